//! Connections that reconnect for ever, with jitter, and tell what happens to them.

use std::fmt;
use std::time::Duration;

use async_nats::{Client, ClientError, ConnectErrorKind, ConnectOptions, Event};
use futures_util::StreamExt;

use crate::config::{Authentication, NatsConfig};

/// Longest pause between two attempts to connect.
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(4);
/// Pause after the first failed attempt; doubles with every further one.
const RECONNECT_DELAY_MIN: Duration = Duration::from_millis(50);
/// How often the server is asked whether it is still there.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The credentials file cannot be used.
    #[error("cannot use the credentials file {path}: {source}")]
    Credentials {
        /// The file.
        path: String,
        /// What is wrong with it.
        source: std::io::Error,
    },
    /// No server answered.
    #[error(
        "cannot connect to NATS at {urls}: {source}; check that it runs there, or name another with --nats-url"
    )]
    Connect {
        /// The servers tried.
        urls: String,
        /// The last error.
        source: async_nats::ConnectError,
    },
}

/// The server did not answer.
#[derive(Debug, thiserror::Error)]
pub enum RoundTripError {
    /// Not within the time given.
    #[error("the NATS server did not answer within {0:?}")]
    TimedOut(Duration),
    /// The connection has been closed.
    #[error("the NATS connection is closed")]
    Closed,
}

/// What happens to a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionNotice {
    /// It stands, for the first time or again.
    Connected,
    /// It broke; messages are lost until it stands again.
    Disconnected,
    /// A subscription's buffer was full and messages were dropped.
    SlowConsumer,
    /// The server or the client reported an error; the text is theirs.
    Error(String),
}

impl fmt::Display for ConnectionNotice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected => formatter.write_str("connected"),
            Self::Disconnected => formatter.write_str("disconnected"),
            Self::SlowConsumer => formatter.write_str("messages were dropped because the buffer was full"),
            Self::Error(text) => formatter.write_str(text),
        }
    }
}

/// Whether the first attempt to connect has to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectPatience {
    /// Fail when no server answers: for commands that a person waits for.
    FailFast,
    /// Go on trying in the background: for a daemon that may start before its broker.
    Forever,
}

/// Connects to the servers of `config`. `role` becomes part of the connection's name in the server's monitoring;
/// `subscription_capacity` bounds each subscription's buffer in messages; `notice` is called with what happens.
pub async fn connect(
    config: &NatsConfig,
    role: &str,
    subscription_capacity: usize,
    patience: ConnectPatience,
    notice: impl Fn(ConnectionNotice) + Send + Sync + 'static,
) -> Result<Client, ConnectError> {
    let name = |url: &async_nats::ServerAddr| format!("{}:{}", url.host(), url.port());
    let urls = config.urls.iter().map(name).collect::<Vec<_>>().join(", ");
    let servers = urls.clone();
    let mut options = ConnectOptions::new()
        .name(format!("{}-{role}", config.connection_name))
        .subscription_capacity(subscription_capacity)
        .ping_interval(PING_INTERVAL)
        .require_tls(config.tls_required)
        .max_reconnects(None)
        .reconnect_delay_callback(|attempts| reconnect_delay(attempts, &mut jitter))
        .event_callback(move |event| {
            if let Some(happened) = notice_of(event, &servers) {
                notice(happened);
            }
            std::future::ready(())
        });
    if let Some(path) = &config.tls_ca_file {
        options = options.add_root_certificates(path.clone());
    }
    if patience == ConnectPatience::Forever {
        options = options.retry_on_initial_connect();
    }
    options = authenticate(options, &config.authentication).await?;
    options
        .connect(config.urls.as_slice())
        .await
        .map_err(|source| ConnectError::Connect { urls, source })
}

async fn authenticate(options: ConnectOptions, how: &Authentication) -> Result<ConnectOptions, ConnectError> {
    Ok(match how {
        Authentication::Anonymous => options,
        Authentication::CredentialsFile(path) => {
            let unusable = |source| ConnectError::Credentials {
                path: path.display().to_string(),
                source,
            };
            options.credentials_file(path).await.map_err(unusable)?
        }
        Authentication::Token(token) => options.token(token.expose().to_owned()),
        Authentication::UserPassword { user, password } => {
            options.user_and_password(user.clone(), password.expose().to_owned())
        }
    })
}

