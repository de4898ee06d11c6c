//! Tasks of sources that report several holders: TensorRT-LLM's servers, servers that hand on events over gRPC, and Dynamo's event plane.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_nats::{Client, ConnectOptions, Event};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::WorkerName;

use kvatlas_process::broker::round_trip;
use kvatlas_process::registry::NewEngine;
use kvatlas_telemetry::{BridgeMetrics, LogGate};

use super::dynamo::{Healing, News, PlaneAddress, PlaneEvents, Records, parse_plane_message};
use super::follower::FollowOptions;
use super::grpc::{Frames, GrpcError};
use super::holders::Holders;
use super::progress::{SharedProgress, log_untold};
use super::server::Origin;
use super::sockets::{SocketError, Subscription};
use super::stalls::{BridgeClock, StallWatch};
use super::subscribed::{StreamError, SubscribedEvents};
use super::tensorrt::{PollError, Poller, ServerEvents};

static UNHEARD_GATE: LogGate = LogGate::new();

/// Pause between two questions to a TensorRT-LLM server, whether or not its answer had events.
const SERVER_PAUSE: Duration = Duration::from_millis(100);
/// Longest time for the NATS server to confirm a subscription.
const CONFIRMATION_PATIENCE: Duration = Duration::from_secs(10);
/// Most messages of a subscription that may wait for the task.
const SUBSCRIPTION_CAPACITY: usize = 65_536;

/// Error that keeps a source from being followed just now.
#[derive(Debug, thiserror::Error)]
enum SourceError {
    #[error(transparent)]
    Poll(#[from] PollError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("{0}")]
    Nats(String),
    #[error(transparent)]
    Grpc(#[from] GrpcError),
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The publisher towards the daemons failed. Following then ends.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
}

impl SourceError {
    fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Publisher(_)
                | Self::Poll(PollError::Publisher(_))
                | Self::Stream(StreamError::Publisher(_))
        )
    }

    fn is_cut(&self) -> bool {
        matches!(self, Self::Socket(error) if error.is_cut())
    }
}

/// Follows one source.
pub(super) struct SourceTask {
    pub(super) engine: NewEngine,
    /// Server that has told of the source; `None` if the source was given directly. The server has to tell the same behind each new
    /// connection.
    pub(super) origin: Option<Origin>,
    pub(super) options: FollowOptions,
    pub(super) clock: BridgeClock,
    pub(super) progress: SharedProgress,
    pub(super) metrics: Arc<BridgeMetrics>,
    pub(super) stop: CancellationToken,
    pub(super) says_goodbye: Arc<AtomicBool>,
    /// Records of Dynamo's discovery; `None` if no place for them is configured.
    pub(super) records: Option<watch::Receiver<Arc<Records>>>,
    /// NATS connection over which daemons are told.
    pub(super) nats: Client,
}

/// A source, with the state that its kind needs.
pub(super) enum Source {
    /// A TensorRT-LLM server.
    Server(ServerEvents),
    /// Dynamo's event plane.
    Plane(PlaneEvents),
    /// A server that hands on events over gRPC.
    Stream(SubscribedEvents),
}

impl Source {
    /// Makes the source of a TensorRT-LLM server.
    pub(super) fn server(engine: &NewEngine, worker: WorkerName, holders: Holders) -> Self {
        Self::Server(ServerEvents::new(worker, engine.key.rank, holders))
    }

    /// Makes the source of Dynamo's event plane.
    pub(super) fn plane(engine: &NewEngine, holders: Holders, options: &FollowOptions) -> Self {
        let address = PlaneAddress {
            endpoint: engine.endpoint.clone(),
            topic: engine.topic.clone(),
        };
        Self::Plane(PlaneEvents::new(holders, address, options))
    }

    /// Makes the source of a server that hands on events over gRPC.
    pub(super) fn stream(engine: &NewEngine, worker: WorkerName, holders: Holders) -> Self {
        Self::Stream(SubscribedEvents::new(worker, engine.key.rank, holders))
    }

    fn into_holders(self) -> Holders {
        match self {
            Self::Stream(events) => events.into_holders(),
            Self::Server(events) => events.into_holders(),
            Self::Plane(events) => events.into_holders(),
        }
    }

