//! Publisher for tests and benches, which send each batch themselves. It sends no heartbeats, keeps no batches for
//! later questions, and has no table of its blocks.

use std::time::{SystemTime, UNIX_EPOCH};

use async_nats::{Client, PublishErrorKind};
use kvatlas_client::ClientError;
use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::{BatchCursor, Event, EventBatch, NamespaceName, Rank, Subjects, Tier, WorkerName};

/// Publisher of one holder's batches, which it numbers without a gap.
#[derive(Debug)]
pub struct Publisher {
    nats: Client,
    subject: String,
    rank: Rank,
    cursor: BatchCursor,
    block_size: Option<BlockSize>,
}

impl Publisher {
    /// Makes a publisher for one rank of `worker`. Its epoch is the current time in microseconds, so a restarted
    /// publisher has a higher epoch and replaces the state of its predecessor.
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
            block_size: None,
        }
    }

    /// Sets the block size that each batch states. Without this call, batches state none.
    #[must_use]
    pub fn of_blocks(mut self, size: BlockSize) -> Self {
        self.block_size = Some(size);
        self
    }

    /// Sets the cursor of the last batch, and so the epoch and number of the next one.
    #[must_use]
    pub fn resuming(mut self, cursor: BatchCursor) -> Self {
        self.cursor = cursor;
        self
    }

    /// Returns the cursor of the last published batch.
    pub fn cursor(&self) -> BatchCursor {
        self.cursor
    }

    /// Publishes one batch, and returns its cursor. A batch without events is a heartbeat.
    ///
    /// NATS does not confirm the batch. The status of the namespace shows which batch the daemon has applied last.
    ///
    /// # Errors
    ///
    /// [`ClientError::TooLarge`] and [`ClientError::Connection`]. The batch was not sent then, and the next batch gets
    /// its number.
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
            block_size: self.block_size,
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

    /// Waits until all batches have been sent to the server.
    pub async fn flush(&self) -> Result<(), ClientError> {
        self.nats
            .flush()
            .await
            .map_err(|error| ClientError::Connection(error.to_string()))
    }
}

/// Returns the time in microseconds since the Unix epoch; 0 before the epoch.
fn unix_time_us() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX)
}
