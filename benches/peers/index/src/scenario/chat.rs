//! Scenario B: multi-turn chat, with one thread that writes and one thread that queries at the same time.
//!
//! There are 16 system prompts of 64 blocks, and 2,000 conversations that begin with one of them. A conversation grows
//! by 8 to 32 blocks in each of 6 turns, on 1 to 3 of 64 workers. A full worker forgets the tails of the conversations
//! that it has not seen for the longest time.
//!
//! Of all operations, 70 % are queries and 30 % are events. One round of conversations is stored before the clock
//! starts. In the timed rounds, each thread goes through its own list as fast as it can. The rate is the number of all
//! operations divided by the time until both threads are done.

use std::collections::{BTreeMap, HashSet};
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use crate::contender::{
    self, Binary, ChainIndex, CompressedTree, Contender, Form, InMode, Kvatlas, Names, Positional, RadixTree,
    Reader, Run, Shape, SmgTree, Strided, TwoTiers, Writer, row,
};
use crate::measure::{Applied, Timing, percentile, timer_cost_ns, trim_memory};
use crate::oracle::Oracle;
use crate::report::{Column, Ledger};
use crate::workload::{Prompt, Segment, mix, shuffled};

use super::{Effort, progress, rotated};

const SYSTEM_PROMPTS: u64 = 16;
const SYSTEM_BLOCKS: u32 = 64;
const CONVERSATIONS: usize = 2_000;
const TURNS: usize = 6;
const WORKERS: u32 = 64;
/// Maximum number of blocks of conversations that a worker keeps. In each round, a worker stores about twice this
/// number.
const WORKER_BLOCKS_MAX: u32 = 3_500;
/// Number of queries in ten operations. The others are events.
const QUERIES_IN_TEN: usize = 7;

/// Number of conversations about which the answers are checked at the end.
const CHECKED: usize = 2_000;

/// Figure: millions of operations in a second.
pub const RATE: &str = "chat, rate";
/// Figures: nanoseconds of a query, at the median and the tails.
pub const PERCENTILES: [(&str, &str, f64); 3] = [
    ("find p50, ns", "chat, p50", 0.5),
    ("p99", "chat, p99", 0.99),
    ("p99.9", "chat, p999", 0.999),
];
const FINDS: &str = "chat, finds";
const EVENTS: &str = "chat, events";

/// Consecutive blocks of a conversation that a worker stores or removes.
#[derive(Debug, Clone, Copy)]
struct Change {
    is_store: bool,
    worker: u32,
    conversation: usize,
    from: u32,
    to: u32,
}

/// Whole scenario, with a list of operations for each thread.
struct Script {
    conversations: Vec<Prompt>,
    /// Changes that are made before the clock starts.
    before: Vec<Change>,
    changes: Vec<Change>,
    /// Queries: a conversation, and the number of its blocks that the query names.
    queries: Vec<(usize, u32)>,
}

/// Blocks that a worker holds: its conversations, the system prompts, and the number of all other blocks.
#[derive(Debug, Default)]
struct Cache {
    /// The conversations that the worker holds. Each has its number of held blocks, including the system prompt, and
    /// the time of its last use.
    held: BTreeMap<usize, (u32, u64)>,
    systems: HashSet<u64>,
    own_blocks: u32,
}

impl Cache {
    /// Simulates that a worker computes the first `to` blocks of a conversation. Stores the blocks that the worker does
    /// not hold.
    fn prefill(&mut self, change: Change, system: u64, now: u64, changes: &mut Vec<Change>) {
        let Change { conversation, to, .. } = change;
        let shared = if self.systems.insert(system) {
            0
        } else {
            SYSTEM_BLOCKS
        };
        let held = self.held.get(&conversation).map_or(shared, |(depth, _)| *depth);
        if held < to {
            changes.push(Change { from: held, ..change });
            self.own_blocks += to - held.max(SYSTEM_BLOCKS);
        }
        self.held.insert(conversation, (held.max(to), now));
        while self.own_blocks > WORKER_BLOCKS_MAX {
            self.evict(change.worker, changes);
        }
    }

