//! From a router's question to its answer.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tonic::{Code, Status};

use kvatlas_core::hash::SchemeAlgorithm;
use kvatlas_core::wire::{
    Address, ErrorCode, NamespaceName, QueryKey, WireError, instance_of_worker, is_pool,
};

use crate::daemon::admin::Readiness;
use crate::daemon::http::Source;
use crate::daemon::metrics::labels::QueryKind;
use crate::daemon::metrics::{GrpcMetrics, QueryErrorMetrics, QueryMetricsByNamespace};
use crate::daemon::queries::{Found, FoundHolder, HeavyRequest, HeavyTurns};

use super::messages::{
    ExternalKvNodeMatch, ExternalKvPrefixMatch, MatchExternalKvPrefixRequest, MatchExternalKvPrefixResponse,
    MatchExternalKvRequest, MatchExternalKvResponse, TierHashes, TierType,
};

/// Most namespaces that are searched for one prompt.
const NAMESPACES_MAX: usize = 64;
/// Blocks of all workers in one answer about tiers, at most: half a megabyte, which a client may leave lying for each of its requests.
const BLOCKS_MAX: u64 = 64 << 10;

/// The tiers of an answer. Blocks beyond the disk count as on it.
const TIERS: [TierType; 3] = [TierType::Hbm, TierType::Dram, TierType::Ssd];

/// Answers routers.
pub(super) struct Questions {
    pub(super) source: Source,
    /// The namespace that is asked about; none for all that speak SGLang's hashes.
    pub(super) namespace: Option<NamespaceName>,
    pub(super) readiness: Arc<Readiness>,
    pub(super) heavy_turns: Arc<HeavyTurns>,
    pub(super) metrics: GrpcMetrics,
    pub(super) errors: QueryErrorMetrics,
    pub(super) namespaces: QueryMetricsByNamespace,
}

/// An answer, and whether the state of all holders that it is about is certain.
#[derive(Debug, PartialEq)]
pub(super) struct Answered<T> {
    pub(super) answer: T,
    pub(super) is_exact: bool,
}

/// The blocks of a prompt that the namespaces have for certain.
#[derive(Debug, Default)]
struct Certain {
    /// Workers, each with what the deepest of its ranks has.
    workers: Vec<FoundHolder>,
    is_exact: bool,
    /// Blocks that were looked for.
    asked: u32,
    /// A namespace that was searched.
    namespace: Option<NamespaceName>,
}

impl Certain {
    /// Adds what one namespace has. Workers in doubt are left out, and so are pools: no request goes there.
    fn add(&mut self, found: Found) {
        self.is_exact &= !found.lacks_some() && found.holders.iter().all(|holder| holder.is_exact);
        self.asked = self.asked.max(found.asked_blocks);
        let mut places: HashMap<_, usize> = HashMap::new();
        let certain = found.holders.into_iter();
        for holder in certain.filter(|holder| holder.is_exact && !is_pool(&holder.id.worker)) {
            let place = *places
                .entry(holder.id.worker.clone())
                .or_insert(self.workers.len());
            match self.workers.get_mut(place) {
                None => self.workers.push(holder),
                Some(known) => join_ranks(known, holder),
            }
        }
    }

    /// The addresses of workers, each with what is reached there, the deepest first.
    fn matches(&self, metrics: &GrpcMetrics) -> Vec<ExternalKvPrefixMatch> {
        let mut deepest: HashMap<&Address, &FoundHolder> = HashMap::new();
        for worker in self.workers.iter().filter(|worker| worker.blocks > 0) {
            let Some(address) = &worker.address else {
                metrics.without_address(&worker.id.worker);
                continue;
            };
            let known = deepest.entry(address).or_insert(worker);
            if worker.blocks > known.blocks {
                *known = worker;
            }
        }
        let of_worker = |(address, worker): (&Address, &FoundHolder)| ExternalKvPrefixMatch {
            worker_address: address.as_str().to_owned(),
            matched_prefix_blocks: worker.blocks,
            worker_id: instance_of_worker(&worker.id.worker),
        };
        let mut matches: Vec<_> = deepest.into_iter().map(of_worker).collect();
        matches.sort_unstable_by(|one, other| {
            let by_depth = other.matched_prefix_blocks.cmp(&one.matched_prefix_blocks);
            by_depth.then_with(|| one.worker_address.cmp(&other.worker_address))
        });
        matches
    }
}

/// Adds what another rank of the same worker has: this protocol knows no ranks.
fn join_ranks(worker: &mut FoundHolder, rank: FoundHolder) {
    worker.blocks = worker.blocks.max(rank.blocks);
    for (known, depth) in worker.near_blocks.iter_mut().zip(rank.near_blocks) {
        *known = depth.max(*known);
    }
    worker.address = worker.address.take().or(rank.address);
}

