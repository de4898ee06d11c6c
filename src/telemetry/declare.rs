//! Declares metrics: one row of [`metric_group!`] gives a metric its handle, name, unit, buckets and help.
//!
//! Names follow the conventions that `promtool check metrics` enforces. They are in lower snake case with the prefix
//! `kvatlas_`. Base units are spelled out (`_seconds`, `_bytes`). All counters end in `_total`, and nothing else does. The
//! unit tests of this module check the same rules. Dashboards rely on a released name: add names, don't rename them.

use metrics::{Counter, Gauge, Histogram, Label, Unit};

use super::labels::{LabelValue, PerLabel};

/// Upper bounds of buckets, in seconds, for short durations: the time of a query, and the time to apply a batch.
pub(super) const LATENCIES: &[f64; 19] = &[
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1,
    5e-1, 1.0,
];
/// Upper bounds of buckets, in seconds, for the duration of writing a snapshot, and of a resync.
pub(super) const LONG_TIMES: &[f64] = &[
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
];
/// Upper bounds of buckets, in seconds, for the time from a change in an engine until queries see the change. The
/// largest bounds are minutes, because a daemon that catches up with a stream reads old events.
pub(super) const LAGS: &[f64; 16] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
/// Upper bounds of buckets for a share, from 0 to 1.
pub(super) const SHARES: &[f64] = &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0];
/// Upper bounds of buckets for a number of leading blocks of a prompt.
pub(super) const DEPTHS: &[f64] = &[
    0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0,
];
/// Upper bounds of buckets for the number of blocks that one batch names.
pub(super) const BATCH_BLOCKS: &[f64; 9] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A sum that only grows while the process lives.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// A distribution over fixed buckets.
    Histogram,
}

impl MetricKind {
    /// Returns the type's name in Prometheus' text format.
    pub fn as_str(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// A label of a metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelDescription {
    /// Key of the label.
    pub key: &'static str,
    /// All values of the label. `None` if the set of values is open.
    pub values: Option<Vec<LabelWord>>,
}

/// One value of a label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelWord {
    /// Text of the value.
    pub word: &'static str,
    /// Meaning of the value.
    pub meaning: &'static str,
}

/// The declaration of a metric.
#[derive(Debug, Clone)]
pub struct MetricDescription {
    /// Name of the metric, as Prometheus sees it.
    pub name: &'static str,
    /// Type of the metric.
    pub kind: MetricKind,
    /// Unit of the value.
    pub unit: Unit,
    /// Help text: one sentence that tells the meaning of the value.
    pub help: &'static str,
    /// Labels of the metric. The labels of its group come first, then the label of its handle.
    pub labels: Vec<LabelDescription>,
    /// The upper bounds of a histogram's buckets, ascending; empty for other types.
    pub buckets: &'static [f64],
}

/// Metrics that are declared together, because the same code feeds them.
#[derive(Debug, Clone)]
pub struct GroupDescription {
    /// The subject of the metrics, in a few words.
    pub about: &'static str,
    /// The metrics, in the order of their rows.
    pub metrics: Vec<MetricDescription>,
}

/// The handle of a metric: a [`Counter`], a [`Gauge`], a [`Histogram`], or a [`PerLabel`] with one handle for each
/// value of a label.
pub(super) trait Handle: Sized {
    /// Type of the metric.
    const KIND: MetricKind;

    /// Label that the handle adds to the labels of its group; `None` unless the handle is a [`PerLabel`].
    fn label() -> Option<LabelDescription> {
        None
    }

    /// Makes a handle for the series with this name and these labels, from the current recorder. A new series begins at zero.
    fn register(name: &'static str, labels: &[Label]) -> Self;

    /// Records a value in every series of the handle.
    #[cfg(test)]
    fn touch(&self);
}

impl Handle for Counter {
    const KIND: MetricKind = MetricKind::Counter;

    fn register(name: &'static str, labels: &[Label]) -> Self {
        metrics::counter!(name, labels.iter())
    }

