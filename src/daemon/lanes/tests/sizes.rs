//! Tests of the block sizes that batches tell.

use super::*;

/// Batch of a worker, with the block size that the batch tells, if any.
pub(super) struct Sent {
    pub(super) worker: &'static str,
    pub(super) epoch: u64,
    pub(super) seq: u64,
    pub(super) told: Option<u32>,
    pub(super) events: Vec<Event>,
}

/// Returns a batch that stores blocks, with the block size `told` if there is one.
pub(super) fn stores(worker: &'static str, epoch: u64, told: Option<u32>, first: u64) -> Sent {
    let hashes = (first..first + 3).map(SequenceHash).collect();
    Sent {
        worker,
        epoch,
        seq: 1,
        told,
        events: vec![Event::Stored(StoredBlocks::by_sequence(None, None, hashes))],
    }
}

pub(super) async fn send(pool: &LanePool, sent: Sent) {
    let batch = EventBatch {
        epoch: sent.epoch,
        block_size: sent.told.map(|told| BlockSize::new(told).unwrap()),
        ..batch(sent.seq, sent.events)
    };
    let worker = WorkerName::new(sent.worker).unwrap();
    pool.dispatch(&frame(1).namespace, worker, &batch.encode(), never())
        .await
        .unwrap();
    pool.drain().await.unwrap();
}

/// Returns the block size of the namespace, and the number of blocks of each worker.
fn known(pool: &LanePool) -> (u32, Vec<(String, u64)>) {
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let holders = namespace.indexer.holders();
    let of = |holder: &Arc<kvatlas_core::index::HolderRecord>| {
        (holder.id.worker.to_string(), holder.status.blocks.load())
    };
    let mut holders: Vec<_> = holders.iter().map(of).collect();
    holders.sort();
    (namespace.indexer.settings().block_size.as_u32(), holders)
}

fn has(worker: &str, blocks: u64) -> (String, u64) {
    (worker.to_owned(), blocks)
}

#[tokio::test]
async fn a_namespace_has_the_block_size_that_its_first_batch_tells() {
    let pool = pool();
    send(&pool, stores("a", 1, Some(64), 10)).await;
    assert_eq!(known(&pool), (64, vec![has("a", 3)]));
    // Two other sizes, and a batch without a size, which is taken to have the configured one.
    for told in [Some(32), Some(16), None] {
        send(&pool, stores("b", 1, told, 20)).await;
        assert_eq!(known(&pool), (64, vec![has("a", 3)]), "{told:?}");
    }
    send(&pool, stores("b", 1, Some(64), 20)).await;
    assert_eq!(known(&pool), (64, vec![has("a", 3), has("b", 3)]));
}

#[tokio::test]
async fn blocks_of_a_batch_that_says_nothing_have_the_size_of_the_configuration() {
    let pool = pool();
    send(&pool, stores("a", 1, None, 10)).await;
    send(&pool, stores("b", 1, Some(64), 20)).await;
    assert_eq!(known(&pool), (16, vec![has("a", 3)]));
    send(&pool, stores("b", 1, Some(16), 20)).await;
    assert_eq!(known(&pool), (16, vec![has("a", 3), has("b", 3)]));
}

#[tokio::test]
async fn when_all_holders_have_left_another_block_size_may_come() {
    let pool = pool();
    send(&pool, stores("a", 1, Some(64), 10)).await;
    let goodbye = Sent {
        seq: 2,
        events: vec![Event::Goodbye],
        ..stores("a", 1, Some(64), 10)
    };
    send(&pool, goodbye).await;
    send(&pool, stores("b", 1, Some(32), 20)).await;
    assert_eq!(known(&pool), (32, vec![has("b", 3)]));
}

