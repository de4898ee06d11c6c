//! Progress of following an engine, kept for clients that ask and written to the log.

use std::fmt::Display;
use std::sync::Arc;

use parking_lot::Mutex;

use kvatlas_process::registry::{EngineStatus, NewEngine};
use kvatlas_telemetry::log_gated;

/// Status of an engine that is followed.
#[derive(Debug, Clone)]
pub(super) struct Progress {
    pub(super) status: EngineStatus,
    pub(super) last_error: Option<String>,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            status: EngineStatus::Pending,
            last_error: None,
        }
    }
}

/// The progress of one engine. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedProgress(Arc<Mutex<Progress>>);

impl SharedProgress {
    /// Returns the progress as it is now.
    pub(super) fn get(&self) -> Progress {
        self.0.lock().clone()
    }

    /// Notes that the engine is followed. `is_exact` says whether all of its content is known for certain. `trouble`
    /// says what is wrong although the engine is followed; `None` if nothing is wrong.
    pub(super) fn followed(&self, engine: &NewEngine, is_exact: bool, trouble: Option<&str>) {
        let status = match is_exact {
            true => EngineStatus::Exact,
            false => EngineStatus::Degraded,
        };
        let mut progress = self.0.lock();
        let is_news = progress.status != status || progress.last_error.as_deref() != trouble;
        // At a start, each engine gets a log line. A client could register engines without end, so the number of lines is
        // limited.
        match trouble {
            Some(trouble) if is_news => {
                log_gated!(warn "engine followed, and in doubt" up to 64; engine = %engine.key, ?status, trouble);
            }
            _ if progress.status != status => {
                log_gated!(info "engine followed" up to 64; engine = %engine.key, ?status);
            }
            _ => {}
        }
        if is_news {
            *progress = Progress {
                status,
                last_error: trouble.map(str::to_owned),
            };
        }
    }

    /// Notes that the engine is out of sight for now: it is silent, or batches may be missing.
    pub(super) fn out_of_sight(&self, engine: &NewEngine, error: &dyn Display) {
        {
            let mut progress = self.0.lock();
            progress.last_error = Some(error.to_string());
            // An engine that was never seen stays pending.
            if progress.status != EngineStatus::Pending {
                progress.status = EngineStatus::Lost;
            }
        }
        log_gated!(warn "engine out of sight"; engine = %engine.key, endpoint = &engine.endpoint, %error);
    }

    /// Notes that the engine is no longer followed.
    pub(super) fn ended(&self, engine: &NewEngine, error: &dyn Display) {
        *self.0.lock() = Progress {
            status: EngineStatus::Lost,
            last_error: Some(error.to_string()),
        };
        log_gated!(error "an engine is no longer followed" up to 64; engine = %engine.key, %error);
    }
}

/// Logs that daemons could not be told that the engine is no longer followed.
pub(super) fn log_untold(engine: &NewEngine, error: &dyn Display) {
    log_gated!(
        warn "daemons do not know that the engine is no longer followed";
        engine = %engine.key, %error
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineDefaults, parse_engine};
    use kvatlas_process::registry::GivenEngine;

    #[test]
    fn an_engine_that_was_never_seen_is_pending_and_not_lost() {
        let defaults = EngineDefaults {
            model: Some("m".to_owned()),
            ..EngineDefaults::default()
        };
        let mut engines = parse_engine("gpu-0=tcp://127.0.0.1:1", &defaults).unwrap();
        let GivenEngine::Publisher(engine) = &engines.remove(0) else {
            panic!("no publisher");
        };
        let progress = SharedProgress::default();
        progress.out_of_sight(engine, &"refused");
        let Progress { status, last_error } = progress.get();
        assert_eq!(
            (status, last_error.as_deref()),
            (EngineStatus::Pending, Some("refused"))
        );
        progress.followed(engine, true, None);
        assert_eq!(progress.get().last_error, None);
        progress.out_of_sight(engine, &"gone");
        assert_eq!(progress.get().status, EngineStatus::Lost);
        progress.followed(engine, false, Some("replay"));
        assert_eq!(progress.get().last_error.as_deref(), Some("replay"));
        assert_eq!(progress.get().status, EngineStatus::Degraded);
        let progress = SharedProgress::default();
        progress.ended(engine, &"closed");
        assert_eq!(progress.get().status, EngineStatus::Lost);
    }
}
