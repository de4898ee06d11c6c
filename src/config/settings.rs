//! The table of settings, from which everything that names a setting is derived.
//!
//! One row gives a setting its key in the file (`nats.url` is `url` in the table `[nats]`), its flag
//! (`--nats-url`), its environment variable (`KVATLAS_NATS_URL`), its kind, its default and its help. Add a
//! row here and read it in the loader; the flags, the printed configuration and the reference follow.

use super::kind::Kind;

/// What the name of every environment variable of a setting begins with.
pub const ENVIRONMENT_PREFIX: &str = "KVATLAS_";

/// The environment variable that names the configuration file; the command line reads it.
pub const CONFIG_VARIABLE: &str = "KVATLAS_CONFIG";

/// One setting of the daemon.
#[derive(Debug)]
pub struct Setting {
    /// The dotted key: the table of the file, then the key in it.
    pub key: &'static str,
    /// The long flag, without its two dashes.
    pub flag: &'static str,
    /// The environment variable.
    pub variable: &'static str,
    /// A second, shorter flag, without its two dashes.
    pub alias: Option<&'static str>,
    /// What values are allowed.
    pub kind: Kind,
    /// The default, as it would be written in an environment variable. Empty means unset.
    pub default: &'static str,
    /// What the setting does, in one line, without a full stop.
    pub help: &'static str,
}

impl Setting {
    /// The table of the configuration file that holds the setting.
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(section, _)| section)
    }

    /// The key within its [section](Setting::section).
    pub fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    /// The setting with this dotted key.
    pub fn find(key: &str) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.key == key)
    }

    const fn with_alias(mut self, alias: &'static str) -> Setting {
        self.alias = Some(alias);
        self
    }
}

/// Spells a dotted key as a flag (`nats-url`) or, with a prefix, as a variable (`KVATLAS_NATS_URL`).
const fn respell<const LENGTH: usize>(prefix: &str, key: &str, separator: u8) -> [u8; LENGTH] {
    let (prefix, key) = (prefix.as_bytes(), key.as_bytes());
    let mut spelled = [0; LENGTH];
    let mut at = 0;
    while at < LENGTH {
        let byte = if at < prefix.len() {
            prefix[at]
        } else {
            key[at - prefix.len()]
        };
        spelled[at] = match byte {
            b'.' | b'_' => separator,
            letter if separator == b'_' => letter.to_ascii_uppercase(),
            letter => letter,
        };
        at += 1;
    }
    spelled
}

/// The text of bytes that [`respell`] made; fails the build, never the daemon.
const fn text(bytes: &'static [u8]) -> &'static str {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(_) => "",
    };
    assert!(!text.is_empty(), "a key must be ASCII");
    text
}

