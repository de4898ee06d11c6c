//! Translation into the hashes of a hash scheme other than the contract's.

use std::io::BufRead;

use kvatlas_core::hash::{BlockSize, SchemeChains, SequenceHash};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, EngineChange, Format, Reason, Translation, Translator,
    TranslatorSettings,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::{Change, Naive, Store, feed};
use crate::fixtures::shared_folder;

const SIZE: u32 = 4;
const MODEL: &str = "o/m";

fn chains(scheme: &str) -> SchemeChains {
    SchemeChains::new(scheme.parse().unwrap(), MODEL)
}

fn translator(scheme: &str) -> Translator {
    Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        chains: Some(chains(scheme)),
        ..TranslatorSettings::for_format(Format::Vllm)
    })
}

fn tokens(first: u32, blocks: u32) -> Vec<u32> {
    (first..first + blocks * SIZE).collect()
}

/// The blocks on the device.
fn held(naive: &Naive) -> Vec<SequenceHash> {
    naive.blocks(0).into_iter().collect()
}

fn sorted(mut hashes: Vec<SequenceHash>) -> Vec<SequenceHash> {
    hashes.sort_unstable();
    hashes
}

#[test]
fn blocks_are_named_by_the_scheme_across_events() {
    for scheme in ["llm-d-xxh64:42", "llm-d-cbor-fnv"] {
        let (mut translator, mut naive) = (translator(scheme), Naive::default());
        let size = BlockSize::new(SIZE).unwrap();
        let expected = chains(scheme).sequence_hashes(&tokens(0, 4), size, None, None);
        let first = Store::new(&[1, 2], None, &tokens(0, 2), SIZE);
        let second = Store::new(&[3, 4], Some(2), &tokens(2 * SIZE, 2), SIZE);
        naive.apply(&feed(
            &mut translator,
            &[Change::Store(first), Change::Store(second)],
        ));
        assert_eq!(held(&naive), sorted(expected.clone()));
        let removal = Change::Remove {
            names: vec![4],
            medium: Some("GPU"),
            group: None,
        };
        naive.apply(&feed(&mut translator, &[removal]));
        assert_eq!(held(&naive), sorted(expected[..3].to_vec()));
        assert_eq!(translator.doubt(), None);
    }
}

#[test]
fn adapters_and_salts_are_told_apart_as_queries_tell_them() {
    let (scheme, size) = ("llm-d-xxh64", BlockSize::new(SIZE).unwrap());
    let (mut translator, mut naive) = (translator(scheme), Naive::default());
    let mut adapter = Store::new(&[1, 2], None, &tokens(0, 2), SIZE);
    adapter.lora_name = Some("sql".to_owned());
    let mut salted = Store::new(&[3, 4], None, &tokens(0, 2), SIZE);
    salted.salt_key = Some("tenant-a".to_owned());
    naive.apply(&feed(
        &mut translator,
        &[Change::Store(adapter), Change::Store(salted)],
    ));
    let chains = chains(scheme);
    let mut expected = chains.sequence_hashes(&tokens(0, 2), size, Some("sql"), None);
    expected.extend(chains.sequence_hashes(&tokens(0, 2), size, None, Some("tenant-a")));
    assert_eq!(held(&naive), sorted(expected));
}

/// Translates one stored event of two blocks with these extra keys.
fn with_extra_keys(extra_keys: &Value) -> (Naive, Option<Reason>) {
    let event = json!({
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null, "token_ids": tokens(0, 2),
        "block_size": SIZE, "lora_id": null, "medium": "GPU", "lora_name": null, "extra_keys": extra_keys,
    });
    let payload = rmp_serde::to_vec_named(&json!([1.5, [event], 0])).unwrap();
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
    decoder.decode(&payload, &mut batch).unwrap();
    let (mut translator, mut output, mut naive) = (
        translator("llm-d-xxh64"),
        Translation::default(),
        Naive::default(),
    );
    translator.translate(&batch, &mut output);
    naive.apply(&output);
    (naive, translator.doubt())
}

#[test]
fn images_come_in_the_order_of_the_prompt_and_the_salt_behind_them() {
    // The hash of the second identifier is smaller than that of the first. Sorted by hash, the identifiers would change
    // places.
    let (one, two) = ("image-z", "image-a");
    let (naive, doubt) = with_extra_keys(&json!([[[one, 0], [two, 2], "salt"], [[two, 2]]]));
    let chains = chains("llm-d-xxh64");
    let steps = chains.steps().unwrap();
    let first = steps.next(steps.root(None), &tokens(0, 1), &[one, two, "salt"]);
    let second = steps.next(first, &tokens(SIZE, 1), &[two]);
    assert_eq!((held(&naive), doubt), (sorted(vec![first, second]), None));
}

