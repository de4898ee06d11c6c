//! The scenarios, one module each.

pub mod chat;
pub mod floors;
pub mod holes;
pub mod lanes;
pub mod latency;
pub mod memory;
pub mod modes;
pub mod pauses;
pub mod replay;

use std::io::Write as _;

/// How thoroughly to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Repetitions of everything.
    pub repetitions: usize,
    /// Whether this is only a smoke run.
    pub is_quick: bool,
}

/// Says on standard error what is going on; standard output has the tables only.
pub fn progress(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The numbers below `count`, beginning at `first`: a different contender starts in every repetition.
pub fn rotated(count: usize, first: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |number| (first + number) % count)
}
