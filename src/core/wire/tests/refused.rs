//! Payloads that are refused, each with its error.

use serde_json::json;

use crate::hash::{PositionalLineageHash, SequenceHash};

use super::super::{DecodeError, ErrorCode, EventBatch, QueryRequest, WireError, WireLimits};

/// Keys that a query may have.
const QUERY_KEYS: [&str; 14] = [
    "tokens",
    "lora_name",
    "cache_salt",
    "block_hashes",
    "sequence_hashes",
    "lineage_hashes",
    "positions",
    "workers",
    "limit",
    "min_blocks",
    "explain",
    "tiers",
    "predicted",
    "queries",
];

/// Returns a JSON value as MessagePack.
fn pack(value: &serde_json::Value) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

fn decode_batch(value: &serde_json::Value) -> Result<EventBatch, DecodeError> {
    EventBatch::decode(&pack(value), &WireLimits::default())
}

fn decode_query(value: &serde_json::Value) -> Result<QueryRequest, DecodeError> {
    QueryRequest::decode(&pack(value), &WireLimits::default())
}

#[allow(clippy::needless_pass_by_value, reason = "callers pass a json! literal")]
fn decode_event(event: serde_json::Value) -> Result<EventBatch, DecodeError> {
    decode_batch(&serde_json::json!({"epoch": 1, "seq": 1, "events": [event]}))
}

macro_rules! assert_refused {
    ($decoded:expr, $pattern:pat) => {
        match $decoded {
            Err($pattern) => {}
            other => panic!("{other:?}"),
        }
    };
}

#[test]
fn batches_need_an_epoch_and_a_number() {
    assert_refused!(
        decode_batch(&json!({"seq": 1})),
        DecodeError::Missing { field: "epoch" }
    );
    assert_refused!(
        decode_batch(&json!({"epoch": 1})),
        DecodeError::Missing { field: "seq" }
    );
    assert_refused!(
        decode_batch(&json!({"epoch": 1, "seq": 0})),
        DecodeError::Combination(_)
    );
    let heartbeat = decode_batch(&json!({"epoch": 0, "seq": 1})).unwrap();
    assert_eq!((heartbeat.rank, heartbeat.events.len()), (0, 0));
}

#[test]
fn other_versions_are_refused() {
    for version in [0, 2, u64::MAX] {
        let batch = decode_batch(&json!({"v": version, "epoch": 1, "seq": 1}));
        assert_eq!(batch, Err(DecodeError::UnsupportedVersion { version }));
        let request = decode_query(&json!({"v": version, "sequence_hashes": [1]}));
        assert_eq!(request, Err(DecodeError::UnsupportedVersion { version }));
    }
    let code = WireError::from(DecodeError::UnsupportedVersion { version: 2 }).code;
    assert_eq!(code, ErrorCode::UnsupportedVersion);
    assert!(decode_query(&json!({"v": 1, "sequence_hashes": [1]})).is_ok());
}

/// Sends each field with a value of every wrong type.
#[test]
fn wrong_types_are_refused() {
    let values = [
        json!(-1),
        json!(1.5),
        json!(true),
        json!("text"),
        json!({"a": 1}),
        json!([[1]]),
        json!(7),
    ];
    let check = |field: &str,
                 mut is_right: Box<dyn FnMut(&serde_json::Value) -> bool>,
                 make: &dyn Fn(&serde_json::Value) -> Result<(), DecodeError>| {
        for value in values.iter().filter(|value| !is_right(value)) {
            match make(value) {
                Err(DecodeError::WrongType { .. }) => {}
                Err(DecodeError::InQuery { source, .. })
                    if field == "queries" && matches!(*source, DecodeError::WrongType { .. }) => {}
                other => panic!("{field} = {value}: {other:?}"),
            }
        }
    };
    let numbers: fn(&serde_json::Value) -> bool = serde_json::Value::is_u64;
    for field in ["v", "epoch", "seq", "rank", "time_us", "tier", "events"] {
        check(
            field,
            Box::new(move |value| field != "events" && numbers(value)),
            &|value| {
                let mut batch = json!({"epoch": 1, "seq": 1});
                batch[field] = value.clone();
                decode_batch(&batch).map(drop)
            },
        );
    }
    let is_text: fn(&serde_json::Value) -> bool = serde_json::Value::is_string;
    for field in [
        "parent",
        "position",
        "sequence_hashes",
        "engine_hashes",
        "block_hashes",
        "tokens",
        "lora_name",
        "cache_salt",
    ] {
        let is_number = matches!(field, "parent" | "position");
        let takes_text = matches!(field, "lora_name" | "cache_salt");
        check(
            field,
            Box::new(move |value| is_number && numbers(value) || takes_text && is_text(value)),
            &|value| {
                let mut event = json!({"type": "stored", "sequence_hashes": [1]});
                event[field] = value.clone();
                decode_event(event).map(drop)
            },
        );
    }
    for field in QUERY_KEYS {
        let is_number = matches!(field, "limit" | "min_blocks");
        let takes_text = matches!(field, "lora_name" | "cache_salt");
        let is_right = move |value: &serde_json::Value| {
            is_number && numbers(value)
                || takes_text && is_text(value)
                || matches!(field, "explain" | "tiers" | "predicted") && value.is_boolean()
        };
        check(field, Box::new(is_right), &|value| {
            decode_query(&json!({field: value})).map(drop)
        });
    }
}

