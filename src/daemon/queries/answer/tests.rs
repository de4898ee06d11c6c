//! Tests of answers from an index with a few holders.

use crate::shared::unbounded;
use kvatlas_config::Depth;
use kvatlas_core::hash::{BlockHash, BlockSize, HashSeed, SequenceHash, block_hash, sequence_hashes};
use kvatlas_core::index::{HolderWriter, NamespaceSettings};
use kvatlas_core::wire::{
    Event, HolderId, LAYERS_LABEL, Labels, Limit, Resumable, StoredBlocks, Tier, WorkerName,
};

use super::*;

mod ahead;
mod hinted;
mod usable;

pub(super) fn answerer() -> Answerer {
    let namespaces = unbounded(16);
    let namespace = namespaces
        .get_or_create(&NamespaceName::new("n").unwrap(), None)
        .unwrap();
    for rank in 0..2 {
        let worker = WorkerName::new("w").unwrap();
        let mut writer = namespace.indexer.register(&HolderId { worker, rank }).unwrap();
        let blocks = StoredBlocks::by_sequence(None, None, vec![SequenceHash(1)]);
        writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
        writer.status().confirm(StreamTrust::default().generation());
    }
    let subjects = Subjects::new("kvatlas").unwrap();
    Answerer::new(
        Arc::new(namespaces),
        Arc::default(),
        Arc::new(Freshness::without_events()),
        Arc::default(),
        subjects,
        WireLimits::default().into(),
    )
}

impl Answerer {
    /// Answers the request in `payload` on the query subject `subject`, in one piece.
    fn answer_query(
        &self,
        subject: &str,
        payload: &[u8],
        reply_bytes_max: usize,
    ) -> Result<Answer, WireError> {
        let (name, request) = self.read_query(subject, payload)?;
        let reply = self.answer_request(&name, &request, reply_bytes_max)?;
        Ok(Answer::to_query(name, &request, reply, reply_bytes_max))
    }
}

#[test]
fn a_batch_whose_reply_cannot_be_sent_is_given_up() {
    let query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(1)]));
    let payload = QueryRequest::Batch(vec![query; 100]).encode();
    let answer = |bytes_max| answerer().answer_query("kvatlas.v1.query.n", &payload, bytes_max);
    let whole = answer(usize::MAX).unwrap().payload;
    assert!(
        whole.len() >= 200 * HOLDER_BYTES_MIN,
        "a reply that could be sent must not be given up"
    );
    assert!(answer(whole.len()).is_ok());
    let error = answer(150 * HOLDER_BYTES_MIN).unwrap_err();
    assert_eq!(error.code, ErrorCode::TooLarge);
}

#[test]
fn the_length_of_a_status_is_known_before_it_is_made() {
    let answerer = answerer();
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    for number in 2..500 {
        let worker = WorkerName::new(&format!("worker-{number}")).unwrap();
        let id = HolderId { worker, rank: 0 };
        let _ = namespace.indexer.register(&id).unwrap();
    }
    let subject = "kvatlas.v1.status.n";
    let made = answerer
        .answer_status(subject, 0, usize::MAX)
        .unwrap()
        .payload
        .len();
    let known = answerer.status_bytes(subject);
    assert!((made / 2..=made * 2).contains(&known), "{known}, {made}");
    assert_eq!(answerer.status_bytes("kvatlas.v1.status.nobody"), 0);
}

#[test]
fn who_changes_is_counted_once_whether_or_not_the_list_is_cut() {
    let answerer = answerer();
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    let id = |rank| HolderId {
        worker: WorkerName::new("w").unwrap(),
        rank,
    };
    let key = QueryKey::SequenceHashes(vec![SequenceHash(1)]);
    let found = namespace.indexer.find_matches(&key, Search::default()).unwrap();
    // The search has not found the third holder.
    let seen = Seen::while_changing(found, vec![id(1), id(2)]);
    for (limit, shown) in [(None, 3), (Some(1), 1)] {
        let options = QueryOptions {
            limit,
            ..QueryOptions::default()
        };
        let reasons = |_: &Match<'_>, _| DegradedReasons::default();
        let (mut holders, mut total) = best_of(&seen.found, None, &options, true, reasons);
        total += add_changing(&mut holders, &seen, None, &options, &namespace.indexer);
        assert_eq!((holders.len(), total), (shown, 3));
    }
}

