//! The two sockets of an engine, for batches and for replays. Both sockets are replaced after every fault, so that no
//! reconnect goes unnoticed.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::time::timeout;

use kvatlas_telemetry::BridgeMetrics;
use kvatlas_telemetry::labels::FrameFault;

use super::frames::{FrameError, Numbered, parse_published, parse_replayed, replay_request};
use super::zmtp::{
    MessageOrCommand, Mismatch, PeerConnection, ReadError, Role, push_message, split_endpoint,
};

/// Error after which a socket cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    /// The peer cannot be used: it has another protocol, security mechanism or socket type.
    #[error("{0}")]
    Mismatch(Mismatch),
    /// The connection cannot be made, or broke.
    #[error("{0}")]
    Network(#[from] io::Error),
    /// The peer announced a frame that is larger than a bound allows.
    #[error("the connection was ended: {0}")]
    Cut(FrameFault),
    /// The publisher went away.
    #[error("the connection has ended")]
    Closed,
    /// No message came within this time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The peer's frames have another form than those of an engine.
    #[error(transparent)]
    Frames(#[from] FrameError),
}

impl SocketError {
    /// Whether the error means that the peer broke a bound.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, Self::Cut(_))
    }
}

/// A connection to an engine's socket, until it breaks.
struct EngineSocket {
    connection: PeerConnection,
    endpoint: String,
    metrics: Arc<BridgeMetrics>,
}

impl EngineSocket {
    /// Connects to `tcp://HOST:PORT` within `patience`.
    async fn connect(
        role: Role,
        endpoint: &str,
        patience: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let connecting = async {
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not tcp://HOST:PORT");
            let address = split_endpoint(endpoint).ok_or_else(invalid)?;
            let stream = TcpStream::connect(address).await?;
            let opened = PeerConnection::open(stream, role).await;
            opened.map_err(|error| explain(error, endpoint, &metrics))
        };
        let connected = timeout(patience, connecting).await;
        Ok(Self {
            connection: connected.map_err(|_| SocketError::TimedOut(patience))??,
            endpoint: endpoint.to_owned(),
            metrics,
        })
    }

    /// Sends a message within `patience`.
    async fn send(&mut self, frames: &[&[u8]], patience: Duration) -> Result<(), SocketError> {
        let mut bytes = Vec::new();
        push_message(&mut bytes, frames);
        let sent = timeout(patience, self.connection.send(&bytes)).await;
        Ok(sent.map_err(|_| SocketError::TimedOut(patience))??)
    }

    /// Waits for the next message. Messages that were received before the connection broke come first. Nothing is lost if
    /// the future is dropped.
    async fn receive(&mut self) -> Result<Vec<Bytes>, SocketError> {
        loop {
            let received = self.connection.next().await;
            let received = received.map_err(|error| explain(error, &self.endpoint, &self.metrics))?;
            if let MessageOrCommand::Message(frames) = received {
                return Ok(frames);
            }
        }
    }
}

/// Converts an error after which nothing more can be read to a [`SocketError`]. If the engine has broken a bound,
/// counts that in `metrics`.
fn explain(error: ReadError, endpoint: &str, metrics: &BridgeMetrics) -> SocketError {
    match error {
        ReadError::Network(error) => SocketError::Network(error),
        ReadError::Closed => SocketError::Closed,
        ReadError::Mismatch(mismatch) => SocketError::Mismatch(mismatch),
        ReadError::TooMuch(fault) => {
            metrics.connection_cut(fault, &endpoint);
            SocketError::Cut(fault)
        }
    }
}

/// A connection to a publisher, until it breaks.
pub(super) struct Subscription {
    socket: EngineSocket,
    /// Batches that were put back, which come before those that are still to be read.
    unread: VecDeque<Numbered>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Subscription({})", self.socket.endpoint)
    }
}

impl Subscription {
    /// Connects, and subscribes to the topics that begin with `topic`. Each of these two steps takes at most
    /// `patience`.
    pub(super) async fn connect(
        endpoint: &str,
        topic: &str,
        patience: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let subscribe = [&[1], topic.as_bytes()].concat();
        let mut socket = EngineSocket::connect(Role::Subscriber, endpoint, patience, metrics).await?;
        socket.send(&[&subscribe], patience).await?;
        let unread = VecDeque::new();
        Ok(Self { socket, unread })
    }

    /// Waits for the next batch. Batches that were received before the connection broke come first.
    pub(super) async fn next(&mut self) -> Result<Numbered, SocketError> {
        match self.unread.pop_front() {
            Some(numbered) => Ok(numbered),
            None => Ok(parse_published(&self.next_frames().await?)?),
        }
    }

    /// Puts back `batches`, which [`Self::next`] has returned in this order. It returns them again.
    pub(super) fn put_back(&mut self, batches: impl IntoIterator<Item = Numbered>) {
        self.unread.extend(batches);
    }

    /// Waits for the next message of any form, and returns its frames.
    pub(super) async fn next_frames(&mut self) -> Result<Vec<Bytes>, SocketError> {
        self.socket.receive().await
    }
}

/// A connection to a replay socket.
pub(super) struct ReplaySocket {
    socket: EngineSocket,
    patience: Duration,
}

impl ReplaySocket {
    /// Connects to a replay socket. `patience` bounds the time to connect and the wait for each message of an answer.
    pub(super) async fn connect(
        endpoint: &str,
        patience: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let socket = EngineSocket::connect(Role::Asker, endpoint, patience, metrics).await?;
        Ok(Self { socket, patience })
    }

    /// Asks for all batches from `start` on that the engine still has; [`Self::next`] gives them.
    pub(super) async fn ask(&mut self, start: u64) -> Result<(), SocketError> {
        let [empty, number] = replay_request(start);
        self.socket.send(&[&empty, &number], self.patience).await
    }

    /// Waits for the next batch of the answer; `None` at its end.
    pub(super) async fn next(&mut self) -> Result<Option<Numbered>, SocketError> {
        let patience = self.patience;
        let next = timeout(patience, self.socket.receive()).await;
        let frames = next.map_err(|_| SocketError::TimedOut(patience))??;
        Ok(parse_replayed(&frames)?)
    }
}