    async fn lost(&mut self) -> Result<(), PublisherError> {
        match self {
            Self::Server(events) => events.holders().lost().await,
            Self::Plane(events) => events.lost().await,
            Self::Stream(events) => events.lost().await,
        }
    }
}

impl SourceTask {
    /// Follows the source until it is stopped: connects, and connects again after each failure.
    pub(super) async fn run(self, mut source: Source) {
        let mut failures = 0;
        loop {
            let failed_before = failures;
            let following = Box::pin(self.follow(&mut source, &mut failures));
            let Some(ended) = self.stop.run_until_cancelled(following).await else {
                break;
            };
            let error = match ended {
                Ok(never) => match never {},
                Err(error) => error,
            };
            if error.is_final() {
                return self.progress.ended(&self.engine, &error);
            }
            self.progress.out_of_sight(&self.engine, &error);
            if let Some(origin) = &self.origin {
                origin.ask_again();
            }
            if source.lost().await.is_err() || self.look_at_records(&mut source).await.is_err() {
                return;
            }
            if error.is_cut() {
                // A broken bound does not reset the count of failures, as for an engine.
                failures = failures.max(failed_before);
            }
            failures = failures.saturating_add(1);
            let pause = tokio::time::sleep(self.options.backoff.pause(failures));
            if self.stop.run_until_cancelled(pause).await.is_none() {
                break;
            }
        }
        let says_goodbye = self.says_goodbye.load(Ordering::Acquire);
        if let Err(error) = source.into_holders().end(says_goodbye).await {
            log_untold(&self.engine, &error);
        }
    }

    /// Takes in the records of discovery while there is no connection: the worker behind the broken connection may be gone.
    async fn look_at_records(&self, source: &mut Source) -> Result<(), PublisherError> {
        match (source, &self.records) {
            (Source::Plane(events), Some(records)) => {
                let known = Arc::clone(&records.borrow());
                events.take_records(known).await
            }
            _ => Ok(()),
        }
    }

    async fn follow(&self, source: &mut Source, failures: &mut u32) -> Result<Infallible, SourceError> {
        match source {
            Source::Server(events) => self.poll(events, failures).await,
            Source::Stream(events) => self.subscribe_grpc(events, failures).await,
            Source::Plane(events) if self.engine.endpoint.starts_with("nats://") => {
                self.subscribe_nats(events, failures).await
            }
            Source::Plane(events) => self.subscribe_zmq(events, failures).await,
        }
    }

    async fn poll(&self, events: &mut ServerEvents, failures: &mut u32) -> Result<Infallible, SourceError> {
        let mut poller = Poller::new(&self.engine.endpoint, self.options.patience)?;
        let mut stalls = self.stall_watch();
        loop {
            let look = stalls.look();
            let answer = match poller.poll().await {
                Ok(answer) => answer,
                Err(error) => {
                    events.note_failure(&error);
                    return Err(error.into());
                }
            };
            *failures = 0;
            if stalls.has_stalled() {
                events.holders().lost().await?;
            }
            // An answer takes the events out of the server. So it is applied even when it no longer proves that the server lives.
            let is_news = stalls.is_news(look);
            let seen_for = is_news.then(|| self.options.look_interval_max());
            events.apply(&answer, seen_for).await?;
            self.note_followed(events.holders());
            tokio::time::sleep(SERVER_PAUSE).await;
            if stalls.has_stalled() {
                events.holders().lost().await?;
            }
        }
    }

    async fn subscribe_zmq(
        &self,
        events: &mut PlaneEvents,
        failures: &mut u32,
    ) -> Result<Infallible, SourceError> {
        let NewEngine { endpoint, topic, .. } = &self.engine;
        let (patience, metrics) = (self.options.patience, Arc::clone(&self.metrics));
        let mut subscription = Subscription::connect(endpoint, topic, patience, metrics).await?;
        *failures = 0;
        // The publisher may not know of the subscription yet.
        events.connected(None);
        let mut healing = Healing::new(self.records.clone(), self.nats.clone(), &self.options);
        self.note_plane(events);
        let mut quiet = Quiet::new(self.stall_watch(), self.options.poll_interval);
        loop {
            let heard = tokio::select! {
                biased;
                frames = subscription.next_frames() => Heard::Message(envelope_of(&frames?)),
                news = healing.news() => Heard::News(news),
                () = quiet.tick() => Heard::Nothing,
            };
            self.hear(heard, events, &mut quiet, &healing).await?;
            healing.ask(events, &quiet.stalls);
            self.note_plane(events);
        }
    }

