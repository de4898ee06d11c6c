//! Engines whose events lack some fields, or whose hashes cover tokens beyond their blocks.

use kvatlas_core::wire::{QueryKey, QueryReply, SingleQuery};
use serde_json::{Value, json};

use super::python::{Publishers, Spec, python};
use super::{BLOCK, Site, follow_text, name_of, namespace, stored, tokens};

/// Returns vLLM's stored event in the form of old versions, which has no fields for adapters and salts.
fn stored_old(which: u32, first: u32, count: u32) -> Value {
    let mut event = stored(which, first, count);
    event.as_array_mut().unwrap().truncate(7);
    event
}

/// Returns vLLM's stored event for the blocks of sequence `which` from `first` to `first + count`, in the form of newer
/// versions.
fn stored_map(which: u32, first: u32, count: u32) -> Value {
    let names: Vec<u64> = (first..first + count)
        .map(|block| name_of(which, block))
        .collect();
    json!({
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": first.checked_sub(1).map(|block| name_of(which, block)),
        "token_ids": tokens(which, first, count), "block_size": BLOCK, "lora_id": null, "medium": "GPU", "lora_name": null,
    })
}

impl Site {
    async fn ask_as(
        &self,
        tokens: Vec<u32>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> QueryReply {
        let key = QueryKey::Tokens {
            tokens,
            lora_name: lora_name.map(str::to_owned),
            cache_salt: cache_salt.map(str::to_owned),
        };
        let namespace = namespace();
        let asked = self.client.queries.query(&namespace, SingleQuery::new(key));
        asked.await.unwrap()
    }
}

fn found(reply: &QueryReply) -> Vec<(&str, u32)> {
    let holders = reply.holders.iter();
    holders
        .map(|holder| (holder.worker.as_str(), holder.matched_blocks))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_with_a_salt_meets_nobody_exactly_who_could_not_have_told_it() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    site.client.listed().await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored_old(1, 0, 2)]));
    let mut salted = stored_map(1, 0, 2);
    salted["extra_keys"] = json!([["s"], null]);
    salted["block_hashes"] = json!([77, 78]);
    publishers.publish(1, &json!([stored_map(1, 0, 2), salted]));
    site.follow(&publishers, 0, "old");
    site.settles("old", 2, &[]).await;
    let ask = async |salt| site.ask_as(tokens(1, 0, 2), None, salt).await;
    let plain = ask(None).await;
    assert_eq!((found(&plain), plain.is_exact()), (vec![("old", 2)], true));
    let with_salt = ask(Some("s")).await;
    assert_eq!((found(&with_salt), with_salt.doubtful_holders), (Vec::new(), 1));
    site.follow(&publishers, 1, "new");
    site.settles("new", 4, &[]).await;
    let with_salt = ask(Some("s")).await;
    assert_eq!(found(&with_salt), [("new", 2)]);
    assert_eq!(
        (with_salt.holders[0].exact, with_salt.doubtful_holders),
        (true, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_have_the_names_that_the_configuration_gives_them() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    site.client.listed().await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    let mut adapted = stored_old(1, 0, 2);
    adapted[5] = json!(7);
    for engine in [0, 1] {
        publishers.publish(engine, &json!([adapted]));
    }
    let named = publishers.flag(0, "named") + ",adapters=7:sql";
    follow_text(&site.bridge, &named);
    site.settles("named", 2, &[]).await;
    site.follow(&publishers, 1, "unnamed");
    site.settles("unnamed", 0, &[]).await;
    let reply = site.ask_as(tokens(1, 0, 2), Some("sql"), None).await;
    assert_eq!(found(&reply), [("named", 2)]);
    assert_eq!(reply.doubtful_holders, 1, "an adapter of the other has no name");
}

/// With EAGLE and MTP, vLLM's hash of a block also covers the token after the block. A prompt that agrees with the
/// engine on this token must match the last block; a prompt that differs must not match it.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_found_where_the_engine_hashes_a_token_ahead() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    site.client.listed().await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    let mut ahead = stored_map(1, 0, 2);
    ahead["lookahead_token_ids"] = json!([tokens(1, 1, 1)[..1], tokens(1, 2, 1)[..1]]);
    publishers.publish(0, &json!([ahead]));
    publishers.publish(1, &json!([stored_map(1, 0, 1)]));
    site.follow(&publishers, 0, "ahead");
    site.follow(&publishers, 1, "plain");
    site.settles("ahead", 2, &[]).await;
    site.settles("plain", 1, &[]).await;
    let whole = site.ask_as(tokens(1, 0, 3), None, None).await;
    assert_eq!(found(&whole), [("ahead", 2), ("plain", 1)]);
    assert!(whole.is_exact());
    // A token that differs from the engine's follows the second block.
    let mut other = tokens(1, 0, 2);
    other.push(5);
    let reply = site.ask_as(other, None, None).await;
    assert_eq!(found(&reply), [("ahead", 1), ("plain", 1)]);
    assert!(reply.is_exact());
}
