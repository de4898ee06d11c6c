//! Bodies of requests. One bound in bytes covers all of them together. A body counts until its request is answered.
//!
//! | a client can | the bound |
//! |---|---|
//! | announce a long body and send little of it | room is reserved for bytes that have come, not for announced ones |
//! | send many long bodies without their ends | at the bound, the source with the most bytes loses its oldest unfinished body that has bytes |
//! | send slowly | the time for a body (`http.request_timeout_ms`) |
//! | send in small pieces | each piece is copied into the body, so no piece keeps the buffer in which it came |
//! | send no body at all | the connection counts as waiting for its client, and gives way to new connections |

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::CONTENT_LENGTH;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use kvatlas_process::listener::{ConnectionHandle, Peer, source_of};
use kvatlas_telemetry::HttpBodyMetrics;

use super::error::HttpRefusal;

/// Maximum number of bytes that are read and discarded from the body of a refused request.
const DRAINED_BYTES_MAX: usize = 64 << 10;
/// Minimum room that is reserved for a body once its first bytes have come, in bytes.
const ROOM_MIN: usize = 1 << 10;

/// Store of the request bodies of one listener.
pub(crate) struct Bodies {
    held: Arc<Mutex<BodyReservations>>,
    limits: BodyLimits,
    metrics: HttpBodyMetrics,
}

/// Bounds on request bodies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimits {
    /// Maximum size of all bodies together, in bytes. [`Bodies::new`] raises a value that is less than twice
    /// `body_bytes_max`.
    pub(crate) all_bytes_max: usize,
    /// Maximum size of one body, in bytes.
    pub(crate) body_bytes_max: usize,
    /// Maximum time for a body to arrive.
    pub(crate) timeout: Duration,
    /// Name of the setting of `all_bytes_max`, for the log.
    pub(crate) setting: &'static str,
}

/// Request bodies for which memory is reserved at present.
#[derive(Default)]
struct BodyReservations {
    bytes: usize,
    received: u64,
    /// Bodies by their number. Each new body gets the next number.
    bodies: HashMap<u64, HeldBody>,
    /// Sources (client addresses) that have bodies with bytes.
    sources: HashMap<Option<IpAddr>, SourceBodies>,
}

/// Bodies of one source that have bytes.
#[derive(Default)]
struct SourceBodies {
    bytes: usize,
    /// Numbers of the bodies that are still arriving. The oldest body comes first.
    coming: BTreeSet<u64>,
}

struct HeldBody {
    /// Address from which the body comes. `None` if the address is not known.
    source: Option<IpAddr>,
    bytes: usize,
    given_up: CancellationToken,
}

/// Guard of the room that is reserved for one body. Dropping it frees the room.
struct BodyRoom {
    held: Arc<Mutex<BodyReservations>>,
    number: u64,
    given_up: CancellationToken,
}

/// Body that has arrived in full, and its reserved room.
pub(crate) struct ReceivedBody {
    pub(crate) bytes: Bytes,
    _room: BodyRoom,
}

impl Bodies {
    /// Creates the store of one listener's bodies, within `limits`.
    pub(crate) fn new(limits: BodyLimits) -> Self {
        // A body takes up to twice its length while it grows.
        let least = limits.body_bytes_max.saturating_mul(2);
        Self {
            held: Arc::default(),
            limits: BodyLimits {
                all_bytes_max: limits.all_bytes_max.max(least),
                ..limits
            },
            metrics: HttpBodyMetrics::new(),
        }
    }

    /// Receives the body of a request, within the limits.
    pub(crate) async fn receive(&self, request: Request) -> Result<ReceivedBody, HttpRefusal> {
        let bytes_max = self.limits.body_bytes_max;
        let announced = request.headers().get(CONTENT_LENGTH);
        let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|bytes| bytes > bytes_max) {
            return Err(HttpRefusal::BodyTooLarge { bytes_max });
        }
        let room = self.begin(&request);
        let _waiting = request
            .extensions()
            .get::<ConnectionHandle>()
            .map(ConnectionHandle::wait);
        let mut body = request.into_body();
        let receiving = self.receive_all(&mut body, &room);
        let received = tokio::select! {
            received = tokio::time::timeout(self.limits.timeout, receiving) => received,
            () = room.given_up.cancelled() => return Err(HttpRefusal::TooManyBodies),
        };
        match received {
            Ok(Ok(bytes)) => {
                room.is_whole();
                Ok(ReceivedBody { bytes, _room: room })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(HttpRefusal::BodyTimedOut {
                milliseconds: self.limits.timeout.as_millis(),
            }),
        }
    }