    /// Removes the later half of the least recently used conversation, or all of it after the system prompt if the half
    /// is short.
    fn evict(&mut self, worker: u32, changes: &mut Vec<Change>) {
        let Some((&conversation, &(depth, seen))) = self.held.iter().min_by_key(|(_, (_, seen))| *seen)
        else {
            return;
        };
        let kept = SYSTEM_BLOCKS + (depth - SYSTEM_BLOCKS) / 2;
        let kept = if depth - kept < 8 { SYSTEM_BLOCKS } else { kept };
        changes.push(Change {
            is_store: false,
            worker,
            conversation,
            from: kept,
            to: depth,
        });
        self.own_blocks -= depth - kept;
        if kept == SYSTEM_BLOCKS {
            self.held.remove(&conversation);
        } else {
            self.held.insert(conversation, (kept, seen));
        }
    }
}

impl Script {
    fn new(rounds: usize) -> Self {
        let conversations: Vec<Prompt> = (0..(rounds + 1) * CONVERSATIONS).map(prompt).collect();
        let mut caches: Vec<Cache> = (0..WORKERS).map(|_| Cache::default()).collect();
        let mut before = Vec::new();
        let mut script = Self {
            conversations,
            before: Vec::new(),
            changes: Vec::new(),
            queries: Vec::new(),
        };
        let mut now = 0;
        for round in 0..=rounds {
            for turn in 0..TURNS {
                let order = shuffled(CONVERSATIONS, (round * TURNS + turn) as u64);
                for (place, &number) in order.iter().enumerate() {
                    let conversation = round * CONVERSATIONS + number;
                    let to = depth_after(conversation, turn);
                    now += 1;
                    let changes = if round == 0 {
                        &mut before
                    } else {
                        &mut script.changes
                    };
                    for worker in workers_of(conversation) {
                        let change = Change {
                            is_store: true,
                            worker,
                            conversation,
                            from: 0,
                            to,
                        };
                        caches[worker as usize].prefill(change, system_of(conversation), now, changes);
                    }
                    if round > 0 {
                        script.queries.push((conversation, to));
                        // Further queries are about conversations that have had this turn.
                        while script.queries.len() * (10 - QUERIES_IN_TEN)
                            < script.changes.len() * QUERIES_IN_TEN
                        {
                            let again = mix(script.queries.len() as u64) as usize % (place + 1);
                            let asked = round * CONVERSATIONS + order[again];
                            script.queries.push((asked, depth_after(asked, turn)));
                        }
                    }
                }
            }
        }
        script.before = before;
        script
    }

    fn oracle(&self) -> Oracle {
        let mut oracle = Oracle::default();
        for change in self.before.iter().chain(&self.changes) {
            let prompt = &self.conversations[change.conversation];
            let sequence = &prompt.sequence[change.from as usize..change.to as usize];
            if change.is_store {
                oracle.store(change.worker, sequence);
            } else {
                oracle.remove(change.worker, sequence);
            }
        }
        oracle
    }

    fn events<W: Writer>(&self, changes: &[Change]) -> Vec<W::Event> {
        let event = |change: &Change| {
            let prompt = &self.conversations[change.conversation];
            let range = change.from as usize..change.to as usize;
            if change.is_store {
                let parent = change
                    .from
                    .checked_sub(1)
                    .map(|before| prompt.sequence[before as usize]);
                let run = Run {
                    parent,
                    position: change.from,
                    blocks: &prompt.blocks[range.clone()],
                    sequence: &prompt.sequence[range],
                };
                W::stored(change.worker, run)
            } else {
                let deepest_first: Vec<u64> = prompt.sequence[range].iter().rev().copied().collect();
                W::removed(change.worker, &deepest_first)
            }
        };
        changes.iter().map(event).collect()
    }

    fn queries<R: Reader>(&self) -> Vec<R::Query> {
        let queries = self.queries.iter();
        queries
            .map(|&(conversation, depth)| {
                R::query(Form::Native, &self.conversations[conversation].prefix(depth))
            })
            .collect()
    }
}

