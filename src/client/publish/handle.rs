//! Handle of a publisher: the publisher as an engine sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, TryAcquireError, mpsc, oneshot};

use kvatlas_core::wire::{
    BatchCursor, DegradedReasons, Event, HolderId, NamespaceName, Profile, Rank, Subjects, Tier, WorkerName,
};

use super::error::PublisherError;
use super::options::PublisherOptions;
use super::outbox::Outbox;
use super::refusals::{PublishConnection, Watches};
use super::sizes::events_bytes;
use super::state::SharedState;
use super::task::{Lent, PublisherCommand, Task, clocks};
use super::voice::Voice;

/// Holder whose blocks are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedHolder {
    /// Namespace of the holder's cache.
    pub namespace: NamespaceName,
    /// Name of the holder's worker.
    pub worker: WorkerName,
    /// Data-parallel rank of the holder; 0 if there is only one.
    pub rank: Rank,
}

/// Counters of a publisher since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PublisherCounters {
    /// Batches sent, without heartbeats.
    pub batches_sent: u64,
    /// Heartbeats sent.
    pub heartbeats_sent: u64,
    /// Batches that could not be sent. Daemons notice the gap and ask for these batches.
    pub batches_failed: u64,
    /// Batches, including heartbeats, that were sent but that the server refused because the client has no right to
    /// publish them. Refusals are counted only with a [`PublishConnection`]. They are counted for each worker and
    /// connection, so publishers of several ranks of one worker on one connection show the same number.
    pub batches_refused: u64,
    /// Calls of [`HolderPublisher::publish`] that had to wait for room in the queue.
    pub queue_waits: u64,
    /// Calls of [`HolderPublisher::try_publish`] that failed because the queue was full.
    pub queue_refusals: u64,
    /// Answers to a daemon's question with the batches that the daemon had missed.
    pub answers_missing: u64,
    /// Answers to a daemon's question with all blocks of the holder (the full state).
    pub answers_full: u64,
    /// Questions of daemons that the publisher refused to answer.
    pub answers_refused: u64,
}

/// The running counters, from which [`PublisherCounters`] are read.
#[derive(Debug, Default)]
pub(super) struct LiveCounters {
    pub(super) batches_sent: AtomicU64,
    pub(super) heartbeats_sent: AtomicU64,
    pub(super) batches_failed: AtomicU64,
    pub(super) queue_waits: AtomicU64,
    pub(super) queue_refusals: AtomicU64,
    pub(super) answers_missing: AtomicU64,
    pub(super) answers_full: AtomicU64,
    pub(super) answers_refused: AtomicU64,
}

/// State that the publisher's handle and its task share.
#[derive(Debug)]
pub(super) struct PublisherShared {
    pub(super) counters: LiveCounters,
    pub(super) cursor: Mutex<BatchCursor>,
    /// Number of the connection to which the first events were handed that no flush has confirmed. `None` if there are none,
    /// or if they wait for a connection.
    pub(super) unconfirmed: Mutex<Option<u64>>,
    /// Watches for the server's refusals; `None` if the connection does not report refusals.
    pub(super) refusals: Option<Watches>,
}

/// Publishes the events of one holder, and answers daemons that miss batches or blocks. See the [module](super).
///
/// Calls take effect in the order in which they return. Calls that run at the same time, in several tasks, have no order:
/// a caller that begins an epoch or says goodbye first waits for its other calls.
///
/// Dropping the publisher publishes the queued events and then ends in silence, as if the engine had died. Daemons keep
/// the blocks until the holder counts as gone. To leave in good order, call [`say_goodbye`](Self::say_goodbye).
#[derive(Debug)]
pub struct HolderPublisher {
    commands: mpsc::Sender<PublisherCommand>,
    /// Room in the queue, in bytes.
    room: Arc<Semaphore>,
    shared: Arc<PublisherShared>,
    options: PublisherOptions,
}

impl HolderPublisher {
    /// Starts a publisher, on a task of the current tokio runtime. `nats` may also be a bare [`Client`](async_nats::Client).
    ///
    /// # Errors
    ///
    /// [`PublisherError::Connection`] if the client is closed, so that no questions can be received.
    /// [`PublisherError::SeqTooLarge`] if the options begin after a batch with too large a number.
    pub async fn start(
        nats: impl Into<PublishConnection>,
        subjects: &Subjects,
        holder: PublishedHolder,
        options: PublisherOptions,
    ) -> Result<Self, PublisherError> {
        Self::begin(nats.into(), subjects, holder, options, Lent::default()).await
    }

