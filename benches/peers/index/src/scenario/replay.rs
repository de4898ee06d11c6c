//! Scenario D: a recorded trace of conversations, replayed at an offered rate.
//!
//! The trace names 512-token pieces of prompts. Each piece becomes 32 blocks of 16 tokens. The second piece of a
//! request decides its worker. The request is queried, and the blocks that the worker does not hold are stored. A full
//! worker removes the pieces that it has not used for the longest time, ends of prompts first. Every block that is
//! queried, stored or removed is a block operation.
//!
//! One thread applies events and one thread queries. The rate gives each operation a due time, before which it does not
//! start. A rate is valid if two conditions hold. The measured rate was at least 99 % of the offered rate (refused
//! events do not count). And 99 % of the queries were answered within a millisecond after their due time. So the time
//! that a query waits for an earlier query counts, too. A rate that fails is tried up to three times more. A bisection
//! goes on until the highest valid rate and the lowest invalid rate are within 10 %. kvatlas has two rows, and the
//! difference between them is noise.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hint::{black_box, spin_loop};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::contender::{
    self, Binary, ChainIndex, CompressedTree, Contender, Form, Kvatlas, Positional, RadixTree, Reader, Run,
    Shape, SmgTree, Strided, Writer,
};
use crate::measure::{Timing, percentile, trim_memory};
use crate::oracle::Oracle;
use crate::report::{Column, Ledger};
use crate::workload::{Prompt, Segment, mix};

use super::{Effort, progress, rotated};

const WORKERS: u32 = 64;
/// Number of blocks in a piece. The trace divides prompts into pieces of 512 tokens.
const PIECE_BLOCKS: u32 = 32;
/// Maximum number of pieces (512 tokens of a prompt) that a worker keeps. All workers together keep 0.6M blocks.
const WORKER_PIECES_MAX: usize = 300;
/// Approximate number of block operations that one list of events covers. The thread waits until the offered rate
/// allows the first event of a list, and then applies the whole list without waiting.
const LIST_BLOCKS: u64 = 16_384;
/// Minimum share of an offered rate that a valid replay reaches.
const REACHED_MIN: f64 = 0.99;
/// Maximum delay of 99 % of the queries in a valid replay, in nanoseconds. The delay is from the time at which the
/// offered rate allows the query until its answer.
const LATENCY_MAX_NS: f64 = 1e6;
/// Precision of the search for the highest valid rate. The search ends when the lowest invalid rate is at most this
/// multiple of the highest valid rate.
const BRACKET: f64 = 1.1;
/// Maximum number of offered rates. The first one is the rate of a replay that does not wait for due times.
const STEPS_MAX: usize = 16;
/// Maximum number of times that the rate is lowered to three quarters of the last one, until a rate is valid. An index
/// that is slow because of its locks is slow at any rate, so more attempts would not help.
const FALLS_MAX: usize = 5;
/// Number of times that a rate is tried. A replay lasts some tenths of a second, so a single pause of the machine could
/// make it fail.
const TRIES: usize = 4;
/// Name of the row of the control, which measures kvatlas a second time. The difference between the two rows is noise.
const CONTROL: &str = "kvatlas, again";

/// Figure: millions of block operations in a second.
pub const RATE: &str = "replay, rate";
/// Figure: thousands of queries in a second, at the highest valid rate.
const QUERIES: &str = "replay, queries";
/// Figure: microseconds within which 99 % of the queries are answered after their due time, at the highest valid rate.
const LATENCY: &str = "replay, p99";

/// Line of the trace. Its other fields are not needed.
#[derive(Debug, Deserialize)]
struct Request {
    input_length: u32,
    hash_ids: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Ask {
        request: usize,
    },
    Store {
        request: usize,
        worker: u32,
        from: u32,
        to: u32,
    },
    Remove {
        request: usize,
        worker: u32,
        from: u32,
        to: u32,
    },
}

impl Step {
    fn is_event(self) -> bool {
        !matches!(self, Self::Ask { .. })
    }
}

/// Operations of the trace, in order.
struct Script {
    prompts: Vec<Prompt>,
    steps: Vec<Step>,
    /// For each step, the number of block operations from the first step up to and including this one.
    done_after: Vec<u64>,
}