fn system_of(conversation: usize) -> u64 {
    mix(conversation as u64) % SYSTEM_PROMPTS
}

/// Returns the one to three different workers of a conversation.
fn workers_of(conversation: usize) -> Vec<u32> {
    let mixed = mix(conversation as u64 ^ (1 << 50));
    let count = 1 + mixed % 3;
    let first = mixed >> 8;
    // The steps from the first worker are different, and below 64.
    (0..count)
        .map(|number| u32::try_from((first + number * 21) % u64::from(WORKERS)).unwrap_or(0))
        .collect()
}

/// Returns the number of blocks of a conversation after a turn, including the system prompt.
fn depth_after(conversation: usize, turn: usize) -> u32 {
    let growth = |turn: usize| 8 + (mix((conversation * TURNS + turn) as u64 ^ (1 << 51)) % 25) as u32;
    SYSTEM_BLOCKS + (0..=turn).map(growth).sum::<u32>()
}

fn prompt(conversation: usize) -> Prompt {
    let system = Segment {
        source: (1 << 33) + system_of(conversation),
        blocks: 0..SYSTEM_BLOCKS,
    };
    let own = Segment {
        source: (1 << 34) + conversation as u64,
        blocks: SYSTEM_BLOCKS..depth_after(conversation, TURNS - 1),
    };
    Prompt::new(vec![system, own])
}

/// Times of one run of the two lists: changes and queries.
struct Outcome {
    applied: Applied,
    writing: Duration,
    asking: Duration,
    times_ns: Vec<u32>,
}

type Measure = fn(&Script, &Oracle, &mut Ledger);

const CONTENDERS: [Measure; 9] = [
    at_once::<Kvatlas>,
    at_once::<InMode<Names>>,
    at_once::<InMode<TwoTiers>>,
    at_once::<ChainIndex>,
    at_once::<SmgTree>,
    at_once::<CompressedTree>,
    at_once::<Positional<Strided>>,
    at_once::<Positional<Binary>>,
    in_turns::<RadixTree>,
];

/// Runs the scenario for every contender. A contender that only one thread can use gets the changes and the queries in
/// turns.
pub fn run(effort: Effort, ledger: &mut Ledger) {
    let script = Script::new(if effort.is_quick { 1 } else { 3 });
    let oracle = script.oracle();
    progress(&format!(
        "chat: {} queries, {} events",
        script.queries.len(),
        script.changes.len()
    ));
    for repetition in 0..effort.repetitions {
        progress(&format!("chat: repetition {}", repetition + 1));
        for number in rotated(CONTENDERS.len(), repetition) {
            CONTENDERS[number](&script, &oracle, ledger);
            trim_memory();
        }
    }
}

/// Prints the table of the scenario.
pub fn print(ledger: &Ledger) {
    let mut columns = vec![Column::new("M operations a second", RATE)];
    columns.extend(PERCENTILES.map(|(heading, figure, _)| Column::new(heading, figure)));
    columns.push(Column::new("M finds a second", FINDS));
    columns.push(Column::new("M events a second", EVENTS));
    ledger.print(
        "B. Multi-turn chat, 70 % queries, one writer and one reader at once",
        &contender::rows(),
        &columns,
    );
}

fn at_once<C: Contender<Reader: Reader<Query: Send> + Send, Writer: Send>>(
    script: &Script,
    oracle: &Oracle,
    ledger: &mut Ledger,
) {
    for &(shape, _) in <C::Reader as Reader>::SHAPES {
        let (reader, mut writer) = C::build(WORKERS);
        writer.apply(script.events::<C::Writer>(&script.before), Timing::Whole);
        let events = script.events::<C::Writer>(&script.changes);
        let mut queries = script.queries::<C::Reader>();
        let outcome = thread::scope(|scope| {
            let reader = &reader;
            let writing = scope.spawn(move || {
                let started = Instant::now();
                let applied = writer.apply(events, Timing::Whole);
                (applied, started.elapsed(), writer)
            });
            let mut times_ns = Vec::with_capacity(queries.len());
            let asking = ask(reader, &mut queries, shape, &mut times_ns);
            let (applied, writing, writer) = writing.join().expect("applying does not panic");
            // The writer is dropped outside of the timed region.
            drop(writer);
            Outcome {
                applied,
                writing,
                asking,
                times_ns,
            }
        });
        record::<C>(script, shape, outcome, ledger);
        check::<C>(script, oracle, &reader, shape, ledger);
    }
}

