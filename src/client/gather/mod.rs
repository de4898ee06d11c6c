//! Gathering: asks all shards at once, and merges their answers into one.
//!
//! A request on the shards' subjects ([`Subjects::of_shards`](kvatlas_core::wire::Subjects::of_shards)) reaches one daemon of every shard,
//! because each shard is a queue group of its own. Each reply says in the header [`SHARD_HEADER`](kvatlas_core::wire::SHARD_HEADER) which
//! shard of how many it comes from, so the first reply tells how many to wait for. The gathering ends when all shards of one division have
//! answered, or when the time is up; the answer then names the shards that are missing.
//!
//! While the number of shards is being changed, daemons of the old and the new division (a number of shards) answer. The first
//! division that is complete is taken. So queries are answered all the time, if the old daemons stop after the new daemons are
//! ready.

mod collection;
mod gatherer;
mod inbox;
mod merge;

pub use gatherer::{Gatherer, Merged};
