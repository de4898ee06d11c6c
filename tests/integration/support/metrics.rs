//! Metrics of a daemon, as a scraper reads them.

use std::collections::HashMap;

use kvatlas_telemetry::{MetricDescription, MetricKind, all};

use super::process::Process;
use super::{eventually, http_get};

/// Returns all metrics of a daemon, which must have a process of its own. Daemons in the test's process share their
/// metrics.
pub fn page(daemon: &Process) -> String {
    http_get(daemon.admin_address(), "/metrics").1
}

/// Returns the value of a series: `name`, or `name{label="value"}` with all its labels. Fails the test if there is no
/// such series.
pub fn metric(daemon: &Process, series: &str) -> u64 {
    let text = page(daemon);
    find(&text, series).unwrap_or_else(|| panic!("no {series}\n{text}"))
}

/// Returns the value of a series as [`metric`] does, but 0 if there is no such series yet.
pub fn counter(daemon: &Process, series: &str) -> u64 {
    find(&page(daemon), series).unwrap_or_default()
}

fn find(text: &str, series: &str) -> Option<u64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.map(|value| value.parse().unwrap())
}

/// Returns the sum of all series of a metric whose labels contain `label`.
pub fn total(daemon: &Process, name: &str, label: &str) -> f64 {
    let text = page(daemon);
    let is_wanted = |line: &&str| {
        let labels = line.strip_prefix(name);
        labels.is_some_and(|labels| labels.starts_with(['{', ' ']) && labels.contains(label))
    };
    let values = text
        .lines()
        .filter(is_wanted)
        .map(|line| line.rsplit(' ').next().unwrap());
    values.map(|value| value.parse::<f64>().unwrap()).sum()
}

/// Waits until [`total`] is above 0.
pub async fn counted(daemon: &Process, name: &str, label: &str) {
    eventually(&format!("{name} {label} is above 0"), async || {
        (total(daemon, name, label) > 0.0).then_some(())
    })
    .await;
}

/// Fails the test unless all metrics on the page match their declarations: the type, the help text, the label keys, and
/// the values of labels that allow only certain values.
pub fn require_declared(page: &str) {
    let declared: HashMap<&str, MetricDescription> =
        all().into_iter().map(|metric| (metric.name, metric)).collect();
    let mut current = None;
    for line in page.lines().filter(|line| !line.is_empty()) {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap();
            let metric = declared
                .get(name)
                .unwrap_or_else(|| panic!("not declared: {line}"));
            assert_eq!(help, metric.help, "{name}");
            current = Some(metric);
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let metric = current.unwrap_or_else(|| panic!("no help before: {line}"));
            assert_eq!(kind, format!("{} {}", metric.name, metric.kind.as_str()));
        } else {
            require_declared_labels(line, current.unwrap());
        }
    }
}

fn require_declared_labels(line: &str, metric: &MetricDescription) {
    let (series, _) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    assert!(name.starts_with(metric.name), "{line}");
    let labels = labels
        .trim_end_matches('}')
        .split(',')
        .filter(|label| !label.is_empty());
    let mut labels: Vec<_> = labels.map(|label| label.split_once('=').unwrap()).collect();
    labels.retain(|(key, _)| !(metric.kind == MetricKind::Histogram && *key == "le"));
    let keys: Vec<_> = labels.iter().map(|(key, _)| *key).collect();
    let declared: Vec<_> = metric.labels.iter().map(|label| label.key).collect();
    assert_eq!(keys, declared, "{line}");
    for ((_, value), label) in labels.iter().zip(&metric.labels) {
        let value = value.trim_matches('"');
        if let Some(values) = &label.values {
            assert!(values.iter().any(|known| known.word == value), "{line}");
        }
    }
}
