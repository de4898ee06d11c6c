//! Start and end of a bridge: what it tells daemons, and when its process reports that it is ready.

use serde_json::{Value, json};

use super::python::{Publishers, Spec, python};
use super::{Site, stored, tokens};
use crate::support::http::HttpClient;
use crate::support::process::kvatlas;
use crate::support::server;

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