#[tokio::test]
async fn an_engine_that_is_restarted_with_another_block_size_leaves_nothing_behind() {
    let pool = pool();
    for worker in ["a", "b"] {
        send(&pool, stores(worker, 2, Some(16), 10)).await;
    }
    // A late batch of a process that has ended already.
    send(&pool, stores("a", 1, Some(64), 20)).await;
    assert_eq!(known(&pool), (16, vec![has("a", 3), has("b", 3)]));
    send(&pool, stores("a", 3, Some(64), 20)).await;
    assert_eq!(known(&pool), (16, vec![has("b", 3)]));
    // A redelivered batch of the ended process makes no holder.
    send(&pool, stores("a", 2, Some(16), 10)).await;
    assert_eq!(known(&pool), (16, vec![has("b", 3)]));
    send(&pool, stores("b", 3, Some(64), 20)).await;
    assert_eq!(known(&pool), (16, vec![]));
    // The last holder with the old size has been removed.
    let next = Sent {
        seq: 2,
        ..stores("a", 3, Some(64), 20)
    };
    send(&pool, next).await;
    let (size, holders) = known(&pool);
    assert_eq!((size, holders.len()), (64, 1));
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let reasons = namespace.indexer.holders()[0].status.own_reasons();
    assert!(
        reasons.contains(DegradedReason::Gap),
        "its first batch is asked for"
    );
}

/// Restores the holders of a pool in another one.
async fn restore_all(before: &LanePool, after: &LanePool) {
    for lane in 0..before.lane_count() {
        let mut position = None;
        while let Some((next, dump)) = before.dump_next(lane, position, true, never()).await.unwrap() {
            position = Some(next);
            let holder = dump.frame.clone();
            after
                .restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
                .await
                .unwrap();
            for payload in dump.batches() {
                after
                    .restore(&holder, Frame::Batch(payload), unconfirmed())
                    .await
                    .unwrap();
            }
        }
    }
    after.drain().await.unwrap();
}

fn unsized_holders(pool: &LanePool) -> u32 {
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    namespace.indexer.unsized_holders()
}

#[tokio::test]
async fn a_told_block_size_outlasts_a_restart_with_any_default() {
    for told in [16, 64] {
        for default in [16, 32, 64] {
            let (before, after) = (pool(), pool_with_default_size(default));
            send(&before, stores("a", 1, Some(told), 10)).await;
            restore_all(&before, &after).await;
            assert_eq!(known(&after), (told, vec![has("a", 3)]), "default {default}");
            assert_eq!(unsized_holders(&after), 0, "default {default}");
            let next = Sent {
                seq: 2,
                ..stores("a", 1, Some(told), 20)
            };
            send(&after, next).await;
            assert_eq!(known(&after), (told, vec![has("a", 6)]), "default {default}");
        }
    }
}

#[tokio::test]
async fn a_guessed_block_size_is_still_a_guess_after_a_restart() {
    let before = pool();
    send(&before, stores("guessed", 1, None, 20)).await;
    let same = pool();
    restore_all(&before, &same).await;
    assert_eq!(known(&same), (16, vec![has("guessed", 3)]));
    assert_eq!(unsized_holders(&same), 1);
    // Under another default, the blocks have another size than a batch without a size has now.
    let other = pool_with_default_size(32);
    restore_all(&before, &other).await;
    assert_eq!(known(&other), (32, vec![has("guessed", 0)]));
    // So they do not fit to a size that another publisher has told, either.
    let told = pool_with_default_size(32);
    send(&told, stores("told", 1, Some(16), 10)).await;
    restore_all(&before, &told).await;
    assert_eq!(known(&told), (16, vec![has("guessed", 0), has("told", 3)]));
}

#[tokio::test]
async fn a_process_with_another_block_size_is_doubtful_as_long_as_the_one_before_it_goes_on() {
    let pool = pool();
    // The epochs lie ahead of the clock, so that batches without times count as made after all that was said.
    let before = kvatlas_client::unix_time_us() + 3_600_000_000;
    send(&pool, stores("a", 1, Some(16), 10)).await;
    send(&pool, stores("w", before, Some(16), 20)).await;
    for seq in 1..4 {
        for (epoch, told) in [(before + 1, 32), (before, 16)] {
            let sent = stores("w", epoch, Some(told), 20);
            send(&pool, Sent { seq: seq + 1, ..sent }).await;
            let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
            assert_eq!(known(&pool), (16, vec![has("a", 3)]), "{seq} {told}");
            assert_eq!(namespace.indexer.refused().count(None), 1);
        }
    }
}
