//! The recorder behind all metrics, and their rendering for Prometheus.

use std::time::SystemTime;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use parking_lot::Mutex;
use thiserror::Error;

use super::declare::{MetricDescription, MetricKind};
use super::{groups, process_metrics};

/// Why metrics could not be set up.
#[derive(Debug, Error)]
pub enum MetricsError {
    /// The declared buckets of a histogram are not usable.
    #[error("the buckets of {name} are not usable: {source}; correct its declaration")]
    Buckets {
        /// The name of the histogram.
        name: &'static str,
        /// The mistake.
        source: BuildError,
    },
    /// The recorder could not become that of the process.
    #[error("metrics can't be recorded: {0}; install them once, at start")]
    Install(#[source] BuildError),
}

/// Renders the metrics of the process.
#[derive(Debug, Clone)]
pub struct MetricsHandle {
    prometheus: PrometheusHandle,
}

impl MetricsHandle {
    /// Renders what no process has recorded.
    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        let recorder = PrometheusBuilder::new().build_recorder();
        Self {
            prometheus: recorder.handle(),
        }
    }

    /// All metrics in Prometheus' text format, version 0.0.4.
    pub fn render(&self) -> String {
        self.prometheus.render()
    }

    /// Moves recorded samples of histograms into their buckets.
    ///
    /// Samples wait in memory, 16 bytes each, until this or [`MetricsHandle::render`] is called. Call it once a
    /// second. Then this memory stays bounded by a second's samples, even if Prometheus does not scrape.
    pub fn run_upkeep(&self) {
        self.prometheus.run_upkeep();
    }
}

/// The handle of the process's recorder, which the first call installs. Daemons in one process share the recorder.
///
/// # Errors
///
/// As [`install`]; a recorder of another library counts as a second call.
pub fn install_shared() -> Result<MetricsHandle, MetricsError> {
    static SHARED: Mutex<Option<MetricsHandle>> = Mutex::new(None);
    let mut shared = SHARED.lock();
    if let Some(handle) = &*shared {
        return Ok(handle.clone());
    }
    let handle = install()?;
    *shared = Some(handle.clone());
    Ok(handle)
}

/// Installs the recorder of the process and describes every declared metric.
///
/// Call it once, before any handle is made: handles made earlier record nothing. The call records the build information,
/// and its own time as the start time of the process.
///
/// # Errors
///
/// [`MetricsError::Install`] on a second call. [`MetricsError::Buckets`] can't happen with the buckets that are
/// declared; a unit test installs them.
pub fn install() -> Result<MetricsHandle, MetricsError> {
    let prometheus = builder()?.install_recorder().map_err(MetricsError::Install)?;
    describe_all();
    process_metrics::record_start(SystemTime::now());
    Ok(MetricsHandle { prometheus })
}

/// A builder that knows the buckets of every histogram.
fn builder() -> Result<PrometheusBuilder, MetricsError> {
    let mut builder = PrometheusBuilder::new();
    for metric in groups::all() {
        if metric.kind != MetricKind::Histogram {
            continue;
        }
        builder = builder
            .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)
            .map_err(|source| MetricsError::Buckets {
                name: metric.name,
                source,
            })?;
    }
    Ok(builder)
}

/// Gives the current recorder the help text and unit of every metric.
fn describe_all() {
    for metric in groups::all() {
        let MetricDescription { name, unit, help, .. } = metric;
        match metric.kind {
            MetricKind::Counter => metrics::describe_counter!(name, unit, help),
            MetricKind::Gauge => metrics::describe_gauge!(name, unit, help),
            MetricKind::Histogram => metrics::describe_histogram!(name, unit, help),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::super::labels::DropReason;
    use super::super::*;
    use super::*;

    /// Runs `record` with a recorder of its own and renders what it recorded.
    pub(crate) fn rendered(record: impl FnOnce()) -> String {
        let recorder = builder().expect("declared buckets are usable").build_recorder();
        ::metrics::with_local_recorder(&recorder, || {
            describe_all();
            record();
        });
        recorder.handle().render()
    }

    #[test]
    fn every_declared_metric_is_rendered_with_help_and_type() {
        let text = rendered(groups::touch_every_series);
        let metrics = groups::all();
        for MetricDescription { name, kind, help, .. } in &metrics {
            assert!(
                text.contains(&format!("# HELP {name} {help}\n")),
                "HELP of {name}\n{text}"
            );
            let kind = kind.as_str();
            assert!(
                text.contains(&format!("# TYPE {name} {kind}\n")),
                "TYPE of {name}\n{text}"
            );
        }
        let types = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
        assert_eq!(
            types,
            metrics.len(),
            "a metric is recorded that is not declared\n{text}"
        );
    }

    #[test]
    fn every_series_has_the_declared_labels() {
        let text = rendered(groups::touch_every_series);
        for metric in groups::all() {
            let suffix = match metric.kind {
                MetricKind::Histogram => "_count",
                MetricKind::Counter | MetricKind::Gauge => "",
            };
            let name = format!("{}{suffix}", metric.name);
            let is_series = |line: &&str| {
                line.strip_prefix(&name)
                    .is_some_and(|rest| rest.starts_with(['{', ' ']))
            };
            let series = text.lines().find(is_series).unwrap();
            for label in &metric.labels {
                assert!(series.contains(&format!("{}=\"", label.key)), "{series}");
            }
        }
    }

    #[test]
    fn series_exist_at_zero_before_the_first_drop() {
        let text = rendered(|| drop(EventMetrics::for_namespace("models")));
        for reason in <DropReason as labels::LabelValue>::ALL {
            let line =
                format!("kvatlas_batches_dropped_total{{namespace=\"models\",reason=\"{reason}\"}} 0\n");
            assert!(text.contains(&line), "{line}\n{text}");
        }
    }

    #[test]
    fn histograms_have_the_declared_buckets() {
        let text = rendered(|| {
            let metrics = QueryMetrics::for_namespace("models");
            metrics.answered(labels::QueryKind::Tokens, Duration::from_micros(3));
        });
        for line in [
            "kvatlas_query_duration_seconds_bucket{namespace=\"models\",le=\"0.000002\"} 0\n",
            "kvatlas_query_duration_seconds_bucket{namespace=\"models\",le=\"0.000005\"} 1\n",
            "kvatlas_query_duration_seconds_bucket{namespace=\"models\",le=\"1\"} 1\n",
            "kvatlas_query_duration_seconds_count{namespace=\"models\"} 1\n",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_second_installation_is_a_typed_error() {
        // The first call may fail as well, if another test installed a recorder; the second has to.
        let first = install();
        assert!(matches!(install(), Err(MetricsError::Install(_))));
        if let Ok(handle) = first {
            handle.run_upkeep();
            assert!(handle.render().contains("kvatlas_build_info"));
        }
    }
}
