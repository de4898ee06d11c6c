//! The two sockets of an engine. Both are made anew after every fault, so that a connection is never replaced unseen.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::time::timeout;
use zeromq::{
    DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage,
};

use super::frames::{FrameError, Numbered, ReplayMessage, parse_published, parse_replayed, replay_request};

/// Why a socket cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    /// The library's error.
    #[error("{0}")]
    Zmq(#[from] ZmqError),
    /// The publisher went away.
    #[error("the connection has ended")]
    Closed,
    /// Nothing came in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// It does not speak as an engine does.
    #[error(transparent)]
    Frames(#[from] FrameError),
}

fn options(connect_timeout: Duration) -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(connect_timeout);
    options
}

fn frames(message: ZmqMessage) -> Vec<Bytes> {
    message.into_vec()
}

/// A connection to a publisher, until it breaks.
pub(super) struct Subscription {
    socket: SubSocket,
    events: BoxStream<'static, SocketEvent>,
}

impl Subscription {
    /// Connects and subscribes to the topics that begin with `topic`.
    pub(super) async fn connect(
        endpoint: &str,
        topic: &str,
        connect_timeout: Duration,
    ) -> Result<Self, SocketError> {
        let mut socket = SubSocket::with_options(options(connect_timeout));
        let events = socket.monitor().boxed();
        // Before the connection, so that nothing is published on it unseen.
        socket.subscribe(topic).await?;
        let connected = timeout(connect_timeout, socket.connect(endpoint)).await;
        connected.map_err(|_| SocketError::TimedOut(connect_timeout))??;
        Ok(Self { socket, events })
    }

    /// The next batch. What had been received before the connection broke comes first.
    pub(super) async fn next(&mut self) -> Result<Numbered, SocketError> {
        Ok(parse_published(&self.next_frames().await?)?)
    }

    /// The next message, whatever it is.
    pub(super) async fn next_frames(&mut self) -> Result<Vec<Bytes>, SocketError> {
        loop {
            tokio::select! {
                biased;
                message = self.socket.recv() => return Ok(frames(message?)),
                event = self.events.next() => match event {
                    // The library would connect again by itself, and nobody would know what is between.
                    Some(SocketEvent::Disconnected(_) | SocketEvent::Closed) | None => {
                        return Err(SocketError::Closed);
                    }
                    Some(_) => {}
                },
            }
        }
    }
}

/// A connection to a replay socket.
pub(super) struct Replay {
    socket: DealerSocket,
    events: BoxStream<'static, SocketEvent>,
    patience: Duration,
}

impl Replay {
    /// Connects. `patience` is how long the next message of an answer may take.
    pub(super) async fn connect(endpoint: &str, patience: Duration) -> Result<Self, SocketError> {
        let mut socket = DealerSocket::with_options(options(patience));
        let events = socket.monitor().boxed();
        let connected = timeout(patience, socket.connect(endpoint)).await;
        connected.map_err(|_| SocketError::TimedOut(patience))??;
        Ok(Self {
            socket,
            events,
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

    /// The next message of the answer.
    pub(super) async fn next(&mut self) -> Result<ReplayMessage, SocketError> {
        let patience = self.patience;
        let next = timeout(patience, self.receive()).await;
        next.map_err(|_| SocketError::TimedOut(patience))?
    }

    async fn receive(&mut self) -> Result<ReplayMessage, SocketError> {
        loop {
            tokio::select! {
                biased;
                message = self.socket.recv() => return Ok(parse_replayed(&frames(message?))?),
                event = self.events.next() => match event {
                    Some(SocketEvent::Disconnected(_) | SocketEvent::Closed) | None => {
                        return Err(SocketError::Closed);
                    }
                    Some(_) => {}
                },
            }
        }
    }
}
