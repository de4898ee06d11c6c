//! Settings of a publisher.

use std::time::Duration;

use kvatlas_core::index::NamespaceSettings;
use kvatlas_core::wire::{BatchCursor, DegradedReasons, HEARTBEAT_INTERVAL, Profile};

use super::error::PublisherError;

/// Way in which batches travel to daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Core NATS: batches are not acknowledged. If a batch is lost, daemons notice a gap in the batch numbers and ask for the
    /// batch.
    #[default]
    Core,
    /// JetStream: a batch carries the header `Nats-Msg-Id`. The next batch is sent only when the stream has
    /// acknowledged the previous one. The stream has to exist.
    JetStream {
        /// Longest wait for an acknowledgement before the batch is sent again. If the stream already has the batch, it
        /// drops the second one.
        acknowledgement_timeout: Duration,
        /// Maximum number of times that a batch is sent. After that many sends without an acknowledgement, the batch is
        /// given up. Daemons then notice a gap in the batch numbers and ask for the batch.
        attempts: u32,
    },
}

impl Transport {
    /// JetStream, with times that suit an engine: a batch is given up half a minute after it was first sent.
    pub const ACKNOWLEDGED: Self = Self::JetStream {
        acknowledgement_timeout: Duration::from_secs(5),
        attempts: 6,
    };
}

/// Default of [`PublisherOptions::batch_events_max`]. Daemons drop batches with more events than they are configured for.
pub(super) const BATCH_EVENTS_MAX: usize = 1024;

/// Largest number of a batch after which a publisher goes on. As many numbers are left above it, so that no publisher
/// comes to the end of them.
pub const AFTER_SEQ_MAX: u64 = u64::MAX / 2;

/// Point at which the batch numbers begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Beginning {
    /// Begins a new epoch, in which the holder has no blocks yet. The epoch's number is the present time, in
    /// microseconds.
    #[default]
    NewEpoch,
    /// Begins the epoch with this number, in which the holder has no blocks yet. The number must be above the numbers
    /// of all earlier epochs.
    Epoch(u64),
    /// Begins a new epoch above this number, with the blocks of the [lent state](super::FullState). The epoch's first
    /// batch number is skipped, so that daemons see a gap and ask for the blocks. This is for a caller that already
    /// knows the holder's blocks. A number that, read as microseconds, lies more than a day ahead of the clock does not
    /// count: daemons would drop all batches.
    Above(u64),
    /// Continues after this batch, which an earlier incarnation of the publisher sent. The blocks of the earlier batches are not
    /// known here. So daemons can get the batches that are published from now on, but not the full state. The batch's
    /// number must be at most [`AFTER_SEQ_MAX`].
    After(BatchCursor),
}

impl Beginning {
    /// Checks that the batch after which the publisher is to go on leaves it enough numbers.
    pub(super) fn check(self) -> Result<(), PublisherError> {
        match self {
            Self::After(BatchCursor { seq, .. }) if seq > AFTER_SEQ_MAX => Err(PublisherError::SeqTooLarge {
                seq,
                seq_max: AFTER_SEQ_MAX,
            }),
            _ => Ok(()),
        }
    }
}

/// Settings of a publisher. [`Default`] is right for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherOptions {
    /// Point at which the batch numbers begin.
    pub beginning: Beginning,
    /// Doubts about the holder's blocks at the start; none by default. The first batch tells them, and so does every
    /// answer, so daemons never call the holder exact before they know the doubts. A later
    /// [`Doubted`](kvatlas_core::wire::Event::Doubted) replaces them.
    pub doubts: DegradedReasons,
    /// Way in which batches travel to daemons.
    pub transport: Transport,
    /// Block size and hashing of the namespace, as the daemons have them. If a daemon's configuration names the
    /// namespace, the daemon refuses batches of another block size. Otherwise the daemon takes the block size from the
    /// batches.
    pub settings: NamespaceSettings,
    /// Whether batches tell the block size; `true` by default. Use `false` if the blocks stand for no tokens, for
    /// example in a test of a deployment.
    pub tells_block_size: bool,
    /// The holder's address for requests, and its labels. Daemons learn both from the first batch, from every
    /// heartbeat, and from every batch that clears the holder's blocks.
    pub profile: Profile,
    /// Time without a batch after which a heartbeat is sent.
    pub heartbeat_interval: Duration,
    /// Shortest time between two batches. Events that come sooner share the next batch; after a pause, events are sent
    /// immediately. If the time is zero, events of separate calls never share a batch.
    pub batch_delay: Duration,
    /// Maximum number of events in a batch.
    pub batch_events_max: usize,
    /// Approximate maximum size of a batch, in bytes. NATS servers accept messages of up to 1 MiB unless configured otherwise.
    pub batch_bytes_max: usize,
    /// Maximum number of calls whose events wait in the queue. When the queue is full,
    /// [`publish`](super::HolderPublisher::publish) waits for room, and [`try_publish`](super::HolderPublisher::try_publish)
    /// fails.
    pub queue_batches_max: usize,
    /// Approximate maximum number of bytes that the events in the queue take. The queue is then full, as with the maximum
    /// number of calls. A call that alone takes more waits until the queue has no other events.
    pub queue_bytes_max: usize,
    /// Longest wait of [`flush`](super::HolderPublisher::flush) and [`say_goodbye`](super::HolderPublisher::say_goodbye).
    pub patience: Duration,
    /// Maximum number of the last batches that the publisher keeps (its ring) for daemons that miss them.
    pub ring_batches_max: usize,
    /// Maximum number of payload bytes of the last batches that the publisher keeps for daemons that miss them.
    pub ring_bytes_max: usize,
    /// Approximate maximum size of one chunk of an answer to a daemon, in bytes.
    pub chunk_bytes_max: usize,
    /// Maximum number of answers that are sent to daemons at the same time. Further questions are refused, and daemons ask again.
    pub answers_max: usize,
    /// Whether the publisher answers daemons that miss batches. Only then does it keep the ring of batches and the table of
    /// blocks.
    pub answers_resyncs: bool,
}

impl Default for PublisherOptions {
    fn default() -> Self {
        Self {
            beginning: Beginning::NewEpoch,
            doubts: DegradedReasons::default(),
            transport: Transport::Core,
            settings: NamespaceSettings::default(),
            tells_block_size: true,
            profile: Profile::default(),
            heartbeat_interval: HEARTBEAT_INTERVAL,
            batch_delay: Duration::from_millis(2),
            batch_events_max: BATCH_EVENTS_MAX,
            batch_bytes_max: 512 << 10,
            queue_batches_max: 1024,
            queue_bytes_max: 64 << 20,
            patience: Duration::from_secs(10),
            ring_batches_max: 4096,
            ring_bytes_max: 16 << 20,
            chunk_bytes_max: 256 << 10,
            answers_max: 4,
            answers_resyncs: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_goes_on_after_the_last_numbers() {
        let after = |seq| Beginning::After(BatchCursor { epoch: 7, seq }).check();
        assert!(after(AFTER_SEQ_MAX).is_ok());
        for seq in [AFTER_SEQ_MAX + 1, u64::MAX] {
            let refused = after(seq).unwrap_err();
            assert!(matches!(refused, PublisherError::SeqTooLarge { .. }), "{refused}");
        }
    }
}
