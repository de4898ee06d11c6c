//! Search for the pods (llm-d's word for workers) that hold the keys of a pipeline.
//!
//! The keys of a prompt come in order, from its first block on, each in a command of its own. All keys that have
//! arrived together (a *part* of the pipeline) are looked up in one search. A later part may continue the prompt of the
//! previous part, or begin a new prompt. A part that ends inside a command waits for the rest (see `connection`). So does,
//! for a moment, a part of which a worker has all, and can reuse less: with the next keys it may be all. The keys do not
//! show whether they continue a prompt. But a continuation is of use only where a worker holds the previous parts and
//! more. So this is tried first, in a search that does not count as an answer. Then the part is searched as the
//! continuation, or as a new prompt.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    ErrorCode, NamespaceName, QueryKey, WireError, WorkerName, instance_among, is_pool,
};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::queries::{Found, FoundHolder, Misses, Source, searched};
use kvatlas_process::admin::Readiness;
use kvatlas_telemetry::labels::QueryKind;
use kvatlas_telemetry::{AnsweredPrompt, QueryErrorMetrics, QueryMetricsByNamespace};

use super::entry::{TIERS, field};
use super::known::KnownNames;
use super::resp::ReplyBuffer;

/// Maximum number of namespaces about which a gateway asks its shards at the same time, for one part of a pipeline.
const GATHERS_AT_ONCE: usize = 16;

/// End of a log line that tells an operator what to compare if routers never find a holder. Each of these things
/// changes llm-d's keys.
const COMPARED: &str =
    "blockSizeTokens, hashAlgorithm, hashSeed and the model's name with the namespaces here";

/// Pod (llm-d's word for a worker) that holds leading blocks of a prompt.
#[derive(Debug, PartialEq, Eq)]
struct Pod {
    /// Numbers of the prompt's leading blocks that the pod has: on the device, on device and host together, and in all
    /// tiers together.
    depths: [u32; TIERS.len()],
    /// Fields for the three tiers, encoded as in a reply. A field says that the pod holds a block in that tier.
    fields: [Vec<u8>; TIERS.len()],
}

impl Pod {
    fn depth(&self) -> u32 {
        let [.., depth] = self.depths;
        depth
    }

    /// Returns the pod's field for the block at `position`. The field names the nearest tier whose depth includes the
    /// block, where the depth of a tier counts the leading blocks on this tier and all nearer tiers. `None` if the pod
    /// does not hold all blocks up to `position`.
    fn field(&self, position: u32) -> Option<&[u8]> {
        let nearest = self.depths.iter().position(|depth| position < *depth)?;
        self.fields.get(nearest).map(Vec::as_slice)
    }
}

/// Approximate number of bytes that a [`Pod`] occupies, with its fields.
const POD_BYTES: usize = 512;

/// Pods that hold the blocks of one part of a pipeline.
#[derive(Debug, Default)]
pub(super) struct PipelinePart {
    /// Number of blocks that the prompt has before the part's first key.
    offset: usize,
    /// Whether further keys of the prompt may add blocks to this part: a pod has all of it, and can reuse fewer. With
    /// windows or states, a request goes on behind certain blocks only.
    pub(super) may_rise: bool,
    /// Pods that hold leading blocks, the one with the most blocks first.
    pods: Vec<Pod>,
    /// Answers of the namespaces, for the metrics.
    answers: Vec<NamespaceAnswer>,
}

/// Answer of a namespace about a prompt, as the metrics count it.
#[derive(Debug)]
struct NamespaceAnswer {
    name: NamespaceName,
    prompt: AnsweredPrompt,
    elapsed: Duration,
}

impl PipelinePart {
    /// Returns the approximate number of bytes that the part occupies.
    pub(super) fn bytes(&self) -> usize {
        self.pods.len() * POD_BYTES
    }

    /// Writes the reply to one key of the part, the key at position `place`. The entries come in this order: first the
    /// routers' own `guesses`, then the entries of the pods.
    pub(super) fn reply(&self, place: usize, guesses: &[impl AsRef<[u8]>], replies: &mut ReplyBuffer) {
        let position = u32::try_from(self.offset + place).unwrap_or(u32::MAX);
        let holders = self.pods.partition_point(|pod| pod.depth() > position);
        replies.list(guesses.len() + holders);
        guesses.iter().for_each(|guess| replies.text(guess.as_ref()));
        for pod in self.pods.iter().take(holders) {
            replies.raw(pod.field(position).unwrap_or_default());
        }
    }
}