#[test]
fn payloads_are_maps_with_text_keys() {
    for payload in [&[0xc0][..], &[0x90], &[0x01], &[0xa1, b'x'], &[0x81, 0x01, 0x02]] {
        assert_refused!(
            EventBatch::decode(payload, &WireLimits::default()),
            DecodeError::WrongType { .. }
        );
        assert_refused!(
            QueryRequest::decode(payload, &WireLimits::default()),
            DecodeError::WrongType { .. }
        );
    }
    assert_refused!(
        EventBatch::decode(&[], &WireLimits::default()),
        DecodeError::Truncated { offset: 0 }
    );
    let mut payload = pack(&json!({"epoch": 1, "seq": 1}));
    payload.push(0xc0);
    assert_refused!(
        EventBatch::decode(&payload, &WireLimits::default()),
        DecodeError::TrailingBytes { .. }
    );
    assert_refused!(
        QueryRequest::decode(&[0x80, 0x80], &WireLimits::default()),
        DecodeError::TrailingBytes { offset: 1 }
    );
}

#[test]
fn a_key_sent_twice_is_refused() {
    let twice = |key: &str, value: &[u8]| {
        let mut entry = vec![0xa0 | u8::try_from(key.len()).unwrap()];
        entry.extend(key.bytes());
        entry.extend(value);
        [vec![0x82], entry.clone(), entry].concat()
    };
    for key in ["v", "epoch", "seq", "rank", "time_us", "tier", "events"] {
        let value: &[u8] = if key == "events" { &[0x90] } else { &[1] };
        let decoded = EventBatch::decode(&twice(key, value), &WireLimits::default());
        assert!(
            matches!(decoded, Err(DecodeError::Repeated { field }) if field == key),
            "{key}: {decoded:?}"
        );
    }
    for key in QUERY_KEYS {
        let value: &[u8] = match key {
            "limit" | "min_blocks" => &[1],
            "explain" | "tiers" | "predicted" => &[0xc3],
            // A nil is a value, too.
            "lora_name" | "cache_salt" => &[0xc0],
            _ => &[0x90],
        };
        let decoded = QueryRequest::decode(&twice(key, value), &WireLimits::default());
        assert!(
            matches!(decoded, Err(DecodeError::Repeated { field }) if field == key),
            "{key}: {decoded:?}"
        );
    }
}

#[test]
fn numbers_out_of_range_are_refused() {
    assert_refused!(
        decode_batch(&json!({"epoch": 1, "seq": 1, "tier": 8})),
        DecodeError::OutOfRange {
            field: "tier",
            value: 8,
            max: 7
        }
    );
    assert!(decode_batch(&json!({"epoch": 1, "seq": 1, "tier": 7})).is_ok());
    let beyond = 1_u64 << 32;
    assert_refused!(
        decode_batch(&json!({"epoch": 1, "seq": 1, "rank": beyond})),
        DecodeError::OutOfRange { field: "rank", .. }
    );
    assert_refused!(
        decode_query(&json!({"tokens": [beyond]})),
        DecodeError::OutOfRange { field: "tokens", .. }
    );
    assert_refused!(
        decode_query(&json!({"tokens": [1], "min_blocks": beyond})),
        DecodeError::OutOfRange {
            field: "min_blocks",
            ..
        }
    );
    // A limit beyond 32 bits is no limit.
    assert!(decode_query(&json!({"tokens": [1], "limit": beyond})).is_ok());
    let event = json!({"type": "stored", "parent": 1, "position": 1 << 24, "sequence_hashes": [1]});
    assert_refused!(decode_event(event), DecodeError::Position(_));
}

