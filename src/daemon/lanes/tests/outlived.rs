//! Two publishers claim one holder, and the one that is believed falls silent.

use kvatlas_core::wire::{AdminHolder, HolderId};
use kvatlas_telemetry::EventMetrics;

use super::super::clock::LaneClock;
use super::super::flow::Flows;
use super::super::held::HoldingLimits;
use super::super::holder::{Afterwards, Holder, JobClocks, LaneParts};
use super::super::job::HolderCommand;
use super::super::sequence::ReceivedBatch;
use super::super::tally::BatchTally;
use super::doubts::Scene;
use super::restarts::{in_epoch, stores};
use super::*;

/// A holder on its own, whose time the test sets.
struct Alone {
    holder: Holder,
    parts: LaneParts,
}

impl Alone {
    async fn begin() -> Self {
        let scene = Scene::begin().await;
        let namespace = scene.namespace();
        let id = HolderId {
            worker: WorkerName::new("alone").unwrap(),
            rank: 0,
        };
        let writer = namespace.indexer.register(&id).unwrap();
        let flow = Flows::new(1).of(&namespace.name);
        let metrics = Arc::new(EventMetrics::unattributed());
        Self {
            holder: Holder::new(writer, metrics, flow, at(0)),
            parts: LaneParts {
                holding: HoldingLimits::new(false, 0, 0, 0),
                clock: LaneClock::new(),
                tally: BatchTally::default(),
            },
        }
    }

    /// Gives the holder a batch of an epoch at this second. Returns its epoch and its reasons for doubt after that.
    fn receive(&mut self, second: u64, epoch: u64, seq: u64) -> (u64, DegradedReasons) {
        self.receive_at(at(second), epoch, seq)
    }

    fn receive_at(&mut self, clocks: JobClocks, epoch: u64, seq: u64) -> (u64, DegradedReasons) {
        self.take(clocks, in_epoch(epoch, seq, stores(seq * 10)))
    }

    fn take(&mut self, clocks: JobClocks, batch: EventBatch) -> (u64, DegradedReasons) {
        let received = ReceivedBatch {
            batch,
            generation: StreamGeneration::default(),
            bytes: 1,
        };
        let afterwards = self.holder.apply(received, self.parts.context(clocks));
        assert_eq!(afterwards, Afterwards::Stays);
        let status = self.holder.writer.status();
        (status.cursor.load().epoch, status.own_reasons())
    }
}

fn at(second: u64) -> JobClocks {
    JobClocks {
        monotonic_us: second * 1_000_000,
        unix_us: second * 1_000_000,
        listening_us: second * 1_000_000,
        seen_us: second * 1_000_000,
        is_new: true,
    }
}

#[tokio::test]
async fn the_publisher_that_goes_on_is_believed() {
    let (contested, gap) = (DegradedReason::Contested, DegradedReason::Gap);
    let mut alone = Alone::begin().await;
    alone.receive(0, 9, 1);
    assert_eq!(alone.receive(1, 5, 4), (9, DegradedReasons::of(contested)));
    assert_eq!(alone.receive(2, 5, 5), (9, DegradedReasons::of(contested)));
    assert_eq!(
        alone.receive(3, 5, 6).0,
        9,
        "the other one was first heard 2 s ago"
    );
    assert_eq!(alone.receive(4, 5, 7), (5, DegradedReasons::of(gap)));
    assert_eq!(
        alone.receive(5, 5, 8),
        (5, DegradedReasons::of(gap)),
        "it is still to be asked"
    );
    // The first one is back: nobody knows whose blocks the holder has.
    assert_eq!(
        alone.receive(6, 9, 2),
        (9, DegradedReasons::of(gap).with(contested))
    );
    assert_eq!(alone.receive(7, 5, 9).1, DegradedReasons::of(gap).with(contested));
    // An epoch above both ends it.
    assert_eq!(alone.receive(8, 10, 1), (10, DegradedReasons::default()));
}

#[tokio::test]
async fn nobody_else_is_believed_while_both_go_on() {
    let mut alone = Alone::begin().await;
    for second in 1..20 {
        assert_eq!(alone.receive(second, 9, second).0, 9);
        assert_eq!(alone.receive(second, 5, second).0, 9);
    }
    // Neither a batch that comes again, nor one that has waited, shows who goes on.
    assert_eq!(alone.receive(30, 5, 19).0, 9);
    let waited = JobClocks {
        is_new: false,
        ..at(31)
    };
    assert_eq!(alone.receive_at(waited, 5, 20).0, 9);
    // Nor one that came soon after the last batch of the believed one, and waited for the lane.
    let late = JobClocks {
        seen_us: 20_000_000,
        ..at(32)
    };
    assert_eq!(alone.receive_at(late, 5, 21).0, 9);
    assert_eq!(alone.receive(33, 5, 22).0, 5);
}

