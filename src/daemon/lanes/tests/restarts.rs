//! Tests of publishers that restart, and of batches that come late, while batches are held.

use kvatlas_core::wire::{BatchCursor, DegradedReasons};

use super::doubts::Scene;
use super::*;

fn stores(first: u64) -> Vec<Event> {
    let hashes = (first..first + 3).map(SequenceHash).collect();
    vec![Event::Stored(StoredBlocks::by_sequence(None, None, hashes))]
}

fn in_epoch(epoch: u64, seq: u64, events: Vec<Event>) -> EventBatch {
    EventBatch {
        epoch,
        ..batch(seq, events)
    }
}

fn made_at(time_us: u64, seq: u64) -> EventBatch {
    EventBatch {
        time_us: Some(time_us),
        ..batch(seq, Vec::new())
    }
}

#[tokio::test]
async fn blocks_that_missing_batches_brought_outlast_a_question_that_nobody_answers() {
    let scene = Scene::begin().await;
    // The first batch of the new epoch is lost. The old epoch had no blocks, so the missing batches of the new one
    // suffice.
    scene.receive(&in_epoch(2, 2, stores(20)).encode()).await;
    let asked = scene.ask().await;
    assert!(!asked.full);
    let missing = vec![in_epoch(2, 1, stores(10)), in_epoch(2, 2, stores(20))];
    assert_eq!(scene.answer(asked, missing).await, ResyncOutcome::Exact);
    assert_eq!(depth(&scene.pool, 10), Some(3));
    // The connection breaks, and the publisher does not answer.
    scene.trust.doubt();
    let asked = scene.ask().await;
    scene.give_up(asked).await;
    scene.receive(&in_epoch(2, 3, Vec::new()).encode()).await;
    assert!(scene.reasons().await.is_empty());
    assert_eq!(
        (depth(&scene.pool, 10), depth(&scene.pool, 20)),
        (Some(3), Some(3))
    );
}

#[tokio::test]
async fn a_late_first_batch_of_an_epoch_does_not_drop_the_batches_that_overtook_it() {
    let scene = Scene::begin().await;
    scene.ask().await;
    for (seq, first) in [(2, 20), (1, 10)] {
        scene.receive(&in_epoch(2, seq, stores(first)).encode()).await;
    }
    assert!(scene.reasons().await.is_empty());
    assert_eq!(
        (depth(&scene.pool, 10), depth(&scene.pool, 20)),
        (Some(3), Some(3))
    );
}

#[tokio::test]
async fn batches_that_an_answer_overtook_are_no_restart() {
    let scene = Scene::begin().await;
    scene.receive(&made_at(30, 3).encode()).await;
    let asked = scene.ask().await;
    let missing = (2..=5).map(|seq| made_at(10 * seq, seq)).collect();
    assert_eq!(scene.answer(asked, missing).await, ResyncOutcome::Exact);
    for seq in 4..=6 {
        scene.receive(&made_at(10 * seq, seq).encode()).await;
    }
    let reasons = scene.reasons().await;
    assert!(reasons.is_empty(), "{reasons:?}");
}

#[tokio::test]
async fn a_dump_without_held_batches_is_not_certain() {
    let scene = Scene::begin().await;
    scene.ask().await;
    scene.hear(2, stores(10)).await;
    let generation = scene.trust.generation();
    let dumped = scene.pool.dump_next(0, None, false, generation).await.unwrap();
    let (_, dump) = dumped.unwrap();
    assert_eq!(dump.frame.seq, 1);
    // The snapshot's stream position is after the second batch, so the restarted daemon does not read it.
    let restarted = pool();
    let restored = Frame::Holder(dump.frame.clone());
    restarted
        .restore(
            &dump.frame,
            restored,
            RestoreOrigin::new(generation, Duration::ZERO),
        )
        .await
        .unwrap();
    restarted.drain().await.unwrap();
    let namespace = restarted.namespaces.get(&dump.frame.namespace).unwrap();
    let reasons = namespace.indexer.holders()[0].status.reasons(&scene.trust);
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
}

#[tokio::test]
async fn what_comes_again_after_a_goodbye_makes_no_holder() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(2, 1, stores(10)).encode()).await;
    scene
        .receive(&in_epoch(2, 2, vec![Event::Goodbye]).encode())
        .await;
    for (epoch, seq) in [(2, 1), (1, 1), (2, 2)] {
        scene.receive(&in_epoch(epoch, seq, stores(10)).encode()).await;
        scene.pool.drain().await.unwrap();
        assert_eq!(scene.reasons_of(0), None, "of batch {epoch}:{seq}");
    }
    // A publisher may have come back with the lower epoch, so the batch counts as refused.
    assert_eq!(scene.namespace().indexer.refused().count(None), 1);
    assert_eq!(scene.pool.assigned_workers(), 0);
    // A batch of the next epoch makes a holder.
    scene.receive(&in_epoch(3, 1, stores(20)).encode()).await;
    assert!(scene.reasons().await.is_empty());
    assert_eq!((depth(&scene.pool, 10), depth(&scene.pool, 20)), (None, Some(3)));
}

