//! Doubts about a holder's blocks: the place among the events at which a doubt begins, and the events that end it.

use kvatlas_core::hash::{BlockSize, HashSeed};
use kvatlas_core::wire::Tier;
use kvatlas_engines::{Format, Reason, Translation, Translator, TranslatorSettings, Untold};
use serde_json::{Value, json};

use crate::common::{Naive, contract_chain, decode, translator};

pub(crate) const SIZE: u32 = 4;

/// One engine, and the blocks that a daemon knows from the engine's events.
pub(crate) struct Followed {
    format: Format,
    pub(crate) translator: Translator,
    naive: Naive,
    last: Translation,
}

impl Followed {
    pub(crate) fn new(format: Format) -> Self {
        Self::with(format, translator(SIZE))
    }

    fn with(format: Format, translator: Translator) -> Self {
        Self {
            format,
            translator,
            naive: Naive::default(),
            last: Translation::default(),
        }
    }

    pub(crate) fn hear(&mut self, events: &[Value]) -> Option<Reason> {
        let payload = match self.format {
            Format::Dynamo | Format::TensorRt => json!(events),
            _ => json!([1.5, events, 0]),
        };
        let batch = decode(self.format, payload.to_string().as_bytes());
        self.last.clear();
        self.translator.translate(&batch, &mut self.last);
        self.naive.apply(&self.last);
        self.translator.doubt()
    }

    pub(crate) fn blocks(&self) -> usize {
        self.naive.blocks(0).len()
    }
}

fn tokens(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

pub(crate) fn stored(names: &[u64], parent: Option<u64>, first: u32, size: u32) -> Value {
    let count = u32::try_from(names.len()).unwrap() * size;
    json!({
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
        "token_ids": tokens(first, count), "block_size": size, "lora_id": null, "medium": "GPU", "lora_name": null,
    })
}

pub(crate) fn with(mut event: Value, fields: Value) -> Value {
    let Value::Object(fields) = fields else {
        panic!("fields are an object")
    };
    event.as_object_mut().unwrap().extend(fields);
    event
}

pub(crate) fn removed(names: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})
}

fn cleared() -> Value {
    json!({"type": "AllBlocksCleared"})
}

/// A test of payloads that contain a clear and events that cannot be applied, for each format that has clears. An
/// event that cannot be applied must put the blocks in doubt if it comes after the clear, and must not if it comes
/// before.
#[test]
fn a_clear_ends_the_doubts_before_it_and_no_others() {
    let dynamo = |data: Value| json!({"worker_id": 7, "event": {"event_id": 0, "data": data, "dp_rank": 0}});
    let tensorrt = |data: Value| json!({"event_id": 0, "data": data, "window_size": 8});
    let cases = [
        (
            Format::Vllm,
            cleared(),
            json!({"type": "BlockForgotten"}),
            json!({"type": 5}),
        ),
        (
            Format::Vllm,
            json!(["AllBlocksCleared"]),
            json!(["BlockForgotten"]),
            json!(["BlockRemoved", 7]),
        ),
        (
            Format::Sglang,
            cleared(),
            json!({"type": "BlockForgotten"}),
            json!(7),
        ),
        (
            Format::Mooncake,
            json!({"type": "cleared"}),
            json!({"type": "forgotten"}),
            json!(null),
        ),
        (
            Format::Dynamo,
            dynamo(json!("cleared")),
            dynamo(json!("forgotten")),
            dynamo(json!(1)),
        ),
    ];
    for (format, clear, unknown, malformed) in cases {
        for (bad, reason) in [(unknown, Reason::UnknownEvent), (malformed, Reason::Malformed)] {
            let mut engine = Followed::new(format);
            assert_eq!(
                engine.hear(&[clear.clone(), bad.clone()]),
                Some(reason),
                "{format:?} {bad}"
            );
            assert_eq!(
                engine.hear(&[bad.clone(), clear.clone()]),
                None,
                "{format:?} {bad}"
            );
            assert_eq!(
                engine.hear(&[bad.clone(), clear.clone(), bad.clone()]),
                Some(reason),
                "{format:?}"
            );
        }
    }
    // TensorRT-LLM never clears.
    let mut engine = Followed::new(Format::TensorRt);
    assert_eq!(
        engine.hear(&[tensorrt(json!({"type": "forgotten"}))]),
        Some(Reason::UnknownEvent)
    );
}

