//! How events are taken in.

use std::collections::HashMap;
use std::time::Duration;

use crate::tracking::LivenessLimits;
use crate::wire::{NamespaceName, Shard, WireLimits};

use super::held::HoldingLimits;

/// How events are taken in.
#[derive(Debug, Clone)]
pub struct IngestSettings {
    /// Threads that apply events; at least 1.
    pub lanes: usize,
    /// What may wait for one lane, in bytes.
    pub lane_queue_bytes: usize,
    /// Bounds on messages.
    pub limits: WireLimits,
    /// Which workers are taken; all where it is absent.
    pub shard: Option<Shard>,
    /// What a holder keeps back while its publisher is asked for what is missing; nothing where it is absent.
    pub holding: Option<HoldingSettings>,
    /// How long holders may be silent.
    pub liveness: LivenessSettings,
}

/// Bounds on the batches of a holder that wait until those before them are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldingSettings {
    /// Most payload bytes of one holder. All holders of a lane together keep back no more than the lane's queue takes.
    pub bytes_per_holder_max: usize,
    /// How long they wait for an answer.
    pub wait_max: Duration,
}

/// How long the holders of each namespace may be silent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LivenessSettings {
    /// For namespaces that are not named here.
    pub default: LivenessLimits,
    /// For these.
    pub overrides: HashMap<NamespaceName, LivenessLimits>,
}

impl LivenessSettings {
    /// The limits of a namespace.
    pub fn of(&self, namespace: &NamespaceName) -> &LivenessLimits {
        self.overrides.get(namespace).unwrap_or(&self.default)
    }
}

impl IngestSettings {
    pub(crate) fn holding_limits(&self) -> HoldingLimits {
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
