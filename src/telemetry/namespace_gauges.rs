//! The sizes of one namespace, as gauges.

use std::time::Duration;

use metrics::Gauge;

use super::labels::{HolderState, LabelValue, PerLabel};
use super::names;

/// The sizes of one namespace at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NamespaceSizes {
    /// Workers known.
    pub workers: u64,
    /// Holders whose every batch was applied.
    pub holders_exact: u64,
    /// Holders of which something is missing.
    pub holders_degraded: u64,
    /// Holders that are silent for longer than they should be.
    pub holders_stale: u64,
    /// Pairs of a holder and a block that it has.
    pub held_blocks: u64,
    /// Different blocks that at least one holder has.
    pub distinct_blocks: u64,
    /// Different blocks that the index has forgotten so far because there were too many.
    pub evicted_blocks: u64,
    /// Memory that the different blocks take in the index.
    pub index_bytes: u64,
    /// Events that wait for their parent.
    pub parked_events: u64,
    /// Blocks whose hashes disagree with the hash contract.
    pub chain_conflicts: u64,
}

/// The gauges of one namespace. Make it once and hold it; one thread should set it, now and then.
pub struct NamespaceGauges {
    workers: Gauge,
    holders: PerLabel<HolderState, Gauge>,
    stale_holders: Gauge,
    held_blocks: Gauge,
    distinct_blocks: Gauge,
    evicted_blocks: Gauge,
    index_bytes: Gauge,
    parked_events: Gauge,
    chain_conflicts: Gauge,
    event_lag: Gauge,
}

impl NamespaceGauges {
    /// The gauges of a namespace that was admitted: the caller bounds how many there are.
    pub fn for_namespace(namespace: &str) -> Self {
        Self {
            workers: names::WORKERS.with([namespace]),
            holders: PerLabel::new(|state: HolderState| names::HOLDERS.with([namespace, state.as_str()])),
            stale_holders: names::STALE_HOLDERS.with([namespace]),
            held_blocks: names::HELD_BLOCKS.with([namespace]),
            distinct_blocks: names::DISTINCT_BLOCKS.with([namespace]),
            evicted_blocks: names::EVICTED_BLOCKS.with([namespace]),
            index_bytes: names::INDEX_BYTES.with([namespace]),
            parked_events: names::PARKED_EVENTS.with([namespace]),
            chain_conflicts: names::CHAIN_CONFLICTS.with([namespace]),
            event_lag: names::EVENT_LAG.with([namespace]),
        }
    }

    /// Sets all sizes.
    pub fn set_sizes(&self, sizes: &NamespaceSizes) {
        self.workers.set(sizes.workers as f64);
        self.holders
            .get(HolderState::Exact)
            .set(sizes.holders_exact as f64);
        self.holders
            .get(HolderState::Degraded)
            .set(sizes.holders_degraded as f64);
        self.stale_holders.set(sizes.holders_stale as f64);
        self.held_blocks.set(sizes.held_blocks as f64);
        self.distinct_blocks.set(sizes.distinct_blocks as f64);
        self.evicted_blocks.set(sizes.evicted_blocks as f64);
        self.index_bytes.set(sizes.index_bytes as f64);
        self.parked_events.set(sizes.parked_events as f64);
        self.chain_conflicts.set(sizes.chain_conflicts as f64);
    }

    /// Sets the largest age, of all holders, that a holder's last batch had when it was applied.
    pub fn set_event_lag(&self, lag: Duration) {
        self.event_lag.set(lag);
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_size_reaches_its_own_series() {
        let text = rendered(|| {
            let gauges = NamespaceGauges::for_namespace("a");
            gauges.set_sizes(&NamespaceSizes {
                workers: 1,
                holders_exact: 2,
                holders_degraded: 3,
                holders_stale: 1,
                held_blocks: 4,
                distinct_blocks: 5,
                evicted_blocks: 8,
                index_bytes: 9,
                parked_events: 6,
                chain_conflicts: 7,
            });
            gauges.set_event_lag(Duration::from_millis(250));
        });
        for line in [
            "kvatlas_workers{namespace=\"a\"} 1",
            "kvatlas_holders{namespace=\"a\",state=\"exact\"} 2",
            "kvatlas_holders{namespace=\"a\",state=\"degraded\"} 3",
            "kvatlas_stale_holders{namespace=\"a\"} 1",
            "kvatlas_held_blocks{namespace=\"a\"} 4",
            "kvatlas_distinct_blocks{namespace=\"a\"} 5",
            "kvatlas_evicted_blocks{namespace=\"a\"} 8",
            "kvatlas_index_bytes{namespace=\"a\"} 9",
            "kvatlas_parked_events{namespace=\"a\"} 6",
            "kvatlas_chain_conflicts{namespace=\"a\"} 7",
            "kvatlas_event_lag_seconds{namespace=\"a\"} 0.25",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }
}
