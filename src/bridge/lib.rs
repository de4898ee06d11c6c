//! The bridge: follows engines' ZMQ publishers, and tells daemons by the contract what they say.
//!
//! ```text
//! engine ──PUB──▶ Guard ─▶ Subscription ─┐
//!        ◀─DEALER─ Guard ◀▶ Replay ─────┴▶ Follower ─▶ Decoder ─▶ Translator ─▶ HolderPublisher ─▶ NATS
//! ```
//!
//! One task follows one publisher: one port, one data-parallel rank. TensorRT-LLM's servers and Dynamo's event plane tell of several holders;
//! their tasks are in `sources`. The promises:
//!
//! 1. A holder is called exact only while all of the engine's batches since its start, or since a clear, have been applied in order.
//!    What is missing is asked of the engine's replay socket. What that cannot give back makes the holder `upstream_gap` until the engine
//!    clears or restarts.
//! 2. Each question to the replay socket overlaps with what was applied. After a reconnect, other bytes for the same number are another
//!    process: a new epoch begins, and nothing of the old one is left. Nothing that came over the new connection counts before. On an
//!    unbroken connection other bytes are either another process or a replay socket of another engine. Nothing of either is left, and the
//!    socket is believed again once it has the same bytes as a batch that is published.
//! 3. An engine that is gone, or answers nothing, is `upstream_lost` (and so `unverified`), and heartbeats stop, so that daemons find it stale.
//! 4. A bridge that has stood still vouches for nothing until it has looked again (`stalls`).
//! 5. What is kept on disk (`state`) makes no holder exact: it is as after a reconnect.
//! 6. Of several bridges that follow an engine one speaks (`lease`), and two that both do are told apart by their epochs.
//! 7. What an engine's server has told counts for connections that stood when it was asked (`server`). What differs then is another engine.
//! 8. Another process at the sockets of an engine that was out of sight for [`FollowOptions::give_up_after`] is in doubt until it clears, unless
//!    its server's name or its source vouches for it (`follower::identity`).
//! 9. A worker of Dynamo's event plane is exact while its own numbers of events go on from a state that it was asked for (`dynamo::courses`).
//! 10. Memory is bounded: messages wait in the engine, and a connection with a message beyond the bounds ends (`guard`); names by
//!     [`FollowOptions::blocks_max`], batches for daemons by the publisher's ring.
//!
//! `deploy/bridge.md` says the same for operators.

mod beginning;
mod check;
mod continuity;
mod discovery;
mod dynamo;
mod engines;
mod follower;
mod frames;
mod grpc;
mod guard;
mod holders;
mod hosts;
mod http;
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
mod walker;

pub use discovery::{Discover, DiscoverError, DiscoverOptions, SourceState};
pub use dynamo::AnswerPorts;
pub use engines::{Bridge, BridgeOptions};
pub use follower::FollowOptions;
pub use hosts::{AllowedHosts, HostsError};
pub use lease::{LeaseOptions, Times as LeaseTimes};
pub use republish::{RepublishAddress, RepublishOptions, SocketPair};
pub use spec::{EngineDefaults, SpecError, parse_engine, parse_engines_file};
pub use stalls::BridgeClock;
pub use state::{StateDirectory, StateError};
