//! Streams of server-sent events. A stream sends a frame a second, or an atlas every few seconds.
//!
//! A stream ends by itself before its connection reaches the admin listener's age limit, and the browser opens the next
//! one. A stream also ends when the daemon drains, so that no open page delays a stop.

use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::poll_fn;
use serde::Serialize;
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::spawn_blocking;

use kvatlas_client::unix_time_us;
use kvatlas_core::index::Namespace;
use kvatlas_core::wire::{DegradedReason, NamespaceName};

use crate::costs::ToldCost;
use crate::lanes::{Stray, now_us};
use crate::outcomes::{HolderPromises, NamespacePromises};
use crate::queries::{MissingShard, ShardOutage};
use crate::runbook::{AdviceTable, mend_of};
use crate::snapshots::FailingSnapshots;
use crate::troubles::Troubles;
use kvatlas_process::admin::{Latch, ReadinessReport};
use kvatlas_telemetry::labels::{DropReason, LabelValue};

use super::atlas::{Atlas, Lens};
use super::fleet::{FleetChange, FleetState, HolderCounts, Number};
use super::rates::Rates;
use super::{Page, PageRefusal, SharedFrame, asked, held, permit, respond};

/// Time between two messages (frames) about the holders.
const FRAME_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time over which the rates in a frame are averaged. It is a few frames, because making one may take long.
const RATES_SPAN_MAX: Duration = Duration::from_secs(3);
/// Time between two checks whether the daemon is draining.
const DRAIN_INTERVAL: Duration = Duration::from_millis(250);
/// Minimum time between two atlases (trees of hot prefixes). The pause is longer if making an atlas takes long.
const ATLAS_INTERVAL: Duration = Duration::from_secs(3);
/// Minimum pause after making an atlas (a tree of hot prefixes), as a multiple of the time that making it took. So the
/// atlases of one stream take less than a 20th of one core's time.
const ATLAS_SHARE: u32 = 20;
/// Maximum life of a stream. It is short enough that a stream ends before its connection reaches the maximum life of
/// connections, even if the connection was idle before the stream.
const STREAM_AGE_MAX: Duration = Duration::from_secs(50);
/// Maximum number of holders for which one message tells the cost of their doubt. The holders with the greatest cost
/// are chosen.
const COSTS_MAX: usize = 64;
/// Maximum number of messages that wait for a slow client.
const WAITING_MAX: usize = 2;

const EVENT_STREAM: &str = "text/event-stream";

/// Names of the page's alerts for troubles that concern no single holder and no batch.
const ALERTS: [&str; 5] = [
    "KvatlasClockAhead",
    "KvatlasPromisesBroken",
    "KvatlasShardMissing",
    "KvatlasSnapshotUploadsFail",
    "KvatlasSnapshotsFail",
];

/// Words, each with the runbook's advice on it.
type Mends = Vec<(&'static str, String)>;

/// Advice from the runbook for each trouble that the page can show, except dropped batches. The runbook's page is read
/// only once, although every stream sends the advice.
static MENDS: LazyLock<Mends> = LazyLock::new(|| {
    let reasons = DegradedReason::ALL.map(DegradedReason::as_str);
    let latches = Latch::ALL.map(Latch::as_str);
    let mut mends = mends_in(AdviceTable::DegradedReasons, &reasons);
    mends.extend(mends_in(AdviceTable::OtherTroubles, &ALERTS));
    mends.extend(mends_in(AdviceTable::Latches, &latches));
    mends
});

/// Advice from the runbook for each reason for which batches are dropped. Some of the reasons have the word of a
/// holder's reason for doubt.
static DROP_MENDS: LazyLock<Mends> = LazyLock::new(|| {
    let reasons: Vec<&str> = DropReason::ALL.iter().map(|reason| reason.as_str()).collect();
    mends_in(AdviceTable::DropReasons, &reasons)
});

fn mends_in(table: AdviceTable, words: &[&'static str]) -> Mends {
    let mends = words
        .iter()
        .map(|word| (*word, mend_of([*word].into_iter(), table)));
    mends.collect()
}

/// First message of a stream. It has the facts that do not change while the daemon runs.
#[derive(Serialize)]
struct StreamHello {
    version: &'static str,
    commit: &'static str,
    /// Bits of a holder's reasons for doubt, each with its word.
    reasons: Vec<(u32, &'static str)>,
    /// Names of the troubles that the page can show, except dropped batches, each with the runbook's advice.
    mends: &'static [(&'static str, String)],
    /// Reasons for which batches are dropped, each with the runbook's advice.
    drop_mends: &'static [(&'static str, String)],
}

