//! Event batches in the test vectors: their meaning, and their bytes.

use kvatlas_core::hash::{BlockHash, BlockSize, Position, SequenceHash};
use kvatlas_core::wire::{
    Address, BlockContent, BlockNames, DegradedReason, DegradedReasons, Event, EventBatch, Labels, Profile,
    RemovedBlocks, Resumable, ResumableBlocks, StoredBlocks, Tier,
};
use serde_json::{Value, json};

use super::{BLOCKS, CHAIN, FIRST, SECOND, hex, limits, lineage_chain, lineage_hexes, present, wide, wides};

fn event_meaning(event: &Event) -> Value {
    match event {
        Event::Stored(stored) => stored_meaning(stored),
        Event::Removed(removed) => present(&[
            ("type", Some(json!("removed"))),
            (
                "sequence_hashes",
                Some(wides(&removed.hashes, SequenceHash::as_u64)),
            ),
            (
                "lineage_hashes",
                (!removed.lineage_hashes.is_empty()).then(|| lineage_hexes(&removed.lineage_hashes)),
            ),
        ]),
        Event::Resumable(blocks) => present(&[
            ("type", Some(json!("resumable"))),
            (
                "sequence_hashes",
                Some(wides(&blocks.hashes, SequenceHash::as_u64)),
            ),
            (
                "lineage_hashes",
                (!blocks.lineage_hashes.is_empty()).then(|| lineage_hexes(&blocks.lineage_hashes)),
            ),
            ("resumable", Some(json!(blocks.resumable))),
        ]),
        Event::Cleared => json!({ "type": "cleared" }),
        Event::Doubted(reasons) => json!({ "type": "doubted", "reasons": reasons }),
        Event::Goodbye => json!({ "type": "goodbye" }),
    }
}

fn stored_meaning(stored: &StoredBlocks) -> Value {
    let mut entries = vec![("type", Some(json!("stored")))];
    match &stored.names {
        BlockNames::Sequence {
            parent,
            position,
            hashes,
        } => entries.extend([
            ("parent", parent.map(|parent| wide(parent.as_u64()))),
            ("position", position.map(|position| json!(position.as_u64()))),
            ("sequence_hashes", Some(wides(hashes, SequenceHash::as_u64))),
        ]),
        BlockNames::Lineage(hashes) => entries.push(("lineage_hashes", Some(lineage_hexes(hashes)))),
    }
    match &stored.content {
        None => {}
        Some(BlockContent::BlockHashes(hashes)) => {
            entries.push(("block_hashes", Some(wides(hashes, BlockHash::as_u64))));
        }
        Some(BlockContent::Tokens {
            tokens,
            lora_name,
            cache_salt,
        }) => entries.extend([
            ("tokens", Some(json!(tokens))),
            ("lora_name", lora_name.as_ref().map(|name| json!(name))),
            ("cache_salt", cache_salt.as_ref().map(|salt| json!(salt))),
        ]),
    }
    let names = stored.engine_hashes.as_ref();
    entries.push(("engine_hashes", names.map(|names| wides(names, |name| name))));
    entries.push(("resumable", stored.resumable.runs().map(|runs| json!(runs))));
    present(&entries)
}

pub(super) fn batch_meaning(batch: &EventBatch) -> Value {
    present(&[
        ("epoch", Some(json!(batch.epoch))),
        ("seq", Some(json!(batch.seq))),
        ("rank", Some(json!(batch.rank))),
        ("time_us", batch.time_us.map(|time| json!(time))),
        ("tier", Some(json!(batch.tier.as_u8()))),
        ("block_size", batch.block_size.map(|size| json!(size.as_u32()))),
        ("profile", batch.profile.as_ref().map(profile_meaning)),
        ("events", Some(batch.events.iter().map(event_meaning).collect())),
    ])
}

/// Returns an address and labels as the meaning of a batch.
fn profile_meaning(profile: &Profile) -> Value {
    let address = profile.address.as_ref().map(Address::as_str);
    json!({ "address": address, "labels": profile.labels })
}

