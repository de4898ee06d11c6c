//! `kvatlas doctor`: checks everything that a deployment needs, and says what to mend.

mod bridges;
mod broker;
mod clock;
mod daemon;
mod holders;
mod jetstream;
mod namespaces;
mod permissions;
mod probe;
mod promises;
mod replicas;
mod report;
mod search;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvatlas_config::{Config, process_environment};
use kvatlas_core::wire::{NamespaceName, PROBE_NAME, Subjects, WorkerName};
use kvatlas_process::setup::Setup;

use super::admin_client::AdminClientArguments;
use super::connect::{DaemonArguments, parse_time};
use super::failure::Failure;
use super::nats_context::Surroundings;
use super::output::{print, print_json};
use super::serve::StopSignals;
use super::text::printable;
use broker::DoctorConnection;
pub(super) use namespaces::Hashed;
use probe::Probe;
use replicas::Replica;
use report::{Check, DoctorReport};

pub(super) const EXAMPLES: &str = "The probe publishes one event of a worker of its own, asks for it, and takes it back. \
    Nothing of it stays.\n\
    Exit codes: 0 nothing failed, although there may be warnings, 1 a check failed, 69 no NATS server.\n\n\
    Examples:\n  \
    kvatlas doctor\n  \
    kvatlas doctor --config kvatlas.toml --role daemon\n  \
    kvatlas doctor --admin 10.0.0.7:9464 --admin 10.0.0.8:9464 --json";

/// Parts of a deployment to look at.
#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    #[command(flatten)]
    daemon: DaemonArguments,
    /// The daemon's configuration file; environment variables override it, and no context is chosen.
    #[arg(long, value_name = "FILE", conflicts_with = "context")]
    config: Option<PathBuf>,
    /// Permissions to check: a daemon's, a publisher's, a router's or all of them.
    #[arg(long, value_enum, default_value_t = NatsRole::All)]
    role: NatsRole,
    /// Namespace of the probe event.
    #[arg(long, value_name = "NAME", default_value = PROBE_NAME)]
    namespace: NamespaceName,
    /// Worker of the probe event; the event is of a data-parallel rank of its own.
    #[arg(long, value_name = "NAME", default_value = PROBE_NAME)]
    worker: WorkerName,
    /// Admin listener of a replica; may be given several times [default: the listeners of all daemons, gateways and
    /// bridges that are found on NATS; also 127.0.0.1:9464 if no daemon or gateway is among them] [environment:
    /// KVATLAS_ADMIN_LISTEN].
    #[arg(long = "admin", value_name = "ADDRESS")]
    admin: Vec<String>,
    /// How long to wait for each answer: 5, 2.5s or 500ms.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    timeout: Duration,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A role of `deploy/nats`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NatsRole {
    /// Receives events and answers queries.
    Daemon,
    /// Publishes the events of a worker.
    Publisher,
    /// Sends queries.
    Router,
    /// All of these, as on a server without permissions.
    All,
}

impl NatsRole {
    fn includes(self, other: Self) -> bool {
        self == Self::All || self == other
    }
}

/// Runs all checks and prints the report. Fails if a check failed, or if a signal ends the checks.
pub(crate) async fn doctor(arguments: DoctorArguments) -> Result<(), Failure> {
    let config = arguments.load()?;
    let named = arguments.named()?;
    let probe = Probe::of(arguments.namespace.clone(), arguments.worker.clone());
    let mut signals = StopSignals::listen()?;
    let (report, unconnected) = tokio::select! {
        examined = examine(&arguments, &config, named, &probe) => examined?,
        name = signals.next() => {
            // Without its goodbye, daemons would keep the probe's holder as stale for a while.
            tokio::select! {
                () = probe.take_back(arguments.timeout) => {}
                _ = signals.next() => {}
            }
            return Err(Failure::failed(format_args!("ended by {name}")));
        }
    };
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&printable(&report.render()))?;
    }
    report.verdict(unconnected)
}

