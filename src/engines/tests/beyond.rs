//! Tiers beyond the device. Their events tell less than events of the device: only names, no salts and objects,
//! children before their parents, or several blocks as one chunk. Some of these events leave one tier in doubt.

use std::collections::BTreeSet;

use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::Tier;
use kvatlas_engines::{Format, Reason, Translation, Translator, TranslatorSettings};
use serde_json::{Value, json};

use crate::common::{Naive, contract_chain, decode, restarted, settings};

const SIZE: u32 = 4;

/// One engine, and the blocks that a daemon knows from the engine's events.
struct Followed {
    format: Format,
    translator: Translator,
    naive: Naive,
    last: Translation,
}

impl Followed {
    fn new(format: Format) -> Self {
        Self::with(format, TranslatorSettings::for_format(format))
    }

    /// A vLLM engine whose requests have no salts and no adapters.
    fn without_salts() -> Self {
        let settings = TranslatorSettings {
            has_no_salts: true,
            ..TranslatorSettings::for_format(Format::Vllm)
        };
        Self::with(Format::Vllm, settings)
    }

    fn with(format: Format, settings: TranslatorSettings) -> Self {
        let settings = TranslatorSettings {
            block_size: BlockSize::new(SIZE).unwrap(),
            // SGLang would not load blocks as small as those of these tests.
            loaded_tokens_min: 0,
            ..settings
        };
        Self {
            format,
            translator: Translator::new(settings),
            naive: Naive::default(),
            last: Translation::default(),
        }
    }

    /// Translates a batch. Returns the doubts about single tiers, and asserts that the holder as a whole is in no doubt.
    fn hear(&mut self, events: &[Value]) -> Vec<(u8, Reason)> {
        let batch = decode(self.format, json!([1.5, events, 0]).to_string().as_bytes());
        self.last.clear();
        self.translator.translate(&batch, &mut self.last);
        self.naive.apply(&self.last);
        let mut full = Translation::default();
        self.translator.full_state(&mut full);
        let mut restored = Naive::default();
        restored.apply(&full);
        assert_eq!(restored, self.naive, "a resync says what the events say");
        assert_eq!(self.translator.doubt(), None);
        assert!(!self.translator.hides_groups());
        let doubts = self.translator.tier_doubts();
        doubts.map(|(tier, reason)| (tier.as_u8(), reason)).collect()
    }

    fn blocks(&self, tier: u8) -> BTreeSet<SequenceHash> {
        self.naive.blocks(tier)
    }

    fn barred(&self, tier: u8) -> Vec<SequenceHash> {
        let barred = self.naive.barred.iter().filter(|(at, _)| *at == tier);
        barred.map(|(_, hash)| *hash).collect()
    }
}

const HOST: u8 = 1;
const NONE: [(u8, Reason); 0] = [];

fn tokens(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn stored(names: &[u64], parent: Option<u64>, first: u32, medium: &str) -> Value {
    let count = u32::try_from(names.len()).unwrap() * SIZE;
    json!({
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
        "token_ids": tokens(first, count), "block_size": SIZE, "lora_id": null, "medium": medium, "lora_name": null,
    })
}

/// A stored event without tokens and size, as vLLM's offloading connector announces a block by default.
fn placeholder(name: u64) -> Value {
    with(
        stored(&[name], None, 0, "CPU"),
        &json!({"token_ids": [], "block_size": 0, "group_idx": 0}),
    )
}

/// A stored event with a single name for `count` tokens, which are several blocks.
fn chunk(name: u64, parent: Option<u64>, first: u32, count: u32) -> Value {
    with(
        stored(&[name], parent, first, "CPU"),
        &json!({"token_ids": tokens(first, count), "block_size": count}),
    )
}

fn with(mut event: Value, fields: &Value) -> Value {
    let fields = fields.as_object().unwrap().clone();
    event.as_object_mut().unwrap().extend(fields);
    event
}

fn removed(names: &[u64], medium: &str) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": names, "medium": medium})
}

fn cleared() -> Value {
    json!({"type": "AllBlocksCleared"})
}

fn chain(blocks: u32, salt: Option<&str>) -> Vec<SequenceHash> {
    contract_chain(&tokens(0, blocks * SIZE), SIZE, None, salt)
}

fn set(hashes: &[SequenceHash]) -> BTreeSet<SequenceHash> {
    hashes.iter().copied().collect()
}

