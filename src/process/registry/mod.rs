//! The registry of engines. It has the types that describe an engine, its server and its state, and the interface of the
//! component that follows engines. The bridge implements the interface; the HTTP listener and the page use it.

mod beside;
mod report;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use kvatlas_core::hash::Scheme;
use kvatlas_core::wire::{HolderId, ModelKey, NamespaceName, Profile, Rank};
use kvatlas_engines::{Format, GroupFacts};

use kvatlas_config::{Discovery, Secret};

pub use beside::{BesideEvents, read_scheme};
pub use report::{EnginesReport, SourceState, TroubledEngine};

/// Longest wait until the holders of engines that are no longer followed have left the index.
const LEAVING_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two attempts to follow an engine, while holders of engines that are no longer followed are still in the index.
const LEAVING_INTERVAL: Duration = Duration::from_millis(20);

/// Key of one publisher of an engine: the names of an instance and a model, and a rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EngineKey {
    /// Name of the instance, as gateways know it.
    pub instance: String,
    /// The model, and the tenant for whom the publisher serves it.
    pub model: ModelKey,
    /// Data-parallel rank of the publisher.
    pub rank: Rank,
}

impl fmt::Display for EngineKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{} of {}", self.instance, self.rank, self.model)
    }
}

/// One publisher of an engine that a bridge is to follow. A bridge writes registered publishers to a file, so every new field
/// needs `#[serde(default)]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewEngine {
    /// Key of the publisher.
    pub key: EngineKey,
    /// Address at which the publisher publishes events, such as `tcp://host:5557`.
    pub endpoint: String,
    /// Address at which the publisher replays missed batches; `None` if it does not replay.
    pub replay: Option<String>,
    /// Format of the publisher's payloads.
    pub format: Format,
    /// Number of tokens in a block.
    pub block_size: u32,
    /// Prefix of the topics that are followed; empty for all topics.
    pub topic: String,
    /// Facts about the engine's blocks that the engine's events don't tell.
    pub beside: BesideEvents,
    /// Facts about the engine's groups of layers that the engine's events don't tell.
    pub groups: GroupFacts,
    /// Address where requests for the engine go, and its labels.
    #[serde(default)]
    pub profile: Profile,
    /// Place at which Dynamo's workers record how a bridge can ask them for all their blocks. Only operators can give
    /// this place. `None` for a publisher that a client has registered.
    #[serde(skip)]
    pub discovery: Option<Discovery>,
    /// Time for which a registration counts without being renewed; `None` if it counts until it is unregistered, or if the
    /// publisher was not registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Duration>,
}

impl NewEngine {
    /// Whether `other` is followed in exactly the same way. The address for requests, the labels and the time to live may
    /// differ, because they do not affect how an engine is followed.
    pub fn is_followed_like(&self, other: &Self) -> bool {
        let relabelled = || Self {
            profile: self.profile.clone(),
            ttl: self.ttl,
            ..other.clone()
        };
        self == other || *self == relabelled()
    }

    /// Whether the engine's server delivers events over gRPC.
    pub fn is_grpc(&self) -> bool {
        is_grpc(&self.endpoint)
    }

    /// Endpoints that the bridge connects to for this publisher.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.endpoint.as_str()).chain(self.replay.as_deref())
    }

    /// Returns the kind of connection over which the publisher's events come.
    pub fn connection(&self) -> Connection {
        match self.format {
            _ if self.is_grpc() => Connection::Stream,
            Format::TensorRt => Connection::Drain,
            Format::Dynamo => Connection::Plane,
            Format::Vllm | Format::Sglang | Format::Mooncake | Format::TokenSpeed => Connection::Sockets,
        }
    }

    /// Whether this publisher's connection may also bring events of other holders. False for a publisher with its own
    /// ZeroMQ sockets.
    pub fn is_source(&self) -> bool {
        self.connection() != Connection::Sockets
    }
}

