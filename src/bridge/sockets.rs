//! The two sockets of an engine, for batches and for replays. Both are made anew after every fault, so that a connection is never replaced
//! unseen.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use kvatlas_telemetry::BridgeMetrics;
use kvatlas_telemetry::labels::FrameFault;

use super::frames::{FrameError, Numbered, ReplayMessage, parse_published, parse_replayed, replay_request};
use super::zmtp::{Mismatch, ReadError, Reader, Received, Role};
use super::zmtp::{open, pong, push_message, split_endpoint};

/// Bytes of answers to heartbeats from which on more are left out: an engine that takes none has no use for them.
const UNSENT_BYTES_MAX: usize = 4096;

/// Error after which a socket cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    /// The peer is not the socket that was asked for.
    #[error("{0}")]
    Mismatch(Mismatch),
    /// The connection cannot be made, or broke.
    #[error("{0}")]
    Network(#[from] io::Error),
    /// The peer announced more than the bridge takes.
    #[error("the connection was ended: {0}")]
    Cut(FrameFault),
    /// The publisher went away.
    #[error("the connection has ended")]
    Closed,
    /// Nothing came in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The peer does not speak as an engine does.
    #[error(transparent)]
    Frames(#[from] FrameError),
}

impl SocketError {
    /// Whether the peer broke a bound.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, Self::Cut(_))
    }
}

/// A connection to an engine's socket, until it breaks.
struct Connection {
    reader: Reader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// Answers to the engine's heartbeats that have not been sent yet.
    unsent: BytesMut,
    endpoint: String,
    metrics: Arc<BridgeMetrics>,
}

impl Connection {
    /// Connects to `tcp://HOST:PORT` within `patience`, and sends `first`.
    async fn connect(
        role: Role,
        endpoint: &str,
        first: &[&[u8]],
        patience: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let connecting = async {
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not tcp://HOST:PORT");
            let address = split_endpoint(endpoint).ok_or_else(invalid)?;
            let stream = TcpStream::connect(address).await?;
            let opened = open(stream, role).await;
            let (reader, writer) = opened.map_err(|error| explain(error, endpoint, &metrics))?;
            let mut connection = Self {
                reader,
                writer,
                unsent: BytesMut::new(),
                endpoint: endpoint.to_owned(),
                metrics,
            };
            connection.send(first).await?;
            Ok(connection)
        };
        let connected = timeout(patience, connecting).await;
        connected.map_err(|_| SocketError::TimedOut(patience))?
    }

    /// Sends a message. An empty one is none.
    async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        let mut bytes = Vec::new();
        push_message(&mut bytes, frames);
        self.writer.write_all(&bytes).await
    }

    /// Waits for the next message. Messages that were received before the connection broke come first. Nothing is lost if the future is
    /// dropped.
    async fn receive(&mut self) -> Result<Vec<Bytes>, SocketError> {
        loop {
            let received = tokio::select! {
                biased;
                received = self.reader.next() => received,
                sent = self.writer.write_buf(&mut self.unsent), if !self.unsent.is_empty() => {
                    sent?;
                    continue;
                }
            };
            match received.map_err(|error| explain(error, &self.endpoint, &self.metrics))? {
                Received::Message(frames) => return Ok(frames),
                Received::Command(body) => self.answer(&body),
            }
        }
    }

    /// Answers a heartbeat. Other commands need no answer.
    fn answer(&mut self, command: &[u8]) {
        if let Some(pong) = pong(command)
            && self.unsent.len() < UNSENT_BYTES_MAX
        {
            self.unsent.extend_from_slice(&pong);
        }
    }
}

/// Returns why nothing more can be read, and counts a bound that the engine has broken.
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
pub(super) struct Subscription(Connection);

impl Subscription {
    /// Connects and subscribes to the topics that begin with `topic`.
    pub(super) async fn connect(
        endpoint: &str,
        topic: &str,
        connect_timeout: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let subscribe = [&[1], topic.as_bytes()].concat();
        let connected = Connection::connect(
            Role::Subscriber,
            endpoint,
            &[&subscribe],
            connect_timeout,
            metrics,
        )
        .await?;
        Ok(Self(connected))
    }

    /// Waits for the next batch. Batches that were received before the connection broke come first.
    pub(super) async fn next(&mut self) -> Result<Numbered, SocketError> {
        Ok(parse_published(&self.next_frames().await?)?)
    }

    /// Waits for the next message of any form, and returns its frames.
    pub(super) async fn next_frames(&mut self) -> Result<Vec<Bytes>, SocketError> {
        self.0.receive().await
    }
}

/// A connection to a replay socket.
pub(super) struct Replay {
    connection: Connection,
    patience: Duration,
}

impl Replay {
    /// Connects to a replay socket. `patience` bounds the time to connect and the wait for each message of an answer.
    pub(super) async fn connect(
        endpoint: &str,
        patience: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let connection = Connection::connect(Role::Asker, endpoint, &[], patience, metrics).await?;
        Ok(Self { connection, patience })
    }

    /// Asks for all batches from `start` on that the engine still has; [`Self::next`] gives them.
    pub(super) async fn ask(&mut self, start: u64) -> Result<(), SocketError> {
        let [empty, number] = replay_request(start);
        let sent = timeout(self.patience, self.connection.send(&[&empty, &number])).await;
        Ok(sent.map_err(|_| SocketError::TimedOut(self.patience))??)
    }

    /// Waits for the next message of the answer.
    pub(super) async fn next(&mut self) -> Result<ReplayMessage, SocketError> {
        let patience = self.patience;
        let next = timeout(patience, self.connection.receive()).await;
        let frames = next.map_err(|_| SocketError::TimedOut(patience))??;
        Ok(parse_replayed(&frames)?)
    }
}
