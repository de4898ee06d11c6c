//! Several bridges that follow one engine. One bridge speaks (publishes the engine's events); if it dies or stands
//! still, another bridge speaks.

use serde_json::json;

use super::lasting::Asking;
use super::python::{Publishers, Spec, python};
use super::{Site, removed, stored};
use crate::support::eventually;
use crate::support::http::HttpClient;
use crate::support::process::Process;

/// Starts a bridge of the group in a process of its own.
fn bridge(site: &Site, publishers: &Publishers) -> Process {
    let engine = format!("--engine={}", publishers.flag(0, "gpu-0"));
    let arguments = [
        "--model",
        "m",
        "--block-size",
        "4",
        "--lease",
        "pair",
        engine.as_str(),
    ];
    Process::bridge(site.broker.url(), &arguments)
}

/// Waits until a bridge has received `batches` batches of engine `gpu-0`, knows its blocks for certain, and publishes
/// the engine's events to daemons or not (`speaks`).
pub(super) async fn knows(bridge: &Process, batches: u32, speaks: bool) {
    let mut admin = HttpClient::connect(bridge.admin_address()).await;
    eventually("the bridge knows the engine", async || {
        let page = String::from_utf8(admin.get("/metrics").await.body).unwrap();
        let is = |name: &str, value: u32| {
            let line = format!("kvatlas_bridge_{name}{{namespace=\"m\",engine=\"gpu-0/0\"}} {value}");
            page.lines().any(|found| found == line)
        };
        let is_whole = (batches == 0 || is("batches_total", batches)) && is("engine_exact", 1);
        (is_whole && is("engine_speaks", speaks.into())).then_some(())
    })
    .await;
}

async fn epoch(site: &Site) -> u64 {
    site.holder("gpu-0").await.unwrap().epoch
}

/// A bridge that publishes the events of an engine (speaks for it) is killed. Another bridge that follows the engine
/// must speak, with all blocks, although the replay socket keeps only the latest batches.
#[tokio::test(flavor = "multi_thread")]
async fn when_the_bridge_that_speaks_is_killed_the_other_one_does() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(64)]);
    let first = bridge(&site, &publishers);
    site.settles("gpu-0", 0, &[]).await;
    let second = bridge(&site, &publishers);
    knows(&second, 0, false).await;
    // The test publishes few batches at a time, so that the replay socket still has the batches that a connection
    // missed.
    for round in 0..5 {
        for part in 0..20 {
            publishers.publish(0, &json!([stored(round, part, 1)]));
        }
        site.settles("gpu-0", u64::from(round + 1) * 20, &[]).await;
        knows(&second, (round + 1) * 20, false).await;
    }
    let before = epoch(&site).await;
    let asking = Asking::start(&site, 20, 20);
    first.kill();
    eventually("the other one speaks", async || {
        let holder = site.holder("gpu-0").await?;
        (holder.epoch > before && holder.exact && holder.blocks == 100).then_some(())
    })
    .await;
    // A bridge that starts late cannot know the first batches. It leaves the engine to the bridge that knows them.
    let third = bridge(&site, &publishers);
    publishers.publish(0, &json!([stored(7, 0, 1)]));
    site.settles("gpu-0", 101, &[]).await;
    knows(&second, 101, true).await;
    let (code, log) = third.stop();
    assert_eq!(code, Some(0), "{log}");
    site.settles("gpu-0", 101, &[]).await;
    assert!(asking.end().await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_stood_still_leaves_it_to_the_other_one() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 10), stored(2, 0, 10)]));
    let first = bridge(&site, &publishers);
    site.settles("gpu-0", 20, &[]).await;
    let second = bridge(&site, &publishers);
    knows(&second, 1, false).await;
    let asking = Asking::start(&site, 10, 10);
    let before = epoch(&site).await;
    first.freeze();
    eventually("the other one speaks", async || {
        (epoch(&site).await > before).then_some(())
    })
    .await;
    asking.expect(2, u32::MAX);
    publishers.publish(0, &json!([removed(2, 4, 6)]));
    site.settles("gpu-0", 14, &[]).await;
    asking.expect(2, 4);
    // The bridge continues, and has not noticed that another bridge speaks.
    let after = epoch(&site).await;
    first.signal(rustix::process::Signal::CONT);
    knows(&first, 2, false).await;
    publishers.publish(0, &json!([stored(3, 0, 1)]));
    site.settles("gpu-0", 15, &[]).await;
    assert_eq!(epoch(&site).await, after);
    // When the second bridge ends normally, the first one speaks again.
    let (code, log) = second.stop();
    assert_eq!(code, Some(0), "{log}");
    eventually("the first one speaks", async || {
        (epoch(&site).await > after).then_some(())
    })
    .await;
    site.settles("gpu-0", 15, &[]).await;
    publishers.publish(0, &json!([stored(3, 1, 1)]));
    site.settles("gpu-0", 16, &[]).await;
    assert!(asking.end().await > 0);
}
