//! From the configuration to the settings of each part.

use crate::config::{self, Config, NamespaceConfig};
use crate::hash::{BlockSize, BlockSizeError};
use crate::index::{Capacity, Hashing, IndexKind, IndexLimits, NamespaceSettings, Namespaces, ParkingLimits};
use crate::ingest::{
    AnswerLimits, HoldingSettings, IngestSettings, LivenessSettings, ResyncSettings, RetryPace,
};
use crate::tracking::LivenessLimits;
use crate::wire::{NameError, NamespaceName, WireLimits};

/// A namespace of the configuration that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// Its name is not one.
    #[error("namespaces.{name}: {source}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        source: NameError,
    },
    /// Its block size is not one.
    #[error("block_size: {0}")]
    BlockSize(#[from] BlockSizeError),
}

fn namespace_settings(config: NamespaceConfig) -> Result<NamespaceSettings, NamespaceError> {
    let hashing = match config.hashing {
        config::Hashing::Engine => Hashing::Engine,
        config::Hashing::Recompute => Hashing::Recompute,
    };
    let index = match config.index {
        config::IndexKind::Lineage => IndexKind::Lineage,
        config::IndexKind::Radix => IndexKind::Radix,
    };
    Ok(NamespaceSettings {
        block_size: BlockSize::new(config.block_size)?,
        hashing,
        index,
    })
}

/// The namespaces, with those that the configuration names already there.
pub(super) fn namespaces(config: &Config) -> Result<Namespaces, NamespaceError> {
    let defaults = namespace_settings(config.namespaces.default)?;
    let mut configured = Vec::new();
    for (name, namespace) in &config.namespaces.overrides {
        let bad_name = |source| NamespaceError::Name {
            name: name.clone(),
            source,
        };
        configured.push((
            NamespaceName::new(name).map_err(bad_name)?,
            namespace_settings(*namespace)?,
        ));
    }
    let limits = &config.limits;
    Ok(Namespaces::within(
        capacity(limits.max_blocks_total, limits.max_bytes_total),
        defaults,
        configured,
        index_limits(config),
        limits.max_namespaces,
    ))
}

/// Bounds of which 0 is none.
fn capacity(blocks_max: u64, bytes_max: u64) -> Capacity {
    let bound = |limit| if limit == 0 { u64::MAX } else { limit };
    Capacity {
        blocks_max: bound(blocks_max),
        bytes_max: bound(bytes_max),
    }
}

fn index_limits(config: &Config) -> IndexLimits {
    IndexLimits {
        workers_max: config.limits.max_workers_per_namespace,
        ranks_per_worker_max: config.limits.max_ranks_per_worker,
        blocks_per_holder_max: config.limits.max_blocks_per_holder,
        capacity: capacity(
            config.limits.max_blocks_per_namespace,
            config.limits.max_bytes_per_namespace,
        ),
        parking: ParkingLimits {
            events_max: config.events.parked_events_max,
            blocks_max: config.events.parked_blocks_max,
            wait_us_max: u64::try_from(config.events.parked_ttl.as_micros()).unwrap_or(u64::MAX),
        },
    }
}

/// Bounds on messages on events subjects.
fn event_limits(config: &Config) -> WireLimits {
    WireLimits {
        message_bytes_max: config.events.max_message_bytes,
        events_max: config.events.max_events_per_batch,
        blocks_per_event_max: config.events.max_blocks_per_event,
        name_bytes_max: config.limits.max_name_bytes,
        ..WireLimits::default()
    }
}

/// Bounds on messages on query subjects.
pub(super) fn query_limits(config: &Config) -> WireLimits {
    WireLimits {
        message_bytes_max: config.queries.max_message_bytes,
        query_depth_max: config.queries.max_depth_blocks,
        queries_max: config.queries.max_batch,
        filter_workers_max: config.limits.max_workers_per_namespace,
        name_bytes_max: config.limits.max_name_bytes,
        ..WireLimits::default()
    }
}

/// How events are taken in.
pub(super) fn ingest_settings(config: &Config) -> IngestSettings {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    IngestSettings {
        lanes: config.events.lane_count(cores),
        lane_queue_bytes: config.events.lane_queue_bytes,
        limits: event_limits(config),
        shard: config.sharding.shard,
        holding: (config.resync.concurrency > 0).then(|| HoldingSettings {
            bytes_per_holder_max: config.resync.max_held_bytes,
            // Whoever asks gives up before: this is for what waits for its turn.
            wait_max: config.resync.timeout * 2,
        }),
        liveness: liveness(config),
    }
}

/// How long holders may be silent.
fn liveness(config: &Config) -> LivenessSettings {
    let limits = |namespace: &NamespaceConfig| LivenessLimits {
        stale_after: namespace.stale_after,
        remove_after: namespace.remove_after,
    };
    let overrides = config.namespaces.overrides.iter();
    LivenessSettings {
        default: limits(&config.namespaces.default),
        overrides: overrides
            // Names that are none have been refused when the namespaces were made.
            .filter_map(|(name, namespace)| Some((NamespaceName::new(name).ok()?, limits(namespace))))
            .collect(),
    }
}

/// How publishers are asked for what is missing.
pub(super) fn resync_settings(config: &Config) -> ResyncSettings {
    /// No publisher needs so many: most chunks are far larger than this makes them.
    const BYTES_PER_CHUNK_MIN: usize = 1024;
    let limits = event_limits(config);
    let chunks_max = (config.resync.max_answer_bytes / BYTES_PER_CHUNK_MIN).max(64);
    ResyncSettings {
        concurrency: config.resync.concurrency,
        timeout: config.resync.timeout,
        answer: AnswerLimits {
            bytes_max: config.resync.max_answer_bytes,
            chunks_max: u32::try_from(chunks_max).unwrap_or(u32::MAX),
        },
        wire: limits,
        pace: RetryPace {
            pause_min: config.resync.retry_min,
            pause_max: config.resync.retry_max,
        },
    }
}
