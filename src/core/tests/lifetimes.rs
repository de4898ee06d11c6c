//! Tests that safe code cannot keep certain references: the compiler must refuse programs that keep them. For each
//! refused program there is an accepted program that is the same, but does not keep the reference. So the compiler
//! refuses the first program only because of the reference.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::process::Command;

/// Code that replaces the modules and libraries that `words.rs` uses.
const AROUND: &str = r#"
#![allow(dead_code, unused_imports, unsafe_code)]
extern crate self as parking_lot;

pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }
    pub fn lock(&self) -> std::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

mod sync {
    pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
}

mod epoch {
    pub(crate) struct Guard;
    impl Guard {
        pub(crate) unsafe fn defer(&self, free: impl FnOnce()) {
            free();
        }
    }
}

use epoch::Guard;
use std::sync::atomic::AtomicU64;
use words::Words;
"#;

/// Returns whether the compiler accepts a program with `words.rs` and this function. Also returns the compiler's
/// messages.
fn compiles(function: &str) -> (bool, String) {
    let directory = std::env::temp_dir().join(format!("kvatlas-lifetimes-{}", fastrand::u64(..)));
    std::fs::create_dir_all(&directory).unwrap();
    let (source, words) = (
        directory.join("program.rs"),
        concat!(env!("CARGO_MANIFEST_DIR"), "/words.rs"),
    );
    let program = format!("{AROUND}\n#[path = {words:?}]\nmod words;\n{function}\n");
    std::fs::write(&source, program).unwrap();
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler)
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "lib",
            "--emit",
            "metadata",
            "-o",
        ])
        .args([directory.join("program.rmeta"), source])
        .output()
        .unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn an_array_cannot_outlive_its_owner() {
    let taken = "fn kept<'a>(words: &'a Words, guard: &'a Guard) -> &'a [AtomicU64] { words.get(guard) }";
    let (is_taken, messages) = compiles(taken);
    assert!(is_taken, "{messages}");
    let freed = "fn kept(guard: &Guard) -> &[AtomicU64] { let words = Words::default(); words.get(guard) }";
    let (is_taken, messages) = compiles(freed);
    assert!(!is_taken && messages.contains("E0515"), "{messages}");
}

#[test]
fn an_array_cannot_outlive_its_guard() {
    let freed = "fn kept(words: &Words) -> &[AtomicU64] { let guard = Guard; words.get(&guard) }";
    let (is_taken, messages) = compiles(freed);
    assert!(!is_taken && messages.contains("E0515"), "{messages}");
}
