//! Held batches: batches that wait at a holder until the missing batches before them have come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvatlas_core::wire::{DegradedReason, DegradedReasons};

use super::sequence::ReceivedBatch;

/// Bounds on held batches, which wait at a holder until the missing batches before them have come.
#[derive(Debug, Clone)]
pub(super) struct HoldingLimits {
    /// Whether batches are held until the missing batches before them have come. False if resyncs are off, because then
    /// nobody asks for missing batches.
    pub(super) is_enabled: bool,
    /// Maximum size of the batches that one holder holds, in bytes. A holder may hold a larger batch if it is the
    /// only one. Each batch counts 256 bytes more than its payload.
    pub(super) bytes_per_holder_max: usize,
    /// Maximum size of the batches that all holders of the lane hold together, in bytes. Each batch counts 256 bytes
    /// more than its payload.
    pub(super) bytes_max: usize,
    /// Maximum time for which held batches wait for the publisher's answer, in microseconds.
    pub(super) wait_us_max: u64,
    held_bytes: Arc<AtomicUsize>,
}

impl HoldingLimits {
    pub(super) fn new(
        is_enabled: bool,
        bytes_per_holder_max: usize,
        bytes_max: usize,
        wait_us_max: u64,
    ) -> Self {
        Self {
            is_enabled,
            bytes_per_holder_max,
            bytes_max,
            wait_us_max,
            held_bytes: Arc::default(),
        }
    }
}

/// Bytes that a held batch counts in addition to its payload.
const BATCH_OVERHEAD_BYTES: usize = 256;

/// The held batches of one holder, in the order in which they came.
#[derive(Debug)]
pub(super) struct HeldBatches {
    batches: VecDeque<ReceivedBatch>,
    bytes: usize,
    lane_bytes: Arc<AtomicUsize>,
    /// Time at which the holder began to hold batches, in microseconds on the lane's clock.
    pub(super) since_us: u64,
    /// Reasons for doubt that have come since the resync began.
    doubts: DegradedReasons,
    dropped: DroppedMessages,
}

/// Messages that were dropped while batches were held.
#[derive(Debug, Default)]
struct DroppedMessages {
    /// Reasons for doubt that the dropped messages give.
    doubts: DegradedReasons,
    /// Number of held batches that came before the last dropped message.
    behind: usize,
}

/// Number of a resync. It distinguishes the resyncs of one holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResyncNumber(pub(super) u64);

/// Error that a holder or lane has no room for another held batch. It returns the batch.
#[derive(Debug)]
pub(super) struct NoRoom(pub(super) ReceivedBatch);

impl HeldBatches {
    pub(super) fn new(limits: &HoldingLimits, since_us: u64) -> Self {
        Self {
            batches: VecDeque::new(),
            bytes: 0,
            lane_bytes: Arc::clone(&limits.held_bytes),
            since_us,
            doubts: DegradedReasons::default(),
            dropped: DroppedMessages::default(),
        }
    }

    /// Notes that a resync begins. The publisher's answer will cover everything that has come so far, so only later
    /// reasons for doubt are collected.
    pub(super) fn begin(&mut self, now_us: u64) {
        self.since_us = now_us;
        self.doubts = DegradedReasons::default();
    }

    /// Adds a reason for doubt that has come since the resync began.
    pub(super) fn note_doubt(&mut self, reason: DegradedReason) {
        self.doubts = self.doubts.with(reason);
        if is_of_dropped(reason) {
            self.note_dropped(DegradedReasons::of(reason));
        }
    }

    /// Notes that messages were dropped after all batches that are held now. `doubts` are the reasons for doubt that
    /// the drop gives. Does nothing if `doubts` is empty.
    pub(super) fn note_dropped(&mut self, doubts: DegradedReasons) {
        if !doubts.is_empty() {
            self.dropped.doubts = self.dropped.doubts.union(doubts);
            self.dropped.behind = self.batches.len();
        }
    }

    /// Returns the highest epoch of a held batch; 0 if no batch is held.
    pub(super) fn newest_epoch(&self) -> u64 {
        let epochs = self.batches.iter().map(|received| received.batch.epoch);
        epochs.max().unwrap_or_default()
    }

    /// Whether no batch is held.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns the reasons for doubt that have come since the resync began. The answer to the resync can be older than
    /// these reasons.
    pub(super) fn doubts(&self) -> DegradedReasons {
        self.doubts
    }

    /// Holds one more batch until the missing batches before it have come. Fails if the holder or the lane has no room
    /// for the batch.
    pub(super) fn push(&mut self, received: ReceivedBatch, limits: &HoldingLimits) -> Result<(), NoRoom> {
        let bytes = received.bytes + BATCH_OVERHEAD_BYTES;
        let on_lane = self.lane_bytes.load(Ordering::Relaxed);
        // The holder's bound does not apply to a single batch: a message of any size may come behind a gap.
        let has_room = self.batches.is_empty() || self.bytes + bytes <= limits.bytes_per_holder_max;
        if !has_room || on_lane + bytes > limits.bytes_max {
            return Err(NoRoom(received));
        }
        self.lane_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        self.batches.push_back(received);
        Ok(())
    }

    /// Returns the held batches in order. A batch after which a message was dropped comes with the reasons for doubt
    /// that dropped messages give. The batches no longer count toward the lane's bound on held batches.
    pub(super) fn into_batches(mut self) -> impl Iterator<Item = (ReceivedBatch, DegradedReasons)> {
        let DroppedMessages { doubts, behind } = std::mem::take(&mut self.dropped);
        let batches = std::mem::take(&mut self.batches).into_iter().enumerate();
        batches.map(move |(index, received)| {
            let later = if index < behind {
                doubts
            } else {
                DegradedReasons::default()
            };
            (received, later)
        })
    }
}

impl Drop for HeldBatches {
    fn drop(&mut self) {
        self.lane_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Whether `reason` means that a message was dropped of which neither the number nor the content is known.
pub(super) fn is_of_dropped(reason: DegradedReason) -> bool {
    matches!(reason, DegradedReason::Undecodable | DegradedReason::Gap)
}
