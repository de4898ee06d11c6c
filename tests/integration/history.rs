//! The daemon keeps the time since which each holder is not exact. The times outlast restarts.

use kvatlas_core::wire::{DegradedReason, DegradedReasons, Event};
use serde_json::Value;

use crate::support::{Client, broker, daemon, eventually, hashes, http_get, snapshots_in, stored};

#[tokio::test(flavor = "multi_thread")]
async fn since_when_a_holder_is_in_doubt_is_known_after_a_restart() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let first = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 4))])
        .await;
    let doubted = Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamGap));
    client.tell(&mut publisher, "gpu-0", 0, vec![doubted]).await;
    let since = || async {
        let holder = client.holder("gpu-0", 0).await?;
        assert!(!holder.exact);
        holder.since_us
    };
    let before = eventually("the daemon says since when", since).await;
    first.stop().await;

    let second = daemon(broker.url(), &settings).await;
    let after = eventually("the next one knows it", since).await;
    assert_eq!(after, before);
    client
        .tell(
            &mut publisher,
            "gpu-0",
            0,
            vec![Event::Cleared, stored(hashes(10, 4))],
        )
        .await;
    let admin = second.admin_address().unwrap();
    let changes = eventually("what has changed is told", async || {
        let (_, body) = http_get(admin, "/workers?worker=gpu-0&changes=true");
        let holder = serde_json::from_str::<Value>(&body).unwrap()["holders"][0].clone();
        let changes = holder["changes"].as_array()?.clone();
        let is_exact = changes.last()?["state"] == "exact" && changes.len() > 2;
        assert!(holder["since_us"].is_null() || !is_exact);
        is_exact.then_some(changes)
    })
    .await;
    let told = |state: &str| {
        changes
            .iter()
            .find(|change| change["state"] == state)
            .map(|change| change["at_us"].as_u64().unwrap())
    };
    let doubt = changes
        .iter()
        .find(|change| change["degraded"][0] == "upstream_gap");
    assert!(
        doubt.is_some() && told("unwatched").unwrap() >= before,
        "{changes:?}"
    );
    let (_, other) = http_get(admin, "/workers?worker=gpu-1&changes=true");
    assert_eq!(serde_json::from_str::<Value>(&other).unwrap()["holders_total"], 0);
    second.stop().await;
}
