//! Forms of payloads that other versions of the engines write: names and tokens as text, long payloads, arrays without fields
//! for salts and adapters.

use kvatlas_core::hash::{HashSeed, block_hash_with, next_sequence_hash, object_hash};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, EngineChange, Format, Reason, Translation, Untold,
};
use serde_json::{Value, json};

use crate::common::{Naive, contract_chain, decode, translator};

const SIZE: u32 = 4;

fn tokens(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

/// A stored event as an array of `slots` elements. If `last` is not null, it is the last element.
fn stored_array(slots: usize, name: &Value, parent: &Value, tokens: &[u32], last: &Value) -> Value {
    let mut event = vec![
        json!("BlockStored"),
        json!([name]),
        parent.clone(),
        json!(tokens),
        json!(SIZE),
        Value::Null,
        json!("GPU"),
    ];
    event.resize(slots, Value::Null);
    if !last.is_null() {
        event[slots - 1] = last.clone();
    }
    json!(event)
}

fn translated(format: Format, events: &[Value]) -> (EngineBatch, Naive, Option<Reason>) {
    let batch = decode(format, json!([1.5, events, 0]).to_string().as_bytes());
    let (mut output, mut naive) = (Translation::default(), Naive::default());
    let mut translator = translator(SIZE);
    translator.translate(&batch, &mut output);
    naive.apply(&output);
    (batch, naive, translator.doubt())
}

#[test]
fn names_may_be_hexadecimal_text() {
    let name = |last: u64| json!(format!("{}{last:016x}", "ab".repeat(24)));
    for format in [Format::Vllm, Format::Sglang] {
        let root = stored_array(7, &name(1), &Value::Null, &tokens(0, 4), &Value::Null);
        let child = stored_array(7, &name(2), &name(1), &tokens(4, 4), &Value::Null);
        let removal = json!(["BlockRemoved", [name(2)], "GPU"]);
        let (batch, naive, doubt) = translated(format, &[root, child, removal]);
        assert_eq!((naive.blocks(0).len(), doubt), (1, None), "{format:?}");
        let EngineChange::Stored(stored) = batch.events()[1].change else {
            panic!("stored")
        };
        assert_eq!((batch.hashes(stored.names), stored.parent), (&[2][..], Some(1)));
    }
    for refused in [
        "",
        "12",
        "0123456789abcdef0",
        "0123456789abcdeg",
        "no name at all, you",
    ] {
        let event = stored_array(7, &json!(refused), &Value::Null, &tokens(0, 4), &Value::Null);
        assert_eq!(
            translated(Format::Vllm, &[event]).2,
            Some(Reason::Malformed),
            "{refused}"
        );
    }
}

#[test]
fn a_text_among_tokens_is_an_image() {
    let digest = "5a".repeat(32);
    let event = |text: &str| {
        json!({
            "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null, "block_size": SIZE,
            "token_ids": [0, 1, 2, 3, 4, text, 6, 7], "lora_id": null, "medium": "GPU", "lora_name": null,
        })
    };
    let (_, naive, doubt) = translated(Format::Vllm, &[event(&digest)]);
    assert_eq!(doubt, None);
    let seed = HashSeed::default();
    let first = contract_chain(&tokens(0, 4), SIZE, None, None)[0];
    let object = u64::from_str_radix(&digest[..16], 16).unwrap();
    let second = block_hash_with(&[4, 0, 6, 7], [object], seed);
    let expected = [first, next_sequence_hash(Some(first), second)];
    assert_eq!(naive.blocks(0), expected.into_iter().collect());
    assert_ne!(naive, translated(Format::Vllm, &[event("another image")]).1);
    assert_eq!(translated(Format::Vllm, &[event("")]).2, Some(Reason::Malformed));
    // TensorRT-LLM's list can have the same texts.
    let token = |token: Value| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0});
    let tokens = [json!(4), json!(digest), json!(6), json!(7)].map(token);
    let block = json!({"block_hash": 2, "tokens": tokens, "cache_level": 0});
    let data = json!({"type": "stored", "parent_hash": null, "blocks": [block]});
    let batch = decode(
        Format::TensorRt,
        json!([{"event_id": 0, "data": data}]).to_string().as_bytes(),
    );
    let mut output = Translation::default();
    translator(SIZE).translate(&batch, &mut output);
    let mut naive = Naive::default();
    naive.apply(&output);
    assert_eq!(
        naive.blocks(0),
        [next_sequence_hash(None, second)].into_iter().collect()
    );
}

