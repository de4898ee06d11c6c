//! Tests of the index against a brute-force oracle, and of the rules that the oracle takes for granted.

mod concurrency;
mod differential;
mod eviction;
mod foreign;
mod instants;
mod names;
mod operation;
mod oracle;
mod parking;
mod radix;
pub(crate) mod random;
mod rules;
mod sparse;
mod walk;
mod world;
