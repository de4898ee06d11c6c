//! Queries that are too many or too large. They are refused early, and small queries are answered meanwhile.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use futures_util::StreamExt;
use kvatlas_client::ClientError;
use kvatlas_core::wire::{
    ERROR_CODE_HEADER, ErrorCode, QueryOptions, QueryRequest, SHARD_HEADER, SingleQuery, Tier,
};

use rustix::process::Signal;

use crate::support::process::{Process, message};
use crate::support::{
    Client, PATIENCE, broker, by_sequence, daemon, eventually, hashes, matches, namespace, stored, subjects,
};

/// Number of large requests that are sent at the same time. Together they have 48 MiB.
const LARGE: usize = 96;

#[tokio::test(flavor = "multi_thread")]
async fn large_requests_are_refused_early_and_small_ones_answered_meanwhile() {
    let broker = broker().await;
    let settings = [("queries.max_waiting_bytes", "64 KiB")];
    let daemon = daemon(broker.url(), &settings).await;
    let (client, flooding) = (
        Client::connect(broker.url()).await,
        Client::connect(broker.url()).await,
    );
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    // Each of these requests has half a megabyte.
    let large: Vec<SingleQuery> = vec![by_sequence(&hashes(1, 16_000)); 4];
    let payload = QueryRequest::Batch(large.clone()).encode();
    assert!(payload.len() > 400_000, "{} bytes", payload.len());
    let flood = futures_util::future::join_all((0..LARGE).map(|_| {
        let (queries, large) = (flooding.queries.clone(), large.clone());
        async move { queries.query_batch(&namespace(), large).await }
    }));
    let small = async {
        for _ in 0..50 {
            let reply = client.ask(hashes(1, 6)).await;
            assert_eq!(matches(&reply), [("gpu-0".to_owned(), 0, 4, true)]);
        }
    };
    let (answers, ()) = tokio::join!(flood, small);
    let mut refused = 0;
    for answer in &answers {
        match answer {
            Ok(results) => assert_eq!(results.len(), 4),
            Err(ClientError::Refused(error)) => {
                assert_eq!(error.code, ErrorCode::TooManyRequests, "{error}");
                assert!(error.text.contains("queries.max_waiting_bytes"), "{error}");
                refused += 1;
            }
            Err(error) => panic!("neither answered nor refused: {error}"),
        }
    }
    assert!(refused < LARGE, "the first finds room");
    // After the flood, a large request is answered again.
    let answer = flooding.queries.query_batch(&namespace(), large).await;
    assert_eq!(answer.unwrap().len(), 4);
    daemon.stop().await;
}

/// A connection that ends because too much waits comes back only when half of that has been taken. Each request that is
/// taken has a reply, for which there is no connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_for_queries_that_ended_by_a_flood_comes_back() {
    let broker = broker().await;
    let mut daemon = Process::serve(broker.url(), &[("events.subscription_bytes", "4 MiB")]);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    let flooding = async_nats::connect(broker.url()).await.unwrap();
    let payload = Bytes::from(QueryRequest::Single(by_sequence(&hashes(1, 30))).encode());
    daemon.freeze();
    for number in 0..30_000 {
        let reply_to = format!("_INBOX.nobody.{number}");
        let subject = subjects().query(&namespace());
        flooding
            .publish_with_reply(subject, reply_to, payload.clone())
            .await
            .unwrap();
    }
    flooding.flush().await.unwrap();
    daemon.signal(Signal::CONT);
    daemon.wait_for_line(|line| message(line).contains("the connection ends until half"));
    // A query that is lost with the connection is sent again after half of the patience.
    let impatient = client.queries.clone().with_patience(Duration::from_secs(2));
    let reply = eventually("queries are answered again", async || {
        let query = by_sequence(&hashes(1, 6));
        impatient.query(&namespace(), query).await.ok()
    })
    .await;
    assert_eq!(matches(&reply).len(), 1);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_a_large_status_wait_for_each_other_and_no_query_waits_for_them() {
    const HOLDERS: u32 = 1000;
    let broker = broker().await;
    let settings = [
        ("queries.max_waiting_bytes", "64 KiB"),
        ("limits.max_ranks_per_worker", "1000"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let (client, flooding) = (
        Client::connect(broker.url()).await,
        Client::connect(broker.url()).await,
    );
    for rank in 0..HOLDERS {
        let mut publisher = client.publisher("gpu-0", rank);
        publisher
            .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
            .await
            .unwrap();
    }
    let has_all = async || {
        let status = client.status().await.ok()?;
        (status.holders.len() == HOLDERS as usize).then_some(())
    };
    eventually("all holders are known", has_all).await;
    let flood = futures_util::future::join_all((0..LARGE).map(|_| flooding.status()));
    let small = async {
        for _ in 0..50 {
            let query = SingleQuery {
                options: QueryOptions {
                    limit: Some(1),
                    ..QueryOptions::default()
                },
                ..by_sequence(&hashes(1, 6))
            };
            let reply = client.ask_with(query).await.unwrap();
            assert_eq!(matches(&reply), [("gpu-0".to_owned(), 0, 4, true)]);
        }
    };
    let (answers, ()) = tokio::join!(flood, small);
    for answer in &answers {
        match answer {
            Ok(status) => assert_eq!(status.holders.len(), HOLDERS as usize),
            Err(ClientError::Refused(error)) => {
                assert_eq!(error.code, ErrorCode::TooManyRequests, "{error}");
            }
            Err(error) => panic!("neither answered nor refused: {error}"),
        }
    }
    assert!(answers.iter().any(Result::is_ok), "the first finds room");
    daemon.stop().await;
}

/// Requests that wait for a shard stay in the gateway's memory until the shard answers or the deadline has passed.
#[tokio::test(flavor = "multi_thread")]
async fn large_requests_that_wait_for_the_shards_of_a_gateway_are_bounded_in_bytes() {
    let broker = broker().await;
    let settings = [
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "60000"),
        ("queries.max_waiting_bytes", "64 KiB"),
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let (client, other) = (
        Client::connect(broker.url()).await,
        Client::connect(broker.url()).await,
    );
    // The shard answers late.
    let mut shard = client.nats.subscribe("kvatlas.v1.shards.query.>").await.unwrap();
    client.nats.flush().await.unwrap();
    let large = || by_sequence(&hashes(1, 5000));
    let waiting = tokio::spawn(async move { other.queries.query(&namespace(), large()).await });
    let asked = tokio::time::timeout(PATIENCE, shard.next())
        .await
        .unwrap()
        .unwrap();
    let refused = client.queries.query(&namespace(), large()).await;
    let Err(ClientError::Refused(error)) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(error.code, ErrorCode::TooManyRequests, "{error}");
    let mut headers = HeaderMap::new();
    headers.insert(SHARD_HEADER, "0/1");
    headers.insert(ERROR_CODE_HEADER, "400");
    let reply_to = asked.reply.unwrap();
    let replied = client.nats.publish_with_headers(reply_to, headers, Bytes::new());
    replied.await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(ClientError::Refused(_))));
    gateway.stop().await;
}
