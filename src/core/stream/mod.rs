//! Trust in the event stream, which concerns all holders together: whether the received events can be complete.
//!
//! A doubt (the connection broke, the client dropped messages, a snapshot was loaded) begins a new generation of the
//! stream. A holder is trusted again when a batch received in the new generation has the holder's next batch number.
//!
//! | file | content |
//! |---|---|
//! | `status.rs` | whether one holder's state is certain, and how large it is |
//! | `doubtful.rs` | the number of holders whose states are not certain |
//! | `refused.rs` | holders whose batches are dropped |

mod doubtful;
mod refused;
mod status;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use doubtful::DoubtfulHolders;
pub use refused::{RefusedAt, RefusedHolders, RefusedName, RefusedPublisher, SILENT_US};
pub use status::{HolderStatus, SequenceGap};

pub(crate) use doubtful::DoubtCounter;

/// Number of a generation of the event stream. A new generation begins with every doubt about the whole stream, for
/// example when the connection breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct StreamGeneration(u64);

/// Current generation of the event stream, and whether the stream is stalled. A stream is stalled while published
/// events have long waited to be applied. The code that receives events changes this value. The code that decides
/// whether a holder can be trusted reads it.
///
/// The first generation is 1. So a holder that no batch has confirmed, which has generation 0, is not trusted.
#[derive(Debug, Default)]
pub struct StreamTrust {
    doubts: AtomicU64,
    /// Last generation for which [`Self::follow`] was called; 0 if there is none.
    followed: AtomicU64,
    /// Number of the last generation in which every publisher was known, minus 1. It is 0 at first, so generation 1
    /// counts as such a generation from the start.
    listed: AtomicU64,
    /// Whether some publishers are known whose events do not reach the stream.
    has_unheard: AtomicBool,
    stalls: AtomicU64,
    ended_stalls: AtomicU64,
}

/// Stall: a period in which events wait to be applied, although no event is lost. The value is the number of the
/// stall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamStall(u64);

impl StreamTrust {
    /// Returns the current generation.
    pub fn generation(&self) -> StreamGeneration {
        StreamGeneration(self.doubts.load(Ordering::Acquire) + 1)
    }

    /// Records that the daemon, in `generation`, receives everything that is published from now on.
    pub fn follow(&self, generation: StreamGeneration) {
        self.followed.fetch_max(generation.0, Ordering::AcqRel);
    }

    /// Returns the current generation if everything published now is received in it. `None` from a doubt until
    /// [`Self::follow`] is called for the new generation, and during a stall.
    ///
    /// Suppose that a publisher tells its state after this call. The state is then valid for this generation, because
    /// every later batch of the publisher is received.
    pub fn followed(&self) -> Option<StreamGeneration> {
        if self.is_stalled() {
            return None;
        }
        let followed = self.followed.load(Ordering::Acquire);
        let generation = self.generation();
        (followed >= generation.0).then_some(generation)
    }

    /// Doubts the stream, and returns the new generation. From now on a holder is trusted only after its state has been
    /// confirmed in the new generation.
    pub fn doubt(&self) -> StreamGeneration {
        StreamGeneration(self.doubts.fetch_add(1, Ordering::AcqRel) + 2)
    }

    /// Records that every publisher was known in `generation`. The caller has found this out in one of two ways: it has
    /// received messages for longer than any publisher stays silent, or it has read a stream that has a message of
    /// every publisher.
    pub fn note_listed(&self, generation: StreamGeneration) {
        self.listed
            .fetch_max(generation.0.saturating_sub(1), Ordering::AcqRel);
    }

    /// Records whether some publishers are known whose events do not reach the stream.
    pub fn set_unheard(&self, has_unheard: bool) {
        self.has_unheard.store(has_unheard, Ordering::Release);
    }

    /// Whether some publishers are known whose events do not reach the stream.
    pub fn has_unheard(&self) -> bool {
        self.has_unheard.load(Ordering::Acquire)
    }

    /// Whether every publisher is known, and is heard. If the result is `false`, there may be a new publisher from which
    /// no message has arrived yet. During a stall the result is `false`, and while
    /// [some publishers are unheard](Self::set_unheard). Must be called before a search, because a publisher may appear
    /// during the search.
    pub fn is_listed(&self) -> bool {
        !self.has_unheard()
            && !self.is_stalled()
            && self.listed.load(Ordering::Acquire) >= self.doubts.load(Ordering::Acquire)
    }

    /// Begins a stall: no holder is trusted, because events wait that will be applied later. When the stall
    /// [ends](Self::end_stall), the holders that batches had confirmed before are trusted again.
    pub fn stall(&self) -> StreamStall {
        StreamStall(self.stalls.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Ends `stall` and all earlier stalls, because the events that waited have been applied. A stall that began after
    /// `stall` continues.
    pub fn end_stall(&self, stall: StreamStall) {
        self.ended_stalls.fetch_max(stall.0, Ordering::AcqRel);
    }

    /// Returns the last stall (a period in which events wait to be applied), if it has not ended.
    pub(crate) fn current_stall(&self) -> Option<StreamStall> {
        // The end is read first. If a stall ends between the two reads, it is taken for a stall that lasts. A stall
        // that lasts is never taken for one that has ended.
        let ended = self.ended_stalls.load(Ordering::Acquire);
        let last = self.stalls.load(Ordering::Acquire);
        (last > ended).then_some(StreamStall(last))
    }

    /// Whether the stream is stalled: events wait to be applied. Must be called before a search, because a search that
    /// began during a stall has not seen these events.
    pub fn is_stalled(&self) -> bool {
        self.current_stall().is_some()
    }
}
