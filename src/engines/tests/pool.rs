//! Mooncake Store: the holder to which each of its objects belongs, and the blocks that an object's events add or
//! remove.

use std::collections::BTreeSet;

use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::ModelKey;
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, Format, HashMode, Reason, Translation, Translator, TranslatorSettings,
};
use serde_json::{Value, json};

use crate::common::{Naive, contract_chain};

const SIZE: u32 = 4;
const HOST: u8 = 1;

struct Store {
    decoder: Decoder,
    translator: Translator,
    naive: Naive,
}

impl Store {
    fn new() -> Self {
        let settings = TranslatorSettings {
            block_size: BlockSize::new(SIZE).unwrap(),
            mode: HashMode::Trust { sample: 1 },
            ..TranslatorSettings::for_format(Format::Mooncake)
        };
        let model = Some(ModelKey::new("m"));
        Self {
            decoder: Decoder::new(Format::Mooncake, DecodeLimits::default()).of_model(model),
            translator: Translator::new(settings),
            naive: Naive::default(),
        }
    }

    /// Translates a batch. Returns the reason why the host tier is in doubt, and the reasons why events of the batch
    /// were left out.
    fn hear(&mut self, events: &[Value]) -> (Option<Reason>, Vec<Reason>) {
        let mut batch = EngineBatch::default();
        let payload = json!([1_795_580_032_112_u64, events, 0]).to_string();
        self.decoder.decode(payload.as_bytes(), &mut batch).unwrap();
        let mut output = Translation::default();
        self.translator.translate(&batch, &mut output);
        self.naive.apply(&output);
        assert_eq!(self.translator.doubt(), None);
        let doubts: Vec<_> = self.translator.tier_doubts().collect();
        assert!(doubts.iter().all(|(tier, _)| tier.as_u8() == HOST));
        let left_out = output.reasons.iter().map(|(reason, _)| reason);
        (doubts.first().map(|(_, reason)| *reason), left_out.collect())
    }

    fn blocks(&self) -> BTreeSet<SequenceHash> {
        self.naive.blocks(HOST)
    }
}

fn chain() -> Vec<SequenceHash> {
    let tokens: Vec<u32> = (0..4 * SIZE).collect();
    contract_chain(&tokens, SIZE, None, None)
}

/// An event with all fields of `mooncake_master` 0.3.14.
fn event(kind: &str, hashes: &[SequenceHash], fields: &Value) -> Value {
    let names: Vec<u64> = hashes.iter().map(|hash| hash.as_u64()).collect();
    let class = match kind {
        "stored" => "BlockStored",
        "removed" => "BlockRemoved",
        _ => "AllBlocksCleared",
    };
    let mut event = json!({
        "event_id": 1, "timestamp": 1_795_580_032_112_u64, "event_type": kind, "type": class, "model_name": "m",
        "block_size": SIZE, "additional_salt": null, "lora_name": null, "tenant_id": "default", "backend_id": "pool-1",
        "medium": if kind == "cleared" { json!(null) } else { json!("cpu") }, "dp_rank": 0, "group_id": null,
        "object_key": "key", "seq_hashes": names, "block_hashes": names, "session_id": null,
        "base_block_idx": null, "parent_hash": null, "token_ids": null, "parent_block_hash": null,
    });
    if kind == "cleared" {
        for key in ["seq_hashes", "block_hashes"] {
            event.as_object_mut().unwrap().remove(key);
        }
    }
    let fields = fields.as_object().unwrap().clone();
    event.as_object_mut().unwrap().extend(fields);
    event
}

/// Stored events of the first two blocks of the chain, with their positions.
fn placed() -> [Value; 2] {
    let chain = chain();
    [
        event("stored", &chain[..1], &json!({"base_block_idx": 0})),
        event(
            "stored",
            &chain[1..2],
            &json!({"base_block_idx": 1, "parent_hash": chain[0].as_u64()}),
        ),
    ]
}

