//! `kvatlas admin`: commands of operators to daemons and bridges.

use std::time::Duration;

use async_nats::StatusCode;
use clap::{Args, Subcommand};
use futures_util::StreamExt;
use kvatlas_core::wire::{
    AdminCommand, AdminHolder, AdminReply, AdminRequest, NamespaceName, Rank, WorkerName,
};
use serde_json::{Value, json};

use super::connect::ConnectionArguments;
use super::failure::Failure;
use super::output::{print, print_json};
use super::table::TextTable;
use super::text::{counted, printable};

pub(super) const EXAMPLES: &str = "Examples:\n  \
    kvatlas admin forget llama gpu-0        # all its ranks, on every daemon\n  \
    kvatlas admin resync llama gpu-0 3\n  \
    kvatlas admin reset vllm-0              # bridges have the engine drop its prefix cache\n  \
    kvatlas admin snapshot\n  \
    kvatlas admin drain --instance kvatlas@host-1:4711\n\n\
    Every daemon that hears a command carries it out and replies, unless --instance names one; reset is for bridges.";

/// Longest wait for a further reply after the previous reply.
const QUIET: Duration = Duration::from_millis(300);
/// Maximum number of replies to one command that are read.
const REPLIES_MAX: usize = 4096;

/// The flags of `kvatlas admin`.
#[derive(Debug, Args)]
pub(crate) struct AdminArguments {
    #[command(subcommand)]
    command: AdminSubcommand,
}

/// Arguments that all commands have in common.
#[derive(Debug, Args)]
struct CommonArguments {
    #[command(flatten)]
    connection: ConnectionArguments,
    /// Name of the only daemon or bridge that is to act, as replies show it.
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum AdminSubcommand {
    /// Forget a worker or one of its ranks, with its epoch and batch numbers; its next batch counts as its first.
    ///
    /// This is for a holder whose publisher is locked out by a wrong epoch or number. Run `kvatlas admin snapshot`
    /// afterwards, because a restart would bring the holder back.
    Forget(HolderArguments),
    /// Call a worker or one of its ranks doubtful, so that the daemon asks its publisher for the full state.
    Resync(HolderArguments),
    /// Make an engine drop its prefix cache, which ends every doubt about it. The bridges that follow the engine ask
    /// its server to do so.
    ///
    /// vLLM's server drops its cache only in development mode (VLLM_SERVER_DEV_MODE=1), and not while requests run.
    Reset {
        /// Name that the bridge has for the engine, or name of its worker.
        engine: String,
        #[command(flatten)]
        common: CommonArguments,
    },
    /// Write a snapshot now.
    Snapshot(CommonArguments),
    /// Stop in good order; needs --instance or --all.
    Drain {
        #[command(flatten)]
        common: CommonArguments,
        /// Stop all daemons.
        #[arg(long)]
        all: bool,
    },
}

#[derive(Debug, Args)]
struct HolderArguments {
    /// The namespace.
    namespace: NamespaceName,
    /// The worker.
    worker: WorkerName,
    /// Data-parallel rank; without it, all ranks of the worker.
    rank: Option<Rank>,
    #[command(flatten)]
    common: CommonArguments,
}

impl HolderArguments {
    fn split(self) -> (CommonArguments, Option<AdminHolder>) {
        let holder = AdminHolder {
            namespace: self.namespace,
            worker: self.worker,
            rank: self.rank,
        };
        (self.common, Some(holder))
    }
}

impl AdminArguments {
    /// Sends the command, and prints the replies. Fails if a reply has an error, or if no reply came.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut reset = None;
        let (command, (common, holder)) = match self.command {
            AdminSubcommand::Reset { engine, common } => {
                reset = Some(engine);
                (AdminCommand::Reset, (common, None))
            }
            AdminSubcommand::Forget(of) => (AdminCommand::Forget, of.split()),
            AdminSubcommand::Resync(of) => (AdminCommand::Resync, of.split()),
            AdminSubcommand::Snapshot(common) => (AdminCommand::Snapshot, (common, None)),
            AdminSubcommand::Drain { common, all } if all == common.instance.is_some() => {
                return Err(Failure::usage(
                    "say which daemon is to stop: either --instance NAME or --all",
                ));
            }
            AdminSubcommand::Drain { common, .. } => (AdminCommand::Drain, (common, None)),
        };
        let request = AdminRequest {
            instance: common.instance,
            engine: reset,
            holder,
        };
        let answers = ask(&common.connection, command, &request).await?;
        if common.json {
            let shown = answers.iter().map(
                |AdminReply {
                     instance,
                     holders,
                     error,
                     ..
                 }| { json!({ "instance": instance, "holders": holders, "error": error }) },
            );
            print_json(&json!({ repliers(command): shown.collect::<Value>() }))?;
        } else {
            print(&render(command, &answers))?;
        }
        if let (AdminCommand::Forget | AdminCommand::Resync, Some(holder)) = (command, &request.holder)
            && answers
                .iter()
                .all(|answer| answer.holders == 0 && answer.error.is_none())
        {
            return Err(Failure::failed(format_args!(
                "no daemon that answered has {} of {}: kvatlas query --namespace {} --status lists the workers",
                holder.worker, holder.namespace, holder.namespace
            )));
        }
        let failed = answers.iter().filter(|answer| answer.error.is_some()).count();
        match failed {
            0 => Ok(()),
            failed => Err(Failure::failed(format_args!(
                "{failed} of {} {} did not do it",
                answers.len(),
                repliers(command)
            ))),
        }
    }
}

