//! Checks of the daemon: the round trip of a probe event, and the room for snapshots.

use std::path::Path;
use std::time::{Duration, Instant};

use async_nats::Request;
use bytes::Bytes;
use kvatlas_client::publish::{HolderPublisher, PublishedHolder};
use kvatlas_client::{ClientError, QueryClient, Refusal, Refused};
use kvatlas_config::Config;
use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{
    ErrorCode, Gathered, HolderMatch, NamespaceName, QueryKey, QueryReply, QueryRequest, SingleQuery,
    Subjects, Tier, WireError,
};
use kvatlas_process::setup::{Setup, SnapshotRoom};

use super::broker::DoctorConnection;
use super::probe::Probe;
use super::report::Check;
use super::{DoctorArguments, NatsRole};

const ROUND_TRIP: &str = "round trip";
/// Number of questions that are asked at once. Each is sent once, so one of ten daemons that hangs is missed by all of them
/// in one case of a thousand.
const QUESTIONS: u64 = 64;
/// Time within which each of these questions should be answered.
const QUESTION_PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two questions whether the daemon has applied the probe event.
const ASKING_INTERVAL: Duration = Duration::from_millis(2);
/// Number of questions to the shards that fit into the doctor's patience, even if each of them times out. So an answer
/// that names the missing shards arrives before the doctor gives up.
const GATHER_PARTS: u32 = 4;

/// Last answer of the daemon, as long as no answer has listed the probe event's block.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LackingAnswer {
    /// Nobody has answered.
    Absent,
    /// A complete answer: the daemon did not refuse, and no shard is known to be missing.
    Whole,
    /// Some shards did not answer.
    Incomplete(Gathered),
    /// The daemon refused to answer, and says why.
    Refused(WireError),
}

/// The process that answers the question about the probe event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeAnswerer {
    /// A daemon or a gateway.
    Any,
    /// The shards. No daemon without shards and no gateway answered, so the doctor asked all shards itself.
    Shards,
}

impl ProbeAnswerer {
    /// Returns the successful check for a probe event. An answer listed the event's block after the time `elapsed`.
    fn check(self, elapsed: Duration) -> Check {
        let found = format!("a probe event was found {elapsed:.1?} after it was published");
        Check::fine(
            ROUND_TRIP,
            match self {
                Self::Any => found,
                Self::Shards => format!(
                    "{found}; the doctor asked all shards itself, as there is no gateway: clients that do not gather need one (kvatlas \
                     serve --gateway)"
                ),
            },
        )
    }
}

/// Checks the round trip of a probe event: publishes a block, asks the daemon for it, and then removes the block's
/// holder. `block_size` is the block size of the probe's namespace, if a daemon has told it.
pub(super) async fn check_round_trip(
    arguments: &DoctorArguments,
    subjects: &Subjects,
    connected: &DoctorConnection,
    probe: &Probe,
    block_size: Option<BlockSize>,
) -> Check {
    let publisher = match probe.publisher(&connected.nats, subjects, block_size).await {
        Ok(publisher) => publisher,
        Err(error) => return Check::failed(ROUND_TRIP, error, "see the log of the NATS server"),
    };
    let begun = Instant::now();
    let mut lacking = LackingAnswer::Absent;
    let arrived = arrive(arguments, subjects, connected, probe, publisher, &mut lacking);
    let limit = tokio::time::timeout(arguments.timeout, arrived);
    let (namespace, worker) = (&arguments.namespace, &arguments.worker);
    let (told, asked) = (subjects.events(namespace, worker), subjects.query(namespace));
    let gathered = subjects.of_shards().query(namespace);
    let limit = connected.unless_refused(&[&told, &asked, &gathered], limit).await;
    let elapsed = begun.elapsed();
    let unanswered = match limit {
        Ok(Ok(Ok(ProbeAnswerer::Any)) | Err(_)) => unanswered(subjects, connected, namespace).await,
        _ => 0,
    };
    // The goodbye makes daemons forget the probe's holder.
    probe.take_back(arguments.timeout).await;
    match limit {
        Err(refusal) => refused_probe(&refusal, &told, arguments.role),
        Ok(Ok(Ok(_)) | Err(_)) if (1..QUESTIONS).contains(&unanswered) => Check::warning(
            ROUND_TRIP,
            format!("{unanswered} of {QUESTIONS} questions had no answer within {QUESTION_PATIENCE:?}"),
            "a daemon hangs, or has died a moment ago: kvatlas doctor --admin ADDRESS, for each of them, says which one; end it",
        ),
        Ok(Ok(Ok(answerer))) => answerer.check(elapsed),
        Ok(Ok(Err(trouble))) => Check::failed(
            ROUND_TRIP,
            trouble,
            "start a daemon with the same nats.url and subjects.prefix; /readyz of its admin listener says what it waits for",
        ),
        Ok(Err(_)) => unknown_probe(&lacking, &asked, arguments.timeout),
    }
}

