//! Tests of the page's answers, against an index with a few holders.

use std::time::Duration;

use crate::shared::unbounded;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Request;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{
    Event, HolderId, QueryKey, QueryRequest, SingleQuery, StoredBlocks, Subjects, Tier, WireLimits,
    WorkerName,
};
use serde_json::Value;

use super::*;
use crate::lanes::tests::{namespaces, settings};
use crate::lanes::{Freshness, LanePool, LaneSettings, now_us};
use crate::outcomes::Outcomes;

struct World {
    page: Arc<Page>,
    sampled: Answerer,
    readiness: Arc<Readiness>,
}

/// Makes a page for the namespace `n`, whose three holders have the blocks `[1, 2, 3]`, `[1, 2]` and `[1, 8]`.
fn world() -> World {
    world_with(Arc::new(Freshness::without_events()))
}

fn world_with(freshness: Arc<Freshness>) -> World {
    let (namespaces, trust) = (unbounded(4), Arc::<StreamTrust>::default());
    let namespace = namespaces.get_or_create(&name(), None).unwrap();
    for (worker, hashes) in [("a", &[1, 2, 3][..]), ("b", &[1, 2]), ("c", &[1, 8])] {
        let worker = WorkerName::new(worker).unwrap();
        let mut writer = namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap();
        let hashes = hashes.iter().copied().map(SequenceHash).collect();
        let stored = StoredBlocks::by_sequence(None, None, hashes);
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
        writer.status().confirm(trust.generation());
    }
    let subjects = Subjects::new("kvatlas").unwrap();
    let namespaces = Arc::new(namespaces);
    let answerer = Answerer::new(
        Arc::clone(&namespaces),
        trust,
        freshness,
        Arc::default(),
        subjects,
        WireLimits::default().into(),
    );
    let sample = Arc::new(QuerySample::default());
    let readiness = Arc::new(Readiness::new());
    World {
        page: Arc::new(Page::new(
            answerer.clone(),
            Arc::clone(&readiness),
            Looked {
                sample: Arc::clone(&sample),
                outcomes: Arc::new(Outcomes::new(namespaces, None)),
                costs: Arc::default(),
                missing_shards: Arc::default(),
                snapshot_failing: Arc::default(),
                strays: Box::new(Vec::new),
            },
            MetricsHandle::empty(),
        )),
        sampled: Answerer {
            sample: Some(sample),
            ..answerer
        },
        readiness,
    }
}

fn name() -> NamespaceName {
    NamespaceName::new("n").unwrap()
}

impl World {
    async fn get(&self, path: &str, query: &str) -> Response {
        let request = Request::get(format!("{path}?{query}"));
        let request = request.body(Body::empty()).unwrap();
        let service = TowerToHyperService::new(self.page.router());
        service.call(request).await.unwrap()
    }

    async fn json(&self, path: &str, query: &str) -> (StatusCode, Value) {
        let response = self.get(path, query).await;
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap())
    }

    /// Returns the data of the first event called `event` in the stream at `path`.
    async fn event(&self, path: &str, query: &str, event: &str) -> Value {
        let mut body = self.get(path, query).await.into_body();
        loop {
            let chunk: Bytes = body
                .frame()
                .await
                .expect("an event")
                .unwrap()
                .into_data()
                .unwrap();
            let text = String::from_utf8(chunk.to_vec()).unwrap();
            if let Some((_, data)) = text.split_once(&format!("event: {event}\ndata: ")) {
                return serde_json::from_str(data.trim_end()).unwrap();
            }
        }
    }

    fn ask(&self, hashes: &[u64]) {
        let hashes = hashes.iter().copied().map(SequenceHash).collect();
        let query = SingleQuery::new(QueryKey::SequenceHashes(hashes));
        let request = QueryRequest::Single(query);
        self.sampled
            .answer_request(&name(), &request, usize::MAX)
            .unwrap();
    }
}

#[tokio::test]
async fn a_hot_prefix_is_drawn_and_explained() {
    let world = world();
    world.ask(&[1, 2, 3]);
    for (lens, total) in [("asked", 1), ("held", 7)] {
        let query = format!("namespace=n&lens={lens}");
        let atlas = world.event("/page/atlas", &query, "atlas").await;
        assert_eq!(atlas["total"], total, "{atlas}");
        let nodes = atlas["nodes"].as_array().unwrap();
        let node = nodes.iter().find(|node| node["end"] == 3).expect("the deepest");
        assert_eq!(node["all"], 1);
        assert_eq!(node["names"], serde_json::json!(["a/0"]));
        let query = format!("{query}&block={}", node["block"].as_str().unwrap());
        let (status, explained) = world.json("/page/explain", &query).await;
        assert_eq!(status, StatusCode::OK, "{explained}");
        assert_eq!(
            (&explained["complete"], &explained["holders_total"]),
            (&1.into(), &3.into())
        );
        let dropped: Vec<&Value> = explained["holders"]
            .as_array()
            .unwrap()
            .iter()
            .map(|holder| &holder["dropped_out"])
            .collect();
        assert_eq!(
            dropped,
            [
                &Value::Null,
                &serde_json::json!([2, 1]),
                &serde_json::json!([1, 2])
            ]
        );
        assert_eq!(
            (&explained["loss"]["asking"], &explained["loss"]["sampled"]),
            (&1.into(), &1.into())
        );
        let start = node["start"].as_u64().unwrap();
        // From the node's first block on: 1, 2, 3 and 8, or 3 alone.
        let copies = [7, 3, 1][usize::try_from(start).unwrap()];
        assert_eq!(explained["loss"]["below"]["copies"], copies, "{explained}");
        assert_eq!(explained["loss"]["tokens"], (3 - start) * 16);
    }
}

