//! Reload: the settings that a running daemon takes from a configuration that was read again.

use std::time::Duration;

use crate::lanes::{LaneLimits, LanePool};
use kvatlas_config::{Config, Live};
use kvatlas_telemetry::{self as telemetry, LoggingError};

use crate::queries::query_limits;
use kvatlas_core::wire::WireLimits;

use super::Daemon;
use super::http::http_limits;

/// Settings that take effect without a restart.
const RELOADABLE: [&str; 14] = [
    "logging.level",
    "nats.credentials_file",
    "nats.nkey_seed_file",
    "nats.token",
    "nats.user",
    "nats.password",
    "events.max_message_bytes",
    "events.max_blocks_per_event",
    "events.max_events_per_batch",
    "events.max_epoch_ahead_seconds",
    "queries.max_message_bytes",
    "queries.max_depth_blocks",
    "queries.max_batch",
    "limits.empty_namespace_seconds",
];

/// The outcome of a reload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReloadReport {
    /// The settings that took effect.
    pub applied: Vec<&'static str>,
    /// The settings that differ from the start's configuration and need a restart.
    pub needs_restart: Vec<&'static str>,
}

/// The bounds that a reload replaces, apart from those of the lanes.
pub(super) struct DaemonLimits {
    pub(super) queries: Live<WireLimits>,
    pub(super) http: Live<WireLimits>,
    pub(super) empty_namespace: Live<Duration>,
}

impl DaemonLimits {
    fn replace(&self, config: &Config, pool: &LanePool) {
        self.queries.replace(query_limits(config));
        self.http.replace(http_limits(config));
        self.empty_namespace.replace(config.limits.empty_namespace);
        pool.limits().replace(LaneLimits::of_config(config));
    }
}

impl Daemon {
    /// Returns `config`, with the settings that need a restart as they were at the start.
    fn live_config(&self, config: &Config) -> Config {
        let mut live = self.config.clone();
        live.events.max_message_bytes = config.events.max_message_bytes;
        live.events.max_blocks_per_event = config.events.max_blocks_per_event;
        live.events.max_events_per_batch = config.events.max_events_per_batch;
        live.events.max_epoch_ahead = config.events.max_epoch_ahead;
        live.queries.max_message_bytes = config.queries.max_message_bytes;
        live.queries.max_depth_blocks = config.queries.max_depth_blocks;
        live.queries.max_batch = config.queries.max_batch;
        live.limits.empty_namespace = config.limits.empty_namespace;
        live
    }

    /// Takes the log's level, bounds on messages and queries, the time after which empty namespaces are forgotten, and the credentials
    /// for NATS from a configuration. New credentials are used from the next connection on. The server ends present connections when
    /// their credentials are no longer right.
    ///
    /// # Errors
    ///
    /// [`LoggingError`] if kvatlas has not set up the log, or if the new level cannot be parsed. Nothing has changed then.
    pub fn reload(&self, config: &Config) -> Result<ReloadReport, LoggingError> {
        let mut in_force = self.in_force.lock();
        let changed = in_force.changed_settings(config);
        if changed.contains(&"logging.level") {
            telemetry::set_filter(&config.logging.level)?;
        }
        self.limits.replace(&self.live_config(config), &self.pool);
        self.nats.authentication.replace(&config.nats.authentication);
        let applied = changed
            .into_iter()
            .filter(|key| RELOADABLE.contains(key))
            .collect();
        *in_force = config.clone();
        let differs = self.config.changed_settings(config);
        Ok(ReloadReport {
            applied,
            needs_restart: differs
                .into_iter()
                .filter(|key| !RELOADABLE.contains(key))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_config::Setting;

    #[test]
    fn what_can_be_reloaded_is_a_setting() {
        for key in RELOADABLE {
            assert!(Setting::find(key).is_some(), "{key}");
        }
    }
}
