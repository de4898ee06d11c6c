//! Answers to the questions of SGLang's routers: which workers have leading blocks of a prompt.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

// A namespace can have hundreds of workers. Hashing their names and addresses by SipHash takes a tenth of an answer's
// time.
use hashbrown::HashMap;
use tonic::{Code, Status};

use kvatlas_core::hash::SchemeAlgorithm;
use kvatlas_core::wire::{
    Address, ErrorCode, ModelKey, NamespaceName, QueryKey, WireError, WorkerName, instance_among, is_pool,
};

use crate::queries::{Found, FoundHolder, HeavyRequest, HeavyTurns, Misses, Source, searched};
use kvatlas_config::Depth;
use kvatlas_process::admin::Readiness;
use kvatlas_telemetry::labels::QueryKind;
use kvatlas_telemetry::{GrpcMetrics, QueryErrorMetrics, QueryMetricsByNamespace};

use super::messages::{
    ExternalKvNodeMatch, ExternalKvPrefixMatch, MatchExternalKvPrefixRequest, MatchExternalKvPrefixResponse,
    MatchExternalKvRequest, MatchExternalKvResponse, TierHashes, TierType,
};
use super::reports::{BlockReports, Coverage, ReportedMatch};

/// Maximum number of blocks, of all workers together, in one answer that lists tiers: about a megabyte. Each request of
/// a slow client can keep that much in memory.
const BLOCKS_MAX: u32 = 64 << 10;

/// The tiers of an answer, the nearest first. Blocks beyond the disk count as blocks on the disk.
const TIERS: [TierType; 3] = [TierType::Hbm, TierType::Dram, TierType::Ssd];

/// Answerer of the questions of SGLang's routers.
pub(super) struct Questions {
    pub(super) source: Arc<Source>,
    /// Namespace that is searched. `None` means all namespaces with SGLang's hashes.
    pub(super) namespace: Option<NamespaceName>,
    /// Workers whose blocks are reported over gRPC. `None` if reports are not taken.
    pub(super) reports: Option<Arc<BlockReports>>,
    /// Number of blocks that answers tell about a worker: those that a request can reuse, or those that full attention
    /// has.
    pub(super) depth: Depth,
    pub(super) readiness: Arc<Readiness>,
    pub(super) heavy_turns: Arc<HeavyTurns>,
    pub(super) metrics: GrpcMetrics,
    pub(super) errors: QueryErrorMetrics,
    pub(super) namespaces: QueryMetricsByNamespace,
    pub(super) misses: Misses,
}

/// Answer, with a note whether the state of all holders concerned is certain. `is_exact` is `None` if the answer is not
/// about holders.
#[derive(Debug, PartialEq)]
pub(super) struct AnswerWithCertainty<T> {
    pub(super) answer: T,
    pub(super) is_exact: Option<bool>,
}

/// Result of the searches for a prompt in all searched namespaces. It lists each holder only with those tiers whose
/// state is certain.
#[derive(Debug, Default)]
struct Certain {
    /// Workers of the searched namespaces. A worker is listed once for each of its addresses, with the numbers of the
    /// rank at that address that has the most blocks.
    workers: Vec<FoundHolder>,
    /// Names by which gateways call the workers, in the same order.
    names: Vec<String>,
    /// Workers whose blocks are reported over gRPC.
    reported: Vec<ReportedMatch>,
    is_exact: bool,
    /// Number of blocks of the prompt that were looked for.
    asked: u32,
    /// Namespace of the last search that succeeded. `None` if no search has succeeded.
    namespace: Option<NamespaceName>,
}

impl Certain {
    /// Adds the holders of one namespace, each with the tiers whose state is certain. Pools (caches that workers share)
    /// are left out, because no request can be sent to a pool.
    fn add(&mut self, found: &Found) {
        self.is_exact &= !found.lacks_some() && found.holders.iter().all(|holder| holder.is_exact);
        self.asked = self.asked.max(found.prompt.asked_blocks);
        let mut places: HashMap<_, usize> = HashMap::new();
        let certain = found.holders.iter().filter_map(FoundHolder::certain);
        for holder in certain.filter(|holder| !is_pool(&holder.id.worker)) {
            let key = (holder.id.worker.clone(), holder.address.clone());
            let place = *places.entry(key).or_insert(self.workers.len());
            match self.workers.get_mut(place) {
                None => self.workers.push(holder),
                Some(known) if holder.reach() > known.reach() => *known = holder,
                Some(_) => {}
            }
        }
    }

