//! How to publish.

use std::time::Duration;

use kvatlas_core::index::NamespaceSettings;
use kvatlas_core::wire::{BatchCursor, HEARTBEAT_INTERVAL, Profile};

/// How batches travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Core NATS: a batch is sent and not acknowledged. What is lost shows as a gap, and is asked for.
    #[default]
    Core,
    /// JetStream: a batch carries the header `Nats-Msg-Id`, and the next one waits until the stream has acknowledged it. The
    /// stream has to exist.
    JetStream {
        /// How long an acknowledgement may take before the batch is sent again. The stream drops what it has already.
        acknowledgement_timeout: Duration,
        /// How often a batch is sent before it is given up. What is given up shows as a gap, and is asked for.
        attempts: u32,
    },
}

impl Transport {
    /// JetStream, with times that are right for an engine: a batch is given up half a minute after it was sent first.
    pub const ACKNOWLEDGED: Self = Self::JetStream {
        acknowledgement_timeout: Duration::from_secs(5),
        attempts: 6,
    };
}

/// The point at which the batch numbers begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Beginning {
    /// With a new epoch, the time in microseconds: the holder has nothing yet.
    #[default]
    NewEpoch,
    /// With a new epoch of this number, which has to be above every one before: the holder has nothing yet.
    Epoch(u64),
    /// With a new epoch above this number, and the blocks that the [lent state](super::FullState) has. Its first number is skipped, so that
    /// daemons see that there is more than what follows, and ask. For who knows from before what the holder has.
    Above(u64),
    /// After this batch of an incarnation whose blocks are not known here. Daemons can be given what was published since, but
    /// not the full state.
    After(BatchCursor),
}

/// How to publish. [`Default`] is right for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherOptions {
    /// The point at which the batch numbers begin.
    pub beginning: Beginning,
    /// How batches travel.
    pub transport: Transport,
    /// Block size and hashing of the namespace, as the daemon has them. A namespace that the daemon's configuration does not
    /// name takes the block size over. Any other one refuses batches of another size.
    pub settings: NamespaceSettings,
    /// Whether batches say the block size. True at first. For blocks that have no tokens, such as those of a probe.
    pub tells_block_size: bool,
    /// The holder's address for requests, and its labels. Daemons are told with the first batch, with every heartbeat, and with what
    /// clears.
    pub profile: Profile,
    /// The longest silence: a heartbeat ends it.
    pub heartbeat_interval: Duration,
    /// The least time between two batches: events that come sooner share the next one. After a pause they are sent at once. Zero makes
    /// every call a batch.
    pub batch_delay: Duration,
    /// Most events of a batch.
    pub batch_events_max: usize,
    /// Most bytes of a batch, about. NATS servers take 1 MiB unless configured otherwise.
    pub batch_bytes_max: usize,
    /// Most calls that wait to be published; [`publish`](super::HolderPublisher::publish) waits for room, and
    /// [`try_publish`](super::HolderPublisher::try_publish) fails without.
    pub queue_batches_max: usize,
    /// Most batches that are kept for daemons that miss them.
    pub ring_batches_max: usize,
    /// Most payload bytes that are kept for them.
    pub ring_bytes_max: usize,
    /// Most bytes of one chunk of an answer, about.
    pub chunk_bytes_max: usize,
    /// Most answers that are sent at once; further questions are refused, and come again.
    pub answers_max: usize,
    /// Whether to answer daemons, and so to keep the ring and the table.
    pub answers_resyncs: bool,
}

impl Default for PublisherOptions {
    fn default() -> Self {
        Self {
            beginning: Beginning::NewEpoch,
            transport: Transport::Core,
            settings: NamespaceSettings::default(),
            tells_block_size: true,
            profile: Profile::default(),
            heartbeat_interval: HEARTBEAT_INTERVAL,
            batch_delay: Duration::from_millis(2),
            batch_events_max: 1024,
            batch_bytes_max: 512 << 10,
            queue_batches_max: 1024,
            ring_batches_max: 4096,
            ring_bytes_max: 16 << 20,
            chunk_bytes_max: 256 << 10,
            answers_max: 4,
            answers_resyncs: true,
        }
    }
}
