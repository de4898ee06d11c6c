//! Recovery on Dynamo's event plane. After a late start, lost events or a doubt, the bridge asks the worker for its
//! events, over both request planes.
//!
//! The workers are simulated, with the frames of Dynamo 1.6.1 and with faults. `deploy/scenario-routers.sh` has real
//! workers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::StreamExt;
use kvatlas_process::registry::{EngineRegistry, MeantEngines};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use xxhash_rust::xxh3::xxh3_64;

use super::sources::{envelope, hashes};
use super::{Site, follow_text};
use crate::support::eventually;

const SUBJECT: &str = "namespace.dynamo.component.backend.endpoint.generate.kv-events";
/// Reasons for doubt about a worker while the bridge has lost some of the worker's events and cannot get them again.
const LOST: [&str; 2] = ["unverified", "upstream_lost"];

/// Fault in the answer of a worker to a request for its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Dynamo's transport reports that there is no such endpoint.
    Refused,
    Error,
    InvalidRange,
    DumpFails,
    /// The connection ends in the middle of the answer.
    Cut,
    /// The answer has no end.
    Endless,
    WrongChecksum,
    TooLarge,
    NoJson,
    /// The answer is about another worker.
    Foreign,
    /// Some events in the middle of the answer are missing.
    Holes,
    /// Another client sends an answer first.
    Stranger,
    /// After the acknowledgement, nothing follows.
    Silent,
}

/// The simulated worker's own index.
#[derive(Default)]
struct Index {
    /// Events in order. Event numbers begin with 1.
    events: Vec<Value>,
    /// Number of the oldest event that the worker still has in its buffer. Older events can be had only as part of a
    /// dump of all blocks.
    buffer_begins: u64,
    /// Number by which the event number in a dump is too low: the dump also has this many later events.
    understates: u64,
    /// Fault of all answers; `None` for right answers.
    fault: Option<Fault>,
    asked: usize,
    dumps: usize,
}

impl Index {
    fn last(&self) -> u64 {
        self.events.len() as u64
    }

    fn from(&self, start: u64) -> Vec<Value> {
        let begin = usize::try_from(start.saturating_sub(1)).unwrap();
        self.events.get(begin..).unwrap_or_default().to_vec()
    }

    fn answer(&mut self, question: &Value) -> Value {
        assert_eq!(question["supports_tree_dump_failed"], json!(true));
        let last = self.last();
        match question["start_event_id"].as_u64() {
            Some(start) if start > last && last > 0 => {
                json!({"TooNew": {"requested_start": start, "requested_end": last, "newest_available": last}})
            }
            Some(start) if start >= self.buffer_begins.max(1) && last > 0 => {
                json!({"Events": {"events": self.from(start), "last_event_id": last}})
            }
            _ => {
                self.dumps += 1;
                let last = last.saturating_sub(self.understates);
                json!({"TreeDump": {"events": self.from(1), "last_event_id": last, "reset_scope": "all"}})
            }
        }
    }
}

fn two_parts(header: &Value, body: &[u8]) -> Vec<u8> {
    let header = if header.is_null() {
        Vec::new()
    } else {
        header.to_string().into_bytes()
    };
    let sum = xxh3_64(&[&header[..], body].concat());
    let mut message = Vec::new();
    for number in [header.len() as u64, body.len() as u64, sum] {
        message.extend(number.to_be_bytes());
    }
    message.extend(header.iter().chain(body));
    message
}

/// Answers one request, at the address that the request gives.
async fn answer(index: &Mutex<Index>, request: &[u8]) {
    let length =
        |at: usize| usize::try_from(u64::from_be_bytes(request[at..at + 8].try_into().unwrap())).unwrap();
    let (control, question) = request[24..].split_at(length(0));
    assert_eq!(question.len(), length(8));
    let control: Value = serde_json::from_slice(control).unwrap();
    let question: Value = serde_json::from_slice(question).unwrap();
    let info = control["connection_info"]["info"].as_str().unwrap();
    let info: Value = serde_json::from_str(info).unwrap();
    let (mut told, fault) = {
        let mut index = index.lock();
        index.asked += 1;
        (index.answer(&question), index.fault)
    };
    let address = info["address"].as_str().unwrap();
    match fault {
        Some(Fault::Silent) => return,
        Some(Fault::Stranger) => {
            let mut stranger = TcpStream::connect(address).await.unwrap();
            let hello = two_parts(&json!({"subject": "guessed", "stream_type": "response"}), b"");
            stranger.write_all(&hello).await.unwrap();
        }
        Some(Fault::Error) => told = json!({"Error": "dp_rank mismatch"}),
        Some(Fault::InvalidRange) => told = json!({"InvalidRange": {"start_id": 3, "end_id": 1}}),
        Some(Fault::DumpFails) => told = json!({"TreeDumpFailed": {"last_event_id": 1, "message": "busy"}}),
        Some(Fault::Foreign) => told = of_another(&told),
        Some(Fault::Holes) => told = json!({"Events": {"events": [], "last_event_id": 1_000}}),
        _ => {}
    }
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The bridge may close the connection before the end of the answer.
    let _ = stream.write_all(&frames(&info, &told, fault)).await;
    if fault == Some(Fault::Endless) {
        // The connection stays open until the bridge closes it.
        let _ = stream.read(&mut [0; 16]).await;
    }
}

