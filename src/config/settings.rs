//! The settings: each is declared here, in one row, and nowhere else.
//!
//! A row gives a setting its key in the file (`nats.url` is `url` in the table `[nats]`), its type, its default, its
//! bounds and its help. From the key follow its flag (`--nats-url`) and its environment variable
//! (`KVATLAS_NATS_URL`). To add a setting, add a row. A new section needs a line in `configuration!`, too.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use kvatlas_core::index::Hashing;
use kvatlas_core::wire::Shard;

use super::declare::{Setting, SettingTable, configuration, tables};
use super::dynamo::{Discovery, DynamoComponent};
use super::effective::{Effective, Values};
use super::error::ConfigError;
use super::kind::{Kind, Secret};
use super::live::Live;
use super::namespaces::NamespaceConfigs;
use super::rule::{
    Rule, boolean, bytes, choice, components, integer, listen_address, milliseconds, milliseconds_or_never,
    optional, optional_text, path, seconds, secret, server_urls, text,
};
use super::types::{Authentication, Depth, GrpcWriting, Transport};
use kvatlas_telemetry::LogFormat;

/// Environment variable that names the configuration file. The command line reads it.
pub const CONFIG_VARIABLE: &str = "KVATLAS_CONFIG";

/// All settings. Settings of one section stand together.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(Config::settings);

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

configuration! {
    nats: NatsConfig,
    subjects: SubjectsConfig,
    events: EventsConfig,
    resync: ResyncConfig,
    queries: QueriesConfig,
    sharding: ShardingConfig,
    gateway: GatewayConfig,
    ready: ReadyConfig,
    limits: LimitsConfig,
    namespaces: NamespaceConfigs,
    snapshots: SnapshotsConfig,
    admin: AdminConfig,
    http: HttpConfig,
    hints: HintsConfig,
    dynamo: DynamoConfig,
    redis: RedisConfig,
    grpc: GrpcConfig,
    logging: LoggingConfig,
    traces: TracesConfig,
    shutdown: ShutdownConfig,
}

