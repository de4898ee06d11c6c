//! `kvatlas replay`: sends a trace of real requests through a simulated fleet, and checks each reply.

use std::fmt::Write;
use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use indicatif::{HumanCount, HumanFloatCount, ProgressBar, ProgressStyle};
use kvatlas_config::process_environment;
use kvatlas_core::wire::NamespaceName;
use kvatlas_simulation::{
    FinalCheck, FleetSize, Replay, ReplayOptions, Report, Request, Session, SimulationError, Tally,
    embedded_config, read_trace,
};

use super::connect::DaemonArguments;
use super::failure::Failure;
use super::output::{print, print_json};
use super::serve::StopSignals;
use super::table::TextTable;
use super::transport::TransportName;

pub(super) const EXAMPLES: &str = "\
Ends with 0 when every reply was right, and with 1 when one was wrong.

Examples:
  kvatlas replay --trace conversation_trace.jsonl --workers 64 --embedded
  kvatlas replay --trace conversation_trace.jsonl --nats-url nats://127.0.0.1:4222 --json";

/// Log filter of a simulation, which shows warnings and errors. It hides the daemon's warning about the development
/// broker, because the command itself says more about that broker.
pub(super) const LOG_FILTER: &str = "warn,kvatlas_daemon::life::start=error";

/// Prefix of the subjects on the NATS server that the command starts.
const EMBEDDED_PREFIX: &str = "kvatlas";

/// Shortest time between two drawings of the progress bar.
const REDRAW: Duration = Duration::from_millis(200);

/// Trace to replay, and the fleet to replay it through.
#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// Trace in the Mooncake format: one JSON object a line, with timestamp (ms) and hash_ids.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Read at most so many requests of the trace.
    #[arg(long, value_name = "COUNT")]
    limit_requests: Option<NonZeroUsize>,
    /// Simulate so many workers.
    #[arg(long, value_name = "COUNT", default_value = "16", value_parser = parse_workers)]
    workers: NonZeroUsize,
    /// Give each worker room for so many blocks.
    #[arg(long, value_name = "COUNT", default_value = "2048")]
    blocks_per_worker: NonZeroUsize,
    /// Seed of the random numbers, which decide between equally good workers.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Start a daemon in this process, and a NATS server for it; otherwise a daemon must run already.
    #[arg(long, conflicts_with = "urls")]
    embedded: bool,
    /// How events travel: with jetstream, workers wait until the events stream has kept a batch, and a daemon that is
    /// started reads it from there.
    #[arg(long, value_enum, default_value_t)]
    transport: TransportName,
    #[command(flatten)]
    daemon: DaemonArguments,
    /// Namespace to use; nobody else may use it.
    #[arg(long, value_name = "NAME", default_value = "replay")]
    namespace: NamespaceName,
    /// Have so many queries under way at once.
    #[arg(long, value_name = "COUNT", default_value = "8")]
    in_flight: NonZeroUsize,
    /// Wait after so many requests until their events are applied, and check a sample. With 1, a run with the same seed
    /// repeats exactly.
    #[arg(long, value_name = "COUNT", default_value = "1000")]
    checkpoint_requests: NonZeroUsize,
    /// How many of the last requests to check at the end: all, or a number.
    #[arg(long, value_name = "COUNT", default_value = "all", value_parser = parse_check)]
    check: FinalCheck,
    /// Leave the simulated workers in the daemon, to look at them.
    #[arg(long, conflicts_with = "embedded")]
    no_cleanup: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Maximum number of workers in one namespace, by a daemon's default limits.
const WORKERS_MAX: usize = 4096;

/// Parses a number of workers, from 1 to [`WORKERS_MAX`].
pub(super) fn parse_workers(text: &str) -> Result<NonZeroUsize, String> {
    NonZeroUsize::from_str(text)
        .ok()
        .filter(|workers| workers.get() <= WORKERS_MAX)
        .ok_or_else(|| format!("write a number from 1 to {WORKERS_MAX}"))
}

fn parse_check(text: &str) -> Result<FinalCheck, String> {
    match text {
        "all" => Ok(FinalCheck::All),
        _ => usize::from_str(text)
            .map(FinalCheck::Last)
            .map_err(|_| "write all, or how many of the last requests".to_owned()),
    }
}

impl From<SimulationError> for Failure {
    fn from(error: SimulationError) -> Self {
        match error {
            SimulationError::Config(errors) => errors.into(),
            SimulationError::Start(error) => error.into(),
            SimulationError::Connect(error) => error.into(),
            SimulationError::Client(error) => error.into(),
            SimulationError::Publisher(error) => error.into(),
            SimulationError::Prefix(_) | SimulationError::NamespaceInUse { .. } => Self::usage(error),
            SimulationError::NotReady(_) | SimulationError::Broker(_) => Self::unavailable(error),
            _ => Self::failed(error),
        }
    }
}

