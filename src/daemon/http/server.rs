//! The HTTP listener: connections within limits, on the threads of the program's runtime.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_process::listener::{Acceptor, ConnectionLimits};
use kvatlas_telemetry::HttpConnectionMetrics;

use crate::vital::vital;

use super::routes::router;
use super::shared::{HttpParts, HttpShared};

/// Reason why the listener cannot start.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on {listen} (http.listen): {source}; give an address of this machine and a free port with --http-listen, or \
     turn it off with --http-listen off"
)]
pub struct HttpStartError {
    /// Address of the listener.
    listen: SocketAddr,
    /// Error of the operating system.
    source: io::Error,
}

/// Maximum length of the head of a request, in bytes. A longer head is refused with status 431.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Running listener. Dropping this value stops the listener without waiting. [`HttpServer::stop`] waits.
#[derive(Debug)]
pub struct HttpServer {
    local_addr: SocketAddr,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl HttpServer {
    /// Binds the address, and serves requests to it on the current runtime. Port 0 takes any free port.
    ///
    /// # Errors
    ///
    /// [`HttpStartError`] if the address is taken or does not belong to this machine.
    pub async fn start(
        listen: SocketAddr,
        parts: HttpParts,
        limits: ConnectionLimits,
    ) -> Result<Self, HttpStartError> {
        let failed = |source| HttpStartError { listen, source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let local_addr = listener.local_addr().map_err(failed)?;
        let (stopping, tasks) = (CancellationToken::new(), TaskTracker::new());
        let acceptor = Acceptor {
            name: "http",
            limits,
            stopping: stopping.clone(),
            counts: Arc::new(HttpConnectionMetrics::new()),
        };
        let service = TowerToHyperService::new(router(&Arc::new(HttpShared::new(parts))));
        tasks.spawn(vital(acceptor.run(listener, service)));
        tracing::info!(%local_addr, "query listener started");
        Ok(Self {
            local_addr,
            stopping,
            tasks,
        })
    }

    /// Returns the address at which the listener accepts connections. If the configured port was 0, this address has
    /// the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops listening, and lets requests in progress go on until the limit on their time.
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
