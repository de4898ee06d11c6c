//! Server for Dynamo's routers: takes their requests, over NATS or TCP, and sends the answers back.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Message};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use xxhash_rust::xxh3::xxh3_64;

use crate::queries::{MEMBER_MESSAGES_MIN, Misses, QueueMember};
use crate::shared::{Shared, Stage};
use crate::start_error::{StartError, bind};
use kvatlas_config::{Config, DynamoComponent, DynamoConfig};
use kvatlas_core::wire::Subjects;
use kvatlas_process::admin::Latch;
use kvatlas_process::broker::{
    Buffer, ConnectionNotice, Intake, RefusedSubscriptions, SubscribeError, connect_counted,
};
use kvatlas_process::instance_name;
use kvatlas_process::listener::{Acceptor, ConnectionLimits, Place};
use kvatlas_process::presence::advertised;
use kvatlas_telemetry::labels::{Connection, DynamoOutcome};
use kvatlas_telemetry::{
    DynamoAnswerMetrics, DynamoConnectionMetrics, DynamoMetrics, LogGate, QueryErrorMetrics,
    QueryMetricsByNamespace, log_gated,
};

use super::answer::Indexer;
use super::destinations::{CONNECT_TIMEOUT, Destinations};
use super::discovery::keep_record;
use super::messages::{ENDPOINT, Instance, MessageError, ReplyTo, RequestTransport, read_request, response};

/// Maximum length of a request, in bytes. A hash in JSON takes about twenty bytes.
const REQUEST_BYTES_MAX: usize = 8 << 20;
/// Maximum number of requests that are answered at the same time. Further requests wait. So do answers that wait to be
/// sent: see [`Destinations`].
const ANSWERS_MAX: usize = 256;
/// Maximum number of connections that stay open after their answer was sent, until the router ends them. The daemon
/// ends further connections at once.
const ENDINGS_MAX: usize = 1024;
/// Time for which connections and unsent answers may go on after the daemon is told to stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without a request after which a stopping daemon ends a connection. By then routers have seen that the discovery
/// record is gone.
const QUIET_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum length of a request's path and headers, in bytes. Paths have a smaller bound, [`PATH_BYTES_MAX`].
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Time that a router gets to end the connection of an answer. After this time, the daemon ends the connection.
const END_PATIENCE: Duration = Duration::from_secs(1);
/// Number of bytes that one permit of the semaphore `Service::room` (memory for requests) stands for.
const ROOM_BYTES: usize = 1 << 10;
/// Time between two checks of the readiness, while this replica does not take queries yet.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Maximum length of a path in a TCP request, in bytes. A path is `ID/NAMESPACE/COMPONENT/ENDPOINT`.
const PATH_BYTES_MAX: u16 = 4 << 10;
/// Pause before a subscription is made again that the server has refused.
const REJOIN_PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of messages that wait on the connection to NATS.
const WAITING_MAX: usize = MEMBER_MESSAGES_MIN;

static UNREADABLE_GATE: LogGate = LogGate::new();

