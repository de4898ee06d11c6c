//! Sets up the recorder of the metrics.

use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use thiserror::Error;

use super::process_metrics;
use super::series::AllSeries;

/// Error of setting up the metrics.
#[derive(Debug, Error)]
pub enum MetricsError {
    /// The process already has a global recorder, so the recorder of kvatlas could not be installed.
    #[error("metrics can't be recorded: the process has a recorder already; install it once, at start")]
    Install,
}

/// Renders the metrics of the process.
#[derive(Debug, Clone)]
pub struct MetricsHandle(Arc<AllSeries>);

impl MetricsHandle {
    /// Returns a handle of a new recorder, in which nothing is recorded.
    pub fn empty() -> Self {
        Self(Arc::new(AllSeries::new()))
    }

    /// Returns all metrics in Prometheus' text format, version 0.0.4.
    pub fn render(&self) -> String {
        self.0.render()
    }
}

/// Returns the handle of the process's recorder. The first call installs the recorder; daemons in one process share it.
///
/// # Errors
///
/// [`MetricsError::Install`] if another library has installed a recorder.
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

/// Installs the recorder of the process, and returns the handle that renders its metrics.
///
/// Call it once, before any metric handle is made: handles made earlier record nothing. The call records the build
/// information, and its own time as the start time of the process.
///
/// # Errors
///
/// [`MetricsError::Install`] on a second call.
pub fn install() -> Result<MetricsHandle, MetricsError> {
    let handle = MetricsHandle::empty();
    metrics::set_global_recorder(Arc::clone(&handle.0)).map_err(|_| MetricsError::Install)?;
    process_metrics::record_start(SystemTime::now());
    Ok(handle)
}

/// Runs `record` with a new recorder, and returns the recorded metrics as text.
pub fn rendered(record: impl FnOnce()) -> String {
    let handle = MetricsHandle::empty();
    ::metrics::with_local_recorder(&handle.0, record);
    handle.render()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::declare::{MetricDescription, MetricKind};
    use super::super::labels::DropReason;
    use super::super::*;
    use super::*;

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
        assert!(matches!(install(), Err(MetricsError::Install)));
        if let Ok(handle) = first {
            assert!(handle.render().contains("kvatlas_build_info"));
        }
    }
}
