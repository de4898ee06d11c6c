//! Workers' blocks that are reported over gRPC, as SGLang's bridge reports them to SGLang's own indexer.
//!
//! A report names blocks by their hashes, and does not say which block follows which. So the index cannot take these
//! blocks. But a hash of SGLang stands for its whole prefix, so a set of hashes for each worker is enough. The depth of
//! a worker is the number of leading hashes of a prompt in its set.
//!
//! ```text
//! ConfigureExpectedWorkers ──▶ awaited ──ReplaceExternalKvSnapshot──▶ told ──ApplyExternalKvBatch──▶ told
//!                                 ▲                                     │
//!                                 └── a batch is missing or of another epoch, or there is no room ◀─┘
//! ```
//!
//! - After the daemon's start, nobody knows which workers there are until a list of them comes. Answers are not exact
//!   until then, but for no longer than a worker may be silent: perhaps no worker reports at all.
//! - A worker is *awaited* until its snapshot comes. Answers leave out an awaited worker. After the snapshot the worker
//!   is *told*: its blocks are known.
//! - A worker that has been silent for longer than the limit is left out as well, until its next batch or a snapshot.
//!   Only these show that nothing is missing.
//! - While the silence is still below the limit, two other messages also end it: a repeated batch, and a new list that
//!   names the worker.
//! - A batch is applied in one step, and so is a snapshot.
//! - Memory is bounded. A worker whose blocks do not fit becomes awaited again.

mod blocks;
mod check;
mod reuse;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tokio::sync::Mutex;
use tokio::task::yield_now;

use kvatlas_config::Depth;
use kvatlas_telemetry::GrpcReportMetrics;
use kvatlas_telemetry::labels::{ReportLoss, ReportState};

use super::messages::{
    ApplyExternalKvBatchRequest, ApplyExternalKvBatchResponse, ConfigureExpectedWorkersRequest,
    ConfigureExpectedWorkersResponse, ExternalKvNodeMatch, ReplaceExternalKvSnapshotRequest,
    ReplaceExternalKvSnapshotResponse, TierHashes, WorkerCacheSpec,
};

use blocks::{TierPlace, WorkerBlocks};
use check::{BlockChange, Stored, WORKERS_MAX, check_name, check_text};
use reuse::depths;

pub(super) use check::BlockReportError;

/// Approximate memory of a worker without its blocks, in bytes.
const WORKER_BYTES: usize = 512;
/// Number of blocks that are stored or looked up before other tasks get a turn.
const AT_ONCE: usize = 8192;

/// Bounds on the blocks that reports may add, and on a worker's silence.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReportLimits {
    pub(super) bytes_max: usize,
    /// Maximum silence of a worker before it is left out of answers. `None` means no bound.
    pub(super) silence_max: Option<Duration>,
}

/// Position in a worker's sequence of batches: the epoch (one run of the worker) and the batch's number within it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Checkpoint {
    epoch: String,
    seq: u64,
}

/// State of a worker that reports its blocks over gRPC.
#[derive(Debug)]
struct ReportedWorker {
    /// Address to which requests for the worker go. Empty if no report has named it.
    address: String,
    spec: Option<WorkerCacheSpec>,
    /// Position of the last batch or snapshot that was applied. While a snapshot is awaited, this is `None` and
    /// `blocks` is empty.
    checkpoint: Option<Checkpoint>,
    /// Start of the worker's present silence: the time of the last applied batch or snapshot, or of the last call of
    /// [`Self::prolong`] that had an effect.
    heard: Instant,
    blocks: WorkerBlocks,
}

impl ReportedWorker {
    fn awaited(now: Instant) -> Self {
        Self {
            address: String::new(),
            spec: None,
            checkpoint: None,
            heard: now,
            blocks: WorkerBlocks::default(),
        }
    }

    fn bytes(&self) -> usize {
        WORKER_BYTES + self.blocks.bytes()
    }

    fn is_silent(&self, now: Instant, silence_max: Option<Duration>) -> bool {
        let silence = now.saturating_duration_since(self.heard);
        silence_max.is_some_and(|most| silence > most)
    }

