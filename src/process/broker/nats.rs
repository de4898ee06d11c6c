//! Connections to NATS. They reconnect for ever, with jitter, and report each incident to a callback.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, ClientError, ConnectErrorKind, ConnectOptions, Event, Server, ServerAddr};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;

use crate::admin::Readiness;
use kvatlas_client::{Refusal, reconnect_pause};
use kvatlas_config::{Authentication, NatsConfig};
use kvatlas_telemetry::labels::{Connection, ConnectionEvent};
use kvatlas_telemetry::{ConnectionMetrics, log_gated};

use super::credentials;
use super::intake::Intake;

/// Interval between two pings that check whether the server is still there. After three intervals without any message
/// from the server, the client connects anew. Without that, a connection recovers from a long break of the network only at
/// TCP's next retransmission, which is as late as the break was long.
const PING_INTERVAL: Duration = Duration::from_secs(3);

/// Time that the server may take to confirm a subscription before it is asked again.
const CONFIRMATION_PATIENCE: Duration = Duration::from_secs(5);
/// Number of round trips to the server after which a subscription counts as confirmed. The client library delivers
/// errors and messages on different paths. During the second round trip, an error of the subscription has time to
/// arrive.
const CONFIRMATION_TRIPS: usize = 2;

/// Cause of a connection that fails for TLS.
const NO_TLS: &str = "no TLS session comes about; check the nats.tls_… settings and the files that they name";

/// Error of connecting to NATS.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file with credentials or with a seed cannot be used.
    #[error("cannot use the credentials in {path}: {source}")]
    Credentials {
        /// Path of the file.
        path: String,
        /// Error of reading or using the file.
        source: std::io::Error,
    },
    /// No server answered, or the server that answered refused the client.
    #[error("cannot connect to NATS at {urls}: {}; {}", describe(source), mend_of(source))]
    Connect {
        /// Servers that were tried.
        urls: String,
        /// Error of the last attempt.
        source: async_nats::ConnectError,
    },
}

impl ConnectError {
    /// Returns the error's text without the advice on what to do.
    pub fn found(&self) -> String {
        match self {
            Self::Credentials { .. } => self.to_string(),
            Self::Connect { urls, source } => {
                format!("cannot connect to NATS at {urls}: {}", describe(source))
            }
        }
    }

    /// Returns the advice on what to do.
    pub fn mend(&self) -> &'static str {
        match self {
            Self::Credentials { .. } => "name a file that can be read, and is of the form that NATS makes",
            Self::Connect { source, .. } => mend_of(source),
        }
    }

    /// Whether a server answered but refused the client.
    pub fn is_refusal(&self) -> bool {
        let Self::Connect { source, .. } = self else {
            return false;
        };
        matches!(
            source.kind(),
            ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication
        )
    }
}

/// Error of a [`round_trip`]: the server did not answer.
#[derive(Debug, thiserror::Error)]
pub enum RoundTripError {
    /// No answer came within this time.
    #[error("the NATS server did not answer within {0:?}")]
    TimedOut(Duration),
    /// The connection has been closed.
    #[error("the NATS connection is closed")]
    Closed,
}

/// Error of a subscription that the client library refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot subscribe to {subject}: {reason}")]
pub struct SubscribeError {
    subject: String,
    reason: String,
}

impl SubscribeError {
    /// Makes the error of a subscription to `subject`. `reason` is the client library's error.
    pub fn new(subject: &str, reason: &dyn fmt::Display) -> Self {
        Self {
            subject: subject.to_owned(),
            reason: reason.to_string(),
        }
    }
}

/// Incident of a connection to NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionNotice {
    /// The connection is established, for the first time or again.
    Connected,
    /// The connection broke. Messages are lost until it is established again.
    Disconnected,
    /// A subscription's buffer was full and messages were dropped.
    SlowConsumer,
    /// The server refused a subscription or a message, or withdrew the right to a subscription.
    Refused(Refusal),
    /// The server is about to shut down (lame duck mode). It takes no new connections, and ends the existing ones one
    /// after the other.
    LameDuck,
    /// Any other error, in the words of the server or of the client library.
    Error(String),
}