#[test]
fn identifiers_belong_to_their_own_events_and_blocks() {
    let stored = |name: u64, more: Value| {
        let mut event = json!({
            "type": "BlockStored", "block_hashes": [name, name + 1], "parent_block_hash": null,
            "token_ids": tokens(0, 2), "block_size": SIZE, "medium": "GPU",
        });
        event
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        event
    };
    let infos = json!([{"mm_objects": [{"mm_hash": 5}]}, null]);
    let one = stored(
        1,
        json!({"extra_keys": [[["one", 0]], null], "block_mm_infos": infos}),
    );
    let two = stored(
        11,
        json!({"extra_keys": [null, [["two", 0]]], "mm_keys": [[{"hash": "three"}], null]}),
    );
    let payload = rmp_serde::to_vec_named(&json!([1.5, [one, two], 0])).unwrap();
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
    decoder.decode(&payload, &mut batch).unwrap();
    let of_events = batch.events().iter().map(|event| match &event.change {
        EngineChange::Stored(stored) => batch.identifiers(stored.objects).collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let expected = [vec!["object:0000000000000005"], vec!["three", "two"]];
    assert_eq!(of_events.collect::<Vec<_>>(), expected);
}

#[test]
fn what_has_no_text_is_asked_for_by_nobody() {
    let (naive, doubt) = with_extra_keys(&json!([[7], null]));
    let plain =
        chains("llm-d-xxh64").sequence_hashes(&tokens(0, 2), BlockSize::new(SIZE).unwrap(), None, None);
    assert_eq!((held(&naive).len(), doubt), (2, None));
    assert!(plain.iter().all(|hash| !held(&naive).contains(hash)));
}

#[test]
fn what_cannot_be_computed_is_a_doubt() {
    let mut misfit = translator("llm-d-xxh64");
    let three = Store::new(&[1, 2], None, &tokens(0, 1), SIZE);
    feed(&mut misfit, &[Change::Store(three)]);
    assert_eq!(misfit.doubt(), Some(Reason::TokenCount));
    // If tokens come in pairs, the hash of a block also covers the token after the block.
    let pairs: Vec<[u32; 2]> = (0..SIZE).map(|token| [token, token + 1]).collect();
    let event = json!(["BlockStored", [1], null, pairs, SIZE, null, "GPU"]);
    let payload = rmp_serde::to_vec(&json!([1.5, [event], 0])).unwrap();
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(Format::Sglang, DecodeLimits::default());
    decoder.decode(&payload, &mut batch).unwrap();
    let mut pairs = translator("llm-d-cbor-fnv");
    pairs.translate(&batch, &mut Translation::default());
    assert_eq!(pairs.doubt(), Some(Reason::Lookahead));
}

#[test]
fn all_vectors_of_llm_d_are_met() {
    #[derive(Deserialize)]
    struct Vector {
        algorithm: String,
        seed: String,
        model: String,
        block_size: usize,
        tokens: Vec<u32>,
        #[serde(default)]
        extras: Vec<Option<Vec<String>>>,
        keys: Vec<String>,
    }
    let Some(folder) = shared_folder("llmd") else {
        return;
    };
    let file = std::fs::File::open(folder.join("keys.jsonl")).unwrap();
    let mut met = 0;
    for line in std::io::BufReader::new(file).lines() {
        let vector: Vector = serde_json::from_str(&line.unwrap()).unwrap();
        let seed = Some(&vector.seed).filter(|seed| !seed.is_empty());
        let seed = seed.map(|seed| format!(":{seed}")).unwrap_or_default();
        let scheme = format!("llm-d-{}{seed}", vector.algorithm);
        let chains = SchemeChains::new(scheme.parse().unwrap(), vector.model);
        let steps = chains.steps().unwrap();
        let mut last = steps.root(None);
        for (block, tokens) in vector.tokens.chunks_exact(vector.block_size).enumerate() {
            let extras = vector.extras.get(block).cloned().flatten().unwrap_or_default();
            let extras: Vec<&str> = extras.iter().map(String::as_str).collect();
            last = steps.next(last, tokens, &extras);
            assert_eq!(last.as_u64().to_string(), vector.keys[block], "{scheme}");
        }
        met += 1;
    }
    assert_eq!(met, 72);
}

/// Translates events of SGLang, each in a batch of its own. The names in the events are taken as the hashes of SGLang's
/// scheme.
fn translate_sglang(events: &[Value]) -> (Naive, Translator) {
    translate("sglang", Format::Sglang, events)
}

/// Translates events of an engine, each in a batch of its own. The engine's names are taken as the hashes of `scheme`.
fn translate(scheme: &str, format: Format, events: &[Value]) -> (Naive, Translator) {
    let mut translator = Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        chains: Some(chains(scheme)),
        ..TranslatorSettings::for_format(format)
    });
    let mut decoder = Decoder::new(format, DecodeLimits::default());
    let mut naive = Naive::default();
    for event in events {
        let payload = rmp_serde::to_vec_named(&json!([1.5, [event], 0])).unwrap();
        let mut batch = EngineBatch::default();
        decoder.decode(&payload, &mut batch).unwrap();
        let mut output = Translation::default();
        translator.translate(&batch, &mut output);
        naive.apply(&output);
    }
    (naive, translator)
}

