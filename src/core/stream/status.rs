//! Whether a holder's state is certain, in a form that queries read without a lock.
//!
//! Two kinds of doubt exist. A *reason* is a fact about the holder (a gap, an undecodable batch) and stays until a new
//! epoch, a `cleared` event or a resync replaces the state. A doubt about the *stream* (the connection broke, the client dropped
//! messages, a snapshot was loaded) concerns all holders at once: see [`StreamTrust`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use crossbeam_utils::atomic::AtomicCell;

use super::{StreamGeneration, StreamTrust};
use crate::wire::{BatchCursor, DegradedReason, DegradedReasons, Profile};

/// A gap in the count of a holder's batches. Both numbers are 0 where there was none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceGap {
    /// The number that should have come.
    pub expected: u64,
    /// The number that came.
    pub received: u64,
}

impl fmt::Display for SequenceGap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { expected, received } = self;
        write!(formatter, "expected batch {expected}, got {received}")
    }
}

/// The facts that the lane of a holder tells the queries about it. One lane writes; anyone reads.
#[derive(Debug, Default)]
pub struct HolderStatus {
    reasons: AtomicU32,
    confirmed: AtomicCell<StreamGeneration>,
    /// Counts changes of both, before and after each, of all holders that a query can see together.
    changes: Arc<AtomicU64>,
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
    /// Since when it has not been exact, in microseconds since the Unix epoch; 0 where it is, and where nobody notes that.
    pub inexact_since_us: AtomicCell<u64>,
    /// How old the last batch was when it was applied, in microseconds, by the publisher's clock.
    pub lag_us: AtomicCell<u64>,
    /// The numbers at the last gap in the count of its batches.
    pub gap: AtomicCell<SequenceGap>,
    /// How many answers have listed it as other than exact.
    pub doubtful_answers: AtomicU64,
    /// Whether the holder's hashes are not the contract's chain, so that queries by tokens or block hashes cannot
    /// find its blocks. Queries by its own hashes can, and are as exact as ever; so this is no degradation.
    pub has_foreign_chain: AtomicCell<bool>,
    /// Whether it is known how many tokens the holder's blocks have: its publisher has said so, or has sent the tokens of a block. Otherwise
    /// they count as the namespace's, and queries by tokens may not find them.
    pub is_size_known: AtomicCell<bool>,
    /// The address and labels that its publisher has told; none where it has told none.
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
        // Heartbeats repeat it.
        if self.profile() != profile {
            let told = (!profile.is_empty()).then(|| Arc::new(profile));
            self.profile.store(told);
        }
    }

    /// Makes a change and counts it twice: before it, so that who sees the change sees a new count, and after it, so that who looked in between
    /// looks again.
    fn change<T>(&self, change: impl FnOnce() -> T) -> T {
        self.changes.fetch_add(1, Ordering::AcqRel);
        let changed = change();
        self.changes.fetch_add(1, Ordering::Release);
        changed
    }

    /// Why the holder's state is not certain, in the current generation of the stream.
    pub fn reasons(&self, trust: &StreamTrust) -> DegradedReasons {
        let is_stalled = trust.is_stalled();
        self.reasons_at(trust.generation(), is_stalled)
    }

    /// As [`Self::reasons`], in this generation of the stream.
    pub(super) fn reasons_at(&self, generation: StreamGeneration, is_stalled: bool) -> DegradedReasons {
        // First whether the stream is trusted, then the reasons: a batch behind a gap adds its reason and then confirms. The
        // other way round, a reader in between would see neither the doubt nor the reason.
        let is_confirmed = !is_stalled && self.is_confirmed(generation);
        let reasons = self.own_reasons();
        // A publisher that has lost sight of its engine verifies nothing.
        if is_confirmed && !reasons.contains(DegradedReason::UpstreamLost) {
            return reasons;
        }
        reasons.with(DegradedReason::Unverified)
    }

    /// Why the state is not certain that a search has seen, where `replacements` states had been replaced when it began. If this one has been
    /// replaced since, the reasons of now are those of another state: it counts as unverified.
    pub(crate) fn reasons_since(&self, replacements: u64, trust: &StreamTrust) -> DegradedReasons {
        let reasons = self.reasons(trust);
        match self.replacement.load() > replacements {
            true => reasons.with(DegradedReason::Unverified),
            false => reasons,
        }
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
        // Mostly it is there.
        !self.own_reasons().contains(reason)
            && self.change(|| self.reasons.fetch_or(reason as u32, Ordering::AcqRel)) & reason as u32 == 0
    }

    /// Takes a reason away that says nothing about the blocks; says whether it was there.
    pub fn recover(&self, reason: DegradedReason) -> bool {
        // Mostly it is not there.
        self.own_reasons().contains(reason)
            && self.change(|| self.reasons.fetch_and(!(reason as u32), Ordering::AcqRel)) & reason as u32 != 0
    }

    /// Replaces all reasons by `reasons`: the state has been replaced as a whole.
    pub fn reset_reasons(&self, reasons: DegradedReasons) {
        self.change(|| self.reasons.store(reasons.bits(), Ordering::Release));
    }

    /// Takes all reasons away that are not in `kept`, and returns what is left. A reason that is added at the same time, by whoever
    /// evicts blocks, stays or goes as if it had been added before or after, but is never overwritten.
    pub fn retain_reasons(&self, kept: DegradedReasons) -> DegradedReasons {
        let before = self.change(|| self.reasons.fetch_and(kept.bits(), Ordering::AcqRel));
        DegradedReasons::from_bits(before & kept.bits())
    }

    /// Whether a batch received in `generation` or later continued the count.
    pub fn is_confirmed(&self, generation: StreamGeneration) -> bool {
        self.confirmed.load() >= generation
    }

    /// A batch received in `generation` continued the count.
    pub fn confirm(&self, generation: StreamGeneration) {
        // Each batch does so, and mostly says nothing new.
        if self.confirmed.load() != generation {
            self.change(|| self.confirmed.store(generation));
        }
    }

    /// Subtracts evicted blocks from the size. The lane's next size replaces that.
    pub(crate) fn note_evicted(&self, blocks: u64) {
        // What the lane publishes meanwhile is newer.
        let fewer = |before: u64| Some(before.saturating_sub(blocks));
        let _ = self.blocks.fetch_update(fewer);
    }
}
