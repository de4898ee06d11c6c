//! Stream: the numbered events of one engine, for all routers that follow it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use kvatlas_core::wire::Rank;
use kvatlas_engines::{EngineBatch, EventList, Mirror, SavedMirror, Translation, Translator};

use kvatlas_telemetry::labels::{RepublishCut, RepublishOmission};
use kvatlas_telemetry::{BridgeMetrics, EngineMetrics};

use crate::zmtp::push_message;

use super::NUMBERS_MAX;

/// First number of the batches in a stream. The count never uses 0 or 1, so a batch with the number 0 always looks like
/// a restart to routers.
const FIRST: u64 = 2;
/// Maximum size of the messages that wait for one subscriber, in bytes.
const WAITING_BYTES_MAX: usize = 32 << 20;
/// Bytes of memory that a waiting message takes in addition to its content.
const MESSAGE_OVERHEAD_BYTES: usize = 64;
/// Minimum time between two states that are written for replays. Clients that ask in between share the next state.
const STATE_INTERVAL: Duration = Duration::from_millis(50);
/// Time after which an engine's blocks are in doubt, if the engine is not known to live or its events may be missing.
const UNSEEN_MAX: Duration = Duration::from_secs(30);

/// Messages that the stream has queued for one subscriber.
pub(super) struct QueuedMessages {
    messages: mpsc::UnboundedReceiver<Bytes>,
    bytes: Arc<AtomicUsize>,
}

impl QueuedMessages {
    /// Waits for the next message; `None` if the subscriber has been dropped.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        let message = self.messages.recv().await?;
        let taken = message.len() + MESSAGE_OVERHEAD_BYTES;
        self.bytes.fetch_sub(taken, Ordering::AcqRel);
        Some(message)
    }
}

struct Subscriber {
    messages: mpsc::UnboundedSender<Bytes>,
    bytes: Arc<AtomicUsize>,
}

impl Subscriber {
    /// Queues a message. Returns `false` if there is no room for it, or the subscriber has gone.
    fn send(&self, message: &Bytes, metrics: &BridgeMetrics) -> bool {
        let taken = message.len() + MESSAGE_OVERHEAD_BYTES;
        if self.bytes.fetch_add(taken, Ordering::AcqRel) + taken > WAITING_BYTES_MAX {
            metrics.republish_cut(RepublishCut::Slow);
            return false;
        }
        self.messages.send(message.clone()).is_ok()
    }
}

/// All blocks of the engine, as they are after the batch with the number `number`.
pub(super) struct StreamState {
    /// Last batch number whose changes the state includes.
    pub(super) number: u64,
    pub(super) lists: Vec<EventList>,
}

struct SubscribedMirror {
    mirror: Mirror,
    number: u64,
    subscribers: Vec<Subscriber>,
    /// State that was written last. It is available only as long as an answer to a client uses it.
    state: Weak<StreamState>,
    written_at: Option<Instant>,
    /// Number of states that have been written.
    written: u64,
    /// Time since which the engine is out of sight; `None` while it is in sight, that is, alive with all of its events known.
    unseen_since: Option<Instant>,
}

/// Stream of one engine's events.
pub(super) struct Stream {
    rank: Rank,
    metrics: Arc<BridgeMetrics>,
    engine_metrics: EngineMetrics,
    inner: Mutex<SubscribedMirror>,
    /// Lock that a task holds while it waits for a state and writes it.
    turn: tokio::sync::Mutex<()>,
}

impl Stream {
    pub(super) fn new(
        mirror: Mirror,
        rank: Rank,
        (metrics, engine_metrics): (Arc<BridgeMetrics>, EngineMetrics),
    ) -> Self {
        let inner = SubscribedMirror {
            mirror,
            number: FIRST,
            subscribers: Vec::new(),
            state: Weak::new(),
            written_at: None,
            written: 0,
            unseen_since: None,
        };
        Self {
            rank,
            metrics,
            engine_metrics,
            inner: Mutex::new(inner),
            turn: tokio::sync::Mutex::new(()),
        }
    }

    pub(super) fn metrics(&self) -> &BridgeMetrics {
        &self.metrics
    }

