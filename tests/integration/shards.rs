//! Shards, gateways and replicas on a real broker.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::jetstream::Restartable;
use crate::support::metrics::{counter, total};
use crate::support::process::Process;
use crate::support::proxy::{Network, Proxy};
use crate::support::{
    Client, PATIENCE, broker, daemon, eventually, hashes, http_get, matches, namespace, server, stored,
    subjects,
};
use async_nats::connection::State;
use bytes::Bytes;
use futures_util::StreamExt;
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::{
    ERROR_CODE_HEADER, ErrorCode, Gathered, NamespacesReply, PROTOCOL_VERSION, QueryKey, QueryOptions,
    QueryReply, QueryResult, SHARD_HEADER, Shard, SingleQuery, StatusReply, Tier,
};
use serde_json::Value;

const WORKERS: u32 = 12;

/// Publishes the batches of workers `gpu-0`, `gpu-1`, …. Each worker has one block more than its predecessor.
async fn publish(client: &Client) {
    for number in 0..WORKERS {
        let mut publisher = client.publisher(&format!("gpu-{number}"), 0);
        let blocks = stored(hashes(10, u64::from(number) + 1));
        publisher.publish(Tier::DEVICE, vec![blocks]).await.unwrap();
        publisher.flush().await.unwrap();
    }
}

/// Returns the holders that an unsharded daemon with all workers would name: the first `limit`, with the most blocks
/// first.
fn expected(limit: usize) -> Vec<(String, u32, u32, bool)> {
    let holder = |number| (format!("gpu-{number}"), 0, number + 1, true);
    (0..WORKERS).rev().map(holder).take(limit).collect()
}

fn shard(url: &str, shard: &str) -> Process {
    Process::serve(url, &[("sharding.shard", shard)])
}

async fn gathering(client: &Client, patience: Duration) -> QueryClient {
    let queries = QueryClient::new(client.nats.clone(), subjects()).with_patience(patience);
    queries.gathering().await.unwrap()
}

fn query(limit: Option<u32>) -> SingleQuery {
    let options = QueryOptions {
        limit,
        ..QueryOptions::default()
    };
    SingleQuery {
        options,
        ..SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 20)))
    }
}

fn missing(reply: &QueryReply) -> (u32, Vec<u32>) {
    let gathered = reply.gathered.clone().unwrap();
    (gathered.shards, gathered.missing)
}

