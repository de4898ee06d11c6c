//! `deploy/test-vectors.json`: the contract as examples. A client in any language can check itself against them.
//!
//! This test computes the content of the file. `KVATLAS_TEST_REWRITE_VECTORS=1 cargo test -p kvatlas-core --test
//! vectors` rewrites the file after an intended change of the contract.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fmt::Write as _;

use kvatlas_core::hash::{
    BlockHash, BlockSize, HashSeed, PositionalLineageHash, SequenceHash, block_hashes, lineage_hashes,
    sequence_hashes,
};
use kvatlas_core::wire::{NamespaceName, Shard, Subjects, WireLimits, WorkerName};
use serde_json::{Map, Value, json};

#[path = "vectors/batches.rs"]
mod batches;
#[path = "vectors/llmd.rs"]
mod llmd;
#[path = "vectors/queries.rs"]
mod queries;
#[path = "vectors/replies.rs"]
mod replies;
#[path = "vectors/resyncs.rs"]
mod resyncs;
#[path = "vectors/schemes.rs"]
mod schemes;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/test-vectors.json");

/// Returns bytes as hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut digits, byte| {
        write!(digits, "{byte:02x}").unwrap();
        digits
    })
}

/// Returns a 64-bit number as 16 hexadecimal digits, because many readers of JSON keep only 53 bits of a number.
fn wide(value: u64) -> Value {
    json!(format!("{value:016x}"))
}

fn wides<T: Copy>(values: &[T], number: impl Fn(T) -> u64) -> Value {
    values.iter().map(|value| wide(number(*value))).collect()
}

const FIRST: u64 = 0xea06_fc71_a5ee_6e88;
const SECOND: u64 = 0xad01_835a_37dd_294c;
const CHAIN: [SequenceHash; 2] = [SequenceHash(FIRST), SequenceHash(SECOND)];
const BLOCKS: [BlockHash; 2] = [BlockHash(FIRST), BlockHash(0x1fbf_39bd_106b_e0b5)];

fn limits() -> WireLimits {
    WireLimits::default()
}

/// Returns a JSON map of the entries that have a value.
fn present(entries: &[(&str, Option<Value>)]) -> Value {
    let given = entries
        .iter()
        .filter_map(|(key, value)| Some(((*key).to_owned(), value.clone()?)));
    Value::Object(given.collect::<Map<_, _>>())
}

fn lineage_hexes(hashes: &[PositionalLineageHash]) -> Value {
    hashes.iter().map(|hash| hex(&hash.to_be_bytes())).collect()
}

fn lineage_chain() -> Vec<PositionalLineageHash> {
    let first = PositionalLineageHash::new(CHAIN[0], None, 0).unwrap();
    vec![first, first.child(CHAIN[1]).unwrap()]
}

fn hash_vector(name: &str, tokens: &[u32], block_size: u32, lora: Option<&str>, salt: Option<&str>) -> Value {
    let seed = HashSeed::for_cache(lora, salt);
    let blocks: Vec<BlockHash> = block_hashes(tokens, BlockSize::new(block_size).unwrap(), seed).collect();
    let sequence: Vec<SequenceHash> = sequence_hashes(blocks.iter().copied()).collect();
    let lineage: Vec<PositionalLineageHash> = lineage_hashes(&sequence).collect::<Result<_, _>>().unwrap();
    json!({
        "name": name,
        "tokens": tokens,
        "block_size": block_size,
        "lora_name": lora,
        "cache_salt": salt,
        "seed": wide(seed.as_u64()),
        "block_hashes": wides(&blocks, BlockHash::as_u64),
        "sequence_hashes": wides(&sequence, SequenceHash::as_u64),
        "lineage_hashes": lineage.iter().map(|hash| hex(&hash.to_be_bytes())).collect::<Vec<_>>(),
    })
}

fn hashes() -> Vec<Value> {
    let (lora, salt) = (Some("my-lora"), Some("tenant-a"));
    let counting = |count: u32| (1..=count).collect::<Vec<u32>>();
    let wide_tokens = [0, u32::MAX, 1 << 31, 65_536, 1, 2, 3, 4];
    vec![
        hash_vector("two blocks", &counting(32), 16, None, None),
        hash_vector("an adapter", &counting(32), 16, lora, None),
        hash_vector("a salt", &counting(32), 16, None, salt),
        hash_vector("an adapter and a salt", &counting(32), 16, lora, salt),
        hash_vector("empty names add nothing", &counting(16), 16, Some(""), Some("")),
        hash_vector(
            "names that are not ASCII",
            &counting(16),
            16,
            Some("Käse-7B"),
            Some("租户"),
        ),
        hash_vector("small blocks", &counting(8), 4, None, None),
        hash_vector("a tail that is no block", &counting(11), 4, None, None),
        hash_vector("less than a block", &counting(3), 4, None, None),
        hash_vector("large tokens", &wide_tokens, 4, None, None),
        hash_vector("blocks of one token", &counting(3), 1, lora, None),
        hash_vector("blocks of 33 tokens", &counting(33), 33, None, None),
        hash_vector("blocks of 64 tokens", &counting(64), 64, lora, salt),
        hash_vector("blocks of 300 tokens", &counting(300), 300, None, None),
    ]
}

const CURRENT: u64 = 0xfedc_ba98_7654_3210;
const PARENT: u64 = 0x0123_4567_89ab_cdef;

