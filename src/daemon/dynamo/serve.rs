//! Taking routers' requests, over NATS and TCP, and giving answers back.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64;

use crate::daemon::broker::{Buffer, ConnectError, connect_counted};
use crate::daemon::config::{Component, DynamoConfig};
use crate::daemon::instance_name;
use crate::daemon::metrics::LogGate;
use crate::daemon::metrics::labels::Connection;
use crate::daemon::shared::{Shared, Stage};

use super::answer::Indexer;
use super::discovery::keep_record;
use super::messages::{Instance, MessageError, ReplyTo, Transport, read_request, response};

/// Longest request, in bytes: hashes in JSON take about twenty each.
const REQUEST_BYTES_MAX: usize = 8 << 20;
/// Requests that are answered at the same time; further ones wait.
const ANSWERS_MAX: usize = 256;
/// Connections of routers at the same time; further ones wait.
const CONNECTIONS_MAX: usize = 256;
/// Time that a router has to take its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Messages that may wait on the connection to NATS.
const WAITING_MAX: usize = 1024;

static REFUSED_GATE: LogGate = LogGate::new();
static UNREADABLE_GATE: LogGate = LogGate::new();
static UNANSWERED_GATE: LogGate = LogGate::new();

/// Why Dynamo's routers cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum DynamoError {
    /// The connection to NATS.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The listener.
    #[error("cannot listen on {address} for Dynamo's routers: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// Serves Dynamo's routers as tasks of `stage`, where components are configured.
pub(crate) async fn start_dynamo(shared: &Shared, stage: &Stage) -> Result<(), DynamoError> {
    let config = &shared.config.dynamo;
    if config.components.is_empty() {
        return Ok(());
    }
    let answerer = shared.listener_answerer();
    let service = Service {
        indexer: Indexer {
            answerer,
            readiness: Arc::clone(&shared.readiness),
        },
        answers: Arc::new(Semaphore::new(ANSWERS_MAX)),
        stop: stage.stop.clone(),
    };
    let transport = match config.listen {
        None => Transport::Nats,
        Some(address) => Transport::Tcp(listen(address, config, &service, stage).await?),
    };
    // Replicas share the record of a subject. A listener has its own.
    let seed = match &transport {
        Transport::Nats => shared.config.subjects.prefix.clone(),
        Transport::Tcp(address) => format!("{} {address}", instance_name(&shared.nats.connection_name)),
    };
    let instances: Vec<Instance> = config.components.iter().map(|one| instance(one, &seed)).collect();
    if transport == Transport::Nats {
        let buffer = Buffer::of_messages(WAITING_MAX);
        let client = connect_counted(&shared.nats, Connection::Queries, "dynamo", buffer, |_| {}).await?;
        for instance in &instances {
            let (client, service) = (client.clone(), service.clone());
            let group = shared.config.queries.queue_group.clone();
            stage
                .tasks
                .spawn(serve_subject(client, instance.subject(), group, service));
        }
    }
    if let Some(discovery) = &config.discovery {
        for instance in instances {
            let keeping = keep_record(discovery.clone(), instance, transport.clone(), stage.stop.clone());
            stage.tasks.spawn(keeping);
        }
    }
    Ok(())
}

/// The instance of a component. Its number is positive as a signed one, as Dynamo's are.
fn instance(component: &Component, seed: &str) -> Instance {
    let name = format!("kvatlas {seed} {component}");
    Instance {
        component: component.clone(),
        id: xxh3_64(name.as_bytes()) >> 1,
    }
}

