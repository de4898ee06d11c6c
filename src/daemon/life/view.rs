//! State of a running daemon, as the admin listener shows it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::response::Response;
use parking_lot::Mutex;
use serde::Serialize;

use crate::costs::{Costs, ToldCost};
use crate::history::{History, ShownChange};
use crate::lanes::{LanePool, WorkerKey, epoch_ahead_s};
use crate::outcomes::{HolderPromises, Outcomes, PromiseTally};
use crate::page::{self, Page};
use crate::queries::{MissingShards, report, unsized_holders};
use kvatlas_client::unix_time_us;
use kvatlas_config::{Config, Live};
use kvatlas_core::index::{HolderRecord, IndexSizes, Namespace, Namespaces};
use kvatlas_core::stream::{HolderStatus, StreamTrust};
use kvatlas_core::wire::{
    DegradedReason, DegradedReasons, HolderStatusReply, NamespaceName, TROUBLE_LABEL, WireLimits,
};
use kvatlas_process::admin::{AdminSource, Latch, Readiness, ReadinessReport, WorkersCursor, WorkersQuery};
use kvatlas_process::registry::{EngineRegistry, EnginesReport};
use kvatlas_process::setup::Setup;
use kvatlas_telemetry::labels::{HolderState, namespace_label};
use kvatlas_telemetry::{MetricsHandle, NamespaceGauges, ProcessMetrics, log_gated};

use crate::snapshots::{SnapshotFailing, SnapshotKeeper};
use crate::troubles::Troubles;

use super::memory::ShrinkWatch;

/// Reader of the daemon's state, for metrics, probes and people.
pub(super) struct DaemonView {
    /// Role of this process: `daemon` or `gateway`.
    pub(super) role: &'static str,
    /// Configuration of the start.
    pub(super) config: Config,
    /// Bounds on queries, which a reload may replace.
    pub(super) query_limits: Live<WireLimits>,
    /// Engines of the bridge in this process; `None` if there is no bridge.
    pub(super) engines: Option<Arc<dyn EngineRegistry>>,
    pub(super) namespaces: Arc<Namespaces>,
    pub(super) history: Arc<History>,
    pub(super) outcomes: Arc<Outcomes>,
    pub(super) costs: Arc<Costs>,
    pub(super) missing_shards: Arc<MissingShards>,
    pub(super) snapshot_failing: Arc<SnapshotFailing>,
    pub(super) trust: Arc<StreamTrust>,
    pub(super) readiness: Arc<Readiness>,
    pub(super) pool: Arc<LanePool>,
    pub(super) metrics: MetricsHandle,
    pub(super) process: ProcessMetrics,
    pub(super) gauges: Mutex<HashMap<NamespaceName, NamespaceGauges>>,
    /// Keeper of snapshots. `None` until the newest snapshot is loaded, and also without a snapshot directory.
    pub(super) snapshots: Mutex<Option<Arc<SnapshotKeeper>>>,
    pub(super) page: Arc<Page>,
    pub(super) shrinks: Mutex<ShrinkWatch>,
}

impl DaemonView {
    /// Updates all gauges. Calls `seen` with every holder, its namespace, and the reasons for which the holder is not
    /// exact.
    pub(super) fn publish(&self, mut seen: impl FnMut(&NamespaceName, &HolderRecord, DegradedReasons)) {
        let report = self.readiness.report();
        self.process.ready.set(f64::from(report.is_ready()));
        let is_connected = report.is_set(Latch::Connected);
        self.process.connected.set(f64::from(is_connected));
        self.process.publish_usage();
        self.pool.publish_backlogs();
        if let Some(snapshots) = &*self.snapshots.lock() {
            snapshots.publish_age();
        }
        let (mut gauges, mut bytes) = (self.gauges.lock(), 0);
        for namespace in self.namespaces.all() {
            let gauges = gauges
                .entry(namespace.name.clone())
                .or_insert_with(|| NamespaceGauges::for_namespace(namespace_label(namespace.name.as_str())));
            bytes += self.publish_sizes(&namespace, gauges, &mut seen);
        }
        self.shrinks.lock().note(bytes);
    }

