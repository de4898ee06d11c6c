//! `kvatlas admin`: commands of operators to daemons and bridges.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::{Client, StatusCode, Subscriber};
use bytes::Bytes;
use clap::{Args, Subcommand};
use futures_util::StreamExt;
use kvatlas_core::wire::{
    AdminCommand, AdminHolder, AdminReply, AdminRequest, NamespaceName, PROTOCOL_VERSION, Rank, Subjects,
    WorkerName,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::admin_client::ProcessRole;
use super::connect::{ConnectionArguments, NatsConnection};
use super::failure::Failure;
use super::output::{print, print_json};
use super::presence::{PING, PresentProcess};
use super::table::TextTable;
use super::text::{counted, printable};

pub(super) const EXAMPLES: &str = "Examples:\n  \
    kvatlas admin forget llama gpu-0        # all its ranks, on every daemon\n  \
    kvatlas admin resync llama gpu-0 3\n  \
    kvatlas admin reset vllm-0              # bridges have the engine drop its prefix cache\n  \
    kvatlas admin snapshot\n  \
    kvatlas admin drain --instance kvatlas@host-1:4711\n\n\
    Every daemon that hears a command carries it out and replies, unless --instance names one; reset is for bridges. \
    A daemon that is there and has not replied within --timeout is shown, and counts as a failure.";

/// Silence after which no further process is expected to say that it is there. If none has said so, no further reply is
/// expected after it.
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
    /// afterwards, because a restart would bring the holder back. A publisher whose batches are dropped must have ended:
    /// until its next batch, answers would be exact without it.
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
    #[arg(value_parser = parse_worker)]
    worker: WorkerName,
    /// Data-parallel rank; without it, all ranks of the worker.
    rank: Option<Rank>,
    #[command(flatten)]
    common: CommonArguments,
}

/// Reads the name of a worker. Daemons also list refused publishers by names that no worker can have, so the error says
/// what to do about these.
fn parse_worker(text: &str) -> Result<WorkerName, String> {
    let hint = "a refused publisher that is listed by such a name has no holder to forget: correct its subject, and the name goes \
                from the list after remove_after_ms";
    WorkerName::new(text).map_err(|error| format!("{error}; {hint}"))
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
    /// Sends the command, and prints the replies. Fails if a reply has an error or is missing.
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

/// Sends a command, and returns the replies, sorted by instance. A process that is there and does not reply has an
/// error in place of a reply. Waits until all that are there have replied, for the timeout at most.
async fn ask(
    connection: &ConnectionArguments,
    command: AdminCommand,
    request: &AdminRequest,
) -> Result<Vec<AdminReply>, Failure> {
    let NatsConnection { nats, subjects, .. } = connection.connect().await?;
    let (reply_to, mut replies) = inbox(&nats).await?;
    let (presence_inbox, mut present) = inbox(&nats).await?;
    nats.publish_with_reply(PING, presence_inbox, Bytes::new())
        .await
        .map_err(Failure::unavailable)?;
    nats.publish_with_reply(subjects.admin(command), reply_to, request.encode().into())
        .await
        .map_err(Failure::unavailable)?;
    let mut awaited = AwaitedReplies::new(command, request.instance.clone(), &subjects);
    let (over, quiet) = (sleep(connection.timeout), sleep(QUIET));
    tokio::pin!(over, quiet);
    while !awaited.are_all_there() {
        tokio::select! {
            () = &mut over => break,
            // Before anybody is heard of, silence shows only that the way is long.
            () = &mut quiet, if !awaited.is_listed && awaited.is_anybody_heard() => awaited.is_listed = true,
            Some(found) = present.next() => {
                awaited.found(&found.payload);
                quiet.as_mut().reset(Instant::now() + QUIET);
            }
            reply = replies.next() => match reply {
                Some(reply) if reply.status != Some(StatusCode::NO_RESPONDERS) => {
                    awaited.take(&reply.payload)?;
                    quiet.as_mut().reset(Instant::now() + QUIET);
                }
                _ => return Err(nobody(command)),
            },
        }
    }
    let mut answers = awaited.into_replies(connection.timeout)?;
    answers.sort_by(|one, other| one.instance.cmp(&other.instance));
    Ok(answers)
}

/// Returns a subject for replies, and the subscription to it.
async fn inbox(nats: &Client) -> Result<(String, Subscriber), Failure> {
    let inbox = nats.new_inbox();
    let replies = nats.subscribe(inbox.clone()).await;
    Ok((inbox, replies.map_err(Failure::unavailable)?))
}

/// Returns the failure of a command that nobody has carried out.
fn nobody(command: AdminCommand) -> Failure {
    Failure::unavailable(match command {
        AdminCommand::Reset => {
            "no bridge has carried it out: none follows an engine of that name, none may subscribe to this command, or you lack the \
             permission"
        }
        _ => {
            "no daemon has carried it out: none listens to commands (admin.commands), none has that name, or you lack the permission"
        }
    })
}

/// Returns the failure of a reset that no bridge has carried out within `patience`, while the bridges `silent` have not
/// replied.
fn no_reply(silent: &[&str], patience: Duration) -> Failure {
    let names: Vec<String> = silent.iter().map(|name| printable(name)).collect();
    Failure::unavailable(format_args!(
        "no reply within {patience:?} of {}: it may follow the engine, and drop the cache later; see its log, or raise --timeout. All \
         other bridges do not follow an engine of that name",
        names.join(", ")
    ))
}

/// Replies to one command, and the processes that are to reply.
struct AwaitedReplies<'a> {
    command: AdminCommand,
    /// Name of the only process that is to act; `None` if all are.
    instance: Option<String>,
    /// Subjects of the processes that are to act. Other processes have other subjects.
    subjects: &'a Subjects,
    /// Names of the processes that are there. Two processes can have one name.
    present: Vec<String>,
    /// Whether it is known which processes are there.
    is_listed: bool,
    replies: Vec<AdminReply>,
}

