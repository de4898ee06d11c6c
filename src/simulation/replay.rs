//! Drives a fleet through requests, with a router that asks a daemon, and checks the daemon's replies.
//!
//! Queries run in parallel with each other, and with the events of earlier requests. So a reply may miss the last few
//! events, as in any fleet. One task serves the requests in order, one after the other. The *truth* is the set of
//! blocks that the simulated workers hold at that time. At a checkpoint no query is under way, and the daemon has
//! applied every event. So replies at a checkpoint must equal the truth. With a checkpoint after each request, the
//! whole run is the same for the same seed.

use std::collections::{BTreeSet, HashSet};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};

use kvatlas_client::publish::{CutBounds, HolderPublisher, PublisherError, cut_events};
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    DegradedReason, Event, HolderMatch, NamespaceName, QueryKey, QueryReply, QueryResult, SingleQuery, Tier,
};

use super::check::difference;
use super::error::SimulationError;
use super::fleet::{ExpectedHolder, Fleet, FleetSize};
use super::random_routing::random_routing_hit_rate;
use super::report::{Report, Tally};
use super::request::Request;
use super::session::{DaemonAnswer, POLLS, PROGRESS_PATIENCE, Session, answered};
use fastrand::Rng;

/// Maximum number of queries in one request of a check, which compares replies with the truth.
const BATCH_QUERIES_MAX: usize = 128;
/// Target size of one request to the daemon and of its reply, when replies are compared with the truth. In bytes.
/// Every NATS server accepts messages of twice this size.
const BATCH_BYTES: usize = 512 << 10;
/// Bounds on one batch of events. They are below the publisher's own.
const BATCH: CutBounds = CutBounds {
    events_max: 256,
    bytes_max: 256 << 10,
};
/// Approximate bytes of one holder in a reply.
const HOLDER_BYTES: usize = 96;
/// Maximum number of earlier requests that are drawn at a checkpoint, to compare replies about them with the truth.
const CHECKPOINT_SAMPLE: usize = 64;

/// The requests for which the daemon's replies are compared with the truth at the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinalCheck {
    /// Replies about all requests are compared.
    All,
    /// Replies about the last requests are compared, at most this many.
    Last(usize),
}

/// Settings of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayOptions {
    /// Size of the fleet.
    pub size: FleetSize,
    /// Seed of the random choice between equally good workers, and of the choice of requests whose replies checkpoints
    /// compare with the truth.
    pub seed: u64,
    /// Maximum number of queries that are under way at the same time.
    pub in_flight: NonZeroUsize,
    /// Number of requests between two checkpoints. At a checkpoint all events are applied, and replies are compared
    /// with the truth.
    pub checkpoint_requests: NonZeroUsize,
}

/// A fleet that serves requests, with a router that asks a daemon.
pub struct Replay<'session> {
    session: &'session Session,
    options: ReplayOptions,
    fleet: Fleet,
    publishers: Vec<HolderPublisher>,
    /// Workers that have published since the last checkpoint, at which all events were applied.
    touched: BTreeSet<usize>,
    sampling: Rng,
    tally: Tally,
}

/// Reply to one query of the run, with the time that it took.
struct TimedReply {
    answer: DaemonAnswer<QueryReply>,
    latency: Duration,
}

impl<'session> Replay<'session> {
    /// Creates a fleet of workers with empty caches.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Publisher`] if the connection is closed; [`SimulationError::Name`] or [`SimulationError::Histogram`]
    /// would be errors in this program.
    pub async fn new(session: &'session Session, options: ReplayOptions) -> Result<Self, SimulationError> {
        let fleet = Fleet::new(options.size, options.seed)?;
        let mut publishers = Vec::with_capacity(options.size.workers.get());
        for name in fleet.names() {
            publishers.push(session.publisher(name).await?);
        }
        Ok(Self {
            session,
            options,
            fleet,
            publishers,
            touched: BTreeSet::new(),
            sampling: Rng::with_seed(options.seed),
            tally: Tally::new()?,
        })
    }

