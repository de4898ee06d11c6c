//! The reference of the metrics: the page `deploy/metrics.md`.

use std::collections::BTreeMap;

use kvatlas_lab::pages::require_page;

use super::declare::{LabelWord, MetricDescription};
use super::groups::groups;

const INTRODUCTION: &str = "# Metrics

This page is made from the declarations in `src/telemetry`. The admin listener serves the metrics at `/metrics`, in
Prometheus' text format. A group's series, histograms too, exist from its first use, at zero.

The label `namespace` is `(none)` for whatever cannot be attributed to a known namespace, and `(others)` for all namespaces beyond 4,096 together.
";

/// Returns the reference of all metrics in Markdown: a table for each group, and the values of the labels that have a closed set.
fn metrics_markdown() -> String {
    let mut page = String::from(INTRODUCTION);
    for group in groups() {
        page.push_str(&format!("\n## {}\n\n", group.about));
        page.push_str("| metric | type | labels | meaning |\n|---|---|---|---|\n");
        page.extend(group.metrics.iter().map(row));
        let values: Vec<String> = group.metrics.iter().flat_map(label_values).collect();
        if !values.is_empty() {
            page.push_str(&format!("\n{}", values.concat()));
        }
    }
    page.push_str(&meanings());
    page
}

/// Returns the table of the meanings of all values of labels. Values of one word and meaning share a row.
fn meanings() -> String {
    let metrics = groups().into_iter().flat_map(|group| group.metrics);
    let labels = metrics.flat_map(|metric| metric.labels.into_iter().map(move |label| (metric.name, label)));
    let mut rows: BTreeMap<(&str, String), Vec<String>> = BTreeMap::new();
    for (metric, label) in labels {
        for value in label.values.into_iter().flatten() {
            let meaning = value.meaning.replace("[`", "`").replace("`]", "`");
            let places = rows.entry((value.word, meaning.trim().to_owned())).or_default();
            places.push(format!("`{}` of `{metric}`", label.key));
        }
    }
    let row = |((word, meaning), places): ((&str, String), Vec<String>)| {
        format!("| `{word}` | {meaning} | {} |\n", places.join(", "))
    };
    let rows: String = rows.into_iter().map(row).collect();
    format!("\n## Values of labels\n\n| value | meaning | label |\n|---|---|---|\n{rows}")
}

fn row(metric: &MetricDescription) -> String {
    let labels: Vec<String> = metric
        .labels
        .iter()
        .map(|label| format!("`{}`", label.key))
        .collect();
    format!(
        "| `{}` | {} | {} | {} |\n",
        metric.name,
        metric.kind.as_str(),
        labels.join(", "),
        metric.help
    )
}

/// Returns a line for each label of the metric that has a closed set of values.
fn label_values(metric: &MetricDescription) -> Vec<String> {
    let line = |key: &str, values: &[LabelWord]| {
        let values: Vec<String> = values.iter().map(|value| format!("`{}`", value.word)).collect();
        format!("- `{key}` of `{}`: {}\n", metric.name, values.join(", "))
    };
    let labels = metric.labels.iter();
    labels
        .filter_map(|label| Some(line(label.key, label.values.as_deref()?)))
        .collect()
}

#[test]
fn the_page_of_the_metrics_is_true() {
    require_page("metrics.md", &metrics_markdown());
}
