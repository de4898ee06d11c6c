//! The two sockets of an engine, for batches and for replays, each behind a guard. Both are made anew after every fault, so that a
//! connection is never replaced unseen.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::time::timeout;
use zeromq::{
    DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage,
};

use kvatlas_telemetry::BridgeMetrics;
use kvatlas_telemetry::labels::FrameFault;

use super::frames::{FrameError, Numbered, ReplayMessage, parse_published, parse_replayed, replay_request};
use super::guard::Guard;

/// Error after which a socket cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    /// The library's error.
    #[error("{0}")]
    Zmq(#[from] ZmqError),
    /// The connection cannot be made.
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

fn options(connect_timeout: Duration) -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(connect_timeout);
    options
}

/// Connects `socket` to `endpoint` through a guard, within `patience`.
async fn connect(
    socket: &mut impl Socket,
    endpoint: &str,
    patience: Duration,
    metrics: Arc<BridgeMetrics>,
) -> Result<Guard, SocketError> {
    let connecting = async {
        let guard = Guard::connect(endpoint, metrics).await?;
        match socket.connect(guard.local()).await {
            Ok(()) => Ok(guard),
            Err(error) => Err(explain(&guard, error.into())),
        }
    };
    let connected = timeout(patience, connecting).await;
    connected.map_err(|_| SocketError::TimedOut(patience))?
}

/// Returns why a connection ended: the bound that the guard saw broken, if there is one, or else the library's `error`.
fn explain(guard: &Guard, error: SocketError) -> SocketError {
    guard.fault().map_or(error, SocketError::Cut)
}

/// Waits for the next message of a socket. Messages that were received before its connection broke come first.
async fn receive(
    socket: &mut impl SocketRecv,
    events: &mut BoxStream<'static, SocketEvent>,
    guard: &Guard,
) -> Result<Vec<Bytes>, SocketError> {
    loop {
        tokio::select! {
            biased;
            message = socket.recv() => {
                return message.map(ZmqMessage::into_vec).map_err(|error| explain(guard, error.into()));
            }
            event = events.next() => match event {
                // The library would connect again by itself, and messages could be lost unseen in between.
                Some(SocketEvent::Disconnected(_) | SocketEvent::Closed) | None => {
                    return Err(explain(guard, SocketError::Closed));
                }
                Some(_) => {}
            },
        }
    }
}

/// A connection to a publisher, until it breaks.
pub(super) struct Subscription {
    socket: SubSocket,
    events: BoxStream<'static, SocketEvent>,
    guard: Guard,
}

impl Subscription {
    /// Connects and subscribes to the topics that begin with `topic`.
    pub(super) async fn connect(
        endpoint: &str,
        topic: &str,
        connect_timeout: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let mut socket = SubSocket::with_options(options(connect_timeout));
        let events = socket.monitor().boxed();
        // Subscribes before connecting, so that nothing is published on the connection unseen.
        socket.subscribe(topic).await?;
        let guard = connect(&mut socket, endpoint, connect_timeout, metrics).await?;
        Ok(Self {
            socket,
            events,
            guard,
        })
    }

    /// Waits for the next batch. Batches that were received before the connection broke come first.
    pub(super) async fn next(&mut self) -> Result<Numbered, SocketError> {
        Ok(parse_published(&self.next_frames().await?)?)
    }

    /// Waits for the next message of any form, and returns its frames.
    pub(super) async fn next_frames(&mut self) -> Result<Vec<Bytes>, SocketError> {
        receive(&mut self.socket, &mut self.events, &self.guard).await
    }
}

/// A connection to a replay socket.
pub(super) struct Replay {
    socket: DealerSocket,
    events: BoxStream<'static, SocketEvent>,
    guard: Guard,
    patience: Duration,
}

impl Replay {
    /// Connects to a replay socket. `patience` bounds the time to connect and the wait for each message of an answer.
    pub(super) async fn connect(
        endpoint: &str,
        patience: Duration,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, SocketError> {
        let mut socket = DealerSocket::with_options(options(patience));
        let events = socket.monitor().boxed();
        let guard = connect(&mut socket, endpoint, patience, metrics).await?;
        Ok(Self {
            socket,
            events,
            guard,
            patience,
        })
    }

    /// Asks for all batches from `start` on that the engine still has; [`Self::next`] gives them.
    pub(super) async fn ask(&mut self, start: u64) -> Result<(), SocketError> {
        let [empty, number] = replay_request(start);
        let mut message = ZmqMessage::from(empty);
        message.push_back(number);
        let sent = timeout(self.patience, self.socket.send(message)).await;
        Ok(sent.map_err(|_| SocketError::TimedOut(self.patience))??)
    }

    /// Waits for the next message of the answer.
    pub(super) async fn next(&mut self) -> Result<ReplayMessage, SocketError> {
        let patience = self.patience;
        let next = timeout(patience, receive(&mut self.socket, &mut self.events, &self.guard)).await;
        let frames = next.map_err(|_| SocketError::TimedOut(patience))??;
        Ok(parse_replayed(&frames)?)
    }
}
