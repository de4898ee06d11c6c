//! Tests of the other forms that a publisher or router may choose: arrays instead of blobs, keys in any order,
//! unknown keys.

use proptest::prelude::*;
use rmp::encode;
use serde_json::json;

use crate::hash::{PositionalLineageHash, SequenceHash};

use super::super::{
    Address, BlockContent, BlockNames, Event, EventBatch, QueryKey, QueryRequest, RemovedBlocks,
    ResumableBlocks, ResyncChunk, StoredBlocks, WireLimits,
};
use super::generate;

/// A nil. For an optional field it means the same as leaving the key out.
const NIL: [u8; 1] = [0xc0];

/// Map entries, in the order in which they are sent.
type Entries = Vec<(String, Vec<u8>)>;

fn value(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes);
    bytes
}

fn number(number: u64) -> Vec<u8> {
    value(|bytes| drop(encode::write_uint(bytes, number)))
}

fn text(text: &str) -> Vec<u8> {
    value(|bytes| drop(encode::write_str(bytes, text)))
}

fn array(elements: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let elements: Vec<Vec<u8>> = elements.into_iter().collect();
    value(|bytes| {
        encode::write_array_len(bytes, u32::try_from(elements.len()).unwrap()).unwrap();
        bytes.extend(elements.concat());
    })
}

fn map(entries: &Entries) -> Vec<u8> {
    value(|bytes| {
        encode::write_map_len(bytes, u32::try_from(entries.len()).unwrap()).unwrap();
        for (key, value) in entries {
            encode::write_str(bytes, key).unwrap();
            bytes.extend(value);
        }
    })
}

/// Returns hashes as an array of integers.
fn numbers<T: Copy + Into<u64>>(list: &[T]) -> Vec<u8> {
    array(list.iter().map(|element| number((*element).into())))
}

fn lineage(list: &[PositionalLineageHash]) -> Vec<u8> {
    array(
        list.iter()
            .map(|key| value(|bytes| drop(encode::write_bin(bytes, &key.to_be_bytes())))),
    )
}

fn entry(key: &str, value: Vec<u8>) -> (String, Vec<u8>) {
    (key.to_owned(), value)
}

fn optional_text(key: &str, content: Option<&String>) -> (String, Vec<u8>) {
    entry(key, content.map_or(NIL.into(), |content| text(content)))
}

fn tokens_entries(tokens: &[u32], lora_name: Option<&String>, cache_salt: Option<&String>) -> Entries {
    vec![
        entry("tokens", numbers(tokens)),
        optional_text("lora_name", lora_name),
        optional_text("cache_salt", cache_salt),
    ]
}

fn stored_entries(stored: &StoredBlocks) -> Entries {
    let mut entries = vec![entry("type", text("stored"))];
    match &stored.names {
        BlockNames::Lineage(keys) => entries.push(entry("lineage_hashes", lineage(keys))),
        BlockNames::Sequence {
            parent,
            position,
            hashes,
        } => {
            entries.push(entry(
                "parent",
                parent.map_or(NIL.into(), |parent| number(parent.as_u64())),
            ));
            entries.push(entry(
                "position",
                position.map_or(NIL.into(), |position| number(position.as_u64())),
            ));
            entries.push(entry("sequence_hashes", numbers(hashes)));
        }
    }
    match &stored.content {
        None => entries.extend([entry("block_hashes", NIL.into()), entry("tokens", NIL.into())]),
        Some(BlockContent::BlockHashes(hashes)) => {
            entries.extend([
                entry("block_hashes", numbers(hashes)),
                entry("tokens", NIL.into()),
            ]);
        }
        Some(BlockContent::Tokens {
            tokens,
            lora_name,
            cache_salt,
        }) => {
            entries.extend(tokens_entries(tokens, lora_name.as_ref(), cache_salt.as_ref()));
            entries.push(entry("block_hashes", NIL.into()));
        }
    }
    let names = stored.engine_hashes.as_ref();
    entries.push(entry(
        "engine_hashes",
        names.map_or(NIL.into(), |names| numbers(names)),
    ));
    let runs = stored.resumable.runs();
    entries.push(entry("resumable", runs.map_or(NIL.into(), numbers)));
    entries
}

