//! Checks for tests that a page, or a part of a file, equals the text that is made from declarations in the code.

#![allow(clippy::unwrap_used, reason = "tests fail by it")]

use std::path::Path;

/// Path of the root of the repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// Environment variable that makes the tests write the pages instead of comparing them.
const WRITE_VARIABLE: &str = "KVATLAS_TEST_WRITE_PAGES";

/// Requires that the page `deploy/NAME` has this text.
#[track_caller]
pub fn require_page(name: &str, text: &str) {
    let path = Path::new(ROOT).join("deploy").join(name);
    if std::env::var_os(WRITE_VARIABLE).is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == text,
        "deploy/{name} is not what the declarations say; write it with {WRITE_VARIABLE}=1 cargo test --workspace --lib page"
    );
}

/// Requires that the file at `path` has this text between `begin` and `end`.
#[track_caller]
pub fn require_part(path: &str, begin: &str, end: &str, text: &str) {
    let path = Path::new(ROOT).join(path);
    let file = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = file.split_once(begin).unwrap();
    let (part, after) = rest.split_once(end).unwrap();
    if std::env::var_os(WRITE_VARIABLE).is_some() {
        std::fs::write(&path, [before, begin, text, end, after].concat()).unwrap();
        return;
    }
    assert!(
        part == text,
        "{} is not what the declarations say; write it with {WRITE_VARIABLE}=1 cargo test --workspace --lib page",
        path.display()
    );
}
