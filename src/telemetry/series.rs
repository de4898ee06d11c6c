//! All series of a recorder, and their output in Prometheus' text format.
//!
//! The series of an engine or a holder end when their last handle is dropped, so when the engine or holder is gone. All
//! others stay until the process ends.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};
use parking_lot::Mutex;

use super::declare::{MetricDescription, MetricGroup, MetricKind};
use super::histograms::Buckets;
use super::{EngineMetrics, HolderOutcomeMetrics, groups};

/// The recorder that keeps all metrics: the series of each declared metric, by its name. A metric that is not declared is
/// not recorded.
#[derive(Debug)]
pub(super) struct AllSeries(Mutex<BTreeMap<&'static str, Family>>);

/// The series of one metric, by their labels.
#[derive(Debug)]
struct Family {
    declared: MetricDescription,
    /// Whether a series ends when its last handle is dropped.
    is_leased: bool,
    series: BTreeMap<Key, Series>,
}

/// The value of a series. The value of a gauge is stored as the bits of an `f64`.
#[derive(Debug)]
enum Series {
    Kept(Arc<AtomicU64>),
    Leased(Weak<AtomicU64>),
    Histogram(Arc<Buckets>),
}

impl AllSeries {
    /// Makes the families of all declared metrics, without a series yet.
    pub(super) fn new() -> Self {
        let leased = [EngineMetrics::describe(), HolderOutcomeMetrics::describe()];
        let is_leased = |name: &str| {
            let mut metrics = leased.iter().flat_map(|group| &group.metrics);
            metrics.any(|metric| metric.name == name)
        };
        let family = |declared: MetricDescription| Family {
            is_leased: is_leased(declared.name),
            declared,
            series: BTreeMap::new(),
        };
        let families = groups::all()
            .into_iter()
            .map(|metric| (metric.name, family(metric)));
        Self(Mutex::new(families.collect()))
    }

    /// Returns the value of a counter or gauge. A new series begins at zero. `None` if no such metric is declared.
    fn value(&self, key: &Key) -> Option<Arc<AtomicU64>> {
        let mut families = self.0.lock();
        let Family {
            is_leased, series, ..
        } = families.get_mut(key.name())?;
        let known = series.get(key).and_then(Series::value);
        if known.is_some() {
            return known;
        }
        let fresh = Arc::new(AtomicU64::new(0));
        let kept = if *is_leased {
            series.retain(|_, series| series.value().is_some());
            Series::Leased(Arc::downgrade(&fresh))
        } else {
            Series::Kept(Arc::clone(&fresh))
        };
        series.insert(key.to_retained(), kept);
        Some(fresh)
    }

    /// Returns the buckets of a histogram. The buckets of a new series begin at zero. `None` if no such histogram is
    /// declared.
    fn buckets(&self, key: &Key) -> Option<Arc<Buckets>> {
        let mut families = self.0.lock();
        let Family { declared, series, .. } = families.get_mut(key.name())?;
        let fresh = || Series::Histogram(Arc::new(Buckets::new(declared.buckets)));
        match series.entry(key.to_retained()).or_insert_with(fresh) {
            Series::Histogram(buckets) => Some(Arc::clone(buckets)),
            Series::Kept(_) | Series::Leased(_) => None,
        }
    }

    /// Returns all series in Prometheus' text format, version 0.0.4.
    pub(super) fn render(&self) -> String {
        let (mut text, mut lines) = (String::new(), String::new());
        for (name, Family { declared, series, .. }) in &*self.0.lock() {
            for (key, series) in series {
                let labels = LabelSet::from_key_and_global(key, &Default::default());
                series.render(declared, &labels, &mut lines);
            }
            if !lines.is_empty() {
                write_help_line(&mut text, name, None, None, declared.help);
                write_type_line(&mut text, name, None, None, declared.kind.as_str());
                text.push_str(&lines);
                text.push('\n');
                lines.clear();
            }
        }
        text
    }
}

impl Series {
    /// Returns the value of a counter or gauge. `None` for a histogram, and for a series that has ended.
    fn value(&self) -> Option<Arc<AtomicU64>> {
        match self {
            Self::Kept(value) => Some(Arc::clone(value)),
            Self::Leased(value) => value.upgrade(),
            Self::Histogram(_) => None,
        }
    }

    fn render(&self, declared: &MetricDescription, labels: &LabelSet, text: &mut String) {
        let name = declared.name;
        if let Self::Histogram(buckets) = self {
            return buckets.render(name, labels, text);
        }
        let Some(value) = self.value() else { return };
        let value = value.load(Ordering::Acquire);
        if declared.kind == MetricKind::Gauge {
            write_metric_line::<&str, f64>(text, name, None, labels, None, f64::from_bits(value), None);
        } else {
            write_metric_line::<&str, u64>(text, name, None, labels, None, value, None);
        }
    }
}

/// Ignores descriptions that callers register, because the declarations already describe every metric.
impl Recorder for AllSeries {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.value(key).map_or_else(Counter::noop, Counter::from_arc)
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.value(key).map_or_else(Gauge::noop, Gauge::from_arc)
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.buckets(key)
            .map_or_else(Histogram::noop, Histogram::from_arc)
    }
}
