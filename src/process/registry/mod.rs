//! The registry of engines: what is said of an engine, its server and its state, and the interface of whoever follows them. The bridge does; HTTP
//! and the page ask it.

mod beside;

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

/// How long the holders of engines that are no longer followed may take to leave.
const LEAVING_PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at them.
const LEAVING_INTERVAL: Duration = Duration::from_millis(20);

/// Names one publisher of an engine: an instance, a model, a rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EngineKey {
    /// The name that gateways have for the instance.
    pub instance: String,
    /// The model, and for whom.
    pub model: ModelKey,
    /// The data-parallel rank.
    pub rank: Rank,
}

impl fmt::Display for EngineKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{} of {}", self.instance, self.rank, self.model)
    }
}

/// One publisher to follow. A bridge writes those down that are registered: a field that is added has `#[serde(default)]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewEngine {
    /// The key of the publisher.
    pub key: EngineKey,
    /// The address on which it publishes, such as `tcp://host:5557`.
    pub endpoint: String,
    /// The address on which it replays what was missed, if anywhere.
    pub replay: Option<String>,
    /// The format of its payloads.
    pub format: Format,
    /// Tokens in a block.
    pub block_size: u32,
    /// The prefix of the topics that are followed; empty for all.
    pub topic: String,
    /// The facts about its blocks that are not in its events.
    pub beside: BesideEvents,
    /// The facts about its groups of layers that are not in its events.
    pub groups: GroupFacts,
    /// The address where requests for it go, and its labels.
    #[serde(default)]
    pub profile: Profile,
    /// The place where Dynamo's workers say how they are asked for all that they have. Only operators give it: what is registered has none.
    #[serde(skip)]
    pub discovery: Option<Discovery>,
}

impl NewEngine {
    /// Whether `other` is followed in just the same way. Address and labels may differ: they say nothing of how.
    pub fn is_followed_like(&self, other: &Self) -> bool {
        let relabelled = Self {
            profile: self.profile.clone(),
            ..other.clone()
        };
        *self == relabelled
    }

    /// Whether its server hands on events over gRPC.
    pub fn is_grpc(&self) -> bool {
        is_grpc(&self.endpoint)
    }

    /// The endpoints that the bridge connects to for it.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.endpoint.as_str()).chain(self.replay.as_deref())
    }

    /// Whether it may tell of several holders over one connection, and so is no ZeroMQ publisher of its own.
    pub fn is_source(&self) -> bool {
        self.is_grpc() || matches!(self.format, Format::TensorRt | Format::Dynamo)
    }
}

/// Tells whether an address is that of a server that speaks gRPC.
fn is_grpc(address: &str) -> bool {
    address.starts_with("grpc://") || address.starts_with("grpcs://")
}

/// An engine that is named by the address of its server, and asked the rest. Written down like [`NewEngine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewServer {
    /// The name that gateways have for the instance.
    pub instance: String,
    /// `http://HOST:PORT` or `grpc://HOST:PORT`; with TLS `https://HOST:PORT` or `grpcs://HOST:PORT`.
    pub url: String,
    /// The model that it has to serve; none for the first one that it names.
    pub model: Option<String>,
    /// For whom it serves; empty for the default tenant.
    pub tenant: String,
    /// The kind of server that it is asked as first.
    pub format: Format,
    /// Tokens in a block; none where the engine has to tell.
    pub block_size: Option<u32>,
    /// The facts about its blocks that are not in its events.
    pub beside: BesideEvents,
    /// The facts about its groups of layers that are not in its events.
    pub groups: GroupFacts,
    /// The facts that the source knows which has found it.
    pub discovered: Discovered,
    /// The scheme of the hashes that name its blocks; none for the contract's.
    pub scheme: Option<Scheme>,
    /// The address where requests for it go, and its labels.
    pub profile: Profile,
}

/// The facts that a source of engines knows of one, beside its address.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Discovered {
    /// An identity that tells it from all others which have had its name or its address, such as a pod's UID; empty where there is none.
    pub identity: String,
    /// Labels by their keys, such as a pod's.
    pub labels: BTreeMap<String, String>,
}