/// The events of Mooncake's master have an object's key and no block hashes, so no block can be placed.
#[test]
fn an_object_under_a_key_alone_leaves_doubt() {
    let mut store = Store::new();
    assert_eq!(store.hear(&[event("removed", &[], &json!({}))]), (None, vec![]));
    let stored = event("stored", &[], &json!({"object_key": "m1@16@0@0011223344556677"}));
    let unjoined = (Some(Reason::Unjoined), vec![Reason::Unjoined]);
    assert_eq!(store.hear(std::slice::from_ref(&stored)), unjoined);
    assert_eq!(store.hear(&[event("cleared", &[], &json!({}))]), (None, vec![]));
    assert_eq!(store.hear(&[stored]), unjoined);
    assert_eq!(store.blocks().len(), 0);
}

#[test]
fn a_block_without_position_and_parent_is_no_root() {
    let mut store = Store::new();
    for hash in chain() {
        let stored = event("stored", &[hash], &json!({}));
        let unknown = Reason::UnknownParent;
        assert_eq!(store.hear(&[stored]), (Some(unknown), vec![unknown]));
    }
    assert_eq!(store.blocks().len(), 0);
}

/// Tests that several stores of the same object count as one copy. Until a clear, the tier is in doubt, because the
/// store does not report its evictions.
#[test]
fn stores_of_an_object_are_one_and_in_doubt() {
    let mut store = Store::new();
    let kept = (Some(Reason::NoRemovals), vec![]);
    for _ in 0..3 {
        assert_eq!(store.hear(&placed()), kept);
    }
    assert_eq!(store.hear(&[event("removed", &chain()[1..2], &json!({}))]), kept);
    assert_eq!(store.blocks(), BTreeSet::from([chain()[0]]));
    assert_eq!(store.hear(&[event("removed", &chain()[..1], &json!({}))]), kept);
    assert_eq!(store.hear(&[event("cleared", &[], &json!({}))]), (None, vec![]));
    let [first, second] = placed();
    let cleared = event("cleared", &[], &json!({}));
    assert_eq!(store.hear(&[first, cleared, second]), kept);
}

#[test]
fn what_belongs_to_others_is_not_the_holders() {
    let chain = chain();
    for fields in [
        json!({"model_name": "other"}),
        json!({"tenant_id": "tenant-b"}),
        json!({"backend_id": "pool-2"}),
    ] {
        let mut store = Store::new();
        store.hear(&placed());
        // Removals and clears of another owner do not change the holder's blocks.
        let foreign = [
            event("removed", &chain[..2], &fields),
            event("cleared", &[], &fields),
        ];
        let (doubt, left_out) = store.hear(&foreign);
        assert_eq!(
            (doubt, left_out),
            (Some(Reason::NoRemovals), vec![Reason::OtherOwner])
        );
        assert_eq!(store.blocks().len(), 2, "{fields}");
        let root = json!({"base_block_idx": 0});
        let mut stored = event("stored", &chain[3..], &root);
        let fields = fields.as_object().unwrap().clone();
        stored.as_object_mut().unwrap().extend(fields);
        store.hear(&[event("cleared", &[], &json!({}))]);
        let other = Reason::OtherOwner;
        assert_eq!(store.hear(&[stored]), (Some(other), vec![other]));
        assert_eq!(store.blocks().len(), 0);
    }
}

#[test]
fn a_part_of_a_block_or_one_of_an_adapter_is_not_the_block() {
    for (fields, reason) in [
        (json!({"tp_rank": 0}), Reason::Unjoined),
        (json!({"lora_name": "ad"}), Reason::Untold),
        (json!({"additional_salt": "s"}), Reason::Untold),
    ] {
        let mut store = Store::new();
        let mut stored = event("stored", &chain()[..1], &json!({"base_block_idx": 0}));
        let more = fields.as_object().unwrap().clone();
        stored.as_object_mut().unwrap().extend(more);
        assert_eq!(store.hear(&[stored]), (Some(reason), vec![reason]), "{fields}");
        assert_eq!(store.blocks().len(), 0);
    }
}
