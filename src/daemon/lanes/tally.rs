//! Tally of the batches that a lane has applied and has not counted in its metrics yet. Batches are counted together,
//! so that counting costs less than applying a short batch.

use std::cell::RefCell;
use std::sync::Arc;

use kvatlas_telemetry::{AppliedBatch, AppliedBatches, EventMetrics};

/// Applied batches of the lane's present turn that are not counted in the metrics yet. All are of one namespace.
#[derive(Default)]
pub(super) struct BatchTally(RefCell<UncountedBatches>);

#[derive(Default)]
struct UncountedBatches {
    metrics: Option<Arc<EventMetrics>>,
    batches: AppliedBatches,
}

impl BatchTally {
    /// Adds an applied batch of the namespace to which `metrics` belongs. If batches of another namespace are still
    /// uncounted, counts those first.
    pub(super) fn add(&self, metrics: &Arc<EventMetrics>, batch: &AppliedBatch) {
        let mut counted = self.0.borrow_mut();
        let is_same = |other: &Arc<EventMetrics>| Arc::ptr_eq(other, metrics);
        if !counted.metrics.as_ref().is_some_and(is_same) {
            counted.count();
            counted.metrics = Some(Arc::clone(metrics));
        }
        counted.batches.add(batch);
    }

    /// Counts the added batches in the metrics, and empties the tally.
    pub(super) fn count(&self) {
        self.0.borrow_mut().count();
    }
}

impl UncountedBatches {
    fn count(&mut self) {
        if let Some(metrics) = self.metrics.take() {
            metrics.batches_applied(&mut self.batches);
        }
    }
}