/// A test that answers are not certain while the daemon has not heard of every publisher. An unknown worker may hold
/// blocks.
#[test]
fn before_everybody_is_known_no_answer_is_certain() {
    let answerer = answerer();
    let ask = |namespace: &str| {
        let query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(900)]));
        let payload = QueryRequest::Single(query).encode();
        let subject = format!("kvatlas.v1.query.{namespace}");
        let answer = answerer.answer_query(&subject, &payload, usize::MAX)?;
        Ok::<_, WireError>(QueryReply::decode(&answer.payload).unwrap())
    };
    let code = |namespace| ask(namespace).unwrap_err().code;
    let status = || {
        let answer = answerer.answer_status("kvatlas.v1.status.n", 0, usize::MAX);
        let status = StatusReply::decode(&answer.unwrap().payload).unwrap();
        (status.unheard_holders, status.is_exact())
    };
    assert!(ask("n").unwrap().is_exact());
    assert_eq!(status(), (0, true));
    assert_eq!(code("other"), ErrorCode::UnknownNamespace);
    // The daemon follows the events anew.
    let generation = answerer.trust.doubt();
    for holder in answerer
        .namespace(&NamespaceName::new("n").unwrap())
        .unwrap()
        .indexer
        .holders()
    {
        holder.status.confirm(generation);
    }
    let reply = ask("n").unwrap();
    assert_eq!((reply.doubtful_holders, reply.is_exact()), (1, false));
    assert_eq!(status(), (1, false));
    assert_eq!(code("other"), ErrorCode::Unavailable);
    let refused = answerer
        .answer_status("kvatlas.v1.status.other", 0, usize::MAX)
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unavailable);
    let name = NamespaceName::new("n").unwrap();
    let key = QueryKey::SequenceHashes(vec![SequenceHash(900)]);
    let query = dialect_query(&key, None);
    let reply = answerer.answer_one(&name, &query).unwrap();
    assert!(Found::of_reply(reply, Depth::Usable).unwrap().lacks_some());
    answerer.trust.note_listed(generation);
    assert!(ask("n").unwrap().is_exact());
    assert_eq!(status(), (0, true));
    assert_eq!(code("other"), ErrorCode::UnknownNamespace);
    // The same holds during a stall.
    let stall = answerer.trust.stall();
    assert_eq!(code("other"), ErrorCode::Unavailable);
    answerer.trust.end_stall(stall);
    assert_eq!(code("other"), ErrorCode::UnknownNamespace);
}

/// A test of holders whose publishers have not told the block size. A query by tokens may not find their blocks, so
/// they are in doubt for such a query.
#[test]
fn who_cannot_be_found_by_tokens_for_want_of_a_size_is_in_doubt() {
    let answerer = answerer();
    let name = NamespaceName::new("n").unwrap();
    let doubtful = |tokens: Vec<u32>, limit| {
        let key = QueryKey::Tokens {
            tokens,
            lora_name: None,
            cache_salt: None,
        };
        let mut query = SingleQuery::new(key);
        query.options.limit = limit;
        let payload = QueryRequest::Single(query).encode();
        let answer = answerer.answer_query("kvatlas.v1.query.n", &payload, usize::MAX);
        let reply = QueryReply::decode(&answer.unwrap().payload).unwrap();
        (reply.holders.len(), reply.doubtful_holders)
    };
    let tokens: Vec<u32> = (1..=16).collect();
    assert_eq!(doubtful(tokens.clone(), None), (0, 2));
    assert_eq!(
        answerer
            .status(&answerer.namespace(&name).unwrap(), 0)
            .unsized_holders,
        2
    );
    // A holder that is found by tokens has the guessed block size.
    let worker = WorkerName::new("found").unwrap();
    let indexer = &answerer.namespace(&name).unwrap().indexer;
    let mut writer = indexer.register(&HolderId { worker, rank: 0 }).unwrap();
    let hash = kvatlas_core::hash::block_hashes(
        &tokens,
        kvatlas_core::hash::BlockSize::DEFAULT,
        kvatlas_core::hash::HashSeed::for_cache(None, None),
    );
    let chain = kvatlas_core::hash::sequence_hashes(hash).collect();
    let blocks = StoredBlocks::by_sequence(None, None, chain);
    writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
    writer.status().confirm(StreamTrust::default().generation());
    assert_eq!(doubtful(tokens.clone(), None), (1, 2));
    writer.set_size_known(true);
    assert_eq!(indexer.unsized_holders(), 2);
    writer.set_size_known(false);
    writer.retire();
    assert_eq!((indexer.unsized_holders(), doubtful(tokens, None)), (2, (0, 2)));
}

