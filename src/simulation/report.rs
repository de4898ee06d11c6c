//! Counts of a simulation, and its report.

use std::time::Duration;

use hdrhistogram::{CreationError, Histogram};
use kvatlas_core::wire::QueryReply;
use serde::Serialize;

use super::fleet::FleetSize;

/// Maximum number of wrong replies whose difference is kept as text.
const DIFFERENCES_KEPT: usize = 5;
/// Significant digits of the latencies.
const LATENCY_DIGITS: u8 = 3;
/// Longest latency that is recorded exactly, in microseconds. A longer latency is recorded as this value.
const LATENCY_US_MAX: u64 = 60_000_000;

/// Percentiles of the time from sending a query to having its reply, in microseconds. The time includes the ways over
/// NATS in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct QueryLatency {
    /// Median latency: half of the queries took no longer.
    pub p50: u64,
    /// 99th percentile of the latency: 99 of 100 queries took no longer.
    pub p99: u64,
    /// 99.9th percentile of the latency: 999 of 1000 queries took no longer.
    pub p999: u64,
    /// Longest latency of a query.
    pub max: u64,
}

/// Counts of a run so far.
#[derive(Debug)]
pub struct Tally {
    /// Requests served.
    pub requests: usize,
    /// Blocks of all requests.
    pub requested_blocks: usize,
    /// Blocks of all requests that the serving workers already held when the requests arrived.
    pub hit_blocks: usize,
    /// Batches of events that the workers have published.
    pub batches: usize,
    /// Events in the published batches.
    pub events: usize,
    /// Blocks stored or removed by the events.
    pub event_blocks: usize,
    /// Number of distinct blocks in the daemon's index, according to the daemon's last status reply.
    pub indexed_blocks: u64,
    /// Replies during the run in which a holder was degraded for more than a moment.
    pub degraded_replies: usize,
    /// Replies in which a holder was degraded, but only for a moment: its events were being applied or were waiting.
    /// Not counted in `degraded_replies`.
    pub momentary_replies: usize,
    /// Queries of the run that a daemon refused, because it did not know the namespace or could not answer.
    pub refused_queries: usize,
    /// Replies that were compared with the truth at a time when all events had been applied.
    pub checked_replies: usize,
    /// Replies that differed from the truth.
    pub wrong_replies: usize,
    /// Texts of the first few differences between replies and the truth.
    pub differences: Vec<String>,
    /// Time spent on serving requests and on waiting until their events were applied, without the checks.
    pub elapsed: Duration,
    latency_us: Histogram<u64>,
}

impl Tally {
    /// Creates empty counts.
    ///
    /// # Errors
    ///
    /// [`CreationError`] if the histogram's bounds are not valid, which would be an error in this function.
    pub fn new() -> Result<Self, CreationError> {
        Ok(Self {
            requests: 0,
            requested_blocks: 0,
            hit_blocks: 0,
            batches: 0,
            events: 0,
            event_blocks: 0,
            indexed_blocks: 0,
            degraded_replies: 0,
            momentary_replies: 0,
            refused_queries: 0,
            checked_replies: 0,
            wrong_replies: 0,
            differences: Vec::new(),
            elapsed: Duration::ZERO,
            latency_us: Histogram::new_with_bounds(1, LATENCY_US_MAX, LATENCY_DIGITS)?,
        })
    }

    /// Counts a reply that calls at least one holder degraded. It counts as a momentary reply if all its reasons are
    /// momentary (`changing` or `behind`), and as a degraded reply otherwise.
    pub fn record_doubts(&mut self, reply: &QueryReply) {
        let mut in_doubt = reply.holders.iter().filter(|holder| !holder.exact).peekable();
        if in_doubt.peek().is_none() {
            return;
        }
        match in_doubt.all(|holder| holder.degraded.are_of_the_moment()) {
            true => self.momentary_replies += 1,
            false => self.degraded_replies += 1,
        }
    }

    /// Counts a query's latency.
    pub fn record_latency(&mut self, latency: Duration) {
        let latency_us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.latency_us.saturating_record(latency_us);
    }

    /// Counts a comparison of a reply with the truth. `difference` says how a wrong reply differs; the first few of
    /// these texts are kept.
    pub fn record_check(&mut self, difference: Option<String>) {
        self.checked_replies += 1;
        let Some(difference) = difference else {
            return;
        };
        self.wrong_replies += 1;
        if self.differences.len() < DIFFERENCES_KEPT {
            self.differences.push(difference);
        }
    }

    /// Returns the share of requested blocks that the serving worker held already.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hit_blocks, self.requested_blocks)
    }

    /// Returns the latencies so far.
    pub fn query_latency(&self) -> QueryLatency {
        QueryLatency {
            p50: self.latency_us.value_at_quantile(0.5),
            p99: self.latency_us.value_at_quantile(0.99),
            p999: self.latency_us.value_at_quantile(0.999),
            max: self.latency_us.max(),
        }
    }

    /// Returns `count` divided by the elapsed time in seconds.
    pub fn per_second(&self, count: usize) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 {
            as_f64(count) / seconds
        } else {
            0.0
        }
    }

    /// Returns the number of queries that have been answered in the run.
    pub fn queries(&self) -> u64 {
        self.latency_us.len()
    }
}

