//! Tests of publishers that restart, and of batches that come late, while batches are held.

use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{BatchCursor, BlockContent, DegradedReasons, PROBE_NAME};

use kvatlas_telemetry::labels::ResyncFailure;

use super::doubts::Scene;
use super::*;

pub(super) fn stores(first: u64) -> Vec<Event> {
    let hashes = (first..first + 3).map(SequenceHash).collect();
    vec![Event::Stored(StoredBlocks::by_sequence(None, None, hashes))]
}

pub(super) fn in_epoch(epoch: u64, seq: u64, events: Vec<Event>) -> EventBatch {
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

/// Begins the epoch 2 without its first batch, and answers the question for the missing batches.
async fn answer_next_epoch(scene: &Scene) -> ResyncOutcome {
    scene.receive(&in_epoch(2, 2, Vec::new()).encode()).await;
    let asked = scene.ask().await;
    assert!(!asked.full, "the old epoch had no blocks");
    let missing = vec![in_epoch(2, 1, Vec::new()), in_epoch(2, 2, Vec::new())];
    scene.answer(asked, missing).await
}

/// Returns the publisher's full state in the epoch `epoch`, which has no blocks.
fn full_in(epoch: u64) -> ResyncAnswer {
    ResyncAnswer {
        kind: kvatlas_core::wire::ResyncAnswerKind::Full,
        cursor: BatchCursor { epoch, seq: 1 },
        time_us: None,
        batches: Vec::new(),
    }
}

#[tokio::test]
async fn doubts_of_the_publisher_end_with_its_epoch_though_its_next_first_batch_is_lost() {
    let scene = Scene::begin().await;
    let doubts = DegradedReasons::of(DegradedReason::UpstreamGap);
    scene.hear(2, vec![Event::Doubted(doubts)]).await;
    assert_eq!(scene.reasons().await, doubts);
    assert_eq!(answer_next_epoch(&scene).await, ResyncOutcome::Exact);
    assert_eq!(scene.reasons().await, DegradedReasons::default());
}

#[tokio::test]
async fn the_late_answer_of_an_ended_process_is_no_doubt_about_the_next_one() {
    let scene = Scene::begin().await;
    let asked = scene.ask().await;
    scene.receive(&in_epoch(2, 1, Vec::new()).encode()).await;
    scene.fail(asked, ResyncFailure::CursorBehind);
    assert!(scene.reasons().await.is_empty());
    // The answer of the present process is.
    scene.fail(scene.ask().await, ResyncFailure::CursorBehind);
    assert_eq!(scene.reasons().await, DegradedReasons::of(DegradedReason::Gap));
    assert!(scene.ask().await.full);
}

#[tokio::test]
async fn doubts_of_the_publisher_end_with_its_epoch_though_nobody_answers() {
    let scene = Scene::begin().await;
    let doubts = DegradedReasons::of(DegradedReason::UpstreamGap);
    scene.hear(2, vec![Event::Doubted(doubts)]).await;
    scene.receive(&in_epoch(2, 2, Vec::new()).encode()).await;
    let asked = scene.ask().await;
    scene.give_up(asked).await;
    assert_eq!(scene.reasons().await, DegradedReasons::of(DegradedReason::Gap));
}

#[tokio::test]
async fn a_told_block_size_ends_with_its_epoch_though_the_next_first_batch_is_lost() {
    for is_full in [false, true] {
        let scene = Scene::begin().await;
        let sized = EventBatch {
            block_size: Some(BlockSize::DEFAULT),
            ..batch(2, Vec::new())
        };
        scene.receive(&sized.encode()).await;
        assert!(scene.reasons().await.is_empty());
        assert_eq!(scene.namespace().indexer.unsized_holders(), 0);
        if is_full {
            // The publisher is asked before anything of its new epoch has come.
            let asked = scene.ask().await;
            let generation = scene.trust.generation();
            let finished = scene
                .pool
                .finish_resync(&scene.holder, asked.number, full_in(2), generation);
            finished.await.unwrap();
        } else {
            answer_next_epoch(&scene).await;
        }
        assert_eq!(scene.namespace().indexer.unsized_holders(), 1, "full: {is_full}");
    }
}

#[tokio::test]
async fn a_told_block_size_ends_when_the_numbers_begin_anew() {
    let scene = Scene::begin().await;
    let sized = EventBatch {
        block_size: Some(BlockSize::DEFAULT),
        ..made_at(20, 2)
    };
    scene.receive(&sized.encode()).await;
    scene.pool.drain().await.unwrap();
    assert_eq!(scene.namespace().indexer.unsized_holders(), 0);
    scene.receive(&made_at(30, 1).encode()).await;
    scene.pool.drain().await.unwrap();
    assert_eq!(scene.namespace().indexer.unsized_holders(), 1);
}

/// A test of an engine whose hashes are not the contract's, and that is restarted with others. The holder has no blocks
/// any more.
#[tokio::test]
async fn a_foreign_chain_ends_with_its_epoch_if_the_answer_has_the_next_one_from_its_beginning() {
    let scene = Scene::begin().await;
    let mut foreign = StoredBlocks::by_sequence(None, None, vec![SequenceHash(10)]);
    foreign.content = Some(BlockContent::Tokens {
        tokens: (0..16).collect(),
        lora_name: None,
        cache_salt: None,
    });
    let removed = Event::Removed(RemovedBlocks::by_sequence(vec![SequenceHash(10)]));
    scene.hear(2, vec![Event::Stored(foreign), removed]).await;
    scene.pool.drain().await.unwrap();
    assert_eq!(scene.namespace().indexer.foreign_holders(), 1);
    assert_eq!(answer_next_epoch(&scene).await, ResyncOutcome::Exact);
    assert_eq!(scene.namespace().indexer.foreign_holders(), 0);
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

/// Time of a server's clock, in microseconds since the Unix epoch. It is far from the machine's own time.
const SERVER_US: u64 = 5_000_000_000_000;

/// Returns the frame of a holder whose publisher was last seen at `seen_us` by the server's clock.
fn seen_at(seen_us: u64) -> HolderFrame {
    HolderFrame {
        seen_us: Some(seen_us),
        ..frame(7)
    }
}

/// Restores a holder. By the machine's clock, the snapshot is new.
async fn restored(holder: &HolderFrame) -> LanePool {
    let limits = LivenessLimits {
        stale_after: Some(Duration::from_secs(60)),
        remove_after: None,
    };
    let pool = pool_with(limits, None);
    let origin = RestoreOrigin::new(StreamTrust::default().generation(), Duration::ZERO);
    pool.restore(holder, Frame::Holder(holder.clone()), origin)
        .await
        .unwrap();
    pool.drain().await.unwrap();
    pool
}

async fn is_stale_after_a_look(pool: &LanePool, namespace: &NamespaceName) -> bool {
    pool.tick(true);
    pool.drain().await.unwrap();
    let namespace = pool.namespaces.get(namespace).unwrap();
    let reasons = namespace.indexer.holders()[0].status.own_reasons();
    reasons.contains(DegradedReason::Stale)
}

#[tokio::test]
async fn restored_publishers_are_as_old_as_the_servers_clock_says() {
    const SECOND_US: u64 = 1_000_000;
    for (seen_us, is_stale) in [
        (SERVER_US - SECOND_US, false),
        (SERVER_US - 61 * SECOND_US, true),
        // The server's clock was set back, so this time says nothing.
        (SERVER_US + 3600 * SECOND_US, true),
        (0, true),
    ] {
        let holder = seen_at(seen_us);
        let pool = restored(&holder).await;
        pool.freshness().stream_clock.note(SERVER_US, now_us());
        let namespace = &holder.namespace;
        assert_eq!(
            is_stale_after_a_look(&pool, namespace).await,
            is_stale,
            "{seen_us}"
        );
    }
}

#[tokio::test]
async fn a_probe_that_a_killed_doctor_has_left_is_not_stale() {
    for (namespace, worker) in [(PROBE_NAME, "w"), ("llama", PROBE_NAME)] {
        let holder = HolderFrame {
            namespace: NamespaceName::new(namespace).unwrap(),
            worker: WorkerName::new(worker).unwrap(),
            ..seen_at(0)
        };
        let pool = restored(&holder).await;
        pool.freshness().stream_clock.note(SERVER_US, now_us());
        assert!(
            !is_stale_after_a_look(&pool, &holder.namespace).await,
            "{namespace}"
        );
    }
}

#[tokio::test]
async fn snapshots_keep_the_time_at_which_a_publisher_was_seen() {
    let seen_us = SERVER_US - 7_000_000;
    let holder = seen_at(seen_us);
    let pool = restored(&holder).await;
    let dumped = async || {
        let lanes = 0..pool.lane_count();
        for lane in lanes {
            let dump = pool.dump_next(lane, None, false, StreamGeneration::default());
            if let Some((_, dump)) = dump.await.unwrap() {
                return dump.frame.seen_us;
            }
        }
        None
    };
    // The server has not told its time yet.
    assert_eq!(dumped().await, Some(seen_us));
    pool.freshness().stream_clock.note(SERVER_US, now_us());
    assert!(!is_stale_after_a_look(&pool, &holder.namespace).await);
    let again = dumped().await.unwrap();
    // Both ways through the other clock round, and read it at another moment.
    assert!(
        (seen_us - 60_000_000..=seen_us + 1000).contains(&again),
        "{again}"
    );
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

/// Returns a scene whose holder holds a goodbye behind a gap, and the resync in which its publisher has been asked.
async fn scene_with_held_goodbye() -> (Scene, crate::lanes::ResyncBegun) {
    let scene = Scene::begin().await;
    scene.hear(3, vec![Event::Goodbye]).await;
    let asked = scene.ask().await;
    (scene, asked)
}

/// A test of a publisher that says goodbye and begins again, while the daemon holds its batches. The first batch of the
/// new epoch is lost.
#[tokio::test]
async fn a_held_goodbye_does_not_remove_a_holder_whose_next_epoch_has_begun() {
    for is_answered in [false, true] {
        let (scene, asked) = scene_with_held_goodbye().await;
        scene.receive(&in_epoch(2, 2, stores(20)).encode()).await;
        match is_answered {
            true => _ = scene.answer(asked, vec![batch(2, Vec::new())]).await,
            false => scene.give_up(asked).await,
        }
        let reasons = scene.reasons().await;
        assert!(reasons.contains(DegradedReason::Gap), "{reasons:?}");
    }
}

#[tokio::test]
async fn a_goodbye_in_an_answer_does_not_remove_a_holder_whose_next_epoch_has_begun() {
    let scene = Scene::begin().await;
    let asked = scene.ask().await;
    scene.receive(&in_epoch(2, 2, stores(20)).encode()).await;
    scene.answer(asked, vec![batch(2, vec![Event::Goodbye])]).await;
    let reasons = scene.reasons().await;
    assert!(reasons.contains(DegradedReason::Gap), "{reasons:?}");
}

#[tokio::test]
async fn a_held_goodbye_does_not_remove_a_holder_whose_next_process_lost_a_batch() {
    let (scene, _) = scene_with_held_goodbye().await;
    scene.pool.drain().await.unwrap();
    scene.lose(in_epoch(2, 1, stores(20)));
    let reasons = scene.reasons().await;
    assert!(reasons.contains(DegradedReason::Unverified), "{reasons:?}");
}

#[tokio::test]
async fn a_held_goodbye_of_the_last_process_removes_the_holder() {
    let (scene, asked) = scene_with_held_goodbye().await;
    scene.hear(4, stores(20)).await;
    scene.give_up(asked).await;
    scene.pool.drain().await.unwrap();
    assert_eq!(scene.reasons_of(0), None);
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

/// A test that a live publisher of a lower epoch contests the holder, even if its blocks have another size.
#[tokio::test]
async fn a_lower_epoch_of_another_block_size_contests_the_holder() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    assert!(scene.reasons().await.is_empty());
    let other = EventBatch {
        block_size: BlockSize::new(64).ok(),
        ..in_epoch(5, 1, stores(20))
    };
    scene.receive(&other.encode()).await;
    assert_eq!(
        scene.reasons().await,
        DegradedReasons::of(DegradedReason::Contested)
    );
    assert_eq!(scene.namespace().indexer.refused().count(None), 0);
}

/// A test of a second publisher whose epoch is too far ahead to be believed. Neither an answer of the believed
/// publisher nor its next epoch tells whose blocks the holder has.
#[tokio::test]
async fn an_epoch_that_is_not_believed_contests_the_holder() {
    let contested = DegradedReasons::of(DegradedReason::Contested);
    let ahead = in_epoch(u64::MAX / 2, 1, stores(20));
    for is_lost in [false, true] {
        let scene = Scene::begin_in(Scene::new_pool_believing(Some(Duration::from_secs(3600)))).await;
        match is_lost {
            true => scene.lose(ahead.clone()),
            false => scene.receive(&ahead.encode()).await,
        }
        scene.pool.drain().await.unwrap();
        let asked = scene.ask().await;
        assert_eq!(scene.answer(asked, Vec::new()).await, ResyncOutcome::Incomplete);
        assert_eq!(scene.reasons().await, contested);
        scene.receive(&in_epoch(2, 1, stores(10)).encode()).await;
        assert_eq!(scene.reasons().await, contested);
    }
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

/// A test that the batches of an ended epoch are no contest if a stream has kept them, as after a change of settings.
#[tokio::test]
async fn batches_of_an_ended_epoch_in_the_stream_are_no_contest() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(2, 1, stores(10)).encode()).await;
    let subject = "kvatlas.v1.events.llama.gpu-0";
    for (seq, time_us) in [(1, Some(1)), (2, Some(2)), (3, None)] {
        let kept = EventBatch {
            time_us,
            ..in_epoch(1, seq, stores(20))
        };
        let (payload, generation) = (kept.encode(), scene.trust.generation());
        let kept_for = Duration::from_secs(60);
        scene
            .pool
            .receive(subject, &payload, generation, kept_for, None)
            .await;
    }
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn a_contested_holder_whose_publishers_fell_silent_is_stale_too() {
    let contested = DegradedReasons::of(DegradedReason::Contested);
    // Every look finds that the publishers have been silent for too long.
    let limits = LivenessLimits {
        stale_after: Some(Duration::ZERO),
        remove_after: None,
    };
    let scene = Scene::begin_in(pool_with(limits, None)).await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    scene.receive(&in_epoch(5, 1, stores(20)).encode()).await;
    assert_eq!(scene.reasons().await, contested);
    scene.pool.tick(true);
    assert_eq!(scene.reasons().await, contested.with(DegradedReason::Stale));
    // The publisher that is not believed shows that it is alive.
    scene.receive(&in_epoch(5, 2, Vec::new()).encode()).await;
    assert_eq!(scene.reasons().await, contested);
}