    #[cfg(test)]
    fn touch(&self) {
        self.increment(1);
    }
}

impl Handle for Gauge {
    const KIND: MetricKind = MetricKind::Gauge;

    fn register(name: &'static str, labels: &[Label]) -> Self {
        metrics::gauge!(name, labels.iter())
    }

    #[cfg(test)]
    fn touch(&self) {
        self.set(1.0);
    }
}

impl Handle for Histogram {
    const KIND: MetricKind = MetricKind::Histogram;

    fn register(name: &'static str, labels: &[Label]) -> Self {
        metrics::histogram!(name, labels.iter())
    }

    #[cfg(test)]
    fn touch(&self) {
        self.record(1.0);
    }
}

impl<L: LabelValue, H: Handle> Handle for PerLabel<L, H> {
    const KIND: MetricKind = H::KIND;

    fn label() -> Option<LabelDescription> {
        Some(LabelDescription {
            key: L::KEY,
            values: L::values(),
        })
    }

    fn register(name: &'static str, labels: &[Label]) -> Self {
        PerLabel::new(|value: L| {
            let own = Label::new(L::KEY, value.as_str());
            let labels: Vec<Label> = labels.iter().cloned().chain([own]).collect();
            H::register(name, &labels)
        })
    }

    #[cfg(test)]
    fn touch(&self) {
        L::ALL.iter().for_each(|value| self.get(*value).touch());
    }
}

/// The type of a label that all metrics of a group have. The caller of the group's constructor gives the label's value.
pub(super) trait GroupLabel {
    /// Returns all values of the label. `None` if the set of values is open; then the caller of the constructor bounds their
    /// number.
    fn values() -> Option<Vec<LabelWord>> {
        None
    }

    /// Returns the text of the label's value.
    fn text(&self) -> String;

    /// Returns an example value for tests.
    #[cfg(test)]
    fn example() -> Self;
}

impl GroupLabel for &str {
    fn text(&self) -> String {
        (*self).to_owned()
    }

    #[cfg(test)]
    fn example() -> Self {
        "models"
    }
}

impl GroupLabel for usize {
    fn text(&self) -> String {
        self.to_string()
    }

    #[cfg(test)]
    fn example() -> Self {
        0
    }
}

impl<L: LabelValue> GroupLabel for L {
    fn values() -> Option<Vec<LabelWord>> {
        let word = |value: &L| LabelWord {
            word: value.as_str(),
            meaning: value.meaning(),
        };
        Some(L::ALL.iter().map(word).collect())
    }

    fn text(&self) -> String {
        self.as_str().to_owned()
    }

    #[cfg(test)]
    fn example() -> Self {
        L::ALL[0]
    }
}

/// A group of metrics as [`metric_group!`] declares it.
pub(super) trait MetricGroup {
    /// Returns the description of the group and of its metrics.
    fn describe() -> GroupDescription;