/// Kind of connection over which a bridge receives events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// Two ZeroMQ sockets of a publisher: one publishes, the other one replays.
    Sockets,
    /// A topic or subject of Dynamo's event plane. It carries the events of many workers.
    Plane,
    /// A stream over gRPC from the engine's server.
    Stream,
    /// Questions over HTTP to the engine's server. The server returns each event only once.
    Drain,
}

/// Returns whether an address names a server that speaks gRPC.
fn is_grpc(address: &str) -> bool {
    address.starts_with("grpc://") || address.starts_with("grpcs://")
}

/// Engine that is given by the address of its server. The bridge asks the server for everything else. A bridge writes registered
/// servers to a file, as it does with [`NewEngine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewServer {
    /// Name of the instance, as gateways know it.
    pub instance: String,
    /// URL of the server: `http://HOST:PORT` or `grpc://HOST:PORT`; with TLS, `https://HOST:PORT` or `grpcs://HOST:PORT`.
    pub url: String,
    /// Model that the server must serve; `None` for the first model that it names.
    pub model: Option<String>,
    /// Tenant for whom the server serves the model; empty for the default tenant.
    pub tenant: String,
    /// Kind of engine that is tried first when the server is asked.
    pub format: Format,
    /// Number of tokens in a block; `None` if the engine has to report the number.
    pub block_size: Option<u32>,
    /// Facts about the engine's blocks that the engine's events don't tell.
    pub beside: BesideEvents,
    /// Facts about the engine's groups of layers that the engine's events don't tell.
    pub groups: GroupFacts,
    /// Facts from the source (such as DNS or Kubernetes) in which the server was found.
    pub discovered: Discovered,
    /// Scheme of the hashes that name the engine's blocks; `None` for kvatlas's own scheme.
    pub scheme: Option<Scheme>,
    /// Address where requests for the engine go, and its labels.
    pub profile: Profile,
    /// Time for which a registration counts without being renewed, as in [`NewEngine`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Duration>,
}

/// Facts about an engine from the source that found it (such as DNS or Kubernetes), except its address.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Discovered {
    /// Identity that distinguishes the engine from earlier engines with its name or its address, such as a pod's UID. Empty if
    /// there is none.
    pub identity: String,
    /// Labels by their keys, such as those of a pod.
    pub labels: BTreeMap<String, String>,
    /// Name of the object that the engine was found as, such as a pod's. Empty if there is none.
    // The last field: earlier programs have saved the facts as a list, without it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub object: String,
}

/// Key of one server: the instance, and the model, tenant and scheme that were given for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerKey {
    /// Name of the instance, as gateways know it.
    pub instance: String,
    /// Model that the server must serve, if one is given.
    pub model: Option<String>,
    /// Tenant for whom the server serves the model.
    pub tenant: String,
    /// Scheme of the hashes that name the engine's blocks; `None` for kvatlas's own scheme.
    pub scheme: Option<Scheme>,
}

impl ServerKey {
    /// Returns the model, tenant and scheme of the key as one [`ModelKey`]. The model's name is empty if no model is given.
    pub fn cache(&self) -> ModelKey {
        let model = self.model.clone().unwrap_or_default();
        ModelKey::of_tenant(model, &self.tenant).speaking(self.scheme.clone())
    }
}

impl NewServer {
    /// Whether the server speaks gRPC.
    pub fn is_grpc(&self) -> bool {
        is_grpc(&self.url)
    }

    /// Returns the server's key.
    pub fn key(&self) -> ServerKey {
        ServerKey {
            instance: self.instance.clone(),
            model: self.model.clone(),
            tenant: self.tenant.clone(),
            scheme: self.scheme.clone(),
        }
    }

    /// Whether a bridge would ask and follow the server `other` in exactly the same way. The two may differ in the
    /// address for requests, in all labels and in the time to live.
    pub fn is_asked_like(&self, other: &Self) -> bool {
        let relabelled = || Self {
            profile: self.profile.clone(),
            ttl: self.ttl,
            discovered: Discovered {
                labels: self.discovered.labels.clone(),
                ..other.discovered.clone()
            },
            ..other.clone()
        };
        self == other || *self == relabelled()
    }
}

