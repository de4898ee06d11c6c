//! Tests of the answers, against an index with a few holders.

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{Capacity, IndexLimits, NamespaceSettings};
use kvatlas_core::wire::{Event, HolderId, StoredBlocks, Tier, WorkerName};

use super::*;

fn answerer() -> Answerer {
    let namespaces = Namespaces::new(
        Capacity::UNBOUNDED,
        NamespaceSettings::default(),
        Vec::new(),
        IndexLimits::default(),
        16,
    );
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
        subjects,
        WireLimits::default().into(),
    )
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
    let made = answerer.answer_status(subject, 0).unwrap().payload.len();
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
    // The third one has not been found.
    let seen = Seen::while_changing(found, vec![id(1), id(2)]);
    for (limit, shown) in [(None, 3), (Some(1), 1)] {
        let options = QueryOptions {
            limit,
            ..QueryOptions::default()
        };
        let reasons = |_: &HolderRecord| DegradedReasons::default();
        let (mut holders, mut total) = best_of(&seen.found, &options, reasons);
        total += add_changing(&mut holders, &seen, &options);
        assert_eq!((holders.len(), total), (shown, 3));
    }
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
    // Who may hold six blocks is kept, who cannot is not.
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
    let shortest = HolderMatch {
        worker: WorkerName::new("w").unwrap(),
        rank: 0,
        matched_blocks: 1,
        matched_blocks_max: None,
        device_blocks: None,
        host_blocks: None,
        exact: true,
        degraded: DegradedReasons::default(),
        dropped_out: None,
    };
    let bytes = rmp_serde::to_vec_named(&shortest).unwrap();
    assert_eq!(bytes.len(), HOLDER_BYTES_MIN);
}
