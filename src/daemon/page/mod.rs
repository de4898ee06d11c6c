//! The page that the admin listener serves to browsers. It shows the fleet of holders, rates, the exactness of answers,
//! an atlas (a tree of hot prefixes), and a query box.
//!
//! | file | subject |
//! |---|---|
//! | `assets/` | the page itself: HTML, CSS, ECMAScript modules; embedded, without a build step, nothing loaded from elsewhere |
//! | `files.rs` | serving the files, under a strict Content-Security-Policy |
//! | `stream.rs` | server-sent events: a frame a second, an atlas every few seconds |
//! | `fleet.rs` | changes of the holders since the last message to a client |
//! | `rates.rs` | rates and latencies, from two readings of the metrics |
//! | `past.rs` | rates and inexact answers of the minutes before a page was opened |
//! | `atlas.rs` | the tree of the hottest prefixes |
//! | `asked.rs`, `held.rs` | two sources of the atlas: the sample of recent queries, and a walk over the index |
//! | `explain.rs` | one prefix: its holders, the first block that each holder lacks, and the cost of losing it |
//! | `ask.rs` | the query box |
//! | `parameters.rs` | the parameters of a request |
//!
//! The page changes nothing. The numbers of streams, of questions at the same time, of holders, of nodes of an atlas
//! and of blocks of a walk are bounded. Work that takes longer than microseconds runs on a thread for blocking work, so
//! that probes are answered meanwhile.

mod ask;
mod asked;
mod atlas;
mod explain;
mod files;
mod fleet;
mod held;
mod parameters;
mod past;
mod rates;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use hyper::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{Response, StatusCode};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use kvatlas_client::unix_time_us;
use kvatlas_core::wire::{ErrorCode, NamespaceName, WireError};

use crate::costs::Costs;
use crate::lanes::Stray;
use crate::outcomes::Outcomes;
use crate::queries::{Answerer, MissingShards, QuerySample};
use crate::snapshots::SnapshotFailing;
use kvatlas_process::admin::{AdminBody, PageAnswer, PageRequest, Readiness, STREAMS_MAX};
use kvatlas_telemetry::MetricsHandle;

use atlas::{Atlas, Lens};
use fleet::FleetState;
use parameters::Parameters;
use past::{READING_INTERVAL, READING_SHARE, RateHistory};
use rates::Meter;

/// Maximum number of questions of browsers that are worked on at the same time. Further questions wait.
const QUESTIONS_MAX: usize = 2;
/// Maximum number of questions that wait or are worked on.
const WAITING_MAX: usize = 16;
/// Maximum number of atlases (trees of hot prefixes) that are kept, so that their prefixes can be explained.
const ATLASES_MAX: usize = 8;

/// Records of the daemon that the page in a browser shows.
pub(crate) struct Looked {
    pub(crate) sample: Arc<QuerySample>,
    pub(crate) outcomes: Arc<Outcomes>,
    pub(crate) costs: Arc<Costs>,
    pub(crate) missing_shards: Arc<MissingShards>,
    pub(crate) snapshot_failing: Arc<SnapshotFailing>,
    /// Function that returns the names of namespaces that do not exist although events for them came recently.
    pub(crate) strays: Box<dyn Fn() -> Vec<Stray> + Send + Sync>,
}

/// Server of the page and of its data, which is read from the daemon.
pub(crate) struct Page {
    answerer: Answerer,
    readiness: Arc<Readiness>,
    looked: Looked,
    metrics: MetricsHandle,
    past: Mutex<Remembered>,
    /// State of the holders, from which the messages (frames) of all streams are made. About once a second, the first
    /// stream that needs the state updates it.
    frame: Mutex<SharedFrame>,
    /// Atlases (trees of hot prefixes) that were sent to clients, the newest last.
    atlases: Mutex<VecDeque<KeptAtlas>>,
    streams: Arc<Semaphore>,
    questions: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

struct SharedFrame {
    fleet: FleetState,
    meter: Meter,
}

#[derive(Default)]
struct Remembered {
    past: RateHistory,
    meter: Meter,
    /// Earliest time at which the metrics are read again for the page. `None` before the first reading.
    next: Option<Instant>,
}

struct KeptAtlas {
    namespace: NamespaceName,
    lens: Lens,
    atlas: Arc<Atlas>,
}

/// Reason why a request of the page is refused.
#[derive(Debug, thiserror::Error)]
enum PageRefusal {
    #[error("{0}")]
    Parameters(String),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("this prefix is no longer in the picture; choose it again in a newer one")]
    Outdated,
    #[error("too many pages are open; close one, or try again later")]
    Busy,
    #[error("the answer could not be made; the daemon's log says why")]
    Failed,
}