/// Serves Dynamo's routers as tasks of `stage`. Does nothing if no components are configured.
pub(crate) async fn start_dynamo(shared: &Shared, stage: &Stage) -> Result<(), StartError> {
    let config = &shared.config.dynamo;
    if config.components.is_empty() {
        return Ok(());
    }
    let components = config.components.iter();
    let tenants = components.map(|one| (endpoint_path(one), one.tenant.clone()));
    let service = Arc::new(Service {
        tenants: tenants.collect(),
        subjects: shared.subjects.clone(),
        indexer: Indexer {
            source: shared.source().await?,
            readiness: Arc::clone(&shared.readiness),
            errors: QueryErrorMetrics::new(),
            namespaces: QueryMetricsByNamespace::default(),
            metrics: DynamoAnswerMetrics::new(),
            misses: Misses::new(
                "Dynamo's routers",
                "--kv-cache-block-size with the namespace here",
            ),
        },
        answers: Arc::new(Semaphore::new(ANSWERS_MAX)),
        destinations: Destinations::default(),
        endings: Semaphore::new(ENDINGS_MAX),
        room: Arc::new(Semaphore::new(config.max_receiving_bytes / ROOM_BYTES)),
        room_bytes_max: config.max_receiving_bytes,
        idle_timeout: config.idle_timeout,
        request_timeout: config.request_timeout,
        metrics: DynamoMetrics::new(),
        stop: stage.stop.clone(),
        tasks: stage.tasks.clone(),
    });
    let transport = match config.listen {
        None => RequestTransport::Nats,
        Some(address) => RequestTransport::Tcp(listen(address, config, &service, stage).await?),
    };
    // Over NATS, replicas share one record, so their seeds are equal. Each TCP listener has a record of its own.
    let seed = match &transport {
        RequestTransport::Nats => shared.config.subjects.prefix.clone(),
        RequestTransport::Tcp(address) => {
            format!("{} {address}", instance_name(&shared.nats.connection_name))
        }
    };
    let instances: Vec<Instance> = config.components.iter().map(|one| instance(one, &seed)).collect();
    if transport == RequestTransport::Nats {
        for instance in &instances {
            start_subject(shared, stage, instance, Arc::clone(&service)).await?;
        }
    }
    if let Some(discovery) = &config.discovery {
        for instance in instances {
            let keeping = keep_record(discovery.clone(), instance, transport.clone(), stage.stop.clone());
            let service = Arc::clone(&service);
            stage.spawn_to_end(async move {
                if settled(&service).await {
                    keeping.await;
                }
            });
        }
    }
    Ok(())
}

/// Returns the NATS subjects on which Dynamo's routers ask a daemon or gateway with these settings. Empty if none asks,
/// or if they ask over TCP. Members of a queue group leave it by messages on the same subjects.
pub fn dynamo_subjects(config: &Config) -> Vec<String> {
    let over_nats = config
        .dynamo
        .components
        .iter()
        .filter(|_| config.dynamo.listen.is_none());
    over_nats
        .map(|component| instance(component, &config.subjects.prefix).subject())
        .collect()
}

/// Returns the instance of a component. Its id is a hash of `seed` and the component's name. Like Dynamo's ids, the id fits a
/// positive signed 64-bit number.
fn instance(component: &DynamoComponent, seed: &str) -> Instance {
    let DynamoComponent { namespace, name, .. } = component;
    let name = format!("kvatlas {seed} {namespace}.{name}");
    Instance {
        component: component.clone(),
        id: xxh3_64(name.as_bytes()) >> 1,
    }
}

/// Reason why a router does not get its answer.
#[derive(Debug, thiserror::Error)]
enum UnsentError {
    /// As many answers to the router's address are on their way as one address may have.
    #[error("too many answers to this address are on their way")]
    ManyToAddress,
    /// As many answers are on their way as addresses may have that have taken none lately.
    #[error("too many answers are on their way to addresses that have taken none")]
    ManyUntaken,
    /// Router did not take the answer.
    #[error("the answer was not taken: {0}")]
    NotTaken(#[from] io::Error),
}

/// State that all requests of Dynamo's routers share, over NATS and over TCP.
struct Service {
    /// Tenant of each component that is served. The keys come from [`endpoint_path`].
    tenants: HashMap<String, String>,
    /// Subjects of the wire contract. The daemon drops a request if the acknowledgement would go to one of these
    /// subjects.
    subjects: Subjects,
    indexer: Indexer,
    answers: Arc<Semaphore>,
    destinations: Destinations,
    endings: Semaphore,
    /// Memory for requests, reserved until they are answered: one permit for each `ROOM_BYTES`.
    room: Arc<Semaphore>,
    room_bytes_max: usize,
    idle_timeout: Duration,
    /// Maximum time for a request to arrive. Also the maximum time for the router to take its answer.
    request_timeout: Duration,
    metrics: DynamoMetrics,
    stop: CancellationToken,
    /// Tasks that answer requests. The daemon's stop waits for them.
    tasks: TaskTracker,
}

impl Service {
    /// Starts a task that answers a request to the endpoint with the path `endpoint`. Before that, waits until fewer
    /// than `ANSWERS_MAX` requests are being answered. `room` is the memory reserved for the message.
    async fn take(self: &Arc<Self>, message: Bytes, room: OwnedSemaphorePermit, endpoint: String) {
        let Ok(permit) = Arc::clone(&self.answers).acquire_owned().await else {
            return;
        };
        let service = Arc::clone(self);
        self.tasks.spawn(async move {
            let made = service.make_answer(message, endpoint).await;
            drop(room);
            let outcome = match made {
                Some((reply_to, answer, outcome)) => service.send(&reply_to, answer, outcome, permit).await,
                None => DynamoOutcome::Unreadable,
            };
            service.metrics.requests.get(outcome).increment(1);
        });
    }

