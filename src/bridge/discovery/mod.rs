//! Discovery: finds engines by DNS, in files that are watched, as pods of Kubernetes, and in the records of Dynamo.
//!
//! A source yields the whole set of engines that it knows, and again whenever the set changes. One function, [`Bridge::replace`], applies
//! the difference. A new engine is followed, a changed one (also in its identity) begins anew, and an engine that is gone is forgotten at
//! once. A source that cannot look just now yields nothing, and the engines that it has known stay.
//!
//! | source | knows | is asked |
//! |---|---|---|
//! | `dns:NAME[:PORT]` | addresses and ports | every few seconds |
//! | `file:PATH` | what the file says | every second whether it has changed |
//! | `kubernetes:SELECTOR` | pods: names, addresses, UIDs, labels | by a watch |
//! | `inferencepool:NAME` | the pods of a pool | by two watches |
//! | `dynamo:PLACE` | publishers of Dynamo's event planes | every second |
//! | `endpointslices:SERVICE` | the endpoints of a Service: names, addresses, UIDs | by a watch |

mod dns;
mod dynamo;
mod file;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod labels;
mod spec;

use std::fmt::Display;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use kvatlas_core::wire::{Address, Labels, Profile};
use parking_lot::Mutex;
use tokio::sync::watch;

use kvatlas_process::registry::{Discovered, GivenEngine, NewServer};
use kvatlas_telemetry::labels::EngineSource;
use kvatlas_telemetry::{BridgeMetrics, log_gated};

use super::engines::Bridge;
use super::http::authority;
use super::spec::EngineDefaults;

pub use labels::{PodLabels, PodLabelsError};
use spec::Place;
pub use spec::{Discover, DiscoverError};

/// Most engines of one source. Further engines are not followed, and an error says so.
const FOUND_MAX: usize = 16_384;
/// Pause before engines that were refused are tried again: the obstacle may be gone by then.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Port of an engine's server if nothing tells it: the usual one of vLLM.
const SERVER_PORT: u16 = 8000;

/// Pauses between two looks at sources that cannot tell of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscoverOptions {
    /// Pause between two questions to DNS.
    pub dns_interval: Duration,
    /// Pause between two looks at files, and at records of Dynamo.
    pub file_interval: Duration,
}

impl Default for DiscoverOptions {
    fn default() -> Self {
        Self {
            dns_interval: Duration::from_secs(5),
            file_interval: Duration::from_secs(1),
        }
    }
}

/// A source of engines, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceState {
    /// The source, as it was given.
    pub source: String,
    /// The number of engines that it knows.
    pub engines: usize,
    /// Error that keeps the source from looking; `None` if it can look.
    pub last_error: Option<String>,
}

/// An error that keeps an engine from being believed: its source does not confirm that it is still the engine that was found.
#[derive(Debug, thiserror::Error)]
#[cfg_attr(
    not(feature = "kubernetes"),
    expect(dead_code, reason = "no other source can be asked")
)]
pub(super) enum LookError {
    /// The source cannot look just now.
    #[error("another engine may have its address by now, and where it was found nobody can be asked: {0}")]
    Unanswered(String),
    /// The source no longer knows the engine at this address, and is about to report that.
    #[error("it is gone from this address, by where it was found")]
    Gone,
}

/// A question to a source about one engine, beside the changes that the source reports by itself.
type Look = Box<dyn Fn(NewServer) -> BoxFuture<'static, Result<(), LookError>> + Send + Sync>;

/// Reports of one source: the engines that it knows, and what is wrong with it. Clones share them.
#[derive(Clone)]
pub(super) struct Reports {
    /// Function that asks the source about one engine; unset if the source cannot be asked.
    look: Arc<OnceLock<Look>>,
    source: Arc<str>,
    kind: EngineSource,
    metrics: Arc<BridgeMetrics>,
    known: watch::Sender<Option<Vec<GivenEngine>>>,
    trouble: Arc<Mutex<Option<String>>>,
}

/// Engines that a source knows, each time these change; `None` before its first report.
type KnownEngines = watch::Receiver<Option<Vec<GivenEngine>>>;

impl Reports {
    /// Makes the reports of a source, and their receiver. The receiver is made before the first report, which it would otherwise miss.
    fn new(source: &str, kind: EngineSource, metrics: &Arc<BridgeMetrics>) -> (Self, KnownEngines) {
        let (known, received) = watch::channel(None);
        let reports = Self {
            look: Arc::default(),
            source: Arc::from(source),
            kind,
            metrics: Arc::clone(metrics),
            known,
            trouble: Arc::default(),
        };
        (reports, received)
    }

    /// Reports all engines that the source knows now.
    fn know(&self, mut engines: Vec<GivenEngine>) {
        let found = engines.len();
        engines.truncate(FOUND_MAX);
        match found > FOUND_MAX {
            true => self.set_trouble(Some(format!(
                "{found} engines are found; the first {FOUND_MAX} are followed"
            ))),
            false => self.set_trouble(None),
        }
        self.known.send_if_modified(|known| {
            let is_news = known.as_ref() != Some(&engines);
            *known = Some(engines);
            is_news
        });
    }

    /// Reports that the source cannot look just now. The engines that it has known stay.
    fn fail(&self, error: &dyn Display) {
        self.metrics.discovery_failures.get(self.kind).increment(1);
        self.set_trouble(Some(format!("{error}")));
    }

