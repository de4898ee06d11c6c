//! Scenario A, the longest pause: the queries of a reader while another thread stores and removes a million blocks.
//!
//! The reader makes one query after another, about sequences that are not removed. Each query is timed by itself.
//! Queries during which the system took the processor away are left out, so that the figures show the index and not the
//! machine. Waiting for a lock is not left out. Before the writer begins, the reader runs alone, which shows the pauses
//! of the machine.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::contender::{
    self, Binary, ChainIndex, CompressedTree, Contender, Form, Kvatlas, Positional, Reader, Run, Shape,
    SmgTree, Strided, Writer,
};
use crate::measure::{Timing, involuntary_switches, percentile, timer_cost_ns, trim_memory};
use crate::report::{Column, Ledger};
use crate::workload::{Layout, Prompt, shuffled};

use super::{Effort, progress, rotated};

/// Number of sequences that are not removed. The reader queries these.
const STAYING: usize = 64;

/// Number of queries that the reader makes before the writer begins.
const QUERIES_ALONE: usize = 200_000;

/// Time from which on a query is slow. A slow query is not counted if the system took the processor away during it.
const SLOW: Duration = Duration::from_micros(20);

/// Figure: longest query before the writer begins, in microseconds.
const ALONE: &str = "pauses, alone";
/// Figure: longest query during stores and removals, in microseconds.
pub const LONGEST: &str = "pauses, longest";
/// Figure: nanoseconds within which 99.9 % of the queries during stores and removals are done.
const P999: &str = "pauses, p999";

type Measure = fn(&[Prompt], &Layout, &mut Ledger);

const CONTENDERS: [Measure; 6] = [
    measure::<Kvatlas>,
    measure::<ChainIndex>,
    measure::<SmgTree>,
    measure::<CompressedTree>,
    measure::<Positional<Strided>>,
    measure::<Positional<Binary>>,
];

/// Runs the scenario for every contender that can be read during writes.
pub fn run(layout: &Layout, effort: Effort, ledger: &mut Ledger) {
    let prompts: Vec<Prompt> = (0..layout.sequences())
        .map(|number| layout.prompt(number))
        .collect();
    for repetition in 0..effort.repetitions {
        progress(&format!("pauses: repetition {}", repetition + 1));
        for number in rotated(CONTENDERS.len(), repetition) {
            CONTENDERS[number](&prompts, layout, ledger);
            trim_memory();
        }
    }
}

/// Prints the table of the scenario.
pub fn print(layout: &Layout, ledger: &Ledger) {
    let columns = [
        Column::new("longest query alone, µs", ALONE),
        Column::new("longest query during writes, µs", LONGEST),
        Column::new("p99.9 during writes, ns", P999),
    ];
    ledger.print(
        &format!(
            "A. {}. A reader while all is stored and removed again",
            layout.name
        ),
        &contender::names(),
        &columns,
    );
}

fn measure<C: Contender<Reader: Reader<Query: Send> + Send, Writer: Send>>(
    prompts: &[Prompt],
    layout: &Layout,
    ledger: &mut Ledger,
) {
    let (reader, mut writer) = C::build(layout.workers);
    let (staying, coming) = prompts.split_at(STAYING.min(prompts.len()));
    let run = |prompt: &Prompt, number: usize| {
        let worker = u32::try_from(number).unwrap_or(0) % layout.workers;
        let run = Run {
            parent: None,
            position: 0,
            blocks: &prompt.blocks,
            sequence: &prompt.sequence,
        };
        C::Writer::stored(worker, run)
    };
    let events = staying
        .iter()
        .enumerate()
        .map(|(number, prompt)| run(prompt, number));
    writer.apply(events.collect(), Timing::Whole);
    let mut queries: Vec<_> = staying
        .iter()
        .map(|prompt| C::Reader::query(Form::Native, prompt))
        .collect();
    let mut alone = Watch::default();
    for _ in 0..QUERIES_ALONE / STAYING {
        alone.ask_all(&reader, &mut queries);
    }
    ledger.record(ALONE, C::NAME, alone.longest_us());

    let stores: Vec<_> = coming
        .iter()
        .enumerate()
        .map(|(number, prompt)| run(prompt, number))
        .collect();
    let removals: Vec<_> = shuffled(coming.len(), 7)
        .into_iter()
        .map(|number| {
            let worker = u32::try_from(number).unwrap_or(0) % layout.workers;
            let deepest_first: Vec<u64> = coming[number].sequence.iter().rev().copied().collect();
            C::Writer::removed(worker, &deepest_first)
        })
        .collect();
    let is_done = AtomicBool::new(false);
    let mut watch = thread::scope(|scope| {
        let is_done = &is_done;
        let watching = scope.spawn(move || {
            let mut watch = Watch::default();
            while !is_done.load(Ordering::Relaxed) {
                watch.ask_all(&reader, &mut queries);
            }
            watch
        });
        writer.apply(stores, Timing::Whole);
        writer.apply(removals, Timing::Whole);
        is_done.store(true, Ordering::Relaxed);
        watching.join().expect("a search does not panic")
    });
    ledger.record(LONGEST, C::NAME, watch.longest_us());
    watch.times_ns.sort_unstable();
    ledger.record(P999, C::NAME, percentile(&watch.times_ns, 0.999));
}

/// Measures the time of each query, and notices when the system takes the processor away.
#[derive(Debug, Default)]
struct Watch {
    times_ns: Vec<u32>,
    switches: u64,
}

impl Watch {
    fn ask_all<R: Reader>(&mut self, reader: &R, queries: &mut [R::Query]) {
        if self.times_ns.is_empty() {
            self.switches = involuntary_switches();
        }
        for query in queries {
            let started = Instant::now();
            black_box(reader.find(query, Shape::Lean));
            let elapsed = started.elapsed();
            if elapsed >= SLOW {
                let switches = involuntary_switches();
                if std::mem::replace(&mut self.switches, switches) != switches {
                    continue;
                }
            }
            let nanoseconds = elapsed.as_nanos() as f64 - timer_cost_ns();
            self.times_ns.push(nanoseconds.max(0.0) as u32);
        }
    }

    fn longest_us(&self) -> f64 {
        self.times_ns
            .iter()
            .max()
            .map_or(f64::NAN, |&longest| f64::from(longest) / 1e3)
    }
}
