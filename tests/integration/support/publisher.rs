//! A publisher without a ring, a table or heartbeats: a test or a bench says batch by batch what is sent.

use std::time::{SystemTime, UNIX_EPOCH};

use async_nats::{Client, PublishErrorKind};
use kvatlas_client::ClientError;
use kvatlas_core::wire::{BatchCursor, Event, EventBatch, NamespaceName, Rank, Subjects, Tier, WorkerName};

/// Publishes the batches of one holder, numbered without a gap.
#[derive(Debug)]
pub struct Publisher {
    nats: Client,
    subject: String,
    rank: Rank,
    cursor: BatchCursor,
}

impl Publisher {
    /// A publisher for one rank of `worker`, in a new epoch: the current time in microseconds, so that a restarted publisher
    /// replaces the state of the one before.
    pub fn new(
        nats: Client,
        subjects: &Subjects,
        namespace: &NamespaceName,
        worker: &WorkerName,
        rank: Rank,
    ) -> Self {
        Self {
            nats,
            subject: subjects.events(namespace, worker),
            rank,
            cursor: BatchCursor {
                epoch: unix_time_us(),
                seq: 0,
            },
        }
    }

    /// The same publisher in another epoch or at another number; the next batch has the number after it.
    #[must_use]
    pub fn resuming(mut self, cursor: BatchCursor) -> Self {
        self.cursor = cursor;
        self
    }

    /// The last batch published.
    pub fn cursor(&self) -> BatchCursor {
        self.cursor
    }

    /// Publishes one batch; without events it is a heartbeat. Returns its cursor.
    ///
    /// NATS takes the batch without an answer: use the status subject to see how far the daemon is.
    ///
    /// # Errors
    ///
    /// [`ClientError::TooLarge`] and [`ClientError::Connection`]. The batch was not sent then, and the next one has its number.
    pub async fn publish(&mut self, tier: Tier, events: Vec<Event>) -> Result<BatchCursor, ClientError> {
        let next = BatchCursor {
            seq: self.cursor.seq + 1,
            ..self.cursor
        };
        let batch = EventBatch {
            epoch: next.epoch,
            seq: next.seq,
            rank: self.rank,
            time_us: Some(unix_time_us()),
            tier,
            block_size: None,
            profile: None,
            events,
        };
        let payload = batch.encode();
        let bytes = payload.len();
        let sent = self.nats.publish(self.subject.clone(), payload.into()).await;
        sent.map_err(|error| match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => ClientError::TooLarge {
                subject: self.subject.clone(),
                bytes,
                bytes_max: self.nats.max_payload(),
            },
            _ => ClientError::Connection(error.to_string()),
        })?;
        self.cursor = next;
        Ok(next)
    }

    /// Waits until all batches have left for the server.
    pub async fn flush(&self) -> Result<(), ClientError> {
        self.nats
            .flush()
            .await
            .map_err(|error| ClientError::Connection(error.to_string()))
    }
}

/// Microseconds since the Unix epoch; 0 before it.
fn unix_time_us() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX)
}
