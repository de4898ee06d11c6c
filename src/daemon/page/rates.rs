//! Rates and latencies, computed from two readings of the metrics.
//!
//! The metrics are read from the same text that Prometheus scrapes, so the page and a dashboard cannot disagree.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use kvatlas_telemetry::labels::{AnswerState, LabelValue};

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
}

/// Values from one reading of the metrics. A counter's value is the sum over all its labels. A histogram has such a sum
/// for each bucket bound.
#[derive(Debug, Default)]
struct Reading {
    sums: BTreeMap<&'static str, f64>,
    /// Numbers of answers by the word for their certainty.
    answers: BTreeMap<&'static str, f64>,
    /// Buckets of the histogram of query times. A bucket is its upper bound in seconds, and the number of samples up to
    /// that bound. `applied` has the same for the times to apply a batch.
    queries: DurationBuckets,
    applied: DurationBuckets,
}

type DurationBuckets = Vec<(f64, f64)>;

const SUMS: [&str; 9] = [
    "kvatlas_batches_applied_total",
    "kvatlas_blocks_stored_total",
    "kvatlas_blocks_removed_total",
    "kvatlas_batches_dropped_total",
    "kvatlas_queries_total",
    "kvatlas_query_errors_total",
    "kvatlas_query_replies_dropped_total",
    "kvatlas_query_usable_ratio_sum",
    "kvatlas_query_usable_ratio_count",
];
const ANSWERS: &str = "kvatlas_query_answers_total";
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
            } else if name == ANSWERS {
                add_answers(&mut reading.answers, series, value);
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

    fn answered(&self, state: AnswerState) -> f64 {
        self.answers.get(state.as_str()).copied().unwrap_or_default()
    }
}

/// Returns the value of a series' label. The value must have no quotes.
fn label<'s>(series: &'s str, name: &str) -> Option<&'s str> {
    let (_, rest) = series.split_once(&format!("{name}=\""))?;
    let (value, _) = rest.split_once('"')?;
    Some(value)
}

fn add_answers(answers: &mut BTreeMap<&'static str, f64>, series: &str, value: f64) {
    let told = label(series, "state");
    let mut words = AnswerState::ALL.iter().map(|state| state.as_str());
    if let Some(word) = words.find(|word| Some(*word) == told) {
        *answers.entry(word).or_default() += value;
    }
}

fn add_bucket(buckets: &mut DurationBuckets, series: &str, value: f64) {
    let Some(bound) = label(series, "le").and_then(|bound| bound.parse::<f64>().ok()) else {
        return;
    };
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
    last: Option<(Instant, Reading)>,
    rates: Option<Rates>,
}

impl Meter {
    /// Returns the time of the last reading. `None` before the first reading.
    pub(super) fn read_at(&self) -> Option<Instant> {
        self.last.as_ref().map(|(at, _)| *at)
    }

    /// Returns the latest rates. `None` before the second reading.
    pub(super) fn rates(&self) -> Option<&Rates> {
        self.rates.as_ref()
    }

    /// Forgets the previous reading if it is older than `age_max`. A mean over such a time is no rate of the present.
    pub(super) fn forget_older(&mut self, age_max: Duration, now: Instant) {
        let is_older = |at: Instant| now.saturating_duration_since(at) > age_max;
        if self.read_at().is_some_and(is_older) {
            *self = Self::default();
        }
    }