#[test]
fn what_clears_less_than_everything_is_in_doubt() {
    for clear in [
        json!({"type": "AllBlocksCleared", "group_idx": 1}),
        json!({"type": "AllBlocksCleared", "block_hashes": [1]}),
        json!({"type": "AllBlocksCleared", "component_type": "SWA"}),
        json!(["AllBlocksCleared", 7]),
    ] {
        let mut engine = Followed::new(Format::Vllm);
        engine.hear(&[stored(&[1], None, 0, SIZE)]);
        assert!(engine.hear(std::slice::from_ref(&clear)).is_some(), "{clear}");
        assert_eq!(engine.blocks(), 1, "{clear}");
    }
    // A clear of another tier leaves the device as it is.
    for clear in [
        json!({"type": "AllBlocksCleared", "medium": "CPU"}),
        json!(["AllBlocksCleared", "CPU"]),
    ] {
        let mut engine = Followed::new(Format::Vllm);
        engine.hear(&[stored(&[1], None, 0, SIZE)]);
        assert_eq!(engine.hear(std::slice::from_ref(&clear)), None, "{clear}");
        assert_eq!(engine.blocks(), 1, "{clear}");
        let doubts: Vec<_> = engine.translator.tier_doubts().collect();
        assert_eq!(doubts, [(Tier::HOST, Reason::UnclearTier)], "{clear}");
    }
    // A clear of another system is not about this engine's blocks.
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[stored(&[1], None, 0, SIZE)]);
    let others = json!({"type": "AllBlocksCleared", "ownership": "kvcr"});
    assert_eq!((engine.hear(&[others]), engine.blocks()), (None, 1));
    // If the array's second value names a medium, it is the medium.
    assert_eq!(
        (
            engine.hear(&[json!(["AllBlocksCleared", "GPU"])]),
            engine.blocks()
        ),
        (None, 0)
    );
}

#[test]
fn small_pieces_one_an_event_are_another_block_size() {
    for size in [1, 2] {
        let mut engine = Followed::new(Format::Sglang);
        let piece = |at: u32| {
            stored(
                &[u64::from(100 + at)],
                at.checked_sub(1).map(|at| u64::from(100 + at)),
                at * size,
                size,
            )
        };
        // Alone, a small block is an incomplete block at the end of a sequence.
        assert_eq!(engine.hear(&[piece(0)]), None);
        assert_eq!(engine.hear(&[piece(1)]), Some(Reason::BlockSize), "{size}");
        assert_eq!(
            engine.hear(&[cleared(), piece(0), piece(1)]),
            Some(Reason::BlockSize)
        );
    }
}

#[test]
fn pieces_beside_whole_blocks_are_of_a_cache_beside_them() {
    let mut engine = Followed::new(Format::Vllm);
    let main = json!({"group_idx": 0, "kv_cache_spec_kind": "mla_attention"});
    let piece = |at: u32| {
        let parent = at.checked_sub(1).map(|at| u64::from(5000 + at));
        with(stored(&[u64::from(5000 + at)], parent, at, 1), main.clone())
    };
    assert_eq!(engine.hear(&[piece(0), piece(1)]), Some(Reason::BlockSize));
    let whole = with(stored(&[1], None, 0, SIZE), main.clone());
    assert_eq!(engine.hear(&[whole]), None);
    for at in 2..9 {
        assert_eq!(engine.hear(&[piece(at)]), None);
    }
    assert_eq!(engine.blocks(), 1);
    assert_eq!(engine.last.reasons.of(Reason::PartOfBlock), 1);
    assert_eq!(engine.translator.other_block_size(), None);
    // Several small blocks in one event are not incomplete blocks.
    assert_eq!(
        engine.hear(&[stored(&[8, 9], Some(1), 4, 1)]),
        Some(Reason::BlockSize)
    );
    assert_eq!(engine.translator.other_block_size(), Some(1));
}

