//! `kvatlas publish`: publishes the events of one worker, read as JSON lines.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvatlas_client::publish::{
    AFTER_SEQ_MAX, Beginning, HolderPublisher, PublishConnection, PublishedHolder, PublisherError,
    PublisherOptions,
};
use kvatlas_client::{QueryClient, unix_time_us};
use kvatlas_core::hash::BlockSize;
use kvatlas_core::index::NamespaceSettings;
use kvatlas_core::wire::{
    Address, BatchCursor, DegradedReason, Event, EventBatch, HolderStatusReply, Labels, NamespaceName,
    Profile, Rank, WireLimits, WorkerName,
};
use tokio::time::Instant;

use super::connect::{ConnectionArguments, NatsConnection};
use super::event_line::LineBatch;
use super::failure::Failure;
use super::lines::{LineError, NumberedLine, numbered, open};
use super::output::{print, say};
use super::publish_wait::DaemonWatch;
use super::text::counted;
use super::transport::TransportName;

pub(super) const EXAMPLES: &str = r#"A line is one event, or a batch of events with an optional tier:
  {"type":"stored","sequence_hashes":["ea06fc71a5ee6e88","ad01835a37dd294c"]}
  {"type":"stored","parent":"ad01835a37dd294c","sequence_hashes":["0x1f"],"tokens":[1,2,3,4]}
  {"tier":1,"events":[{"type":"removed","sequence_hashes":["ea06fc71a5ee6e88"]}]}
  {"events":[]}
Types are stored, removed, resumable, cleared, doubted and goodbye; the wire contract of the project describes their keys.
A hash is a text of 16 hexadecimal digits (32 for a lineage hash), or 0x and fewer,
or a decimal number.

Examples:
  kvatlas publish events.jsonl --namespace llama --worker gpu-0 --wait
  kvatlas publish - --namespace llama --worker gpu-0 --epoch 7 --seq 12 < more.jsonl

Without --epoch, the batches begin a new epoch: all that the worker's rank had is replaced by them. While another
publisher of the rank is alive, that is refused without --force."#;

/// Events to publish, and the worker that they are of.
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
    /// Epoch (incarnation) of the publisher [default: the time in microseconds, which is a new epoch].
    #[arg(long, value_name = "NUMBER")]
    epoch: Option<u64>,
    /// Number of the first batch in its epoch.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "epoch",
        value_parser = clap::value_parser!(u64).range(1..=AFTER_SEQ_MAX))]
    seq: u64,
    /// Tokens in a block [default: as many as the namespace has, or 16].
    #[arg(long, value_name = "TOKENS", value_parser = parse_block_size)]
    block_size: Option<BlockSize>,
    /// Address that requests for the worker go to: HOST:PORT, or a URL. Answers give it to routers.
    #[arg(long, value_name = "ADDRESS")]
    address: Option<Address>,
    /// Label of the worker, such as its role, zone or model. May be given several times.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    labels: Vec<(String, String)>,
    /// How batches travel: with jetstream, a batch waits until the events stream has kept the batch before it.
    #[arg(long, value_enum, default_value_t)]
    transport: TransportName,
    /// Begin a new epoch though another publisher of the worker's rank is alive. The holder is contested then.
    #[arg(long, conflicts_with = "epoch")]
    force: bool,
    /// Pass over bad lines, after reporting them, and publish the others.
    #[arg(long)]
    keep_going: bool,
    /// Wait until the daemon's status shows that the last batch is applied, at most for the time of --timeout.
    #[arg(long)]
    wait: bool,
    /// Check the lines, also against the default limits of a daemon, and print the batches; connect to nothing.
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
}

/// Numbers of batches, events and blocks that were published, and of bad lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct PublishedCounts {
    batches: u64,
    events: u64,
    blocks: u64,
    bad_lines: u64,
    /// Whether the last batch had a goodbye event. After a goodbye, the daemon no longer knows the holder.
    has_said_goodbye: bool,
}

impl PublishedCounts {
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