fn event_entries(event: &Event) -> Entries {
    match event {
        Event::Stored(stored) => stored_entries(stored),
        Event::Removed(RemovedBlocks {
            hashes,
            lineage_hashes,
        }) => vec![
            entry("type", text("removed")),
            entry("sequence_hashes", numbers(hashes)),
            entry("lineage_hashes", lineage(lineage_hashes)),
        ],
        Event::Resumable(ResumableBlocks {
            hashes,
            lineage_hashes,
            resumable,
        }) => vec![
            entry("type", text("resumable")),
            entry("sequence_hashes", numbers(hashes)),
            entry("lineage_hashes", lineage(lineage_hashes)),
            entry("resumable", vec![if *resumable { 0xc3 } else { 0xc2 }]),
        ],
        Event::Cleared => vec![entry("type", text("cleared"))],
        Event::Doubted(reasons) => {
            let words = reasons.iter().map(|reason| text(reason.as_str()));
            vec![entry("type", text("doubted")), entry("reasons", array(words))]
        }
        Event::Goodbye => vec![entry("type", text("goodbye"))],
    }
}

/// Returns a value that a later version of the contract might send.
fn unknown(depth: usize) -> Vec<u8> {
    let mut nested = vec![0x91; depth];
    // Keys of any type, a float, an extension, a negative number.
    nested.extend([
        0x83, 0xa1, b'k', 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x01, 0xd4, 1, 2, 0xc0, 0xff,
    ]);
    nested
}

/// Adds unknown keys to `entries`, and changes their order.
fn disguise(mut entries: Entries, rotation: usize, depth: usize) -> Vec<u8> {
    entries.push(entry("new_in_version_2", unknown(depth)));
    entries.push(entry("", number(7)));
    entries.push(entry(
        "big",
        value(|bytes| drop(encode::write_bin(bytes, &[9; 3000]))),
    ));
    // An unknown key may even come twice.
    entries.push(entry("big", vec![0xc2]));
    let rotation = rotation % entries.len();
    entries.rotate_left(rotation);
    entries.reverse();
    map(&entries)
}

proptest! {
    #[test]
    fn arrays_are_blobs_and_order_is_free(batch in generate::batch(), rotation: usize, depth in 0_usize..3000) {
        let events = batch.events.iter().map(|event| disguise(event_entries(event), rotation / 7, depth / 3));
        let told = batch.profile.as_ref();
        let address = told.map(|told| told.address.as_ref().map_or(String::new(), Address::to_string));
        let labels = told.map_or(NIL.into(), |told| {
            map(&told.labels.iter().map(|(key, value)| entry(key, text(value))).collect())
        });
        let entries = vec![
            entry("v", number(1)),
            entry("epoch", number(batch.epoch)),
            entry("seq", number(batch.seq)),
            entry("rank", number(u64::from(batch.rank))),
            entry("time_us", batch.time_us.map_or(NIL.into(), number)),
            entry("tier", number(u64::from(batch.tier.as_u8()))),
            entry(
                "block_size",
                batch.block_size.map_or(NIL.into(), |size| number(u64::from(size.as_u32()))),
            ),
            optional_text("address", address.as_ref()),
            entry("labels", labels),
            entry("events", array(events)),
        ];
        let payload = disguise(entries, rotation, depth);
        prop_assert_eq!(EventBatch::decode(&payload, &WireLimits::default()), Ok(batch));
    }

    #[test]
    fn queries_too(request in generate::request(), rotation: usize, depth in 0_usize..3000) {
        let queries = match &request {
            QueryRequest::Single(query) => std::slice::from_ref(query),
            QueryRequest::Batch(queries) => queries,
        };
        let mut all: Vec<Entries> = Vec::new();
        for query in queries {
            let mut entries = match &query.key {
                QueryKey::Tokens { tokens, lora_name, cache_salt } => {
                    tokens_entries(tokens, lora_name.as_ref(), cache_salt.as_ref())
                }
                QueryKey::BlockHashes(hashes) => vec![entry("block_hashes", numbers(hashes))],
                QueryKey::SequenceHashes(hashes) => vec![entry("sequence_hashes", numbers(hashes))],
                QueryKey::LineageHashes(hashes) => vec![entry("lineage_hashes", lineage(hashes))],
            };
            let positions = query.positions.as_ref().map_or(NIL.into(), |positions| {
                array(positions.iter().map(|position| number(position.as_u64())))
            });
            entries.push(entry("positions", positions));
            entries.push(entry("token_count", query.token_count.map_or(NIL.into(), number)));
            let options = &query.options;
            if let Some(workers) = &options.workers {
                entries.push(entry("workers", array(workers.iter().map(|worker| text(worker.as_str())))));
            }
            entries.push(entry("limit", options.limit.map_or(NIL.into(), |limit| number(u64::from(limit)))));
            entries.push(entry("min_blocks", number(u64::from(options.min_blocks))));
            for (key, flag) in [
                ("explain", options.explain),
                ("tiers", options.tiers),
                ("predicted", options.predicted),
            ] {
                entries.push(entry(key, vec![if flag { 0xc3 } else { 0xc2 }]));
            }
            all.push(entries);
        }
        let payload = match &request {
            QueryRequest::Single(_) => disguise(all.remove(0), rotation, depth),
            QueryRequest::Batch(_) => {
                let queries = all.into_iter().map(|entries| disguise(entries, rotation / 5, depth / 3));
                disguise(vec![entry("queries", array(queries))], rotation, depth)
            }
        };
        prop_assert_eq!(QueryRequest::decode(&payload, &WireLimits::default()), Ok(request));
    }
}