#[tokio::test]
async fn the_goodbye_of_a_publisher_that_was_outlived_changes_nothing() {
    let mut alone = Alone::begin().await;
    alone.receive(0, 9, 1);
    for second in 1..6 {
        alone.receive(second, 5, second);
    }
    let before = alone.receive(6, 5, 6);
    assert_eq!(before, (5, DegradedReasons::of(DegradedReason::Gap)));
    assert_eq!(alone.take(at(7), in_epoch(9, 2, vec![Event::Goodbye])), before);
    assert_eq!(alone.receive(7, 5, 7), before);
}

#[tokio::test]
async fn a_lost_batch_of_a_publisher_that_was_outlived_leaves_a_doubt_of_some_seconds() {
    let (contested, gap) = (DegradedReason::Contested, DegradedReason::Gap);
    let mut alone = Alone::begin().await;
    alone.receive(0, 9, 1);
    for second in 1..7 {
        alone.receive(second, 5, second);
    }
    let context = alone.parts.context(at(7));
    // It may be a goodbye.
    alone.holder.note_lost(&in_epoch(9, 2, Vec::new()), context);
    let doubts = DegradedReasons::of(gap).with(contested);
    assert_eq!(alone.receive(8, 5, 7), (5, doubts));
    assert_eq!(alone.receive(10, 5, 8), (5, DegradedReasons::of(gap)));
    // It was none.
    assert_eq!(alone.receive(11, 9, 3), (9, doubts));
}

#[tokio::test]
async fn the_goodbye_of_the_other_one_leaves_a_silent_publisher_contested_until_its_next_batch() {
    let contested = DegradedReasons::of(DegradedReason::Contested);
    for (second, left) in [(3, DegradedReasons::default()), (4, contested)] {
        let mut alone = Alone::begin().await;
        alone.receive(1, 9, 1);
        assert_eq!(alone.receive(second, 5, 1), (9, contested));
        assert_eq!(
            alone.take(at(second), in_epoch(5, 2, vec![Event::Goodbye])),
            (9, left)
        );
        assert_eq!(alone.receive(second + 1, 9, 2).1, DegradedReasons::default());
    }
}

/// Returns what is left when everything has been applied: the holder's reasons for doubt, `None` if there is no holder, and
/// the number of refused holders.
async fn left(scene: &Scene) -> (Option<DegradedReasons>, usize) {
    scene.pool.drain().await.unwrap();
    let refused = scene.namespace().indexer.refused().count(None);
    (scene.reasons_of(0), refused)
}

#[tokio::test]
async fn the_other_publisher_of_a_holder_is_left_after_a_goodbye() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    scene.receive(&in_epoch(5, 4, stores(20)).encode()).await;
    assert!(scene.reasons().await.contains(DegradedReason::Contested));
    scene
        .receive(&in_epoch(9, 2, vec![Event::Goodbye]).encode())
        .await;
    assert_eq!(left(&scene).await, (None, 1), "it has unknown blocks");
    // A batch from before, and the next one.
    scene.receive(&in_epoch(5, 4, stores(20)).encode()).await;
    scene.pool.drain().await.unwrap();
    assert_eq!(scene.reasons_of(0), None);
    scene.receive(&in_epoch(5, 5, stores(30)).encode()).await;
    assert!(scene.reasons().await.contains(DegradedReason::Gap));
    assert_eq!(left(&scene).await.1, 0);
}

#[tokio::test]
async fn who_says_goodbye_claims_the_holder_no_longer() {
    let scene = Scene::begin().await;
    let contested = async || scene.reasons().await.contains(DegradedReason::Contested);
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    scene.receive(&in_epoch(5, 4, stores(20)).encode()).await;
    // Another process has ended, and not the one that claims the holder.
    scene
        .receive(&in_epoch(4, 9, vec![Event::Goodbye]).encode())
        .await;
    assert!(contested().await);
    scene
        .receive(&in_epoch(5, 5, vec![Event::Goodbye]).encode())
        .await;
    assert!(!contested().await);
    // When the believed one has gone, too, nobody is left.
    scene
        .receive(&in_epoch(9, 2, vec![Event::Goodbye]).encode())
        .await;
    assert_eq!(left(&scene).await, (None, 0));
}

#[tokio::test]
async fn a_publisher_that_is_too_far_ahead_is_left_in_doubt_after_the_goodbye_of_the_other_one() {
    let scene = Scene::begin_in(Scene::new_pool_believing(Some(Duration::from_secs(60)))).await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    let ahead = kvatlas_client::unix_time_us() + 3_600_000_000;
    scene.receive(&in_epoch(ahead, 1, stores(20)).encode()).await;
    assert!(scene.reasons().await.contains(DegradedReason::Contested));
    scene
        .receive(&in_epoch(9, 2, vec![Event::Goodbye]).encode())
        .await;
    assert_eq!(left(&scene).await, (None, 1));
}