#[test]
fn a_block_without_tokens_is_what_its_name_stands_for() {
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(engine.hear(&[stored(&[1, 2, 3], None, 0, "GPU")]), NONE);
    assert_eq!(
        engine.hear(&[placeholder(1), placeholder(2), placeholder(3)]),
        NONE
    );
    assert_eq!(engine.hear(&[removed(&[3, 2, 1], "GPU")]), NONE);
    assert_eq!(
        (engine.blocks(0), engine.blocks(HOST)),
        (set(&[]), set(&chain(3, None)))
    );
    assert_eq!(engine.hear(&[removed(&[2], "CPU")]), NONE);
    assert_eq!(engine.blocks(HOST).len(), 2);
    // The event of the host comes after the removal from the device, because the copy took some steps.
    assert_eq!(engine.hear(&[placeholder(2)]), NONE);
    assert_eq!(engine.blocks(HOST), set(&chain(3, None)));
    // The event of the host comes before the event of the device, in one batch.
    assert_eq!(
        engine.hear(&[placeholder(4), stored(&[4], Some(3), 12, "GPU")]),
        NONE
    );
    assert_eq!(engine.blocks(HOST), set(&chain(4, None)));
    // No event has told of this name, so the host tier is in doubt.
    assert_eq!(engine.hear(&[placeholder(99)]), [(HOST, Reason::Placeholder)]);
    assert_eq!(engine.blocks(HOST).len(), 4);
}

#[test]
fn children_may_come_before_their_parents_in_a_batch() {
    let mut engine = Followed::new(Format::Vllm);
    let block = |at: u32| {
        let parent = at.checked_sub(1).map(|at| u64::from(100 + at));
        stored(&[u64::from(100 + at)], parent, at * SIZE, "CPU")
    };
    let backwards: Vec<Value> = (0..200).rev().map(block).collect();
    assert_eq!(engine.hear(&backwards), NONE);
    assert_eq!(engine.blocks(HOST), set(&chain(200, None)));
    // A removal of a block takes effect even if the block's parent comes later in the batch.
    let mut engine = Followed::new(Format::Vllm);
    let events = [block(1), removed(&[101], "CPU"), block(0)];
    assert_eq!(engine.hear(&events), NONE);
    assert_eq!(engine.blocks(HOST), set(&chain(1, None)));
    // A parent that never comes leaves this tier in doubt.
    assert_eq!(engine.hear(&[block(3)]), [(HOST, Reason::UnknownParent)]);
    // The parent of a block on the host may be on the device only.
    let mut engine = Followed::new(Format::Vllm);
    let device = stored(&[100], None, 0, "GPU");
    assert_eq!(engine.hear(&[block(1), device]), NONE);
    assert_eq!(engine.blocks(HOST), set(&chain(2, None)[1..]));
}

#[test]
fn a_name_says_whose_cache_a_block_is_of() {
    let salted = with(
        stored(&[1, 2], None, 0, "GPU"),
        &json!({"extra_keys": [["tenant"], null]}),
    );
    let mut engine = Followed::new(Format::Vllm);
    // Two blocks in one event are a chunk.
    let chunk = [(HOST, Reason::LoadMinimum)];
    assert_eq!(engine.hear(&[salted, stored(&[1, 2], None, 0, "CPU")]), chunk);
    assert_eq!(engine.blocks(HOST), set(&chain(2, Some("tenant"))));
    // Only the first of these names is known.
    assert_eq!(engine.hear(&[stored(&[2, 3], Some(1), 4, "CPU")]), chunk);
    assert_eq!(engine.blocks(HOST), set(&chain(3, Some("tenant"))));
    // The name of this first block is unknown, so it may have a salt or none.
    let unknown = stored(&[9], None, 100, "CPU");
    assert_eq!(
        engine.hear(std::slice::from_ref(&unknown)),
        [(HOST, Reason::Untold)]
    );
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(engine.hear(std::slice::from_ref(&unknown)), NONE);
    assert_eq!(engine.blocks(HOST).len(), 1);
    // SGLang tells salts in every tier.
    let mut engine = Followed::new(Format::Sglang);
    let salted = with(stored(&[1], None, 0, "GPU"), &json!({"cache_salt": "tenant"}));
    assert_eq!(engine.hear(&[salted, unknown]), NONE);
    assert_eq!(engine.blocks(HOST).len(), 1);
}