    /// Fails if bad lines were left out.
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

/// Publishes the batches of the lines, and prints how many were published. With `--dry-run`, only checks the lines.
pub(crate) async fn publish(arguments: &PublishArguments) -> Result<(), Failure> {
    let profile = arguments.profile()?;
    if arguments.dry_run {
        return check_lines(arguments);
    }
    let input = open(&arguments.file)?;
    let connection = arguments.connection.connect().await?;
    let known = PublishTarget::ask(arguments, &connection).await;
    if arguments.epoch.is_none() && !arguments.force {
        known.check_alone(arguments, &connection).await?;
    }
    let publisher = publisher(arguments, &connection, known, profile).await?;
    let mut sending = Sending::new(arguments, &connection, &publisher);
    let watch = match arguments.wait {
        true => Some(arguments.watch(&connection, publisher.cursor()).await?),
        false => None,
    };
    let outcome = sending.send(input).await;
    if !sending.is_refused || sending.taken.batches > 0 {
        let subject = connection
            .subjects
            .events(&arguments.namespace, &arguments.worker);
        let BatchCursor { epoch, seq } = sending.cursor;
        let done = sending.taken.describe();
        print(&format!(
            "published {done} to {subject} (epoch {epoch}, last seq {seq})\n"
        ))?;
    }
    outcome?;
    if let Some(watch) = watch.filter(|_| sending.taken.batches > 0) {
        print(
            &watch
                .wait_until_applied(sending.cursor, sending.taken.has_said_goodbye)
                .await?,
        )?;
    }
    sending.handed_over.check()
}

/// Checks the lines without publishing, and prints the batch of each line as JSON.
fn check_lines(arguments: &PublishArguments) -> Result<(), Failure> {
    let mut checked = PublishedCounts::default();
    let beginning = BatchCursor {
        epoch: arguments.epoch.unwrap_or(u64::MAX),
        seq: arguments.seq,
    };
    for line in numbered(open(&arguments.file)?) {
        let check = |batch| check_limits(batch, arguments.rank, beginning);
        if let Some(batch) = read(line, arguments.keep_going, &mut checked, check)? {
            print(&format!("{}\n", batch.to_json().map_err(Failure::failed)?))?;
            checked.count(&batch);
        }
    }
    say(format_args!(
        "checked {}; nothing was published\n",
        checked.describe()
    ));
    checked.check()
}

/// Returns, in words, why the server did not take the batches in time.
fn not_taken(transport: TransportName) -> &'static str {
    match transport {
        TransportName::Core => "the NATS server did not take the batches in time",
        TransportName::Jetstream => {
            "no events stream has acknowledged the batches in time; have a daemon make it with \
             --events-transport jetstream, or leave --transport out"
        }
    }
}

/// Facts about the worker's rank and its namespace. The command asks the daemon for them before it publishes anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct PublishTarget {
    /// Tokens in a block of the namespace; `None` if the daemon does not tell.
    block_size: Option<BlockSize>,
    /// Last batch that the daemon has applied of the worker's rank. Its numbers are 0 if the daemon does not tell.
    cursor: BatchCursor,
    /// Whether the rank's publisher was heard of in the last seconds.
    may_live: bool,
}

impl PublishTarget {
    /// Longest wait for the daemon's answer. Usually no daemon is there, or the daemon answers immediately.
    const PATIENCE: Duration = Duration::from_secs(1);
    /// Time in which a publisher that is alive sends a batch: it sends something every second.
    const SILENCE: Duration = Duration::from_millis(1300);
    /// Pause between two questions whether a batch has come.
    const LOOK_INTERVAL: Duration = Duration::from_millis(100);

    /// Asks the daemon for the namespace's block size and the rank's last batch. If no daemon answers, returns `None`
    /// for the size and 0 for the batch's numbers.
    async fn ask(arguments: &PublishArguments, connection: &NatsConnection) -> Self {
        let client = QueryClient::new(connection.nats.clone(), connection.subjects.clone());
        let patience = Self::PATIENCE.min(arguments.connection.timeout);
        let client = client.with_patience(patience);
        let subject = connection.subjects.status(&arguments.namespace);
        let asked = client.status(&arguments.namespace);
        // A publisher need not have the right to ask.
        let Ok(Ok(status)) = connection.unless_refused(&subject, asked).await else {
            return Self::default();
        };
        let is_ours =
            |holder: &&HolderStatusReply| holder.worker == arguments.worker && holder.rank == arguments.rank;
        let ours = status.holders.iter().find(is_ours);
        Self {
            block_size: BlockSize::new(status.block_size).ok(),
            cursor: ours.map_or_else(BatchCursor::default, |holder| BatchCursor {
                epoch: holder.epoch,
                seq: holder.seq,
            }),
            may_live: ours.is_some_and(|holder| !holder.degraded.contains(DegradedReason::Stale)),
        }
    }

