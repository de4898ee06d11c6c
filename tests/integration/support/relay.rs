//! Relay between publishers and a daemon, with the faults of a very bad network.
//!
//! Publishers use the prefix [`ORIGIN`]. The relay passes their batches on under the daemon's prefix, with faults.
//! *Before* it passes a batch on, it notes the batch in the [`Truth`]. It also notes the newest state of each holder
//! that it has sent to the daemon. The daemon's questions and the publishers' answers pass through the relay, too. So
//! no message reaches the daemon before the truth has the batches that were published earlier.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use async_nats::{HeaderMap, Message, Subscriber};
use futures_util::StreamExt;
use kvatlas_client::publish::PublisherOptions;
use kvatlas_core::wire::{BatchCursor, EventBatch, ResyncChunk, Subjects, Tier, WireLimits};
use kvatlas_process::broker::round_trip;
use tokio_util::sync::CancellationToken;

use super::publisher::Publisher;
use super::truth::{Holder, Truth, Workload};
use super::{
    Client, PATIENCE, broker, daemon, engine, eventually, hashes, namespace, stored, subjects, worker,
};

/// Subject prefix under which publishers publish, so that the daemon gets their batches only through the relay.
pub const ORIGIN: &str = "origin";
/// Worker name in the subject of a marker: a message that the relay counts but does not pass on. A marker shows that
/// the relay has processed all messages before it.
const MARKER: &str = "marker";

/// Probabilities of the faults of a batch, in thousandths.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub drop: u64,
    pub duplicate: u64,
    /// Probability that the relay holds a batch back until the next batch of the same worker has passed.
    pub reorder: u64,
    /// Probability that the payload is cut short.
    pub corrupt: u64,
}

/// Function that damages a publisher's answer. It takes the chunks of the answer, and returns the payloads that the
/// relay sends to the daemon instead.
pub type AnswerFault = Arc<dyn Fn(Vec<ResyncChunk>) -> Vec<Vec<u8>> + Send + Sync>;

#[derive(Default)]
struct State {
    faults: Faults,
    answer_fault: Option<AnswerFault>,
    /// Whether the relay drops the daemon's questions, so that publishers do not get them.
    is_deaf: bool,
    /// Whether the relay keeps the publishers' answers from the daemon for now.
    holds_answers: bool,
    answers_faulted: u64,
    answers_held: u64,
    /// Number of the last marker that the relay has received. A marker is a message that only shows how far the relay
    /// is.
    marker: u64,
    /// Number of the newest state (version) of each holder that the relay has sent to the daemon.
    delivered: HashMap<Holder, usize>,
}

/// Relay that runs until the value is dropped.
pub struct Relay {
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
    publishers: async_nats::Client,
    truth: Arc<Truth>,
    nats: async_nats::Client,
    probes: AtomicU64,
}

/// Returns the subjects on which publishers publish to the relay, and get its questions.
pub fn origin() -> Subjects {
    Subjects::new(ORIGIN).unwrap()
}

impl Relay {
    pub async fn start(url: &str, truth: Arc<Truth>, seed: u64) -> Self {
        let options = async_nats::ConnectOptions::new()
            .subscription_capacity(1 << 20)
            .max_reconnects(None);
        let nats = options.connect(url).await.unwrap();
        let batches = nats.subscribe(origin().all_events()).await.unwrap();
        let questions = nats.subscribe("kvatlas.v1.resync.>").await.unwrap();
        round_trip(&nats, PATIENCE).await.unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let stop = CancellationToken::new();
        let worker = Worker {
            nats: nats.clone(),
            truth: Arc::clone(&truth),
            state: Arc::clone(&state),
            dice: Workload::new(seed, 1),
            held_back: HashMap::new(),
            held_answers: Vec::new(),
        };
        tokio::spawn(worker.run(batches, questions, stop.clone()));
        Self {
            state,
            stop,
            publishers: async_nats::connect(url).await.unwrap(),
            truth,
            nats,
            probes: AtomicU64::new(0),
        }
    }

    /// Waits until the relay has processed all messages that publishers have sent. Marker number `marker`, which is
    /// sent last, shows it.
    async fn passes_what_was_sent(&self, marker: u64) {
        let subject = origin().events(&namespace(), &worker(MARKER));
        let payload = marker.to_be_bytes().to_vec();
        self.publishers.publish(subject, payload.into()).await.unwrap();
        eventually("the marker has passed", async || {
            (self.state.lock().unwrap().marker >= marker).then_some(())
        })
        .await;
    }