    /// Serves all requests, with checkpoints. Then checks the requests that `check` selects.
    ///
    /// `observe` is called after every request.
    ///
    /// # Errors
    ///
    /// Any [`SimulationError`] that ends the run. Wrong replies don't: the report counts them.
    pub async fn run(
        &mut self,
        requests: &[Request],
        check: FinalCheck,
        mut observe: impl FnMut(&Tally),
    ) -> Result<Report, SimulationError> {
        let mut served = 0;
        for window in requests.chunks(self.options.checkpoint_requests.get()) {
            self.advance(window, &mut observe).await?;
            served += window.len();
            self.check_sample(requests.get(..served).unwrap_or_default())
                .await?;
        }
        self.check_final(requests, check).await?;
        self.report(requests)
    }

    /// Serves these requests and waits until the daemon has applied all their events.
    ///
    /// # Errors
    ///
    /// The errors of [`Replay::run`].
    pub async fn advance(
        &mut self,
        requests: &[Request],
        observe: &mut impl FnMut(&Tally),
    ) -> Result<(), SimulationError> {
        let begun = Instant::now();
        let before = self.tally.elapsed;
        let (routers, namespace) = (self.session.routers(), self.session.namespace());
        let ask = |request: &Request| {
            // Each query has a task of its own, so that its latency does not include the time that this task spends on other requests.
            tokio::spawn(ask(routers.clone(), namespace.clone(), request.chain.clone()))
        };
        let answers = stream::iter(requests)
            .map(ask)
            .buffered(self.options.in_flight.get());
        let mut pairs = answers.zip(stream::iter(requests));
        while let Some((answer, request)) = pairs.next().await {
            self.serve(request, answer??).await?;
            self.tally.elapsed = before + begun.elapsed();
            observe(&self.tally);
        }
        drop(pairs);
        self.drain().await?;
        self.tally.elapsed = before + begun.elapsed();
        Ok(())
    }

    /// Routes one request by the daemon's answer, and publishes the changes in the worker's cache.
    async fn serve(&mut self, request: &Request, answer: Option<TimedReply>) -> Result<(), SimulationError> {
        let mut matches = vec![0; self.options.size.workers.get()];
        if let Some(answer) = answer {
            self.tally.record_latency(answer.latency);
            match answer.answer {
                DaemonAnswer::Reply(reply) => {
                    matches = self.fleet.matches_in(&reply);
                    self.tally.record_doubts(&reply);
                }
                DaemonAnswer::UnknownNamespace | DaemonAnswer::Unavailable => self.tally.refused_queries += 1,
            }
        }
        let served = self.fleet.serve(request, &matches);
        self.tally.requests += 1;
        self.tally.requested_blocks += request.chain.len();
        self.tally.hit_blocks += served.admission.hit_blocks;
        self.tally.event_blocks += served.event_blocks();
        self.tally.events += served.events.len();
        if let Some(publisher) = self.publishers.get(served.worker)
            && !served.events.is_empty()
        {
            self.touched.insert(served.worker);
            self.tally.batches += publish(publisher, served.events).await?;
        }
        Ok(())
    }

    /// Waits until every published batch is applied.
    async fn drain(&mut self) -> Result<(), SimulationError> {
        let mut cursors = Vec::with_capacity(self.publishers.len());
        for (number, (name, publisher)) in self.fleet.names().zip(&self.publishers).enumerate() {
            let cursor = match self.touched.remove(&number) {
                true => publisher.flush().await?,
                false => publisher.cursor(),
            };
            if cursor.seq > 0 {
                cursors.push((name.clone(), cursor));
            }
        }
        let status = self.session.wait_for_cursors(&cursors).await?;
        self.tally.indexed_blocks = status.map_or(0, |status| status.distinct_blocks);
        Ok(())
    }