fn lineage_vector(position: u64) -> Value {
    let parent = (position > 0).then_some(SequenceHash(PARENT));
    let packed = PositionalLineageHash::new(SequenceHash(CURRENT), parent, position).unwrap();
    json!({
        "position": position,
        "current": wide(CURRENT),
        "parent": parent.map(|parent| wide(parent.as_u64())),
        "lineage_hash": hex(&packed.to_be_bytes()),
        "mode": packed.mode(),
        "current_fragment": wide(packed.current_hash_fragment()),
        "parent_fragment": wide(packed.parent_hash_fragment()),
    })
}

fn lineage() -> Vec<Value> {
    [
        0, 1, 254, 255, 256, 257, 65_534, 65_535, 65_536, 65_537, 16_777_214, 16_777_215,
    ]
    .map(lineage_vector)
    .to_vec()
}

fn lineage_refused() -> Vec<Value> {
    [
        ("mode 3 does not exist", 3_u128 << 126),
        ("position 5 is of mode 0", 1_u128 << 126 | 5 << 110),
        ("position 256 is of mode 1", 2_u128 << 126 | 256 << 102),
        ("position 0 has no parent", 1_u128 << 59),
        (
            "a current fragment of 56 bits at position 255",
            255_u128 << 118 | 1 << 55,
        ),
        (
            "a current fragment of 52 bits at position 65535",
            1_u128 << 126 | 65_535 << 110 | 1 << 51,
        ),
    ]
    .into_iter()
    .map(|(why, packed)| {
        assert!(PositionalLineageHash::from_u128(packed).is_err(), "{why}");
        json!({ "why": why, "lineage_hash": hex(&packed.to_be_bytes()) })
    })
    .collect()
}

fn subjects() -> Vec<Value> {
    let vector = |prefix: &str, namespace: &str, worker: &str, rank: u32| {
        let subjects = Subjects::new(prefix).unwrap();
        let namespace = NamespaceName::new(namespace).unwrap();
        let worker = WorkerName::new(worker).unwrap();
        json!({
            "prefix": prefix,
            "namespace": namespace.as_str(),
            "worker": worker.as_str(),
            "rank": rank,
            "events": subjects.events(&namespace, &worker),
            "query": subjects.query(&namespace),
            "status": subjects.status(&namespace),
            "resync": subjects.resync(&namespace, &worker, rank),
            "shards_query": subjects.of_shards().query(&namespace),
            "shards_status": subjects.of_shards().status(&namespace),
        })
    };
    vec![
        vector("kvatlas", "llama", "gpu-0", 0),
        vector("team_a.prod", "Llama-3_1-8B", "node-7_gpu-1", 4_294_967_295),
    ]
}

fn names_refused() -> Vec<Value> {
    ["", "a.b", "a b", "a*", ">", "ä", "x/y"]
        .into_iter()
        .map(str::to_owned)
        .chain([("x").repeat(65)])
        .map(|name| {
            assert!(WorkerName::new(&name).is_err() && NamespaceName::new(&name).is_err());
            json!(name)
        })
        .collect()
}

fn shards() -> Vec<Value> {
    let shard_of = |worker: &str, count: u32| {
        let name = WorkerName::new(worker).unwrap();
        let index = (0..count).find(|index| Shard::new(*index, count).unwrap().owns(&name));
        json!({ "worker": worker, "shards": count, "shard": index.unwrap() })
    };
    let mut vectors: Vec<Value> = (0..6)
        .map(|number| shard_of(&format!("gpu-{number}"), 3))
        .collect();
    vectors.extend([shard_of("gpu-0", 1), shard_of("gpu-0", 256)]);
    vectors
}

/// Returns the content of the file, with one vector on each line, so that a diff shows which vectors change.
fn document() -> String {
    let sections = [
        ("hashes", hashes()),
        ("llmd_keys", llmd::llmd_keys()),
        ("sglang_pages", schemes::sglang_pages()),
        ("vllm_blocks", schemes::vllm_blocks()),
        ("lineage", lineage()),
        ("lineage_refused", lineage_refused()),
        ("subjects", subjects()),
        ("names_refused", names_refused()),
        ("shards", shards()),
        ("batches", batches::batches()),
        ("batches_refused", batches::batches_refused()),
        ("queries", queries::queries()),
        ("hints", queries::hints()),
        ("query_batches", queries::query_batches()),
        ("query_replies", replies::query_replies()),
        ("query_batch_replies", replies::query_batch_replies()),
        ("status_replies", replies::status_replies()),
        ("resync_requests", resyncs::resync_requests()),
        ("resync_chunks", resyncs::resync_chunks()),
    ];
    let about = "Test vectors of kvatlas' wire contract; deploy/clients.md tells how to use them. Numbers of 64 bits are 16 \
                 hexadecimal digits, payloads are hexadecimal.";
    let mut text = format!(
        "{{\n\"about\": {},\n\"contract\": 1,\n\"lineage_layout\": 1",
        json!(about)
    );
    for (name, vectors) in sections {
        let lines: Vec<String> = vectors.iter().map(Value::to_string).collect();
        write!(text, ",\n\"{name}\": [\n{}\n]", lines.join(",\n")).unwrap();
    }
    text.push_str("\n}\n");
    text
}

#[test]
fn the_file_of_vectors_is_what_the_code_does() {
    let expected = document();
    serde_json::from_str::<Value>(&expected).unwrap();
    if std::env::var_os("KVATLAS_TEST_REWRITE_VECTORS").is_some() {
        std::fs::write(PATH, &expected).unwrap();
    }
    let found = std::fs::read_to_string(PATH).unwrap_or_default();
    let difference = expected.lines().zip(found.lines()).find(|(new, old)| new != old);
    assert!(
        expected == found,
        "deploy/test-vectors.json says something else: {difference:#?}\nIf the contract is meant to change, rewrite the file with \
         KVATLAS_TEST_REWRITE_VECTORS=1, and review it"
    );
}