    /// Waits until the daemon has applied everything that the relay has sent to it. Then raises the floors of the truth
    /// to that state.
    ///
    /// First, an empty batch of another worker (the probe) must be applied. By then, the daemon's lane (the thread that
    /// applies events) has received all earlier batches. But the lane takes turns between workers, so it may apply the
    /// probe before them. So the barrier also waits until no batch waits for a lane.
    pub async fn barrier(&self, client: &Client) {
        let epoch = 1 + self.probes.fetch_add(1, Ordering::Relaxed);
        self.passes_what_was_sent(epoch).await;
        let delivered = self.state.lock().unwrap().delivered.clone();
        let mut probe = Publisher::new(self.nats.clone(), &subjects(), &namespace(), &worker("probe"), 0)
            .resuming(BatchCursor { epoch, seq: 0 });
        let cursor = probe.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        client.applied("probe", 0, cursor).await;
        eventually("nothing waits for a lane", async || {
            let status = client.status().await.ok()?;
            (status.batches_waiting == 0).then_some(())
        })
        .await;
        for (holder, version) in delivered {
            self.truth.raise_floor_to(&holder, version);
        }
    }

    /// Returns the connection for publishers.
    pub fn publishers(&self) -> async_nats::Client {
        self.publishers.clone()
    }

    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().unwrap().faults = faults;
    }

    /// Sets the function that damages the answers of publishers; `None` leaves answers as they are.
    pub fn set_answer_fault(&self, fault: Option<AnswerFault>) {
        self.state.lock().unwrap().answer_fault = fault;
    }

    /// Returns the number of answers that an answer fault has changed.
    pub fn answers_faulted(&self) -> u64 {
        self.state.lock().unwrap().answers_faulted
    }

    /// Makes the relay keep the publishers' answers from the daemon (`true`), or send the kept answers and all later
    /// ones (`false`).
    pub fn hold_answers(&self, holds: bool) {
        self.state.lock().unwrap().holds_answers = holds;
    }

    /// Returns the largest number of answers that the relay has kept from the daemon at one time.
    pub fn answers_held(&self) -> u64 {
        self.state.lock().unwrap().answers_held
    }

    /// Sets whether the relay drops the daemon's questions, so that publishers do not get them.
    pub fn set_deaf(&self, is_deaf: bool) {
        self.state.lock().unwrap().is_deaf = is_deaf;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Holder and number of the state (version) that a batch makes; `None` if the batch cannot be decoded.
type Made = Option<(Holder, usize)>;

struct Worker {
    nats: async_nats::Client,
    truth: Arc<Truth>,
    state: Arc<Mutex<State>>,
    dice: Workload,
    held_back: HashMap<String, VecDeque<(bytes::Bytes, Made)>>,
    held_answers: Vec<Answer>,
}

impl Worker {
    async fn run(mut self, mut batches: Subscriber, mut questions: Subscriber, stop: CancellationToken) {
        let (answered, mut answers) = tokio::sync::mpsc::unbounded_channel::<Answer>();
        let mut looks = tokio::time::interval(std::time::Duration::from_millis(5));
        loop {
            tokio::select! {
                // Batches that a publisher sent before its answer are noted before the answer is passed on.
                biased;
                () = stop.cancelled() => return,
                Some(batch) = batches.next() => self.pass_batch(batch).await,
                Some(question) = questions.next() => self.pass_question(question, answered.clone()).await,
                Some(answer) = answers.recv() => {
                    while let Ok(Some(batch)) =
                        tokio::time::timeout(std::time::Duration::ZERO, batches.next()).await
                    {
                        self.pass_batch(batch).await;
                    }
                    self.held_answers.push(answer);
                    self.pass_answers().await;
                }
                _ = looks.tick() => self.pass_answers().await,
            }
        }
    }

    fn happens(&mut self, chance: u64) -> bool {
        chance > 0 && self.dice.below(1000) < chance
    }

    async fn pass_batch(&mut self, message: Message) {
        let Some(subject) = message.subject.strip_prefix(ORIGIN) else {
            return;
        };
        if subject.ends_with(MARKER) {
            let marker = u64::from_be_bytes(message.payload[..].try_into().unwrap());
            self.state.lock().unwrap().marker = marker;
            return;
        }
        let subject = format!("kvatlas{subject}");
        let faults = self.state.lock().unwrap().faults;
        let mut made = None;
        if let Ok((_, worker)) = subjects().parse_events(&subject, 64)
            && let Ok(batch) = EventBatch::decode(&message.payload, &WireLimits::default())
        {
            let cursor = BatchCursor {
                epoch: batch.epoch,
                seq: batch.seq,
            };
            let version = self
                .truth
                .apply(worker.as_str(), batch.rank, cursor, &batch.events);
            made = Some(((worker.to_string(), batch.rank), version));
        }
        if self.happens(faults.drop) {
            return;
        }
        if self.happens(faults.reorder) {
            let late = self.held_back.entry(subject).or_default();
            late.push_back((message.payload, made));
            return;
        }
        let mut payload = message.payload;
        if self.happens(faults.corrupt) && !payload.is_empty() {
            // The payload is cut short. A changed byte within a hash would not be noticed.
            let at = usize::try_from(self.dice.below(payload.len() as u64)).unwrap();
            payload.truncate(at);
        }
        let times = if self.happens(faults.duplicate) { 2 } else { 1 };
        for _ in 0..times {
            self.deliver(&subject, payload.clone(), made.clone()).await;
        }
        for (late, made) in self.held_back.remove(&subject).unwrap_or_default() {
            self.deliver(&subject, late, made).await;
        }
    }

    async fn deliver(&self, subject: &str, payload: bytes::Bytes, made: Made) {
        self.nats.publish(subject.to_owned(), payload).await.unwrap();
        if let Some((holder, version)) = made {
            let mut state = self.state.lock().unwrap();
            let newest = state.delivered.entry(holder).or_default();
            *newest = (*newest).max(version);
        }
    }

    /// Sends a question of the daemon on to the publisher, with a reply subject of the relay. A task of its own waits
    /// for the answer.
    async fn pass_question(
        &mut self,
        question: Message,
        answered: tokio::sync::mpsc::UnboundedSender<Answer>,
    ) {
        let (Some(reply_to), Some(subject)) = (question.reply, question.subject.strip_prefix("kvatlas"))
        else {
            return;
        };
        if self.state.lock().unwrap().is_deaf {
            return;
        }
        let inbox = self.nats.new_inbox();
        let mut chunks = self.nats.subscribe(inbox.clone()).await.unwrap();
        let subject = format!("{ORIGIN}{subject}");
        self.nats
            .publish_with_reply(subject, inbox, question.payload)
            .await
            .unwrap();
        tokio::spawn(async move {
            let reply_to = reply_to.to_string();
            let mut chunks_so_far = Vec::new();
            let patience = std::time::Duration::from_secs(5);
            // The loop continues after the last chunk, because another publisher may claim the worker and answer, too.
            while let Ok(Some(message)) = tokio::time::timeout(patience, chunks.next()).await {
                let reply_to = reply_to.clone();
                if message.headers.is_some() || message.status.is_some() {
                    let headers = message.headers;
                    let chunks = Vec::new();
                    let _ = answered.send(Answer {
                        reply_to,
                        headers,
                        chunks,
                    });
                    continue;
                }
                let chunk = ResyncChunk::decode(&message.payload, &WireLimits::default()).unwrap();
                let is_last = chunk.is_last;
                chunks_so_far.push(chunk);
                if is_last {
                    let chunks = std::mem::take(&mut chunks_so_far);
                    let headers = None;
                    let _ = answered.send(Answer {
                        reply_to,
                        headers,
                        chunks,
                    });
                }
            }
        });
    }

    async fn pass_answers(&mut self) {
        {
            let mut state = self.state.lock().unwrap();
            if state.holds_answers {
                state.answers_held = state.answers_held.max(self.held_answers.len() as u64);
                return;
            }
        }
        for answer in std::mem::take(&mut self.held_answers) {
            self.pass_answer(answer).await;
        }
    }

    async fn pass_answer(&mut self, answer: Answer) {
        let Answer {
            reply_to,
            headers,
            chunks,
        } = answer;
        if chunks.is_empty() {
            let headers = headers.unwrap_or_default();
            self.nats
                .publish_with_headers(reply_to, headers, bytes::Bytes::new())
                .await
                .unwrap();
            return;
        }
        let fault = {
            let mut state = self.state.lock().unwrap();
            state.answers_faulted += u64::from(state.answer_fault.is_some());
            state.answer_fault.clone()
        };
        let payloads = match fault {
            Some(fault) => fault(chunks),
            None => chunks.iter().map(ResyncChunk::encode).collect(),
        };
        for payload in payloads {
            self.nats.publish(reply_to.clone(), payload.into()).await.unwrap();
        }
    }
}

/// Complete answer of a publisher to one question of the daemon: all chunks, or only the headers of an answer without a
/// payload.
struct Answer {
    reply_to: String,
    headers: Option<HeaderMap>,
    chunks: Vec<ResyncChunk>,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_barrier_waits_for_what_the_probe_has_overtaken() {
    const BATCHES: usize = 40;
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("events.lanes", "1")]).await;
    let client = Client::connect(broker.url()).await;
    let relay = Relay::start(broker.url(), Arc::default(), 1).await;
    let engine = engine(
        relay.publishers(),
        &origin(),
        "gpu-0",
        PublisherOptions::default(),
    )
    .await;
    // Another rank of the same worker keeps the worker's queue busy for much longer than the probe takes.
    let mut busy = client.publisher("gpu-0", 1);
    for number in 0..BATCHES as u64 {
        let blocks = hashes(1 + number * 60_000, 60_000);
        busy.publish(Tier::DEVICE, vec![stored(blocks)]).await.unwrap();
    }
    round_trip(&client.nats, PATIENCE).await.unwrap();
    for _ in 0..BATCHES {
        engine
            .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
            .await
            .unwrap();
    }
    engine.flush().await.unwrap();
    let holder = ("gpu-0".to_owned(), 0);
    let delivered = eventually("a batch has passed the relay", async || {
        relay.state.lock().unwrap().delivered.get(&holder).copied()
    })
    .await;
    relay.barrier(&client).await;
    let status = client.holder("gpu-0", 0).await;
    // All batches of the worker pass the relay, so version `n` of the holder is made by batch `n`.
    let applied = status.map_or(0, |status| status.seq);
    assert!(
        applied >= delivered as u64,
        "{delivered} batches were delivered, {applied} applied"
    );
    daemon.stop().await;
}