/// Last prompt for which a connection has asked. Its keys may arrive in several parts.
#[derive(Debug, Default)]
pub(super) struct PromptChain {
    keys: Vec<SequenceHash>,
    /// Whether a worker holds all of the keys, also if a request can reuse only some of them. Only then is the next part of
    /// the pipeline tried as a continuation of this prompt.
    is_held: bool,
}

impl PromptChain {
    /// Notes that the next keys of the connection belong to another prompt.
    pub(super) fn end(&mut self) {
        self.keys = Vec::new();
        self.is_held = false;
    }

    /// Forgets the keys of `part`, the last part that was looked up. It will be looked up again, with more keys.
    pub(super) fn forget(&mut self, part: &PipelinePart) {
        self.keys.truncate(part.offset);
        self.is_held = part.offset > 0;
    }
}

/// Search in the namespaces with llm-d's hash schemes.
pub(super) struct Prefixes {
    source: Arc<Source>,
    known: KnownNames,
    readiness: Arc<Readiness>,
    metrics: QueryMetricsByNamespace,
    errors: QueryErrorMetrics,
    misses: Misses,
    /// Requests that all parts together may have under way at a gateway's shards, beside one each.
    gathers_beside: Semaphore,
}

impl Prefixes {
    pub(super) fn new(source: Arc<Source>, readiness: Arc<Readiness>) -> Self {
        let beside = match &*source {
            Source::Here(_) => 0,
            Source::Shards(shards) => shards.asker.gathers_max() / 4,
        };
        Self {
            gathers_beside: Semaphore::new(beside.min(Semaphore::MAX_PERMITS)),
            source,
            known: KnownNames::default(),
            readiness,
            metrics: QueryMetricsByNamespace::default(),
            errors: QueryErrorMetrics::new(),
            misses: Misses::new("llm-d's routers", COMPARED),
        }
    }

    /// Returns the pods (llm-d's word for workers) that hold `keys`. The keys begin a prompt, or continue the prompt in
    /// `chain`. Returns no pods while the daemon may not answer.
    pub(super) async fn ask(&self, chain: &mut PromptChain, keys: &[u64]) -> PipelinePart {
        if !self.readiness.may_still_answer() {
            self.errors.failed(ErrorCode::Unavailable, &"not ready");
            return PipelinePart::default();
        }
        let keys: Vec<SequenceHash> = keys.iter().copied().map(SequenceHash::from).collect();
        let names = self.names().await;
        let before = std::mem::take(&mut chain.keys);
        if std::mem::take(&mut chain.is_held) {
            let offset = before.len();
            let next = keys.get(..1).unwrap_or_default();
            if self
                .is_held_beyond(&names, offset, [before.as_slice(), next].concat())
                .await
            {
                return self.search(&names, chain, [before, keys].concat(), offset).await;
            }
        }
        self.search(&names, chain, keys, 0).await
    }

    /// Whether a worker holds more of the prompt `keys` than its first `blocks` blocks. In a gateway, the shards count this
    /// search as an answer nevertheless.
    async fn is_held_beyond(&self, names: &[NamespaceName], blocks: usize, keys: Vec<SequenceHash>) -> bool {
        let key = self.key_of(keys);
        let is_deeper = |holder: &FoundHolder| holder.matched_blocks as usize > blocks;
        let (at_once, _beside) = self.at_once(names.len());
        for names in names.chunks(at_once) {
            let searches = names.iter().map(|name| self.source.find_uncounted(name, &key));
            let mut found = join_all(searches).await.into_iter().flatten();
            if found.any(|found| found.holders.iter().any(is_deeper)) {
                return true;
            }
        }
        false
    }