    /// Returns the destination of the answer to a request, the answer, and the outcome that is counted if the router
    /// takes the answer. `None` if the request does not tell the answer's destination.
    async fn make_answer(&self, message: Bytes, endpoint: String) -> Option<(ReplyTo, Bytes, DynamoOutcome)> {
        let asked = read_request(&message).inspect_err(log_unreadable).ok()?;
        drop(message);
        let tenant = self.tenants.get(&endpoint);
        let tenant = tenant.ok_or_else(|| MessageError::endpoint(&endpoint));
        let (answer, outcome) = match tenant.and_then(|tenant| Ok((tenant, asked.question?))) {
            Ok((tenant, question)) => (
                self.indexer.answer(&question, tenant).await,
                DynamoOutcome::Answered,
            ),
            Err(error) => {
                log_unreadable(&error);
                let answer = serde_json::json!({"Error": error.to_string()});
                (answer, DynamoOutcome::Unreadable)
            }
        };
        let answer = response(&asked.reply_to, &answer);
        Some((asked.reply_to, answer, outcome))
    }

    /// Sends an answer. Returns `outcome` if the router has taken the answer, or else the outcome that says why it has
    /// not. After the daemon's stop, the router has [`DRAIN_TIMEOUT`] to take it.
    ///
    /// `permit` is one of the `ANSWERS_MAX` permits that limit the requests being answered. This function gives the
    /// permit back before it begins to send, so that slow routers do not delay the answers to other requests.
    async fn send(
        &self,
        reply_to: &ReplyTo,
        answer: Bytes,
        outcome: DynamoOutcome,
        permit: OwnedSemaphorePermit,
    ) -> DynamoOutcome {
        let sending = async {
            let share = self.destinations.begin(reply_to.address);
            let share = share.ok_or(UnsentError::ManyToAddress)?;
            let place = share
                .place(answer.len(), permit)
                .await
                .ok_or(UnsentError::ManyUntaken)?;
            let written = timeout(self.request_timeout, write(reply_to, answer)).await;
            share.note(matches!(written, Ok(Ok(_))));
            drop((place, share));
            let mut stream = written.map_err(io::Error::from)??;
            if let Ok(_ending) = self.endings.try_acquire() {
                end(&mut stream).await?;
            }
            Ok(())
        };
        let sent = tokio::select! {
            sent = sending => sent,
            () = self.stopped_for(DRAIN_TIMEOUT) => Err(UnsentError::NotTaken(io::ErrorKind::TimedOut.into())),
        };
        let address = reply_to.address;
        match sent {
            Ok(()) => outcome,
            Err(UnsentError::NotTaken(error)) => {
                log_gated!(warn "a router of Dynamo did not take its answer"; %error, %address);
                DynamoOutcome::NotTaken
            }
            Err(error) => {
                log_gated!(warn "an answer to a router of Dynamo was thrown away"; %error, %address);
                DynamoOutcome::NotSent
            }
        }
    }

    /// Waits until the daemon is told to stop, and then for `time`.
    async fn stopped_for(&self, time: Duration) {
        self.stop.cancelled().await;
        tokio::time::sleep(time).await;
    }