impl PageRefusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Parameters(_) => StatusCode::BAD_REQUEST,
            Self::Wire(error) => match error.code {
                ErrorCode::UnknownNamespace => StatusCode::NOT_FOUND,
                _ => StatusCode::BAD_REQUEST,
            },
            Self::Outdated => StatusCode::GONE,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl Page {
    /// Makes the page. It takes its answers to queries from `answerer`.
    pub(crate) fn new(
        answerer: Answerer,
        readiness: Arc<Readiness>,
        looked: Looked,
        metrics: MetricsHandle,
    ) -> Self {
        Self {
            answerer,
            readiness,
            looked,
            metrics,
            past: Mutex::default(),
            frame: Mutex::new(SharedFrame {
                fleet: FleetState::default(),
                meter: Meter::default(),
            }),
            atlases: Mutex::default(),
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
        }
    }

    /// Answers a request for the page, for one of its files, or for its data. `None` if there is no such path. Must be
    /// called in a tokio runtime.
    pub(crate) fn respond(self: &Arc<Self>, request: PageRequest<'_>) -> Option<PageAnswer> {
        if let Some(response) = files::respond(request.path) {
            return Some(PageAnswer(Box::pin(std::future::ready(response))));
        }
        let route = PageRoute::of(request.path)?;
        let (page, parameters) = (Arc::clone(self), Parameters::parse(request.query));
        Some(PageAnswer(Box::pin(async move {
            let answered = match parameters {
                Err(refusal) => Err(refusal),
                Ok(parameters) => page.answer(route, parameters).await,
            };
            answered.unwrap_or_else(|refusal| {
                let text = serde_json::json!({ "error": refusal.to_string() }).to_string();
                respond(refusal.status(), JSON, AdminBody::whole(text))
            })
        })))
    }

    async fn answer(
        self: Arc<Self>,
        route: PageRoute,
        parameters: Parameters,
    ) -> Result<Response<AdminBody>, PageRefusal> {
        match route {
            PageRoute::Frames => self.frames(),
            PageRoute::Atlases => {
                let (namespace, lens) = (parameters.namespace()?, parameters.lens()?);
                self.atlas_stream(namespace, lens)
            }
            PageRoute::Explain => self.json(move |page| page.explain(&parameters)).await,
            PageRoute::Ask => self.json(move |page| page.ask(&parameters)).await,
        }
    }

    /// Answers with the JSON that `work` returns. Runs `work` on a thread for blocking work.
    async fn json(
        self: Arc<Self>,
        work: impl FnOnce(&Self) -> Result<String, PageRefusal> + Send + 'static,
    ) -> Result<Response<AdminBody>, PageRefusal> {
        let text = self.in_background(work).await??;
        Ok(respond(StatusCode::OK, JSON, AdminBody::whole(text)))
    }

    /// Runs `work` on a thread for blocking work when its turn comes. Refuses if too many questions wait.
    async fn in_background<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, PageRefusal> {
        let _place = permit(&self.waiting)?;
        let turn = Arc::clone(&self.questions).acquire_owned().await;
        let turn = turn.map_err(|_| PageRefusal::Busy)?;
        let page = Arc::clone(self);
        let working = tokio::task::spawn_blocking(move || {
            let done = work(&page);
            drop(turn);
            done
        });
        working.await.map_err(|_| PageRefusal::Failed)
    }

    /// Records rates and counts of answers, for pages that are opened later. Does nothing if it is not yet time to read
    /// the metrics again. Must be called in a tokio runtime, and does not block it.
    pub(crate) fn remember(self: &Arc<Self>, now: Instant) {
        {
            let mut known = self.past.lock();
            if known.next.is_some_and(|next| now < next) {
                return;
            }
            known.next = Some(now + READING_INTERVAL);
        }
        let page = Arc::clone(self);
        tokio::task::spawn_blocking(move || page.read_past(now));
    }

    fn read_past(&self, now: Instant) {
        let text = self.metrics.render();
        let namespaces = self.answerer.namespaces().all();
        let mut known = self.past.lock();
        let Remembered { past, meter, next } = &mut *known;
        meter.read(&text, self.looked.sample.counts(), now);
        let all = namespaces.iter().map(|namespace| &**namespace);
        past.note(unix_time_us(), meter.rates(), all);
        *next = Some(now + (now.elapsed() * READING_SHARE).max(READING_INTERVAL));
    }

    /// Keeps an atlas (a tree of hot prefixes), so that its prefixes can be explained. At most two atlases are kept for
    /// each namespace and each way of weighing prefixes.
    fn keep_atlas(&self, namespace: &NamespaceName, lens: Lens, atlas: Arc<Atlas>) {
        let mut atlases = self.atlases.lock();
        // The previous atlas is kept too, because a client may still show it.
        let is_same = |kept: &&KeptAtlas| kept.namespace == *namespace && kept.lens == lens;
        if atlases.iter().filter(is_same).count() > 1
            && let Some(oldest) = atlases.iter().position(|kept| is_same(&kept))
        {
            atlases.remove(oldest);
        }
        if atlases.len() >= ATLASES_MAX {
            atlases.pop_front();
        }
        atlases.push_back(KeptAtlas {
            namespace: namespace.clone(),
            lens,
            atlas,
        });
    }
}

fn permit(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, PageRefusal> {
    Arc::clone(semaphore)
        .try_acquire_owned()
        .map_err(|_| PageRefusal::Busy)
}

const JSON: &str = "application/json";

#[derive(Debug, Clone, Copy)]
enum PageRoute {
    Frames,
    Atlases,
    Explain,
    Ask,
}

impl PageRoute {
    fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/page/frames" => Self::Frames,
            "/page/atlas" => Self::Atlases,
            "/page/explain" => Self::Explain,
            "/page/ask" => Self::Ask,
            _ => return None,
        })
    }
}

/// Builds an answer after which the connection ends. If the connection were used again, it could reach its age limit in
/// the middle of a stream.
fn respond(status: StatusCode, content_type: &'static str, body: AdminBody) -> Response<AdminBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
