//! Tests of heavy requests: the estimate of their work, and the answering in pieces.

use kvatlas_core::hash::{Position, SequenceHash};
use kvatlas_core::wire::{ErrorCode, Event, HolderId, NamespaceName, StoredBlocks, Tier, WorkerName};

use super::super::tests::answerer;
use super::*;

#[tokio::test]
async fn a_batch_that_asks_for_what_many_hold_is_heavy_however_short_it_is() {
    let answerer = answerer();
    let name = NamespaceName::new("n").unwrap();
    let query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(1)]));
    let batch = QueryRequest::Batch(vec![query.clone(); 256]);
    // With two holders, the batch is not heavy.
    assert!(answerer.enter_if_heavy(&name, &batch).unwrap().is_none());
    let namespace = answerer.namespace(&name).unwrap();
    for number in 0..200 {
        let worker = WorkerName::new(&format!("worker-{number}")).unwrap();
        let id = HolderId { worker, rank: 0 };
        let mut writer = namespace.indexer.register(&id).unwrap();
        let blocks = StoredBlocks::by_sequence(None, None, vec![SequenceHash(1)]);
        writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
    }
    assert!(batch.encode().len() < 16 << 10);
    let heavy = answerer.enter_if_heavy(&name, &batch).unwrap().unwrap();
    let in_pieces = answerer.answer_in_pieces(&name, &batch, usize::MAX, &heavy).await;
    let AnyReply::Batch(in_pieces) = in_pieces.unwrap() else {
        panic!("a batch");
    };
    let AnyReply::Batch(at_once) = answerer.answer_request(&name, &batch, usize::MAX).unwrap() else {
        panic!("a batch");
    };
    assert_eq!(in_pieces.results.len(), at_once.results.len());
    let holders = |result: &QueryResult| match result {
        QueryResult::Reply(reply) => reply.holders.len(),
        QueryResult::Error(error) => panic!("{error:?}"),
    };
    assert!(in_pieces.results.iter().all(|result| holders(result) == 202));
    // The length of this reply is bounded as that of any other.
    let too_long = answerer.answer_in_pieces(&name, &batch, 1 << 20, &heavy).await;
    assert_eq!(too_long.unwrap_err().code, ErrorCode::TooLarge);
    // A batch about few workers is not heavy, and neither is a single query.
    let mut of_one = query.clone();
    of_one.options.workers = Some(vec![WorkerName::new("w").unwrap()]);
    let few = QueryRequest::Batch(vec![of_one; 256]);
    assert!(answerer.enter_if_heavy(&name, &few).unwrap().is_none());
    assert!(
        answerer
            .enter_if_heavy(&name, &QueryRequest::Single(query))
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_compressed_chain_is_little_work_however_the_engine_names_its_blocks() {
    /// Number of blocks in each chain of the tests. The chains have no block in common.
    const CHAIN: u64 = 1000;
    let answerer = answerer();
    let name = NamespaceName::new("n").unwrap();
    let namespace = answerer.namespace(&name).unwrap();
    let id = HolderId {
        worker: WorkerName::new("long").unwrap(),
        rank: 0,
    };
    let mut writer = namespace.indexer.register(&id).unwrap();
    for chain in 0..400 {
        let numbers = 1 + chain * CHAIN..=(chain + 1) * CHAIN;
        let hashes = numbers.clone().map(SequenceHash).collect();
        let blocks = StoredBlocks {
            // The blocks also have names of their engine.
            engine_hashes: Some(numbers.map(|number| number << 32).collect()),
            ..StoredBlocks::by_sequence(None, None, hashes)
        };
        writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
    }
    let mut query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(CHAIN)]));
    query.positions = Some(vec![Position::new(999).unwrap()]);
    let request = QueryRequest::Single(query);
    assert!(answerer.enter_if_heavy(&name, &request).unwrap().is_none());
    let reply = answerer.answer_request(&name, &request, usize::MAX);
    let AnyReply::Single(reply) = reply.unwrap() else {
        panic!("one query");
    };
    assert_eq!(reply.holders[0].matched_blocks, 1000);
}
