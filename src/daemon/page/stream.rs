//! Server-sent events: a frame a second, an atlas every few seconds.
//!
//! A stream ends by itself before its connection reaches the admin listener's age limit, and the browser opens the next one. It also ends
//! when the daemon drains, so that no open page delays a stop.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde::Serialize;
use tokio::sync::mpsc::{Sender, channel};

use kvatlas_client::unix_time_us;
use kvatlas_core::index::Namespace;
use kvatlas_core::wire::{DegradedReason, NamespaceName};

use crate::costs::ToldCost;
use crate::outcomes::BrokenPromise;
use crate::queries::MissingShard;
use crate::runbook::mend_of;
use crate::troubles::Troubles;
use kvatlas_process::admin::{AdminBody, ReadinessReport};

use super::atlas::{Atlas, Lens};
use super::fleet::{Fleet, FleetChange, Number};
use super::rates::Rates;
use super::{Page, Refusal, SharedFrame, asked, held, permit, respond};

/// Between two frames.
const FRAME_INTERVAL: Duration = Duration::from_secs(1);
/// Between two looks at the drain.
const DRAIN_INTERVAL: Duration = Duration::from_millis(250);
/// The least time between two atlases; more if making one takes long.
const ATLAS_INTERVAL: Duration = Duration::from_secs(3);
/// The share of one core's time that making atlases may take: one part in so many.
const ATLAS_SHARE: u32 = 20;
/// Life of a stream: shorter than that of a connection, with the time for which one may have been idle before.
const STREAM_AGE_MAX: Duration = Duration::from_secs(50);
/// Holders with what their doubt costs in a frame, those that cost most.
const COSTS_MAX: usize = 64;
/// Messages that wait for a slow client.
const WAITING_MAX: usize = 2;

const EVENT_STREAM: &str = "text/event-stream";

/// The runbook's mend for each reason. It reads a page for that, and every stream begins with it.
static MENDS: LazyLock<Vec<(&str, String)>> = LazyLock::new(|| {
    let mend = |reason: DegradedReason| {
        let word = reason.as_str();
        (word, mend_of([word].into_iter(), "what to do"))
    };
    DegradedReason::ALL.map(mend).into()
});

/// The facts that do not change while the daemon runs.
#[derive(Serialize)]
struct Hello {
    version: &'static str,
    commit: &'static str,
    /// The words for the bits of a holder's reasons.
    reasons: Vec<(u32, &'static str)>,
    /// The mend for each word.
    mends: &'static [(&'static str, String)],
}

#[derive(Serialize)]
struct Frame<'a> {
    /// Microseconds since the Unix epoch.
    now_us: u64,
    ready: bool,
    /// Why it is not.
    reasons: Vec<String>,
    namespaces: Vec<NamespaceJson>,
    rates: Option<&'a Rates>,
    fleet: FleetChange<'a>,
    /// The shards that answers of a gateway lack.
    missing_shards: Vec<MissingShard>,
    /// The holders whose doubts concern most queries: number, and in words which share of them.
    costs: Vec<(Number, String)>,
}

#[derive(Serialize)]
struct NamespaceJson {
    name: String,
    block_size: u32,
    holders: usize,
    distinct_blocks: u64,
    held_blocks: u64,
    bytes: u64,
    /// Holders of which exact answers promised more than requests found lately.
    broken_promises: Vec<BrokenPromise>,
    /// The answers about it lately, and how many of them were not exact.
    cost: Option<ToldCost>,
    #[serde(flatten)]
    troubles: Troubles,
}

impl Page {
    /// A stream of frames.
    pub(super) fn frames(self: Arc<Self>) -> Result<Response<AdminBody>, Refusal> {
        let permit = permit(&self.streams)?;
        Ok(stream(async move |out: Output| {
            self.send_frames(&out).await;
            drop(permit);
        }))
    }

    async fn send_frames(&self, out: &Output) -> Option<()> {
        out.send("hello", &Hello::new()).await?;
        let past = self.past.lock().past.rates();
        out.send("past", &past).await?;
        let (mut heard, mut bars) = (0, None);
        while !self.is_over(out) {
            if let Some(text) = self.sparks(&mut bars) {
                out.send_text("sparks", text).await?;
            }
            let text = self.frame(&mut heard);
            out.send_text("frame", text?).await?;
            self.pause(out, FRAME_INTERVAL).await?;
        }
        Some(())
    }

    /// The bars of all namespaces, where there are newer ones than a client has heard of.
    fn sparks(&self, heard: &mut Option<u64>) -> Option<String> {
        let known = self.past.lock();
        let read = known.past.bars_read();
        if heard.replace(read) == Some(read) {
            return None;
        }
        serde_json::to_string(&known.past.sparks()).ok()
    }

