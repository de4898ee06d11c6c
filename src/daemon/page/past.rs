//! Record of the last fifteen minutes, for pages that are opened later. It has overall rates and, for each namespace, the
//! number of answers that were not exact.
//!
//! The daemon reads its metrics every few seconds, and its counts of answers every fifteen seconds, whether or not a
//! page is open. Three things are bounded: the number of points, the number of namespaces, and the share of one core's
//! time for readings of the metrics.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use kvatlas_core::index::Namespace;
use kvatlas_core::wire::NamespaceName;

use super::rates::Rates;

/// Minimum time between two readings of the metrics. The pause is longer if a reading takes long.
pub(super) const READING_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time from one reading to the next, as a multiple of the time that the first of them took. So readings take
/// at most a 200th of one core's time.
pub(super) const READING_SHARE: u32 = 200;
/// Maximum number of readings whose rates are kept: fifteen minutes.
const POINTS_MAX: usize = 180;
/// Length of a bar. A bar counts the answers about a namespace during that time.
pub(super) const BAR_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum number of bars (counts of answers in a stretch of time) of a namespace that are kept: fifteen minutes.
const BARS_MAX: usize = 60;
/// Maximum number of namespaces with bars (counts of answers in stretches of time); 1 KiB each.
const NAMESPACES_MAX: usize = 256;

/// Bar of a namespace: the number of answers about it in a stretch of time, and the number of those that were not
/// exact.
type Bar = (u64, u64);

/// Record of the last fifteen minutes: rates, and counts of answers by namespace.
#[derive(Debug, Default)]
pub(super) struct RateHistory {
    points: VecDeque<(u64, Rates)>,
    namespaces: HashMap<NamespaceName, NamespaceBars>,
    bars: u64,
}

#[derive(Debug)]
struct NamespaceBars {
    /// Values of two counters at the end of the namespace's last bar: the number of all answers, and the number of
    /// inexact answers.
    counted: Bar,
    bars: VecDeque<Bar>,
    /// Number of the last bar at whose end the namespace existed.
    seen: u64,
}

/// Rates of the last fifteen minutes, which the daemon sends to a page when the page opens. A row has the time at which
/// the metrics were read, in microseconds since the Unix epoch, and one value for each of `names`, the rates' names. A
/// value that is not known is null.
#[derive(Debug, Serialize)]
pub(super) struct PastRates {
    names: Vec<String>,
    rows: Vec<(u64, Vec<Option<f64>>)>,
}

/// Bars of all namespaces, the newest last. A bar counts the answers about a namespace in a stretch of time.
#[derive(Debug, Serialize)]
pub(super) struct Sparks<'p> {
    /// Maximum number of bars (counts of answers in a stretch of time) of a namespace.
    bars: usize,
    /// Length of the time that one bar covers, in seconds.
    seconds: u64,
    namespaces: HashMap<&'p str, &'p VecDeque<Bar>>,
}

impl RateHistory {
    /// Notes the rates since the previous reading of the metrics.
    pub(super) fn note(&mut self, now_us: u64, rates: Option<&Rates>) {
        if let Some(rates) = rates {
            push(&mut self.points, POINTS_MAX, (now_us, rates.clone()));
        }
    }