impl Questions {
    /// Workers that have leading blocks of a prompt.
    pub(super) async fn prefix(
        &self,
        question: MatchExternalKvPrefixRequest,
    ) -> Result<Answered<MatchExternalKvPrefixResponse>, Status> {
        let mut hashes = question.hashes;
        if question.max_blocks > 0 {
            hashes.truncate(usize::try_from(question.max_blocks).unwrap_or(usize::MAX));
        }
        let certain = self.ask(&hashes).await?;
        let matches = certain.matches(&self.metrics);
        let best = matches.first().map(|best| best.matched_prefix_blocks);
        Ok(Answered {
            answer: MatchExternalKvPrefixResponse {
                matches,
                best_prefix_blocks: best.unwrap_or_default(),
                blocks_read: certain.asked,
            },
            is_exact: certain.is_exact,
        })
    }

    /// Leading blocks of a prompt that workers have, by the nearest tier that reaches so far.
    pub(super) async fn tiers(
        &self,
        question: MatchExternalKvRequest,
    ) -> Result<Answered<MatchExternalKvResponse>, Status> {
        let hashes = question.hashes;
        let certain = self.ask(&hashes).await?;
        let heavy = self.heavy(&certain)?;
        let _turn = match &heavy {
            Some(heavy) => heavy.turn().await,
            None => None,
        };
        let workers = certain.workers.iter().filter(|worker| worker.blocks > 0);
        let mut matches: Vec<_> = workers.map(|worker| tiers_of(worker, &hashes)).collect();
        matches.sort_unstable_by(|one, other| one.worker_id.cmp(&other.worker_id));
        Ok(Answered {
            answer: MatchExternalKvResponse { matches },
            is_exact: certain.is_exact,
        })
    }

    /// A place among the large answers of the namespace for one that is large.
    fn heavy(&self, certain: &Certain) -> Result<Option<HeavyRequest>, Status> {
        let work: u64 = certain
            .workers
            .iter()
            .map(|worker| u64::from(worker.blocks))
            .sum();
        if work > BLOCKS_MAX {
            let text = format!("the answer would have {work} blocks, at most {BLOCKS_MAX}; ask for fewer");
            return Err(Status::resource_exhausted(text));
        }
        let Some(namespace) = &certain.namespace else {
            return Ok(None);
        };
        let entered = self.heavy_turns.enter_if_heavy(namespace, work);
        entered.map_err(|error| self.refused(&error))
    }

    /// The blocks of a prompt that the namespaces have.
    async fn ask(&self, hashes: &[i64]) -> Result<Certain, Status> {
        if !self.readiness.may_answer() {
            let reasons = self.readiness.report().reasons().join("; ");
            let error = WireError::new(ErrorCode::Unavailable, format!("not ready: {reasons}"));
            return Err(self.refused(&error));
        }
        // What is found of a part is found of the whole.
        let hashes = hashes.iter().take(self.source.limits().query_depth_max);
        let hashes = hashes.map(|hash| hash.cast_unsigned().into());
        let key = QueryKey::SequenceHashes(hashes.collect());
        let names = self.asked();
        let mut refusal = None;
        let mut certain = Certain {
            is_exact: names.len() <= NAMESPACES_MAX,
            ..Certain::default()
        };
        for name in names.into_iter().take(NAMESPACES_MAX) {
            let begun = Instant::now();
            match self.source.find(&name, &key, None).await {
                Ok(found) => {
                    let metrics = self.namespaces.of(&name);
                    metrics.answered(QueryKind::SequenceHashes, begun.elapsed());
                    metrics.found(found.prompt());
                    certain.add(found);
                    certain.namespace = Some(name);
                }
                Err(error) => {
                    certain.is_exact = false;
                    refusal = Some(error);
                }
            }
        }
        if certain.namespace.is_some() {
            return Ok(certain);
        }
        let unknown = || {
            let text = "no events have come for a namespace that speaks SGLang's hashes: follow engines with scheme=sglang, or name a \
                        namespace (grpc.namespace)";
            WireError::new(ErrorCode::UnknownNamespace, text)
        };
        Err(self.refused(&refusal.unwrap_or_else(unknown)))
    }

    /// The namespaces that are asked about.
    fn asked(&self) -> Vec<NamespaceName> {
        match (&self.namespace, &self.source) {
            (Some(name), _) => vec![name.clone()],
            (None, Source::Here(index)) => {
                let is_sglang = |algorithm| algorithm == SchemeAlgorithm::Sglang;
                index.answerer.namespaces().speaking(is_sglang)
            }
            // A gateway is given one.
            (None, Source::Shards(_)) => Vec::new(),
        }
    }