#[test]
fn a_group_whose_blocks_are_left_out_is_not_needed() {
    let full = |group: u32| json!({"group_idx": group, "kv_cache_spec_kind": "full_attention"});
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[with(stored(&[1, 2], None, 0, SIZE), full(0))]);
    let part = with(stored(&[7], None, 0, 2), full(1));
    let unnamed = with(
        stored(&[7], None, 0, SIZE),
        json!({"group_idx": 1, "kv_cache_spec_kind": "full_attention", "lora_id": 3}),
    );
    assert_eq!(engine.hear(&[part, unnamed]), None);
    assert_eq!(engine.blocks(), 2);
    engine.hear(&[with(stored(&[1], None, 0, SIZE), full(1))]);
    assert_eq!(engine.blocks(), 1);
}

#[test]
fn a_removal_with_a_text_that_nobody_knows_is_in_doubt() {
    let removal = |tail: &[Value]| {
        let mut event = vec![json!("BlockRemoved"), json!([1]), json!("GPU"), Value::Null];
        event.extend_from_slice(tail);
        let mut engine = Followed::new(Format::Vllm);
        engine.hear(&[stored(&[1], None, 0, SIZE), json!(event)]);
        (engine.translator.doubt(), engine.blocks())
    };
    assert_eq!(removal(&[json!("capacity")]), (Some(Reason::Malformed), 1));
    assert_eq!(
        removal(&[json!("full_attention"), Value::Null, json!("capacity")]).0,
        Some(Reason::Malformed)
    );
    assert_eq!(removal(&[json!("LOCAL"), Value::Null]), (None, 0));
    assert_eq!(removal(&[json!("LOCAL"), json!("kvcr")]), (None, 1));
    assert_eq!(
        removal(&[
            json!("full_attention"),
            Value::Null,
            json!("LOCAL"),
            json!("kvcr")
        ]),
        (None, 1)
    );
    // An unknown key of a map is ignored. It tells no owner.
    let mut engine = Followed::new(Format::Sglang);
    let reason = with(removed(&[1]), json!({"reason": "capacity"}));
    assert_eq!(
        (
            engine.hear(&[stored(&[1], None, 0, SIZE), reason]),
            engine.blocks()
        ),
        (None, 0)
    );
}

/// TensorRT-LLM's stored event of `blocks`, each with its name and its tokens.
fn tensorrt_stored(parent: Option<&Value>, blocks: &[(Value, Vec<u32>)]) -> Value {
    let block = |(name, tokens): &(Value, Vec<u32>)| {
        let tokens: Vec<Value> = tokens
            .iter()
            .map(|token| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0}))
            .collect();
        json!({"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0})
    };
    let blocks: Vec<Value> = blocks.iter().map(block).collect();
    json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
}

fn tensorrt(id: u64, data: &Value, fields: &Value) -> Value {
    with(
        json!({"event_id": id, "data": data, "window_size": 128}),
        fields.clone(),
    )
}

#[test]
fn a_part_in_the_event_of_its_parent_is_a_part() {
    let stored = |sizes: &[u32]| {
        let blocks: Vec<_> = (1..)
            .zip(sizes)
            .map(|(name, size)| (json!(name), tokens(name * 100, *size)))
            .collect();
        let data = tensorrt_stored(None, &blocks);
        let mut engine = Followed::new(Format::TensorRt);
        let doubt = engine.hear(&[tensorrt(0, &data, &json!({}))]);
        (
            doubt,
            engine.blocks(),
            engine.last.reasons.of(Reason::PartOfBlock),
        )
    };
    assert_eq!(stored(&[4, 4, 2]), (None, 2, 1));
    assert_eq!(stored(&[4, 2]), (None, 1, 1));
    assert_eq!(stored(&[2]), (None, 0, 1));
    // No block follows an incomplete block, and no block is larger than the block size.
    assert_eq!(stored(&[4, 2, 4]).0, Some(Reason::BlockSize));
    assert_eq!(stored(&[4, 8]).0, Some(Reason::BlockSize));
    assert_eq!(stored(&[2, 2]).0, Some(Reason::BlockSize));
    assert_eq!(stored(&[4, 0]).0, Some(Reason::BlockSize));
}