impl ConnectionNotice {
    /// Whether the incident may mean that messages of core NATS were lost.
    pub fn loses_messages(&self) -> bool {
        matches!(self, Self::Disconnected | Self::SlowConsumer)
    }
}

impl fmt::Display for ConnectionNotice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected => formatter.write_str("connected"),
            Self::Disconnected => formatter.write_str("disconnected"),
            Self::SlowConsumer => formatter.write_str("messages were dropped because the buffer was full"),
            Self::Refused(refusal) => refusal.fmt(formatter),
            Self::LameDuck => formatter.write_str("the server is about to shut down"),
            Self::Error(text) => formatter.write_str(text),
        }
    }
}

/// Whether the first attempt to connect has to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectPatience {
    /// Fail when no server answers: for commands that a person waits for.
    FailFast,
    /// Keep trying in the background: for a daemon that may start before its broker.
    Forever,
}

/// Bounds on the messages that a connection has received and the process has not taken yet.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// Largest number of messages that wait for one subscription.
    pub messages_max: usize,
    /// Bound on the total size of these messages, if there is such a bound. The task that takes messages must report them to the
    /// [`Intake`]. It must also let the intake [watch](Intake::watch) the client.
    pub intake: Option<Arc<Intake>>,
}

impl Buffer {
    /// Makes a buffer that is bounded in the number of messages, and not in their size.
    pub fn of_messages(messages_max: usize) -> Self {
        Self {
            messages_max,
            intake: None,
        }
    }

    /// Makes a buffer that is bounded in the number of messages and in their total size. Also returns the [`Intake`],
    /// which counts the bytes of the messages.
    pub fn of_bytes(messages_max: usize, bytes_max: usize) -> (Self, Arc<Intake>) {
        let intake = Intake::new(bytes_max);
        let buffer = Self {
            messages_max,
            intake: Some(Arc::clone(&intake)),
        };
        (buffer, intake)
    }
}

/// Connects to the servers of `config`.
///
/// - `role` becomes part of the connection's name in the server's monitoring.
/// - `subscription_capacity` bounds each subscription's buffer, in messages.
/// - `notice` is called with each incident of the connection.
pub async fn connect(
    config: &NatsConfig,
    role: &str,
    subscription_capacity: usize,
    patience: ConnectPatience,
    notice: impl Fn(ConnectionNotice) + Send + Sync + 'static,
) -> Result<Client, ConnectError> {
    let buffer = Buffer::of_messages(subscription_capacity);
    connect_with(config, role, buffer, patience, notice).await
}

/// Returns the configured servers as text for people: `HOST:PORT` for each, separated by commas. Passwords in the
/// URLs are left out.
pub fn places_of(config: &NatsConfig) -> String {
    let name = |url: &ServerAddr| format!("{}:{}", url.host(), url.port());
    config.urls.iter().map(name).collect::<Vec<_>>().join(", ")
}

pub(super) async fn connect_with(
    config: &NatsConfig,
    role: &str,
    buffer: Buffer,
    patience: ConnectPatience,
    notice: impl Fn(ConnectionNotice) + Send + Sync + 'static,
) -> Result<Client, ConnectError> {
    let urls = places_of(config);
    let servers = urls.clone();
    let errors = Arc::new(LastErrors::default());
    let hearing = Arc::clone(&errors);
    let authentication = config.authentication.clone();
    check_credentials(&authentication.now())?;
    let intake = buffer.intake.clone();
    let present = move |nonce: Vec<u8>| {
        let (authentication, intake) = (Arc::clone(&authentication.now()), intake.clone());
        async move {
            if let Some(intake) = intake {
                intake.room().await;
            }
            credentials::present_to_client(&authentication, &nonce)
        }
    };
    let mut options = ConnectOptions::with_auth_callback(present)
        .name(connection_name(&config.connection_name, role))
        .custom_inbox_prefix(config.inbox_prefix.clone())
        .subscription_capacity(buffer.messages_max)
        .ping_interval(PING_INTERVAL)
        .require_tls(config.tls_required)
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_pause)
        .reconnect_to_server_callback(move |pool, _| {
            hearing.note(&pool);
            // The client library chooses the server.
            std::future::ready(None)
        })
        .event_callback(move |event| {
            if let Some(happened) = notice_of(event, &servers, &errors) {
                notice(happened);
            }
            std::future::ready(())
        });
    if let Some(path) = &config.tls_ca_file {
        options = options.add_root_certificates(path.clone());
    }
    if let (Some(certificate), Some(key)) = (&config.tls_cert_file, &config.tls_key_file) {
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    if config.tls_first {
        options = options.tls_first();
    }
    if patience == ConnectPatience::Forever {
        options = options.retry_on_initial_connect();
    }
    let connected = connect_to(options, &config.urls).await;
    let client = connected.map_err(|source| ConnectError::Connect { urls, source })?;
    if let Some(intake) = &buffer.intake {
        intake.count(&client);
    }
    Ok(client)
}