    /// Forgets the outcomes of holders that have been removed.
    pub(super) fn forget_gone_outcomes(&self) {
        self.outcomes.forget_gone();
    }

    /// Reads how many answers there were since the last call, and how many were not exact. These numbers are the cost
    /// of doubts.
    pub(super) fn note_costs(&self, now: Instant) {
        let namespaces = self.namespaces.all();
        self.costs
            .look(namespaces.iter().map(|namespace| &**namespace), now);
    }

    /// Forgets namespaces that have been empty for longer than `empty_us_max`. What they have evicted is counted for the
    /// last time, and their gauges end at 0.
    pub(super) fn forget_empty_namespaces(&self, now_us: u64, empty_us_max: u64) {
        for namespace in self.namespaces.forget_empty(now_us, empty_us_max) {
            log_gated!(info "a namespace without holders is forgotten"; namespace = namespace.name.as_str());
            if let Some(gauges) = self.gauges.lock().remove(&namespace.name) {
                self.publish_sizes(&namespace, &gauges, |_, _, _| {});
            }
            self.pool.forget_namespace(&namespace.name);
        }
    }

    /// Returns the cost of a holder's doubt: the number of recent answers, and the number of those that list the holder
    /// as not exact. `None` if the holder is exact, or its cost is not known.
    fn cost_of(&self, namespace: &NamespaceName, holder: &HolderRecord) -> Option<ToldCost> {
        // Most holders are exact.
        let is_doubtful = holder.status.inexact_since_us.load() > 0;
        let cost = is_doubtful.then(|| self.costs.of_holder(namespace, &holder.id));
        cost.flatten().map(ToldCost::of_holder)
    }

    /// Updates the gauges of one namespace, and calls `seen` as [`Self::publish`] does. Returns the size of the
    /// namespace's index in bytes.
    fn publish_sizes(
        &self,
        namespace: &Namespace,
        gauges: &NamespaceGauges,
        mut seen: impl FnMut(&NamespaceName, &HolderRecord, DegradedReasons),
    ) -> u64 {
        let holders = namespace.indexer.holders();
        let freshness = self.pool.freshness();
        let look = freshness.look(&namespace.name);
        gauges.behind.set(Duration::from_micros(look.behind_us));
        let reasons: Vec<_> = holders
            .iter()
            .map(|holder| {
                let reasons = report(holder, &self.trust, &look, &namespace.name).degraded;
                seen(&namespace.name, holder, reasons);
                reasons.union(holder.status.own_reasons().of_some_queries())
            })
            .collect();
        let is_exact = |reasons: &&DegradedReasons| reasons.of_all_queries().is_empty();
        let exact = reasons.iter().filter(is_exact).count();
        gauges
            .holders
            .get(HolderState::Degraded)
            .set((holders.len() - exact) as f64);
        gauges.holders.get(HolderState::Exact).set(exact as f64);
        for reason in DegradedReason::ALL {
            let has = reasons.iter().filter(|reasons| reasons.contains(reason)).count();
            gauges.degraded_holders.get(reason).set(has as f64);
        }
        let is_stale = |status: &HolderStatus| status.own_reasons().contains(DegradedReason::Stale);
        let stale = holders.iter().filter(|holder| is_stale(&holder.status)).count();
        gauges.stale_holders.set(stale as f64);
        let now_us = unix_time_us();
        let is_ahead =
            |holder: &&Arc<HolderRecord>| epoch_ahead_s(holder.status.cursor.load().epoch, now_us) > 0;
        let ahead = holders.iter().filter(is_ahead).count();
        gauges.epochs_ahead.set(ahead as f64);
        let lag_us = holders.iter().map(|holder| holder.status.lag_us.load()).max();
        let lag = Duration::from_micros(lag_us.unwrap_or_default());
        gauges.event_lag.set(lag);
        let sizes = namespace.indexer.sizes();
        gauges.workers.set(sizes.workers as f64);
        gauges.held_blocks.set(sizes.held_blocks as f64);
        gauges.distinct_blocks.set(sizes.distinct_blocks as f64);
        gauges.set_evicted(sizes.evicted_blocks);
        gauges.index_bytes.set(sizes.bytes as f64);
        gauges.parked_events.set(sizes.parked_events as f64);
        gauges.chain_conflicts.set(sizes.chain_conflicts as f64);
        sizes.bytes
    }
}

