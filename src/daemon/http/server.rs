//! The listener: connections within limits, on the threads of the program's runtime.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_process::listener::{Acceptor, ConnectionLimits};
use kvatlas_telemetry::HttpConnectionMetrics;

use super::routes::router;
use super::shared::{HttpParts, HttpShared};

/// Why the listener cannot start.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {listen} (http.listen): {source}")]
pub struct HttpStartError {
    /// The address.
    listen: SocketAddr,
    /// The system's error.
    source: io::Error,
}

/// The bounds on what clients can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpLimits {
    /// Most connections at once.
    pub connections_max: usize,
    /// Most connections of one source at once. A source is an IPv4 address, or an IPv6 network of 64 bits.
    pub per_source_max: usize,
    /// Most time to send the head of a request, and most time that a connection may be idle between two requests.
    pub idle_timeout: Duration,
    /// Time for which a request in progress may go on after the stop.
    pub drain_timeout: Duration,
}

/// Bytes buffered for the head of a request; a longer head is refused with status 431.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// The running listener. Dropping it stops the listener without waiting; [`HttpServer::stop`] waits.
#[derive(Debug)]
pub struct HttpServer {
    local_addr: SocketAddr,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl HttpServer {
    /// Binds the address and serves it on the current runtime. Port 0 takes any free port.
    ///
    /// # Errors
    ///
    /// [`HttpStartError`] if the address is taken or not of this machine.
    pub async fn start(
        listen: SocketAddr,
        parts: HttpParts,
        limits: HttpLimits,
    ) -> Result<Self, HttpStartError> {
        let failed = |source| HttpStartError { listen, source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let local_addr = listener.local_addr().map_err(failed)?;
        let (stopping, tasks) = (CancellationToken::new(), TaskTracker::new());
        let acceptor = Acceptor {
            name: "http",
            limits: ConnectionLimits {
                connections_max: limits.connections_max,
                per_source_max: limits.per_source_max,
                head_timeout: limits.idle_timeout,
                age_max: None,
                drain_timeout: limits.drain_timeout,
                head_bytes_max: HEAD_BYTES_MAX,
            },
            stopping: stopping.clone(),
            counts: Arc::new(HttpConnectionMetrics::new()),
        };
        let service = TowerToHyperService::new(router(&Arc::new(HttpShared::new(parts))));
        tasks.spawn(acceptor.run(listener, service));
        tracing::info!(%local_addr, "query listener started");
        Ok(Self {
            local_addr,
            stopping,
            tasks,
        })
    }

    /// Returns the address that the listener is bound to, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops listening, and lets requests in progress finish within the limit.
    pub async fn stop(&self) {
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stopping.cancel();
    }
}
