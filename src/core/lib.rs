//! Core library, which every other part of kvatlas uses: no I/O, no async, no clock.
//!
//! - [`hash`]: the hash contract, shared with Dynamo.
//! - [`wire`]: the MessagePack contract. `deploy/wire-contract.md` describes it for other languages.
//! - [`index`]: the exact index, for use without a daemon.
//! - [`snapshot`]: the file format of snapshots.
//! - [`stream`]: checks a stream of events for gaps, and says whether the state built from it can be trusted.

mod ahead;
mod epoch;
pub mod hash;
pub mod index;
mod mix;
mod name_map;
mod names;
pub mod snapshot;
mod split_map;
pub mod stream;
mod sync;
pub mod wire;
mod worded;
mod words;