/// Returns the profile that some test vectors contain.
pub(super) fn profile() -> Profile {
    let labels = [("role", "prefill"), ("topology.kubernetes.io/zone", "eu-1a")];
    let owned = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Profile {
        address: Some(Address::new("10.0.0.7:8000").unwrap()),
        labels: Labels::new(owned.into()).unwrap(),
    }
}

pub(super) fn batch(events: Vec<Event>) -> EventBatch {
    EventBatch {
        epoch: 7,
        seq: 1,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    }
}

fn batch_vector(name: &str, batch: &EventBatch) -> Value {
    let payload = batch.encode();
    assert_eq!(
        EventBatch::decode(&payload, &limits()).as_ref(),
        Ok(batch),
        "{name}"
    );
    json!({ "name": name, "meaning": batch_meaning(batch), "payload": hex(&payload) })
}

/// Returns a test vector for a second encoding of a batch, in which the bytes are different and the meaning is the
/// same. Encoders need not produce this encoding, but every daemon must accept it.
fn other_bytes(name: &str, batch: &EventBatch, other: &Value) -> Value {
    let payload = rmp_serde::to_vec_named(other).unwrap();
    assert_eq!(
        EventBatch::decode(&payload, &limits()).as_ref(),
        Ok(batch),
        "{name}"
    );
    json!({ "name": name, "meaning": batch_meaning(batch), "payload": hex(&payload), "only_decode": true })
}

pub(super) fn stored(content: Option<BlockContent>, engine_hashes: Option<Vec<u64>>) -> Event {
    Event::Stored(StoredBlocks {
        content,
        engine_hashes,
        ..StoredBlocks::by_sequence(None, None, CHAIN.to_vec())
    })
}

pub(super) fn stored_behind(parent: u64, position: Option<u64>, hashes: Vec<SequenceHash>) -> Event {
    let position = position.map(|position| Position::new(position).unwrap());
    Event::Stored(StoredBlocks::by_sequence(
        Some(SequenceHash(parent)),
        position,
        hashes,
    ))
}

fn tokens(lora_name: Option<&str>, cache_salt: Option<&str>) -> BlockContent {
    BlockContent::Tokens {
        tokens: (1..=32).collect(),
        lora_name: lora_name.map(str::to_owned),
        cache_salt: cache_salt.map(str::to_owned),
    }
}

