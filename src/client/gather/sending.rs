//! Sending of a request to the shards: once, or again on new connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Statistics};
use bytes::Bytes;

use super::super::error::ClientError;
use super::super::resend::{CONNECTIONS_MAX, LOOK_INTERVAL, NobodyPeriod, ended_too_often};

/// A request to all shards.
#[derive(Debug)]
pub(super) struct ShardRequest {
    pub(super) subject: String,
    pub(super) reply_to: String,
    pub(super) payload: Bytes,
    pub(super) headers: HeaderMap,
}

impl ShardRequest {
    pub(super) async fn send(&self, nats: &Client) -> Result<(), ClientError> {
        let (subject, reply_to) = (self.subject.clone(), self.reply_to.clone());
        // Empty headers would still be sent, as a message with headers.
        let sent = match self.headers.is_empty() {
            true => {
                nats.publish_with_reply(subject, reply_to, self.payload.clone())
                    .await
            }
            false => {
                let headers = self.headers.clone();
                let sent =
                    nats.publish_with_reply_and_headers(subject, reply_to, headers, self.payload.clone());
                sent.await
            }
        };
        sent.map_err(|error| ClientError::unsent(&error, nats, &self.subject, self.payload.len()))
    }
}

/// Decides when a request is sent again, in the cases that [`QueryClient`](crate::QueryClient) describes.
#[derive(Debug)]
pub(super) struct Resends {
    statistics: Arc<Statistics>,
    /// Number of the connection on which the request was sent last.
    connection: u64,
    /// Number of connections that have ended since the request was first sent.
    ended: usize,
    /// Time at which the request is sent a second time; `None` afterwards.
    second_at: Option<Instant>,
    /// Period in which the request is sent again if no daemon listens.
    nobody: NobodyPeriod,
}

impl Resends {
    /// Begins to watch the connection and the time. Must be called before the request is first sent.
    pub(super) fn of(nats: &Client, patience: Duration) -> Self {
        let statistics = nats.statistics();
        Self {
            connection: statistics.connects.load(Ordering::Relaxed),
            statistics,
            ended: 0,
            second_at: Some(Instant::now() + patience / 2),
            nobody: NobodyPeriod::of(patience),
        }
    }

    /// Waits until the request is to be sent again, because there is a new connection or because half of the patience
    /// has passed.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if too many connections have ended.
    pub(super) async fn next(&mut self, request: &ShardRequest) -> Result<(), ClientError> {
        loop {
            let connection = self.statistics.connects.load(Ordering::Relaxed);
            if connection != self.connection {
                self.connection = connection;
                self.ended += 1;
                return match self.ended < CONNECTIONS_MAX {
                    true => Ok(()),
                    false => Err(ClientError::Connection(ended_too_often(request.payload.len()))),
                };
            }
            if self.second_at.is_some_and(|at| at <= Instant::now()) {
                self.second_at = None;
                return Ok(());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Waits a moment after the server has reported that no daemon listens. Returns whether the request is then to be
    /// sent again.
    pub(super) async fn next_for_nobody(&mut self) -> bool {
        let connection = self.statistics.connects.load(Ordering::Relaxed);
        let is_early = self.nobody.lasts(connection, Instant::now());
        if is_early {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        is_early
    }
}