    /// Begins to count the worker's silence anew, unless the silence has already exceeded `silence_max`. Meant for
    /// signs of life that do not show whether batches are missing.
    fn prolong(&mut self, now: Instant, silence_max: Option<Duration>) {
        if !self.is_silent(now, silence_max) {
            self.heard = now;
        }
    }
}

#[derive(Debug, Default)]
struct ReportedWorkers {
    workers: BTreeMap<String, ReportedWorker>,
    bytes: usize,
    /// Whether a list of workers has come since the daemon's start.
    is_listed: bool,
}

impl ReportedWorkers {
    /// Applies `change` to a worker, and updates the count of the worker's memory. Returns `None` if the worker is
    /// unknown.
    fn change<T>(&mut self, name: &str, change: impl FnOnce(&mut ReportedWorker) -> T) -> Option<T> {
        let worker = self.workers.get_mut(name)?;
        let before = worker.bytes();
        let done = change(worker);
        self.bytes = self.bytes.saturating_sub(before).saturating_add(worker.bytes());
        Some(done)
    }

    fn told(&self) -> usize {
        let workers = self.workers.values();
        workers.filter(|worker| worker.checkpoint.is_some()).count()
    }

    fn is_told(&self, name: &str) -> bool {
        let worker = self.workers.get(name);
        worker.is_some_and(|worker| worker.checkpoint.is_some())
    }
}

/// Worker that has leading blocks of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReportedMatch {
    pub(super) worker: String,
    /// Address of the worker. Empty if no report has named it.
    pub(super) address: String,
    pub(super) blocks: u32,
}

/// Certainty about the state of all workers that report over gRPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Coverage {
    /// Whether the state of at least one reporting worker is certain.
    pub(super) knows_some: bool,
    /// Whether it is certain which workers there are, and what the state of each is.
    pub(super) is_exact: bool,
}

/// Coverage without any reported workers.
impl Default for Coverage {
    fn default() -> Self {
        Self {
            knows_some: false,
            is_exact: true,
        }
    }
}

/// All workers that report their blocks over gRPC.
pub(super) struct BlockReports {
    kept: RwLock<ReportedWorkers>,
    /// Lock that lets one snapshot be taken at a time. While a snapshot is taken, memory holds its blocks and the blocks that it
    /// replaces.
    snapshots: Mutex<()>,
    limits: ReportLimits,
    started: Instant,
    metrics: GrpcReportMetrics,
}

impl BlockReports {
    pub(super) fn new(limits: ReportLimits) -> Self {
        Self {
            kept: RwLock::default(),
            snapshots: Mutex::default(),
            limits,
            started: Instant::now(),
            metrics: GrpcReportMetrics::new(),
        }
    }

    /// Runs `work` on the workers under the write lock, and then updates the metrics.
    fn write<T>(&self, work: impl FnOnce(&mut ReportedWorkers) -> T) -> T {
        let mut kept = self.kept.write();
        let done = work(&mut kept);
        let (told, all) = (kept.told(), kept.workers.len());
        let workers = |state| self.metrics.workers.get(state);
        workers(ReportState::Told).set(told as f64);
        workers(ReportState::Awaited).set((all - told) as f64);
        self.metrics.bytes.set(kept.bytes as f64);
        done
    }

    /// Sets the list of workers. A worker that is not named is forgotten.
    pub(super) fn configure(
        &self,
        request: ConfigureExpectedWorkersRequest,
        now: Instant,
    ) -> Result<ConfigureExpectedWorkersResponse, BlockReportError> {
        if request.workers.len() > WORKERS_MAX {
            return Err(BlockReportError::TooManyWorkers(request.workers.len()));
        }
        for worker in &request.workers {
            check_name("worker_id", &worker.worker_id)?;
            check_text("worker_address", &worker.worker_address)?;
        }
        let (answer, forgotten) = self.write(|kept| {
            let mut before = std::mem::take(&mut kept.workers);
            kept.is_listed = true;
            for expected in request.workers {
                let known = before.remove(&expected.worker_id);
                let mut worker = known.unwrap_or_else(|| ReportedWorker::awaited(now));
                worker.address = expected.worker_address;
                worker.spec = expected.cache_spec.or(worker.spec);
                worker.prolong(now, self.limits.silence_max);
                kept.workers.insert(expected.worker_id, worker);
            }
            kept.bytes = kept.workers.values().map(ReportedWorker::bytes).sum();
            let count = |workers| u32::try_from(workers).unwrap_or(u32::MAX);
            let answer = ConfigureExpectedWorkersResponse {
                total_workers: count(kept.workers.len()),
                ready_workers: count(kept.told()),
            };
            (answer, before)
        });
        // The forgotten workers are dropped after the lock has been released, so that no other task waits for this.
        drop(forgotten);
        Ok(answer)
    }