/// One holder, as the admin path `/workers` shows it.
#[derive(Serialize)]
struct HolderJson {
    namespace: NamespaceName,
    #[serde(flatten)]
    status: HolderStatusReply,
    applied_at_us: u64,
    lag_us: u64,
    /// Time that the lane has spent on the events of the worker, for all its ranks together, in microseconds.
    worker_lane_us: u64,
    /// Numbers of the holder's blocks in the last one to two minutes: blocks that exact answers promised, and blocks
    /// that requests found. Absent if no router has reported outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcomes: Option<PromiseTally>,
    /// Details of the holder's reasons for doubt, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
    /// Cost of the holder's doubt: the number of recent answers, and the number of those that list the holder as not
    /// exact. Absent if the holder is exact.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<ToldCost>,
    /// Changes of the holder's state, the oldest first. Empty unless the request asks for changes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changes: Vec<ShownChange>,
}

/// Returns the explanation of a holder's doubt, as text: the batch numbers at the last gap, or the publisher's own
/// words. `None` if there is no explanation for any of `reasons`.
fn detail(status: &HolderStatus, reasons: DegradedReasons) -> Option<String> {
    let gap = status.gap.load();
    if gap.received > 0 && reasons.contains(DegradedReason::Gap) {
        return Some(gap.to_string());
    }
    let profile = status.profile();
    let told = profile.labels.get(TROUBLE_LABEL)?;
    (!reasons.upstream().is_empty()).then(|| told.to_owned())
}

impl HolderJson {
    fn cursor(&self) -> WorkersCursor {
        WorkersCursor {
            namespace: self.namespace.as_str().to_owned(),
            worker: self.status.worker.as_str().to_owned(),
            rank: self.status.rank,
        }
    }
}

/// One namespace, as the admin path `/index` shows it.
#[derive(Serialize)]
struct NamespaceJson {
    namespace: NamespaceName,
    block_size: u32,
    hashing: &'static str,
    distinct_blocks: u64,
    held_blocks: u64,
    evicted_blocks: u64,
    bytes: u64,
    holders: usize,
    workers: usize,
    parked_events: u64,
    foreign_holders: u32,
    /// Number of holders whose block size is not known for certain.
    unsized_holders: u32,
    #[serde(flatten)]
    troubles: Troubles,
    chain_conflicts: u64,
    /// Holders for which exact answers recently promised more blocks than requests found.
    broken_promises: Vec<HolderPromises>,
    /// Number of recent answers about the namespace, and number of those that were not exact.
    cost: Option<ToldCost>,
}

