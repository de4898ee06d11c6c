//! Tests of the index against a brute-force oracle, and of the rules that the oracle assumes.

mod attacks;
mod colliding;
mod concurrency;
mod crowded;
mod defects;
mod differential;
mod event_forms;
mod eviction;
mod foreign;
pub(super) mod hook;
mod interleaved;
mod known;
mod leaving;
mod memory;
mod names;
mod namespaces;
mod operation;
mod oracle;
mod parking;
mod passing;
mod plain;
mod rules;
mod slot_sets;
mod sparse;
mod trust;
mod twins;
mod walk;
mod whole_hashes;
mod world;

/// Everything that the tests use of the index.
mod api {
    pub(super) use crate::index::*;
}