#[derive(Serialize)]
struct PageFrame<'a> {
    /// Present time, in microseconds since the Unix epoch.
    now_us: u64,
    ready: bool,
    /// Reasons why the daemon is not ready, as texts.
    reasons: Vec<String>,
    /// Name of the precondition ([`Latch`]) that the daemon waits for. `None` if the daemon is ready or stopping.
    awaited: Option<&'static str>,
    namespaces: Vec<PageNamespace>,
    rates: Option<&'a Rates>,
    fleet: FleetChange<'a>,
    /// Time for which the NATS server has been silent, or the leader of the events stream, in microseconds. `None` if
    /// neither is. Meanwhile all holders are [`DegradedReason::Behind`].
    broker_silent_us: Option<u64>,
    /// Reason in words why nothing new is known of the stream; `None` unless only the stream is silent.
    stream_trouble: Option<String>,
    /// Shards whose blocks are missing from answers. Always empty if this process is not a gateway.
    missing_shards: Vec<MissingShard>,
    /// Outage of a gateway: no shard answers it. `None` for a daemon that is no gateway, too.
    shard_outage: Option<ShardOutage>,
    /// Namespaces that do not exist although events for them came recently.
    strays: Vec<Stray>,
    /// Reason why snapshots are not written. `None` if they are written.
    snapshots: Option<FailingSnapshots>,
    /// Reason why snapshots are not sent to the Object Store. `None` if they are sent.
    uploads: Option<FailingSnapshots>,
    /// Holders in doubt that were listed in the largest numbers of recent answers. Each entry has the holder's number
    /// on the page, and the cost of its doubt as text.
    costs: Vec<(Number, String)>,
}

#[derive(Serialize)]
struct PageNamespace {
    name: String,
    #[serde(flatten)]
    holders: HolderCounts,
    distinct_blocks: u64,
    held_blocks: u64,
    bytes: u64,
    /// Some of the holders for which exact answers recently promised more blocks than requests found.
    broken_promises: Vec<HolderPromises>,
    /// Number of all such holders, including holders that `broken_promises` does not name.
    broken_promises_total: usize,
    /// Comparison for the namespace's holders, over the last one to two minutes: their blocks that exact answers
    /// promised, and their blocks that requests found. `None` if no router reports outcomes.
    promises: Option<NamespacePromises>,
    /// Number of recent answers about the namespace, and number of those that were not exact.
    cost: Option<ToldCost>,
    #[serde(flatten)]
    troubles: Troubles,
}

impl Page {
    /// Returns a response that streams messages about the holders (frames), one every second.
    pub(super) fn frames(self: Arc<Self>) -> Result<Response, PageRefusal> {
        let permit = permit(&self.streams)?;
        Ok(stream(async move |out: StreamOutput| {
            self.send_frames(&out).await;
            drop(permit);
        }))
    }

    async fn send_frames(self: &Arc<Self>, out: &StreamOutput) -> Option<()> {
        out.send("hello", &StreamHello::new()).await?;
        let past = self.past.lock().past.rates();
        out.send("past", &past).await?;
        let (mut heard, mut bars) = (0, None);
        while !self.is_over(out) {
            if let Some(text) = self.sparks(&mut bars) {
                out.send_text("sparks", text).await?;
            }
            let (page, mut look) = (Arc::clone(self), heard);
            let making = spawn_blocking(move || page.frame(&mut look).map(|text| (text, look)));
            let (text, look) = making.await.ok()??;
            heard = look;
            out.send_text("frame", text).await?;
            self.pause(out, FRAME_INTERVAL).await?;
        }
        Some(())
    }

