//! The routes, and the handling that all requests share: tokens, metrics and tracing.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};

use crate::traces::{OpenSpan, SpanKind, TRACEPARENT};
use kvatlas_process::listener::{ConnectionHandle, Peer, source_of};
use kvatlas_telemetry::labels::{HttpRoute, LabelValue};

use super::answers::AnswerReader;
use super::error::HttpRefusal;
use super::shared::{HttpShared, json_response};
use super::{contract, dialect, dump, lookup, models, openapi, registration, reports, workers};

/// Header with the shard that answers. Absent if workers are not divided into shards.
static SHARD: HeaderName = HeaderName::from_static("x-kvatlas-shard");

/// Route that takes one HTTP method.
struct MethodRoute {
    path: &'static str,
    method: &'static str,
    handler: MethodRouter<Arc<HttpShared>>,
}

/// Returns all routes. `openapi.json` describes the same routes.
fn routes() -> Vec<MethodRoute> {
    let route = |method, path, handler| MethodRoute {
        path,
        method,
        handler,
    };
    vec![
        route("POST", "/v1/query", post(contract::query)),
        route("GET", "/v1/status", get(contract::holders_status)),
        route("GET", "/v1/models", get(models::models)),
        route("POST", "/v1/outcomes", post(reports::outcomes)),
        route("POST", "/v1/hints", post(reports::hints)),
        route("POST", "/query", post(dialect::query)),
        route("POST", "/query_by_hash", post(dialect::query_by_hash)),
        route("POST", "/lookup", post(lookup::lookup)),
        route("POST", "/register", post(registration::register)),
        route("POST", "/unregister", post(registration::unregister)),
        route("GET", "/workers", get(workers::workers)),
        route("GET", "/dump", get(dump::dump)),
        route("GET", "/health", get(health)),
        route("GET", "/metrics", get(metrics)),
        route("GET", "/openapi.json", get(openapi::document)),
    ]
}

/// Returns the method and path of every route.
#[cfg(test)]
pub(super) fn paths() -> Vec<(&'static str, &'static str)> {
    routes().iter().map(|route| (route.method, route.path)).collect()
}

/// Builds the service that the listener serves.
pub(super) fn router(shared: &Arc<HttpShared>) -> Router {
    let mut router = Router::new();
    for route in routes() {
        let allowed = route.method;
        let other_method = move |State(shared): State<Arc<HttpShared>>, request: Request| async move {
            refuse(HttpRefusal::Method { allowed }, request, &shared).await
        };
        router = router.route(route.path, route.handler.fallback(other_method));
    }
    let unknown = |State(shared): State<Arc<HttpShared>>, request: Request| async move {
        refuse(HttpRefusal::NoRoute, request, &shared).await
    };
    let watched = axum::middleware::from_fn_with_state(Arc::clone(shared), watch);
    router
        .fallback(unknown)
        .layer(watched)
        .with_state(Arc::clone(shared))
}

/// Answers with an error. A short request body is read nevertheless, so that the connection can be used again.
async fn refuse(error: HttpRefusal, request: Request, shared: &HttpShared) -> HttpRefusal {
    shared.bodies.drain(request).await;
    error
}

/// Opens the trace span of a request. `None` if the request is not to be traced.
fn span_of(shared: &HttpShared, route: HttpRoute, request: &Request) -> Option<OpenSpan> {
    let traceparent = request.headers().get(TRACEPARENT)?.to_str().ok()?;
    let tracer = shared.parts.tracer.as_ref()?;
    let mut span = tracer.open(traceparent, "kvatlas http", SpanKind::Server)?;
    span.note("http.request.method", request.method().as_str());
    span.note("http.route", route.as_str());
    Some(span)
}

/// Runs the steps that every request needs around its route: checks the token, writes errors, counts the request, and traces it
/// if it is to be traced.
async fn watch(State(shared): State<Arc<HttpShared>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let route = HttpRoute::of_path(request.uri().path());
    // Errors are answered in the contract's format on its own routes, and in the dialects' format on the others.
    let is_contract = request.uri().path().starts_with("/v1/");
    let span = span_of(&shared, route, &request);
    let is_open = route == HttpRoute::Health;
    let peer = request.extensions().get::<Peer>();
    let reader = AnswerReader {
        source: peer.map(|peer| source_of(peer.0.ip())),
        connection: request.extensions().get::<ConnectionHandle>().cloned(),
    };
    let token = shared.parts.token.as_ref();
    let mut response = if is_open || token.is_none_or(|token| token.allows(request.headers())) {
        next.run(request).await
    } else {
        refuse(HttpRefusal::Unauthorized, request, &shared)
            .await
            .into_response()
    };
    response = shared.answers.hold(response, reader).await;
    if let Some(error) = response.extensions_mut().remove::<HttpRefusal>() {
        response = error.respond(!is_contract);
    }
    if let Some(shard) = shared.parts.index.as_ref().and_then(|index| index.shard.as_ref()) {
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

/// Answers `GET /health`: status 200 if the daemon is ready or the process has no index, else 503 with the reasons.
async fn health(State(shared): State<Arc<HttpShared>>) -> Response {
    let Some(index) = &shared.parts.index else {
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

/// Answers `GET /metrics` in Prometheus' text format.
async fn metrics(State(shared): State<Arc<HttpShared>>) -> Response {
    let mut response = Response::new(Body::from(shared.parts.metrics.metrics()));
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}
