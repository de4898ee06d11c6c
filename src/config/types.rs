//! The configuration as the rest of the daemon reads it.
//!
//! The fields are named after their settings; the table in [`settings`](super::settings) says more about
//! each, and its bounds hold for every value here.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::snapshot::SnapshotFormat;
use crate::wire::Shard;

use super::kind::Secret;

/// How to reach NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatsConfig {
    /// The servers to try; never empty.
    pub urls: Vec<async_nats::ServerAddr>,
    /// How to authenticate.
    pub authentication: Authentication,
    /// Whether to refuse a connection without TLS.
    pub tls_required: bool,
    /// More certificate authorities to trust, in a PEM file.
    pub tls_ca_file: Option<PathBuf>,
    /// The connections' name in the server's monitoring.
    pub connection_name: String,
    /// Whether to start a server of our own instead of connecting to `urls`.
    pub embedded: bool,
    /// The binary of the embedded server; `None` is to search for it.
    pub server_binary: Option<PathBuf>,
}

/// How to authenticate to NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authentication {
    /// Not at all.
    Anonymous,
    /// With the JWT and the seed in a credentials file.
    CredentialsFile(PathBuf),
    /// With a token.
    Token(Secret),
    /// With a user's name and password.
    UserPassword {
        /// The user.
        user: String,
        /// The user's password.
        password: Secret,
    },
}

/// Which subjects to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubjectsConfig {
    /// What every subject begins with, without a trailing dot.
    pub prefix: String,
}

/// How events are taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventsConfig {
    /// Threads that apply events; 0 leaves the number to [`EventsConfig::lane_count`].
    pub lanes: usize,
    /// Events that wait for one lane, at most, in bytes.
    pub lane_queue_bytes: usize,
    /// Messages that wait in the client's subscription, at most.
    pub subscription_capacity: usize,
    /// The largest message, in bytes.
    pub max_message_bytes: usize,
    /// Blocks in one event, at most.
    pub max_blocks_per_event: usize,
    /// Events in one batch, at most.
    pub max_events_per_batch: usize,
    /// Events of one holder that wait for the block before theirs, at most.
    pub parked_events_max: usize,
    /// Blocks in the parked events of one holder, at most.
    pub parked_blocks_max: usize,
    /// How long an event stays parked, at most.
    pub parked_ttl: Duration,
    /// How they travel.
    pub transport: Transport,
    /// The stream that keeps them, with JetStream.
    pub stream: StreamConfig,
}

/// How events travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// As messages of core NATS, at most once.
    Core,
    /// Through a stream of JetStream, which keeps them.
    JetStream,
}

/// The JetStream stream that keeps the events. The limits are for a stream that the daemon creates; 0 is no limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamConfig {
    /// Its name.
    pub name: String,
    /// Whether to create it where it is missing.
    pub create: bool,
    /// How long it keeps a message, at most.
    pub age_max: Duration,
    /// Bytes that it keeps, at most.
    pub bytes_max: u64,
    /// Messages that it keeps, at most.
    pub messages_max: u64,
    /// On how many servers it lies.
    pub replicas: usize,
}

impl EventsConfig {
    /// The number of lanes on a machine with this many cores: `lanes`, or half the cores, at least 1.
    pub fn lane_count(&self, cores: usize) -> usize {
        const LANES_MAX: usize = 256;
        if self.lanes == 0 {
            (cores / 2).clamp(1, LANES_MAX)
        } else {
            self.lanes
        }
    }
}

/// How publishers are asked for what is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResyncConfig {
    /// Publishers asked at once, at most; 0 asks none.
    pub concurrency: usize,
    /// How long an answer may take.
    pub timeout: Duration,
    /// The largest answer, in bytes.
    pub max_answer_bytes: usize,
    /// Batches of one holder that are kept back meanwhile, at most, in bytes.
    pub max_held_bytes: usize,
    /// The pause after the first failure.
    pub retry_min: Duration,
    /// The longest pause.
    pub retry_max: Duration,
}

/// How queries are answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueriesConfig {
    /// The largest message, in bytes.
    pub max_message_bytes: usize,
    /// Blocks of one prompt, at most.
    pub max_depth_blocks: usize,
    /// Prompts in one message, at most.
    pub max_batch: usize,
    /// The queue group that shares the queries out.
    pub queue_group: String,
    /// Connections that serve queries.
    pub connections: usize,
}