/// Names one server: an instance, and the cache that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerKey {
    /// The name that gateways have for the instance.
    pub instance: String,
    /// The model that it has to serve, if any is given.
    pub model: Option<String>,
    /// For whom it serves.
    pub tenant: String,
    /// The scheme of the hashes that name its blocks.
    pub scheme: Option<Scheme>,
}

impl ServerKey {
    /// The cache that was asked for; its model is without a name where any will do.
    pub fn cache(&self) -> ModelKey {
        let model = self.model.clone().unwrap_or_default();
        ModelKey::of_tenant(model, &self.tenant).speaking(self.scheme.clone())
    }
}

impl NewServer {
    /// Whether it speaks gRPC.
    pub fn is_grpc(&self) -> bool {
        is_grpc(&self.url)
    }

    /// Its name.
    pub fn key(&self) -> ServerKey {
        ServerKey {
            instance: self.instance.clone(),
            model: self.model.clone(),
            tenant: self.tenant.clone(),
            scheme: self.scheme.clone(),
        }
    }

    /// Whether `other` is asked, and followed, in just the same way. Address and labels may differ.
    pub fn is_asked_like(&self, other: &Self) -> bool {
        let relabelled = Self {
            profile: self.profile.clone(),
            ..other.clone()
        };
        *self == relabelled
    }
}

/// An engine as it is given: by its sockets, or by the address of its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GivenEngine {
    /// One publisher.
    Publisher(NewEngine),
    /// A server that is asked for its publishers.
    Server(NewServer),
}

impl GivenEngine {
    /// Tells whether a text begins as the URL of a server does.
    pub fn is_url(text: &str) -> bool {
        text.starts_with("http://") || text.starts_with("https://") || is_grpc(text)
    }

    /// Tells whether an endpoint is that of a server that is asked for its publishers. TensorRT-LLM's is asked for events where it speaks HTTP.
    pub fn is_server(endpoint: &str, format: Format) -> bool {
        match format {
            Format::Vllm | Format::Sglang => Self::is_url(endpoint),
            Format::TensorRt | Format::TokenSpeed => is_grpc(endpoint),
            Format::Dynamo | Format::Mooncake => false,
        }
    }

    /// The endpoints that the bridge connects to for it, as far as they are known.
    pub fn endpoints(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Self::Publisher(engine) => Box::new(engine.endpoints()),
            Self::Server(server) => Box::new(std::iter::once(server.url.as_str())),
        }
    }

    /// The name that gateways have for the instance.
    pub fn instance(&self) -> &str {
        match self {
            Self::Publisher(engine) => &engine.key.instance,
            Self::Server(server) => &server.instance,
        }
    }
}

/// How an engine is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineStatus {
    /// Not connected yet.
    Pending,
    /// Connected, and what it has is known for certain.
    Exact,
    /// Connected, and something was lost that it cannot give back.
    Degraded,
    /// The connection broke, or the engine is silent.
    Lost,
}

impl EngineStatus {
    /// Dynamo's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Exact | Self::Degraded => "active",
            Self::Lost => "failed",
        }
    }
}

/// An engine that is followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineState {
    /// How it was given.
    pub engine: NewEngine,
    /// How it is followed.
    pub status: EngineStatus,
    /// The last trouble with it; none while nothing is wrong.
    pub last_error: Option<String>,
}

/// A server that is asked, or was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerState {
    /// How it was given.
    pub server: NewServer,
    /// Its publishers that are followed, in the order of their ranks; none until it has told of them.
    pub engines: Vec<EngineKey>,
    /// The trouble with it; none while nothing is wrong.
    pub last_error: Option<String>,
}

