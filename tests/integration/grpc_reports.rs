//! Workers whose blocks a bridge reports over gRPC, as SGLang's bridge does. Their blocks appear in answers, together
//! with the workers that the index knows from events. The tests cover lost reports, windows, and
//! the token that a bridge needs.

use std::collections::BTreeMap;

use kvatlas_core::hash::SequenceHash;
use kvatlas_daemon::Daemon;
use tonic::{Code, Request, Status};

use crate::grpc::{LISTEN, PATIENT, Question, Router, knows_all, namespace, prompt, publish, told_of_first};
use crate::support::{Client, broker, daemon, eventually};

/// Messages as SGLang's bridge declares them.
#[derive(Clone, PartialEq, prost::Message)]
struct Hashes {
    #[prost(int32, tag = "1")]
    tier: i32,
    #[prost(sfixed64, repeated, tag = "2")]
    hashes: Vec<i64>,
    #[prost(uint32, repeated, tag = "3")]
    component_masks: Vec<u32>,
    #[prost(uint32, repeated, tag = "4")]
    block_sizes: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Action {
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(int32, tag = "2")]
    tier: i32,
    #[prost(sfixed64, repeated, tag = "3")]
    hashes: Vec<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Batch {
    #[prost(string, tag = "1")]
    worker_id: String,
    #[prost(uint64, tag = "2")]
    seq: u64,
    #[prost(message, repeated, tag = "3")]
    actions: Vec<Action>,
    #[prost(string, tag = "4")]
    worker_address: String,
    #[prost(string, tag = "7")]
    worker_epoch: String,
    #[prost(bool, tag = "8")]
    enforce_sequence: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Applied {
    #[prost(uint64, tag = "4")]
    applied_seq: u64,
    #[prost(bool, tag = "5")]
    duplicate: bool,
}

/// Description of a worker's caches (full attention, windows, states) in six numbers.
#[derive(Clone, PartialEq, prost::Message)]
struct Spec {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(uint32, tag = "2")]
    components: u32,
    #[prost(uint32, tag = "3")]
    swa_window_tokens: u32,
    #[prost(uint32, tag = "4")]
    full_tier_mask: u32,
    #[prost(uint32, tag = "5")]
    swa_tier_mask: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Snapshot {
    #[prost(string, tag = "1")]
    worker_id: String,
    #[prost(string, tag = "2")]
    worker_address: String,
    #[prost(string, tag = "3")]
    worker_epoch: String,
    #[prost(uint64, tag = "4")]
    applied_seq: u64,
    #[prost(message, repeated, tag = "5")]
    hashes_by_tier: Vec<Hashes>,
    #[prost(message, optional, tag = "6")]
    cache_spec: Option<Spec>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Expected {
    #[prost(string, tag = "1")]
    worker_id: String,
    #[prost(string, tag = "2")]
    worker_address: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Workers {
    #[prost(message, repeated, tag = "1")]
    workers: Vec<Expected>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Ready {
    #[prost(uint32, tag = "1")]
    total_workers: u32,
    #[prost(uint32, tag = "2")]
    ready_workers: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TierQuestion {
    #[prost(sfixed64, repeated, tag = "1")]
    hashes: Vec<i64>,
    #[prost(bool, tag = "2")]
    count_as_hit: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Node {
    #[prost(string, tag = "1")]
    worker_id: String,
    #[prost(string, tag = "2")]
    address: String,
    #[prost(message, repeated, tag = "3")]
    hashes_by_tier: Vec<Hashes>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nodes {
    #[prost(message, repeated, tag = "1")]
    matches: Vec<Node>,
}

fn numbers(hashes: &[SequenceHash]) -> Vec<i64> {
    hashes.iter().map(|hash| hash.as_u64().cast_signed()).collect()
}

fn address(worker: &str) -> String {
    format!("http://{worker}:30000")
}

/// Simulated bridge, which sends reports about workers.
struct Bridge(Router);

impl Bridge {
    async fn expect(&self, workers: &[&str]) -> (u32, u32) {
        let worker = |worker: &&str| Expected {
            worker_id: (*worker).to_owned(),
            worker_address: address(worker),
        };
        let workers = workers.iter().map(worker).collect();
        let sent = self
            .0
            .send("ConfigureExpectedWorkers", Request::new(Workers { workers }));
        let ready: Ready = sent.await.unwrap().into_inner();
        (ready.total_workers, ready.ready_workers)
    }

    async fn replace(&self, worker: &str, applied_seq: u64, tiers: Vec<Hashes>, cache_spec: Option<Spec>) {
        let snapshot = Snapshot {
            worker_id: worker.to_owned(),
            worker_address: address(worker),
            worker_epoch: "e".to_owned(),
            applied_seq,
            hashes_by_tier: tiers,
            cache_spec,
        };
        let sent = self.0.send("ReplaceExternalKvSnapshot", Request::new(snapshot));
        let answer: Ready = sent.await.unwrap().into_inner();
        assert_eq!(
            u64::from(answer.total_workers),
            applied_seq,
            "its number comes back"
        );
    }

    async fn apply(&self, worker: &str, seq: u64, actions: Vec<Action>) -> Result<Applied, Status> {
        let batch = Batch {
            worker_id: worker.to_owned(),
            seq,
            actions,
            worker_address: address(worker),
            worker_epoch: "e".to_owned(),
            enforce_sequence: true,
        };
        let sent = self.0.send("ApplyExternalKvBatch", Request::new(batch));
        Ok(sent.await?.into_inner())
    }
}

/// Starts a daemon that accepts reports, with these further settings.
async fn taking(url: &str, more: &[(&str, &str)]) -> (Daemon, Router, Bridge) {
    let name = namespace();
    let own = [
        LISTEN,
        ("grpc.namespace", name.as_str()),
        ("grpc.writing", "open"),
    ];
    let daemon = daemon(url, &[&PATIENT[..], &own, more].concat()).await;
    // From now on, a worker of which the daemon has not heard does not exist.
    daemon.listed().await;
    let router = Router::connect(&daemon).await;
    let bridge = Bridge(Router::connect(&daemon).await);
    (daemon, router, bridge)
}

fn on_device(hashes: &[SequenceHash]) -> Vec<Hashes> {
    vec![Hashes {
        tier: 1,
        hashes: numbers(hashes),
        ..Hashes::default()
    }]
}

fn action(kind: i32, tier: i32, hashes: &[SequenceHash]) -> Action {
    Action {
        kind,
        tier,
        hashes: numbers(hashes),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reported_worker_is_told_beside_those_of_the_index() {
    let broker = broker().await;
    let (_daemon, router, bridge) = taking(broker.url(), &[]).await;
    let asked = prompt(0, 0, 8);
    let unknown = router.ask(&asked).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unavailable, "{unknown}");
    assert_eq!(bridge.expect(&["sgl-0", "sgl-1"]).await, (2, 0));
    assert_eq!(
        router.ask(&asked).await.unwrap_err().code(),
        Code::Unavailable,
        "both are awaited"
    );
    bridge.replace("sgl-0", 4, on_device(&asked[..7]), None).await;
    let mut expected = BTreeMap::from([(address("sgl-0"), 7)]);
    assert_eq!(
        router.told(&asked).await,
        (expected.clone(), false),
        "one is awaited"
    );
    assert_eq!(bridge.expect(&["sgl-0"]).await, (1, 1));
    assert_eq!(
        router.told(&asked).await,
        (expected.clone(), true),
        "nobody else is there"
    );

    let client = Client::connect(broker.url()).await;
    publish(&client, "kvatlas").await;
    expected.extend(told_of_first());
    // Once the daemon knows the whole fleet, the answer has all expected workers.
    eventually("the fleet is known", async || {
        (router.told(&asked).await.0 == expected).then_some(())
    })
    .await;
    let removed = action(2, 1, &asked[2..3]);
    let applied = bridge.apply("sgl-0", 5, vec![removed]).await.unwrap();
    assert_eq!((applied.applied_seq, applied.duplicate), (5, false));
    expected.insert(address("sgl-0"), 2);
    assert_eq!(router.told(&asked).await.0, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_does_not_count_where_events_tell_of_the_same_address() {
    let broker = broker().await;
    let (_daemon, router, bridge) = taking(broker.url(), &[]).await;
    let asked = prompt(0, 0, 8);
    bridge.expect(&["gpu-0", "gpu-4"]).await;
    bridge.replace("gpu-0", 1, on_device(&asked[..7]), None).await;
    bridge.replace("gpu-4", 1, on_device(&asked[..6]), None).await;
    let reported = BTreeMap::from([(address("gpu-0"), 7), (address("gpu-4"), 6)]);
    assert_eq!(router.told(&asked).await, (reported, true));
    let client = Client::connect(broker.url()).await;
    publish(&client, "kvatlas").await;
    // By its events the first worker has less. The other one is in doubt, and left out.
    knows_all(&router).await;
    assert_eq!(router.told(&asked).await, (told_of_first(), false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_batch_makes_the_bridge_send_a_snapshot() {
    let broker = broker().await;
    let (_daemon, router, bridge) = taking(broker.url(), &[]).await;
    let asked = prompt(0, 0, 8);
    let unexpected = bridge.apply("sgl-0", 1, vec![]).await.unwrap_err();
    assert_eq!(unexpected.code(), Code::FailedPrecondition, "{unexpected}");
    bridge.expect(&["sgl-0"]).await;
    bridge.replace("sgl-0", 0, vec![], None).await;
    bridge
        .apply("sgl-0", 1, vec![action(1, 1, &asked[..3])])
        .await
        .unwrap();
    let again = bridge.apply("sgl-0", 1, vec![action(3, 1, &[])]).await.unwrap();
    assert!(again.duplicate && again.applied_seq == 1, "{again:?}");
    let told = BTreeMap::from([(address("sgl-0"), 3)]);
    assert_eq!(router.told(&asked).await, (told, true));
    let gap = bridge.apply("sgl-0", 3, vec![]).await.unwrap_err();
    assert_eq!(gap.code(), Code::FailedPrecondition);
    assert!(gap.message().contains("batch 2 is missing"), "{gap}");
    // No worker is known, so the answer is an error and the router goes by load.
    assert_eq!(router.ask(&asked).await.unwrap_err().code(), Code::Unavailable);
    bridge.replace("sgl-0", 3, on_device(&asked[..2]), None).await;
    let told = BTreeMap::from([(address("sgl-0"), 2)]);
    assert_eq!(router.told(&asked).await, (told, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_of_reported_workers_count_by_the_depth_that_is_asked_for() {
    let broker = broker().await;
    let asked = prompt(0, 0, 5);
    let parts = vec![Hashes {
        component_masks: vec![3, 3, 1, 3, 1],
        block_sizes: vec![16; 5],
        ..on_device(&asked).remove(0)
    }];
    let spec = Spec {
        version: 1,
        components: 3,
        swa_window_tokens: 32,
        full_tier_mask: 2,
        swa_tier_mask: 2,
    };
    for (depth, expected) in [("usable", 2), ("matched", 5)] {
        let more = [("queries.dialect_depth", depth)];
        let (_daemon, router, bridge) = taking(broker.url(), &more).await;
        bridge.expect(&["sgl-0"]).await;
        bridge
            .replace("sgl-0", 0, parts.clone(), Some(spec.clone()))
            .await;
        let told = BTreeMap::from([(address("sgl-0"), expected)]);
        assert_eq!(router.told(&asked).await, (told, true), "{depth}");
        bridge.replace("sgl-0", 0, parts.clone(), None).await;
        assert_eq!(
            router.told(&asked).await.0,
            BTreeMap::new(),
            "nobody says what a request needs"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reported_page_after_a_hole_is_listed_and_look_ups_are_not_counted() {
    let broker = broker().await;
    let (_daemon, router, bridge) = taking(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    publish(&client, "kvatlas").await;
    knows_all(&router).await;
    let asked = prompt(0, 0, 9);
    bridge.expect(&["sgl-0"]).await;
    bridge.replace("sgl-0", 0, on_device(&asked[8..]), None).await;
    for (count_as_hit, pages) in [(true, 3), (false, 9), (true, 9)] {
        let question = TierQuestion {
            hashes: numbers(&asked[..pages]),
            count_as_hit,
        };
        let sent = router.send("MatchExternalKv", Request::new(question));
        let nodes: Nodes = sent.await.unwrap().into_inner();
        let reported = nodes.matches.iter().find(|node| node.worker_id == "sgl-0");
        let tiers = reported.map(|node| (node.address.clone(), node.hashes_by_tier.len()));
        assert_eq!(tiers, (pages == 9).then(|| (address("sgl-0"), 1)));
    }
    let question = Question {
        hashes: numbers(&asked),
        max_blocks: 0,
    };
    let sent: Result<tonic::Response<Nodes>, _> = router
        .send("GetExternalKvHitCounts", Request::new(question))
        .await;
    assert_eq!(sent.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_report_need_their_own_token() {
    let broker = broker().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "secret\n").unwrap();
    let more = [
        ("grpc.writing", "token"),
        ("grpc.writing_token_file", path.to_str().unwrap()),
    ];
    let (_daemon, router, bridge) = taking(broker.url(), &more).await;
    let refused = bridge.apply("sgl-0", 1, vec![]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert!(refused.message().contains("grpc.writing_token_file"), "{refused}");
    let mut request = Request::new(Workers::default());
    request
        .metadata_mut()
        .insert("authorization", "Bearer secret".parse().unwrap());
    let ready: Ready = router
        .send("ConfigureExpectedWorkers", request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!((ready.total_workers, ready.ready_workers), (0, 0));
    // Questions need no token.
    assert_eq!(router.ask(&[]).await.unwrap_err().code(), Code::Unavailable);
}
