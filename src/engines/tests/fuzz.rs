//! Tests that damaged payloads of every format cause no panic, take bounded memory, and add no blocks that contradict
//! each other.
//!
//! `KVATLAS_FUZZ_ROUNDS` and `KVATLAS_FUZZ_SEED` set the number of rounds and the seed.

use kvatlas_engines::{
    BatchError, DecodeLimits, Decoder, EngineBatch, EngineChange, Format, Reason, Translation,
};
use serde_json::json;

use crate::common::mutation::{messagepack, mutate, payloads};
use crate::common::{Change, Engine, Naive, Store, decode, restarted, settings, translator};
use fastrand::Rng;

fn number_from(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

#[test]
fn damage_is_counted_and_never_a_panic() {
    let rounds = number_from("KVATLAS_FUZZ_ROUNDS", 60_000);
    let seed = number_from("KVATLAS_FUZZ_SEED", 0x6b76_6174_6c61);
    let good = payloads();
    let mut random = Rng::with_seed(seed);
    let mut decoders = Format::ALL.map(|format| Decoder::new(format, DecodeLimits::default()));
    let mut batch = EngineBatch::default();
    let mut output = Translation::default();
    let mut translators = Format::ALL.map(|_| (translator(2), Naive::default()));
    let (mut read, mut refused, mut left_out) = (0_u64, 0_u64, 0_u64);
    for round in 0..rounds {
        let (format, payload) = &good[random.usize(..good.len())];
        let mut payload = payload.clone();
        mutate(&mut payload, &good, &mut random);
        let place = Format::ALL.iter().position(|other| other == format).unwrap();
        match decoders[place].decode(&payload, &mut batch) {
            Ok(()) => read += 1,
            Err(_) => {
                refused += 1;
                assert!(batch.events().is_empty() && batch.reasons.is_empty());
            }
        }
        left_out += batch.reasons.iter().map(|(_, times)| times).sum::<u64>();
        check_spans(&batch, seed, round);
        let (translator, naive) = &mut translators[place];
        output.clear();
        translator.translate(&batch, &mut output);
        // The naive index refuses a block that is stored twice, or removed without being held.
        naive.apply(&output);
        assert!(
            naive
                .held
                .values()
                .all(|blocks| blocks.len() <= translator.names())
        );
        if round % 100 == 0 {
            *translator = restarted(translator, settings(2));
        }
        if round % 1000 == 0 {
            let mut full = Translation::default();
            translator.full_state(&mut full);
            let mut restored = Naive::default();
            restored.apply(&full);
            assert_eq!(&restored, naive, "seed {seed}, round {round}");
            translator.reset();
            *naive = Naive::default();
        }
    }
    // The damage leaves enough to read, and enough to refuse.
    assert!(
        read > rounds / 10 && refused > rounds / 10 && left_out > rounds / 10,
        "{read} {refused} {left_out}"
    );
}

/// Checks that every span in the batch's events lies within the batch's lists.
fn check_spans(batch: &EngineBatch, seed: u64, round: u64) {
    for event in batch.events() {
        if let Some(owner) = event.owner {
            assert_eq!(batch.text(owner).len(), owner.len(), "seed {seed}, round {round}");
        }
        match event.change {
            EngineChange::Stored(stored) => {
                assert_eq!(batch.hashes(stored.names).len(), stored.names.len());
                let objects = batch.objects(stored.objects);
                assert_eq!(objects.len(), stored.objects.len());
                assert!(objects.is_sorted(), "seed {seed}, round {round}");
                assert!(
                    objects
                        .iter()
                        .all(|object| (object.block as usize) < stored.names.len())
                );
            }
            EngineChange::Removed(removed) => {
                assert_eq!(batch.hashes(removed.names).len(), removed.names.len());
            }
            EngineChange::Created(_) | EngineChange::Moved { .. } | EngineChange::Cleared => {}
        }
    }
}

#[test]
fn a_field_that_cannot_be_read_costs_its_event() {
    let good = Store::new(&[1, 2], None, &[1, 2, 3, 4], 2);
    let whole = Engine::PLAIN.payload(&[Change::Store(good.clone()), Change::Clear, Change::Store(good)]);
    let bad_events = [
        json!({"type": "BlockStored"}),
        json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": "no list", "token_ids": [1, 2], "block_size": 2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1.5], "token_ids": [1, 2], "block_size": 2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, -2], "block_size": 2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 4_294_967_296_u64], "block_size": 2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2]}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": -2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [[1, 2], [3, 4]], "block_size": 2}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "extra_keys": [null, null]}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "extra_keys": [[{}]]}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "lookahead_token_ids": [1]}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "medium": 7}),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "extra_keys": [[["image", "far"]]]}),
        json!(["BlockStored", [1], null, [1, 2], 2, null, "GPU", {}]),
        json!(["BlockRemoved", [1], "GPU", 0, "LOCAL", "LOCAL"]),
        json!({"type": "BlockStored", "parent_block_hash": null, "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "extra_keys": [[null]]}),
        json!([
            "BlockStored",
            [1],
            null,
            [1, 2],
            2,
            null,
            "GPU",
            null,
            null,
            0,
            "mla_attention",
            "wide"
        ]),
        json!({"type": "BlockRemoved"}),
        json!({"type": "BlockRemoved", "block_hashes": [null]}),
        json!({"parent_block_hash": null, "block_hashes": [1]}),
        json!({"type": 5}),
        json!(["BlockStored", [1], null, [1, 2]]),
        json!(["BlockRemoved"]),
        json!([]),
        json!("BlockStored"),
        json!(null),
    ];
    for bad in &bad_events {
        let payload = with_second_event(&whole, &messagepack(bad));
        let batch = decode(Format::Vllm, &payload);
        assert_eq!(batch.events().len(), 2, "{bad}");
        assert_eq!(
            batch.reasons.of(Reason::Malformed),
            1,
            "{bad}: {:?}",
            batch.reasons
        );
        let EngineChange::Stored(last) = batch.events()[1].change else {
            unreachable!("the last is a store");
        };
        assert_eq!(batch.hashes(last.names), [1, 2], "{bad}");
    }
    let unknown = with_second_event(
        &whole,
        &messagepack(&json!({"type": "BlocksShuffled", "x": [1, {}]})),
    );
    assert_eq!(
        decode(Format::Vllm, &unknown).reasons.doubt(),
        Some(Reason::UnknownEvent)
    );
}

