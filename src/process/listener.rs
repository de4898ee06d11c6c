//! A listener that limits its connections, in total and for each source. The admin listener and the query listener use
//! it for HTTP. The listeners for the routers of llm-d, SGLang and Dynamo use it for their protocols. A *source* is an
//! IPv4 address, or the first 64 bits of an IPv6 address.
//!
//! | what a client can hold | what bounds it |
//! |---|---|
//! | connections | `connections_max` in total, `per_source_max` for one source |
//! | a connection without a request | `head_timeout`, the time to send the head of a request |
//! | a connection while a limit is reached | the oldest connection that waits for its client is closed to make room for
//! a new one |
//! | a connection whose request's body does not come | its reader [notes](ConnectionHandle::wait) that it waits for its client |
//! | memory for a head | `head_bytes_max` |
//! | an answer that it does not read | `unread_timeout`, by the system (on Linux) |
//!
//! So any number of silent connections cannot keep others out. At a limit, a new connection takes the place of an older
//! one, the oldest of those that wait for their clients:
//!
//! - At the limit of a source, the new connection replaces a connection of the same source.
//! - At the total limit, it replaces a connection of the source that has the most connections.
//! - If no connection of the chosen source waits for its client, the new connection is refused.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_telemetry::{ConnectionCounts, log_gated};

/// Pause after a failure to accept a connection. Usually no file descriptor is left then, and trying again immediately would
/// waste processor time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time after which a client that reads nothing of what was sent is cut off, if the listener's own timeout is not longer.
/// Linux also counts a client that reads too little to make room for a whole segment.
const UNREAD_MAX: Duration = Duration::from_secs(30);

/// Bounds on the connections, time and memory that clients can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Maximum number of open connections.
    pub connections_max: usize,
    /// Maximum number of open connections of one source. A source is an IPv4 address, or the first 64 bits of an IPv6 address.
    pub per_source_max: usize,
    /// Maximum time to send the head of a request. Also the maximum time that a connection may be idle between two requests.
    pub head_timeout: Duration,
    /// Age at which a connection takes no further request; `None` for no limit.
    pub age_max: Option<Duration>,
    /// Time that a request in progress has to finish after the connection reaches `age_max`, or after the listener is
    /// stopped.
    pub drain_timeout: Duration,
    /// Maximum size of the head of a request, in bytes. A longer head is refused with status 431.
    pub head_bytes_max: usize,
    /// Time for which a client may read nothing of an answer, or 30 s if that is longer.
    pub unread_timeout: Duration,
}

/// Accepts and serves the connections of one listener.
pub struct Acceptor<C> {
    /// Name of the listener, for the log.
    pub name: &'static str,
    /// Bounds on what clients can hold: connections, time and memory.
    pub limits: ConnectionLimits,
    /// Token that stops the listener.
    pub stopping: CancellationToken,
    /// Counter of the listener's connections.
    pub counts: Arc<C>,
}

impl<C: ConnectionCounts> Acceptor<C> {
    /// Serves HTTP until the stop, then waits until all connections have ended.
    pub async fn run<S, B>(self, listener: TcpListener, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (limits, stopping, name) = (self.limits, self.stopping.clone(), self.name);
        let serve = move |stream, peer, place: Place| {
            let (service, stopping) = (service.clone(), stopping.clone());
            async move { serve(stream, peer, service, &place, limits, stopping, name).await }
        };
        self.accept(listener, serve).await;
    }

