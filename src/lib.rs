//! The parts of the program `kvatlas`: the daemon, and the simulated fleet that its demo and its tests drive.
//!
//! Programs use the crates below this one: `kvatlas-core` (the index, hashes, the wire contract), `kvatlas-client` (asking and
//! publishing over NATS) and `kvatlas-vocab` (vocabularies). The README shows how to begin.

#[cfg(feature = "bridge")]
pub mod bridge;
pub mod daemon;
pub mod simulation;

// What unit tests share with the integration tests names this crate as they do.
#[cfg(test)]
extern crate self as kvatlas;

/// Compiles the README's Rust examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
