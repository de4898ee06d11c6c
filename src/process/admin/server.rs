//! The thread and the listener of the admin server.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::AdminSource;
use super::routes::router;
use crate::listener::{Acceptor, ConnectionLimits};
use kvatlas_telemetry::AdminMetrics;

/// Error of starting or stopping the admin listener.
#[derive(Debug, Error)]
pub enum AdminError {
    /// The listener cannot be bound to the address.
    #[error(
        "the admin listener can't use {listen}: {source}; give an address of this machine and a free port with \
         --admin-listen, or turn it off with --admin-listen off"
    )]
    Bind {
        /// Address as it was configured.
        listen: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The operating system refused a thread or a poller.
    #[error("the admin thread can't be started: {0}; check the limits on threads and open files")]
    Thread(#[source] io::Error),
    /// The admin thread did not end in time, because a method of its [`AdminSource`] is still running. The thread accepts no new
    /// connection, and its port becomes free when that method returns.
    #[error("the admin thread did not end within {limit:?}; what it serves is stuck")]
    StopTimedOut {
        /// Time after which the caller stopped waiting for the thread's end.
        limit: Duration,
    },
    /// The admin thread ended by a panic, which was logged.
    #[error("the admin thread panicked; see the message on standard error")]
    Panicked,
}

/// Bounds on the connections that clients can hold, and on the time that stopping may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdminLimits {
    /// Limits of the connections.
    pub(super) connections: ConnectionLimits,
    /// Longest wait for the thread's end, in addition to the time for the drain.
    pub(super) stop_timeout: Duration,
}

impl Default for AdminLimits {
    fn default() -> Self {
        Self {
            connections: ConnectionLimits {
                connections_max: 64,
                // The page has at most half as many streams. So a stream is never closed to make room for another
                // request of its client.
                per_source_max: 2 * super::STREAMS_MAX,
                head_timeout: Duration::from_secs(5),
                age_max: Some(Duration::from_secs(60)),
                drain_timeout: Duration::from_secs(2),
                head_bytes_max: 16 * 1024,
                unread_timeout: Duration::ZERO,
            },
            stop_timeout: Duration::from_secs(2),
        }
    }
}

/// The running admin listener. Dropping this value stops the listener and does not wait for its end.
/// [`AdminServer::stop`] waits.
#[derive(Debug)]
pub struct AdminServer {
    local_addr: SocketAddr,
    stopping: CancellationToken,
    /// Channel on which nothing is ever sent. It disconnects when the listener's thread has ended.
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
                // A runtime must not be dropped inside another one: that panics.
                runtime.shutdown_background();
                return Err(AdminError::Bind { listen, source });
            }
        };
        let stopping = CancellationToken::new();
        let (end_sender, ended) = mpsc::channel::<Infallible>();
        let acceptor = Acceptor {
            name: "admin",
            limits: limits.connections,
            stopping: stopping.clone(),
            counts: Arc::new(AdminMetrics::new()),
        };
        let service = TowerToHyperService::new(router(source));
        let thread = thread::Builder::new()
            .name("kvatlas-admin".to_owned())
            .spawn(move || {
                // This value is dropped last, also if the thread panics. Dropping it tells `stop` that the thread has
                // ended.
                let _end_sender = end_sender;
                runtime.block_on(acceptor.run(listener, service));
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

    /// Returns the address of the listener, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops listening, lets requests in progress finish for at most 2 s, and waits at most 2 s more for the thread to
    /// end. If the call returns without an error, the port is free.
    ///
    /// # Errors
    ///
    /// [`AdminError::StopTimedOut`] if a method of the source does not return. [`AdminError::Panicked`] if the thread
    /// had ended by a panic.
    pub fn stop(mut self) -> Result<(), AdminError> {
        self.stopping.cancel();
        let limit = self.limits.connections.drain_timeout + self.limits.stop_timeout;
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
