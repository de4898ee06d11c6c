//! Hints: reports of routers about where they have sent requests, kept for a short time. A hint tells what a holder will soon
//! have, before the first event of the holder's engine shows it. A hint is fulfilled once the index has shown all its blocks.
//! A fulfilled hint predicts nothing any more: the engine may evict the blocks later, and only the index shows that.
//!
//! Routers send hints over NATS or HTTP, if the settings allow it. Hints never change the index: a query that asks for hints
//! gets them in a list of their own. All memory is bounded. A router that lies makes predictions wrong, and nothing else.

mod table;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::index::QueryChain;
use kvatlas_core::wire::{HolderId, NamespaceName, Shard, WorkerName};

use kvatlas_telemetry::HintMetrics;
use kvatlas_telemetry::labels::HintDrop;

pub(crate) use table::KeptHint;
use table::{HintTable, cost};

/// Hints of all namespaces. A hint is a router's report that it has sent a request to a holder.
pub(crate) struct Hints {
    /// Shard of the daemon, if it has one. Hints about workers of other shards are ignored.
    shard: Option<Shard>,
    time_to_live: Duration,
    bytes_max: usize,
    metrics: HintMetrics,
    tables: Mutex<HashMap<NamespaceName, HintTable>>,
}

impl std::fmt::Debug for Hints {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Hints").finish_non_exhaustive()
    }
}

impl Hints {
    /// Creates an empty store of hints (reports of where routers have sent requests) about the workers of `shard`. It
    /// keeps a hint for `time_to_live`, in at most `bytes_max` bytes.
    pub(crate) fn new(shard: Option<Shard>, time_to_live: Duration, bytes_max: usize) -> Self {
        Self {
            shard,
            time_to_live,
            bytes_max,
            metrics: HintMetrics::new(),
            tables: Mutex::default(),
        }
    }

    /// Whether hints about `worker` are kept here. Those about workers of other shards are not.
    pub(crate) fn are_about(&self, worker: &WorkerName) -> bool {
        self.shard.is_none_or(|shard| shard.owns(worker))
    }

    /// Counts a hint, or a report of hints, that could not be decoded.
    pub(crate) fn undecodable(&self, error: &dyn std::fmt::Display) {
        self.metrics.dropped(HintDrop::Undecodable, 1, error);
    }

    /// Counts hints for a namespace that the daemon does not know.
    pub(crate) fn unknown_namespace(&self, name: &NamespaceName, hints: usize) {
        if hints > 0 {
            self.metrics
                .dropped(HintDrop::UnknownNamespace, hints as u64, name);
        }
    }

    /// Keeps the hint that `holder` will soon have the blocks of `chain`. Returns whether the hint was kept. A hint is
    /// not kept if it has no blocks, or is larger than the whole memory for hints.
    pub(crate) fn add(
        &self,
        name: &NamespaceName,
        holder: HolderId,
        chain: &mut QueryChain<'_>,
        now: Instant,
    ) -> bool {
        if chain.is_empty() {
            return false;
        }
        let cost = cost(chain.len());
        if cost > self.bytes_max {
            self.metrics.dropped(HintDrop::NoRoom, 1, &holder);
            return false;
        }
        let blocks: Vec<PositionalLineageHash> = (0..chain.len()).map(|place| chain.key(place)).collect();
        let mut tables = self.tables.lock();
        self.expire(&mut tables, now);
        self.make_room(&mut tables, cost);
        let table = tables.entry(name.clone()).or_default();
        table.add(holder, blocks, now + self.time_to_live);
        self.metrics.taken.increment(1);
        self.show(&tables);
        true
    }

    /// Returns the holders that should soon have leading blocks of a prompt, each with the number of these blocks. The
    /// largest number comes first.
    pub(crate) fn find(
        &self,
        name: &NamespaceName,
        chain: &mut QueryChain<'_>,
        now: Instant,
    ) -> Vec<(Arc<KeptHint>, usize)> {
        let mut tables = self.tables.lock();
        if tables.is_empty() {
            return Vec::new();
        }
        self.expire(&mut tables, now);
        let table = tables.get(name);
        table.map_or_else(Vec::new, |table| {
            table.find(chain.len(), |place| chain.key(place))
        })
    }

    /// Checks unfulfilled hints, at most `max` of each namespace. `has_all` says whether a hint's holder has all blocks
    /// of the hint. If so, the hint becomes fulfilled, and no longer predicts anything.
    pub(crate) fn look(
        &self,
        max: usize,
        now: Instant,
        mut has_all: impl FnMut(&NamespaceName, &KeptHint) -> bool,
    ) {
        let mut tables = self.tables.lock();
        self.expire(&mut tables, now);
        let looks = tables
            .iter_mut()
            .map(|(name, table)| (name.clone(), table.look(max)));
        let looks: Vec<(NamespaceName, Vec<Arc<KeptHint>>)> = looks.collect();
        // The checks take time. The lock is released before them, because queries need it.
        drop(tables);
        for (name, hints) in looks {
            for hint in hints {
                if has_all(&name, &hint) {
                    hint.fulfil();
                    self.metrics.fulfilled.increment(1);
                }
            }
        }
    }

    fn expire(&self, tables: &mut HashMap<NamespaceName, HintTable>, now: Instant) {
        let before: usize = tables.values().map(HintTable::len).sum();
        let unfulfilled: u64 = tables.values_mut().map(|table| table.expire(now)).sum();
        self.metrics.expired.increment(unfulfilled);
        if tables.values().map(HintTable::len).sum::<usize>() < before {
            tables.retain(|_, table| table.len() > 0);
            self.show(tables);
        }
    }

    /// Forgets hints until `wanted` more bytes fit. Each time, the namespace whose hints take the most memory loses its
    /// oldest hint.
    fn make_room(&self, tables: &mut HashMap<NamespaceName, HintTable>, wanted: usize) {
        let room = self.bytes_max.saturating_sub(wanted);
        while tables.values().map(HintTable::bytes).sum::<usize>() > room {
            let largest = tables.iter_mut().max_by_key(|(_, table)| table.bytes());
            let Some((name, table)) = largest else { return };
            if table.forget_oldest().is_none() {
                return;
            }
            self.metrics.dropped(HintDrop::NoRoom, 1, name);
        }
        tables.retain(|_, table| table.len() > 0);
    }

    fn show(&self, tables: &HashMap<NamespaceName, HintTable>) {
        let bytes: usize = tables.values().map(HintTable::bytes).sum();
        self.metrics.bytes.set(bytes as f64);
    }
}

#[cfg(test)]
mod tests;
