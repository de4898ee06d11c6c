//! Queries that are too many or too large at once: they are refused early, and small ones are answered meanwhile.

use kvatlas_client::ClientError;
use kvatlas_core::wire::{ErrorCode, QueryRequest, SingleQuery};

use crate::support::{Client, broker, by_sequence, daemon, hashes, matches, namespace, stored};

/// Large requests that are sent at once: 48 MiB.
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
    // Half a megabyte each.
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
    // Later there is room again.
    let answer = flooding.queries.query_batch(&namespace(), large).await;
    assert_eq!(answer.unwrap().len(), 4);
    daemon.stop().await;
}
