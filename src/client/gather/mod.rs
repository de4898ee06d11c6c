//! Gathering: asks all shards at the same time, and merges their answers into one.
//!
//! A request on the shards' subjects ([`Subjects::of_shards`](kvatlas_core::wire::Subjects::of_shards)) reaches one daemon of
//! every shard, because each shard is a queue group of its own. Each reply says in the header
//! [`SHARD_HEADER`](kvatlas_core::wire::SHARD_HEADER) which shard it comes from, and how many shards there are. So
//! the first reply tells how many replies to wait for. The gathering ends when all shards have replied. It also ends
//! when the time is up, and the answer then names the missing shards.
//!
//! A *division* is a way to divide the workers into shards, named by its number of shards. While operators change
//! that number, daemons of the old and of the new division answer. The answer comes from the first division that is
//! whole: all its shards have replied, none refuses to answer, and at least one knows the namespace. So queries are
//! answered all the time, if the old daemons stop only when the new daemons are ready.
//!
//! A division that is not whole ends the gathering only when all shards of all other divisions have replied, too. The
//! division that gave the last whole answer counts among those others, even before its first reply. Its word that
//! nobody knows the namespace is an answer.

mod collection;
mod gatherer;
mod inbox;
mod merge;
mod sending;

pub use gatherer::{Gatherer, Merged};