/// Consecutive pieces of a prompt that a worker stored for one request.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    request: usize,
    from: u32,
    to: u32,
    seen: (usize, Reverse<u32>),
}

/// Pieces that a worker holds, and the order in which the worker will remove them.
#[derive(Debug, Default)]
struct Cache {
    /// Key of the stretch to which each held piece belongs. A stretch is the pieces that one request has stored. Its
    /// key is `(request, from)`: the request, and the number of the first piece.
    pieces: HashMap<u64, (usize, u32)>,
    stretches: HashMap<(usize, u32), Stretch>,
    /// Keys of the stretches (the pieces that one request has stored), in the order in which the worker will remove
    /// them: least recently used first. Among stretches that were last used together, the one deeper in the prompt
    /// comes first.
    order: BTreeMap<(usize, Reverse<u32>), (usize, u32)>,
}

impl Cache {
    /// Marks the held pieces of the request as used, and returns their number.
    fn touch(&mut self, ids: &[u64], now: usize) -> u32 {
        let mut held = 0;
        while let Some(key) = ids.get(held as usize).and_then(|id| self.pieces.get(id)).copied() {
            if let Some(stretch) = self.stretches.get_mut(&key) {
                self.order.remove(&stretch.seen);
                stretch.seen = (now, Reverse(held));
                self.order.insert(stretch.seen, key);
            }
            held += 1;
        }
        held
    }

    fn store(&mut self, request: usize, ids: &[u64], from: u32, now: usize) {
        let to = u32::try_from(ids.len()).expect("a request has few pieces");
        let stretch = Stretch {
            request,
            from,
            to,
            seen: (now, Reverse(to)),
        };
        let key = (request, from);
        self.order.insert(stretch.seen, key);
        self.stretches.insert(key, stretch);
        let new = ids.get(from as usize..).unwrap_or_default();
        self.pieces.extend(new.iter().map(|&id| (id, key)));
    }

    fn evict(&mut self, requests: &[Request]) -> Option<Stretch> {
        let (_, key) = self.order.pop_first()?;
        let stretch = self.stretches.remove(&key)?;
        for id in &requests[stretch.request].hash_ids[stretch.from as usize..stretch.to as usize] {
            self.pieces.remove(id);
        }
        Some(stretch)
    }
}

