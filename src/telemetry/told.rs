//! Gauges of whether engines are exact at daemons. They are 0 while daemons cannot be told anything.

use std::collections::HashMap;
use std::sync::Arc;

use metrics::Gauge;
use parking_lot::Mutex;

/// The gauges of all engines, and whether daemons can be told. Clones share them.
#[derive(Clone, Default)]
pub(super) struct ExactGauges(Arc<Mutex<ExactGaugesState>>);

#[derive(Default)]
struct ExactGaugesState {
    /// Whether the NATS server is away, so that daemons cannot be told.
    is_away: bool,
    next: u64,
    /// Gauge of each entry, and whether its engine is exact apart from that; `None` before that was noted. An engine may
    /// have several entries, of which one is noted.
    gauges: HashMap<u64, (Gauge, Option<bool>)>,
}

/// One engine's entry among the gauges. The entry ends when this value is dropped.
pub(super) struct ExactGaugeEntry {
    gauges: ExactGauges,
    number: u64,
}

impl ExactGauges {
    /// Adds the gauge of one engine.
    pub(super) fn add(&self, gauge: Gauge) -> ExactGaugeEntry {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        state.gauges.insert(number, (gauge, None));
        ExactGaugeEntry {
            gauges: self.clone(),
            number,
        }
    }

    /// Notes whether the NATS server is away.
    pub(super) fn set_away(&self, is_away: bool) {
        let mut state = self.0.lock();
        if std::mem::replace(&mut state.is_away, is_away) != is_away {
            for (gauge, is_exact) in state.gauges.values() {
                if let Some(is_exact) = is_exact {
                    gauge.set(f64::from(*is_exact && !is_away));
                }
            }
        }
    }
}

impl ExactGaugeEntry {
    /// Notes whether the engine is exact.
    pub(super) fn set(&self, exact: bool) {
        let mut state = self.gauges.0.lock();
        let is_away = state.is_away;
        if let Some((gauge, is_exact)) = state.gauges.get_mut(&self.number) {
            *is_exact = Some(exact);
            gauge.set(f64::from(exact && !is_away));
        }
    }
}

impl Drop for ExactGaugeEntry {
    fn drop(&mut self) {
        self.gauges.0.lock().gauges.remove(&self.number);
    }
}
