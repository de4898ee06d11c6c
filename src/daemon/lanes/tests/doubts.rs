//! Tests of doubts that arise while batches are held. A batch that was received before a doubt never ends that doubt,
//! even if it is applied later.

use kvatlas_core::index::Namespace;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{BatchCursor, DegradedReasons, HolderId, Rank, ResyncAnswerKind};

use super::*;
use futures_util::FutureExt;
use kvatlas_telemetry::labels::{LaneWork, ResyncFailure};

/// Pool of lanes whose holders hold batches after a gap, with a worker `gpu-0` that has published its first batch.
pub(super) struct Scene {
    pub(super) pool: LanePool,
    pub(super) trust: StreamTrust,
    pub(super) holder: HolderKey,
}

impl Scene {
    /// Returns a pool of lanes whose holders hold batches until missing batches before them have come.
    pub(super) fn new_pool() -> LanePool {
        Self::new_pool_believing(None)
    }

    /// Returns such a pool, with a bound on the time by which an epoch may lie ahead of the clock.
    pub(super) fn new_pool_believing(epoch_ahead_max: Option<Duration>) -> LanePool {
        let holding = HoldingSettings {
            bytes_per_holder_max: 1 << 20,
            wait_max: Duration::from_secs(3600),
        };
        Self::new_pool_with(holding, epoch_ahead_max)
    }

    fn new_pool_with(holding: HoldingSettings, epoch_ahead_max: Option<Duration>) -> LanePool {
        let settings = LaneSettings {
            lanes: 1,
            lane_queue_bytes: 4096,
            holding: Some(holding),
            epoch_ahead_max,
            ..settings()
        };
        LanePool::start(&settings, Arc::new(namespaces())).unwrap()
    }

    pub(super) async fn begin() -> Self {
        Self::begin_in(Self::new_pool()).await
    }

    pub(super) async fn begin_in(pool: LanePool) -> Self {
        let worker = WorkerKey {
            namespace: frame(1).namespace,
            worker: frame(1).worker,
        };
        let scene = Self {
            pool,
            trust: StreamTrust::default(),
            holder: (worker, 0),
        };
        scene.hear(1, Vec::new()).await;
        assert!(scene.reasons().await.is_empty());
        scene
    }

    pub(super) async fn receive(&self, payload: &[u8]) {
        let worker = &self.holder.0;
        let (namespace, name) = (&worker.namespace, worker.worker.clone());
        let generation = self.trust.generation();
        let dispatched = self.pool.dispatch(namespace, name, payload, generation);
        dispatched.await.unwrap();
    }

    pub(super) async fn hear(&self, seq: u64, events: Vec<Event>) {
        self.receive(&batch(seq, events).encode()).await;
    }

    /// Delivers a batch that was damaged on the way.
    pub(super) async fn hear_garbage(&self) {
        self.receive(b"garbage").await;
    }

    pub(super) async fn ask(&self) -> ResyncBegun {
        self.pool.begin_resync(&self.holder).await.unwrap().unwrap()
    }

    /// Answers the resync request `asked` with the missing batches.
    pub(super) async fn answer(&self, asked: ResyncBegun, batches: Vec<EventBatch>) -> ResyncOutcome {
        let seq = batches.last().map_or(asked.cursor.seq, |batch| batch.seq);
        let answer = ResyncAnswer {
            kind: ResyncAnswerKind::Missing,
            cursor: BatchCursor { seq, ..asked.cursor },
            time_us: None,
            batches,
        };
        let generation = self.trust.generation();
        let finished = self
            .pool
            .finish_resync(&self.holder, asked.number, answer, generation);
        finished.await.unwrap()
    }

    pub(super) async fn give_up(&self, asked: ResyncBegun) {
        self.fail(asked, ResyncFailure::NoResponder);
    }

    pub(super) fn fail(&self, asked: ResyncBegun, failure: ResyncFailure) {
        let abandoned = self.pool.abandon_resync(&self.holder, asked.number, failure);
        abandoned.unwrap();
    }

    /// Delivers a batch that is dropped, because the queue has no room for it.
    pub(super) fn lose(&self, mut lost: EventBatch) {
        let many = (0..1024).map(SequenceHash).collect();
        lost.events.push(Event::Removed(RemovedBlocks::by_sequence(many)));
        self.lose_payload(lost.encode());
    }

