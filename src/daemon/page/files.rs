//! Static files of the page: HTML, CSS and scripts.

use hyper::header::{CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY, VARY};
use hyper::{Response, StatusCode};

use kvatlas_process::admin::AdminBody;

use super::respond as respond_with;

/// Content-Security-Policy of the page. The page loads only its own files and answers, has no inline code, and may not
/// stand in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
     trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Path, content type and text of every file.
const FILES: [(&str, &str, &str); 15] = [
    ("/", HTML, include_str!("assets/index.html")),
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

/// Returns the response with the file at `path`. `None` if there is no such file.
pub(super) fn respond(path: &str) -> Option<Response<AdminBody>> {
    let (_, content_type, text) = FILES.iter().find(|(file, _, _)| *file == path)?;
    let mut response = respond_with(StatusCode::OK, content_type, AdminBody::whole(*text));
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(
        HeaderName::from_static("cross-origin-opener-policy"),
        HeaderValue::from_static("same-origin"),
    );
    // The same path answers clients that accept no HTML with the list of routes.
    headers.insert(VARY, HeaderValue::from_static("Accept"));
    Some(response)
}
