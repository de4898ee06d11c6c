//! Inbox for the answers of all publishers. It has one subscription, and a queue for each attempt to resync a holder.
//!
//! An attempt may be slow to take its answer, because it waits for a slot or works on a chunk. The client library
//! bounds waiting messages by their number only. So messages are taken from the library immediately, and wait here,
//! bounded in bytes.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_nats::{Client, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::coop::unconstrained;

use kvatlas_client::Backoff;
use kvatlas_core::wire::ERROR_CODE_HEADER;
use kvatlas_process::broker::Intake;

use super::assembly::AnswerLimits;

/// Approximate size of a waiting message without its payload, in bytes.
const WORD_BYTES: usize = 64;
/// Maximum number of messages that are taken in a row before other work is looked at.
const MESSAGES_AT_ONCE: usize = 256;
/// Pauses before the next try after the server has refused a subscription.
const RETRIES: Backoff = Backoff {
    pause_min: Duration::from_millis(100),
    pause_max: Duration::from_secs(2),
};

/// Message that came on an attempt's reply subject, or the news that messages were lost.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ResyncMessage {
    /// Chunk (a piece) of the answer.
    Chunk(Bytes),
    /// Publisher has answered with an error.
    Refused,
    /// No publisher subscribes to the subject on which the request was sent.
    NoResponder,
    /// Connection has lost messages, so nobody knows whether the rest of the answer will come.
    Lost,
}

impl ResyncMessage {
    fn of(message: &Message) -> Self {
        let headers = message.headers.as_ref();
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            Self::NoResponder
        } else if headers.is_some_and(|headers| headers.get(ERROR_CODE_HEADER).is_some()) {
            Self::Refused
        } else {
            // A copy: the payload is a slice of the connection's buffer, and would keep all of it.
            Self::Chunk(Bytes::copy_from_slice(&message.payload))
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Chunk(payload) => WORD_BYTES + payload.len(),
            Self::Refused | Self::NoResponder => WORD_BYTES,
            Self::Lost => 0,
        }
    }
}

/// Inbox for the answers that attempts to resync expect. The token in an answer's subject says to which attempt it
/// belongs.
#[derive(Debug)]
pub(super) struct Answers {
    /// Prefix of the subjects on which publishers reply to all attempts to resync.
    prefix: String,
    /// Bounds on one answer.
    limits: AnswerLimits,
    /// Maximum size of all waiting messages together, in bytes.
    waiting_max: usize,
    waiting: AtomicUsize,
    expected: Mutex<HashMap<u64, Expected>>,
    /// Key of the hash that makes reply subjects hard to guess. If they could be guessed, publishers could answer for
    /// each other.
    key: RandomState,
    asked: AtomicUsize,
}

#[derive(Debug)]
struct Expected {
    words: mpsc::UnboundedSender<ResyncMessage>,
    /// Number of payload bytes of the answer that have come so far.
    bytes: usize,
    /// Number of messages of the answer that have come so far.
    chunks: u32,
}

/// Answer whose messages are arriving.
#[derive(Debug)]
pub(super) struct Reply {
    answers: Arc<Answers>,
    token: u64,
    words: mpsc::UnboundedReceiver<ResyncMessage>,
}

impl Answers {
    /// Makes an inbox for answers within `limits`, on subjects that begin with `prefix`. All waiting messages together
    /// take no more memory than `concurrency` answers of the largest size.
    pub(super) fn new(prefix: String, concurrency: usize, limits: AnswerLimits) -> Arc<Self> {
        Arc::new(Self {
            prefix,
            limits,
            waiting_max: limits.bytes_max.saturating_mul(concurrency),
            waiting: AtomicUsize::new(0),
            expected: Mutex::new(HashMap::new()),
            key: RandomState::new(),
            asked: AtomicUsize::new(0),
        })
    }

    /// Begins to expect one more answer of a publisher. The returned value receives the answer's messages.
    pub(super) fn expect(self: &Arc<Self>) -> Reply {
        let token = self.key.hash_one(self.asked.fetch_add(1, Ordering::Relaxed));
        let (sender, words) = mpsc::unbounded_channel();
        let expected = Expected {
            words: sender,
            bytes: 0,
            chunks: 0,
        };
        self.expected.lock().insert(token, expected);
        Reply {
            answers: Arc::clone(self),
            token,
            words,
        }
    }

