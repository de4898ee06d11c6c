//! Scenario H: one namespace, written and searched by one thread and by two threads at the same time.
//!
//! The events of 128 workers are made in advance. Then either one thread applies all of them, or each of two threads
//! applies the events of half of the workers. Searches are divided in the same way. Times are by the wall clock, from
//! the common beginning until the slower thread is done. So they show the throughput of two lanes.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use crate::contender::{
    ChainIndex, Contender, Form, InMode, Kvatlas, Names, Reader, Run, Shape, SmgTree, TwoLanes, Writer,
};
use crate::measure::{Timing, stay_on_core, trim_memory};
use crate::plans::DISTINCT;
use crate::report::{Column, Ledger};
use crate::workload::shuffled;

use super::{Effort, progress, rotated};

/// Number of different queries of a measurement. They are so few that they fit the processor's caches.
const QUESTIONS: u32 = 128;
/// Number of times that each query is made.
const ROUNDS: usize = 256;

type Measure = fn(&mut Ledger);

const CONTENDERS: [(&str, Measure); 4] = [
    (Kvatlas::NAME, measure::<Kvatlas>),
    (InMode::<Names>::NAME, measure::<InMode<Names>>),
    (ChainIndex::NAME, measure::<ChainIndex>),
    (SmgTree::NAME, measure::<SmgTree>),
];

/// Phases, in this order.
const PHASES: [&str; 3] = ["store", "search", "remove"];

fn figure(phase: &str, what: &str) -> String {
    format!("lanes, {phase}, {what}")
}

/// Measures every contender.
pub fn run(effort: Effort, ledger: &mut Ledger) {
    for repetition in 0..effort.repetitions {
        progress(&format!("lanes: repetition {}", repetition + 1));
        for number in rotated(CONTENDERS.len(), repetition) {
            CONTENDERS[number].1(ledger);
        }
    }
}

/// Prints the table of the scenario.
pub fn print(ledger: &Ledger) {
    let rows: Vec<String> = CONTENDERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let whats = PHASES
        .iter()
        .flat_map(|phase| ["one thread", "two", "gain"].map(|what| (*phase, what)));
    let columns: Vec<Column> = whats
        .map(|(phase, what)| Column::new(format!("{phase}, {what}"), figure(phase, what)))
        .collect();
    let title = format!(
        "H. {}. Wall time, ns a block and a search; how many times as fast two threads are",
        DISTINCT.name
    );
    ledger.print(&title, &rows, &columns);
}

fn measure<C: Contender<Reader: Reader<Query: Send> + Sync>>(ledger: &mut Ledger)
where
    C::Writer: TwoLanes,
{
    let [one, two] = [1, 2].map(times::<C>);
    for (phase, (one, two)) in PHASES.iter().zip(one.into_iter().zip(two)) {
        ledger.record(&figure(phase, "one thread"), C::NAME, one);
        ledger.record(&figure(phase, "two"), C::NAME, two);
        ledger.record(&figure(phase, "gain"), C::NAME, one / two);
    }
}

/// Returns the times of the three [`PHASES`], measured with this number of threads.
fn times<C: Contender<Reader: Reader<Query: Send> + Sync>>(threads: usize) -> [f64; 3]
where
    C::Writer: TwoLanes,
{
    trim_memory();
    let (reader, writer) = C::build(DISTINCT.workers);
    let mut writers = if threads == 1 {
        vec![writer]
    } else {
        Vec::from(writer.split())
    };
    let mut apply = |removes| {
        let events: Vec<_> = (0..threads)
            .map(|lane| events::<C::Writer>(lane, threads, removes))
            .collect();
        let wall = at_once(writers.iter_mut().zip(events).collect(), |(writer, events)| {
            let applied = writer.apply(events, Timing::Whole);
            assert_eq!(applied.refused, 0, "nothing is refused");
        });
        wall / f64::from(DISTINCT.blocks)
    };
    let stored = apply(false);
    let questions: Vec<Vec<_>> = (0..threads)
        .map(|part| questions::<C::Reader>(part, threads))
        .collect();
    let wall = at_once(questions, |mut questions| {
        for _ in 0..ROUNDS {
            for question in &mut questions {
                black_box(reader.find(question, Shape::Lean));
            }
        }
    });
    let searched = wall / f64::from(QUESTIONS) / ROUNDS as f64;
    [stored, searched, apply(true)]
}

/// Returns the queries of one thread. The queries are divided into `parts` parts, and `part` is the number of the
/// thread's part. All their prompts are held.
fn questions<R: Reader>(part: usize, parts: usize) -> Vec<R::Query> {
    let own = (0..QUESTIONS).filter(|number| *number as usize % parts == part);
    own.map(|number| R::query(Form::Native, &DISTINCT.prompt(number)))
        .collect()
}

/// Returns the events that one of `lanes` threads applies, in a random order. They are removals if `removes`, else
/// stores.
fn events<W: Writer>(lane: usize, lanes: usize, removes: bool) -> Vec<W::Event> {
    let holdings = DISTINCT.holdings();
    let numbers = shuffled(holdings.len(), 9 + u64::from(removes));
    let own = numbers.iter().map(|number| holdings[*number]);
    let own = own.filter(|(_, holder)| *holder as usize % lanes == lane);
    own.map(|(sequence, holder)| {
        let prompt = DISTINCT.prompt(sequence);
        if removes {
            let tail_first: Vec<u64> = prompt.sequence.iter().rev().copied().collect();
            return W::removed(holder, &tail_first);
        }
        let run = Run {
            parent: None,
            position: 0,
            blocks: &prompt.blocks,
            sequence: &prompt.sequence,
        };
        W::stored(holder, run)
    })
    .collect()
}

/// Runs `work` on each part in a thread of its own. Returns the nanoseconds from the start of the first thread until
/// the last thread is done.
fn at_once<T: Send>(parts: Vec<T>, work: impl Fn(T) + Sync) -> f64 {
    let (barrier, work) = (&Barrier::new(parts.len()), &work);
    let spans: Vec<(Instant, Instant)> = thread::scope(|scope| {
        let threads = parts.into_iter().enumerate().map(|(number, part)| {
            scope.spawn(move || {
                // Without this, two threads that wake each other may share one core for the whole measurement.
                stay_on_core(number);
                barrier.wait();
                let started = Instant::now();
                work(part);
                (started, Instant::now())
            })
        });
        let threads: Vec<_> = threads.collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("no part panics");
        threads.into_iter().map(join).collect()
    });
    let started = spans.iter().map(|(started, _)| *started).min();
    let ended = spans.iter().map(|(_, ended)| *ended).max();
    let wall = started.zip(ended).map(|(started, ended)| ended - started);
    wall.map_or(f64::NAN, |wall| wall.as_nanos() as f64)
}
