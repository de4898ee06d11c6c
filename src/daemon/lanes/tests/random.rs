//! Random tests: a publisher, a network and a resyncer take random steps in random order.
//!
//! An exact holder must have the blocks that its publisher had at the holder's cursor. It must also have the address
//! and labels that its publisher had told last before that cursor. Its cursor must be at or after every batch that has
//! reached the lane.

use std::collections::BTreeSet;

use kvatlas_core::index::HolderRecord;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{BatchCursor, Labels, Profile, ResyncAnswerKind};
use kvatlas_lab::random::{Random, setting};

use super::doubts::Scene;
use super::*;
use kvatlas_telemetry::labels::ResyncFailure;

/// Number of different blocks. Each block is a chain of its own.
const BLOCKS: u64 = 5;
/// Number of steps in one run.
const STEPS: usize = 80;

/// State of the simulated publisher after one batch.
#[derive(Debug, Clone)]
struct Version {
    batch: EventBatch,
    blocks: BTreeSet<u64>,
    /// Profile (address and labels) that the publisher has told in the batch's epoch.
    profile: Profile,
}

/// Batch that has been sent and has not arrived yet.
struct OnWay {
    version: usize,
    generation: StreamGeneration,
}

/// Snapshot frames (records) of a holder, and the messages that the stream delivers after them.
struct Written {
    frame: HolderFrame,
    batches: Vec<Vec<u8>>,
    /// Messages that have come after these frames were written.
    rest: Vec<Vec<u8>>,
}

struct World {
    scene: Scene,
    /// Whether a stream keeps the messages that have come. With a stream the daemon can be killed; without one the
    /// connection can break.
    has_stream: bool,
    written: Option<Written>,
    random: Random,
    versions: Vec<Version>,
    cursor: BatchCursor,
    blocks: BTreeSet<u64>,
    profile: Profile,
    time_us: u64,
    way: Vec<OnWay>,
    /// Oldest state of the publisher (see `Version`) that a holder may have while it counts as exact.
    floor: usize,
    /// Newest state of the publisher (see `Version`) whose batch was damaged on the way.
    damaged: usize,
    /// Whether the publisher has failed to answer a resync request. After such a failure, a holder whose state the
    /// publisher replaces counts as exact, whatever was damaged before.
    has_failed: bool,
    asked: Option<(ResyncBegun, StreamGeneration)>,
    answer: Option<(ResyncBegun, ResyncAnswer, StreamGeneration)>,
    log: Vec<String>,
}

fn stored_block(block: u64) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, vec![SequenceHash(block)]))
}

fn removed_block(block: u64) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(vec![SequenceHash(block)]))
}

impl World {
    async fn begin(seed: u64) -> Self {
        let first = Version {
            batch: batch(1, Vec::new()),
            blocks: BTreeSet::new(),
            profile: Profile::default(),
        };
        let scene = Scene::begin().await;
        scene.trust.follow(scene.trust.generation());
        Self {
            scene,
            has_stream: seed.is_multiple_of(2),
            written: None,
            random: Random::new(seed),
            versions: vec![first],
            cursor: BatchCursor { epoch: 1, seq: 1 },
            blocks: BTreeSet::new(),
            profile: Profile::default(),
            time_us: 10,
            way: Vec::new(),
            floor: 0,
            damaged: 0,
            has_failed: false,
            asked: None,
            answer: None,
            log: Vec::new(),
        }
    }

    fn publish(&mut self) {
        let mut events = Vec::new();
        for _ in 0..self.random.below(3) {
            let block = 1 + self.random.next() % BLOCKS;
            events.push(match self.random.below(7) {
                0 => {
                    self.blocks.clear();
                    Event::Cleared
                }
                1 | 2 => {
                    self.blocks.remove(&block);
                    removed_block(block)
                }
                _ if self.blocks.insert(block) => stored_block(block),
                // No block is stored twice, because it would have to be removed twice.
                _ => continue,
            });
        }
        self.send(events);
    }

    fn send(&mut self, events: Vec<Event>) {
        self.time_us += 1;
        self.cursor.seq += 1;
        // A batch with a clear always tells the profile: a cleared holder is exact, whatever was missed before.
        let is_changed = self.random.chance(20);
        let is_told = is_changed || events.contains(&Event::Cleared);
        if is_changed {
            self.profile = match self.random.chance(20) {
                true => Profile::default(),
                false => Profile {
                    address: format!("gpu-0:{}", self.time_us).parse().ok(),
                    labels: Labels::NONE,
                },
            };
        }
        let batch = EventBatch {
            epoch: self.cursor.epoch,
            time_us: Some(self.time_us),
            profile: is_told.then(|| self.profile.clone()),
            ..batch(self.cursor.seq, events)
        };
        self.log
            .push(format!("publish {}:{} {:?}", batch.epoch, batch.seq, self.blocks));
        let generation = self.scene.trust.generation();
        self.way.push(OnWay {
            version: self.versions.len(),
            generation,
        });
        let blocks = self.blocks.clone();
        let profile = self.profile.clone();
        self.versions.push(Version {
            batch,
            blocks,
            profile,
        });
    }