    /// Names the workers. `is_known` tells whether there is a worker, also one that has nothing of the prompt: it
    /// decides by which name another worker goes.
    fn name_all(&mut self, is_known: impl Fn(&WorkerName) -> bool) {
        let workers = || self.workers.iter().map(|holder| &holder.id.worker);
        let found = LazyCell::new(|| workers().collect::<HashSet<_>>());
        let is_known = |worker: &WorkerName| is_known(worker) || found.contains(worker);
        let names = workers()
            .map(|worker| instance_among(worker, &is_known))
            .collect();
        drop(found);
        self.names = names;
    }

    /// Returns each address once, with the worker at that address that has the most leading blocks. The workers are
    /// sorted by their number of leading blocks, the largest first. Also returns whether all workers with blocks are
    /// listed: workers without an address are left out, and counted in `metrics`.
    fn matches(&self, metrics: &GrpcMetrics) -> (Vec<ExternalKvPrefixMatch>, bool) {
        let found = self.workers.iter().zip(&self.names);
        let found = found.filter(|(worker, _)| worker.blocks > 0);
        let found = found.map(|(worker, name)| ReportedMatch {
            worker: name.clone(),
            address: url_of(worker),
            blocks: worker.blocks,
        });
        let mut deepest: HashMap<String, (u32, String)> = HashMap::new();
        let mut lists_all = true;
        for worker in found.chain(self.reported.iter().cloned()) {
            if worker.address.is_empty() {
                metrics.without_address(&worker.worker);
                lists_all = false;
                continue;
            }
            let known = deepest.entry(worker.address).or_default();
            if worker.blocks > known.0 {
                *known = (worker.blocks, worker.worker);
            }
        }
        let of_worker = |(worker_address, (matched_prefix_blocks, worker_id))| ExternalKvPrefixMatch {
            worker_address,
            matched_prefix_blocks,
            worker_id,
        };
        let mut matches: Vec<_> = deepest.into_iter().map(of_worker).collect();
        matches.sort_unstable_by(|one, other| {
            let by_depth = other.matched_prefix_blocks.cmp(&one.matched_prefix_blocks);
            by_depth.then_with(|| one.worker_address.cmp(&other.worker_address))
        });
        (matches, lists_all)
    }
}

/// Returns the URL under which a router knows the worker. A bare `HOST:PORT` gets the scheme `http`. Empty if the
/// worker has no address.
fn url_of(worker: &FoundHolder) -> String {
    let address = worker.address.as_ref().map(Address::as_str);
    url_at(address.unwrap_or_default())
}

fn url_at(address: &str) -> String {
    match address {
        "" => String::new(),
        url if url.contains("://") => url.to_owned(),
        authority => format!("http://{authority}"),
    }
}

impl Questions {
    /// Returns the workers that have leading blocks of a prompt, each with the number of these blocks.
    pub(super) async fn prefix(
        &self,
        question: MatchExternalKvPrefixRequest,
    ) -> Result<AnswerWithCertainty<MatchExternalKvPrefixResponse>, Status> {
        let mut hashes = question.hashes;
        if question.max_blocks > 0 {
            hashes.truncate(usize::try_from(question.max_blocks).unwrap_or(usize::MAX));
        }
        let is_whole = self.cut(&mut hashes);
        let (reported, coverage) = match &self.reports {
            None => Default::default(),
            Some(reports) => reports.prefixes(&hashes, self.depth, Instant::now()).await,
        };
        let mut certain = self.ask(&hashes, coverage).await?;
        certain.reported = self.untold_by_events(reported, |found| &found.address);
        let (matches, lists_all) = certain.matches(&self.metrics);
        let best = matches.first().map(|best| best.matched_prefix_blocks);
        Ok(AnswerWithCertainty {
            answer: MatchExternalKvPrefixResponse {
                matches,
                best_prefix_blocks: best.unwrap_or_default(),
                blocks_read: certain.asked,
            },
            is_exact: Some(certain.is_exact && lists_all && is_whole),
        })
    }

    /// Returns the blocks of a prompt that each worker has, by tier. For workers in the index, these are leading
    /// blocks. Each is listed once, under the nearest tier whose depth includes it. The depth of a tier counts the
    /// leading blocks on this tier and all nearer tiers. For workers that report over gRPC, each block is listed under
    /// every tier that has it.
    pub(super) async fn tiers(
        &self,
        question: MatchExternalKvRequest,
    ) -> Result<AnswerWithCertainty<MatchExternalKvResponse>, Status> {
        let mut hashes = question.hashes;
        let is_whole = self.cut(&mut hashes);
        let (reported, coverage) = self.placements(&hashes).await?;
        let certain = self.ask(&hashes, coverage).await?;
        let reported = self.untold_by_events(reported, |found| &found.address);
        let heavy = self.heavy(&certain, &reported)?;
        let _turn = match &heavy {
            Some(heavy) => heavy.turn().await,
            None => None,
        };
        let workers = certain.workers.iter().zip(certain.names);
        let workers = workers.filter(|(worker, _)| worker.blocks > 0);
        let mut matches: Vec<_> = workers
            .map(|(worker, name)| tiers_of(worker, name, &hashes))
            .collect();
        matches.extend(reported);
        matches.sort_unstable_by(|one, other| {
            (&one.worker_id, &one.address).cmp(&(&other.worker_id, &other.address))
        });
        Ok(AnswerWithCertainty {
            answer: MatchExternalKvResponse { matches },
            is_exact: Some(certain.is_exact && is_whole),
        })
    }