/// Makes all checks. `named` are the replicas that the command line names. Also returns the error text with which the
/// command ends if no NATS server could be reached.
async fn examine(
    arguments: &DoctorArguments,
    config: &Config,
    named: Vec<Replica>,
    probe: &Probe,
) -> Result<(DoctorReport, Option<&'static str>), Failure> {
    let subjects = Subjects::new(&config.subjects.prefix).map_err(Failure::usage)?;
    let mut report = DoctorReport::default();
    let connected = match broker::connect(config, arguments.timeout).await {
        Ok(connected) => {
            report.add(connected.check());
            Ok(connected)
        }
        Err(unconnected) => {
            report.add(unconnected.check);
            Err(unconnected.verdict)
        }
    };
    let (replicas, found) = match named.is_empty() {
        false => (named, Vec::new()),
        true => arguments.find(connected.as_ref().ok(), config).await,
    };
    let seen = replicas::look(replicas).await;
    let told = replicas::setups(&seen);
    match &connected {
        Ok(connected) => {
            let setup = wanted(&Setup::of(config), &told);
            report.add(connected.check_payload(&setup));
            report.extend(permissions::check(arguments, config, &subjects, connected, &setup).await);
            let is_followed = !told.is_empty();
            report.add(jetstream::check(connected, &setup, arguments, &subjects, is_followed).await);
            let size = replicas::block_size(&seen, &arguments.namespace);
            report.add(daemon::check_round_trip(arguments, &subjects, connected, probe, size).await);
        }
        Err(_) => {
            for name in ["max_payload", "permissions", "JetStream", "round trip"] {
                report.add(Check::skipped(name, "there is no NATS server to ask"));
            }
        }
    }
    report.extend(found);
    if told.is_empty() {
        report.add(daemon::check_disk(config));
    }
    for (place, setup) in &told {
        let name = format!("disk of {place}");
        report.add(daemon::check_room(&name, setup.snapshots.as_ref()));
    }
    report.extend(replicas::check(&seen, arguments.timeout, probe).await);
    Ok((report, connected.err()))
}

/// Returns the needs that the daemons have together: the largest message, a stream, and whether one needs an Object
/// Store. If no daemon has told its needs, returns those of the doctor's own configuration.
fn wanted(own: &Setup, told: &[(String, Setup)]) -> Setup {
    let mut setups = told.iter().map(|(_, setup)| setup.clone());
    let Some(first) = setups.next() else {
        return own.clone();
    };
    setups.fold(first, |all, next| Setup {
        max_message_bytes: all.max_message_bytes.max(next.max_message_bytes),
        stream: all.stream.or(next.stream),
        has_object_store: all.has_object_store || next.has_object_store,
        snapshots: None,
    })
}

impl DoctorArguments {
    /// Returns the replicas that are found on NATS. Adds the replica at the default address, unless a daemon or gateway
    /// was found. Also returns a check for each process or address that cannot be asked.
    async fn find(
        &self,
        connected: Option<&DoctorConnection>,
        config: &Config,
    ) -> (Vec<Replica>, Vec<Check>) {
        let (mut replicas, mut checks) = match connected {
            Some(connected) => search::find(connected, &config.subjects.prefix, self.timeout).await,
            None => (Vec::new(), Vec::new()),
        };
        if replicas.iter().all(Replica::is_bridge) {
            match self.replica(None) {
                Ok(replica) => replicas.push(replica),
                Err(failure) => checks.push(Check::skipped("replica", failure)),
            }
        }
        (replicas, checks)
    }

    /// Returns the replicas that `--admin` names.
    fn named(&self) -> Result<Vec<Replica>, Failure> {
        let addresses = self.admin.iter().cloned().map(Some);
        addresses.map(|address| self.replica(address)).collect()
    }

    /// Returns the replica at `address`. If it is `None`, returns the replica at the address in the environment or at
    /// the default address.
    fn replica(&self, address: Option<String>) -> Result<Replica, Failure> {
        let is_expected = address.is_some();
        let admin = AdminClientArguments::at(address, self.timeout).client()?;
        Ok(Replica::at(admin, is_expected))
    }

    fn load(&self) -> Result<Config, Failure> {
        let (environment, flags) = self.daemon.sources(
            self.config.is_some(),
            process_environment(),
            &Surroundings::of_process(),
        )?;
        let environment = environment.into_iter();
        Ok(Config::load(flags, environment, self.config.as_deref())?)
    }
}
