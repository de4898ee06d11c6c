//! Common base of all routes: the state that they share, the bodies of requests, and JSON responses.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use kvatlas_core::wire::ModelKey;

use super::auth::TokenFile;
use crate::outcomes::Outcomes;
use crate::queries::Source;
use crate::traces::Tracer;
use kvatlas_process::admin::{AdminSource, Readiness};
use kvatlas_telemetry::labels::{HttpRoute, PerLabel};
use kvatlas_telemetry::{HttpMetrics, QueryErrorMetrics, QueryMetricsByNamespace};

use super::answers::AnswerRoom;
use super::bodies::{Bodies, BodyLimits, ReceivedBody};
use super::error::HttpRefusal;
use super::fields::{self, Unknown};
use super::scores::Scores;
use kvatlas_process::registry::EngineRegistry;

/// Header that tells whether an answer is certain.
static EXACT: HeaderName = HeaderName::from_static("x-kvatlas-exact");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Parts of the process that the routes use.
pub struct HttpParts {
    /// Index of the daemon. `None` in a process that only runs a bridge.
    pub(crate) index: Option<Index>,
    /// Bridge that follows engines. `None` if no bridge runs in this process.
    pub engines: Option<Arc<dyn EngineRegistry>>,
    /// Source of the metrics that `/metrics` returns.
    pub metrics: Arc<dyn AdminSource>,
    /// Token that requests need. `None` if requests need no token.
    pub token: Option<TokenFile>,
    /// Maximum length of a request's body, in bytes.
    pub body_bytes_max: usize,
    /// Maximum size of all request bodies together, in bytes. A body counts until its request is answered.
    pub receiving_bytes_max: usize,
    /// Maximum time for a request's body to arrive.
    pub request_timeout: Duration,
    /// Tracer that opens trace spans. `None` if no collector is configured.
    pub(crate) tracer: Option<Tracer>,
}

impl HttpParts {
    /// Returns the parts for a process that only runs a bridge. Its routes serve the registration of engines.
    pub fn of_bridge(
        engines: Arc<dyn EngineRegistry>,
        metrics: Arc<dyn AdminSource>,
        token: Option<TokenFile>,
    ) -> Self {
        Self {
            index: None,
            engines: Some(engines),
            metrics,
            token,
            body_bytes_max: 64 << 10,
            receiving_bytes_max: 4 << 20,
            request_timeout: Duration::from_secs(10),
            tracer: None,
        }
    }
}

/// Index, with the metrics of the queries that are answered from it.
pub(crate) struct Index {
    /// Index or shards that answer queries.
    pub(super) source: Arc<Source>,
    pub(super) errors: QueryErrorMetrics,
    /// Readiness of the daemon: queries are answered once it is ready.
    pub(super) readiness: Arc<Readiness>,
    /// Record of outcomes: for each request, the cached blocks that it found, and the blocks that an answer had
    /// promised.
    pub(super) outcomes: Arc<Outcomes>,
    /// Shard of the daemon, that is, its part of the workers. `None` if the daemon knows all workers.
    pub(super) shard: Option<HeaderValue>,
    /// Metrics of each namespace that queries have been about.
    pub(super) metrics: QueryMetricsByNamespace,
    /// Semaphore that lets one dump run at a time, because a dump takes time of every lane.
    pub(super) dumps: Arc<tokio::sync::Semaphore>,
}

impl Index {
    pub(crate) fn new(
        source: Arc<Source>,
        readiness: Arc<Readiness>,
        outcomes: Arc<Outcomes>,
        shard: Option<String>,
    ) -> Self {
        Self {
            source,
            errors: QueryErrorMetrics::new(),
            readiness,
            outcomes,
            shard: shard.and_then(|shard| HeaderValue::from_str(&shard).ok()),
            metrics: QueryMetricsByNamespace::default(),
            dumps: Arc::new(tokio::sync::Semaphore::new(1)),
        }
    }
}

/// State that all HTTP requests share.
pub(super) struct HttpShared {
    pub(super) parts: HttpParts,
    pub(super) metrics: PerLabel<HttpRoute, HttpMetrics>,
    pub(super) bodies: Bodies,
    pub(super) answers: AnswerRoom,
}

