//! Every metric of the program: name, type, unit, help text and label keys, in one place.
//!
//! Names follow the conventions that `promtool check metrics` enforces: lower snake case with the prefix `kvatlas_`,
//! base units spelled out (`_seconds`, `_bytes`), `_total` on counters and on nothing else. The unit tests of this
//! module check the same rules. A name, once released, is relied on by dashboards: add, don't rename.

use std::marker::PhantomData;

use metrics::{Counter, Gauge, Histogram, Label, Unit};

/// Label key: the namespace that the value belongs to.
pub const NAMESPACE: &str = "namespace";
/// Label key: why something was dropped, rejected or degraded.
pub const REASON: &str = "reason";
/// Label key: a [`HolderState`](super::labels::HolderState).
pub const STATE: &str = "state";
/// Label key: a [`QueryKind`](super::labels::QueryKind).
pub const KIND: &str = "kind";
/// Label key: an [`ErrorCode`](crate::wire::ErrorCode).
pub const CODE: &str = "code";
/// Label key: a [`Connection`](super::labels::Connection).
pub const CONNECTION: &str = "connection";
/// Label key: a [`ConnectionEvent`](super::labels::ConnectionEvent).
pub const EVENT: &str = "event";
/// Label key: the number of a lane.
pub const LANE: &str = "lane";
/// Label key: an [`GatherOutcome`](super::labels::GatherOutcome).
pub const OUTCOME: &str = "outcome";
/// Label key: the index of a shard.
pub const SHARD: &str = "shard";
/// Label key: the version of the program.
pub const VERSION: &str = "version";

/// Upper bounds for what takes microseconds: queries and the application of a batch, in seconds.
const LATENCY_BUCKETS_SECONDS: &[f64] = &[
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1,
    5e-1, 1.0,
];
/// Upper bounds for the writing of a snapshot, in seconds.
const SNAPSHOT_BUCKETS_SECONDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
];
/// Upper bounds for the number of blocks that one batch names.
const BATCH_BLOCK_BUCKETS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];

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

/// What is declared about one metric.
#[derive(Debug, Clone, Copy)]
pub struct MetricDescription {
    /// The name, as Prometheus sees it.
    pub name: &'static str,
    /// The type.
    pub kind: MetricKind,
    /// The unit of the value.
    pub unit: Unit,
    /// One sentence that tells what is counted or measured.
    pub help: &'static str,
    /// The keys of the labels, in the order in which [`Metric::with`] takes their values.
    pub labels: &'static [&'static str],
    /// The upper bounds of a histogram's buckets, ascending; empty for other types.
    pub buckets: &'static [f64],
}

/// A handle that a recorder gives out: [`Counter`], [`Gauge`] or [`Histogram`].
pub trait Instrument: Sized {
    /// The type of metric that this handle feeds.
    const KIND: MetricKind;

    /// Asks the current recorder for the handle of one series, which it creates if it doesn't exist.
    fn register(name: &'static str, labels: Vec<Label>) -> Self;
}

impl Instrument for Counter {
    const KIND: MetricKind = MetricKind::Counter;

    fn register(name: &'static str, labels: Vec<Label>) -> Self {
        metrics::counter!(name, labels)
    }
}

impl Instrument for Gauge {
    const KIND: MetricKind = MetricKind::Gauge;

    fn register(name: &'static str, labels: Vec<Label>) -> Self {
        metrics::gauge!(name, labels)
    }
}

impl Instrument for Histogram {
    const KIND: MetricKind = MetricKind::Histogram;

    fn register(name: &'static str, labels: Vec<Label>) -> Self {
        metrics::histogram!(name, labels)
    }
}

/// A declared metric, typed by the handle that it gives and the number of its labels.
#[derive(Debug)]
pub struct Metric<I, const LABELS: usize> {
    description: MetricDescription,
    instrument: PhantomData<fn() -> I>,
}

impl<I: Instrument, const LABELS: usize> Metric<I, LABELS> {
    /// The handle of the series with these label values, given in the order of the declared keys.
    ///
    /// This is a lookup by name and labels: hold the handle, don't call this for each message.
    pub fn with(&self, values: [&str; LABELS]) -> I {
        let keys = self.description.labels.iter();
        let labels = keys
            .zip(values)
            .map(|(&key, value)| Label::new(key, value.to_owned()))
            .collect();
        I::register(self.description.name, labels)
    }

