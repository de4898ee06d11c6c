//! The thread, the listener and the connections.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::AdminSource;
use super::routes::respond;
use crate::telemetry::{AdminMetrics, LogGate};

static ACCEPT_GATE: LogGate = LogGate::new();

/// Why the admin listener could not be started or stopped.
#[derive(Debug, Error)]
pub enum AdminError {
    /// The address can't be listened on.
    #[error(
        "the admin listener can't use {listen}: {source}; give an address of this machine and a free port with \
         --admin-listen, or turn it off with --admin-listen off"
    )]
    Bind {
        /// The address as given.
        listen: SocketAddr,
        /// What the operating system said.
        source: io::Error,
    },
    /// The operating system gave no thread or no poller.
    #[error("the admin thread can't be started: {0}; check the limits on threads and open files")]
    Thread(#[source] io::Error),
    /// The admin thread did not end in time: a method of its [`AdminSource`] is still running. It has taken no new
    /// connection since, and its port is free once that method returns.
    #[error("the admin thread did not end within {limit:?}; what it serves is stuck")]
    StopTimedOut {
        /// How long was waited.
        limit: Duration,
    },
    /// The admin thread ended by a panic, which was logged.
    #[error("the admin thread panicked; see the message on standard error")]
    Panicked,
}

/// What a client can hold, bounded.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdminLimits {
    /// Connections at once; a further one is closed at once.
    pub(super) connections_max: usize,
    /// Time to send the head of a request, and time that a connection may be idle between two.
    pub(super) header_read_timeout: Duration,
    /// Age at which a connection takes no further request.
    pub(super) connection_age_max: Duration,
    /// Time that a request in progress still has after that, or after the stop.
    pub(super) drain_timeout: Duration,
    /// Bytes buffered for the head of a request; a longer head is refused with status 431.
    pub(super) request_head_bytes_max: usize,
    /// Time after the drain in which the thread has to end.
    pub(super) stop_timeout: Duration,
}

impl Default for AdminLimits {
    fn default() -> Self {
        Self {
            connections_max: 64,
            header_read_timeout: Duration::from_secs(5),
            connection_age_max: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(2),
            request_head_bytes_max: 16 * 1024,
            stop_timeout: Duration::from_secs(2),
        }
    }
}

/// The running admin listener. Dropping it stops it without waiting; [`AdminServer::stop`] waits.
#[derive(Debug)]
pub struct AdminServer {
    local_addr: SocketAddr,
    stopping: CancellationToken,
    /// Disconnects when the thread is over; nothing is ever sent.
    ended: Receiver<Infallible>,
    thread: Option<JoinHandle<()>>,
    limits: AdminLimits,
}

impl AdminServer {
    /// Binds the address and serves it on a thread of its own. Port 0 takes any free port.
    ///
    /// # Errors
    ///
    /// [`AdminError::Bind`] if the address is taken or not of this machine, [`AdminError::Thread`] if the operating
    /// system refuses a thread.
    pub fn start(listen: SocketAddr, source: Arc<dyn AdminSource>) -> Result<Self, AdminError> {
        Self::start_with(listen, source, AdminLimits::default())
    }