    /// A stream of atlases of one namespace.
    pub(super) fn atlas_stream(
        self: Arc<Self>,
        namespace: NamespaceName,
        lens: Lens,
    ) -> Result<Response<AdminBody>, Refusal> {
        self.answerer.namespace(&namespace)?;
        let permit = permit(&self.streams)?;
        Ok(stream(async move |out: Output| {
            self.send_atlases(&out, &namespace, lens).await;
            drop(permit);
        }))
    }

    async fn send_atlases(
        self: &Arc<Self>,
        out: &Output,
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

    /// A new atlas.
    fn atlas(&self, name: &NamespaceName, lens: Lens) -> Result<Arc<Atlas>, Refusal> {
        let namespace = self.answerer.namespace(name)?;
        let trust = self.answerer.trust();
        Ok(Arc::new(match lens {
            Lens::Asked => {
                let queries = self.looked.sample.queries(name);
                let branches = asked::branches(&queries);
                let mut atlas = Atlas::new(&namespace, trust, &branches, queries.len() as u64);
                atlas.seconds = Some(asked::seconds(&queries, Instant::now()));
                atlas
            }
            Lens::Held => {
                let (branches, partial) = held::branches(&namespace.indexer);
                let roots = branches.iter().filter(|branch| branch.parent.is_none());
                let total = roots.map(|branch| branch.weight).sum();
                let mut atlas = Atlas::new(&namespace, trust, &branches, total);
                atlas.partial = partial;
                atlas
            }
        }))
    }

    /// One frame for a client that has heard of `heard`, which is brought up to date.
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
            );
            meter.read(&self.metrics.render(), self.looked.sample.counts(), now);
        }
        let report: ReadinessReport = self.readiness.report();
        let frame = Frame {
            now_us: unix_time_us(),
            ready: report.is_ready(),
            reasons: report.reasons(),
            namespaces: namespaces
                .iter()
                .map(|namespace| self.describe(namespace, now))
                .collect(),
            rates: shared.meter.rates(),
            missing_shards: self.looked.missing_shards.all(unix_time_us()),
            costs: self.told_costs(&shared.fleet),
            fleet: shared.fleet.change(heard),
        };
        serde_json::to_string(&frame).ok()
    }

    /// The holders whose doubts cost most, in words.
    fn told_costs(&self, fleet: &Fleet) -> Vec<(Number, String)> {
        let worst = self.looked.costs.worst(COSTS_MAX).into_iter();
        let told = worst.filter_map(|(name, holder, cost)| {
            let number = fleet.number(&name, &holder)?;
            Some((number, cost.to_string()))
        });
        told.collect()
    }

    fn describe(&self, namespace: &Namespace, now: Instant) -> NamespaceJson {
        let sizes = namespace.indexer.sizes();
        NamespaceJson {
            name: namespace.name.as_str().to_owned(),
            block_size: namespace.indexer.settings().block_size.as_u32(),
            holders: sizes.holders,
            distinct_blocks: sizes.distinct_blocks,
            held_blocks: sizes.held_blocks,
            bytes: sizes.bytes,
            broken_promises: self.looked.outcomes.broken_promises(&namespace.name, now),
            cost: self.looked.costs.of_namespace(&namespace.name),
            troubles: Troubles::of(namespace, unix_time_us()),
        }
    }

    fn is_over(&self, out: &Output) -> bool {
        out.begun.elapsed() > STREAM_AGE_MAX || self.readiness.report().is_draining()
    }

    /// Waits; none if the client has gone or the stream is over.
    async fn pause(&self, out: &Output, pause: Duration) -> Option<()> {
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

impl Hello {
    fn new() -> Self {
        let reasons = DegradedReason::ALL.map(|reason| (reason as u32, reason.as_str()));
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: kvatlas_telemetry::commit(),
            reasons: reasons.to_vec(),
            mends: &MENDS,
        }
    }
}

/// The other end of a stream.
struct Output {
    sender: Sender<Bytes>,
    begun: Instant,
}

impl Output {
    /// Sends an event; none if the client has gone.
    async fn send(&self, event: &str, data: &impl Serialize) -> Option<()> {
        self.send_text(event, serde_json::to_string(data).ok()?).await
    }

    /// As [`Self::send`]; JSON text has no line feeds, so the data is one line.
    async fn send_text(&self, event: &str, data: String) -> Option<()> {
        // Over and again at once: the browser opens the next stream without a pause that a person would notice.
        let message = format!("retry: 500\nevent: {event}\ndata: {data}\n\n");
        self.sender.send(message.into()).await.ok()
    }
}

/// An answer that `write` goes on writing.
fn stream<W>(write: impl FnOnce(Output) -> W) -> Response<AdminBody>
where
    W: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = channel(WAITING_MAX);
    let begun = Instant::now();
    tokio::spawn(write(Output { sender, begun }));
    respond(StatusCode::OK, EVENT_STREAM, AdminBody::Stream(receiver))
}
