//! Settings of the lanes.

use std::collections::HashMap;
use std::time::Duration;

use kvatlas_client::unix_time_us;
use kvatlas_config::{Config, NamespaceConfig};
use kvatlas_core::wire::{NamespaceName, PROBE_NAME, Shard, Subjects, WireLimits, WorkerName};

use super::held::HoldingLimits;
use super::liveness::LivenessLimits;

/// Settings of the lanes, and of the pool that gives messages to them.
#[derive(Debug, Clone)]
pub struct LaneSettings {
    /// Subjects on which messages come.
    pub subjects: Subjects,
    /// Number of threads that apply events; at least 1.
    pub lanes: usize,
    /// Maximum size of the messages that wait for one lane, in bytes.
    pub lane_queue_bytes: usize,
    /// Age of the oldest waiting event beyond which holders are degraded. `None` means no limit on the age.
    pub behind_after: Option<Duration>,
    /// Bounds on the size of messages.
    pub limits: WireLimits,
    /// Shard whose workers are taken. `None` means that all workers are taken.
    pub shard: Option<Shard>,
    /// Bounds on the batches that a holder holds during a resync. `None` means that no batches are held.
    pub holding: Option<HoldingSettings>,
    /// Bounds on the silence of holders.
    pub liveness: LivenessSettings,
    /// Maximum time by which an epoch may lie ahead of the clock. `None` means no bound.
    pub epoch_ahead_max: Option<Duration>,
}

/// Bounds on publishers' messages and epochs.
#[derive(Debug, Clone)]
pub(crate) struct LaneLimits {
    /// Bounds on the size of messages.
    pub(crate) wire: WireLimits,
    /// Maximum time by which an epoch may lie ahead of the clock. `None` means no bound.
    pub(crate) epoch_ahead_max: Option<Duration>,
}

impl LaneLimits {
    /// Returns the bounds from a configuration.
    pub(crate) fn of_config(config: &Config) -> Self {
        Self {
            wire: event_limits(config),
            epoch_ahead_max: epoch_ahead_max(config),
        }
    }

    pub(super) fn of(settings: &LaneSettings) -> Self {
        Self {
            wire: settings.limits.clone(),
            epoch_ahead_max: settings.epoch_ahead_max,
        }
    }
}

/// Bounds on held batches, which wait at a holder until missing batches before them have come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldingSettings {
    /// Maximum size of the batches that one holder holds, in bytes. A holder may hold a larger batch if it is the
    /// only one. Each batch counts 256 bytes more than its payload. All holders of a lane together hold at most as
    /// many bytes as the lane's queue may have.
    pub bytes_per_holder_max: usize,
    /// Maximum time for which held batches wait for an answer.
    pub wait_max: Duration,
}

/// Bounds on the silence of the holders of each namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LivenessSettings {
    /// Bounds for namespaces without bounds of their own.
    pub default: LivenessLimits,
    /// Bounds for single namespaces.
    pub overrides: HashMap<NamespaceName, LivenessLimits>,
}

impl LivenessSettings {
    fn of_config(config: &Config) -> Self {
        let limits = |namespace: &NamespaceConfig| LivenessLimits {
            stale_after: namespace.stale_after,
            remove_after: namespace.remove_after,
        };
        let overrides = config.namespaces.overrides.iter();
        Self {
            default: limits(&config.namespaces.default),
            overrides: overrides
                // A name that is not valid was refused when the namespaces were made.
                .filter_map(|(name, namespace)| Some((NamespaceName::new(name).ok()?, limits(namespace))))
                .collect(),
        }
    }

    /// Returns the bounds for a namespace.
    pub fn of(&self, namespace: &NamespaceName) -> &LivenessLimits {
        match namespace.as_str() {
            PROBE_NAME => &LivenessLimits::OF_PROBES,
            _ => self.overrides.get(namespace).unwrap_or(&self.default),
        }
    }