tables! {
    /// Settings of the connections to NATS.
    pub NatsConfig in [nats] {
        /// NATS servers to connect to, joined by commas.
        urls as url: Vec<async_nats::ServerAddr> = "nats://127.0.0.1:4222", server_urls();
        /// How to authenticate.
        authentication: Live<Authentication>;
        /// Refuse a connection to NATS without TLS.
        tls_required: bool = "false", boolean();
        /// Begin TLS before the server sends anything; the server must be configured for that (handshake_first).
        tls_first: bool = "false", boolean();
        /// PEM file of certificate authorities to trust for NATS, in place of the authorities that the system trusts;
        /// read anew for every connection.
        tls_ca_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// PEM file of the certificate that kvatlas shows to NATS; read anew for every connection.
        tls_cert_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// PEM file of the certificate's private key.
        tls_key_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// Name of the connections in NATS's own monitoring.
        connection_name: String = "kvatlas", text(Kind::Name);
        /// Beginning of the subjects on which NATS delivers replies; give each role a different beginning if clients
        /// must not read each other's replies.
        inbox_prefix: String = "_INBOX", text(Kind::SubjectPrefix);
        /// Start a private NATS server on a free local port, for development.
        embedded: bool = "false", boolean(), flag "embedded";
        /// The nats-server binary of the embedded server; if unset, kvatlas looks for one in NATS_SERVER_BIN, in PATH,
        /// in the directory of its own program, and in .tools/ (where deploy/setup.sh puts it).
        server_binary: Option<PathBuf> = "", path(Kind::OptionalFile);
    }

    /// Settings for authenticating to NATS.
    pub(super) Credentials in [nats] {
        /// NATS credentials file (JWT and seed) to authenticate with; read anew for every connection.
        credentials_file: Option<PathBuf> = "", path(Kind::OptionalFile) => live;
        /// File with the seed of an NKey to authenticate to NATS with; read anew for every connection.
        nkey_seed_file: Option<PathBuf> = "", path(Kind::OptionalFile) => live;
        /// Token to authenticate to NATS with.
        token: Option<Secret> = "", secret() => live;
        /// User to authenticate to NATS as; needs a password too.
        user: String = "", text(Kind::OptionalText) => live;
        /// Password of the NATS user.
        password: Option<Secret> = "", secret() => live;
    }

    /// Settings of the NATS subjects.
    pub SubjectsConfig in [subjects] {
        /// The beginning of every NATS subject of kvatlas.
        prefix: String = "kvatlas", text(Kind::SubjectPrefix);
    }

    /// Settings for receiving and applying events.
    pub EventsConfig in [events] {
        /// Threads that apply events; 0 is half the cores, at least 1.
        lanes: usize = "0", integer(0, 256);
        /// Maximum number of bytes of the events that wait for one lane. Beyond it, messages of core NATS are dropped,
        /// and messages of JetStream wait in the stream.
        lane_queue_bytes: usize = "64 MiB", bytes(64 * KIB, 4 * GIB);
        /// Maximum number of messages in the NATS client's buffer in front of the lanes' queues; the daemon empties the
        /// buffer without waiting. Buffers for queries have room for at least 2048 messages.
        subscription_capacity: usize = "8192", integer(16, 16_777_216);
        /// Approximate maximum of the bytes that one connection has received and the daemon has not taken yet. This
        /// bounds each connection for events of core NATS, for queries, for answers of publishers, and for reports of
        /// routers. Beyond it, the connection ends; the daemon connects again when at most half of this number of bytes wait.
        subscription_bytes: usize = "64 MiB", bytes(4 * MIB, 4 * GIB);
        /// If the oldest waiting event is older than this, in milliseconds, all holders with waiting events are
        /// degraded as behind; 0 is never.
        behind_after as behind_after_ms: Option<Duration> = "250", milliseconds_or_never(3_600_000);
        /// Maximum size of one event message.
        max_message_bytes: usize = "1 MiB", bytes(KIB, 64 * MIB) => live;
        /// Maximum number of blocks in one event.
        max_blocks_per_event: usize = "65536", integer(1, 16_777_216) => live;
        /// Maximum number of events in one batch.
        max_events_per_batch: usize = "4096", integer(1, 1_048_576) => live;
        /// Maximum number of events of one holder that wait until their parent block is stored (parked events); 0 parks
        /// none.
        parked_events_max: usize = "64", integer(0, 65_536);
        /// Maximum number of bytes of all parked events (events that wait for their parent block); one holder may take
        /// a fourth of the bytes that the other holders do not use. Further events are dropped, and their holders are
        /// in doubt.
        parked_bytes_max: usize = "256 MiB", bytes(MIB, 64 * GIB);
        /// Maximum number of blocks in the parked events of one holder.
        parked_blocks_max: usize = "65536", integer(0, 16_777_216);
        /// Maximum time for which an event stays parked, in milliseconds.
        parked_ttl as parked_ttl_ms: Duration = "30000", milliseconds(1, 3_600_000);
        /// Maximum time by which a publisher's epoch, read as microseconds since 1970, may lie ahead of the clock, in
        /// seconds; 0 is no limit.
        max_epoch_ahead as max_epoch_ahead_seconds: Duration = "86400", seconds(0, 31_536_000_000) => live;
        /// How events travel: as messages of core NATS, or through a JetStream stream that keeps them.
        transport: Transport = "core", choice();
        /// The stream that keeps the events, with JetStream.
        stream: StreamConfig;
    }

    /// The JetStream stream that keeps the events. The limits are for a stream that the daemon creates.
    pub StreamConfig in [events] {
        /// Name of the JetStream stream of the events.
        name as stream: String = "KVATLAS_EVENTS", text(Kind::Name);
        /// Create the stream where it is missing; the limits below are for this case.
        create as stream_create: bool = "true", boolean();
        /// Maximum time for which the stream keeps an event, in seconds; 0 is no limit.
        age_max as stream_max_age_seconds: Duration = "86400", seconds(0, 31_536_000);
        /// Maximum number of bytes that the stream keeps; 0 is no limit.
        bytes_max as stream_max_bytes: u64 = "4 GiB", bytes(0, 1024 * TIB);
        /// Maximum number of messages that the stream keeps; 0 is no limit.
        messages_max as stream_max_messages: u64 = "0", integer(0, 1_000_000_000_000);
        /// Number of NATS servers that keep the stream.
        replicas as stream_replicas: usize = "1", integer(1, 5);
    }

    /// Settings for asking publishers for missing batches and blocks.
    pub ResyncConfig in [resync] {
        /// Maximum number of publishers that answer with missing batches or blocks at the same time; 0 asks none. A
        /// publisher that is silent for 250 ms does not count.
        concurrency: usize = "16", integer(0, 1024);
        /// How long a publisher's answer may take, in milliseconds.
        timeout as timeout_ms: Duration = "5000", milliseconds(10, 600_000);
        /// Maximum size of the whole answer of one publisher.
        max_answer_bytes: usize = "64 MiB", bytes(64 * KIB, 4 * GIB);
        /// Maximum number of bytes of one holder's batches that wait while the holder's publisher is asked; a single
        /// batch may be larger.
        max_held_bytes: usize = "1 MiB", bytes(KIB, GIB);
        /// Pause after the first failed resync of a holder, in milliseconds; the pause doubles with every further
        /// failure.
        retry_min as retry_min_ms: Duration = "200", milliseconds(1, 3_600_000);
        /// The longest pause between two resyncs of a holder, in milliseconds.
        retry_max as retry_max_ms: Duration = "30000", milliseconds(1, 3_600_000);
    }

    /// Settings for answering queries.
    pub QueriesConfig in [queries] {
        /// Maximum size of one query message.
        max_message_bytes: usize = "1 MiB", bytes(KIB, 64 * MIB) => live;
        /// Maximum number of blocks that a query may name for one prompt.
        max_depth_blocks: usize = "65536", integer(1, 16_777_216) => live;
        /// Maximum number of prompts in one query message.
        max_batch: usize = "256", integer(1, 65_536) => live;
        /// NATS queue group of the daemons; each query goes to one member.
        queue_group: String = "kvatlas", text(Kind::Name);
        /// Maximum number of bytes of large requests that wait on one connection, for their turn or for a gateway's
        /// shards; further large requests are refused with error 429. A request is large if the query message, or the
        /// reply to a status request, is above 32 KiB.
        max_waiting_bytes: usize = "16 MiB", bytes(64 * KIB, GIB);
        /// NATS connections that serve queries.
        connections: usize = "1", integer(1, 16);
        /// Kind of depth (number of leading blocks) in answers in the protocols of other routers: usable, the blocks
        /// that a request can reuse, or matched, the blocks of full attention.
        dialect_depth: Depth = "usable", choice();
        /// Answer the questions of NATS's micro services ($SRV.PING, INFO, STATS), so that `nats micro` finds the daemon.
        discovery: bool = "true", boolean();
    }

    /// Settings for following only one shard of the workers.
    pub ShardingConfig in [sharding] {
        /// Follow only the workers of this shard, and answer only for these workers; if unset, follow all workers.
        shard: Option<Shard> = "", optional(Kind::OptionalShard), flag "shard";
    }

    /// Settings of a gateway, which gathers the replies of shards.
    pub GatewayConfig in [gateway] {
        /// Follow no events: answer queries by gathering the shards' replies.
        enabled: bool = "false", boolean(), flag "gateway";
        /// How long a gateway waits for the shards, in milliseconds; then the gateway answers without the missing
        /// shards.
        deadline as deadline_ms: Duration = "250", milliseconds(1, 60_000);
        /// Maximum number of requests for which a gateway gathers replies at the same time; further requests are
        /// refused.
        max_gathers: usize = "1024", integer(1, 1_048_576);
    }

    /// Settings for the time at which a starting daemon begins to take queries.
    pub ReadyConfig in [ready] {
        /// Maximum time for which a starting daemon tries to learn as much as a serving replica knows, in milliseconds;
        /// it takes queries afterwards.
        settle as settle_ms: Duration = "30000", milliseconds(0, 3_600_000);
    }

    /// Bounds on the index.
    pub LimitsConfig in [limits] {
        /// Maximum number of namespaces; the namespace of kvatlas doctor's probe does not count.
        max_namespaces: usize = "64", integer(1, 65_536);
        /// Allow only the namespaces that the file names in tables [namespaces.NAME], and the namespace of kvatlas doctor's
        /// probe.
        named_namespaces_only: bool = "false", boolean();
        /// Time without a holder after which a namespace that the file does not name is forgotten, in seconds; 0 is never.
        empty_namespace as empty_namespace_seconds: Duration = "600", seconds(0, 86_400) => live;
        /// Maximum number of workers in one namespace.
        max_workers_per_namespace: usize = "4096", integer(1, 65_535);
        /// Maximum number of data-parallel ranks of one worker.
        max_ranks_per_worker: usize = "64", integer(1, 4096);
        /// Maximum number of blocks that one holder may have.
        max_blocks_per_holder: usize = "16777216", integer(1, 4_294_967_295);
        /// Maximum number of distinct blocks that the index of one namespace keeps. Beyond it, the index forgets the
        /// least recently used blocks that no other block follows. 0 is no limit.
        max_blocks_per_namespace: u64 = "0", integer(0, 1_000_000_000_000);
        /// Maximum memory for the distinct blocks of one namespace. Beyond it, the index forgets the least recently
        /// used blocks that no other block follows. 0 is no limit.
        max_bytes_per_namespace: u64 = "0", bytes(0, 1024 * TIB);
        /// Maximum number of distinct blocks of all namespaces together. Beyond it, the namespace that takes the most
        /// memory forgets blocks that no other block follows. 0 is no limit.
        max_blocks_total: u64 = "0", integer(0, 1_000_000_000_000);
        /// Maximum memory for the distinct blocks of all namespaces together. Beyond it, the namespace that takes the
        /// most memory forgets blocks that no other block follows. 0 is no limit.
        max_bytes_total: u64 = "0", bytes(0, 1024 * TIB);
        /// Maximum length of the name of a namespace or worker.
        max_name_bytes: usize = "64", integer(16, 64);
    }

    /// Settings of a namespace: block size, hashing, and times of silence. A table `[namespaces.NAME]` of the file
    /// overrides them for one namespace.
    pub NamespaceConfig in [namespace_defaults] {
        /// Number of tokens in a block of a namespace if neither the namespace's table in the file nor its batches give
        /// the number.
        block_size: u32 = "16", integer(1, 65_536);
        /// Whether to trust the hashes that engines send (engine), or to recompute them (recompute).
        hashing: Hashing = "engine", choice();
        /// Time without a message after which a holder is stale at the latest, in milliseconds; 0 is never. Publishers
        /// send a message every second.
        stale_after as stale_after_ms: Option<Duration> = "3000", milliseconds_or_never(86_400_000);
        /// Time without a message after which a holder is removed, in milliseconds; 0 is never.
        remove_after as remove_after_ms: Option<Duration> = "600000", milliseconds_or_never(86_400_000);
    }

    /// Snapshots: their places, and when they are written.
    pub SnapshotsConfig in [snapshots] {
        /// Directory of the snapshots from which a restarted daemon loads its index; if unset, there are no snapshots.
        directory: Option<PathBuf> = "", path(Kind::OptionalPath);
        /// Time between snapshots, in seconds.
        interval as interval_seconds: Duration = "60", seconds(1, 86_400);
        /// Number of snapshots to keep.
        keep: usize = "3", integer(1, 1000);
        /// The Object Store to send snapshots to and to start from, if there is one.
        object_store: Option<ObjectStoreConfig>;
    }

    /// The Object Store to which snapshots are sent and from which a fresh replica starts.
    pub ObjectStoreConfig in [snapshots] {
        /// Bucket of the NATS Object Store to which snapshots are sent and from which a fresh replica starts; made if
        /// missing; if unset, no Object Store is used.
        bucket as object_store: String = "", text(Kind::OptionalName);
        /// Minimum time between two snapshots that are sent, in seconds.
        interval as object_store_interval_seconds: Duration = "300", seconds(1, 86_400);
        /// Maximum size of one snapshot to send or fetch.
        snapshot_bytes_max as object_store_max_bytes: u64 = "8 GiB", bytes(MIB, TIB);
        /// Maximum time for which a start waits for a snapshot from the Object Store, in seconds.
        patience as object_store_patience_seconds: Duration = "60", seconds(1, 3600);
        /// Number of NATS servers that keep the bucket, if the daemon makes it.
        replicas as object_store_replicas: usize = "1", integer(1, 5);
    }

    /// The listener for metrics and probes.
    pub AdminConfig in [admin] {
        /// Address of the HTTP listener for metrics and probes; port 0 takes a free one, off disables it.
        listen: Option<SocketAddr> = "127.0.0.1:9464", listen_address();
        /// IP address or host name that kvatlas doctor is told together with the listener's port; if unset, it is told
        /// the listener's address, or the machine's name. Not for a listener on a loopback address.
        advertise: Option<String> = "", optional_text(Kind::OptionalText);
        /// Carry out commands that operators send over NATS (kvatlas admin); all clients that may publish on the subjects of
        /// these commands count as operators.
        commands: bool = "true", boolean();
    }

    /// The listener for queries over HTTP.
    pub HttpConfig in [http] {
        /// Address of the HTTP listener for queries; port 0 takes a free one, off disables it.
        listen: Option<SocketAddr> = "off", listen_address();
        /// File with the bearer token that HTTP queries need; if unset, they need none.
        token_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// Maximum size of the body of one HTTP query.
        max_body_bytes: usize = "8 MiB", bytes(KIB, 256 * MIB);
        /// Maximum number of bytes of all bodies of HTTP queries that have arrived and are not answered yet; beyond it,
        /// a query of the address with the most bytes is refused. Also of all long answers that clients have not read
        /// yet; one address may have half of it.
        max_receiving_bytes: usize = "64 MiB", bytes(MIB, 16 * GIB);
        /// Maximum number of HTTP connections for queries at the same time.
        max_connections: usize = "1024", integer(1, 65_536);
        /// Maximum number of HTTP connections for queries from one address at the same time; at the maximum, a new
        /// connection replaces the oldest connection that waits for its client.
        max_connections_per_source: usize = "256", integer(1, 65_536);
        /// How long an HTTP connection may wait for the head of a request, in milliseconds.
        idle_timeout as idle_timeout_ms: Duration = "75000", milliseconds(100, 3_600_000);
        /// How long the body of an HTTP query may take to arrive, and how long a client may take to read 1 MiB of a
        /// dump, in milliseconds.
        request_timeout as request_timeout_ms: Duration = "10000", milliseconds(10, 600_000);
    }

    /// Settings for hints, in which routers report where they have sent requests.
    pub HintsConfig in [hints] {
        /// How long answers show the blocks of a router's hint as predicted, in milliseconds; choose about the time
        /// that an engine takes for the first token. 0 takes no hints.
        time_to_live as ttl_ms: Option<Duration> = "0", milliseconds_or_never(60_000);
        /// Maximum number of bytes of all hints; beyond it, the oldest hints are dropped.
        max_bytes: usize = "64 MiB", bytes(64 * KIB, 16 * GIB);
    }

    /// Settings for answering Dynamo's routers, as their remote indexer.
    pub DynamoConfig in [dynamo] {
        /// Components of Dynamo whose routers are answered, joined by commas, such as dynamo.backend; if =TENANT
        /// follows a component, the component's models belong to that tenant; if unset, none.
        components: Vec<DynamoComponent> = "", components();
        /// The place where Dynamo's processes find each other: etcd:http://HOST:PORT, or file:DIRECTORY; if unset, there is none.
        discovery: Option<Discovery> = "", optional(Kind::OptionalDiscovery);
        /// Address of a TCP listener for Dynamo's request plane; off takes requests over NATS.
        listen: Option<SocketAddr> = "off", listen_address();
        /// Host that routers are told together with the listener's port; if unset, routers are told the listener's IP
        /// address, which must not stand for all addresses then.
        advertise: Option<String> = "", optional_text(Kind::OptionalText);
        /// Maximum number of bytes of all requests of Dynamo's routers whose answers are not made yet; requests that
        /// exceed it wait, over TCP for dynamo.request_timeout_ms at most, after which the connection is cut off.
        max_receiving_bytes: usize = "64 MiB", bytes(8 * MIB, 16 * GIB);
        /// Maximum number of connections of Dynamo's routers at the same time.
        max_connections: usize = "1024", integer(1, 65_536);
        /// Maximum number of connections of Dynamo's routers from one address at the same time; at the maximum, a new
        /// connection replaces the oldest connection that waits for its client.
        max_connections_per_source: usize = "256", integer(1, 65_536);
        /// How long a connection of one of Dynamo's routers may be idle, in milliseconds.
        idle_timeout as idle_timeout_ms: Duration = "3600000", milliseconds(100, 86_400_000);
        /// How long a request of one of Dynamo's routers may take to arrive, and how long the router may take to
        /// receive the answer, in milliseconds.
        request_timeout as request_timeout_ms: Duration = "5000", milliseconds(10, 600_000);
    }

    /// Settings for answering llm-d's routers in place of Redis.
    pub RedisConfig in [redis] {
        /// Address of the listener that answers llm-d's routers in place of Redis; port 0 takes a free one, off
        /// disables it.
        listen: Option<SocketAddr> = "off", listen_address();
        /// File with the password that llm-d's routers need; if unset, they need none.
        token_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// Maximum number of bytes of one command of llm-d's routers, and of the pipelined commands that are read
        /// before they are answered. Before a client has shown the password, 16 KiB at most.
        max_command_bytes: usize = "1 MiB", bytes(4 * KIB, 64 * MIB);
        /// Maximum number of bytes of all commands of llm-d's routers that have arrived and are not answered yet, and
        /// as many of long answers that are being taken; a connection that exceeds it is cut off.
        max_receiving_bytes: usize = "64 MiB", bytes(MIB, 16 * GIB);
        /// Maximum number of connections of llm-d's routers at the same time.
        max_connections: usize = "1024", integer(1, 65_536);
        /// Maximum number of connections of llm-d's routers from one address at the same time; at the maximum, a new
        /// connection replaces the oldest connection that waits for its client.
        max_connections_per_source: usize = "256", integer(1, 65_536);
        /// How long a connection of one of llm-d's routers may be idle, in milliseconds.
        idle_timeout as idle_timeout_ms: Duration = "3600000", milliseconds(100, 86_400_000);
        /// How long a command of one of llm-d's routers may take to arrive, with the pipelined HKEYS before it. The
        /// router may take as long to receive the reply. In milliseconds.
        request_timeout as request_timeout_ms: Duration = "10000", milliseconds(10, 600_000);
        /// Maximum number of bytes of all speculative entries (guesses of llm-d's routers); beyond it, the oldest
        /// entries are dropped.
        max_speculative_bytes: usize = "64 MiB", bytes(64 * KIB, 16 * GIB);
        /// How long a speculative entry of one of llm-d's routers is kept if the router does not take the entry back,
        /// in milliseconds.
        speculative_ttl as speculative_ttl_ms: Duration = "10000", milliseconds(100, 3_600_000);
    }

    /// Settings for answering SGLang's routers, as their indexer.
    pub GrpcConfig in [grpc] {
        /// Address of the listener that answers SGLang's routers over gRPC; port 0 takes a free one, off disables it.
        listen: Option<SocketAddr> = "off", listen_address();
        /// Namespace about which SGLang's routers are answered; if unset, all namespaces with SGLang's hashes. A
        /// gateway needs this setting.
        namespace: Option<String> = "", optional_text(Kind::OptionalName);
        /// File with the token that clients of gRPC need; if unset, they need none.
        token_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// Maximum size of one question over gRPC.
        max_message_bytes: usize = "8 MiB", bytes(4 * KIB, 64 * MIB);
        /// Maximum number of bytes of all questions over gRPC that have arrived and are not answered yet; beyond it,
        /// the oldest question of the source with the most bytes is refused.
        max_receiving_bytes: usize = "64 MiB", bytes(MIB, 16 * GIB);
        /// Maximum number of requests of one connection over gRPC at the same time.
        max_streams: u32 = "64", integer(1, 4096);
        /// Maximum number of connections of SGLang's routers at the same time.
        max_connections: usize = "1024", integer(1, 65_536);
        /// Maximum number of connections of SGLang's routers from one address at the same time; at the maximum, a new
        /// connection replaces the oldest connection that waits for its client.
        max_connections_per_source: usize = "256", integer(1, 65_536);
        /// How long a connection over gRPC may be without a question, in milliseconds.
        idle_timeout as idle_timeout_ms: Duration = "3600000", milliseconds(100, 86_400_000);
        /// How long a question over gRPC may take to arrive and to be answered, in milliseconds; the client's own deadline may be
        /// shorter.
        request_timeout as request_timeout_ms: Duration = "10000", milliseconds(10, 600_000);
        /// Clients that may report over gRPC which blocks workers have, as SGLang's bridge does: none (off), clients
        /// with the token of grpc.writing_token_file (token), or all clients that may ask (open); needs grpc.namespace.
        writing: GrpcWriting = "off", choice();
        /// File with the token that clients need to report blocks over gRPC.
        writing_token_file: Option<PathBuf> = "", path(Kind::OptionalFile);
        /// Maximum number of bytes of all blocks that are reported over gRPC; a worker whose blocks do not fit is left
        /// out of answers until a snapshot of its blocks fits.
        max_reported_bytes: usize = "256 MiB", bytes(64 * KIB, 64 * GIB);
        /// Time without a report about a worker over gRPC after which answers leave the worker out, in milliseconds; 0 is never.
        report_silence as max_report_silence_ms: Option<Duration> = "60000", milliseconds_or_never(86_400_000);
    }

    /// Settings of the log.
    pub LoggingConfig in [logging] {
        /// Format of the log lines.
        format: LogFormat = "text", choice();
        /// Filter of the log lines; lines of the NATS client are written only if the filter names async_nats.
        level: String = "info", text(Kind::LogFilter) => live;
    }

    /// Settings for tracing requests and sending the spans to a collector.
    pub TracesConfig in [traces] {
        /// The URL to which spans are sent by OTLP over HTTP as JSON, such as http://127.0.0.1:4318/v1/traces; if unset, nothing
        /// is traced.
        endpoint: Option<String> = "", optional_text(Kind::OptionalHttpUrl);
        /// Maximum number of spans that wait to be sent; further spans are dropped and counted.
        spans_max as max_waiting_spans: usize = "4096", integer(1, 1_048_576);
    }

    /// Settings of the shutdown.
    pub ShutdownConfig in [shutdown] {
        /// Maximum time for which a shutdown waits for work to finish, in seconds.
        drain as drain_seconds: Duration = "10", seconds(1, 600);
    }
}