    /// Encodes the payload of a batch, with the time now and the engine's rank.
    pub(super) fn payload(&self, list: &EventList) -> Vec<u8> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        list.payload(now.unwrap_or_default().as_secs_f64(), self.rank)
    }

    fn message(&self, number: u64, list: &EventList) -> Bytes {
        let mut bytes = Vec::new();
        push_message(&mut bytes, &[b"", &number.to_be_bytes(), &self.payload(list)]);
        bytes.into()
    }

    /// Makes the first two messages for a new subscriber. The first looks like a restart of the engine, and the second
    /// like a gap, which makes the subscriber ask for a replay.
    fn beginning(&self, number: u64) -> [Bytes; 2] {
        [
            self.message(0, &EventList::cleared()),
            self.message(number, &EventList::default()),
        ]
    }

    fn send(&self, inner: &mut SubscribedMirror, message: &Bytes) {
        let before = inner.subscribers.len();
        inner
            .subscribers
            .retain(|subscriber| subscriber.send(message, &self.metrics));
        if inner.subscribers.len() < before {
            self.engine_metrics
                .republish_subscribers
                .set(inner.subscribers.len() as f64);
        }
    }

    fn send_next(&self, inner: &mut SubscribedMirror, list: &EventList) {
        inner.number += 1;
        // Without subscribers no message is needed: a router that connects later asks for everything.
        if !inner.subscribers.is_empty() {
            let message = self.message(inner.number, list);
            self.send(inner, &message);
        }
    }

    /// Begins the numbers of the batches anew, so that every subscriber asks for all blocks.
    fn begin_anew(&self, inner: &mut SubscribedMirror) {
        inner.number = FIRST;
        for message in self.beginning(FIRST) {
            self.send(inner, &message);
        }
    }

    /// Sends the changes since the last call to all subscribers.
    fn publish(&self, inner: &mut SubscribedMirror) {
        let changes = inner.mirror.take_changes();
        self.engine_metrics
            .republished_bytes
            .set(inner.mirror.bytes() as f64);
        let omissions = inner.mirror.take_omissions();
        for (reason, blocks) in [
            (RepublishOmission::Full, omissions.full),
            (RepublishOmission::Salts, omissions.salts),
            (RepublishOmission::Special, omissions.special),
            (RepublishOmission::Unknown, omissions.unknown),
        ] {
            self.metrics.republish_left_out(reason, blocks);
        }
        match changes {
            Some(lists) if inner.number + (lists.len() as u64) < NUMBERS_MAX => {
                lists.iter().for_each(|list| self.send_next(inner, list));
            }
            Some(lists) if lists.is_empty() => {}
            // All blocks must be sent again, or the numbers have reached their maximum.
            _ => self.begin_anew(inner),
        }
    }

    /// Sends an empty batch. From its number, subscribers see whether they have missed a batch. If the engine has been
    /// out of sight for [`UNSEEN_MAX`], its blocks are in doubt until it is in sight again.
    pub(super) fn beat(&self) {
        let mut inner = self.inner.lock();
        if inner
            .unseen_since
            .is_some_and(|since| since.elapsed() >= UNSEEN_MAX)
        {
            inner.mirror.lose_sight();
        }
        self.publish(&mut inner);
        if inner.subscribers.is_empty() {
            return;
        }
        match inner.number + 1 < NUMBERS_MAX {
            true => self.send_next(&mut inner, &EventList::default()),
            false => self.begin_anew(&mut inner),
        }
    }

    /// Adds a subscriber, and returns its queue of messages. The first messages make the subscriber drop any blocks
    /// that it has, and ask for all blocks.
    pub(super) fn subscribe(&self) -> QueuedMessages {
        let (sender, messages) = mpsc::unbounded_channel();
        let bytes = Arc::new(AtomicUsize::new(0));
        let subscriber = Subscriber {
            messages: sender,
            bytes: Arc::clone(&bytes),
        };
        let mut inner = self.inner.lock();
        for message in self.beginning(inner.number) {
            subscriber.send(&message, &self.metrics);
        }
        inner
            .subscribers
            .retain(|subscriber| !subscriber.messages.is_closed());
        inner.subscribers.push(subscriber);
        self.engine_metrics
            .republish_subscribers
            .set(inner.subscribers.len() as f64);
        QueuedMessages { messages, bytes }
    }

    /// Returns all blocks, as they are after the last batch. The state has that batch's number. It includes every batch
    /// that was sent before this call.
    pub(super) async fn state(&self) -> Arc<StreamState> {
        let written = self.inner.lock().written;
        let _turn = self.turn.lock().await;
        let wait = {
            let inner = self.inner.lock();
            if inner.written > written
                && let Some(state) = inner.state.upgrade()
            {
                return state;
            }
            let next = inner.written_at.map(|at| at + STATE_INTERVAL);
            next.map_or(Duration::ZERO, |next| {
                next.saturating_duration_since(Instant::now())
            })
        };
        tokio::time::sleep(wait).await;
        self.write_state()
    }

    fn write_state(&self) -> Arc<StreamState> {
        let mut inner = self.inner.lock();
        self.publish(&mut inner);
        let lists = inner.mirror.all();
        let state = Arc::new(StreamState {
            number: inner.number,
            lists,
        });
        (inner.state, inner.written_at) = (Arc::downgrade(&state), Some(Instant::now()));
        inner.written += 1;
        state
    }

    /// Sends empty batches until the last number is at least `number`. Stops at [`NUMBERS_MAX`].
    pub(super) fn reach(&self, number: u64) {
        let mut inner = self.inner.lock();
        while inner.number < number.min(NUMBERS_MAX) {
            self.send_next(&mut inner, &EventList::default());
        }
    }

    /// Counts an answer to a question for a replay.
    pub(super) fn answered(&self) {
        self.engine_metrics.republish_answers.increment(1);
    }
}