    /// Fails if another publisher of the rank is alive: one of its batches comes while this call waits. Does not wait if
    /// the rank is not known, or has been silent.
    async fn check_alone(
        self,
        arguments: &PublishArguments,
        connection: &NatsConnection,
    ) -> Result<(), Failure> {
        let until = Instant::now() + Self::SILENCE;
        while self.may_live && Instant::now() < until {
            tokio::time::sleep(Self::LOOK_INTERVAL).await;
            let cursor = Self::ask(arguments, connection).await.cursor;
            if cursor > self.cursor {
                let (worker, rank) = (&arguments.worker, arguments.rank);
                return Err(Failure::failed(format_args!(
                    "nothing was published: another publisher of {worker}, rank {rank}, is alive, and was at epoch {}, seq {}. End it, or \
                     choose another --worker; with --force, the new batches replace its blocks, and the holder is contested",
                    cursor.epoch, cursor.seq
                )));
            }
        }
        Ok(())
    }

    /// Returns the epoch of the first batch, and with `--epoch` also the batch number before it. Without `--epoch`,
    /// begins a new epoch above the one that the daemon knows, even if an earlier publisher's clock was ahead of this
    /// machine's clock.
    fn beginning(self, arguments: &PublishArguments) -> Beginning {
        match arguments.epoch {
            Some(epoch) => Beginning::After(BatchCursor {
                epoch,
                seq: arguments.seq - 1,
            }),
            None => Beginning::Epoch(unix_time_us().max(self.cursor.epoch.saturating_add(1))),
        }
    }
}

fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    let tokens = text.parse().map_err(|_| "it is no whole number".to_owned())?;
    BlockSize::new(tokens).map_err(|error| error.to_string())
}

/// Starts a publisher that makes one batch of each line. While the command runs, the publisher answers daemons that ask
/// for missing batches.
async fn publisher(
    arguments: &PublishArguments,
    connection: &NatsConnection,
    known: PublishTarget,
    profile: Profile,
) -> Result<HolderPublisher, PublisherError> {
    let holder = PublishedHolder {
        namespace: arguments.namespace.clone(),
        worker: arguments.worker.clone(),
        rank: arguments.rank,
    };
    let block_size = arguments.block_size.or(known.block_size);
    let options = PublisherOptions {
        beginning: known.beginning(arguments),
        settings: NamespaceSettings {
            block_size: block_size.unwrap_or_default(),
            ..NamespaceSettings::default()
        },
        transport: arguments.transport.into(),
        profile,
        batch_delay: Duration::ZERO,
        // Only the server's limits apply, because each line is published as one batch.
        batch_events_max: usize::MAX,
        batch_bytes_max: usize::MAX,
        ..PublisherOptions::default()
    };
    let nats = PublishConnection::new(connection.nats.clone(), connection.refusals.clone());
    HolderPublisher::start(nats, &connection.subjects, holder, options).await
}

/// Parses a label as the flag gives it: `KEY=VALUE`.
fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

impl PublishArguments {
    /// Returns the worker's profile: its address and its labels.
    fn profile(&self) -> Result<Profile, Failure> {
        let labels = Labels::new(self.labels.iter().cloned().collect());
        Ok(Profile {
            address: self.address.clone(),
            labels: labels.map_err(Failure::usage)?,
        })
    }

    /// Begins to observe whether the daemon applies the batches after `cursor`. Fails if these credentials may not ask
    /// the daemon.
    async fn watch(&self, connection: &NatsConnection, cursor: BatchCursor) -> Result<DaemonWatch, Failure> {
        let worker = (self.namespace.clone(), self.worker.clone(), self.rank);
        let first = BatchCursor {
            seq: cursor.seq.saturating_add(1),
            ..cursor
        };
        DaemonWatch::begin(connection, worker, first, self.connection.timeout).await
    }
}