#[test]
fn a_chunk_can_be_loaded_as_a_whole_only() {
    let chain = chain(8, None);
    let mut engine = Followed::new(Format::Vllm);
    let of_chunk = |first: u32, medium| {
        let names: Vec<u64> = (u64::from(first)..).take(4).collect();
        let parent = first.checked_sub(1).map(u64::from).filter(|_| first > 10);
        stored(&names, parent, (first - 10) * SIZE, medium)
    };
    // How much of a chunk a request loads depends on where its blocks on the device end.
    let doubted = [(HOST, Reason::LoadMinimum)];
    assert_eq!(engine.hear(&[of_chunk(10, "CPU"), of_chunk(14, "CPU")]), doubted);
    assert_eq!(engine.blocks(HOST), set(&chain));
    let within = || {
        let mut within: Vec<_> = [&chain[..3], &chain[4..7]].concat();
        within.sort_unstable();
        within
    };
    assert_eq!(engine.barred(HOST), within());
    // On the device, each of these blocks can be loaded alone.
    assert_eq!(engine.hear(&[of_chunk(10, "GPU"), of_chunk(10, "CPU")]), doubted);
    assert_eq!((engine.barred(0), engine.barred(HOST)), (Vec::new(), within()));
    let names: Vec<u64> = (10..14).collect();
    assert_eq!(
        engine.hear(&[removed(&names, "CPU"), removed(&names, "CPU")]),
        doubted
    );
    assert_eq!(engine.blocks(HOST), set(&chain[4..]));
    // A block that comes alone can be loaded alone.
    let alone = stored(&[14], Some(13), 16, "CPU");
    assert_eq!(engine.hear(&[alone]), NONE);
    assert!(!engine.barred(HOST).contains(&chain[4]));
    // SGLang's pages (blocks) are never chunks.
    let mut engine = Followed::new(Format::Sglang);
    assert_eq!(engine.hear(&[of_chunk(10, "CPU")]), NONE);
    assert_eq!(engine.barred(HOST), []);
}

#[test]
fn sglangs_small_pages_on_the_host_may_not_be_loaded() {
    for (size, is_doubted) in [(1, true), (8, true), (16, false)] {
        let mut translator = Translator::new(TranslatorSettings {
            block_size: BlockSize::new(size).unwrap(),
            ..TranslatorSettings::for_format(Format::Sglang)
        });
        for (medium, is_beyond) in [("GPU", false), ("CPU", true)] {
            let page = with(
                stored(&[1], None, 0, medium),
                &json!({"token_ids": tokens(0, size), "block_size": size}),
            );
            let batch = decode(Format::Sglang, json!([1.5, [page], 0]).to_string().as_bytes());
            translator.translate(&batch, &mut Translation::default());
            let doubts: Vec<_> = translator
                .tier_doubts()
                .map(|(tier, reason)| (tier.as_u8(), reason))
                .collect();
            let expected = [(HOST, Reason::LoadMinimum)];
            assert_eq!(
                doubts == expected,
                is_doubted && is_beyond,
                "{size} {medium}: {doubts:?}"
            );
        }
    }
}

#[test]
fn chunks_whose_ends_alone_are_named_leave_their_tier_in_doubt() {
    let chain = chain(8, None);
    let names: Vec<u64> = (1..9).collect();
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[stored(&names, None, 0, "GPU")]);
    let doubted = [(HOST, Reason::UnknownChunk)];
    assert_eq!(engine.hear(&[placeholder(4)]), doubted);
    assert_eq!(engine.hear(&[placeholder(8)]), doubted);
    assert_eq!(engine.blocks(HOST), set(&[chain[3], chain[7]]));
    // If chunks had four blocks, none could end here. So each name stands for a single block.
    assert_eq!(engine.hear(&[placeholder(5)]), NONE);
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[stored(&names, None, 0, "GPU")]);
    assert_eq!(engine.hear(&[placeholder(1), placeholder(2)]), NONE);
}