impl HttpShared {
    pub(super) fn new(parts: HttpParts) -> Self {
        Self {
            metrics: PerLabel::new(HttpMetrics::of_route),
            bodies: Bodies::new(BodyLimits {
                all_bytes_max: parts.receiving_bytes_max,
                body_bytes_max: parts.body_bytes_max,
                timeout: parts.request_timeout,
                setting: "http.max_receiving_bytes",
            }),
            answers: AnswerRoom::new(parts.receiving_bytes_max, parts.request_timeout),
            parts,
        }
    }

    /// Returns the index. Fails if the process has no index, or if the daemon is not ready.
    pub(super) fn index(&self) -> Result<&Index, HttpRefusal> {
        let missing =
            || HttpRefusal::NotFound("this process has no index; it only follows engines".to_owned());
        let index = self.parts.index.as_ref().ok_or_else(missing)?;
        if index.readiness.may_answer() {
            return Ok(index);
        }
        let reasons = index.readiness.report().reasons().join("; ");
        Err(HttpRefusal::Unavailable(format!("not ready: {reasons}")))
    }

    /// Returns the bridge. Fails if no bridge runs in this process.
    pub(super) fn engines(&self) -> Result<&dyn EngineRegistry, HttpRefusal> {
        let missing = || {
            let text = "no bridge runs in this process; start kvatlas up, or kvatlas bridge --http-listen";
            HttpRefusal::NotFound(text.to_owned())
        };
        self.parts.engines.as_deref().ok_or_else(missing)
    }

    /// Returns an empty result for a query about a model that has sent no events. The result counts as not certain,
    /// because the engines of the model that the bridge follows may have blocks. `None` if the bridge follows no engine
    /// of the model.
    pub(super) fn followed(&self, model: &ModelKey) -> Option<Scores> {
        let engines = self.parts.engines.as_ref()?.engines();
        let own = engines.iter().find(|state| state.engine.key.model == *model)?;
        Some(Scores::new(own.engine.block_size, Vec::new(), true, |_| false))
    }

    /// Returns the index, even if it is not ready, and the bridge. Each is `None` if this process does not have it.
    pub(super) fn known(&self) -> (Option<&Index>, Option<&dyn EngineRegistry>) {
        (self.parts.index.as_ref(), self.parts.engines.as_deref())
    }

    /// Returns the maximum length of a reply, in bytes. The bound exists because a reply is built whole before it is
    /// sent.
    pub(super) fn reply_bytes_max(&self) -> usize {
        const REPLY_BYTES_MAX: usize = 8 << 20;
        REPLY_BYTES_MAX
    }
}

/// Body of a request, received within the limits. Dropping it frees its memory for other bodies.
pub(super) struct Payload(ReceivedBody);

impl Payload {
    /// Reads the body as a JSON object. `unknown` says how fields that the route does not know are treated.
    pub(super) fn json<T: DeserializeOwned>(&self, unknown: Unknown) -> Result<T, HttpRefusal> {
        fields::read(self.object()?, unknown)
    }

    /// Returns the bytes of the body if they begin like a JSON object, else fails. The check is needed because serde
    /// would also read an array as the fields of a struct, in their order.
    pub(super) fn object(&self) -> Result<&[u8], HttpRefusal> {
        let bytes = &self.0.bytes;
        match bytes.trim_ascii_start().first() {
            Some(b'{') => Ok(bytes),
            _ => Err(HttpRefusal::BadRequest("the body is no JSON object".to_owned())),
        }
    }
}

impl FromRequest<Arc<HttpShared>> for Payload {
    type Rejection = HttpRefusal;

    async fn from_request(request: Request, shared: &Arc<HttpShared>) -> Result<Self, HttpRefusal> {
        shared.bodies.receive(request).await.map(Self)
    }
}

/// Builds a JSON response. `exact`, if present, becomes the header that tells whether the answer is certain.
pub(super) fn json_response(body: &impl Serialize, exact: Option<bool>) -> Response {
    let bytes = match serde_json::to_vec(body) {
        Ok(bytes) => bytes,
        Err(error) => {
            let text = format!("the reply cannot be written: {error}");
            return HttpRefusal::Unavailable(text).into_response();
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
