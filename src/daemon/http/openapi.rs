//! The OpenAPI document of all routes, and the handler that answers with it.

use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;

/// The OpenAPI document. A test compares it with the routes and with real answers.
pub(super) const DOCUMENT: &str = include_str!("openapi.json");

/// Answers `GET /openapi.json` with [`DOCUMENT`].
pub(super) async fn document() -> Response {
    let mut response = Response::new(Body::from(DOCUMENT));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}
