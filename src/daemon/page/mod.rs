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
//! | `questions.rs` | the parameters of a request |
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
mod past;
mod questions;
mod rates;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::StatusCode;
use hyper::header::{CONNECTION, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use kvatlas_client::unix_time_us;
use kvatlas_core::wire::{ErrorCode, NamespaceName, WireError};

use crate::costs::Costs;
use crate::lanes::Stray;
use crate::outcomes::Outcomes;
use crate::queries::{Answerer, MissingShards, QuerySample};
use crate::snapshots::SnapshotFailing;
use kvatlas_process::admin::{ParametersError, Readiness, STREAMS_MAX, parameters};
use kvatlas_telemetry::MetricsHandle;

pub(crate) use files::home;

use atlas::{Atlas, Lens};
use fleet::FleetState;
use past::{BAR_INTERVAL, READING_INTERVAL, READING_SHARE, RateHistory};
use questions::AtlasQuestion;
use rates::Meter;

/// Maximum number of questions of browsers that are worked on at the same time. Further questions wait.
const QUESTIONS_MAX: usize = 2;
/// Maximum number of questions that wait or are worked on.
const WAITING_MAX: usize = 16;
/// Maximum number of atlases (trees of hot prefixes) that are kept, so that their prefixes can be explained.
const ATLASES_MAX: usize = 8;

/// Records that the daemon keeps about itself, and that the page shows in a browser.
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
    /// Time at which the present bar (counts of answers in a stretch of time) ends. `None` before the first bar.
    bar_end: Option<Instant>,
}

impl Remembered {
    /// Returns whether the present bar is over, and whether the metrics are to be read again. If so, sets the times of
    /// the next ones. A bar that is over late makes no later bar late.
    fn due(&mut self, now: Instant) -> (bool, bool) {
        let is_due = |at: Option<Instant>| at.is_none_or(|at| now >= at);
        let due = (is_due(self.bar_end), is_due(self.next));
        if due.0 {
            let on_time = self.bar_end.map(|end| end + BAR_INTERVAL);
            self.bar_end = on_time.filter(|end| *end > now).or(Some(now + BAR_INTERVAL));
        }
        if due.1 {
            self.next = Some(now + READING_INTERVAL);
        }
        due
    }
}

struct KeptAtlas {
    namespace: NamespaceName,
    lens: Lens,
    atlas: Arc<Atlas>,
}

/// Reason why a request of the page is refused.
#[derive(Debug, thiserror::Error)]
enum PageRefusal {
    #[error(transparent)]
    Parameters(#[from] ParametersError),
    #[error("the query: {0}")]
    Query(String),
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
            Self::Parameters(_) | Self::Query(_) => StatusCode::BAD_REQUEST,
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

    /// Returns the routes of the files that the page loads, and of its data. The answers need a tokio runtime.
    pub(crate) fn router(self: &Arc<Self>) -> Router {
        type Asked = (State<Arc<Page>>, RawQuery);
        let frames = |State(page): State<Arc<Self>>| async { page.frames() };
        let atlases = |(State(page), RawQuery(query)): Asked| async move {
            let AtlasQuestion { namespace, lens } = parameters(query.as_deref())?;
            page.atlas_stream(namespace, lens)
        };
        let explain = |(State(page), RawQuery(query)): Asked| page.json(query, Self::explain);
        let ask = |(State(page), RawQuery(query)): Asked| page.json(query, Self::ask);
        files::router()
            .route("/page/frames", get(frames))
            .route("/page/atlas", get(atlases))
            .route("/page/explain", get(explain))
            .route("/page/ask", get(ask))
            .with_state(Arc::clone(self))
    }

    /// Answers with the JSON that `work` returns for the parameters in `query`. Runs `work` on a thread for blocking work.
    async fn json<Q: DeserializeOwned + Send + 'static>(
        self: Arc<Self>,
        query: Option<String>,
        work: fn(&Self, &Q) -> Result<String, PageRefusal>,
    ) -> Result<Response, PageRefusal> {
        let question = parameters(query.as_deref())?;
        let text = self.in_background(move |page| work(page, &question)).await??;
        Ok(respond(JSON, text))
    }

    /// Runs `work` on a thread for blocking work, once fewer than [`QUESTIONS_MAX`] questions are being worked on.
    /// Refuses if [`WAITING_MAX`] questions already wait or are worked on.
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

    /// Records rates and counts of answers in the background, for pages that are opened later. Does nothing if none is
    /// due. Must be called about once a second in a tokio runtime, and does not block it.
    pub(crate) fn remember(self: &Arc<Self>, now: Instant) {
        let (is_bar_over, is_reading_due) = self.past.lock().due(now);
        let page = Arc::clone(self);
        if is_bar_over || is_reading_due {
            tokio::task::spawn_blocking(move || {
                if is_bar_over {
                    page.end_bar();
                }
                if is_reading_due {
                    page.read_past(now);
                }
            });
        }
    }

    fn end_bar(&self) {
        let namespaces = self.answerer.namespaces().all();
        let all = namespaces.iter().map(|namespace| &**namespace);
        self.past.lock().past.end_bar(all);
    }

    fn read_past(&self, now: Instant) {
        let text = self.metrics.render();
        let mut known = self.past.lock();
        let Remembered {
            past, meter, next, ..
        } = &mut *known;
        meter.read(&text, now);
        past.note(unix_time_us(), meter.rates());
        *next = Some(now + (now.elapsed() * READING_SHARE).max(READING_INTERVAL));
    }

    /// Keeps an atlas (a tree of hot prefixes), so that its prefixes can be explained. For each namespace and lens
    /// (meaning of the weights), at most the two newest atlases are kept.
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

impl IntoResponse for PageRefusal {
    fn into_response(self) -> Response {
        let text = serde_json::json!({ "error": self.to_string() }).to_string();
        (self.status(), respond(JSON, text)).into_response()
    }
}

/// Builds an answer after which the connection ends. If the connection were used again, it could reach its age limit in
/// the middle of a stream.
fn respond(content_type: &'static str, body: impl Into<Body>) -> Response {
    let headers = [
        (CONTENT_TYPE, content_type),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CONNECTION, "close"),
    ];
    (headers, body.into()).into_response()
}
