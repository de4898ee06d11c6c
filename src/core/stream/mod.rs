//! Trust in the event stream, for all holders at once: whether the received events can be complete.
//!
//! A doubt (the connection broke, the client dropped messages, a snapshot was loaded) begins a new generation of the
//! stream. A holder is trusted again when a batch received in the new generation continues the holder's count.
//!
//! | file | content |
//! |---|---|
//! | `status.rs` | whether one holder's state is certain, and how large it is |
//! | `doubtful.rs` | the number of holders whose states are not certain |
//! | `refused.rs` | holders whose batches are dropped |

mod doubtful;
mod refused;
mod status;

use std::sync::atomic::{AtomicU64, Ordering};

pub use doubtful::DoubtfulHolders;
pub use refused::{RefusedAt, RefusedHolders, RefusedPublisher};
pub use status::{HolderStatus, SequenceGap};

pub(crate) use doubtful::DoubtCounter;

/// A generation of the event stream. Every doubt about the whole stream begins a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct StreamGeneration(u64);

/// The current generation of the event stream, and whether it is stalled, that is, whether the applied events are far
/// behind the published ones. Shared by the code that doubts the stream and the code that asks.
///
/// Begins at generation 1. So a holder that no batch has confirmed, which has generation 0, is not trusted.
#[derive(Debug, Default)]
pub struct StreamTrust {
    doubts: AtomicU64,
    /// The last generation whose subscription the server is known to have. 0 if there was none.
    followed: AtomicU64,
    /// Number of doubts at the last time when every publisher was known. A publisher is known after its first message.
    listed: AtomicU64,
    stalls: AtomicU64,
    ended_stalls: AtomicU64,
}

/// A stall: a time in which events wait to be applied, although no event is lost. The number counts stalls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamStall(u64);

impl StreamTrust {
    /// The current generation.
    pub fn generation(&self) -> StreamGeneration {
        StreamGeneration(self.doubts.load(Ordering::Acquire) + 1)
    }

    /// Records that everything published from now on is received in `generation`.
    pub fn follow(&self, generation: StreamGeneration) {
        self.followed.fetch_max(generation.0, Ordering::AcqRel);
    }

    /// The current generation, if its messages are being received. `None` after a doubt, until the stream is followed
    /// again. `None` also during a stall.
    ///
    /// A publisher's statement about itself after this call proves something for this generation, as everything it
    /// publishes later is received.
    pub fn followed(&self) -> Option<StreamGeneration> {
        if self.is_stalled() {
            return None;
        }
        let followed = self.followed.load(Ordering::Acquire);
        let generation = self.generation();
        (followed >= generation.0).then_some(generation)
    }

    /// Doubts the stream, and returns the new generation. No holder is trusted until a batch received in the new
    /// generation continues its count.
    pub fn doubt(&self) -> StreamGeneration {
        StreamGeneration(self.doubts.fetch_add(1, Ordering::AcqRel) + 2)
    }

    /// Records that every publisher has been heard of in `generation`, because the generation has lasted longer than
    /// any publisher is silent.
    pub fn note_listed(&self, generation: StreamGeneration) {
        self.listed
            .fetch_max(generation.0.saturating_sub(1), Ordering::AcqRel);
    }

    /// Whether every publisher is known. After a doubt, and during a stall, there may be a new publisher from which
    /// nothing has arrived yet. Ask before a search.
    pub fn is_listed(&self) -> bool {
        !self.is_stalled() && self.listed.load(Ordering::Acquire) >= self.doubts.load(Ordering::Acquire)
    }

    /// Begins a stall: no holder is trusted, because events wait that will be applied later. The confirmations that
    /// holders have from their batches count again when the stall [ends](Self::end_stall).
    pub fn stall(&self) -> StreamStall {
        StreamStall(self.stalls.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Ends `stall` and all earlier stalls. All events that had been published when the stall ended, or a moment
    /// before, have been applied. A later stall goes on.
    pub fn end_stall(&self, stall: StreamStall) {
        self.ended_stalls.fetch_max(stall.0, Ordering::AcqRel);
    }

    /// The last stall, if it has not ended.
    pub(crate) fn current_stall(&self) -> Option<StreamStall> {
        // The end is read first. A stall that ends between the two reads is then taken for one that lasts, never the
        // other way round.
        let ended = self.ended_stalls.load(Ordering::Acquire);
        let last = self.stalls.load(Ordering::Acquire);
        (last > ended).then_some(StreamStall(last))
    }

    /// Whether events wait to be applied. A search that began before the end of a stall has not seen these events, so
    /// ask before the search.
    pub fn is_stalled(&self) -> bool {
        self.current_stall().is_some()
    }
}
