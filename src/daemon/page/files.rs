//! Static files of the page: HTML, CSS and scripts.

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::header::{CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, VARY};

use super::respond;

/// Content-Security-Policy of the page. The page loads only its own files and answers, has no inline code, and may not
/// stand in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
     trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Path, content type and text of every file that the page loads.
const FILES: [(&str, &str, &str); 14] = [
    ("/page/page.css", CSS, include_str!("assets/page.css")),
    ("/page/icon.svg", SVG, include_str!("assets/icon.svg")),
    ("/page/page.js", SCRIPT, include_str!("assets/page.js")),
    ("/page/text.js", SCRIPT, include_str!("assets/text.js")),
    ("/page/fleet.js", SCRIPT, include_str!("assets/fleet.js")),
    ("/page/trouble.js", SCRIPT, include_str!("assets/trouble.js")),
    ("/page/plots.js", SCRIPT, include_str!("assets/plots.js")),
    ("/page/atlas.js", SCRIPT, include_str!("assets/atlas.js")),
    (
        "/page/namespaces.js",
        SCRIPT,
        include_str!("assets/namespaces.js"),
    ),
    ("/page/matrix.js", SCRIPT, include_str!("assets/matrix.js")),
    ("/page/holder.js", SCRIPT, include_str!("assets/holder.js")),
    ("/page/promises.js", SCRIPT, include_str!("assets/promises.js")),
    ("/page/url.js", SCRIPT, include_str!("assets/url.js")),
    ("/page/ask.js", SCRIPT, include_str!("assets/ask.js")),
];

/// Returns the page itself.
pub(crate) fn home() -> Response {
    respond_with_file(HTML, include_str!("assets/index.html"))
}

/// Returns the routes of the files that the page loads.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES
        .iter()
        .fold(Router::new(), |router, (path, content_type, text)| {
            router.route(path, get(|| async { respond_with_file(content_type, text) }))
        })
}

fn respond_with_file(content_type: &'static str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        // The path of the page answers clients that accept no HTML with the list of routes.
        (VARY, "Accept"),
    ];
    (headers, respond(content_type, text)).into_response()
}