    /// Delivers a message that is dropped, because the queue has no room for it: the message is longer than the
    /// queue, and the message of another worker waits already.
    fn lose_payload(&self, payload: Vec<u8>) {
        let mut inbox = self.pool.inbox();
        let small = batch(1, Vec::new()).encode();
        for (worker, payload) in [("gpu-1", small), ("gpu-0", payload)] {
            let subject = format!("kvatlas.v1.events.llama.{worker}");
            let generation = self.trust.generation();
            self.pool.sort(&mut inbox, &subject, &payload, generation, None);
        }
        self.pool.hand_over(&mut inbox);
    }

    pub(super) fn namespace(&self) -> Arc<Namespace> {
        self.pool.namespaces.get(&self.holder.0.namespace).unwrap()
    }

    /// Returns the holder's reasons for doubt after everything has been applied.
    pub(super) async fn reasons(&self) -> DegradedReasons {
        self.pool.drain().await.unwrap();
        self.reasons_of(self.holder.1).unwrap()
    }

    /// Returns the present reasons for doubt of a rank of the worker. `None` if the rank is not known.
    pub(super) fn reasons_of(&self, rank: Rank) -> Option<DegradedReasons> {
        let holders = self.namespace().indexer.holders();
        let is_it = |id: &HolderId| id.worker == self.holder.0.worker && id.rank == rank;
        let holder = holders.iter().find(|holder| is_it(&holder.id))?;
        Some(holder.status.reasons(&self.trust))
    }
}

#[tokio::test]
async fn a_step_of_a_resync_does_not_wait_for_room_in_the_queue() {
    let scene = Scene::begin().await;
    let (gate, opened) = std::sync::mpsc::channel::<()>();
    let wait = move |_: &mut lane::Lane, _: &WorkerKey| {
        _ = opened.recv();
    };
    let blocked = scene
        .pool
        .on_worker_now(worker(0), LaneWork::Upkeep, wait)
        .unwrap();
    // Another worker floods the lane.
    let mut inbox = scene.pool.inbox();
    let generation = scene.trust.generation();
    for seq in 1..100 {
        let heartbeat = batch(seq, Vec::new()).encode();
        let subject = format!("kvatlas.v1.events.llama.flood-{seq}");
        scene
            .pool
            .sort(&mut inbox, &subject, &heartbeat, generation, None);
    }
    scene.pool.hand_over(&mut inbox);
    let waiting = scene.pool.messages_waiting();
    let mut asked = Box::pin(scene.ask());
    assert!((&mut asked).now_or_never().is_none());
    assert_eq!(scene.pool.messages_waiting(), waiting + 1);
    drop(gate);
    blocked.await.unwrap();
    let asked = asked.await;
    assert_eq!(scene.answer(asked, Vec::new()).await, ResyncOutcome::Exact);
}

