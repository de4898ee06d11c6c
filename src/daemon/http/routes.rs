//! The routes, and what all of them share.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use kvatlas_core::wire::NamespaceName;

use crate::daemon::admin::{AdminSource, Readiness};
use crate::daemon::config::Secret;
use crate::daemon::lanes::LanePool;
use crate::daemon::metrics::labels::{
    HttpRoute, LabelValue, NAMESPACE_LABELS_MAX, PerLabel, QueryKind, namespace_label,
};
use crate::daemon::metrics::{AnsweredPrompt, HttpMetrics, QueryErrorMetrics, QueryMetrics};
use crate::daemon::queries::Answerer;
use crate::daemon::traces::{OpenSpan, SpanKind, TRACEPARENT, Tracer};

use super::engines::EngineRegistry;
use super::error::HttpError;
use super::{auth, contract, dialect, dump, openapi, registration, workers};

/// Says whether all holders in an answer are exact.
static EXACT: HeaderName = HeaderName::from_static("x-kvatlas-exact");
/// Which shard an answer is from; absent where workers are not divided.
static SHARD: HeaderName = HeaderName::from_static("x-kvatlas-shard");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// What queries are answered from.
pub(crate) struct IndexParts {
    /// Answers queries.
    pub(crate) answerer: Answerer,
    /// The lanes, for dumps and the backlog.
    pub(crate) pool: Arc<LanePool>,
    /// Whether queries are answered yet.
    pub(crate) readiness: Arc<Readiness>,
    /// The part of the workers that this daemon knows, as text; none where it knows all.
    pub(crate) shard: Option<String>,
}

/// What the routes serve.
pub struct HttpParts {
    /// The index; none in a process that only runs a bridge.
    pub(crate) index: Option<IndexParts>,
    /// The bridge; none where none runs in this process.
    pub engines: Option<Arc<dyn EngineRegistry>>,
    /// What `/metrics` gives.
    pub metrics: Arc<dyn AdminSource>,
    /// The token that requests need.
    pub token: Option<Secret>,
    /// Longest body of a request, in bytes.
    pub body_bytes_max: usize,
    /// Time in which a request's body has to come.
    pub request_timeout: Duration,
    /// Opens spans, where there is a collector.
    pub(crate) tracer: Option<Tracer>,
}

impl HttpParts {
    /// The parts of a process that only runs a bridge: engines can be registered there.
    pub fn of_bridge(
        engines: Arc<dyn EngineRegistry>,
        metrics: Arc<dyn AdminSource>,
        token: Option<Secret>,
    ) -> Self {
        Self {
            index: None,
            engines: Some(engines),
            metrics,
            token,
            body_bytes_max: 64 << 10,
            request_timeout: Duration::from_secs(10),
            tracer: None,
        }
    }
}

/// The index, and what is counted of its queries.
pub(super) struct Index {
    pub(super) answerer: Answerer,
    pub(super) pool: Arc<LanePool>,
    pub(super) errors: QueryErrorMetrics,
    readiness: Arc<Readiness>,
    shard: Option<HeaderValue>,
    /// One for each namespace that was asked about: only those that exist are answered, so their number is bounded.
    metrics: ArcSwap<HashMap<NamespaceName, Arc<QueryMetrics>>>,
    adding: Mutex<()>,
    /// One dump at a time: each takes a turn of every lane.
    pub(super) dumps: Arc<tokio::sync::Semaphore>,
}

impl Index {
    fn new(parts: IndexParts) -> Self {
        Self {
            answerer: parts.answerer,
            pool: parts.pool,
            errors: QueryErrorMetrics::new(),
            readiness: parts.readiness,
            shard: parts.shard.and_then(|shard| HeaderValue::from_str(&shard).ok()),
            metrics: ArcSwap::default(),
            adding: Mutex::new(()),
            dumps: Arc::new(tokio::sync::Semaphore::new(1)),
        }
    }

    /// Counts queries that were answered, and what they found of their prompts.
    pub(super) fn count(
        &self,
        namespace: &NamespaceName,
        kind: QueryKind,
        queries: usize,
        elapsed: Duration,
        prompts: impl Iterator<Item = AnsweredPrompt>,
    ) {
        let known = self.metrics.load();
        let metrics = match known.get(namespace) {
            Some(metrics) => Arc::clone(metrics),
            None => self.add_metrics(namespace),
        };
        (0..queries).for_each(|_| metrics.answered(kind, elapsed));
        prompts.for_each(|prompt| metrics.found(prompt));
    }

