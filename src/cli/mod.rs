//! The command line: what a person types, and what is printed back.
//!
//! Results go to standard output, as tables for people or, with `--json`, as one object for programs; everything else
//! goes to standard error. A command ends with 0, or with one of the numbers of [`ExitStatus`]. The commands hold no
//! logic of the daemon: they only call the library.

#![allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "the comments of arguments are help texts"
)]

mod admin;
mod admin_client;
#[cfg(feature = "bridge")]
mod bridge;
#[cfg(feature = "compare")]
mod compare;
mod connect;
mod demo;
mod doctor;
mod doubted;
#[cfg(feature = "bridge")]
mod engines;
mod event_line;
mod explain;
mod failure;
mod fleet;
mod followed;
#[cfg(feature = "generate")]
mod generate;
mod lines;
mod missing;
mod namespace;
mod nats_context;
mod output;
mod presence;
mod probe;
mod promises;
mod publish;
mod publish_wait;
mod query;
mod query_report;
mod refused;
mod replay;
mod serve;
mod silence;
mod snapshot;
mod status;
mod status_report;
mod strays;
pub(crate) mod supervisor;
mod table;
mod text;
#[cfg(feature = "top")]
mod top;
mod transport;
mod trouble;
#[cfg(feature = "bridge")]
mod up;
#[cfg(feature = "vocab")]
mod vocab;

use clap::{Parser, Subcommand};

pub(crate) use admin::AdminArguments;
#[cfg(feature = "bridge")]
pub(crate) use bridge::BridgeArguments;
#[cfg(feature = "compare")]
pub(crate) use compare::{CompareArguments, compare};
pub(crate) use demo::DemoArguments;
pub(crate) use doctor::{DoctorArguments, doctor};
pub(crate) use explain::{ExplainArguments, explain};
pub(crate) use failure::{ExitStatus, Failure};
pub(crate) use fleet::FleetArguments;
#[cfg(feature = "generate")]
pub(crate) use generate::{CompletionsArguments, ManArguments, completions, man};
pub(crate) use output::say;
pub(crate) use probe::ProbeArguments;
pub(crate) use publish::{PublishArguments, publish};
pub(crate) use query::{QueryArguments, query};
pub(crate) use replay::ReplayArguments;
pub(crate) use serve::{ConfigSource, Hangups, ServeArguments, StopSignals, announce, start_logging};
pub(crate) use snapshot::{SnapshotArguments, snapshot};
pub(crate) use status::{StatusArguments, status};
#[cfg(feature = "top")]
pub(crate) use top::{TopArguments, top};
#[cfg(feature = "bridge")]
pub(crate) use up::UpArguments;
#[cfg(feature = "vocab")]
pub(crate) use vocab::{VocabArguments, vocab};

/// Command line of the program.
#[derive(Debug, Parser)]
#[command(
    name = "kvatlas",
    version = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ")"),
    about = "A global, exact map of the KV-cache blocks held by every LLM inference worker, served over NATS.",
    after_help = "Exit codes: 0 done, 1 failed, 64 wrong usage or configuration, 69 no broker or no daemon.\n\n\
        Examples:\n  \
        kvatlas demo\n  \
        kvatlas serve --embedded\n  \
        kvatlas query --namespace llama --status\n  \
        kvatlas publish events.jsonl --namespace llama --worker gpu-0 --wait",
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon until it is told to stop.
    ///
    /// The daemon takes in the events of all workers, answers queries, and serves metrics and probes over HTTP. SIGTERM
    /// or SIGINT stops it in good order; a second signal ends it at once.
    #[command(after_help = serve::EXAMPLES)]
    Serve(Box<ServeArguments>),
    #[cfg(feature = "bridge")]
    /// Run all that one machine needs: a NATS server, the daemon, a bridge to engines, and queries over HTTP.
    ///
    /// The NATS server is a process of its own; it is not started if --nats-url names one. The rest is one process.
    #[command(after_help = up::EXAMPLES)]
    Up(Box<UpArguments>),
    #[cfg(feature = "bridge")]
    /// Follow engines' ZMQ publishers, and publish their events to daemons over NATS.
    #[command(after_help = bridge::EXAMPLES)]
    Bridge(Box<BridgeArguments>),
    /// Ask which workers hold leading blocks of a prompt, or how far the daemon has followed each worker.
    #[command(after_help = query::EXAMPLES)]
    Query(Box<QueryArguments>),
    /// Show all namespaces of a daemon on one screen; the exit code says whether all is well.
    #[command(after_help = status::EXAMPLES)]
    Status(StatusArguments),
    #[cfg(feature = "top")]
    /// Watch the fleet, rates and latencies of a daemon in the terminal.
    #[command(after_help = top::EXAMPLES)]
    Top(TopArguments),
    /// Look at everything that a deployment needs, and say what to mend.
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(Box<DoctorArguments>),
    /// Say what a word of an answer, an alert, a metric or a setting means, and what to do.
    #[command(after_help = explain::EXAMPLES)]
    Explain(ExplainArguments),
    /// Publish the events of one worker, read as JSON lines.
    ///
    /// For tests, for repairs by hand, and as a model for publishers in other languages.
    #[command(after_help = publish::EXAMPLES)]
    Publish(Box<PublishArguments>),
    /// Show a daemon at work: with a simulated fleet, and a NATS server that the command starts.
    #[command(after_help = demo::EXAMPLES)]
    Demo(DemoArguments),
    /// Replay a trace of requests through a simulated fleet, and check every reply.
    #[command(after_help = replay::EXAMPLES)]
    Replay(Box<ReplayArguments>),
    /// Simulate a fleet of workers and its router, with a daemon that runs already, until told to stop.
    #[command(after_help = fleet::EXAMPLES)]
    Fleet(FleetArguments),
    #[cfg(feature = "compare")]
    /// Compare policies of routing on the same requests: exact answers, guesses, affinity, round robin, random.
    #[command(after_help = compare::EXAMPLES)]
    Compare(Box<CompareArguments>),
    /// Ask the daemon's admin listener whether it is ready: the health check of containers.
    #[command(after_help = probe::EXAMPLES)]
    Probe(ProbeArguments),
    /// Make daemons forget or resynchronise a worker, write a snapshot, or stop.
    #[command(after_help = admin::EXAMPLES)]
    Admin(Box<AdminArguments>),
    /// Look into snapshot files.
    Snapshot(SnapshotArguments),
    #[cfg(feature = "vocab")]
    /// Ask which tokens of a model's vocabulary may come next.
    Vocab(VocabArguments),
    #[cfg(feature = "generate")]
    /// Print the completions of this command line for a shell.
    #[command(after_help = generate::COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArguments),
    #[cfg(feature = "generate")]
    /// Print the manual page.
    #[command(after_help = generate::MAN_EXAMPLES)]
    Man(ManArguments),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