/// Connects the client. The future is boxed, so that the client library is compiled here and not in each program that connects.
fn connect_to(
    options: ConnectOptions,
    urls: &[ServerAddr],
) -> BoxFuture<'_, Result<Client, async_nats::ConnectError>> {
    Box::pin(options.connect(urls))
}

/// Returns the name of a connection in the server's monitoring: `NAME-ROLE@HOST kvatlas/VERSION`.
fn connection_name(name: &str, role: &str) -> String {
    let system = rustix::system::uname();
    let (host, version) = (system.nodename().to_string_lossy(), env!("CARGO_PKG_VERSION"));
    format!("{name}-{role}@{host} kvatlas/{version}")
}

/// Checks that a file of credentials or with a seed can be read and used.
///
/// # Errors
///
/// [`ConnectError::Credentials`] if it cannot.
pub fn check_credentials(how: &Authentication) -> Result<(), ConnectError> {
    let (Authentication::CredentialsFile(path) | Authentication::NkeySeedFile(path)) = how else {
        return Ok(());
    };
    let presented = credentials::present(how, b"");
    presented.map(|_| ()).map_err(|source| ConnectError::Credentials {
        path: path.display().to_string(),
        source,
    })
}

/// Connects one part of the daemon to NATS, as [`connect`] does, but tries without end. Counts and logs each incident
/// under the label `connection`.
pub async fn connect_counted(
    config: &NatsConfig,
    connection: Connection,
    role: &str,
    buffer: Buffer,
    notice: impl Fn(&ConnectionNotice) + Send + Sync + 'static,
) -> Result<Client, ConnectError> {
    let metrics = ConnectionMetrics::for_connection(connection);
    let counted = move |happened: ConnectionNotice| {
        let event = match happened {
            ConnectionNotice::Connected => ConnectionEvent::Connected,
            ConnectionNotice::Disconnected => ConnectionEvent::Disconnected,
            ConnectionNotice::SlowConsumer => ConnectionEvent::SlowConsumer,
            ConnectionNotice::Refused(_) => ConnectionEvent::Refused,
            ConnectionNotice::LameDuck | ConnectionNotice::Error(_) => ConnectionEvent::Error,
        };
        metrics.happened(event, &happened);
        notice(&happened);
    };
    connect_with(config, role, buffer, ConnectPatience::Forever, counted).await
}

/// Adds `client` to the connections of its kind that decide whether the process is ready. It is not ready while none of
/// one kind is up.
pub fn follow_connection(readiness: &Readiness, kind: &'static str, client: &Client) {
    let client = client.clone();
    readiness.follow_connection(kind, move || client.connection_state() == State::Connected);
}

/// Texts of the errors of the last attempts to connect. The client library's events have only the kind of an error.
#[derive(Default)]
struct LastErrors(Mutex<Vec<String>>);

impl LastErrors {
    /// Remembers the last error of each server in `pool`. These are the servers to which the client library tries to
    /// connect.
    fn note(&self, pool: &[Server]) {
        *self.0.lock() = pool
            .iter()
            .filter_map(|server| server.last_error.clone())
            .collect();
    }

    /// Returns the full text of the last error of the kind `kind`; returns `kind` itself if no such text is kept.
    fn of_kind(&self, kind: &str) -> String {
        let errors = self.0.lock();
        let error = errors.iter().find(|error| error.starts_with(kind));
        error.map_or_else(|| kind.to_owned(), String::clone)
    }
}