    /// Starts a publisher as [`start`](Self::start) does, but without a table of the holder's blocks. Daemons that need
    /// the full state get it from `state`. This is for a relay that knows the full state anyway.
    ///
    /// # Errors
    ///
    /// The errors of [`start`](Self::start).
    pub async fn start_with_state(
        nats: impl Into<PublishConnection>,
        subjects: &Subjects,
        holder: PublishedHolder,
        options: PublisherOptions,
        state: SharedState,
    ) -> Result<Self, PublisherError> {
        let lent = Lent {
            state: Some(state),
            voice: None,
        };
        Self::begin(nats.into(), subjects, holder, options, lent).await
    }

    /// Starts one of several publishers that take turns for a holder. Otherwise does the same as
    /// [`start_with_state`](Self::start_with_state). The publisher publishes only while `voice` says that it is its turn.
    ///
    /// # Errors
    ///
    /// The errors of [`start`](Self::start).
    pub async fn start_in_turn(
        nats: impl Into<PublishConnection>,
        subjects: &Subjects,
        holder: PublishedHolder,
        options: PublisherOptions,
        state: SharedState,
        voice: Voice,
    ) -> Result<Self, PublisherError> {
        let lent = Lent {
            state: Some(state),
            voice: Some(voice),
        };
        Self::begin(nats.into(), subjects, holder, options, lent).await
    }