/// Description of an engine that an operator or a client gives: the engine's sockets, or the address of its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GivenEngine {
    /// One publisher, given by its sockets.
    Publisher(NewEngine),
    /// A server, which is asked for its publishers.
    Server(NewServer),
}

impl GivenEngine {
    /// Returns whether a text begins like the URL of a server.
    pub fn is_url(text: &str) -> bool {
        text.starts_with("http://") || text.starts_with("https://") || is_grpc(text)
    }

    /// Returns whether an endpoint of an engine with this format is a server that the bridge asks for publishers. Returns false
    /// for TensorRT-LLM's HTTP server, which is asked for events instead.
    pub fn is_server(endpoint: &str, format: Format) -> bool {
        match format {
            Format::Vllm | Format::Sglang => Self::is_url(endpoint),
            Format::TensorRt | Format::TokenSpeed => is_grpc(endpoint),
            Format::Dynamo | Format::Mooncake => false,
        }
    }

    /// Returns the endpoints to which the bridge connects for this engine. For a server, this is only the server's
    /// URL. The bridge learns the endpoints of its publishers later.
    pub fn endpoints(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Self::Publisher(engine) => Box::new(engine.endpoints()),
            Self::Server(server) => Box::new(std::iter::once(server.url.as_str())),
        }
    }

    /// Name of the instance, as gateways know it.
    pub fn instance(&self) -> &str {
        match self {
            Self::Publisher(engine) => &engine.key.instance,
            Self::Server(server) => &server.instance,
        }
    }

    /// Time for which a registration counts without being renewed; `None` if it counts until it is unregistered.
    pub fn ttl(&self) -> Option<Duration> {
        match self {
            Self::Publisher(engine) => engine.ttl,
            Self::Server(server) => server.ttl,
        }
    }

    /// Whether `other` is the same engine, perhaps with other settings.
    pub fn is_same_engine(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Publisher(engine), Self::Publisher(other)) => engine.key == other.key,
            (Self::Server(server), Self::Server(other)) => server.key() == other.key(),
            _ => false,
        }
    }
}

/// State of a bridge's connection to an engine, and of its knowledge of the engine's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineStatus {
    /// The bridge has not connected to the engine yet.
    Pending,
    /// The bridge is connected, and knows the engine's blocks for certain.
    Exact,
    /// The bridge is connected, but events were lost that the engine cannot send again, or the NATS server refuses the reports
    /// about the engine.
    Degraded,
    /// The connection broke, or the engine is silent.
    Lost,
}

impl EngineStatus {
    /// Whether the bridge is connected to the engine and follows its blocks, for certain or not.
    pub fn is_followed(self) -> bool {
        matches!(self, Self::Exact | Self::Degraded)
    }

    /// Returns Dynamo's word for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Exact | Self::Degraded => "active",
            Self::Lost => "failed",
        }
    }
}

/// An engine that is followed, and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineState {
    /// Description of the engine, as an operator or a client gave it.
    pub engine: NewEngine,
    /// State of the bridge's connection to the engine.
    pub status: EngineStatus,
    /// Last trouble with the engine; `None` while nothing is wrong.
    pub last_error: Option<String>,
}

/// A server that is or was asked for its publishers, and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerState {
    /// Description of the server, as an operator or a client gave it.
    pub server: NewServer,
    /// Keys of the server's publishers that are followed, in the order of their ranks; empty until the server has named its
    /// publishers.
    pub engines: Vec<EngineKey>,
    /// Text that says why the server's engine is not followed; `None` while nothing is wrong.
    pub last_error: Option<String>,
    /// Whether the engine is not followed only because it has stored no block yet. Its first block tells the block
    /// size.
    pub is_idle: bool,
}

