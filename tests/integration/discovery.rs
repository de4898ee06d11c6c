//! The micro service protocol of NATS, as `nats micro` and NATS clients in every language use it.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::stream::{self, RetentionPolicy};
use futures_util::StreamExt;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::Tier;
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use serde_json::{Value, json};

use crate::support::doctor::{check, doctor};
use crate::support::jetstream::{JETSTREAM, STREAM, servers};
use crate::support::process::{Process, kvatlas};
use crate::support::{
    Client, PATIENCE, broker, config, daemon, eventually, hashes, http_get, server, snapshots_in, stored,
};

/// Sends a question, and returns all answers when exactly `answers` of them have come.
async fn asked(client: &Client, subject: &str, answers: usize) -> Vec<Value> {
    eventually(&format!("{answers} answer {subject}"), async || {
        let inbox = client.nats.new_inbox();
        let mut replies = client.nats.subscribe(inbox.clone()).await.unwrap();
        let question = (subject.to_owned(), inbox);
        client
            .nats
            .publish_with_reply(question.0, question.1, "".into())
            .await
            .unwrap();
        let mut found = Vec::new();
        while let Ok(Some(reply)) = tokio::time::timeout(Duration::from_millis(500), replies.next()).await {
            // If there is no listener, the server sends a message with a status.
            if reply.status.is_none() {
                found.push(serde_json::from_slice(&reply.payload).unwrap());
            }
            if found.len() == answers {
                return Some(found);
            }
        }
        None
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_are_found_and_tell_what_they_have_answered() {
    let broker = broker().await;
    let url = broker.url();
    // As in a container, where it listens at all addresses and is told its own.
    let settings = [("admin.listen", "0.0.0.0:0"), ("admin.advertise", "127.0.0.1")];
    let one = daemon(url, &settings).await;
    let client = Client::connect(url).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;

    let pings = asked(&client, "$SRV.PING", 1).await;
    assert_eq!(pings[0]["type"], "io.nats.micro.v1.ping_response");
    assert_eq!(pings[0]["name"], "kvatlas");
    assert_eq!(pings[0]["version"], env!("CARGO_PKG_VERSION"));
    let metadata = pings[0]["metadata"].as_object().unwrap();
    assert_eq!(metadata["role"], "daemon");
    let port = one.admin_address().unwrap().port();
    assert_eq!(metadata["admin"], format!("127.0.0.1:{port}"));
    assert!(metadata.values().all(Value::is_string), "{metadata:?}");
    let id = pings[0]["id"].as_str().unwrap();

    let info = &asked(&client, &format!("$SRV.INFO.kvatlas.{id}"), 1).await[0];
    assert_eq!(info["type"], "io.nats.micro.v1.info_response");
    assert!(!info["description"].as_str().unwrap().is_empty());
    let endpoints = info["endpoints"].as_array().unwrap();
    let told: Vec<_> = endpoints
        .iter()
        .map(|endpoint| [&endpoint["name"], &endpoint["subject"], &endpoint["queue_group"]])
        .collect();
    assert_eq!(
        told,
        [
            [&json!("query"), &json!("kvatlas.v1.query.>"), &json!("kvatlas")],
            [&json!("status"), &json!("kvatlas.v1.status.>"), &json!("kvatlas")],
        ]
    );

    let stats = || async { asked(&client, "$SRV.STATS.kvatlas", 1).await.remove(0) };
    let before = stats().await["endpoints"][0].clone();
    client.ask(hashes(1, 4)).await;
    client.ask(hashes(1, 4)).await;
    let too_deep = (0..70_000).map(SequenceHash).collect();
    let query = kvatlas_core::wire::SingleQuery::new(kvatlas_core::wire::QueryKey::SequenceHashes(too_deep));
    client.ask_with(query).await.unwrap_err();
    let after = stats().await;
    assert_eq!(after["type"], "io.nats.micro.v1.stats_response");
    let started = after["started"].as_str().unwrap();
    assert!(started.ends_with('Z') && started.contains('T'), "{started}");
    let after = &after["endpoints"][0];
    let more = |key: &str| after[key].as_u64().unwrap() - before[key].as_u64().unwrap();
    assert_eq!((more("num_requests"), more("num_errors")), (3, 1));
    assert!(more("processing_time") > 0);
    assert!(after["average_processing_time"].as_u64().unwrap() > 0);
    assert!(
        after["last_error"].as_str().unwrap().starts_with("413:"),
        "{after}"
    );

    // Each process answers for itself. A process that has stopped answers no more.
    let other = daemon(url, &[("sharding.shard", "0/2")]).await;
    let gateway = daemon(url, &[("gateway.enabled", "true")]).await;
    let pings = asked(&client, "$SRV.PING.kvatlas", 3).await;
    let ids: BTreeSet<&str> = pings.iter().map(|ping| ping["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 3, "{pings:?}");
    let roles: BTreeSet<(Option<&str>, Option<&str>)> = pings
        .iter()
        .map(|ping| {
            (
                ping["metadata"]["role"].as_str(),
                ping["metadata"]["shard"].as_str(),
            )
        })
        .collect();
    let expected = [
        (Some("daemon"), None),
        (Some("daemon"), Some("0/2")),
        (Some("gateway"), None),
    ];
    assert_eq!(roles, BTreeSet::from(expected));
    other.stop().await;
    gateway.stop().await;
    let pings = asked(&client, "$SRV.PING", 1).await;
    assert_eq!(pings[0]["id"], id);
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_not_to_be_found_is_not() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("queries.discovery", "false")]).await;
    let client = Client::connect(broker.url()).await;
    let answer = client.nats.request("$SRV.PING", "".into()).await;
    assert!(answer.is_err(), "{answer:?}");
    daemon.stop().await;
}

/// A test that a command ends when a daemon that nobody finds has replied, and not only at the end of its patience.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_ends_with_the_replies_where_nobody_is_to_be_found() {
    let directory = tempfile::tempdir().unwrap();
    let (key, value) = snapshots_in(directory.path());
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("queries.discovery", "false"), (key, &value)]).await;
    let arguments = [
        "admin",
        "snapshot",
        "--timeout",
        "600s",
        "--nats-url",
        broker.url(),
    ];
    let mut command = tokio::process::Command::from(kvatlas(&arguments));
    let ended = tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output());
    let output = ended.await.unwrap().unwrap();
    assert!(output.status.success(), "{output:?}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_and_bridge_of_up_are_found_and_looked_at_once() {
    let broker = broker().await;
    let up = Process::up(
        broker.url(),
        &["--model", "llama", "--engine", "gpu-0=tcp://127.0.0.1:1"],
    );
    let client = Client::connect(broker.url()).await;
    let pings = asked(&client, "$SRV.PING.kvatlas", 2).await;
    let found = pings.iter().map(|ping| {
        let about = &ping["metadata"];
        (about["role"].as_str().unwrap(), about["admin"].as_str().unwrap())
    });
    let found: BTreeSet<(&str, &str)> = found.collect();
    let admin = up.admin_address().to_string();
    let expected = [("bridge", admin.as_str()), ("daemon", admin.as_str())];
    assert_eq!(found, BTreeSet::from(expected));
    let (_, checks) = doctor(broker.url(), &[], &[]).await;
    let name = format!("replica {admin}");
    let looks = checks.iter().filter(|check| check["name"] == name.as_str());
    assert_eq!(looks.count(), 1, "{checks:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_the_replicas_itself() {
    let broker = broker().await;
    let one = daemon(broker.url(), &[]).await;
    let other = daemon(broker.url(), &[]).await;
    let elsewhere = daemon(broker.url(), &[("subjects.prefix", "another")]).await;
    let client = Client::connect(broker.url()).await;
    asked(&client, "$SRV.PING", 3).await;
    let (_, checks) = doctor(broker.url(), &[], &[]).await;
    let names: Vec<&str> = checks
        .iter()
        .map(|check| check["name"].as_str().unwrap())
        .collect();
    for daemon in [&one, &other] {
        let name = format!("replica {}", daemon.admin_address().unwrap());
        assert!(names.contains(&name.as_str()), "{name} is not in {names:?}");
    }
    assert!(names.contains(&"replicas"), "{names:?}");
    let not_ours = elsewhere.admin_address().unwrap().to_string();
    assert!(!names.iter().any(|name| name.contains(&not_ours)), "{names:?}");
    for daemon in [one, other, elsewhere] {
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_asks_shards_without_a_gateway() {
    let broker = broker().await;
    let one = daemon(broker.url(), &[("sharding.shard", "0/2")]).await;
    let other = daemon(broker.url(), &[("sharding.shard", "1/2")]).await;
    let round_trip = async || {
        let (_, checks) = doctor(broker.url(), &[], &[]).await;
        check(&checks, "round trip").to_string()
    };
    let told = round_trip().await;
    assert!(told.contains("was found") && told.contains("--gateway"), "{told}");
    other.stop().await;
    let told = round_trip().await;
    assert!(told.contains("failed") && told.contains("shard 1 of 2"), "{told}");
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_a_bridge_and_says_what_it_lacks() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    // No engine listens at this address.
    let engine = ["--model", "llama", "--engine", "vllm-0=tcp://127.0.0.1:9"];
    let bridge = Process::bridge(broker.url(), &engine);
    let client = Client::connect(broker.url()).await;
    let pings = asked(&client, "$SRV.PING.kvatlas", 2).await;
    let roles: BTreeSet<&str> = pings
        .iter()
        .filter_map(|ping| ping["metadata"]["role"].as_str())
        .collect();
    assert_eq!(roles, BTreeSet::from(["bridge", "daemon"]));
    let infos = asked(&client, "$SRV.INFO.kvatlas", 2).await;
    let of_bridge = infos.iter().find(|info| info["metadata"]["role"] == "bridge");
    assert_eq!(of_bridge.unwrap()["endpoints"], json!([]));
    asked(&client, "$SRV.STATS.kvatlas", 2).await;
    let place = bridge.admin_address();
    eventually("the bridge says that nobody listens", async || {
        http_get(place, "/workers").1.contains("refused").then_some(())
    })
    .await;
    let (_, checks) = doctor(broker.url(), &[], &[]).await;
    let text = check(&checks, "engines").to_string();
    assert!(text.contains("vllm-0") && text.contains("refused"), "{text}");
    drop(bridge);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_daemons_that_hash_differently() {
    let broker = broker().await;
    let one = daemon(broker.url(), &[]).await;
    let other = daemon(broker.url(), &[("namespace_defaults.block_size", "32")]).await;
    let client = Client::connect(broker.url()).await;
    asked(&client, "$SRV.PING", 2).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let events = vec![stored(hashes(1, 4))];
    publisher.publish(Tier::DEVICE, events).await.unwrap();
    let places = [&one, &other].map(|daemon| daemon.admin_address().unwrap());
    eventually("both know the namespace", async || {
        let known = places.map(|place| http_get(place, "/index").1.contains("\"llama\""));
        (known == [true, true]).then_some(())
    })
    .await;
    let (code, checks) = doctor(broker.url(), &[], &[]).await;
    assert_eq!(code, Some(1));
    let text = check(&checks, "namespaces").to_string();
    for word in ["llama", "16 tokens", "32 tokens"] {
        assert!(text.contains(word), "{text}");
    }
    for daemon in [one, other] {
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_does_not_speak_with_the_rights_of_the_daemon() {
    let options = BrokerOptions {
        with_jetstream: true,
        ..crate::support::own_port()
    };
    let broker = EmbeddedBroker::start_with(&server(), options).await.unwrap();
    let daemon = daemon(broker.url(), &[JETSTREAM]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    let before = messages_in_stream(&client).await;
    assert!(before > 0);
    // The stream would keep such a reply as if the worker had published it.
    for verb in ["PING", "INFO", "STATS"] {
        let (question, reply_to) = (format!("$SRV.{verb}"), "kvatlas.v1.events.llama.gpu-0");
        let sent = client.nats.publish_with_reply(question, reply_to, "".into());
        sent.await.unwrap();
    }
    // Answers to these questions come after the answers to the earlier questions.
    for verb in ["PING", "INFO", "STATS"] {
        asked(&client, &format!("$SRV.{verb}"), 1).await;
    }
    assert_eq!(messages_in_stream(&client).await, before);
    daemon.stop().await;
}

async fn messages_in_stream(client: &Client) -> u64 {
    let stores = async_nats::jetstream::new(client.nats.clone());
    let stream = stores.get_stream(STREAM).await.unwrap();
    stream.cached_info().state.messages
}

/// Starts a daemon with a stream that is too large for any server, so that it is never ready. Returns the daemon, and
/// the doctor's check of JetStream.
async fn check_of_stream(url: &str) -> (Daemon, Value) {
    let settings = [JETSTREAM, ("events.stream_max_bytes", "1048576 GiB")];
    let daemon = Daemon::start(config(url, &settings)).await.unwrap();
    let admin = daemon.admin_address().unwrap().to_string();
    let (_, checks) = doctor(url, &["--admin", &admin, "--timeout", "60s"], &[]).await;
    let stream = check(&checks, "JetStream");
    assert_eq!(stream["outcome"], "failed", "{stream}");
    (daemon, stream.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_says_why_a_stream_cannot_be_read() {
    for server in servers() {
        let options = BrokerOptions {
            with_jetstream: true,
            ..crate::support::own_port()
        };
        let broker = EmbeddedBroker::start_with(&server, options).await.unwrap();
        let client = Client::connect(broker.url()).await;
        let (daemon, stream) = check_of_stream(broker.url()).await;
        let mend = stream["mend"].as_str().unwrap();
        assert!(mend.contains("why it cannot"), "{stream}");
        daemon.stop().await;
        let stores = async_nats::jetstream::new(client.nats.clone());
        let right = "kvatlas.v1.events.>".to_owned();
        let other = "kvatlas.v1.events.llama.>".to_owned();
        for (subject, retention, word) in [
            (other, RetentionPolicy::Limits, "and no other"),
            (right, RetentionPolicy::Interest, "retention"),
        ] {
            let stream = stream::Config {
                name: STREAM.to_owned(),
                subjects: vec![subject],
                retention,
                ..stream::Config::default()
            };
            stores.create_stream(stream).await.unwrap();
            let (daemon, stream) = check_of_stream(broker.url()).await;
            assert!(stream["found"].as_str().unwrap().contains(word), "{stream}");
            daemon.stop().await;
            stores.delete_stream(STREAM).await.unwrap();
        }
    }
}