    /// Applies a batch, which has to be the next one of its worker. A batch that was applied earlier changes nothing,
    /// and is answered as a duplicate.
    pub(super) fn apply(
        &self,
        request: ApplyExternalKvBatchRequest,
        now: Instant,
    ) -> Result<ApplyExternalKvBatchResponse, BlockReportError> {
        check_name("worker_id", &request.worker_id)?;
        check_text("worker_address", &request.worker_address)?;
        let changes = BlockChange::all_of(&request.actions)?;
        if !request.enforce_sequence || request.worker_epoch.is_empty() {
            return Err(BlockReportError::Unnumbered);
        }
        self.write(|kept| {
            let seq = request.seq;
            let next = kept.next_batch(&request.worker_id, &request.worker_epoch, seq);
            kept.change(&request.worker_id, |worker| match next {
                Ok(None) => worker.heard = now,
                Ok(Some(_)) => worker.prolong(now, self.limits.silence_max),
                Err(_) => {}
            });
            if let Some(applied_seq) = self.noted(kept, &request.worker_id, next)? {
                return Ok(ApplyExternalKvBatchResponse {
                    applied_seq,
                    duplicate: true,
                });
            }
            let further = changes.iter().map(BlockChange::further).sum();
            let room = kept.room_for(&request.worker_id, further, self.limits.bytes_max);
            self.noted(kept, &request.worker_id, room)?;
            kept.change(&request.worker_id, |worker| {
                worker.address = request.worker_address;
                worker.spec = request.cache_spec.or(worker.spec);
                BlockChange::make_all(&changes, &mut worker.blocks);
                worker.blocks.rest();
                worker.checkpoint = Some(Checkpoint {
                    epoch: request.worker_epoch,
                    seq,
                });
            });
            Ok(ApplyExternalKvBatchResponse {
                applied_seq: seq,
                duplicate: false,
            })
        })
    }

    /// Returns `result` unchanged. If `result` is the error of a missing batch, of a batch of another epoch or of lacking
    /// memory, first counts the loss and forgets the worker's blocks. Answers then leave the worker out until its next
    /// snapshot.
    fn noted<T>(
        &self,
        kept: &mut ReportedWorkers,
        name: &str,
        result: Result<T, BlockReportError>,
    ) -> Result<T, BlockReportError> {
        let reason = match &result {
            Err(BlockReportError::Gap { .. }) => ReportLoss::Gap,
            // A worker that has a snapshot has one of another epoch.
            Err(BlockReportError::NoSnapshot) if kept.is_told(name) => ReportLoss::Epoch,
            Err(BlockReportError::NoRoom) => ReportLoss::Room,
            _ => return result,
        };
        self.metrics.lost(reason, name);
        kept.change(name, |worker| {
            worker.checkpoint = None;
            worker.blocks = WorkerBlocks::default();
        });
        result
    }