#[test]
fn a_chunk_under_one_name_is_cut_into_blocks() {
    let chain = chain(8, None);
    let mut engine = Followed::new(Format::Vllm);
    let names: Vec<u64> = (1..9).collect();
    assert_eq!(engine.hear(&[stored(&names[..4], None, 0, "GPU")]), NONE);
    // vLLM's offloading names a chunk by the name of its last block.
    assert_eq!(engine.hear(&[chunk(4, None, 0, 16)])[0].0, HOST);
    assert_eq!(engine.blocks(HOST), set(&chain[..4]));
    assert_eq!(engine.barred(HOST).len(), 3);
    // A chunk may have a name of its own, and the next chunk gives it as parent.
    let mut engine = Followed::new(Format::Vllm);
    let events = [chunk(901, None, 0, 16), chunk(902, Some(901), 16, 16)];
    engine.hear(&events);
    assert_eq!(engine.blocks(HOST), set(&chain));
    assert_eq!(engine.barred(HOST).len(), 6);
    engine.hear(&[removed(&[901], "CPU")]);
    assert_eq!(engine.blocks(HOST), set(&chain[4..]));
    engine.hear(&[removed(&[902], "CPU")]);
    assert_eq!((engine.blocks(HOST).len(), engine.translator.names()), (0, 0));
    // A chunk that does not end with a block can't be cut into blocks.
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(
        engine.hear(&[chunk(903, None, 0, 18)]),
        [(HOST, Reason::BlockSize)]
    );
}

#[test]
fn a_chunk_with_a_name_of_its_own_may_be_of_any_salt() {
    let untold = [(HOST, Reason::Untold)];
    let mut engine = Followed::new(Format::Vllm);
    let device = stored(&[1, 2, 3, 4], None, 0, "GPU");
    assert_eq!(engine.hear(std::slice::from_ref(&device)), NONE);
    assert_eq!(engine.hear(&[chunk(901, None, 0, 16)])[0].1, Reason::Untold);
    assert_eq!(engine.blocks(HOST).len(), 4);
    // No later event tells the salt.
    assert_eq!(engine.hear(&[removed(&[901], "CPU")]), untold);
    assert_eq!(engine.hear(&[cleared()])[0].0, HOST);
    // A name that the device has told covers the salt.
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[device, chunk(4, None, 0, 16)]);
    let doubts: Vec<_> = engine.translator.tier_doubts().collect();
    assert_eq!(doubts, [(Tier::HOST, Reason::HiddenKey)]);
}

#[test]
fn removals_of_chunks_are_told_while_the_last_one_left_others() {
    let silent = [(HOST, Reason::NoRemovals)];
    let both = [chunk(901, None, 0, 16), chunk(902, Some(901), 16, 16)];
    let mut engine = Followed::without_salts();
    assert_eq!(engine.hear(&both), silent);
    assert_eq!(engine.hear(&[removed(&[902], "CPU")]), NONE);
    assert_eq!(engine.hear(&both[1..]), NONE);
    let settings = TranslatorSettings {
        has_no_salts: true,
        ..settings(SIZE)
    };
    let restarted = restarted(&engine.translator, settings.clone());
    assert_eq!(restarted.tier_doubts().count(), 0);
    let mut earlier = serde_json::to_value(engine.translator.save()).unwrap();
    earlier["beyond"]
        .as_object_mut()
        .unwrap()
        .remove("own_chunks")
        .unwrap();
    let earlier = Translator::restore(settings, serde_json::from_value(earlier).unwrap()).unwrap();
    assert_eq!(
        earlier.tier_doubts().next(),
        Some((Tier::HOST, Reason::NoRemovals))
    );
    // All chunks are withdrawn when the connector loses its server.
    assert_eq!(engine.hear(&[removed(&[901, 902], "CPU")]), silent);
    assert_eq!(engine.hear(&both), silent);
    assert_eq!(engine.hear(&[removed(&[902], "CPU")]), NONE);
}

#[test]
fn a_chunk_behind_a_chunk_that_has_gone_cannot_be_loaded() {
    let chunks = [
        chunk(901, None, 0, 16),
        chunk(902, Some(901), 16, 16),
        chunk(903, Some(902), 32, 16),
    ];
    let gap = [(HOST, Reason::UnknownParent)];
    let mut engine = Followed::without_salts();
    engine.hear(&chunks);
    assert_eq!(engine.hear(&[removed(&[903], "CPU")]), NONE);
    assert_eq!(engine.hear(&chunks[2..]), NONE);
    assert_eq!(engine.hear(&[removed(&[901], "CPU")]), gap);
    assert_eq!(engine.hear(&[removed(&[902], "CPU")]), gap);
    assert_eq!(engine.hear(&chunks[..1]), gap);
    assert_eq!(engine.hear(&chunks[1..2]), NONE);
    assert_eq!(engine.hear(&[removed(&[901], "CPU")]), gap);
    assert_eq!(engine.hear(&chunks[..1]), NONE);
}

