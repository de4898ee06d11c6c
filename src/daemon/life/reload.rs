//! Reload of a running daemon: the daemon reads its configuration again, and some of the settings take effect without a
//! restart.

use std::time::Duration;

use crate::lanes::{LaneLimits, LanePool};
use kvatlas_config::{Authentication, Config, Live, Setting};
use kvatlas_core::wire::WireLimits;
use kvatlas_process::broker::{ConnectError, check_credentials};
use kvatlas_telemetry::{self as telemetry, LoggingError};

use crate::http::TokenError;
use crate::queries::query_limits;

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

/// Reason why a reload changes nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// Log is not set up, or its new level cannot be parsed.
    #[error(transparent)]
    Logging(#[from] LoggingError),
    /// File with the credentials for NATS cannot be used.
    #[error(transparent)]
    Credentials(#[from] ConnectError),
    /// File with the token of a listener cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Largest message of the new configuration has no room in a lane's queue. The queue keeps its size until a
    /// restart.
    #[error(
        "events.max_message_bytes is {message_bytes}, but a lane's queue has {queue_bytes} bytes until a restart"
    )]
    NoRoom {
        /// Maximum size of a message in the new configuration, in bytes.
        message_bytes: usize,
        /// Size of a lane's queue, in bytes.
        queue_bytes: usize,
    },
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
    /// - the credentials for NATS, which the next connection uses. The server ends a present connection when its
    ///   credentials are no longer right.
    ///
    /// Also reads the tokens of the listeners again, each from the file that was named at the start. A file is passed
    /// over if `config` names another in its place, which counts after a restart.
    ///
    /// # Errors
    ///
    /// [`ReloadError`], which names the reason. Nothing has changed then.
    pub fn reload(&self, config: &Config) -> Result<ReloadReport, ReloadError> {
        let mut in_force = self.in_force.lock();
        self.check(config)?;
        let differs = self.config.changed_settings(config);
        let tokens = self.tokens.read_again_except(&differs)?;
        let changed = in_force.changed_settings(config);
        if changed.contains(&"logging.level") {
            telemetry::set_filter(&config.logging.level)?;
        }
        self.limits.replace(&self.config.with_live(config), &self.pool);
        let how = Authentication::clone(&config.nats.authentication.now());
        self.nats.authentication.replace(how);
        let applied = changed.into_iter().filter(|key| is_live(key));
        let applied = applied.chain(tokens.replace()).collect();
        *in_force = config.clone();
        Ok(ReloadReport {
            applied,
            needs_restart: differs.into_iter().filter(|key| !is_live(key)).collect(),
        })
    }

    /// Reads the tokens of the listeners again, each from the file that was named at the start. Returns the names of
    /// the settings whose tokens have changed.
    ///
    /// # Errors
    ///
    /// [`TokenError`] if a file cannot be used. Nothing has changed then.
    pub fn read_tokens_again(&self) -> Result<Vec<&'static str>, TokenError> {
        Ok(self.tokens.read_again()?.replace())
    }

    /// Checks what loading `config` has not checked: that what a reload takes from it can be used.
    fn check(&self, config: &Config) -> Result<(), ReloadError> {
        check_credentials(&config.nats.authentication.now())?;
        let message_bytes = config.events.max_message_bytes;
        let queue_bytes = self.config.events.lane_queue_bytes;
        match message_bytes > queue_bytes {
            true => Err(ReloadError::NoRoom {
                message_bytes,
                queue_bytes,
            }),
            false => Ok(()),
        }
    }
}
