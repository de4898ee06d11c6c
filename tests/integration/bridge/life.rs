//! Start and end of a bridge: what it tells daemons, and when its process reports that it is ready.

use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_bridge::Bridge;
use kvatlas_core::wire::{DegradedReasons, Event, EventBatch, WireLimits};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::frames::{batch, subscriber};
use super::python::{Publishers, Spec, python};
use super::{Site, follow_text, options, stored, tokens};
use crate::support::http::HttpClient;
use crate::support::process::kvatlas;
use crate::support::{PATIENCE, broker, server, subjects};

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_is_stopped_says_so_at_once() {
    let Some(python) = python() else { return };
    // Silence alone makes no holder stale here.
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(2, 0, 3)]));
    site.follow(&publishers, 0, "gpu-0");
    site.settles("gpu-0", 2, &[]).await;
    // This bridge has a process of its own, which a signal ends.
    let flag = format!("--engine={}", publishers.flag(1, "gpu-1"));
    let mut process = kvatlas(&["bridge", "--nats-url", site.broker.url(), "--admin-listen", "off"])
        .args(["--model", "m", "--block-size", "4", &flag])
        .spawn()
        .unwrap();
    site.settles("gpu-1", 3, &[]).await;
    site.bridge.stop(false).await;
    site.settles("gpu-0", 2, &["unverified", "upstream_lost"]).await;
    let pid = rustix::process::Pid::from_child(&process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(process.wait().unwrap().success());
    site.settles("gpu-1", 3, &["unverified", "upstream_lost"]).await;
}

/// An engine publishes one block again and again, so often that the bridge never looks. Daemons are told nothing new, and
/// must get heartbeats nevertheless, for longer than one look gives them.
#[tokio::test]
async fn batches_without_news_are_signs_of_life() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let mut told = nats.subscribe(subjects().all_events()).await.unwrap();
    nats.flush().await.unwrap();
    let mut options = options();
    options.publisher.heartbeat_interval = Duration::from_millis(50);
    let look_ends_after = options.follow.poll_interval + Duration::from_secs(1);
    let needed = 2 * look_ends_after.as_millis() / options.publisher.heartbeat_interval.as_millis();
    let bridge = Bridge::new(subjects(), options);
    bridge.start(&nats);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    follow_text(
        &bridge,
        &format!("gpu-0=tcp://{}", listener.local_addr().unwrap()),
    );
    let mut engine = subscriber(&listener).await;
    let mut pace = tokio::time::interval(Duration::from_millis(20));
    let (mut number, mut is_exact, mut heartbeats) = (0, false, 0);
    let hearing = async {
        while heartbeats < needed {
            tokio::select! {
                _ = pace.tick() => {
                    engine.write_all(&batch(number, &stored(1, 0, 1))).await.unwrap();
                    number += 1;
                }
                message = told.next() => {
                    let message = message.unwrap();
                    let events = EventBatch::decode(&message.payload, &WireLimits::default()).unwrap().events;
                    is_exact |= events.contains(&Event::Doubted(DegradedReasons::default()));
                    heartbeats += u128::from(is_exact && events.is_empty());
                }
            }
        }
    };
    let heard = tokio::time::timeout(PATIENCE, hearing).await;
    heard.unwrap_or_else(|_| panic!("{heartbeats} of {needed} heartbeats"));
}

#[test]
fn up_refuses_engines_of_a_model_with_different_block_sizes() {
    let other = "--engine=gpu-1=tcp://127.0.0.1:2,block_size=32";
    let refused = kvatlas(&["up", "--model", "m", "--block-size", "4", other])
        .arg("--engine=gpu-0=tcp://127.0.0.1:1")
        .output()
        .unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(64), "{text}");
    assert!(
        text.contains(
            "block_size is 4, but the blocks of this model have 32 tokens here: gpu-1/0 of m has that size"
        ),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn up_is_ready_when_it_knows_what_engines_have() {
    let Some(python) = python() else { return };
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    for part in 0..200 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    let server = server();
    let flag = format!("--engine={}", publishers.flag(0, "gpu-0"));
    let mut up = kvatlas(&["up", "--model", "m", "--block-size", "4", &flag])
        .args([
            "--http-listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
            "--logging-format",
            "json",
        ])
        .args(["--nats-server-binary", server.to_str().unwrap()])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let log = std::io::BufReader::new(up.stderr.take().unwrap());
    let mut address = None;
    for line in std::io::BufRead::lines(log).map_while(Result::ok) {
        let line: Value = serde_json::from_str(&line).unwrap();
        let message = line["message"].as_str().unwrap_or_default();
        if let Some(rest) = message.strip_prefix("queries over HTTP are at http://") {
            address = Some(rest.trim_end_matches('/').parse().unwrap());
        }
        if message == "ready" {
            break;
        }
    }
    // The first answer after the start already has all blocks, and is exact.
    let mut http = HttpClient::connect(address.unwrap()).await;
    let query = json!({"model_name": "m", "token_ids": tokens(1, 0, 200)});
    let answer = http.post("/query", &query).await;
    let scores = answer.json()["scores"].clone();
    assert_eq!((scores, answer.is_exact()), (json!({"gpu-0": {"0": 800}}), true));
    // Counts from before the daemon's start are kept, too.
    let metrics = String::from_utf8(http.get("/metrics").await.body).unwrap();
    for name in ["undecodable", "events_left_out", "connections_cut"] {
        assert!(
            metrics.contains(&format!("kvatlas_bridge_{name}_total")),
            "{name} is missing:\n{metrics}"
        );
    }
    up.kill().unwrap();
    up.wait().unwrap();
}