    /// Returns the bars of all namespaces. A bar counts the answers about a namespace in a stretch of time. `None` if
    /// no bar has ended since the client last got the bars. `heard` is the number of bars that had ended at that time.
    /// It is set to the present number.
    fn sparks(&self, heard: &mut Option<u64>) -> Option<String> {
        let known = self.past.lock();
        let read = known.past.bars_ended();
        if heard.replace(read) == Some(read) {
            return None;
        }
        serde_json::to_string(&known.past.sparks()).ok()
    }

    /// Returns a response that streams atlases (trees of hot prefixes) of one namespace.
    pub(super) fn atlas_stream(
        self: Arc<Self>,
        namespace: NamespaceName,
        lens: Lens,
    ) -> Result<Response, PageRefusal> {
        self.answerer.namespace(&namespace)?;
        let permit = permit(&self.streams)?;
        Ok(stream(async move |out: StreamOutput| {
            self.send_atlases(&out, &namespace, lens).await;
            drop(permit);
        }))
    }

    async fn send_atlases(
        self: &Arc<Self>,
        out: &StreamOutput,
        namespace: &NamespaceName,
        lens: Lens,
    ) -> Option<()> {
        while !self.is_over(out) {
            let begun = Instant::now();
            let name = namespace.clone();
            let made = self.in_background(move |page| page.atlas(&name, lens)).await;
            match made {
                Ok(Ok(atlas)) => {
                    self.keep_atlas(namespace, lens, Arc::clone(&atlas));
                    out.send("atlas", &*atlas).await?;
                }
                Ok(Err(refusal)) | Err(refusal) => {
                    out.send("trouble", &refusal.to_string()).await?;
                }
            }
            let pause = begun.elapsed().saturating_mul(ATLAS_SHARE).max(ATLAS_INTERVAL);
            self.pause(out, pause).await?;
        }
        Some(())
    }

    /// Builds a new atlas (a tree of hot prefixes) of the namespace `name`.
    fn atlas(&self, name: &NamespaceName, lens: Lens) -> Result<Arc<Atlas>, PageRefusal> {
        let namespace = self.answerer.namespace(name)?;
        Ok(Arc::new(match lens {
            Lens::Asked => {
                let queries = self.looked.sample.queries(name);
                let branches = asked::branches(&queries);
                let mut atlas = Atlas::new(&namespace, &self.answerer, &branches, queries.len() as u64);
                atlas.seconds = Some(asked::seconds(&queries, Instant::now()));
                atlas
            }
            Lens::Held => {
                let (branches, partial) = held::branches(&namespace.indexer);
                let roots = branches.iter().filter(|branch| branch.parent.is_none());
                let total = roots.map(|branch| branch.weight).sum();
                let mut atlas = Atlas::new(&namespace, &self.answerer, &branches, total);
                atlas.partial = partial;
                atlas
            }
        }))
    }

    /// Returns the next message for a client: what has changed since the last look (a pass over all holders) that the
    /// client has received. `heard` is the number of that look. Afterwards it is the number of the latest look. Takes
    /// long with many holders, so it must run on a thread for blocking work.
    fn frame(&self, heard: &mut u64) -> Option<String> {
        let namespaces = self.answerer.namespaces().all();
        let mut shared = self.frame.lock();
        let now = Instant::now();
        let is_old = |at: Instant| now.saturating_duration_since(at) * 10 >= FRAME_INTERVAL * 9;
        if shared.meter.read_at().is_none_or(is_old) {
            let SharedFrame { fleet, meter } = &mut *shared;
            fleet.look(
                namespaces.iter().map(|namespace| &**namespace),
                self.answerer.trust(),
                &self.answerer.freshness,
            );
            meter.forget_older(RATES_SPAN_MAX, now);
            meter.read(&self.metrics.render(), now);
        }
        let report: ReadinessReport = self.readiness.report();
        let frame = PageFrame {
            now_us: unix_time_us(),
            ready: report.is_ready(),
            reasons: report.reasons(),
            awaited: report.awaited().map(Latch::as_str),
            namespaces: namespaces
                .iter()
                .map(|namespace| self.describe(namespace, &shared.fleet, now))
                .collect(),
            rates: shared.meter.rates(),
            broker_silent_us: self.answerer.freshness.silent_us(now_us()),
            stream_trouble: self.answerer.freshness.stream_trouble(now_us()),
            missing_shards: self.looked.missing_shards.all(unix_time_us()),
            shard_outage: self.looked.missing_shards.outage(unix_time_us()),
            strays: (self.looked.strays)(),
            snapshots: self.looked.snapshot_failing.writing(),
            uploads: self.looked.snapshot_failing.sending(),
            costs: self.told_costs(&shared.fleet),
            fleet: shared.fleet.change(heard),
        };
        serde_json::to_string(&frame).ok()
    }