#[test]
fn contradictions_are_refused() {
    let both = json!({"type": "stored", "sequence_hashes": [1], "lineage_hashes": []});
    let without_parent = json!({"type": "stored", "position": 1, "sequence_hashes": [1]});
    let root_with_parent = json!({"type": "stored", "parent": 1, "position": 0, "sequence_hashes": [1]});
    let lineage_with_parent = json!({"type": "stored", "parent": 1, "lineage_hashes": []});
    let content_twice = json!({"type": "stored", "sequence_hashes": [1], "tokens": [1], "block_hashes": [1]});
    for event in [
        both,
        without_parent,
        root_with_parent,
        lineage_with_parent,
        content_twice,
    ] {
        assert_refused!(decode_event(event), DecodeError::Combination(_));
    }
    for list in ["engine_hashes", "block_hashes", "tokens"] {
        let mut event = json!({"type": "stored", "sequence_hashes": [1, 2]});
        event[list] = json!([1, 2, 3]);
        let decoded = decode_event(event);
        assert!(
            matches!(decoded, Err(DecodeError::LengthMismatch { field, count: 3, blocks: 2 }) if field == list),
            "{decoded:?}"
        );
    }
    for request in [
        json!({}),
        json!({"explain": true}),
        json!({"tokens": [1], "sequence_hashes": [1]}),
        json!({"queries": [], "tokens": [1]}),
        json!({"block_hashes": [1], "cache_salt": "s"}),
        json!({"sequence_hashes": [1], "positions": [5], "explain": true}),
        json!({"sequence_hashes": [1], "positions": [5], "tiers": true}),
        json!({"sequence_hashes": [1], "positions": [5], "predicted": true}),
    ] {
        assert_refused!(decode_query(&request), DecodeError::Combination(_));
    }
    for (field, value) in [
        ("lora_name", json!("a")),
        ("cache_salt", json!("s")),
        ("positions", json!([0])),
        ("token_count", json!(9)),
        ("workers", json!(["w"])),
        ("limit", json!(1)),
        ("min_blocks", json!(2)),
        ("explain", json!(true)),
        ("tiers", json!(true)),
        ("predicted", json!(true)),
    ] {
        let request = |queries: &[serde_json::Value]| json!({"queries": queries, field: value});
        let decoded = decode_query(&request(&[json!({"tokens": [1]})]));
        assert!(
            matches!(decoded, Err(DecodeError::Combination(_))),
            "{field}: {decoded:?}"
        );
    }
    for query in [json!({}), json!({"sequence_hashes": [1], "lora_name": "a"})] {
        let refused = decode_query(&json!({"queries": [{"tokens": [1]}, query]})).unwrap_err();
        assert!(refused.to_string().starts_with("queries[1]: "), "{refused}");
        let DecodeError::InQuery { index: 1, source } = refused else {
            panic!("{refused:?}");
        };
        assert!(matches!(*source, DecodeError::Combination(_)), "{source:?}");
    }
    // A nil stands for an absent field, and the contract may get fields that are not known yet.
    let nil = json!({"queries": [{"block_hashes": [1], "cache_salt": null}], "lora_name": null, "limit": null, "x": 1});
    assert!(matches!(decode_query(&nil), Ok(QueryRequest::Batch(_))));
    for request in [
        json!({"tokens": [1], "positions": [0]}),
        json!({"sequence_hashes": [1, 2], "positions": [5]}),
        json!({"sequence_hashes": [1, 2], "positions": [5, 5]}),
        json!({"sequence_hashes": [], "positions": []}),
        json!({"sequence_hashes": [1], "positions": [1 << 24]}),
    ] {
        assert_refused!(decode_query(&request), DecodeError::Positions(_));
    }
    assert!(decode_query(&json!({"sequence_hashes": [1, 2], "positions": [5, (1 << 24) - 1]})).is_ok());
}