/// Turns an answer into an answer about worker 8.
fn of_another(told: &Value) -> Value {
    let mut told = told.clone();
    for answer in ["TreeDump", "Events"] {
        let events = told
            .get_mut(answer)
            .and_then(|answer| answer["events"].as_array_mut());
        for event in events.into_iter().flatten() {
            event["worker_id"] = json!(8);
        }
    }
    told
}

/// Returns all bytes that a worker sends as one answer, from the first frame to the end of the stream.
fn frames(info: &Value, told: &Value, fault: Option<Fault>) -> Vec<u8> {
    let error = (fault == Some(Fault::Refused)).then_some("no such endpoint");
    let body = json!({"data": told, "complete_final": false})
        .to_string()
        .into_bytes();
    let mut data = match fault {
        Some(Fault::NoJson) => two_parts(&Value::Null, b"{]"),
        _ => two_parts(&Value::Null, &body),
    };
    match fault {
        Some(Fault::WrongChecksum) => data[23] ^= 1,
        Some(Fault::TooLarge) => data[8] = 0x7f,
        Some(Fault::Cut) => data.truncate(data.len() / 2),
        _ => {}
    }
    let mut all = two_parts(
        &json!({"subject": info["subject"], "stream_type": "response"}),
        b"",
    );
    all.extend(two_parts(&json!({"error": error}), b""));
    all.extend(data);
    if !matches!(fault, Some(Fault::Cut | Fault::Endless)) {
        all.extend(two_parts(&Value::Null, br#"{"complete_final":true}"#));
        all.extend(two_parts(&json!("sentinel"), b""));
    }
    all
}

async fn serve_connection(mut stream: TcpStream, index: Arc<Mutex<Index>>) {
    let mut answers = JoinSet::new();
    while let Ok(path) = stream.read_u16().await {
        let mut text = vec![0; usize::from(path)];
        stream.read_exact(&mut text).await.unwrap();
        assert_eq!(text, b"7/dynamo/backend/worker_kv_query_source_1");
        let mut headers = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut headers).await.unwrap();
        let _: Value = serde_json::from_slice(&headers).unwrap();
        let mut request = vec![0; usize::try_from(stream.read_u32().await.unwrap()).unwrap()];
        stream.read_exact(&mut request).await.unwrap();
        if stream.write_u32(0).await.is_err() {
            return;
        }
        let index = Arc::clone(&index);
        answers.spawn(async move { answer(&index, &request).await });
    }
}

/// Simulated worker 7 of Dynamo, with an index of its own events. It answers requests for them until the value is
/// dropped.
struct Worker {
    index: Arc<Mutex<Index>>,
    folder: TempDir,
    _serving: JoinSet<()>,
}

impl Worker {
    /// Starts a worker that answers requests over TCP.
    async fn over_tcp() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = json!({"tcp": format!("{address}/7/dynamo/backend/worker_kv_query_source_1")});
        Self::new(&target, |index| async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve_connection(stream, Arc::clone(&index)));
            }
        })
    }

    /// Starts a worker that answers requests over NATS.
    async fn over_nats(site: &Site) -> Self {
        let nats = async_nats::connect(site.broker.url()).await.unwrap();
        let subject = "dynamo_backend.worker_kv_query_source_1-7";
        let mut requests = nats.subscribe(subject).await.unwrap();
        nats.flush().await.unwrap();
        Self::new(&json!({"nats_tcp": subject}), |index| async move {
            while let Some(request) = requests.next().await {
                nats.publish(request.reply.unwrap(), "".into()).await.unwrap();
                answer(&index, &request.payload).await;
            }
        })
    }

    fn new<F: Future<Output = ()> + Send + 'static>(
        target: &Value,
        serve: impl FnOnce(Arc<Mutex<Index>>) -> F,
    ) -> Self {
        let index = Arc::<Mutex<Index>>::default();
        let mut serving = JoinSet::new();
        serving.spawn(serve(Arc::clone(&index)));
        let worker = Self {
            index,
            folder: tempfile::tempdir().unwrap(),
            _serving: serving,
        };
        worker.write_record(1, target);
        worker
    }

    fn record(&self, publisher: u64) -> PathBuf {
        let key = format!(
            "{}/topic/kv-events/{publisher:x}",
            SUBJECT.trim_end_matches(".kv-events").replace('.', "/")
        );
        let folder = self.folder.path().join("v1/event_sources");
        folder.join(key.replace('/', "%2F").replace('-', "%2D"))
    }

    fn write_record(&self, publisher: u64, target: &Value) {
        let record = json!({
            "type": "EventSource", "topic": "kv-events", "publisher_id": publisher,
            "metadata": {"publisher_id": publisher, "worker": {"worker_id": 7, "dp_rank": 0}, "recovery_target": {"transport": target}},
        });
        let path = self.record(publisher);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // The file appears at once with its whole content.
        let made = tempfile::NamedTempFile::new_in(self.folder.path()).unwrap();
        std::fs::write(made.path(), record.to_string()).unwrap();
        made.persist(path).unwrap();
    }

    fn follow(&self, site: &Site) {
        let (url, folder) = (site.broker.url(), self.folder.path().display());
        follow_text(
            &site.bridge,
            &format!("plane={url},format=dynamo,topic={SUBJECT},discovery=file:{folder}"),
        );
    }

    /// Adds an event to the worker's index without publishing it. Returns the message in which it would be published.
    fn has(&self, data: &Value) -> Value {
        let mut index = self.index.lock();
        let event = json!({"event_id": index.last() + 1, "data": data, "dp_rank": 0});
        let event =
            json!({"worker_id": 7, "storage_tier": "device", "residency_domain": "worker", "event": event});
        index.events.push(event.clone());
        event
    }

    fn asked(&self) -> usize {
        self.index.lock().asked
    }
}