    /// Draws some of `requests` at random, and compares the daemon's replies about them with the truth. Call it only
    /// after [`Replay::advance`] has returned.
    ///
    /// # Errors
    ///
    /// The errors of [`Replay::run`].
    pub async fn check_sample(&mut self, requests: &[Request]) -> Result<(), SimulationError> {
        let sampling = &mut self.sampling;
        let drawn: Vec<_> = (0..CHECKPOINT_SAMPLE.min(requests.len()))
            .filter_map(|_| sampling.choice(requests))
            .map(|request| request.chain.as_slice())
            .collect();
        self.check(&drawn).await
    }

    /// Compares the daemon's replies about requests with the truth. `check` selects the requests, and each distinct
    /// prompt is compared once. Call it only after [`Replay::advance`] has returned.
    ///
    /// # Errors
    ///
    /// The errors of [`Replay::run`].
    pub async fn check_final(
        &mut self,
        requests: &[Request],
        check: FinalCheck,
    ) -> Result<(), SimulationError> {
        let first = match check {
            FinalCheck::All => 0,
            FinalCheck::Last(last) => requests.len().saturating_sub(last),
        };
        // The last hash names the whole chain.
        let mut seen = HashSet::new();
        let distinct: Vec<_> = requests
            .iter()
            .skip(first)
            .map(|request| request.chain.as_slice())
            .filter(|chain| chain.last().is_some_and(|last| seen.insert(*last)))
            .collect();
        self.check(&distinct).await
    }

    /// Asks the daemon about these chains, many in one request, and compares its replies with the truth.
    async fn check(&mut self, chains: &[&[SequenceHash]]) -> Result<(), SimulationError> {
        let mut left = chains;
        while !left.is_empty() {
            let (batch, rest) = left.split_at(batch_length(left, self.options.size.workers.get()));
            left = rest;
            let answer = self.settled(batch).await?;
            for (number, chain) in batch.iter().enumerate() {
                let found = match &answer {
                    DaemonAnswer::Reply(results) => self.difference(chain, results.get(number)),
                    // Of an unknown namespace, no worker holds any block.
                    DaemonAnswer::UnknownNamespace if self.fleet.expected_holders(chain).is_empty() => None,
                    DaemonAnswer::UnknownNamespace => {
                        Some("the daemon does not know the namespace".to_owned())
                    }
                    DaemonAnswer::Unavailable => Some("the daemon could not answer".to_owned()),
                };
                let text = found.map(|found| format!("{}-block prompt: {found}", chain.len()));
                self.tally.record_check(text);
            }
        }
        Ok(())
    }

    /// Returns the daemon's replies about these chains. Call it when all events have been applied. On a busy machine,
    /// the daemon may still be behind, or unable to answer. Then it is asked again.
    async fn settled(
        &self,
        batch: &[&[SequenceHash]],
    ) -> Result<DaemonAnswer<Vec<QueryResult>>, SimulationError> {
        let asked_first = Instant::now();
        let mut asked = 0_u32;
        loop {
            let queries: Vec<_> = batch.iter().copied().map(query).collect();
            let routers = self.session.routers();
            let answer = answered(routers.query_batch(self.session.namespace(), queries).await)?;
            let is_behind = |result: &QueryResult| match result {
                QueryResult::Reply(reply) => reply.holders.iter().any(may_be_behind),
                QueryResult::Error(_) => false,
            };
            let is_momentary = match &answer {
                DaemonAnswer::Reply(results) => results.iter().any(is_behind),
                DaemonAnswer::UnknownNamespace => false,
                DaemonAnswer::Unavailable => true,
            };
            if !is_momentary || asked_first.elapsed() >= PROGRESS_PATIENCE {
                return Ok(answer);
            }
            asked = asked.saturating_add(1);
            tokio::time::sleep(POLLS.pause(asked)).await;
        }
    }

