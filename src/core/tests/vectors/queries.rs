//! Queries in the test vectors: their meaning, and their bytes.

use kvatlas_core::hash::{BlockHash, Position, SequenceHash};
use kvatlas_core::wire::{
    Hint, HintReport, QueryKey, QueryOptions, QueryRequest, SingleQuery, WireError, WorkerName,
};
use serde_json::{Value, json};

use super::{BLOCKS, CHAIN, hex, limits, lineage_chain, lineage_hexes, present, wides};

fn query_meaning(query: &SingleQuery) -> Value {
    let mut entries = match &query.key {
        QueryKey::Tokens {
            tokens,
            lora_name,
            cache_salt,
        } => vec![
            ("tokens", Some(json!(tokens))),
            ("lora_name", lora_name.as_ref().map(|name| json!(name))),
            ("cache_salt", cache_salt.as_ref().map(|salt| json!(salt))),
        ],
        QueryKey::BlockHashes(hashes) => vec![("block_hashes", Some(wides(hashes, BlockHash::as_u64)))],
        QueryKey::SequenceHashes(hashes) => {
            vec![("sequence_hashes", Some(wides(hashes, SequenceHash::as_u64)))]
        }
        QueryKey::LineageHashes(hashes) => vec![("lineage_hashes", Some(lineage_hexes(hashes)))],
    };
    let options = &query.options;
    let positions = query.positions.as_ref();
    entries.extend([
        (
            "positions",
            positions.map(|positions| positions.iter().map(|position| position.as_u32()).collect()),
        ),
        ("token_count", query.token_count.map(|count| json!(count))),
        (
            "workers",
            options
                .workers
                .as_ref()
                .map(|workers| workers.iter().map(WorkerName::as_str).collect()),
        ),
        ("limit", options.limit.map(|limit| json!(limit))),
        (
            "min_blocks",
            (options.min_blocks != 0).then(|| json!(options.min_blocks)),
        ),
        ("explain", options.explain.then_some(Value::Bool(true))),
        ("tiers", options.tiers.then_some(Value::Bool(true))),
        ("predicted", options.predicted.then_some(Value::Bool(true))),
    ]);
    present(&entries)
}

fn query_vector(name: &str, query: SingleQuery) -> Value {
    let meaning = query_meaning(&query);
    let request = QueryRequest::Single(query);
    let payload = request.encode();
    assert_eq!(QueryRequest::decode(&payload, &limits()), Ok(request), "{name}");
    json!({ "name": name, "meaning": meaning, "payload": hex(&payload) })
}

fn by_tokens(lora_name: Option<&str>, cache_salt: Option<&str>) -> SingleQuery {
    SingleQuery::new(QueryKey::Tokens {
        tokens: (1..=40).collect(),
        lora_name: lora_name.map(str::to_owned),
        cache_salt: cache_salt.map(str::to_owned),
    })
}

fn by_sequence() -> SingleQuery {
    SingleQuery::new(QueryKey::SequenceHashes(CHAIN.to_vec()))
}

pub(super) fn hints() -> Vec<Value> {
    let vector = |name: &str, worker: &str, rank, prompt: SingleQuery| {
        let meaning = json!({ "worker": worker, "rank": rank, "prompt": query_meaning(&prompt) });
        let worker = WorkerName::new(worker).unwrap();
        let report = HintReport(vec![Hint { worker, rank, prompt }]);
        let payload = report.encode();
        assert_eq!(HintReport::decode(&payload, &limits()), Ok(report));
        json!({ "name": name, "meaning": meaning, "payload": hex(&payload) })
    };
    vec![
        vector(
            "by tokens, with an adapter",
            "gpu-0",
            0,
            by_tokens(Some("my-lora"), None),
        ),
        vector("by sequence hashes, to a rank", "gpu-1", 3, by_sequence()),
    ]
}

pub(super) fn queries() -> Vec<Value> {
    let workers = ["gpu-0", "gpu-1"].map(|name| WorkerName::new(name).unwrap());
    let narrowed = SingleQuery {
        options: QueryOptions {
            workers: Some(workers.to_vec()),
            limit: Some(3),
            min_blocks: 2,
            explain: true,
            tiers: true,
            predicted: true,
        },
        ..by_sequence()
    };
    let counted = SingleQuery {
        token_count: Some(32),
        ..by_sequence()
    };
    let compressed = SingleQuery {
        positions: Some(
            [0, 4095]
                .map(|position| Position::new(position).unwrap())
                .to_vec(),
        ),
        ..by_sequence()
    };
    vec![
        query_vector("by tokens", by_tokens(None, None)),
        query_vector(
            "by tokens, with an adapter and a salt",
            by_tokens(Some("my-lora"), Some("tenant-a")),
        ),
        query_vector(
            "by block hashes",
            SingleQuery::new(QueryKey::BlockHashes(BLOCKS.to_vec())),
        ),
        query_vector("by sequence hashes", by_sequence()),
        query_vector(
            "by lineage hashes",
            SingleQuery::new(QueryKey::LineageHashes(lineage_chain())),
        ),
        query_vector("with every option", narrowed),
        query_vector("a compressed chain", compressed),
        query_vector("with the number of tokens", counted),
    ]
}

pub(super) fn query_batches() -> Vec<Value> {
    let queries = vec![by_tokens(None, None), by_sequence()];
    let meaning: Value = queries.iter().map(query_meaning).collect();
    let request = QueryRequest::Batch(queries);
    let payload = request.encode();
    assert_eq!(QueryRequest::decode(&payload, &limits()), Ok(request));
    vec![json!({ "name": "two queries", "meaning": { "queries": meaning }, "payload": hex(&payload) })]
}

/// Checks the numbers of errors, which are a part of the contract, too.
#[test]
fn the_errors_of_refused_requests_are_numbered() {
    let unsupported = QueryRequest::decode(&[0x81, 0xa1, b'v', 2], &limits()).unwrap_err();
    assert_eq!(WireError::from(unsupported).code.as_u16(), 505);
    let empty = QueryRequest::decode(&[0x80], &limits()).unwrap_err();
    assert_eq!(WireError::from(empty).code.as_u16(), 400);
}