impl Script {
    fn read(path: &Path, requests_max: usize) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut requests: Vec<Request> = text
            .lines()
            .take(requests_max)
            .map(|line| serde_json::from_str(line).expect("every line of the trace is a request"))
            .collect();
        for request in &mut requests {
            // The last piece may be shorter than the others, so only whole pieces are used.
            request.hash_ids.truncate(request.input_length as usize / 512);
        }
        requests.retain(|request| !request.hash_ids.is_empty());
        Some(Self::new(&requests))
    }

    fn new(requests: &[Request]) -> Self {
        let mut caches: Vec<Cache> = (0..WORKERS).map(|_| Cache::default()).collect();
        let mut steps = Vec::new();
        for (number, request) in requests.iter().enumerate() {
            let ids = &request.hash_ids;
            steps.push(Step::Ask { request: number });
            let decides = ids.get(1).or(ids.first()).copied().unwrap_or(0);
            let worker = u32::try_from(mix(decides) % u64::from(WORKERS)).unwrap_or(0);
            let cache = &mut caches[worker as usize];
            let held = cache.touch(ids, number);
            let to = u32::try_from(ids.len()).expect("a request has few pieces");
            if held < to {
                cache.store(number, ids, held, number);
                steps.push(Step::Store {
                    request: number,
                    worker,
                    from: held * PIECE_BLOCKS,
                    to: to * PIECE_BLOCKS,
                });
            }
            while cache.pieces.len() > WORKER_PIECES_MAX {
                let Some(stretch) = cache.evict(requests) else {
                    break;
                };
                steps.push(Step::Remove {
                    request: stretch.request,
                    worker,
                    from: stretch.from * PIECE_BLOCKS,
                    to: stretch.to * PIECE_BLOCKS,
                });
            }
        }
        let prompts: Vec<Prompt> = requests.iter().map(prompt).collect();
        let mut done = 0;
        let done_after = steps
            .iter()
            .map(|step| {
                done += match *step {
                    Step::Ask { request } => u64::from(prompts[request].len()),
                    Step::Store { from, to, .. } | Step::Remove { from, to, .. } => u64::from(to - from),
                };
                done
            })
            .collect();
        Self {
            prompts,
            steps,
            done_after,
        }
    }

    fn operations(&self) -> u64 {
        self.done_after.last().copied().unwrap_or(0)
    }

    fn event<W: Writer>(&self, step: Step) -> Option<W::Event> {
        let slice = |request: usize, from: u32, to: u32| {
            let prompt = &self.prompts[request];
            let range = from as usize..to as usize;
            (&prompt.blocks[range.clone()], &prompt.sequence[range])
        };
        match step {
            Step::Ask { .. } => None,
            Step::Store {
                request,
                worker,
                from,
                to,
            } => {
                let (blocks, sequence) = slice(request, from, to);
                let before = from.checked_sub(1);
                let run = Run {
                    parent: before.map(|before| self.prompts[request].sequence[before as usize]),
                    position: from,
                    blocks,
                    sequence,
                };
                Some(W::stored(worker, run))
            }
            Step::Remove {
                request,
                worker,
                from,
                to,
            } => {
                let (_, sequence) = slice(request, from, to);
                let deepest_first: Vec<u64> = sequence.iter().rev().copied().collect();
                Some(W::removed(worker, &deepest_first))
            }
        }
    }

    /// Returns the lists of events. Each has the number of block operations before its first event, from which its due
    /// time follows.
    fn lists<W: Writer>(&self) -> Vec<(u64, Vec<W::Event>)> {
        let mut lists: Vec<(u64, Vec<W::Event>)> = Vec::new();
        let mut list_begins = u64::MAX;
        let mut offered: u64 = 0;
        for (&step, &done) in self.steps.iter().zip(&self.done_after) {
            if let Some(event) = self.event::<W>(step) {
                if offered.saturating_sub(list_begins) > LIST_BLOCKS || lists.is_empty() {
                    list_begins = offered;
                    lists.push((offered, Vec::new()));
                }
                if let Some((_, events)) = lists.last_mut() {
                    events.push(event);
                }
            }
            offered = done;
        }
        lists
    }

    /// Returns the queries. Each has the number of block operations before it, from which its due time follows.
    fn queries<R: Reader>(&self) -> Vec<(u64, R::Query)> {
        let mut offered: u64 = 0;
        let mut queries = Vec::new();
        for (&step, &done) in self.steps.iter().zip(&self.done_after) {
            if let Step::Ask { request } = step {
                queries.push((offered, R::query(Form::Native, &self.prompts[request])));
            }
            offered = done;
        }
        queries
    }

    fn oracle(&self) -> Oracle {
        let mut oracle = Oracle::default();
        for step in &self.steps {
            match *step {
                Step::Ask { .. } => {}
                Step::Store {
                    request,
                    worker,
                    from,
                    to,
                } => oracle.store(
                    worker,
                    &self.prompts[request].sequence[from as usize..to as usize],
                ),
                Step::Remove {
                    request,
                    worker,
                    from,
                    to,
                } => oracle.remove(
                    worker,
                    &self.prompts[request].sequence[from as usize..to as usize],
                ),
            }
        }
        oracle
    }
}

fn prompt(request: &Request) -> Prompt {
    let pieces = request.hash_ids.iter().map(|&id| Segment {
        source: (1 << 35) + id,
        blocks: 0..PIECE_BLOCKS,
    });
    Prompt::new(pieces.collect())
}

/// Offered rate, from which the due time of each operation follows. The operation's number of earlier block operations
/// is called `offered`.
#[derive(Debug, Clone, Copy)]
struct Pace {
    started: Instant,
    /// Block operations in a second; infinite in a replay that does not wait.
    rate: f64,
}

impl Pace {
    fn wait(self, offered: u64) {
        let due = Duration::from_secs_f64(offered as f64 / self.rate);
        while self.started.elapsed() < due {
            spin_loop();
        }
    }

    /// Returns the nanoseconds since the due time of the operation that has `offered` operations before it.
    fn late_ns(self, offered: u64) -> u32 {
        let due = Duration::from_secs_f64(offered as f64 / self.rate);
        let late = self.started.elapsed().saturating_sub(due);
        u32::try_from(late.as_nanos()).unwrap_or(u32::MAX)
    }
}