    fn difference(&self, chain: &[SequenceHash], result: Option<&QueryResult>) -> Option<String> {
        match result {
            Some(QueryResult::Reply(reply)) => {
                difference(chain.len(), &self.fleet.expected_holders(chain), reply)
            }
            Some(QueryResult::Error(error)) => Some(format!("the query was refused: {}", error.text)),
            None => Some("the query was refused: the batch of answers is too short".to_owned()),
        }
    }

    /// Returns the workers that really hold leading blocks of a chain, from the simulated caches.
    pub fn expected_holders(&self, chain: &[SequenceHash]) -> Vec<ExpectedHolder> {
        self.fleet.expected_holders(chain)
    }

    /// Returns the report on the whole run. `requests` must be all requests that were served.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Name`], which would be an error in this program.
    pub fn report(&self, requests: &[Request]) -> Result<Report, SimulationError> {
        let (size, seed) = (self.options.size, self.options.seed);
        let random_hit_rate = random_routing_hit_rate(requests, size, seed)?;
        Ok(Report::new(&self.tally, size, seed, random_hit_rate))
    }
}

/// Publishes the events of one request, in as many batches as they need. Returns the number of batches.
pub(super) async fn publish(
    publisher: &HolderPublisher,
    events: Vec<Event>,
) -> Result<usize, PublisherError> {
    let batches = cut_events(events, BATCH);
    let count = batches.len();
    for events in batches {
        publisher.publish(Tier::DEVICE, events).await?;
    }
    Ok(count)
}

/// Returns how many of the chains fit into one request: both the request and its reply must stay within bounds.
/// Returns at least 1 if `chains` is not empty.
fn batch_length(chains: &[&[SequenceHash]], workers: usize) -> usize {
    let reply_bytes = workers.saturating_mul(HOLDER_BYTES).max(1);
    let queries_max = (BATCH_BYTES / reply_bytes).clamp(1, BATCH_QUERIES_MAX);
    let mut bytes = 0;
    let fitting = chains.iter().take(queries_max).take_while(|chain| {
        bytes += size_of_val(**chain);
        bytes <= BATCH_BYTES
    });
    fitting.count().max(1).min(chains.len())
}

/// Whether the reply calls the holder degraded because events may still wait to be applied.
fn may_be_behind(holder: &HolderMatch) -> bool {
    holder.degraded.contains(DegradedReason::Behind)
}

fn query(chain: &[SequenceHash]) -> SingleQuery {
    SingleQuery::new(QueryKey::SequenceHashes(chain.to_vec()))
}

/// Asks the daemon about one prompt. `None` if the prompt has no whole block, so that there is nothing to ask.
async fn ask(
    routers: QueryClient,
    namespace: NamespaceName,
    chain: Vec<SequenceHash>,
) -> Result<Option<TimedReply>, ClientError> {
    if chain.is_empty() {
        return Ok(None);
    }
    let query = SingleQuery::new(QueryKey::SequenceHashes(chain));
    let begun = Instant::now();
    let answer = answered(routers.query(&namespace, query).await)?;
    Ok(Some(TimedReply {
        answer,
        latency: begun.elapsed(),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::request::chain_of;
    use super::*;

    #[test]
    fn batches_stay_within_bounds_and_get_on() {
        let chain = chain_of(&(0..4096).collect::<Vec<_>>());
        let short: &[SequenceHash] = &chain[..4];
        let many = vec![short; 1000];
        assert_eq!(batch_length(&many, 1), BATCH_QUERIES_MAX);
        assert_eq!(batch_length(&many, 256), BATCH_BYTES / (256 * HOLDER_BYTES));
        assert_eq!(batch_length(&many, usize::MAX), 1);
        assert_eq!(batch_length(&many[..3], 1), 3);
        // One chain of hashes takes 32 KiB.
        assert_eq!(batch_length(&vec![chain.as_slice(); 100], 1), 16);
        let long = vec![chain[0]; 100_000];
        assert_eq!(batch_length(&[long.as_slice(), short], 1), 1);
    }
}