pub(super) fn batches() -> Vec<Value> {
    let by_lineage = |names| {
        Event::Stored(StoredBlocks {
            names: BlockNames::Lineage(lineage_chain()),
            content: None,
            engine_hashes: names,
            resumable: Resumable::ALL,
        })
    };
    let partly = |resumable| {
        Event::Stored(StoredBlocks {
            resumable,
            ..StoredBlocks::by_sequence(None, None, CHAIN.to_vec())
        })
    };
    let plain = batch(vec![stored(None, None)]);
    let told = EventBatch {
        block_size: Some(BlockSize::DEFAULT),
        ..plain.clone()
    };
    let many: Vec<SequenceHash> = (1..=40).map(SequenceHash).collect();
    let removed = RemovedBlocks {
        hashes: vec![CHAIN[1]],
        lineage_hashes: lineage_chain(),
    };
    let everything = EventBatch {
        epoch: 1_800_000_000_000_000,
        seq: 300,
        rank: 70_000,
        time_us: Some(1_800_000_000_123_456),
        tier: Tier::new(2).unwrap(),
        block_size: None,
        profile: Some(Profile {
            address: Some(Address::new("https://[fd00::7]:8443/v1").unwrap()),
            labels: Labels::NONE,
        }),
        events: vec![
            Event::Cleared,
            stored(None, None),
            Event::Removed(RemovedBlocks::by_sequence(vec![CHAIN[1]])),
            Event::Goodbye,
        ],
    };
    let arrays = json!({
        "unknown": { "to": ["everybody", null] },
        "events": [{ "sequence_hashes": [FIRST, SECOND], "type": "stored", "parent": null, "position": null }],
        "tier": null,
        "block_size": null,
        "address": null,
        "labels": null,
        "time_us": null,
        "seq": 1,
        "epoch": 7,
    });
    vec![
        batch_vector("a heartbeat", &batch(Vec::new())),
        batch_vector(
            "a heartbeat, with an address and labels",
            &EventBatch {
                profile: Some(profile()),
                ..batch(Vec::new())
            },
        ),
        batch_vector(
            "an address and labels no more",
            &EventBatch {
                profile: Some(Profile::default()),
                ..batch(Vec::new())
            },
        ),
        batch_vector("stored from position 0", &plain),
        batch_vector("stored, with the block size", &told),
        batch_vector(
            "stored behind a parent",
            &batch(vec![stored_behind(FIRST, None, vec![CHAIN[1]])]),
        ),
        batch_vector(
            "stored behind a parent at a position",
            &batch(vec![stored_behind(FIRST, Some(1), vec![CHAIN[1]])]),
        ),
        batch_vector("stored by lineage hashes", &batch(vec![by_lineage(None)])),
        batch_vector(
            "stored by lineage hashes with names",
            &batch(vec![by_lineage(Some(vec![1, u64::MAX]))]),
        ),
        batch_vector(
            "stored with block hashes",
            &batch(vec![stored(
                Some(BlockContent::BlockHashes(BLOCKS.to_vec())),
                None,
            )]),
        ),
        batch_vector(
            "stored with tokens",
            &batch(vec![stored(Some(tokens(Some("my-lora"), Some("租户"))), None)]),
        ),
        batch_vector(
            "stored with engine hashes",
            &batch(vec![stored(Some(tokens(None, None)), Some(vec![1, u64::MAX]))]),
        ),
        batch_vector(
            "a blob of more than 255 bytes",
            &batch(vec![Event::Stored(StoredBlocks::by_sequence(None, None, many))]),
        ),
        batch_vector(
            "removed, by both kinds of hashes",
            &batch(vec![Event::Removed(removed)]),
        ),
        batch_vector(
            "stored, only the last one resumable",
            &batch(vec![partly(Resumable::from_flags([false, true]))]),
        ),
        batch_vector(
            "stored, only the first one resumable, and none",
            &batch(vec![
                partly(Resumable::from_flags([true, false])),
                partly(Resumable::none()),
            ]),
        ),
        batch_vector(
            "resumable, and not, by both kinds of hashes",
            &batch(vec![
                Event::Resumable(ResumableBlocks::by_sequence(vec![CHAIN[0]], true)),
                Event::Resumable(ResumableBlocks {
                    hashes: vec![CHAIN[1]],
                    lineage_hashes: lineage_chain(),
                    resumable: false,
                }),
            ]),
        ),
        batch_vector("cleared", &batch(vec![Event::Cleared])),
        batch_vector(
            "doubted",
            &batch(vec![Event::Doubted(DegradedReasons::of(
                DegradedReason::UpstreamGap,
            ))]),
        ),
        batch_vector(
            "doubted no more",
            &batch(vec![Event::Doubted(DegradedReasons::default())]),
        ),
        batch_vector(
            "doubted, as groups of layers are not known",
            &batch(vec![Event::Doubted(DegradedReasons::of(
                DegradedReason::UnknownGroups,
            ))]),
        ),
        batch_vector("goodbye", &batch(vec![Event::Goodbye])),
        batch_vector("every field, and several events", &everything),
        other_bytes("arrays, nil, another order, an unknown key", &plain, &arrays),
    ]
}