    async fn receive_all(&self, body: &mut Body, room: &BodyRoom) -> Result<Bytes, HttpRefusal> {
        let mut received: Vec<u8> = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame
                .map_err(|error| HttpRefusal::BadRequest(format!("the body cannot be read: {error}")))?;
            let Ok(piece) = frame.into_data() else {
                continue;
            };
            let needed = received.len() + piece.len();
            if needed > self.limits.body_bytes_max {
                return Err(HttpRefusal::BodyTooLarge {
                    bytes_max: self.limits.body_bytes_max,
                });
            }
            if needed > received.capacity() {
                let capacity = (received.capacity() * 2).max(needed).max(ROOM_MIN);
                self.grow(room, capacity - received.capacity())?;
                received.reserve_exact(capacity - received.len());
            }
            received.extend_from_slice(&piece);
        }
        Ok(received.into())
    }

    /// Reads the short body of a refused request, so that its connection can be used again. If the body is longer, or does not
    /// come in time, the connection ends after the response.
    pub(super) async fn drain(&self, request: Request) {
        let _waiting = request
            .extensions()
            .get::<ConnectionHandle>()
            .map(ConnectionHandle::wait);
        let mut body = request.into_body();
        let draining = async {
            let mut bytes = 0;
            while let Some(Ok(frame)) = body.frame().await {
                bytes += frame.data_ref().map_or(0, Bytes::len);
                if bytes > DRAINED_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(self.limits.timeout, draining).await;
    }

    fn begin(&self, request: &Request) -> BodyRoom {
        let source = request
            .extensions()
            .get::<Peer>()
            .map(|peer| source_of(peer.0.ip()));
        let given_up = CancellationToken::new();
        let mut held = self.held.lock();
        held.received += 1;
        let number = held.received;
        held.bodies.insert(
            number,
            HeldBody {
                source,
                bytes: 0,
                given_up: given_up.clone(),
            },
        );
        BodyRoom {
            held: Arc::clone(&self.held),
            number,
            given_up,
        }
    }

    /// Reserves `more` bytes of memory for a body. If too little memory is free, drops unfinished bodies. Fails if this
    /// body is among the dropped ones.
    fn grow(&self, room: &BodyRoom, more: usize) -> Result<(), HttpRefusal> {
        let mut held = self.held.lock();
        while held.bytes.saturating_add(more) > self.limits.all_bytes_max {
            self.metrics.refused(self.limits.setting);
            match held.heaviest(room.number, more) {
                Some(number) if number != room.number => held.give_up(number),
                _ => {
                    held.give_up(room.number);
                    return Err(HttpRefusal::TooManyBodies);
                }
            }
        }
        let grown = held.grow(room.number, more);
        grown.ok_or(HttpRefusal::TooManyBodies)
    }
}

impl BodyReservations {
    /// Returns the number of the body to drop: the oldest unfinished body that has bytes, of the source with the most
    /// bytes. `more` is the number of bytes that the body `wanting` asks for. They count as bytes of its source. If no
    /// other body of that source can be dropped, that is `wanting` itself. `None` if `wanting` was given up.
    fn heaviest(&self, wanting: u64, more: usize) -> Option<u64> {
        let of = self.bodies.get(&wanting)?.source;
        let wanted = self.sources.get(&of).map_or(0, |source| source.bytes) + more;
        // A body that has come whole is not given up: its request is being answered.
        let with_coming = self
            .sources
            .iter()
            .filter(|(_, source)| !source.coming.is_empty());
        let others = with_coming.filter(|(address, source)| **address != of && source.bytes > wanted);
        let heaviest = others.max_by_key(|(address, source)| (source.bytes, **address));
        let source = heaviest
            .map(|(_, source)| source)
            .or_else(|| self.sources.get(&of));
        let oldest = source.and_then(|source| source.coming.first());
        Some(oldest.copied().unwrap_or(wanting))
    }

    /// Counts `more` bytes for a body that is arriving. `None` if the body was given up.
    fn grow(&mut self, number: u64, more: usize) -> Option<()> {
        let body = self.bodies.get_mut(&number)?;
        body.bytes += more;
        self.bytes += more;
        let source = self.sources.entry(body.source).or_default();
        source.bytes += more;
        source.coming.insert(number);
        Some(())
    }

    fn give_up(&mut self, number: u64) {
        let Some(body) = self.bodies.remove(&number) else {
            return;
        };
        self.bytes -= body.bytes;
        body.given_up.cancel();
        if let Some(source) = self.sources.get_mut(&body.source) {
            source.bytes -= body.bytes;
            source.coming.remove(&number);
            if source.bytes == 0 {
                self.sources.remove(&body.source);
            }
        }
    }

    /// Notes that a body has arrived in full.
    fn is_whole(&mut self, number: u64) {
        let source = self.bodies.get(&number).map(|body| body.source);
        if let Some(source) = source.and_then(|source| self.sources.get_mut(&source)) {
            source.coming.remove(&number);
        }
    }
}

impl BodyRoom {
    /// Marks the body as arrived in full. From now on it is not dropped to free memory for other bodies.
    fn is_whole(&self) {
        self.held.lock().is_whole(self.number);
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        self.held.lock().give_up(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bodies(all_bytes_max: usize, body_bytes_max: usize, seconds: u64) -> Bodies {
        Bodies::new(BodyLimits {
            all_bytes_max,
            body_bytes_max,
            timeout: Duration::from_secs(seconds),
            setting: "a test's",
        })
    }

    fn request(source: &str) -> Request {
        let mut request = Request::new(Body::empty());
        let peer = format!("{source}:1").parse().unwrap();
        request.extensions_mut().insert(Peer(peer));
        request
    }

    #[test]
    fn the_source_with_the_most_gives_way_and_who_is_answered_does_not() {
        let bodies = bodies(100, 10, 1);
        let begin = |source| bodies.begin(&request(source));
        let (greedy, also, honest) = (begin("10.0.0.1"), begin("10.0.0.1"), begin("10.0.0.2"));
        bodies.grow(&greedy, 40).unwrap();
        bodies.grow(&also, 50).unwrap();
        bodies.grow(&honest, 30).unwrap();
        assert!(greedy.given_up.is_cancelled() && !also.given_up.is_cancelled());
        assert_eq!(bodies.held.lock().bytes, 80);
        // A body that was given up gets no more room.
        assert!(bodies.grow(&greedy, 1).is_err());
        // Complete bodies are kept, so a new body of the greedy source gives way itself.
        also.is_whole();
        honest.is_whole();
        let late = begin("10.0.0.1");
        assert!(bodies.grow(&late, 30).is_err() && late.given_up.is_cancelled());
        drop((greedy, also, honest, late));
        let held = bodies.held.lock();
        assert!(
            held.bodies.is_empty() && held.sources.is_empty() && held.bytes == 0,
            "all room is given back"
        );
    }

    #[test]
    fn a_body_without_bytes_does_not_give_way() {
        let bodies = bodies(100, 10, 1);
        let begin = |source| bodies.begin(&request(source));
        let empty: Vec<_> = (0..50).map(|_| begin("10.0.0.1")).collect();
        let (long, honest) = (begin("10.0.0.1"), begin("10.0.0.2"));
        bodies.grow(&long, 90).unwrap();
        bodies.grow(&honest, 20).unwrap();
        assert!(long.given_up.is_cancelled());
        assert!(!empty.iter().any(|body| body.given_up.is_cancelled()));
    }

    #[tokio::test]
    async fn a_body_in_pieces_takes_room_for_itself_alone() {
        let bodies = bodies(1 << 20, 100_000, 10);
        let pieces = (0..50_000_u32).map(|_| Ok::<_, std::convert::Infallible>(Bytes::from_static(b"x")));
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        let received = bodies.receive(Request::new(body)).await.ok().unwrap();
        assert_eq!(received.bytes.len(), 50_000);
        assert!((50_000..=100_000).contains(&bodies.held.lock().bytes));
        drop(received);
        assert_eq!(bodies.held.lock().bytes, 0);
        let long = Body::from(vec![0; 100_001]);
        let refused = bodies.receive(Request::new(long)).await;
        assert!(matches!(
            refused,
            Err(HttpRefusal::BodyTooLarge { bytes_max: 100_000 })
        ));
        assert_eq!(bodies.held.lock().bytes, 0);
    }
}
