//! Event plane as a source: subscribes over NATS or ZeroMQ, and asks the plane's workers for missing events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Client, ConnectOptions, Event};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::mpsc;

use kvatlas_client::publish::PublisherError;
use kvatlas_process::broker::round_trip;
use kvatlas_process::registry::NewEngine;
use kvatlas_telemetry::log_gated;

use super::super::sockets::Subscription;
use super::super::sources::{FollowedSource, FollowedSourceError, Quiet, SourceTask};
use super::healing::{Healing, News};
use super::{PlaneEvents, parse_plane_message};

/// Maximum time for the NATS server to confirm a subscription.
const CONFIRMATION_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of a subscription's messages that may wait for the task.
const SUBSCRIPTION_CAPACITY: usize = 65_536;

impl FollowedSource for PlaneEvents {
    async fn follow(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowedSourceError> {
        match task.engine.endpoint.starts_with("nats://") {
            true => self.subscribe_nats(task, failures).await,
            false => self.subscribe_zmq(task, failures).await,
        }
    }

    async fn disconnected(&mut self, task: &SourceTask) -> Result<(), FollowedSourceError> {
        self.lost().await?;
        // The worker behind the broken connection may be gone. The records tell.
        if let Some(records) = &task.records {
            let known = Arc::clone(&records.borrow());
            self.take_records(known).await?;
            self.told_recorded().await?;
        }
        Ok(())
    }

    async fn end(self, _: &SourceTask, says_goodbye: bool) -> Result<(), FollowedSourceError> {
        Ok(self.holders.end(says_goodbye).await?)
    }
}

impl PlaneEvents {
    async fn subscribe_zmq(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowedSourceError> {
        let NewEngine { endpoint, topic, .. } = &task.engine;
        let (patience, metrics) = (task.options.patience, Arc::clone(&task.metrics));
        let mut subscription = Subscription::connect(endpoint, topic, patience, metrics).await?;
        *failures = 0;
        // The publisher may not know of the subscription yet.
        self.connected(None);
        let mut healing = Healing::new(task.records.clone(), task.nats.clone(), &task.options);
        self.note_followed(task);
        let mut quiet = Quiet::new(task.stall_watch(), task.options.poll_interval);
        loop {
            let heard = tokio::select! {
                biased;
                frames = subscription.next_frames() => PlaneEvent::Message(envelope_of(&frames?)),
                news = healing.news() => PlaneEvent::News(news),
                () = quiet.tick() => PlaneEvent::Nothing,
            };
            self.hear(heard, &mut quiet, &healing).await?;
            healing.ask(self, &quiet.stalls);
            self.note_followed(task);
        }
    }

    async fn subscribe_nats(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowedSourceError> {
        let (client, mut breaks) = connect(&task.engine.endpoint, task.options.patience).await?;
        let subscribed = client.subscribe(task.engine.topic.clone()).await;
        let mut messages = subscribed.map_err(FollowedSourceError::broken)?;
        // A missing confirmation does not end following: the account may lack the right to an inbox, which only this
        // check needs.
        let mut confirmation = std::pin::pin!(round_trip(&client, CONFIRMATION_PATIENCE).fuse());
        let mut is_confirmed = false;
        *failures = 0;
        let mut healing = Healing::new(task.records.clone(), client.clone(), &task.options);
        let mut quiet = Quiet::new(task.stall_watch(), task.options.poll_interval);
        loop {
            let heard = tokio::select! {
                biased;
                broken = breaks.recv() => {
                    return Err(FollowedSourceError::broken(broken.unwrap_or_default()));
                }
                confirmed = &mut confirmation => {
                    if let Err(error) = confirmed {
                        let engine = &task.engine.key;
                        log_gated!(warn "nothing shows that the event plane is heard"; %engine, %error);
                    }
                    self.connected(Some(Instant::now()));
                    is_confirmed = true;
                    continue;
                }
                message = messages.next() => match message {
                    Some(message) => PlaneEvent::Message(message.payload),
                    None => return Err(FollowedSourceError::broken("the subscription has ended")),
                },
                news = healing.news() => PlaneEvent::News(news),
                () = quiet.tick() => PlaneEvent::Nothing,
            };
            is_confirmed |= matches!(heard, PlaneEvent::Message(_));
            self.hear(heard, &mut quiet, &healing).await?;
            if is_confirmed {
                // No worker is asked before the subscription is confirmed: the bridge could miss events that the worker
                // publishes after its answer.
                healing.ask(self, &quiet.stalls);
                self.note_followed(task);
            }
        }
    }

    /// Handles the event that woke the task of the event plane: a message, changed records or a worker's answer, or a
    /// tick of the timer.
    async fn hear(
        &mut self,
        heard: PlaneEvent,
        quiet: &mut Quiet,
        healing: &Healing,
    ) -> Result<(), PublisherError> {
        if quiet.has_stalled(matches!(heard, PlaneEvent::Nothing)) {
            self.lost().await?;
        }
        match heard {
            // If messages waited unread during a stall, this message may be one of them.
            PlaneEvent::Message(payload) => self.apply(&payload, quiet.is_behind()).await,
            PlaneEvent::News(news) => healing.take(news, self, &quiet.stalls).await,
            PlaneEvent::Nothing => Ok(()),
        }
    }

    /// Notes the progress of following the event plane. An exact holder stays exact when only questions to workers fail.
    fn note_followed(&self, task: &SourceTask) {
        let in_doubt = self.holders.trouble();
        let trouble = self.trouble().or_else(|| in_doubt.clone());
        task.note_followed(in_doubt.is_none(), trouble.as_deref());
    }
}

/// Event that wakes the task of an event plane.
enum PlaneEvent {
    /// A message has come.
    Message(Bytes),
    /// A worker has answered, or discovery's records have changed.
    News(News),
    /// A tick of the timer, at which no message waits to be read.
    Nothing,
}

/// Returns the envelope of a message over ZeroMQ. If the frames are no such message, returns empty bytes, which cannot be
/// decoded.
fn envelope_of(frames: &[Bytes]) -> Bytes {
    parse_plane_message(frames)
        .inspect_err(|error| tracing::debug!(%error, "no message of an event plane"))
        .unwrap_or_default()
}

/// Makes a NATS connection that only this source uses. The channel tells when the connection breaks, so that no
/// reconnect goes unseen.
async fn connect(
    url: &str,
    patience: Duration,
) -> Result<(Client, mpsc::Receiver<String>), FollowedSourceError> {
    let (broke, breaks) = mpsc::channel(1);
    let options = ConnectOptions::new()
        .name("kvatlas-bridge-source")
        .connection_timeout(patience)
        .subscription_capacity(SUBSCRIPTION_CAPACITY)
        .event_callback(move |event| {
            let broke = broke.clone();
            async move {
                let is_loss = matches!(
                    event,
                    Event::Disconnected | Event::SlowConsumer(_) | Event::Closed
                );
                if is_loss {
                    // The channel holds one event, which is enough to end the connection.
                    let _ = broke.try_send(event.to_string());
                }
            }
        });
    let client = options.connect(url).await;
    let client = client.map_err(FollowedSourceError::broken)?;
    Ok((client, breaks))
}
