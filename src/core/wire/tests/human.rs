//! Tests of messages as JSON: every written message is read back unchanged, and the error for a wrong message names the
//! mistake.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::hash::{BlockHash, Position, SequenceHash};

use super::super::{
    BatchReply, BlockContent, BlockNames, Event, EventBatch, HolderMatch, QueryReply, QueryRequest,
    QueryResult, RemovedBlocks, Resumable, ResumableBlocks, SingleQuery, StatusReply, StoredBlocks, Tier,
};
use super::generate;

fn event(text: &str) -> Result<Event, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn query(text: &str) -> Result<SingleQuery, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(batch in generate::batch(), request in generate::request()) {
        let text = serde_json::to_string(&batch).unwrap();
        prop_assert_eq!(serde_json::from_str::<EventBatch>(&text).unwrap(), batch, "{}", text);
        let text = serde_json::to_string(&request).unwrap();
        prop_assert_eq!(serde_json::from_str::<QueryRequest>(&text).unwrap(), request, "{}", text);
    }

    /// Checks that replies are read back equal. Counts that a reply may leave out are an exception: JSON always
    /// contains them.
    #[test]
    fn replies_are_read_back(reply in generate::query_reply(), batch in generate::batch_reply(), status in generate::status_reply()) {
        let text = serde_json::to_string(&reply).unwrap();
        prop_assert_eq!(serde_json::from_str::<QueryReply>(&text).unwrap(), with_bounds(reply));
        let text = serde_json::to_string(&batch).unwrap();
        let results = batch.results.into_iter().map(|result| match result {
            QueryResult::Reply(reply) => QueryResult::Reply(with_bounds(reply)),
            error @ QueryResult::Error(_) => error,
        });
        let batch = BatchReply { v: batch.v, results: results.collect() };
        prop_assert_eq!(serde_json::from_str::<BatchReply>(&text).unwrap(), batch);
        let text = serde_json::to_string(&status).unwrap();
        prop_assert_eq!(serde_json::from_str::<StatusReply>(&text).unwrap(), status);
    }

    /// Checks that serde's MessagePack writer writes the same bytes as `encode`, because both write the same entries.
    #[test]
    fn bytes_are_those_of_the_entries(batch in generate::batch_reply(), status in generate::status_reply()) {
        prop_assert_eq!(rmp_serde::to_vec_named(&batch).unwrap(), batch.encode());
        prop_assert_eq!(rmp_serde::to_vec_named(&status).unwrap(), status.encode());
    }
}

fn with_bounds(reply: QueryReply) -> QueryReply {
    let with_bound = |holder: HolderMatch| HolderMatch {
        matched_blocks_max: Some(holder.blocks_max()),
        usable_blocks: Some(holder.usable()),
        device_usable_blocks: holder.device_usable_blocks.or(holder.device_blocks),
        host_usable_blocks: holder.host_usable_blocks.or(holder.host_blocks),
        ..holder
    };
    QueryReply {
        holders: reply.holders.into_iter().map(with_bound).collect(),
        ..reply
    }
}

#[test]
fn an_event_has_the_keys_of_the_contract() {
    let text = r#"{"type":"stored","parent":"00000000000000aa","position":1,
        "sequence_hashes":["00000000000000ab", 172],"block_hashes":["0x1","0x2"],"engine_hashes":[7,8],"resumable":[1,1]}"#;
    let expected = StoredBlocks {
        names: BlockNames::Sequence {
            parent: Some(SequenceHash(0xaa)),
            position: Some(Position::new(1).unwrap()),
            hashes: vec![SequenceHash(0xab), SequenceHash(172)],
        },
        content: Some(BlockContent::BlockHashes(vec![BlockHash(1), BlockHash(2)])),
        engine_hashes: Some(vec![7, 8]),
        resumable: Resumable::from_flags([false, true]),
    };
    assert_eq!(event(text), Ok(Event::Stored(expected)));
    let batch = EventBatch {
        epoch: 7,
        seq: 1,
        rank: 0,
        time_us: None,
        tier: Tier::new(1).unwrap(),
        block_size: None,
        profile: None,
        events: vec![
            Event::Removed(RemovedBlocks::by_sequence(vec![SequenceHash(1)])),
            Event::Resumable(ResumableBlocks::by_sequence(vec![SequenceHash(2)], false)),
            Event::Cleared,
        ],
    };
    let expected = json!({
        "v": 1, "epoch": 7, "seq": 1, "rank": 0, "tier": 1,
        "events": [
            { "type": "removed", "sequence_hashes": ["0000000000000001"] },
            { "type": "resumable", "sequence_hashes": ["0000000000000002"], "resumable": false },
            { "type": "cleared" },
        ],
    });
    assert_eq!(serde_json::to_value(&batch).unwrap(), expected);
}

#[test]
fn replies_say_defaults_and_write_hashes_as_texts() {
    let reply: QueryReply = serde_json::from_value(json!({
        "v": 1, "query_blocks": 64, "holders_total": 1, "holders": [{
            "worker": "gpu-1", "rank": 0, "matched_blocks": 12, "exact": true,
            "dropped_out": { "position": 12, "lineage_hash": "3fc91a2b3c4d5e6f785cba9876543210", "other_holders": 1 },
        }],
    }))
    .unwrap();
    let written: Value = serde_json::to_value(&reply).unwrap();
    let holder = &written["holders"][0];
    assert_eq!(
        holder["dropped_out"]["lineage_hash"],
        "3fc91a2b3c4d5e6f785cba9876543210"
    );
    assert_eq!(
        (&holder["degraded"], &holder["matched_blocks_max"]),
        (&json!([]), &json!(12))
    );
    assert_eq!(holder["usable_blocks"], json!(12));
    assert_eq!(
        (&written["foreign_holders"], &written["unseen_blocks_max"]),
        (&json!(0), &json!(0))
    );
}