/// Publishes the probe event, and waits until the daemon's answers list its block. Writes the last answer without the
/// block into `lacking`.
async fn arrive(
    arguments: &DoctorArguments,
    subjects: &Subjects,
    connected: &DoctorConnection,
    probe: &Probe,
    publisher: &HolderPublisher,
    lacking: &mut LackingAnswer,
) -> Result<ProbeAnswerer, String> {
    let (stored, hash) = Probe::block(publisher);
    publisher
        .publish(Tier::DEVICE, vec![stored])
        .await
        .map_err(|error| error.to_string())?;
    publisher.flush().await.map_err(|error| error.to_string())?;
    wait_for(arguments, subjects, connected, (probe, hash), lacking).await
}

/// Asks several questions at once, which NATS spreads over all daemons that answer. Returns how many had no answer, or one
/// without some shards. A refusal is an answer.
async fn unanswered(subjects: &Subjects, connected: &DoctorConnection, namespace: &NamespaceName) -> u64 {
    let query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(0)]));
    let payload = Bytes::from(QueryRequest::Single(query).encode());
    // A query client would send a question again, so that another daemon could answer it.
    let ask = |_| async {
        let request = Request::new().payload(payload.clone()).timeout(None);
        let answered = connected.nats.send_request(subjects.query(namespace), request);
        u64::from(match tokio::time::timeout(QUESTION_PATIENCE, answered).await {
            Ok(Ok(reply)) => QueryReply::decode(&reply.payload)
                .ok()
                .and_then(|reply| reply.gathered)
                .is_some_and(|gathered| !gathered.missing.is_empty()),
            Ok(Err(_)) => false,
            Err(_) => true,
        })
    };
    let counts = futures_util::future::join_all((0..QUESTIONS).map(ask)).await;
    counts.into_iter().sum()
}

/// Returns the check for a probe event that the NATS server refuses. `events` is the subject of the event.
///
/// If `--role` limits the credentials to one role, the check is skipped, because each role lacks a permission that the
/// probe needs. But a publisher must have the permission to publish events. So the check of a publisher's credentials
/// fails if that is what the server refuses, and so does the check of credentials for all roles.
fn refused_probe(refusal: &Refusal, events: &str, role: NatsRole) -> Check {
    match role {
        NatsRole::All => Check::failed(
            ROUND_TRIP,
            refusal,
            "give credentials that may publish events and ask, as the operator of deploy/nats; or say with --role which role these \
             are for",
        ),
        NatsRole::Publisher if refusal.refused == Refused::Message(events.to_owned()) => Check::failed(
            ROUND_TRIP,
            refusal,
            "let the publisher publish its events, as deploy/nats does; --worker says of which worker the credentials are",
        ),
        NatsRole::Daemon | NatsRole::Publisher | NatsRole::Router => Check::skipped(
            ROUND_TRIP,
            format!("{refusal}; it needs credentials that may publish events and ask"),
        ),
    }
}