/// Sends a command, and returns the replies, sorted by instance. Stops in three cases: no reply has come for [`QUIET`], the
/// timeout has passed, or [`REPLIES_MAX`] replies have come.
async fn ask(
    connection: &ConnectionArguments,
    command: AdminCommand,
    request: &AdminRequest,
) -> Result<Vec<AdminReply>, Failure> {
    let connected = connection.connect().await?;
    let (nats, subject) = (connected.nats, connected.subjects.admin(command));
    let inbox = nats.new_inbox();
    let mut replies = nats
        .subscribe(inbox.clone())
        .await
        .map_err(Failure::unavailable)?;
    nats.publish_with_reply(subject, inbox, request.encode().into())
        .await
        .map_err(Failure::unavailable)?;
    let deadline = tokio::time::Instant::now() + connection.timeout;
    let mut answers: Vec<AdminReply> = Vec::new();
    while answers.len() < REPLIES_MAX {
        let until = match answers.is_empty() {
            true => deadline,
            false => deadline.min(tokio::time::Instant::now() + QUIET),
        };
        let Ok(Some(message)) = tokio::time::timeout_at(until, replies.next()).await else {
            break;
        };
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            break;
        }
        let reply = AdminReply::decode(&message.payload)
            .map_err(|error| Failure::failed(format_args!("a reply cannot be read: {error}")))?;
        answers.push(reply);
    }
    if answers.is_empty() {
        return Err(Failure::unavailable(match command {
            AdminCommand::Reset => {
                "no bridge has carried it out: none follows an engine of that name, none may subscribe to this command, or you lack the \
                 permission"
            }
            _ => {
                "no daemon has carried it out: none listens to commands (admin.commands), none has that name, or you lack the permission"
            }
        }));
    }
    answers.sort_by(|one, other| one.instance.cmp(&other.instance));
    Ok(answers)
}

/// Returns the plural of the processes that carry out a command: `bridges` for a reset, else `daemons`.
fn repliers(command: AdminCommand) -> &'static str {
    match command {
        AdminCommand::Reset => "bridges",
        _ => "daemons",
    }
}

fn render(command: AdminCommand, answers: &[AdminReply]) -> String {
    let who = match command {
        AdminCommand::Reset => "BRIDGE",
        _ => "DAEMON",
    };
    let mut table = TextTable::new(&[who, "OUTCOME"]);
    for answer in answers {
        let holders = counted(answer.holders, "holder", "holders");
        let outcome = match (&answer.error, command) {
            (Some(error), _) => printable(error),
            (None, AdminCommand::Forget) => format!("forgot {holders}"),
            (None, AdminCommand::Resync) => format!("asks for {holders}"),
            (None, AdminCommand::Reset) => format!("its server has dropped the cache of {holders}"),
            (None, AdminCommand::Snapshot) => "written".to_owned(),
            (None, AdminCommand::Drain) => "stops".to_owned(),
        };
        table.push(vec![printable(&answer.instance), outcome]);
    }
    table.render()
}
