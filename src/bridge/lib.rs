//! The bridge: follows engines' ZMQ publishers and reports their events to daemons in the form of the contract.
//!
//! ```text
//! engine ──PUB──▶ Subscription ───┐
//!        ◀─DEALER─▶ ReplaySocket ─┴▶ Follower ─▶ Decoder ─▶ Translator ─▶ HolderPublisher ─▶ NATS
//! ```
//!
//! One task follows one publisher: one port, one data-parallel rank. TensorRT-LLM's servers and Dynamo's event plane
//! report several holders each; their tasks are in `sources`. A holder is *exact* if its blocks are known for certain.
//! An engine is *in sight* while it lives and no batch is known to be missing. The promises:
//!
//! 1. A holder is called exact only while all of the engine's batches since its start, or since a clear, have been
//!    applied in order. The bridge asks the engine's replay socket for missing batches. If the socket no longer has
//!    them, the holder has the reason `upstream_gap` until the engine clears or restarts.
//! 2. Each question to the replay socket begins at a batch that was applied before. After a reconnect, other bytes
//!    under the same number show another process: a new epoch begins, and all blocks of the old process are dropped. No
//!    batch from the new connection counts before that check. On an unbroken connection, other bytes show either
//!    another process or a replay socket of another engine. All blocks are dropped in both cases. The bridge believes
//!    the socket again once the socket gives a batch with the same number and bytes as a published one.
//! 3. An engine that is gone or does not answer has the reason `upstream_lost` (and so counts as unverified). The
//!    bridge stops its heartbeats, so that daemons find it stale.
//! 4. A bridge that has stood still treats every engine as out of sight until it has checked the engine again
//!    (`stalls`).
//! 5. State that is kept on disk or in JetStream (`state`) makes no holder exact. The bridge treats it like the state
//!    before a reconnect.
//! 6. If several bridges follow an engine, one of them *speaks* (`lease`): it alone reports the engine to daemons, and
//!    to routers (`republish`). If two of them speak by mistake, daemons tell them apart by their epochs.
//! 7. An answer of an engine's server counts for connections that were open when the server was asked (`server`). If a
//!    later answer differs, the server belongs to another engine.
//! 8. If an engine was out of sight for [`FollowOptions::give_up_after`], another process at its sockets is in doubt
//!    until that process clears. There are two exceptions: the engine's source confirms that it is the same engine, or
//!    the engine's name is nothing but its address (`follower::identity`).
//! 9. A worker of Dynamo's event plane is exact once the bridge has asked it for its state. It stays exact while its
//!    event numbers continue from that state without a gap (`dynamo::courses`).
//! 10. Memory is bounded. Unread messages wait in the engine (back-pressure). A connection with a message beyond the
//!     bounds ends (`zmtp`). [`FollowOptions::blocks_max`] bounds the names of blocks. The publisher keeps the last
//!     batches for daemons in a ring of fixed size.
//!
//! `deploy/bridge.md` gives the same promises to operators.

mod beginning;
mod check;
mod continuity;
mod discovery;
mod dynamo;
mod engines;
mod farewells;
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
mod refused;
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

pub use discovery::{Discover, DiscoverError, DiscoverOptions, PodLabels, PodLabelsError};
pub use dynamo::AnswerPorts;
pub use engines::{Bridge, BridgeOptions};
pub use follower::FollowOptions;
pub use hosts::{AllowedHosts, HostsError};
pub use lease::{LeaseOptions, Times as LeaseTimes};
pub use republish::{
    RepublishAddress, RepublishAddressError, RepublishOptions, RouterQuestion, SocketPair, TwoAddresses,
};
pub use spec::{EngineDefaults, SpecError, parse_engine, parse_engines_file};
pub use stalls::BridgeClock;
pub use state::{PlaceError, StateDirectory, StateError, StatePlace};