#[test]
fn a_key_that_comes_twice_costs_its_event() {
    let once = messagepack(&json!({"type": "BlockRemoved", "block_hashes": [1]}));
    let entry = messagepack(&json!({"block_hashes": [1]}));
    // Repeats the entry, and the map head counts both.
    let twice = [&[once[0] + 1], &once[1..], &entry[1..]].concat();
    for (event, malformed) in [(&once, 0), (&twice, 1)] {
        let payload = [&[0x92, 1, 0x91], event.as_slice()].concat();
        let batch = decode(Format::Vllm, &payload);
        assert_eq!(batch.reasons.of(Reason::Malformed), malformed);
        assert_eq!(batch.events().len() as u64, 1 - malformed);
    }
}

/// The payload with another event in the place of its second event, which is a clear.
fn with_second_event(payload: &[u8], event: &[u8]) -> Vec<u8> {
    let clear = messagepack(&json!({"type": "AllBlocksCleared"}));
    let at = payload
        .windows(clear.len())
        .position(|window| window == clear)
        .unwrap();
    [&payload[..at], event, &payload[at + clear.len()..]].concat()
}

#[test]
fn what_is_no_batch_is_an_error() {
    let mut batch = EngineBatch::default();
    for format in Format::ALL {
        let mut decoder = Decoder::new(format, DecodeLimits::default());
        for bytes in [
            &b""[..],
            &[0xc1],
            &[0xdd, 0xff, 0xff, 0xff, 0xff],
            b"\"text\"",
            &[0x93, 1],
            b"[1, 2",
        ] {
            assert!(decoder.decode(bytes, &mut batch).is_err(), "{format:?} {bytes:?}");
        }
    }
    let mut decoder = Decoder::new(Format::Dynamo, DecodeLimits::default());
    let inner = json!({"publisher_id": 1, "sequence": 2, "payload": []});
    let outer = json!({"publisher_id": 1, "sequence": 2, "payload": inner.to_string().into_bytes()});
    assert_eq!(
        decoder.decode(outer.to_string().as_bytes(), &mut batch),
        Err(BatchError::Nested)
    );
    let small = DecodeLimits {
        payload_bytes_max: 10,
        ..DecodeLimits::default()
    };
    let mut decoder = Decoder::new(Format::Vllm, small);
    assert!(decoder.decode(&[0xc0; 11], &mut batch).is_err());
}
