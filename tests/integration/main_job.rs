//! The daemon's main task over a real broker: events come in, and queries get exact prefix matches.

use crate::support::{
    Client, broker, daemon, hashes, matches, namespace, old_server, own_port, removed, stored, stored_after,
    worker,
};
use kvatlas_core::hash::{
    BlockSize, HashSeed, PositionalLineageHash, SequenceHash, block_hashes, lineage_hashes, sequence_hashes,
};
use kvatlas_core::wire::{
    BlockContent, BlockNames, Event, QueryKey, QueryOptions, QueryReply, QueryResult, Resumable, SingleQuery,
    StoredBlocks, Tier,
};
use kvatlas_process::broker::embedded::EmbeddedBroker;

/// Runs one scenario from the first event to the last query. The tests run it with each version of the server.
async fn serve_and_ask(broker: &EmbeddedBroker) {
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let (mut first, mut second, mut ranked) = (
        client.publisher("gpu-0", 0),
        client.publisher("gpu-1", 0),
        client.publisher("gpu-1", 1),
    );
    client
        .tell(&mut first, "gpu-0", 0, vec![stored(hashes(10, 8))])
        .await;
    client
        .tell(
            &mut second,
            "gpu-1",
            0,
            vec![stored(hashes(10, 4)), stored_after(13, hashes(90, 2))],
        )
        .await;
    client
        .tell(
            &mut ranked,
            "gpu-1",
            1,
            vec![stored(hashes(10, 8)), removed(hashes(14, 1))],
        )
        .await;

    let reply = client.ask(hashes(10, 10)).await;
    assert_eq!(reply.query_blocks, 10);
    let expected = [
        ("gpu-0".to_owned(), 0, 8, true),
        ("gpu-1".to_owned(), 0, 4, true),
        ("gpu-1".to_owned(), 1, 4, true),
    ];
    assert_eq!(matches(&reply), expected, "holes count for nothing behind them");

    // The hole is filled, so the blocks after it count again.
    client
        .tell(&mut ranked, "gpu-1", 1, vec![stored_after(13, hashes(14, 1))])
        .await;
    let reply = client.ask(hashes(10, 10)).await;
    assert_eq!(matches(&reply)[1], ("gpu-1".to_owned(), 1, 8, true));
    assert!(client.ask(hashes(500, 3)).await.holders.is_empty());
    let report = daemon.stop().await;
    assert!(report.overran.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_matches_out() {
    serve_and_ask(&broker().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_matches_out_on_an_older_server() {
    if let Some(binary) = old_server() {
        serve_and_ask(&EmbeddedBroker::start_with(&binary, own_port()).await.unwrap()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_forms_of_a_query_get_the_same_answer() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let tokens: Vec<u32> = (1..=100).collect();
    let blocks: Vec<_> = block_hashes(&tokens, BlockSize::DEFAULT, HashSeed::default()).collect();
    let sequence: Vec<SequenceHash> = sequence_hashes(blocks.iter().copied()).collect();
    let lineage: Vec<PositionalLineageHash> = lineage_hashes(&sequence).collect::<Result<_, _>>().unwrap();
    assert_eq!(sequence.len(), 6, "the tail of four tokens is no block");

    let mut by_sequence = client.publisher("by-sequence", 0);
    client
        .tell(
            &mut by_sequence,
            "by-sequence",
            0,
            vec![stored(sequence[..5].to_vec())],
        )
        .await;
    let mut by_lineage = client.publisher("by-lineage", 0);
    let names = BlockNames::Lineage(lineage[..3].to_vec());
    let event = Event::Stored(StoredBlocks {
        names,
        content: None,
        engine_hashes: None,
        resumable: Resumable::ALL,
    });
    client.tell(&mut by_lineage, "by-lineage", 0, vec![event]).await;

    let keys = [
        QueryKey::Tokens {
            tokens,
            lora_name: None,
            cache_salt: None,
        },
        QueryKey::BlockHashes(blocks),
        QueryKey::SequenceHashes(sequence),
        QueryKey::LineageHashes(lineage),
    ];
    let expected = [
        ("by-sequence".to_owned(), 0, 5, true),
        ("by-lineage".to_owned(), 0, 3, true),
    ];
    for key in &keys {
        let reply = client.ask_with(SingleQuery::new(key.clone())).await.unwrap();
        assert_eq!(matches(&reply), expected, "{key:?}");
    }
    let queries = keys.iter().cloned().map(SingleQuery::new).collect();
    for result in client.queries.query_batch(&namespace(), queries).await.unwrap() {
        let QueryResult::Reply(reply) = result else {
            panic!("{result:?}")
        };
        assert_eq!(matches(&reply), expected);
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn options_narrow_the_answer_and_explain_it() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    for (name, count) in [("a", 5), ("b", 3), ("c", 5), ("d", 1)] {
        let mut publisher = client.publisher(name, 0);
        client
            .tell(&mut publisher, name, 0, vec![stored(hashes(10, count))])
            .await;
    }
    let ask = async |options: QueryOptions| {
        let query = SingleQuery {
            options,
            ..SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 6)))
        };
        client.ask_with(query).await.unwrap()
    };
    let names = |reply: &kvatlas_core::wire::QueryReply| {
        reply
            .holders
            .iter()
            .map(|holder| holder.worker.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&ask(QueryOptions::default()).await), ["a", "c", "b", "d"]);
    let limited = ask(QueryOptions {
        limit: Some(2),
        ..QueryOptions::default()
    })
    .await;
    assert_eq!(
        (names(&limited), limited.holders_total),
        (vec!["a".to_owned(), "c".to_owned()], 4)
    );
    let deep = ask(QueryOptions {
        min_blocks: 3,
        ..QueryOptions::default()
    })
    .await;
    assert_eq!(names(&deep), ["a", "c", "b"]);
    let workers = Some(vec![worker("b"), worker("d"), worker("nobody")]);
    assert_eq!(
        names(
            &ask(QueryOptions {
                workers,
                ..QueryOptions::default()
            })
            .await
        ),
        ["b", "d"]
    );

    let explained = ask(QueryOptions {
        explain: true,
        ..QueryOptions::default()
    })
    .await;
    let keys: Vec<_> = lineage_hashes(&hashes(10, 6)).collect::<Result<_, _>>().unwrap();
    let dropped = explained.holders[2].dropped_out.clone().unwrap();
    assert_eq!(
        (dropped.position, dropped.other_holders),
        (3, 2),
        "b lacks block 3, which a and c have"
    );
    assert_eq!(dropped.lineage_hash, keys[3]);
    assert_eq!(explained.holders[0].dropped_out.clone().unwrap().other_holders, 0);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_query_says_how_much_lies_near() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let [mut spread, mut near] = ["spread", "near"].map(|name| client.publisher(name, 0));
    let [host, disk] = [1, 2].map(|tier| Tier::new(tier).unwrap());
    client
        .tell(&mut near, "near", 0, vec![stored(hashes(10, 3))])
        .await;
    // The worker has two blocks on the device, four on the host, and all six on the disk.
    for (tier, count) in [(Tier::DEVICE, 2), (host, 4), (disk, 6)] {
        let events = vec![stored(hashes(10, count))];
        client.tell_in(tier, &mut spread, "spread", 0, events).await;
    }
    let query = |tiers| SingleQuery {
        options: QueryOptions {
            tiers,
            explain: true,
            ..QueryOptions::default()
        },
        ..SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 6)))
    };
    let depths = |reply: &QueryReply| -> Vec<_> {
        let holders = reply.holders.iter();
        holders
            .map(|holder| (holder.matched_blocks, holder.device_blocks, holder.host_blocks))
            .collect()
    };
    let all = [(6, Some(2), Some(4)), (3, Some(3), Some(3))];
    let reply = client.ask_with(query(true)).await.unwrap();
    assert_eq!(depths(&reply), all);
    assert_eq!(reply.holders[1].dropped_out.as_ref().unwrap().position, 3);
    let reply = client.ask_with(query(false)).await.unwrap();
    assert_eq!(depths(&reply), [(6, None, None), (3, None, None)]);
    let batch = vec![query(false), query(true)];
    let results = client.queries.query_batch(&namespace(), batch).await.unwrap();
    assert!(
        matches!(&results[1], QueryResult::Reply(reply) if depths(reply) == all),
        "{results:?}"
    );

    // A block that leaves the device no longer counts for the device, but still counts in the other tiers.
    client
        .tell(&mut spread, "spread", 0, vec![removed(hashes(11, 1))])
        .await;
    let reply = client.ask_with(query(true)).await.unwrap();
    assert_eq!(depths(&reply), [(6, Some(1), Some(4)), (3, Some(3), Some(3))]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn opaque_engine_hashes_are_recomputed_or_reported() {
    let broker = broker().await;
    let tokens: Vec<u32> = (1..=64).collect();
    let content = || {
        Some(BlockContent::Tokens {
            tokens: tokens.clone(),
            lora_name: None,
            cache_salt: None,
        })
    };
    let names = || BlockNames::Sequence {
        parent: None,
        position: None,
        hashes: hashes(7000, 4),
    };
    let event = Event::Stored(StoredBlocks {
        names: names(),
        content: content(),
        engine_hashes: None,
        resumable: Resumable::ALL,
    });
    let query = || {
        SingleQuery::new(QueryKey::Tokens {
            tokens: tokens.clone(),
            lora_name: None,
            cache_salt: None,
        })
    };
    let client = Client::connect(broker.url()).await;

    let recomputing = daemon(broker.url(), &[("namespace_defaults.hashing", "recompute")]).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client.tell(&mut publisher, "gpu-0", 0, vec![event.clone()]).await;
    assert_eq!(
        matches(&client.ask_with(query()).await.unwrap()),
        [("gpu-0".to_owned(), 0, 4, true)]
    );
    client
        .tell(&mut publisher, "gpu-0", 0, vec![removed(hashes(7002, 2))])
        .await;
    assert_eq!(
        matches(&client.ask_with(query()).await.unwrap()),
        [("gpu-0".to_owned(), 0, 2, true)]
    );
    recomputing.stop().await;

    let trusting = daemon(broker.url(), &[]).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let status = client.tell(&mut publisher, "gpu-0", 0, vec![event]).await;
    assert!(status.foreign_chain);
    let reply = client.ask_with(query()).await.unwrap();
    assert_eq!(
        (reply.holders.len(), reply.foreign_holders),
        (0, 1),
        "an empty answer says why"
    );
    assert_eq!(
        matches(&client.ask(hashes(7000, 4)).await),
        [("gpu-0".to_owned(), 0, 4, true)]
    );
    trusting.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_held_while_any_tier_has_it() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let host = Tier::new(1).unwrap();
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(10, 3))])
        .await
        .unwrap();
    publisher
        .publish(host, vec![stored(hashes(10, 2))])
        .await
        .unwrap();
    let cursor = publisher
        .publish(Tier::DEVICE, vec![removed(hashes(10, 3))])
        .await
        .unwrap();
    client.applied("gpu-0", 0, cursor).await;
    assert_eq!(
        matches(&client.ask(hashes(10, 3)).await),
        [("gpu-0".to_owned(), 0, 2, true)]
    );
    let cursor = publisher
        .publish(host, vec![removed(hashes(10, 2))])
        .await
        .unwrap();
    client.applied("gpu-0", 0, cursor).await;
    assert!(client.ask(hashes(10, 3)).await.holders.is_empty());
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_the_queries_and_all_follow_the_events() {
    let broker = broker().await;
    let (one, other) = (daemon(broker.url(), &[]).await, daemon(broker.url(), &[]).await);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 3))])
        .await;
    one.stop().await;
    // Both replicas know the same, whichever of them answers.
    client.applied("gpu-0", 0, publisher.cursor()).await;
    assert_eq!(
        matches(&client.ask(hashes(10, 3)).await),
        [("gpu-0".to_owned(), 0, 3, true)]
    );
    other.stop().await;
}
