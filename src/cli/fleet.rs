//! `kvatlas fleet`: simulates workers until it is told to stop, to try out deployments.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use clap::Args;
use kvatlas_config::process_environment;
use kvatlas_core::wire::NamespaceName;
use kvatlas_simulation::{FleetSize, SteadyFleet, SteadyOptions, SteadyTally};
use kvatlas_telemetry::{self as telemetry, LogFormat};

use super::connect::DaemonArguments;
use super::failure::Failure;
use super::replay::parse_workers;
use super::serve::StopSignals;
use super::transport::TransportName;

pub(super) const EXAMPLES: &str = "\
It waits for NATS and for the daemon, and goes on while they are away. SIGTERM or SIGINT ends it: the workers take their leave.

Examples:
  kvatlas fleet --nats-url nats://127.0.0.1:4222 --workers 16 --rate 50
  kvatlas fleet --transport jetstream";

/// Log filter of the command: summaries, warnings and errors.
const LOG_FILTER: &str = "info,async_nats=warn";
/// Greatest value of `--rate`, in requests a second.
const RATE_MAX: i64 = 10_000;

/// Arguments of `kvatlas fleet`: the fleet to simulate.
#[derive(Debug, Args)]
pub(crate) struct FleetArguments {
    /// Simulate so many workers.
    #[arg(long, value_name = "COUNT", default_value = "16", value_parser = parse_workers)]
    workers: NonZeroUsize,
    /// Give each worker room for so many blocks.
    #[arg(long, value_name = "COUNT", default_value = "3000")]
    blocks_per_worker: NonZeroUsize,
    /// Serve so many requests a second.
    #[arg(long, value_name = "COUNT", default_value = "50", value_parser = parse_rate)]
    rate: NonZeroU32,
    /// Seed of the conversations.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Namespace to use; nobody else may use the workers' names in it.
    #[arg(long, value_name = "NAME", default_value = "demo")]
    namespace: NamespaceName,
    /// How events travel.
    #[arg(long, value_enum, default_value_t)]
    transport: TransportName,
    /// Seconds between two log lines that sum up what happened.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    summary_seconds: u64,
    #[command(flatten)]
    daemon: DaemonArguments,
}

fn parse_rate(text: &str) -> Result<NonZeroU32, String> {
    text.parse()
        .ok()
        .filter(|rate: &NonZeroU32| i64::from(rate.get()) <= RATE_MAX)
        .ok_or_else(|| format!("write a number from 1 to {RATE_MAX}"))
}

impl FleetArguments {
    /// Simulates the fleet until a signal comes.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = StopSignals::listen()?;
        telemetry::init(LogFormat::Text, LOG_FILTER).map_err(Failure::failed)?;
        let config = self.daemon.load(process_environment())?;
        let mut fleet = SteadyFleet::start(&config, self.options()).await?;
        tracing::info!(workers = self.workers, rate = self.rate, namespace = %self.namespace, "the fleet starts");
        let period = Duration::from_secs(self.summary_seconds);
        let signal = loop {
            tokio::select! {
                tally = fleet.go_on(period) => log(tally?),
                signal = signals.next() => break signal,
            }
        };
        tracing::info!(signal, "the workers take their leave");
        tokio::select! {
            () = fleet.say_goodbye() => Ok(()),
            signal = signals.next() => Err(super::replay::interrupted(signal)),
        }
    }

    fn options(&self) -> SteadyOptions {
        SteadyOptions {
            namespace: self.namespace.clone(),
            size: FleetSize {
                workers: self.workers,
                blocks_per_worker: self.blocks_per_worker,
            },
            rate: self.rate,
            seed: self.seed,
            transport: self.transport.into(),
        }
    }
}

fn log(tally: SteadyTally) {
    let SteadyTally {
        requests,
        requested_blocks,
        hit_blocks,
        unanswered,
        degraded,
    } = tally;
    let hit_percent = hit_blocks * 100 / requested_blocks.max(1);
    tracing::info!(requests, hit_percent, unanswered, degraded, "the fleet goes on");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_bounded() {
        assert_eq!(parse_rate("50").map(NonZeroU32::get), Ok(50));
        for text in ["0", "-1", "10001", "fast"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