impl<'a> AwaitedReplies<'a> {
    fn new(command: AdminCommand, instance: Option<String>, subjects: &'a Subjects) -> Self {
        Self {
            command,
            instance,
            subjects,
            present: Vec::new(),
            is_listed: false,
            replies: Vec::new(),
        }
    }

    /// Notes a process that is there, if the command is for it.
    fn found(&mut self, payload: &[u8]) {
        let Some(process) = PresentProcess::decode(payload) else {
            return;
        };
        // A gateway keeps no index, so it has nothing to do but to stop. It may lack the right to hear commands.
        let has_role = |role: ProcessRole| process.role == role.as_str();
        let is_concerned = match self.command {
            AdminCommand::Reset => has_role(ProcessRole::Bridge),
            AdminCommand::Drain => !has_role(ProcessRole::Bridge),
            AdminCommand::Forget | AdminCommand::Resync | AdminCommand::Snapshot => {
                has_role(ProcessRole::Daemon)
            }
        };
        let is_meant = self
            .instance
            .as_ref()
            .is_none_or(|name| *name == process.instance)
            && Subjects::new(&process.subjects_prefix).is_ok_and(|subjects| subjects == *self.subjects)
            && is_concerned;
        if is_meant && self.present.len() < REPLIES_MAX {
            self.present.push(process.instance);
        }
    }

    fn take(&mut self, payload: &[u8]) -> Result<(), Failure> {
        let reply = AdminReply::decode(payload)
            .map_err(|error| Failure::failed(format_args!("a reply cannot be read: {error}")))?;
        self.replies.push(reply);
        Ok(())
    }

    /// Whether a process that carries out the command has said that it is there, or has replied.
    fn is_anybody_heard(&self) -> bool {
        !self.present.is_empty() || self.replies.iter().any(|reply| !self.is_idle(reply))
    }

    /// Whether no further reply is to be expected. As long as it is not known who is there, a further reply may come.
    fn are_all_there(&self) -> bool {
        if self.replies.len() >= REPLIES_MAX {
            return true;
        }
        // Two processes can have the name, and only one of them follows the engine.
        let is_done = self.instance.is_some() && self.replies.iter().any(|reply| !self.is_idle(reply));
        is_done || (self.is_listed && self.silent().is_empty())
    }

    /// Whether the reply comes from a bridge that has nothing to reset, because it does not follow the engine.
    fn is_idle(&self, reply: &AdminReply) -> bool {
        self.command == AdminCommand::Reset && reply.holders == 0 && reply.error.is_none()
    }