    /// Passes a message to the attempt to resync for which it came, if the attempt still expects an answer.
    fn deliver(&self, message: &Message) {
        let token = message.subject.strip_prefix(self.prefix.as_str());
        let Some(token) = token.and_then(|token| u64::from_str_radix(token, 16).ok()) else {
            return;
        };
        let mut answers = self.expected.lock();
        let Some(expected) = answers.get_mut(&token) else {
            return;
        };
        let word = ResyncMessage::of(message);
        let bytes = word.bytes();
        expected.bytes = expected.bytes.saturating_add(message.payload.len());
        expected.chunks = expected.chunks.saturating_add(1);
        let is_endless = expected.bytes > self.limits.bytes_max || expected.chunks > self.limits.chunks_max;
        let waiting = self.waiting.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let is_full = waiting > self.waiting_max;
        let sent = !is_full && expected.words.send(word).is_ok();
        if !sent {
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
        }
        // The attempt gets no further messages. It fails when it has taken the messages that wait for it.
        if !sent || is_endless {
            answers.remove(&token);
        }
    }

    /// Tells all attempts to resync that messages for them may have been lost.
    fn lose(&self) {
        for (_, expected) in self.expected.lock().drain() {
            // An attempt that has given up needs no news.
            let _ = expected.words.send(ResyncMessage::Lost);
        }
    }

    /// Returns the size of all messages that wait for attempts to resync, in bytes.
    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

impl Reply {
    /// Returns the subject on which the publisher must answer.
    pub(super) fn subject(&self) -> String {
        format!("{}{:016x}", self.answers.prefix, self.token)
    }

    /// Waits for the next message. Returns `None` if the answer is larger than allowed, or if the waiting messages of
    /// all answers together take too much memory.
    pub(super) async fn next(&mut self) -> Option<ResyncMessage> {
        let word = self.words.recv().await?;
        self.answers.waiting.fetch_sub(word.bytes(), Ordering::Relaxed);
        Some(word)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.answers.expected.lock().remove(&self.token);
        while let Ok(word) = self.words.try_recv() {
            self.answers.waiting.fetch_sub(word.bytes(), Ordering::Relaxed);
        }
    }
}

/// Receiver of the messages of all publishers' answers from the connection.
pub(super) struct AnswersSource {
    pub(super) client: Client,
    pub(super) answers: Arc<Answers>,
    pub(super) intake: Arc<Intake>,
    /// Number of times that the server has refused the subscription.
    pub(super) refusals: watch::Receiver<u64>,
    /// Number of times that the connection has lost messages.
    pub(super) losses: watch::Receiver<u64>,
}

impl AnswersSource {
    /// Returns the subject of the subscription to all answers.
    pub(super) fn subject(answers: &Answers) -> String {
        format!("{}*", answers.prefix)
    }