    /// Takes a reading of the metrics from their `text`, and computes the rates since the previous reading. `now` is
    /// the time of the reading.
    pub(super) fn read(&mut self, text: &str, now: Instant) {
        let reading = Reading::of(text);
        self.rates = self.last.as_ref().map(|(at, before)| {
            let seconds = now.saturating_duration_since(*at).as_secs_f64().max(0.001);
            let rate = |name| (reading.sum(name) - before.sum(name)).max(0.0) / seconds;
            let answered = |state| (reading.answered(state) - before.answered(state)).max(0.0) / seconds;
            let shares = rate("kvatlas_query_usable_ratio_count");
            Rates {
                usable: (shares > 0.0).then(|| rate("kvatlas_query_usable_ratio_sum") / shares),
                batches: rate("kvatlas_batches_applied_total"),
                stored: rate("kvatlas_blocks_stored_total"),
                removed: rate("kvatlas_blocks_removed_total"),
                dropped: rate("kvatlas_batches_dropped_total"),
                queries: rate("kvatlas_queries_total"),
                failed: rate("kvatlas_query_errors_total") + rate("kvatlas_query_replies_dropped_total"),
                exact: answered(AnswerState::Exact),
                degraded: answered(AnswerState::Degraded),
                empty: answered(AnswerState::Empty),
                query_p50_us: quantile_us(&before.queries, &reading.queries, 0.5),
                query_p99_us: quantile_us(&before.queries, &reading.queries, 0.99),
                apply_p99_us: quantile_us(&before.applied, &reading.applied, 0.99),
            }
        });
        self.last = Some((now, reading));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_that_is_read_exists() {
        let declared: Vec<&str> = kvatlas_telemetry::all()
            .into_iter()
            .map(|metric| metric.name)
            .collect();
        let bases = [ANSWERS, QUERIES, APPLIED].map(|name| name.trim_end_matches("_bucket"));
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
kvatlas_query_answers_total{namespace=\"a\",state=\"exact\"} 1
";
        let after = "\
kvatlas_queries_total{namespace=\"a\",kind=\"tokens\"} 110
kvatlas_queries_total{namespace=\"b\",kind=\"tokens\"} 105
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"0.001\"} 60
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"0.002\"} 110
kvatlas_query_duration_seconds_bucket{namespace=\"a\",le=\"+Inf\"} 110
kvatlas_query_usable_ratio_sum{namespace=\"a\"} 3
kvatlas_query_usable_ratio_count{namespace=\"a\"} 4
kvatlas_query_answers_total{namespace=\"a\",state=\"exact\"} 3
kvatlas_query_answers_total{namespace=\"b\",state=\"exact\"} 2
kvatlas_query_answers_total{namespace=\"b\",state=\"degraded\"} 6
kvatlas_query_answers_total{namespace=\"b\",state=\"empty\"} 8
";
        let mut meter = Meter::default();
        let begun = Instant::now();
        meter.read(before, begun);
        assert_eq!(meter.rates(), None);
        meter.read(after, begun + Duration::from_secs(2));
        let expected = Rates {
            queries: 100.0,
            exact: 2.0,
            degraded: 3.0,
            empty: 4.0,
            usable: Some(0.75),
            query_p50_us: Some(1000.0),
            query_p99_us: Some(1980.0),
            ..Rates::default()
        };
        assert_eq!(meter.rates(), Some(&expected));
        meter.read(after, begun + Duration::from_secs(3));
        let rates = meter.rates().unwrap();
        assert_eq!((rates.query_p50_us, rates.usable), (None, None));
    }

    #[test]
    fn a_mean_over_a_long_time_is_no_rate() {
        let (mut meter, begun, age_max) = (Meter::default(), Instant::now(), Duration::from_secs(3));
        meter.read("kvatlas_queries_total 0", begun);
        meter.forget_older(age_max, begun + age_max);
        meter.read("kvatlas_queries_total 30", begun + age_max);
        assert_eq!(meter.rates().map(|rates| rates.queries), Some(10.0));
        let later = begun + age_max * 100;
        meter.forget_older(age_max, later);
        assert_eq!(meter.rates(), None);
        meter.read("kvatlas_queries_total 60", later);
        assert_eq!(meter.rates(), None);
    }

    #[test]
    fn what_is_beyond_the_last_bound_is_told_as_that_bound() {
        let now = vec![(0.5, 0.0), (1.0, 1.0), (f64::INFINITY, 100.0)];
        assert_eq!(quantile_us(&Vec::new(), &now, 0.99), Some(1e6));
        assert_eq!(quantile_us(&now, &now, 0.99), None);
        assert_eq!(quantile_us(&Vec::new(), &Vec::new(), 0.5), None);
    }
}