/// Outcome of one replay.
#[derive(Debug, Clone, Copy)]
struct Reached {
    /// Block operations in a second.
    rate: f64,
    /// Delay from a query's due time until its answer, in nanoseconds. 99 % of the queries have at most this delay.
    latency_ns: f64,
}

impl Reached {
    fn is_valid(self, offered: f64) -> bool {
        self.rate >= REACHED_MIN * offered && self.latency_ns < LATENCY_MAX_NS
    }
}

type Replay = fn(&Script, f64, Option<(&Oracle, &mut Ledger)>) -> Reached;

const CONTENDERS: [(&str, Replay); 8] = [
    (Kvatlas::NAME, at_once::<Kvatlas>),
    (ChainIndex::NAME, at_once::<ChainIndex>),
    (SmgTree::NAME, at_once::<SmgTree>),
    (CompressedTree::NAME, at_once::<CompressedTree>),
    (Positional::<Strided>::NAME, at_once::<Positional<Strided>>),
    (Positional::<Binary>::NAME, at_once::<Positional<Binary>>),
    (RadixTree::NAME, in_turns::<RadixTree>),
    (CONTROL, at_once::<Kvatlas>),
];

/// Runs the scenario for every contender. A contender that only one thread can use gets the events and the queries in
/// turns.
pub fn run(trace: &Path, requests_max: usize, effort: Effort, ledger: &mut Ledger) {
    let Some(script) = Script::read(trace, requests_max) else {
        progress(&format!("replay: no trace at {}; left out", trace.display()));
        return;
    };
    let oracle = script.oracle();
    let events = script.steps.iter().filter(|step| step.is_event()).count();
    progress(&format!(
        "replay: {} queries, {events} events, {} block operations",
        script.prompts.len(),
        script.operations()
    ));
    for repetition in 0..effort.repetitions {
        progress(&format!("replay: repetition {}", repetition + 1));
        for number in rotated(CONTENDERS.len(), repetition) {
            let (name, replay) = CONTENDERS[number];
            let unpaced = replay(&script, f64::INFINITY, Some((&oracle, &mut *ledger)));
            trim_memory();
            let Some((offered, reached)) = bisect(&script, replay, unpaced.rate) else {
                progress(&format!("{name}: no rate was valid"));
                continue;
            };
            let queries = script.prompts.len() as f64 / script.operations() as f64 * offered;
            progress(&format!("{name}: {:.1} M a second", offered / 1e6));
            ledger.record(RATE, name, offered / 1e6);
            ledger.record(QUERIES, name, queries / 1e3);
            ledger.record(LATENCY, name, reached.latency_ns / 1e3);
        }
    }
}

/// Returns the highest valid rate that was found, in block operations a second, and its outcome. `None` if no rate was
/// valid.
fn bisect(script: &Script, replay: Replay, unpaced: f64) -> Option<(f64, Reached)> {
    let (mut valid, mut invalid): (Option<(f64, Reached)>, Option<f64>) = (None, None);
    let mut offered = unpaced;
    for step in 0..STEPS_MAX {
        if valid.is_none() && step > FALLS_MAX {
            break;
        }
        let tries = (0..TRIES).map(|_| {
            let reached = replay(script, offered, None);
            trim_memory();
            reached
        });
        match tries.into_iter().find(|reached| reached.is_valid(offered)) {
            Some(reached) => valid = Some((offered, reached)),
            None => invalid = Some(offered),
        }
        offered = match (valid, invalid) {
            (Some((valid, _)), Some(invalid)) if invalid <= valid * BRACKET => break,
            (Some((valid, _)), Some(invalid)) => (valid * invalid).sqrt(),
            (Some((valid, _)), None) => valid * 1.25,
            (None, Some(invalid)) => invalid * 0.75,
            (None, None) => unpaced,
        };
    }
    valid
}

/// Prints the table of the scenario.
pub fn print(ledger: &Ledger) {
    let columns = [
        Column::new("M block operations a second", RATE),
        Column::new("thousand queries a second among them", QUERIES),
        Column::new("p99 of these, µs", LATENCY),
    ];
    let mut rows = contender::names();
    rows.push(CONTROL.to_owned());
    ledger.print(
        "D. Recorded conversations on 64 workers, highest offered rate of which 99 % was reached with a p99 of queries below 1 ms",
        &rows,
        &columns,
    );
}