impl ReplayArguments {
    /// Replays the trace and prints the report. Fails if a reply was wrong.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = StopSignals::listen()?;
        start_logging()?;
        let requests =
            read_trace(&self.trace, self.limit_requests.map(NonZeroUsize::get)).map_err(Failure::usage)?;
        let session = self.open().await?;
        let outcome = tokio::select! {
            outcome = Box::pin(self.replay(&session, &requests)) => outcome,
            signal = signals.next() => Err(interrupted(signal)),
        };
        let left = tokio::select! {
            left = Box::pin(self.leave(session)) => left,
            signal = signals.next() => Err(interrupted(signal)),
        };
        let report = outcome?;
        left?;
        if self.json {
            print_json(&report)?;
        } else {
            print(&render(&report))?;
        }
        verdict(&report)
    }

    async fn open(&self) -> Result<Session, Failure> {
        let namespace = self.namespace.clone();
        let session = if self.embedded {
            let prefix = self.daemon.prefix().unwrap_or(EMBEDDED_PREFIX);
            let mut config = embedded_config(prefix, "off")?;
            if self.transport == TransportName::Jetstream {
                config.events.transport = kvatlas_config::Transport::JetStream;
            }
            Box::pin(Session::embedded(config, namespace)).await?
        } else {
            let config = self.daemon.load(process_environment())?;
            Session::remote(&config, namespace).await?
        };
        Ok(session.publishing_by(self.transport.into()))
    }

    fn options(&self) -> ReplayOptions {
        ReplayOptions {
            size: FleetSize {
                workers: self.workers,
                blocks_per_worker: self.blocks_per_worker,
            },
            seed: self.seed,
            in_flight: self.in_flight,
            checkpoint_requests: self.checkpoint_requests,
        }
    }

    async fn replay(&self, session: &Session, requests: &[Request]) -> Result<Report, Failure> {
        let progress = ReplayProgress::new(requests.len(), self.json);
        let mut replay = Replay::new(session, self.options()).await?;
        let report = replay
            .run(requests, self.check, |tally| progress.show(tally))
            .await?;
        Ok(report)
    }

    /// Closes the session. First removes the simulated workers from a daemon that runs on, unless `--no-cleanup` is
    /// given.
    async fn leave(&self, session: Session) -> Result<(), Failure> {
        if !self.embedded && !self.no_cleanup {
            let workers = self.options().size.worker_names().map_err(Failure::failed)?;
            session.say_goodbye(&workers).await?;
        }
        close(session).await
    }
}

/// Sets the log up for a simulation.
pub(super) fn start_logging() -> Result<(), Failure> {
    kvatlas_telemetry::init(kvatlas_telemetry::LogFormat::Text, LOG_FILTER).map_err(Failure::failed)
}

/// Returns the failure of a run that a signal has ended.
pub(super) fn interrupted(signal: &str) -> Failure {
    Failure::failed(format_args!("interrupted by {signal}; there is no report"))
}

/// Ends a session. Fails if some part of the daemon in this process did not stop in time.
pub(super) async fn close(session: Session) -> Result<(), Failure> {
    match session.close().await {
        Some(report) if !report.overran.is_empty() => Err(Failure::failed(report)),
        _ => Ok(()),
    }
}

/// Fails if a reply was wrong. The failure names the first few differences.
pub(super) fn verdict(report: &Report) -> Result<(), Failure> {
    if report.wrong_replies == 0 {
        return Ok(());
    }
    let differences = report.differences.join("\n  ");
    Err(Failure::failed(format_args!(
        "{} of {} replies were wrong; the first:\n  {differences}",
        report.wrong_replies, report.checked_replies
    )))
}

/// Progress bar on standard error. It is hidden if standard error is no terminal, or if the output is JSON.
pub(super) struct ReplayProgress {
    bar: ProgressBar,
}

impl ReplayProgress {
    /// Makes a progress bar for a run of `requests` requests. `is_quiet` hides the bar.
    pub(super) fn new(requests: usize, is_quiet: bool) -> Self {
        if is_quiet || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
            };
        }
        let bar = ProgressBar::new(u64::try_from(requests).unwrap_or(u64::MAX));
        let template = "{bar:12} {human_pos}/{human_len}  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(REDRAW);
        Self { bar }
    }

    /// Draws the progress of the run.
    pub(super) fn show(&self, tally: &Tally) {
        // Computing the percentiles takes longer than the rest of this method. So the message is not updated for every
        // request.
        const MESSAGE_REQUESTS: usize = 64;
        if self.bar.is_hidden() {
            return;
        }
        self.bar
            .set_position(u64::try_from(tally.requests).unwrap_or(u64::MAX));
        if tally.requests.is_multiple_of(MESSAGE_REQUESTS) {
            self.bar.set_message(summary(tally));
        }
    }
}

