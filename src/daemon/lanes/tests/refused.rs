//! Publishers whose batches are dropped. Their blocks are unknown, so an answer must not say that they have none.

use super::sizes::{Sent, send, stores};
use super::*;

fn named(name: &str) -> WorkerName {
    WorkerName::new(name).unwrap()
}

/// Returns the number of refused holders: of all workers, of `a` and of `b`.
fn refused(pool: &LanePool) -> (usize, [usize; 2]) {
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let of = |name: &str| namespace.indexer.refused().count(Some(&[named(name)]));
    (namespace.indexer.refused().count(None), ["a", "b"].map(of))
}

const NOBODY: (usize, [usize; 2]) = (0, [0, 0]);
const B_ALONE: (usize, [usize; 2]) = (1, [0, 1]);

/// Returns a pool that knows a worker `a`.
async fn pool_of_a(settings: LaneSettings) -> LanePool {
    let pool = LanePool::start(&settings, Arc::new(namespaces())).unwrap();
    send(&pool, stores("a", 1, None, 10)).await;
    assert_eq!(refused(&pool), NOBODY);
    pool
}

/// Returns settings with which a holder is removed after the given silence.
fn removing_after(silence: Duration) -> LaneSettings {
    let limits = LivenessLimits {
        stale_after: None,
        remove_after: Some(silence),
    };
    LaneSettings {
        liveness: LivenessSettings {
            default: limits,
            overrides: HashMap::new(),
        },
        ..settings()
    }
}

async fn send_garbage(pool: &LanePool, worker: &str) {
    pool.dispatch(&frame(1).namespace, named(worker), b"garbage", never())
        .await
        .unwrap();
    pool.drain().await.unwrap();
}

#[tokio::test]
async fn a_publisher_whose_blocks_have_another_size_is_doubtful() {
    let pool = pool_of_a(settings()).await;
    // The publisher counts as one refused holder until one of its batches is taken.
    for epoch in [1, 1, 2] {
        send(&pool, stores("b", epoch, Some(64), 20)).await;
        assert_eq!(refused(&pool), B_ALONE);
    }
    send(&pool, stores("b", 3, Some(16), 20)).await;
    assert_eq!(refused(&pool), NOBODY);
    // The holder is removed for a process with another block size. Then that process leaves.
    send(&pool, stores("b", 4, Some(64), 20)).await;
    assert_eq!(refused(&pool), B_ALONE);
    let goodbye = Sent {
        seq: 2,
        events: vec![Event::Goodbye],
        ..stores("b", 4, Some(64), 20)
    };
    send(&pool, goodbye).await;
    assert_eq!(refused(&pool), NOBODY);
    // A late batch of a process that had ended before.
    let late = EventBatch {
        epoch: 3,
        block_size: Some(BlockSize::new(64).unwrap()),
        time_us: Some(1),
        ..batch(1, Vec::new())
    };
    let (subject, generation) = ("kvatlas.v1.events.llama.b", StreamGeneration::default());
    let minute = Duration::from_secs(60);
    pool.receive(subject, &late.encode(), generation, minute, None)
        .await;
    pool.drain().await.unwrap();
    assert_eq!(refused(&pool), NOBODY);
    // One that has not waited may be of a process that goes on, whose clock is behind.
    send(&pool, stores("b", 3, Some(64), 20)).await;
    assert_eq!(refused(&pool), B_ALONE);
}

/// A test that a process of which nothing but its goodbye is heard leaves the one that lives in doubt for a moment only.
#[tokio::test]
async fn a_goodbye_alone_of_a_process_with_another_size_ends_nobody_else() {
    let pool = pool_of_a(settings()).await;
    send(&pool, stores("b", 3, Some(16), 20)).await;
    assert_eq!(refused(&pool), NOBODY);
    let goodbye = Sent {
        events: vec![Event::Goodbye],
        ..stores("b", 4, Some(64), 20)
    };
    send(&pool, goodbye).await;
    assert_eq!(refused(&pool), B_ALONE);
    // Batches that tell no times are taken from the second one on.
    for (seq, doubtful) in [(2, B_ALONE), (3, NOBODY)] {
        let next = Sent {
            seq,
            ..stores("b", 3, Some(16), 20)
        };
        send(&pool, next).await;
        assert_eq!(refused(&pool), doubtful, "batch {seq}");
    }
}

#[tokio::test]
async fn a_publisher_whose_epochs_are_not_believed_is_doubtful() {
    let pool = pool_of_a(LaneSettings {
        epoch_ahead_max: Some(Duration::from_secs(3600)),
        ..settings()
    })
    .await;
    send(&pool, stores("b", u64::MAX / 2, None, 20)).await;
    assert_eq!(refused(&pool), B_ALONE);
    send(&pool, stores("b", 1, None, 20)).await;
    assert_eq!(refused(&pool), NOBODY);
}

#[tokio::test]
async fn a_publisher_that_nobody_can_read_is_doubtful() {
    let pool = pool_of_a(settings()).await;
    for _ in 0..3 {
        send_garbage(&pool, "b").await;
        assert_eq!(refused(&pool), B_ALONE);
    }
    // A registered holder is in doubt itself. But what cannot be read may be of another rank.
    send(&pool, stores("b", 1, None, 20)).await;
    assert_eq!(refused(&pool), B_ALONE);
    send_garbage(&pool, "b").await;
    assert_eq!(refused(&pool), B_ALONE);
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let holders = namespace.indexer.holders();
    let holder = holders.iter().find(|holder| holder.id.worker == named("b"));
    let reasons = holder.unwrap().status.own_reasons();
    assert!(reasons.contains(DegradedReason::Undecodable));
}