    /// Replaces all blocks of a worker by the blocks of a snapshot.
    pub(super) async fn replace(
        &self,
        request: ReplaceExternalKvSnapshotRequest,
    ) -> Result<ReplaceExternalKvSnapshotResponse, BlockReportError> {
        check_name("worker_id", &request.worker_id)?;
        check_name("worker_epoch", &request.worker_epoch)?;
        check_text("worker_address", &request.worker_address)?;
        let parts: Vec<Stored<'_>> = request
            .hashes_by_tier
            .iter()
            .map(Stored::of_snapshot)
            .collect::<Result<_, _>>()?;
        let _alone = self.snapshots.lock().await;
        let count = parts.iter().map(|part| part.hashes.len()).sum();
        self.write(|kept| {
            let room = kept.room_for_snapshot(&request.worker_id, count, self.limits.bytes_max);
            self.noted(kept, &request.worker_id, room)
        })?;
        let mut blocks = WorkerBlocks::default();
        for part in &parts {
            for start in (0..part.hashes.len()).step_by(AT_ONCE) {
                part.store(&mut blocks, start..part.hashes.len().min(start + AT_ONCE));
                yield_now().await;
            }
        }
        let applied_seq = request.applied_seq;
        let put = self.write(|kept| {
            // Other workers may have taken the room in the meantime.
            let room = kept.room_for_snapshot(&request.worker_id, count, self.limits.bytes_max);
            self.noted(kept, &request.worker_id, room)?;
            Ok(kept.change(&request.worker_id, |worker| {
                worker.address = request.worker_address;
                worker.spec = request.cache_spec;
                worker.heard = Instant::now();
                worker.checkpoint = Some(Checkpoint {
                    epoch: request.worker_epoch,
                    seq: applied_seq,
                });
                std::mem::replace(&mut worker.blocks, blocks)
            }))
        });
        // The old blocks are dropped after the lock has been released, so that no other task waits for this.
        drop(put?);
        Ok(ReplaceExternalKvSnapshotResponse { applied_seq })
    }

    /// Whether a worker's state is certain, that is, whether its snapshot has come and it has not been silent for too long.
    fn is_certain(&self, worker: &ReportedWorker, now: Instant) -> bool {
        worker.checkpoint.is_some() && !worker.is_silent(now, self.limits.silence_max)
    }

    /// Whether it is known which workers report: after the daemon's start, a list of them has come, or none has come for
    /// longer than a worker may be silent.
    fn is_listed(&self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.started);
        self.kept.read().is_listed || self.limits.silence_max.is_some_and(|most| elapsed > most)
    }

    /// Calls `look` for every worker whose state is certain. `look` returns the number of blocks that it has looked up.
    /// The result says two things: whether the state of all workers is certain, and whether the state of at least one
    /// is. Nothing is certain about all workers until it is known which there are.
    ///
    /// After each [`AT_ONCE`] blocks, other tasks get a turn. So the workers of one answer may be seen at different
    /// times.
    async fn look(&self, now: Instant, mut look: impl FnMut(&str, &ReportedWorker) -> usize) -> Coverage {
        let mut coverage = Coverage {
            is_exact: self.is_listed(now),
            ..Coverage::default()
        };
        let mut last: Option<String> = None;
        loop {
            {
                let kept = self.kept.read();
                let after = last.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
                let mut rest = kept.workers.range::<str, _>((after, Bound::Unbounded));
                let mut looked_up = 0;
                let stopped_at = rest.find(|(name, worker)| {
                    match self.is_certain(worker, now) {
                        true => {
                            coverage.knows_some = true;
                            looked_up += look(name, worker);
                        }
                        false => coverage.is_exact = false,
                    }
                    looked_up >= AT_ONCE
                });
                last = match stopped_at {
                    Some((name, _)) => Some(name.clone()),
                    None => return coverage,
                };
            }
            yield_now().await;
        }
    }

    /// Returns the workers that have leading blocks of a prompt, and whether the state of all workers is certain and can be
    /// judged. Looks up only the hashes before the first repeated one, because a prompt never has the same hash twice.
    pub(super) async fn prefixes(
        &self,
        hashes: &[i64],
        depth: Depth,
        now: Instant,
    ) -> (Vec<ReportedMatch>, Coverage) {
        let hashes = unrepeated(hashes);
        let (mut matches, mut all_judged) = (Vec::new(), true);
        let looking = self.look(now, |name, worker| {
            let found = depths(&worker.blocks, worker.spec.as_ref(), hashes);
            all_judged &= found.is_judged;
            let blocks = match depth {
                Depth::Usable => found.usable,
                Depth::Matched => found.matched,
            };
            if blocks > 0 {
                matches.push(ReportedMatch {
                    worker: name.to_owned(),
                    address: worker.address.clone(),
                    blocks,
                });
            }
            found.matched.try_into().unwrap_or(usize::MAX)
        });
        let mut coverage = looking.await;
        coverage.is_exact &= all_judged;
        (matches, coverage)
    }

    /// Returns the workers that have any of `hashes`, leading or not, with the hashes in each tier. `None` if the list
    /// would have more than `blocks_max` blocks.
    pub(super) async fn placements(
        &self,
        hashes: &[i64],
        blocks_max: usize,
        now: Instant,
    ) -> Option<(Vec<ExternalKvNodeMatch>, Coverage)> {
        let (mut matches, mut room) = (Vec::new(), Some(blocks_max));
        let looking = self.look(now, |name, worker| {
            let Some(left) = room else { return 0 };
            let hashes_by_tier: Vec<_> = TierPlace::ALL
                .into_iter()
                .map(|tier| placed(worker, tier, hashes))
                .filter(|placed| !placed.hashes.is_empty())
                .collect();
            let count = hashes_by_tier.iter().map(|placed| placed.hashes.len()).sum();
            room = left.checked_sub(count);
            if count > 0 {
                matches.push(ExternalKvNodeMatch {
                    worker_id: name.to_owned(),
                    address: worker.address.clone(),
                    hashes_by_tier,
                });
            }
            hashes.len()
        });
        let coverage = looking.await;
        room.map(|_| (matches, coverage))
    }
}

