//! `kvatlas publish`: the events of one worker, from JSON lines.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvatlas_client::publish::{
    Beginning, HolderPublisher, PublishConnection, PublishedHolder, PublisherError, PublisherOptions,
};
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::{BatchCursor, ErrorCode, Event, HolderStatusReply, NamespaceName, Rank, WorkerName};
use tokio::time::Instant;

use super::connect::{Connection, ConnectionArguments};
use super::event_line::LineBatch;
use super::failure::Failure;
use super::lines::{NumberedLine, numbered, open};
use super::output::{print, say};
use super::status_report::describe_state;
use super::text::counted;
use super::transport::TransportName;

pub(super) const EXAMPLES: &str = r#"A line is one event, or a batch of events with an optional tier:
  {"type":"stored","sequence_hashes":["ea06fc71a5ee6e88","ad01835a37dd294c"]}
  {"type":"stored","parent":"ad01835a37dd294c","sequence_hashes":["0x1f"],"tokens":[1,2,3,4]}
  {"tier":1,"events":[{"type":"removed","sequence_hashes":["ea06fc71a5ee6e88"]}]}
  {"events":[]}
Types are stored, removed, cleared, doubted and goodbye; deploy/wire-contract.md describes their keys.
A hash is a text of 16 hexadecimal digits (32 for a lineage hash), or 0x and fewer,
or a decimal number.

Examples:
  kvatlas publish events.jsonl --namespace llama --worker gpu-0 --wait
  kvatlas publish - --namespace llama --worker gpu-0 --epoch 7 --seq 12 < more.jsonl

Without --epoch, the batches begin a new epoch: all that the worker's rank had is replaced by them."#;

/// How often `--wait` asks the daemon how far it is.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What to publish, and as whom.
#[derive(Debug, Args)]
pub(crate) struct PublishArguments {
    /// File with one event or batch a line; - is standard input.
    #[arg(value_name = "FILE", default_value = "-")]
    file: PathBuf,
    #[command(flatten)]
    connection: ConnectionArguments,
    /// Namespace of the worker.
    #[arg(long, value_name = "NAME")]
    namespace: NamespaceName,
    /// Worker that the events are of.
    #[arg(long, value_name = "NAME")]
    worker: WorkerName,
    /// Data-parallel rank of the worker.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    rank: Rank,
    /// Incarnation of the publisher [default: the time in microseconds, which is new].
    #[arg(long, value_name = "NUMBER")]
    epoch: Option<u64>,
    /// Number of the first batch in its epoch.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "epoch",
        value_parser = clap::value_parser!(u64).range(1..))]
    seq: u64,
    /// How batches travel: with jetstream, each waits until the events stream has kept the one before.
    #[arg(long, value_enum, default_value_t)]
    transport: TransportName,
    /// Pass over bad lines, after reporting them, and publish the others.
    #[arg(long)]
    keep_going: bool,
    /// Wait until the daemon's status shows that the last batch is applied, as long as --timeout says.
    #[arg(long)]
    wait: bool,
    /// Check the lines and print the batches; connect to nothing.
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
}

/// What has been published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Published {
    batches: u64,
    events: u64,
    blocks: u64,
    bad_lines: u64,
    /// Whether the last batch had a goodbye, after which the daemon does not know the holder any more.
    has_said_goodbye: bool,
}

impl Published {
    fn count(&mut self, batch: &LineBatch) {
        self.batches += 1;
        self.events += batch.events.len() as u64;
        self.blocks += batch.blocks() as u64;
        self.has_said_goodbye = batch.events.contains(&Event::Goodbye);
    }

    fn describe(&self) -> String {
        let batches = counted(self.batches, "batch", "batches");
        let events = counted(self.events, "event", "events");
        let blocks = counted(self.blocks, "block", "blocks");
        format!("{batches}, {events}, {blocks}")
    }

    /// An error when lines were passed over.
    fn check(&self) -> Result<(), Failure> {
        match self.bad_lines {
            0 => Ok(()),
            bad => {
                let lines = counted(bad, "bad line was", "bad lines were");
                Err(Failure::failed(format_args!(
                    "{lines} not published; correct the input"
                )))
            }
        }
    }
}

