//! Check of clients (callers) that want to change which engines the bridge follows.
//!
//! A browser sends a request to any address that a web page names, this machine included. So three kinds of requests
//! are refused:
//!
//! - The body's type is not JSON. A page of another site can send a body of another type without the browser's check.
//! - The header `Origin` or `Sec-Fetch-Site` shows that a page has sent the request.
//! - A request from this machine has a `Host` that is neither an address nor `localhost`. This prevents DNS rebinding,
//!   in which an attacker's name resolves to this machine.
//!
//! If every request needs the token of `http.token_file`, no page can send one, and only the body's type is checked.
//!
//! | client | without `http.token_file` |
//! |---|---|
//! | a program on this machine whose `Host` is an address or `localhost` | allowed |
//! | a program on another machine | allowed; if the bridge has made a token, only with that token |
//! | any other: a web page, another name for this machine | refused; if the bridge has made a token, allowed with that token |

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::header::{CONTENT_TYPE, HOST, ORIGIN};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue};

use kvatlas_config::Secret;
use kvatlas_process::listener::Peer;

use super::auth;
use super::error::HttpRefusal;
use super::shared::HttpShared;

/// Client that may change which engines the bridge follows. As an extractor, this type refuses the requests of all
/// other clients.
pub(super) struct Caller {
    /// Address from which the request came. `None` if the address is not known.
    pub(super) peer: Option<IpAddr>,
}

impl FromRequestParts<Arc<HttpShared>> for Caller {
    type Rejection = HttpRefusal;

    async fn from_request_parts(parts: &mut Parts, shared: &Arc<HttpShared>) -> Result<Self, HttpRefusal> {
        let peer = parts.extensions.get::<Peer>().map(|Peer(address)| *address);
        let peer = peer.map(|address: SocketAddr| address.ip().to_canonical());
        let made = shared.engines().ok().and_then(|engines| engines.register_token());
        check(&parts.headers, peer, shared.parts.token.is_some(), made)?;
        Ok(Self { peer })
    }
}

/// Checks that a client may change which engines the bridge follows. `has_token` says whether `http.token_file` names a
/// token. If it does, the client has shown this token before. `made` is the token that the bridge has made itself, if
/// any.
fn check(
    headers: &HeaderMap,
    peer: Option<IpAddr>,
    has_token: bool,
    made: Option<&Secret>,
) -> Result<(), HttpRefusal> {
    let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !content_type.is_some_and(is_json) {
        return Err(HttpRefusal::MediaType);
    }
    let is_of_program = headers.get(ORIGIN).is_none() && headers.get("sec-fetch-site").is_none();
    let is_here = peer.is_some_and(|peer| peer.is_loopback());
    let is_named_so = is_local(headers.get(HOST));
    if has_token || (is_of_program && is_here && is_named_so) {
        return Ok(());
    }
    match made {
        Some(token) if auth::is_allowed(headers, token) => Ok(()),
        Some(_) => Err(HttpRefusal::Forbidden(
            "only programs on this machine, at 127.0.0.1 or localhost, may do that without the token that kvatlas up has printed: send the \
             header Authorization: Bearer TOKEN"
                .to_owned(),
        )),
        None if is_of_program && !is_here => Ok(()),
        None => Err(HttpRefusal::Forbidden(
            "web pages, and requests to this machine under another name than localhost or its address, need a token: set http.token_file \
             (--http-token-file)"
                .to_owned(),
        )),
    }
}

fn is_json(content_type: &[u8]) -> bool {
    let media_type = content_type.split(|byte| *byte == b';').next();
    media_type.is_some_and(|text| text.trim_ascii().eq_ignore_ascii_case(b"application/json"))
}

/// Whether a host is an address or `localhost`. Any other name could belong to an attacker who lets it resolve to this
/// machine.
fn is_local(host: Option<&HeaderValue>) -> bool {
    let authority = host.and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    authority.is_some_and(|authority| {
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
            .collect()
    }

    fn status(peer: &str, list: &[(&'static str, &'static str)], made: Option<&Secret>) -> u16 {
        let checked = check(&headers(list), peer.parse().ok(), false, made);
        checked.map_or_else(|error| error.respond(true).status().as_u16(), |()| 200)
    }

    const JSON: (&str, &str) = ("content-type", "application/json; charset=utf-8");
    const HERE: (&str, &str) = ("host", "127.0.0.1:8090");

    #[test]
    fn what_a_page_of_another_site_can_send_is_refused() {
        let made = Secret::new("made");
        for token in [None, Some(&made)] {
            assert_eq!(status("127.0.0.1", &[JSON, HERE], token), 200);
            assert_eq!(
                status("127.0.0.1", &[JSON, ("host", "localhost:8090")], token),
                200
            );
            assert_eq!(status("::1", &[JSON, ("host", "[::1]:8090")], token), 200);
            let refused = [
                (vec![("content-type", "text/plain"), HERE], 415),
                (vec![HERE], 415),
                (vec![JSON, HERE, ("origin", "http://evil.example")], 403),
                (vec![JSON, HERE, ("origin", "null")], 403),
                (vec![JSON, HERE, ("sec-fetch-site", "cross-site")], 403),
                (vec![JSON, ("host", "evil.example:8090")], 403),
                (vec![JSON, ("host", "127.0.0.1.evil.example")], 403),
                (vec![JSON], 403),
            ];
            for (list, expected) in refused {
                assert_eq!(status("127.0.0.1", &list, token), expected, "{list:?}");
            }
        }
    }

    #[test]
    fn a_token_lets_in_whoever_has_it() {
        let made = Secret::new("made");
        let elsewhere = [JSON, ("host", "kvatlas:8090")];
        assert_eq!(status("10.0.0.7", &elsewhere, None), 200);
        assert_eq!(status("10.0.0.7", &elsewhere, Some(&made)), 403);
        let wrong = [JSON, ("host", "kvatlas:8090"), ("authorization", "Bearer x")];
        assert_eq!(status("10.0.0.7", &wrong, Some(&made)), 403);
        let page = ("origin", "http://tools.example");
        let right = [
            JSON,
            page,
            ("host", "kvatlas:8090"),
            ("authorization", "Bearer made"),
        ];
        assert_eq!(status("10.0.0.7", &right, Some(&made)), 200);
        // The request has already shown the token of the configuration.
        assert!(check(&headers(&[JSON, page]), None, true, None).is_ok());
        assert!(check(&headers(&[page]), None, true, None).is_err());
    }
}
