//! Checks that the documentation agrees with the code.

use std::collections::BTreeSet;

use kvatlas_core::hash::{BlockHash, SequenceHash};
use kvatlas_core::wire::{
    BlockContent, BlockNames, DegradedReason, ErrorCode, Event, EventBatch, QueryKey, QueryRequest, Tier,
    WireLimits,
};
use kvatlas_process::admin::Latch;

/// Pages by their file names.
const PAGES: [(&str, &str); 4] = [
    ("wire-contract.md", include_str!("../../deploy/wire-contract.md")),
    ("settings.md", include_str!("../../deploy/settings.md")),
    ("operating.md", include_str!("../../deploy/operating.md")),
    ("metrics.md", include_str!("../../deploy/metrics.md")),
];

/// Requires that one of the pages has `text`. The failure shows `text`, so that it can be added to a page.
fn require(text: &str) {
    let holds = |(_, page): &(&str, &str)| page.contains(text);
    assert!(PAGES.iter().any(holds), "no page in deploy/ has:\n{text}");
}

/// Returns the bytes of the code blocks that are marked as hexadecimal.
fn examples() -> Vec<Vec<u8>> {
    let blocks = PAGES[0].1.split("```hex\n").skip(1);
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
fn every_word_of_a_reply_is_listed() {
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
    let headings = |page: &str| -> BTreeSet<String> {
        page.lines()
            .filter_map(|line| Some(anchor(line.strip_prefix('#')?.trim_start_matches('#').trim())))
            .collect()
    };
    for (name, page) in PAGES {
        for link in page.split("](").skip(1) {
            let Some((file, target)) = link.split(')').next().unwrap().split_once('#') else {
                continue;
            };
            let file = if file.is_empty() { name } else { file };
            // Links to files outside of this folder are not checked.
            let Some((_, page)) = PAGES.iter().find(|(name, _)| *name == file) else {
                continue;
            };
            let headings = headings(page);
            assert!(
                headings.contains(target),
                "{name} links to {file}#{target}: {headings:?}"
            );
        }
    }
}