/// Publishes the lines, and says how many there were.
pub(crate) async fn publish(arguments: &PublishArguments) -> Result<(), Failure> {
    let mut published = Published::default();
    if arguments.dry_run {
        for line in numbered(open(&arguments.file)?) {
            if let Some(batch) = parse(&line?, arguments.keep_going, &mut published)? {
                print(&format!("{}\n", batch.to_json().map_err(Failure::failed)?))?;
                published.count(&batch);
            }
        }
        say(format_args!(
            "checked {}; nothing was published\n",
            published.describe()
        ));
        return published.check();
    }
    let input = open(&arguments.file)?;
    let connection = arguments.connection.connect().await?;
    let publisher = publisher(arguments, &connection).await?;
    let outcome = publish_lines(arguments, input, &publisher, &mut published).await;
    // Also what came before a bad line has to leave, and is told about.
    let flushed = tokio::time::timeout(arguments.connection.timeout, publisher.flush()).await;
    let subject = connection
        .subjects
        .events(&arguments.namespace, &arguments.worker);
    let BatchCursor { epoch, seq } = publisher.cursor();
    let done = published.describe();
    print(&format!(
        "published {done} to {subject} (epoch {epoch}, last seq {seq})\n"
    ))?;
    outcome?;
    flushed.map_err(|_| Failure::unavailable(not_taken(arguments.transport)))??;
    if arguments.wait && published.batches > 0 {
        wait_until_applied(
            arguments,
            connection,
            publisher.cursor(),
            published.has_said_goodbye,
        )
        .await?;
    }
    published.check()
}

/// Why batches were not taken in time.
fn not_taken(transport: TransportName) -> &'static str {
    match transport {
        TransportName::Core => "the NATS server did not take the batches in time",
        TransportName::Jetstream => {
            "no events stream has acknowledged the batches in time; have a daemon make it with \
             --events-transport jetstream, or leave --transport out"
        }
    }
}

/// A publisher that makes a batch of every line. As long as the command runs it answers daemons that miss one.
async fn publisher(
    arguments: &PublishArguments,
    connection: &Connection,
) -> Result<HolderPublisher, PublisherError> {
    let beginning = arguments.epoch.map_or(Beginning::NewEpoch, |epoch| {
        Beginning::After(BatchCursor {
            epoch,
            seq: arguments.seq - 1,
        })
    });
    let holder = PublishedHolder {
        namespace: arguments.namespace.clone(),
        worker: arguments.worker.clone(),
        rank: arguments.rank,
    };
    let options = PublisherOptions {
        beginning,
        transport: arguments.transport.into(),
        batch_delay: Duration::ZERO,
        // The server's own limits hold: a line is a batch, as its author wrote it.
        batch_events_max: usize::MAX,
        batch_bytes_max: usize::MAX,
        ..PublisherOptions::default()
    };
    let nats = PublishConnection::new(connection.nats.clone(), connection.refusals.clone());
    HolderPublisher::start(nats, &connection.subjects, holder, options).await
}

async fn publish_lines(
    arguments: &PublishArguments,
    input: Box<dyn std::io::BufRead>,
    publisher: &HolderPublisher,
    published: &mut Published,
) -> Result<(), Failure> {
    for line in numbered(input) {
        let line = line?;
        if let Some(batch) = parse(&line, arguments.keep_going, published)? {
            let mut with_this = *published;
            with_this.count(&batch);
            let sent = publisher.publish(batch.tier, batch.events).await;
            sent.map_err(|error| Failure::unavailable(format_args!("line {}: {error}", line.number)))?;
            *published = with_this;
        }
    }
    Ok(())
}

/// The batch of a line; `None` where it is bad and has been reported.
fn parse(
    line: &NumberedLine,
    keep_going: bool,
    published: &mut Published,
) -> Result<Option<LineBatch>, Failure> {
    match LineBatch::parse(&line.text) {
        Ok(batch) => Ok(Some(batch)),
        Err(error) => {
            let failure = Failure::failed(format_args!("line {}: {error}", line.number));
            if !keep_going {
                return Err(failure);
            }
            say(format_args!("error: {failure}\n"));
            published.bad_lines += 1;
            Ok(None)
        }
    }
}