    /// Makes the handles with example labels, and records a value in each of their series.
    #[cfg(test)]
    fn touch_example();
}

/// Declares a group of metrics: a struct with one handle for each row, and a constructor for it.
///
/// A row is a help sentence as doc comment, then `field: Handle = "name", Unit;`. For a histogram, the row ends in
/// `"name", Unit, BUCKETS;`. The group's constructor takes the labels that all rows have, and makes all series of the
/// group, at zero. A handle `PerLabel<L, Counter>` adds the label of `L`. `keeping { field: Type = value }` adds fields
/// that are no metrics.
macro_rules! metric_group {
    (
        $(#[doc = $about:literal])+
        $group:ident::$constructor:ident($($label:ident: $type:ty),*) $(keeping {
            $($(#[doc = $state_help:literal])* $state:ident: $state_type:ty = $value:expr),+
        })? {
            $(
                $(#[doc = $help:literal])+
                $visibility:vis $field:ident: $handle:ty = $name:literal, $unit:ident $(, $buckets:ident)?;
            )+
        }
    ) => {
        $(#[doc = $about])+
        pub struct $group {
            $($($(#[doc = $state_help])* $state: $state_type,)+)?
            $(
                $(#[doc = $help])+
                $visibility $field: $handle,
            )+
        }

        impl $group {
            /// Makes the handles. Call this once and hold the handles, because the call looks each series up.
            ///
            /// The caller bounds the number of different label values.
            #[allow(
                clippy::new_without_default,
                reason = "it registers series with the recorder, which a default should not"
            )]
            pub fn $constructor($($label: $type),*) -> Self {
                use $crate::declare;
                let labels: &[metrics::Label] = &[$(
                    metrics::Label::new(stringify!($label), declare::GroupLabel::text(&$label))
                ),*];
                Self {
                    $($($state: $value,)+)?
                    $($field: <$handle as declare::Handle>::register($name, labels),)+
                }
            }
        }

        impl $crate::declare::MetricGroup for $group {
            fn describe() -> $crate::declare::GroupDescription {
                use $crate::declare;
                let labels: &[declare::LabelDescription] = &[$(declare::LabelDescription {
                    key: stringify!($label),
                    values: <$type as declare::GroupLabel>::values(),
                }),*];
                declare::GroupDescription {
                    about: concat!($($about),+).trim().trim_end_matches('.'),
                    metrics: vec![$(declare::MetricDescription {
                        name: $name,
                        kind: <$handle as declare::Handle>::KIND,
                        unit: metrics::Unit::$unit,
                        help: concat!($($help),+).trim(),
                        labels: labels.iter().cloned().chain(<$handle as declare::Handle>::label()).collect(),
                        buckets: metric_group!(@buckets $($buckets)?),
                    }),+],
                }
            }

            #[cfg(test)]
            fn touch_example() {
                use $crate::declare;
                let group = Self::$constructor($(<$type as declare::GroupLabel>::example()),*);
                $(declare::Handle::touch(&group.$field);)+
                // Some series end with their handles, so the handles must never be dropped.
                std::mem::forget(group);
            }
        }
    };
    (@buckets) => { &[] };
    (@buckets $buckets:ident) => { $buckets };
}
pub(super) use metric_group;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::groups::all;
    use super::*;

    const UNIT_ABBREVIATIONS: &[&str] = &[
        "s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d",
    ];
    const NOT_BASE_UNITS: &[&str] = &["minutes", "hours", "days", "weeks", "bits"];
    const UNIT_PREFIXES: &[&str] = &[
        "nano", "micro", "milli", "centi", "kilo", "kibi", "mega", "mibi", "mebi", "giga", "gibi", "tera",
    ];
    const TYPE_NAMES: &[&str] = &["counter", "gauge", "histogram", "summary"];

    fn is_lower_snake(text: &str) -> bool {
        text.starts_with(|first: char| first.is_ascii_lowercase())
            && text.split('_').all(|word| {
                !word.is_empty()
                    && word
                        .bytes()
                        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
            })
    }

    /// Checks a metric against the rules of `promtool check metrics`, and against kvatlas's own. Returns the rules that the
    /// metric breaks.
    fn lint(metric: &MetricDescription) -> Vec<String> {
        let name = metric.name;
        let words: Vec<&str> = name.split('_').collect();
        let mut problems = Vec::new();
        let mut require = |holds: bool, rule: &str| {
            if !holds {
                problems.push(format!("{name}: {rule}"));
            }
        };
        require(is_lower_snake(name), "lower snake case");
        require(name.starts_with("kvatlas_"), "prefix");
        require(
            !metric.help.trim().is_empty() && metric.help.ends_with('.'),
            "help text",
        );
        require(
            (metric.kind == MetricKind::Counter) == name.ends_with("_total"),
            "_total on counters only",
        );
        require(
            words.iter().filter(|word| **word == "total").count() <= 1,
            "_total once",
        );
        require(
            !["bucket", "count", "sum"]
                .iter()
                .any(|end| words.last() == Some(end)),
            "reserved suffix",
        );
        require(
            !words.iter().any(|word| TYPE_NAMES.contains(word)),
            "type in name",
        );
        require(
            !words.iter().any(|word| UNIT_ABBREVIATIONS.contains(word)),
            "unit abbreviation",
        );
        let scaled = |word: &str| {
            UNIT_PREFIXES.iter().any(|prefix| {
                word.strip_prefix(prefix)
                    .is_some_and(|rest| ["seconds", "bytes"].contains(&rest))
            })
        };
        require(
            !words
                .iter()
                .any(|word| NOT_BASE_UNITS.contains(word) || scaled(word)),
            "base units",
        );
        let before_total = name.strip_suffix("_total").unwrap_or(name);
        for (unit, suffix) in [(Unit::Seconds, "_seconds"), (Unit::Bytes, "_bytes")] {
            require(
                (metric.unit == unit) == before_total.ends_with(suffix),
                "unit last in the name",
            );
        }
        require(
            matches!(metric.unit, Unit::Seconds | Unit::Bytes | Unit::Count),
            "base unit declared",
        );
        let keys = metric.labels.iter().map(|label| label.key);
        require(
            keys.clone().all(|key| is_lower_snake(key) && key != "le"),
            "label keys",
        );
        require(
            keys.collect::<BTreeSet<_>>().len() == metric.labels.len(),
            "label twice",
        );
        require(
            (metric.kind == MetricKind::Histogram) != metric.buckets.is_empty(),
            "buckets",
        );
        require(
            metric.buckets.windows(2).all(|pair| pair[0] < pair[1]),
            "ascending buckets",
        );
        problems
    }

    #[test]
    fn names_follow_the_conventions() {
        let problems: Vec<String> = all().iter().flat_map(lint).collect();
        assert!(problems.is_empty(), "{problems:#?}");
    }

    #[test]
    fn names_are_unique() {
        let metrics = all();
        let names: BTreeSet<&str> = metrics.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), metrics.len());
        let helps: BTreeSet<&str> = metrics.iter().map(|metric| metric.help).collect();
        assert_eq!(helps.len(), metrics.len());
    }

    #[test]
    fn the_linter_finds_each_kind_of_mistake() {
        let find = |name| all().into_iter().find(|metric| metric.name == name).unwrap();
        let good = find("kvatlas_queries_total");
        assert!(lint(&good).is_empty());
        for name in [
            "queries_total",
            "kvatlas_Queries_total",
            "kvatlas_queries",
            "kvatlas_query_total_total",
            "kvatlas__queries_total",
            "kvatlas_query_ms_total",
            "kvatlas_query_milliseconds_total",
            "kvatlas_query_minutes_total",
            "kvatlas_query_counter_total",
            "kvatlas_query_seconds_total",
        ] {
            let bad = MetricDescription { name, ..good.clone() };
            assert!(!lint(&bad).is_empty(), "{name}");
        }
        let gauge = find("kvatlas_workers");
        for name in [
            "kvatlas_workers_total",
            "kvatlas_workers_count",
            "kvatlas_workers_bucket",
        ] {
            let bad = MetricDescription {
                name,
                ..gauge.clone()
            };
            assert!(!lint(&bad).is_empty(), "{name}");
        }
        let label = |key| LabelDescription { key, values: None };
        let histogram = find("kvatlas_batch_blocks");
        for bad in [
            MetricDescription {
                help: "",
                ..good.clone()
            },
            MetricDescription {
                labels: vec![label("le")],
                ..good.clone()
            },
            MetricDescription {
                labels: vec![label("kind"), label("kind")],
                ..good.clone()
            },
            MetricDescription {
                buckets: &[1.0],
                ..good
            },
            MetricDescription {
                buckets: &[2.0, 1.0],
                ..histogram
            },
        ] {
            assert!(!lint(&bad).is_empty(), "{bad:?}");
        }
    }
}