    /// Reserves memory for a request of `bytes` bytes over TCP, and waits until there is enough. Fails if other requests
    /// leave too little for the time that a request may take.
    async fn room(&self, bytes: usize) -> io::Result<OwnedSemaphorePermit> {
        let awaited = timeout(self.request_timeout, self.room_awaited(bytes)).await;
        awaited.ok().flatten().ok_or_else(|| {
            self.metrics.requests.get(DynamoOutcome::NoRoom).increment(1);
            io::Error::other("requests take too much room (dynamo.max_receiving_bytes)")
        })
    }

    /// Reserves memory for a request of `bytes` bytes, which waits until there is enough. A request that is larger than
    /// all of the memory gets all of it. `None` only if the memory is given up.
    async fn room_awaited(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = bytes
            .div_ceil(ROOM_BYTES)
            .min(self.room_bytes_max / ROOM_BYTES)
            .max(1);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        Arc::clone(&self.room).acquire_many_owned(units).await.ok()
    }
}

fn log_unreadable(error: &MessageError) {
    if let Some(suppressed) = UNREADABLE_GATE.admit() {
        tracing::warn!(%error, suppressed, "a request of a router of Dynamo cannot be read");
    }
}

/// Connects to a router, and writes the answer. Returns the connection.
async fn write(reply_to: &ReplyTo, answer: Bytes) -> io::Result<TcpStream> {
    let connecting = TcpStream::connect(reply_to.address);
    let mut stream = timeout(CONNECT_TIMEOUT, connecting).await??;
    stream.set_nodelay(true)?;
    stream.write_all(&answer).await?;
    Ok(stream)
}

/// Waits until the router ends the connection of its answer. After [`END_PATIENCE`], ends the connection from this
/// side, and waits for [`END_PATIENCE`] again. Fails if the router has still not ended the connection.
///
/// The side that ends a connection first keeps the connection's port for a minute. With a connection for each answer,
/// this side would run out of ports. So the router gets time to end the connection first.
async fn end(stream: &mut TcpStream) -> io::Result<()> {
    if let Ok(ended) = timeout(END_PATIENCE, read_to_end(stream)).await {
        return ended;
    }
    stream.shutdown().await?;
    timeout(END_PATIENCE, read_to_end(stream)).await?
}

/// Reads until the router ends the connection, and discards the bytes. After an answer, a router sends nothing but
/// messages that ask to end the stream. They need no reaction, because the stream ends in any case.
async fn read_to_end(stream: &mut TcpStream) -> io::Result<()> {
    let mut rest = [0; 256];
    while stream.read(&mut rest).await? > 0 {}
    Ok(())
}

/// Returns the path of a component's endpoint: `NAMESPACE/COMPONENT/ENDPOINT`. All instances of the component share this
/// part of their TCP paths. The instance's id comes before it, and is not compared: it changes with each start, and a router
/// asks by an older record until it has seen the new one.
fn endpoint_path(component: &DynamoComponent) -> String {
    let DynamoComponent { namespace, name, .. } = component;
    format!("{namespace}/{name}/{ENDPOINT}")
}

/// Waits until this replica takes queries. After its start, it first catches up with the other replicas' blocks, for a
/// limited time. Returns false if the daemon stops before.
async fn settled(service: &Service) -> bool {
    let mut looks = interval(LOOK_EVERY);
    let takes_queries = || {
        let report = service.indexer.readiness.report();
        report.is_set(Latch::Settled) && report.is_set(Latch::QueriesSubscribed)
    };
    let settling = async {
        while !takes_queries() {
            looks.tick().await;
        }
    };
    service.stop.run_until_cancelled(settling).await.is_some()
}

/// Starts to serve the requests to an instance over NATS, on a connection of its own. A task that takes all messages of its
/// connection can tell how many bytes wait there.
async fn start_subject(
    shared: &Shared,
    stage: &Stage,
    instance: &Instance,
    service: Arc<Service>,
) -> Result<(), StartError> {
    let (buffer, intake) = Buffer::of_bytes(WAITING_MAX, shared.config.events.subscription_bytes);
    let (own, refused) = ([instance.subject()], RefusedSubscriptions::default());
    let counted = refused.clone();
    let notice = move |notice: &ConnectionNotice| match notice {
        ConnectionNotice::Refused(refusal) if refusal.is_subscription_to(&own) => counted.count(),
        _ => {}
    };
    let client = connect_counted(&shared.nats, Connection::Queries, "dynamo", buffer, notice).await?;
    let watching = Arc::clone(&intake).watch(client.clone());
    stage.spawn(watching);
    let requests = SubjectRequests {
        client,
        intake,
        subject: instance.subject(),
        group: shared.config.queries.queue_group.clone(),
    };
    let endpoint = endpoint_path(&instance.component);
    stage.spawn_to_end(requests.serve(endpoint, service, refused));
    Ok(())
}

/// Requests to an instance over NATS.
struct SubjectRequests {
    client: Client,
    intake: Arc<Intake>,
    subject: String,
    group: String,
}

impl SubjectRequests {
    /// Serves the requests, once this replica takes queries. Replicas form a queue group, so each request reaches one of
    /// them. When the daemon stops, requests that NATS has already sent here are still answered, because routers have no
    /// fallback. The same holds when the server withdraws the right to the subject.
    async fn serve(self, endpoint: String, service: Arc<Service>, refused: RefusedSubscriptions) {
        if !settled(&service).await {
            return;
        }
        let mut refusals = refused.watch();
        let mut member = match self.join().await {
            Ok(member) => member,
            Err(error) => {
                let subject = self.subject;
                return tracing::error!(%error, subject, "Dynamo's routers cannot be served");
            }
        };
        loop {
            let message = tokio::select! {
                () = service.stop.cancelled() => break,
                message = member.next_counted(&self.intake) => message,
                Ok(()) = refusals.changed() => {
                    for message in member.ended().await {
                        self.take(message, &endpoint, &service).await;
                    }
                    // The server may give the right back.
                    service.stop.run_until_cancelled(sleep(REJOIN_PAUSE)).await;
                    match self.join().await {
                        Ok(again) => member = again,
                        Err(_) => return,
                    }
                    continue;
                }
            };
            let Some(message) = message else { break };
            self.take(message, &endpoint, &service).await;
        }
        while let Some(message) = member.next_until_left().await {
            self.take(message, &endpoint, &service).await;
        }
        let _ = self.client.flush().await;
    }