    /// Returns the holders in doubt that were listed in the largest numbers of recent answers. Each entry has the
    /// holder's number on the page, and the cost of its doubt as text.
    fn told_costs(&self, fleet: &FleetState) -> Vec<(Number, String)> {
        let worst = self.looked.costs.worst(COSTS_MAX).into_iter();
        let told = worst.filter_map(|(name, holder, cost)| {
            let number = fleet.number(&name, &holder)?;
            Some((number, cost.to_string()))
        });
        told.collect()
    }

    fn describe(&self, namespace: &Namespace, fleet: &FleetState, now: Instant) -> PageNamespace {
        let sizes = namespace.indexer.sizes();
        let (broken_promises_total, broken_promises) =
            self.looked.outcomes.broken_promises(&namespace.name, now);
        PageNamespace {
            name: namespace.name.as_str().to_owned(),
            holders: fleet.counts(&namespace.name),
            distinct_blocks: sizes.distinct_blocks,
            held_blocks: sizes.held_blocks,
            bytes: sizes.bytes,
            broken_promises,
            broken_promises_total,
            promises: self.looked.outcomes.promises(&namespace.name, now),
            cost: self.looked.costs.of_namespace(&namespace.name),
            troubles: Troubles::of(namespace, unix_time_us()),
        }
    }

    fn is_over(&self, out: &StreamOutput) -> bool {
        out.begun.elapsed() > STREAM_AGE_MAX || self.readiness.report().is_draining()
    }

    /// Waits for `pause`. Returns `None` if the client has disconnected or the stream is over.
    async fn pause(&self, out: &StreamOutput, pause: Duration) -> Option<()> {
        let until = tokio::time::Instant::now() + pause;
        loop {
            let step = until.min(tokio::time::Instant::now() + DRAIN_INTERVAL);
            tokio::select! {
                () = tokio::time::sleep_until(step) => {}
                () = out.sender.closed() => return None,
            }
            if self.is_over(out) {
                return None;
            }
            if step == until {
                return Some(());
            }
        }
    }
}

impl StreamHello {
    fn new() -> Self {
        let reasons = DegradedReason::ALL.map(|reason| (reason as u32, reason.as_str()));
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: kvatlas_telemetry::commit(),
            reasons: reasons.to_vec(),
            mends: &MENDS,
            drop_mends: &DROP_MENDS,
        }
    }
}

/// Sending end of a stream.
struct StreamOutput {
    sender: Sender<Bytes>,
    begun: Instant,
}

impl StreamOutput {
    /// Sends an event. Returns `None` if the client has disconnected.
    async fn send(&self, event: &str, data: &impl Serialize) -> Option<()> {
        self.send_text(event, serde_json::to_string(data).ok()?).await
    }

    /// Sends an event whose data is already JSON text, as [`Self::send`] does. JSON text has no line feeds, so the data
    /// is one line.
    async fn send_text(&self, event: &str, data: String) -> Option<()> {
        // With this `retry`, the browser opens the next stream so soon after the end of this one that a person does not notice the pause.
        let message = format!("retry: 500\nevent: {event}\ndata: {data}\n\n");
        self.sender.send(message.into()).await.ok()
    }
}

/// Builds an answer with a streamed body. `write` sends the body in a task of its own.
fn stream<W>(write: impl FnOnce(StreamOutput) -> W) -> Response
where
    W: Future<Output = ()> + Send + 'static,
{
    let (sender, mut receiver) = channel(WAITING_MAX);
    let begun = Instant::now();
    tokio::spawn(write(StreamOutput { sender, begun }));
    let messages = poll_fn(move |context| receiver.poll_recv(context));
    respond(
        EVENT_STREAM,
        Body::from_stream(messages.map(Ok::<Bytes, Infallible>)),
    )
}
