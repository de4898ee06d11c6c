//! HTTP client for the admin listener of a daemon, gateway or bridge.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, StatusCode, Uri};
use kvatlas_config::process_environment;
use kvatlas_process::http::{HttpConnection, HttpError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::connect::parse_time;
use super::failure::Failure;

/// Largest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Default port of the admin listener.
const PORT: u16 = 9464;
const LISTEN_VARIABLE: &str = "KVATLAS_ADMIN_LISTEN";
/// Time without any byte after which a stream of events counts as lost. The streams that are read here have an event
/// every second.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Address of a daemon's admin listener, and how long to wait for it.
#[derive(Debug, Args)]
pub(super) struct AdminClientArguments {
    /// The daemon's admin listener: HOST, HOST:PORT or http://HOST:PORT [default: 127.0.0.1:9464] [environment:
    /// KVATLAS_ADMIN_LISTEN].
    #[arg(long = "admin", value_name = "ADDRESS")]
    address: Option<String>,
    /// How long to wait for an answer: 5, 2.5s or 500ms.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    pub(super) timeout: Duration,
}

/// Client for one admin listener.
#[derive(Debug, Clone)]
pub(super) struct AdminClient {
    /// Address of the listener as `HOST:PORT`.
    authority: String,
    timeout: Duration,
}

/// Answer of the route `/readyz`.
#[derive(Debug, Deserialize)]
pub(super) struct ReadinessAnswer {
    pub(super) ready: bool,
    pub(super) reasons: Vec<String>,
    /// The precondition of readiness (latch) that is not met and that the others mostly wait for. An older daemon leaves
    /// it out.
    #[serde(default)]
    pub(super) awaited: Option<String>,
}

/// The role of a process with an admin listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProcessRole {
    /// Gateway: it asks shards, and keeps no index.
    Gateway,
    /// Bridge: it follows engines.
    Bridge,
    /// Daemon: it keeps an index. An answer without a role comes from an older daemon.
    #[default]
    #[serde(other)]
    Daemon,
}

/// Role in an answer of the route `/index`.
#[derive(Debug, Deserialize)]
struct RoleAnswer {
    #[serde(default)]
    role: ProcessRole,
}

impl ProcessRole {
    /// Returns the role as a word for people.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Bridge => "bridge",
            Self::Daemon => "daemon",
        }
    }

    /// Whether a process of this role keeps an index of holders.
    pub(super) fn keeps_an_index(self) -> bool {
        self == Self::Daemon
    }

    /// Returns a hint that says whose admin listener to ask instead of this one; `None` for a daemon, which keeps an
    /// index.
    pub(super) fn hint(self) -> Option<&'static str> {
        match self {
            Self::Gateway => {
                Some("this is a gateway, which keeps no index: ask the shards' admin listeners\n")
            }
            Self::Bridge => Some("this is a bridge, which keeps no index: ask a daemon's admin listener\n"),
            Self::Daemon => None,
        }
    }
}

impl AdminClientArguments {
    /// Makes arguments for the listener at `address`. If it is `None`, the address in the environment or the default is
    /// used.
    pub(super) fn at(address: Option<String>, timeout: Duration) -> Self {
        Self { address, timeout }
    }

    /// Returns a client for the listener that the flag, the environment or the default names.
    pub(super) fn client(&self) -> Result<AdminClient, Failure> {
        let environment = process_environment().into_iter();
        let mut set = environment
            .filter(|(name, value)| name == LISTEN_VARIABLE && !value.is_empty())
            .map(|(_, value)| value);
        let address = match self.address.clone() {
            Some(address) => address,
            None => configured(set.next())?,
        };
        let authority = authority(&address).ok_or_else(|| {
            Failure::usage(format_args!(
                "{address:?} is not the address of an admin listener; write HOST:PORT, such as 127.0.0.1:{PORT}"
            ))
        })?;
        Ok(AdminClient {
            authority: reachable(authority),
            timeout: self.timeout,
        })
    }
}

/// Returns the address in the environment variable, or the default address. Fails if the variable is `off`.
fn configured(variable: Option<String>) -> Result<String, Failure> {
    match variable {
        Some(address) if address == "off" => Err(Failure::usage(format_args!(
            "{LISTEN_VARIABLE} is off: there is no admin listener to ask; name another daemon's with --admin"
        ))),
        Some(address) => Ok(address),
        None => Ok(format!("127.0.0.1:{PORT}")),
    }
}