#[test]
fn a_connector_that_never_says_what_it_removes_is_never_exact() {
    for (medium, tier) in [("cpu", HOST), ("STORAGE", 2)] {
        let mut engine = Followed::new(Format::Vllm);
        let doubted = [(tier, Reason::NoRemovals)];
        assert_eq!(engine.hear(&[stored(&[1], None, 0, medium)]), doubted);
        assert_eq!(engine.blocks(tier).len(), 1);
        // The connector's blocks may still be there after a clear.
        assert_eq!(engine.hear(&[cleared()]), doubted);
        assert_eq!(engine.blocks(tier).len(), 0);
    }
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(engine.hear(&[stored(&[1], None, 0, "CPU")]), NONE);
    // In SGLang, `cpu` is a medium like any other.
    let mut engine = Followed::new(Format::Sglang);
    assert_eq!(engine.hear(&[stored(&[1], None, 0, "cpu")]), NONE);
}

#[test]
fn a_clear_of_the_device_says_nothing_of_what_lies_beyond() {
    let everywhere = ["GPU", "CPU", "EXTERNAL"].map(|medium| stored(&[1], None, 0, medium));
    for (format, doubted) in [
        (
            Format::Vllm,
            vec![(HOST, Reason::UnclearTier), (3, Reason::UnclearTier)],
        ),
        (Format::Sglang, vec![(3, Reason::UnclearTier)]),
    ] {
        let mut engine = Followed::new(format);
        assert_eq!(engine.hear(&everywhere), NONE);
        assert_eq!(engine.hear(&[cleared()]), doubted, "{format:?}");
        assert!(engine.naive.held.is_empty());
        let mut engine = Followed::new(format);
        engine.hear(&everywhere[..1]);
        assert_eq!(engine.hear(&[cleared()]), NONE, "{format:?}");
    }
    // A block that waits for its parent counts as stored, too.
    let mut engine = Followed::new(Format::Vllm);
    let waiting = stored(&[2], Some(1), 4, "CPU");
    assert_eq!(engine.hear(&[waiting, cleared()]), [(HOST, Reason::UnclearTier)]);
}

/// A stored event of a connector with a pool of blocks (vLLM's SimpleCPUOffloadConnector), which tells the kind of the group.
fn pooled(names: &[u64], parent: Option<u64>, first: u32) -> Value {
    let fields = json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL"});
    with(stored(names, parent, first, "CPU"), &fields)
}

fn on_device(names: &[u64], parent: Option<u64>, first: u32) -> Value {
    let fields = json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention"});
    with(stored(names, parent, first, "GPU"), &fields)
}

#[test]
fn a_clear_behind_the_devices_is_of_a_connectors_pool() {
    // No event has told of a connector, so its pool was empty.
    let mut engine = Followed::new(Format::Vllm);
    assert_eq!(engine.hear(&[on_device(&[9], None, 90)]), NONE);
    let batch = [cleared(), on_device(&[1, 2], None, 0), cleared()];
    assert_eq!(engine.hear(&batch), NONE);
    assert_eq!(engine.blocks(0), set(&chain(2, None)));
    assert_eq!(engine.hear(&[on_device(&[3], Some(2), 8)]), NONE);
    assert_eq!(engine.blocks(0), set(&chain(3, None)));
    // The clear empties the pool, and leaves the blocks on the device.
    let pool = [
        pooled(&[1], None, 0),
        pooled(&[2], Some(1), 4),
        pooled(&[3], Some(2), 8),
    ];
    assert_eq!(engine.hear(&pool), NONE);
    assert_eq!(engine.blocks(HOST), set(&chain(3, None)));
    let doubted = [(HOST, Reason::UnclearTier)];
    assert_eq!(
        engine.hear(&[cleared(), on_device(&[1], None, 0), cleared()]),
        doubted
    );
    assert_eq!(
        (engine.blocks(0), engine.blocks(HOST)),
        (set(&chain(1, None)), set(&[]))
    );
    // A clear after an event of the pool empties the pool, too.
    let mut engine = Followed::new(Format::Vllm);
    engine.hear(&[on_device(&[1, 2], None, 0), pooled(&[1, 2], None, 0)]);
    let batch = [removed(&[2], "GPU"), removed(&[2], "CPU"), cleared()];
    assert_eq!(engine.hear(&batch), doubted);
    assert_eq!(
        (engine.blocks(0), engine.blocks(HOST)),
        (set(&chain(1, None)), set(&[]))
    );
    assert_eq!(engine.translator.names(), 1);
    // Both clears empty the device, because events of the device follow the second.
    assert_eq!(
        engine.hear(&[cleared(), cleared(), on_device(&[1], None, 0)]),
        doubted
    );
    assert_eq!(engine.blocks(0), set(&chain(1, None)));
    // In other formats, each clear empties all tiers.
    for format in [Format::Sglang, Format::TokenSpeed] {
        let mut engine = Followed::new(format);
        assert_eq!(engine.hear(&batch_of_two_clears()), NONE);
        assert_eq!(engine.blocks(0), set(&[]), "{format:?}");
    }
}

