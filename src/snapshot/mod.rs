//! The snapshot file format.
//!
//! A snapshot holds, for every holder, how far its batches had been applied and events that rebuild what it held then. Where the
//! events come from a JetStream stream, it also says up to where the stream is surely part of it. All numbers are little-endian.
//!
//! ```text
//! offset  bytes
//!      0      8  magic "KVATLSNP"
//!      8      4  format version, 3 or 2
//!     12      8  when the snapshot was begun, microseconds since the Unix epoch
//!     20      8  XXH3-64 of bytes 0 to 19
//!     28         one Zstandard frame, to the end of the file. In it, one after the other:
//!
//!            4  length of the payload, at most 64 MiB
//!            1  kind: 1 holder, 2 batch, 3 end, 4 stream, 5 forest
//!            n  payload
//!            8  XXH3-64 of length, kind and payload, with the frame's number (from 0) as seed
//! ```
//!
//! - A *stream* frame is a MessagePack map ([`StreamCursor`]). All of them come before the first holder.
//! - A *holder* frame is a MessagePack map ([`HolderFrame`]): whose blocks follow, the cursor (epoch and batch number)
//!   that they belong to, and why its state was not certain, if it was not.
//! - A *batch* frame is an [`EventBatch`](crate::wire::EventBatch) payload of the wire contract, for the holder before it.
//!   Frames are applied in order: parents come before their children.
//! - A *forest* frame (version 3) has blocks of many holders, each distinct block once; see [`forest`]. The holders whose blocks are there
//!   have a holder frame that says so ([`InForest`]) and no batches; all of them come before the first forest frame.
//! - The *end* frame says how many holders, batches and blocks came before it. Nothing follows it; a file without it is
//!   truncated.
//!
//! The checksum's seed is the frame's number, so a lost, repeated or swapped frame is found, not only a changed one. It covers what
//! was compressed, so damage shows whatever the decompressor makes of it.
//!
//! A holder can come twice: what comes later replaces what came before. So a writer can take back what it has written of a holder that
//! has meanwhile become something that a forest cannot say.
//!
//! Hashes don't compress, but in version 2 holders of one prefix repeat the same ones: the compressor looks back over 16 MiB, which is
//! what makes the difference. A reader grants the decompressor a window of 16 MiB too, and no more.
//!
//! Version 2 is what [`SnapshotFormat::Events`] writes: no forest, and every holder in batches. Version 1 had no compression and no stream
//! frames. All are read. Readers refuse versions that they don't know.

pub mod forest;
mod reader;
mod summary;
mod writer;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::index::{Hashing, NamespaceSettings};
use crate::wire::{NamespaceName, Rank, Tier, WorkerName};

pub use reader::{Frame, SnapshotError, SnapshotReader};
pub use summary::{HolderSummary, SnapshotContent, SnapshotSummary, summarise, verify};
pub use writer::SnapshotWriter;

/// The first bytes of every snapshot.
const MAGIC: [u8; 8] = *b"KVATLSNP";
/// The newest version that this build writes and reads. Must change with every incompatible change of the format.
pub const FORMAT_VERSION: u32 = 3;
/// The version without forests.
const EVENTS_VERSION: u32 = 2;
/// The version before compression, which this build still reads.
const UNCOMPRESSED_VERSION: u32 = 1;
/// Bytes before the first frame.
const HEADER_BYTES: usize = 28;
/// Longest payload of a frame, in bytes. A reader takes no more memory than this for a frame, whatever the file says.
pub const FRAME_BYTES_MAX: usize = 64 << 20;
/// Most bytes that a snapshot may have when it is decompressed: some billions of blocks. Bounds how long a small file can keep a
/// reader busy.
pub const CONTENT_BYTES_MAX: u64 = 64 << 30;
/// How far the compressor looks back, as a power of two.
const WINDOW_LOG: u32 = 24;
/// Most stream frames.
const STREAMS_MAX: u64 = 64;

/// Kinds of frames. The numbers must be kept stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum FrameKind {
    Holder = 1,
    Batch = 2,
    End = 3,
    Stream = 4,
    Forest = 5,
}

/// How a snapshot says what holders have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SnapshotFormat {
    /// The blocks of regular holders as one forest, each distinct block once; events for the others. Version 3.
    #[default]
    Forest,
    /// Events that rebuild each holder. Version 2, which builds before this format read, too.
    Events,
}

impl SnapshotFormat {
    fn version(self) -> u32 {
        match self {
            Self::Forest => FORMAT_VERSION,
            Self::Events => EVENTS_VERSION,
        }
    }
}

/// Up to where a JetStream stream is part of a snapshot: all messages up to `sequence` have been applied to the holders, later
/// ones maybe. So applying those after it, in order, makes the state complete; what is applied twice is known by its numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamCursor {
    /// The stream's name.
    pub stream: String,
    /// When the stream was created, in microseconds since the Unix epoch: a stream of the same name that was created at another time
    /// counts its messages anew.
    pub created_us: u64,
    /// Sequence number of the last message that is surely part of the snapshot; 0 where none is.
    pub sequence: u64,
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
    /// The largest time, by the publisher's clock, at which one of the batches that the blocks reflect was made, in microseconds
    /// since the Unix epoch; 0 where none of them says. Absent in older snapshots: it is not known then.
    #[serde(default)]
    pub made_us: Option<u64>,
    /// Where the blocks are to come in a forest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forest: Option<InForest>,
}

/// A holder whose blocks are in a forest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForest {
    /// Which of the file's holders with blocks in a forest it is, from 0.
    pub number: u32,
    /// The tier that holds all its blocks.
    pub tier: Tier,
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
    /// Runs of blocks in forests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forest_runs: u64,
    /// Distinct blocks in forests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forest_blocks: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The checksum of a frame.
fn frame_checksum(number: u64, length: [u8; 4], kind: u8, payload: &[u8]) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::with_seed(number);
    hasher.update(&length);
    hasher.update(&[kind]);
    hasher.update(payload);
    hasher.digest()
}