/// Returns `HOST:PORT` of an address with or without `http://` and a port; `None` if it is no such address.
fn authority(text: &str) -> Option<String> {
    let bare = text.strip_prefix("http://").unwrap_or(text);
    let bare = bare.strip_suffix('/').unwrap_or(bare);
    let uri: Uri = format!("http://{bare}/").parse().ok()?;
    let authority = uri.authority()?;
    let is_plain = uri.path() == "/" && uri.query().is_none() && !bare.contains(['/', '@']);
    // The text after the host must be a port. Otherwise the default port would be asked instead of the intended one.
    let port = match authority.as_str().strip_prefix(authority.host())? {
        "" => PORT,
        written => written.strip_prefix(':')?.parse().ok()?,
    };
    (is_plain && port != 0).then(|| format!("{}:{port}", authority.host()))
}

/// Returns the address at which this machine can reach the listener. If the listener uses all addresses of the machine,
/// this is the loopback address.
fn reachable(authority: String) -> String {
    let Ok(listens) = authority.parse::<SocketAddr>() else {
        return authority;
    };
    let ip = match listens.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listens.port()).to_string()
}

impl AdminClient {
    /// Returns the address of the listener as `HOST:PORT`.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// Asks for the path `target`. Returns the status and the body of the answer, even if the status is an error.
    pub(super) async fn body(&self, target: &str) -> Result<(StatusCode, Bytes), Failure> {
        let answering = async {
            let mut connection = self.connect().await?;
            let request = connection.request(Method::GET, target);
            let asked = connection.ask(request, Bytes::new(), ANSWER_BYTES_MAX).await;
            asked.map_err(|error| self.broken(&error))
        };
        self.in_time(answering).await
    }

    /// Asks whether the process is ready. The answer tells the reasons if it is not.
    pub(super) async fn readiness(&self) -> Result<ReadinessAnswer, Failure> {
        self.json("/readyz").await
    }

    /// Returns the JSON answer at the path `target`. The status may be a success or 503 (not ready).
    pub(super) async fn json<T: DeserializeOwned>(&self, target: &str) -> Result<T, Failure> {
        let (status, body) = self.body(target).await?;
        let is_answer = status.is_success() || status == StatusCode::SERVICE_UNAVAILABLE;
        serde_json::from_slice(&body)
            .ok()
            .filter(|_| is_answer)
            .ok_or_else(|| {
                Failure::failed(format_args!(
                    "{} answers {target} with {status} and not with what an admin listener of kvatlas says",
                    self.authority
                ))
            })
    }

    /// Opens the stream of server-sent events at the path `target`.
    pub(super) async fn events(&self, target: &str) -> Result<Events, Failure> {
        let answering = async {
            let mut connection = self.connect().await?;
            let request = connection.request(Method::GET, target);
            let sent = connection.send(request, Bytes::new()).await;
            sent.map_err(|error| self.broken(&error))
        };
        let response = self.in_time(answering).await?;
        match response.status() {
            StatusCode::OK => Ok(Events {
                body: response.into_body(),
                buffer: Vec::new(),
                heard: Instant::now(),
                silence_max: SILENCE_MAX,
            }),
            StatusCode::SERVICE_UNAVAILABLE => Err(Failure::unavailable(format_args!(
                "{} has no room for another viewer; close a page or another `kvatlas top`",
                self.authority
            ))),
            status => Err(self.without_stream(status).await),
        }
    }

    /// Returns the failure for a listener that answers with `status` in place of a stream of events: a bridge has none.
    async fn without_stream(&self, status: StatusCode) -> Failure {
        let answer = self.json::<RoleAnswer>("/index").await;
        let hint = answer.ok().and_then(|answer| answer.role.hint());
        let said = match hint.filter(|_| status == StatusCode::NOT_FOUND) {
            Some(hint) => hint.trim_end().to_owned(),
            None => format!("answers {status}; is it an older kvatlas?"),
        };
        Failure::failed(format_args!("{}: {said}", self.authority))
    }

    async fn connect(&self) -> Result<HttpConnection, Failure> {
        let opened = HttpConnection::open(&self.authority).await;
        opened.map_err(|error| match error {
            HttpError::Connection(error) => Failure::unavailable(format_args!(
                "no admin listener answers at {} ({error}); name the daemon's admin.listen with --admin",
                self.authority
            )),
            error => self.broken(&error),
        })
    }

    async fn in_time<T>(&self, answering: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        tokio::time::timeout(self.timeout, answering).await.map_err(|_| {
            Failure::unavailable(format_args!(
                "the admin listener at {} did not answer within {:?}",
                self.authority, self.timeout
            ))
        })?
    }

    fn broken(&self, error: &HttpError) -> Failure {
        let error: &dyn std::fmt::Display = match error {
            HttpError::Body(error) => error,
            error => error,
        };
        Failure::unavailable(format_args!("the admin listener at {}: {error}", self.authority))
    }
}

/// A stream of server-sent events.
#[derive(Debug)]
pub(super) struct Events {
    body: Incoming,
    buffer: Vec<u8>,
    /// Time at which the last bytes came, or the stream was opened.
    heard: Instant,
    /// Time without any byte after which the stream counts as lost.
    silence_max: Duration,
}