    /// Returns the names of the processes that are there and have not replied.
    fn silent(&self) -> Vec<&str> {
        let mut replied: BTreeMap<&str, usize> = BTreeMap::new();
        for reply in &self.replies {
            *replied.entry(&reply.instance).or_default() += 1;
        }
        let mut silent = Vec::new();
        for name in &self.present {
            match replied.get_mut(name.as_str()) {
                Some(left) if *left > 0 => *left -= 1,
                _ => silent.push(name.as_str()),
            }
        }
        silent
    }

    /// Returns the replies, and an error for each process that has not replied within `patience`. Bridges that do not
    /// follow the engine of a reset are left out. Older ones of them do not reply, so silent bridges are left out, too,
    /// if another bridge follows the engine.
    ///
    /// # Errors
    ///
    /// The failure of a command that nobody has carried out. It names the bridges that may still do so.
    fn into_replies(mut self, patience: Duration) -> Result<Vec<AdminReply>, Failure> {
        let is_reset = self.command == AdminCommand::Reset;
        let silent = self.silent();
        if is_reset && !silent.is_empty() && self.replies.iter().all(|reply| self.is_idle(reply)) {
            return Err(no_reply(&silent, patience));
        }
        let silent = if is_reset { Vec::new() } else { silent };
        let error = format!(
            "no reply within {patience:?}: see its log; raise --timeout, or turn its admin.commands on"
        );
        let silent: Vec<AdminReply> = silent
            .into_iter()
            .map(|name| AdminReply {
                v: PROTOCOL_VERSION,
                instance: name.to_owned(),
                holders: 0,
                error: Some(error.clone()),
            })
            .collect();
        let mut replies = std::mem::take(&mut self.replies);
        replies.retain(|reply| !self.is_idle(reply));
        replies.extend(silent);
        match replies.is_empty() {
            true => Err(nobody(self.command)),
            false => Ok(replies),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn presence(instance: &str, prefix: &str, role: &str) -> Vec<u8> {
        let metadata = json!({ "instance": instance, "subjects_prefix": prefix, "role": role });
        json!({ "name": "kvatlas", "metadata": metadata })
            .to_string()
            .into_bytes()
    }

    fn reply(instance: &str) -> Vec<u8> {
        reply_about(instance, 1)
    }

    fn reply_about(instance: &str, holders: u64) -> Vec<u8> {
        let reply = AdminReply {
            v: PROTOCOL_VERSION,
            instance: instance.to_owned(),
            holders,
            error: None,
        };
        reply.encode()
    }

    fn subjects() -> Subjects {
        Subjects::new("kvatlas").unwrap()
    }

    fn awaited<'a>(
        subjects: &'a Subjects,
        command: AdminCommand,
        instance: Option<&str>,
    ) -> AwaitedReplies<'a> {
        let mut awaited = AwaitedReplies::new(command, instance.map(str::to_owned), subjects);
        for (instance, prefix, role) in [
            ("a", "kvatlas", "daemon"),
            ("b", "kvatlas", "gateway"),
            ("b", "kvatlas", "daemon"),
            ("c", "other", "daemon"),
            ("d", "kvatlas", "bridge"),
        ] {
            awaited.found(&presence(instance, prefix, role));
        }
        awaited.found(b"another program");
        awaited
    }

    fn outcomes(awaited: AwaitedReplies<'_>) -> Vec<(String, bool)> {
        let replies = awaited.into_replies(Duration::from_secs(5)).unwrap_or_default();
        replies
            .into_iter()
            .map(|reply| (reply.instance, reply.error.is_none()))
            .collect()
    }

    #[test]
    fn all_that_are_there_are_waited_for() {
        let subjects = subjects();
        let mut awaited = awaited(&subjects, AdminCommand::Drain, None);
        for name in ["a", "b", "b"] {
            assert!(!awaited.are_all_there(), "{name}");
            awaited.take(&reply(name)).unwrap();
        }
        assert!(!awaited.are_all_there(), "others may say that they are there");
        awaited.is_listed = true;
        assert!(awaited.are_all_there());
        awaited.found(&presence("e", "kvatlas", "daemon"));
        assert!(!awaited.are_all_there());
    }

