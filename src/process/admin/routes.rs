//! The routes of the admin listener.

use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Body;
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderMap, HeaderValue, VARY};
use hyper::{Method, StatusCode, Uri};

use super::{AdminSource, WorkersQuery};

const ROUTES: &str = "kvatlas admin listener\n\n\
    GET /metrics  metrics in Prometheus' text format\n\
    GET /livez    200 while the process runs\n\
    GET /readyz   200 if the daemon can serve, else 503; JSON\n\
    GET /workers  workers, at most 1000 unless told otherwise; JSON\n\
    \x20             ?namespace=NAME&worker=NAME&state=exact|degraded&reason=REASON&changes=true&limit=COUNT&after=NEXT\n\
    GET /index    sizes of the index by namespace; JSON\n\
    GET /vllm-router  of a bridge with --republish: flags of vLLM's router\n\
    \x20             ?host=NAME&model=NAME\n\
    \nA browser gets a page about all of this at /.\n";

const JSON: &str = "application/json";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

type AdminState = State<Arc<dyn AdminSource>>;

/// Builds the service that the listener serves.
pub(super) fn router(source: Arc<dyn AdminSource>) -> Router {
    let page = source.page();
    let metrics = |State(source): AdminState| async move { typed(PROMETHEUS_TEXT, source.metrics()) };
    let index = |State(source): AdminState| async move { typed(JSON, source.index_json()) };
    let unknown = || async {
        (
            StatusCode::NOT_FOUND,
            format!("There is no such path.\n\n{ROUTES}"),
        )
    };
    Router::new()
        .route("/", get(home))
        .route("/metrics", get(metrics))
        .route("/livez", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/workers", get(workers))
        .route("/index", get(index))
        .route("/vllm-router", get(router_flags))
        .with_state(source)
        .merge(page)
        .method_not_allowed_fallback(other_method)
        .fallback(unknown)
        .layer(from_fn(guard))
}

fn typed(content_type: &'static str, body: String) -> impl IntoResponse {
    ([(CONTENT_TYPE, content_type)], body)
}

/// Answers a request, unless it must be refused. Refused are requests that have a body, and requests for the page's
/// data that come from a page of another site.
async fn guard(request: Request, next: Next) -> Response {
    let has_body = !request.body().is_end_stream();
    // A page of another site, open in the operator's browser, must not make such requests.
    let site = request.headers().get("sec-fetch-site");
    let is_foreign =
        request.uri().path().starts_with("/page/") && site.is_some_and(|site| site == "cross-site");
    let mut response = match *request.method() {
        _ if is_foreign => (StatusCode::FORBIDDEN, "Open the page itself.\n").into_response(),
        Method::GET | Method::HEAD if has_body => {
            let text = "Send the request without a body.\n";
            (StatusCode::PAYLOAD_TOO_LARGE, text).into_response()
        }
        _ => next.run(request).await,
    };
    // Every answer shows the state at this moment, so it must not be cached.
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if has_body {
        // The body is not read, and would keep the connection busy.
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn other_method(uri: Uri) -> impl IntoResponse {
    let text = format!("{} answers GET and HEAD only.\n", uri.path());
    (StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "GET, HEAD")], text)
}

async fn home(State(source): AdminState, headers: HeaderMap) -> Response {
    let accepted = headers.get(ACCEPT).map(HeaderValue::as_bytes);
    let is_browser = accepted.is_some_and(|types| types.windows(9).any(|part| part == b"text/html"));
    let page = is_browser.then(|| source.home()).flatten();
    page.unwrap_or_else(|| ([(VARY, "Accept")], ROUTES).into_response())
}

async fn ready(State(source): AdminState) -> impl IntoResponse {
    let report = source.readiness();
    let status = match report.is_ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, typed(JSON, report.to_json()))
}

async fn workers(State(source): AdminState, RawQuery(query): RawQuery) -> Response {
    match WorkersQuery::parse(query.as_deref()) {
        Ok(query) => typed(JSON, source.workers_json(&query)).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn router_flags(State(source): AdminState, RawQuery(query): RawQuery) -> Response {
    match source.router_flags(query.as_deref()) {
        Some(Ok(flags)) => flags.into_response(),
        Some(Err(error)) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
        None => (StatusCode::NOT_FOUND, "No engines are republished here.\n").into_response(),
    }
}