    /// Lets the publisher say goodbye, and come back with its next epoch.
    fn leave(&mut self) {
        self.blocks.clear();
        self.send(vec![Event::Goodbye]);
        self.restart();
    }

    fn restart(&mut self) {
        self.cursor = BatchCursor {
            epoch: self.cursor.epoch + 1,
            seq: 0,
        };
        self.blocks.clear();
        self.profile = Profile::default();
        self.log.push(format!("epoch {}", self.cursor.epoch));
    }

    async fn deliver(&mut self) {
        if self.way.is_empty() {
            return;
        }
        let index = match self.random.chance(25) {
            true => self.random.below(self.way.len().min(3)),
            false => 0,
        };
        let OnWay { version, generation } = self.way.remove(index);
        let BatchCursor { epoch, seq } = self.at(version);
        if self.random.chance(8) {
            self.log.push(format!("lose {epoch}:{seq}"));
            return;
        }
        if self.random.chance(5) {
            self.way.insert(0, OnWay { version, generation });
        }
        let is_damaged = self.random.chance(8);
        match is_damaged {
            true => self.damaged = self.damaged.max(version),
            false => self.floor = self.floor.max(version),
        }
        self.log
            .push(format!("deliver {epoch}:{seq}, damaged {is_damaged}"));
        let payload = match is_damaged {
            true => b"garbage".to_vec(),
            false => self.versions[version].batch.encode(),
        };
        self.receive(&payload, generation).await;
        if let Some(written) = &mut self.written {
            written.rest.push(payload);
        }
    }

    async fn receive(&self, payload: &[u8], generation: StreamGeneration) {
        let worker = &self.scene.holder.0;
        let (namespace, name) = (&worker.namespace, worker.worker.clone());
        let dispatched = self.scene.pool.dispatch(namespace, name, payload, generation);
        dispatched.await.unwrap();
    }

    /// Delivers one of the next batches at a moment at which the queue has no room for it.
    fn drop_next(&mut self) {
        if self.way.is_empty() {
            return;
        }
        let index = self.random.below(self.way.len().min(2));
        let OnWay { version, .. } = self.way.remove(index);
        self.log.push(format!("no room for {:?}", self.at(version)));
        self.floor = self.floor.max(version);
        self.scene.lose(self.versions[version].batch.clone());
    }

    async fn write(&mut self) {
        let generation = self.scene.trust.generation();
        let dumped = self.scene.pool.dump_next(0, None, true, generation).await;
        let Some((_, dump)) = dumped.unwrap() else {
            return;
        };
        self.log.push(format!("write {:?}", dump.frame));
        self.written = Some(Written {
            frame: dump.frame.clone(),
            batches: dump.batches().collect(),
            rest: Vec::new(),
        });
    }

    /// Kills the daemon, and restarts it from the last snapshot that it has written.
    async fn kill(&mut self) {
        let Some(written) = self.written.take() else {
            return;
        };
        self.log.push("kill".to_owned());
        self.scene.pool = Scene::new_pool();
        self.scene.trust = StreamTrust::default();
        let generation = self.scene.trust.generation();
        self.scene.trust.follow(generation);
        (self.asked, self.answer, self.has_failed) = (None, None, false);
        let Written { frame, batches, rest } = &written;
        let holder = Frame::Holder(frame.clone());
        let frames = std::iter::once(holder).chain(batches.iter().cloned().map(Frame::Batch));
        for part in frames {
            self.scene
                .pool
                .restore(frame, part, RestoreOrigin::new(generation, Duration::ZERO))
                .await
                .unwrap();
        }
        for payload in rest {
            self.receive(payload, generation).await;
        }
        self.written = Some(written);
    }

    fn at(&self, version: usize) -> BatchCursor {
        let batch = &self.versions[version].batch;
        BatchCursor {
            epoch: batch.epoch,
            seq: batch.seq,
        }
    }

    /// Breaks the connection: batches on their way may be lost.
    fn break_connection(&mut self) {
        self.log.push("break".to_owned());
        let generation = self.scene.trust.doubt();
        self.scene.trust.follow(generation);
        let random = &mut self.random;
        self.way.retain(|_| random.chance(50));
        self.floor = self.versions.len() - 1;
    }

    async fn ask(&mut self) {
        if self.asked.is_some() || self.answer.is_some() {
            return;
        }
        let generation = self.scene.trust.followed().unwrap();
        let Scene { pool, holder, .. } = &self.scene;
        let Some(begun) = pool.begin_resync(holder).await.unwrap() else {
            return;
        };
        self.log.push(format!("ask {begun:?}"));
        self.asked = Some((begun, generation));
    }

    async fn give_up(&mut self) {
        let asked = self.asked.take().map(|(begun, _)| begun);
        let Some(begun) = asked.or_else(|| self.answer.take().map(|(begun, ..)| begun)) else {
            return;
        };
        let failure = match self.random.chance(50) {
            true => ResyncFailure::NoResponder,
            false => ResyncFailure::TimedOut,
        };
        self.log.push(format!("give up {failure:?}"));
        self.has_failed = true;
        self.abandon(begun, failure).await;
    }

