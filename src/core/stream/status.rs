//! The status of a holder, which queries read without a lock. It tells above all whether the holder's state is
//! certain.
//!
//! There are two kinds of doubt. A *reason* is a fact about the holder (a gap, an undecodable batch). It stays until
//! a new epoch, a `cleared` event or a resync replaces the state. A doubt about the *stream* (the connection broke,
//! the client dropped messages, a snapshot was loaded) concerns all holders together: see [`StreamTrust`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use crossbeam_utils::atomic::AtomicCell;

use super::{StreamGeneration, StreamTrust};
use crate::wire::{BatchCursor, DegradedReason, DegradedReasons, Profile};

/// Gap in a holder's batch numbers. Both numbers are 0 if there was no gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceGap {
    /// Batch number that was expected.
    pub expected: u64,
    /// Batch number that was received.
    pub received: u64,
}

impl fmt::Display for SequenceGap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { expected, received } = self;
        write!(formatter, "expected batch {expected}, got {received}")
    }
}

/// Status of a holder: facts that queries need. The holder's lane, which applies its batches, is the only writer; any
/// thread may read.
#[derive(Debug, Default)]
pub struct HolderStatus {
    reasons: AtomicU32,
    confirmed: AtomicCell<StreamGeneration>,
    /// Change counter, shared by all holders of one index. It is raised before and after each change of `reasons` or
    /// `confirmed`.
    changes: Arc<AtomicU64>,
    /// Number of the last replacement of the holder's whole state; 0 if there was none. The replacements of all holders
    /// of one index are numbered together. A reader must read the reasons before this number. If a replacement has
    /// already removed some reasons, the reader then sees the replacement's number.
    pub(crate) replacement: AtomicCell<u64>,
    /// Epoch and number of the last applied batch.
    pub cursor: AtomicCell<BatchCursor>,
    /// Number of blocks that the holder has.
    pub blocks: AtomicCell<u64>,
    /// Number of stored events that wait for their parent.
    pub parked_events: AtomicCell<u32>,
    /// Time at which the last batch was applied, in microseconds since the Unix epoch. 0 if no batch was applied.
    pub applied_at_us: AtomicCell<u64>,
    /// Time since which the holder has not been exact, in microseconds since the Unix epoch. 0 if the holder is
    /// exact, or if nobody records the time.
    pub inexact_since_us: AtomicCell<u64>,
    /// Time at which the holder's epoch began in this process, in microseconds since the Unix epoch. 0 if the time is
    /// not known, because the state comes from a snapshot.
    pub epoch_since_us: AtomicCell<u64>,
    /// Age of the last batch at the time when it was applied, in microseconds, by the publisher's clock.
    pub lag_us: AtomicCell<u64>,
    /// Last gap in the holder's batch numbers.
    pub gap: AtomicCell<SequenceGap>,
    /// Number of answers in which the holder was listed as not exact.
    pub doubtful_answers: AtomicU64,
    /// Whether the holder's hashes differ from the contract's chain. If so, queries by tokens or block hashes cannot
    /// find its blocks. This is no degradation: queries by the holder's own hashes find the blocks, and are exact.
    pub has_foreign_chain: AtomicCell<bool>,
    /// Whether the number of tokens in the holder's blocks is known. It is known if the publisher has told it or has
    /// sent the tokens of a block. Otherwise the namespace's block size is assumed, and queries by tokens may not
    /// find the blocks.
    pub is_size_known: AtomicCell<bool>,
    /// Address and labels that the holder's publisher has given. `None` if it has given neither.
    profile: ArcSwapOption<Profile>,
}

impl HolderStatus {
    /// Makes a status whose changes are counted in `changes`.
    pub(super) fn counted_in(changes: Arc<AtomicU64>) -> Self {
        Self {
            changes,
            ..Self::default()
        }
    }

    /// Returns the holder's address and labels.
    pub fn profile(&self) -> Profile {
        let told = self.profile.load();
        told.as_deref().cloned().unwrap_or_default()
    }

    /// Replaces the holder's address and labels.
    pub fn set_profile(&self, profile: Profile) {
        // Heartbeats repeat the same profile.
        if self.profile() != profile {
            let told = (!profile.is_empty()).then(|| Arc::new(profile));
            self.profile.store(told);
        }
    }

    /// Makes a change, and raises the change counter before and after it. Because of the first raise, a reader that
    /// sees the change also sees a new count. Because of the second, a reader that read during the change sees that
    /// it must read again.
    fn change<T>(&self, change: impl FnOnce() -> T) -> T {
        self.changes.fetch_add(1, Ordering::AcqRel);
        let changed = change();
        self.changes.fetch_add(1, Ordering::Release);
        changed
    }

    /// Returns the reasons why the holder's state is not certain, in the current generation of the stream.
    pub fn reasons(&self, trust: &StreamTrust) -> DegradedReasons {
        let is_stalled = trust.is_stalled();
        self.reasons_at(trust.generation(), is_stalled)
    }