impl AdminSource for DaemonView {
    fn metrics(&self) -> String {
        self.publish(|_, _, _| {});
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
        let freshness = self.pool.freshness();
        let (mut holders, mut total, mut is_cut) = (Vec::<HolderJson>::new(), 0, false);
        for namespace in self.namespaces.all() {
            if !is_wanted(&namespace.name) {
                continue;
            }
            let mut records = namespace.indexer.holders();
            records.sort_unstable_by(|one, other| one.id.cmp(&other.id));
            let look = freshness.look(&namespace.name);
            for record in records {
                let status = report(&record, &self.trust, &look, &namespace.name);
                let is_named = |worker: &String| worker == status.worker.as_str();
                if !query.wants(status.degraded) || !query.worker.as_ref().is_none_or(is_named) {
                    continue;
                }
                total += 1;
                let holder = HolderJson {
                    namespace: namespace.name.clone(),
                    outcomes: self.outcomes.lately(&namespace.name, &record.id, Instant::now()),
                    changes: Vec::new(),
                    detail: detail(&record.status, status.degraded),
                    cost: self.cost_of(&namespace.name, &record),
                    status,
                    applied_at_us: record.status.applied_at_us.load(),
                    lag_us: record.status.lag_us.load(),
                    worker_lane_us: freshness.spent_us(&WorkerKey {
                        namespace: namespace.name.clone(),
                        worker: record.id.worker.clone(),
                    }),
                };
                if query
                    .after
                    .as_ref()
                    .is_some_and(|after| holder.cursor() <= *after)
                {
                    continue;
                }
                if holders.len() < query.limit {
                    let changes = query
                        .has_changes
                        .then(|| self.history.of(&namespace.name, &record.id));
                    holders.push(HolderJson {
                        changes: changes.unwrap_or_default(),
                        ..holder
                    });
                } else {
                    is_cut = true;
                }
            }
        }
        let last = holders.last().filter(|_| is_cut);
        let next = last.map(|holder| holder.cursor().to_text());
        serde_json::json!({ "holders": holders, "holders_total": total, "next": next }).to_string()
    }

    fn index_json(&self) -> String {
        let now_us = unix_time_us();
        let describe = |namespace: &Arc<Namespace>| {
            let sizes: IndexSizes = namespace.indexer.sizes();
            let settings = namespace.indexer.settings();
            NamespaceJson {
                namespace: namespace.name.clone(),
                block_size: settings.block_size.as_u32(),
                hashing: settings.hashing.as_str(),
                distinct_blocks: sizes.distinct_blocks,
                held_blocks: sizes.held_blocks,
                evicted_blocks: sizes.evicted_blocks,
                bytes: sizes.bytes,
                holders: sizes.holders,
                workers: sizes.workers,
                parked_events: sizes.parked_events,
                foreign_holders: sizes.foreign_holders,
                unsized_holders: unsized_holders(namespace),
                troubles: Troubles::of(namespace, now_us),
                chain_conflicts: sizes.chain_conflicts,
                broken_promises: self.outcomes.broken_promises(&namespace.name, Instant::now()).1,
                cost: self.costs.of_namespace(&namespace.name),
            }
        };
        let namespaces: Vec<NamespaceJson> = self.namespaces.all().iter().map(describe).collect();
        let (failing, unsent) = (self.snapshot_failing.writing(), self.snapshot_failing.sending());
        let setup = Setup {
            max_message_bytes: self.query_limits.now().message_bytes_max as u64,
            ..Setup::of(&self.config)
        };
        serde_json::json!({
            "role": self.role,
            "setup": setup,
            "snapshot_error": failing.as_ref().map(|failing| &failing.error),
            "snapshot_error_since_us": failing.as_ref().map(|failing| failing.since_us),
            "snapshot_upload_error": unsent.as_ref().map(|failing| &failing.error),
            "snapshot_upload_error_since_us": unsent.as_ref().map(|failing| failing.since_us),
            "missing_shards": self.missing_shards.all(now_us),
            "shard_outage": self.missing_shards.outage(now_us),
            "engines": self.engines.as_deref().map(EnginesReport::of),
            "namespaces": namespaces,
            "strays": self.pool.strays(),
            "broker_silent_us": self.pool.freshness().silent_us(crate::lanes::now_us()),
            "stream_trouble": self.pool.freshness().stream_trouble(crate::lanes::now_us()),
            "messages_waiting": self.pool.messages_waiting(),
            "assigned_workers": self.pool.assigned_workers(),
        })
        .to_string()
    }

    fn home(&self) -> Option<Response> {
        Some(page::home())
    }

    fn page(&self) -> Router {
        self.page.router()
    }
}