macro_rules! setting {
    ($key:literal, $kind:expr, $default:literal, $help:literal $(,)?) => {{
        const FLAG: [u8; $key.len()] = respell("", $key, b'-');
        const VARIABLE: [u8; ENVIRONMENT_PREFIX.len() + $key.len()] = respell(ENVIRONMENT_PREFIX, $key, b'_');
        Setting {
            key: $key,
            flag: text(&FLAG),
            variable: text(&VARIABLE),
            alias: None,
            kind: $kind,
            default: $default,
            help: $help,
        }
    }};
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// An integer within bounds, both included.
const fn integer(minimum: u64, maximum: u64) -> Kind {
    Kind::Integer { minimum, maximum }
}

/// A size in bytes within bounds, both included.
const fn bytes(minimum: u64, maximum: u64) -> Kind {
    Kind::Bytes { minimum, maximum }
}

/// Every setting; those of one section are neighbours.
pub const SETTINGS: &[Setting] = &[
    setting!(
        "nats.url",
        Kind::ServerUrls,
        "nats://127.0.0.1:4222",
        "NATS servers to connect to, joined by commas",
    ),
    setting!(
        "nats.credentials_file",
        Kind::OptionalFile,
        "",
        "NATS credentials file (JWT and seed) to authenticate with",
    ),
    setting!(
        "nats.token",
        Kind::Secret,
        "",
        "Token to authenticate to NATS with"
    ),
    setting!(
        "nats.user",
        Kind::OptionalText,
        "",
        "User to authenticate to NATS as; needs a password too",
    ),
    setting!("nats.password", Kind::Secret, "", "Password of the NATS user"),
    setting!(
        "nats.tls_required",
        Kind::Boolean,
        "false",
        "Refuse a connection to NATS without TLS"
    ),
    setting!(
        "nats.tls_ca_file",
        Kind::OptionalFile,
        "",
        "PEM file of certificate authorities to trust for NATS, beside the system's",
    ),
    setting!(
        "nats.connection_name",
        Kind::Name,
        "kvatlas",
        "Name of the connections in NATS's own monitoring"
    ),
    setting!(
        "nats.embedded",
        Kind::Boolean,
        "false",
        "Start a NATS server of our own on a free local port, for development",
    )
    .with_alias("embedded"),
    setting!(
        "nats.server_binary",
        Kind::OptionalFile,
        "",
        "The nats-server binary of the embedded server; unset, NATS_SERVER_BIN, PATH and what deploy/setup.sh has fetched (.tools/) are searched",
    ),
    setting!(
        "subjects.prefix",
        Kind::SubjectPrefix,
        "kvatlas",
        "What every NATS subject of kvatlas begins with",
    ),
    setting!(
        "events.lanes",
        integer(0, 256),
        "0",
        "Threads that apply events; 0 is half the cores, at least 1",
    ),
    setting!(
        "events.lane_queue_bytes",
        bytes(64 * KIB, 4 * GIB),
        "64 MiB",
        "Events waiting for one lane, at most; the subscription waits while it is full",
    ),
    setting!(
        "events.subscription_capacity",
        integer(16, 16_777_216),
        "65536",
        "Messages waiting in the NATS client's subscription to the events, at most",
    ),
    setting!(
        "events.max_message_bytes",
        bytes(KIB, 64 * MIB),
        "1 MiB",
        "Size of one event message, at most"
    ),
    setting!(
        "events.max_blocks_per_event",
        integer(1, 16_777_216),
        "65536",
        "Blocks in one event, at most"
    ),
    setting!(
        "events.max_events_per_batch",
        integer(1, 1_048_576),
        "4096",
        "Events in one batch, at most"
    ),
    setting!(
        "events.parked_events_max",
        integer(0, 65_536),
        "64",
        "Events of one holder that wait for the block before theirs, at most; 0 parks none",
    ),
    setting!(
        "events.parked_blocks_max",
        integer(0, 16_777_216),
        "65536",
        "Blocks in the parked events of one holder, at most",
    ),
    setting!(
        "events.parked_ttl_ms",
        integer(1, 3_600_000),
        "30000",
        "How long an event stays parked, in milliseconds, at most",
    ),
    setting!(
        "events.transport",
        Kind::Choice(&["core", "jetstream"]),
        "core",
        "How events travel: as messages of core NATS, or through a JetStream stream that keeps them",
    ),
    setting!(
        "events.stream",
        Kind::Name,
        "KVATLAS_EVENTS",
        "Name of the JetStream stream of the events"
    ),
    setting!(
        "events.stream_create",
        Kind::Boolean,
        "true",
        "Create the stream where it is missing; the limits below are for this case",
    ),
    setting!(
        "events.stream_max_age_seconds",
        integer(0, 31_536_000),
        "86400",
        "How long the stream keeps an event, in seconds, at most; 0 is no limit",
    ),
    setting!(
        "events.stream_max_bytes",
        bytes(0, 1024 * TIB),
        "4 GiB",
        "Bytes that the stream keeps, at most; 0 is no limit",
    ),
    setting!(
        "events.stream_max_messages",
        integer(0, 1_000_000_000_000),
        "0",
        "Messages that the stream keeps, at most; 0 is no limit",
    ),
    setting!(
        "events.stream_replicas",
        integer(1, 5),
        "1",
        "NATS servers that keep the stream"
    ),
    setting!(
        "resync.concurrency",
        integer(0, 1024),
        "16",
        "Publishers asked at once for what is missing, at most; 0 asks none",
    ),
    setting!(
        "resync.timeout_ms",
        integer(10, 600_000),
        "5000",
        "How long a publisher's answer may take, in milliseconds",
    ),
    setting!(
        "resync.max_answer_bytes",
        bytes(64 * KIB, 4 * GIB),
        "64 MiB",
        "Size of one publisher's whole answer, at most",
    ),
    setting!(
        "resync.max_held_bytes",
        bytes(KIB, GIB),
        "1 MiB",
        "Batches of one holder kept back while its publisher is asked, at most",
    ),
    setting!(
        "resync.retry_min_ms",
        integer(1, 3_600_000),
        "200",
        "Pause after the first failed resync of a holder, in milliseconds; it doubles with every further one",
    ),
    setting!(
        "resync.retry_max_ms",
        integer(1, 3_600_000),
        "30000",
        "The longest pause between two resyncs of a holder, in milliseconds",
    ),
    setting!(
        "queries.max_message_bytes",
        bytes(KIB, 64 * MIB),
        "1 MiB",
        "Size of one query message, at most"
    ),
    setting!(
        "queries.max_depth_blocks",
        integer(1, 16_777_216),
        "65536",
        "Blocks of one prompt that a query may name, at most",
    ),
    setting!(
        "queries.max_batch",
        integer(1, 65_536),
        "256",
        "Prompts in one query message, at most"
    ),
    setting!(
        "queries.queue_group",
        Kind::Name,
        "kvatlas",
        "NATS queue group that shares the queries out"
    ),
    setting!(
        "queries.connections",
        integer(1, 16),
        "1",
        "NATS connections that serve queries"
    ),
    setting!(
        "sharding.shard",
        Kind::OptionalShard,
        "",
        "Take only the workers of this shard, and answer for these; unset, all workers",
    )
    .with_alias("shard"),
    setting!(
        "gateway.enabled",
        Kind::Boolean,
        "false",
        "Follow no events: answer queries by gathering the shards' replies",
    )
    .with_alias("gateway"),
    setting!(
        "gateway.deadline_ms",
        integer(1, 60_000),
        "250",
        "How long a gateway waits for the shards, in milliseconds; then it answers without those missing",
    ),
    setting!(
        "gateway.max_gathers",
        integer(1, 1_048_576),
        "1024",
        "Requests that a gateway gathers at the same time, at most; more are refused",
    ),
    setting!(
        "ready.settle_ms",
        integer(0, 3_600_000),
        "30000",
        "How long a starting daemon tries to know as much as a replica that serves before it takes queries, in milliseconds, at most",
    ),
    setting!(
        "limits.max_namespaces",
        integer(1, 65_536),
        "64",
        "Namespaces, at most"
    ),
    setting!(
        "limits.max_workers_per_namespace",
        integer(1, 65_535),
        "4096",
        "Workers in one namespace, at most",
    ),
    setting!(
        "limits.max_ranks_per_worker",
        integer(1, 4096),
        "64",
        "Data-parallel ranks of one worker, at most",
    ),
    setting!(
        "limits.max_blocks_per_holder",
        integer(1, 4_294_967_295),
        "16777216",
        "Blocks that one holder may have, at most",
    ),
    setting!(
        "limits.max_blocks_per_namespace",
        integer(0, 1_000_000_000_000),
        "0",
        "Distinct blocks that the index of one namespace keeps; beyond it forgets leaves, least recently used first. 0 is no limit",
    ),
    setting!(
        "limits.max_bytes_per_namespace",
        bytes(0, 1024 * TIB),
        "0",
        "Memory for the distinct blocks of one namespace, in the same way; 0 is no limit",
    ),
    setting!(
        "limits.max_blocks_total",
        integer(0, 1_000_000_000_000),
        "0",
        "Distinct blocks of all namespaces together; beyond it the largest forgets. 0 is no limit",
    ),
    setting!(
        "limits.max_bytes_total",
        bytes(0, 1024 * TIB),
        "0",
        "Memory for the distinct blocks of all namespaces together, in the same way; 0 is no limit",
    ),
    setting!(
        "limits.max_name_bytes",
        integer(1, 64),
        "64",
        "Length of a namespace's or worker's name, at most"
    ),
    setting!(
        "namespace_defaults.block_size",
        integer(1, 65_536),
        "16",
        "Tokens in a block, for namespaces that do not say",
    ),
    setting!(
        "namespace_defaults.hashing",
        Kind::Choice(&["engine", "recompute"]),
        "engine",
        "Trust the hashes that engines send, or recompute them, for namespaces that do not say",
    ),
    setting!(
        "namespace_defaults.index",
        Kind::Choice(&["lineage", "radix"]),
        "lineage",
        "How the index is built, for namespaces that do not say: addressed by lineage hashes, or as a radix tree",
    ),
    setting!(
        "namespace_defaults.stale_after_ms",
        integer(0, 86_400_000),
        "30000",
        "Silence after which a holder is stale, in milliseconds; 0 is never",
    ),
    setting!(
        "namespace_defaults.remove_after_ms",
        integer(0, 86_400_000),
        "600000",
        "Silence after which a holder is removed, in milliseconds; 0 is never",
    ),
    setting!(
        "snapshots.directory",
        Kind::OptionalPath,
        "",
        "Directory of the snapshots that make a restart warm; unset, there are none",
    ),
    setting!(
        "snapshots.interval_seconds",
        integer(1, 86_400),
        "60",
        "Time between snapshots, in seconds"
    ),
    setting!("snapshots.keep", integer(1, 1000), "3", "Snapshots to keep"),
    setting!(
        "snapshots.format",
        Kind::Choice(&["forest", "events"]),
        "forest",
        "Write each distinct block once, or the events that rebuild each holder, which older builds read",
    ),
    setting!(
        "snapshots.object_store",
        Kind::OptionalName,
        "",
        "NATS Object Store bucket to send snapshots to and to start from; made if missing; unset, there is none",
    ),
    setting!(
        "snapshots.object_store_interval_seconds",
        integer(1, 86_400),
        "300",
        "Time between snapshots that are sent, in seconds, at least",
    ),
    setting!(
        "snapshots.object_store_max_bytes",
        bytes(MIB, TIB),
        "8 GiB",
        "Size of one snapshot to send or fetch, at most"
    ),
    setting!(
        "snapshots.object_store_patience_seconds",
        integer(1, 3600),
        "60",
        "How long a start waits for a snapshot from the Object Store, in seconds, at most",
    ),
    setting!(
        "snapshots.object_store_replicas",
        integer(1, 5),
        "1",
        "NATS servers that keep the bucket, where the daemon makes it",
    ),
    setting!(
        "admin.listen",
        Kind::ListenAddress,
        "127.0.0.1:9464",
        "Address of the HTTP listener for metrics and probes; port 0 takes a free one, off disables it",
    ),
    setting!(
        "logging.format",
        Kind::Choice(&["text", "json"]),
        "text",
        "Format of the log lines"
    ),
    setting!(
        "logging.level",
        Kind::LogFilter,
        "info,async_nats=warn",
        "Which log lines to write"
    ),
    setting!(
        "shutdown.drain_seconds",
        integer(1, 600),
        "10",
        "How long a shutdown waits for work to finish, in seconds, at most",
    ),
];

/// The sections in the order of the table, each once.
pub fn sections() -> Vec<&'static str> {
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
        let variables: BTreeSet<_> = SETTINGS.iter().map(|setting| setting.variable).collect();
        let flags: Vec<_> = SETTINGS
            .iter()
            .flat_map(|setting| std::iter::once(setting.flag).chain(setting.alias))
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
        assert!(!sections.contains(&super::super::file::NAMESPACES));
    }

    #[test]
    fn help_is_one_line_without_a_full_stop() {
        for setting in SETTINGS {
            assert!(
                !setting.help.is_empty() && !setting.help.contains('\n'),
                "{}",
                setting.key
            );
            assert!(!setting.help.ends_with('.'), "{}", setting.key);
        }
    }
}