#[test]
fn a_nil_in_a_chunk_is_an_absent_field() {
    let required = || {
        vec![
            entry("epoch", number(1)),
            entry("seq", number(2)),
            entry("kind", text("full")),
            entry("chunk", number(0)),
        ]
    };
    let decode = |entries| ResyncChunk::decode(&map(&entries), &WireLimits::default()).unwrap();
    for key in ["time_us", "recomputed_block_size"] {
        let mut entries = required();
        entries.push(entry(key, NIL.into()));
        assert_eq!(decode(entries), decode(required()), "{key}");
    }
}

#[test]
fn a_null_in_json_is_an_absent_field() {
    let batch = |event: serde_json::Value| {
        let batch = json!({"epoch": 1, "seq": 1, "events": [event]});
        serde_json::from_value::<EventBatch>(batch).unwrap()
    };
    let plain = json!({"type": "stored", "sequence_hashes": [1]});
    for key in [
        "parent",
        "position",
        "lineage_hashes",
        "engine_hashes",
        "block_hashes",
        "tokens",
        "lora_name",
        "cache_salt",
        "resumable",
    ] {
        let mut event = plain.clone();
        event[key] = serde_json::Value::Null;
        assert_eq!(batch(event), batch(plain.clone()), "{key}");
    }
    let query = |query: serde_json::Value| serde_json::from_value::<QueryRequest>(query).unwrap();
    let plain = json!({"sequence_hashes": [1]});
    for key in ["lora_name", "cache_salt", "positions", "token_count", "limit"] {
        let mut asked = plain.clone();
        asked[key] = serde_json::Value::Null;
        assert_eq!(query(asked), query(plain.clone()), "{key}");
    }
}

#[test]
fn a_signed_hash_is_a_negative_number_and_refused() {
    let entries = vec![entry(
        "sequence_hashes",
        array([vec![0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0]]),
    )];
    assert!(QueryRequest::decode(&map(&entries), &WireLimits::default()).is_err());
    let entries = vec![entry(
        "sequence_hashes",
        array([vec![0xd3, 0x70, 0, 0, 0, 0, 0, 0, 0]]),
    )];
    let decoded = QueryRequest::decode(&map(&entries), &WireLimits::default()).unwrap();
    let QueryRequest::Single(query) = decoded else {
        panic!("one query")
    };
    assert_eq!(
        query.key,
        QueryKey::SequenceHashes(vec![SequenceHash(0x70 << 56)])
    );
}