impl Copy for NamespaceConfig {}

/// Reads the settings of the Object Store; `None` if they name no bucket.
impl SettingTable for Option<ObjectStoreConfig> {
    fn settings() -> Vec<Setting> {
        ObjectStoreConfig::settings()
    }

    fn read(values: Values<'_>) -> Result<Self, ConfigError> {
        let config = ObjectStoreConfig::read(values)?;
        Ok((!config.bucket.is_empty()).then_some(config))
    }

    fn take_live(&mut self, other: &Self) {
        if let (Some(own), Some(other)) = (self, other) {
            own.take_live(other);
        }
    }
}

impl GatewayConfig {
    /// Returns the process's role, which the process shows among the services of NATS and at its admin listener.
    pub fn role(&self) -> &'static str {
        match self.enabled {
            true => "gateway",
            false => "daemon",
        }
    }
}

impl EventsConfig {
    /// Returns the number of lanes (threads that apply events) on a machine with `cores` cores: `lanes`, or half the
    /// cores (from 1 to 256) if `lanes` is 0.
    pub fn lane_count(&self, cores: usize) -> usize {
        const LANES_MAX: usize = 256;
        if self.lanes == 0 {
            (cores / 2).clamp(1, LANES_MAX)
        } else {
            self.lanes
        }
    }
}