#[tokio::test]
async fn a_deep_prefix_is_explained_as_far_as_it_was_compared() {
    let world = world();
    let deep: Vec<u64> = (100..400).collect();
    let namespace = world.sampled.namespace(&name()).unwrap();
    let worker = WorkerName::new("deep").unwrap();
    let mut writer = namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap();
    let hashes = deep.iter().copied().map(SequenceHash).collect();
    let stored = StoredBlocks::by_sequence(None, None, hashes);
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    // The sample keeps as much of this query as of one that asks for less.
    world.ask(&deep);
    let query = "namespace=n&lens=held";
    let atlas = world.event("/page/atlas", query, "atlas").await;
    let nodes = atlas["nodes"].as_array().unwrap();
    let node = nodes.iter().find(|node| node["end"] == 300).expect("the deepest");
    let query = format!("{query}&block={}", node["block"].as_str().unwrap());
    let (_, explained) = world.json("/page/explain", &query).await;
    let loss = &explained["loss"];
    assert_eq!(
        (&loss["asking"], &loss["compared"]),
        (&1.into(), &256.into()),
        "{explained}"
    );
}

#[tokio::test]
async fn what_cannot_be_answered_is_refused_in_words() {
    let world = world();
    let block = "block=00000000000000000000000000000000";
    for (path, query, status) in [
        ("/page/ask", "", 400),
        ("/page/ask", "namespace=n&query=%7B%7D", 400),
        ("/page/ask", "namespace=n&namespace=n", 400),
        ("/page/ask", "namespace=n&query=%ff", 400),
        ("/page/ask", "namespace=%2F&query=%7B%7D", 400),
        ("/page/ask", "namespace=m&query=%7B%22tokens%22:[1]%7D", 404),
        ("/page/atlas", "namespace=m&lens=asked", 404),
        ("/page/atlas", "namespace=n&lens=other", 400),
        ("/page/explain", &format!("namespace=n&lens=asked&{block}"), 410),
        ("/page/explain", "namespace=n&lens=asked&block=1", 400),
    ] {
        let (answered, body) = world.json(path, query).await;
        assert_eq!(answered.as_u16(), status, "{path}?{query}: {body}");
        assert!(
            body["error"].as_str().is_some_and(|text| !text.is_empty()),
            "{body}"
        );
    }
    let unknown = world.get("/page/other", "").await;
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_query_is_answered_with_where_each_drops_out() {
    let query =
        "namespace=n&query=%7B%22sequence_hashes%22:[%220000000000000001%22,%220000000000000008%22]%7D";
    let (status, reply) = world().json("/page/ask", query).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(reply["holders"][0]["worker"], "c");
    assert_eq!(reply["holders"][1]["dropped_out"]["position"], 1);
}

#[tokio::test]
async fn frames_tell_the_fleet_and_end_with_the_daemon() {
    let world = world();
    let frame = world.event("/page/frames", "", "frame").await;
    assert_eq!(frame["fleet"]["added"].as_array().map(Vec::len), Some(3));
    let namespace = &frame["namespaces"][0];
    assert_eq!(
        (
            &namespace["distinct_blocks"],
            &namespace["exact"],
            &namespace["degraded"]
        ),
        (&4.into(), &3.into(), &0.into())
    );
    assert_eq!(frame["broker_silent_us"], Value::Null);
    world.readiness.start_draining();
    let body = world.get("/page/frames", "").await.into_body();
    let rest = body.collect().await.unwrap().to_bytes();
    assert!(
        !rest.windows(12).any(|part| part == b"event: frame"),
        "it has ended at once"
    );
}

#[tokio::test]
async fn holders_that_are_behind_are_not_exact_on_the_page() {
    let patient = LaneSettings {
        behind_after: Some(Duration::from_secs(60)),
        ..settings()
    };
    let pool = LanePool::start(&patient, Arc::new(namespaces())).unwrap();
    let freshness = pool.freshness();
    // Each world has its first frame and its first atlas.
    for (heard_us, exact) in [(now_us() - 61_000_000, 0), (now_us(), 3)] {
        freshness.heard(heard_us);
        let world = world_with(Arc::clone(&freshness));
        let answerer = &world.page.answerer;
        let status = answerer.status(&answerer.namespace(&name()).unwrap(), 0);
        let told: Vec<u32> = status
            .holders
            .iter()
            .map(|holder| holder.degraded.bits())
            .collect();
        let frame = world.event("/page/frames", "", "frame").await;
        let facts = frame["fleet"]["facts"].as_array().unwrap();
        let shown: Vec<u64> = facts.iter().map(|facts| facts[2].as_u64().unwrap()).collect();
        assert_eq!(shown, told.iter().copied().map(u64::from).collect::<Vec<_>>());
        assert_eq!(told.iter().filter(|bits| **bits == 0).count(), exact);
        assert_eq!(frame["broker_silent_us"].is_null(), exact == 3, "{frame}");
        let atlas = world.event("/page/atlas", "namespace=n&lens=held", "atlas").await;
        for node in atlas["nodes"].as_array().unwrap() {
            let all = node["all"].as_u64().unwrap();
            assert_eq!(node["exact"], if exact == 0 { 0 } else { all }, "{node}");
        }
    }
}

#[tokio::test]
async fn a_frame_that_takes_long_keeps_nobody_else_waiting() {
    let world = world();
    let (page, mut first) = (Arc::clone(&world.page), Some(()));
    let (locked, is_locked) = std::sync::mpsc::channel();
    let (release, is_released) = std::sync::mpsc::channel::<()>();
    // The making of the first frame waits for this thread.
    let busy = std::thread::spawn(move || {
        let _frame = page.frame.lock();
        locked.send(()).unwrap();
        is_released.recv().unwrap();
    });
    is_locked.recv().unwrap();
    let mut body = world.get("/page/frames", "").await.into_body();
    while let Some(chunk) = body.frame().await {
        let text = chunk.unwrap().into_data().unwrap();
        let is_event = |name: &[u8]| text.windows(name.len()).any(|part| part == name);
        // The test's only thread comes here while the frame is being made.
        if is_event(b"event: past") && first.take().is_some() {
            tokio::task::yield_now().await;
            assert_eq!(world.get("/page/frames", "").await.status(), StatusCode::OK);
            release.send(()).unwrap();
        }
        if is_event(b"event: frame") {
            break;
        }
    }
    assert_eq!(first, None);
    busy.join().unwrap();
}

#[tokio::test]
async fn every_word_of_trouble_has_a_mend() {
    let world = world();
    let hello = world.event("/page/frames", "", "hello").await;
    let mends = hello["mends"].as_array().unwrap();
    let drop_mends = hello["drop_mends"].as_array().unwrap();
    for word in ["gap", "undecodable", "KvatlasShardMissing", "settled"] {
        assert!(mends.iter().any(|mend| mend[0] == word), "{word}");
    }
    for word in ["other_settings", "undecodable"] {
        assert!(drop_mends.iter().any(|mend| mend[0] == word), "{word}");
    }
    for mend in mends.iter().chain(drop_mends) {
        let text = mend[1].as_str().unwrap();
        assert!(text.len() > 10 && !text.starts_with("kvatlas explain"), "{mend}");
    }
    let frame = world.event("/page/frames", "", "frame").await;
    assert_eq!(
        (&frame["ready"], &frame["awaited"]),
        (&false.into(), &"snapshot_loaded".into())
    );
}

#[tokio::test]
async fn a_page_is_told_what_was_before() {
    let world = world();
    let read = || (0..3).for_each(|_| world.page.read_past(Instant::now()));
    read();
    world.page.end_bar();
    world.ask(&[1, 2]);
    read();
    world.page.end_bar();
    let past = world.event("/page/frames", "", "past").await;
    // Rates need two readings, so six readings give five rows.
    assert_eq!(past["rows"].as_array().map(Vec::len), Some(5), "{past}");
    let sparks = world.event("/page/frames", "", "sparks").await;
    assert_eq!(sparks["namespaces"]["n"][0][0], 1, "{sparks}");
    assert_eq!(sparks["namespaces"]["n"].as_array().map(Vec::len), Some(1));
}

#[test]
fn bars_end_by_the_clock_and_readings_are_apart() {
    let (mut known, begun) = (Remembered::default(), Instant::now());
    let second = Duration::from_secs(1);
    assert_eq!(known.due(begun), (true, true));
    assert_eq!(known.due(begun + second), (false, false));
    // A reading that took long puts off the next reading, but no bar.
    known.next = Some(begun + second * 100);
    let ended: Vec<u32> = (1..=60)
        .filter(|age| known.due(begun + second * *age).0)
        .collect();
    assert_eq!(ended, [15, 30, 45, 60]);
    assert_eq!(known.due(begun + second * 80), (true, false));
    let ended: Vec<u32> = (81..=120)
        .filter(|age| known.due(begun + second * *age).0)
        .collect();
    assert_eq!(ended, [90, 105, 120], "lateness is made up for");
    assert_eq!(known.due(begun + second * 200), (true, true));
    assert_eq!(known.due(begun + second * 201), (false, false));
}

#[tokio::test]
async fn streams_are_bounded_and_give_their_place_back() {
    let world = world();
    let mut open = Vec::new();
    for _ in 0..STREAMS_MAX {
        open.push(world.get("/page/frames", "").await);
    }
    let refused = world.get("/page/frames", "").await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(open);
    let freed = async {
        while world.get("/page/frames", "").await.status() != StatusCode::OK {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), freed)
        .await
        .expect("a place is free again");
}