    /// Starts the publisher. The future is boxed, so that the publisher is compiled here and not in each program that starts one.
    fn begin<'a>(
        nats: PublishConnection,
        subjects: &'a Subjects,
        holder: PublishedHolder,
        options: PublisherOptions,
        lent: Lent,
    ) -> BoxFuture<'a, Result<Self, PublisherError>> {
        Box::pin(async move {
            let PublishConnection { nats, refusals } = nats;
            options.beginning.check()?;
            let started = Instant::now();
            let id = HolderId {
                worker: holder.worker.clone(),
                rank: holder.rank,
            };
            let outbox = Outbox::new(options.clone(), &id, lent.state.is_none(), clocks(started))?;
            let events_subject = subjects.events(&holder.namespace, &holder.worker);
            let questions_subject = options
                .answers_resyncs
                .then(|| subjects.resync(&holder.namespace, &holder.worker, holder.rank));
            // The watch begins before anything is sent that could be refused.
            let refusals = refusals.map(|all| all.watch(&events_subject, questions_subject.as_deref()));
            let shared = Arc::new(PublisherShared {
                counters: LiveCounters::default(),
                cursor: Mutex::new(outbox.cursor),
                unconfirmed: Mutex::default(),
                refusals,
            });
            let questions = match &questions_subject {
                // A publisher that speaks in turns receives questions only in its turns.
                Some(subject) if lent.voice.is_none() => {
                    let subscribed = nats.subscribe(subject.clone()).await;
                    Some(subscribed.map_err(|error| PublisherError::Connection(error.to_string()))?)
                }
                _ => None,
            };
            let (commands, queue) = mpsc::channel(options.queue_batches_max.max(1));
            let task = Task::new(
                nats,
                events_subject,
                outbox,
                Arc::clone(&shared),
                lent,
                questions_subject,
                started,
            );
            tokio::spawn(task.run(queue, questions));
            Ok(Self {
                commands,
                room: Arc::new(Semaphore::new(room_max(&options))),
                shared,
                options,
            })
        })
    }

    /// Publishes events, in order. An empty list is a heartbeat. Waits while the queue is full.
    ///
    /// # Errors
    ///
    /// [`PublisherError::TooLarge`], [`PublisherError::TooManyEvents`] or [`PublisherError::Stopped`].
    pub async fn publish(&self, tier: Tier, events: Vec<Event>) -> Result<(), PublisherError> {
        let bytes = self.check(&events)?;
        let Some(events) = self.try_send(tier, events, bytes)? else {
            return Ok(());
        };
        self.shared.counters.queue_waits.fetch_add(1, Ordering::Relaxed);
        let room = Arc::clone(&self.room).acquire_many_owned(bytes).await;
        let room = room.map_err(|_| PublisherError::Stopped)?;
        let command = PublisherCommand::Publish { tier, events, room };
        let sent = self.commands.send(command).await;
        sent.map_err(|_| PublisherError::Stopped)
    }

    /// Publishes events as [`publish`](Self::publish) does, but fails if the queue is full. This is for an engine that must not
    /// wait. The engine has to keep the refused events, and to publish them later.
    ///
    /// # Errors
    ///
    /// [`PublisherError::QueueFull`], and the errors of [`publish`](Self::publish).
    pub fn try_publish(&self, tier: Tier, events: Vec<Event>) -> Result<(), PublisherError> {
        let bytes = self.check(&events)?;
        if self.try_send(tier, events, bytes)?.is_none() {
            return Ok(());
        }
        self.shared
            .counters
            .queue_refusals
            .fetch_add(1, Ordering::Relaxed);
        Err(PublisherError::QueueFull {
            queued_max: self.options.queue_batches_max,
            bytes_max: self.options.queue_bytes_max,
        })
    }

    /// Queues events if the queue has room for them and for their `bytes`. Gives the events back if it has not.
    fn try_send(
        &self,
        tier: Tier,
        events: Vec<Event>,
        bytes: u32,
    ) -> Result<Option<Vec<Event>>, PublisherError> {
        let room = match Arc::clone(&self.room).try_acquire_many_owned(bytes) {
            Ok(room) => room,
            Err(TryAcquireError::NoPermits) => return Ok(Some(events)),
            Err(TryAcquireError::Closed) => return Err(PublisherError::Stopped),
        };
        match self
            .commands
            .try_send(PublisherCommand::Publish { tier, events, room })
        {
            Ok(()) => Ok(None),
            Err(TrySendError::Full(PublisherCommand::Publish { events, .. })) => Ok(Some(events)),
            Err(TrySendError::Full(_) | TrySendError::Closed(_)) => Err(PublisherError::Stopped),
        }
    }

    /// Checks that the events fit into one batch. Returns the room that they take in the queue, in bytes.
    fn check(&self, events: &[Event]) -> Result<u32, PublisherError> {
        let (bytes, bytes_max) = (events_bytes(events), self.options.batch_bytes_max);
        if bytes > bytes_max {
            return Err(PublisherError::TooLarge { bytes, bytes_max });
        }
        let events_max = self.options.batch_events_max;
        if events.len() > events_max {
            let events = events.len();
            return Err(PublisherError::TooManyEvents { events, events_max });
        }
        Ok(u32::try_from(bytes.min(room_max(&self.options))).unwrap_or(u32::MAX))
    }

    /// Publishes the queued events, and then begins a new epoch, so that daemons forget all blocks that the holder had. This is
    /// for a relay whose engine has restarted.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Stopped`].
    pub async fn begin_epoch(&self) -> Result<(), PublisherError> {
        self.begin_epoch_in_doubt(DegradedReasons::default()).await
    }

    /// Begins a new epoch as [`begin_epoch`](Self::begin_epoch) does. The epoch's first batch already tells the `doubts`, so
    /// daemons never call the holder exact in the new epoch before they know the doubts.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Stopped`].
    pub async fn begin_epoch_in_doubt(&self, doubts: DegradedReasons) -> Result<(), PublisherError> {
        let sent = self.commands.send(PublisherCommand::BeginEpoch(doubts)).await;
        sent.map_err(|_| PublisherError::Stopped)
    }

    /// Publishes the queued events, and tells daemons the holder's new address and labels.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Stopped`].
    pub async fn set_profile(&self, profile: Profile) -> Result<(), PublisherError> {
        let sent = self.commands.send(PublisherCommand::Profile(profile)).await;
        sent.map_err(|_| PublisherError::Stopped)
    }

    /// Sets whether heartbeats are sent while there is nothing to publish. They are sent by default. A relay that hears nothing
    /// from its engine turns them off, so that daemons call the holder stale.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Stopped`].
    pub async fn set_heartbeats(&self, are_sent: bool) -> Result<(), PublisherError> {
        self.heartbeat_until((!are_sent).then(Instant::now)).await
    }

    /// Makes heartbeats end when `time` has passed from now. A later call replaces this end with a new one. Without any
    /// call, heartbeats have no end. A relay calls this method each time it finds its engine alive, so that the
    /// heartbeats end if the relay itself hangs.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Stopped`].
    pub async fn heartbeat_for(&self, time: Duration) -> Result<(), PublisherError> {
        // If the end lies beyond the clock's range, heartbeats have no end.
        self.heartbeat_until(Instant::now().checked_add(time)).await
    }

    async fn heartbeat_until(&self, until: Option<Instant>) -> Result<(), PublisherError> {
        let sent = self.commands.send(PublisherCommand::HeartbeatsUntil(until)).await;
        sent.map_err(|_| PublisherError::Stopped)
    }

    /// Waits until everything queued so far has been sent to the server, and returns the cursor of the last batch. With a
    /// [`PublishConnection`], also waits until the server has processed that batch.
    ///
    /// # Errors
    ///
    /// Failures and refusals of batches are reported by the first call after them.
    ///
    /// - [`PublisherError::Stopped`] if the publisher has stopped;
    /// - [`PublisherError::Connection`] if a batch could not be sent, or if the connection was lost after the first events
    ///   since the last call were handed to it: they may not have arrived. Daemons notice that, and ask for them, as long as
    ///   the publisher lives;
    /// - [`PublisherError::TooLarge`] if a batch is larger than the server's messages may be;
    /// - [`PublisherError::Unanswered`] if the server has not answered for four seconds, or if it has not taken everything
    ///   within the [`patience`](PublisherOptions::patience);
    /// - [`PublisherError::Refused`] if the server refused a batch, or the subscription to daemons' questions. After a
    ///   goodbye, daemons ask no questions, so a refused subscription is then no error.
    pub async fn flush(&self) -> Result<BatchCursor, PublisherError> {
        self.in_time(self.flush_in_full()).await
    }

    async fn flush_in_full(&self) -> Result<BatchCursor, PublisherError> {
        let (reply, flushed) = oneshot::channel();
        self.commands
            .send(PublisherCommand::Flush(reply))
            .await
            .map_err(|_| PublisherError::Stopped)?;
        flushed.await.map_err(|_| PublisherError::Stopped)?
    }

    /// Waits for `work`, but no longer than the patience.
    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, PublisherError>>,
    ) -> Result<T, PublisherError> {
        let waited = self.options.patience;
        let ended = tokio::time::timeout(waited, work).await;
        ended.map_err(|_| PublisherError::Unanswered { waited })?
    }

    /// Publishes the queued events and a goodbye, so that daemons forget the holder immediately. Then ends the publisher.
    /// Messages that the server has not taken in time may still arrive later, if the connection comes back.
    ///
    /// # Errors
    ///
    /// The errors of [`flush`](Self::flush). A connection that was lost before the goodbye is no error.
    pub async fn say_goodbye(self) -> Result<(), PublisherError> {
        let farewell = async {
            self.publish(Tier::DEVICE, vec![Event::Goodbye]).await?;
            self.flush_in_full().await.map(|_| ())
        };
        self.in_time(farewell).await
    }

    /// Returns the cursor of the last batch sent.
    pub fn cursor(&self) -> BatchCursor {
        *self.shared.cursor.lock()
    }

    /// Returns the counters so far.
    pub fn counters(&self) -> PublisherCounters {
        let live = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PublisherCounters {
            batches_sent: read(&live.batches_sent),
            heartbeats_sent: read(&live.heartbeats_sent),
            batches_failed: read(&live.batches_failed),
            batches_refused: self.shared.refusals.as_ref().map_or(0, Watches::messages),
            queue_waits: read(&live.queue_waits),
            queue_refusals: read(&live.queue_refusals),
            answers_missing: read(&live.answers_missing),
            answers_full: read(&live.answers_full),
            answers_refused: read(&live.answers_refused),
        }
    }
}

/// Returns the room in the queue, in bytes.
fn room_max(options: &PublisherOptions) -> usize {
    options.queue_bytes_max.clamp(1, Semaphore::MAX_PERMITS)
}