#[tokio::test]
async fn a_holder_in_a_snapshot_for_which_there_is_no_room_is_doubtful() {
    let namespaces = namespaces_within(IndexLimits {
        workers_max: 1,
        ..IndexLimits::default()
    });
    let pool = LanePool::start(&settings(), Arc::new(namespaces)).unwrap();
    for worker in ["a", "b"] {
        let holder = HolderFrame {
            worker: named(worker),
            ..frame(1)
        };
        pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
            .await
            .unwrap();
        pool.drain().await.unwrap();
    }
    assert_eq!(refused(&pool), B_ALONE);
}

/// A test that a publisher counts as alive if it sends only messages that cannot be read. If it counted as gone, no
/// answer would list it.
#[tokio::test]
async fn who_is_heard_of_by_garbage_alone_is_not_gone() {
    // If the machine stops for a moment, the worker is silent for too long and counts as gone. Then the test begins
    // again.
    while !stays_for(Duration::from_millis(200)).await {}
}

/// Sends unreadable messages of a worker for the given time, and asserts that the pool keeps the worker's lane.
/// Returns false if a pause between two messages was so long that the worker may count as gone.
async fn stays_for(time: Duration) -> bool {
    let pool = pool_of_a(removing_after(Duration::from_millis(50))).await;
    let begun = std::time::Instant::now();
    let mut before = begun;
    while begun.elapsed() < time {
        send_garbage(&pool, "a").await;
        pool.tick(true);
        pool.drain().await.unwrap();
        if before.elapsed() >= Duration::from_millis(25) {
            return false;
        }
        before = std::time::Instant::now();
        assert_eq!(pool.assigned_workers(), 1);
    }
    true
}

#[tokio::test]
async fn a_refused_publisher_is_forgotten_in_time_that_was_listened() {
    let pool = pool_of_a(removing_after(Duration::from_micros(1))).await;
    send(&pool, stores("b", 1, Some(64), 20)).await;
    for _ in 0..100 {
        pool.tick(false);
    }
    assert_eq!(refused(&pool).1[1], 1);
    while refused(&pool).1[1] > 0 {
        pool.tick(true);
    }
}

/// Has the pool receive a batch on the events subject of `worker`, which need not be a name.
async fn receive(pool: &LanePool, worker: &str, seq: u64, events: Vec<Event>) {
    let subject = format!("kvatlas.v1.events.llama.{worker}");
    let payload = batch(seq, events).encode();
    pool.receive(&subject, &payload, never(), Duration::ZERO, None)
        .await;
    pool.drain().await.unwrap();
}

#[tokio::test]
async fn a_publisher_whose_name_is_not_accepted_is_doubtful() {
    let limits = WireLimits {
        name_bytes_max: 5,
        ..WireLimits::default()
    };
    let pool = pool_of_a(LaneSettings { limits, ..settings() }).await;
    let longer = "x".repeat(65);
    for (number, worker) in ["abcdef", "a:b", "a.b", &longer].into_iter().enumerate() {
        for seq in [1, 2] {
            receive(&pool, worker, seq, Vec::new()).await;
            assert_eq!(refused(&pool).0, number + 1, "{worker}");
        }
    }
    assert!(pool.drops_some());
    for worker in ["a.b", "a:b"] {
        receive(&pool, worker, 3, vec![Event::Goodbye]).await;
    }
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let named = namespace.indexer.refused().named(9);
    let named: Vec<_> = named
        .iter()
        .map(|known| (known.worker.as_str(), known.reason))
        .collect();
    let cut = format!("{}...", &longer[..64]);
    assert_eq!(named, [("abcdef", "bad_subject"), (cut.as_str(), "bad_subject")]);
}

#[tokio::test]
async fn a_publisher_whose_name_is_not_accepted_makes_no_namespace() {
    let pool = LanePool::start(&settings(), Arc::new(namespaces())).unwrap();
    receive(&pool, "a:b", 1, Vec::new()).await;
    assert!(pool.namespaces.all().is_empty());
    let strays = pool.strays();
    assert!(strays.len() == 1 && *strays[0].namespace() == frame(1).namespace);
    assert!(pool.lacks_any(|name| *name == frame(1).namespace));
}

#[tokio::test]
async fn publishers_whose_messages_came_before_their_namespace_are_doubtful_in_it_for_two_seconds() {
    let pool = LanePool::start(&settings(), Arc::new(namespaces())).unwrap();
    for worker in ["a:b", "a.b"] {
        receive(&pool, worker, 1, Vec::new()).await;
    }
    receive(&pool, "a:b", 2, vec![Event::Goodbye]).await;
    receive(&pool, "b", 1, Vec::new()).await;
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    assert_eq!(namespace.indexer.refused().count(None), 1);
    for worker in ["a", "c", "d"] {
        let asked = [WorkerName::new(worker).unwrap()];
        assert_eq!(namespace.indexer.refused().count(Some(&asked)), 1, "{worker}");
    }
    assert!(!pool.lacks_any(|_| true));
    receive(&pool, "c", 1, Vec::new()).await;
    assert_eq!(
        namespace.indexer.refused().count(None),
        1,
        "it may be of any other worker"
    );
    while namespace.indexer.refused().count(None) > 0 {
        pool.tick(true);
    }
}

#[tokio::test]
async fn a_publisher_whose_name_is_not_accepted_counts_in_one_shard() {
    let of_shard = async |index| {
        let shard = Shard::new(index, 3);
        let pool = LanePool::start(&LaneSettings { shard, ..settings() }, Arc::new(namespaces())).unwrap();
        receive(&pool, "a:b", 1, Vec::new()).await;
        pool.strays().len()
    };
    assert_eq!(of_shard(0).await + of_shard(1).await + of_shard(2).await, 1);
}
