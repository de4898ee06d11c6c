//! `kvatlas compare`: compares routing policies, to show whether routing on exact answers pays.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use kvatlas_simulation::policies::{Comparison, PolicyOutcome, ServiceModel, plot};
use kvatlas_simulation::{Attention, CacheModel, FleetSize, Request, Retention, SyntheticLoad, read_trace};

use super::failure::Failure;
use super::output::{print, print_json, say};
use super::replay::parse_workers;
use super::table::TextTable;

pub(super) const EXAMPLES: &str = "\
Needs neither a daemon nor a broker: it simulates in virtual time, and repeats exactly for the same seed.

Examples:
  kvatlas compare --trace conversation_trace.jsonl --workers 16 --speed 2
  kvatlas compare --attention full --attention window:2 --attention states
  kvatlas compare --plot policies.svg --json";

/// Number of requests when no trace is given.
const SYNTHETIC_REQUESTS: usize = 10_000;

/// Maximum time that one step of the model of an engine can take, in microseconds: one minute. Longer times would
/// exceed the range of the clock of a run.
const TIME_MAX_US: u64 = 60_000_000;

/// Requests, workers and costs to compare policies on.
#[derive(Debug, Args)]
pub(crate) struct CompareArguments {
    /// Trace in the Mooncake format; without one, the requests of the demo.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Take at most so many requests.
    #[arg(long, value_name = "COUNT")]
    limit_requests: Option<NonZeroUsize>,
    /// Simulate so many workers.
    #[arg(long, value_name = "COUNT", default_value = "16", value_parser = parse_workers)]
    workers: NonZeroUsize,
    /// Give each worker room for so many blocks.
    #[arg(long, value_name = "COUNT", default_value = "2048")]
    blocks_per_worker: NonZeroUsize,
    /// Attention of the model: full, or full beside a window of so many blocks (window:2), or beside states. May be
    /// given several times.
    #[arg(long, value_name = "KIND", default_value = "full", value_parser = parse_attention)]
    attention: Vec<Attention>,
    /// Places where caches keep blocks of windows and states, in addition to the ends of prompts and the places where
    /// prompts part: one place in every so many blocks, 0 for none, or all. Like vLLM's
    /// prefix_cache_retention_interval.
    #[arg(long, value_name = "BLOCKS", default_value = "0", value_parser = parse_retention)]
    retention: Retention,
    /// Let requests arrive so many times as fast as recorded.
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = parse_speed)]
    speed: f64,
    /// Time to compute one block of a prompt, in microseconds.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = ServiceModel::default().block_us,
        value_parser = clap::value_parser!(u64).range(..=TIME_MAX_US))]
    block_us: u64,
    /// Time for one token of an answer, in microseconds.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = ServiceModel::default().token_us,
        value_parser = clap::value_parser!(u64).range(..=TIME_MAX_US))]
    token_us: u64,
    /// Time from a change of a cache until the index knows it, in microseconds.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = ServiceModel::default().event_delay_us,
        value_parser = clap::value_parser!(u64).range(..=TIME_MAX_US))]
    event_delay_us: u64,
    /// Weight of a block that must be computed, for policies that weigh load. A block in flight weighs 1.
    #[arg(long, value_name = "WEIGHT", default_value_t = ServiceModel::default().overlap_weight)]
    overlap_weight: u64,
    /// Seed of the random numbers.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Draw the outcomes as SVG into this file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed = text.parse::<f64>().ok();
    speed
        .filter(|speed| (0.001..=1000.0).contains(speed))
        .ok_or_else(|| "write a number from 0.001 to 1000".to_owned())
}

fn parse_attention(text: &str) -> Result<Attention, String> {
    let window = || text.strip_prefix("window:")?.parse().ok();
    match text {
        "full" => Ok(Attention::Full),
        "states" => Ok(Attention::States),
        _ => window()
            .map(Attention::Window)
            .ok_or_else(|| "write full, states, or window: and a number of blocks from 1".to_owned()),
    }
}

fn parse_retention(text: &str) -> Result<Retention, String> {
    match text {
        "0" => Ok(Retention::Boundaries),
        "all" => Ok(Retention::All),
        _ => text
            .parse()
            .map(Retention::Every)
            .map_err(|_| "write a number of blocks, or all".to_owned()),
    }
}

/// Compares the policies, and prints the figures of each.
pub(crate) fn compare(arguments: &CompareArguments) -> Result<(), Failure> {
    let requests = arguments.requests()?;
    let comparison = |attention| Comparison {
        size: FleetSize {
            workers: arguments.workers,
            blocks_per_worker: arguments.blocks_per_worker,
        },
        cache: CacheModel {
            attention,
            retention: arguments.retention,
        },
        model: ServiceModel {
            block_us: arguments.block_us,
            token_us: arguments.token_us,
            event_delay_us: arguments.event_delay_us,
            overlap_weight: arguments.overlap_weight,
            ..ServiceModel::default()
        },
        speed: arguments.speed,
        seed: arguments.seed,
    };
    let progress = |outcome: &PolicyOutcome| {
        if !arguments.json {
            say(format_args!("{}: {}\n", outcome.scenario, outcome.policy));
        }
    };
    let mut outcomes = Vec::new();
    for attention in &arguments.attention {
        outcomes.extend(comparison(*attention).run(&requests, progress)?);
    }
    if let Some(path) = &arguments.plot {
        let picture = plot(&outcomes);
        std::fs::write(path, picture)
            .map_err(|error| Failure::failed(format_args!("cannot write {}: {error}", path.display())))?;
    }
    if arguments.json {
        return print_json(&serde_json::json!({ "outcomes": outcomes, "seed": arguments.seed }));
    }
    print(&render(&outcomes))
}

impl CompareArguments {
    fn requests(&self) -> Result<Vec<Request>, Failure> {
        let limit = self.limit_requests.map(NonZeroUsize::get);
        match &self.trace {
            Some(path) => read_trace(path, limit).map_err(Failure::usage),
            None => Ok(SyntheticLoad::new(self.seed)
                .take(limit.unwrap_or(SYNTHETIC_REQUESTS))
                .collect()),
        }
    }
}

fn render(outcomes: &[PolicyOutcome]) -> String {
    let mut table = TextTable::new(&[
        "SCENARIO",
        "POLICY",
        ">PROMISED",
        ">HIT",
        ">COMPUTED",
        ">FIRST TOKEN",
        ">P99",
    ]);
    let mut scenario = "";
    for outcome in outcomes {
        let name = if outcome.scenario == scenario {
            ""
        } else {
            &outcome.scenario
        };
        scenario = &outcome.scenario;
        table.push(vec![
            name.to_owned(),
            outcome.policy.to_owned(),
            format!("{:.1} %", outcome.promised_rate * 100.0),
            format!("{:.1} %", outcome.hit_rate * 100.0),
            outcome.computed_blocks.to_string(),
            format!("{:.0} ms", outcome.first_token_ms_mean),
            format!("{:.0} ms", outcome.first_token_ms_p99),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Example {
        #[command(flatten)]
        compare: CompareArguments,
    }

    #[test]
    fn times_of_the_model_are_bounded() {
        for flag in ["--block-us", "--token-us", "--event-delay-us"] {
            let taken = |time: &str| Example::try_parse_from(["example", flag, time]).is_ok();
            assert!(taken("0") && taken("60000000"), "{flag}");
            assert!(!taken("60000001") && !taken("18446744073709551615"), "{flag}");
        }
    }
}
