//! Scenario G: events such as real engines publish, compared with the simplest form of kvatlas's events and with the
//! best peer.
//!
//! The same sequences are stored, searched and removed in every mode. The modes are: blocks with the contract's hashes,
//! blocks with names of the engine's own, blocks on two tiers, blocks in two copies, and one block in a hundred
//! missing. A peer has only one mode. A layout with more workers than a peer allows is skipped for that peer.

use std::hint::black_box;
use std::time::Instant;

use crate::contender::{
    ChainIndex, Contender, Copies, Form, Holes, InMode, Kvatlas, Names, Reader, Run, Shape, SmgTree,
    TwoTiers, Writer,
};
use crate::measure::{Applied, Spread, Timing, resident_bytes, timer_cost_ns, trim_memory};
use crate::report::{Column, Ledger};
use crate::workload::{Kind, Layout, Prompt, shuffled};

use super::{Effort, progress, rotated};

/// Number of events that are made together. Making them is not timed; applying them is.
const EVENTS_AT_ONCE: usize = 64;
/// Maximum number of different queries of a kind.
const QUESTIONS_MAX: usize = 1024;
/// Number of queries that are made, and then searched, together.
const BATCH: usize = 16;

type Measure = fn(&Work<'_>, &mut Ledger);

const CONTENDERS: [(&str, Measure); 7] = [
    (Kvatlas::NAME, measure::<Kvatlas>),
    (InMode::<Names>::NAME, measure::<InMode<Names>>),
    (InMode::<TwoTiers>::NAME, measure::<InMode<TwoTiers>>),
    (InMode::<Copies>::NAME, measure::<InMode<Copies>>),
    (InMode::<Holes>::NAME, measure::<InMode<Holes>>),
    (ChainIndex::NAME, measure::<ChainIndex>),
    (SmgTree::NAME, measure::<SmgTree>),
];

struct Work<'a> {
    layout: &'a Layout,
    repetition: usize,
    prompts: Vec<Prompt>,
    questions: Vec<(Kind, Vec<Prompt>)>,
}

const STORE: &str = "store";
const REMOVE: [&str; 2] = ["remove, tail first", "remove, head first"];
const BYTES: [&str; 2] = ["bytes a block, roughly", "left, roughly"];

fn figure(layout: &Layout, what: &str) -> String {
    format!("modes, {}, {what}", layout.name)
}

/// Measures every contender in every layout.
pub fn run(layouts: &[Layout], effort: Effort, ledger: &mut Ledger) {
    for layout in layouts {
        let prompts: Vec<Prompt> = (0..layout.sequences())
            .map(|number| layout.prompt(number))
            .collect();
        let asked = shuffled(prompts.len(), 1);
        let ask = |kind: Kind| {
            let asked = asked.iter().take(QUESTIONS_MAX);
            let question = |number: &usize| {
                let fresh = u32::try_from(*number).expect("there are fewer sequences than that");
                kind.ask(&prompts[*number], fresh)
            };
            (kind, asked.map(question).collect())
        };
        let questions = Kind::ALL.into_iter().map(ask).collect();
        let mut work = Work {
            layout,
            repetition: 0,
            prompts,
            questions,
        };
        for repetition in 0..effort.repetitions {
            progress(&format!("modes, {}: repetition {}", layout.name, repetition + 1));
            work.repetition = repetition;
            for number in rotated(CONTENDERS.len(), repetition) {
                CONTENDERS[number].1(&work, ledger);
                trim_memory();
            }
        }
    }
}

/// Prints a table for each layout.
pub fn print(layouts: &[Layout], ledger: &Ledger) {
    let rows: Vec<String> = CONTENDERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    for layout in layouts {
        let kinds = Kind::ALL.map(Kind::as_str);
        let whats = kinds.into_iter().chain([STORE]).chain(REMOVE).chain(BYTES);
        let columns: Vec<Column> = whats
            .map(|what| Column::new(what, figure(layout, what)))
            .collect();
        let title = format!("G. {}. Searches in ns, writes in ns a block", layout.name);
        ledger.print(&title, &rows, &columns);
    }
}

fn measure<C: Contender>(work: &Work<'_>, ledger: &mut Ledger) {
    let layout = work.layout;
    if layout.workers > C::WORKERS_MAX {
        return;
    }
    let blocks = f64::from(layout.depth) * layout.holdings().len() as f64;
    trim_memory();
    let before = resident_bytes() as f64;
    let (reader, mut writer) = C::build(layout.workers);
    let stored = store_all::<C>(work, &mut writer);
    let mut record = |what: &str, value: f64| ledger.record(&figure(layout, what), C::NAME, value);
    record(STORE, stored.processor.as_nanos() as f64 / blocks);
    trim_memory();
    record(BYTES[0], (resident_bytes() as f64 - before) / blocks);
    for (kind, prompts) in &work.questions {
        record(kind.as_str(), time_searches(&reader, prompts, work.repetition));
    }
    for (is_head_first, what) in REMOVE.iter().enumerate() {
        let removed = remove_all::<C>(work, &mut writer, is_head_first == 1);
        record(what, removed.processor.as_nanos() as f64 / blocks);
        if is_head_first == 0 {
            store_all::<C>(work, &mut writer);
        }
    }
    writer.upkeep();
    trim_memory();
    record(BYTES[1], (resident_bytes() as f64 - before) / blocks);
}

fn time_searches<R: Reader>(reader: &R, prompts: &[Prompt], repetition: usize) -> f64 {
    let mut times = Vec::new();
    // The first pass is not counted. It fills the caches for the second.
    for pass in 0..3 {
        let order = shuffled(prompts.len(), (repetition * 3 + pass) as u64 + 2);
        for asked in order.chunks(BATCH) {
            let mut queries: Vec<R::Query> = asked
                .iter()
                .map(|&number| R::query(Form::Native, &prompts[number]))
                .collect();
            let started = Instant::now();
            for query in &mut queries {
                black_box(reader.find(query, Shape::Lean));
            }
            let elapsed = started.elapsed().as_nanos() as f64 - timer_cost_ns();
            if pass > 0 {
                times.push(elapsed / queries.len() as f64);
            }
        }
    }
    Spread::of(&times).map_or(f64::NAN, |spread| spread.median)
}

fn store_all<C: Contender>(work: &Work<'_>, writer: &mut C::Writer) -> Applied {
    let mut applied = Applied::default();
    for holdings in work.layout.holdings().chunks(EVENTS_AT_ONCE) {
        let events = holdings.iter().map(|&(number, holder)| {
            let prompt = &work.prompts[number as usize];
            let run = Run {
                parent: None,
                position: 0,
                blocks: &prompt.blocks,
                sequence: &prompt.sequence,
            };
            C::Writer::stored(holder, run)
        });
        applied.add(&writer.apply(events.collect(), Timing::Whole));
    }
    applied
}

/// Removes all sequences in a random order. `is_head_first` chooses the order of the blocks within a removal: first
/// block first, or last block first.
fn remove_all<C: Contender>(work: &Work<'_>, writer: &mut C::Writer, is_head_first: bool) -> Applied {
    let holdings = work.layout.holdings();
    let mut applied = Applied::default();
    for numbers in shuffled(holdings.len(), 7).chunks(EVENTS_AT_ONCE) {
        let events = numbers.iter().map(|&number| {
            let (sequence, holder) = holdings[number];
            let mut hashes = work.prompts[sequence as usize].sequence.clone();
            if !is_head_first {
                hashes.reverse();
            }
            C::Writer::removed(holder, &hashes)
        });
        applied.add(&writer.apply(events.collect(), Timing::Whole));
    }
    applied
}