/// Goes through the changes and the queries on one thread, some of each in turn. [`at_once`] goes through them on two
/// threads.
fn in_turns<C: Contender>(script: &Script, oracle: &Oracle, ledger: &mut Ledger) {
    const EVENTS_IN_TURN: usize = 30;
    for &(shape, _) in <C::Reader as Reader>::SHAPES {
        let (reader, mut writer) = C::build(WORKERS);
        writer.apply(script.events::<C::Writer>(&script.before), Timing::Whole);
        let mut events = script.events::<C::Writer>(&script.changes).into_iter();
        let mut queries = script.queries::<C::Reader>();
        let (mut applied, mut times_ns) = (Applied::default(), Vec::with_capacity(queries.len()));
        let queries_in_turn = queries.len() / script.changes.len().div_ceil(EVENTS_IN_TURN) + 1;
        let started = Instant::now();
        for turn in queries.chunks_mut(queries_in_turn) {
            ask(&reader, turn, shape, &mut times_ns);
            let events: Vec<_> = events.by_ref().take(EVENTS_IN_TURN).collect();
            applied.add(&writer.apply(events, Timing::Whole));
        }
        applied.add(&writer.apply(events.collect(), Timing::Whole));
        let elapsed = started.elapsed();
        let outcome = Outcome {
            applied,
            writing: elapsed,
            asking: elapsed,
            times_ns,
        };
        record::<C>(script, shape, outcome, ledger);
        check::<C>(script, oracle, &reader, shape, ledger);
    }
}

fn ask<R: Reader>(reader: &R, queries: &mut [R::Query], shape: Shape, times_ns: &mut Vec<u32>) -> Duration {
    let timer_cost = timer_cost_ns();
    let started = Instant::now();
    for query in queries {
        let before = Instant::now();
        black_box(reader.find(query, shape));
        let elapsed = before.elapsed().as_nanos() as f64 - timer_cost;
        times_ns.push(elapsed.max(0.0) as u32);
    }
    started.elapsed()
}

fn record<C: Contender>(script: &Script, shape: Shape, mut outcome: Outcome, ledger: &mut Ledger) {
    let row = row::<C>(shape);
    let (queries, events) = (script.queries.len() as f64, outcome.applied.events as f64);
    let elapsed = outcome.writing.max(outcome.asking);
    let rate = |operations: f64, time: Duration| operations / time.as_secs_f64() / 1e6;
    ledger.record(RATE, &row, rate(queries + events, elapsed));
    ledger.record(FINDS, &row, rate(queries, outcome.asking));
    ledger.record(EVENTS, &row, rate(events, outcome.writing));
    outcome.times_ns.sort_unstable();
    for (_, figure, share) in PERCENTILES {
        ledger.record(figure, &row, percentile(&outcome.times_ns, share));
    }
    if outcome.applied.refused > 0 {
        progress(&format!("{row}: refused {} events", outcome.applied.refused));
    }
}

/// Checks the state after all changes. The answers about the last [`CHECKED`] conversations must equal the oracle's
/// answers.
fn check<C: Contender>(
    script: &Script,
    oracle: &Oracle,
    reader: &C::Reader,
    shape: Shape,
    ledger: &mut Ledger,
) {
    let last = script.conversations.iter().rev().take(CHECKED);
    for prompt in last {
        let mut query = C::Reader::query(Form::Native, prompt);
        let is_right = reader.answer(&mut query, shape) == oracle.answer(&prompt.sequence);
        ledger.judge("B, in the end", &row::<C>(shape), is_right);
    }
}