/// The party that has given a namespace its block size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeOf {
    /// The configuration.
    #[error("the configuration says so: set namespaces.{0}.block_size")]
    Configuration(NamespaceName),
    /// An engine that is followed.
    #[error("{0} has that size; unregister the engines of the model first")]
    Engine(Box<EngineKey>),
    /// A holder in the index, and maybe others.
    #[error("worker {worker}/{rank} has that size; end it, or let the daemon forget it (kvatlas admin forget)", worker = .0.worker, rank = .0.rank)]
    Holder(HolderId),
}

/// Why an engine is not followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterRefusal {
    /// The same instance, model and rank is followed otherwise.
    #[error("{key} is followed at {endpoint} already; unregister it first")]
    Conflict {
        /// The publisher in question.
        key: Box<EngineKey>,
        /// The address where it is followed.
        endpoint: String,
    },
    /// Another engine with another model or block size is followed at the same address.
    #[error("{endpoint} is followed as {key} with blocks of {block_size} tokens; unregister that first")]
    SameAddress {
        /// The publisher that is followed there.
        key: Box<EngineKey>,
        /// The address.
        endpoint: String,
        /// The size of that one's blocks.
        block_size: u32,
    },
    /// The configuration does not allow the bridge to connect to this host.
    #[error("{endpoint}: engines on {host} may not be registered; allow it with --register-hosts")]
    Host {
        /// The host, as it was given.
        host: String,
        /// The address.
        endpoint: String,
    },
    /// Its blocks have another size than those of its namespace.
    #[error("block_size is {asked}, but the blocks of this model have {in_force} tokens here: {whose}")]
    OtherBlockSize {
        /// The block size in the registration.
        asked: u32,
        /// The block size of the namespace.
        in_force: u32,
        /// The party that has given it that size.
        whose: SizeOf,
    },
    /// A part of the registration cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// As many engines are followed as may be.
    #[error("{engines} engines are followed; no more are allowed (--max-engines)")]
    TooMany {
        /// The limit.
        engines: usize,
    },
    /// The bridge is stopping.
    #[error("the bridge is stopping")]
    Stopping,
}

impl RegisterRefusal {
    /// Whether a holder in the index is in the way, which may be about to leave.
    fn is_by_holder(&self) -> bool {
        let Self::OtherBlockSize { whose, .. } = self else {
            return false;
        };
        matches!(whose, SizeOf::Holder(_))
    }
}

/// Follows engines by `attempt`. While holders with another block size are in the way of one, it is tried again for a moment: those of
/// engines that were just unregistered leave.
///
/// # Errors
///
/// What the last attempt has refused.
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

/// Engines that are no longer followed.
pub type RemovedEngines = Vec<EngineKey>;

/// The engines that a bridge follows. No method waits.
pub trait EngineRegistry: Send + Sync {
    /// Begins to follow an engine. Where it is followed in just this way, only its address and labels are taken over.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal`].
    fn register(&self, engine: NewEngine) -> Result<(), RegisterRefusal>;

    /// Begins to ask a server for its publishers, and to follow those. Where it is asked in just this way, only its address and labels are
    /// taken over.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal`]. What the server itself tells is found out later, and is in [`Self::servers`].
    fn register_server(&self, server: NewServer) -> Result<(), RegisterRefusal>;

    /// Begins to follow an engine, however it is given.
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

    /// Whether a client at `peer` may register `engine`: where the bridge may connect to is a matter of its configuration.
    ///
    /// # Errors
    ///
    /// [`RegisterRefusal::Host`].
    fn may_register(&self, engine: &GivenEngine, peer: Option<IpAddr>) -> Result<(), RegisterRefusal>;

    /// The token that clients need which may be neither a program on this machine nor one that the operator trusts; none where there is none.
    fn register_token(&self) -> Option<&Secret>;

    /// Ends to follow all engines for which `is_meant` holds, and returns them. A server of which one rank is meant is meant as a whole.
    fn unregister(&self, is_meant: &dyn Fn(&EngineKey) -> bool) -> RemovedEngines;

    /// The engines, in the order of their keys.
    fn engines(&self) -> Vec<EngineState>;

    /// The servers, in the order of their keys.
    fn servers(&self) -> Vec<ServerState>;
}
