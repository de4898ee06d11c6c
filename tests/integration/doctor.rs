//! `kvatlas doctor`: its probe, and its checks where parts of the deployment are missing.

use std::process::Stdio;

use futures_util::{FutureExt, StreamExt};
use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{NamespaceName, PROBE_NAME, QueryKey, QueryRequest, SingleQuery, Tier, WorkerName};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::doctor::{check, doctor};
use crate::support::process::kvatlas;
use crate::support::{
    Client, PATIENCE, broker, daemon, eventually, http_get, lasting_port, snapshots_in, subjects,
};

#[tokio::test(flavor = "multi_thread")]
async fn doctors_at_the_same_time_do_not_fail_each_other() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let looking = (0..4).map(|_| doctor(broker.url(), &[], &[]));
    for (_, checks) in futures_util::future::join_all(looking).await {
        let probe = check(&checks, "round trip");
        assert_eq!(probe["outcome"], "fine", "{probe}");
    }
    daemon.stop().await;
}

/// NATS gives each question to one member of the daemons' group. If the doctor sent one again, the sound member might answer
/// in place of the one that hangs.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_hangs_is_seen_by_questions_that_are_sent_once() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let asked = subjects().query(&PROBE_NAME.parse().unwrap());
    let (group, silent) = ("kvatlas".to_owned(), client.nats.clone());
    let _silent = silent.queue_subscribe(asked.clone(), group).await.unwrap();
    let mut all = client.nats.subscribe(asked).await.unwrap();
    client.nats.flush().await.unwrap();
    let (_, checks) = doctor(broker.url(), &[], &[]).await;
    let probe = check(&checks, "round trip");
    assert_eq!(probe["outcome"], "warning", "{probe}");
    // «30 of 64 questions had no answer within 1s».
    let found = probe["found"].as_str().unwrap();
    let (_, of) = found.split_once(" of ").unwrap();
    let told: usize = of.split(' ').next().unwrap().parse().unwrap();
    let mut end = client.nats.subscribe("end").await.unwrap();
    client.nats.publish("end", "".into()).await.unwrap();
    end.next().await.unwrap();
    let query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(0)]));
    let payload = QueryRequest::Single(query).encode();
    let mut seen = 0;
    while let Some(Some(message)) = all.next().now_or_never() {
        seen += usize::from(message.payload == payload);
    }
    assert_eq!(seen, told);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_is_taken_however_its_namespace_hashes() {
    let broker = broker().await;
    for hashing in ["engine", "recompute"] {
        let daemon = daemon(broker.url(), &[("namespace_defaults.hashing", hashing)]).await;
        let admin = daemon.admin_address().unwrap().to_string();
        let client = Client::connect(broker.url()).await;
        // The namespace has its block size from its publisher.
        let mut publisher = client
            .publisher("gpu-0", 0)
            .of_blocks(BlockSize::new(32).unwrap());
        client.tell(&mut publisher, "gpu-0", 0, Vec::new()).await;
        for namespace in [PROBE_NAME, "llama"] {
            let arguments = ["--admin", &admin, "--namespace", namespace];
            let (_, checks) = doctor(broker.url(), &arguments, &[]).await;
            let probe = check(&checks, "round trip");
            assert_eq!(probe["outcome"], "fine", "{hashing}, {namespace}: {probe}");
        }
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_publisher_is_told_also_to_a_doctor_with_its_name() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut sound = client.publisher("gpu-0", 0);
    client.tell(&mut sound, "gpu-0", 0, Vec::new()).await;
    let mut wide = client
        .publisher("gpu-1", 0)
        .of_blocks(BlockSize::new(32).unwrap());
    wide.publish(Tier::DEVICE, Vec::new()).await.unwrap();
    let admin = daemon.admin_address().unwrap();
    eventually("gpu-1 is refused", async || {
        http_get(admin, "/index")
            .1
            .contains("other_settings")
            .then_some(())
    })
    .await;
    let admin = admin.to_string();
    let arguments = ["--admin", &admin, "--namespace", "llama", "--worker", "gpu-1"];
    let (_, checks) = doctor(broker.url(), &arguments, &[]).await;
    let refused = check(&checks, "publisher gpu-1 of llama");
    assert_eq!(refused["outcome"], "failed", "{refused}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doctor_that_is_interrupted_takes_its_probe_back() {
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let namespace = NamespaceName::new(PROBE_NAME).unwrap();
    let worker = WorkerName::new(PROBE_NAME).unwrap();
    // The question about the probe is heard, and not answered.
    let question = subjects().query(&namespace);
    let _questions = client.nats.subscribe(question).await.unwrap();
    let events = subjects().events(&namespace, &worker);
    let mut events = client.nats.subscribe(events).await.unwrap();
    client.nats.flush().await.unwrap();
    let arguments = ["doctor", "--nats-url", broker.url(), "--timeout", "600s"];
    let admin = ["--admin", "127.0.0.1:9"];
    let mut command = kvatlas(&arguments);
    let doctor = command.args(admin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let doctor = doctor.spawn().unwrap();
    let mut says = async |word: &str| {
        while let Some(batch) = events.next().await {
            if batch
                .payload
                .windows(word.len())
                .any(|part| part == word.as_bytes())
            {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, says("stored")).await.unwrap();
    kill_process(Pid::from_child(&doctor), Signal::INT).unwrap();
    tokio::time::timeout(PATIENCE, says("goodbye")).await.unwrap();
    let waiting = tokio::task::spawn_blocking(move || doctor.wait_with_output().unwrap());
    let ended = waiting.await.unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("ended by SIGINT"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_tells_its_disk_although_the_broker_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let (key, value) = snapshots_in(directory.path());
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[(key, &value)]).await;
    let admin = daemon.admin_address().unwrap().to_string();
    let nobody = format!("nats://127.0.0.1:{}", lasting_port());
    let (code, checks) = doctor(&nobody, &["--admin", &admin], &[]).await;
    assert_eq!(code, Some(69));
    let disk = format!("disk of {admin}");
    let path = directory.path().to_str().unwrap();
    let found = check(&checks, &disk)["found"].as_str().unwrap();
    assert!(found.contains(path), "{found}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_is_off_ends_no_doctor() {
    let broker = broker().await;
    let off = [("KVATLAS_ADMIN_LISTEN", "off")];
    let nobody = format!("nats://127.0.0.1:{}", lasting_port());
    for (url, expected) in [(broker.url(), 1), (nobody.as_str(), 69)] {
        let (code, checks) = doctor(url, &["--timeout", "1s"], &off).await;
        let replica = check(&checks, "replica");
        assert_eq!(replica["outcome"], "skipped", "{replica}");
        assert!(
            replica.to_string().contains("KVATLAS_ADMIN_LISTEN is off"),
            "{replica}"
        );
        assert_eq!(code, Some(expected), "{checks:?}");
    }
    // An address that the command line names must be right.
    let mut wrong = kvatlas(&["doctor", "--nats-url", broker.url(), "--admin", "a b"]);
    let looking = tokio::task::spawn_blocking(move || wrong.output().unwrap());
    let looked = looking.await.unwrap();
    assert_eq!(looked.status.code(), Some(64), "{looked:?}");
}