    /// Cuts the hashes to the longest query that is allowed. Returns whether nothing was cut off. If something was, an
    /// answer is not exact, because workers may have blocks behind the cut.
    fn cut(&self, hashes: &mut Vec<i64>) -> bool {
        let asked = hashes.len();
        hashes.truncate(self.source.limits().query_depth_max);
        hashes.len() == asked
    }

    /// Returns the tiers in which workers that report over gRPC have `hashes`, and how certain the state of these
    /// workers is.
    async fn placements(&self, hashes: &[i64]) -> Result<(Vec<ExternalKvNodeMatch>, Coverage), Status> {
        let Some(reports) = &self.reports else {
            return Ok(Default::default());
        };
        let blocks_max = usize::try_from(BLOCKS_MAX).unwrap_or(usize::MAX);
        let hashes = each_once(hashes);
        let found = reports.placements(&hashes, blocks_max, Instant::now()).await;
        found.ok_or_else(|| too_many(format_args!("more than {BLOCKS_MAX}")))
    }

    /// Leaves out each of the `reported` workers that has the same address as a worker in the index. Such a report may
    /// be outdated: if nobody corrects a report any more, it still looks as certain as a new one. So the events count
    /// instead.
    fn untold_by_events<T>(&self, mut reported: Vec<T>, address: impl Fn(&T) -> &str) -> Vec<T> {
        let (Some(name), Source::Here(index)) = (&self.namespace, &*self.source) else {
            return reported;
        };
        if reported.is_empty() {
            return reported;
        }
        if let Some(namespace) = index.answerer.namespaces().get(name) {
            let holders = namespace.indexer.holders();
            let workers = holders.iter().filter(|holder| !is_pool(&holder.id.worker));
            let addresses = workers.filter_map(|holder| holder.status.profile().address);
            let told: HashSet<String> = addresses.map(|address| url_at(address.as_str())).collect();
            reported.retain(|found| !told.contains(&url_at(address(found))));
        }
        reported
    }

    /// Registers this answer in the queue of heavy requests if it lists many blocks. Returns `None` if it lists few. A
    /// namespace has one queue, in which answers are made one after the other. Fails if the answer lists more than
    /// `BLOCKS_MAX` blocks, or if too much work waits.
    fn heavy(
        &self,
        certain: &Certain,
        reported: &[ExternalKvNodeMatch],
    ) -> Result<Option<HeavyRequest>, Status> {
        let blocks = certain.workers.iter().map(|worker| u64::from(worker.blocks));
        let tiers = reported.iter().flat_map(|found| &found.hashes_by_tier);
        let work = blocks.sum::<u64>() + tiers.map(|tier| tier.hashes.len() as u64).sum::<u64>();
        if work > u64::from(BLOCKS_MAX) {
            return Err(too_many(work));
        }
        let Some(namespace) = certain.namespace.as_ref().or(self.namespace.as_ref()) else {
            return Ok(None);
        };
        let entered = self.heavy_turns.enter_if_heavy(namespace, work);
        entered.map_err(|error| self.refused(&error))
    }

