//! Scenarios, with a module for each.

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

/// Thoroughness of the measurements.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Number of repetitions of every measurement.
    pub repetitions: usize,
    /// Whether this is a smoke run.
    pub is_quick: bool,
}

/// Prints the progress to standard error. Standard output has only the tables.
pub fn progress(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Returns all numbers below `count` in a circle that begins at `first`. So every repetition can begin with another
/// contender.
pub fn rotated(count: usize, first: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |number| (first + number) % count)
}
