//! Requests of daemons and answers of publishers in the test vectors: their meaning, and their bytes.

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    BatchCursor, Event, EventBatch, RemovedBlocks, ResyncAnswerKind, ResyncChunk, ResyncRequest,
};
use serde_json::{Value, json};

use super::batches::{batch, batch_meaning, stored, stored_behind};
use super::{CHAIN, SECOND, hex, limits, present};

pub(super) fn resync_requests() -> Vec<Value> {
    let vector = |name: &str, request: ResyncRequest| {
        let payload = request.encode();
        assert_eq!(ResyncRequest::decode(&payload, &limits()), Ok(request), "{name}");
        let BatchCursor { epoch, seq } = request.cursor;
        let meaning = json!({ "rank": request.rank, "epoch": epoch, "seq": seq, "full": request.full });
        json!({ "name": name, "meaning": meaning, "payload": hex(&payload) })
    };
    let request = |epoch, seq, full| ResyncRequest {
        rank: 0,
        cursor: BatchCursor { epoch, seq },
        full,
    };
    vec![
        vector("what came after batch 3", request(7, 3, false)),
        vector("a daemon that knows nothing", request(0, 0, false)),
        vector("only the full state helps", request(7, 3, true)),
    ]
}

fn chunk_vector(name: &str, chunk: &ResyncChunk) -> Value {
    let payload = chunk.encode();
    assert_eq!(
        ResyncChunk::decode(&payload, &limits()).as_ref(),
        Ok(chunk),
        "{name}"
    );
    let batches = chunk.decode_batches(&limits()).unwrap();
    let meaning = present(&[
        ("rank", Some(json!(chunk.rank))),
        ("epoch", Some(json!(chunk.cursor.epoch))),
        ("seq", Some(json!(chunk.cursor.seq))),
        ("kind", Some(json!(chunk.kind.as_str()))),
        ("time_us", chunk.time_us.map(|time| json!(time))),
        (
            "recomputed_block_size",
            chunk.recomputed_block_size.map(|size| json!(size)),
        ),
        ("chunk", Some(json!(chunk.number))),
        ("last", Some(json!(chunk.is_last))),
        ("batches", Some(batches.iter().map(batch_meaning).collect())),
    ]);
    json!({ "name": name, "meaning": meaning, "payload": hex(&payload) })
}

pub(super) fn resync_chunks() -> Vec<Value> {
    let nothing = ResyncChunk {
        rank: 0,
        cursor: BatchCursor { epoch: 7, seq: 5 },
        kind: ResyncAnswerKind::Missing,
        number: 0,
        is_last: true,
        time_us: Some(1_800_000_000_123_456),
        recomputed_block_size: None,
        batches: Vec::new(),
    };
    let numbered = |seq, events| EventBatch { seq, ..batch(events) }.encode();
    let missing = ResyncChunk {
        batches: vec![
            numbered(4, vec![stored(None, None)]),
            numbered(
                5,
                vec![Event::Removed(RemovedBlocks::by_sequence(vec![CHAIN[1]]))],
            ),
        ],
        ..nothing
    };
    let first = ResyncChunk {
        kind: ResyncAnswerKind::Full,
        is_last: false,
        batches: vec![numbered(5, vec![stored(None, None)])],
        ..nothing
    };
    let second = ResyncChunk {
        number: 1,
        is_last: true,
        batches: vec![numbered(
            5,
            vec![stored_behind(SECOND, Some(2), vec![SequenceHash(3)])],
        )],
        ..first
    };
    let recomputed = ResyncChunk {
        is_last: true,
        recomputed_block_size: Some(16),
        batches: vec![numbered(5, vec![stored(None, Some(vec![7000, 7001]))])],
        ..first
    };
    vec![
        chunk_vector("nothing is missing", &nothing),
        chunk_vector("the two batches after the third", &missing),
        chunk_vector("the full state, its first chunk", &first),
        chunk_vector("the full state, its last chunk", &second),
        chunk_vector("a full state with names of the engine's", &recomputed),
    ]
}