    /// Notes what is wrong, and logs it if it has changed. `None` notes that nothing is wrong.
    fn set_trouble(&self, trouble: Option<String>) {
        let before = std::mem::replace(&mut *self.trouble.lock(), trouble.clone());
        let source = &*self.source;
        match trouble {
            Some(error) if before.as_ref() != Some(&error) => {
                log_gated!(
                    warn "engines cannot be looked for; those that are known stay" up to 16;
                    source, error
                );
            }
            None if before.is_some() => {
                log_gated!(info "engines are looked for again" up to 16; source);
            }
            _ => {}
        }
    }

    /// Lets the source be asked about one engine from now on.
    #[cfg(feature = "kubernetes")]
    fn answer_by(&self, look: Look) {
        // Each source sets its function only once.
        let _ = self.look.set(look);
    }

    /// Returns the name of the source.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Asks the source whether an engine is still the one that was found. A source that cannot be asked confirms all that it has reported.
    pub(super) async fn confirm(&self, server: &NewServer) -> Result<(), LookError> {
        match self.look.get() {
            Some(look) => look(server.clone()).await,
            None => Ok(()),
        }
    }

    /// Returns the source as operators see it.
    pub(super) fn state(&self) -> SourceState {
        SourceState {
            source: self.source.to_string(),
            engines: self.known.borrow().as_ref().map_or(0, Vec::len),
            last_error: self.trouble.lock().clone(),
        }
    }
}

impl Bridge {
    /// Begins to follow the engines that a source finds, until the bridge stops. Settings that nothing else tells come from `defaults`.
    pub fn discover(&self, what: &Discover, defaults: &EngineDefaults, options: DiscoverOptions) {
        let (reports, known) = Reports::new(what.as_str(), what.kind(), self.metrics());
        self.spawn_source(apply(self.clone(), reports.clone(), known));
        self.add_source(reports.clone());
        let defaults = defaults.clone();
        match what.place.clone() {
            Place::Dns(place) => {
                self.spawn_source(async move {
                    dns::run(&place, &defaults, options.dns_interval, &reports).await
                });
            }
            Place::File(path) => {
                self.spawn_source(async move {
                    file::run(&path, &defaults, options.file_interval, &reports).await
                });
            }
            Place::Dynamo(place) => {
                self.spawn_source(async move {
                    dynamo::run(&place, &defaults, options.file_interval, &reports).await
                });
            }
            #[cfg(feature = "kubernetes")]
            Place::Kubernetes(place) => {
                self.spawn_source(async move { kubernetes::run(&place, &defaults, &reports).await });
            }
        }
    }
}

/// Keeps the bridge's engines of a source equal to those that the source knows, for ever.
async fn apply(bridge: Bridge, reports: Reports, mut known: KnownEngines) {
    let mut is_refused = false;
    loop {
        let changed = known.changed();
        let changed = match is_refused {
            true => tokio::time::timeout(RETRY_INTERVAL, changed)
                .await
                .unwrap_or(Ok(())),
            false => changed.await,
        };
        if changed.is_err() {
            return;
        }
        let engines = known.borrow_and_update().clone().unwrap_or_default();
        let source = &*reports.source;
        let refused = bridge.replace(source, &engines).err().unwrap_or_default();
        let found = bridge.found_by(|other| other.kind == reports.kind);
        reports.metrics.discovered.get(reports.kind).set(found as f64);
        is_refused = !refused.is_empty();
        for refusal in refused {
            log_gated!(warn "an engine that was found is not followed" up to 16; source, %refusal);
        }
    }
}

/// Port at which an engine's server is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ServerPort {
    number: u16,
    /// Whether the server is asked over gRPC instead of HTTP.
    is_grpc: bool,
}

/// Makes the server at an address that a source has found. Requests for the engine go to that address, too.
fn server_at(
    name: String,
    host: &str,
    port: ServerPort,
    discovered: Discovered,
    defaults: &EngineDefaults,
) -> NewServer {
    let authority = authority(host, port.number);
    let scheme = if port.is_grpc { "grpc" } else { "http" };
    NewServer {
        instance: name,
        url: format!("{scheme}://{authority}"),
        discovered,
        profile: Profile {
            address: Address::new(&authority).ok(),
            labels: Labels::default(),
        },
        ..defaults.server()
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::Subjects;
    use kvatlas_process::registry::EngineRegistry;

    use super::super::BridgeOptions;
    use super::*;

    #[tokio::test]
    async fn a_report_before_the_bridge_looks_is_not_missed() {
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let (reports, known) = Reports::new("dns:vllm", EngineSource::Dns, bridge.metrics());
        let port = ServerPort {
            number: 8000,
            is_grpc: false,
        };
        let defaults = EngineDefaults::default();
        let server = server_at(
            "a".to_owned(),
            "127.0.0.1",
            port,
            Discovered::default(),
            &defaults,
        );
        reports.know(vec![GivenEngine::Server(server)]);
        // All answers are the same from then on: nothing else would tell of the engine.
        let applying = apply(bridge.clone(), reports, known);
        assert!(futures_util::poll!(std::pin::pin!(applying)).is_pending());
        assert_eq!(bridge.servers().len(), 1);
    }
}