/// The outcome of a simulation. Written as JSON, it is one object, with the names of the fields as keys.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Report {
    /// Requests served.
    pub requests: usize,
    /// Workers of the fleet.
    pub workers: usize,
    /// Blocks that each worker had room for.
    pub blocks_per_worker: usize,
    /// The seed of the random numbers.
    pub seed: u64,
    /// Blocks of all requests.
    pub requested_blocks: usize,
    /// Share of the requested blocks that the serving worker held already.
    pub hit_rate: f64,
    /// Share of the requested blocks that are held already if each request goes to a worker drawn at random.
    pub random_hit_rate: f64,
    /// Replies that differed from the simulator's own account, after all events had been applied.
    pub wrong_replies: usize,
    /// Replies that were compared with the simulator's own account.
    pub checked_replies: usize,
    /// Replies during the run in which a holder was degraded for more than a moment.
    pub degraded_replies: usize,
    /// Replies in which holders were degraded for a moment only (`changing` or `behind`). Not counted in
    /// `degraded_replies`.
    pub momentary_replies: usize,
    /// Queries of the run that a daemon refused, because it did not know the namespace or could not answer. Until the
    /// first events are applied, no daemon knows the namespace.
    pub refused_queries: usize,
    /// Latencies of the queries of the run.
    pub query_us: QueryLatency,
    /// Batches of events that the workers have published.
    pub batches: usize,
    /// Events in the published batches.
    pub events: usize,
    /// Blocks stored or removed by the events.
    pub blocks: usize,
    /// Distinct blocks in the daemon's index at the end.
    pub indexed_blocks: u64,
    /// Time spent on serving requests and on waiting until their events were applied, without the checks.
    pub elapsed_seconds: f64,
    /// Requests served per second of `elapsed_seconds`. Serving a request means one query, the routing, and the publishing of the
    /// worker's events.
    pub requests_per_second: f64,
    /// Blocks stored or removed by events, per second of `elapsed_seconds`.
    pub blocks_per_second: f64,
    /// Texts of the first few differences between replies and the truth.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<String>,
}

impl Report {
    /// Creates the report on a run, from its counts and the size of its fleet.
    pub(super) fn new(tally: &Tally, size: FleetSize, seed: u64, random_hit_rate: f64) -> Self {
        Self {
            requests: tally.requests,
            workers: size.workers.get(),
            blocks_per_worker: size.blocks_per_worker.get(),
            seed,
            requested_blocks: tally.requested_blocks,
            hit_rate: tally.hit_rate(),
            random_hit_rate,
            wrong_replies: tally.wrong_replies,
            checked_replies: tally.checked_replies,
            degraded_replies: tally.degraded_replies,
            momentary_replies: tally.momentary_replies,
            refused_queries: tally.refused_queries,
            query_us: tally.query_latency(),
            batches: tally.batches,
            events: tally.events,
            blocks: tally.event_blocks,
            indexed_blocks: tally.indexed_blocks,
            elapsed_seconds: tally.elapsed.as_secs_f64(),
            requests_per_second: tally.per_second(tally.requests),
            blocks_per_second: tally.per_second(tally.event_blocks),
            differences: tally.differences.clone(),
        }
    }
}

/// Returns `part` divided by `whole`, or 0 if `whole` is 0.
pub(super) fn ratio(part: usize, whole: usize) -> f64 {
    if whole == 0 {
        0.0
    } else {
        as_f64(part) / as_f64(whole)
    }
}

/// Converts a count to a floating-point number. The result is exact up to 2^53.
#[allow(
    clippy::cast_precision_loss,
    reason = "counts here stay far below 2^53, and a share needs no more digits"
)]
fn as_f64(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{DegradedReason, DegradedReasons, HolderMatch, WorkerName};

    use super::*;

    #[test]
    fn shares_and_rates_of_nothing_are_zero() {
        let tally = Tally::new().unwrap();
        assert_eq!(tally.hit_rate(), 0.0);
        assert_eq!(tally.per_second(5), 0.0);
        assert_eq!(ratio(1, 4), 0.25);
    }

    #[test]
    fn doubts_of_the_moment_are_counted_apart() {
        let mut tally = Tally::new().unwrap();
        let holder = |reasons: &[DegradedReason]| HolderMatch {
            exact: reasons.is_empty(),
            degraded: reasons
                .iter()
                .copied()
                .fold(DegradedReasons::default(), DegradedReasons::with),
            ..HolderMatch::new(WorkerName::new("a").unwrap(), 0, 1)
        };
        let (behind, gap) = (DegradedReason::Behind, DegradedReason::Gap);
        for holders in [
            vec![],
            vec![holder(&[])],
            vec![holder(&[]), holder(&[DegradedReason::Changing])],
            vec![holder(&[behind]), holder(&[behind, gap])],
        ] {
            tally.record_doubts(&QueryReply {
                behind_us: 0,
                predicted: Vec::new(),
                v: 1,
                query_blocks: 1,
                block_size: 16,
                holders_total: 2,
                holders,
                foreign_holders: 0,
                doubtful_holders: 0,
                gathered: None,
                unseen_blocks_max: 0,
            });
        }
        assert_eq!((tally.momentary_replies, tally.degraded_replies), (1, 1));
    }

    #[test]
    fn differences_are_all_counted_and_few_kept() {
        let mut tally = Tally::new().unwrap();
        for number in 0..20 {
            tally.record_check((number % 2 == 0).then(|| number.to_string()));
        }
        assert_eq!((tally.checked_replies, tally.wrong_replies), (20, 10));
        assert_eq!(tally.differences, ["0", "2", "4", "6", "8"]);
    }

    #[test]
    fn latencies_are_percentiles_in_microseconds() {
        let mut tally = Tally::new().unwrap();
        for latency_us in 1..=1000 {
            tally.record_latency(Duration::from_micros(latency_us));
        }
        tally.record_latency(Duration::from_secs(3600));
        let latency = tally.query_latency();
        assert_eq!((latency.p50, latency.p99), (501, 991));
        assert!(latency.max >= LATENCY_US_MAX, "an outlier is cut, not lost");
        assert_eq!(tally.queries(), 1001);
    }
}
