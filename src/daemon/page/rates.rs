//! Rates and latencies, computed from two readings of the metrics.
//!
//! The metrics are read from the same text that Prometheus scrapes, so the page and a dashboard cannot disagree.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use crate::queries::AnswerCounts;

/// Averages per second since the previous reading of the metrics. Some fields are other values, for example shares, as
/// their comments say.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub(super) struct Rates {
    /// Number of batches applied per second.
    batches: f64,
    /// Number of blocks stored per second.
    stored: f64,
    /// Number of blocks removed per second.
    removed: f64,
    /// Number of whole batches dropped per second.
    dropped: f64,
    /// Number of queries answered per second.
    queries: f64,
    /// Number per second of queries answered with an error, and of replies that were not sent.
    failed: f64,
    /// Number per second of answers in which every holder was exact.
    exact: f64,
    /// Number per second of answers with a degraded holder.
    degraded: f64,
    /// Number per second of answers without a holder.
    empty: f64,
    /// Share of matched blocks that a request can reuse. `None` if no blocks were matched.
    usable: Option<f64>,
    /// Time in microseconds within which half of the queries were answered. `None` if there were no queries.
    query_p50_us: Option<f64>,
    /// Time in microseconds within which 99 % of the queries were answered. `None` if there were no queries.
    query_p99_us: Option<f64>,
    /// Time in microseconds within which 99 % of the batches were applied. `None` if there were no batches.
    apply_p99_us: Option<f64>,
    /// Number of messages that wait for a lane at present. A lane is a thread that applies events.
    waiting: f64,
    /// Present memory of the process in RAM, in bytes.
    resident_bytes: f64,
}

/// Values from one reading of the metrics. A counter's value is the sum over all its labels. A histogram has such a sum
/// for each bucket bound.
#[derive(Debug, Default)]
struct Reading {
    sums: BTreeMap<&'static str, f64>,
    /// Buckets of the histogram of query times. A bucket is its upper bound in seconds, and the number of samples up to
    /// that bound. `applied` has the same for the times to apply a batch.
    queries: DurationBuckets,
    applied: DurationBuckets,
}

type DurationBuckets = Vec<(f64, f64)>;

const SUMS: [&str; 11] = [
    "kvatlas_batches_applied_total",
    "kvatlas_blocks_stored_total",
    "kvatlas_blocks_removed_total",
    "kvatlas_batches_dropped_total",
    "kvatlas_queries_total",
    "kvatlas_query_errors_total",
    "kvatlas_query_replies_dropped_total",
    "kvatlas_query_usable_ratio_sum",
    "kvatlas_query_usable_ratio_count",
    "kvatlas_lane_queue_messages",
    "kvatlas_process_resident_memory_bytes",
];
const QUERIES: &str = "kvatlas_query_duration_seconds_bucket";
const APPLIED: &str = "kvatlas_batch_apply_duration_seconds_bucket";

impl Reading {
    fn of(text: &str) -> Self {
        let mut reading = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let name = series.split_once('{').map_or(series, |(name, _)| name);
            let Ok(value) = value.parse::<f64>() else { continue };
            if let Some(known) = SUMS.iter().find(|known| **known == name) {
                *reading.sums.entry(known).or_default() += value;
            } else if name == QUERIES {
                add_bucket(&mut reading.queries, series, value);
            } else if name == APPLIED {
                add_bucket(&mut reading.applied, series, value);
            }
        }
        for buckets in [&mut reading.queries, &mut reading.applied] {
            buckets.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
        }
        reading
    }

    fn sum(&self, name: &str) -> f64 {
        self.sums.get(name).copied().unwrap_or_default()
    }
}

fn add_bucket(buckets: &mut DurationBuckets, series: &str, value: f64) {
    let bound = series
        .split_once("le=\"")
        .and_then(|(_, rest)| rest.split_once('"'))
        .and_then(|(bound, _)| bound.parse::<f64>().ok());
    let Some(bound) = bound else { return };
    match buckets.iter_mut().find(|(known, _)| *known == bound) {
        Some((_, sum)) => *sum += value,
        None => buckets.push((bound, value)),
    }
}

/// Returns a quantile of the samples that came between two readings: the value in microseconds that the given share of
/// the samples does not exceed. The value is interpolated within its bucket. `None` if there were no samples.
fn quantile_us(before: &DurationBuckets, now: &DurationBuckets, share: f64) -> Option<f64> {
    let earlier = |bound: f64| {
        let same = before.iter().find(|(known, _)| *known == bound);
        same.map_or(0.0, |(_, count)| *count)
    };
    let new: DurationBuckets = now
        .iter()
        .map(|(bound, count)| (*bound, count - earlier(*bound)))
        .collect();
    let (_, total) = *new.last()?;
    if total <= 0.0 {
        return None;
    }
    let wanted = total * share;
    let (mut lower, mut below) = (0.0, 0.0);
    for (bound, count) in new {
        if count >= wanted {
            // A value above the last finite bound counts as that bound.
            let within = if bound.is_finite() && count > below {
                lower + (bound - lower) * (wanted - below) / (count - below)
            } else {
                lower
            };
            return Some(within * 1e6);
        }
        (lower, below) = (bound, count);
    }
    None
}

