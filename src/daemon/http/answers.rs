//! Room for answers that their clients have not read yet. One bound in bytes covers all of them together, and half of it
//! those of one source, so that a client that reads nothing leaves room for others. The listener closes the connection
//! of a client that reads nothing for a while.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use parking_lot::Mutex;

use kvatlas_telemetry::HttpAnswerMetrics;

use super::error::HttpRefusal;

/// Maximum length of an answer that needs no room, in bytes. The bound on connections bounds these answers.
const SHORT_BYTES_MAX: usize = 16 << 10;

/// Room for the answers of one listener.
pub(super) struct AnswerRoom {
    held: Arc<Mutex<HeldAnswers>>,
    bytes_max: usize,
    metrics: HttpAnswerMetrics,
}

/// Numbers of bytes of the answers that have room, by source.
#[derive(Default)]
struct HeldAnswers {
    by_source: HashMap<Option<IpAddr>, usize>,
}

/// Answer with its room. Dropping it, which happens when all of it has been written, frees the room.
struct HeldAnswer {
    bytes: Bytes,
    source: Option<IpAddr>,
    held: Arc<Mutex<HeldAnswers>>,
}

impl AnswerRoom {
    /// Creates the room for `bytes_max` bytes of answers.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            held: Arc::default(),
            bytes_max,
            metrics: HttpAnswerMetrics::new(),
        }
    }

    /// Reserves room for an answer to `source`, until it is written. Returns a refusal instead if there is none. An
    /// answer whose length is not known, as that of a dump, needs none: it is made as it is read.
    pub(super) async fn hold(&self, response: Response, source: Option<IpAddr>) -> Response {
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
        match self.take(bytes, source) {
            Some(held) => Response::from_parts(head, Body::from(Bytes::from_owner(held))),
            None => {
                self.metrics.refused();
                HttpRefusal::TooManyAnswers.into_response()
            }
        }
    }

    /// Reserves room. `None` if there is none. A source that has no answer may have one that is longer than half of the room,
    /// and counts as half of it for others.
    fn take(&self, bytes: Bytes, source: Option<IpAddr>) -> Option<HeldAnswer> {
        let mut held = self.held.lock();
        let half = self.bytes_max / 2;
        let others = held.by_source.iter().filter(|(other, _)| **other != source);
        let others: usize = others.map(|(_, bytes)| half.min(*bytes)).sum();
        let own = held.by_source.get(&source).copied().unwrap_or_default();
        let all = own + bytes.len();
        if (own > 0 && all > half) || others + half.min(all) > self.bytes_max {
            return None;
        }
        held.by_source.insert(source, all);
        Some(HeldAnswer {
            bytes,
            source,
            held: Arc::clone(&self.held),
        })
    }
}

impl AsRef<[u8]> for HeldAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for HeldAnswer {
    fn drop(&mut self) {
        let mut held = self.held.lock();
        if let Some(own) = held.by_source.get_mut(&self.source) {
            *own -= self.bytes.len();
            if *own == 0 {
                held.by_source.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::http::StatusCode;

    use super::*;

    #[tokio::test]
    async fn unread_answers_of_one_source_leave_room_for_others() {
        const LENGTH: usize = 20 << 10;
        let room = AnswerRoom::new(10 * LENGTH);
        let source = |number| Some(IpAddr::from(Ipv4Addr::from_bits(number)));
        let ask = async |number| {
            let answer = Response::new(Body::from(vec![b'a'; LENGTH]));
            let mut answer = room.hold(answer, source(number)).await;
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
        assert!(room.held.lock().by_source.is_empty());
        // A long answer is possible, and leaves half of the room to others.
        let long = Response::new(Body::from(vec![b'a'; 11 * LENGTH]));
        let long = room.hold(long, source(1)).await;
        assert_eq!(long.status(), StatusCode::OK);
        assert!(ask(1).await.is_err());
        for number in 2..7 {
            unread.push(ask(number).await.unwrap());
        }
        assert!(ask(8).await.is_err());
        let short = Response::new(Body::from("short"));
        assert_eq!(room.hold(short, source(2)).await.status(), StatusCode::OK);
    }
}