    /// Reserves requests that a gateway may have under way beside the one of each part. Returns the number of namespaces
    /// that may be searched at the same time, as long as the reservation lives. If other parts have all of them, that is
    /// one.
    fn at_once(&self, names: usize) -> (usize, Option<SemaphorePermit<'_>>) {
        let more = names.min(GATHERS_AT_ONCE).saturating_sub(1);
        let more = more.min(self.gathers_beside.available_permits());
        let beside = self
            .gathers_beside
            .try_acquire_many(u32::try_from(more).unwrap_or(0));
        match beside {
            Ok(beside) => (more + 1, Some(beside)),
            Err(_) => (1, None),
        }
    }

    /// Searches for the prompt `keys`, and notes it in `chain`. The first `offset` keys came in earlier parts of the
    /// pipeline.
    async fn search(
        &self,
        names: &[NamespaceName],
        chain: &mut PromptChain,
        keys: Vec<SequenceHash>,
        offset: usize,
    ) -> PipelinePart {
        let asked = keys.len();
        let key = self.key_of(keys);
        let (holders, answers) = self.find(names, &key).await;
        let knows = |worker: &WorkerName| names.iter().any(|name| self.source.knows_worker(name, worker));
        let part = PipelinePart {
            offset,
            may_rise: holders.iter().any(|holder| may_rise(holder, asked)),
            pods: pods(&holders, knows),
            answers,
        };
        chain.is_held = holders
            .iter()
            .any(|holder| holder.matched_blocks as usize >= asked);
        if let QueryKey::SequenceHashes(keys) = key {
            chain.keys = keys;
        }
        part
    }

    /// Returns the key of a search for the prompt `keys`, as far as the limits allow.
    fn key_of(&self, mut keys: Vec<SequenceHash>) -> QueryKey {
        keys.truncate(self.source.limits().query_depth_max);
        QueryKey::SequenceHashes(keys)
    }

    /// Returns the names of the namespaces to search. None if they are not known, which is counted as an error.
    async fn names(&self) -> Vec<NamespaceName> {
        let names = self.known.of(&self.source).await;
        let names = names.unwrap_or_else(|error| {
            self.errors.failed(error.code, &error.text);
            Vec::new()
        });
        searched(&self.source, names, &self.errors).0
    }

    /// Returns the holders that have leading blocks of the prompt, from the namespaces `names`. Several namespaces may
    /// have holders: a prompt's keys belong to one model, and a model has one namespace for each tenant. Also returns the
    /// answers to count: those with holders, or else one without.
    async fn find(
        &self,
        names: &[NamespaceName],
        key: &QueryKey,
    ) -> (Vec<FoundHolder>, Vec<NamespaceAnswer>) {
        let mut all = Vec::with_capacity(names.len());
        let (at_once, _beside) = self.at_once(names.len());
        for names in names.chunks(at_once) {
            all.extend(join_all(names.iter().map(|name| self.find_in(name, key))).await);
        }
        let (mut holders, mut answers, mut empty) = (Vec::new(), Vec::new(), None);
        for (name, (found, elapsed)) in names.iter().zip(all) {
            match found {
                // The namespace has been forgotten since it was listed.
                Err(error) if error.code == ErrorCode::UnknownNamespace => {}
                Err(error) => self.errors.failed(error.code, &error.text),
                Ok(mut found) => {
                    let (name, prompt) = (name.clone(), found.prompt);
                    found.lend_addresses(|worker| self.source.addresses_of(&name, worker));
                    let answer = NamespaceAnswer {
                        name,
                        prompt,
                        elapsed,
                    };
                    match found.holders.is_empty() {
                        true => empty = empty.or(Some(answer)),
                        false => answers.push(answer),
                    }
                    holders.extend(found.holders);
                }
            }
        }
        if holders.is_empty() {
            answers.extend(empty);
            self.misses.missed(&self.source, names);
        } else {
            self.misses.found();
        }
        (holders, answers)
    }

    /// Searches one namespace. Also returns the time that it took.
    async fn find_in(&self, name: &NamespaceName, key: &QueryKey) -> (Result<Found, WireError>, Duration) {
        let begun = Instant::now();
        let found = self.source.find(name, key, None).await;
        (found, begun.elapsed())
    }

    /// Counts the answers in `part`. A part that is looked up again with more keys is not an answer.
    pub(super) fn count(&self, part: &PipelinePart) {
        for answer in &part.answers {
            let metrics = self.metrics.of(&answer.name);
            metrics.answered(QueryKind::SequenceHashes, answer.elapsed);
            metrics.found(answer.prompt);
        }
    }
}

