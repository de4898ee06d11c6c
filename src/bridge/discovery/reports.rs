//! Reports of sources. A source reports the engines that it knows, or the error that keeps it from looking for engines.

use std::fmt::Display;
use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::watch;

use kvatlas_process::registry::{GivenEngine, NewServer, RegisterRefusal, SourceState};
use kvatlas_telemetry::labels::EngineSource;
use kvatlas_telemetry::{BridgeMetrics, log_gated};

/// Maximum number of engines of one source. Further engines are not followed, and an error says so.
pub(super) const FOUND_MAX: usize = 16_384;

/// Error that keeps the bridge from believing an engine: the source that found the engine does not confirm it.
#[derive(Debug, thiserror::Error)]
#[cfg_attr(
    not(feature = "kubernetes"),
    expect(dead_code, reason = "no other source can be asked")
)]
pub(crate) enum LookError {
    /// The source cannot be asked at the moment.
    #[error("another engine may have its address by now, and where it was found nobody can be asked: {0}")]
    Unanswered(String),
    /// The source no longer knows the engine at this address. Its next report will leave the engine out.
    #[error("it is gone from this address, by where it was found")]
    Gone,
}

/// Function by which the bridge asks a source about one engine. The source also reports changes by itself.
pub(super) type EngineLookup =
    Box<dyn Fn(NewServer) -> BoxFuture<'static, Result<(), LookError>> + Send + Sync>;

/// Reports of one source: the engines that it knows, and its present error. Clones share them.
#[derive(Clone)]
pub(crate) struct Reports {
    /// Function that asks the source about one engine; unset if the source cannot be asked.
    look: Arc<OnceLock<EngineLookup>>,
    source: Arc<str>,
    pub(super) kind: EngineSource,
    pub(super) metrics: Arc<BridgeMetrics>,
    known: watch::Sender<Option<Vec<GivenEngine>>>,
    trouble: Arc<Mutex<Option<String>>>,
    /// Engines of the source that are not followed: their number, and a text that says why; `None` if all are.
    refused: Arc<Mutex<Option<(usize, String)>>>,
}

/// Receiver that follows the engines that a source knows. Its value is `None` before the source's first report.
pub(super) type KnownEngines = watch::Receiver<Option<Vec<GivenEngine>>>;

impl Reports {
    /// Makes the reports of a source, and a receiver of the source's engines. The receiver exists before the first
    /// report, so it misses no report.
    pub(super) fn new(
        source: &str,
        kind: EngineSource,
        metrics: &Arc<BridgeMetrics>,
    ) -> (Self, KnownEngines) {
        let (known, received) = watch::channel(None);
        let reports = Self {
            look: Arc::default(),
            source: Arc::from(source),
            kind,
            metrics: Arc::clone(metrics),
            known,
            trouble: Arc::default(),
            refused: Arc::default(),
        };
        (reports, received)
    }

    /// Reports all engines that the source knows now.
    pub(super) fn know(&self, engines: Vec<GivenEngine>) {
        self.know_noting(engines, None);
    }

    /// Reports all engines that the source knows now, with a `note` for operators. It is no failure of the source.
    pub(super) fn know_noting(&self, mut engines: Vec<GivenEngine>, note: Option<String>) {
        let found = engines.len();
        engines.truncate(FOUND_MAX);
        let has_more = found > FOUND_MAX;
        let more = has_more.then(|| format!("{found} engines are found; the first {FOUND_MAX} are followed"));
        self.set_trouble(more.or(note), false);
        self.known.send_if_modified(|known| {
            let is_news = known.as_ref() != Some(&engines);
            *known = Some(engines);
            is_news
        });
    }

    /// Reports that the source cannot look for engines at the moment. The engines that it has known stay.
    pub(super) fn fail(&self, error: &dyn Display) {
        self.metrics.discovery_failures.get(self.kind).increment(1);
        self.set_trouble(Some(format!("{error}")), true);
    }

    /// Notes which of the `found` engines the bridge does not follow.
    pub(super) fn note_refused(&self, found: usize, refused: &[RegisterRefusal]) {
        let text = |first| {
            let count = refused.len();
            (
                count,
                format!("{found} engines are found, {count} are not followed: {first}"),
            )
        };
        *self.refused.lock() = refused.first().map(text);
    }

    /// Stores what is wrong with the source, and logs a change of it. `None` means that nothing is wrong. `is_failure` says
    /// that the source cannot look.
    fn set_trouble(&self, trouble: Option<String>, is_failure: bool) {
        let before = std::mem::replace(&mut *self.trouble.lock(), trouble.clone());
        let (source, is_news) = (&*self.source, before != trouble);
        match trouble {
            Some(note) if is_news && !is_failure => {
                log_gated!(warn "a source of engines may lack some" up to 16; source, note);
            }
            Some(error) if is_news => {
                let known = self.known.borrow().as_ref().map_or(0, Vec::len);
                log_gated!(warn "engines cannot be looked for; those that are known stay" up to 16; source, known, error);
            }
            None if is_news => {
                log_gated!(info "engines are looked for again" up to 16; source);
            }
            _ => {}
        }
    }

    /// Sets the function by which the bridge can ask the source about one engine.
    #[cfg(feature = "kubernetes")]
    pub(super) fn answer_by(&self, look: EngineLookup) {
        // Each source sets its function only once.
        let _ = self.look.set(look);
    }

    /// Returns the name of the source.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Asks the source whether an engine is still the one that was found. A source that cannot be asked confirms every
    /// engine.
    pub(crate) async fn confirm(&self, server: &NewServer) -> Result<(), LookError> {
        match self.look.get() {
            Some(look) => look(server.clone()).await,
            None => Ok(()),
        }
    }

    /// Returns the source as operators see it.
    pub(crate) fn state(&self) -> SourceState {
        let trouble = self.trouble.lock().clone();
        let refused = self.refused.lock().clone();
        SourceState {
            source: self.source.to_string(),
            engines: self.known.borrow().as_ref().map_or(0, Vec::len),
            refused: refused.as_ref().map_or(0, |(count, _)| *count),
            last_error: trouble.or(refused.map(|(_, text)| text)),
        }
    }
}