#[test]
fn every_fault_of_an_event_is_named() {
    for (text, part) in [
        ("[1,2]", "expected an object"),
        ("{", "EOF"),
        ("{}", "type is missing"),
        (r#"{"type":"evicted"}"#, "unknown variant `evicted`"),
        (r#"{"type":"cleared","tier":1}"#, "unknown field `tier`"),
        (r#"{"type":"cleared","parent":1}"#, "have a type only"),
        (r#"{"type":"goodbye","sequence_hashes":[]}"#, "have a type only"),
        (
            r#"{"type":"stored","sequence_hash":[]}"#,
            "unknown field `sequence_hash`",
        ),
        (r#"{"type":"stored","type":"stored"}"#, "duplicate field"),
        (r#"{"type":"stored"}"#, "sequence_hashes is missing"),
        (
            r#"{"type":"resumable","resumable":true}"#,
            "sequence_hashes is missing",
        ),
        (
            r#"{"type":"resumable","sequence_hashes":[1]}"#,
            "resumable is missing",
        ),
        (
            r#"{"type":"resumable","sequence_hashes":[1],"resumable":[1]}"#,
            "is a boolean",
        ),
        (
            r#"{"type":"resumable","sequence_hashes":[1],"resumable":true,"position":1}"#,
            "resumable only",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"resumable":false}"#,
            "run lengths",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"resumable":[1,1]}"#,
            "2 elements for 1 blocks",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1,2],"resumable":[1,0]}"#,
            "a run of no blocks",
        ),
        (
            r#"{"type":"removed","sequence_hashes":[1],"resumable":true}"#,
            "leave the others out",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"resumable":"all"}"#,
            "neither a boolean",
        ),
        (r#"{"type":"removed"}"#, "sequence_hashes is missing"),
        (
            r#"{"type":"removed","sequence_hashes":[],"tokens":[]}"#,
            "only; leave the others out",
        ),
        (
            r#"{"type":"stored","sequence_hashes":["12"]}"#,
            "write 16 hexadecimal digits",
        ),
        (r#"{"type":"stored","sequence_hashes":[1.5]}"#, "a hash"),
        (
            r#"{"type":"stored","sequence_hashes":[1],"position":3}"#,
            "needs a parent",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"position":16777216,"parent":1}"#,
            "16777215",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1,2],"block_hashes":[1]}"#,
            "1 elements for 2 blocks",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"engine_hashes":[]}"#,
            "0 elements for 1 blocks",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"block_hashes":[1],"tokens":[1]}"#,
            "not both",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"lora_name":"a"}"#,
            "belong to tokens",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"tokens":[4294967296]}"#,
            "u32",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[],"lineage_hashes":[]}"#,
            "not both",
        ),
        (
            r#"{"type":"stored","lineage_hashes":[],"parent":1}"#,
            "leave out parent",
        ),
    ] {
        let error = event(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
    for (text, part) in [
        (r#"{"epoch":1,"seq":0}"#, "from 1"),
        (r#"{"epoch":1,"seq":1,"tier":8}"#, "there is no tier 8"),
        (r#"{"epoch":1,"seq":1,"v":2}"#, "version 2"),
        (r#"{"seq":1}"#, "epoch is missing"),
    ] {
        let error = serde_json::from_str::<EventBatch>(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn every_fault_of_a_query_is_named() {
    for (text, part) in [
        ("[[1]]", "expected an object"),
        ("{}", "nothing is asked for"),
        (r#"{"tokens":[],"block_hashes":[]}"#, "only one of"),
        (r#"{"block_hashes":[],"cache_salt":"a"}"#, "belong to tokens"),
        (
            r#"{"sequence_hashes":["0x1"],"positions":[1],"explain":true}"#,
            "explain needs",
        ),
        (
            r#"{"sequence_hashes":["0x1"],"positions":[1],"tiers":true}"#,
            "tiers needs",
        ),
        (
            r#"{"sequence_hashes":["0x1"],"positions":[1,2]}"#,
            "2 elements for 1 hashes",
        ),
        (
            r#"{"sequence_hashes":["0x1"],"positions":[16777216]}"#,
            "16777215",
        ),
        (
            r#"{"block_hashes":["0x1"],"positions":[1]}"#,
            "belong to sequence_hashes",
        ),
        (r#"{"tokens":[1,2,3],"token_count":2}"#, "token_count is less"),
        (r#"{"token":[]}"#, "unknown field `token`"),
        (r#"{"tokens":[],"workers":["a b"]}"#, "a name may only have"),
        (r#"{"tokens":[-1]}"#, "u32"),
        (r#"{"queries":[{"tokens":[1]}]}"#, "belong to a request"),
    ] {
        let error = query(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
    let batch: QueryRequest = serde_json::from_str(r#"{"queries":[{"tokens":[1]}]}"#).unwrap();
    assert!(matches!(batch, QueryRequest::Batch(queries) if queries.len() == 1));
    let both = serde_json::from_str::<QueryRequest>(r#"{"queries":[],"tokens":[1]}"#).unwrap_err();
    assert!(both.to_string().contains("not both"), "{both}");
    // These values mean the same as an absent field.
    let void = r#"{"queries":[],"lora_name":"","cache_salt":null,"explain":false,"min_blocks":0}"#;
    assert!(serde_json::from_str::<QueryRequest>(void).is_ok());
    assert!(query(r#"{"block_hashes":[1],"lora_name":"","cache_salt":null}"#).is_ok());
}
