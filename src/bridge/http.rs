//! Questions to engines' servers over HTTP/1.1, with TLS where the URL says so. Answers are bounded in bytes; redirects are
//! not followed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use hyper::header::{ACCEPT, CONTENT_LENGTH};
use hyper::{Method, StatusCode, Uri};
use kvatlas_core::wire::Address;
use kvatlas_process::http;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::hosts::is_here;

pub(super) use kvatlas_process::http::HttpError;

/// Maximum size of an answer, in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerAddress {
    pub(super) is_secure: bool,
    /// A name or an address, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// The path after the port; `/` if the URL has no path.
    pub(super) path: String,
}

impl ServerAddress {
    /// Parses the address in `http://HOST:PORT` or `https://HOST:PORT`, with a path or without; `None` if the URL has
    /// another form.
    pub(super) fn parse(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        let is_secure = match uri.scheme_str()? {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            // The text behind the host is no port.
            None if authority.as_str() != authority.host() => return None,
            None if is_secure => 443,
            None => 80,
        };
        let has_user = authority.as_str().contains('@');
        let is_sound = !host.is_empty() && port > 0 && !has_user && uri.query().is_none();
        is_sound.then(|| Self {
            is_secure,
            host: host.to_owned(),
            port,
            path: uri.path().to_owned(),
        })
    }

    /// Parses the URL of an engine's server: an HTTP or HTTPS URL, `grpc://HOST:PORT` or `grpcs://HOST:PORT`. `None` if
    /// the URL has another form.
    pub(super) fn of_server(url: &str) -> Option<Self> {
        match url.strip_prefix("grpc") {
            Some(rest) => Self::parse(&format!("http{rest}")),
            None => Self::parse(url),
        }
    }

    /// Returns host and port, as a URL has them.
    pub(super) fn authority(&self) -> String {
        authority(&self.host, self.port)
    }
}

/// Returns the address to which requests for an engine go, from the `url` of the engine's server: `HOST:PORT`, or with
/// TLS a URL. `None` if the URL has a loopback or unspecified address: a router on another machine would take that
/// address for its own machine.
pub(super) fn address_of(url: &str) -> Option<Address> {
    let server = ServerAddress::of_server(url)?;
    let is_unspecified = |address: IpAddr| address.to_canonical().is_unspecified();
    if is_here(&server.host) || server.host.parse().is_ok_and(is_unspecified) {
        return None;
    }
    let authority = server.authority();
    let address = match url.split_once("://") {
        Some((scheme, _)) if server.is_secure => Address::new(&format!("{scheme}://{authority}")),
        _ => Address::new(&authority),
    };
    address.ok()
}

/// Joins a host and a port, as a URL has them: an IPv6 address in brackets.
pub(super) fn authority(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// A connection to a server.
pub(super) struct ServerConnection {
    connection: http::HttpConnection,
    peer: SocketAddr,
}

impl ServerConnection {
    /// Connects to a server, with TLS if the address says so.
    pub(super) async fn open(address: &ServerAddress) -> Result<Self, HttpError> {
        let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
        let peer = stream.peer_addr()?;
        let authority = address.authority();
        let connection = match address.is_secure {
            false => http::HttpConnection::on(stream, &authority).await?,
            true => {
                let name = ServerName::try_from(address.host.clone()).map_err(io::Error::other)?;
                let config = TLS.as_ref().map_err(|error| io::Error::other(error.clone()))?;
                let connector = TlsConnector::from(Arc::clone(config));
                http::HttpConnection::on(connector.connect(name, stream).await?, &authority).await?
            }
        };
        Ok(Self { connection, peer })
    }

    /// Returns the address of the server's machine.
    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns whether the server has ended the connection.
    pub(super) fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Sends a request without a body, and returns the status and the body of the answer. After an error the connection
    /// cannot be used again.
    pub(super) async fn ask(&mut self, method: Method, path: &str) -> Result<(StatusCode, Bytes), HttpError> {
        let request = self.connection.request(method, path);
        let request = request
            .header(ACCEPT, "application/json")
            .header(CONTENT_LENGTH, 0);
        self.connection.ask(request, Bytes::new(), ANSWER_BYTES_MAX).await
    }
}

/// Settings of TLS: servers' certificates are checked against the authorities that this machine trusts.
static TLS: LazyLock<Result<Arc<ClientConfig>, String>> = LazyLock::new(|| {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    Ok(Arc::new(
        builder.with_root_certificates(roots).with_no_client_auth(),
    ))
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_url_without_a_user() {
        let parsed = |url: &str| {
            let address = ServerAddress::parse(url)?;
            Some(format!(
                "{} {} {}",
                address.is_secure,
                address.authority(),
                address.path
            ))
        };
        for (url, expected) in [
            ("http://gpu-0:8000", "false gpu-0:8000 /"),
            ("https://gpu-0/v1", "true gpu-0:443 /v1"),
            ("http://[::1]:8000/", "false [::1]:8000 /"),
        ] {
            assert_eq!(parsed(url).as_deref(), Some(expected), "{url}");
        }
        for refused in [
            "tcp://gpu-0:8000",
            "gpu-0:8000",
            "http://a@b:1",
            "http://a:0",
            "http://a:",
            "http://a:70000",
            "http://a?b",
            "/x",
        ] {
            assert_eq!(parsed(refused), None, "{refused}");
        }
    }

    #[test]
    fn requests_go_to_the_server_unless_it_is_only_known_here() {
        for (url, expected) in [
            ("http://vllm-0:8000", Some("vllm-0:8000")),
            ("grpc://[fd00::7]:50051", Some("[fd00::7]:50051")),
            ("http://10.0.0.7:8000/kv_cache_events", Some("10.0.0.7:8000")),
            ("https://gpu-0.example", Some("https://gpu-0.example:443")),
            ("grpcs://gpu-0:50051", Some("grpcs://gpu-0:50051")),
            ("http://127.0.0.1:8000", None),
            ("http://LOCALHOST:8000", None),
            ("grpc://[::1]:8000", None),
            ("http://0.0.0.0:8000", None),
            ("tcp://vllm-0:5557", None),
        ] {
            let address = address_of(url);
            assert_eq!(address.as_ref().map(Address::as_str), expected, "{url}");
        }
    }
}