impl Setting {
    /// Returns the setting with this dotted key.
    pub fn find(key: &str) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.key == key)
    }
}

/// Returns the sections in the order of their rows, each once.
pub(super) fn sections() -> Vec<&'static str> {
    let mut sections: Vec<_> = SETTINGS.iter().map(Setting::section).collect();
    sections.dedup();
    sections
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_derived_from_the_key() {
        let setting = Setting::find("events.lane_queue_bytes").unwrap();
        assert_eq!(setting.flag, "events-lane-queue-bytes");
        assert_eq!(setting.variable, "KVATLAS_EVENTS_LANE_QUEUE_BYTES");
        assert_eq!(
            (setting.section(), setting.name()),
            ("events", "lane_queue_bytes")
        );
    }

    #[test]
    fn names_are_unique() {
        let keys: BTreeSet<_> = SETTINGS.iter().map(|setting| setting.key).collect();
        let variables: BTreeSet<_> = SETTINGS.iter().map(|setting| setting.variable.as_str()).collect();
        let flags: Vec<_> = SETTINGS
            .iter()
            .flat_map(|setting| std::iter::once(setting.flag.as_str()).chain(setting.alias))
            .collect();
        assert_eq!(keys.len(), SETTINGS.len());
        assert_eq!(variables.len(), SETTINGS.len());
        assert_eq!(flags.iter().collect::<BTreeSet<_>>().len(), flags.len());
        assert!(!variables.contains(CONFIG_VARIABLE));
    }

    #[test]
    fn sections_are_contiguous() {
        let sections = sections();
        assert_eq!(
            sections.iter().collect::<BTreeSet<_>>().len(),
            sections.len(),
            "{sections:?}"
        );
        assert!(!sections.contains(&crate::effective::NAMESPACES));
    }

    #[test]
    fn help_is_one_line_without_a_full_stop() {
        for setting in SETTINGS.iter() {
            assert!(
                !setting.help.is_empty() && !setting.help.contains('\n'),
                "{}",
                setting.key
            );
            assert!(!setting.help.ends_with('.'), "{}", setting.key);
        }
    }
}