/// Progress of the batches on their way to the server.
struct Sending<'a> {
    arguments: &'a PublishArguments,
    publisher: &'a HolderPublisher,
    /// Largest message that the server takes, in bytes.
    payload_max: usize,
    /// Numbers of batches, events and blocks that were given to the publisher for sending.
    handed_over: PublishedCounts,
    /// Numbers of batches, events and blocks that the server has taken. With JetStream, these batches are in the
    /// stream.
    taken: PublishedCounts,
    /// Cursor of the last batch that the server has taken.
    cursor: BatchCursor,
    /// Whether the last wait for the server's confirmation failed: the server reported an error, or the wait timed out.
    is_refused: bool,
}

impl<'a> Sending<'a> {
    fn new(
        arguments: &'a PublishArguments,
        connection: &NatsConnection,
        publisher: &'a HolderPublisher,
    ) -> Self {
        Self {
            arguments,
            publisher,
            payload_max: connection.nats.max_payload(),
            handed_over: PublishedCounts::default(),
            taken: PublishedCounts::default(),
            cursor: publisher.cursor(),
            is_refused: false,
        }
    }

    /// Publishes the lines, and waits until the server has taken the batches.
    async fn send(&mut self, input: Box<dyn std::io::BufRead>) -> Result<(), Failure> {
        let sent = self.send_lines(input).await;
        if self.is_refused {
            return sent;
        }
        // The batches before a bad line must be confirmed, too, so that the output can count them.
        let confirmed = self.confirm().await;
        sent.and(confirmed)
    }

    async fn send_lines(&mut self, input: Box<dyn std::io::BufRead>) -> Result<(), Failure> {
        for line in numbered(input) {
            let number = line.as_ref().map_or(0, |line| line.number);
            let (rank, payload_max) = (self.arguments.rank, self.payload_max);
            let cursor = self.publisher.cursor();
            let check = |batch| check_size(batch, rank, cursor, payload_max);
            let read = read(line, self.arguments.keep_going, &mut self.handed_over, check)?;
            let Some(batch) = read else { continue };
            let mut with_this = self.handed_over;
            with_this.count(&batch);
            let sent = self.publisher.publish(batch.tier, batch.events).await;
            sent.map_err(|error| Failure::unavailable(format_args!("line {number}: {error}")))?;
            self.handed_over = with_this;
            // The stream confirms each batch, so that only batches that it keeps are counted.
            if self.arguments.transport == TransportName::Jetstream {
                self.confirm().await?;
            }
        }
        Ok(())
    }

    /// Waits until the server has taken all batches that were given to the publisher.
    async fn confirm(&mut self) -> Result<(), Failure> {
        let patience = self.arguments.connection.timeout;
        let flushed = tokio::time::timeout(patience, self.publisher.flush()).await;
        self.is_refused = !matches!(flushed, Ok(Ok(_)));
        let not_in_time = |_| Failure::unavailable(not_taken(self.arguments.transport));
        self.cursor = flushed.map_err(not_in_time)??;
        self.taken = self.handed_over;
        Ok(())
    }
}

/// Returns the batch of a line if `check` accepts the batch. With `keep_going`, a bad line is reported and `None` is
/// returned. Otherwise a bad line is an error.
fn read(
    line: Result<NumberedLine, LineError>,
    keep_going: bool,
    published: &mut PublishedCounts,
    check: impl FnOnce(LineBatch) -> Result<LineBatch, String>,
) -> Result<Option<LineBatch>, Failure> {
    let failure = match line {
        Ok(NumberedLine { number, text }) => {
            let parsed = LineBatch::parse(&text).map_err(|error| error.to_string());
            match parsed.and_then(check) {
                Ok(batch) => return Ok(Some(batch)),
                Err(fault) => Failure::failed(format_args!("line {number}: {fault}")),
            }
        }
        // No line can be read after this error.
        Err(error) if !error.is_of_one_line() => return Err(error.into()),
        Err(error) => error.into(),
    };
    if !keep_going {
        return Err(failure);
    }
    say(format_args!("error: {failure}\n"));
    published.bad_lines += 1;
    Ok(None)
}