    fn add_metrics(&self, namespace: &NamespaceName) -> Arc<QueryMetrics> {
        let _adding = self.adding.lock();
        let mut known = HashMap::clone(&self.metrics.load());
        if known.len() >= NAMESPACE_LABELS_MAX {
            known.clear();
        }
        let added = known
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(QueryMetrics::for_namespace(namespace_label(namespace.as_str()))));
        let added = Arc::clone(added);
        self.metrics.store(Arc::new(known));
        added
    }
}

/// What all requests share.
pub(super) struct Shared {
    index: Option<Index>,
    engines: Option<Arc<dyn EngineRegistry>>,
    metrics_source: Arc<dyn AdminSource>,
    metrics: PerLabel<HttpRoute, HttpMetrics>,
    token: Option<Secret>,
    body_bytes_max: usize,
    request_timeout: Duration,
    tracer: Option<Tracer>,
}

impl Shared {
    pub(super) fn new(parts: HttpParts) -> Self {
        Self {
            index: parts.index.map(Index::new),
            engines: parts.engines,
            metrics_source: parts.metrics,
            metrics: PerLabel::new(HttpMetrics::of_route),
            token: parts.token,
            body_bytes_max: parts.body_bytes_max,
            request_timeout: parts.request_timeout,
            tracer: parts.tracer,
        }
    }

    /// The index, once it may be asked.
    pub(super) fn index(&self) -> Result<&Index, HttpError> {
        let missing = || HttpError::NotFound("this process has no index; it only follows engines".to_owned());
        let index = self.index.as_ref().ok_or_else(missing)?;
        if index.readiness.may_answer() {
            return Ok(index);
        }
        let reasons = index.readiness.report().reasons().join("; ");
        Err(HttpError::Unavailable(format!("not ready: {reasons}")))
    }

    /// The bridge.
    pub(super) fn engines(&self) -> Result<&dyn EngineRegistry, HttpError> {
        let missing = || {
            let text = "no bridge runs in this process; start kvatlas up, or kvatlas bridge --http-listen";
            HttpError::NotFound(text.to_owned())
        };
        self.engines.as_deref().ok_or_else(missing)
    }

    /// Longest reply: it is made before it is sent.
    pub(super) fn reply_bytes_max(&self) -> usize {
        const REPLY_BYTES_MAX: usize = 64 << 20;
        REPLY_BYTES_MAX
    }
}

/// The body of a request, within the limits.
pub(super) struct Payload(Bytes);

impl Payload {
    /// What the body says.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, HttpError> {
        serde_json::from_slice(&self.0)
            .map_err(|error| HttpError::BadRequest(format!("the body is not what this route takes: {error}")))
    }
}

impl FromRequest<Arc<Shared>> for Payload {
    type Rejection = Response;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<Self, Response> {
        let is_contract = is_contract(request.uri().path());
        let body = read_body(request, shared).await;
        body.map(Self).map_err(|error| error.respond(!is_contract))
    }
}

async fn read_body(request: Request, shared: &Shared) -> Result<Bytes, HttpError> {
    let bytes_max = shared.body_bytes_max;
    let announced = request.headers().get(CONTENT_LENGTH);
    let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > bytes_max) {
        return Err(HttpError::BodyTooLarge { bytes_max });
    }
    let body = Limited::new(request.into_body(), bytes_max).collect();
    let timeout = shared.request_timeout;
    match tokio::time::timeout(timeout, body).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(HttpError::BodyTooLarge { bytes_max }),
        Ok(Err(error)) => Err(HttpError::BadRequest(format!("the body cannot be read: {error}"))),
        Err(_) => {
            let milliseconds = timeout.as_millis();
            Err(HttpError::BodyTimedOut { milliseconds })
        }
    }
}

/// Whether a path answers in the contract's words.
fn is_contract(path: &str) -> bool {
    path.starts_with("/v1/")
}

/// A route that takes one method.
struct Route {
    path: &'static str,
    method: &'static str,
    handler: MethodRouter<Arc<Shared>>,
}

/// All routes; `openapi.json` describes the same.
fn routes() -> Vec<Route> {
    let route = |method, path, handler| Route {
        path,
        method,
        handler,
    };
    vec![
        route("POST", "/v1/query", post(contract::query)),
        route("GET", "/v1/status", get(contract::holders_status)),
        route("POST", "/query", post(dialect::query)),
        route("POST", "/query_by_hash", post(dialect::query_by_hash)),
        route("POST", "/register", post(registration::register)),
        route("POST", "/unregister", post(registration::unregister)),
        route("GET", "/workers", get(workers::workers)),
        route("GET", "/dump", get(dump::dump)),
        route("GET", "/health", get(health)),
        route("GET", "/metrics", get(metrics)),
        route("GET", "/openapi.json", get(openapi::document)),
    ]
}