/// The party that has determined the block size of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeOf {
    /// The configuration, which sets the block size of this namespace.
    #[error("the configuration says so: set namespaces.{0}.block_size")]
    Configuration(NamespaceName),
    /// An engine that is followed.
    #[error(
        "{0} has that size; start this engine with it, or serve it as another model or tenant; or unregister the others first"
    )]
    Engine(Box<EngineKey>),
    /// A holder in the index, whose blocks have this size. There may be more such holders.
    #[error("worker {worker}/{rank} has that size; end it, or let the daemon forget it (kvatlas admin forget)", worker = .0.worker, rank = .0.rank)]
    Holder(HolderId),
}

/// Reason why an engine is not followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterRefusal {
    /// A publisher with the same instance, model and rank is already followed, but in another way.
    #[error(
        "{key} is followed at {endpoint} already; give the other engine a name of its own, or unregister this one first"
    )]
    Conflict {
        /// Key of the publisher.
        key: Box<EngineKey>,
        /// Address at which the publisher is followed.
        endpoint: String,
    },
    /// Another engine is already followed at this address. It has another model or another block size.
    #[error("{endpoint} is followed as {key} with blocks of {block_size} tokens; unregister that first")]
    SameAddress {
        /// Key of the publisher that is followed there.
        key: Box<EngineKey>,
        /// Address of the publisher.
        endpoint: String,
        /// Block size of the publisher that is already followed at the address.
        block_size: u32,
    },
    /// The configuration does not allow the bridge to connect to this host.
    #[error("{endpoint}: engines on {host} may not be registered; allow it with --register-hosts")]
    Host {
        /// Host, as it was given.
        host: String,
        /// Address that names the host.
        endpoint: String,
    },
    /// The engine's blocks have another size than those of its namespace.
    #[error("block_size is {asked}, but the blocks of this model have {in_force} tokens here: {whose}")]
    OtherBlockSize {
        /// Block size in the registration.
        asked: u32,
        /// Block size that the namespace already has.
        in_force: u32,
        /// Party that has determined the namespace's block size.
        whose: SizeOf,
    },
    /// The engine gives its events to one client only, and several bridges would follow it (`--lease`).
    #[error(
        "{key}: an answer takes the events out of TensorRT-LLM's server, so that bridges with a lease would take them from \
         each other; follow it over gRPC, or by one bridge without --lease"
    )]
    Drained {
        /// Key of the publisher.
        key: Box<EngineKey>,
    },
    /// A part of the registration cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// The largest allowed number of engines is followed already.
    #[error("{engines} engines are followed; no more are allowed (--max-engines)")]
    TooMany {
        /// Maximum number of engines that may be followed.
        engines: usize,
    },
    /// The bridge is stopping.
    #[error("the bridge is stopping")]
    Stopping,
}

impl RegisterRefusal {
    /// Whether the reason for the refusal is the block size of a holder in the index. That holder may be about to
    /// leave the index.
    fn is_by_holder(&self) -> bool {
        let Self::OtherBlockSize { whose, .. } = self else {
            return false;
        };
        matches!(whose, SizeOf::Holder(_))
    }
}

/// Calls `attempt`, which tries to follow engines. Repeats the call for at most two seconds while it fails because of
/// holders with another block size. Such holders leave the index soon if their engines were just unregistered.
///
/// # Errors
///
/// The refusals of the last attempt.
pub async fn follow_patiently(
    attempt: impl Fn() -> Result<(), Vec<RegisterRefusal>>,
) -> Result<(), Vec<RegisterRefusal>> {
    let deadline = Instant::now() + LEAVING_PATIENCE;
    loop {
        match attempt() {
            Err(refused)
                if refused.iter().any(RegisterRefusal::is_by_holder) && Instant::now() < deadline =>
            {
                tokio::time::sleep(LEAVING_INTERVAL).await;
            }
            outcome => return outcome,
        }
    }
}

