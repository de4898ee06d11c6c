//! Tests of Dynamo's event plane. In its events about tiers beyond the device, two facts are lost that the engine's
//! own events tell: whether a store reports its removals, and which blocks load only together.

use kvatlas_core::hash::BlockSize;
use kvatlas_engines::{Format, Reason, Translation, Translator, TranslatorSettings};
use serde_json::{Value, json};

use crate::common::{Naive, decode};

struct Worker {
    translator: Translator,
    naive: Naive,
}

impl Worker {
    fn new(tells_beyond: bool) -> Self {
        let settings = TranslatorSettings {
            block_size: BlockSize::new(16).unwrap(),
            tells_beyond,
            ..TranslatorSettings::for_format(Format::Dynamo)
        };
        Self {
            translator: Translator::new(settings),
            naive: Naive::default(),
        }
    }

    /// Translates an event about a tier. Returns the doubts about single tiers, and asserts that the worker as a whole is
    /// in no doubt.
    fn hear(&mut self, tier: &str, data: &Value) -> Vec<(u8, Reason)> {
        let event = json!({"event_id": 0, "data": data, "dp_rank": 0});
        let event =
            json!({"worker_id": 7, "storage_tier": tier, "residency_domain": "worker", "event": event});
        let batch = decode(Format::Dynamo, event.to_string().as_bytes());
        let mut output = Translation::default();
        self.translator.translate(&batch, &mut output);
        self.naive.apply(&output);
        assert_eq!(self.translator.doubt(), None);
        let doubts = self.translator.tier_doubts();
        doubts.map(|(tier, reason)| (tier.as_u8(), reason)).collect()
    }
}

fn stored() -> Value {
    let block = |name: u64| json!({"block_hash": name, "tokens_hash": 100 + name});
    json!({"stored": {"parent_hash": null, "start_position": null, "blocks": [block(1), block(2)]}})
}

fn removed() -> Value {
    json!({"removed": {"block_hashes": [2, 1]}})
}

#[test]
fn a_tier_beyond_the_device_is_certain_only_if_it_is_told() {
    for (name, tier) in [("host_pinned", 1), ("disk", 2), ("external", 3)] {
        let mut worker = Worker::new(false);
        assert_eq!(worker.hear("device", &stored()), []);
        assert_eq!(worker.hear(name, &stored()), [(tier, Reason::NoRemovals)]);
        assert_eq!(worker.naive.blocks(tier).len(), 2);
        assert_eq!(worker.hear(name, &removed()), []);
        let mut worker = Worker::new(true);
        assert_eq!(worker.hear(name, &stored()), []);
    }
    assert!(!TranslatorSettings::for_format(Format::Dynamo).tells_beyond);
    assert!(TranslatorSettings::for_format(Format::Vllm).tells_beyond);
}

#[test]
fn a_clear_is_of_its_tier() {
    let unclear = [(1, Reason::UnclearTier)];
    let mut worker = Worker::new(true);
    worker.hear("device", &stored());
    assert_eq!(worker.hear("device", &json!("cleared")), []);
    worker.hear("device", &stored());
    worker.hear("host_pinned", &stored());
    assert_eq!(worker.hear("device", &json!("cleared")), unclear);
    assert_eq!(worker.naive.blocks(0).len(), 0);
    // A clear of the host takes nothing from the device.
    let mut worker = Worker::new(true);
    worker.hear("device", &stored());
    assert_eq!(worker.hear("host_pinned", &json!("cleared")), unclear);
    assert_eq!(worker.naive.blocks(0).len(), 2);
}
