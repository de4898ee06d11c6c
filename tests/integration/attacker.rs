//! Honest and hostile workers and routers together, on one broker and in one namespace.
//!
//! Hostile clients do whatever the permissions of `deploy/nats` allow. A hostile publisher sends anything on the
//! subjects of its own workers, and answers a daemon's questions about these workers with anything. A hostile router
//! sends anything on query subjects. A seed decides what hostile clients do.
//!
//! During the whole test, replies about honest workers are compared with the truth: no reply that is marked exact may
//! be wrong, and at the end every reply must equal the truth. The daemon must not end or panic, and its memory must
//! stay within a bound.
//!
//! | kind | what it is |
//! |---|---|
//! | noise | random bytes, cut and changed batches, numbers at the limits of their ranges, endless answers |
//! | clears | a clear, followed by an event that cannot be decoded; a batch of a lower epoch after a batch of a higher
//! epoch |
//! | forms | single blocks, children before their parents, parents whose names come later, one hash under two parents,
//! copies in several tiers |
//! | floods | new blocks without end, in an index with too little room (only in a test of their own) |
//! | queries | batches about blocks that all workers hold, compressed hashes, damaged queries, replies to subjects of
//! other clients |
//!
//! `KVATLAS_TEST_ATTACK_SECONDS` sets a longer time, and `KVATLAS_TEST_ATTACK_SEED` repeats a run.

use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_client::publish::Transport;
use kvatlas_core::hash::{Position, SequenceHash};
use kvatlas_core::wire::{
    BatchCursor, BlockNames, DegradedReasons, Event, EventBatch, QueryRequest, RemovedBlocks, Resumable,
    ResumableBlocks, ResyncAnswerKind, ResyncChunk, SingleQuery, StoredBlocks, Tier,
};
use tokio::time::Instant;

use crate::support::fleet::{Fleet, OneDaemon, QUICK_RESYNCS};
use crate::support::metrics::total;
use crate::support::process::{Process, memory_peak};
use crate::support::truth::{HOSTILE, Workload};
use crate::support::{broker, by_sequence, hashes, removed, stored, stored_after};

/// Minimum number of hostile acts. On a busy machine, an attacker acts less often in five seconds, and so attacks for
/// longer.
const ACTS_MIN: u64 = 4000;
/// Number of hostile workers.
const WORKERS: u64 = 6;
/// Maximum memory of the daemon in this test, in bytes: twice the bounds of its queues and answers together.
const MEMORY_MAX: u64 = 512 << 20;