/// Converts an event of the client library into an incident; `None` if the event is no incident. `servers` names the
/// servers that are tried, and `errors` has the texts of the errors.
fn notice_of(event: Event, servers: &str, errors: &LastErrors) -> Option<ConnectionNotice> {
    match event {
        Event::Connected => Some(ConnectionNotice::Connected),
        Event::Disconnected => Some(ConnectionNotice::Disconnected),
        Event::SlowConsumer(_) => Some(ConnectionNotice::SlowConsumer),
        Event::ServerError(error) => {
            let text = error.to_string();
            Some(Refusal::parse(&text).map_or(ConnectionNotice::Error(text), ConnectionNotice::Refused))
        }
        // Only a failed attempt to connect is reported as `Other`. The client tries again, without a limit.
        Event::ClientError(ClientError::Other(kind)) => Some(ConnectionNotice::Error(format!(
            "cannot connect to {servers}: {}; trying again",
            cause_of(&kind, &errors.of_kind(&kind))
        ))),
        Event::ClientError(error) => Some(ConnectionNotice::Error(error.to_string())),
        Event::LameDuckMode => Some(ConnectionNotice::LameDuck),
        Event::Draining | Event::Closed => None,
    }
}

/// Returns the cause of a failed attempt to connect, for people. `kind` is the text of a [`ConnectErrorKind`], and `error` the
/// text of the whole error.
fn cause_of(kind: &str, error: &str) -> String {
    known_cause(kind, error).map_or_else(|| error.to_owned(), |cause| format!("{cause} ({error})"))
}

/// Returns the cause of a failed first attempt, for people.
fn describe(error: &async_nats::ConnectError) -> String {
    cause_of(&error.kind().to_string(), &error.to_string())
}

/// Whether `error`, the text of a failed attempt to connect, is about TLS. The client library gives errors of TLS
/// sessions the kind of input and output errors. So this function looks for the first words of rustls's error texts.
fn is_about_tls(error: &str) -> bool {
    let input_output = ConnectErrorKind::Io.to_string();
    let session = [
        "invalid peer certificate",
        "received fatal alert",
        "received corrupt message",
        "received unexpected message",
        "received unexpected handshake message",
        "peer is incompatible",
        "peer misbehaved",
        "peer sent no certificates",
        "cannot decrypt peer",
    ];
    let words = error
        .strip_prefix(&input_output)
        .map(|rest| rest.trim_start_matches(": "));
    let is_of_session = words.is_some_and(|words| session.iter().any(|known| words.starts_with(known)));
    is_of_session || error.starts_with(&ConnectErrorKind::Tls.to_string())
}

/// Returns a clearer text for the cause of a failed attempt to connect; `None` if the client library's text is clear.
/// `kind` is the text of the error's [`ConnectErrorKind`], and `error` is the error's whole text. For example, the
/// library's text would not tell an operator that no server is there.
fn known_cause(kind: &str, error: &str) -> Option<&'static str> {
    if is_about_tls(error) {
        return Some(NO_TLS);
    }
    let causes = [
        (
            ConnectErrorKind::Io,
            "no NATS server answers there, or it closed the connection",
        ),
        (ConnectErrorKind::Dns, "the host name cannot be resolved"),
        (ConnectErrorKind::TimedOut, "nothing answers there in time"),
        (
            ConnectErrorKind::AuthorizationViolation,
            "the server refuses the credentials, or their absence",
        ),
    ];
    causes
        .iter()
        .find(|(known, _)| known.to_string() == kind)
        .map(|(_, cause)| *cause)
}

/// Returns advice for people: the settings to check after an attempt to connect has failed with `error`.
fn mend_of(error: &async_nats::ConnectError) -> &'static str {
    match error.kind() {
        _ if is_about_tls(&error.to_string()) => {
            "name another server with --nats-url, or correct these settings"
        }
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            "give the right ones with the --nats-… flags, the KVATLAS_NATS_… variables or --context, or see the server's log for what it refuses"
        }
        // The server says nothing, because it waits for TLS.
        _ if error.to_string().contains("expected INFO") => {
            "check that it runs there; a server that waits for TLS (handshake_first) needs nats.tls_first"
        }
        _ => {
            "check that it runs there, or name another with --nats-url; kvatlas up and serve --embedded name their own in their log"
        }
    }
}

