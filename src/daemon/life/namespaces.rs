//! Creation of the namespaces that the configuration names.

use kvatlas_config::{Config, NamespaceConfig};
use kvatlas_core::hash::{BlockSize, BlockSizeError};
use kvatlas_core::index::{Capacity, IndexLimits, NamespaceSettings, Namespaces, ParkingLimits};
use kvatlas_core::wire::{NameError, NamespaceName};

/// Reason why a namespace of the configuration cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// Name of the namespace is not valid.
    #[error("namespaces.{name}: {source}")]
    Name {
        /// Name that is not valid.
        name: String,
        /// Reason why the name is not valid.
        source: NameError,
    },
    /// Block size of the namespace is not valid.
    #[error("block_size: {0}")]
    BlockSize(#[from] BlockSizeError),
}

fn namespace_settings(config: NamespaceConfig) -> Result<NamespaceSettings, NamespaceError> {
    Ok(NamespaceSettings {
        block_size: BlockSize::new(config.block_size)?,
        hashing: config.hashing,
        ..NamespaceSettings::default()
    })
}

/// Makes the namespaces of a daemon. The namespaces that the configuration names exist from the start.
///
/// # Errors
///
/// [`NamespaceError`] if a configured namespace cannot be made.
pub fn namespaces(config: &Config) -> Result<Namespaces, NamespaceError> {
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
    let mut namespaces = Namespaces::new(
        capacity(limits.max_blocks_total, limits.max_bytes_total),
        defaults,
        configured,
        index_limits(config),
        limits.max_namespaces,
    );
    namespaces.is_open = !limits.named_namespaces_only;
    // Shards do not take block sizes from batches: each sees its own workers only, and two shards could take different sizes. A gateway
    // does not know the shards' sizes.
    namespaces.takes_sizes = config.sharding.shard.is_none() && !config.gateway.enabled;
    Ok(namespaces)
}

/// Returns the bounds on the size of an index. 0 in the configuration means no bound.
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
            bytes_max: config.events.parked_bytes_max as u64,
            blocks_max: config.events.parked_blocks_max,
            wait_us_max: u64::try_from(config.events.parked_ttl.as_micros()).unwrap_or(u64::MAX),
        },
    }
}
