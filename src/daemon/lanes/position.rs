//! Position in the events stream up to which messages have been handed to the lanes.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use kvatlas_config::{Config, NamespaceConfig};
use kvatlas_core::snapshot::StreamCursor;

/// Position in the events stream: the last message that has been handed to the lanes. Not set without JetStream.
///
/// A snapshot reads the position and then dumps the holders. A dump waits in a lane's queue behind earlier messages,
/// so every message up to the position is part of the snapshot.
///
/// The daemon drops messages that its settings exclude, for example those of other shards. So a position is of use
/// only to a daemon with the same settings.
#[derive(Debug, Default)]
pub struct StreamPosition {
    cursor: Mutex<Option<StreamCursor>>,
    /// Digest of the settings that decide which workers' messages are taken.
    intake: u64,
}

impl StreamPosition {
    /// Returns a position that is not set yet. Notes which messages the daemon takes under `config`.
    pub(crate) fn under(config: &Config) -> Self {
        let (limits, namespaces) = (&config.limits, &config.namespaces);
        let blocks = |namespace: &NamespaceConfig| (namespace.block_size, namespace.hashing);
        let named: BTreeMap<&String, _> = namespaces
            .overrides
            .iter()
            .map(|(name, namespace)| (name, blocks(namespace)))
            .collect();
        let deciding = (
            config.sharding.shard,
            (
                limits.max_namespaces,
                limits.named_namespaces_only,
                limits.max_name_bytes,
            ),
            (limits.max_workers_per_namespace, limits.max_ranks_per_worker),
            (blocks(&namespaces.default), named),
        );
        Self {
            cursor: Mutex::default(),
            intake: xxh3_64(format!("{deciding:?}").as_bytes()),
        }
    }

    /// Returns the last message of the stream that has been handed to the lanes. `None` if there is none.
    pub fn get(&self) -> Option<StreamCursor> {
        self.cursor.lock().clone()
    }

    /// Sets the position after which messages are read from the stream.
    pub fn set(&self, cursor: StreamCursor) {
        *self.cursor.lock() = Some(cursor);
    }

    /// Returns the digest of the settings that decide which workers' messages are taken.
    pub(crate) fn intake(&self) -> u64 {
        self.intake
    }

    /// Whether the daemon knows every publisher that has sent messages up to the position.
    pub(crate) fn has_all(&self) -> bool {
        self.cursor.lock().as_ref().is_some_and(|cursor| cursor.has_all)
    }

    /// Notes whether the daemon knows every publisher that has sent messages up to the position.
    pub(crate) fn note_all(&self, has_all: bool) {
        if let Some(cursor) = self.cursor.lock().as_mut() {
            cursor.has_all = has_all;
        }
    }

    /// Whether the stream has been read up to its end through the servers with the digest `servers`, and not through
    /// others since.
    pub(crate) fn is_through(&self, servers: u64) -> bool {
        let cursor = self.cursor.lock();
        cursor.as_ref().and_then(|cursor| cursor.server) == Some(servers)
    }

    /// Notes that the stream has been read up to its end through the servers with the digest `servers`. `None` if the
    /// stream's server may have been away since.
    pub(crate) fn note_servers(&self, servers: Option<u64>) {
        if let Some(cursor) = self.cursor.lock().as_mut() {
            cursor.server = servers;
        }
    }

    /// Moves the position to message `sequence` of the stream. `digest` is the digest of that message, or `None` if the
    /// message was not read.
    pub(crate) fn advance(&self, sequence: u64, digest: Option<u64>) {
        if let Some(cursor) = self.cursor.lock().as_mut() {
            (cursor.sequence, cursor.digest) = (sequence, digest);
        }
    }

    /// Returns the sequence number of the last message of the stream that has been handed to the lanes; 0 if there is
    /// none.
    pub(crate) fn sequence(&self) -> u64 {
        self.cursor.lock().as_ref().map_or(0, |cursor| cursor.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_that_has_messages_dropped_is_part_of_the_intake() {
        let intake = |key: &str, value: &str| {
            let flags = BTreeMap::from([(key.to_owned(), value.to_owned())]);
            StreamPosition::under(&Config::load(flags, std::iter::empty(), None).unwrap()).intake()
        };
        let before = intake("events.lanes", "2");
        for (key, value) in [
            ("sharding.shard", "0/2"),
            ("limits.max_namespaces", "3"),
            ("limits.named_namespaces_only", "true"),
            ("limits.max_name_bytes", "32"),
            ("limits.max_workers_per_namespace", "3"),
            ("limits.max_ranks_per_worker", "3"),
            ("namespace_defaults.block_size", "64"),
        ] {
            assert_ne!(intake(key, value), before, "{key}");
        }
        assert_eq!(intake("events.lanes", "3"), before);
    }
}
