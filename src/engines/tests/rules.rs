//! Tests of the rules by which a translator accepts events, and of the reasons for which it leaves events out.

use std::collections::{BTreeSet, HashMap};

use kvatlas_core::hash::{
    BlockSize, HashSeed, SequenceHash, block_hash_with, next_sequence_hash, object_hash,
};
use kvatlas_core::wire::{Event, Tier};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, Format, HashMode, Reason, Translation, Translator, TranslatorSettings,
};
use serde_json::json;

use crate::common::{Change, Engine, Naive, Names, Shape, Store, contract_chain, decode, feed, translator};

const SIZE: u32 = 4;

fn tokens(first: u32, blocks: u32) -> Vec<u32> {
    (first..first + blocks * SIZE).collect()
}

fn store(names: &[u64], parent: Option<u64>, first: u32) -> Store {
    Store::new(
        names,
        parent,
        &tokens(first, u32::try_from(names.len()).unwrap()),
        SIZE,
    )
}

fn remove(names: &[u64]) -> Change {
    Change::Remove {
        names: names.to_vec(),
        medium: Some("GPU"),
        group: None,
    }
}

/// A translator that has a chain of blocks named 1, 2, 3, and a naive index of its events.
fn with_chain() -> (Translator, Naive) {
    let mut translator = translator(SIZE);
    let mut naive = Naive::default();
    naive.apply(&feed(
        &mut translator,
        &[Change::Store(store(&[1, 2, 3], None, 0))],
    ));
    (translator, naive)
}

/// Expects that `change` is left out as a whole, for `reason`.
fn assert_left_out(change: Change, reason: Reason) {
    let (mut translator, mut naive) = with_chain();
    let before = naive.clone();
    let output = feed(&mut translator, &[change]);
    assert_eq!(output.reasons.of(reason), 1, "{reason:?}: {:?}", output.reasons);
    assert_eq!(output.reasons.iter().count(), 1, "{reason:?}");
    assert_eq!(
        translator.doubt(),
        Some(reason).filter(|reason| reason.degrades())
    );
    naive.apply(&output);
    assert_eq!(naive, before, "{reason:?}");
    assert_eq!((translator.blocks(), translator.names()), (3, 3), "{reason:?}");
    // The earlier blocks are unchanged: they can be removed.
    naive.apply(&feed(&mut translator, &[remove(&[3, 2, 1])]));
    assert_eq!(naive, Naive::default(), "{reason:?}");
    assert_eq!((translator.blocks(), translator.names()), (0, 0), "{reason:?}");
}

