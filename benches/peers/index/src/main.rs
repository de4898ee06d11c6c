//! The index of kvatlas beside those of other projects, over identical work in one process.
//!
//! `benches/peers/run.sh` builds this and runs everything; `--help` shows the parts. Standard output is Markdown.
//!
//! How to read it:
//! - A cell is the median of the repetitions, with the least and the greatest of them. Every repetition builds each index anew, and
//!   another index goes first.
//! - Every contender is given the same blocks, events and questions, made outside the timed region in the form that its own
//!   interface takes. A row names the contender and the shape of its answers: `groups` are kvatlas's `Matches` as returned, `list`
//!   the same with every holder collected; `callback` is `ChainIndex::score_into`, `map` a hash map of all holders.
//! - All use the system allocator and are built with the same flags; the heading of the output says which.
//! - Every question that is timed is asked once more and compared with a brute-force oracle; a table says how many answers were
//!   right. An index may be wrong by design: a wrong answer is counted, not excused.
//! - Store and removal times are processor time of the thread that applies the events, so that other processes of the machine do
//!   not count.

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
    /// A smoke run of about a minute: fewer layouts and repetitions.
    #[arg(long)]
    quick: bool,
    /// Repetitions of everything.
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    /// The recorded conversations of scenario D.
    #[arg(long, default_value = DEFAULT_TRACE)]
    trace: PathBuf,
    /// How many of them are replayed, from the first.
    #[arg(long, default_value_t = 4_000)]
    trace_requests: usize,
    /// Fills one index in this process and prints its sizes: what scenario C starts.
    #[arg(long, hide = true, value_delimiter = ',')]
    fill: Option<Vec<u32>>,
}

/// Beside the repository, as the sources know it.
const DEFAULT_TRACE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../../shared/traces/conversation_trace.jsonl"
);

/// A part of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Everything.
    All,
    /// A: searches, stores and removals in indexes filled in a known way.
    Latency,
    /// A, the longest pause: a reader while another thread writes.
    Pauses,
    /// F: many conversations that differ in their first block.
    FanOut,
    /// B: multi-turn chat, one writer and one reader at once.
    Chat,
    /// C: resident bytes a block, in processes of their own.
    Memory,
    /// G: what engines really publish: names of their own, two tiers, two copies, holes.
    Modes,
    /// H: one namespace, written by one thread and by two at once.
    Lanes,
    /// No times, only right and wrong answers: holes, and the same blocks behind different prefixes.
    Holes,
    /// D: a recorded trace at an offered rate, and how far that can go.
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

/// For which processor features this was compiled, as every contender in it.
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
