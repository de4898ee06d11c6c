//! One HTTP/2 connection of a client, within limits.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use kvatlas_process::listener::{Peer, Place};

use super::service::Door;

/// Maximum size of the headers of one request, in bytes.
const HEADER_BYTES_MAX: u32 = 16 << 10;
/// Limits on the bytes that a client may send before the server reads them (HTTP/2 flow control). The first limit is
/// for one question, the second for all questions of one connection.
const UNREAD_BYTES_MAX: [u32; 2] = [64 << 10, 256 << 10];

/// Time for which a request in progress may go on after the daemon is told to stop.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Count of the requests on a connection that are being answered. While the count is 0, the connection counts as
/// waiting for its client, and may have to give way to a new connection.
pub(super) struct Activity {
    place: Place,
    requests: Mutex<usize>,
    changed: Notify,
}

/// Guard of a request that is being answered. The request counts until the guard is dropped.
pub(super) struct RequestGuard(Arc<Activity>);

impl Activity {
    pub(super) fn new(place: Place) -> Self {
        Self {
            place,
            requests: Mutex::new(0),
            changed: Notify::new(),
        }
    }

    /// Counts a request as being answered, until the returned guard is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> RequestGuard {
        self.change(|requests| requests + 1);
        RequestGuard(Arc::clone(self))
    }

    fn change(&self, change: impl Fn(usize) -> usize) {
        let mut requests = self.requests.lock();
        *requests = change(*requests);
        self.place.note_waits(*requests == 0);
        self.changed.notify_one();
    }

    /// Waits until `idle_timeout` has passed without a request in progress.
    async fn idle_for(&self, idle_timeout: Duration) {
        loop {
            let changed = self.changed.notified();
            let is_idle = *self.requests.lock() == 0;
            if !is_idle {
                changed.await;
            } else if timeout(idle_timeout, changed).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.change(|requests| requests.saturating_sub(1));
    }
}

/// Serves one client. The connection ends in one of these cases:
///
/// - The client leaves, is idle for too long, or breaks a limit.
/// - The connection gives way to a new one (is displaced).
/// - The daemon stops.
pub(super) async fn serve(
    door: Arc<Door>,
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    stopping: CancellationToken,
) {
    let activity = Arc::new(Activity::new(place));
    let (of_requests, asked) = (Arc::clone(&activity), Arc::clone(&door));
    let service = service_fn(move |request: Request<Incoming>| {
        let (door, activity) = (Arc::clone(&asked), Arc::clone(&of_requests));
        async move {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(Peer(peer));
            Ok::<_, Infallible>(door.serve(request, activity).await)
        }
    });
    let [of_stream, of_connection] = UNREAD_BYTES_MAX;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(door.config.max_streams)
        .max_header_list_size(HEADER_BYTES_MAX)
        .initial_stream_window_size(of_stream)
        .initial_connection_window_size(of_connection)
        .keep_alive_interval(door.config.request_timeout)
        .keep_alive_timeout(door.config.request_timeout);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        ended = connection.as_mut() => return log_end(ended),
        () = activity.place.displaced() => return,
        () = stopping.cancelled() => {}
        () = activity.idle_for(door.config.idle_timeout) => {}
    }
    // No further request is taken. A client that does not take its answer within the drain timeout is cut off.
    connection.as_mut().graceful_shutdown();
    if let Ok(ended) = timeout(DRAIN_TIMEOUT, connection).await {
        log_end(ended);
    }
}

/// Logs a connection that ended with an error. Clients cause such errors, so they are logged for debugging only.
fn log_end(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection of a router over gRPC has ended");
    }
}