#[test]
fn contradictions_are_left_out() {
    let left_out = |store: Store, reason| assert_left_out(Change::Store(store), reason);
    left_out(store(&[4, 5], Some(99), 12), Reason::UnknownParent);
    left_out(store(&[4, 3], Some(3), 12), Reason::SelfParent);
    left_out(store(&[4, 1], Some(3), 12), Reason::Cycle);
    left_out(store(&[4, 5, 2], Some(3), 12), Reason::Cycle);
    left_out(store(&[4, 5, 2], None, 50), Reason::NameConflict);
    left_out(store(&[4, 5, 4], Some(3), 12), Reason::NameConflict);
    left_out(store(&[1], None, 50), Reason::NameConflict);
    for wrong in [1, 7, 9] {
        let mut misfit = store(&[4, 5], Some(3), 12);
        misfit.tokens = (0..wrong).collect();
        left_out(misfit, Reason::TokenCount);
    }
    let mut other_size = store(&[4], Some(3), 12);
    (other_size.tokens, other_size.block_size) = (vec![1, 2], 2);
    left_out(other_size, Reason::PartOfBlock);
    let mut smaller = store(&[4, 5], Some(3), 12);
    (smaller.tokens, smaller.block_size) = (vec![1, 2, 3, 4], 2);
    left_out(smaller, Reason::BlockSize);
    let mut larger = store(&[4], Some(3), 12);
    (larger.tokens, larger.block_size) = ((0..2 * SIZE).collect(), 2 * SIZE);
    left_out(larger, Reason::BlockSize);
    let mut zero = store(&[4], Some(3), 12);
    zero.block_size = 0;
    left_out(zero, Reason::PartOfBlock);
    let mut salted = store(&[4], Some(3), 12);
    salted.cache_salt = Some("b".to_owned());
    left_out(salted, Reason::SaltConflict);
    let mut adapted = store(&[4], None, 12);
    adapted.lora_id = Some(7);
    left_out(adapted, Reason::UnnamedAdapter);
    let mut placeholder = store(&[4], None, 12);
    (placeholder.tokens, placeholder.block_size) = (Vec::new(), 0);
    left_out(placeholder, Reason::Placeholder);
    let mut elsewhere = store(&[4], None, 12);
    elsewhere.medium = Some("FS");
    left_out(elsewhere, Reason::UnknownMedium);
    left_out(store(&[], None, 12), Reason::Ignored);
    let mut window = store(&[4], None, 12);
    window.group = Some((1, Some("sliding_window")));
    left_out(window, Reason::OtherGroup);
    let mut unknown = store(&[4], None, 12);
    unknown.group = Some((1, None));
    left_out(unknown, Reason::UnknownGroup);
    assert_left_out(remove(&[9]), Reason::NotHeld);
    assert_left_out(
        Change::Remove {
            names: vec![1],
            medium: Some("CPU"),
            group: None,
        },
        Reason::NotHeld,
    );
}

#[test]
fn a_clear_ends_doubt() {
    let (mut translator, mut naive) = with_chain();
    feed(&mut translator, &[Change::Store(store(&[9], Some(8), 40))]);
    assert_eq!(translator.doubt(), Some(Reason::UnknownParent));
    let output = feed(
        &mut translator,
        &[Change::Clear, Change::Store(store(&[1], None, 0))],
    );
    naive.apply(&output);
    assert_eq!(
        output.parts.first().and_then(|part| part.events.first()),
        Some(&Event::Cleared)
    );
    assert_eq!(translator.doubt(), None);
    assert_eq!(naive.blocks(0).len(), 1);
}

#[test]
fn a_block_is_held_until_its_last_copy_goes() {
    let (mut translator, mut naive) = with_chain();
    let again = feed(&mut translator, &[Change::Store(store(&[1, 2], None, 0))]);
    assert!(again.is_empty());
    let mut on_host = store(&[1], None, 0);
    on_host.medium = Some("CPU");
    naive.apply(&feed(&mut translator, &[Change::Store(on_host)]));
    assert_eq!((naive.blocks(0).len(), naive.blocks(1).len()), (3, 1));
    naive.apply(&feed(&mut translator, &[remove(&[2, 1])]));
    assert_eq!(naive.blocks(0).len(), 3);
    naive.apply(&feed(&mut translator, &[remove(&[2, 1])]));
    assert_eq!((naive.blocks(0).len(), naive.blocks(1).len()), (1, 1));
}

#[test]
fn a_full_table_takes_no_more() {
    let mut translator = Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        blocks_max: 3,
        ..TranslatorSettings::default()
    });
    feed(&mut translator, &[Change::Store(store(&[1, 2], None, 0))]);
    let output = feed(&mut translator, &[Change::Store(store(&[3, 4], Some(2), 8))]);
    assert_eq!(output.reasons.of(Reason::TableFull), 1);
    assert_eq!(
        (translator.names(), translator.doubt()),
        (2, Some(Reason::TableFull))
    );
}