pub(super) fn batches_refused() -> Vec<Value> {
    let event = |event: Value| json!({ "epoch": 7, "seq": 1, "events": [event] });
    let cases = [
        ("no epoch", json!({ "seq": 1 })),
        ("number 0", json!({ "epoch": 7, "seq": 0 })),
        ("another version", json!({ "v": 2, "epoch": 7, "seq": 1 })),
        ("tier 8", json!({ "epoch": 7, "seq": 1, "tier": 8 })),
        (
            "blocks of no tokens",
            json!({ "epoch": 7, "seq": 1, "block_size": 0 }),
        ),
        (
            "blocks that are too long",
            json!({ "epoch": 7, "seq": 1, "block_size": 65_537 }),
        ),
        (
            "an address without a port",
            json!({ "epoch": 7, "seq": 1, "address": "10.0.0.7" }),
        ),
        (
            "an address with a user",
            json!({ "epoch": 7, "seq": 1, "address": "http://user@10.0.0.7:8000" }),
        ),
        (
            "an address with a control character",
            json!({ "epoch": 7, "seq": 1, "address": "10.0.0.7\n:8000" }),
        ),
        (
            "a label that is no text",
            json!({ "epoch": 7, "seq": 1, "labels": { "rank": 7 } }),
        ),
        (
            "a label without a key",
            json!({ "epoch": 7, "seq": 1, "labels": { "": "prefill" } }),
        ),
        (
            "a label that is too long",
            json!({ "epoch": 7, "seq": 1, "labels": { "role": "r".repeat(129) } }),
        ),
        ("no map", json!([7, 1])),
        (
            "an event without a type",
            event(json!({ "sequence_hashes": [1] })),
        ),
        ("an unknown type", event(json!({ "type": "moved" }))),
        ("no hashes", event(json!({ "type": "stored" }))),
        (
            "both kinds of hashes",
            event(json!({ "type": "stored", "sequence_hashes": [1], "lineage_hashes": [] })),
        ),
        (
            "a position above 0 without a parent",
            event(json!({ "type": "stored", "sequence_hashes": [1], "position": 3 })),
        ),
        (
            "position 0 with a parent",
            event(json!({ "type": "stored", "sequence_hashes": [1], "position": 0, "parent": 5 })),
        ),
        (
            "a position beyond the last",
            event(
                json!({ "type": "stored", "sequence_hashes": [1, 2], "position": 16_777_215, "parent": 5 }),
            ),
        ),
        (
            "fewer names than blocks",
            event(json!({ "type": "stored", "sequence_hashes": [1, 2], "engine_hashes": [1] })),
        ),
        (
            "more blocks in the runs than there are",
            event(json!({ "type": "stored", "sequence_hashes": [1, 2], "resumable": [2, 1] })),
        ),
        (
            "a run of no blocks",
            event(json!({ "type": "stored", "sequence_hashes": [1, 2], "resumable": [1, 0, 1] })),
        ),
        (
            "a boolean for runs",
            event(json!({ "type": "stored", "sequence_hashes": [1, 2], "resumable": true })),
        ),
        (
            "runs for a boolean",
            event(json!({ "type": "resumable", "sequence_hashes": [1, 2], "resumable": [1] })),
        ),
        (
            "whether blocks are resumable is not said",
            event(json!({ "type": "resumable", "sequence_hashes": [1, 2] })),
        ),
        (
            "tokens that make no whole blocks",
            event(json!({ "type": "stored", "sequence_hashes": [1, 2], "tokens": [1, 2, 3] })),
        ),
        (
            "a negative hash",
            event(json!({ "type": "stored", "sequence_hashes": [-1] })),
        ),
    ];
    let refused = |(why, meaning): &(&str, Value)| {
        let payload = rmp_serde::to_vec_named(meaning).unwrap();
        refused_vector(why, &payload)
    };
    let mut vectors: Vec<Value> = cases.iter().map(refused).collect();
    let whole = batch(vec![stored(None, None)]).encode();
    vectors.push(refused_vector("cut short", &whole[..whole.len() - 1]));
    vectors.push(refused_vector(
        "bytes behind the map",
        &[whole.as_slice(), &[0xc0]].concat(),
    ));
    vectors.push(refused_vector("a blob of 7 bytes", &ragged()));
    vectors
}

/// Returns a batch with a blob of hashes whose length is not a multiple of a hash's length.
fn ragged() -> Vec<u8> {
    let mut payload = vec![0x83, 0xa5];
    payload.extend(b"epoch\x07\xa3seq\x01\xa6events\x91\x82\xa4type\xa6stored\xafsequence_hashes\xc4\x07");
    payload.extend([0; 7]);
    payload
}

fn refused_vector(why: &str, payload: &[u8]) -> Value {
    assert!(EventBatch::decode(payload, &limits()).is_err(), "{why}");
    json!({ "why": why, "payload": hex(payload) })
}
