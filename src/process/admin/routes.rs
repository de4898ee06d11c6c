//! Chooses the answer to each request. The functions do no I/O, and have no state of their own.

use bytes::Bytes;
use hyper::body::Body;
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, VARY};
use hyper::{Method, Request, Response, StatusCode};

use super::{AdminBody, AdminSource, Answering, PageRequest, WorkersQuery};

pub(super) const ROUTES: &str = "kvatlas admin listener\n\n\
    GET /metrics  metrics in Prometheus' text format\n\
    GET /livez    200 while the process runs\n\
    GET /readyz   200 if the daemon can serve, else 503; JSON\n\
    GET /workers  workers, at most 1000 unless told otherwise; JSON\n\
    \x20             ?namespace=NAME&worker=NAME&state=exact|degraded&reason=REASON&changes=true&limit=COUNT&after=NEXT\n\
    GET /index    sizes of the index by namespace; JSON\n\
    GET /vllm-router  of a bridge with --republish: flags of vLLM's router\n\
    \x20             ?host=NAME&model=NAME\n\
    \nA browser gets a page about all of this at /.\n";

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns the answer to one request. For a HEAD request, the HTTP library drops the body and keeps the header with its length.
pub(super) fn respond<B: Body>(request: &Request<B>, source: &dyn AdminSource) -> Answering {
    if let Some(answering) = respond_with_page(request, source) {
        return answering;
    }
    Box::pin(std::future::ready(respond_at_once(request, source)))
}

/// Returns the answer to a request that a browser makes for the page; `None` for any other request.
fn respond_with_page<B: Body>(request: &Request<B>, source: &dyn AdminSource) -> Option<Answering> {
    let path = request.uri().path();
    let is_page = path.starts_with("/page/") || path == "/" && accepts_html(request);
    if !is_page || request.method() != Method::GET || !request.body().is_end_stream() {
        return None;
    }
    // A page of another site, open in the operator's browser, must not make such requests.
    let site = request.headers().get("sec-fetch-site");
    if path != "/" && site.is_some_and(|site| site == "cross-site") {
        let refusal = text(StatusCode::FORBIDDEN, "Open the page itself.\n");
        return Some(Box::pin(std::future::ready(last(refusal))));
    }
    let query = request.uri().query().unwrap_or_default();
    source.page(PageRequest { path, query }).map(|answer| answer.0)
}

fn accepts_html<B>(request: &Request<B>) -> bool {
    let accepted = request.headers().get(ACCEPT).map(HeaderValue::as_bytes);
    accepted.is_some_and(|types| types.windows(9).any(|part| part == b"text/html"))
}

fn respond_at_once<B: Body>(request: &Request<B>, source: &dyn AdminSource) -> Response<AdminBody> {
    let path = request.uri().path();
    let Some(route) = Route::of(path) else {
        return last(text(
            StatusCode::NOT_FOUND,
            format!("There is no such path.\n\n{ROUTES}"),
        ));
    };
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let message = format!("{path} answers GET and HEAD only.\n");
        let response = text(StatusCode::METHOD_NOT_ALLOWED, message);
        return last(with_header(response, ALLOW, "GET, HEAD"));
    }
    if !request.body().is_end_stream() {
        return last(text(
            StatusCode::PAYLOAD_TOO_LARGE,
            "Send the request without a body.\n",
        ));
    }
    route.respond(request.uri().query(), source)
}

#[derive(Clone, Copy)]
enum Route {
    List,
    Metrics,
    Live,
    Ready,
    Workers,
    Index,
    RouterFlags,
}

impl Route {
    fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/" => Self::List,
            "/metrics" => Self::Metrics,
            "/livez" => Self::Live,
            "/readyz" => Self::Ready,
            "/workers" => Self::Workers,
            "/index" => Self::Index,
            "/vllm-router" => Self::RouterFlags,
            _ => return None,
        })
    }

    fn respond(self, query: Option<&str>, source: &dyn AdminSource) -> Response<AdminBody> {
        match self {
            // A browser gets the page from the same path.
            Self::List => with_header(text(StatusCode::OK, ROUTES), VARY, "Accept"),
            Self::Metrics => answer(StatusCode::OK, PROMETHEUS_TEXT, source.metrics()),
            Self::Live => text(StatusCode::OK, "ok"),
            Self::Ready => {
                let report = source.readiness();
                let status = if report.is_ready() {
                    StatusCode::OK
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                };
                answer(status, JSON, report.to_json())
            }
            Self::Workers => match WorkersQuery::parse(query) {
                Ok(query) => answer(StatusCode::OK, JSON, source.workers_json(&query)),
                Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
            },
            Self::Index => answer(StatusCode::OK, JSON, source.index_json()),
            Self::RouterFlags => match source.router_flags(query) {
                Some(Ok(flags)) => text(StatusCode::OK, flags),
                Some(Err(error)) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
                None => text(StatusCode::NOT_FOUND, "No engines are republished here.\n"),
            },
        }
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<AdminBody> {
    answer(status, TEXT, body)
}

fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<AdminBody> {
    let mut response = Response::new(AdminBody::whole(body));
    *response.status_mut() = status;
    let response = with_header(response, CONTENT_TYPE, content_type);
    // Every answer shows the state at this moment, so it must not be cached.
    with_header(response, CACHE_CONTROL, "no-store")
}

/// Marks the response as the last of its connection. Otherwise, a request's body that is not read would keep the connection busy.
fn last(response: Response<AdminBody>) -> Response<AdminBody> {
    with_header(response, CONNECTION, "close")
}

fn with_header(
    mut response: Response<AdminBody>,
    name: HeaderName,
    value: &'static str,
) -> Response<AdminBody> {
    response
        .headers_mut()
        .insert(name, HeaderValue::from_static(value));
    response
}
