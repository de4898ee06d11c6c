//! The snapshot file format. A snapshot has the blocks of a whole index, in compact form.
//!
//! [`dump_events`](crate::index::HolderWriter::dump_events) is the public way to get one holder's blocks, as events.
//! A snapshot has the same blocks for all holders. It also has each holder's cursor: the holder's epoch and the
//! number of its last applied batch. `kvatlas snapshot export` prints a file as JSON lines.
//!
//! # Layout
//!
//! All numbers are little-endian.
//!
//! ```text
//! offset  bytes
//!      0      8  magic "KVATLSNP"
//!      8      4  format version, 3
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
//! | frame | payload | place |
//! |---|---|---|
//! | stream | MessagePack map [`StreamCursor`]: how far a JetStream stream is surely part of the snapshot | before all holders |
//! | holder | MessagePack map [`HolderFrame`]: name, cursor, reasons for doubt | before its blocks |
//! | batch | an [`EventBatch`](crate::wire::EventBatch) of the wire contract; parents before their children | after its holder |
//! | forest | blocks of many holders, each distinct block once; see [`forest`] | after the frames of its holders |
//! | end | MessagePack map [`SnapshotTotals`]: counts of what came before | last; a file without it is truncated |
//!
//! - A regular holder (no hole, one tier, the contract's names) has its blocks in a forest. Its frame gives its place
//!   there ([`InForest`]), and no batch follows it.
//! - Any other holder has batches: the events of `dump_events`.
//! - A holder can come twice. The later frame replaces the earlier one. A writer uses this to correct a holder that
//!   has changed in a way that a forest cannot express.
//!
//! # Damage
//!
//! The frame's number seeds the checksum, so the checksum also finds lost, repeated and swapped frames. It covers the
//! bytes before compression, so it finds every wrong byte in the decompressed content.
//!
//! A compressor looks back over at most 16 MiB. A reader lets the decompressor use a window of that size at most.
//!
//! Readers refuse every version except their own ([`SnapshotError::Version`]).

pub mod forest;
mod reader;
mod summary;
mod writer;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::hash::BlockSize;
use crate::index::{Hashing, NamespaceSettings};
use crate::wire::{Address, Labels, NamespaceName, Rank, Tier, WorkerName};

pub use reader::{Frame, SnapshotError, SnapshotReader};
pub use summary::{HolderSummary, SnapshotContent, SnapshotSummary, summarise, verify};
pub use writer::SnapshotWriter;

/// The first bytes of every snapshot.
const MAGIC: [u8; 8] = *b"KVATLSNP";
/// The version that this build writes and reads. Must change with every incompatible change of the format.
pub const FORMAT_VERSION: u32 = 3;
/// Bytes before the first frame.
const HEADER_BYTES: usize = 28;
/// Maximum payload of a frame, in bytes. A reader takes no more memory than this for a frame, whatever the file says.
pub const FRAME_BYTES_MAX: usize = 64 << 20;
/// Maximum number of bytes of a decompressed snapshot, enough for some billions of blocks. It limits how long a small
/// file can keep a reader busy.
pub const CONTENT_BYTES_MAX: u64 = 64 << 30;
/// Base-2 logarithm of the size, in bytes, of the window in which the compressor finds repetitions.
const WINDOW_LOG: u32 = 24;
/// Maximum number of frames with cursors of JetStream streams in a snapshot.
const STREAMS_MAX: u64 = 64;

/// Kinds of frames, the parts of a snapshot. The numbers must be kept stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum FrameKind {
    Holder = 1,
    Batch = 2,
    End = 3,
    Stream = 4,
    Forest = 5,
}

/// Cursor of a JetStream stream. Every message up to `sequence` has been applied to the holders of the snapshot. Some
/// later messages may have been applied, too.
///
/// Replaying the messages after `sequence`, in order, completes the state. Batch numbers tell which batches are
/// already part of the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamCursor {
    /// The stream's name.
    pub stream: String,
    /// Time at which the stream was created, in microseconds since the Unix epoch. Distinguishes the stream from a
    /// later stream of the same name, whose message numbers start again.
    pub created_us: u64,
    /// Sequence number of the last message that is surely part of the snapshot. 0 if no message is.
    pub sequence: u64,
    /// Digest of the message with number `sequence` ([`message_digest`]). It shows whether the stream was replaced by
    /// an older copy of itself, in which other messages now have the same numbers. Absent if the message was not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<u64>,
    /// Digest of those settings of the daemon that decide which publishers' messages it accepts. If the settings have
    /// changed, the daemon may now accept messages that it dropped before the snapshot. Absent in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intake: Option<u64>,
    /// Whether every known publisher has a holder in the snapshot. False if the daemon was dropping some publisher's
    /// messages, and in older files.
    #[serde(default)]
    pub has_all: bool,
    /// Digest of the identity of the NATS server through which the stream was last read up to its end. A server has a
    /// new identity after each restart. Absent if the stream has not been read up to its end, and in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<u64>,
}

