//! The commit that the running program was built from. Libraries are not built anew for each commit, so the program says it at its start.

use std::sync::OnceLock;

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Says which commit the program was built from. Later calls change nothing.
pub fn set_commit(commit: &'static str) {
    let _ = COMMIT.set(commit);
}

/// The commit that the program was built from, where it has said so.
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown commit")
}