/// Replays the script at the offered `rate`, in block operations a second. One thread applies events, and one queries.
fn at_once<C: Contender<Reader: Reader<Query: Send> + Send, Writer: Send>>(
    script: &Script,
    rate: f64,
    check: Option<(&Oracle, &mut Ledger)>,
) -> Reached {
    let (reader, mut writer) = C::build(WORKERS);
    let lists = script.lists::<C::Writer>();
    let queries = script.queries::<C::Reader>();
    let pace = Pace {
        started: Instant::now(),
        rate,
    };
    let reader_here = &reader;
    let (asked, late, (applied, refused, writer)) = thread::scope(|scope| {
        let writing = scope.spawn(move || {
            let mut refused = 0;
            for (offered, events) in lists {
                pace.wait(offered);
                refused += writer.apply(events, Timing::Whole).refused;
            }
            (pace.started.elapsed(), refused, writer)
        });
        let mut late = Vec::with_capacity(queries.len());
        for (offered, mut query) in queries {
            pace.wait(offered);
            black_box(reader_here.find(&mut query, shape::<C>()));
            late.push(pace.late_ns(offered));
        }
        let asked = pace.started.elapsed();
        (asked, late, writing.join().expect("applying does not panic"))
    });
    if let Some((oracle, ledger)) = check {
        judge::<C>(script, oracle, &reader, ledger);
    }
    drop(writer);
    reached::<C>(script, asked.max(applied), refused, late)
}

/// Replays the script on one thread: events and queries in turns. [`at_once`] does the same on two threads.
fn in_turns<C: Contender>(script: &Script, rate: f64, check: Option<(&Oracle, &mut Ledger)>) -> Reached {
    let (reader, mut writer) = C::build(WORKERS);
    let mut queries = script.queries::<C::Reader>().into_iter().peekable();
    let lists = script.lists::<C::Writer>();
    let pace = Pace {
        started: Instant::now(),
        rate,
    };
    let mut refused = 0;
    let mut late = Vec::with_capacity(script.prompts.len());
    for (offered, events) in lists {
        while let Some((asked, mut query)) = queries.next_if(|(asked, _)| *asked <= offered) {
            pace.wait(asked);
            black_box(reader.find(&mut query, shape::<C>()));
            late.push(pace.late_ns(asked));
        }
        pace.wait(offered);
        refused += writer.apply(events, Timing::Whole).refused;
    }
    for (asked, mut query) in queries {
        pace.wait(asked);
        black_box(reader.find(&mut query, shape::<C>()));
        late.push(pace.late_ns(asked));
    }
    let elapsed = pace.started.elapsed();
    if let Some((oracle, ledger)) = check {
        judge::<C>(script, oracle, &reader, ledger);
    }
    reached::<C>(script, elapsed, refused, late)
}

/// Returns the shape of answers that costs the index least.
fn shape<C: Contender>() -> Shape {
    <C::Reader as Reader>::SHAPES
        .first()
        .map_or(Shape::List, |(shape, _)| *shape)
}

fn reached<C: Contender>(script: &Script, elapsed: Duration, refused: u64, mut late: Vec<u32>) -> Reached {
    let events = script.steps.iter().filter(|step| step.is_event()).count();
    if refused > 0 {
        progress(&format!("{}: refused {refused} of {events} events", C::NAME));
    }
    let taken = 1.0 - refused as f64 / events.max(1) as f64;
    late.sort_unstable();
    Reached {
        rate: script.operations() as f64 * taken / elapsed.as_secs_f64(),
        latency_ns: percentile(&late, 0.99),
    }
}

/// Checks the state after all changes. The answers about the last 1,000 prompts must equal the oracle's answers.
fn judge<C: Contender>(script: &Script, oracle: &Oracle, reader: &C::Reader, ledger: &mut Ledger) {
    const CHECKED: usize = 1_000;
    let row = contender::row::<C>(shape::<C>());
    for prompt in script.prompts.iter().rev().take(CHECKED) {
        let mut query = C::Reader::query(Form::Native, prompt);
        let is_right = reader.answer(&mut query, shape::<C>()) == oracle.answer(&prompt.sequence);
        ledger.judge("D, in the end", &row, is_right);
    }
}