fn batch_of_two_clears() -> [Value; 3] {
    [cleared(), stored(&[1, 2], None, 0, "GPU"), cleared()]
}

#[test]
fn a_clear_that_may_be_the_pools_leaves_the_device_in_doubt() {
    let hear = |engine: &mut Followed, events: &[Value]| {
        let batch = decode(Format::Vllm, json!([1.5, events, 0]).to_string().as_bytes());
        engine.last.clear();
        engine.translator.translate(&batch, &mut engine.last);
        engine.naive.apply(&engine.last);
        engine.translator.doubt()
    };
    for clears in [vec![cleared()], vec![cleared(), cleared()]] {
        let mut engine = Followed::new(Format::Vllm);
        let both = [on_device(&[1, 2, 3], None, 0), pooled(&[1], None, 0)];
        assert_eq!(hear(&mut engine, &both), None);
        assert_eq!(hear(&mut engine, &clears), Some(Reason::UnclearTier));
        assert_eq!(engine.blocks(0), set(&[]));
        // A new block after block 3 proves that blocks 1 to 3 are still there.
        let behind = on_device(&[4], Some(3), 12);
        assert_eq!(hear(&mut engine, &[behind]), Some(Reason::UnclearTier));
        assert_eq!(engine.blocks(0), set(&chain(4, None)));
        // An event of the device after a clear shows that the clear emptied the device.
        assert_eq!(hear(&mut engine, &[cleared(), on_device(&[1], None, 0)]), None);
        assert_eq!(engine.blocks(0), set(&chain(1, None)));
    }
}

#[test]
fn what_cannot_be_placed_beyond_the_device_leaves_the_device_exact() {
    let medium = |medium: &str| stored(&[9], None, 0, medium);
    let bad = [
        (
            with(medium("CPU"), &json!({"parent_block_hash": 77})),
            HOST,
            Reason::UnknownParent,
        ),
        (
            with(medium("CPU"), &json!({"block_size": 6})),
            HOST,
            Reason::BlockSize,
        ),
        (
            with(medium("CPU"), &json!({"token_ids": tokens(0, 12)})),
            HOST,
            Reason::TokenCount,
        ),
        (
            with(medium("CPU"), &json!({"group_idx": 7})),
            HOST,
            Reason::UnknownGroup,
        ),
        (
            with(medium("STORAGE"), &json!({"ownership": "kvcr"})),
            2,
            Reason::OtherOwner,
        ),
        (
            with(medium("CPU"), &json!({"locality": "REMOTE"})),
            HOST,
            Reason::Remote,
        ),
        (medium("FS"), 3, Reason::UnknownMedium),
        (stored(&[9], None, 0, "CPU"), HOST, Reason::HiddenKey),
    ];
    for (event, tier, reason) in bad {
        let mut engine = Followed::new(Format::Vllm);
        assert_eq!(engine.hear(&[stored(&[1, 2], None, 0, "GPU")]), NONE);
        assert_eq!(
            engine.hear(std::slice::from_ref(&event)),
            [(tier, reason)],
            "{event}"
        );
        assert_eq!(engine.blocks(0), set(&chain(2, None)));
    }
    // On the device, two names for one content leave the whole holder in doubt.
    let mut engine = Followed::new(Format::Vllm);
    let batch = [stored(&[1], None, 0, "GPU"), stored(&[9], None, 0, "GPU")];
    let batch = decode(Format::Vllm, json!([1.5, batch, 0]).to_string().as_bytes());
    engine.translator.translate(&batch, &mut engine.last);
    assert_eq!(engine.translator.doubt(), Some(Reason::HiddenKey));
    assert_eq!(engine.translator.tier_doubts().next(), None);
    assert_eq!(Tier::HOST.as_u8(), HOST);
}
