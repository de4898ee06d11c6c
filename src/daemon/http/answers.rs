//! Room for answers that their clients have not read yet. One bound in bytes covers all of them together, and half of it
//! those of one source, so that a client that reads nothing leaves room for others. A client that reads too slowly loses
//! its connection once others need its room. The listener closes the connection of a client that reads nothing for a while.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody as _};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use parking_lot::Mutex;

use kvatlas_process::listener::ConnectionHandle;
use kvatlas_telemetry::HttpAnswerMetrics;

use super::error::HttpRefusal;

/// Maximum length of an answer that needs no room, in bytes. The bound on connections bounds these answers.
const SHORT_BYTES_MAX: usize = 16 << 10;

/// Number of bytes that a client has to read in the time of a request (`http.request_timeout_ms`) on average, if others
/// wait for it.
pub(super) const RATE_BYTES: u32 = 1 << 20;

/// Room for the answers of one listener.
pub(super) struct AnswerRoom {
    held: Arc<Mutex<HeldAnswers>>,
    bytes_max: usize,
    /// Maximum time for each [`RATE_BYTES`] of an answer whose room others need.
    patience: Duration,
    metrics: HttpAnswerMetrics,
}

/// Client that reads an answer.
#[derive(Clone, Default)]
pub(super) struct AnswerReader {
    pub(super) source: Option<IpAddr>,
    pub(super) connection: Option<ConnectionHandle>,
}

/// The answers that have room, by their number, so the oldest first.
#[derive(Default)]
struct HeldAnswers {
    answers: BTreeMap<u64, UnreadAnswer>,
    bytes_by_source: HashMap<Option<IpAddr>, usize>,
    begun: u64,
}

/// Answer that its client has not read yet.
struct UnreadAnswer {
    reader: AnswerReader,
    bytes: usize,
    since: Instant,
}

/// Answer with its room. Dropping it, which happens when all of it has been written, frees the room.
struct HeldAnswer {
    bytes: Bytes,
    number: u64,
    held: Arc<Mutex<HeldAnswers>>,
}

impl AnswerRoom {
    /// Creates the room for `bytes_max` bytes of answers.
    pub(super) fn new(bytes_max: usize, patience: Duration) -> Self {
        Self {
            held: Arc::default(),
            bytes_max,
            patience,
            metrics: HttpAnswerMetrics::new(),
        }
    }

    /// Reserves room for an answer to `reader`, until it is written. Returns a refusal instead if there is none. An
    /// answer whose length is not known, as that of a dump, needs none: it is made as it is read.
    pub(super) async fn hold(&self, response: Response, reader: AnswerReader) -> Response {
        let length = response.body().size_hint().exact();
        let length = length.and_then(|length| usize::try_from(length).ok());
        if length.is_none_or(|length| length <= SHORT_BYTES_MAX) {
            return response;
        }
        let (head, body) = response.into_parts();
        let bytes = match body.collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(error) => {
                return HttpRefusal::Unavailable(format!("the reply cannot be written: {error}"))
                    .into_response();
            }
        };
        match self.take(bytes, reader) {
            Some(held) => Response::from_parts(head, Body::from(Bytes::from_owner(held))),
            None => {
                self.metrics.refused();
                HttpRefusal::TooManyAnswers.into_response()
            }
        }
    }

    /// Reserves room. Where there is none, clients that read too slowly lose theirs, and their connections. `None` if there
    /// is still none then.
    fn take(&self, bytes: Bytes, reader: AnswerReader) -> Option<HeldAnswer> {
        let mut held = self.held.lock();
        while let Some(shortage) = held.shortage(bytes.len(), reader.source, self.bytes_max) {
            let late = held.answers.iter().find(|(_, answer)| {
                let is_in_the_way = shortage == Shortage::OfAll || answer.reader.source == reader.source;
                is_in_the_way && answer.is_late(self.patience)
            });
            let number = *late?.0;
            if let Some(late) = held.remove(number)
                && let Some(connection) = late.reader.connection
            {
                connection.close();
            }
        }
        let number = held.begun;
        held.begun += 1;
        *held.bytes_by_source.entry(reader.source).or_default() += bytes.len();
        let reading = UnreadAnswer {
            reader,
            bytes: bytes.len(),
            since: Instant::now(),
        };
        held.answers.insert(number, reading);
        Some(HeldAnswer {
            bytes,
            number,
            held: Arc::clone(&self.held),
        })
    }
}

/// Kind of room that is missing.
#[derive(PartialEq, Eq)]
enum Shortage {
    /// The source has as much as one source may.
    OfSource,
    OfAll,
}