/// A stored event of SGLang: pages with these names, after `parent`.
fn pages(names: &[SequenceHash], parent: Option<SequenceHash>, tokens: &Value) -> Value {
    let signed = |hash: &SequenceHash| hash.as_u64().cast_signed();
    json!({
        "type": "BlockStored", "block_hashes": names.iter().map(signed).collect::<Vec<_>>(),
        "parent_block_hash": parent.as_ref().map(signed), "token_ids": tokens, "block_size": SIZE, "lora_id": null, "medium": "GPU",
    })
}

#[test]
fn pages_of_sglang_are_known_by_their_names() {
    let size = BlockSize::new(SIZE).unwrap();
    let all = chains("sglang").sequence_hashes(&tokens(0, 4), size, None, None);
    let first = pages(&all[..2], None, &json!(tokens(0, 2)));
    let second = pages(&all[2..], Some(all[1]), &json!(tokens(2 * SIZE, 2)));
    let (naive, translator) = translate_sglang(&[first.clone(), second]);
    assert_eq!((held(&naive), translator.doubt()), (sorted(all), None));
    let mut salted = pages(
        &chains("sglang").sequence_hashes(&tokens(0, 2), size, None, Some("tenant-a")),
        None,
        &json!(tokens(0, 2)),
    );
    salted["cache_salt"] = json!("tenant-a");
    let (naive, translator) = translate_sglang(&[first, salted]);
    assert_eq!((held(&naive).len(), translator.doubt()), (4, None));
}

#[test]
fn pages_of_pairs_are_known_by_their_names() {
    let size = BlockSize::new(SIZE).unwrap();
    let names = chains("sglang")
        .hashes_ahead(&tokens(0, 3)[..9], size, None)
        .unwrap();
    let pairs: Vec<[u32; 2]> = (0..2 * SIZE).map(|token| [token, token + 1]).collect();
    let (naive, translator) = translate_sglang(&[pages(&names, None, &json!(pairs))]);
    assert_eq!((held(&naive), translator.doubt()), (sorted(names), None));
    assert!(translator.looks_ahead() && translator.hashes_pairs());
}

#[test]
fn names_that_are_not_the_schemes_are_a_doubt() {
    let contract: Vec<SequenceHash> = [7, 8].map(SequenceHash::from).to_vec();
    let (naive, translator) = translate_sglang(&[pages(&contract, None, &json!(tokens(0, 2)))]);
    assert_eq!(
        (held(&naive).len(), translator.doubt()),
        (0, Some(Reason::ForeignChain))
    );
    // It is not documented how SGLang hashes blocks with an adapter, so their names are taken unchecked.
    let mut adapter = pages(&contract, None, &json!(tokens(0, 2)));
    adapter["lora_name"] = json!("sql");
    let (naive, translator) = translate_sglang(&[adapter]);
    assert_eq!((held(&naive), translator.doubt()), (sorted(contract), None));
}

/// Translates a stored event of vLLM with two blocks, which have these names and extra keys. The hash scheme is one
/// with a seed.
fn translate_vllm(names: &[SequenceHash], extra_keys: &Value) -> (Naive, Translator) {
    let event = json!({
        "type": "BlockStored", "block_hashes": names.iter().map(|hash| hash.as_u64()).collect::<Vec<_>>(),
        "parent_block_hash": null, "token_ids": tokens(0, 2), "block_size": SIZE, "lora_id": null, "medium": "GPU", "lora_name": null,
        "extra_keys": extra_keys,
    });
    translate("vllm-sha256-cbor:0", Format::Vllm, &[event])
}

#[test]
fn blocks_of_vllm_are_known_by_their_names() {
    let size = BlockSize::new(SIZE).unwrap();
    let own = |salt| chains("vllm-sha256-cbor:0").sequence_hashes(&tokens(0, 2), size, None, salt);
    let (naive, translator) = translate_vllm(&own(None), &Value::Null);
    assert_eq!((held(&naive), translator.doubt()), (sorted(own(None)), None));
    let (naive, translator) = translate_vllm(&own(Some("tenant-a")), &json!([["tenant-a"], null]));
    assert_eq!(
        (held(&naive), translator.doubt()),
        (sorted(own(Some("tenant-a"))), None)
    );
    // These hashes have another seed.
    let other = chains("vllm-sha256-cbor").sequence_hashes(&tokens(0, 2), size, None, None);
    let (naive, translator) = translate_vllm(&other, &Value::Null);
    assert_eq!(
        (held(&naive).len(), translator.doubt()),
        (0, Some(Reason::ForeignChain))
    );
    // It is not documented how vLLM hashes blocks with an image, so their names are taken unchecked.
    let (naive, translator) = translate_vllm(&other, &json!([[["image", 0]], null]));
    assert_eq!((held(&naive), translator.doubt()), (sorted(other), None));
}