#[test]
fn chosen_blocks_are_answered_with_bounds() {
    let answerer = answerer();
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    for (worker, blocks) in [("a", 10), ("b", 5), ("c", 3)] {
        let worker = WorkerName::new(worker).unwrap();
        let mut writer = namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap();
        let hashes = (100..100 + blocks).map(SequenceHash).collect();
        let blocks = StoredBlocks::by_sequence(None, None, hashes);
        writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
    }
    let ask = |positions: &[u64], min_blocks| {
        let hashes = positions
            .iter()
            .map(|position| SequenceHash(100 + position))
            .collect();
        let positions = positions.iter().map(|position| Position::new(*position).unwrap());
        let query = SingleQuery {
            positions: Some(positions.collect()),
            options: QueryOptions {
                min_blocks,
                ..QueryOptions::default()
            },
            ..SingleQuery::new(QueryKey::SequenceHashes(hashes))
        };
        let payload = QueryRequest::Single(query).encode();
        let answer = answerer.answer_query("kvatlas.v1.query.n", &payload, usize::MAX);
        QueryReply::decode(&answer.unwrap().payload).unwrap()
    };
    let bounds = |reply: &QueryReply| -> Vec<(String, u32, u32)> {
        let bounds = |holder: &HolderMatch| {
            (
                holder.worker.to_string(),
                holder.matched_blocks,
                holder.blocks_max(),
            )
        };
        reply.holders.iter().map(bounds).collect()
    };
    let reply = ask(&[0, 4, 8, 9], 0);
    let all = [("a", 10, 10), ("b", 5, 8), ("c", 1, 4)];
    assert_eq!(
        bounds(&reply),
        all.map(|(name, least, most)| (name.to_owned(), least, most))
    );
    assert_eq!((reply.query_blocks, reply.unseen_blocks_max), (10, 0));
    // A holder that may have six blocks is kept. A holder that cannot have six is left out.
    assert_eq!(bounds(&ask(&[0, 4, 8, 9], 6)), bounds(&reply)[..2]);
    let refined = ask(&[5, 6, 7], 0);
    assert_eq!(bounds(&refined), [("a".to_owned(), 8, 8)]);
    assert_eq!(
        refined.unseen_blocks_max, 5,
        "so b holds exactly the five that it holds at least"
    );
}

#[test]
fn the_shortest_holder_is_no_shorter_than_assumed() {
    let shortest = HolderMatch::new(WorkerName::new("w").unwrap(), 0, 1);
    let bytes = rmp_serde::to_vec_named(&shortest).unwrap();
    assert_eq!(bytes.len(), HOLDER_BYTES_MIN);
}

/// A test that compares the number of doubtful holders in an answer with a simple count: over all holders that the
/// answer does not list, one by one.
#[test]
fn whoever_may_hold_more_and_is_not_listed_is_counted() {
    let answerer = answerer();
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    let (indexer, trust) = (&namespace.indexer, &answerer.trust);
    let name = |number: usize| WorkerName::new(&format!("worker-{number}")).unwrap();
    let mut writers: Vec<Option<_>> = (0..6).map(|_| None).collect();
    let mut random = fastrand::Rng::with_seed(4);
    let (mut most, mut least) = (0, u32::MAX);
    for step in 0..20_000_u64 {
        let number = random.usize(..writers.len());
        let writer = &mut writers[number];
        match (random.u8(..8), writer.as_mut()) {
            (_, None) => {
                let id = HolderId {
                    worker: name(number),
                    rank: 0,
                };
                let mut new = indexer.register(&id).unwrap();
                let blocks = StoredBlocks::by_sequence(None, None, vec![SequenceHash(1 + step % 3)]);
                new.apply(Event::Stored(blocks), Tier::DEVICE, 0);
                *writer = Some(new);
            }
            (0, _) => writer.take().into_iter().for_each(HolderWriter::retire),
            (1, Some(writer)) => _ = writer.status().degrade(DegradedReason::Gap),
            (2, Some(writer)) => _ = writer.status().degrade(DegradedReason::Stale),
            (3, Some(writer)) => _ = writer.status().recover(DegradedReason::Stale),
            (4, Some(writer)) => _ = writer.replace_reasons(DegradedReasons::default()),
            (5 | 6, Some(writer)) => writer.status().confirm(trust.generation()),
            (7, Some(writer)) if random.bool() => {
                let doubts = [DegradedReason::LooksAhead, DegradedReason::HostGap];
                let _ = writer.status().degrade(doubts[random.usize(..2)]);
            }
            _ if random.u8(..50) == 0 => _ = trust.doubt(),
            _ if random.u8(..4) == 0 => trust.note_listed(trust.generation()),
            _ => {}
        }
        let stall = (random.u8(..100) == 0).then(|| trust.stall());
        let workers: Vec<_> = (0..random.usize(..3)).map(|_| name(random.usize(..6))).collect();
        let mut query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(random.u64(1..6))]));
        query.options.workers = (!workers.is_empty()).then_some(workers);
        query.options.limit = random.bool().then(|| random.u32(..4));
        let reply = answerer.reply(&namespace, &query, true).unwrap();
        let is_unlisted = |holder: &HolderRecord| {
            let mut listed = reply.holders.iter();
            let is_asked = query
                .options
                .workers
                .as_ref()
                .is_none_or(|asked| asked.contains(&holder.id.worker));
            is_asked
                && !listed.any(|listed| (&listed.worker, listed.rank) == (&holder.id.worker, holder.id.rank))
        };
        let holders = indexer.holders();
        let doubtful = holders.iter().filter(|holder| {
            let reasons = holder.status.reasons(trust).for_query(&query.key, false);
            is_unlisted(holder) && !reasons.is_empty()
        });
        let expected = doubtful.count() + usize::from(!trust.is_listed());
        assert_eq!(reply.doubtful_holders as usize, expected, "step {step}");
        (most, least) = (
            most.max(reply.doubtful_holders),
            least.min(reply.doubtful_holders),
        );
        stall.into_iter().for_each(|stall| trust.end_stall(stall));
    }
    assert!(least == 0 && most > 4, "{least} to {most}");
}

