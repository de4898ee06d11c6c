//! Keys of blocks that llm-d's own token processor has printed, and pages of SGLang's own tests.

use kvatlas_core::hash::{BlockSize, Scheme, SchemeChains};
use serde_json::{Value, json};

use super::wides;

/// Prompts, by their tokens.
#[derive(Clone, Copy)]
enum Prompt {
    /// 53 tokens from 1 on, in blocks of 16.
    Counted,
    /// 197 tokens from 1 on, in blocks of 64.
    Counted64,
    /// Tokens at the borders of their encodings.
    Large,
    /// 48 tokens from 100 on: a block of text, one with an image, one with two.
    Images,
}

impl Prompt {
    fn tokens(self) -> Vec<u32> {
        match self {
            Self::Counted => (1..=53).collect(),
            Self::Counted64 => (1..=197).collect(),
            Self::Large => {
                let borders = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 1 << 31, u32::MAX];
                borders.into_iter().chain(7..=12).collect()
            }
            Self::Images => (100..148).collect(),
        }
    }

    fn block_size(self) -> usize {
        match self {
            Self::Counted64 => 64,
            _ => 16,
        }
    }

    fn extras(self, block: usize) -> &'static [&'static str] {
        match (self, block) {
            (Self::Images, 1) => &["image-a"],
            (Self::Images, 2) => &["image-a", "image-b"],
            _ => &[],
        }
    }
}

const XXH64: &str = "llm-d-xxh64";
const CBOR_FNV: &str = "llm-d-cbor-fnv";

/// The scheme, its seed, the model, the prompt, and its keys.
const VECTORS: [(&str, &str, &str, Prompt, &[u64]); 10] = [
    (
        XXH64,
        "",
        "meta-llama/Llama-3.1-8B-Instruct",
        Prompt::Counted,
        &[4762004430771817687, 15345006280760138163, 11152609865747072141],
    ),
    (
        XXH64,
        "42",
        "m",
        Prompt::Counted64,
        &[15666269219202335940, 7622725183763133469, 5016248529702416155],
    ),
    (XXH64, "0", "m", Prompt::Large, &[3215332984664435429]),
    (
        XXH64,
        "42",
        "",
        Prompt::Images,
        &[8648961862628959128, 16498986078399291675, 3316933599733601245],
    ),
    (
        XXH64,
        "",
        "meta-llama/Llama-3.1-8B-Instruct",
        Prompt::Images,
        &[10875869796742601563, 10569714926623175869, 8982326392129356962],
    ),
    (
        CBOR_FNV,
        "",
        "meta-llama/Llama-3.1-8B-Instruct",
        Prompt::Counted,
        &[369436768847880749, 14719338691038004320, 7734130225493398187],
    ),
    (
        CBOR_FNV,
        "42",
        "m",
        Prompt::Counted64,
        &[11752599813133945327, 10909176858796045133, 16868418804418177423],
    ),
    (CBOR_FNV, "0", "m", Prompt::Large, &[4430413064205329747]),
    (
        CBOR_FNV,
        "42",
        "",
        Prompt::Images,
        &[7469440865592995999, 12006437525484438847, 7129050020315312786],
    ),
    (
        CBOR_FNV,
        "",
        "meta-llama/Llama-3.1-8B-Instruct",
        Prompt::Images,
        &[840838903144113277, 7050024594969592681, 5261347487402463153],
    ),
];

/// The vectors as they are in the file.
pub(crate) fn llmd_keys() -> Vec<Value> {
    let vector = |(algorithm, seed, model, prompt, keys): &(&str, &str, &str, Prompt, &[u64])| {
        let blocks = prompt.tokens().len() / prompt.block_size();
        json!({
            "scheme": algorithm,
            "seed": seed,
            "model": model,
            "block_size": prompt.block_size(),
            "tokens": prompt.tokens(),
            "extras": (0..blocks).map(|block| prompt.extras(block)).collect::<Vec<_>>(),
            "sequence_hashes": wides(keys, |key| key),
        })
    };
    VECTORS.iter().map(vector).collect()
}

#[test]
fn schemes_meet_the_vectors_of_llm_d() {
    for (algorithm, seed, model, prompt, keys) in VECTORS {
        let scheme = match seed {
            "" => algorithm.to_owned(),
            seed => format!("{algorithm}:{seed}"),
        };
        let chains = SchemeChains::new(scheme.parse::<Scheme>().unwrap(), model);
        let tokens = prompt.tokens();
        let steps = chains.steps().unwrap();
        let mut last = steps.root(None);
        let blocks = tokens.chunks_exact(prompt.block_size()).enumerate();
        let computed: Vec<u64> = blocks
            .map(|(block, tokens)| {
                last = steps.next(last, tokens, prompt.extras(block));
                last.as_u64()
            })
            .collect();
        assert_eq!(computed, keys, "{scheme} of {model:?}");
    }
}