fn number_of(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

/// Source of hostile acts, which a seed decides.
struct Attacker {
    nats: async_nats::Client,
    random: fastrand::Rng,
    /// Prompts of the honest workers.
    prompts: Vec<Vec<SequenceHash>>,
    /// Whether the attacker stores new blocks without end.
    floods: bool,
    /// Epoch of the last batch.
    epoch: u64,
}

impl Attacker {
    /// Returns random bytes, at most `length_max`.
    fn noise(&mut self, length_max: usize) -> Vec<u8> {
        let length = self.random.usize(..=length_max);
        std::iter::repeat_with(|| self.random.u8(..))
            .take(length)
            .collect()
    }

    fn prompt(&mut self) -> Vec<SequenceHash> {
        let number = self.random.usize(..self.prompts.len());
        self.prompts[number].clone()
    }

    /// Returns a number at which mistakes are likely, such as 0 or the largest number.
    fn number(&mut self) -> u64 {
        match self.random.u8(..8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << 63,
            3 => self.random.u64(..),
            _ => self.random.u64(1..50),
        }
    }

    fn subject(&mut self) -> String {
        let worker = format!("{HOSTILE}{}", self.random.u64(..WORKERS));
        match self.random.u8(..20) {
            0 => format!("kvatlas.v1.events.junk-{}.{worker}", self.random.u16(..)),
            1 => format!("kvatlas.v1.events.llama.{worker}.more"),
            2 => format!("kvatlas.v1.events.{worker}"),
            _ => format!("kvatlas.v1.events.llama.{worker}"),
        }
    }

    /// Makes an event that stores consecutive blocks. The names of the blocks and the position are optional.
    fn sequence(
        &mut self,
        parent: Option<u64>,
        position: Option<usize>,
        hashes: &[SequenceHash],
        names: Option<u64>,
    ) -> Event {
        let engine_hashes = names.map(|names| hashes.iter().map(|hash| hash.0 ^ names).collect());
        Event::Stored(StoredBlocks {
            names: BlockNames::Sequence {
                parent: parent.map(SequenceHash),
                position: position.and_then(|position| Position::new(position as u64).ok()),
                hashes: hashes.to_vec(),
            },
            content: None,
            engine_hashes,
            resumable: match self.random.u8(..4) {
                0 => Resumable::from_flags(hashes.iter().map(|_| self.random.bool())),
                _ => Resumable::ALL,
            },
        })
    }

    /// Makes an event about blocks of honest workers, in a form that is rare or that no engine sends.
    fn form(&mut self) -> Event {
        let chain = self.prompt();
        let some = self.random.usize(1..chain.len());
        let (before, name) = (chain[some - 1].0, self.random.u64(1..4) << 60);
        match self.random.u8(..12) {
            // A single block, with its position or without.
            0 => self.sequence(Some(before), Some(some), &chain[some..=some], None),
            1 => self.sequence(Some(before), None, &chain[some..=some], None),
            // Children whose parent's name comes later, or never.
            2 => self.sequence(Some(before ^ name), Some(some), &chain[some..], None),
            3 => self.sequence(Some(before ^ name), None, &chain[some..], Some(name)),
            4 => self.sequence(None, None, &chain[..some], Some(name)),
            // One hash under two parents, and at two positions.
            5 => self.sequence(Some(chain[0].0), None, &chain[some..], None),
            6 => self.sequence(None, None, &chain[some..], Some(name)),
            // Copies of known blocks that wait for an unknown parent.
            7 => {
                let unknown = self.random.u64(..);
                self.sequence(Some(unknown), None, &chain, None)
            }
            8 => removed(
                chain[some..]
                    .iter()
                    .map(|hash| SequenceHash(hash.0 ^ name))
                    .collect(),
            ),
            9 => Event::Resumable(ResumableBlocks {
                hashes: chain[some..].to_vec(),
                lineage_hashes: Vec::new(),
                resumable: self.random.bool(),
            }),
            // Each block is removed twice in one event.
            10 => removed([&chain[some..], &chain[some..]].concat()),
            _ => Event::Removed(RemovedBlocks::by_sequence(chain)),
        }
    }

    fn event(&mut self) -> Event {
        let chain = self.prompt();
        let (some, most) = (self.random.usize(1..chain.len()), chain.len() as u64);
        if self.floods && self.random.bool() {
            let blocks = self.random.u64(1..200);
            return stored(hashes(self.random.u64(..), blocks));
        }
        match self.random.u8(..18) {
            12.. => self.form(),
            // Blocks of honest workers, in their own order and in other orders.
            0..=2 => stored(chain),
            3 => stored(chain.into_iter().rev().collect()),
            4 => stored_after(chain[some].0, chain[..some].to_vec()),
            5 => stored_after(self.number(), hashes(self.random.u64(..1000), most)),
            6 => removed(chain[some..].to_vec()),
            // Many blocks with one name.
            7 => stored(vec![chain[0]; 200]),
            8 => Event::Stored(StoredBlocks {
                names: BlockNames::Sequence {
                    parent: None,
                    position: None,
                    hashes: chain,
                },
                content: None,
                engine_hashes: Some(vec![7; self.random.usize(..30)]),
                resumable: Resumable::ALL,
            }),
            9 => Event::Cleared,
            10 => Event::Doubted(DegradedReasons::default()),
            _ => Event::Goodbye,
        }
    }

    fn batch(&mut self) -> EventBatch {
        let events = self.random.usize(..6);
        // An epoch and number that continue the last batch, a lower epoch, the next epoch, or numbers without a
        // meaning.
        let (epoch, seq) = match self.random.u8(..4) {
            0 => (self.epoch, self.random.u64(1..40)),
            1 => (self.epoch.saturating_sub(self.random.u64(1..50)), 1),
            2 => (self.epoch + 1, 1),
            _ => (self.number(), self.number()),
        };
        self.epoch = self.epoch.max(epoch.min(1 << 40));
        EventBatch {
            epoch,
            seq,
            rank: match self.random.u8(..10) {
                0 => self.random.u32(..),
                other => u32::from(other % 3),
            },
            time_us: self.random.bool().then(|| self.number()),
            tier: match self.random.u8(..4) {
                0 => Tier::new(self.random.u8(..8)).unwrap(),
                _ => Tier::DEVICE,
            },
            block_size: None,
            profile: None,
            events: (0..events).map(|_| self.event()).collect(),
        }
    }

    /// Returns the payload of a batch, which may be damaged.
    fn payload(&mut self) -> Vec<u8> {
        let mut payload = match self.random.u8(..24) {
            0 => return self.noise(2000),
            // A batch at the limit of blocks in an event, or beyond it.
            1 => {
                let blocks = self.random.u64(30_000..80_000);
                let first = self.random.u64(..4) << 40;
                let mut batch = self.batch();
                batch.events = vec![stored(hashes(first, blocks))];
                batch.encode()
            }
            // A clear, followed by events that cannot be decoded.
            2 => {
                let mut batch = self.batch();
                batch.events = vec![Event::Cleared, self.event(), removed(hashes(1, 3))];
                let mut payload = batch.encode();
                let word = b"removed";
                if let Some(at) = payload.windows(word.len()).rposition(|part| part == word) {
                    payload[at] = b'x';
                }
                return payload;
            }
            _ => self.batch().encode(),
        };
        match self.random.u8(..6) {
            0 => payload.truncate(self.random.usize(..=payload.len())),
            1 => {
                for _ in 0..self.random.usize(1..4) {
                    let at = self.random.usize(..payload.len());
                    payload[at] = self.random.u8(..);
                }
            }
            _ => {}
        }
        payload
    }

    /// Returns a question of a hostile router.
    fn question(&mut self) -> Vec<u8> {
        match self.random.u8(..10) {
            0 => Vec::new(),
            1 | 2 => self.noise(500),
            // Queries about blocks that all honest workers hold, and about some of these blocks.
            8 => {
                let mut query = by_sequence(&self.prompt());
                query.options.explain = self.random.bool();
                query.options.tiers = self.random.bool();
                QueryRequest::Batch(vec![query; 256]).encode()
            }
            9 => {
                let prompt = self.prompt();
                let chosen: Vec<usize> = (0..prompt.len()).filter(|_| self.random.bool()).collect();
                let hashes: Vec<SequenceHash> = chosen.iter().map(|at| prompt[*at]).collect();
                let positions = chosen.iter().filter_map(|at| Position::new(*at as u64).ok());
                let query = SingleQuery {
                    positions: Some(positions.collect()),
                    ..by_sequence(&hashes)
                };
                QueryRequest::Batch(vec![query; 1 + self.random.usize(..60)]).encode()
            }
            3 => {
                let mut payload = QueryRequest::Single(by_sequence(&self.prompt())).encode();
                let at = self.random.usize(..payload.len());
                payload[at] = self.random.u8(..);
                payload
            }
            4 => QueryRequest::Batch(vec![by_sequence(&hashes(1, 10_000)); 4]).encode(),
            5 => QueryRequest::Batch(vec![by_sequence(&self.prompt()); 300]).encode(),
            _ => QueryRequest::Single(by_sequence(&self.prompt())).encode(),
        }
    }

    async fn ask(&mut self) {
        let subject = match self.random.u8(..8) {
            0 => "kvatlas.v1.query.nobody".to_owned(),
            1 => "kvatlas.v1.query.llama.more".to_owned(),
            2 => "kvatlas.v1.status.llama".to_owned(),
            _ => "kvatlas.v1.query.llama".to_owned(),
        };
        let payload = self.question();
        // The server allows a client to name any subject for the reply.
        let reply_to = match self.random.u8(..6) {
            0 => "kvatlas.v1.events.llama.gpu-0".to_owned(),
            1 => "kvatlas.v1.events.llama.anchor-0".to_owned(),
            2 => "$JS.API.STREAM.PURGE.KVATLAS_EVENTS".to_owned(),
            3 => return self.nats.publish(subject, payload.into()).await.unwrap(),
            _ => self.nats.new_inbox(),
        };
        let sent = self.nats.publish_with_reply(subject, reply_to, payload.into());
        sent.await.unwrap();
    }

    async fn act(&mut self) {
        match self.random.u8(..10) {
            0..=6 => {
                let (subject, payload) = (self.subject(), self.payload());
                // Sometimes the same message is sent many times.
                let times = if self.random.u8(..50) == 0 { 30 } else { 1 };
                for _ in 0..times {
                    let sent = self.nats.publish(subject.clone(), payload.clone().into());
                    sent.await.unwrap();
                }
            }
            _ => self.ask().await,
        }
    }

    /// Acts for `time`, and at least [`ACTS_MIN`] times. Returns the number of acts.
    async fn attack(&mut self, time: Duration) -> u64 {
        let (end, mut acts) = (Instant::now() + time, 0);
        while Instant::now() < end || acts < ACTS_MIN {
            self.act().await;
            acts += 1;
            if self.random.u8(..8) == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        acts
    }

    /// Returns a hostile publisher's answer to a question: nothing, noise, lies, or an answer without an end.
    fn answer(&mut self) -> Vec<Vec<u8>> {
        let cursor = BatchCursor {
            epoch: self.number(),
            seq: self.number(),
        };
        let kinds = [ResyncAnswerKind::Full, ResyncAnswerKind::Missing];
        let kind = kinds[self.random.usize(..2)];
        let rank = self.random.u32(..3);
        let (count, ends) = match self.random.u8(..6) {
            0 => return Vec::new(),
            1 => return vec![self.noise(1000)],
            2 => (400, false),
            _ => (self.random.u32(1..5), self.random.bool()),
        };
        let skips = self.random.u8(..5) == 0;
        (0..count)
            .map(|number| ResyncChunk {
                rank,
                cursor,
                kind,
                number: number + u32::from(skips && number > 1),
                is_last: ends && number + 1 == count,
                time_us: None,
                recomputed_block_size: None,
                batches: (0..self.random.u8(..4)).map(|_| self.payload()).collect(),
            })
            .map(|chunk| chunk.encode())
            .filter(|payload| payload.len() < 1 << 20)
            .collect()
    }
}

/// Answers all questions about hostile workers, without end.
async fn answer(mut attacker: Attacker) {
    let mut questions = attacker.nats.subscribe("kvatlas.v1.resync.>").await.unwrap();
    while let Some(question) = questions.next().await {
        let (true, Some(reply_to)) = (question.subject.contains(HOSTILE), question.reply) else {
            continue;
        };
        for chunk in attacker.answer() {
            let _ = attacker.nats.publish(reply_to.clone(), chunk.into()).await;
        }
    }
}

/// Attacks a daemon that has these further settings.
async fn attack_daemon(floods: bool, more: &[(&'static str, &'static str)]) {
    let seed = number_of("KVATLAS_TEST_ATTACK_SEED").unwrap_or(7);
    let time = number_of("KVATLAS_TEST_ATTACK_SECONDS").map_or(Duration::ZERO, Duration::from_secs);
    let broker = broker().await;
    let bounds = [
        ("events.lanes", "2"),
        ("events.lane_queue_bytes", "4 MiB"),
        ("limits.max_namespaces", "8"),
        ("limits.max_workers_per_namespace", "32"),
        ("limits.max_ranks_per_worker", "8"),
        ("limits.max_blocks_per_holder", "100000"),
        ("resync.max_answer_bytes", "4 MiB"),
        ("queries.max_waiting_bytes", "1 MiB"),
    ];
    let settings: Vec<_> = QUICK_RESYNCS
        .into_iter()
        .chain(bounds)
        .chain(more.iter().copied())
        .collect();
    let mut daemon = Process::serve(broker.url(), &settings);
    let mut fleet = Fleet::through(broker.url(), Transport::Core, 4, seed).await;
    let attacker = async |seed| Attacker {
        nats: async_nats::connect(broker.url()).await.unwrap(),
        random: fastrand::Rng::with_seed(seed),
        prompts: Workload::new(seed, 16).prompts().to_vec(),
        floods,
        epoch: 1,
    };
    let mut hostile = attacker(seed).await;
    let answering = tokio::spawn(answer(attacker(seed + 1).await));
    let mut acts = 0;
    let attack = async { acts = hostile.attack(time).await };
    let mut tally = Box::pin(fleet.under_load(&OneDaemon, attack)).await;
    assert!(daemon.runs(), "seed {seed}: the daemon has ended");
    match floods {
        // Honest workers have room for their share of the blocks, so they must be exact. No query asks about hostile
        // workers.
        true => fleet.settle_below(&mut tally).await,
        false => fleet.settle(&mut tally).await,
    }
    answering.abort();
    tally.report(&format!(
        "hostile publishers and routers, seed {seed}, {acts} acts, floods {floods}"
    ));
    let dropped = |reason: &str| {
        total(
            &daemon,
            "kvatlas_batches_dropped_total",
            &format!("reason=\"{reason}\""),
        )
    };
    for reason in ["undecodable", "bad_subject", "epoch_ahead", "too_many_ranks"] {
        assert!(
            dropped(reason) > 0.0,
            "seed {seed}: the attack did not reach {reason}"
        );
    }
    match memory_peak(daemon.pid()) {
        Some(peak) => {
            println!("seed {seed}: {} MiB at most", peak >> 20);
            assert!(peak <= MEMORY_MAX, "seed {seed}: {peak} bytes");
        }
        None => crate::support::skipped("this system does not say how much memory a process has had"),
    }
    let (code, log) = daemon.stop();
    assert_eq!(code, Some(0), "seed {seed}: {log}");
    assert!(!log.contains("panicked"), "seed {seed}: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_honest_are_answered_for_rightly_whatever_the_hostile_do() {
    attack_daemon(false, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_honest_are_answered_for_rightly_where_the_hostile_fill_the_index() {
    attack_daemon(true, &[("limits.max_blocks_total", "20000")]).await;
}
