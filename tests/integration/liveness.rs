//! Silent holders. They become stale, and are removed later. A goodbye removes a holder at once. Time in which no
//! message could arrive does not count as silence.

use std::time::Duration;

use crate::support::metrics::{counter, metric};
use crate::support::process::Process;
use crate::support::{
    Client, broker, daemon, engine, eventually, hashes, matches, reasons, stored, subjects,
};
use kvatlas_client::publish::{HolderPublisher, PublisherOptions};
use kvatlas_core::wire::Tier;

const GPU: &str = "gpu-0";

async fn publisher(url: &str, heartbeat_interval: Duration) -> HolderPublisher {
    let nats = async_nats::connect(url).await.unwrap();
    let options = PublisherOptions {
        heartbeat_interval,
        ..PublisherOptions::default()
    };
    engine(nats, &subjects(), GPU, options).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_holder_is_stale_and_heartbeats_make_it_exact_again() {
    let broker = broker().await;
    let settings = [
        ("namespace_defaults.stale_after_ms", "1"),
        ("namespace_defaults.remove_after_ms", "0"),
    ];
    let daemon = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let mut silent = client.publisher(GPU, 0);
    client.tell(&mut silent, GPU, 0, vec![stored(hashes(1, 4))]).await;
    let status = eventually("the holder is stale", async || {
        client.holder(GPU, 0).await.filter(|holder| !holder.exact)
    })
    .await;
    assert_eq!(reasons(&status), ["stale"]);
    assert_eq!(
        matches(&client.ask(hashes(1, 4)).await),
        [(GPU.to_owned(), 0, 4, false)],
        "it is not removed, and answers say what it is"
    );
    assert_eq!(metric(&daemon, "kvatlas_stale_holders{namespace=\"llama\"}"), 1);
    // The holder was only silent, so a heartbeat makes it exact again.
    eventually("the holder is exact again", async || {
        Some(client.tell(&mut silent, GPU, 0, Vec::new()).await).filter(|status| status.exact)
    })
    .await;
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_is_silent_for_too_long_is_removed_and_may_come_back() {
    let broker = broker().await;
    let settings = [
        ("namespace_defaults.stale_after_ms", "1"),
        ("namespace_defaults.remove_after_ms", "2"),
    ];
    let daemon = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let engine = publisher(broker.url(), Duration::from_secs(3600)).await;
    engine
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    engine.flush().await.unwrap();
    eventually("the holder is there, and then it is not", async || {
        let is_counted = counter(&daemon, "kvatlas_holders_removed_total{namespace=\"llama\"}") > 0;
        (is_counted && client.holder(GPU, 0).await.is_none()).then_some(())
    })
    .await;
    assert_eq!(matches(&client.ask(hashes(1, 4)).await), []);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_removed_is_learned_again_from_its_next_heartbeat() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("resync.retry_max_ms", "500")]).await;
    let client = Client::connect(broker.url()).await;
    let engine = publisher(broker.url(), Duration::from_millis(50)).await;
    engine
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    client.exact(GPU, 0).await;
    // As an operator would, a client removes the holder in a later epoch. The engine does not know.
    let mut operator = client
        .publisher(GPU, 0)
        .resuming(kvatlas_core::wire::BatchCursor {
            epoch: u64::MAX,
            seq: 0,
        });
    operator
        .publish(Tier::DEVICE, vec![kvatlas_core::wire::Event::Goodbye])
        .await
        .unwrap();
    eventually("the holder is back, with all that it has", async || {
        let reply = client.ask(hashes(1, 4)).await;
        let counters = engine.counters();
        let was_asked = counters.answers_full + counters.answers_missing > 0;
        let is_back = matches(&reply) == [(GPU.to_owned(), 0, 4, true)];
        (is_back && was_asked && counters.heartbeats_sent > 0).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_of_the_publisher_removes_the_holder_at_once() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let engine = publisher(broker.url(), Duration::from_millis(20)).await;
    engine
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    client.exact(GPU, 0).await;
    engine.say_goodbye().await.unwrap();
    eventually("the holder is gone", async || {
        client.holder(GPU, 0).await.is_none().then_some(())
    })
    .await;
    daemon.stop().await;
}
