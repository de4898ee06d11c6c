//! Scenario H: one namespace, written by one thread and by two at once.
//!
//! The events of 128 workers are made before. Then one thread applies all of them, or each of two those of half of the workers. Times are
//! of the wall clock, from when both may begin to when the slower is done: what a pair of lanes takes in.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use crate::contender::{ChainIndex, Contender, InMode, Kvatlas, Names, Run, TwoLanes, Writer};
use crate::measure::{Timing, trim_memory};
use crate::plans::DISTINCT;
use crate::report::{Column, Ledger};
use crate::workload::shuffled;

use super::{Effort, progress, rotated};

type Measure = fn(&mut Ledger);

const CONTENDERS: [(&str, Measure); 3] = [
    (Kvatlas::NAME, measure::<Kvatlas>),
    (InMode::<Names>::NAME, measure::<InMode<Names>>),
    (ChainIndex::NAME, measure::<ChainIndex>),
];

const WHATS: [[&str; 2]; 2] = [
    ["store, one lane", "remove, one lane"],
    ["store, two lanes", "remove, two lanes"],
];
const GAINS: [&str; 2] = ["store, lanes gain", "remove, lanes gain"];

fn figure(what: &str) -> String {
    format!("lanes, {what}")
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

/// Prints the table.
pub fn print(ledger: &Ledger) {
    let rows: Vec<String> = CONTENDERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let whats = WHATS.into_iter().flatten().chain(GAINS);
    let columns: Vec<Column> = whats.map(|what| Column::new(what, figure(what))).collect();
    let title = format!(
        "H. {}. Wall time, ns a block; how many times as fast two lanes are",
        DISTINCT.name
    );
    ledger.print(&title, &rows, &columns);
}

fn measure<C: Contender>(ledger: &mut Ledger)
where
    C::Writer: TwoLanes,
{
    let mut times = [[0.0; 2]; 2];
    for (lanes, times) in times.iter_mut().enumerate() {
        trim_memory();
        let (_reader, writer) = C::build(DISTINCT.workers);
        let mut writers = if lanes == 0 {
            vec![writer]
        } else {
            Vec::from(writer.split())
        };
        for (phase, time) in times.iter_mut().enumerate() {
            let events = (0..writers.len())
                .map(|lane| events::<C::Writer>(lane, writers.len(), phase == 1))
                .collect();
            *time = apply(&mut writers, events);
        }
    }
    for (times, whats) in times.iter().zip(WHATS) {
        for (time, what) in times.iter().zip(whats) {
            ledger.record(&figure(what), C::NAME, *time);
        }
    }
    for (phase, what) in GAINS.iter().enumerate() {
        ledger.record(&figure(what), C::NAME, times[0][phase] / times[1][phase]);
    }
}

/// The events of a lane's workers, in another order than the layout's.
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

/// Applies each lane's events in a thread of its own; gives ns a block, from the common beginning to the end of the last.
fn apply<W: Writer + Send>(writers: &mut [W], events: Vec<Vec<W::Event>>) -> f64 {
    let blocks = f64::from(DISTINCT.blocks);
    let barrier = Barrier::new(writers.len());
    let spans: Vec<(Instant, Instant)> = thread::scope(|scope| {
        let lanes = writers.iter_mut().zip(events).map(|(writer, events)| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                let started = Instant::now();
                let applied = writer.apply(events, Timing::Whole);
                assert_eq!(applied.refused, 0, "nothing is refused");
                (started, Instant::now())
            })
        });
        let lanes: Vec<_> = lanes.collect();
        let join = |lane: thread::ScopedJoinHandle<'_, _>| lane.join().expect("a lane does not panic");
        lanes.into_iter().map(join).collect()
    });
    let started = spans.iter().map(|(started, _)| *started).min();
    let ended = spans.iter().map(|(_, ended)| *ended).max();
    let wall = started.zip(ended).map(|(started, ended)| ended - started);
    wall.map_or(f64::NAN, |wall| wall.as_nanos() as f64 / blocks)
}