#[tokio::test]
async fn cleared_in_an_answer_does_not_forgive_what_came_after_the_question() {
    let scene = Scene::begin().await;
    scene.hear_garbage().await;
    let asked = scene.ask().await;
    scene.hear_garbage().await;
    let outcome = scene.answer(asked, vec![batch(2, vec![Event::Cleared])]).await;
    assert_eq!(outcome, ResyncOutcome::Incomplete);
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
    // A request that is made after the doubt settles the doubt.
    let asked = scene.ask().await;
    assert_eq!(
        scene.answer(asked, vec![batch(3, Vec::new())]).await,
        ResyncOutcome::Exact
    );
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn cleared_in_a_held_batch_does_not_forgive_what_came_after_it() {
    for has_answer in [true, false] {
        let scene = Scene::begin().await;
        scene.hear_garbage().await;
        let asked = scene.ask().await;
        scene.hear(3, vec![Event::Cleared]).await;
        scene.hear_garbage().await;
        if has_answer {
            scene.answer(asked, vec![batch(2, Vec::new())]).await;
        } else {
            scene.give_up(asked).await;
        }
        let reasons = scene.reasons().await;
        assert!(reasons.contains(DegradedReason::Undecodable), "{reasons:?}");
    }
}

#[tokio::test]
async fn where_nobody_answers_cleared_in_a_held_batch_forgives_what_came_before_it() {
    let scene = Scene::begin().await;
    let asked = scene.ask().await;
    scene.hear_garbage().await;
    scene.hear(3, vec![Event::Cleared]).await;
    scene.give_up(asked).await;
    let reasons = scene.reasons().await;
    assert!(reasons.is_empty(), "{reasons:?}");
}

#[tokio::test]
async fn cleared_in_a_late_batch_does_not_forgive_a_message_that_overtook_it() {
    let scene = Scene::begin().await;
    // The damaged batch was the third one.
    scene.hear_garbage().await;
    scene.hear(2, vec![Event::Cleared]).await;
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
    let asked = scene.ask().await;
    scene.answer(asked, vec![batch(3, Vec::new())]).await;
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn where_nobody_answers_cleared_forgives_what_came_before_it() {
    let scene = Scene::begin().await;
    let asked = scene.ask().await;
    scene.give_up(asked).await;
    scene.hear_garbage().await;
    scene.hear(2, vec![Event::Cleared]).await;
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn a_batch_that_is_held_again_does_not_forgive_what_came_after_it() {
    let scene = Scene::begin().await;
    scene.hear_garbage().await;
    let asked = scene.ask().await;
    scene.hear(4, vec![Event::Cleared]).await;
    scene.hear_garbage().await;
    // The third batch is still missing.
    let outcome = scene.answer(asked, vec![batch(2, Vec::new())]).await;
    assert_eq!(outcome, ResyncOutcome::Incomplete);
    let asked = scene.ask().await;
    scene.give_up(asked).await;
    let reasons = scene.reasons().await;
    assert!(reasons.contains(DegradedReason::Undecodable), "{reasons:?}");
}

#[tokio::test]
async fn held_batches_do_not_confirm_a_holder_whose_later_messages_were_dropped() {
    let scene = Scene::begin().await;
    scene.ask().await;
    scene.hear(2, Vec::new()).await;
    scene.pool.drain().await.unwrap();
    scene.lose(batch(3, Vec::new()));
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Unverified));
    // The lost batch comes again.
    scene.hear(3, Vec::new()).await;
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn an_answer_does_not_take_back_what_a_held_batch_has_confirmed_since_the_question() {
    let scene = Scene::begin().await;
    let (asked, generation) = (scene.ask().await, scene.trust.generation());
    scene.trust.doubt();
    scene.hear(2, Vec::new()).await;
    let answer = ResyncAnswer {
        kind: ResyncAnswerKind::Missing,
        cursor: asked.cursor,
        time_us: None,
        batches: Vec::new(),
    };
    let finished = scene
        .pool
        .finish_resync(&scene.holder, asked.number, answer, generation);
    assert_eq!(finished.await.unwrap(), ResyncOutcome::Exact);
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn a_batch_longer_than_what_may_be_held_is_held_alone() {
    let holding = HoldingSettings {
        bytes_per_holder_max: 1024,
        wait_max: Duration::from_secs(3600),
    };
    let scene = Scene::begin_in(Scene::new_pool_with(holding, None)).await;
    let many = (0..256).map(SequenceHash).collect();
    let long = batch(3, vec![Event::Removed(RemovedBlocks::by_sequence(many))]);
    assert!(long.encode().len() > 1024);
    scene.receive(&long.encode()).await;
    // Missing batches suffice, because the batch after the gap is held and has not been applied.
    let asked = scene.ask().await;
    assert!(!asked.full);
    let missing = vec![batch(2, Vec::new())];
    assert_eq!(scene.answer(asked, missing).await, ResyncOutcome::Exact);
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn what_comes_late_does_not_confirm_a_holder_whose_later_batch_was_dropped() {
    let scene = Scene::begin().await;
    scene.lose(batch(3, Vec::new()));
    scene.hear(2, Vec::new()).await;
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Unverified));
    let asked = scene.ask().await;
    scene.answer(asked, vec![batch(3, Vec::new())]).await;
    assert!(scene.reasons().await.is_empty());
}

/// Returns a batch of rank 1; all other batches are of rank 0.
fn of_next_rank(seq: u64) -> EventBatch {
    EventBatch {
        rank: 1,
        ..batch(seq, Vec::new())
    }
}

#[tokio::test]
async fn a_dropped_batch_of_one_rank_says_nothing_of_another() {
    let scene = Scene::begin().await;
    scene.receive(&of_next_rank(1).encode()).await;
    scene.lose(of_next_rank(2));
    assert!(scene.reasons().await.is_empty());
    let reasons = scene.reasons_of(1).unwrap();
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Unverified));
}

#[tokio::test]
async fn a_dropped_message_that_cannot_be_read_is_as_one_that_came() {
    let scene = Scene::begin().await;
    scene.lose_payload(vec![0xc1; 8192]);
    scene.hear(2, Vec::new()).await;
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
}

#[tokio::test]
async fn a_dropped_batch_that_numbers_anew_is_a_restart() {
    let scene = Scene::begin().await;
    let made_at = |time_us, seq| EventBatch {
        time_us: Some(time_us),
        ..batch(seq, Vec::new())
    };
    scene.receive(&made_at(20, 2).encode()).await;
    scene.lose(made_at(40, 1));
    // The last batch before the restart comes late.
    scene.receive(&made_at(30, 3).encode()).await;
    let reasons = scene.reasons().await;
    assert!(reasons.contains(DegradedReason::Gap), "{reasons:?}");
}