/// Whether more keys of the prompt may add blocks to those that `holder` can reuse of the first `asked`, in all tiers or in
/// the near ones.
fn may_rise(holder: &FoundHolder, asked: usize) -> bool {
    let near = holder.near_blocks.into_iter().zip(holder.near_matched_blocks);
    let mut depths = near.chain([(holder.blocks, holder.matched_blocks)]);
    let has_less = depths.any(|(blocks, matched)| matched as usize >= asked && blocks < matched);
    has_less && !is_pool(&holder.id.worker) && holder.certain().is_some()
}

/// Returns the pods (llm-d's word for workers) that certainly hold leading blocks, the pod with the most blocks first.
/// llm-d knows no ranks, so a pod gets the depths of its rank with the most blocks. `is_known` tells whether there is a
/// worker, also one that has nothing of the prompt.
fn pods(holders: &[FoundHolder], is_known: impl Fn(&WorkerName) -> bool) -> Vec<Pod> {
    let found: HashSet<&WorkerName> = holders.iter().map(|holder| &holder.id.worker).collect();
    let is_known = |worker: &WorkerName| found.contains(worker) || is_known(worker);
    let mut reaches: HashMap<String, [u32; TIERS.len()]> = HashMap::new();
    for holder in holders.iter().filter(|holder| !is_pool(&holder.id.worker)) {
        let Some(certain) = holder.certain() else { continue };
        let known = reaches.entry(pod_of(holder, &is_known)).or_default();
        *known = certain.reach().max(*known);
    }
    let held = reaches.into_iter().map(|(pod, [depth, device, with_host])| {
        let depths = [device, with_host, depth];
        let fields = TIERS.map(|tier| in_reply(&field(&pod, tier)));
        Pod { depths, fields }
    });
    let mut pods: Vec<Pod> = held.filter(|pod| pod.depth() > 0).collect();
    pods.sort_by(|one, other| {
        other
            .depth()
            .cmp(&one.depth())
            .then_with(|| one.fields.cmp(&other.fields))
    });
    pods
}

/// Returns llm-d's name of a worker: the `IP:PORT` to which its requests go. If no address is known, returns the
/// worker's own name among the known workers. llm-d writes an IPv6 address without brackets.
fn pod_of(holder: &FoundHolder, is_known: &dyn Fn(&WorkerName) -> bool) -> String {
    let Some(address) = &holder.address else {
        return instance_among(&holder.id.worker, is_known);
    };
    let address = address.as_str();
    let bare = address.split_once("://").map_or(address, |(_, bare)| bare);
    let authority = bare.split_once('/').map_or(bare, |(authority, _)| authority);
    authority.replace(['[', ']'], "")
}

