//! What the admin listener shows of a running daemon.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;

use crate::admin::{AdminSource, Readiness, ReadinessReport, WorkersQuery};
use crate::index::{IndexSizes, Namespace, Namespaces, give_back_memory};
use crate::ingest::LanePool;
use crate::telemetry::{MetricsHandle, NamespaceGauges, NamespaceSizes, ProcessMetrics};
use crate::tracking::{DegradedReason, DegradedReasons, HolderStatus, StreamTrust};
use crate::wire::{NamespaceName, Rank, WorkerName};

use super::snapshots::Snapshots;

/// Reads the daemon's state for metrics, probes and people.
pub(super) struct DaemonView {
    pub(super) namespaces: Arc<Namespaces>,
    pub(super) trust: Arc<StreamTrust>,
    pub(super) readiness: Arc<Readiness>,
    pub(super) pool: Arc<LanePool>,
    pub(super) metrics: MetricsHandle,
    pub(super) process: ProcessMetrics,
    pub(super) gauges: Mutex<HashMap<NamespaceName, NamespaceGauges>>,
    /// Set when they are loaded; none where there are none.
    pub(super) snapshots: Mutex<Option<Arc<Snapshots>>>,
}

impl DaemonView {
    /// Brings all gauges up to date.
    pub(super) fn publish(&self) {
        self.process.set_ready(self.readiness.report().is_ready());
        self.pool.publish_backlogs();
        if let Some(snapshots) = &*self.snapshots.lock() {
            snapshots.publish_age();
        }
        let mut gauges = self.gauges.lock();
        for namespace in self.namespaces.all() {
            let gauges = gauges
                .entry(namespace.name.clone())
                .or_insert_with(|| NamespaceGauges::for_namespace(namespace.name.as_str()));
            gauges.set_sizes(&self.sizes(&namespace));
            let lag_us = namespace
                .indexer
                .holders()
                .iter()
                .map(|holder| holder.status.lag_us())
                .max();
            gauges.set_event_lag(Duration::from_micros(lag_us.unwrap_or_default()));
        }
    }

    /// Folds recorded samples away, so that they do not pile up where nobody scrapes.
    pub(super) fn run_upkeep(&self) {
        self.metrics.run_upkeep();
        give_back_memory();
    }

    fn sizes(&self, namespace: &Namespace) -> NamespaceSizes {
        let sizes = namespace.indexer.sizes();
        let holders = namespace.indexer.holders();
        let degraded = holders
            .iter()
            .filter(|holder| !holder.status.reasons(&self.trust).is_empty())
            .count();
        let is_stale = |status: &HolderStatus| status.own_reasons().contains(DegradedReason::Stale);
        let stale = holders.iter().filter(|holder| is_stale(&holder.status)).count();
        NamespaceSizes {
            workers: sizes.workers as u64,
            holders_exact: (holders.len() - degraded) as u64,
            holders_degraded: degraded as u64,
            holders_stale: stale as u64,
            held_blocks: sizes.held_blocks,
            distinct_blocks: sizes.distinct_blocks,
            evicted_blocks: sizes.evicted_blocks,
            index_bytes: sizes.bytes,
            parked_events: sizes.parked_events,
            chain_conflicts: sizes.chain_conflicts,
        }
    }
}

/// One holder, as `/workers` shows it.
#[derive(Serialize)]
struct HolderJson {
    namespace: NamespaceName,
    worker: WorkerName,
    rank: Rank,
    epoch: u64,
    seq: u64,
    blocks: u64,
    parked_events: u32,
    exact: bool,
    degraded: DegradedReasons,
    foreign_chain: bool,
    applied_at_us: u64,
    lag_us: u64,
}

/// One namespace, as `/index` shows it.
#[derive(Serialize)]
struct NamespaceJson {
    namespace: NamespaceName,
    block_size: u32,
    hashing: &'static str,
    index: &'static str,
    distinct_blocks: u64,
    held_blocks: u64,
    evicted_blocks: u64,
    bytes: u64,
    holders: usize,
    workers: usize,
    parked_events: u64,
    foreign_holders: u32,
    chain_conflicts: u64,
}

impl AdminSource for DaemonView {
    fn metrics(&self) -> String {
        self.publish();
        self.metrics.render()
    }

    fn readiness(&self) -> ReadinessReport {
        self.readiness.report()
    }

    fn workers_json(&self, query: &WorkersQuery) -> String {
        let is_wanted = |name: &NamespaceName| {
            query
                .namespace
                .as_ref()
                .is_none_or(|wanted| wanted == name.as_str())
        };
        let mut holders = Vec::new();
        let mut total = 0;
        for namespace in self
            .namespaces
            .all()
            .iter()
            .filter(|namespace| is_wanted(&namespace.name))
        {
            let mut records = namespace.indexer.holders();
            records.sort_unstable_by(|one, other| one.id.cmp(&other.id));
            total += records.len();
            for record in records.iter().take(query.limit - holders.len()) {
                let cursor = record.status.cursor();
                let degraded = record.status.reasons(&self.trust);
                holders.push(HolderJson {
                    namespace: namespace.name.clone(),
                    worker: record.id.worker.clone(),
                    rank: record.id.rank,
                    epoch: cursor.epoch,
                    seq: cursor.seq,
                    blocks: record.status.blocks(),
                    parked_events: record.status.parked_events(),
                    exact: degraded.is_empty(),
                    degraded,
                    foreign_chain: record.status.has_foreign_chain(),
                    applied_at_us: record.status.applied_at_us(),
                    lag_us: record.status.lag_us(),
                });
            }
        }
        serde_json::json!({ "holders": holders, "holders_total": total }).to_string()
    }

    fn index_json(&self) -> String {
        let describe = |namespace: &Arc<Namespace>| {
            let sizes: IndexSizes = namespace.indexer.sizes();
            let settings = namespace.indexer.settings();
            NamespaceJson {
                namespace: namespace.name.clone(),
                block_size: settings.block_size.as_u32(),
                hashing: settings.hashing.as_str(),
                index: settings.index.as_str(),
                distinct_blocks: sizes.distinct_blocks,
                held_blocks: sizes.held_blocks,
                evicted_blocks: sizes.evicted_blocks,
                bytes: sizes.bytes,
                holders: sizes.holders,
                workers: sizes.workers,
                parked_events: sizes.parked_events,
                foreign_holders: sizes.foreign_holders,
                chain_conflicts: sizes.chain_conflicts,
            }
        };
        let namespaces: Vec<NamespaceJson> = self.namespaces.all().iter().map(describe).collect();
        serde_json::json!({
            "namespaces": namespaces,
            "messages_waiting": self.pool.messages_waiting(),
            "assigned_workers": self.pool.assigned_workers(),
        })
        .to_string()
    }
}
