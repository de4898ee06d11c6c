//! The commit from which the running program was built. The library that keeps it is not built anew for each commit, so
//! the program sets the commit at its start.

use std::sync::OnceLock;

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Sets the commit that the program was built from. Later calls change nothing.
pub fn set_commit(commit: &'static str) {
    let _ = COMMIT.set(commit);
}

/// Returns the commit that the program was built from, or `unknown commit` before [`set_commit`].
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown commit")
}
