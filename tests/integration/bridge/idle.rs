//! `kvatlas up` with engines that it cannot follow, or not yet: what it prints, and what the doctor and the status say
//! of them.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};

use serde_json::json;

use super::python::{Publishers, Spec, python};
use super::servers::{Answers, Server};
use super::{Killed, stored};
use crate::support::doctor::{check, doctor};
use crate::support::process::kvatlas;
use crate::support::{PATIENCE, broker};

/// Returns what comes on `lines` up to the first line that contains `end`, with that line.
fn read_to(lines: &Receiver<String>, end: &str) -> String {
    let mut text = String::new();
    while !text.contains(end) {
        let line = lines.recv_timeout(PATIENCE);
        text += &line.unwrap_or_else(|_| panic!("there is no {end:?} in:\n{text}"));
        text.push('\n');
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn up_says_what_keeps_it_from_following_engines() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    let idle = Server::start(Answers::vllm(&publishers, &[0])).await;
    let off = Server::start(Answers::without_events(&publishers)).await;
    let mut up = kvatlas(&["up", "--nats-url", broker.url(), "--http-listen", "127.0.0.1:0"])
        .args(["--admin-listen", "127.0.0.1:0"])
        .args(["--engine", &format!("gpu-0={}", idle.url())])
        .args(["--engine", &format!("off={}", off.url())])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = BufReader::new(up.stdout.take().unwrap()).lines();
    let _up = Killed(up);
    let (line, lines) = channel();
    std::thread::spawn(move || {
        output.map_while(Result::ok).for_each(|text| {
            let _ = line.send(text);
        });
    });
    let printed = read_to(&lines, "kvatlas status --admin ");
    assert!(printed.contains("No engine is followed yet"), "{printed}");
    assert!(printed.contains("1 engine is idle"), "{printed}");
    let off_says = format!(
        "engine off at {} is not followed: the engine publishes no KV events",
        off.url()
    );
    assert!(printed.contains(&off_says), "{printed}");
    assert!(!printed.contains("/query"), "{printed}");
    let (_, admin) = printed.trim_end().rsplit_once(' ').unwrap();

    let status = kvatlas(&["status", "--admin", admin]).output().unwrap();
    let shown = String::from_utf8(status.stdout).unwrap();
    assert_eq!(status.status.code(), Some(1), "{shown}");
    assert!(
        shown.contains(&off_says) && shown.contains("1 engine is idle"),
        "{shown}"
    );
    let (_, checks) = doctor(broker.url(), &[], &[]).await;
    let engines = check(&checks, "engines");
    assert_eq!(engines["outcome"], "warning", "{engines}");
    let found = engines["found"].as_str().unwrap();
    assert!(found.contains("off: ") && !found.contains("more"), "{found}");

    // The first request stores the first blocks.
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let printed = read_to(&lines, "/query");
    assert!(printed.contains("1 engine is followed"), "{printed}");
}