    /// The refusal in the words of gRPC: with a code that makes the router go by load, where it is not the router's fault.
    fn refused(&self, error: &WireError) -> Status {
        self.errors.failed(error.code, &error.text);
        let code = match error.code {
            ErrorCode::UnknownNamespace | ErrorCode::Unavailable => Code::Unavailable,
            ErrorCode::TooManyRequests => Code::ResourceExhausted,
            ErrorCode::TooLarge => Code::OutOfRange,
            ErrorCode::BadRequest | ErrorCode::UnsupportedVersion => Code::InvalidArgument,
        };
        Status::new(code, error.text.clone())
    }
}

/// The blocks of a worker, by tier.
fn tiers_of(worker: &FoundHolder, hashes: &[i64]) -> ExternalKvNodeMatch {
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
            });
            before = depth;
        }
    }
    ExternalKvNodeMatch {
        worker_id: instance_of_worker(&worker.id.worker),
        address: worker
            .address
            .as_ref()
            .map_or_else(String::new, |address| address.as_str().to_owned()),
        hashes_by_tier,
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::index::NearBlocks;
    use kvatlas_core::wire::{HolderId, WorkerName};

    use super::*;

    fn holder(
        worker: &str,
        rank: u32,
        depths: [u32; 3],
        address: Option<&str>,
        is_exact: bool,
    ) -> FoundHolder {
        let [device, with_host, blocks] = depths;
        FoundHolder {
            id: HolderId {
                worker: WorkerName::new(worker).unwrap(),
                rank,
            },
            blocks,
            near_blocks: [device, with_host],
            is_exact,
            address: address.map(|address| address.parse().unwrap()),
        }
    }

    fn certain(holders: Vec<FoundHolder>, doubtful_holders: u32) -> Certain {
        let mut certain = Certain {
            is_exact: true,
            ..Certain::default()
        };
        certain.add(Found {
            block_size: 64,
            asked_blocks: 9,
            holders,
            most: NearBlocks::default(),
            foreign_holders: 0,
            doubtful_holders,
        });
        certain
    }

    fn told(certain: &Certain) -> Vec<(String, u32, String)> {
        let matches = certain.matches(&GrpcMetrics::new()).into_iter();
        matches
            .map(|found| (found.worker_address, found.matched_prefix_blocks, found.worker_id))
            .collect()
    }

    #[test]
    fn each_address_is_told_once_with_the_deepest_that_is_certain() {
        let (a, b) = (Some("http://a:30000"), Some("http://b:30000"));
        let holders = vec![
            holder("a", 0, [1, 2, 3], a, true),
            holder("a", 1, [2, 2, 2], a, true),
            holder("b_d1", 0, [4, 4, 4], b, true),
            // A worker that has come back under another name, at the same place.
            holder("b_d0", 0, [1, 1, 1], b, true),
            holder("nowhere", 0, [9, 9, 9], None, true),
            holder("_pstore", 0, [0, 0, 9], Some("http://p:1"), true),
            holder("empty", 0, [0, 0, 0], Some("http://e:1"), true),
        ];
        let all = certain(holders.clone(), 0);
        let expected = [
            ("http://b:30000".to_owned(), 4, "b.1".to_owned()),
            ("http://a:30000".to_owned(), 3, "a".to_owned()),
        ];
        assert_eq!(
            (told(&all).as_slice(), all.is_exact, all.asked),
            (&expected[..], true, 9)
        );
        assert!(!certain(holders.clone(), 1).is_exact, "others may have more");
        let doubted = holder("c", 0, [9, 9, 9], Some("http://c:1"), false);
        let some = certain([holders, vec![doubted]].concat(), 0);
        assert_eq!((told(&some).as_slice(), some.is_exact), (&expected[..], false));
    }

    #[test]
    fn tiers_have_the_blocks_behind_those_of_nearer_ones() {
        let of_tiers = |depths| {
            let found = tiers_of(&holder("b_d1", 0, depths, None, true), &[1, 2, -3, 4]);
            assert_eq!((found.worker_id.as_str(), found.address.as_str()), ("b.1", ""));
            let tiers = found.hashes_by_tier.into_iter();
            tiers.map(|tier| (tier.tier, tier.hashes)).collect::<Vec<_>>()
        };
        assert_eq!(
            of_tiers([1, 2, 4]),
            [(1, vec![1]), (2, vec![2]), (3, vec![-3, 4])]
        );
        assert_eq!(of_tiers([0, 0, 1]), [(3, vec![1])]);
        // More than was asked for is not told, whatever is found.
        assert_eq!(of_tiers([9, 9, 9]), [(1, vec![1, 2, -3, 4])]);
    }
}