    /// Returns the same as [`Self::reasons`], but for the given `generation` of the stream.
    pub(super) fn reasons_at(&self, generation: StreamGeneration, is_stalled: bool) -> DegradedReasons {
        // The confirmation is read before the reasons: a batch after a gap adds its reason and then confirms. In the
        // other order, a reader in between would see neither the doubt nor the reason.
        let is_confirmed = !is_stalled && self.is_confirmed(generation);
        let reasons = self.own_reasons();
        // If the publisher has lost contact with its engine, its batches prove nothing.
        if is_confirmed && !reasons.contains(DegradedReason::UpstreamLost) {
            return reasons;
        }
        reasons.with(DegradedReason::Unverified)
    }

    /// Returns the reasons why the state that a search has seen is not certain. `replacements` is the number of states
    /// that had been replaced when the search began. If this holder's state has been replaced since then, its present
    /// reasons belong to a state that the search has not seen. So the result then also contains
    /// [`DegradedReason::Unverified`].
    pub(crate) fn reasons_since(&self, replacements: u64, trust: &StreamTrust) -> DegradedReasons {
        let reasons = self.reasons(trust);
        match self.replacement.load() > replacements {
            true => reasons.with(DegradedReason::Unverified),
            false => reasons,
        }
    }

    /// Whether a resync can make the state certain, in the current generation of the stream. In a resync, the publisher
    /// sends missed batches or its full state.
    pub fn is_worth_a_resync(&self, trust: &StreamTrust) -> bool {
        let is_unconfirmed = trust.is_stalled() || !self.is_confirmed(trust.generation());
        is_unconfirmed || self.own_reasons().iter().any(DegradedReason::is_worth_a_resync)
    }

    /// Returns the reasons that only a new epoch, a `cleared` event or a resync removes. Snapshots contain these
    /// reasons.
    pub fn lasting_reasons(&self) -> DegradedReasons {
        self.own_reasons().filtered(DegradedReason::is_lasting)
    }

    /// Returns all reasons that have been added and not been removed.
    pub fn own_reasons(&self) -> DegradedReasons {
        DegradedReasons::from_bits(self.reasons.load(Ordering::Acquire))
    }

    /// Adds a reason. Returns whether the reason is new.
    pub fn degrade(&self, reason: DegradedReason) -> bool {
        // Usually the reason is there already.
        !self.own_reasons().contains(reason)
            && self.change(|| self.reasons.fetch_or(reason as u32, Ordering::AcqRel)) & reason as u32 == 0
    }

    /// Removes a reason that does not concern the blocks. Returns whether the status had the reason.
    pub fn recover(&self, reason: DegradedReason) -> bool {
        // Usually the reason is not there.
        self.own_reasons().contains(reason)
            && self.change(|| self.reasons.fetch_and(!(reason as u32), Ordering::AcqRel)) & reason as u32 != 0
    }

    /// Replaces all reasons by `reasons`, because the holder's whole state has been replaced.
    pub fn reset_reasons(&self, reasons: DegradedReasons) {
        self.change(|| self.reasons.store(reasons.bits(), Ordering::Release));
    }

    /// Keeps only the reasons in `kept`, and returns the remaining reasons. A thread that evicts blocks may add a
    /// reason at the same time. That reason is kept or removed as if it had been added before or after this call, never
    /// lost.
    pub fn retain_reasons(&self, kept: DegradedReasons) -> DegradedReasons {
        let before = self.change(|| self.reasons.fetch_and(kept.bits(), Ordering::AcqRel));
        DegradedReasons::from_bits(before & kept.bits())
    }

    /// Whether the holder's state was last [confirmed](Self::confirm) in `generation` or later.
    pub fn is_confirmed(&self, generation: StreamGeneration) -> bool {
        self.confirmed.load() >= generation
    }

    /// Records that the holder's state is confirmed in `generation`: each earlier batch has been applied or is known to
    /// be missing. For example, a batch received in `generation` had the holder's next batch number. A confirmation in
    /// a later generation stays.
    pub fn confirm(&self, generation: StreamGeneration) {
        // Every batch confirms, and most change nothing.
        if !self.is_confirmed(generation) {
            self.change(|| self.confirmed.store(generation));
        }
    }

    /// Takes the confirmation of the holder's state back.
    pub fn unconfirm(&self) {
        let never = StreamGeneration::default();
        if self.confirmed.load() != never {
            self.change(|| self.confirmed.store(never));
        }
    }

    /// Subtracts evicted blocks from the holder's number of blocks. The holder's lane, the thread that applies its
    /// events, later replaces the result by the number that it counts.
    pub(crate) fn note_evicted(&self, blocks: u64) {
        // If the lane writes the number at the same time, the lane's number is newer, and blocks are subtracted from
        // it.
        let fewer = |before: u64| Some(before.saturating_sub(blocks));
        let _ = self.blocks.fetch_update(fewer);
    }
}