/// Waits until the server has processed everything that was sent on `client` before. Sends a message to an inbox of this client.
/// The server processes that message last and sends it back. A flush would show only that the bytes have been sent.
pub async fn round_trip(client: &Client, patience: Duration) -> Result<(), RoundTripError> {
    let trip = async {
        let inbox = client.new_inbox();
        let mut echo = client
            .subscribe(inbox.clone())
            .await
            .map_err(|_| RoundTripError::Closed)?;
        client
            .publish(inbox, bytes::Bytes::new())
            .await
            .map_err(|_| RoundTripError::Closed)?;
        client.flush().await.map_err(|_| RoundTripError::Closed)?;
        echo.next().await.map(|_| ()).ok_or(RoundTripError::Closed)
    };
    tokio::time::timeout(patience, trip)
        .await
        .unwrap_or(Err(RoundTripError::TimedOut(patience)))
}

/// Waits until the server has confirmed a subscription that was made on `client` before, and then returns `true`.
/// Keeps waiting while the server cannot be reached. `name` is the subscription's name for the log.
///
/// Returns `false` if too many bytes wait in `intake`, so that no new connection is made. The caller must then
/// [discard](Intake::discard) the subscription: no task takes its messages, because it is not confirmed.
pub async fn is_confirmed(client: &Client, intake: &Intake, name: &str) -> bool {
    for _ in 0..CONFIRMATION_TRIPS {
        while let Err(error) = round_trip(client, CONFIRMATION_PATIENCE).await {
            log_gated!(warn "the subscription is not confirmed yet"; %error, name);
            if !intake.has_room() {
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_named_by_use_host_and_version() {
        let name = connection_name("site", "queries-0");
        assert!(name.starts_with("site-queries-0@"), "{name}");
        let version = format!(" kvatlas/{}", env!("CARGO_PKG_VERSION"));
        assert!(name.ends_with(&version), "{name}");
        assert!(!name.contains("@ "), "the host is missing: {name}");
    }

    #[test]
    fn a_failed_attempt_says_where_why_and_that_there_will_be_another() {
        let text = |kind: ConnectErrorKind| {
            let event = Event::ClientError(ClientError::Other(kind.to_string()));
            let errors = LastErrors::default();
            notice_of(event, "broker:4222", &errors).unwrap().to_string()
        };
        assert_eq!(
            text(ConnectErrorKind::Io),
            "cannot connect to broker:4222: no NATS server answers there, or it closed the connection (IO error); \
             trying again"
        );
        let refused = ConnectError::Connect {
            urls: "broker:4222".to_owned(),
            source: async_nats::ConnectError::new(ConnectErrorKind::AuthorizationViolation),
        };
        let refused = refused.to_string();
        assert!(
            refused.contains("the server refuses the credentials"),
            "{refused}"
        );
        assert!(!refused.contains("check that it runs"), "{refused}");
        assert!(text(ConnectErrorKind::Dns).contains("resolved"));
        assert!(text(ConnectErrorKind::Authentication).contains("failed signing nonce; trying again"));
    }

    #[test]
    fn an_error_of_a_tls_session_is_told_from_an_absent_server() {
        use async_nats::rustls::{self, AlertDescription, CertificateError, InvalidMessage};

        let of_session = [
            rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer),
            rustls::Error::AlertReceived(AlertDescription::CertificateRequired),
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType),
            rustls::Error::NoCertificatesPresented,
        ];
        for error in of_session {
            let error = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
            let source = async_nats::ConnectError::from(error);
            let (kind, text) = (source.kind().to_string(), source.to_string());
            let told = ConnectError::Connect {
                urls: "broker:4222".to_owned(),
                source,
            };
            let told = told.to_string();
            assert!(
                told.contains("nats.tls_…") && !told.contains("no NATS server"),
                "{told}"
            );
            assert!(!told.contains("check that it runs"), "{told}");
            // A daemon's connection keeps the texts of the errors of the last attempt.
            let errors = LastErrors(Mutex::new(vec!["timed out".to_owned(), text.clone()]));
            let event = Event::ClientError(ClientError::Other(kind));
            let told = notice_of(event, "broker:4222", &errors).unwrap().to_string();
            assert!(told.contains("nats.tls_…") && told.contains(&text), "{told}");
        }
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        assert!(!is_about_tls(
            &async_nats::ConnectError::from(refused).to_string()
        ));
    }
}
