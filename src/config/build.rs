//! Turns checked values into the typed configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::snapshot::SnapshotFormat;

use super::error::ConfigError;
use super::kind::{Secret, Value, parse_server};
use super::layers::{Effective, Entry};
use super::types::{
    AdminConfig, Authentication, EventsConfig, GatewayConfig, Hashing, IndexKind, LimitsConfig, LogFormat,
    LoggingConfig, NamespaceConfig, NamespacesConfig, NatsConfig, ObjectStoreConfig, QueriesConfig,
    ReadyConfig, ResyncConfig, ShardingConfig, ShutdownConfig, SnapshotsConfig, StreamConfig, SubjectsConfig,
    Transport,
};

const BLOCK_SIZE: &str = "namespace_defaults.block_size";
const HASHING: &str = "namespace_defaults.hashing";
pub(super) const INDEX: &str = "namespace_defaults.index";
/// The word for a radix tree.
pub(super) const RADIX: &str = "radix";
pub(super) const STALE_AFTER: &str = "namespace_defaults.stale_after_ms";
pub(super) const REMOVE_AFTER: &str = "namespace_defaults.remove_after_ms";

/// Reads values by key and type. A key or type that the table of settings has not is noted in `errors`.
pub(super) struct Builder<'a> {
    effective: &'a Effective,
    pub(super) errors: Vec<ConfigError>,
    #[cfg(test)]
    pub(super) keys_read: std::collections::BTreeSet<&'static str>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(effective: &'a Effective) -> Builder<'a> {
        Builder {
            effective,
            errors: Vec::new(),
            #[cfg(test)]
            keys_read: std::collections::BTreeSet::new(),
        }
    }

    pub(super) fn nats(&mut self) -> NatsConfig {
        NatsConfig {
            urls: self.read("nats.url", |value| {
                text(value)?.split(',').map(parse_server).collect()
            }),
            authentication: self.authentication(),
            tls_required: self.boolean("nats.tls_required"),
            tls_ca_file: self.path("nats.tls_ca_file"),
            connection_name: self.text("nats.connection_name"),
            embedded: self.boolean("nats.embedded"),
            server_binary: self.path("nats.server_binary"),
        }
    }

    fn authentication(&mut self) -> Authentication {
        let credentials_file = self.path("nats.credentials_file");
        let token = self.secret("nats.token");
        let (user, password) = (self.text("nats.user"), self.secret("nats.password"));
        match (credentials_file, token, password) {
            (Some(path), _, _) => Authentication::CredentialsFile(path),
            (_, Some(token), _) => Authentication::Token(token),
            (_, _, Some(password)) => Authentication::UserPassword { user, password },
            (None, None, None) => Authentication::Anonymous,
        }
    }

    pub(super) fn subjects(&mut self) -> SubjectsConfig {
        SubjectsConfig {
            prefix: self.text("subjects.prefix"),
        }
    }

    pub(super) fn events(&mut self) -> EventsConfig {
        EventsConfig {
            lanes: self.integer("events.lanes"),
            lane_queue_bytes: self.integer("events.lane_queue_bytes"),
            subscription_capacity: self.integer("events.subscription_capacity"),
            max_message_bytes: self.integer("events.max_message_bytes"),
            max_blocks_per_event: self.integer("events.max_blocks_per_event"),
            max_events_per_batch: self.integer("events.max_events_per_batch"),
            parked_events_max: self.integer("events.parked_events_max"),
            parked_blocks_max: self.integer("events.parked_blocks_max"),
            parked_ttl: Duration::from_millis(self.integer("events.parked_ttl_ms")),
            transport: self.transport(),
            stream: StreamConfig {
                name: self.text("events.stream"),
                create: self.boolean("events.stream_create"),
                age_max: Duration::from_secs(self.integer("events.stream_max_age_seconds")),
                bytes_max: self.integer("events.stream_max_bytes"),
                messages_max: self.integer("events.stream_max_messages"),
                replicas: self.integer("events.stream_replicas"),
            },
        }
    }

    pub(super) fn resync(&mut self) -> ResyncConfig {
        ResyncConfig {
            concurrency: self.integer("resync.concurrency"),
            timeout: Duration::from_millis(self.integer("resync.timeout_ms")),
            max_answer_bytes: self.integer("resync.max_answer_bytes"),
            max_held_bytes: self.integer("resync.max_held_bytes"),
            retry_min: Duration::from_millis(self.integer("resync.retry_min_ms")),
            retry_max: Duration::from_millis(self.integer("resync.retry_max_ms")),
        }
    }

    fn transport(&mut self) -> Transport {
        let transport = self.read("events.transport", |value| match text(value)? {
            "core" => Some(Some(Transport::Core)),
            "jetstream" => Some(Some(Transport::JetStream)),
            _ => None,
        });
        transport.unwrap_or(Transport::Core)
    }

    pub(super) fn queries(&mut self) -> QueriesConfig {
        QueriesConfig {
            max_message_bytes: self.integer("queries.max_message_bytes"),
            max_depth_blocks: self.integer("queries.max_depth_blocks"),
            max_batch: self.integer("queries.max_batch"),
            queue_group: self.text("queries.queue_group"),
            connections: self.integer("queries.connections"),
        }
    }

    pub(super) fn sharding(&mut self) -> ShardingConfig {
        let shard = self.read("sharding.shard", |value| match text(value)? {
            "" => Some(None),
            shard => shard.parse().ok().map(Some),
        });
        ShardingConfig { shard }
    }

    pub(super) fn gateway(&mut self) -> GatewayConfig {
        GatewayConfig {
            enabled: self.boolean("gateway.enabled"),
            deadline: Duration::from_millis(self.integer("gateway.deadline_ms")),
            max_gathers: self.integer("gateway.max_gathers"),
        }
    }

    pub(super) fn ready(&mut self) -> ReadyConfig {
        ReadyConfig {
            settle: Duration::from_millis(self.integer("ready.settle_ms")),
        }
    }

    pub(super) fn limits(&mut self) -> LimitsConfig {
        LimitsConfig {
            max_namespaces: self.integer("limits.max_namespaces"),
            max_workers_per_namespace: self.integer("limits.max_workers_per_namespace"),
            max_ranks_per_worker: self.integer("limits.max_ranks_per_worker"),
            max_blocks_per_holder: self.integer("limits.max_blocks_per_holder"),
            max_blocks_per_namespace: self.integer("limits.max_blocks_per_namespace"),
            max_bytes_per_namespace: self.integer("limits.max_bytes_per_namespace"),
            max_blocks_total: self.integer("limits.max_blocks_total"),
            max_bytes_total: self.integer("limits.max_bytes_total"),
            max_name_bytes: self.integer("limits.max_name_bytes"),
        }
    }

    pub(super) fn namespaces(&mut self) -> NamespacesConfig {
        let default = self.namespace(&BTreeMap::new());
        let effective = self.effective;
        let overrides = effective
            .namespaces
            .iter()
            .map(|(name, table)| (name.clone(), self.namespace(&table.entries)))
            .collect();
        NamespacesConfig { default, overrides }
    }

    fn namespace(&mut self, entries: &BTreeMap<&'static str, Entry>) -> NamespaceConfig {
        let block_size = self.read_over(entries, BLOCK_SIZE, |value| u32::try_from(integer(value)?).ok());
        let hashing = self.read_over(entries, HASHING, |value| match text(value)? {
            "engine" => Some(Some(Hashing::Engine)),
            "recompute" => Some(Some(Hashing::Recompute)),
            _ => None,
        });
        let index = self.read_over(entries, INDEX, |value| match text(value)? {
            "lineage" => Some(Some(IndexKind::Lineage)),
            RADIX => Some(Some(IndexKind::Radix)),
            _ => None,
        });
        NamespaceConfig {
            block_size,
            hashing: hashing.unwrap_or(Hashing::Engine),
            index: index.unwrap_or(IndexKind::Lineage),
            stale_after: self.silence(entries, STALE_AFTER),
            remove_after: self.silence(entries, REMOVE_AFTER),
        }
    }

    /// A time in milliseconds, of which 0 is never.
    fn silence(&mut self, entries: &BTreeMap<&'static str, Entry>, key: &'static str) -> Option<Duration> {
        let limit_ms = self.read_over(entries, key, integer);
        (limit_ms > 0).then(|| Duration::from_millis(limit_ms))
    }

    pub(super) fn snapshots(&mut self) -> SnapshotsConfig {
        SnapshotsConfig {
            directory: self.path("snapshots.directory"),
            interval: Duration::from_secs(self.integer("snapshots.interval_seconds")),
            keep: self.integer("snapshots.keep"),
            format: self.snapshot_format(),
            object_store: self.object_store(),
        }
    }

    fn snapshot_format(&mut self) -> SnapshotFormat {
        let format = self.read("snapshots.format", |value| match text(value)? {
            "forest" => Some(Some(SnapshotFormat::Forest)),
            "events" => Some(Some(SnapshotFormat::Events)),
            _ => None,
        });
        format.unwrap_or_default()
    }

    fn object_store(&mut self) -> Option<ObjectStoreConfig> {
        let bucket = self.text("snapshots.object_store");
        let config = ObjectStoreConfig {
            bucket,
            interval: Duration::from_secs(self.integer("snapshots.object_store_interval_seconds")),
            snapshot_bytes_max: self.integer("snapshots.object_store_max_bytes"),
            patience: Duration::from_secs(self.integer("snapshots.object_store_patience_seconds")),
            replicas: self.integer("snapshots.object_store_replicas"),
        };
        (!config.bucket.is_empty()).then_some(config)
    }

    pub(super) fn admin(&mut self) -> AdminConfig {
        let listen = self.read("admin.listen", |value| match text(value)? {
            "off" => Some(None),
            address => address.parse().ok().map(Some),
        });
        AdminConfig { listen }
    }

    pub(super) fn logging(&mut self) -> LoggingConfig {
        let format = self.read("logging.format", |value| match text(value)? {
            "text" => Some(Some(LogFormat::Text)),
            "json" => Some(Some(LogFormat::Json)),
            _ => None,
        });
        LoggingConfig {
            format: format.unwrap_or(LogFormat::Text),
            level: self.text("logging.level"),
        }
    }

    pub(super) fn shutdown(&mut self) -> ShutdownConfig {
        ShutdownConfig {
            drain: Duration::from_secs(self.integer("shutdown.drain_seconds")),
        }
    }

    fn boolean(&mut self, key: &'static str) -> bool {
        self.read(key, |value| match value {
            Value::Boolean(value) => Some(*value),
            _ => None,
        })
    }

    fn integer<T: TryFrom<u64> + Default>(&mut self, key: &'static str) -> T {
        self.read(key, |value| T::try_from(integer(value)?).ok())
    }

    fn text(&mut self, key: &'static str) -> String {
        self.read(key, |value| text(value).map(str::to_owned))
    }

    fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        self.read(key, |value| {
            let text = text(value)?;
            Some((!text.is_empty()).then(|| PathBuf::from(text)))
        })
    }

    fn secret(&mut self, key: &'static str) -> Option<Secret> {
        self.read(key, |value| match value {
            Value::Secret(secret) => Some((!secret.expose().is_empty()).then(|| secret.clone())),
            _ => None,
        })
    }

    fn read<T: Default>(&mut self, key: &'static str, convert: impl FnOnce(&Value) -> Option<T>) -> T {
        self.read_over(&BTreeMap::new(), key, convert)
    }

    /// Reads the value that `entries` has for the key, or the one in force.
    fn read_over<T: Default>(
        &mut self,
        entries: &BTreeMap<&'static str, Entry>,
        key: &'static str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> T {
        #[cfg(test)]
        self.keys_read.insert(key);
        let entry = entries.get(key).or_else(|| self.effective.entry(key));
        entry.and_then(|entry| convert(&entry.value)).unwrap_or_else(|| {
            self.errors.push(ConfigError::Table { key });
            T::default()
        })
    }
}

fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::Integer(number) => Some(*number),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}