    /// Returns the bounds for a worker of a namespace. The workers of probes have bounds of their own in every
    /// namespace.
    pub(super) fn of_worker(&self, namespace: &NamespaceName, worker: &WorkerName) -> &LivenessLimits {
        match worker.as_str() {
            PROBE_NAME => &LivenessLimits::OF_PROBES,
            _ => self.of(namespace),
        }
    }
}

impl LaneSettings {
    /// Returns the settings that a configuration gives, for messages on `subjects`.
    pub(crate) fn of(config: &Config, subjects: &Subjects) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            subjects: subjects.clone(),
            lanes: config.events.lane_count(cores),
            lane_queue_bytes: config.events.lane_queue_bytes,
            behind_after: config.events.behind_after,
            limits: event_limits(config),
            shard: config.sharding.shard,
            holding: (config.resync.concurrency > 0).then(|| HoldingSettings {
                bytes_per_holder_max: config.resync.max_held_bytes,
                // A running resync gives up earlier. This bounds the wait for a resync that has not begun.
                wait_max: config.resync.timeout * 2,
            }),
            liveness: LivenessSettings::of_config(config),
            epoch_ahead_max: epoch_ahead_max(config),
        }
    }

    /// Returns one lane's bounds on held batches, that is, on batches that wait until earlier missing batches have
    /// come.
    pub(super) fn holding_limits(&self) -> HoldingLimits {
        let Some(holding) = &self.holding else {
            return HoldingLimits::new(false, 0, 0, 0);
        };
        let wait_us_max = u64::try_from(holding.wait_max.as_micros()).unwrap_or(u64::MAX);
        HoldingLimits::new(
            true,
            holding.bytes_per_holder_max,
            self.lane_queue_bytes,
            wait_us_max,
        )
    }
}

/// Returns the maximum time by which an epoch may lie ahead of the clock. `None` means no bound. In the
/// configuration, 0 means no bound.
fn epoch_ahead_max(config: &Config) -> Option<Duration> {
    let ahead_max = config.events.max_epoch_ahead;
    (!ahead_max.is_zero()).then_some(ahead_max)
}

/// Returns the largest epoch that is accepted now. Batches of higher epochs are dropped.
pub(crate) fn epoch_max(ahead_max: Option<Duration>) -> u64 {
    epoch_max_at(unix_time_us(), ahead_max)
}

/// Start of the year 2020, in microseconds since the Unix epoch. A clock that shows an earlier time has not been set,
/// and is ignored.
const CLOCK_MIN_US: u64 = 1_577_836_800_000_000;

/// Returns the seconds by which `epoch` lies ahead of the clock. Returns 0 if the difference is at most 5 seconds,
/// which is normal between two clocks. Also returns 0 if the clock has not been set.
pub(crate) fn epoch_ahead_s(epoch: u64, now_us: u64) -> u64 {
    const TOLERATED_US: u64 = 5_000_000;
    match epoch.saturating_sub(now_us) {
        ahead_us if now_us >= CLOCK_MIN_US && ahead_us > TOLERATED_US => ahead_us / 1_000_000,
        _ => 0,
    }
}

/// Returns the largest epoch that is accepted at `now_us`, in microseconds since the Unix epoch. If `ahead_max` is
/// `None`, or the clock has not been set, every epoch is accepted.
pub(super) fn epoch_max_at(now_us: u64, ahead_max: Option<Duration>) -> u64 {
    match ahead_max {
        Some(ahead_max) if now_us >= CLOCK_MIN_US => {
            now_us.saturating_add(u64::try_from(ahead_max.as_micros()).unwrap_or(u64::MAX))
        }
        _ => u64::MAX,
    }
}

/// Returns the bounds on messages on events subjects.
fn event_limits(config: &Config) -> WireLimits {
    WireLimits {
        message_bytes_max: config.events.max_message_bytes,
        events_max: config.events.max_events_per_batch,
        blocks_per_event_max: config.events.max_blocks_per_event,
        name_bytes_max: config.limits.max_name_bytes,
        ..WireLimits::default()
    }
}