    /// Takes in one event of a plane's task: a message, news of discovery, or a tick.
    async fn hear(
        &self,
        heard: Heard,
        events: &mut PlaneEvents,
        quiet: &mut Quiet,
        healing: &Healing,
    ) -> Result<(), PublisherError> {
        let is_behind = quiet.awake(matches!(heard, Heard::Nothing), events).await?;
        match heard {
            Heard::Message(payload) => events.apply(&payload, is_behind).await,
            Heard::News(news) => healing.take(news, events, &quiet.stalls).await,
            Heard::Nothing => Ok(()),
        }
    }

    async fn subscribe_nats(
        &self,
        events: &mut PlaneEvents,
        failures: &mut u32,
    ) -> Result<Infallible, SourceError> {
        let (client, mut breaks) = self.connect_nats().await?;
        let failed = |error: &dyn std::fmt::Display| SourceError::Nats(error.to_string());
        let subscribed = client.subscribe(self.engine.topic.clone()).await;
        let mut messages = subscribed.map_err(|error| failed(&error))?;
        // Following goes on without the confirmation: the account may lack the right to an inbox, which nothing else needs.
        let mut confirmation = std::pin::pin!(round_trip(&client, CONFIRMATION_PATIENCE).fuse());
        let mut is_confirmed = false;
        *failures = 0;
        let mut healing = Healing::new(self.records.clone(), client.clone(), &self.options);
        let mut quiet = Quiet::new(self.stall_watch(), self.options.poll_interval);
        loop {
            let heard = tokio::select! {
                biased;
                broken = breaks.recv() => {
                    return Err(SourceError::Nats(broken.unwrap_or_default()));
                }
                confirmed = &mut confirmation => {
                    if let Err(error) = confirmed {
                        let engine = &self.engine.key;
                        if let Some(suppressed) = UNHEARD_GATE.admit() {
                            tracing::warn!(%engine, %error, suppressed, "nothing shows that the event plane is heard");
                        }
                    }
                    events.connected(Some(Instant::now()));
                    is_confirmed = true;
                    continue;
                }
                message = messages.next() => match message {
                    Some(message) => Heard::Message(message.payload),
                    None => return Err(SourceError::Nats("the subscription has ended".to_owned())),
                },
                news = healing.news() => Heard::News(news),
                () = quiet.tick() => Heard::Nothing,
            };
            is_confirmed |= matches!(heard, Heard::Message(_));
            self.hear(heard, events, &mut quiet, &healing).await?;
            if is_confirmed {
                // A worker that is asked before would publish events after its answer that nobody hears.
                healing.ask(events, &quiet.stalls);
                self.note_plane(events);
            }
        }
    }

    async fn subscribe_grpc(
        &self,
        events: &mut SubscribedEvents,
        failures: &mut u32,
    ) -> Result<Infallible, SourceError> {
        let (engine, patience) = (&self.engine, self.options.patience);
        let mut frames = Frames::subscribe(&engine.endpoint, engine.format, patience).await?;
        if let Some(origin) = &self.origin {
            origin.confirmed().await;
        }
        *failures = 0;
        events.connected().await?;
        let mut quiet = Quiet::new(self.stall_watch(), self.options.poll_interval);
        loop {
            let frame = tokio::select! {
                biased;
                frame = frames.next() => Some(frame?),
                () = quiet.tick() => None,
            };
            if quiet.has_stalled(frame.is_none()) {
                events.lost().await?;
            }
            if let Some(frame) = &frame {
                events.apply(frame).await?;
            }
            // The frames end where the server gives no sign of life.
            if !quiet.is_behind() {
                events.seen(self.options.look_interval_max()).await?;
            }
            self.note_streamed(events);
        }
    }