/// Waits until an answer to `queries` names all workers and is exact, and returns this answer. Before, a worker's first
/// batch may still be being applied.
async fn all_known(queries: &QueryClient) -> QueryReply {
    eventually("all workers are known", async || {
        let reply = queries.query(&namespace(), query(None)).await.ok()?;
        (reply.holders.len() == WORKERS as usize && reply.is_exact()).then_some(reply)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_gathers_what_one_daemon_would_say() {
    let broker = broker().await;
    let mut shards = Vec::new();
    for name in ["0/3", "1/3", "2/3"] {
        shards.push(shard(broker.url(), name));
    }
    let client = Client::connect(broker.url()).await;
    let queries = gathering(&client, PATIENCE).await;
    publish(&client).await;
    let reply = all_known(&queries).await;
    assert_eq!(matches(&reply), expected(usize::MAX));
    assert_eq!((missing(&reply), reply.holders_total), ((3, Vec::new()), WORKERS));

    // The limit holds for the merged answer, not for each shard.
    let reply = queries.query(&namespace(), query(Some(4))).await.unwrap();
    assert_eq!((matches(&reply), reply.holders_total), (expected(4), WORKERS));
    let results = queries
        .query_batch(&namespace(), vec![query(Some(1)), query(None)])
        .await
        .unwrap();
    let [QueryResult::Reply(first), QueryResult::Reply(second)] = &results[..] else {
        panic!("{results:?}");
    };
    assert_eq!(
        (matches(first), matches(second)),
        (expected(1), expected(usize::MAX))
    );
    let status = queries.status(&namespace()).await.unwrap();
    let names: BTreeSet<_> = status
        .holders
        .iter()
        .map(|holder| holder.worker.to_string())
        .collect();
    assert_eq!(
        (names.len(), status.gathered.unwrap().shards),
        (WORKERS as usize, 3)
    );

    // A gathering client gets the errors of the shards. A client without gathering finds no daemon.
    eventually("nobody publishes, as all shards know by now", async || {
        let unknown = queries.query(&"nobody".parse().unwrap(), query(None)).await;
        matches!(unknown, Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownNamespace)
            .then_some(())
    })
    .await;
    assert!(matches!(
        client.ask_with(query(None)).await,
        Err(ClientError::NoDaemon { .. })
    ));
    let passed_over = counter(&shards[0], "kvatlas_other_shard_messages_total");
    assert!(passed_over > 0, "workers of other shards are not taken");
    for shard in shards {
        shard.stop();
    }
    let nobody = queries.query(&namespace(), query(None)).await;
    assert!(matches!(nobody, Err(ClientError::NoDaemon { .. })), "{nobody:?}");
}

/// A test that a shard is missing in an answer if it cannot read the messages of its only worker. The worker may have
/// blocks, so the other shard's answer alone is not exact.
#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_cannot_read_its_only_worker_is_missing() {
    let broker = broker().await;
    let shards = ["0/2", "1/2"].map(|name| shard(broker.url(), name));
    let client = Client::connect(broker.url()).await;
    let queries = gathering(&client, PATIENCE).await;
    let worker_of = |index| {
        let shard = Shard::new(index, 2).unwrap();
        let mut names = (0..).map(|number| format!("gpu-{number}"));
        names.find(|name| shard.owns(&name.parse().unwrap())).unwrap()
    };
    let mut publisher = client.publisher(&worker_of(0), 0);
    let blocks = vec![stored(hashes(10, 1))];
    publisher.publish(Tier::DEVICE, blocks).await.unwrap();
    publisher.flush().await.unwrap();
    let exact = async |is_exact, expected: &[u32]| {
        eventually("the other shard has said what it knows", async || {
            let reply = queries.query(&namespace(), query(None)).await.ok()?;
            let is_it = reply.is_exact() == is_exact && missing(&reply) == (2, expected.to_vec());
            (is_it && reply.holders.len() == 1).then_some(())
        })
        .await;
    };
    exact(true, &[]).await;
    let subject = subjects().events(&namespace(), &worker_of(1).parse().unwrap());
    client.nats.publish(subject, "garbage".into()).await.unwrap();
    exact(false, &[1]).await;
    for shard in shards {
        shard.stop();
    }
}

/// Answers a request in the name of shard 0 of 1, with the error that the namespace is unknown.
async fn refuse(nats: &async_nats::Client, question: async_nats::Message) {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert(SHARD_HEADER, "0/1");
    headers.insert(ERROR_CODE_HEADER, "404");
    nats.publish_with_headers(question.reply.unwrap(), headers, Bytes::new())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gathering_client_asks_again_on_a_new_connection_and_after_half_of_its_patience() {
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let shard = async_nats::connect(broker.url()).await.unwrap();
    let subject = subjects().of_shards().status(&namespace());
    let mut questions = shard.subscribe(subject).await.unwrap();
    shard.flush().await.unwrap();
    for (is_cut, patience) in [(true, 10 * PATIENCE), (false, Duration::from_secs(2))] {
        let client = Client::connect(&proxy.url()).await;
        let queries = gathering(&client, patience).await;
        let asking = tokio::spawn(async move { queries.status(&namespace()).await });
        questions.next().await.unwrap();
        proxy.set(Network {
            is_cut,
            ..Network::default()
        });
        eventually("the connection is lost, if it is cut", async || {
            let is_lost = client.nats.connection_state() == State::Disconnected;
            (is_lost == is_cut).then_some(())
        })
        .await;
        proxy.heal();
        refuse(&shard, questions.next().await.unwrap()).await;
        let refused = asking.await.unwrap();
        assert!(
            matches!(&refused, Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownNamespace),
            "{refused:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gathering_client_waits_a_moment_for_shards_that_start() {
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let queries = gathering(&client, 10 * PATIENCE).await;
    let asking = tokio::spawn(async move { queries.status(&namespace()).await });
    let statistics = client.nats.statistics();
    eventually("the server says that nobody listens", async || {
        (statistics.in_messages.load(Ordering::Relaxed) > 0).then_some(())
    })
    .await;
    let shard = async_nats::connect(broker.url()).await.unwrap();
    let subject = subjects().of_shards().status(&namespace());
    let mut questions = shard.subscribe(subject).await.unwrap();
    refuse(&shard, questions.next().await.unwrap()).await;
    let refused = asking.await.unwrap();
    assert!(matches!(&refused, Err(ClientError::Refused(_))), "{refused:?}");
}

/// Answers a request in the name of these shards, in this order: with an error code, or with an empty status.
async fn answer_for(
    nats: &async_nats::Client,
    question: async_nats::Message,
    shards: &[(&str, Option<&str>)],
) {
    let status = StatusReply {
        v: PROTOCOL_VERSION,
        block_size: 16,
        distinct_blocks: 0,
        batches_waiting: 0,
        unsized_holders: 0,
        refused_holders: 0,
        unheard_holders: 0,
        holders: Vec::new(),
        gathered: None,
        behind_us: 0,
    };
    let reply_to = question.reply.unwrap();
    for (shard, code) in shards {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(SHARD_HEADER, *shard);
        let payload = match code {
            Some(code) => {
                headers.insert(ERROR_CODE_HEADER, *code);
                Bytes::new()
            }
            None => status.encode().into(),
        };
        nats.publish_with_headers(reply_to.clone(), headers, payload)
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_shards_that_refuse_do_not_speak_for_old_ones_that_answer() {
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let queries = gathering(&client, PATIENCE).await;
    let shards = async_nats::connect(broker.url()).await.unwrap();
    let subject = subjects().of_shards().status(&namespace());
    let mut questions = shards.subscribe(subject).await.unwrap();
    shards.flush().await.unwrap();
    for code in ["503", "404"] {
        let new = ["0/3", "1/3", "2/3"].map(|shard| (shard, Some(code)));
        let [first, second] = ["0/2", "1/2"].map(|shard| (shard, None));
        // The old shards are heard of by their first reply, and afterwards by the whole answer that they have given.
        for replies in [
            vec![first, new[0], new[1], new[2], second],
            vec![new[0], new[1], new[2], first, second],
        ] {
            let asking = {
                let queries = queries.clone();
                tokio::spawn(async move { queries.status(&namespace()).await })
            };
            answer_for(&shards, questions.next().await.unwrap(), &replies).await;
            let gathered = asking.await.unwrap().unwrap().gathered;
            let whole = Gathered {
                shards: 2,
                missing: Vec::new(),
            };
            assert_eq!(gathered, Some(whole), "{replies:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_shards_are_named() {
    let broker = broker().await;
    let (first, second) = (shard(broker.url(), "0/3"), shard(broker.url(), "2/3"));
    let client = Client::connect(broker.url()).await;
    publish(&client).await;
    let queries = gathering(&client, Duration::from_millis(300)).await;
    let of = |index| Shard::new(index, 3).unwrap();
    let known: Vec<_> = expected(usize::MAX)
        .into_iter()
        .filter(|(name, ..)| !of(1).owns(&name.parse().unwrap()))
        .collect();
    let reply = eventually("the two shards know their workers", async || {
        let reply = queries.query(&namespace(), query(None)).await.ok()?;
        (reply.holders.len() == known.len()).then_some(reply)
    })
    .await;
    assert_eq!((matches(&reply), missing(&reply)), (known, (3, vec![1])));
    // The missing shard may know the namespace, so the client must not report that it does not exist.
    let unknown = queries.query(&"nobody".parse().unwrap(), query(None)).await;
    assert!(matches!(unknown, Err(ClientError::Refused(error)) if error.code == ErrorCode::Unavailable));
    first.stop();
    second.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_drops_the_events_of_a_namespace_is_missing_there() {
    let broker = broker().await;
    let first = shard(broker.url(), "0/2");
    let settings = [
        ("sharding.shard", "1/2"),
        ("limits.named_namespaces_only", "true"),
    ];
    let second = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    publish(&client).await;
    eventually("the second has dropped them", async || {
        let dropped = total(&second, "kvatlas_batches_dropped_total", "namespace_not_named");
        (dropped > 0.0).then_some(())
    })
    .await;
    let queries = gathering(&client, PATIENCE).await;
    let reply = eventually("the first knows its workers", async || {
        let reply = queries.query(&namespace(), query(None)).await.ok()?;
        (reply.holders.len() == workers_of(&first)).then_some(reply)
    })
    .await;
    assert!(reply.holders.len() < WORKERS as usize);
    assert_eq!(missing(&reply), (2, vec![1]));
    assert_eq!(
        queries.status(&namespace()).await.unwrap().gathered,
        reply.gathered
    );
    // No outcome is counted for a namespace without publishers.
    eventually("nobody publishes, as all shards know by now", async || {
        let unknown = queries.query(&"nobody".parse().unwrap(), query(None)).await;
        matches!(unknown, Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownNamespace)
            .then_some(())
    })
    .await;
    first.stop();
    second.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_answers_plain_clients_for_all_shards() {
    let broker = broker().await;
    let gateway = Process::serve(broker.url(), &[("gateway.enabled", "true")]);
    let client = Client::connect(broker.url()).await;
    let nobody = client.ask_with(query(None)).await;
    assert!(
        matches!(&nobody, Err(ClientError::Refused(error)) if error.code == ErrorCode::Unavailable),
        "{nobody:?}"
    );
    let outage = || -> Value {
        let (_, index) = http_get(gateway.admin_address(), "/index");
        serde_json::from_str::<Value>(&index).unwrap()["shard_outage"].take()
    };
    assert!(outage()["since_us"].is_u64(), "{}", outage());
    let (first, second) = (shard(broker.url(), "0/2"), shard(broker.url(), "1/2"));
    publish(&client).await;
    let reply = all_known(&client.queries).await;
    assert!(outage().is_null(), "{}", outage());
    assert_eq!(matches(&reply), expected(usize::MAX));
    assert_eq!(
        reply.gathered,
        Some(Gathered {
            shards: 2,
            missing: Vec::new()
        })
    );
    let results = client
        .queries
        .query_batch(&namespace(), vec![query(Some(2))])
        .await
        .unwrap();
    assert!(matches!(&results[..], [QueryResult::Reply(reply)] if matches(reply) == expected(2)));
    assert_eq!(client.status().await.unwrap().holders.len(), WORKERS as usize);
    let asked = client.nats.request(subjects().namespaces(), "".into());
    let names = NamespacesReply::decode(&asked.await.unwrap().payload).unwrap();
    assert_eq!(names.namespaces, [namespace()]);

    // The gateway itself refuses a wrong request.
    let refused = client
        .nats
        .request(subjects().query(&namespace()), "garbage".into())
        .await
        .unwrap();
    let headers = refused.headers.unwrap();
    assert_eq!(headers.get("Nats-Service-Error-Code").unwrap().as_str(), "400");
    // A gateway's reply is complete. A shard's reply names its shard.
    assert!(headers.get(SHARD_HEADER).is_none());
    let payload = kvatlas_core::wire::QueryRequest::Single(query(None)).encode();
    let part = client
        .nats
        .request(subjects().of_shards().query(&namespace()), payload.into())
        .await
        .unwrap();
    let of: Shard = part
        .headers
        .unwrap()
        .get(SHARD_HEADER)
        .unwrap()
        .as_str()
        .parse()
        .unwrap();
    assert_eq!(of.count(), 2);

    second.stop();
    let reply = client.ask_with(query(None)).await.unwrap();
    assert_eq!(missing(&reply), (2, vec![1]));
    assert!(counter(&gateway, "kvatlas_gathers_total{outcome=\"complete\"}") > 0);
    assert!(counter(&gateway, "kvatlas_gathers_total{outcome=\"partial\"}") > 0);
    assert!(counter(&gateway, "kvatlas_shard_replies_missing_total{shard=\"1\"}") > 0);
    gateway.stop();
    first.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_names_a_missing_shard_that_alone_may_know_a_namespace() {
    let broker = broker().await;
    let settings = [("gateway.enabled", "true"), ("gateway.deadline_ms", "300")];
    let gateway = Process::serve(broker.url(), &settings);
    let first = shard(broker.url(), "0/2");
    let client = Client::connect(broker.url()).await;
    eventually("the first does not know the namespace", async || {
        let refused = client.ask_with(query(None)).await.unwrap_err().to_string();
        refused
            .contains("has heard of the namespace, and shard 1 of 2 did not answer")
            .then_some(())
    })
    .await;
    let (_, index) = http_get(gateway.admin_address(), "/index");
    let index: Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["missing_shards"][0]["shard"], 1, "{index}");
    assert!(index["shard_outage"].is_null(), "{index}");
    assert!(counter(&gateway, "kvatlas_shard_replies_missing_total{shard=\"1\"}") > 0);
    gateway.stop();
    first.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_refuses_what_is_too_much_at_once() {
    let broker = broker().await;
    // One of two shards never answers, so every gathering lasts until the deadline.
    let settings = [
        ("gateway.enabled", "true"),
        ("gateway.max_gathers", "1"),
        ("gateway.deadline_ms", "1000"),
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let first = shard(broker.url(), "0/2");
    let client = Client::connect(broker.url()).await;
    publish(&client).await;
    let ask = || client.ask_with(query(None));
    let (one, other) = tokio::join!(ask(), ask());
    let is_overloaded = |reply: &Result<QueryReply, ClientError>| matches!(reply, Err(ClientError::Refused(error)) if error.text.contains("gateway.max_gathers"));
    assert!(is_overloaded(&one) != is_overloaded(&other), "{one:?} {other:?}");
    gateway.stop().await;
    first.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_shards_can_be_changed_without_a_blind_moment() {
    let broker = broker().await;
    let old = [shard(broker.url(), "0/2"), shard(broker.url(), "1/2")];
    let client = Client::connect(broker.url()).await;
    let queries = gathering(&client, PATIENCE).await;
    let mut new = Vec::new();
    for name in ["0/3", "1/3", "2/3"] {
        new.push(shard(broker.url(), name));
    }
    publish(&client).await;
    eventually("both divisions know all workers", async || {
        let known: usize = old.iter().chain(&new).map(workers_of).sum();
        (known == 2 * WORKERS as usize).then_some(())
    })
    .await;
    let ask = async || queries.query(&namespace(), query(None)).await.unwrap();
    let reply = ask().await;
    assert_eq!(
        (matches(&reply), missing(&reply).1),
        (expected(usize::MAX), Vec::new())
    );
    for daemon in old {
        daemon.stop();
        assert_eq!(matches(&ask().await), expected(usize::MAX));
    }
    assert_eq!(missing(&ask().await), (3, Vec::new()));
    for daemon in new {
        daemon.stop();
    }
}

/// Returns the number of workers that a daemon knows.
fn workers_of(daemon: &Process) -> usize {
    let (_, body) = http_get(daemon.admin_address(), "/workers");
    let json: serde_json::Value = serde_json::from_str(&body).unwrap();
    json["holders"].as_array().unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_shard_shares_its_requests_out_among_its_replicas() {
    let broker = broker().await;
    let mut daemons = Vec::new();
    for name in ["0/2", "0/2", "1/2", "1/2"] {
        daemons.push(shard(broker.url(), name));
    }
    let client = Client::connect(broker.url()).await;
    let queries = gathering(&client, PATIENCE).await;
    publish(&client).await;
    eventually("all replicas know their workers", async || {
        (daemons.iter().map(workers_of).sum::<usize>() == 2 * WORKERS as usize).then_some(())
    })
    .await;
    let ask = async || queries.query(&namespace(), query(None)).await.unwrap();
    for _ in 0..50 {
        assert_eq!(matches(&ask().await), expected(usize::MAX));
    }
    // One replica of each shard stops, and no shard is missing.
    for index in [2, 0] {
        daemons.remove(index).stop();
        let reply = ask().await;
        assert_eq!(
            (matches(&reply), missing(&reply)),
            (expected(usize::MAX), (2, Vec::new()))
        );
    }
    for daemon in daemons {
        daemon.stop();
    }
}
