//! Processes that appear at an engine's sockets after the engine was silent for long. A bridge must doubt such a
//! process, unless it is the same process as before, or the engine's name is its address.

use std::time::Duration;

use kvatlas_bridge::{Bridge, BridgeOptions, FollowOptions};
use kvatlas_process::registry::EngineRegistry;
use serde_json::json;

use super::python::{Publishers, Spec, python};
use super::servers::{Answers, Server};
use super::{Site, follow, follow_text, options, stored};
use crate::support::{eventually, subjects};

/// Starts a bridge that doubts a new process at an engine's sockets after any silence of the engine, however short.
fn impatient(site: &Site) -> Bridge {
    let follow = FollowOptions {
        give_up_after: Duration::ZERO,
        ..options().follow
    };
    let bridge = Bridge::new(subjects(), BridgeOptions { follow, ..options() });
    bridge.start(&site.client.nats);
    bridge
}

fn trouble(bridge: &Bridge) -> String {
    bridge.engines()[0].last_error.clone().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_after_a_long_silence_is_in_doubt_until_it_clears() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let bridge = impatient(&site);
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    follow(&bridge, &publishers, 0, "gpu-0");
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    site.settles("gpu-0", 3, &[]).await;
    publishers = publishers.restart(&python);
    // A clear from before the connection does not show that the process is the known engine.
    publishers.publish(0, &json!([["AllBlocksCleared"], stored(2, 0, 2)]));
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
    eventually("the bridge says why, and what mends it", async || {
        let error = trouble(&bridge);
        let is_it = error.contains("another process by now") && error.contains("kvatlas admin reset");
        is_it.then_some(())
    })
    .await;
    publishers.publish(0, &json!([["AllBlocksCleared"], stored(3, 0, 1)]));
    site.settles("gpu-0", 1, &[]).await;
    eventually("nothing is wrong any more", async || {
        trouble(&bridge).is_empty().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_is_one_without_a_replay_socket() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let bridge = impatient(&site);
    let mut publishers = Publishers::start(&python, &[Spec::without_replay()]);
    follow(&bridge, &publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    site.settles("gpu-0", 3, &[]).await;
    publishers = publishers.restart(&python);
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(2, 0, 2)]));
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_process_is_believed_after_any_silence() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let bridge = impatient(&site);
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    follow(&bridge, &publishers, 0, "gpu-0");
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    site.settles("gpu-0", 3, &[]).await;
    let pid = rustix::process::Pid::from_raw(publishers.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    site.settles("gpu-0", 3, &["unverified", "upstream_lost"]).await;
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    site.settles("gpu-0", 3, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_an_address_vouches_for_whoever_is_there() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let bridge = impatient(&site);
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    // The same server is followed twice, under its address and under a name: as two engines.
    follow_text(&bridge, &server.url());
    follow_text(&bridge, &format!("gpu-0={}", server.url()));
    let by_address = format!("127_d0_d0_d1_c{}", server.address.port());
    site.settles(&by_address, 3, &[]).await;
    site.settles("gpu-0", 3, &[]).await;
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 2)]));
    site.settles(&by_address, 2, &[]).await;
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
}