/// Answers requests, whichever way they come.
#[derive(Clone)]
struct Service {
    indexer: Indexer,
    answers: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Service {
    /// Answers a request in a task of its own. Waits while too many are answered.
    async fn take(&self, message: Bytes) {
        let Ok(permit) = Arc::clone(&self.answers).acquire_owned().await else {
            return;
        };
        let service = self.clone();
        tokio::spawn(async move { service.answer(&message, permit).await });
    }

    async fn answer(&self, message: &[u8], _permit: OwnedSemaphorePermit) {
        let asked = match read_request(message) {
            Ok(asked) => asked,
            Err(error) => return log_unreadable(&error),
        };
        let answer = match asked.question {
            Ok(question) => self.indexer.answer(&question),
            Err(error) => {
                log_unreadable(&error);
                serde_json::json!({"Error": error.to_string()})
            }
        };
        let sending = send(&asked.reply_to, response(&asked.reply_to, &answer));
        let sent = tokio::select! {
            sent = timeout(PATIENCE, sending) => sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
            () = self.stop.cancelled() => return,
        };
        if let Err(error) = sent
            && let Some(suppressed) = UNANSWERED_GATE.admit()
        {
            let address = &asked.reply_to.address;
            tracing::warn!(%error, ?address, suppressed, "a router of Dynamo did not take its answer");
        }
    }
}

fn log_unreadable(error: &MessageError) {
    if let Some(suppressed) = UNREADABLE_GATE.admit() {
        tracing::warn!(%error, suppressed, "a request of a router of Dynamo cannot be read");
    }
}

/// Sends an answer, and waits until the router has taken it.
async fn send(reply_to: &ReplyTo, answer: Bytes) -> io::Result<()> {
    let mut stream = TcpStream::connect(&reply_to.address).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&answer).await?;
    stream.shutdown().await?;
    // What comes back are wishes to end, which is what happens.
    let mut rest = [0; 256];
    while stream.read(&mut rest).await? > 0 {}
    Ok(())
}

/// Serves the requests on a subject, which replicas share, until the stop.
async fn serve_subject(client: Client, subject: String, group: String, service: Service) {
    let subscribed = client.queue_subscribe(subject.clone(), group).await;
    let mut messages = match subscribed {
        Ok(messages) => messages,
        Err(error) => return tracing::error!(%error, subject, "Dynamo's routers cannot be served"),
    };
    loop {
        let message = tokio::select! {
            message = messages.next() => message,
            () = service.stop.cancelled() => break,
        };
        let Some(message) = message else { break };
        if let Some(reply) = message.reply {
            // Whoever asks waits for this acknowledgement first. A lost connection brings its requests to another replica.
            let _ = client.publish(reply, Bytes::new()).await;
        }
        service.take(message.payload).await;
    }
}

/// Listens for routers. Returns the address that they are told.
async fn listen(
    address: SocketAddr,
    config: &DynamoConfig,
    service: &Service,
    stage: &Stage,
) -> Result<String, DynamoError> {
    let failed = |source| DynamoError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let port = listener.local_addr().map_err(failed)?.port();
    let host = config.advertise.clone().unwrap_or_else(|| match address {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    });
    stage.tasks.spawn(accept(listener, service.clone()));
    Ok(format!("{host}:{port}"))
}

async fn accept(listener: TcpListener, service: Service) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = service.stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let service = service.clone();
                tokio::spawn(async move {
                    let _permit = permit;
                    let stop = service.stop.clone();
                    let serving = stop.run_until_cancelled(serve_connection(stream, &service));
                    if let Some(Err(error)) = serving.await {
                        tracing::debug!(%error, "a connection of a router of Dynamo has ended");
                    }
                });
            }
            // No descriptors left, most likely: some come back.
            Err(error) => {
                if let Some(suppressed) = REFUSED_GATE.admit() {
                    tracing::warn!(%error, suppressed, "a router of Dynamo cannot connect");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Serves one connection: path, headers and payload of each request, each after its length.
async fn serve_connection(mut stream: TcpStream, service: &Service) -> io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        let path = stream.read_u16().await?;
        // The request itself says whom to answer.
        skip(&mut stream, path.into()).await?;
        let headers = stream.read_u16().await?;
        skip(&mut stream, headers.into()).await?;
        let bytes = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
        if bytes > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut payload = Vec::with_capacity(bytes.min(64 << 10));
        let mut rest = (&mut stream).take(bytes as u64);
        let read = timeout(PATIENCE, rest.read_to_end(&mut payload)).await??;
        if read < bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        stream.write_u32(0).await?;
        service.take(payload.into()).await;
    }
}

async fn skip(stream: &mut TcpStream, bytes: u64) -> io::Result<()> {
    let (mut rest, mut nowhere) = (stream.take(bytes), tokio::io::sink());
    let skipped = tokio::io::copy(&mut rest, &mut nowhere);
    match timeout(PATIENCE, skipped).await?? == bytes {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