#[test]
fn children_inherit_salt_and_adapter() {
    let mut translator = translator(SIZE);
    let mut root = store(&[1, 2], None, 0);
    root.salt_key = Some("tenant".to_owned());
    root.lora_name = Some("adapter".to_owned());
    let mut child = store(&[3], Some(2), 8);
    child.lora_name = Some("adapter".to_owned());
    let mut naive = Naive::default();
    naive.apply(&feed(
        &mut translator,
        &[Change::Store(root), Change::Store(child)],
    ));
    let chain = contract_chain(&tokens(0, 3), SIZE, Some("adapter"), Some("tenant"));
    assert_eq!(naive.blocks(0), chain.into_iter().collect::<BTreeSet<_>>());
}

#[test]
fn dynamos_mark_before_a_salt_is_no_part_of_it() {
    let chain = |salt: &str| {
        let mut translator = translator(SIZE);
        let mut root = store(&[1], None, 0);
        root.salt_key = Some(salt.to_owned());
        let mut naive = Naive::default();
        naive.apply(&feed(&mut translator, &[Change::Store(root)]));
        naive.blocks(0)
    };
    assert_eq!(chain("dynamo-cache-salt:tenant"), chain("tenant"));
    assert_ne!(chain("dynamo-cache-salt:tenant"), chain("other"));
}

#[test]
fn an_adapter_is_named_by_its_number_where_that_is_configured() {
    let mut translator = Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        lora_names: HashMap::from([(7, "adapter".to_owned())]),
        ..TranslatorSettings::default()
    });
    let mut root = store(&[1], None, 0);
    root.lora_id = Some(7);
    let mut naive = Naive::default();
    naive.apply(&feed(&mut translator, &[Change::Store(root)]));
    let chain = contract_chain(&tokens(0, 1), SIZE, Some("adapter"), None);
    assert_eq!(naive.blocks(0), chain.into_iter().collect::<BTreeSet<_>>());
}

#[test]
fn images_enter_the_hash_of_their_block() {
    let digest = format!("{:016x}{}", 0xfeed_u64, "ab".repeat(24));
    let mut root = store(&[1, 2], None, 0);
    root.images = vec![(1, "picture".to_owned()), (1, digest)];
    let mut naive = Naive::default();
    naive.apply(&feed(&mut translator(SIZE), &[Change::Store(root)]));
    let seed = HashSeed::default();
    let first = contract_chain(&tokens(0, 1), SIZE, None, None)[0];
    let mut objects = [object_hash(b"picture"), 0xfeed];
    objects.sort_unstable();
    let second = block_hash_with(&tokens(SIZE, 1), objects, seed);
    let expected = [first, next_sequence_hash(Some(first), second)];
    assert_eq!(naive.blocks(0), expected.into_iter().collect::<BTreeSet<_>>());
}

#[test]
fn pairs_of_tokens_look_one_token_ahead() {
    // SGLang's pages of pairs: tokens 0 to 4, then 4 to 8.
    let mut payload = Vec::new();
    rmp::encode::write_array_len(&mut payload, 2).unwrap();
    rmp::encode::write_uint(&mut payload, 1).unwrap();
    rmp::encode::write_array_len(&mut payload, 1).unwrap();
    rmp::encode::write_array_len(&mut payload, 6).unwrap();
    rmp::encode::write_str(&mut payload, "BlockStored").unwrap();
    payload.extend([0x92, 1, 2, 0xc0]);
    rmp::encode::write_array_len(&mut payload, 8).unwrap();
    for token in 0..8 {
        payload.extend([0x92, token, token + 1]);
    }
    payload.extend([4, 0xc0]);
    let mut naive = Naive::default();
    let mut output = Translation::default();
    translator(SIZE).translate(&decode(Format::Sglang, &payload), &mut output);
    naive.apply(&output);
    let seed = HashSeed::default();
    let first = SequenceHash::from(block_hash_with(&[0, 1, 2, 3, 4], [], seed).as_u64());
    let second = next_sequence_hash(Some(first), block_hash_with(&[4, 5, 6, 7, 8], [], seed));
    assert_eq!(
        naive.blocks(0),
        [first, second].into_iter().collect::<BTreeSet<_>>()
    );
}