#[test]
fn whoever_changes_while_a_search_runs_is_counted() {
    let answerer = answerer();
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    let key = QueryKey::SequenceHashes(vec![SequenceHash(7)]);
    let doubts = answerer.doubts(&namespace, &key);
    let found = || namespace.indexer.find_matches(&key, Search::default()).unwrap();
    let count = |seen: &Seen| count_doubtful(&answerer.trust, &doubts, seen, None, std::iter::empty());
    let id = HolderId {
        worker: WorkerName::new("w").unwrap(),
        rank: 1,
    };
    assert_eq!(count(&Seen::while_changing(found(), Vec::new())), 0);
    assert_eq!(count(&Seen::while_changing(found(), vec![id])), 1);
    // A holder that is degraded after the facts were read counts as well.
    let holders = namespace.indexer.holders();
    holders[0].status.degrade(DegradedReason::Gap);
    assert_eq!(count(&Seen::while_changing(found(), Vec::new())), 1);
}

/// Answerer for one namespace with blocks of 4 tokens, to which tests add holders.
struct Scene {
    answerer: Answerer,
    namespace: Arc<Namespace>,
}

impl Scene {
    fn new() -> Self {
        let answerer = answerer();
        answerer.trust.note_listed(answerer.trust.generation());
        let settings = NamespaceSettings {
            block_size: BlockSize::new(4).unwrap(),
            is_size_told: true,
            ..NamespaceSettings::default()
        };
        let name = NamespaceName::new("small").unwrap();
        let namespace = answerer
            .namespaces
            .get_or_create(&name, Some(settings.block_size));
        Self {
            namespace: namespace.unwrap(),
            answerer,
        }
    }

    /// Adds a holder of a chain of `blocks`. Each block is given by its tokens. The holder is degraded for `reasons`.
    fn add(&self, worker: &str, blocks: &[&[u32]], reasons: &[DegradedReason]) -> HolderWriter {
        let worker = WorkerName::new(worker).unwrap();
        let mut writer = self
            .namespace
            .indexer
            .register(&HolderId { worker, rank: 0 })
            .unwrap();
        let hashes: Vec<BlockHash> = blocks
            .iter()
            .map(|tokens| block_hash(tokens, HashSeed::default()))
            .collect();
        let stored = StoredBlocks::by_sequence(None, None, sequence_hashes(hashes).collect());
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
        writer.status().confirm(StreamTrust::default().generation());
        writer.set_size_known(true);
        for reason in reasons {
            writer.status().degrade(*reason);
        }
        writer
    }

    fn ask(&self, key: QueryKey, limit: Option<u32>) -> QueryReply {
        let mut query = SingleQuery::new(key);
        query.options.limit = limit;
        let payload = QueryRequest::Single(query).encode();
        let answer = self
            .answerer
            .answer_query("kvatlas.v1.query.small", &payload, usize::MAX);
        QueryReply::decode(&answer.unwrap().payload).unwrap()
    }