impl Drop for ReplayProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Returns a line that sums up the run so far: share of blocks hit, queries a second, latency of queries, blocks in the
/// index.
pub(super) fn summary(tally: &Tally) -> String {
    let latency = tally.query_latency();
    format!(
        "{:.1} % hit  {:.0} queries/s  p50 {} p99 {}  {} blocks",
        tally.hit_rate() * 100.0,
        tally.per_second(usize::try_from(tally.queries()).unwrap_or(usize::MAX)),
        latency_text(latency.p50),
        latency_text(latency.p99),
        HumanCount(tally.indexed_blocks),
    )
}

/// Returns a latency in microseconds as text, in µs or ms.
pub(super) fn latency_text(latency_us: u64) -> String {
    if latency_us < 10_000 {
        format!("{latency_us} µs")
    } else {
        format!("{} ms", latency_us / 1000)
    }
}

/// Returns a count as text, with thousands separators.
pub(super) fn count_text(count: usize) -> String {
    HumanCount(u64::try_from(count).unwrap_or(u64::MAX)).to_string()
}

/// Returns a rate as text, without decimals.
pub(super) fn rate_text(rate: f64) -> String {
    format!("{:.0}", HumanFloatCount(rate))
}

fn render(report: &Report) -> String {
    let latency = &report.query_us;
    let rows = [
        ("requests", count_text(report.requests)),
        ("workers", count_text(report.workers)),
        ("blocks per worker", count_text(report.blocks_per_worker)),
        (
            "hit rate",
            format!(
                "{:.1} % of {} blocks",
                report.hit_rate * 100.0,
                count_text(report.requested_blocks)
            ),
        ),
        (
            "hit rate, routed at random",
            format!("{:.1} %", report.random_hit_rate * 100.0),
        ),
        ("events", count_text(report.events)),
        ("blocks in events", count_text(report.blocks)),
        (
            "distinct blocks indexed",
            HumanCount(report.indexed_blocks).to_string(),
        ),
        ("time", format!("{:.2} s", report.elapsed_seconds)),
        ("requests a second", rate_text(report.requests_per_second)),
        ("blocks a second", rate_text(report.blocks_per_second)),
        ("query latency p50", latency_text(latency.p50)),
        ("query latency p99", latency_text(latency.p99)),
        ("query latency p99.9", latency_text(latency.p999)),
        ("query latency, longest", latency_text(latency.max)),
        ("degraded replies", count_text(report.degraded_replies)),
        ("in doubt for the moment", count_text(report.momentary_replies)),
        ("queries refused", count_text(report.refused_queries)),
        ("replies checked", count_text(report.checked_replies)),
        ("replies wrong", count_text(report.wrong_replies)),
    ];
    let mut table = TextTable::new(&["REPLAY", ""]);
    for (name, value) in rows {
        table.push(vec![name.to_owned(), value]);
    }
    let mut text = table.render();
    let _ = writeln!(text, "\nseed {}", report.seed);
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::failure::ExitStatus;

    #[derive(Debug, Parser)]
    struct Example {
        #[command(flatten)]
        replay: ReplayArguments,
    }

    fn parse(arguments: &[&str]) -> Result<ReplayArguments, clap::Error> {
        let always = ["example", "--trace", "t"];
        Example::try_parse_from(always.iter().chain(arguments)).map(|example| example.replay)
    }

    #[test]
    fn one_daemon_is_used() {
        assert!(parse(&["--embedded"]).unwrap().embedded);
        assert!(!parse(&["--nats", "nats://a"]).unwrap().embedded);
        assert!(!parse(&[]).unwrap().embedded);
        assert!(parse(&["--embedded", "--nats-url", "nats://a"]).is_err());
        // The embedded daemon ends with this process, so there are no workers to leave in it.
        assert!(parse(&["--embedded", "--no-cleanup"]).is_err());
    }

    #[test]
    fn counts_are_checked() {
        assert_eq!(parse(&["--embedded"]).unwrap().check, FinalCheck::All);
        let some = parse(&["--embedded", "--check", "10"]).unwrap();
        assert_eq!(some.check, FinalCheck::Last(10));
        for wrong in [
            ["--check", "some"],
            ["--workers", "0"],
            ["--workers", "4097"],
            ["--in-flight", "0"],
        ] {
            let arguments: Vec<_> = ["--embedded"].iter().chain(&wrong).copied().collect();
            assert!(parse(&arguments).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_wrong_reply_fails_the_command_and_is_shown() {
        let mut report = Report {
            checked_replies: 9,
            ..Report::default()
        };
        assert_eq!(verdict(&report), Ok(()));
        report.wrong_replies = 2;
        report.differences = vec!["worker-1 holds 3 leading blocks, the reply says 2".to_owned()];
        let failure = verdict(&report).unwrap_err();
        assert_eq!(failure.status, ExitStatus::Failed);
        let text = failure.to_string();
        assert!(
            text.contains("2 of 9") && text.contains("worker-1 holds 3"),
            "{text}"
        );
    }

    #[test]
    fn latencies_have_a_unit_that_fits() {
        assert_eq!(latency_text(312), "312 µs");
        assert_eq!(latency_text(12_345), "12 ms");
    }
}
