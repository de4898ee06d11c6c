//! Series that end when their last handle is dropped. So the series of an engine or a holder end when the engine or
//! holder is gone.
//!
//! The library for Prometheus would keep each counter and gauge until the process ends.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use metrics::Key;
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};
use parking_lot::Mutex;

use super::declare::{MetricDescription, MetricKind};

/// The counters and gauges of a recorder that end when their last handle is dropped.
#[derive(Debug)]
pub(super) struct LeasedSeries {
    declared: BTreeMap<&'static str, MetricDescription>,
    /// Values by the metric's name and the labels. The value of a gauge is stored as the bits of an `f64`.
    series: Mutex<BTreeMap<&'static str, BTreeMap<Key, Weak<AtomicU64>>>>,
}

impl LeasedSeries {
    /// Makes the store for the `declared` metrics, without a series yet.
    pub(super) fn new(declared: impl IntoIterator<Item = MetricDescription>) -> Self {
        Self {
            declared: declared.into_iter().map(|metric| (metric.name, metric)).collect(),
            series: Mutex::default(),
        }
    }

    /// Returns the value of the series with this name and labels. The value begins at zero unless another handle of the
    /// series is alive. `None` for a name that is not declared here.
    pub(super) fn series(&self, key: &Key) -> Option<Arc<AtomicU64>> {
        let declared = self.declared.get(key.name())?;
        let mut all = self.series.lock();
        let series = all.entry(declared.name).or_default();
        if let Some(living) = series.get(key).and_then(Weak::upgrade) {
            return Some(living);
        }
        series.retain(|_, value| value.strong_count() > 0);
        let fresh = Arc::new(AtomicU64::new(0));
        series.insert(key.to_retained(), Arc::downgrade(&fresh));
        Some(fresh)
    }

    /// Appends the series that have a living handle, in Prometheus' text format.
    pub(super) fn render(&self, text: &mut String) {
        for (name, series) in &*self.series.lock() {
            let Some(declared) = self.declared.get(name) else {
                continue;
            };
            let living: Vec<(LabelSet, u64)> = series
                .iter()
                .filter_map(|(key, value)| {
                    let value = value.upgrade()?.load(Ordering::Acquire);
                    Some((LabelSet::from_key_and_global(key, &Default::default()), value))
                })
                .collect();
            if living.is_empty() {
                continue;
            }
            write_help_line(text, name, None, None, declared.help);
            write_type_line(text, name, None, None, declared.kind.as_str());
            for (labels, value) in &living {
                match declared.kind {
                    MetricKind::Gauge => {
                        let value = f64::from_bits(*value);
                        write_metric_line::<&str, f64>(text, name, None, labels, None, value, None);
                    }
                    _ => write_metric_line::<&str, u64>(text, name, None, labels, None, *value, None),
                }
            }
            text.push('\n');
        }
    }
}
