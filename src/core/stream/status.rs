//! The status of a holder, in a form that queries read without a lock: most of all, whether its state is certain.
//!
//! There are two kinds of doubt. A *reason* is a fact about the holder (a gap, an undecodable batch). It stays until a
//! new epoch, a `cleared` event or a resync replaces the state. A doubt about the *stream* (the connection broke, the
//! client dropped messages, a snapshot was loaded) concerns all holders at once: see [`StreamTrust`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use crossbeam_utils::atomic::AtomicCell;

use super::{StreamGeneration, StreamTrust};
use crate::wire::{BatchCursor, DegradedReason, DegradedReasons, Profile};

/// A gap in the count of a holder's batches. Both numbers are 0 if there was no gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceGap {
    /// The batch number that should have come.
    pub expected: u64,
    /// The batch number that came.
    pub received: u64,
}

impl fmt::Display for SequenceGap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { expected, received } = self;
        write!(formatter, "expected batch {expected}, got {received}")
    }
}

/// The facts about a holder that queries need. The holder's lane, which applies its batches, is the only writer;
/// anyone reads.
#[derive(Debug, Default)]
pub struct HolderStatus {
    reasons: AtomicU32,
    confirmed: AtomicCell<StreamGeneration>,
    /// Change counter, shared by all holders that a query can see together. Counts before and after each change of
    /// `reasons` or `confirmed`.
    changes: Arc<AtomicU64>,
    /// The number of the last replacement of the whole state, counted over all holders that a query can see together. 0
    /// if there was none. To be read after the reasons.
    pub(crate) replacement: AtomicCell<u64>,
    /// The last batch applied.
    pub cursor: AtomicCell<BatchCursor>,
    /// Number of blocks that the holder has.
    pub blocks: AtomicCell<u64>,
    /// Number of stored events that wait for their parent.
    pub parked_events: AtomicCell<u32>,
    /// When the last batch was applied, in microseconds since the Unix epoch. 0 if no batch was.
    pub applied_at_us: AtomicCell<u64>,
    /// Time from which the holder has not been exact, in microseconds since the Unix epoch. 0 if the holder is exact,
    /// or nobody records the time.
    pub inexact_since_us: AtomicCell<u64>,
    /// Time at which the holder's epoch began here, in microseconds since the Unix epoch. 0 if that is not known: the
    /// state comes from a snapshot.
    pub epoch_since_us: AtomicCell<u64>,
    /// Age of the last batch when it was applied, in microseconds, by the publisher's clock.
    pub lag_us: AtomicCell<u64>,
    /// The last gap in the count of the holder's batches.
    pub gap: AtomicCell<SequenceGap>,
    /// Number of answers that have listed the holder as not exact.
    pub doubtful_answers: AtomicU64,
    /// Whether the holder's hashes are not the contract's chain, so that queries by tokens or block hashes cannot
    /// find its blocks. Queries by its own hashes find them, and are as exact as ever, so this is no degradation.
    pub has_foreign_chain: AtomicCell<bool>,
    /// Whether the number of tokens in the holder's blocks is known: its publisher has told it, or has sent the tokens
    /// of a block. Otherwise the namespace's block size is assumed, and queries by tokens may not find the blocks.
    pub is_size_known: AtomicCell<bool>,
    /// The address and labels that the holder's publisher has told. `None` if it has told none.
    profile: ArcSwapOption<Profile>,
}

impl HolderStatus {
    /// A status whose changes are counted in `changes`.
    pub(super) fn counted_in(changes: Arc<AtomicU64>) -> Self {
        Self {
            changes,
            ..Self::default()
        }
    }

    /// The holder's address and labels.
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

    /// Makes a change and counts it twice. The count before the change ensures that a reader who sees the change sees a
    /// new count. The count after it makes a reader who looked in between look again.
    fn change<T>(&self, change: impl FnOnce() -> T) -> T {
        self.changes.fetch_add(1, Ordering::AcqRel);
        let changed = change();
        self.changes.fetch_add(1, Ordering::Release);
        changed
    }

    /// The reasons for which the holder's state is not certain, in the current generation of the stream.
    pub fn reasons(&self, trust: &StreamTrust) -> DegradedReasons {
        let is_stalled = trust.is_stalled();
        self.reasons_at(trust.generation(), is_stalled)
    }