    async fn abandon(&mut self, begun: ResyncBegun, failure: ResyncFailure) {
        let Scene { pool, holder, .. } = &self.scene;
        pool.abandon_resync(holder, begun.number, failure).unwrap();
    }

    /// Lets the publisher receive the resync request and answer it.
    async fn answer(&mut self) {
        let Some((begun, generation)) = self.asked.take() else {
            return;
        };
        let is_behind = |known: BatchCursor| {
            self.cursor.epoch == known.epoch && self.cursor.seq < known.seq || self.cursor.epoch < known.epoch
        };
        assert!(
            !is_behind(begun.cursor) && !is_behind(begun.seen),
            "{:#?}",
            self.log
        );
        let is_missing = !begun.full && begun.cursor.epoch == self.cursor.epoch && self.random.chance(80);
        let (kind, batches) = match is_missing {
            true => {
                let batches = self.versions.iter().map(|version| version.batch.clone());
                let is_asked =
                    |batch: &EventBatch| batch.epoch == begun.cursor.epoch && batch.seq > begun.cursor.seq;
                (ResyncAnswerKind::Missing, batches.filter(is_asked).collect())
            }
            false => {
                let state = EventBatch {
                    epoch: self.cursor.epoch,
                    profile: Some(self.profile.clone()),
                    ..batch(
                        self.cursor.seq.max(1),
                        self.blocks.iter().copied().map(stored_block).collect(),
                    )
                };
                (ResyncAnswerKind::Full, vec![state])
            }
        };
        self.log.push(format!("answer {kind:?} to {:?}", self.cursor));
        let made = (self.cursor.seq > 0).then_some(self.time_us);
        let answer = ResyncAnswer {
            kind,
            cursor: self.cursor,
            time_us: made,
            batches,
        };
        self.answer = Some((begun, answer, generation));
    }

    async fn take_answer(&mut self) {
        let Some((begun, answer, generation)) = self.answer.take() else {
            return;
        };
        let Scene { pool, holder, .. } = &self.scene;
        let finished = pool.finish_resync(holder, begun.number, answer, generation);
        let outcome = finished.await.unwrap();
        self.log.push(format!("finished {outcome:?}"));
        self.has_failed &= outcome == ResyncOutcome::Superseded;
    }

    async fn step(&mut self) {
        match self.random.below(100) {
            0..=29 => self.publish(),
            30 => self.restart(),
            31 => self.leave(),
            32..=69 => self.deliver().await,
            70..=71 if self.has_stream => self.kill().await,
            70..=71 => self.break_connection(),
            72 if self.has_stream => self.write().await,
            72 => self.drop_next(),
            73..=79 => self.ask().await,
            80..=88 => self.answer().await,
            89..=97 => self.take_answer().await,
            _ => self.give_up().await,
        }
    }

    async fn check(&mut self, seed: u64) {
        if self.has_failed {
            self.damaged = 0;
        }
        self.scene.pool.drain().await.unwrap();
        let reasons = self.scene.reasons_of(self.scene.holder.1);
        // A holder that has left is not checked.
        if reasons.is_none_or(|reasons| !reasons.is_empty()) {
            return;
        }
        let holders = self.scene.namespace().indexer.holders();
        let is_it = |holder: &&Arc<HolderRecord>| holder.id.worker == self.scene.holder.0.worker;
        let status = &holders.iter().find(is_it).unwrap().status;
        let (cursor, profile) = (status.cursor.load(), status.profile());
        let has = |block: &u64| {
            let query = QueryKey::SequenceHashes(vec![SequenceHash(*block)]);
            let search = kvatlas_core::index::Search::default();
            let matches = self.scene.namespace().indexer.find_matches(&query, search);
            matches.unwrap().holders().next().is_some()
        };
        let found: BTreeSet<u64> = (1..=BLOCKS).filter(has).collect();
        // A new epoch has no state before its first batch.
        let version = (0..self.versions.len()).find(|version| self.at(*version) == cursor);
        let known = version.map_or_else(BTreeSet::new, |version| self.versions[version].blocks.clone());
        let told = version.map_or_else(Profile::default, |version| self.versions[version].profile.clone());
        assert_eq!(profile, told, "seed {seed}: at {cursor:?}; {:#?}", self.log);
        let newest = self.at(self.floor.max(self.damaged));
        let is_new = (cursor.epoch, cursor.seq) >= (newest.epoch, newest.seq);
        assert!(
            is_new && found == known,
            "seed {seed}: exact at {cursor:?} with {found:?}, not {known:?}; has come: {newest:?}; {:#?}",
            self.log
        );
    }
}

#[tokio::test]
async fn whatever_happens_what_is_exact_is_right() {
    let runs = setting("KVATLAS_TEST_OPERATIONS", 20_000) / STEPS as u64;
    for seed in 1..=runs {
        let mut world = World::begin(seed).await;
        for _ in 0..STEPS {
            world.step().await;
            world.check(seed).await;
        }
    }
}