fn grouped(names: &[u64], group: u32, kind: Option<&'static str>) -> Change {
    let mut store = store(names, None, 0);
    store.group = Some((group, kind));
    Change::Store(store)
}

fn remove_grouped(names: &[u64], group: u32) -> Change {
    Change::Remove {
        names: names.to_vec(),
        medium: Some("GPU"),
        group: Some(group),
    }
}

#[test]
fn a_block_is_held_where_all_main_groups_have_it() {
    let mut translator = translator(SIZE);
    let mut naive = Naive::default();
    let full = Some("full_attention");
    naive.apply(&feed(&mut translator, &[grouped(&[1, 2], 0, full)]));
    assert_eq!(naive.blocks(0).len(), 2);
    // Blocks that a second group of main attention does not have are no longer held.
    naive.apply(&feed(&mut translator, &[grouped(&[1], 2, full)]));
    assert_eq!(naive.blocks(0).len(), 1);
    naive.apply(&feed(&mut translator, &[grouped(&[1, 2], 2, None)]));
    assert_eq!(naive.blocks(0).len(), 2);
    naive.apply(&feed(&mut translator, &[remove_grouped(&[2], 0)]));
    assert_eq!(naive.blocks(0).len(), 1);
    // Group 2 turns out to be a state, so only group 0 counts.
    naive.apply(&feed(&mut translator, &[grouped(&[1, 2], 2, Some("mamba"))]));
    assert_eq!(naive.blocks(0).len(), 1);
    let output = feed(
        &mut translator,
        &[remove_grouped(&[1], 2), remove_grouped(&[1], 0)],
    );
    naive.apply(&output);
    assert!(output.reasons.is_empty(), "{:?}", output.reasons);
    assert_eq!((naive, translator.blocks()), (Naive::default(), 0));
}

#[test]
fn one_block_under_two_names_is_in_doubt() {
    let (mut translator, mut naive) = with_chain();
    let output = feed(&mut translator, &[Change::Store(store(&[11], None, 0))]);
    assert_eq!(output.reasons.of(Reason::HiddenKey), 1);
    assert_eq!(translator.doubt(), Some(Reason::HiddenKey));
    naive.apply(&feed(&mut translator, &[remove(&[1])]));
    assert_eq!(naive.blocks(0).len(), 3);
    naive.apply(&feed(&mut translator, &[remove(&[11])]));
    assert_eq!(naive.blocks(0).len(), 2);
}

fn trusting(sample: u32) -> Translator {
    Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        mode: HashMode::Trust { sample },
        ..TranslatorSettings::default()
    })
}

#[test]
fn trusted_names_are_sampled() {
    let chain = contract_chain(&tokens(0, 6), SIZE, None, None);
    let names: Vec<u64> = chain.iter().map(|hash| hash.as_u64()).collect();
    let mut translator = trusting(2);
    let mut naive = Naive::default();
    naive.apply(&feed(
        &mut translator,
        &[
            Change::Store(store(&names[..4], None, 0)),
            Change::Store(store(&names[4..], Some(names[3]), 16)),
        ],
    ));
    assert_eq!(naive.blocks(0), chain.iter().copied().collect::<BTreeSet<_>>());
    assert_eq!(translator.doubt(), None);
    let wrong: Vec<u64> = names.iter().map(|name| name ^ 1).collect();
    for sample in [1, 2, 6] {
        let mut translator = trusting(sample);
        let output = feed(&mut translator, &[Change::Store(store(&wrong, None, 0))]);
        assert_eq!(output.reasons.of(Reason::ForeignChain), 1);
        assert_eq!(translator.doubt(), Some(Reason::ForeignChain));
    }
    let mut unchecked = trusting(0);
    feed(&mut unchecked, &[Change::Store(store(&wrong, None, 0))]);
    assert_eq!((unchecked.doubt(), unchecked.blocks()), (None, 6));
}