/// Encodes a batch to find its largest possible size, and returns the batch with the encoding. The time and the block
/// size take the form with the most bytes. Only the number of the batch can still change when the batch is sent.
fn encoded(batch: LineBatch, rank: Rank, cursor: BatchCursor) -> (LineBatch, Vec<u8>) {
    let sent = EventBatch {
        epoch: cursor.epoch,
        seq: cursor.seq.max(1),
        rank,
        time_us: Some(u64::MAX),
        tier: batch.tier,
        // The block size with the longest encoding.
        block_size: BlockSize::new(BlockSize::TOKENS_MAX).ok(),
        profile: None,
        events: batch.events,
    };
    let payload = sent.encode();
    let EventBatch { tier, events, .. } = sent;
    (LineBatch { tier, events }, payload)
}

/// Refuses a batch that is larger than the largest message of the server.
fn check_size(
    batch: LineBatch,
    rank: Rank,
    cursor: BatchCursor,
    payload_max: usize,
) -> Result<LineBatch, String> {
    let (batch, payload) = encoded(batch, rank, cursor);
    let bytes = payload.len();
    match bytes > payload_max {
        true => Err(format!(
            "the batch takes {bytes} bytes, and the NATS server takes {payload_max} at most (max_payload); split it"
        )),
        false => Ok(batch),
    }
}

/// Refuses a batch that exceeds a daemon's default limits.
fn check_limits(batch: LineBatch, rank: Rank, cursor: BatchCursor) -> Result<LineBatch, String> {
    let (batch, payload) = encoded(batch, rank, cursor);
    match EventBatch::decode(&payload, &WireLimits::default()) {
        Ok(_) => Ok(batch),
        Err(error) => Err(format!("a daemon with default limits drops it: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u64, text: &str) -> Result<NumberedLine, LineError> {
        Ok(NumberedLine {
            number,
            text: text.to_owned(),
        })
    }

    const CURSOR: BatchCursor = BatchCursor { epoch: 1, seq: 1 };

    #[test]
    fn a_bad_line_stops_unless_told_otherwise() {
        let mut published = PublishedCounts::default();
        let failure = read(line(7, "{}"), false, &mut published, Ok).unwrap_err();
        assert!(failure.to_string().starts_with("line 7: "), "{failure}");
        assert_eq!(published, PublishedCounts::default());
        assert_eq!(read(line(8, "{}"), true, &mut published, Ok), Ok(None));
        assert_eq!(published.bad_lines, 1);
        let not_text = Err(LineError::NotText { number: 9 });
        assert_eq!(read(not_text, true, &mut published, Ok), Ok(None));
        assert_eq!(published.bad_lines, 2);
        assert!(published.check().is_err());
        // No line can be read after this error.
        let endless = Err(LineError::TooLong { number: 10 });
        assert!(read(endless, true, &mut published, Ok).is_err());
    }

    #[test]
    fn blocks_and_events_are_counted() {
        let mut published = PublishedCounts::default();
        let text = r#"{"events":[{"type":"stored","sequence_hashes":[1,2]},{"type":"removed","sequence_hashes":[1]}]}"#;
        let batch = read(line(1, text), false, &mut published, Ok).unwrap().unwrap();
        published.count(&batch);
        assert_eq!(published.describe(), "1 batch, 2 events, 3 blocks");
        assert_eq!(published.check(), Ok(()));
    }

    #[test]
    fn what_a_daemon_drops_is_refused_before_it_is_published() {
        let limits = WireLimits::default();
        let of_events = |events: usize| LineBatch {
            tier: kvatlas_core::wire::Tier::DEVICE,
            events: vec![Event::Cleared; events],
        };
        let checked = |events| check_limits(of_events(events), 0, CURSOR);
        assert_eq!(
            checked(limits.events_max).map(|batch| batch.events.len()),
            Ok(limits.events_max)
        );
        let error = checked(limits.events_max + 1).unwrap_err();
        assert!(error.contains("default limits"), "{error}");
    }

    #[test]
    fn what_the_server_does_not_take_is_refused() {
        let batch = || LineBatch::parse(r#"{"type":"cleared"}"#).unwrap();
        let (_, payload) = encoded(batch(), 0, CURSOR);
        assert!(check_size(batch(), 0, CURSOR, payload.len()).is_ok());
        let error = check_size(batch(), 0, CURSOR, payload.len() - 1).unwrap_err();
        assert!(error.contains("max_payload"), "{error}");
    }
}