/// Returns a text in the encoding of a reply.
fn in_reply(text: &[u8]) -> Vec<u8> {
    let mut replies = ReplyBuffer::default();
    replies.text(text);
    replies.bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{Address, HolderId, worker_of_instance};

    use super::*;

    fn holder(pod: &str, rank: u32, near_blocks: [u32; 2], blocks: u32, is_exact: bool) -> FoundHolder {
        let worker = worker_of_instance(pod).unwrap();
        FoundHolder {
            id: HolderId { worker, rank },
            blocks,
            near_blocks,
            matched_blocks: blocks,
            near_matched_blocks: near_blocks,
            is_exact,
            near_exact: [is_exact; 2],
            address: None,
        }
    }

    #[test]
    fn pods_are_called_by_their_addresses() {
        let called = |name: &str, address: &str| {
            let mut holder = holder(name, 0, [1, 1], 1, true);
            holder.address = Address::new(address).ok();
            pod_of(&holder, &|_| false)
        };
        assert_eq!(called("vllm-0", "10.0.0.1:8000"), "10.0.0.1:8000");
        assert_eq!(called("vllm-0", "http://10.0.0.1:8000/v1"), "10.0.0.1:8000");
        assert_eq!(called("vllm-0", "https://[fd00::1]:8443"), "fd00::1:8443");
        assert_eq!(called("10.0.0.2:8000", ""), "10.0.0.2:8000");
    }

    fn reply(part: &PipelinePart, place: usize) -> String {
        let mut replies = ReplyBuffer::default();
        part.reply(place, &[b"guess"][..0], &mut replies);
        String::from_utf8(replies.bytes().to_vec()).unwrap()
    }

    #[test]
    fn pods_of_two_workers_are_told_apart() {
        let holders = ["gpu_0", "gpu_u0"].map(|name| FoundHolder {
            id: HolderId {
                worker: WorkerName::new(name).unwrap(),
                rank: 0,
            },
            ..holder("x", 0, [1, 1], 1, true)
        });
        assert_eq!(pods(&holders, |_| false).len(), 2);
        // The other worker is known, and has nothing of the prompt.
        let of_second = |is_known: bool| pods(&holders[1..], |worker| is_known && worker.as_str() == "gpu_0");
        let expected = in_reply(&field("gpu_u0", TIERS[0]));
        assert_eq!(of_second(true)[0].fields[0], expected);
        assert_ne!(of_second(false)[0].fields[0], expected);
    }

    #[test]
    fn tiers_are_the_nearest_that_reach_and_a_pod_is_its_deepest_rank() {
        let mut pool = holder("x", 0, [9, 9], 9, true);
        pool.id.worker = WorkerName::new("_pstore").unwrap();
        let holders = [
            holder("10.0.0.1:8000", 0, [3, 3], 3, true),
            holder("10.0.0.1:8000", 1, [1, 2], 4, true),
            holder("doubted", 0, [9, 9], 9, false),
            holder("10.0.0.2:8000", 0, [5, 5], 5, true),
            pool,
        ];
        let part = PipelinePart {
            pods: pods(&holders, |_| false),
            ..PipelinePart::default()
        };
        for (place, tier) in [(0, "gpu"), (1, "cpu"), (2, "storage"), (3, "storage")] {
            let reply = reply(&part, place);
            let one = format!("\"PodIdentifier\":\"10.0.0.1:8000\",\"DeviceTier\":\"{tier}\"");
            assert!(reply.starts_with("*2\r\n") && reply.contains(&one), "{reply}");
            assert!(
                reply.contains("10.0.0.2:8000\",\"DeviceTier\":\"gpu\""),
                "{reply}"
            );
        }
        assert!(reply(&part, 4).starts_with("*1\r\n"));
        assert_eq!(reply(&part, 5), "*0\r\n");
    }

    #[test]
    fn only_who_has_all_of_a_part_and_can_reuse_less_may_have_more_with_the_next_keys() {
        let rises = |blocks, matched_blocks, is_exact| {
            let holder = FoundHolder {
                matched_blocks,
                near_matched_blocks: [matched_blocks; 2],
                ..holder("a", 0, [blocks; 2], blocks, is_exact)
            };
            may_rise(&holder, 4)
        };
        let rises_near = |device, matched| {
            let holder = FoundHolder {
                near_matched_blocks: [matched, 4],
                ..holder("a", 0, [device, 4], 4, true)
            };
            may_rise(&holder, 4)
        };
        assert!(rises_near(2, 4), "the device has the whole part");
        assert!(!rises_near(2, 3));
        assert!(rises(0, 4, true) && rises(3, 4, true));
        assert!(!rises(4, 4, true), "a request can reuse the whole part");
        assert!(!rises(1, 3, true), "the part's last block is not there");
        assert!(!rises(0, 4, false), "doubted holders are left out in any case");
    }

    #[test]
    fn guesses_come_first() {
        let part = PipelinePart {
            offset: 3,
            may_rise: false,
            pods: pods(&[holder("a", 0, [4, 4], 4, true)], |_| false),
            answers: Vec::new(),
        };
        let mut replies = ReplyBuffer::default();
        part.reply(0, &[b"guess"], &mut replies);
        part.reply(1, &[b"guess"], &mut replies);
        let text = String::from_utf8(replies.bytes().to_vec()).unwrap();
        assert!(text.starts_with("*2\r\n$5\r\nguess\r\n$9"), "{text}");
        assert!(text.ends_with("*1\r\n$5\r\nguess\r\n"), "{text}");
    }
}
