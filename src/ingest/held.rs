//! Batches that a holder keeps back until it is known what came before them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::tracking::StreamGeneration;
use crate::wire::EventBatch;

/// A batch as it was received.
#[derive(Debug)]
pub(crate) struct ReceivedBatch {
    pub(crate) batch: EventBatch,
    pub(crate) generation: StreamGeneration,
    /// Length of its payload.
    pub(crate) bytes: usize,
}

/// Bounds on what may be kept back.
#[derive(Debug, Clone)]
pub(crate) struct HoldingLimits {
    /// Whether anything is kept back at all: somebody has to ask the publishers.
    pub(crate) is_enabled: bool,
    /// Most payload bytes of one holder.
    pub(crate) bytes_per_holder_max: usize,
    /// Most payload bytes of all holders of the lane.
    pub(crate) bytes_max: usize,
    /// How long batches wait for an answer, in microseconds.
    pub(crate) wait_us_max: u64,
    held_bytes: Arc<AtomicUsize>,
}

impl HoldingLimits {
    pub(crate) fn new(
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

/// What a batch costs beside its payload.
const BATCH_OVERHEAD_BYTES: usize = 256;

/// What one holder keeps back, in the order in which it came.
#[derive(Debug)]
pub(crate) struct Held {
    batches: VecDeque<ReceivedBatch>,
    bytes: usize,
    lane_bytes: Arc<AtomicUsize>,
    /// When it began, in microseconds on the lane's clock.
    pub(crate) since_us: u64,
    /// The resync whose answer it waits for; none while none has begun.
    pub(crate) resync: Option<ResyncNumber>,
    marked: usize,
}

/// Tells the resyncs of one holder apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResyncNumber(pub(crate) u64);

/// There is no room for another batch; it is given back.
#[derive(Debug)]
pub(crate) struct NoRoom(pub(crate) ReceivedBatch);

impl Held {
    pub(crate) fn new(limits: &HoldingLimits, since_us: u64) -> Self {
        Self {
            batches: VecDeque::new(),
            bytes: 0,
            lane_bytes: Arc::clone(&limits.held_bytes),
            since_us,
            resync: None,
            marked: 0,
        }
    }

    /// Marks what is held now: it came before the publisher is asked.
    pub(crate) fn mark(&mut self) {
        self.marked = self.batches.len();
    }

    /// How many batches, the first ones, were held when [`Self::mark`] was called last.
    pub(crate) fn marked(&self) -> usize {
        self.marked
    }

    pub(crate) fn push(&mut self, received: ReceivedBatch, limits: &HoldingLimits) -> Result<(), NoRoom> {
        let bytes = received.bytes + BATCH_OVERHEAD_BYTES;
        let on_lane = self.lane_bytes.load(Ordering::Relaxed);
        if self.bytes + bytes > limits.bytes_per_holder_max || on_lane + bytes > limits.bytes_max {
            return Err(NoRoom(received));
        }
        self.lane_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        self.batches.push_back(received);
        Ok(())
    }

    /// Everything, in order; nothing is held any more.
    pub(crate) fn into_batches(mut self) -> VecDeque<ReceivedBatch> {
        std::mem::take(&mut self.batches)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.lane_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
