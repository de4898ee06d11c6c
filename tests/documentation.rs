//! The documentation says what the code says.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "what a test calls may fail like the test itself"
)]

use std::collections::BTreeSet;

use kvatlas::admin::Latch;
use kvatlas::config::settings_markdown;
use kvatlas::hash::{BlockHash, SequenceHash};
use kvatlas::index::RejectReason;
use kvatlas::telemetry::labels::{
    ConsumerReset, DropReason, GatherOutcome, LabelValue, ReplyDropReason, ResyncFailure, SnapshotFailure,
    SnapshotRejection,
};
use kvatlas::telemetry::names::{self, MetricDescription, MetricKind};
use kvatlas::tracking::DegradedReason;
use kvatlas::wire::{
    BlockContent, BlockNames, ErrorCode, Event, EventBatch, QueryKey, QueryRequest, Tier, WireLimits,
};

const OPERATION: &str = include_str!("../deploy/README.md");

/// A row of the table of metrics.
fn metric_row(metric: &MetricDescription) -> String {
    let kind = match metric.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram => "histogram",
    };
    let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
    format!(
        "| `{}` | {kind} | {} | {} |\n",
        metric.name,
        labels.join(", "),
        metric.help
    )
}

fn metrics_markdown() -> String {
    let rows: String = names::ALL.iter().map(metric_row).collect();
    format!("| metric | type | labels | what it says |\n|---|---|---|---|\n{rows}")
}

/// Requires that the page holds `text`; where it does not, `text` is what to put there.
fn require(text: &str) {
    assert!(OPERATION.contains(text), "deploy/README.md lacks:\n{text}");
}

/// The bytes of the code blocks marked as hexadecimal.
fn examples() -> Vec<Vec<u8>> {
    let blocks = OPERATION.split("```hex\n").skip(1);
    let digits = blocks.map(|rest| rest.split("```").next().unwrap().replace(char::is_whitespace, ""));
    digits
        .map(|digits| {
            let pairs = (0..digits.len()).step_by(2);
            pairs
                .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
                .collect()
        })
        .collect()
}

#[test]
fn every_setting_is_listed() {
    require(&settings_markdown());
}

#[test]
fn every_metric_is_listed() {
    require(&metrics_markdown());
}

#[test]
fn every_word_of_a_label_or_reply_is_listed() {
    fn words<L: LabelValue>() -> String {
        let words: Vec<String> = L::ALL
            .iter()
            .map(|value| format!("`{}`", value.as_str()))
            .collect();
        words.join(", ")
    }
    require(&format!(
        "| `kvatlas_batches_dropped_total` | {} |",
        words::<DropReason>()
    ));
    require(&format!(
        "| `kvatlas_blocks_rejected_total` | {} |",
        words::<RejectReason>()
    ));
    require(&format!(
        "| `kvatlas_resyncs_failed_total` | {} |",
        words::<ResyncFailure>()
    ));
    require(&format!(
        "| `kvatlas_query_replies_dropped_total` | {} |",
        words::<ReplyDropReason>()
    ));
    require(&format!(
        "`kvatlas_gathers_total`: {}.\n",
        words::<GatherOutcome>()
    ));
    require(&format!(
        "| `kvatlas_snapshots_failed_total` | {} |",
        words::<SnapshotFailure>()
    ));
    require(&format!(
        "| `kvatlas_snapshots_rejected_total` | {} |",
        words::<SnapshotRejection>()
    ));
    require(&format!(
        "| `kvatlas_stream_consumer_resets_total` | {} |",
        words::<ConsumerReset>()
    ));
    for reason in DegradedReason::ALL {
        require(&format!("\n| `{}` | ", reason.as_str()));
    }
    for latch in Latch::ALL {
        require(&format!("\n| `{}` | ", latch.as_str()));
    }
    for code in ErrorCode::ALL {
        require(&format!("\n| {} | `{}` | ", code.as_u16(), code.as_str()));
    }
}

#[test]
fn the_limits_are_the_defaults() {
    let limits = WireLimits::default();
    for (what, limit) in [
        ("events in a batch", limits.events_max),
        ("blocks in an event", limits.blocks_per_event_max),
        ("blocks in a query", limits.query_depth_max),
        ("queries in a request", limits.queries_max),
        ("workers in a query's filter", limits.filter_workers_max),
    ] {
        require(&format!("| {what} | {limit} | `"));
    }
    require(&format!(
        "| length of `lora_name`, `cache_salt` | {} bytes | |",
        limits.text_bytes_max
    ));
    require(&format!(
        "| {} × its limit on blocks | |",
        limits.tokens_per_block_max
    ));
    assert_eq!(limits.message_bytes_max, 1 << 20);
}

#[test]
fn the_bytes_of_the_examples_are_what_the_text_says() {
    let [batch, query] = &examples()[..] else {
        panic!("there are two examples");
    };
    let limits = WireLimits::default();
    let batch = EventBatch::decode(batch, &limits).unwrap();
    assert_eq!(
        (batch.epoch, batch.seq, batch.rank, batch.tier),
        (7, 1, 0, Tier::DEVICE)
    );
    let [Event::Stored(stored)] = &batch.events[..] else {
        panic!("{batch:?}");
    };
    let chain = vec![
        SequenceHash(0xea06_fc71_a5ee_6e88),
        SequenceHash(0xad01_835a_37dd_294c),
    ];
    let expected = BlockNames::Sequence {
        parent: None,
        position: None,
        hashes: chain,
    };
    assert_eq!(stored.names, expected);
    let blocks = vec![BlockHash(0xea06_fc71_a5ee_6e88), BlockHash(0x1fbf_39bd_106b_e0b5)];
    assert_eq!(stored.content, Some(BlockContent::BlockHashes(blocks)));
    let QueryRequest::Single(query) = QueryRequest::decode(query, &limits).unwrap() else {
        panic!("one query");
    };
    assert!(matches!(&query.key, QueryKey::Tokens { tokens, .. } if *tokens == [1, 2, 3, 4]));
    assert!(query.options.explain);
}

#[test]
fn the_contents_lead_to_headings() {
    let anchor = |heading: &str| -> String {
        let kept = heading
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-'));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    let headings: BTreeSet<String> = OPERATION
        .lines()
        .filter_map(|line| Some(anchor(line.strip_prefix('#')?.trim_start_matches('#').trim())))
        .collect();
    for link in OPERATION.split("](#").skip(1) {
        let target = link.split(')').next().unwrap();
        assert!(
            headings.contains(target),
            "there is no heading for #{target}: {headings:?}"
        );
    }
}