    #[test]
    fn a_daemon_that_does_not_reply_has_failed() {
        let subjects = subjects();
        let mut awaited = awaited(&subjects, AdminCommand::Forget, None);
        awaited.is_listed = true;
        awaited.take(&reply("b")).unwrap();
        // The gateway has nothing to forget.
        let expected = [("b", true), ("a", false)];
        assert_eq!(
            outcomes(awaited),
            expected.map(|(name, is_done)| (name.to_owned(), is_done))
        );
    }

    #[test]
    fn one_reply_is_enough_where_one_process_is_named() {
        let subjects = subjects();
        let mut awaited = awaited(&subjects, AdminCommand::Drain, Some("a"));
        assert!(!awaited.are_all_there());
        awaited.take(&reply("a")).unwrap();
        assert!(awaited.are_all_there());
        assert_eq!(outcomes(awaited), [("a".to_owned(), true)]);
    }

    #[test]
    fn a_bridge_may_leave_a_reset_to_others() {
        let subjects = subjects();
        let mut awaited = awaited(&subjects, AdminCommand::Reset, None);
        awaited.is_listed = true;
        assert_eq!(awaited.silent(), ["d"]);
        awaited.take(&reply("e")).unwrap();
        assert!(!awaited.are_all_there());
        assert_eq!(outcomes(awaited), [("e".to_owned(), true)]);
    }

    #[test]
    fn bridges_that_are_silent_are_named_if_no_other_follows_the_engine() {
        let subjects = subjects();
        let error = |replies: &[Vec<u8>]| {
            let mut awaited = awaited(&subjects, AdminCommand::Reset, None);
            awaited.found(&presence("e", "kvatlas", "bridge"));
            replies.iter().for_each(|reply| awaited.take(reply).unwrap());
            awaited
                .into_replies(Duration::from_secs(5))
                .unwrap_err()
                .to_string()
        };
        let one = error(&[reply_about("e", 0)]);
        assert!(one.starts_with("no reply within 5s of d:"), "{one}");
        let both = error(&[]);
        assert!(both.starts_with("no reply within 5s of d, e:"), "{both}");
        let none = error(&[reply_about("d", 0), reply_about("e", 0)]);
        assert!(none.starts_with("no bridge has carried it out"), "{none}");
    }

    #[test]
    fn a_bridge_without_the_engine_is_not_waited_for_and_not_shown() {
        let subjects = subjects();
        let mut all = awaited(&subjects, AdminCommand::Reset, None);
        all.found(&presence("e", "kvatlas", "bridge"));
        all.is_listed = true;
        all.take(&reply("e")).unwrap();
        assert!(!all.are_all_there());
        all.take(&reply_about("d", 0)).unwrap();
        assert!(all.are_all_there());
        assert_eq!(outcomes(all), [("e".to_owned(), true)]);
        let mut named = awaited(&subjects, AdminCommand::Reset, Some("d"));
        named.take(&reply_about("d", 0)).unwrap();
        assert!(!named.are_all_there(), "another bridge may have the name");
        named.is_listed = true;
        assert!(named.are_all_there());
        assert!(outcomes(named).is_empty());
    }

    #[test]
    fn the_name_of_a_refused_publisher_is_not_called_a_worker() {
        assert_eq!(parse_worker("gpu-0").unwrap().as_str(), "gpu-0");
        for name in ["gpu.0", "a...", ""] {
            let error = parse_worker(name).unwrap_err();
            assert!(error.contains("correct its subject"), "{error}");
        }
    }

    #[test]
    fn replies_are_enough_where_nobody_says_that_it_is_there() {
        let subjects = subjects();
        let mut awaited = AwaitedReplies::new(AdminCommand::Reset, None, &subjects);
        assert!(!awaited.is_anybody_heard() && !awaited.are_all_there());
        // Another bridge, which says nothing else either, may still ask its engine's server.
        awaited.take(&reply_about("d", 0)).unwrap();
        assert!(!awaited.is_anybody_heard() && !awaited.are_all_there());
        awaited.take(&reply("e")).unwrap();
        assert!(awaited.is_anybody_heard() && !awaited.are_all_there());
        awaited.is_listed = true;
        assert!(awaited.are_all_there());
        assert_eq!(outcomes(awaited), [("e".to_owned(), true)]);
    }
}