/// Which part of the workers is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardingConfig {
    /// The shard; `None` is to take all workers.
    pub shard: Option<Shard>,
}

/// How a gateway gathers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Whether the daemon is a gateway: without an index, it answers by asking the shards.
    pub enabled: bool,
    /// How long the shards have to answer.
    pub deadline: Duration,
    /// Requests gathered at the same time, at most.
    pub max_gathers: usize,
}

/// When a starting daemon takes queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyConfig {
    /// How long it tries to know as much as a replica that serves already, at most; zero is not to try.
    pub settle: Duration,
}

/// What the index may hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Namespaces, at most.
    pub max_namespaces: usize,
    /// Workers in one namespace, at most.
    pub max_workers_per_namespace: usize,
    /// Data-parallel ranks of one worker, at most.
    pub max_ranks_per_worker: usize,
    /// Blocks of one holder, at most.
    pub max_blocks_per_holder: usize,
    /// Distinct blocks of one namespace; 0 is no limit, and always where a namespace is a radix tree.
    pub max_blocks_per_namespace: u64,
    /// Bytes of the distinct blocks of one namespace; 0 is no limit, and always where a namespace is a radix tree.
    pub max_bytes_per_namespace: u64,
    /// Distinct blocks of all namespaces together, radix trees apart; 0 is no limit.
    pub max_blocks_total: u64,
    /// Bytes of the distinct blocks of all namespaces together, radix trees apart; 0 is no limit.
    pub max_bytes_total: u64,
    /// The longest name of a namespace or worker, in bytes.
    pub max_name_bytes: usize,
}

/// Whose hashes key the index of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hashing {
    /// The engine's own, as its events give them.
    Engine,
    /// Ours, recomputed from the block hashes or tokens of the events.
    Recompute,
}

/// How the index of a namespace is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexKind {
    /// Addressed by lineage hashes.
    Lineage,
    /// As a radix tree.
    Radix,
}

/// The contract of one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// Tokens in a block.
    pub block_size: u32,
    /// Whose hashes key the index.
    pub hashing: Hashing,
    /// How the index is built.
    pub index: IndexKind,
    /// Silence after which a holder is stale, if ever.
    pub stale_after: Option<Duration>,
    /// Silence after which a holder is removed, if ever.
    pub remove_after: Option<Duration>,
}

/// The contracts of all namespaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespacesConfig {
    /// The contract of a namespace without one of its own.
    pub default: NamespaceConfig,
    /// Contracts by the name of the namespace.
    pub overrides: BTreeMap<String, NamespaceConfig>,
}

impl NamespacesConfig {
    /// The contract of the namespace with this name.
    pub fn of(&self, namespace: &str) -> NamespaceConfig {
        self.overrides.get(namespace).copied().unwrap_or(self.default)
    }
}

/// Where and when to write snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotsConfig {
    /// The directory; `None` is to write none.
    pub directory: Option<PathBuf>,
    /// The time between two snapshots.
    pub interval: Duration,
    /// Snapshots to keep.
    pub keep: usize,
    /// What they are written as.
    pub format: SnapshotFormat,
    /// Where else to keep them; `None` is nowhere.
    pub object_store: Option<ObjectStoreConfig>,
}

/// The Object Store to which snapshots are sent and from which a fresh replica starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectStoreConfig {
    /// Its bucket.
    pub bucket: String,
    /// The least time between two snapshots that are sent.
    pub interval: Duration,
    /// The largest snapshot that is sent or fetched, in bytes.
    pub snapshot_bytes_max: u64,
    /// How long a start waits for a snapshot, at most.
    pub patience: Duration,
    /// On how many servers a bucket lies that the daemon creates.
    pub replicas: usize,
}

/// Where to serve metrics and probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminConfig {
    /// The address; port 0 takes a free one; `None` is not to listen.
    pub listen: Option<SocketAddr>,
}

/// The format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What to log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggingConfig {
    /// The format of the lines.
    pub format: LogFormat,
    /// The filter; `tracing_subscriber::EnvFilter` is known to accept it.
    pub level: String,
}

/// How to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShutdownConfig {
    /// How long to wait for work to finish, at most.
    pub drain: Duration,
}
