//! Whether what is received from the event stream can be trusted, for all holders at once.
//!
//! A doubt (the connection broke, the client dropped messages, a snapshot was loaded) begins a new generation of the stream. Each holder is
//! trusted again when a batch received in that generation continues its count.
//!
//! | file | what |
//! |---|---|
//! | `status.rs` | whether one holder's state is certain, and how large it is |
//! | `doubtful.rs` | how many holders' states are not |
//! | `refused.rs` | holders whose batches are dropped |

mod doubtful;
mod refused;
mod status;

use std::sync::atomic::{AtomicU64, Ordering};

pub use doubtful::DoubtfulHolders;
pub use status::{HolderStatus, SequenceGap};

pub(crate) use doubtful::DoubtCounter;
pub(crate) use refused::RefusedHolders;

/// A generation of the event stream; a later one begins with every doubt about the stream as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct StreamGeneration(u64);

/// The current generation of the event stream, shared by those who doubt it and those who ask; and whether the events that are
/// applied lie far behind those that were published.
///
/// Begins at generation 1, so that a holder that no batch has confirmed (generation 0) is not trusted.
#[derive(Debug, Default)]
pub struct StreamTrust {
    doubts: AtomicU64,
    /// The last generation whose subscription the server is known to have; 0 if there was none.
    followed: AtomicU64,
    /// How many doubts had come when everybody who publishes was last known to have been heard of.
    listed: AtomicU64,
    stalls: AtomicU64,
    ended_stalls: AtomicU64,
}

/// A time in which events wait to be applied, although none is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamStall(u64);

impl StreamTrust {
    /// The current generation.
    pub fn generation(&self) -> StreamGeneration {
        StreamGeneration(self.doubts.load(Ordering::Acquire) + 1)
    }

    /// Says that what is published from now on is received in `generation`.
    pub fn follow(&self, generation: StreamGeneration) {
        self.followed.fetch_max(generation.0, Ordering::AcqRel);
    }

    /// The current generation, if its messages are being received; none after a doubt, until the stream is followed again, and none
    /// in a stall.
    ///
    /// What a publisher says about itself after this proves something for this generation: what it publishes later is received.
    pub fn followed(&self) -> Option<StreamGeneration> {
        if self.is_stalled() {
            return None;
        }
        let followed = self.followed.load(Ordering::Acquire);
        let generation = self.generation();
        (followed >= generation.0).then_some(generation)
    }

    /// Doubts the stream: no holder is trusted until a batch received in the new generation continues its count.
    pub fn doubt(&self) -> StreamGeneration {
        StreamGeneration(self.doubts.fetch_add(1, Ordering::AcqRel) + 2)
    }

    /// Says that everybody who publishes has been heard of in `generation`: it lasts for longer than any publisher is silent.
    pub fn note_listed(&self, generation: StreamGeneration) {
        self.listed
            .fetch_max(generation.0.saturating_sub(1), Ordering::AcqRel);
    }

    /// Whether everybody who publishes is known. After a doubt, and in a stall, somebody may have begun of whom nothing has come yet. To be
    /// asked before a search.
    pub fn is_listed(&self) -> bool {
        !self.is_stalled() && self.listed.load(Ordering::Acquire) >= self.doubts.load(Ordering::Acquire)
    }

    /// Begins a time in which no holder is trusted because events wait that will be applied later. What a holder's batches have
    /// confirmed counts again when it [ends](Self::end_stall).
    pub fn stall(&self) -> StreamStall {
        StreamStall(self.stalls.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Ends `stall` and those before it: all events that had been published when it ended, or a moment before, have been applied.
    /// A later one goes on.
    pub fn end_stall(&self, stall: StreamStall) {
        self.ended_stalls.fetch_max(stall.0, Ordering::AcqRel);
    }

    /// The last stall, if it has not ended.
    pub(crate) fn current_stall(&self) -> Option<StreamStall> {
        // The end first: one that comes in between is then taken for one that lasts, never the other way round.
        let ended = self.ended_stalls.load(Ordering::Acquire);
        let last = self.stalls.load(Ordering::Acquire);
        (last > ended).then_some(StreamStall(last))
    }

    /// Whether events wait to be applied. A search that began before the end of a stall has not seen them: to be asked before it.
    pub fn is_stalled(&self) -> bool {
        self.current_stall().is_some()
    }
}