/// The method and path of every route.
#[cfg(test)]
pub(super) fn paths() -> Vec<(&'static str, &'static str)> {
    routes().iter().map(|route| (route.method, route.path)).collect()
}

/// The service for the listener.
pub(super) fn router(shared: &Arc<Shared>) -> Router {
    let mut router = Router::new();
    for route in routes() {
        let allowed = route.method;
        let other_method = move |State(shared): State<Arc<Shared>>, request: Request| async move {
            refuse(&HttpError::Method { allowed }, request, &shared).await
        };
        router = router.route(route.path, route.handler.fallback(other_method));
    }
    let unknown = |State(shared): State<Arc<Shared>>, request: Request| async move {
        refuse(&HttpError::NoRoute, request, &shared).await
    };
    let watched = axum::middleware::from_fn_with_state(Arc::clone(shared), watch);
    router
        .fallback(unknown)
        .layer(watched)
        .with_state(Arc::clone(shared))
}

/// An error in the words that belong to the path. A short body is read all the same, or the connection could not be used again.
async fn refuse(error: &HttpError, request: Request, shared: &Shared) -> Response {
    const DRAINED_BYTES_MAX: usize = 64 << 10;
    let response = error.respond(!is_contract(request.uri().path()));
    let body = Limited::new(request.into_body(), DRAINED_BYTES_MAX).collect();
    // Where it does not come, or is longer, the connection ends behind the response.
    let _ = tokio::time::timeout(shared.request_timeout, body).await;
    response
}

/// The span of a request, where it is to be traced.
fn span_of(shared: &Shared, route: HttpRoute, request: &Request) -> Option<OpenSpan> {
    let traceparent = request.headers().get(TRACEPARENT)?.to_str().ok()?;
    let tracer = shared.tracer.as_ref()?;
    let mut span = tracer.open(traceparent, "kvatlas http", SpanKind::Server)?;
    span.note("http.request.method", request.method().as_str());
    span.note("http.route", route.as_str());
    Some(span)
}

/// Lets in who may come in, counts, and traces what is to be traced.
async fn watch(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let route = HttpRoute::of_path(request.uri().path());
    let span = span_of(&shared, route, &request);
    let is_open = route == HttpRoute::Health;
    let mut response = if is_open || auth::is_allowed(request.headers(), shared.token.as_ref()) {
        next.run(request).await
    } else {
        refuse(&HttpError::Unauthorized, request, &shared).await
    };
    if let Some(shard) = shared.index.as_ref().and_then(|index| index.shard.as_ref()) {
        response.headers_mut().insert(SHARD.clone(), shard.clone());
    }
    if let Some(mut span) = span {
        let status = response.status();
        span.count("http.response.status_code", status.as_u16().into());
        if status.is_server_error() {
            span.fail(&status);
        }
    }
    shared
        .metrics
        .get(route)
        .answered(response.status().as_u16(), started.elapsed());
    response
}

/// A JSON response; `exact` says whether all holders in it are.
pub(super) fn json_response(body: &impl Serialize, exact: Option<bool>) -> Response {
    let bytes = match serde_json::to_vec(body) {
        Ok(bytes) => bytes,
        Err(error) => {
            let text = format!("the reply cannot be written: {error}");
            return HttpError::Unavailable(text).respond(true);
        }
    };
    let mut response = Response::new(Body::from(bytes));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, JSON);
    if let Some(exact) = exact {
        let value = if exact { "true" } else { "false" };
        headers.insert(EXACT.clone(), HeaderValue::from_static(value));
    }
    response
}

/// `GET /health`.
async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let Some(index) = &shared.index else {
        return json_response(&serde_json::json!({ "status": "ok" }), None);
    };
    if index.readiness.report().is_ready() {
        return json_response(&serde_json::json!({ "status": "ok" }), None);
    }
    let reasons = index.readiness.report().reasons();
    let mut response = json_response(
        &serde_json::json!({ "status": "unavailable", "reasons": reasons }),
        None,
    );
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

/// `GET /metrics`.
async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let mut response = Response::new(Body::from(shared.metrics_source.metrics()));
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

impl Shared {
    /// The index whether or not it may be asked yet, and the bridge; either may be missing.
    pub(super) fn known(&self) -> (Option<&Index>, Option<&dyn EngineRegistry>) {
        (self.index.as_ref(), self.engines.as_deref())
    }
}