impl Events {
    /// Returns the name and the data of the next event; `None` at the end of the stream, or once nothing has come for a
    /// few seconds. The future can be dropped at any time.
    pub(super) async fn next(&mut self) -> Option<(String, String)> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
                let message: Vec<u8> = self.buffer.drain(..end + 2).collect();
                return Some(parse(&String::from_utf8_lossy(&message)));
            }
            let frame = tokio::time::timeout_at(self.heard + self.silence_max, self.body.frame());
            let chunk = frame.await.ok()??.ok()?.into_data().ok()?;
            self.heard = Instant::now();
            if self.buffer.len() + chunk.len() > ANSWER_BYTES_MAX {
                return None;
            }
            self.buffer.extend_from_slice(&chunk);
        }
    }
}

fn parse(message: &str) -> (String, String) {
    let field = |name: &str| {
        let mut lines = message.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().unwrap_or_default().to_owned()
    };
    (field("event: "), field("data: "))
}

#[cfg(test)]
impl AdminClient {
    /// Serves `routes`, and returns a client of this admin listener.
    pub(super) async fn of_routes(routes: axum::Router) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let arguments = AdminClientArguments::at(Some(address), Duration::from_secs(60));
        arguments.client().unwrap()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn addresses_are_written_in_several_ways() {
        for (text, expected) in [
            ("127.0.0.1:9464", Some("127.0.0.1:9464")),
            ("http://kvatlas.example:80/", Some("kvatlas.example:80")),
            ("kvatlas.example", Some("kvatlas.example:9464")),
            ("[::1]:9464", Some("[::1]:9464")),
            ("http://a/metrics", None),
            ("off", Some("off:9464")),
            ("https://a:1", None),
            ("user@a:1", None),
            ("127.0.0.1:29464x", None),
            ("127.0.0.1:99999", None),
            ("127.0.0.1:", None),
            ("127.0.0.1:0", None),
            ("[::1]", Some("[::1]:9464")),
            ("[::1]:x", None),
            ("", None),
            ("a b", None),
        ] {
            assert_eq!(authority(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_listener_that_is_off_is_not_looked_for() {
        let off = configured(Some("off".to_owned())).unwrap_err();
        assert_eq!(off.status, super::super::ExitStatus::Usage);
        assert!(off.to_string().contains("KVATLAS_ADMIN_LISTEN is off"), "{off}");
        assert_eq!(configured(None), Ok("127.0.0.1:9464".to_owned()));
    }

    #[test]
    fn a_listener_on_every_address_is_asked_on_the_loopback() {
        let asked = |text: &str| reachable(text.to_owned());
        assert_eq!(asked("0.0.0.0:9464"), "127.0.0.1:9464");
        assert_eq!(asked("[::]:9464"), "[::1]:9464");
        assert_eq!(asked("10.0.0.7:80"), "10.0.0.7:80");
        assert_eq!(asked("kvatlas:80"), "kvatlas:80");
    }

    #[test]
    fn an_event_has_a_name_and_data() {
        let parsed = parse("retry: 500\nevent: frame\ndata: {\"a\":1}\n\n");
        assert_eq!(parsed, ("frame".to_owned(), "{\"a\":1}".to_owned()));
        assert_eq!(parse(":\n\n"), (String::new(), String::new()));
    }

    #[tokio::test]
    async fn a_bridge_has_no_stream_and_says_so() {
        for (index, expected) in [
            (r#"{"role":"bridge"}"#, ": this is a bridge, which keeps no index"),
            ("{}", ": answers 404 Not Found; is it an older kvatlas?"),
        ] {
            let index = axum::routing::get(move || std::future::ready(index));
            let routes = axum::Router::new().route("/index", index);
            let client = AdminClient::of_routes(routes).await;
            let failure = client.events("/page/frames").await.unwrap_err();
            assert!(failure.to_string().contains(expected), "{failure}");
        }
    }

    /// A test in which the daemon hangs after its first event, while the connection stays open.
    #[tokio::test]
    async fn a_stream_in_which_nothing_comes_is_lost() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (leave, left) = tokio::sync::oneshot::channel::<()>();
        let hung = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let _ = socket.read(&mut [0; 1024]).await.unwrap();
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nevent: frame\ndata: 1\n\n".as_bytes();
            socket.write_all(answer).await.unwrap();
            let _ = left.await;
        });
        let arguments = AdminClientArguments::at(Some(address), Duration::from_secs(60));
        let client = arguments.client().unwrap();
        let mut events = client.events("/page/frames").await.unwrap();
        assert_eq!(events.next().await, Some(("frame".to_owned(), "1".to_owned())));
        events.silence_max = Duration::from_millis(10);
        assert_eq!(events.next().await, None);
        leave.send(()).unwrap();
        hung.await.unwrap();
    }
}