/// Meter that computes the rates from one reading to the next.
#[derive(Debug, Default)]
pub(super) struct Meter {
    last: Option<(Instant, Reading, AnswerCounts)>,
    rates: Option<Rates>,
}

impl Meter {
    /// Returns the time of the last reading. `None` before the first reading.
    pub(super) fn read_at(&self) -> Option<Instant> {
        self.last.as_ref().map(|(at, _, _)| *at)
    }

    /// Returns the latest rates. `None` before the second reading.
    pub(super) fn rates(&self) -> Option<&Rates> {
        self.rates.as_ref()
    }

    /// Takes a reading of the metrics from their `text`, and computes the rates since the previous reading. `now` is
    /// the time of the reading, and `answers` are the counts of answers at that time.
    pub(super) fn read(&mut self, text: &str, answers: AnswerCounts, now: Instant) {
        let reading = Reading::of(text);
        self.rates = self.last.as_ref().map(|(at, before, answered)| {
            let seconds = now.saturating_duration_since(*at).as_secs_f64().max(0.001);
            let rate = |name| (reading.sum(name) - before.sum(name)).max(0.0) / seconds;
            // Counts below 2^53 are exact as floating-point numbers.
            let answered_rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
            let shares = rate("kvatlas_query_usable_ratio_count");
            Rates {
                usable: (shares > 0.0).then(|| rate("kvatlas_query_usable_ratio_sum") / shares),
                batches: rate("kvatlas_batches_applied_total"),
                stored: rate("kvatlas_blocks_stored_total"),
                removed: rate("kvatlas_blocks_removed_total"),
                dropped: rate("kvatlas_batches_dropped_total"),
                queries: rate("kvatlas_queries_total"),
                failed: rate("kvatlas_query_errors_total") + rate("kvatlas_query_replies_dropped_total"),
                exact: answered_rate(answers.exact, answered.exact),
                degraded: answered_rate(answers.degraded, answered.degraded),
                empty: answered_rate(answers.empty, answered.empty),
                query_p50_us: quantile_us(&before.queries, &reading.queries, 0.5),
                query_p99_us: quantile_us(&before.queries, &reading.queries, 0.99),
                apply_p99_us: quantile_us(&before.applied, &reading.applied, 0.99),
                waiting: reading.sum("kvatlas_lane_queue_messages"),
                resident_bytes: reading.sum("kvatlas_process_resident_memory_bytes"),
            }
        });
        self.last = Some((now, reading, answers));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_metric_that_is_read_exists() {
        let declared: Vec<&str> = kvatlas_telemetry::all()
            .into_iter()
            .map(|metric| metric.name)
            .collect();
        let bases = [QUERIES, APPLIED].map(|name| name.trim_end_matches("_bucket"));
        for name in SUMS.into_iter().chain(bases) {
            // A histogram has a sum and a count.
            let base = name.strip_suffix("_sum").or(name.strip_suffix("_count"));
            assert!(declared.contains(&base.unwrap_or(name)), "{name}");
        }
    }

    #[test]
    fn rates_are_differences_by_time() {
        let before = "\
# TYPE kvatlas_queries_total counter
kvatlas_queries_total{namespace=\"a\",kind=\"tokens\"} 10
kvatlas_queries_total{namespace=\"b\",kind=\"tokens\"} 5
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"0.001\"} 10
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"0.002\"} 10
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"+Inf\"} 10
";
        let after = "\
kvatlas_queries_total{namespace=\"a\",kind=\"tokens\"} 110
kvatlas_queries_total{namespace=\"b\",kind=\"tokens\"} 105
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"0.001\"} 60
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"0.002\"} 110
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"+Inf\"} 110
kvatlas_query_usable_ratio_sum{namespace=\"a\"} 3
kvatlas_query_usable_ratio_count{namespace=\"a\"} 4
kvatlas_lane_queue_messages{lane=\"0\"} 3
";
        let mut meter = Meter::default();
        let begun = Instant::now();
        let answers = |exact| AnswerCounts {
            exact,
            ..AnswerCounts::default()
        };
        meter.read(before, answers(1), begun);
        assert_eq!(meter.rates(), None);
        meter.read(after, answers(5), begun + Duration::from_secs(2));
        let expected = Rates {
            queries: 100.0,
            exact: 2.0,
            usable: Some(0.75),
            query_p50_us: Some(1000.0),
            query_p99_us: Some(1980.0),
            waiting: 3.0,
            ..Rates::default()
        };
        assert_eq!(meter.rates(), Some(&expected));
        meter.read(after, answers(5), begun + Duration::from_secs(3));
        let rates = meter.rates().unwrap();
        assert_eq!((rates.query_p50_us, rates.usable), (None, None));
    }

    #[test]
    fn what_is_beyond_the_last_bound_is_told_as_that_bound() {
        let now = vec![(0.5, 0.0), (1.0, 1.0), (f64::INFINITY, 100.0)];
        assert_eq!(quantile_us(&Vec::new(), &now, 0.99), Some(1e6));
        assert_eq!(quantile_us(&now, &now, 0.99), None);
        assert_eq!(quantile_us(&Vec::new(), &Vec::new(), 0.5), None);
    }
}