#[test]
fn a_block_behind_one_of_another_salt_is_a_conflict() {
    let stored = |salts: &[Option<&str>]| {
        let blocks: Vec<_> = (1..)
            .zip(salts)
            .map(|(name, _)| (json!(name), tokens(name * 100, 4)))
            .collect();
        let mut data = tensorrt_stored(None, &blocks);
        for (place, salt) in salts.iter().enumerate() {
            data["blocks"][place]["cache_salt"] = json!(salt);
        }
        let mut engine = Followed::new(Format::TensorRt);
        let doubt = engine.hear(&[tensorrt(0, &data, &json!({}))]);
        (doubt, engine.blocks())
    };
    assert_eq!(stored(&[Some("a"), Some("a")]), (None, 2));
    assert_eq!(stored(&[Some("a"), None, Some("a")]), (None, 3));
    assert_eq!(stored(&[Some("a"), Some("b")]), (Some(Reason::SaltConflict), 1));
    assert_eq!(stored(&[None, Some("b")]), (Some(Reason::SaltConflict), 1));
}

#[test]
fn layer_groups_have_blocks_of_their_own() {
    let mut engine = Followed::new(Format::TensorRt);
    let name = |number: u64| json!(format!("{:064x}", number));
    let blocks = [(name(1), tokens(0, 4)), (name(2), tokens(4, 4))];
    let data = tensorrt_stored(None, &blocks);
    let of = |group: u32| json!({"layer_group_id": group});
    engine.hear(&[tensorrt(0, &data, &of(0)), tensorrt(1, &data, &of(1))]);
    assert_eq!(engine.blocks(), 2);
    let gone = json!({"type": "removed", "block_hashes": [name(2)]});
    assert_eq!(engine.hear(&[tensorrt(2, &gone, &of(1))]), None);
    assert_eq!(engine.blocks(), 1);
    let moved =
        json!({"type": "updated", "block_hash": name(1), "cache_level": {"old_value": 0, "new_value": 1}});
    assert_eq!(engine.hear(&[tensorrt(3, &moved, &of(1))]), None);
    assert_eq!((engine.blocks(), engine.naive.blocks(1).len()), (0, 0));
    // A request reuses the block, although no tier has it in both groups.
    assert!(engine.translator.hides_groups());
    engine.hear(&[tensorrt(4, &moved, &of(0))]);
    assert_eq!((engine.blocks(), engine.naive.blocks(1).len()), (0, 1));
    assert!(!engine.translator.hides_groups());
    let stored = tensorrt_stored(None, &blocks[..1]);
    let removed = json!({"type": "removed", "block_hashes": [name(1)]});
    engine.hear(&[tensorrt(5, &removed, &of(0)), tensorrt(6, &stored, &of(0))]);
    assert!(engine.translator.hides_groups());
    // Now one group has the block in no tier. So no request reuses the block, and the tier of the other group's copy
    // does not matter.
    engine.hear(&[tensorrt(7, &removed, &of(1))]);
    assert!(!engine.translator.hides_groups());
}

#[test]
fn windows_have_blocks_of_their_own() {
    let mut engine = Followed::new(Format::TensorRt);
    let blocks = [(json!(1), tokens(0, 4)), (json!(2), tokens(4, 4))];
    let data = tensorrt_stored(None, &blocks);
    let of = |window: u32| json!({"window_size": window});
    let created = json!({"type": "created", "num_blocks_per_cache_level": [100]});
    // A window counts from its `created` event on, even without a block. The order of the events does not matter.
    engine.hear(&[tensorrt(0, &created, &of(8)), tensorrt(1, &created, &of(32))]);
    assert_eq!(engine.hear(&[tensorrt(2, &data, &of(32))]), None);
    assert_eq!(engine.blocks(), 0);
    assert_eq!(engine.hear(&[tensorrt(3, &data, &of(8))]), None);
    assert_eq!(engine.blocks(), 2);
    let gone = json!({"type": "removed", "block_hashes": [2]});
    assert_eq!(engine.hear(&[tensorrt(4, &gone, &of(8))]), None);
    assert_eq!(engine.blocks(), 1);
    assert!(!engine.translator.hides_groups());
}