    /// Searches the namespaces for a prompt's blocks. `reports` says whether the state of the workers that report over
    /// gRPC is certain. If it is not, the result is not exact either.
    async fn ask(&self, hashes: &[i64], reports: Coverage) -> Result<Certain, Status> {
        if !self.readiness.may_answer() {
            let reasons = self.readiness.report().reasons().join("; ");
            let error = WireError::new(ErrorCode::Unavailable, format!("not ready: {reasons}"));
            return Err(self.refused(&error));
        }
        let sequence = hashes.iter().map(|hash| hash.cast_unsigned().into());
        let key = QueryKey::SequenceHashes(sequence.collect());
        // Found before the names. A namespace that appears meanwhile may be missing in them.
        let asks_all = self.asks_all();
        let (names, is_whole) = searched(&self.source, self.asked(), &self.errors);
        let mut refusal = None;
        let mut certain = Certain {
            is_exact: is_whole && reports.is_exact && asks_all,
            asked: if reports.knows_some {
                u32::try_from(hashes.len()).unwrap_or(u32::MAX)
            } else {
                0
            },
            ..Certain::default()
        };
        for name in &names {
            let begun = Instant::now();
            match self.source.find(name, &key, None).await {
                Ok(mut found) => {
                    let metrics = self.namespaces.of(name);
                    metrics.answered(QueryKind::SequenceHashes, begun.elapsed());
                    metrics.found(found.prompt);
                    found.lend_addresses(|worker| self.source.addresses_of(name, worker));
                    certain.add(&found);
                    certain.namespace = Some(name.clone());
                }
                Err(error) => {
                    // An unknown namespace has no workers other than the reported ones, so the answer stays exact.
                    certain.is_exact &= reports.knows_some && error.code == ErrorCode::UnknownNamespace;
                    refusal = Some(error);
                }
            }
        }
        certain.name_all(|worker| names.iter().any(|name| self.source.knows_worker(name, worker)));
        if !certain.workers.is_empty() {
            self.misses.found();
        } else if certain.namespace.is_some() && !hashes.is_empty() {
            self.misses.missed(&self.source, &names);
        }
        if certain.namespace.is_some() || reports.knows_some {
            return Ok(certain);
        }
        let unknown = || {
            let text = "no events have come for a namespace that speaks SGLang's hashes: follow engines with scheme=sglang, or name a \
                        namespace (grpc.namespace)";
            WireError::new(ErrorCode::UnknownNamespace, text)
        };
        Err(self.refused(&refusal.unwrap_or_else(unknown)))
    }

    /// Returns the names of the namespaces that must be searched.
    fn asked(&self) -> Vec<NamespaceName> {
        match (&self.namespace, &*self.source) {
            (Some(name), _) => vec![name.clone()],
            (None, Source::Here(index)) => {
                let is_sglang = |algorithm| algorithm == SchemeAlgorithm::Sglang;
                index.answerer.namespaces().speaking(is_sglang)
            }
            // A gateway always has a configured namespace.
            (None, Source::Shards(_)) => Vec::new(),
        }
    }

    /// Whether the list of [`Self::asked`] is complete, that is, whether no other namespace may have blocks that the
    /// router asks about. Must be called before that list is made.
    fn asks_all(&self) -> bool {
        let is_sglang = |name: &NamespaceName| {
            let chains = ModelKey::of_namespace(name).and_then(|model| model.chains());
            chains.is_some_and(|chains| chains.algorithm() == SchemeAlgorithm::Sglang)
        };
        self.namespace.is_some() || (self.source.knows_all_names() && !self.source.lacks_any(is_sglang))
    }

    /// Turns an error into gRPC's status, and counts it. The status has a code after which the router chooses a worker by
    /// its load, and does not need an answer. The query is made here, so it is not the router's fault if a shard of
    /// another version refuses the query.
    fn refused(&self, error: &WireError) -> Status {
        self.errors.failed(error.code, &error.text);
        Status::new(code_of(error.code), error.text.clone())
    }
}

/// Returns gRPC's code for an error. After each of these codes the router goes on without the answer.
fn code_of(code: ErrorCode) -> Code {
    match code {
        ErrorCode::UnknownNamespace
        | ErrorCode::Unavailable
        | ErrorCode::BadRequest
        | ErrorCode::UnsupportedVersion => Code::Unavailable,
        ErrorCode::TooManyRequests => Code::ResourceExhausted,
        ErrorCode::TooLarge => Code::OutOfRange,
    }
}

/// Returns the hashes in their order, without repetitions.
fn each_once(hashes: &[i64]) -> Vec<i64> {
    let mut seen = HashSet::new();
    let first = hashes.iter().filter(|hash| seen.insert(**hash));
    first.copied().collect()
}

fn too_many(blocks: impl std::fmt::Display) -> Status {
    let text = format!("the answer would have {blocks} blocks, at most {BLOCKS_MAX}; ask for fewer");
    Status::resource_exhausted(text)
}

/// Returns a worker's leading blocks by tier. Each is listed under the nearest tier whose depth includes it. The depth
/// of a tier counts the leading blocks on this tier and all nearer tiers.
fn tiers_of(worker: &FoundHolder, name: String, hashes: &[i64]) -> ExternalKvNodeMatch {
    let [device, with_host] = worker.near_blocks;
    let mut before = 0;
    let mut hashes_by_tier = Vec::new();
    for (tier, depth) in TIERS.into_iter().zip([device, with_host, worker.blocks]) {
        let depth = usize::try_from(depth).unwrap_or(usize::MAX).min(hashes.len());
        let own = hashes.get(before..depth).unwrap_or_default();
        if !own.is_empty() {
            hashes_by_tier.push(TierHashes {
                tier: tier.into(),
                hashes: own.to_vec(),
                ..TierHashes::default()
            });
            before = depth;
        }
    }
    ExternalKvNodeMatch {
        worker_id: name,
        address: url_of(worker),
        hashes_by_tier,
    }
}

#[cfg(test)]
mod tests;
