//! Reload of a running daemon: the daemon reads its configuration again, and some of the settings take effect without a
//! restart.

use std::time::Duration;

use crate::lanes::{LaneLimits, LanePool};
use kvatlas_config::{Config, Live, Setting};
use kvatlas_telemetry::{self as telemetry, LoggingError};

use crate::queries::query_limits;
use kvatlas_core::wire::WireLimits;

use super::Daemon;
use super::http::http_limits;

/// Result of a reload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReloadReport {
    /// Names of the settings that took effect.
    pub applied: Vec<&'static str>,
    /// Names of the settings that differ from the configuration of the start, and take effect only after a restart.
    pub needs_restart: Vec<&'static str>,
}

/// Whether a reload takes over the setting `key`.
fn is_live(key: &str) -> bool {
    Setting::find(key).is_some_and(|setting| setting.is_live)
}

/// Bounds that a reload replaces. The bounds of the lanes are kept by the lanes themselves.
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
    /// Takes these settings from `config`:
    ///
    /// - the log's level
    /// - the bounds on messages and queries
    /// - the time after which empty namespaces are forgotten
    /// - the credentials for NATS, which the next connection uses. The server ends a present connection when its credentials are
    ///   no longer right.
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
        self.limits.replace(&self.config.with_live(config), &self.pool);
        self.nats.authentication.replace(&config.nats.authentication);
        let applied = changed.into_iter().filter(|key| is_live(key)).collect();
        *in_force = config.clone();
        let differs = self.config.changed_settings(config);
        Ok(ReloadReport {
            applied,
            needs_restart: differs.into_iter().filter(|key| !is_live(key)).collect(),
        })
    }
}