#[test]
fn a_child_has_its_parents_adapter() {
    let of = |name: Option<&str>| json!({"lora_name": name});
    for (parent, child) in [(Some("a"), Some("b")), (Some("a"), None), (None, Some("b"))] {
        let mut engine = Followed::new(Format::Vllm);
        engine.hear(&[with(stored(&[1], None, 0, SIZE), of(parent))]);
        let doubt = engine.hear(&[with(stored(&[2], Some(1), 4, SIZE), of(child))]);
        assert_eq!(doubt, Some(Reason::AdapterConflict), "{parent:?} {child:?}");
        assert_eq!(engine.blocks(), 1);
    }
    let mut salted = Followed::new(Format::Vllm);
    let root = with(
        stored(&[1], None, 0, SIZE),
        json!({"lora_name": "a", "cache_salt": "s"}),
    );
    assert_eq!(
        salted.hear(&[root, with(stored(&[2], Some(1), 4, SIZE), of(Some("a")))]),
        None
    );
    let chain = contract_chain(&tokens(0, 8), SIZE, Some("a"), Some("s"));
    assert_eq!(salted.naive.blocks(0), chain.into_iter().collect());
}

/// Settings of an engine of `format`.
fn of_format(format: Format) -> Translator {
    Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        ..TranslatorSettings::for_format(format)
    })
}

#[test]
fn copies_are_counted_where_the_producer_has_not_counted_them() {
    let mut vllm = Followed::with(Format::Vllm, of_format(Format::Vllm));
    vllm.hear(&[
        stored(&[1], None, 0, SIZE),
        stored(&[1], None, 0, SIZE),
        removed(&[1]),
    ]);
    assert_eq!(vllm.blocks(), 1);
    let event = |data: Value| json!({"worker_id": 7, "event": {"event_id": 0, "data": data, "dp_rank": 0}});
    let store =
        event(json!({"stored": {"parent_hash": null, "blocks": [{"block_hash": 1, "tokens_hash": 2}]}}));
    let remove = event(json!({"removed": {"block_hashes": [1]}}));
    let mut dynamo = Followed::with(Format::Dynamo, of_format(Format::Dynamo));
    let many = vec![store.clone(); 70_000];
    assert_eq!(dynamo.hear(&many), None);
    assert_eq!(dynamo.hear(std::slice::from_ref(&remove)), None);
    assert_eq!((dynamo.blocks(), dynamo.translator.names()), (0, 0));
    dynamo.hear(&[store]);
    assert_eq!(dynamo.blocks(), 1);
    assert!(!Format::Mooncake.counts_copies());
}