#[tokio::test]
async fn who_numbers_anew_after_a_goodbye_comes_back() {
    let scene = Scene::begin().await;
    scene.receive(&made_at(20, 2).encode()).await;
    let goodbye = EventBatch {
        events: vec![Event::Goodbye],
        ..made_at(30, 3)
    };
    scene.receive(&goodbye.encode()).await;
    scene.receive(&made_at(40, 1).encode()).await;
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn who_was_forgotten_by_an_operator_after_a_goodbye_comes_back() {
    let scene = Scene::begin().await;
    scene.hear(2, vec![Event::Goodbye]).await;
    let worker = &scene.holder.0;
    let of = kvatlas_core::wire::AdminHolder {
        namespace: worker.namespace.clone(),
        worker: worker.worker.clone(),
        rank: None,
    };
    scene.pool.command(&of, HolderCommand::Forget).await.unwrap();
    scene.hear(1, Vec::new()).await;
    assert!(scene.reasons().await.is_empty());
}

/// A test that the first batch of a new epoch replaces the state and ends the doubt. The answer of a search that
/// began earlier stays in doubt, because that search has seen the old state.
#[tokio::test]
async fn who_was_found_before_a_new_epoch_is_in_doubt() {
    let scene = Scene::begin().await;
    scene.hear(2, stores(10)).await;
    assert!(scene.reasons().await.is_empty());
    scene.trust.doubt();
    let namespace = scene.namespace();
    let (indexer, record) = (&namespace.indexer, namespace.indexer.holders().remove(0));
    let query = QueryKey::SequenceHashes((10..13).map(SequenceHash).collect());
    let before = indexer.doubtful_holders(&scene.trust);
    let found = indexer.find_matches(&query, kvatlas_core::index::Search::default());
    let found = found.unwrap();
    assert_eq!(found.holders().count(), 1);
    scene.receive(&in_epoch(2, 1, Vec::new()).encode()).await;
    assert!(scene.reasons().await.is_empty(), "it is certain now");
    assert!(!found.reasons(&record, &scene.trust).is_empty());
    assert!(!indexer.reasons_since(&before, &record, &scene.trust).is_empty());
}

/// A test of a publisher whose clock was ahead, and that has died. It comes back with the right time, and so with a
/// lower epoch. The holder is contested until a higher epoch begins.
#[tokio::test]
async fn a_lower_epoch_contests_the_holder_until_a_higher_one_begins() {
    let contested = DegradedReasons::of(DegradedReason::Contested);
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    assert!(scene.reasons().await.is_empty());
    scene.receive(&in_epoch(5, 1, stores(20)).encode()).await;
    assert_eq!(scene.reasons().await, contested);
    // Neither a clear nor the next batch settles whose blocks the holder has.
    scene
        .receive(&in_epoch(9, 2, vec![Event::Cleared]).encode())
        .await;
    assert_eq!(scene.reasons().await, contested);
    // An answer of the believed publisher does not settle it either.
    let asked = scene.ask().await;
    scene.receive(&in_epoch(5, 2, Vec::new()).encode()).await;
    assert_eq!(asked.cursor, BatchCursor { epoch: 9, seq: 2 });
    assert_eq!(scene.answer(asked, Vec::new()).await, ResyncOutcome::Incomplete);
    assert_eq!(scene.reasons().await, contested);
    scene.receive(&in_epoch(10, 1, stores(30)).encode()).await;
    assert!(scene.reasons().await.is_empty());
    assert_eq!((depth(&scene.pool, 10), depth(&scene.pool, 30)), (None, Some(3)));
}

/// A test that an answer with a higher epoch ends a contest. Two publishers claim the holder, and the one with the
/// lower epoch has begun a new epoch, which is higher than both.
#[tokio::test]
async fn an_answer_of_a_higher_epoch_ends_a_contest() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    scene.receive(&in_epoch(5, 1, stores(20)).encode()).await;
    let asked = scene.ask().await;
    let cursor = BatchCursor { epoch: 10, seq: 1 };
    let answer = ResyncAnswer {
        kind: kvatlas_core::wire::ResyncAnswerKind::Full,
        cursor,
        time_us: None,
        batches: vec![in_epoch(10, 1, stores(20))],
    };
    let generation = scene.trust.generation();
    let finished = scene
        .pool
        .finish_resync(&scene.holder, asked.number, answer, generation);
    assert_eq!(finished.await.unwrap(), ResyncOutcome::Exact);
    assert!(scene.reasons().await.is_empty());
    assert_eq!((depth(&scene.pool, 10), depth(&scene.pool, 20)), (None, Some(3)));
}

/// A test that held batches of an ended epoch do not count as batches of another publisher.
#[tokio::test]
async fn held_batches_of_an_ended_epoch_are_no_contest() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(1, 3, stores(10)).encode()).await;
    scene.receive(&in_epoch(2, 1, stores(20)).encode()).await;
    assert!(scene.reasons().await.is_empty());
    // The batch comes after the new epoch has begun.
    scene.receive(&in_epoch(1, 4, Vec::new()).encode()).await;
    assert_eq!(
        scene.reasons().await,
        DegradedReasons::of(DegradedReason::Contested)
    );
}