#[test]
fn events_need_a_known_type_and_blocks() {
    assert_refused!(decode_event(json!({})), DecodeError::Missing { field: "type" });
    assert_refused!(
        decode_event(json!({"type": "evicted"})),
        DecodeError::UnknownWord { field: "type", .. }
    );
    for kind in ["stored", "removed"] {
        assert_refused!(
            decode_event(json!({"type": kind})),
            DecodeError::Missing {
                field: "sequence_hashes"
            }
        );
    }
    assert_refused!(
        decode_event(json!({"type": "x".repeat(65)})),
        DecodeError::TextTooLong { field: "type", .. }
    );
}

#[test]
fn a_text_has_bytes_and_a_list_has_elements() {
    let text = "x".repeat(3000);
    let event = json!({"type": "stored", "sequence_hashes": [1], "tokens": [1], "lora_name": text});
    assert_refused!(
        decode_event(event),
        DecodeError::TextTooLong {
            field: "lora_name",
            bytes: 3000,
            max: 1024
        }
    );
}

#[test]
fn worker_names_of_a_filter_are_checked() {
    for name in ["", "a.b", "w*"] {
        let request = decode_query(&json!({"tokens": [1], "workers": [name]}));
        assert_refused!(request, DecodeError::Name { field: "workers", .. });
    }
}

/// Returns a map with one entry: `key` and a blob.
fn with_blob(key: &str, blob: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    rmp::encode::write_map_len(&mut payload, 1).unwrap();
    rmp::encode::write_str(&mut payload, key).unwrap();
    rmp::encode::write_bin(&mut payload, blob).unwrap();
    payload
}

#[test]
fn ragged_blobs_are_refused() {
    let lists = [
        ("tokens", 4),
        ("block_hashes", 8),
        ("sequence_hashes", 8),
        ("lineage_hashes", 16),
    ];
    for (key, width) in lists {
        for bytes in [1, width - 1, width + 1, 5 * width - 1] {
            let decoded = QueryRequest::decode(&with_blob(key, &vec![0; bytes]), &WireLimits::default());
            assert!(
                matches!(decoded, Err(DecodeError::RaggedBlob { field, .. }) if field == key),
                "{decoded:?}"
            );
        }
        assert!(QueryRequest::decode(&with_blob(key, &[]), &WireLimits::default()).is_ok());
    }
}

#[test]
fn broken_lineage_chains_are_refused() {
    let key = |position, parent: u64, current| {
        PositionalLineageHash::new(
            SequenceHash(current),
            (position > 0).then_some(SequenceHash(parent)),
            position,
        )
        .unwrap()
    };
    let decode = |keys: &[PositionalLineageHash]| {
        let blob: Vec<u8> = keys.iter().flat_map(|key| key.to_be_bytes()).collect();
        QueryRequest::decode(&with_blob("lineage_hashes", &blob), &WireLimits::default())
    };
    let sound = [key(0, 0, 5), key(1, 5, 6), key(2, 6, 7)];
    assert!(decode(&sound).is_ok());
    assert_refused!(decode(&sound[1..]), DecodeError::BrokenChain { index: 0 });
    assert_refused!(
        decode(&[sound[0], sound[2]]),
        DecodeError::BrokenChain { index: 1 }
    );
    assert_refused!(
        decode(&[sound[0], sound[1], key(2, 9, 7)]),
        DecodeError::BrokenChain { index: 2 }
    );
    assert_refused!(
        decode(&[sound[0], sound[0]]),
        DecodeError::BrokenChain { index: 1 }
    );
    // These are no lineage hashes: one has mode 3, and one has a parent at position 0.
    for first in [0xc0, 0x00] {
        let mut blob = [0xff; 16];
        blob[0] = first;
        blob[1] = if first == 0 { 0x1f } else { 0xff };
        let decoded = QueryRequest::decode(&with_blob("lineage_hashes", &blob), &WireLimits::default());
        assert_refused!(
            decoded,
            DecodeError::Lineage {
                field: "lineage_hashes",
                ..
            }
        );
    }
}

#[test]
fn texts_are_utf_8() {
    let payload = [
        &[0x82, 0xa6][..],
        b"tokens",
        &[0x90, 0xa9],
        b"lora_name",
        &[0xa2, 0xc3, 0x28],
    ]
    .concat();
    assert_refused!(
        QueryRequest::decode(&payload, &WireLimits::default()),
        DecodeError::NotUtf8 { field: "lora_name" }
    );
}