    /// What is declared about this metric.
    pub fn description(&self) -> &MetricDescription {
        &self.description
    }
}

/// Declares metrics as constants, and lists them all, so that none can be declared without being described.
macro_rules! declare_metrics {
    ($($instrument:ident $identifier:ident = $name:literal [$($label:ident),*], $unit:ident $(, $buckets:ident)?;
        $help:literal)+) => {
        $(
            #[doc = $help]
            pub const $identifier: Metric<$instrument, { count_labels(&[$($label),*]) }> = Metric {
                description: MetricDescription {
                    name: $name,
                    kind: <$instrument as Instrument>::KIND,
                    unit: Unit::$unit,
                    help: $help,
                    labels: &[$($label),*],
                    buckets: declare_metrics!(@buckets $($buckets)?),
                },
                instrument: PhantomData,
            };
        )+

        /// Every declared metric.
        pub const ALL: &[MetricDescription] = &[$($identifier.description,)+];
    };
    (@buckets) => { &[] };
    (@buckets $buckets:ident) => { $buckets };
}

/// The number of labels, in a form that also gives an empty list a type.
const fn count_labels(labels: &[&str]) -> usize {
    labels.len()
}

declare_metrics! {
    Counter EVENT_MESSAGES_RECEIVED = "kvatlas_event_messages_received_total" [NAMESPACE], Count;
        "Event messages received."
    Counter EVENT_BYTES_RECEIVED = "kvatlas_event_received_bytes_total" [NAMESPACE], Bytes;
        "Payload bytes of the event messages received."
    Counter BATCHES_APPLIED = "kvatlas_batches_applied_total" [NAMESPACE], Count;
        "Event batches applied to the index."
    Counter BLOCKS_STORED = "kvatlas_blocks_stored_total" [NAMESPACE], Count;
        "Blocks that applied events reported as stored."
    Counter BLOCKS_REMOVED = "kvatlas_blocks_removed_total" [NAMESPACE], Count;
        "Blocks that applied events reported as removed, without those that a clear dropped."
    Counter CLEARS = "kvatlas_holder_clears_total" [NAMESPACE], Count;
        "Times that all blocks of a holder were dropped because its publisher said so."
    Counter BATCHES_DROPPED = "kvatlas_batches_dropped_total" [NAMESPACE, REASON], Count;
        "Event batches dropped whole, by reason."
    Counter BLOCKS_REJECTED = "kvatlas_blocks_rejected_total" [NAMESPACE, REASON], Count;
        "Blocks of applied batches that were not taken as sent, by reason."
    Counter SEQUENCE_GAPS = "kvatlas_sequence_gaps_total" [NAMESPACE], Count;
        "Times that a batch arrived whose predecessors did not."
    Counter EPOCH_CHANGES = "kvatlas_epoch_changes_total" [NAMESPACE], Count;
        "Times that a publisher was replaced by a new incarnation."
    Counter HOLDERS_DEGRADED = "kvatlas_holders_degraded_total" [NAMESPACE, REASON], Count;
        "Transitions of a holder from exact to degraded, by reason."
    Counter HOLDERS_REMOVED = "kvatlas_holders_removed_total" [NAMESPACE], Count;
        "Holders removed because nothing was heard of them for too long."
    Counter RESYNCS_STARTED = "kvatlas_resyncs_started_total" [NAMESPACE], Count;
        "Times that a publisher was asked for what is missing."
    Counter RESYNCS_SUCCEEDED = "kvatlas_resyncs_succeeded_total" [NAMESPACE], Count;
        "Resyncs that made a holder exact again."
    Counter RESYNCS_FAILED = "kvatlas_resyncs_failed_total" [NAMESPACE, REASON], Count;
        "Resyncs that did not make a holder exact, by reason."
    Counter QUERIES = "kvatlas_queries_total" [NAMESPACE, KIND], Count;
        "Queries answered without an error, by what they gave to look up."
    Counter QUERY_ERRORS = "kvatlas_query_errors_total" [CODE], Count;
        "Queries answered with an error, by its code."
    Counter QUERY_REPLIES_DROPPED = "kvatlas_query_replies_dropped_total" [REASON], Count;
        "Replies to queries that were not sent, by reason."
    Counter OTHER_SHARD_MESSAGES = "kvatlas_other_shard_messages_total" [], Count;
        "Event messages passed over because their worker belongs to another shard."
    Counter GATHERS = "kvatlas_gathers_total" [OUTCOME], Count;
        "Requests for which a gateway asked the shards, by how that ended."
    Counter SHARD_REPLIES_MISSING = "kvatlas_shard_replies_missing_total" [SHARD], Count;
        "Replies of a shard that a gateway answered without, by the shard's index."
    Counter SHARD_REPLIES_LATE = "kvatlas_shard_replies_late_total" [], Count;
        "Replies of shards that reached a gateway after it had answered."
    Counter CONNECTION_EVENTS = "kvatlas_connection_events_total" [CONNECTION, EVENT], Count;
        "What happened to the connections to the message broker."
    Counter SNAPSHOTS_WRITTEN = "kvatlas_snapshots_written_total" [], Count;
        "Snapshots written completely."
    Counter SNAPSHOTS_FAILED = "kvatlas_snapshots_failed_total" [REASON], Count;
        "Snapshots that could not be written, by reason."
    Counter SNAPSHOTS_REJECTED = "kvatlas_snapshots_rejected_total" [REASON], Count;
        "Snapshots that were found at start but not loaded, by reason."
    Counter SNAPSHOT_PRUNES_FAILED = "kvatlas_snapshot_prunes_failed_total" [], Count;
        "Times that outdated snapshots could not be removed."
    Counter SNAPSHOTS_UPLOADED = "kvatlas_snapshots_uploaded_total" [], Count;
        "Snapshots sent to the Object Store completely."
    Counter SNAPSHOT_UPLOADS_FAILED = "kvatlas_snapshot_uploads_failed_total" [], Count;
        "Snapshots that could not be sent to the Object Store."
    Counter SNAPSHOTS_FETCHED = "kvatlas_snapshots_fetched_total" [], Count;
        "Snapshots fetched from the Object Store at start."
    Counter SNAPSHOT_FETCHES_FAILED = "kvatlas_snapshot_fetches_failed_total" [], Count;
        "Snapshots that could not be fetched from the Object Store at start."
    Counter STREAM_MESSAGES_LOST = "kvatlas_stream_messages_lost_total" [], Count;
        "Messages that were gone from the events stream before they were read."
    Counter STREAM_CONSUMER_RESETS = "kvatlas_stream_consumer_resets_total" [REASON], Count;
        "Times that the consumer of the events stream was made anew, by reason."
    Counter ADMIN_CONNECTIONS_REFUSED = "kvatlas_admin_connections_refused_total" [], Count;
        "Connections to the admin listener that were closed because too many were open."
    Gauge HOLDERS = "kvatlas_holders" [NAMESPACE, STATE], Count;
        "Holders known, by how exactly the index knows their blocks."
    Gauge WORKERS = "kvatlas_workers" [NAMESPACE], Count;
        "Workers known."
    Gauge HELD_BLOCKS = "kvatlas_held_blocks" [NAMESPACE], Count;
        "Pairs of a holder and a block that it has."
    Gauge DISTINCT_BLOCKS = "kvatlas_distinct_blocks" [NAMESPACE], Count;
        "Different blocks that at least one holder has."
    Gauge EVICTED_BLOCKS = "kvatlas_evicted_blocks" [NAMESPACE], Count;
        "Different blocks that the index has forgotten so far because there were too many."
    Gauge INDEX_BYTES = "kvatlas_index_bytes" [NAMESPACE], Bytes;
        "Memory that the different blocks take in the index."
    Gauge PARKED_EVENTS = "kvatlas_parked_events" [NAMESPACE], Count;
        "Events that wait for their parent block to be stored."
    Gauge CHAIN_CONFLICTS = "kvatlas_chain_conflicts" [NAMESPACE], Count;
        "Blocks whose hashes disagree with the hash contract of the namespace."
    Gauge EVENT_LAG = "kvatlas_event_lag_seconds" [NAMESPACE], Seconds;
        "Age of a batch when it was applied, by the publisher's clock: the largest of all holders."
    Gauge STALE_HOLDERS = "kvatlas_stale_holders" [NAMESPACE], Count;
        "Holders of which nothing has been heard for longer than they should be silent."
    Gauge RESYNCS_RUNNING = "kvatlas_resyncs_running" [], Count;
        "Publishers that are being asked for what is missing."
    Gauge RESYNCS_WAITING = "kvatlas_resyncs_waiting" [], Count;
        "Holders that wait for their turn to be asked for what is missing."
    Gauge LANE_QUEUE_BYTES = "kvatlas_lane_queue_bytes" [LANE], Bytes;
        "Payload bytes that wait for a lane."
    Gauge LANE_QUEUE_MESSAGES = "kvatlas_lane_queue_messages" [LANE], Count;
        "Messages that wait for a lane."
    Gauge LAST_SNAPSHOT_TIMESTAMP = "kvatlas_last_snapshot_timestamp_seconds" [], Seconds;
        "Time of the last snapshot that was written completely, in seconds since the Unix epoch."
    Gauge LAST_SNAPSHOT_BYTES = "kvatlas_last_snapshot_bytes" [], Bytes;
        "Size of the last snapshot that was written completely."
    Gauge SNAPSHOT_AGE = "kvatlas_snapshot_age_seconds" [], Seconds;
        "Time since the newest snapshot was begun; 0 while there is none."
    Gauge RESTORED_HOLDERS = "kvatlas_restored_holders" [], Count;
        "Holders in the snapshot that the process started from."
    Gauge RESTORED_BLOCKS = "kvatlas_restored_blocks" [], Count;
        "Blocks in the snapshot that the process started from, summed over its holders."
    Gauge RESTORE_DURATION = "kvatlas_restore_duration_seconds" [], Seconds;
        "Time in which the process loaded the snapshot that it started from."
    Gauge STREAM_SEQUENCE = "kvatlas_stream_sequence" [], Count;
        "Sequence number of the last message of the events stream that was read; 0 without JetStream."
    Gauge STREAM_LAG = "kvatlas_stream_lag_messages" [], Count;
        "Messages of the events stream that are still to be read; 0 without JetStream."
    Gauge BUILD_INFO = "kvatlas_build_info" [VERSION], Count;
        "Always 1; the label tells the version of the program."
    Gauge PROCESS_START_TIME = "kvatlas_process_start_time_seconds" [], Seconds;
        "Start of the process, in seconds since the Unix epoch."
    Gauge READY = "kvatlas_ready" [], Count;
        "1 while the readiness probe succeeds, else 0."
    Histogram QUERY_DURATION = "kvatlas_query_duration_seconds" [NAMESPACE], Seconds, LATENCY_BUCKETS_SECONDS;
        "Time from taking a query off the connection until its reply is handed over."
    Histogram BATCH_APPLY_DURATION = "kvatlas_batch_apply_duration_seconds" [NAMESPACE], Seconds,
        LATENCY_BUCKETS_SECONDS;
        "Time in which a lane applied one batch."
    Histogram BATCH_BLOCKS = "kvatlas_batch_blocks" [NAMESPACE], Count, BATCH_BLOCK_BUCKETS;
        "Blocks that one batch stored or removed."
    Histogram RESYNC_DURATION = "kvatlas_resync_duration_seconds" [NAMESPACE], Seconds, SNAPSHOT_BUCKETS_SECONDS;
        "Time from asking a publisher until its answer was applied."
    Histogram SNAPSHOT_WRITE_DURATION = "kvatlas_snapshot_write_duration_seconds" [], Seconds,
        SNAPSHOT_BUCKETS_SECONDS;
        "Time in which a snapshot was written, from the first byte to the durable file."
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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

    /// The rules of `promtool check metrics`, and ours. Returns what is wrong.
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
        require(
            metric
                .labels
                .iter()
                .all(|key| is_lower_snake(key) && *key != "le"),
            "label keys",
        );
        require(
            metric.labels.iter().collect::<BTreeSet<_>>().len() == metric.labels.len(),
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
        let problems: Vec<String> = ALL.iter().flat_map(lint).collect();
        assert!(problems.is_empty(), "{problems:#?}");
    }

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len());
        let helps: BTreeSet<&str> = ALL.iter().map(|metric| metric.help).collect();
        assert_eq!(helps.len(), ALL.len());
    }

    #[test]
    fn the_linter_finds_each_kind_of_mistake() {
        let good = *QUERIES.description();
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
            assert!(!lint(&MetricDescription { name, ..good }).is_empty(), "{name}");
        }
        let gauge = *WORKERS.description();
        for name in [
            "kvatlas_workers_total",
            "kvatlas_workers_count",
            "kvatlas_workers_bucket",
        ] {
            assert!(!lint(&MetricDescription { name, ..gauge }).is_empty(), "{name}");
        }
        assert!(!lint(&MetricDescription { help: "", ..good }).is_empty());
        assert!(
            !lint(&MetricDescription {
                labels: &["le"],
                ..good
            })
            .is_empty()
        );
        assert!(
            !lint(&MetricDescription {
                labels: &[KIND, KIND],
                ..good
            })
            .is_empty()
        );
        assert!(
            !lint(&MetricDescription {
                buckets: &[1.0],
                ..good
            })
            .is_empty()
        );
        let histogram = *BATCH_BLOCKS.description();
        assert!(
            !lint(&MetricDescription {
                buckets: &[2.0, 1.0],
                ..histogram
            })
            .is_empty()
        );
    }
}