/// Keys of the publishers of engines that are no longer followed.
pub type RemovedEngines = Vec<EngineKey>;

/// Engines that a request to unregister means.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum MeantEngines {
    /// The engine with this key.
    One(EngineKey),
    /// The engines of an instance that serve a model, in any scheme.
    Named {
        /// Name of the instance.
        instance: String,
        /// Name of the model.
        model: String,
        /// Tenant or routing group; `None` means all.
        tenant: Option<String>,
        /// Data-parallel rank; `None` means all.
        rank: Option<Rank>,
    },
}

impl MeantEngines {
    /// Whether the engine with this key is meant.
    pub fn has(&self, key: &EngineKey) -> bool {
        let rank = match self {
            Self::One(one) => Some(one.rank),
            Self::Named { rank, .. } => *rank,
        };
        self.has_any_rank(key) && rank.is_none_or(|rank| rank == key.rank)
    }

    /// Whether an engine is meant that has this key, apart from its rank.
    pub fn has_any_rank(&self, key: &EngineKey) -> bool {
        match self {
            Self::One(one) => (&one.instance, &one.model) == (&key.instance, &key.model),
            Self::Named {
                instance,
                model,
                tenant,
                ..
            } => {
                let is_tenant = tenant.as_ref().is_none_or(|tenant| *tenant == key.model.tenant);
                (instance, model) == (&key.instance, &key.model.model) && is_tenant
            }
        }
    }
}

/// The engines that a bridge follows. No method blocks.
pub trait EngineRegistry: Send + Sync {
    /// Begins to follow an engine. If the engine is already followed in exactly this way, only its address for requests
    /// and its labels are replaced, and its registration is renewed. A registration with a time to live that is in its place
    /// ends.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal`].
    fn register(&self, engine: NewEngine) -> Result<(), RegisterRefusal>;

    /// Begins to ask a server for its publishers, and to follow those. If the server is already asked in exactly this
    /// way, only its address for requests and its labels are replaced.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal`]. Troubles with the server itself show later, in [`Self::servers`].
    fn register_server(&self, server: NewServer) -> Result<(), RegisterRefusal>;

    /// Begins to follow an engine, given by its sockets or by its server.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal`].
    fn register_given(&self, engine: GivenEngine) -> Result<(), RegisterRefusal> {
        match engine {
            GivenEngine::Publisher(engine) => self.register(engine),
            GivenEngine::Server(server) => self.register_server(server),
        }
    }

    /// Checks whether a client at `peer` may register `engine`. The bridge's configuration says which hosts the bridge may
    /// connect to; the client's own host is always allowed.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal::Host`].
    fn may_register(&self, engine: &GivenEngine, peer: Option<IpAddr>) -> Result<(), RegisterRefusal>;

    /// Returns the token that a client has to show to register engines. No token is needed from programs on this
    /// machine, or from clients that have shown the token of the HTTP listener. `None` if the bridge has no
    /// registration token.
    fn register_token(&self) -> Option<&Secret>;

    /// Stops following the engines that are `meant`, now and in a list of registered engines that can only be read later.
    /// Returns the keys of all engines that are no longer followed. If one rank of a server is meant, the bridge stops
    /// following all ranks of that server.
    fn unregister(&self, meant: &MeantEngines) -> RemovedEngines;

    /// Returns the followed engines and their states, in the order of their keys.
    fn engines(&self) -> Vec<EngineState>;

    /// Returns the servers that are or were asked, and their states, in the order of their keys.
    fn servers(&self) -> Vec<ServerState>;

    /// Returns the sources in which the bridge looks for engines, as operators see them.
    fn sources(&self) -> Vec<SourceState>;

    /// Returns the NATS server's texts of the refusals that keep daemons from hearing of engines; empty while the server
    /// refuses nothing.
    fn refusals(&self) -> Vec<String>;

    /// Whether the NATS server refuses events of engines, so that daemons lack them.
    fn is_unheard(&self) -> bool;
}