    /// Hands each new connection to `serve` until the stop. Then waits until all connections have ended. `serve` must bound how
    /// long a connection lasts.
    pub async fn accept<F>(self, listener: TcpListener, serve: impl Fn(TcpStream, SocketAddr, Place) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let connections = TaskTracker::new();
        let open = Arc::new(Mutex::new(OpenConnections::default()));
        while let Some(accepted) = self.stopping.run_until_cancelled(listener.accept()).await {
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    self.accept_failed(&error).await;
                    continue;
                }
            };
            let Some(place) = self.place(&open, source_of(peer.ip())) else {
                // Closing at once tells the client more than an answer that never comes.
                continue;
            };
            // An answer is one small write. It must not wait until the client has acknowledged the previous write.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "a connection sends with delay");
            }
            #[cfg(target_os = "linux")]
            if let Err(error) = bound_unread(&stream, self.limits.unread_timeout) {
                tracing::debug!(%error, "nothing bounds how long a client leaves an answer unread");
            }
            let (counts, serving) = (Arc::clone(&self.counts), serve(stream, peer, place));
            connections.spawn(async move {
                counts.opened();
                serving.await;
                counts.closed();
            });
        }
        drop(listener);
        connections.close();
        connections.wait().await;
    }

    /// Reserves a place for a new connection of `source`. At a limit, an older connection is closed to make room. `None` if no
    /// older connection may be closed.
    fn place(&self, open: &Arc<Mutex<OpenConnections>>, source: IpAddr) -> Option<Place> {
        let limits = self.limits;
        let mut all = open.lock();
        let of_source = all.by_source.get(&source).copied().unwrap_or_default();
        let (limit, has_room) = if of_source >= limits.per_source_max {
            (limits.per_source_max, all.displace(Some(source)))
        } else if all.connections.len() >= limits.connections_max {
            (limits.connections_max, all.displace(None))
        } else {
            return Some(all.add(open, source));
        };
        self.counts.refused(limit);
        has_room.then(|| all.add(open, source))
    }

    async fn accept_failed(&self, error: &io::Error) {
        log_gated!(warn "a connection was not accepted"; %error, listener = self.name);
        let pause = tokio::time::sleep(ACCEPT_PAUSE);
        self.stopping.run_until_cancelled(pause).await;
    }
}

/// Returns the source to which an address belongs: the IPv4 address, or the first 64 bits of an IPv6 address. One client usually
/// has all addresses with the same first 64 bits.
pub fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let network = u128::from(address) & (u128::MAX << 64);
            IpAddr::V6(Ipv6Addr::from(network))
        }
    }
}

/// The open connections by their number. A lower number means an older connection.
#[derive(Default)]
struct OpenConnections {
    connections: BTreeMap<u64, OpenConnection>,
    by_source: HashMap<IpAddr, usize>,
    accepted: u64,
}

struct OpenConnection {
    source: IpAddr,
    /// Whether the connection waits for its client: for a request, or until the client has taken an answer.
    waits: Arc<AtomicBool>,
    displaced: CancellationToken,
}

/// The right of a connection to be open. The number of such rights is bounded, and dropping this value gives the
/// right back.
pub struct Place {
    open: Arc<Mutex<OpenConnections>>,
    number: u64,
    waits: Arc<AtomicBool>,
    displaced: CancellationToken,
}

impl Place {
    /// Notes whether the connection waits for its client from now on. A new connection waits for its client.
    pub fn note_waits(&self, waits: bool) {
        self.waits.store(waits, Ordering::Release);
    }

    /// Waits until the connection has to be closed to make room for a new connection.
    pub async fn displaced(&self) {
        self.displaced.cancelled().await;
    }
}

impl OpenConnections {
    fn add(&mut self, open: &Arc<Mutex<Self>>, source: IpAddr) -> Place {
        self.accepted += 1;
        let (waits, displaced) = (Arc::new(AtomicBool::new(true)), CancellationToken::new());
        *self.by_source.entry(source).or_default() += 1;
        let connection = OpenConnection {
            source,
            waits: Arc::clone(&waits),
            displaced: displaced.clone(),
        };
        self.connections.insert(self.accepted, connection);
        Place {
            open: Arc::clone(open),
            number: self.accepted,
            waits,
            displaced,
        }
    }

    /// Closes the oldest connection of `source` that waits for its client. If `source` is `None`, chooses the source with the
    /// most connections. Returns whether a connection was closed.
    fn displace(&mut self, source: Option<IpAddr>) -> bool {
        let busiest = || {
            let most = self.by_source.iter().max_by_key(|(_, count)| **count);
            most.map(|(source, _)| *source)
        };
        let Some(source) = source.or_else(busiest) else {
            return false;
        };
        let waits = |connection: &OpenConnection| {
            connection.source == source && connection.waits.load(Ordering::Acquire)
        };
        let oldest = self.connections.iter().find(|(_, found)| waits(found));
        let Some(number) = oldest.map(|(number, _)| *number) else {
            return false;
        };
        if let Some(connection) = self.remove(number) {
            connection.displaced.cancel();
        }
        true
    }

