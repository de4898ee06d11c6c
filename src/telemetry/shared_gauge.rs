//! Gauge whose value is the sum of what several handles have set.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Gauge, IntoF64, Label};

use super::declare::{Handle, MetricKind};

/// Handle of a gauge that shows the sum over all handles of its series. A dropped handle no longer counts.
#[derive(Debug)]
pub struct SharedGauge {
    gauge: Gauge,
    /// Bits of the value that this handle has set last.
    set: AtomicU64,
}

impl SharedGauge {
    /// Sets the value of this handle.
    pub fn set<T: IntoF64>(&self, value: T) {
        let value = value.into_f64();
        let before = f64::from_bits(self.set.swap(value.to_bits(), Ordering::Relaxed));
        self.gauge.increment(value - before);
    }
}

impl Drop for SharedGauge {
    fn drop(&mut self) {
        self.set(0.0);
    }
}

impl Handle for SharedGauge {
    const KIND: MetricKind = MetricKind::Gauge;

    fn register(name: &'static str, labels: &[Label]) -> Self {
        Self {
            gauge: Gauge::register(name, labels),
            set: AtomicU64::new(0),
        }
    }

    #[cfg(test)]
    fn touch(&self) {
        self.set(1.0);
    }
}