    /// Makes a NATS connection for this source alone, and a channel that tells when it breaks, so that no reconnect goes unseen.
    async fn connect_nats(&self) -> Result<(Client, mpsc::Receiver<String>), SourceError> {
        let (broke, breaks) = mpsc::channel(1);
        let options = ConnectOptions::new()
            .name("kvatlas-bridge-source")
            .connection_timeout(self.options.patience)
            .subscription_capacity(SUBSCRIPTION_CAPACITY)
            .event_callback(move |event| {
                let broke = broke.clone();
                async move {
                    let is_loss = matches!(
                        event,
                        Event::Disconnected | Event::SlowConsumer(_) | Event::Closed
                    );
                    if is_loss {
                        // One event is enough to end the connection.
                        let _ = broke.try_send(event.to_string());
                    }
                }
            });
        let client = options.connect(&self.engine.endpoint).await;
        let client = client.map_err(|error| SourceError::Nats(error.to_string()))?;
        Ok((client, breaks))
    }

    fn stall_watch(&self) -> StallWatch {
        StallWatch::new(self.clock.clone(), &self.options)
    }

    /// Notes how a stream is followed. The ranks that are heard stay exact when others are not heard.
    fn note_streamed(&self, events: &mut SubscribedEvents) {
        let in_doubt = events.trouble().or_else(|| events.holders().trouble());
        let ranks = self.origin.as_ref().and_then(Origin::ranks);
        let trouble = in_doubt.clone().or_else(|| events.unheard(ranks?));
        self.progress
            .followed(&self.engine, in_doubt.is_none(), trouble.as_deref());
    }

    /// Notes how a plane is followed. An exact holder stays exact when only questions fail.
    fn note_plane(&self, events: &mut PlaneEvents) {
        let in_doubt = events.holders().trouble();
        let trouble = events.trouble().or_else(|| in_doubt.clone());
        self.progress
            .followed(&self.engine, in_doubt.is_none(), trouble.as_deref());
    }

    fn note_followed(&self, holders: &Holders) {
        let trouble = holders.trouble();
        self.progress
            .followed(&self.engine, trouble.is_none(), trouble.as_deref());
    }
}

/// Event that wakes the task of a plane.
enum Heard {
    /// A message has come.
    Message(Bytes),
    /// An answer or a record has come.
    News(News),
    /// A tick: nothing waits to be read.
    Nothing,
}

/// Returns the envelope of a message over ZeroMQ. If the frames are no such message, returns empty bytes, which cannot be decoded.
fn envelope_of(frames: &[Bytes]) -> Bytes {
    parse_plane_message(frames)
        .inspect_err(|error| tracing::debug!(%error, "no message of an event plane"))
        .unwrap_or_default()
}

/// Tells a source that has nothing more to say from a source that has not been read, because it cannot be asked.
struct Quiet {
    stalls: StallWatch,
    ticks: Interval,
}

impl Quiet {
    fn new(stalls: StallWatch, interval: Duration) -> Self {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { stalls, ticks }
    }

    /// Waits for the next tick.
    async fn tick(&mut self) {
        self.ticks.tick().await;
    }

    /// Call after each wait, before daemons are told anything of `events`. `is_tick` says that nothing waits to be read. Puts the holders
    /// out of sight after a stall. Returns whether messages may still be those that waited during a stall.
    async fn awake(&mut self, is_tick: bool, events: &mut PlaneEvents) -> Result<bool, PublisherError> {
        if self.has_stalled(is_tick) {
            events.lost().await?;
        }
        Ok(self.is_behind())
    }

    /// Returns whether the bridge has stood still. If so, the caller puts the holders out of sight. `is_tick` is as in [`Self::awake`].
    fn has_stalled(&mut self, is_tick: bool) -> bool {
        let has_stalled = self.stalls.has_stalled();
        if has_stalled {
            self.ticks.reset();
        } else if is_tick {
            self.stalls.caught_up();
        }
        has_stalled
    }

    /// Whether a message may still be one that waited during a stall.
    fn is_behind(&self) -> bool {
        self.stalls.is_behind()
    }
}