/// If a request asks for it, vLLM reports the request's prefix with a stored event, although the blocks are not
/// stored again. Translators count such an event as a copy. Once all other copies are removed, it is unknown whether
/// the block is still there.
#[test]
fn a_prefix_that_is_told_again_may_be_a_report() {
    let of_vllm = || Followed::with(Format::Vllm, of_format(Format::Vllm));
    let prefix = || stored(&[1, 2], None, 0, SIZE);
    let behind = |name: u64| stored(&[name], Some(2), 2 * SIZE, SIZE);
    let mut engine = of_vllm();
    assert_eq!(engine.hear(&[prefix(), behind(3), prefix()]), None);
    assert_eq!(engine.hear(&[prefix(), behind(3)]), None);
    // A stored event with a parent is no report, because the engine has computed the block: it adds a copy.
    assert_eq!(engine.hear(&[removed(&[3]), removed(&[3])]), None);
    assert_eq!(engine.hear(&[removed(&[2])]), Some(Reason::Reported));
    assert_eq!(engine.blocks(), 2);
    // A new store of the block makes one copy certain again.
    assert_eq!(
        engine.hear(&[stored(&[2], Some(1), SIZE, SIZE)]),
        None,
        "one is certain again"
    );
    assert_eq!(engine.hear(&[removed(&[2])]), Some(Reason::Reported));
    // The reports were copies after all.
    assert_eq!(engine.hear(&[removed(&[2]), removed(&[2])]), None);
    assert_eq!(engine.blocks(), 1);
    assert_eq!(engine.hear(&[removed(&[1])]), Some(Reason::Reported));
    assert_eq!(engine.hear(&[cleared()]), None);

    // The first report of an unknown block adds a certain copy. A removal may tell how many copies are left.
    let mut engine = of_vllm();
    assert_eq!(engine.hear(&[prefix(), removed(&[1, 2])]), None);
    assert_eq!(engine.hear(&[prefix(), prefix()]), None);
    let left = with(removed(&[1, 2]), json!({"remaining_copy_counts": [1, 0]}));
    assert_eq!(engine.hear(&[left]), None);
    assert_eq!(engine.blocks(), 1);
    // With windows, a stored event about a held prefix is genuine. Other engines never report held blocks.
    let window =
        json!({"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8});
    let main = json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention"});
    let mut engine = of_vllm();
    let both = [with(prefix(), main), with(prefix(), window)];
    assert_eq!(engine.hear(&both), None);
    assert_eq!(engine.hear(&both), None);
    assert_eq!(engine.hear(&[with(removed(&[1]), json!({"group_idx": 0}))]), None);
    let mut engine = Followed::with(Format::Sglang, of_format(Format::Sglang));
    assert_eq!(engine.hear(&[prefix(), prefix(), removed(&[1])]), None);
}

#[test]
fn copies_that_are_left_are_what_the_engine_says() {
    let left = |names: &[u64], left: &[u64]| with(removed(names), json!({"remaining_copy_counts": left}));
    let root = || stored(&[1], None, 0, SIZE);
    let mut engine = Followed::new(Format::Vllm);
    // There were two stored events, but the block has one copy.
    assert_eq!(engine.hear(&[root(), root(), left(&[1], &[0])]), None);
    assert_eq!(engine.blocks(), 0);
    // The engine has more copies than its events told.
    assert_eq!(engine.hear(&[root(), left(&[1], &[2]), removed(&[1])]), None);
    assert_eq!(engine.blocks(), 1);
    assert_eq!(engine.hear(&[removed(&[1])]), None);
    assert_eq!(engine.blocks(), 0);
    assert_eq!(engine.hear(&[left(&[1], &[0])]), None);
    // No event has told of this block.
    assert_eq!(engine.hear(&[left(&[9], &[1])]), Some(Reason::Malformed));
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(engine.hear(&[left(&[1], &[0, 0])]), Some(Reason::Malformed));
}

#[test]
fn an_adapter_without_a_name_leaves_doubt_for_adapters_alone() {
    let of_number = |name: u64, number: u64| with(stored(&[name], None, 0, SIZE), json!({"lora_id": number}));
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(engine.hear(&[stored(&[1], None, 0, SIZE)]), None);
    assert_eq!(engine.translator.untold(), Untold::default());
    assert_eq!(engine.hear(&[of_number(2, 7)]), None);
    assert!(engine.translator.untold().adapters);
    engine.hear(&[cleared()]);
    assert_eq!(engine.translator.untold(), Untold::default());
}

#[test]
fn an_adapter_that_is_loaded_anew_may_be_another() {
    let of = |name: u64, number: u64| {
        with(
            stored(&[name], None, 0, SIZE),
            json!({"lora_id": number, "lora_name": "sql"}),
        )
    };
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[of(1, 3), of(1, 3)]);
    assert!(!engine.translator.untold().adapters);
    assert_eq!(engine.hear(&[removed(&[1, 1]), of(2, 4)]), None);
    assert!(engine.translator.untold().adapters);
}

#[test]
fn names_look_one_token_ahead_or_are_in_doubt() {
    let ahead = |name: u64, parent: Option<u64>, first: u32, tokens: &[u32]| {
        with(
            stored(&[name], parent, first, SIZE),
            json!({"lookahead_token_ids": [tokens]}),
        )
    };
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(
        engine.hear(&[ahead(1, None, 0, &[4]), ahead(2, Some(1), 4, &[8])]),
        None
    );
    assert!(engine.translator.looks_ahead() && !engine.translator.hashes_pairs());
    // The same tokens with another lookahead token are another block.
    assert_eq!(engine.hear(&[ahead(11, None, 0, &[99])]), None);
    assert_eq!(engine.blocks(), 3);
    assert_eq!(
        engine.hear(&[stored(&[3], Some(2), 8, SIZE)]),
        Some(Reason::Lookahead)
    );
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(
        engine.hear(&[ahead(1, None, 0, &[4, 5])]),
        Some(Reason::Lookahead)
    );
    assert_ne!(HashSeed::for_cache(Some("a"), None), HashSeed::default());
}

#[test]
fn what_the_configuration_calls_untold_is_in_doubt() {
    let mut engine = Followed::with(
        Format::Vllm,
        Translator::new(TranslatorSettings {
            block_size: BlockSize::new(SIZE).unwrap(),
            is_untold: true,
            ..TranslatorSettings::default()
        }),
    );
    assert_eq!(
        engine.hear(&[stored(&[1], None, 0, SIZE), cleared()]),
        Some(Reason::Untold)
    );
}