/// Tokens, tokens of a page, the salt, whether pages are of pairs, and the names.
type SglangCase = (&'static [u32], u32, &'static str, bool, &'static [i64]);

/// Printed by `compute_node_event_hash_values` of SGLang 0.5.23 over its own compiled hash, as its events name the pages.
const SGLANG: [SglangCase; 7] = [
    (&[1, 2, 3, 4, 5], 4, "", false, &[-3488128144981237669]),
    (
        &[10, 20, 30, 40, 50, 60, 70, 80],
        2,
        "",
        false,
        &[
            978178666101069530,
            -895308556211281782,
            -8033692805846017938,
            835415944263129316,
        ],
    ),
    (
        &[1, 2, 3, 4, 5, 6, 7, 8],
        4,
        "tenant-a",
        false,
        &[3718046898735569995, 3308615664605479373],
    ),
    (
        &[10, 20, 30, 40, 50],
        2,
        "",
        true,
        &[-8847804484166691499, 4989791362144317498],
    ),
    (&[1, 2, 3, 4, 5, 6], 4, "", true, &[-638950109823820341]),
    (
        &[5, 6, 7, 8, 9, 10, 11, 12, 13],
        4,
        "",
        true,
        &[-2900568514773989563, -322435596280658912],
    ),
    (
        &[1, 2, 3, 4, 5, 6, 7, 8, 9],
        4,
        "tenant-a",
        true,
        &[2832294365426534333, 3603037882432405245],
    ),
];

/// The seed, the first token and how many, tokens of a block, the salt, and the names.
type VllmCase = (&'static str, u32, u32, u32, &'static str, &'static [u64]);

/// Printed by `get_request_block_hasher` of vLLM 0.33.0 with `sha256_cbor`, as its events name the blocks.
const VLLM: [VllmCase; 6] = [
    ("", 1, 32, 16, "", &[0x7b0b_f7bf_7fd0_1682, 0x0b36_8b33_d87b_f3bf]),
    (
        "",
        1,
        32,
        16,
        "tenant-a",
        &[0x4656_df8f_4912_4fcf, 0xd1ce_0a68_28f9_edc7],
    ),
    (
        "0",
        1,
        32,
        16,
        "",
        &[0x2cea_bcfa_e6d3_32ea, 0x2647_0bbe_c927_f5bf],
    ),
    (
        "0",
        1,
        32,
        16,
        "tenant-a",
        &[0x2f18_a744_03ce_4052, 0x07b2_41a2_e727_c572],
    ),
    (
        "",
        100,
        300,
        128,
        "",
        &[0x4f30_9a09_48ef_24ed, 0x7490_f0e1_49c9_0c48],
    ),
    (
        "",
        65_500,
        80,
        40,
        "ssssssssssssssssssssssssssssss",
        &[0xbcb4_d8ef_34db_5cae, 0xbb11_00a7_b8ee_84b2],
    ),
];

/// The vectors of vLLM as they are in the file.
pub(crate) fn vllm_blocks() -> Vec<Value> {
    let vector = |(seed, first, count, block_size, salt, blocks): &VllmCase| {
        json!({
            "scheme": "vllm-sha256-cbor",
            "seed": seed,
            "block_size": block_size,
            "tokens": (*first..first + count).collect::<Vec<u32>>(),
            "cache_salt": salt,
            "sequence_hashes": wides(blocks, |block| block),
        })
    };
    VLLM.iter().map(vector).collect()
}

#[test]
fn schemes_meet_the_vectors_of_vllm() {
    for (seed, first, count, block_size, salt, blocks) in VLLM {
        let scheme = match seed {
            "" => "vllm-sha256-cbor".to_owned(),
            seed => format!("vllm-sha256-cbor:{seed}"),
        };
        let chains = SchemeChains::new(scheme.parse().unwrap(), "m");
        assert!(chains.steps().is_none() && !chains.knows_adapters());
        let tokens: Vec<u32> = (first..first + count).collect();
        let size = BlockSize::new(block_size).unwrap();
        let computed = chains.sequence_hashes(&tokens, size, None, Some(salt));
        let computed: Vec<u64> = computed.iter().map(|hash| hash.as_u64()).collect();
        assert_eq!(computed, blocks, "{scheme}, {tokens:?}");
        assert_eq!(chains.hashes_ahead(&tokens, size, None), None);
    }
}

/// The vectors of SGLang as they are in the file.
pub(crate) fn sglang_pages() -> Vec<Value> {
    let vector = |(tokens, page_size, salt, in_pairs, pages): &(&[u32], u32, &str, bool, &[i64])| {
        let pages: Vec<u64> = pages.iter().map(|page| page.cast_unsigned()).collect();
        json!({
            "scheme": "sglang",
            "block_size": page_size,
            "tokens": tokens,
            "cache_salt": salt,
            "in_pairs": in_pairs,
            "sequence_hashes": wides(&pages, |page| page),
        })
    };
    SGLANG.iter().map(vector).collect()
}

#[test]
fn schemes_meet_the_vectors_of_sglang() {
    let chains = SchemeChains::new("sglang".parse().unwrap(), "m");
    assert!(chains.steps().is_none());
    for (tokens, page_size, salt, in_pairs, pages) in SGLANG {
        let size = BlockSize::new(page_size).unwrap();
        let computed = match in_pairs {
            true => chains.hashes_ahead(tokens, size, Some(salt)).unwrap(),
            false => chains.sequence_hashes(tokens, size, None, Some(salt)),
        };
        let computed: Vec<i64> = computed.iter().map(|hash| hash.as_u64().cast_signed()).collect();
        assert_eq!(computed, pages, "{tokens:?}");
    }
}