    /// The same as [`Self::reasons`], in `generation` of the stream.
    pub(super) fn reasons_at(&self, generation: StreamGeneration, is_stalled: bool) -> DegradedReasons {
        // First whether the stream is trusted, then the reasons: a batch after a gap adds its reason and then
        // confirms. In the other order, a reader in between would see neither the doubt nor the reason.
        let is_confirmed = !is_stalled && self.is_confirmed(generation);
        let reasons = self.own_reasons();
        // A publisher that has lost sight of its engine verifies nothing.
        if is_confirmed && !reasons.contains(DegradedReason::UpstreamLost) {
            return reasons;
        }
        reasons.with(DegradedReason::Unverified)
    }

    /// The reasons for which the state that a search has seen is not certain. `replacements` is the number of states
    /// that had been replaced when the search began. If this holder's state has been replaced since, its present
    /// reasons belong to another state. Then the result also contains [`DegradedReason::Unverified`].
    pub(crate) fn reasons_since(&self, replacements: u64, trust: &StreamTrust) -> DegradedReasons {
        let reasons = self.reasons(trust);
        match self.replacement.load() > replacements {
            true => reasons.with(DegradedReason::Unverified),
            false => reasons,
        }
    }

    /// Whether a resync from the publisher can make the state certain, in the current generation of the stream.
    pub fn is_worth_a_resync(&self, trust: &StreamTrust) -> bool {
        let is_unconfirmed = trust.is_stalled() || !self.is_confirmed(trust.generation());
        is_unconfirmed || self.own_reasons().iter().any(DegradedReason::is_worth_a_resync)
    }

    /// The reasons that only a new epoch, a `cleared` event or a resync removes. A snapshot keeps them.
    pub fn lasting_reasons(&self) -> DegradedReasons {
        self.own_reasons().filtered(DegradedReason::is_lasting)
    }

    /// All reasons that have been added and not been removed.
    pub fn own_reasons(&self) -> DegradedReasons {
        DegradedReasons::from_bits(self.reasons.load(Ordering::Acquire))
    }

    /// Adds a reason. Returns whether the reason is new.
    pub fn degrade(&self, reason: DegradedReason) -> bool {
        // Usually the reason is there already.
        !self.own_reasons().contains(reason)
            && self.change(|| self.reasons.fetch_or(reason as u32, Ordering::AcqRel)) & reason as u32 == 0
    }

    /// Removes a reason that is not a fact about the blocks. Returns whether the reason was there.
    pub fn recover(&self, reason: DegradedReason) -> bool {
        // Usually the reason is not there.
        self.own_reasons().contains(reason)
            && self.change(|| self.reasons.fetch_and(!(reason as u32), Ordering::AcqRel)) & reason as u32 != 0
    }

    /// Replaces all reasons by `reasons`, because the state has been replaced as a whole.
    pub fn reset_reasons(&self, reasons: DegradedReasons) {
        self.change(|| self.reasons.store(reasons.bits(), Ordering::Release));
    }

    /// Removes all reasons that are not in `kept`, and returns the reasons that are left. Another thread, which evicts
    /// blocks, may add a reason at the same time. That reason stays or goes as if it had been added before or after,
    /// but is never overwritten.
    pub fn retain_reasons(&self, kept: DegradedReasons) -> DegradedReasons {
        let before = self.change(|| self.reasons.fetch_and(kept.bits(), Ordering::AcqRel));
        DegradedReasons::from_bits(before & kept.bits())
    }

    /// Whether a batch received in `generation` or later continued the count.
    pub fn is_confirmed(&self, generation: StreamGeneration) -> bool {
        self.confirmed.load() >= generation
    }

    /// Records that a batch received in `generation` continued the count.
    pub fn confirm(&self, generation: StreamGeneration) {
        // Every batch confirms, and most change nothing.
        if self.confirmed.load() != generation {
            self.change(|| self.confirmed.store(generation));
        }
    }

    /// Subtracts evicted blocks from the holder's number of blocks. The lane's next number replaces the result.
    pub(crate) fn note_evicted(&self, blocks: u64) {
        // A number that the lane writes in the meantime is newer, and is used instead.
        let fewer = |before: u64| Some(before.saturating_sub(blocks));
        let _ = self.blocks.fetch_update(fewer);
    }
}
