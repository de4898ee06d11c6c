//! One engine that feeds namespaces of two schemes.

use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{HolderMatch, ModelKey, NamespaceName, QueryKey, SingleQuery};
use serde_json::json;

use super::python::{Publishers, Spec, python};
use super::{BLOCK, Site, follow_text, removed, stored, tokens};
use crate::support::eventually;

/// The holders of a key in a namespace.
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