/// A Mooncake event names blocks by the contract's hashes and tells their position, so the blocks are placed even if their parent
/// is not held.
#[test]
fn a_pools_blocks_stand_where_it_says() {
    let chain = contract_chain(&tokens(0, 4), SIZE, None, None);
    let event = serde_json::json!({
        "event_type": "stored", "type": "BlockStored", "block_hashes": [77, 78],
        "seq_hashes": [chain[2].as_u64(), chain[3].as_u64()],
        "parent_hash": chain[1].as_u64(), "base_block_idx": 2,
        "backend_id": "pool-a", "medium": "cpu",
    });
    let removed = serde_json::json!({
        "event_type": "removed", "seq_hashes": [chain[3].as_u64()], "backend_id": "pool-a", "medium": "cpu",
    });
    let payload = serde_json::json!([1.5, [event, removed], 0]).to_string();
    let batch = decode(Format::Mooncake, payload.as_bytes());
    let owner = batch.events()[0].owner.map(|owner| batch.text(owner).to_owned());
    assert_eq!(owner.as_deref(), Some("pool-a"));
    let mut output = Translation::default();
    let mut translator = trusting(1);
    translator.translate(&batch, &mut output);
    let mut naive = Naive::default();
    naive.apply(&output);
    assert_eq!(naive.blocks(1), BTreeSet::from([chain[2]]));
    assert_eq!(translator.doubt(), None);
    let mut recomputing = crate::common::translator(SIZE);
    recomputing.translate(&batch, &mut output);
    assert_eq!(recomputing.doubt(), None);
    assert_eq!(output.reasons.of(Reason::Placeholder), 1);
    // The store does not tell which blocks it evicts.
    for translator in [translator, recomputing] {
        let doubts: Vec<_> = translator.tier_doubts().collect();
        assert_eq!(doubts, [(Tier::HOST, Reason::NoRemovals)]);
    }
}

#[test]
fn every_encoding_of_names_and_events_means_the_same() {
    let changes = [
        Change::Store(store(&[1, u64::MAX, 1 << 63], None, 0)),
        Change::Remove {
            names: vec![1 << 63],
            medium: Some("GPU"),
            group: None,
        },
    ];
    let mut results = Vec::new();
    for names in [Names::Unsigned, Names::Signed, Names::Bytes] {
        for shape in [
            Shape::Map,
            Shape::Array(7),
            Shape::Array(9),
            Shape::Array(12),
            Shape::Array(16),
        ] {
            let payload = Engine { shape, names }.payload(&changes);
            for format in [Format::Vllm, Format::Sglang] {
                let mut naive = Naive::default();
                let mut output = Translation::default();
                translator(SIZE).translate(&decode(format, &payload), &mut output);
                assert!(output.reasons.is_empty(), "{names:?} {shape:?}");
                naive.apply(&output);
                results.push(naive);
            }
        }
    }
    assert_eq!(results[0].blocks(0).len(), 2);
    assert!(results.iter().all(|result| *result == results[0]));
}

#[test]
fn an_envelope_without_publisher_or_number_is_none() {
    let envelope = json!({"publisher_id": 1, "sequence": 2, "payload": []});
    for (missing, is_right) in [
        ("published_at", true),
        ("publisher_id", false),
        ("sequence", false),
    ] {
        let mut envelope = envelope.clone();
        envelope.as_object_mut().unwrap().remove(missing);
        // The payload is an empty list of events.
        envelope["payload"] = json!([0x90]);
        let payload = envelope.to_string();
        let mut decoder = Decoder::new(Format::Dynamo, DecodeLimits::default());
        let decoded = decoder.decode(payload.as_bytes(), &mut EngineBatch::default());
        assert_eq!(decoded.is_ok(), is_right, "without {missing}: {decoded:?}");
    }
}