    fn remove(&mut self, number: u64) -> Option<OpenConnection> {
        let removed = self.connections.remove(&number)?;
        if let Some(count) = self.by_source.get_mut(&removed.source) {
            *count -= 1;
            if *count == 0 {
                self.by_source.remove(&removed.source);
            }
        }
        Some(removed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.lock().remove(self.number);
    }
}

/// Serves one HTTP connection. It ends when the client closes it, breaks a limit, or is displaced. At `age_max` or the
/// stop, only the request in progress is finished.
async fn serve<S, B>(
    stream: TcpStream,
    peer: SocketAddr,
    service: S,
    place: &Place,
    limits: ConnectionLimits,
    stopping: CancellationToken,
    name: &'static str,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    B: Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let waits = &place.waits;
    // The connection waits for its client at all times except while a request is being answered.
    let watched = service_fn(move |mut request: Request<Incoming>| {
        waits.store(false, Ordering::Release);
        request.extensions_mut().insert(Peer(peer));
        request.extensions_mut().insert(ConnectionHandle {
            waits: Arc::clone(waits),
            displaced: place.displaced.clone(),
        });
        let answering = service.call(request);
        async move {
            let answer = answering.await;
            waits.store(true, Ordering::Release);
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.head_bytes_max)
        .serve_connection(TokioIo::new(stream), watched);
    let mut connection = pin!(connection);
    let too_old = async {
        match limits.age_max {
            Some(age_max) => tokio::time::sleep(age_max).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        result = connection.as_mut() => return log_end(name, result),
        () = place.displaced.cancelled() => return,
        () = stopping.cancelled() => {}
        () = too_old => {}
    }
    // From here on, no further request is taken. A client that does not take the answer in progress is cut off.
    connection.as_mut().graceful_shutdown();
    if let Ok(result) = tokio::time::timeout(limits.drain_timeout, connection).await {
        log_end(name, result);
    }
}

/// Has the system close a connection whose peer reads nothing, or confirms nothing, for `timeout`, or for [`UNREAD_MAX`] if
/// that is longer.
#[cfg(target_os = "linux")]
fn bound_unread(stream: &TcpStream, timeout: Duration) -> rustix::io::Result<()> {
    let milliseconds = u32::try_from(timeout.max(UNREAD_MAX).as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(stream, milliseconds)
}

/// Logs a connection that ended with an error. Clients cause such errors, so the line is at level debug.
fn log_end(listener: &'static str, result: hyper::Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, listener, "a connection ended");
    }
}

/// Address of the client that sent a request. Handlers find it among the request's extensions.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// Handle of the connection over which a request came. Handlers find it among the request's extensions.
#[derive(Debug, Clone)]
pub struct ConnectionHandle {
    waits: Arc<AtomicBool>,
    displaced: CancellationToken,
}

/// Guard for the time in which a connection waits for its client. Dropping it ends that time.
pub struct Waiting(Arc<AtomicBool>);

impl ConnectionHandle {
    /// Notes that the connection waits for its client, until the guard is dropped.
    pub fn wait(&self) -> Waiting {
        self.waits.store(true, Ordering::Release);
        Waiting(Arc::clone(&self.waits))
    }

    /// Closes the connection, also in the middle of an answer.
    pub fn close(&self) {
        self.displaced.cancel();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_source_is_an_address_or_a_network() {
        assert_eq!(source_of(address("10.1.2.3")), address("10.1.2.3"));
        assert_eq!(source_of(address("::ffff:10.1.2.3")), address("10.1.2.3"));
        assert_eq!(
            source_of(address("2001:db8:1:2:3:4:5:6")),
            address("2001:db8:1:2::")
        );
    }

    #[test]
    fn the_oldest_that_waits_gives_way_and_who_is_answered_does_not() {
        let open = Arc::new(Mutex::new(OpenConnections::default()));
        let (one, other) = (address("10.0.0.1"), address("10.0.0.2"));
        let add = |source| open.lock().add(&open, source);
        let (answered, oldest, newer, foreign) = (add(one), add(one), add(one), add(other));
        answered.waits.store(false, Ordering::Release);
        assert!(open.lock().displace(Some(one)));
        assert!(oldest.displaced.is_cancelled() && !newer.displaced.is_cancelled());
        // Without a given source, the source with the most connections gives way.
        assert!(open.lock().displace(None));
        assert!(newer.displaced.is_cancelled() && !foreign.displaced.is_cancelled());
        assert!(!open.lock().displace(Some(one)), "the last one is being answered");
        drop((answered, oldest, newer, foreign));
        assert!(open.lock().connections.is_empty() && open.lock().by_source.is_empty());
    }
}
