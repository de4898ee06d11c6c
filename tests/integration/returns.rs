//! Publishers that come back with a lower epoch than before, publishers that the daemon has not heard of yet, and
//! publishers that do not state their block size.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::support::{
    Client, broker, daemon, engine, eventually, hashes, matches, namespace, reasons, stored, subjects,
};
use kvatlas_client::ClientError;
use kvatlas_client::publish::{Beginning, PublisherOptions};
use kvatlas_core::wire::{BatchCursor, DegradedReason, ErrorCode, QueryKey, SingleQuery, Tier};

const GPU: &str = "gpu-0";

/// Returns the time one hour from now, in microseconds since the Unix epoch.
fn ahead() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap() + 3_600_000_000
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_whose_clock_was_ahead_comes_back_above_its_old_epoch() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let wrong = PublisherOptions {
        beginning: Beginning::Epoch(ahead()),
        ..PublisherOptions::default()
    };
    let before = engine(client.nats.clone(), &subjects(), GPU, wrong).await;
    let blocks = vec![stored(hashes(1, 4))];
    before.publish(Tier::DEVICE, blocks).await.unwrap();
    let old = before.flush().await.unwrap();
    client.exact(GPU, 0).await;
    let status = client.holder(GPU, 0).await.unwrap();
    assert!(status.epoch_ahead_s > 3500, "{status:?}");
    // The publisher dies without a goodbye.
    drop(before);
    let after = engine(client.nats.clone(), &subjects(), GPU, PublisherOptions::default()).await;
    let blocks = vec![stored(hashes(100, 3))];
    after.publish(Tier::DEVICE, blocks).await.unwrap();
    eventually("what it holds now is known for certain", async || {
        let (new, gone) = (client.ask(hashes(100, 3)).await, client.ask(hashes(1, 4)).await);
        (matches(&new) == [(GPU.to_owned(), 0, 3, true)] && matches(&gone).is_empty()).then_some(())
    })
    .await;
    // The daemon may have the answer before the publisher's cursor shows the new epoch.
    eventually("the publisher is above its old epoch", async || {
        (after.cursor().epoch > old.epoch).then_some(())
    })
    .await;
    assert!(after.counters().answers_full > 0);
    daemon.stop().await;
}

/// Two publishers claim the same holder. The one with the lower epoch answers no questions, so it cannot learn about
/// the higher epoch. The holder must be in doubt until a still higher epoch begins.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_two_publishers_claim_is_contested() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut higher = client
        .publisher(GPU, 0)
        .resuming(BatchCursor { epoch: 9, seq: 0 });
    client.tell(&mut higher, GPU, 0, vec![stored(hashes(1, 4))]).await;
    let mut lower = client
        .publisher(GPU, 0)
        .resuming(BatchCursor { epoch: 5, seq: 0 });
    lower
        .publish(Tier::DEVICE, vec![stored(hashes(100, 3))])
        .await
        .unwrap();
    eventually("the holder is contested", async || {
        let status = client.holder(GPU, 0).await?;
        (reasons(&status) == ["contested"]).then_some(())
    })
    .await;
    let reply = client.ask(hashes(1, 4)).await;
    assert_eq!(matches(&reply), [(GPU.to_owned(), 0, 4, false)]);
    let reply = client.ask(hashes(100, 3)).await;
    assert_eq!((matches(&reply), reply.is_exact()), (Vec::new(), false));
    // A higher epoch ends the contest.
    let mut next = client
        .publisher(GPU, 0)
        .resuming(BatchCursor { epoch: 10, seq: 0 });
    let status = client.tell(&mut next, GPU, 0, vec![stored(hashes(7, 2))]).await;
    assert!(status.exact, "{status:?}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn once_everybody_has_been_heard_of_answers_lack_nobody() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    eventually("nobody publishes, for certain", async || {
        match client.status().await {
            Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownNamespace => Some(()),
            Err(ClientError::Refused(error)) if error.code == ErrorCode::Unavailable => None,
            other => panic!("{other:?}"),
        }
    })
    .await;
    let mut publisher = client.publisher(GPU, 0);
    client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(1, 4))])
        .await;
    assert!(client.ask(hashes(900, 2)).await.is_exact(), "nobody has them");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_say_its_block_size_may_have_what_tokens_do_not_find() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let by_tokens = || {
        SingleQuery::new(QueryKey::Tokens {
            tokens: (1..=64).collect(),
            lora_name: None,
            cache_salt: None,
        })
    };
    let ask = async || client.ask_with(by_tokens()).await.unwrap();
    let mut silent = client.publisher("silent", 0);
    let said = stored(hashes(1, 4));
    client.tell(&mut silent, "silent", 0, vec![said]).await;
    let said = engine(client.nats.clone(), &subjects(), GPU, PublisherOptions::default()).await;
    said.publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    client.exact(GPU, 0).await;
    eventually("everybody is known", async || {
        (client.ask(hashes(1, 4)).await.doubtful_holders == 0).then_some(())
    })
    .await;
    let reply = ask().await;
    assert_eq!((matches(&reply), reply.doubtful_holders), (Vec::new(), 1));
    assert_eq!(client.status().await.unwrap().unsized_holders, 1);
    daemon.stop().await;
}

/// A publisher does not state its block size. In a namespace for which the configuration gives the block size, its
/// holder must not count as one of unknown size.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_namespace_of_the_configuration_no_block_size_is_guessed() {
    let broker = broker().await;
    let name = namespace();
    let file = format!("[namespaces.{name}]\nblock_size = 16\n");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvatlas.toml");
    std::fs::write(&path, file).unwrap();
    let daemon = crate::support::process::Process::serve(broker.url(), &[("config", path.to_str().unwrap())]);
    let client = Client::connect(broker.url()).await;
    let mut silent = client.publisher("silent", 0);
    client
        .tell(&mut silent, "silent", 0, vec![stored(hashes(1, 4))])
        .await;
    assert_eq!(client.status().await.unwrap().unsized_holders, 0);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_believed_is_asked_although_the_publisher_before_it_has_not_answered() {
    let broker = broker().await;
    // The question to the publisher that has died would last for longer than the test.
    let daemon = daemon(broker.url(), &[("resync.timeout_ms", "600000")]).await;
    let client = Client::connect(broker.url()).await;
    let start = PublisherOptions {
        beginning: Beginning::Epoch(5),
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let other = engine(client.nats.clone(), &subjects(), GPU, start).await;
    let kept = vec![stored(hashes(900, 3))];
    other.publish(Tier::DEVICE, kept).await.unwrap();
    client.exact(GPU, 0).await;
    let before = BatchCursor { epoch: 6, seq: 0 };
    let mut believed = client.publisher(GPU, 0).resuming(before);
    let lost = vec![stored(hashes(100, 2))];
    believed.publish(Tier::DEVICE, lost).await.unwrap();
    eventually("the believed publisher is asked", async || {
        let holder = client.holder(GPU, 0).await?;
        let is_asked = holder.degraded.contains(DegradedReason::Resyncing);
        (is_asked && holder.epoch == 6).then_some(())
    })
    .await;
    client.exact(GPU, 0).await;
    let found = matches(&client.ask(hashes(900, 3)).await);
    assert_eq!(found, [(GPU.to_owned(), 0, 3, true)]);
    drop(other);
    daemon.stop().await;
}