    /// Returns the found holders, each with its matched blocks and whether it is exact. Also returns whether the whole
    /// answer is exact.
    fn found(&self, key: &QueryKey) -> (Vec<(String, u32, bool)>, bool) {
        let reply = self.ask(key.clone(), None);
        let holders = reply
            .holders
            .iter()
            .map(|holder| (holder.worker.to_string(), holder.matched_blocks, holder.exact));
        let listed: Vec<_> = holders.collect();
        let query = dialect_query(key, None);
        let found = self.answerer.answer_one(&self.namespace.name, &query).unwrap();
        let found = Found::of_reply(found, Depth::Usable).unwrap();
        let mut same: Vec<_> = found
            .holders
            .iter()
            .map(|holder| (holder.id.worker.to_string(), holder.blocks, holder.is_exact))
            .collect();
        same.sort_by_key(|(worker, blocks, _)| (std::cmp::Reverse(*blocks), worker.clone()));
        assert_eq!(same, listed);
        assert_eq!(found.doubtful_holders, reply.doubtful_holders);
        (listed, reply.is_exact())
    }
}

fn prompt(tokens: &[u32], lora_name: Option<&str>, cache_salt: Option<&str>) -> QueryKey {
    QueryKey::Tokens {
        tokens: tokens.to_vec(),
        lora_name: lora_name.map(str::to_owned),
        cache_salt: cache_salt.map(str::to_owned),
    }
}

fn who(holders: &[(&str, u32, bool)]) -> Vec<(String, u32, bool)> {
    let owned = |(name, blocks, is_exact): &(&str, u32, bool)| ((*name).to_owned(), *blocks, *is_exact);
    holders.iter().map(owned).collect()
}

#[test]
fn what_an_engine_cannot_tell_is_uncertain_for_who_asks_for_it() {
    let scene = Scene::new();
    let tokens = [1, 2, 3, 4];
    let salts = scene.add("salts", &[&tokens], &[DegradedReason::UntoldSalts]);
    let _told = scene.add("told", &[&tokens], &[]);
    let both = who(&[("salts", 1, true), ("told", 1, true)]);
    assert_eq!(scene.found(&prompt(&tokens, None, None)), (both.clone(), true));
    assert_eq!(scene.found(&prompt(&tokens, None, Some(""))), (both, true));
    assert_eq!(scene.found(&prompt(&tokens, Some("a"), None)), (Vec::new(), true));
    assert_eq!(
        scene.found(&prompt(&tokens, None, Some("s"))),
        (Vec::new(), false)
    );
    assert_eq!(
        scene.ask(prompt(&tokens, None, Some("s")), None).doubtful_holders,
        1
    );
    salts.status().degrade(DegradedReason::UntoldAdapters);
    assert_eq!(
        scene.found(&prompt(&tokens, Some("a"), None)),
        (Vec::new(), false)
    );
    // Hashes that nobody has may be of a prompt with a salt.
    let unknown = QueryKey::SequenceHashes(vec![SequenceHash(1)]);
    assert_eq!(scene.found(&unknown), (Vec::new(), false));
    // A doubt that concerns every query also concerns this one.
    salts.status().degrade(DegradedReason::UpstreamGap);
    let doubted = who(&[("salts", 1, false), ("told", 1, true)]);
    assert_eq!(scene.found(&prompt(&tokens, None, None)), (doubted, false));
}

#[test]
fn a_doubt_about_a_tier_leaves_what_nearer_ones_have_certain() {
    let scene = Scene::new();
    let _holder = scene.add("w", &[&[1, 2, 3, 4], &[5, 6, 7, 8]], &[DegradedReason::HostGap]);
    let asked: Vec<u32> = (1..=12).collect();
    let by = |tokens: &[u32]| scene.found(&prompt(tokens, None, None));
    assert_eq!(by(&asked[..8]), (who(&[("w", 2, true)]), true));
    // Blocks after those on the device may be on the host.
    assert_eq!(by(&asked), (who(&[("w", 2, false)]), false));
    assert_eq!(by(&asked[4..]), (Vec::new(), false));
    let holder = &scene.ask(prompt(&asked, None, None), None).holders[0];
    assert!(holder.is_exact_up_to(Tier::DEVICE) && !holder.is_exact_up_to(Tier::HOST));
}
