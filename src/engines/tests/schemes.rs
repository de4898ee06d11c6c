//! Translation into hashes of a scheme.

use std::io::BufRead;

use kvatlas_core::hash::{BlockSize, SchemeChains, SequenceHash};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, Format, Reason, Translation, Translator, TranslatorSettings,
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
    // Hashed, the second would come before the first.
    let (one, two) = ("image-z", "image-a");
    let (naive, doubt) = with_extra_keys(&json!([[[one, 0], [two, 2], "salt"], [[two, 2]]]));
    let chains = chains("llm-d-xxh64");
    let first = chains.next(chains.root(None), &tokens(0, 1), &[one, two, "salt"]);
    let second = chains.next(first, &tokens(SIZE, 1), &[two]);
    assert_eq!((held(&naive), doubt), (sorted(vec![first, second]), None));
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
    // Pairs of tokens: each block is hashed with the token behind it.
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
        let mut last = chains.root(None);
        for (block, tokens) in vector.tokens.chunks_exact(vector.block_size).enumerate() {
            let extras = vector.extras.get(block).cloned().flatten().unwrap_or_default();
            let extras: Vec<&str> = extras.iter().map(String::as_str).collect();
            last = chains.next(last, tokens, &extras);
            assert_eq!(last.as_u64().to_string(), vector.keys[block], "{scheme}");
        }
        met += 1;
    }
    assert_eq!(met, 72);
}