impl ReportedWorkers {
    /// Checks the number of a batch. Returns `None` if the batch is the next one of its worker. If the batch was
    /// applied earlier, returns the number of the last applied batch.
    fn next_batch(&self, name: &str, epoch: &str, seq: u64) -> Result<Option<u64>, BlockReportError> {
        let worker = self.workers.get(name).ok_or(BlockReportError::Unexpected)?;
        let known = worker.checkpoint.as_ref().filter(|known| known.epoch == epoch);
        let last = known.ok_or(BlockReportError::NoSnapshot)?.seq;
        match seq.checked_sub(last) {
            None | Some(0) => Ok(Some(last)),
            Some(1) => Ok(None),
            Some(_) => Err(BlockReportError::Gap {
                expected: last.saturating_add(1),
                given: seq,
            }),
        }
    }

    /// Checks that there is room for `further` more blocks of a worker.
    fn room_for(&self, name: &str, further: usize, bytes_max: usize) -> Result<(), BlockReportError> {
        let worker = self.workers.get(name).ok_or(BlockReportError::Unexpected)?;
        self.check_room(worker, worker.blocks.bytes_with(further), bytes_max)
    }

    /// Checks that there is room for `count` blocks that replace all present blocks of the worker.
    fn room_for_snapshot(&self, name: &str, count: usize, bytes_max: usize) -> Result<(), BlockReportError> {
        let worker = self.workers.get(name).ok_or(BlockReportError::Unexpected)?;
        self.check_room(worker, WorkerBlocks::default().bytes_with(count), bytes_max)
    }

    fn check_room(
        &self,
        worker: &ReportedWorker,
        bytes: usize,
        bytes_max: usize,
    ) -> Result<(), BlockReportError> {
        let others = self.bytes.saturating_sub(worker.blocks.bytes());
        let fits = others.saturating_add(bytes) <= bytes_max;
        fits.then_some(()).ok_or(BlockReportError::NoRoom)
    }
}

/// Returns the leading hashes before the first one that repeats an earlier hash.
fn unrepeated(hashes: &[i64]) -> &[i64] {
    let mut seen = HashSet::with_capacity(hashes.len());
    let end = hashes.iter().position(|hash| !seen.insert(*hash));
    hashes.get(..end.unwrap_or(hashes.len())).unwrap_or_default()
}

/// Returns the blocks of `hashes` that a worker has in a tier, with their components and tokens.
fn placed(worker: &ReportedWorker, tier: TierPlace, hashes: &[i64]) -> TierHashes {
    let mut placed = TierHashes {
        tier: tier.to_wire(),
        ..TierHashes::default()
    };
    for hash in hashes {
        let held = worker.blocks.get(*hash);
        if let Some((held, components)) = held.and_then(|held| Some((held, held.at(tier)?))) {
            placed.hashes.push(*hash);
            placed.component_masks.push(components.into());
            placed.block_sizes.push(held.tokens);
        }
    }
    placed
}
