//! The publisher as an engine sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_nats::Client;
use parking_lot::Mutex;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::tracking::BatchCursor;
use crate::wire::{Event, HolderId, NamespaceName, Rank, Subjects, Tier, WorkerName};

use super::error::PublisherError;
use super::options::PublisherOptions;
use super::outbox::{Outbox, events_bytes};
use super::task::{Command, Task, clocks};

/// Whose blocks are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedHolder {
    /// The namespace of its cache.
    pub namespace: NamespaceName,
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank; 0 where there is only one.
    pub rank: Rank,
}

/// What a publisher has done since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PublisherCounters {
    /// Batches sent, without heartbeats.
    pub batches_sent: u64,
    /// Heartbeats sent.
    pub heartbeats_sent: u64,
    /// Batches that the transport did not take; daemons notice the gap and ask for them.
    pub batches_failed: u64,
    /// Calls that had to wait for room in the queue.
    pub queue_waits: u64,
    /// Calls that were refused for want of room.
    pub queue_refusals: u64,
    /// Daemons that were given the batches they missed.
    pub answers_missing: u64,
    /// Daemons that were given the full state.
    pub answers_full: u64,
    /// Daemons that could not be helped.
    pub answers_refused: u64,
}

/// As [`PublisherCounters`], while it changes.
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

/// What the handle and the task share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) counters: LiveCounters,
    pub(super) cursor: Mutex<BatchCursor>,
}

/// Publishes for one holder, and answers daemons that miss something. See the [module](super).
///
/// Dropping it publishes what is queued and then ends in silence, as if the engine had died: daemons keep the blocks until the
/// holder counts as gone. To leave in good order, [`say_goodbye`](Self::say_goodbye).
#[derive(Debug)]
pub struct HolderPublisher {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    options: PublisherOptions,
}

impl HolderPublisher {
    /// Starts to publish, on a task of the current tokio runtime.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Connection`] if the client is closed, so that no questions can be received.
    pub async fn start(
        nats: Client,
        subjects: &Subjects,
        holder: PublishedHolder,
        options: PublisherOptions,
    ) -> Result<Self, PublisherError> {
        let started = Instant::now();
        let id = HolderId {
            worker: holder.worker.clone(),
            rank: holder.rank,
        };
        let outbox = Outbox::new(options.clone(), &id, clocks(started))?;
        let shared = Arc::new(Shared {
            counters: LiveCounters::default(),
            cursor: Mutex::new(outbox.cursor),
        });
        let questions = match options.answers_resyncs {
            true => {
                let subject = subjects.resync(&holder.namespace, &holder.worker, holder.rank);
                let subscribed = nats.subscribe(subject).await;
                Some(subscribed.map_err(|error| PublisherError::Connection(error.to_string()))?)
            }
            false => None,
        };
        let (commands, queue) = mpsc::channel(options.queue_batches_max.max(1));
        let events_subject = subjects.events(&holder.namespace, &holder.worker);
        let task = Task::new(nats, events_subject, outbox, Arc::clone(&shared), started);
        tokio::spawn(task.run(queue, questions));
        Ok(Self {
            commands,
            shared,
            options,
        })
    }

    /// Publishes events, in order; without any, a heartbeat. Waits while the queue is full.
    ///
    /// # Errors
    ///
    /// [`PublisherError::TooLarge`], [`PublisherError::TooManyEvents`] or [`PublisherError::Stopped`].
    pub async fn publish(&self, tier: Tier, events: Vec<Event>) -> Result<(), PublisherError> {
        self.check(&events)?;
        let command = Command::Publish { tier, events };
        let command = match self.commands.try_send(command) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed(_)) => return Err(PublisherError::Stopped),
            Err(TrySendError::Full(command)) => command,
        };
        self.shared.counters.queue_waits.fetch_add(1, Ordering::Relaxed);
        self.commands
            .send(command)
            .await
            .map_err(|_| PublisherError::Stopped)
    }

    /// As [`publish`](Self::publish), but fails while the queue is full: for an engine that must not wait. It has to take note of
    /// what it could not say, and to say it later.
    ///
    /// # Errors
    ///
    /// [`PublisherError::QueueFull`], and those of [`publish`](Self::publish).
    pub fn try_publish(&self, tier: Tier, events: Vec<Event>) -> Result<(), PublisherError> {
        self.check(&events)?;
        match self.commands.try_send(Command::Publish { tier, events }) {
            Ok(()) => Ok(()),
            Err(TrySendError::Closed(_)) => Err(PublisherError::Stopped),
            Err(TrySendError::Full(_)) => {
                self.shared
                    .counters
                    .queue_refusals
                    .fetch_add(1, Ordering::Relaxed);
                Err(PublisherError::QueueFull {
                    queued_max: self.options.queue_batches_max,
                })
            }
        }
    }

    fn check(&self, events: &[Event]) -> Result<(), PublisherError> {
        let (bytes, bytes_max) = (events_bytes(events), self.options.batch_bytes_max);
        if bytes > bytes_max {
            return Err(PublisherError::TooLarge { bytes, bytes_max });
        }
        let events_max = self.options.batch_events_max;
        if events.len() > events_max {
            let events = events.len();
            return Err(PublisherError::TooManyEvents { events, events_max });
        }
        Ok(())
    }

    /// Waits until everything has left for the server, and returns the last batch then.
    ///
    /// # Errors
    ///
    /// [`PublisherError::Stopped`], or [`PublisherError::Connection`] if a batch could not be sent since the last call.
    pub async fn flush(&self) -> Result<BatchCursor, PublisherError> {
        let (reply, flushed) = oneshot::channel();
        self.commands
            .send(Command::Flush(reply))
            .await
            .map_err(|_| PublisherError::Stopped)?;
        flushed.await.map_err(|_| PublisherError::Stopped)?
    }

    /// Publishes what is queued and a goodbye, so that daemons forget the holder at once, and ends.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush).
    pub async fn say_goodbye(self) -> Result<(), PublisherError> {
        self.publish(Tier::DEVICE, vec![Event::Goodbye]).await?;
        self.flush().await.map(|_| ())
    }

    /// The last batch sent.
    pub fn cursor(&self) -> BatchCursor {
        *self.shared.cursor.lock()
    }

    /// What has been done so far.
    pub fn counters(&self) -> PublisherCounters {
        let live = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PublisherCounters {
            batches_sent: read(&live.batches_sent),
            heartbeats_sent: read(&live.heartbeats_sent),
            batches_failed: read(&live.batches_failed),
            queue_waits: read(&live.queue_waits),
            queue_refusals: read(&live.queue_refusals),
            answers_missing: read(&live.answers_missing),
            answers_full: read(&live.answers_full),
            answers_refused: read(&live.answers_refused),
        }
    }
}