    /// Receives messages until the client is closed. If the server refuses the subscription, subscribes again without
    /// end.
    pub(super) async fn run(self) {
        let (mut refusals, mut losses) = (self.refusals.clone(), self.losses.clone());
        let mut failures = 0_u32;
        loop {
            let Ok(mut messages) = self.client.subscribe(Self::subject(&self.answers)).await else {
                return;
            };
            loop {
                tokio::select! {
                    () = self.take(&mut messages) => return,
                    lost = losses.changed() => match lost {
                        Ok(()) => self.answers.lose(),
                        Err(_) => return,
                    },
                    refused = refusals.changed() => match refused {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                }
            }
            failures = failures.saturating_add(1);
            tokio::time::sleep(RETRIES.pause(failures)).await;
        }
    }

    async fn take(&self, messages: &mut Subscriber) {
        loop {
            tokio::select! {
                message = messages.next() => match message {
                    Some(message) => self.deliver(&message),
                    None => return,
                },
                () = self.intake.asked() => {}
            }
            for _ in 0..MESSAGES_AT_ONCE {
                let received = self.intake.received();
                // This poll ignores the task's tokio budget. Without budget, the buffer would look empty.
                let Some(Some(message)) = unconstrained(messages.next()).now_or_never() else {
                    self.intake.took_all(received);
                    break;
                };
                self.deliver(&message);
            }
        }
    }

    fn deliver(&self, message: &Message) {
        self.intake.took(message);
        self.answers.deliver(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_MAX: usize = 1 << 20;
    const LIMITS: AnswerLimits = AnswerLimits {
        bytes_max: BYTES_MAX,
        chunks_max: 100,
    };

    fn message(subject: String, payload_bytes: usize) -> Message {
        Message {
            subject: subject.into(),
            reply: None,
            payload: vec![0; payload_bytes].into(),
            headers: None,
            status: None,
            description: None,
            length: payload_bytes,
        }
    }

    #[tokio::test]
    async fn each_attempt_hears_its_own_publisher() {
        let answers = Answers::new("inbox.".to_owned(), 2, LIMITS);
        let (mut one, mut other) = (answers.expect(), answers.expect());
        assert_ne!(one.subject(), other.subject());
        answers.deliver(&message(other.subject(), 2));
        answers.deliver(&message(one.subject(), 1));
        for of_nobody in ["inbox.0", "inbox.", "inbox.none", "elsewhere"] {
            answers.deliver(&message(of_nobody.to_owned(), 3));
        }
        assert_eq!(one.next().await, Some(ResyncMessage::Chunk(vec![0; 1].into())));
        assert_eq!(other.next().await, Some(ResyncMessage::Chunk(vec![0; 2].into())));
        assert_eq!(answers.waiting(), 0);
        let mut none = message(one.subject(), 0);
        none.status = Some(StatusCode::NO_RESPONDERS);
        answers.deliver(&none);
        assert_eq!(one.next().await, Some(ResyncMessage::NoResponder));
        answers.deliver(&message(other.subject(), 2));
        answers.lose();
        answers.deliver(&message(other.subject(), 2));
        assert_eq!(other.next().await, Some(ResyncMessage::Chunk(vec![0; 2].into())));
        assert_eq!(
            (other.next().await, other.next().await),
            (Some(ResyncMessage::Lost), None)
        );
        assert_eq!(answers.waiting(), 0);
    }

    #[tokio::test]
    async fn an_answer_without_end_is_no_longer_taken_and_leaves_nothing_behind() {
        let answers = Answers::new("inbox.".to_owned(), 2, LIMITS);
        let mut endless = answers.expect();
        for _ in 0..1000 {
            answers.deliver(&message(endless.subject(), BYTES_MAX / 4));
            assert!(answers.waiting() <= BYTES_MAX * 5 / 4 + 5 * WORD_BYTES);
        }
        let mut words = 0;
        while endless.next().await.is_some() {
            words += 1;
        }
        assert_eq!(
            words, 5,
            "the last one tells the attempt that the bound is crossed"
        );
        assert_eq!(answers.waiting(), 0);
        let given_up = answers.expect();
        answers.deliver(&message(given_up.subject(), BYTES_MAX / 2));
        assert!(answers.waiting() > 0);
        drop(given_up);
        assert_eq!(answers.waiting(), 0);
    }

    #[tokio::test]
    async fn what_waits_for_all_attempts_together_is_bounded() {
        let answers = Answers::new("inbox.".to_owned(), 2, LIMITS);
        let mut silent: Vec<_> = (0..8).map(|_| answers.expect()).collect();
        for reply in &silent {
            answers.deliver(&message(reply.subject(), BYTES_MAX / 2));
            assert!(answers.waiting() <= 2 * BYTES_MAX);
        }
        // The other attempts have no room. They fail, and are repeated.
        let mut taken = 0;
        for reply in &mut silent[..] {
            taken += usize::from(
                reply
                    .words
                    .recv()
                    .now_or_never()
                    .is_some_and(|word| word.is_some()),
            );
        }
        assert_eq!(taken, 3);
    }
}