/// Tap of a relay: passes the relay's batches to the translator, and the resulting changes to the stream.
pub(in super::super) struct Tap {
    stream: Arc<Stream>,
    /// Tasks of the sockets and of the heartbeat.
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Tap {
    pub(super) fn new(stream: Arc<Stream>, tasks: [AbortOnDropHandle<()>; 2]) -> Self {
        Self {
            stream,
            _tasks: tasks,
        }
    }

    /// Translates `batch` with `translator`, and collects the changes for the stream.
    pub(in super::super) fn translate(
        &self,
        translator: &mut Translator,
        batch: &EngineBatch,
        output: &mut Translation,
    ) {
        self.stream
            .inner
            .lock()
            .mirror
            .translate(translator, batch, output);
    }

    /// Returns all blocks in saved form, from which the next bridge process starts.
    pub(in super::super) fn save(&self) -> SavedMirror {
        self.stream.inner.lock().mirror.save()
    }

    /// Sends the changes since the last call to all subscribers.
    pub(in super::super) fn publish(&self) {
        self.stream.publish(&mut self.stream.inner.lock());
    }

    /// Notes that events may have been lost.
    pub(in super::super) fn doubt(&self) {
        self.stream.inner.lock().mirror.doubt();
    }

    /// Notes that the engine has no blocks: it is another process, or is no longer followed.
    pub(in super::super) fn clear(&self) {
        self.stream.inner.lock().mirror.clear();
    }

    /// Notes whether the engine is in sight, that is, alive with all of its events known.
    pub(in super::super) fn set_in_sight(&self, is_in_sight: bool) {
        let mut inner = self.stream.inner.lock();
        if is_in_sight {
            inner.unseen_since = None;
            inner.mirror.regain_sight();
        } else {
            inner.unseen_since.get_or_insert_with(Instant::now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_for_whom_too_much_waits_is_dropped() {
        let (messages, mut waiting) = mpsc::unbounded_channel();
        let bytes = Arc::new(AtomicUsize::new(0));
        let subscriber = Subscriber { messages, bytes };
        let metrics = BridgeMetrics::new();
        let message = Bytes::from(vec![0; 10 << 20]);
        let sent = [(); 4].map(|()| subscriber.send(&message, &metrics));
        assert_eq!(sent, [true, true, true, false]);
        drop(subscriber);
        let received = std::iter::from_fn(|| waiting.try_recv().ok());
        assert_eq!(received.count(), 3);
    }
}
