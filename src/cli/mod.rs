//! The command line: what a person types, and what is printed back.
//!
//! Results go to standard output, as tables for people or, with `--json`, as one object for programs; everything else
//! goes to standard error. A command ends with 0, or with one of the numbers of [`ExitStatus`]. Nothing here
//! holds logic of the daemon: the commands are thin over the library.

mod connect;
mod demo;
mod event_json;
mod failure;
mod hash_text;
mod lines;
mod output;
mod publish;
mod query;
mod query_json;
mod query_report;
mod replay;
mod serve;
mod snapshot;
mod status_report;
mod table;
mod text;
mod time_text;
mod transport;
mod vocab;

use clap::{Parser, Subcommand};

pub(crate) use demo::DemoArguments;
pub(crate) use failure::{ExitStatus, Failure};
pub(crate) use output::say;
pub(crate) use publish::{PublishArguments, publish};
pub(crate) use query::{QueryArguments, query};
pub(crate) use replay::ReplayArguments;
pub(crate) use serve::{ServeArguments, StopSignals, announce, start_logging};
pub(crate) use snapshot::{SnapshotArguments, snapshot};
pub(crate) use vocab::{VocabArguments, vocab};

/// What the program was asked to do.
#[derive(Debug, Parser)]
#[command(
    name = "kvatlas",
    version,
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
    /// It takes in the events of all workers, answers queries, and serves metrics and probes over HTTP. SIGTERM or
    /// SIGINT stops it in good order; a second signal ends it at once.
    #[command(after_help = serve::EXAMPLES)]
    Serve(Box<ServeArguments>),
    /// Ask which workers hold how long a prefix, or how far the daemon has followed them.
    #[command(after_help = query::EXAMPLES)]
    Query(Box<QueryArguments>),
    /// Publish the events of one worker, read as JSON lines.
    ///
    /// For tests, for repairs by hand, and as a model for publishers in other languages.
    #[command(after_help = publish::EXAMPLES)]
    Publish(Box<PublishArguments>),
    /// Show what the daemon is for: a simulated fleet, on a daemon and a NATS server of its own.
    #[command(after_help = demo::EXAMPLES)]
    Demo(DemoArguments),
    /// Replay a trace of requests through a simulated fleet, and check every reply.
    #[command(after_help = replay::EXAMPLES)]
    Replay(Box<ReplayArguments>),
    /// Look into snapshot files.
    Snapshot(SnapshotArguments),
    /// Ask which tokens of a model's vocabulary may come next.
    Vocab(VocabArguments),
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
