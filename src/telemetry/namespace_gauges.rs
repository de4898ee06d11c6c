//! Metrics about the size and state of one namespace's index. Namespaces that share a label are added up, but for their times.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge};

use kvatlas_core::wire::DegradedReason;

use super::declare::metric_group;
use super::labels::{HolderState, PerLabel};
use super::shared_gauge::SharedGauge;

metric_group! {
    /// Metrics about the index of a namespace.
    NamespaceGauges::for_namespace(namespace: &str) keeping {
        /// Number of evictions that the counter already includes. A namespace that is made anew has a new handle, in which the
        /// number begins at 0.
        evicted_so_far: AtomicU64 = AtomicU64::new(0)
    } {
        /// Holders known, by how exactly the index knows their blocks.
        pub holders: PerLabel<HolderState, SharedGauge> = "kvatlas_holders", Count;
        /// Holders that are degraded now, by reason; a holder with two reasons counts twice.
        pub degraded_holders: PerLabel<DegradedReason, SharedGauge> = "kvatlas_degraded_holders", Count;
        /// Workers known.
        pub workers: SharedGauge = "kvatlas_workers", Count;
        /// Pairs of a holder and a block that it has.
        pub held_blocks: SharedGauge = "kvatlas_held_blocks", Count;
        /// Different blocks in the index: the blocks that at least one holder has, and the missing blocks (holes) before them.
        pub distinct_blocks: SharedGauge = "kvatlas_distinct_blocks", Count;
        /// Different blocks that the index has forgotten because there were too many.
        evicted_blocks: Counter = "kvatlas_blocks_evicted_total", Count;
        /// Memory of the index for the different blocks, and for the record of their holders.
        pub index_bytes: SharedGauge = "kvatlas_index_bytes", Bytes;
        /// Events that wait for their parent block to be stored.
        pub parked_events: SharedGauge = "kvatlas_parked_events", Count;
        /// Blocks that have the same hash as an earlier block; if above 0, two different prefixes have the same
        /// sequence hash.
        pub chain_conflicts: SharedGauge = "kvatlas_chain_conflicts", Count;
        /// Age of a holder's last batch, by the publisher's clock, at the time when the daemon applied it; the largest
        /// of all holders.
        pub event_lag: Gauge = "kvatlas_event_lag_seconds", Seconds;
        /// Age of the oldest event that the daemon knows of and has not applied; 0 if all events are applied.
        pub behind: Gauge = "kvatlas_behind_seconds", Seconds;
        /// Holders whose epoch lies ahead of the daemon's clock, because the clock of the publisher or of the daemon is wrong.
        pub epochs_ahead: SharedGauge = "kvatlas_epochs_ahead", Count;
        /// Holders that have been silent for longer than `stale_after_ms`.
        pub stale_holders: SharedGauge = "kvatlas_stale_holders", Count;
    }
}

impl NamespaceGauges {
    /// Counts the blocks evicted since the last call. `evicted_blocks` is the number of blocks evicted since the namespace was
    /// made.
    pub fn set_evicted(&self, evicted_blocks: u64) {
        let before = self.evicted_so_far.swap(evicted_blocks, Ordering::Relaxed);
        self.evicted_blocks
            .increment(evicted_blocks.saturating_sub(before));
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn evictions_are_counted_on_when_a_namespace_comes_anew() {
        let text = rendered(|| {
            let gauges = NamespaceGauges::for_namespace("a");
            [3, 5, 5]
                .into_iter()
                .for_each(|evicted| gauges.set_evicted(evicted));
            NamespaceGauges::for_namespace("a").set_evicted(2);
        });
        let line = "kvatlas_blocks_evicted_total{namespace=\"a\"} 7\n";
        assert!(text.contains(line), "{text}");
    }
    #[test]
    fn namespaces_with_one_label_are_added_up_until_they_end() {
        let text = |holders: &[f64], ended: usize| {
            rendered(|| {
                let mut all: Vec<_> = holders
                    .iter()
                    .map(|holders| {
                        let gauges = NamespaceGauges::for_namespace("(others)");
                        gauges.holders.get(HolderState::Degraded).set(9.0);
                        gauges.holders.get(HolderState::Degraded).set(*holders);
                        gauges
                    })
                    .collect();
                all.truncate(holders.len() - ended);
                // The value is read while these namespaces are there.
                std::mem::forget(all);
            })
        };
        let line =
            |degraded| format!("kvatlas_holders{{namespace=\"(others)\",state=\"degraded\"}} {degraded}\n");
        assert!(text(&[2.0, 0.0, 1.0], 0).contains(&line(3)));
        assert!(text(&[2.0, 0.0, 1.0], 1).contains(&line(2)));
        assert!(text(&[2.0], 1).contains(&line(0)));
    }
}
