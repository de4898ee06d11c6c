//! Which request gets which answer. Pure: no I/O, no state but the source's.

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Body;
use hyper::header::{ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};

use super::{AdminSource, WorkersQuery};

pub(super) const ROUTES: &str = "kvatlas admin listener\n\n\
    GET /metrics                            metrics in Prometheus' text format\n\
    GET /livez                              200 while the process runs\n\
    GET /readyz                             200 if the daemon can serve, else 503; JSON\n\
    GET /workers?namespace=NAME&limit=COUNT workers, at most 1000 unless told otherwise; JSON\n\
    GET /index                              sizes of the index by namespace; JSON\n";

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The answer to one request. The body of an answer to HEAD is left off by the HTTP library, which keeps its length.
pub(super) fn respond<B: Body>(request: &Request<B>, source: &dyn AdminSource) -> Response<Full<Bytes>> {
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
            _ => return None,
        })
    }

    fn respond(self, query: Option<&str>, source: &dyn AdminSource) -> Response<Full<Bytes>> {
        match self {
            Self::List => text(StatusCode::OK, ROUTES),
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
        }
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    answer(status, TEXT, body)
}

fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let response = with_header(response, CONTENT_TYPE, content_type);
    // Every answer is about this moment.
    with_header(response, CACHE_CONTROL, "no-store")
}

/// Ends the connection after this response, so that a body which nobody reads can't hold it.
fn last(response: Response<Full<Bytes>>) -> Response<Full<Bytes>> {
    with_header(response, CONNECTION, "close")
}

fn with_header(
    mut response: Response<Full<Bytes>>,
    name: HeaderName,
    value: &'static str,
) -> Response<Full<Bytes>> {
    response
        .headers_mut()
        .insert(name, HeaderValue::from_static(value));
    response
}
