//! Payloads of every format, and damage to them, from a seed.

use fastrand::Rng;
use kvatlas_engines::Format;
use serde_json::{Value, json};

use super::{Change, Engine, Names, Shape, Store};

/// Good payloads of every format.
pub(crate) fn payloads() -> Vec<(Format, Vec<u8>)> {
    let mut root = Store::new(&[1, 2, 3], None, &[1, 2, 3, 4, 5, 6], 2);
    root.salt_key = Some("tenant".to_owned());
    root.lora_name = Some("adapter".to_owned());
    root.images = vec![(1, "picture".to_owned())];
    root.group = Some((0, Some("full_attention")));
    let mut child = Store::new(&[4, 5], Some(3), &[7, 8, 9, 10], 2);
    child.medium = Some("CPU");
    let changes = [
        Change::Clear,
        Change::Store(root),
        Change::Store(child),
        Change::Remove {
            names: vec![2, 5],
            medium: Some("GPU"),
            group: Some(0),
        },
    ];
    let mut payloads = Vec::new();
    for shape in [
        Shape::Map,
        Shape::Array(6),
        Shape::Array(9),
        Shape::Array(12),
        Shape::Array(16),
    ] {
        for names in [Names::Unsigned, Names::Signed, Names::Bytes] {
            let payload = Engine { shape, names }.payload(&changes);
            payloads.push((Format::Vllm, payload.clone()));
            payloads.push((Format::Sglang, payload));
        }
    }
    for (format, value) in [
        (Format::Dynamo, router_events()),
        (Format::TensorRt, tensorrt_events()),
        (Format::Mooncake, pool_events()),
    ] {
        payloads.push((format, messagepack(&value)));
        payloads.push((format, value.to_string().into_bytes()));
    }
    let envelope = json!({"publisher_id": 7, "sequence": 3, "published_at": 1, "topic": "kv-events",
        "payload": router_events().to_string().into_bytes()});
    payloads.push((Format::Dynamo, messagepack(&envelope)));
    payloads.push((Format::Dynamo, envelope.to_string().into_bytes()));
    payloads
}

/// `value` as MessagePack.
pub(crate) fn messagepack(value: &Value) -> Vec<u8> {
    use rmp::encode;
    fn write(value: &Value, out: &mut Vec<u8>) {
        match value {
            Value::Null => encode::write_nil(out).unwrap(),
            Value::Bool(value) => encode::write_bool(out, *value).unwrap(),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => drop(encode::write_uint(out, number).unwrap()),
                (None, Some(number)) => drop(encode::write_sint(out, number).unwrap()),
                _ => encode::write_f64(out, number.as_f64().unwrap()).unwrap(),
            },
            Value::String(text) => encode::write_str(out, text).unwrap(),
            Value::Array(list) => {
                encode::write_array_len(out, u32::try_from(list.len()).unwrap()).unwrap();
                list.iter().for_each(|value| write(value, out));
            }
            Value::Object(map) => {
                encode::write_map_len(out, u32::try_from(map.len()).unwrap()).unwrap();
                for (key, value) in map {
                    encode::write_str(out, key).unwrap();
                    write(value, out);
                }
            }
        }
    }
    let mut out = Vec::new();
    write(value, &mut out);
    out
}

pub(crate) fn router_events() -> Value {
    let block = |name: u64| json!({"block_hash": name, "tokens_hash": name * 7, "mm_extra_info": null});
    let event = |id: u64, data: Value| {
        json!({"worker_id": 7, "storage_tier": "device", "residency_domain": "worker",
            "event": {"event_id": id, "data": data, "dp_rank": 0}})
    };
    json!([
        event(
            1,
            json!({"stored": {"parent_hash": null, "start_position": null, "blocks": [block(1), block(2)]}})
        ),
        event(
            2,
            json!({"stored": {"parent_hash": 2, "start_position": 2, "blocks": [block(3)]}})
        ),
        event(3, json!({"removed": {"block_hashes": [1]}})),
        event(4, json!("cleared")),
    ])
}

pub(crate) fn tensorrt_events() -> Value {
    let token =
        |token: u64, extra: u64| json!({"type": "unique_token", "token_id": token, "token_extra_id": extra});
    let block = |name: u64, level: u64| {
        json!({"type": "stored_block", "block_hash": name, "cache_level": level, "priority": 35,
            "tokens": [token(name, 0), token(name + 1, name % 2)], "mm_keys": [{"hash": "ab", "start_offset": 0}]})
    };
    let event = |id: u64, data: Value| json!({"event_id": id, "data": data, "window_size": 1024});
    json!([
        event(
            0,
            json!({"type": "created", "num_blocks_per_cache_level": [100, 50]})
        ),
        event(
            1,
            json!({"type": "stored", "parent_hash": null, "blocks": [block(1, 0), block(2, 0), block(3, 1)]})
        ),
        event(
            2,
            json!({"type": "updated", "block_hash": 1, "cache_level": {"old_value": 0, "new_value": 1}})
        ),
        event(3, json!({"type": "removed", "block_hashes": [3, 2]})),
    ])
}

pub(crate) fn pool_events() -> Value {
    json!([1.5, [
        {"event_type": "stored", "type": "BlockStored", "seq_hashes": [5, 6], "block_hashes": [1, 2], "parent_hash": 4,
            "base_block_idx": 2, "backend_id": "pool", "medium": "cpu"},
        {"event_type": "removed", "seq_hashes": [6], "backend_id": "pool", "medium": "disk"},
        {"event_type": "cleared", "backend_id": "pool"},
    ], 0])
}

/// Damages `payload` in one to three places. Most often, the damage is one changed byte.
pub(crate) fn mutate(payload: &mut Vec<u8>, others: &[(Format, Vec<u8>)], random: &mut Rng) {
    for _ in 0..=random.usize(..3) {
        let at = random.usize(..payload.len().max(1));
        match random.usize(..24) {
            0 => payload.truncate(at),
            1 => payload.insert(at, random.u8(..)),
            2 if at < payload.len() => drop(payload.remove(at)),
            3 => {
                // Inserts a piece of another payload.
                let (_, other) = &others[random.usize(..others.len())];
                let from = random.usize(..other.len().max(1));
                let until = (from + random.usize(..32)).min(other.len());
                payload.splice(
                    at.min(payload.len())..at.min(payload.len()),
                    other[from..until].iter().copied(),
                );
            }
            4 => {
                // Inserts the head of a long value.
                const HEADS: [u8; 8] = [0xdd, 0xdf, 0xdc, 0xde, 0xc6, 0xdb, 0xc9, 0x9f];
                let head = [HEADS[random.usize(..HEADS.len())], 0xff, 0xff, 0xff, 0xff];
                payload.splice(at.min(payload.len())..at.min(payload.len()), head);
            }
            5 => {
                // Repeats a piece.
                let until = (at + random.usize(..64)).min(payload.len());
                let piece = payload[at.min(until)..until].to_vec();
                payload.splice(until..until, piece);
            }
            kind => {
                // Changes one byte: one of its low three bits, or a small number for another, or any bit.
                if let Some(byte) = payload.get_mut(at) {
                    *byte = match kind {
                        6..12 => *byte ^ 1 << random.usize(..3),
                        12..18 if *byte < 0x80 => random.u8(..) & 0x7f,
                        _ => *byte ^ 1 << random.usize(..8),
                    };
                }
            }
        }
        if payload.is_empty() {
            return;
        }
    }
}
