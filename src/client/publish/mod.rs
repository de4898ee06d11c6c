//! The publisher library: tells daemons which blocks one holder has, for an engine or a sidecar next to the engine.
//!
//! A [`HolderPublisher`] numbers batches without a gap within an epoch. To replace batches that are lost on the way, it keeps a
//! *ring* of the last batches, and a *block table* of all blocks that the holder has. A daemon that misses batches asks the
//! publisher (see [`ResyncRequest`](kvatlas_core::wire::ResyncRequest)). The publisher gives the daemon the missing batches
//! from the ring, or the full state from the table. A relay that knows all of the holder's blocks itself can lend them to the
//! publisher, which then keeps no table ([`FullState`]). Heartbeats show daemons that no batch was lost, and that the holder
//! lives.
//!
//! ```text
//! publish ──▶ bounded queue ──▶ open batch ──▶ ring, table ──▶ transport ──▶ events subject
//!   waits, or is refused         (count, bytes,                (core NATS
//!   where there is no room         delay)                        or JetStream)
//!                              daemon ──▶ resync subject ──▶ ring or table ──▶ chunks
//! ```
//!
//! An event that the queue has taken is published in order, exactly once, unless the process dies. The publisher's next
//! incarnation begins a new epoch, which replaces everything that the earlier incarnation published.
//!
//! A NATS server that gives no right to publish takes the bytes, drops the batch, and says so in an error on the connection. A
//! [`PublishConnection`] receives that error. Then [`flush`](HolderPublisher::flush) fails, and
//! [`batches_refused`](PublisherCounters::batches_refused) counts the batch. A bare [`Client`](async_nats::Client) does not
//! pass the error on.
//!
//! ```no_run
//! use kvatlas_core::hash::SequenceHash;
//! use kvatlas_client::publish::{HolderPublisher, PublishConnection, PublishedHolder, PublisherOptions};
//! use kvatlas_core::wire::{Event, NamespaceName, RemovedBlocks, StoredBlocks, Subjects, Tier, WorkerName};
//!
//! # async fn engine() -> Result<(), Box<dyn std::error::Error>> {
//! let nats = PublishConnection::connect(async_nats::ConnectOptions::new(), "nats://127.0.0.1:4222").await?;
//! let holder = PublishedHolder {
//!     namespace: NamespaceName::new("llama")?,
//!     worker: WorkerName::new("gpu-0")?,
//!     rank: 0,
//! };
//! let publisher =
//!     HolderPublisher::start(nats, &Subjects::new("kvatlas")?, holder, PublisherOptions::default()).await?;
//!
//! // What the engine reports, as it happens. Parents come before their children.
//! let chain = vec![SequenceHash(11), SequenceHash(22)];
//! publisher.publish(Tier::DEVICE, vec![Event::Stored(StoredBlocks::by_sequence(None, None, chain))]).await?;
//! let evicted = RemovedBlocks::by_sequence(vec![SequenceHash(22)]);
//! publisher.publish(Tier::DEVICE, vec![Event::Removed(evicted)]).await?;
//!
//! // Daemons forget the holder at once, instead of waiting for heartbeats that do not come.
//! publisher.say_goodbye().await?;
//! # Ok(())
//! # }
//! ```

mod answer;
mod cut;
mod epochs;
mod error;
mod handle;
mod options;
mod outbox;
mod profile;
mod refusals;
mod ring;
mod sizes;
mod state;
mod table;
mod task;
mod transport;
mod voice;

pub use cut::{CutBounds, cut_events};
pub use error::PublisherError;
pub use handle::{HolderPublisher, PublishedHolder, PublisherCounters};
pub use options::{AFTER_SEQ_MAX, Beginning, PublisherOptions, Transport};
pub use refusals::{PublishConnection, Refusals};
pub use state::{FullState, SharedState};
pub use voice::{Term, Voice};
