//! Measures kvatlas's and toktrie's walks in turns.

use std::hint::black_box;
use std::time::Duration;

use kvatlas_vocab::{RegexAutomaton, RegexError, RegexLimits, TokenTrie};
use rustix::time::{ClockId, clock_gettime};

use crate::recognizers::Rows;
use crate::{Tries, text, toktrie_of, visited};

/// Number of rounds. There are many short rounds, so that other work on the machine disturbs only a few, and each walk
/// equally often.
const ROUNDS: usize = 41;
const NODES_PER_ROUND: usize = 500_000;

const CONTENDERS: usize = 4;

pub fn print_header() {
    println!(
        "\nTime a node in ns, and its ratio to the faster of toktrie's two: median (least–greatest) of {ROUNDS} rounds; \
         before it, the states of the table and how long it took to build, once"
    );
    println!(
        "{:<24}{:>8}{:>8}{:>8}  {:<18}{:<18}{:<18}{:<18}{:<18}{:<18}",
        "expression",
        "nodes",
        "states",
        "ms",
        "toktrie, stack",
        "toktrie, adapter",
        "kvatlas, stack",
        "kvatlas, table",
        "ratio, stack",
        "ratio, table",
    );
}

/// Returns the processor time of this thread, which does not include time that other threads took.
fn own_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Measures all walks in turns, and prints their times.
pub fn measure(tries: &Tries, name: &str, expression: &str) -> Result<(), RegexError> {
    let started = own_time();
    let automaton = RegexAutomaton::new(expression, RegexLimits::default())?;
    let compiled_ms = (own_time() - started).as_secs_f64() * 1e3;
    let table = automaton.table();
    let state = table.start().expect("the expression matches something");
    let rows = Rows::new(table, state);
    let nodes = visited(tries, &rows);
    let repeats = (NODES_PER_ROUND / nodes).max(1);
    let mut stack = rows.stack();
    let mut adapter = rows.adapter();
    let mut mask = tries.ours.empty_mask();
    let mut set = tries.theirs.alloc_token_set();
    let mut times = [const { Vec::new() }; CONTENDERS];
    for round in 0..ROUNDS {
        for turn in 0..CONTENDERS {
            let contender = (round + turn) % CONTENDERS;
            let started = own_time();
            for _ in 0..repeats {
                match contender {
                    0 => tries.theirs.add_bias(&mut stack, &mut set, &[]),
                    1 => tries.theirs.add_bias(&mut adapter, &mut set, &[]),
                    2 => tries.ours.allow(&mut stack, &mut mask).expect("the mask fits"),
                    _ => tries
                        .ours
                        .allow_by_table(table, state, &mut mask)
                        .expect("the mask fits"),
                }
                black_box((&mask, &set));
            }
            times[contender].push((own_time() - started).as_nanos() as f64 / (repeats * nodes) as f64);
        }
    }
    let ratio = |contender: usize| -> Vec<f64> {
        (0..ROUNDS)
            .map(|round| times[contender][round] / times[0][round].min(times[1][round]))
            .collect()
    };
    let texts = times.iter().cloned().chain([ratio(2), ratio(3)]).map(spread);
    let cells: String = texts.map(|text| format!("{text:<18}")).collect();
    println!(
        "{name:<24}{nodes:>8}{:>8}{compiled_ms:>8.1}  {}",
        table.states(),
        cells.trim_end()
    );
    Ok(())
}

/// Measures building both tries, and greedy tokenisation of a text.
pub fn measure_others(tries: &Tries) {
    let text = text(&tries.vocabulary);
    let build = || black_box(TokenTrie::new(&tries.vocabulary)).len();
    let build_toktrie = || black_box(toktrie_of(&tries.vocabulary)).vocab_size();
    let cut = || black_box(tries.ours.tokenize_greedily(&text).expect("it was cut before")).len();
    let cut_toktrie = || black_box(tries.theirs.greedy_tokenize(&text)).len();
    println!("\n{:<40}{:<22}{:<22}ratio", "", "toktrie", "kvatlas");
    compare("building, ms", 1e-6, &build_toktrie, &build);
    compare(
        "greedy tokens, ns a byte of text",
        1.0 / text.len() as f64,
        &cut_toktrie,
        &cut,
    );
}

/// Prints the times of kvatlas and toktrie, and their ratio. Multiplies nanoseconds by `scale` before it prints them.
fn compare(name: &str, scale: f64, theirs: &dyn Fn() -> usize, ours: &dyn Fn() -> usize) {
    let time = |work: &dyn Fn() -> usize| {
        let started = own_time();
        black_box(work());
        (own_time() - started).as_nanos() as f64 * scale
    };
    let rounds: Vec<(f64, f64)> = (0..ROUNDS / 2).map(|_| (time(theirs), time(ours))).collect();
    println!(
        "{name:<40}{:<22}{:<22}{}",
        spread(rounds.iter().map(|(theirs, _)| *theirs).collect()),
        spread(rounds.iter().map(|(_, ours)| *ours).collect()),
        spread(rounds.iter().map(|(theirs, ours)| ours / theirs).collect()),
    );
}

/// Returns the median as text, with the least and the greatest.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let (least, middle, most) = (values[0], values[values.len() / 2], values[values.len() - 1]);
    format!("{middle:.2} ({least:.2}–{most:.2})")
}
