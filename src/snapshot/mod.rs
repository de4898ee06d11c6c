//! The snapshot file format.
//!
//! A snapshot holds, for every holder, how far its batches had been applied and events that rebuild what it held then.
//! All numbers are little-endian.
//!
//! ```text
//! offset  bytes
//!      0      8  magic "KVATLSNP"
//!      8      4  format version, 1
//!     12      8  when the snapshot was begun, microseconds since the Unix epoch
//!     20      8  XXH3-64 of bytes 0 to 19
//!     28         frames, one after the other:
//!
//!            4  length of the payload, at most 64 MiB
//!            1  kind: 1 holder, 2 batch, 3 end
//!            n  payload
//!            8  XXH3-64 of length, kind and payload, with the frame's number (from 0) as seed
//! ```
//!
//! - A *holder* frame is a MessagePack map ([`HolderFrame`]): whose blocks follow, the cursor (epoch and batch number)
//!   that they belong to, and why its state was not certain, if it was not.
//! - A *batch* frame is an [`EventBatch`](crate::wire::EventBatch) payload of the wire contract, for the holder before it.
//!   Frames are applied in order: parents come before their children.
//! - The *end* frame says how many holders, batches and blocks came before it. Nothing follows it; a file without it is
//!   truncated.
//!
//! The checksum's seed is the frame's number, so a lost, repeated or swapped frame is found, not only a changed one.
//! A later version of the format gets another version number; readers of this version refuse it.

mod reader;
mod writer;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::index::{Hashing, NamespaceSettings};
use crate::wire::{NamespaceName, Rank, WorkerName};

pub use reader::{Frame, HolderSummary, SnapshotError, SnapshotReader, SnapshotSummary, summarise};
pub use writer::SnapshotWriter;

/// The first bytes of every snapshot.
const MAGIC: [u8; 8] = *b"KVATLSNP";
/// The version that this build writes and reads. Must change with every incompatible change of the format.
pub const FORMAT_VERSION: u32 = 1;
/// Bytes before the first frame.
const HEADER_BYTES: usize = 28;
/// Longest payload of a frame, in bytes. A reader takes no more memory than this for a frame, whatever the file says.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// Kinds of frames. The numbers must be kept stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum FrameKind {
    Holder = 1,
    Batch = 2,
    End = 3,
}

/// Whose blocks follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderFrame {
    /// The namespace.
    pub namespace: NamespaceName,
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank.
    pub rank: Rank,
    /// Epoch of the last batch that the blocks reflect.
    pub epoch: u64,
    /// Number of that batch.
    pub seq: u64,
    /// Why the state was not certain: the bits of [`DegradedReasons`](crate::tracking::DegradedReasons).
    pub degraded_bits: u32,
    /// How many blocks the holder held.
    pub blocks: u64,
    /// Whose chain the blocks are keyed by.
    #[serde(default)]
    pub hashing: Hashing,
    /// Tokens in a block; 0 where the snapshot does not say.
    #[serde(default)]
    pub block_size: u32,
    /// Whether the holder's hashes were not the contract's chain.
    #[serde(default)]
    pub foreign_chain: bool,
}

impl HolderFrame {
    /// Whether the blocks are found by the queries of a namespace with these settings: they are keyed by the same chain.
    pub fn fits(&self, settings: &NamespaceSettings) -> bool {
        // The engine's chain is what it is. Our own depends on where the tokens are cut.
        let is_same_chain = match self.hashing {
            Hashing::Engine => true,
            Hashing::Recompute => self.block_size == settings.block_size.as_u32(),
        };
        self.hashing == settings.hashing && is_same_chain
    }
}

/// What a whole snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SnapshotTotals {
    /// Holder frames.
    pub holders: u64,
    /// Batch frames.
    pub batches: u64,
    /// Blocks, summed over the holder frames.
    pub blocks: u64,
}

/// The checksum of a frame.
fn frame_checksum(number: u64, length: [u8; 4], kind: u8, payload: &[u8]) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::with_seed(number);
    hasher.update(&length);
    hasher.update(&[kind]);
    hasher.update(payload);
    hasher.digest()
}
