//! The index of kvatlas and those of other projects, with identical work in one process.
//!
//! `benches/peers/run.sh` builds this and runs everything; `--help` shows the parts. Standard output is Markdown.
//!
//! How to read the output:
//!
//! - A cell is the median of the repetitions, with the least and the greatest. Every repetition builds each index anew,
//!   and begins with another index.
//! - Every contender gets the same blocks, events and queries. They are made outside of the timed region, in the form
//!   that the contender's own interface takes. A row names the contender and the shape of its answers. `groups` are
//!   kvatlas's `Matches` as returned; `list` is the same with every holder collected; `callback` is
//!   `ChainIndex::score_into`; `map` is a hash map of all holders.
//! - All use the system allocator, and are built with the same flags. The heading of the output shows the flags.
//! - Every timed query is made once more, and its answer is compared with a brute-force oracle. A table shows how many
//!   answers were right. A wrong answer counts as wrong, even if the index is wrong by design.
//! - Times of stores and removals are processor time of the thread that applies the events, so that other processes of
//!   the machine do not count.

mod contender;
mod goals;
mod measure;
mod oracle;
mod plans;
mod report;
mod scenario;
mod workload;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use report::Ledger;
use scenario::{Effort, chat, floors, holes, lanes, latency, memory, modes, pauses, replay};

/// Compares the index of kvatlas with those of other projects and prints Markdown tables.
#[derive(Debug, Parser)]
struct Arguments {
    /// Part to run.
    #[arg(value_enum, default_value = "all")]
    part: Part,
    /// Make a smoke run of about a minute, with fewer layouts and repetitions.
    #[arg(long)]
    quick: bool,
    /// Number of repetitions of every measurement.
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    /// File with the recorded conversations of scenario D.
    #[arg(long, default_value = DEFAULT_TRACE)]
    trace: PathBuf,
    /// Number of recorded conversations that are replayed, from the first.
    #[arg(long, default_value_t = 4_000)]
    trace_requests: usize,
    /// Fill one index in this process, and print its sizes. Scenario C starts such processes.
    #[arg(long, hide = true, value_delimiter = ',')]
    fill: Option<Vec<u32>>,
}

/// Default path of the trace, next to the repository.
const DEFAULT_TRACE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../../shared/traces/conversation_trace.jsonl"
);

/// A part of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All parts.
    All,
    /// A: searches, stores and removals in indexes that are filled in a known way.
    Latency,
    /// A, the longest pause: the slowest query of a reader while another thread writes.
    Pauses,
    /// F: many conversations that differ in their first block.
    FanOut,
    /// B: multi-turn chat, with one writer and one reader at the same time.
    Chat,
    /// C: resident bytes for each block, in processes of their own.
    Memory,
    /// G: events such as real engines publish: names of their own, two tiers, two copies, holes.
    Modes,
    /// H: one namespace, written by one thread and by two threads at the same time.
    Lanes,
    /// Right and wrong answers without times: holes, and the same blocks after different prefixes.
    Holes,
    /// D: a recorded trace at an offered rate, and the highest rate that the index can keep up with.
    Replay,
}

fn main() {
    let arguments = Arguments::parse();
    if let Some(words) = &arguments.fill {
        memory::fill(words);
        return;
    }
    let effort = Effort {
        repetitions: if arguments.quick { 1 } else { arguments.repetitions },
        is_quick: arguments.quick,
    };
    let runs = |part| arguments.part == part || arguments.part == Part::All;
    let mut ledger = Ledger::default();
    print_heading(effort);
    if runs(Part::Latency) {
        let plans = plans::latency(effort);
        latency::run(&plans, effort, &mut ledger);
        latency::print("A", &plans, &ledger);
        floors::run(effort, &mut ledger);
        floors::print(&ledger);
    }
    if runs(Part::Pauses) {
        pauses::run(&plans::DISTINCT, effort, &mut ledger);
        pauses::print(&plans::DISTINCT, &ledger);
    }
    if runs(Part::FanOut) {
        let plans = plans::fan_outs(effort);
        latency::run(&plans, effort, &mut ledger);
        latency::print("F", &plans, &ledger);
    }
    if runs(Part::Chat) {
        chat::run(effort, &mut ledger);
        chat::print(&ledger);
    }
    if runs(Part::Memory) {
        memory::run(effort, &mut ledger);
        memory::print(&ledger);
    }
    if runs(Part::Modes) {
        let layouts = plans::modes(effort);
        modes::run(&layouts, effort, &mut ledger);
        modes::print(&layouts, &ledger);
    }
    if runs(Part::Lanes) {
        lanes::run(effort, &mut ledger);
        lanes::print(&ledger);
    }
    if runs(Part::Replay) {
        let requests_max = if effort.is_quick {
            1_000
        } else {
            arguments.trace_requests
        };
        replay::run(&arguments.trace, requests_max, effort, &mut ledger);
        replay::print(&ledger);
    }
    if runs(Part::Holes) {
        holes::run(&mut ledger);
    }
    ledger.print_verdicts("Answers compared with the oracle", &contender::rows());
    goals::print(&ledger);
}

fn print_heading(effort: Effort) {
    println!(
        "Medians of {} repetitions (least–greatest), order rotated; system allocator; {}; clock read subtracted, {:.0} ns.",
        effort.repetitions,
        build_flags(),
        measure::timer_cost_ns(),
    );
}

/// Returns the processor features for which all contenders were compiled.
fn build_flags() -> String {
    let profile = if cfg!(debug_assertions) {
        "DEBUG BUILD"
    } else {
        "release build"
    };
    let features = if cfg!(target_feature = "avx2") {
        "with AVX2"
    } else {
        "baseline instruction set"
    };
    format!("{profile} for {}, {features}", std::env::consts::ARCH)
}