/// Returns the failed check for a probe event whose block no answer listed within `timeout`. `last` is the last answer,
/// and `asked` is the subject of the questions.
fn unknown_probe(last: &LackingAnswer, asked: &str, timeout: Duration) -> Check {
    let unknown = format!("a daemon answers, and does not know the probe event within {timeout:?}");
    match last {
        LackingAnswer::Absent => Check::failed(
            ROUND_TRIP,
            format!("no answer on {asked} within {timeout:?}"),
            "if a daemon is ready by its /readyz, let it reply (allow_responses, as in deploy/nats), and see its log for what the \
             server refuses; else start one with the same nats.url and subjects.prefix",
        ),
        LackingAnswer::Incomplete(gathered) => missing_shards(gathered),
        // The error text names the missing shard, the bound that is reached, or the condition that a daemon at its
        // start waits for.
        LackingAnswer::Refused(refusal) if refusal.code == ErrorCode::Unavailable => Check::failed(
            ROUND_TRIP,
            format!("{unknown}: {}", refusal.text),
            "mend what the answer names: start the shard (sharding.shard), raise the bound, or name the namespace in the \
             configuration; a daemon that has just started needs a moment",
        ),
        LackingAnswer::Refused(_) | LackingAnswer::Whole => Check::failed(
            ROUND_TRIP,
            unknown,
            "let these credentials publish to the events subject of the probe (--namespace, --worker), see the daemon's \
             log for batches that it dropped or rejected, and with JetStream whether its store has room",
        ),
    }
}

/// Returns the failed check for a probe event, if the last answer about the event lacks the answers of some shards.
fn missing_shards(gathered: &Gathered) -> Check {
    let missing = gathered.missing_in_words();
    let are = if gathered.missing.len() == 1 { "is" } else { "are" };
    Check::failed(
        ROUND_TRIP,
        format!("{missing} {are} not there"),
        "start a daemon of each shard (sharding.shard), with the same nats.url and subjects.prefix; until then, answers lack workers",
    )
}

/// Asks again and again until a complete answer lists the probe's worker as exact. If neither a daemon nor a gateway
/// listens, asks the shards. Goes on asking while no answer comes, and while the daemon does not know the namespace.
/// Fails on any other error. Writes each answer without the worker into `lacking`.
async fn wait_for(
    arguments: &DoctorArguments,
    subjects: &Subjects,
    connected: &DoctorConnection,
    (probe, hash): (&Probe, SequenceHash),
    lacking: &mut LackingAnswer,
) -> Result<ProbeAnswerer, String> {
    let mut client =
        QueryClient::new(connected.nats.clone(), subjects.clone()).with_patience(arguments.timeout);
    let mut nobody: Option<String> = None;
    loop {
        let query = SingleQuery::new(QueryKey::SequenceHashes(vec![hash]));
        match client.query(&arguments.namespace, query).await {
            Ok(reply) => {
                let mut holders = reply.holders.iter();
                let PublishedHolder { worker, rank, .. } = probe.holder();
                let is_probe = |holder: &HolderMatch| (&holder.worker, holder.rank) == (worker, *rank);
                let is_found = holders.any(|holder| is_probe(holder) && holder.exact);
                let incomplete = reply.gathered.filter(|gathered| !gathered.missing.is_empty());
                if is_found && incomplete.is_none() {
                    return Ok(nobody.map_or(ProbeAnswerer::Any, |_| ProbeAnswerer::Shards));
                }
                *lacking = incomplete.map_or(LackingAnswer::Whole, LackingAnswer::Incomplete);
            }
            // A namespace does not exist before its first event, and a daemon that has just started does not know all
            // namespaces yet.
            Err(ClientError::Refused(refusal))
                if matches!(refusal.code, ErrorCode::UnknownNamespace | ErrorCode::Unavailable) =>
            {
                *lacking = LackingAnswer::Refused(refusal);
            }
            // The caller's patience ends at the same time, unless shards are asked.
            Err(ClientError::TimedOut { .. }) => {}
            Err(error @ ClientError::NoDaemon { .. }) => match nobody {
                None => {
                    nobody = Some(error.to_string());
                    let gathering = client.with_patience(arguments.timeout / GATHER_PARTS).gathering();
                    client = gathering.await.map_err(|error| error.to_string())?;
                }
                Some(nobody) => return Err(nobody),
            },
            Err(error) => return Err(error.to_string()),
        }
        tokio::time::sleep(ASKING_INTERVAL).await;
    }
}