    async fn join(&self) -> Result<QueueMember, SubscribeError> {
        QueueMember::join(&self.client, self.subject.clone(), None, &self.group).await
    }

    /// Acknowledges a request, and answers it. The router waits first for the acknowledgement, then for the answer. Drops a
    /// request whose reply subject is a subject of the contract or of the server, because subscribers other than the
    /// router could read the acknowledgement.
    async fn take(&self, message: Message, endpoint: &str, service: &Arc<Service>) {
        if let Some(reply) = message.reply {
            if !service.subjects.may_reply_to(&reply) {
                let requests = &service.metrics.requests;
                return requests.get(DynamoOutcome::ForbiddenReplySubject).increment(1);
            }
            let _ = self.client.publish(reply, Bytes::new()).await;
        }
        if let Some(room) = service.room_awaited(message.payload.len()).await {
            service.take(message.payload, room, endpoint.to_owned()).await;
        }
    }
}

/// Opens the TCP listener for routers. Returns its address for the discovery record.
async fn listen(
    address: SocketAddr,
    config: &DynamoConfig,
    service: &Arc<Service>,
    stage: &Stage,
) -> Result<String, StartError> {
    let (listener, local_addr) = bind(address, "for Dynamo's routers").await?;
    let listens = SocketAddr::new(address.ip(), local_addr.port());
    let told = advertised(config.advertise.as_deref(), listens);
    let acceptor = Acceptor {
        name: "dynamo",
        limits: ConnectionLimits {
            connections_max: config.max_connections,
            per_source_max: config.max_connections_per_source,
            head_timeout: config.idle_timeout,
            age_max: None,
            drain_timeout: DRAIN_TIMEOUT,
            head_bytes_max: HEAD_BYTES_MAX,
            unread_timeout: config.request_timeout,
        },
        stopping: stage.stop.clone(),
        counts: Arc::new(DynamoConnectionMetrics::new()),
    };
    tracing::info!(%local_addr, told, "listener for Dynamo's routers started");
    let service = Arc::clone(service);
    let serve = move |stream, _, place| serve_connection(stream, place, Arc::clone(&service));
    stage.spawn_to_end(acceptor.accept(listener, serve));
    Ok(told)
}

/// Serves a connection until the connection ends, breaks a limit, or gives way to a new one (is displaced). After the
/// daemon is told to stop, a connection may go on for at most [`DRAIN_TIMEOUT`].
async fn serve_connection(mut stream: TcpStream, place: Place, service: Arc<Service>) {
    tokio::select! {
        ended = take_requests(&mut stream, &place, &service) => if let Err(error) = ended {
            tracing::debug!(%error, "a connection of a router of Dynamo has ended");
        },
        () = place.displaced() => {}
        () = service.stopped_for(DRAIN_TIMEOUT) => {}
    }
}

/// Takes the requests of one connection until the connection ends. After the daemon is told to stop, also returns when
/// no request has come for [`QUIET_TIMEOUT`].
///
/// On the wire, a request consists of a path, headers and a payload. The length of each part comes before the part.
async fn take_requests(stream: &mut TcpStream, place: &Place, service: &Arc<Service>) -> io::Result<()> {
    loop {
        let path = tokio::select! {
            path = timeout(service.idle_timeout, stream.read_u16()) => path??,
            () = service.stopped_for(QUIET_TIMEOUT) => return Ok(()),
        };
        let head = timeout(service.request_timeout, receive_head(stream, path)).await??;
        let TcpRequestHead { endpoint, bytes } = head;
        // A request that waits here holds up its connection, and so its router.
        let room = service.room(bytes).await?;
        let payload = timeout(service.request_timeout, receive_payload(stream, bytes)).await??;
        place.note_waits(false);
        timeout(service.request_timeout, stream.write_u32(0)).await??;
        service.take(payload, room, endpoint).await;
        place.note_waits(true);
    }
}

/// Head of a request over TCP.
struct TcpRequestHead {
    /// Path of the endpoint that is asked.
    endpoint: String,
    /// Length of the payload, which follows.
    bytes: usize,
}

/// Receives the head of a request. The caller has already read the first field, which is the length of the request's
/// path in bytes, and passes this length as `path`.
async fn receive_head(stream: &mut TcpStream, path: u16) -> io::Result<TcpRequestHead> {
    if path > PATH_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut path = vec![0; path.into()];
    stream.read_exact(&mut path).await?;
    // `ID/NAMESPACE/COMPONENT/ENDPOINT`.
    let path = String::from_utf8_lossy(&path);
    let endpoint = path
        .split_once('/')
        .map_or("", |(_, endpoint)| endpoint)
        .to_owned();
    // Headers are skipped: the payload itself names the destination of the answer.
    let headers = stream.read_u16().await?;
    skip(stream, headers.into()).await?;
    let bytes = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
    if bytes > REQUEST_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(TcpRequestHead { endpoint, bytes })
}

/// Receives the payload of a request, which has `bytes` bytes.
async fn receive_payload(stream: &mut TcpStream, bytes: usize) -> io::Result<Bytes> {
    let mut payload = Vec::with_capacity(bytes.min(64 << 10));
    let read = stream.take(bytes as u64).read_to_end(&mut payload).await?;
    match read == bytes {
        true => Ok(payload.into()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

async fn skip(stream: &mut TcpStream, bytes: u64) -> io::Result<()> {
    let (mut rest, mut nowhere) = (stream.take(bytes), tokio::io::sink());
    let skipped = tokio::io::copy(&mut rest, &mut nowhere);
    match skipped.await? == bytes {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
