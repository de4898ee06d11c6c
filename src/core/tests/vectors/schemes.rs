//! Names that engines give to blocks: pages of SGLang, and blocks of vLLM.

use kvatlas_core::hash::{BlockSize, SchemeChains};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::wides;

/// One SGLang case: the tokens, the number of tokens of a page, the salt, the adapter's id, whether pairs of tokens
/// are hashed, and the names.
type SglangCase = (
    &'static [u32],
    u32,
    &'static str,
    &'static str,
    bool,
    &'static [i64],
);

/// Id that SGLang gives the adapter `my-lora` with `--lora-paths my-lora=/adapters/my-lora`: a digest of name and
/// path.
const ADAPTER: &str = "f8773e543de25411b8445231782a1fbc";

/// Names of pages that SGLang 0.5.23 itself printed. Where there is no adapter, its function
/// `compute_node_event_hash_values` printed them, with SGLang's own compiled hash function. Where there is an adapter,
/// its cache printed them; its events have the same names.
const SGLANG: [SglangCase; 9] = [
    (&[1, 2, 3, 4, 5], 4, "", "", false, &[-3488128144981237669]),
    (
        &[10, 20, 30, 40, 50, 60, 70, 80],
        2,
        "",
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
        "",
        false,
        &[3718046898735569995, 3308615664605479373],
    ),
    (
        &[10, 20, 30, 40, 50],
        2,
        "",
        "",
        true,
        &[-8847804484166691499, 4989791362144317498],
    ),
    (&[1, 2, 3, 4, 5, 6], 4, "", "", true, &[-638950109823820341]),
    (
        &[5, 6, 7, 8, 9, 10, 11, 12, 13],
        4,
        "",
        "",
        true,
        &[-2900568514773989563, -322435596280658912],
    ),
    (
        &[1, 2, 3, 4, 5, 6, 7, 8, 9],
        4,
        "tenant-a",
        "",
        true,
        &[2832294365426534333, 3603037882432405245],
    ),
    (
        &[1, 2, 3, 4, 5, 6, 7, 8],
        4,
        "",
        ADAPTER,
        false,
        &[-4667663395000963960, 4360600054185822055],
    ),
    (
        &[1, 2, 3, 4, 5, 6, 7, 8],
        4,
        "tenant-a",
        ADAPTER,
        false,
        &[-2733114882961410564, -360540036783101778],
    ),
];

/// One vLLM case: the seed, the first token, the number of tokens, the number of tokens of a block, the salt, and the
/// names.
type VllmCase = (&'static str, u32, u32, u32, &'static str, &'static [u64]);

/// Cases that `get_request_block_hasher` of vLLM 0.33.0 printed with `sha256_cbor`. vLLM's events use the same block
/// names.
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

/// Returns the test vectors of vLLM as they are in the file.
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

/// Returns the test vectors of SGLang as they are in the file.
pub(crate) fn sglang_pages() -> Vec<Value> {
    let vector = |(tokens, page_size, salt, adapter, in_pairs, pages): &SglangCase| {
        let pages: Vec<u64> = pages.iter().map(|page| page.cast_unsigned()).collect();
        json!({
            "scheme": "sglang",
            "block_size": page_size,
            "tokens": tokens,
            "cache_salt": salt,
            "lora_id": adapter,
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
    for (tokens, page_size, salt, adapter, in_pairs, pages) in SGLANG {
        let size = BlockSize::new(page_size).unwrap();
        let computed = match in_pairs {
            true => chains.hashes_ahead(tokens, size, Some(salt)).unwrap(),
            false => chains.sequence_hashes(tokens, size, None, Some(salt)),
        };
        let computed: Vec<i64> = computed
            .iter()
            .map(|hash| page_of(adapter, hash.as_u64()).cast_signed())
            .collect();
        assert_eq!(computed, pages, "{tokens:?}");
    }
}

/// Returns the name of an adapter's page. SGLang computes it from the adapter's id and the name that the page would
/// have without the adapter. kvatlas cannot compute such names, because only SGLang knows the ids of its adapters.
fn page_of(adapter: &str, page: u64) -> u64 {
    if adapter.is_empty() {
        return page;
    }
    let length = (adapter.len() as u64).to_le_bytes();
    let key = Sha256::new_with_prefix(b"sglang-kv-event-namespace-v1\x01").chain_update(length);
    // The last byte stands for a salt that is not part of the key.
    let key = key.chain_update(adapter).chain_update([0]).finalize();
    let digest = Sha256::new_with_prefix(key)
        .chain_update(page.to_be_bytes())
        .finalize();
    let (first, _) = digest.split_at(8);
    first.iter().fold(0, |name, byte| (name << 8) | u64::from(*byte))
}