/// Returns an event that stores the blocks `first` to `first + count` of sequence `which`.
fn stored(which: u32, first: usize, count: usize) -> Value {
    let (blocks, sequences) = hashes(which, u32::try_from(first + count).unwrap());
    let blocks: Vec<Value> = (first..first + count)
        .map(|place| json!({"block_hash": sequences[place], "tokens_hash": blocks[place], "mm_extra_info": null}))
        .collect();
    let parent = first.checked_sub(1).map(|before| sequences[before]);
    json!({"stored": {"parent_hash": parent, "start_position": null, "blocks": blocks}})
}

fn removed(which: u32, place: usize) -> Value {
    let (_, sequences) = hashes(which, u32::try_from(place + 1).unwrap());
    json!({"removed": {"block_hashes": [sequences[place]]}})
}

impl Site {
    /// Publishes events on the event plane.
    async fn tell(&self, publisher: u64, number: u64, events: &[Value]) {
        let payload = envelope(publisher, number, &json!(events));
        self.client.nats.publish(SUBJECT, payload.into()).await.unwrap();
        self.client.nats.flush().await.unwrap();
    }

    fn trouble(&self) -> Option<String> {
        self.bridge.engines().remove(0).last_error
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_heard_late_is_asked_for_all_that_it_has() {
    let site = Site::new(&[]).await;
    let over_tcp = Worker::over_tcp().await;
    over_tcp.has(&stored(1, 0, 3));
    over_tcp.has(&removed(1, 2));
    over_tcp.has(&stored(2, 0, 2));
    over_tcp.follow(&site);
    // The worker publishes nothing.
    site.settles("7", 4, &[]).await;
    assert_eq!((site.depth(1, "7").await, site.depth(2, "7").await), (2, 2));
    // The worker's event numbers continue from its answer, whatever number the message has.
    let event = over_tcp.has(&stored(2, 2, 1));
    site.tell(1, 900, &[event]).await;
    site.settles("7", 5, &[]).await;
    assert_eq!(over_tcp.index.lock().dumps, 1);
    assert!(site.ask(2, 8).await.iter().all(|holder| holder.exact));
    // A silent worker is asked at intervals, so it does not become stale.
    let asked = over_tcp.asked();
    eventually("asked again", async || {
        (over_tcp.asked() > asked + 8).then_some(())
    })
    .await;
    site.settles("7", 5, &[]).await;
    assert_eq!(over_tcp.index.lock().dumps, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_on_the_way_is_asked_for() {
    let site = Site::new(&[]).await;
    for worker in [Worker::over_tcp().await, Worker::over_nats(&site).await] {
        worker.has(&stored(1, 0, 2));
        worker.follow(&site);
        site.settles("7", 2, &[]).await;
        let dumps = worker.index.lock().dumps;
        // Two events are lost, and the next event arrives.
        worker.has(&stored(1, 2, 2));
        worker.has(&removed(1, 3));
        let next = worker.has(&stored(2, 0, 1));
        site.tell(1, 3, &[next]).await;
        site.settles("7", 4, &[]).await;
        assert_eq!((site.depth(1, "7").await, site.depth(2, "7").await), (3, 1));
        // No event follows the lost one.
        worker.has(&stored(2, 1, 5));
        site.settles("7", 9, &[]).await;
        // The worker still had the lost events in its buffer, so no dump was needed.
        assert_eq!(worker.index.lock().dumps, dumps);
        // The worker no longer has the lost event in its buffer.
        worker.has(&removed(2, 5));
        worker.index.lock().buffer_begins = 100;
        let next = worker.has(&stored(3, 0, 3));
        site.tell(1, 9, &[next]).await;
        site.settles("7", 11, &[]).await;
        assert_eq!((site.depth(2, "7").await, site.depth(3, "7").await), (5, 3));
        assert!(worker.index.lock().dumps > dumps);
        // An unreadable message may have been an event of this worker.
        site.client.nats.publish(SUBJECT, "\u{1}".into()).await.unwrap();
        worker.has(&stored(3, 3, 1));
        site.settles("7", 12, &[]).await;
        unfollow(&site, &worker).await;
    }
}

/// Stops following the event plane of `worker`.
async fn unfollow(site: &Site, worker: &Worker) {
    for state in site.bridge.engines() {
        site.bridge.unregister(&MeantEngines::One(state.engine.key));
    }
    eventually("the worker is forgotten", async || {
        site.holder("7").await.is_none().then_some(())
    })
    .await;
    std::fs::remove_file(worker.record(1)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_with_a_fault_leaves_the_worker_out_of_sight() {
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let worker = Worker::over_tcp().await;
    worker.has(&stored(1, 0, 1));
    worker.follow(&site);
    site.settles("7", 1, &[]).await;
    let mut blocks = 1;
    for (fault, words) in [
        (Fault::Refused, "no such endpoint"),
        (Fault::Error, "dp_rank mismatch"),
        (Fault::InvalidRange, "from 3 to 1"),
        (Fault::DumpFails, "busy"),
        (Fault::Cut, "cut off"),
        (Fault::Endless, "no answer within"),
        (Fault::WrongChecksum, "checksum"),
        (Fault::TooLarge, "more than"),
        (Fault::NoJson, "another form"),
        (Fault::Foreign, "another worker"),
        (Fault::Holes, "missing in the answer"),
        (Fault::Silent, "no answer within"),
    ] {
        worker.index.lock().fault = Some(fault);
        worker.has(&stored(1, blocks, 1));
        let next = worker.has(&stored(1, blocks + 1, 1));
        let number = worker.index.lock().last();
        site.tell(1, number, &[next]).await;
        site.settles("7", blocks as u64, &LOST).await;
        eventually(&format!("{fault:?} is named"), async || {
            site.trouble()
                .is_some_and(|trouble| trouble.contains(words))
                .then_some(())
        })
        .await;
        assert!(
            site.ask(1, 64).await.iter().all(|holder| !holder.exact),
            "{fault:?}"
        );
        blocks += 2;
        worker.index.lock().fault = None;
        site.settles("7", blocks as u64, &[]).await;
        eventually("nothing is wrong", async || {
            site.trouble().is_none().then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_who_answers_first_is_turned_away() {
    let site = Site::new(&[]).await;
    let worker = Worker::over_tcp().await;
    worker.index.lock().fault = Some(Fault::Stranger);
    worker.has(&stored(1, 0, 3));
    worker.follow(&site);
    site.settles("7", 3, &[]).await;
}

/// A dump takes time, so it may have events that are later than the event number it states. The bridge must
/// nevertheless reach the worker's newest state.
#[tokio::test(flavor = "multi_thread")]
async fn a_dump_that_knows_more_than_its_number_is_brought_to_one_state() {
    let site = Site::new(&[]).await;
    let worker = Worker::over_tcp().await;
    worker.has(&stored(1, 0, 4));
    worker.has(&removed(1, 3));
    worker.has(&stored(2, 0, 2));
    worker.has(&removed(2, 1));
    worker.index.lock().understates = 3;
    worker.follow(&site);
    site.settles("7", 4, &[]).await;
    assert_eq!((site.depth(1, "7").await, site.depth(2, "7").await), (3, 1));
    // A repeated event changes nothing.
    let again = worker.index.lock().events[1].clone();
    site.tell(1, 1, &[again]).await;
    let next = worker.has(&stored(1, 3, 1));
    site.tell(1, 4, &[next]).await;
    site.settles("7", 5, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_come_while_a_worker_is_asked_wait() {
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let worker = Worker::over_tcp().await;
    worker.index.lock().fault = Some(Fault::Error);
    worker.has(&stored(1, 0, 2));
    worker.follow(&site);
    eventually("the worker is asked", async || (worker.asked() > 0).then_some(())).await;
    // These events wait until the answer has come.
    for place in 2..6 {
        let next = worker.has(&stored(1, place, 1));
        site.tell(1, place as u64, &[next]).await;
    }
    site.settles("7", 0, &LOST).await;
    worker.index.lock().fault = None;
    site.settles("7", 6, &[]).await;
    assert_eq!(site.depth(1, "7").await, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_record_goes_is_forgotten() {
    let site = Site::new(&[]).await;
    let worker = Worker::over_tcp().await;
    worker.has(&stored(1, 0, 3));
    worker.follow(&site);
    site.settles("7", 3, &[]).await;
    let record = worker.record(1);
    let kept = std::fs::read(&record).unwrap();
    std::fs::remove_file(&record).unwrap();
    eventually("the worker is forgotten", async || {
        site.holder("7").await.is_none().then_some(())
    })
    .await;
    // A late message of the ended worker has no effect.
    let late = worker.has(&stored(1, 3, 1));
    site.tell(1, 1, &[late]).await;
    // The worker's record comes back.
    std::fs::write(&record, kept).unwrap();
    site.settles("7", 4, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_publisher_without_a_record_tells_of_a_worker_with_one_does_not_count() {
    let site = Site::new(&[]).await;
    let worker = Worker::over_tcp().await;
    worker.has(&stored(1, 0, 3));
    worker.follow(&site);
    site.settles("7", 3, &[]).await;
    let dumps = worker.index.lock().dumps;
    let event = json!({"event_id": 1, "data": stored(2, 0, 2), "dp_rank": 0});
    let stranger =
        json!({"worker_id": 7, "storage_tier": "device", "residency_domain": "worker", "event": event});
    site.tell(99, 0, &[stranger]).await;
    eventually("the worker is asked for everything", async || {
        (worker.index.lock().dumps > dumps).then_some(())
    })
    .await;
    site.settles("7", 3, &[]).await;
    assert_eq!((site.depth(1, "7").await, site.depth(2, "7").await), (3, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_whom_two_publishers_tell_is_in_doubt_until_one_is_gone() {
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let worker = Worker::over_tcp().await;
    worker.has(&stored(1, 0, 3));
    worker.follow(&site);
    site.settles("7", 3, &[]).await;
    let (one, other) = (worker.record(1), worker.record(2));
    write_as(&one, &other, 2);
    site.settles("7", 3, &["upstream_gap"]).await;
    std::fs::remove_file(&one).unwrap();
    site.settles("7", 3, &[]).await;
    let next = worker.has(&removed(1, 2));
    site.tell(2, 0, &[next]).await;
    site.settles("7", 2, &[]).await;
}

/// Writes a copy of the discovery record in `one` to `other`, with `publisher` as its publisher id.
fn write_as(one: &Path, other: &Path, publisher: u64) {
    let mut record: Value = serde_json::from_slice(&std::fs::read(one).unwrap()).unwrap();
    record["publisher_id"] = json!(publisher);
    std::fs::write(other, record.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_counts_anew_is_asked_for_all_that_it_has() {
    let site = Site::new(&[]).await;
    let worker = Worker::over_tcp().await;
    worker.has(&stored(1, 0, 3));
    worker.has(&stored(2, 0, 3));
    worker.follow(&site);
    site.settles("7", 6, &[]).await;
    // The worker's event numbers begin again, and it publishes nothing.
    worker.index.lock().events.clear();
    worker.has(&stored(3, 0, 2));
    site.settles("7", 2, &[]).await;
    assert_eq!((site.depth(1, "7").await, site.depth(3, "7").await), (0, 2));
}