#[tokio::test]
async fn who_comes_back_with_the_right_time_after_a_goodbye_is_taken_at_once() {
    let scene = Scene::begin().await;
    let now_us = kvatlas_client::unix_time_us();
    let ahead = now_us + 3_600_000_000;
    scene.receive(&in_epoch(ahead, 1, stores(10)).encode()).await;
    scene
        .receive(&in_epoch(ahead, 2, vec![Event::Goodbye]).encode())
        .await;
    let made = |epoch, time_us| EventBatch {
        time_us: Some(time_us),
        ..in_epoch(epoch, 1, stores(20))
    };
    // The process before that one.
    scene.receive(&made(now_us - 2, now_us - 1).encode()).await;
    scene.pool.drain().await.unwrap();
    assert_eq!(scene.reasons_of(0), None);
    let later_us = now_us + 60_000_000;
    scene.receive(&made(later_us, later_us).encode()).await;
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn who_claimed_a_holder_and_has_ended_is_doubtful_for_some_seconds_or_until_it_is_forgotten() {
    let scene = Scene::begin().await;
    let refused = || scene.namespace().indexer.refused().count(None);
    let leave = async |epoch| {
        scene.receive(&in_epoch(epoch, 1, stores(10)).encode()).await;
        scene.receive(&in_epoch(epoch - 4, 4, stores(20)).encode()).await;
        scene
            .receive(&in_epoch(epoch, 2, vec![Event::Goodbye]).encode())
            .await;
        assert_eq!(left(&scene).await, (None, 1));
    };
    leave(9).await;
    // Listening time is real time.
    while refused() > 0 {
        scene.pool.tick(true);
    }
    leave(19).await;
    let of = AdminHolder {
        namespace: scene.holder.0.namespace.clone(),
        worker: scene.holder.0.worker.clone(),
        rank: None,
    };
    let forget = async || scene.pool.command(&of, HolderCommand::Forget).await.unwrap();
    assert_eq!((forget().await, refused(), forget().await), (1, 0, 0));
}

#[tokio::test]
async fn the_other_publisher_goes_on_behind_a_goodbye_also_if_it_was_not_known_to_be_alive() {
    let scene = Scene::begin().await;
    let old = |seq| EventBatch {
        time_us: Some(1),
        ..in_epoch(5, seq, stores(20))
    };
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    scene.receive(&old(4).encode()).await;
    assert!(scene.reasons().await.is_empty(), "it may be a redelivery");
    scene
        .receive(&in_epoch(9, 2, vec![Event::Goodbye]).encode())
        .await;
    assert_eq!(left(&scene).await, (None, 0));
    scene.receive(&old(5).encode()).await;
    assert_eq!(left(&scene).await, (None, 1));
    scene.receive(&old(6).encode()).await;
    assert!(scene.reasons().await.contains(DegradedReason::Gap));
}

#[tokio::test]
async fn who_comes_back_with_a_slow_clock_is_doubtful_and_then_taken() {
    let scene = Scene::begin().await;
    scene.receive(&in_epoch(9, 1, stores(10)).encode()).await;
    scene
        .receive(&in_epoch(9, 2, vec![Event::Goodbye]).encode())
        .await;
    let slow = |seq| EventBatch {
        time_us: Some(seq),
        ..in_epoch(5, seq, stores(20))
    };
    scene.receive(&slow(1).encode()).await;
    assert_eq!(left(&scene).await, (None, 1));
    scene.receive(&slow(2).encode()).await;
    assert!(scene.reasons().await.contains(DegradedReason::Gap));
    assert_eq!(left(&scene).await.1, 0);
}

#[tokio::test]
async fn a_goodbye_that_was_read_late_counts_from_the_time_at_which_it_was_said() {
    let scene = Scene::begin().await;
    let now_us = kvatlas_client::unix_time_us();
    let receive = async |batch: EventBatch, kept_for| {
        let (generation, payload) = (scene.trust.generation(), batch.encode());
        let subject = "kvatlas.v1.events.llama.late";
        scene
            .pool
            .receive(subject, &payload, generation, kept_for, None)
            .await;
        scene.pool.drain().await.unwrap();
    };
    let is_known = || {
        let holders = scene.namespace().indexer.holders();
        holders.iter().any(|holder| holder.id.worker.as_str() == "late")
    };
    let (ahead, minute) = (now_us + 30_000_000, Duration::from_secs(60));
    receive(in_epoch(ahead, 1, stores(10)), minute).await;
    assert!(is_known());
    receive(in_epoch(ahead, 2, vec![Event::Goodbye]), minute).await;
    assert!(!is_known());
    // It began half a minute ago, and does not tell when it makes its batches.
    receive(in_epoch(now_us - 30_000_000, 7, stores(20)), Duration::ZERO).await;
    assert!(is_known());
}
