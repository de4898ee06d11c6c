//! Namespaces with a hashing scheme other than kvatlas's own: an engine whose blocks appear in two namespaces, and a
//! vLLM engine with its own block names.

use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{HolderMatch, ModelKey, NamespaceName, QueryKey, SingleQuery};
use serde_json::{Value, json};

use super::python::{Publishers, Spec, python};
use super::{BLOCK, Site, follow_text, removed, stored, tokens};
use crate::support::eventually;

/// Returns the holders that a query in a namespace finds; `None` if the query fails.
async fn ask(site: &Site, namespace: &NamespaceName, key: QueryKey) -> Option<Vec<HolderMatch>> {
    let asked = site.client.queries.query(namespace, SingleQuery::new(key)).await;
    asked.ok().map(|reply| reply.holders)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_known_by_the_hashes_of_each_scheme() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    let llmd = ModelKey::new("m").speaking(Some("llm-d-cbor-fnv:42".parse().unwrap()));
    let flag = publishers.flag(0, "10.0.0.1:8000");
    follow_text(&site.bridge, &flag);
    follow_text(&site.bridge, &format!("{flag},scheme=llm-d-cbor-fnv:42"));
    publishers.publish(0, &json!([stored(1, 0, 8)]));
    publishers.publish(0, &json!([removed(1, 6, 2)]));
    let by_tokens = || QueryKey::Tokens {
        tokens: tokens(1, 0, 8),
        lora_name: None,
        cache_salt: None,
    };
    let size = BlockSize::new(BLOCK).unwrap();
    let chain: Vec<SequenceHash> = llmd
        .chains()
        .unwrap()
        .sequence_hashes(&tokens(1, 0, 8), size, None, None);
    let spoken = llmd.namespace().unwrap();
    let contracts = ModelKey::new("m").namespace().unwrap();
    for (namespace, key) in [
        (&contracts, by_tokens()),
        (&spoken, by_tokens()),
        (&spoken, QueryKey::SequenceHashes(chain)),
    ] {
        let depth = eventually("it is exact", async || {
            let holders = ask(&site, namespace, key.clone()).await?;
            let [holder] = holders.as_slice() else {
                return None;
            };
            (holder.exact && holder.matched_blocks == 6).then_some(holder.matched_blocks)
        });
        assert_eq!(depth.await, 6);
    }
    publishers.publish(0, &json!([["AllBlocksCleared"]]));
    eventually("nothing is left", async || {
        let holders = ask(&site, &spoken, by_tokens()).await?;
        holders.is_empty().then_some(())
    })
    .await;
}

/// Returns tokens, and the names that vLLM 0.33.0 gives their blocks with this salt and without a hash seed. Both come
/// from the test vectors in `deploy`.
fn blocks_of_vllm(salt: &str) -> (Vec<u32>, Vec<u64>) {
    let vectors: Value = serde_json::from_str(include_str!("../../../deploy/test-vectors.json")).unwrap();
    let blocks = vectors["vllm_blocks"].as_array().unwrap();
    let vector = blocks
        .iter()
        .find(|vector| vector["seed"] == "" && vector["cache_salt"] == salt)
        .unwrap();
    let tokens = vector["tokens"].as_array().unwrap().iter();
    let names = vector["sequence_hashes"].as_array().unwrap().iter();
    (
        tokens
            .map(|token| u32::try_from(token.as_u64().unwrap()).unwrap())
            .collect(),
        names
            .map(|name| u64::from_str_radix(name.as_str().unwrap(), 16).unwrap())
            .collect(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_of_vllm_is_asked_by_its_own_names() {
    let Some(python) = python() else { return };
    let site = Site::new(&[("namespace_defaults.block_size", "16")]).await;
    let spec = Spec::default();
    let mut publishers = Publishers::start(&python, &[spec]);
    let flag = publishers.flag(0, "gpu-0");
    follow_text(
        &site.bridge,
        &format!("{flag},scheme=vllm-sha256-cbor,block_size=16"),
    );
    let spoken = ModelKey::new("m").speaking(Some("vllm-sha256-cbor".parse().unwrap()));
    let spoken = spoken.namespace().unwrap();
    for salt in ["", "tenant-a"] {
        let (tokens, names) = blocks_of_vllm(salt);
        let extra = (!salt.is_empty()).then(|| json!([[salt], null]));
        let stored = json!(["BlockStored", names, null, tokens, 16, null, "GPU", null, extra]);
        publishers.publish(0, &json!([stored]));
        let by_tokens = QueryKey::Tokens {
            tokens,
            lora_name: None,
            cache_salt: (!salt.is_empty()).then(|| salt.to_owned()),
        };
        let by_names = QueryKey::SequenceHashes(names.into_iter().map(SequenceHash::from).collect());
        for key in [by_tokens, by_names] {
            eventually("it is exact", async || {
                let holders = ask(&site, &spoken, key.clone()).await?;
                let [holder] = holders.as_slice() else {
                    return None;
                };
                (holder.exact && holder.matched_blocks == 2).then_some(())
            })
            .await;
        }
    }
    // A name that vLLM would not give to these tokens is not a block of the scheme.
    let (tokens, names) = blocks_of_vllm("");
    let wrong: Vec<u64> = names.iter().map(|name| name ^ 1).collect();
    publishers.publish(
        0,
        &json!([
            ["AllBlocksCleared"],
            ["BlockStored", wrong, null, tokens, 16, null, "GPU", null, null]
        ]),
    );
    eventually("the holder is in doubt", async || {
        let key = QueryKey::SequenceHashes(wrong.iter().copied().map(SequenceHash::from).collect());
        let asked = site
            .client
            .queries
            .query(&spoken, SingleQuery::new(key))
            .await
            .ok()?;
        let is_exact = asked.holders.iter().all(|holder| holder.exact) && asked.doubtful_holders == 0;
        (!is_exact).then_some(())
    })
    .await;
}