/// Returns the check of the disk space for a daemon's snapshots. `name` is the name of the check, and says which daemon
/// it is about.
pub(super) fn check_room(name: &str, room: Option<&SnapshotRoom>) -> Check {
    let Some(room) = room else {
        return Check::warning(
            name,
            "there is no snapshots.directory: a restart begins with an empty map",
            "set snapshots.directory for a warm start",
        );
    };
    let directory = &room.directory;
    match (room.free_bytes, &room.error) {
        (Some(free), _) => {
            let text = format!("{} MiB are free at {directory}", free >> 20);
            if free >= room.wanted_bytes {
                return Check::fine(name, text);
            }
            let mend = format!("make room: {} MiB should be free", room.wanted_bytes >> 20);
            Check::warning(name, text, mend)
        }
        (None, error) => Check::failed(
            name,
            format!(
                "{directory}: {}",
                error.as_deref().unwrap_or("nothing is known of it")
            ),
            "create it, and see whether the disk is sound",
        ),
    }
}

/// Returns the check of the snapshot directory in the doctor's own configuration. It is for daemons that cannot be
/// asked about their disk space.
pub(super) fn check_disk(config: &Config) -> Check {
    const NAME: &str = "disk";
    let Some(directory) = &config.snapshots.directory else {
        return Check::skipped(
            NAME,
            "no daemon was asked, and the doctor is told of no snapshots.directory",
        );
    };
    if let Err(error) = try_to_write(directory) {
        return Check::failed(
            NAME,
            format!("cannot write to {}: {error}", directory.display()),
            "create it, and let the daemon's user write to it; run the doctor as that user",
        );
    }
    check_room(NAME, Setup::of(config).snapshots.as_ref())
}

fn try_to_write(directory: &Path) -> std::io::Result<()> {
    tempfile::tempfile_in(directory).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::report::CheckOutcome;
    use super::*;

    /// Returns the check of a probe whose block is not known after 5 s.
    fn unknown(last: &LackingAnswer) -> Check {
        unknown_probe(last, "a.query", Duration::from_secs(5))
    }

    #[test]
    fn a_shard_that_is_not_there_is_a_failure() {
        let check = |missing| missing_shards(&Gathered { shards: 3, missing });
        assert_eq!(check(vec![0]).outcome(), CheckOutcome::Failed);
        assert_eq!(check(vec![0]).found(), "shard 0 of 3 is not there");
        assert_eq!(check(vec![0, 2]).found(), "shards 0 and 2 of 3 are not there");
    }

    #[test]
    fn a_refusal_that_lasts_is_told_in_the_daemons_words() {
        let check = |code, text: &str| unknown(&LackingAnswer::Refused(WireError::new(code, text)));
        let missing = check(ErrorCode::Unavailable, "shard 1 of 2 did not answer; ask again");
        assert_eq!(missing.outcome(), CheckOutcome::Failed);
        assert!(
            missing
                .found()
                .ends_with("within 5s: shard 1 of 2 did not answer; ask again"),
            "{missing:?}"
        );
        assert!(missing.mend().contains("sharding.shard"), "{missing:?}");
        assert!(!missing.mend().contains("credentials"), "{missing:?}");
        // In these cases, the daemon answers but has not got the event.
        for lacking in [
            unknown(&LackingAnswer::Whole),
            check(ErrorCode::UnknownNamespace, "no events have come"),
        ] {
            assert!(lacking.mend().contains("credentials"), "{lacking:?}");
            // The worker may be a real one, whose blocks must not be forgotten.
            assert!(!lacking.mend().contains("kvatlas admin"), "{lacking:?}");
        }
    }

    #[test]
    fn silence_is_not_taken_for_an_answer() {
        let absent = unknown(&LackingAnswer::Absent);
        assert_eq!(absent.outcome(), CheckOutcome::Failed);
        assert_eq!(absent.found(), "no answer on a.query within 5s");
        assert!(absent.mend().contains("allow_responses"), "{absent:?}");
    }

    #[test]
    fn the_room_of_a_daemons_snapshots_is_what_it_tells() {
        let room = |free_bytes| SnapshotRoom {
            directory: "/d".to_owned(),
            free_bytes,
            wanted_bytes: 5 << 20,
            error: free_bytes.is_none().then(|| "no such directory".to_owned()),
        };
        let outcome = |room| check_room("disk of a", Some(&room)).outcome();
        assert_eq!(outcome(room(Some(5 << 20))), CheckOutcome::Fine);
        assert_eq!(outcome(room(Some(4 << 20))), CheckOutcome::Warning);
        assert_eq!(outcome(room(None)), CheckOutcome::Failed);
        assert_eq!(check_room("disk of a", None).outcome(), CheckOutcome::Warning);
    }
}
