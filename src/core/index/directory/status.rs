//! Whether a holder's state is certain, in a form that queries read without a lock.
//!
//! Two kinds of doubt exist. A *reason* is a fact about the holder (a gap, an undecodable batch) and stays until a new
//! epoch, a `cleared` event or a resync replaces the state. A doubt about the *stream* (the connection broke, the client dropped
//! messages, a snapshot was loaded) concerns all holders at once: it begins a new generation of the stream, and each
//! holder is trusted again when a batch received in that generation continues its count.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_utils::atomic::AtomicCell;

use crate::wire::{BatchCursor, DegradedReason, DegradedReasons};

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
    pub fn current_stall(&self) -> Option<StreamStall> {
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

/// What the lane of a holder tells the queries about it. One lane writes; anyone reads.
#[derive(Debug, Default)]
pub struct HolderStatus {
    reasons: AtomicU32,
    confirmed_generation: AtomicU64,
    /// The number of the last replacement of the state, of all holders that a query can see together; 0 if there was none. To be read after
    /// the reasons.
    pub(crate) replacement: AtomicCell<u64>,
    /// The last batch applied.
    pub cursor: AtomicCell<BatchCursor>,
    /// Blocks that the holder holds.
    pub blocks: AtomicCell<u64>,
    /// Stored events that wait for their parent.
    pub parked_events: AtomicCell<u32>,
    /// When the last batch was applied, in microseconds since the Unix epoch; 0 if none was.
    pub applied_at_us: AtomicCell<u64>,
    /// How old the last batch was when it was applied, in microseconds, by the publisher's clock.
    pub lag_us: AtomicCell<u64>,
    /// Whether the holder's hashes are not the contract's chain, so that queries by tokens or block hashes cannot
    /// find its blocks. Queries by its own hashes can, and are as exact as ever; so this is no degradation.
    pub has_foreign_chain: AtomicCell<bool>,
}

impl HolderStatus {
    /// Why the holder's state is not certain, in the current generation of the stream.
    pub fn reasons(&self, trust: &StreamTrust) -> DegradedReasons {
        // First whether the stream is trusted, then the reasons: a batch behind a gap adds its reason and then confirms. The
        // other way round, a reader in between would see neither the doubt nor the reason.
        let is_confirmed = !trust.is_stalled() && self.is_confirmed(trust.generation());
        let reasons = self.own_reasons();
        // A publisher that has lost sight of its engine verifies nothing.
        if is_confirmed && !reasons.contains(DegradedReason::UpstreamLost) {
            return reasons;
        }
        reasons.with(DegradedReason::Unverified)
    }

    /// Whether asking the publisher can make the state certain, in the current generation of the stream.
    pub fn is_worth_a_resync(&self, trust: &StreamTrust) -> bool {
        let is_unconfirmed = trust.is_stalled() || !self.is_confirmed(trust.generation());
        is_unconfirmed || self.own_reasons().iter().any(DegradedReason::is_worth_a_resync)
    }

    /// The reasons that only a new epoch, a `cleared` event or a resync takes away; what a snapshot keeps.
    pub fn lasting_reasons(&self) -> DegradedReasons {
        self.own_reasons().filtered(DegradedReason::is_lasting)
    }

    /// All reasons that have been added and not been taken away.
    pub fn own_reasons(&self) -> DegradedReasons {
        DegradedReasons::from_bits(self.reasons.load(Ordering::Acquire))
    }

    /// Adds a reason; says whether it is new.
    pub fn degrade(&self, reason: DegradedReason) -> bool {
        self.reasons.fetch_or(reason as u32, Ordering::AcqRel) & reason as u32 == 0
    }

    /// Takes a reason away that says nothing about the blocks; says whether it was there.
    pub fn recover(&self, reason: DegradedReason) -> bool {
        // Mostly it is not there.
        let is_there = self.own_reasons().contains(reason);
        is_there && self.reasons.fetch_and(!(reason as u32), Ordering::AcqRel) & reason as u32 != 0
    }

    /// Replaces all reasons by `reasons`: the state has been replaced as a whole.
    pub fn reset_reasons(&self, reasons: DegradedReasons) {
        self.reasons.store(reasons.bits(), Ordering::Release);
    }

    /// Takes all reasons away that are not in `kept`, and returns what is left. A reason that is added at the same time, by whoever
    /// evicts blocks, stays or goes as if it had been added before or after, but is never overwritten.
    pub fn retain_reasons(&self, kept: DegradedReasons) -> DegradedReasons {
        let before = self.reasons.fetch_and(kept.bits(), Ordering::AcqRel);
        DegradedReasons::from_bits(before & kept.bits())
    }

    /// Whether a batch received in `generation` or later continued the count.
    pub fn is_confirmed(&self, generation: StreamGeneration) -> bool {
        self.confirmed_generation.load(Ordering::Acquire) >= generation.0
    }

    /// A batch received in `generation` continued the count.
    pub fn confirm(&self, generation: StreamGeneration) {
        self.confirmed_generation.store(generation.0, Ordering::Release);
    }

    /// Takes blocks off that the index has forgotten; until the lane publishes sizes again.
    pub(crate) fn note_evicted(&self, blocks: u64) {
        // What the lane publishes meanwhile is newer.
        let fewer = |before: u64| Some(before.saturating_sub(blocks));
        let _ = self.blocks.fetch_update(fewer);
    }
}