impl HeldAnswers {
    /// Returns the kind of room that is missing for `length` more bytes, if any. A source that has no answer may have one
    /// that is longer than half of the room, and counts as half of it for others.
    fn shortage(&self, length: usize, source: Option<IpAddr>, bytes_max: usize) -> Option<Shortage> {
        let half = bytes_max / 2;
        let others = self.bytes_by_source.iter().filter(|(other, _)| **other != source);
        let others: usize = others.map(|(_, bytes)| half.min(*bytes)).sum();
        let own = self.bytes_by_source.get(&source).copied().unwrap_or_default();
        let all = own + length;
        if own > 0 && all > half {
            return Some(Shortage::OfSource);
        }
        (others + half.min(all) > bytes_max).then_some(Shortage::OfAll)
    }

    /// Frees the room of an answer. `None` if it is free already.
    fn remove(&mut self, number: u64) -> Option<UnreadAnswer> {
        let removed = self.answers.remove(&number)?;
        if let Some(own) = self.bytes_by_source.get_mut(&removed.reader.source) {
            *own -= removed.bytes;
            if *own == 0 {
                self.bytes_by_source.remove(&removed.reader.source);
            }
        }
        Some(removed)
    }
}

impl UnreadAnswer {
    /// Returns whether the client reads more slowly than [`RATE_BYTES`] in each `patience`.
    fn is_late(&self, patience: Duration) -> bool {
        let parts = self.bytes.div_ceil(RATE_BYTES as usize);
        self.since.elapsed() >= patience.saturating_mul(u32::try_from(parts).unwrap_or(u32::MAX))
    }
}

impl AsRef<[u8]> for HeldAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for HeldAnswer {
    fn drop(&mut self) {
        self.held.lock().remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::http::StatusCode;

    use super::*;

    fn reader(number: u32) -> AnswerReader {
        AnswerReader {
            source: Some(IpAddr::from(Ipv4Addr::from_bits(number))),
            connection: None,
        }
    }

    #[tokio::test]
    async fn a_client_that_reads_slowly_loses_the_room_that_others_need() {
        const LENGTH: usize = 20 << 10;
        let answer = || Response::new(Body::from(vec![b'a'; LENGTH]));
        let room = AnswerRoom::new(4 * LENGTH, Duration::ZERO);
        let mut slow = Vec::new();
        for number in [1, 1, 2, 2] {
            slow.push(room.hold(answer(), reader(number)).await);
        }
        // A source replaces its own oldest answer, also where it is not the oldest of all.
        slow.push(room.hold(answer(), reader(2)).await);
        let readers = || {
            let held = room.held.lock();
            let of = |(number, reading): (&u64, &UnreadAnswer)| (*number, reading.reader.source);
            held.answers.iter().map(of).collect::<Vec<_>>()
        };
        let [one, two, three] = [1, 2, 3].map(|number| reader(number).source);
        assert_eq!(readers(), [(0, one), (1, one), (3, two), (4, two)]);
        slow.push(room.hold(answer(), reader(3)).await);
        assert_eq!(readers(), [(1, one), (3, two), (4, two), (5, three)]);
        slow.clear();
        assert!(room.held.lock().bytes_by_source.is_empty());
    }

    #[tokio::test]
    async fn unread_answers_of_one_source_leave_room_for_others() {
        const LENGTH: usize = 20 << 10;
        let room = AnswerRoom::new(10 * LENGTH, Duration::MAX);
        let ask = async |number| {
            let answer = Response::new(Body::from(vec![b'a'; LENGTH]));
            let mut answer = room.hold(answer, reader(number)).await;
            let refusal = answer.extensions_mut().remove::<HttpRefusal>();
            match refusal {
                Some(refusal) => Err(refusal.respond(false).status()),
                None => Ok(answer),
            }
        };
        let mut unread = Vec::new();
        for _ in 0..5 {
            unread.push(ask(1).await.unwrap());
        }
        assert_eq!(ask(1).await.unwrap_err(), StatusCode::SERVICE_UNAVAILABLE);
        for number in 2..7 {
            unread.push(ask(number).await.unwrap());
        }
        assert!(ask(8).await.is_err(), "all room is taken");
        let read = unread
            .pop()
            .unwrap()
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes();
        assert_eq!(read.len(), LENGTH);
        assert!(ask(8).await.is_err(), "the answer is not written yet");
        drop(read);
        unread.push(ask(8).await.unwrap());
        unread.clear();
        assert!(room.held.lock().answers.is_empty());
        // A long answer is possible, and leaves half of the room to others.
        let long = Response::new(Body::from(vec![b'a'; 11 * LENGTH]));
        let long = room.hold(long, reader(1)).await;
        assert_eq!(long.status(), StatusCode::OK);
        assert!(ask(1).await.is_err());
        for number in 2..7 {
            unread.push(ask(number).await.unwrap());
        }
        assert!(ask(8).await.is_err());
        let short = Response::new(Body::from("short"));
        assert_eq!(room.hold(short, reader(2)).await.status(), StatusCode::OK);
    }
}