/// What an event means; `servers` are those that are tried.
fn notice_of(event: Event, servers: &str) -> Option<ConnectionNotice> {
    match event {
        Event::Connected => Some(ConnectionNotice::Connected),
        Event::Disconnected => Some(ConnectionNotice::Disconnected),
        Event::SlowConsumer(_) => Some(ConnectionNotice::SlowConsumer),
        Event::ServerError(error) => Some(ConnectionNotice::Error(error.to_string())),
        // The client reports nothing else like this, and tries again: there is no limit to its attempts.
        Event::ClientError(ClientError::Other(kind)) => Some(ConnectionNotice::Error(format!(
            "cannot connect to {servers}: {}; trying again",
            cause_of(&kind)
        ))),
        Event::ClientError(error) => Some(ConnectionNotice::Error(error.to_string())),
        Event::LameDuckMode => Some(ConnectionNotice::Error(
            "the server is about to shut down".to_owned(),
        )),
        Event::Draining | Event::Closed => None,
    }
}

/// Why an attempt to connect failed. The client keeps the operating system's error to itself and gives the text of a
/// [`ConnectErrorKind`], in which nobody recognises a server that is not there.
fn cause_of(kind: &str) -> String {
    let causes = [
        (
            ConnectErrorKind::Io,
            "no NATS server answers there, or it closed the connection",
        ),
        (ConnectErrorKind::Dns, "the host name cannot be resolved"),
        (
            ConnectErrorKind::Tls,
            "no TLS session comes about; check nats.tls_required and nats.tls_ca_file",
        ),
        (ConnectErrorKind::TimedOut, "nothing answers there in time"),
        (
            ConnectErrorKind::AuthorizationViolation,
            "the server refuses the credentials, or their absence",
        ),
    ];
    causes
        .iter()
        .find(|(known, _)| known.to_string() == kind)
        .map_or_else(|| kind.to_owned(), |(_, cause)| format!("{cause} ({kind})"))
}

/// Doubles from the least to the greatest delay; jitter takes off up to half, so that a fleet does not come back at once.
fn reconnect_delay(attempts: usize, jitter: &mut dyn FnMut() -> u32) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1))
        .unwrap_or(u32::MAX)
        .min(16);
    let whole = RECONNECT_DELAY_MIN
        .saturating_mul(1 << doublings)
        .min(RECONNECT_DELAY_MAX);
    whole - whole / 2 * (jitter() % 1024) / 1024
}

/// A number that differs from process to process and from call to call.
fn jitter() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(std::time::Instant::now());
    u32::try_from(random >> 32).unwrap_or_default()
}

/// Waits until the server has worked off all that was sent on `client` before: a message to an inbox of our own comes back
/// behind it. A flush alone only says that the bytes have left.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_attempt_says_where_why_and_that_there_will_be_another() {
        let text = |kind: ConnectErrorKind| {
            let event = Event::ClientError(ClientError::Other(kind.to_string()));
            notice_of(event, "broker:4222").unwrap().to_string()
        };
        assert_eq!(
            text(ConnectErrorKind::Io),
            "cannot connect to broker:4222: no NATS server answers there, or it closed the connection (IO error); \
             trying again"
        );
        assert!(text(ConnectErrorKind::Dns).contains("resolved"));
        assert!(text(ConnectErrorKind::Authentication).contains("failed signing nonce; trying again"));
    }

    #[test]
    fn delays_grow_to_a_bound_and_are_jittered() {
        let mut least = || 1023;
        let mut most = || 0;
        assert_eq!(reconnect_delay(0, &mut most), RECONNECT_DELAY_MIN);
        assert_eq!(reconnect_delay(1, &mut most), RECONNECT_DELAY_MIN);
        assert_eq!(reconnect_delay(3, &mut most), RECONNECT_DELAY_MIN * 4);
        assert_eq!(reconnect_delay(usize::MAX, &mut most), RECONNECT_DELAY_MAX);
        let shortest = reconnect_delay(usize::MAX, &mut least);
        assert!(shortest >= RECONNECT_DELAY_MAX / 2 && shortest < RECONNECT_DELAY_MAX);
    }
}