/// Asks until the daemon has applied the batch at `cursor`.
async fn wait_until_applied(
    arguments: &PublishArguments,
    connection: Connection,
    cursor: BatchCursor,
    has_said_goodbye: bool,
) -> Result<(), Failure> {
    let patience = arguments.connection.timeout;
    let deadline = Instant::now() + patience;
    let client = QueryClient::new(connection.nats, connection.subjects).with_patience(patience);
    loop {
        let holder = find_holder(arguments, &client).await?;
        match progress(holder.as_ref(), cursor, has_said_goodbye) {
            Progress::Applied(text) => return print(&text),
            Progress::Ignored(text) => return Err(Failure::failed(text)),
            Progress::Waiting(state) if Instant::now() >= deadline => {
                let BatchCursor { epoch, seq } = cursor;
                return Err(Failure::failed(format_args!(
                    "epoch {epoch}, seq {seq} was not applied within {patience:?}: the daemon {state}; \
                     see its log for the reason, or raise --timeout"
                )));
            }
            Progress::Waiting(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

/// How far the daemon is with what was published, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Progress {
    Applied(String),
    /// It will never be applied.
    Ignored(String),
    Waiting(String),
}

fn progress(holder: Option<&HolderStatusReply>, cursor: BatchCursor, has_said_goodbye: bool) -> Progress {
    let Some(holder) = holder else {
        return match has_said_goodbye {
            true => {
                Progress::Applied("applied: the daemon does not know the worker's rank any more\n".to_owned())
            }
            false => Progress::Waiting("has none of the worker's batches".to_owned()),
        };
    };
    let BatchCursor { epoch, seq } = cursor;
    if holder.epoch > epoch {
        return Progress::Ignored(format!(
            "the daemon ignores epoch {epoch}, because epoch {} has replaced it; use a higher --epoch",
            holder.epoch
        ));
    }
    if has_said_goodbye || holder.epoch < epoch || holder.seq < seq {
        return Progress::Waiting(format!("is at epoch {}, seq {}", holder.epoch, holder.seq));
    }
    let blocks = counted(holder.blocks, "block", "blocks");
    let state = describe_state(holder.exact, holder.degraded);
    Progress::Applied(format!("applied: the worker's rank holds {blocks}, {state}\n"))
}

/// The daemon's status of our holder; `None` where it does not know it yet.
async fn find_holder(
    arguments: &PublishArguments,
    client: &QueryClient,
) -> Result<Option<HolderStatusReply>, Failure> {
    match client.status(&arguments.namespace).await {
        Ok(status) => Ok(status
            .holders
            .into_iter()
            .find(|holder| holder.worker == arguments.worker && holder.rank == arguments.rank)),
        // The namespace comes into being with its first batch.
        Err(ClientError::Refused(refusal)) if refusal.code == ErrorCode::UnknownNamespace => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u64, text: &str) -> NumberedLine {
        NumberedLine {
            number,
            text: text.to_owned(),
        }
    }

    #[test]
    fn a_bad_line_stops_unless_told_otherwise() {
        let mut published = Published::default();
        let failure = parse(&line(7, "{}"), false, &mut published).unwrap_err();
        assert!(failure.to_string().starts_with("line 7: "), "{failure}");
        assert_eq!(published, Published::default());
        assert_eq!(parse(&line(8, "{}"), true, &mut published), Ok(None));
        assert_eq!(published.bad_lines, 1);
        assert!(published.check().is_err());
    }

    #[test]
    fn blocks_and_events_are_counted() {
        let mut published = Published::default();
        let text = r#"{"events":[{"type":"stored","sequence_hashes":[1,2]},{"type":"removed","sequence_hashes":[1]}]}"#;
        let batch = parse(&line(1, text), false, &mut published).unwrap().unwrap();
        published.count(&batch);
        assert_eq!(published.describe(), "1 batch, 2 events, 3 blocks");
        assert_eq!(published.check(), Ok(()));
    }

    fn holder(epoch: u64, seq: u64) -> HolderStatusReply {
        HolderStatusReply {
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 0,
            epoch,
            seq,
            blocks: 1,
            parked_events: 0,
            foreign_chain: false,
            exact: true,
            degraded: kvatlas_core::wire::DegradedReasons::default(),
        }
    }

    #[test]
    fn the_daemon_is_waited_for_until_it_is_there_or_never_will_be() {
        let cursor = BatchCursor { epoch: 7, seq: 2 };
        let progress =
            |holder: Option<HolderStatusReply>, goodbye| progress(holder.as_ref(), cursor, goodbye);
        assert!(matches!(progress(None, false), Progress::Waiting(_)));
        assert!(matches!(
            progress(Some(holder(6, 9)), false),
            Progress::Waiting(_)
        ));
        assert!(matches!(
            progress(Some(holder(7, 1)), false),
            Progress::Waiting(_)
        ));
        let applied = Progress::Applied("applied: the worker's rank holds 1 block, exact\n".to_owned());
        assert_eq!(progress(Some(holder(7, 2)), false), applied);
        assert!(matches!(
            progress(Some(holder(8, 1)), false),
            Progress::Ignored(_)
        ));
        // A goodbye is applied when the holder is gone, not before.
        assert!(matches!(progress(Some(holder(7, 2)), true), Progress::Waiting(_)));
        assert!(matches!(progress(None, true), Progress::Applied(_)));
    }
}