#[tokio::test]
async fn what_a_worker_without_a_holder_sent_in_vain_is_in_doubt() {
    let scene = Scene::begin().await;
    scene.hear(2, vec![Event::Goodbye]).await;
    // The damaged batch was the second one of the new epoch.
    scene.hear_garbage().await;
    scene.pool.drain().await.unwrap();
    assert!(scene.namespace().indexer.holders().is_empty());
    let in_next_epoch = |seq| EventBatch {
        epoch: 2,
        ..batch(seq, Vec::new())
    };
    scene.receive(&in_next_epoch(1).encode()).await;
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
    let asked = scene.ask().await;
    scene.answer(asked, vec![in_next_epoch(2)]).await;
    assert!(scene.reasons().await.is_empty());
}

#[tokio::test]
async fn what_cannot_be_read_may_have_been_of_a_rank_that_comes_later() {
    let scene = Scene::begin().await;
    // The damaged batch was the second one of the next rank.
    scene.hear_garbage().await;
    scene.receive(&of_next_rank(1).encode()).await;
    scene.pool.drain().await.unwrap();
    let reasons = scene.reasons_of(1).unwrap();
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
}

#[tokio::test]
async fn what_cannot_be_read_counts_in_a_namespace_that_comes_later() {
    let scene = Scene {
        pool: Scene::new_pool(),
        ..Scene::begin().await
    };
    scene.hear_garbage().await;
    assert_eq!(scene.pool.namespaces.all().len(), 0);
    scene.hear(1, Vec::new()).await;
    let reasons = scene.reasons().await;
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Undecodable));
}

/// A test of an operator who asks for a resync while the publisher is being asked for missing batches. These do not
/// answer the operator.
#[tokio::test]
async fn an_operator_is_not_answered_by_missing_batches_that_were_asked_for_before() {
    let scene = Scene::begin().await;
    scene.hear(3, Vec::new()).await;
    let asked = scene.ask().await;
    assert!(!asked.full);
    let of = kvatlas_core::wire::AdminHolder {
        namespace: scene.holder.0.namespace.clone(),
        worker: scene.holder.0.worker.clone(),
        rank: None,
    };
    assert_eq!(scene.pool.command(&of, HolderCommand::Doubt).await.unwrap(), 1);
    let missing = vec![batch(2, Vec::new()), batch(3, Vec::new())];
    assert_eq!(scene.answer(asked, missing).await, ResyncOutcome::Superseded);
    assert_eq!(scene.reasons().await, DegradedReasons::of(DegradedReason::Gap));
    assert!(scene.ask().await.full);
}

/// A test of a worker with two ranks. The messages of one rank cannot be read, and an answer of the other rank's
/// publisher says nothing of them.
#[tokio::test]
async fn a_rank_that_cannot_be_read_is_doubtful_beside_one_that_answers() {
    let scene = Scene::begin().await;
    scene.hear_garbage().await;
    let asked = scene.ask().await;
    assert_eq!(scene.answer(asked, Vec::new()).await, ResyncOutcome::Exact);
    assert!(scene.reasons().await.is_empty());
    assert_eq!(scene.namespace().indexer.refused().count(None), 1);
}

#[tokio::test]
async fn a_dropped_rank_that_cannot_be_read_is_doubtful_beside_one_that_answers() {
    let scene = Scene::begin().await;
    scene.lose_payload(vec![0xc1; 8192]);
    scene.pool.drain().await.unwrap();
    let asked = scene.ask().await;
    assert_eq!(scene.answer(asked, Vec::new()).await, ResyncOutcome::Exact);
    assert_eq!(scene.namespace().indexer.refused().count(None), 1);
}

#[tokio::test]
async fn a_rank_that_could_not_be_read_is_doubtful_when_another_one_comes() {
    let scene = Scene {
        pool: Scene::new_pool(),
        ..Scene::begin().await
    };
    // The namespace does not exist yet, so only the lanes remember the message.
    scene.hear_garbage().await;
    scene.hear(1, Vec::new()).await;
    scene.pool.drain().await.unwrap();
    let asked = scene.ask().await;
    assert_eq!(scene.answer(asked, Vec::new()).await, ResyncOutcome::Exact);
    assert_eq!(scene.namespace().indexer.refused().count(None), 1);
}