    /// Ends a bar, and notes the number of answers about each namespace since the previous bar ended. Must be called
    /// every [`BAR_INTERVAL`].
    pub(super) fn end_bar<'n>(&mut self, namespaces: impl Iterator<Item = &'n Namespace>) {
        self.bars += 1;
        for namespace in namespaces {
            self.note_answers(&namespace.name, namespace.answers.counts());
        }
        let bars = self.bars;
        self.namespaces.retain(|_, known| known.seen == bars);
    }

    fn note_answers(&mut self, name: &NamespaceName, counts: Bar) {
        let seen = self.bars;
        if let Some(known) = self.namespaces.get_mut(name) {
            let (all, inexact) = known.counted;
            let bar = (counts.0.saturating_sub(all), counts.1.saturating_sub(inexact));
            push(&mut known.bars, BARS_MAX, bar);
            (known.counted, known.seen) = (counts, seen);
        } else if self.namespaces.len() < NAMESPACES_MAX {
            let bars = NamespaceBars {
                counted: counts,
                bars: VecDeque::new(),
                seen,
            };
            self.namespaces.insert(name.clone(), bars);
        }
    }

    /// Returns the rates of the last fifteen minutes.
    pub(super) fn rates(&self) -> PastRates {
        let mut names = Vec::new();
        let rows = self.points.iter().map(|(at_us, rates)| {
            let Ok(Value::Object(numbers)) = serde_json::to_value(rates) else {
                return (*at_us, Vec::new());
            };
            if names.is_empty() {
                names = numbers.keys().cloned().collect();
            }
            // Two digits behind the point are enough for a plot.
            let rounded = |number: &Value| Some((number.as_f64()? * 100.0).round() / 100.0);
            (*at_us, numbers.values().map(rounded).collect())
        });
        let rows = rows.collect();
        PastRates { names, rows }
    }

    /// Returns the number of bars that have ended since the start. A bar counts the answers about a namespace in a
    /// stretch of time, which is the same for all namespaces.
    pub(super) fn bars_ended(&self) -> u64 {
        self.bars
    }

    /// Returns the bars (counts of answers in stretches of time) of all namespaces.
    pub(super) fn sparks(&self) -> Sparks<'_> {
        let known = self.namespaces.iter();
        Sparks {
            bars: BARS_MAX,
            seconds: BAR_INTERVAL.as_secs(),
            namespaces: known.map(|(name, known)| (name.as_str(), &known.bars)).collect(),
        }
    }
}

/// Adds `new` at the end, and removes the oldest entries beyond `max`.
fn push<T>(kept: &mut VecDeque<T>, max: usize, new: T) {
    kept.push_back(new);
    while kept.len() > max {
        kept.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::shared::unbounded;

    use super::*;

    fn namespaces(count: usize) -> Vec<Arc<Namespace>> {
        let namespaces = unbounded(count);
        let make = |number| {
            let name = NamespaceName::new(&format!("n{number}")).unwrap();
            namespaces.get_or_create(&name, None).unwrap()
        };
        (0..count).map(make).collect()
    }

    fn end_bar(past: &mut RateHistory, namespaces: &[Arc<Namespace>]) {
        past.end_bar(namespaces.iter().map(|namespace| &**namespace));
    }

    #[test]
    fn a_bar_has_the_answers_since_the_one_before() {
        let (mut past, all) = (RateHistory::default(), namespaces(1));
        all[0].answers.count(true);
        end_bar(&mut past, &all);
        [true, false, false]
            .into_iter()
            .for_each(|is_exact| all[0].answers.count(is_exact));
        end_bar(&mut past, &all);
        end_bar(&mut past, &all);
        let sparks = serde_json::to_value(past.sparks()).unwrap();
        assert_eq!(sparks["namespaces"]["n0"], serde_json::json!([[3, 2], [0, 0]]));
        assert_eq!(past.bars_ended(), 3);
        // A namespace that has gone is forgotten.
        end_bar(&mut past, &[]);
        assert!(past.sparks().namespaces.is_empty());
    }

    #[test]
    fn points_bars_and_namespaces_are_bounded() {
        let (mut past, all) = (RateHistory::default(), namespaces(NAMESPACES_MAX + 1));
        for _ in 0..=BARS_MAX + 1 {
            end_bar(&mut past, &all);
        }
        for _ in 0..=POINTS_MAX {
            past.note(7, Some(&Rates::default()));
        }
        assert_eq!(past.sparks().namespaces.len(), NAMESPACES_MAX);
        assert!(
            past.sparks()
                .namespaces
                .values()
                .all(|bars| bars.len() == BARS_MAX)
        );
        let PastRates { names, rows } = past.rates();
        assert_eq!(rows.len(), POINTS_MAX);
        assert!(names.iter().any(|name| name == "query_p99_us"), "{names:?}");
        assert!(
            rows.iter()
                .all(|(at_us, row)| *at_us == 7 && row.len() == names.len())
        );
    }
}
