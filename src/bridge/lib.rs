//! The bridge: follows engines' ZMQ publishers and reports their events to daemons in the form of the contract.
//!
//! ```text
//! engine ──PUB──▶ Subscription ───┐
//!        ◀─DEALER─▶ ReplaySocket ─┴▶ Follower ─▶ Decoder ─▶ Translator ─▶ HolderPublisher ─▶ NATS
//! ```
//!
//! One task follows one publisher: one port, one data-parallel rank. TensorRT-LLM's servers and Dynamo's event plane report several holders
//! each; their tasks are in `sources`. The promises:
//!
//! 1. A holder is called exact only while all of the engine's batches since its start, or since a clear, have been applied in order. The
//!    bridge asks the engine's replay socket for missing batches. If the socket cannot give them back, the holder is `upstream_gap` until
//!    the engine clears or restarts.
//! 2. Each question to the replay socket overlaps with the batches that were applied. After a reconnect, other bytes under the same number
//!    show another process: a new epoch begins, and all blocks of the old process are dropped. Nothing that came over the new connection
//!    counts before that check. On an unbroken connection, other bytes show either another process or a replay socket of another engine.
//!    The blocks of both are dropped, and the socket is believed again once it has the same bytes as a batch that is published.
//! 3. An engine that is gone or does not answer is `upstream_lost` (and so `unverified`), and its heartbeats stop, so that daemons find it
//!    stale.
//! 4. A bridge that has stood still treats every engine as out of sight until it has looked at the engine again (`stalls`).
//! 5. State that is kept on disk or in JetStream (`state`) makes no holder exact: the bridge treats it like the state before a reconnect.
//! 6. Of several bridges that follow an engine, one speaks (`lease`): it alone reports the engine to daemons, and to routers (`republish`).
//!    If two of them speak by mistake, daemons tell them apart by their epochs.
//! 7. An answer of an engine's server counts for connections that stood when the server was asked (`server`). A later answer that differs
//!    means another engine.
//! 8. Another process at the sockets of an engine that was out of sight for [`FollowOptions::give_up_after`] is in doubt until it clears.
//!    The process is not in doubt if its server's name or its source vouches for it (`follower::identity`).
//! 9. A worker of Dynamo's event plane is exact once the bridge has asked it for its state. It stays exact while its event numbers continue
//!    from that state without a gap (`dynamo::courses`).
//! 10. Memory is bounded. Unread messages wait in the engine (back-pressure), and a connection with a message beyond the bounds ends
//!     (`zmtp`). Names of blocks are bounded by [`FollowOptions::blocks_max`], batches for daemons by the publisher's ring.
//!
//! `deploy/bridge.md` gives the same promises to operators.

mod beginning;
mod check;
mod continuity;
mod discovery;
mod dynamo;
mod engines;
mod follower;
mod frames;
mod grpc;
mod holders;
mod hosts;
mod http;
mod kin;
mod lease;
mod partial;
mod progress;
mod relay;
mod republish;
mod reset;
mod server;
mod sockets;
mod sources;
mod spec;
mod stalls;
mod state;
mod subscribed;
mod task;
mod tensorrt;
mod topics;
mod zmtp;

pub use discovery::{Discover, DiscoverError, DiscoverOptions, PodLabels, PodLabelsError, SourceState};
pub use dynamo::AnswerPorts;
pub use engines::{Bridge, BridgeOptions};
pub use follower::FollowOptions;
pub use hosts::{AllowedHosts, HostsError};
pub use lease::{LeaseOptions, Times as LeaseTimes};
pub use republish::{RepublishAddress, RepublishOptions, RouterQuestion, SocketPair};
pub use spec::{EngineDefaults, SpecError, parse_engine, parse_engines_file};
pub use stalls::BridgeClock;
pub use state::{PlaceError, StateDirectory, StateError, StatePlace};