    pub(super) fn start_with(
        listen: SocketAddr,
        source: Arc<dyn AdminSource>,
        limits: AdminLimits,
    ) -> Result<Self, AdminError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(AdminError::Thread)?;
        let bound = bind(&runtime, listen).and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (local_addr, listener) = match bound {
            Ok(bound) => bound,
            Err(source) => {
                // A runtime must not be dropped where another one runs: that panics.
                runtime.shutdown_background();
                return Err(AdminError::Bind { listen, source });
            }
        };
        let stopping = CancellationToken::new();
        let (end_sender, ended) = mpsc::channel::<Infallible>();
        let acceptor = Acceptor {
            source,
            limits,
            stopping: stopping.clone(),
            metrics: AdminMetrics::new(),
        };
        let thread = thread::Builder::new()
            .name("kvatlas-admin".to_owned())
            .spawn(move || {
                // Dropped after all else, also by a panic: it tells `stop` that the thread is over.
                let _end_sender = end_sender;
                runtime.block_on(acceptor.run(listener));
            })
            .map_err(AdminError::Thread)?;
        tracing::info!(%local_addr, "admin listener started");
        Ok(Self {
            local_addr,
            stopping,
            ended,
            thread: Some(thread),
            limits,
        })
    }

    /// The address that is listened on, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops listening, lets requests in progress finish for at most 2 s, and waits at most 2 s more for the thread
    /// to end. When this returns without an error, the port is free.
    ///
    /// # Errors
    ///
    /// [`AdminError::StopTimedOut`] if a method of the source doesn't return; [`AdminError::Panicked`] if the thread
    /// had ended by a panic.
    pub fn stop(mut self) -> Result<(), AdminError> {
        self.stopping.cancel();
        let limit = self.limits.drain_timeout + self.limits.stop_timeout;
        if matches!(self.ended.recv_timeout(limit), Err(RecvTimeoutError::Timeout)) {
            return Err(AdminError::StopTimedOut { limit });
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(AdminError::Panicked),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        self.stopping.cancel();
    }
}

fn bind(runtime: &Runtime, listen: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(listen)?;
    listener.set_nonblocking(true)?;
    let _entered = runtime.enter();
    TcpListener::from_std(listener)
}

/// What the admin thread runs.
struct Acceptor {
    source: Arc<dyn AdminSource>,
    limits: AdminLimits,
    stopping: CancellationToken,
    metrics: AdminMetrics,
}

impl Acceptor {
    /// Accepts until the stop, then drains.
    async fn run(self, listener: TcpListener) {
        let connections = TaskTracker::new();
        let permits = Arc::new(Semaphore::new(self.limits.connections_max));
        while let Some(accepted) = self.stopping.run_until_cancelled(listener.accept()).await {
            let stream = match accepted {
                Ok((stream, _peer)) => stream,
                Err(error) => {
                    self.accept_failed(&error).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                // Closing at once tells the client more than an answer that never comes.
                self.metrics.connection_refused(self.limits.connections_max);
                continue;
            };
            let (source, limits, stopping) = (Arc::clone(&self.source), self.limits, self.stopping.clone());
            connections.spawn(async move {
                serve(stream, source, limits, stopping).await;
                drop(permit);
            });
        }
        drop(listener);
        connections.close();
        // Each connection bounds its own drain.
        connections.wait().await;
    }

    async fn accept_failed(&self, error: &io::Error) {
        if let Some(suppressed) = ACCEPT_GATE.admit() {
            tracing::warn!(%error, suppressed, "admin connection not accepted");
        }
        // Typically no file descriptor is left: accepting again at once would only burn the processor.
        let pause = tokio::time::sleep(Duration::from_millis(100));
        self.stopping.run_until_cancelled(pause).await;
    }
}

/// Serves one connection until the client closes it, breaks a limit, or grows too old, or the server stops.
async fn serve(
    stream: TcpStream,
    source: Arc<dyn AdminSource>,
    limits: AdminLimits,
    stopping: CancellationToken,
) {
    let service = service_fn(|request| {
        let response = respond(&request, source.as_ref());
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_read_timeout)
        .max_buf_size(limits.request_head_bytes_max)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    tokio::select! {
        result = connection.as_mut() => return log_end(result),
        () = stopping.cancelled() => {}
        () = tokio::time::sleep(limits.connection_age_max) => {}
    }
    // No further request; a client that doesn't take the answer in progress is cut off.
    connection.as_mut().graceful_shutdown();
    if let Ok(result) = tokio::time::timeout(limits.drain_timeout, connection).await {
        log_end(result);
    }
}

/// A connection that ends badly is the client's doing, and of interest only to who looks into it.
fn log_end(result: hyper::Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "admin connection ended");
    }
}