/// Returns the digest by which a message of a stream is recognised: XXH3-64 of its subject, a zero byte and its
/// payload.
pub fn message_digest(subject: &str, payload: &[u8]) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    hasher.update(subject.as_bytes());
    hasher.update(&[0]);
    hasher.update(payload);
    hasher.digest()
}

/// Frame of a holder. The holder's blocks come in later frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderFrame {
    /// Name of the namespace.
    pub namespace: NamespaceName,
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
    /// Epoch of the last batch that was applied to the blocks.
    pub epoch: u64,
    /// Number of the last batch that was applied to the blocks.
    pub seq: u64,
    /// Reasons why the state was not certain, as the bits of [`DegradedReasons`](crate::wire::DegradedReasons).
    pub degraded_bits: u32,
    /// Number of blocks that the holder had.
    pub blocks: u64,
    /// Hash chain by which the blocks are identified: that of the engine, or the one that the daemon computes.
    #[serde(default)]
    pub hashing: Hashing,
    /// Number of tokens in a block. 0 if the snapshot does not give it.
    #[serde(default)]
    pub block_size: u32,
    /// Whether the holder's publisher has told `block_size`. Older files say so only where it differs from the daemon's
    /// configuration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_size_told: bool,
    /// Whether the holder's hashes were not the contract's chain.
    #[serde(default)]
    pub foreign_chain: bool,
    /// Latest time at which a publisher made one of the batches that were applied to the blocks, in microseconds since
    /// the Unix epoch. 0 if no batch has a time. Absent if the latest time is not known.
    #[serde(default)]
    pub made_us: Option<u64>,
    /// Time at which the holder's publisher was last seen to be alive, in microseconds since the Unix epoch, by the
    /// clock of the server that has the stream. 0 if it was not seen. Absent if the server's time was not known, and in
    /// older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_us: Option<u64>,
    /// Address for requests to the holder, as its publisher gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Address>,
    /// The holder's labels.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// The holder's place in the snapshot's forests ([`forest`]). Absent if its blocks are not in a forest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forest: Option<InForest>,
}

/// Place of a holder in the snapshot's forests ([`forest`]). Only a holder whose blocks are in a forest has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForest {
    /// Number of the holder, from 0. Only those holders of the file are counted whose blocks are in a forest.
    pub number: u32,
    /// Tier of all blocks of the holder.
    pub tier: Tier,
}

impl HolderFrame {
    /// Returns the block size that the holder's publisher has told. `None` if it has told none.
    pub fn told_block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.block_size).ok().filter(|_| self.is_size_told)
    }

    /// Whether queries in a namespace with these settings can find the blocks: the namespace and the blocks must use
    /// the same hash chain and block size. A size that was only guessed does not fit to one that publishers have told.
    pub fn fits(&self, settings: &NamespaceSettings) -> bool {
        // The engine's own names do not depend on the size of a block.
        let is_unknown = self.block_size == 0 && self.hashing == Hashing::Engine;
        self.hashing == settings.hashing
            && settings.takes(self.told_block_size())
            && (is_unknown || self.block_size == settings.block_size.as_u32())
    }
}

/// Numbers of frames and blocks in a whole snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SnapshotTotals {
    /// Number of holder frames.
    pub holders: u64,
    /// Number of batch frames.
    pub batches: u64,
    /// Number of blocks, summed over the holder frames.
    pub blocks: u64,
    /// Number of runs of blocks in forests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forest_runs: u64,
    /// Number of distinct blocks in forests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forest_blocks: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Returns the checksum of a frame.
fn frame_checksum(number: u64, length: [u8; 4], kind: u8, payload: &[u8]) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::with_seed(number);
    hasher.update(&length);
    hasher.update(&[kind]);
    hasher.update(payload);
    hasher.digest()
}