#[test]
fn image_keys_tell_blocks_apart() {
    let event = |images: Value| {
        json!({
            "type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "block_size": SIZE,
            "token_ids": [0, 1, 2, 3], "lora_id": null, "medium": "GPU", "lora_name": null, "mm_keys": images,
        })
    };
    let image = |hash: &str| json!([[{"type": "mm_key", "hash": hash, "start_offset": 0}]]);
    let (_, naive, doubt) = translated(Format::Vllm, &[event(image("picture"))]);
    assert_eq!(doubt, None);
    let block = block_hash_with(&[0, 1, 2, 3], [object_hash(b"picture")], HashSeed::default());
    assert_eq!(
        naive.blocks(0),
        [next_sequence_hash(None, block)].into_iter().collect()
    );
    assert_eq!(
        translated(Format::Vllm, &[event(json!([[], []]))]).2,
        Some(Reason::Malformed)
    );
}

#[test]
fn a_long_payload_may_have_as_many_events_as_its_bytes_hold() {
    const EVENTS: u32 = 70_000;
    let removal = |name: u32| json!({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"});
    let events: Vec<Value> = (0..EVENTS).map(removal).collect();
    let payload = rmp_serde::to_vec(&json!([1.5, events, 0])).unwrap();
    assert_eq!(decode(Format::Vllm, &payload).events().len(), EVENTS as usize);
    // Empty events do not raise the limit: a payload of them may have no more events than a short one.
    let nothing = rmp_serde::to_vec(&json!([1.5, vec![Value::Null; 70_000], 0])).unwrap();
    let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
    assert!(decoder.decode(&nothing, &mut EngineBatch::default()).is_err());
}

#[test]
fn a_map_without_events_is_no_batch() {
    let block = json!({"block_hash": 1, "tokens_hash": 2});
    let data = json!({"stored": {"parent_hash": null, "blocks": [block]}});
    let of_dynamo = json!({"worker_id": 1, "event": {"event_id": 0, "data": data, "dp_rank": 0}});
    let enveloped = json!({"publisher_id": 1, "sequence": 0, "topic": "kv-events", "payload": []});
    let others = json!({"ts": 1.0, "kv_events": [{"type": "AllBlocksCleared"}]});
    for payload in [json!({}), json!({"ts": 1.0}), of_dynamo, enveloped, others] {
        for format in [Format::Vllm, Format::Sglang, Format::Mooncake, Format::TokenSpeed] {
            let mut decoder = Decoder::new(format, DecodeLimits::default());
            let decoded = decoder.decode(payload.to_string().as_bytes(), &mut EngineBatch::default());
            assert!(decoded.is_err(), "{format:?}: {payload}");
        }
    }
    assert!(decode(Format::Vllm, br#"{"events": []}"#).events().is_empty());
}

#[test]
fn the_time_of_a_batch_may_be_of_any_type() {
    for time in [json!("2026-01-01"), json!(-1), Value::Null, json!(true)] {
        let cleared = json!([{"type": "AllBlocksCleared"}]);
        for payload in [json!([time, cleared]), json!({"ts": time, "events": cleared})] {
            let batch = decode(Format::Vllm, payload.to_string().as_bytes());
            assert_eq!((batch.events().len(), batch.doubts().len()), (1, 0), "{payload}");
        }
    }
}

#[test]
fn old_forms_have_no_room_for_salts_and_adapters() {
    let of = |format, slots| {
        let event = stored_array(slots, &json!(1), &Value::Null, &tokens(0, 4), &Value::Null);
        translated(format, &[event]).0.untold
    };
    let untold = |salts, adapters| Untold { salts, adapters };
    for (slots, vllm, sglang) in [
        (7, untold(true, true), untold(true, true)),
        (8, untold(true, false), untold(false, true)),
        (9, untold(false, false), untold(false, true)),
        (12, untold(false, false), untold(false, true)),
    ] {
        assert_eq!(
            (of(Format::Vllm, slots), of(Format::Sglang, slots)),
            (vllm, sglang),
            "{slots}"
        );
    }
    let map = json!({
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [0, 1, 2, 3],
        "block_size": SIZE, "lora_id": null, "medium": "GPU", "lora_name": null,
    });
    assert_eq!(translated(Format::Vllm, &[map]).0.untold, Untold::default());
}

/// SGLang 0.5.5 named each page (block) by Python's hash of its tokens. Its events left out the parent of the first
/// page of each node of its tree.
#[test]
fn pages_that_are_named_by_their_own_tokens_leave_doubt() {
    // hash((1, 2, 3, 4)) of CPython 3.8 and later.
    let event = |name: u64, tokens: Vec<u32>| json!(["BlockStored", [name], null, tokens, 4, null]);
    let python = 590_899_387_183_067_792;
    let (_, naive, doubt) = translated(Format::Sglang, &[event(python, tokens(1, 4))]);
    assert_eq!((doubt, naive.blocks(0).len()), (Some(Reason::UnknownParent), 1));
    assert_eq!(
        translated(Format::Sglang, &[event(python + 1, tokens(1, 4))]).2,
        None
    );
    assert_eq!(translated(Format::Vllm, &[event(python, tokens(1, 4))]).2, None);
}
