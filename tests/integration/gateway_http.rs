//! HTTP answers of a gateway over shards. On every route, also on the routes of other indexers, they equal the answers
//! of one daemon with all workers. A shard answers in the same way for its own workers.

use std::collections::BTreeSet;

use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::hash::{BlockHash, BlockSize, HashSeed, SequenceHash, block_hashes, sequence_hashes};
use kvatlas_core::wire::{
    ErrorCode, Event, EventBatch, HolderStatusReply, NamespaceName, PROBE_NAME, Profile, RemovedBlocks,
    Resumable, Shard, StoredBlocks, Subjects, Tier, WorkerName,
};
use kvatlas_daemon::Daemon;
use serde_json::{Value, json};

use crate::support::http::{Answer, HttpClient};
use crate::support::publisher::Publisher;
use crate::support::{Client, broker, daemon, eventually};

const SHARDS: u32 = 2;

/// Routes on which a gateway answers differently from a daemon: the path, the statuses of daemon and gateway, and the
/// reason.
const DIFFERENT: [(&str, [u16; 2], &str); 2] = [
    (
        "/dump",
        [200, 404],
        "the blocks stay with the shards, and each dumps its own",
    ),
    ("/metrics", [200, 200], "each process has figures of its own"),
];

fn tokens(count: u32) -> Vec<u32> {
    (1..=count).collect()
}

fn block_hashes_of(blocks: u32) -> Vec<BlockHash> {
    block_hashes(&tokens(blocks * 16), BlockSize::DEFAULT, HashSeed::default()).collect()
}

fn chain(blocks: u32) -> Vec<SequenceHash> {
    sequence_hashes(block_hashes_of(blocks)).collect()
}

fn stored(blocks: u32) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, chain(blocks)))
}

/// Batch of a holder, with the names of its namespace and worker.
type Sent = (&'static str, &'static str, EventBatch);

fn sent(namespace: &'static str, worker: &'static str, rank: u32, seq: u64, tier: u8, event: Event) -> Sent {
    let batch = EventBatch {
        epoch: 1,
        seq,
        rank,
        time_us: Some(seq),
        tier: Tier::new(tier).unwrap(),
        block_size: Some(BlockSize::DEFAULT),
        profile: (seq == 1).then(|| Profile {
            address: format!("{}:8000", worker.trim_start_matches('_')).parse().ok(),
            labels: serde_json::from_value(json!({"rank": rank.to_string()})).unwrap(),
        }),
        events: vec![event],
    };
    (namespace, worker, batch)
}

/// Returns batches of holders that belong to different shards. Between them, the holders have several ranks and tiers,
/// a block missing in the middle, a window, and a missing batch. One holder is a pool, and one belongs to another
/// tenant.
fn fleet() -> Vec<Sent> {
    let windowed = Event::Stored(StoredBlocks {
        resumable: Resumable::from_flags([true, true, false, false]),
        ..StoredBlocks::by_sequence(None, None, chain(4))
    });
    vec![
        sent("llama", "gpu-0", 0, 1, 0, stored(4)),
        sent("llama", "gpu-0", 1, 1, 0, stored(2)),
        sent("llama", "gpu-1", 0, 1, 0, stored(1)),
        sent("llama", "gpu-1", 0, 2, 1, stored(3)),
        sent("llama", "gpu-1", 0, 3, 2, stored(5)),
        sent("llama", "gpu-2", 0, 1, 0, windowed),
        sent("llama", "gpu-3", 0, 1, 0, stored(5)),
        sent(
            "llama",
            "gpu-3",
            0,
            2,
            0,
            Event::Removed(RemovedBlocks::by_sequence(vec![chain(2)[1]])),
        ),
        sent("llama", "10_d0_d0_d1_c8000", 0, 1, 0, stored(3)),
        sent("llama", "10_d0_d0_d1_c8000", 0, 3, 0, stored(4)),
        sent("llama", "7", 0, 1, 0, stored(2)),
        sent("llama", "_pstore", 0, 1, 3, stored(5)),
        sent("llama_tacme", "gpu-4", 0, 1, 0, stored(3)),
    ]
}

/// Two sides that have received the same batches: a single daemon, and shards with a gateway.
struct Site {
    client: Client,
    one: HttpClient,
    shards: Vec<Daemon>,
    daemons: [Daemon; 2],
    gateway: HttpClient,
    _broker: kvatlas_process::broker::embedded::EmbeddedBroker,
}

/// Makes a site that has received the batches of `fleet`.
async fn site(fleet: &[Sent]) -> Site {
    Box::pin(site_with(fleet, &[])).await
}

/// Makes a site as [`site`] does. The daemon and the shards have the settings `more`, too.
async fn site_with(fleet: &[Sent], more: &[(&str, &str)]) -> Site {
    let broker = broker().await;
    let start = async |settings: &[(&str, &str)]| {
        // The daemons ask no publisher, so the gap stays.
        let patient = [
            ("resync.concurrency", "0"),
            ("namespace_defaults.stale_after_ms", "600000"),
            ("namespace_defaults.remove_after_ms", "900000"),
            ("hints.ttl_ms", "60000"),
            ("http.listen", "127.0.0.1:0"),
        ];
        let all = [&patient[..], settings].concat();
        daemon(broker.url(), &all).await
    };
    let one = start(&[&[("subjects.prefix", "one")][..], more].concat()).await;
    let mut shards = Vec::new();
    for index in 0..SHARDS {
        let shard = format!("{index}/{SHARDS}");
        let own = [("subjects.prefix", "many"), ("sharding.shard", &shard)];
        shards.push(start(&[&own[..], more].concat()).await);
    }
    let settings = [
        ("subjects.prefix", "many"),
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "2000"),
        ("http.listen", "127.0.0.1:0"),
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let site = Site {
        one: HttpClient::connect(one.http_address().unwrap()).await,
        gateway: HttpClient::connect(gateway.http_address().unwrap()).await,
        client,
        shards,
        daemons: [one, gateway],
        _broker: broker,
    };
    site.tell_all(fleet).await;
    site
}

impl Site {
    /// Publishes the fleet to the single daemon, and to the shards behind the gateway. Waits until both have applied
    /// all batches, know that there are no other publishers, and tell of each holder in doubt since when it is.
    async fn tell_all(&self, fleet: &[Sent]) {
        for prefix in ["one", "many"] {
            let subjects = Subjects::new(prefix).unwrap();
            for (namespace, worker, batch) in fleet {
                let (namespace, worker): (NamespaceName, WorkerName) =
                    (namespace.parse().unwrap(), worker.parse().unwrap());
                let payload = batch.encode().into();
                let subject = subjects.events(&namespace, &worker);
                self.client.nats.publish(subject, payload).await.unwrap();
            }
            let queries = QueryClient::new(self.client.nats.clone(), subjects);
            for (name, blocks) in [("llama", 30), ("llama_tacme", 3)] {
                if fleet.iter().all(|(namespace, ..)| *namespace != name) {
                    continue;
                }
                let namespace: NamespaceName = name.parse().unwrap();
                eventually("the fleet is known", async || {
                    let status = queries.status(&namespace).await.ok()?;
                    let held: u64 = status.holders.iter().map(|holder| holder.blocks).sum();
                    let is_dated = |holder: &HolderStatusReply| holder.exact || holder.since_us.is_some();
                    let are_dated = status.holders.iter().all(is_dated);
                    (held == blocks && status.batches_waiting == 0 && are_dated).then_some(())
                })
                .await;
            }
            eventually("everybody is known", async || {
                let unknown = queries.status(&"nobody".parse().unwrap()).await.unwrap_err();
                let code = ErrorCode::UnknownNamespace;
                matches!(unknown, ClientError::Refused(error) if error.code == code).then_some(())
            })
            .await;
        }
    }

    /// Sends the same request to the daemon and to the gateway, and returns both answers.
    async fn ask(&mut self, path: &str, body: Option<&Value>) -> [Answer; 2] {
        match body {
            Some(body) => [
                self.one.post(path, body).await,
                self.gateway.post(path, body).await,
            ],
            None => [self.one.get(path).await, self.gateway.get(path).await],
        }
    }
}

/// Returns the body of an answer without the parts that must differ: the list of shards, counts that each shard makes
/// for itself, and numbers of look-ups.
fn comparable(answer: &Answer) -> String {
    let body = String::from_utf8(answer.body.clone()).unwrap();
    let gathered = [
        format!(r#","gathered":{{"shards":{SHARDS},"missing":[]}}"#),
        format!(r#","gathered":{{"missing":[],"shards":{SHARDS}}}"#),
        format!(r#""gathered":{{"missing":[],"shards":{SHARDS}}},"#),
    ];
    let body = gathered.iter().fold(body, |body, part| body.replace(part, ""));
    // These values depend on the daemon and on the time.
    [
        r#""distinct_blocks":"#,
        r#""other_holders":"#,
        r#""since_us":"#,
        r#""event_id":"Lookup"#,
    ]
    .iter()
    .fold(body, |body, marker| {
        let mut parts = body.split(marker).map(str::to_owned);
        let first = parts.next().unwrap();
        let without_number = |part: String| part.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
        parts.fold(first, |all, part| {
            format!("{all}{marker}N{}", without_number(part))
        })
    })
}

/// Path, and the body of a request that has one.
type Question = (&'static str, Option<Value>);

fn questions() -> Vec<Question> {
    let hashes: Vec<u64> = chain(5).iter().map(|hash| hash.as_u64()).collect();
    let blocks: Vec<u64> = block_hashes_of(5).iter().map(|hash| hash.as_u64()).collect();
    let contract = |more: Value| {
        let mut asked = json!({"model": "llama"});
        asked
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        ("/v1/query", Some(asked))
    };
    let mut all = vec![
        contract(json!({"tokens": tokens(80)})),
        contract(json!({"tokens": tokens(80), "token_count": 81})),
        contract(json!({"tokens": tokens(85), "limit": 3, "tiers": true})),
        contract(json!({"sequence_hashes": hashes, "explain": true, "tiers": true})),
        contract(json!({"block_hashes": blocks, "workers": ["gpu-1", "gpu-2", "nobody"]})),
        contract(json!({"sequence_hashes": [hashes[0], hashes[4]], "positions": [0, 4]})),
        contract(
            json!({"queries": [{"tokens": tokens(48)}, {"sequence_hashes": hashes, "limit": 2}, {"sequence_hashes": [1]}]}),
        ),
        contract(json!({"tenant": "acme", "tokens": tokens(80)})),
        contract(json!({"model": "nobody", "tokens": [1]})),
        contract(json!({"tokens": tokens(80), "token_count": 79})),
        contract(json!({})),
        ("/v1/status?model=llama", None),
        ("/v1/status?model=llama&tenant=acme", None),
        ("/v1/status?model=nobody", None),
        ("/workers", None),
        ("/workers?model_name=llama&routing_group=acme", None),
        ("/v1/models", None),
        ("/health", None),
        ("/openapi.json", None),
        ("/dump", None),
        ("/metrics", None),
        ("/nothing", None),
        ("/v1/query", None),
        ("/v1/status", Some(json!({}))),
    ];
    all.extend(reports());
    all.extend(in_dialects());
    all
}

/// Returns requests on the HTTP routes that kvatlas has in common with other indexers.
fn in_dialects() -> Vec<Question> {
    let hashes: Vec<u64> = chain(5).iter().map(|hash| hash.as_u64()).collect();
    let blocks: Vec<u64> = block_hashes_of(5).iter().map(|hash| hash.as_u64()).collect();
    let post = |path, body| (path, Some(body));
    let mut all = Vec::new();
    // Three prompts end with a whole block, and one ends in the middle of a block.
    for count in [16, 64, 80, 85] {
        all.push(post(
            "/query",
            json!({"model_name": "llama", "token_ids": tokens(count)}),
        ));
        all.push(post(
            "/query",
            json!({"model": "llama", "token_ids": tokens(count), "block_size": 16}),
        ));
    }
    all.extend([
        post(
            "/query",
            json!({"model_name": "llama", "routing_group": "acme", "token_ids": tokens(64)}),
        ),
        post(
            "/query",
            json!({"model": "llama", "token_ids": tokens(80), "block_size": 16, "instance_id": "gpu-1"}),
        ),
        post(
            "/query",
            json!({"model": "llama", "token_ids": tokens(80), "block_size": 32}),
        ),
        post(
            "/query",
            json!({"model_name": "llama", "token_ids": tokens(80), "cache_salt": "s"}),
        ),
        post("/query", json!({"model_name": "nobody", "token_ids": [1]})),
        post("/lookup", json!({"model": "nobody", "tokens": [1]})),
        post("/lookup", json!({"model": "llama", "tokens": tokens(80)})),
        // There are two caches, so a request without a model is refused.
        post("/lookup", json!({"tokens": tokens(80)})),
        post("/register", json!({"model": "llama", "instance_id": "gpu-9"})),
        post("/unregister", json!({"model": "llama", "instance_id": "gpu-9"})),
        post(
            "/query_by_hash",
            json!({"model_name": "llama", "block_hashes": blocks}),
        ),
        post(
            "/query_by_hash",
            json!({"model": "llama", "seq_hashes": hashes, "block_size": 16}),
        ),
    ]);
    all
}

/// Returns reports of routers (hints and outcomes), and a query whose answer also has the blocks that the hints
/// predict.
fn reports() -> Vec<Question> {
    let workers = ["gpu-0", "gpu-1", "gpu-2", "gpu-3", "nobody"];
    let about = |model: &str, list: &str, of: &dyn Fn(&str) -> Value| {
        Some(json!({"model": model, list: workers.map(of)}))
    };
    let prompt = json!({"tokens": tokens(96)});
    let hint = |worker: &str| json!({"worker": worker, "prompt": prompt});
    let outcome = |worker: &str| json!({"worker": worker, "promised_blocks": 2, "found_tokens": 32});
    let sampled = json!({"worker": "gpu-0", "prompt": {"sequence_hashes": [1], "positions": [0]}});
    vec![
        ("/v1/hints", about("llama", "hints", &hint)),
        ("/v1/hints", about("nobody", "hints", &hint)),
        ("/v1/hints", Some(json!({"model": "llama", "hints": [sampled]}))),
        (
            "/v1/hints",
            Some(json!({"model": "llama", "hints": vec![hint("gpu-0"); 65]})),
        ),
        (
            "/v1/query",
            Some(json!({"model": "llama", "tokens": tokens(96), "predicted": true})),
        ),
        ("/v1/outcomes", about("llama", "outcomes", &outcome)),
        ("/v1/outcomes", about("nobody", "outcomes", &outcome)),
        (
            "/v1/outcomes",
            Some(json!({"model": "llama", "outcomes": vec![outcome("gpu-0"); 257]})),
        ),
    ]
}

/// Checks that there is a request for every route.
fn check_that_all_are_asked(document: &Value) {
    let route = |method: &str, path: &str| format!("{method} {path}");
    let asked: BTreeSet<String> = questions()
        .iter()
        .map(|(path, body)| {
            let method = if body.is_some() { "post" } else { "get" };
            route(method, path.split('?').next().unwrap_or_default())
        })
        .collect();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            assert!(
                asked.contains(&route(method, path)),
                "nobody asks {method} {path}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_answers_every_route_as_one_daemon_would() {
    let mut site = Box::pin(site(&fleet())).await;
    check_that_all_are_asked(&site.one.get("/openapi.json").await.json());
    let owned = |worker: &str| Shard::new(0, SHARDS).unwrap().owns(&worker.parse().unwrap());
    let workers = ["gpu-0", "gpu-1", "gpu-2", "gpu-3"].map(owned);
    assert!(
        workers.contains(&true) && workers.contains(&false),
        "both shards have some"
    );
    let mut found = 0;
    for (path, body) in questions() {
        let [one, gateway] = site.ask(path, body.as_ref()).await;
        let statuses = [one.status, gateway.status];
        if let Some((_, different, why)) = DIFFERENT.iter().find(|(different, ..)| *different == path) {
            assert_eq!(statuses, *different, "{path}: {why}");
            continue;
        }
        let what = format!("{path} {}", body.map_or(String::new(), |body| body.to_string()));
        let said = String::from_utf8_lossy(&gateway.body);
        assert_eq!(gateway.status, one.status, "{what}: {said}");
        if gateway.status == 413 {
            // The gateway and the daemon word this refusal differently.
            continue;
        }
        assert_eq!(comparable(&gateway), comparable(&one), "{what}");
        let exact = |answer: &Answer| answer.headers.get("x-kvatlas-exact").cloned();
        assert_eq!(exact(&gateway), exact(&one), "{what}");
        found += usize::from(comparable(&one).contains("gpu-1"));
    }
    assert!(found > 12, "most questions find somebody: {found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_told_to_a_gateway_reach_the_shards_of_their_workers() {
    let mut site = Box::pin(site(&fleet())).await;
    let mut told = Vec::new();
    for (path, body) in reports() {
        let answer = site.gateway.post(path, &body.unwrap()).await;
        told.push((answer.status, answer.json()));
    }
    let statuses: Vec<u16> = told.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [200, 404, 400, 413, 200, 200, 404, 413]);
    // A hint about an unknown worker is kept, but an outcome of an unknown worker is not counted.
    assert_eq!(
        (&told[0].1["taken"], &told[5].1["counted"]),
        (&json!(5), &json!(4))
    );
    let predicted = told[4].1["predicted"].as_array().unwrap().iter();
    let predicted: Vec<&Value> = predicted.map(|holder| &holder["worker"]).collect();
    assert_eq!(predicted, ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]);
    site.shards.remove(0).stop().await;
    let (_, body) = reports().remove(0);
    let answer = site.gateway.post("/v1/hints", &body.unwrap()).await;
    assert_eq!(
        answer.json()["gathered"],
        json!({"shards": SHARDS, "missing": [0]})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_without_a_model_is_of_the_only_one_at_a_gateway_too() {
    let mut only = fleet();
    only.retain(|(namespace, ..)| *namespace == "llama");
    let mut site = Box::pin(site(&only)).await;
    let [one, gateway] = site.ask("/lookup", Some(&json!({"tokens": tokens(80)}))).await;
    assert_eq!((one.status, gateway.status), (200, 200));
    assert_eq!(comparable(&gateway), comparable(&one));
    assert!(gateway.json()["layout_info"]["gpu-1"][1].is_u64());
    let subjects = Subjects::new("many").unwrap();
    let worker = WorkerName::new("other").unwrap();
    let publisher = |namespace: &str| {
        let namespace = NamespaceName::new(namespace).unwrap();
        Publisher::new(site.client.nats.clone(), &subjects, &namespace, &worker, 0)
    };
    let (mut probe, mut rolled) = (publisher(PROBE_NAME), publisher("rolled"));
    let look = async |gateway: &mut HttpClient| {
        let answer = gateway.post("/lookup", &json!({"tokens": tokens(80)})).await;
        answer.status
    };
    // A probe of the doctor is no model.
    probe.publish(Tier::DEVICE, vec![stored(1)]).await.unwrap();
    rolled.publish(Tier::DEVICE, vec![stored(1)]).await.unwrap();
    eventually("two models are known", async || {
        (look(&mut site.gateway).await == 400).then_some(())
    })
    .await;
    rolled.publish(Tier::DEVICE, vec![Event::Goodbye]).await.unwrap();
    eventually("the model without workers does not count", async || {
        (look(&mut site.gateway).await == 200).then_some(())
    })
    .await;
}

/// The shards drop the events of a second model. Its publisher is at one of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_without_a_model_is_not_certain_while_a_shard_drops_another_models_events() {
    let mut site = Box::pin(site_with(&[], &[("limits.max_namespaces", "1")])).await;
    let subjects = ["one", "many"].map(|prefix| Subjects::new(prefix).unwrap());
    let nats = site.client.nats.clone();
    let publish = async |namespace: &str, worker: &str| {
        for subjects in &subjects {
            let (namespace, worker): (NamespaceName, WorkerName) =
                (namespace.parse().unwrap(), worker.parse().unwrap());
            let mut publisher = Publisher::new(nats.clone(), subjects, &namespace, &worker, 0);
            publisher.publish(Tier::DEVICE, vec![stored(4)]).await.unwrap();
        }
    };
    let body = json!({"tokens": tokens(80)});
    let mut both_are = async |is_exact: &str| {
        eventually("the daemon and the gateway are as certain", async || {
            let answers = site.ask("/lookup", Some(&body)).await;
            let is = |answer: &Answer| answer.status == 200 && answer.headers["x-kvatlas-exact"] == is_exact;
            answers.iter().all(is).then_some(())
        })
        .await;
    };
    // Each shard knows the namespace before its only place is taken.
    for number in 0..8 {
        publish("llama", &format!("gpu-{number}")).await;
    }
    both_are("true").await;
    publish("qwen", "gpu-9").await;
    both_are("false").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_names_itself_and_answers_for_its_own_workers() {
    let mut site = Box::pin(site(&fleet())).await;
    let mut shards = Vec::new();
    for shard in &site.shards {
        shards.push(HttpClient::connect(shard.http_address().unwrap()).await);
    }
    let shard_of = |answer: &Answer| answer.headers.get("x-kvatlas-shard").cloned();
    for (path, body) in questions() {
        let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        let method = if body.is_empty() { "GET" } else { "POST" };
        for (index, shard) in shards.iter_mut().enumerate() {
            let answer = shard.ask(method, path, &body).await;
            assert_eq!(shard_of(&answer), Some(format!("{index}/{SHARDS}")), "{path}");
        }
        for whole in [&mut site.one, &mut site.gateway] {
            assert_eq!(shard_of(&whole.ask(method, path, &body).await), None, "{path}");
        }
    }
    // Merged, the shards' answers equal the answer of one daemon. Answers are lists of holders, or maps of instances.
    let dialects = [
        (
            "/v1/query",
            json!({"model": "llama", "tokens": tokens(80)}),
            "/holders",
        ),
        (
            "/query",
            json!({"model": "llama", "token_ids": tokens(80), "block_size": 16}),
            "/default",
        ),
        (
            "/query",
            json!({"model_name": "llama", "token_ids": tokens(80)}),
            "/instances",
        ),
        (
            "/lookup",
            json!({"model": "llama", "tokens": tokens(80)}),
            "/layout_info",
        ),
    ];
    for (path, body, place) in dialects {
        let of = |answer: &Answer| parts_of(answer.json().pointer(place).unwrap());
        let mut together = BTreeSet::new();
        for shard in &mut shards {
            let part = of(&shard.post(path, &body).await);
            assert!(!part.is_empty() && together.is_disjoint(&part), "{path} {part:?}");
            together.extend(part);
        }
        assert_eq!(together, of(&site.one.post(path, &body).await), "{path}");
    }
}

/// Returns the members of a list or a map, each as text.
fn parts_of(whole: &Value) -> BTreeSet<String> {
    match whole {
        Value::Array(list) => list.iter().map(Value::to_string).collect(),
        Value::Object(map) => map
            .iter()
            .map(|(name, value)| format!("{name} {value}"))
            .collect(),
        other => panic!("neither a list nor a map: {other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_says_over_http_that_a_shard_is_missing() {
    let mut site = Box::pin(site(&fleet())).await;
    site.shards.remove(0).stop().await;
    let query = json!({"model": "llama", "tokens": tokens(80)});
    let dialect = json!({"model_name": "llama", "token_ids": tokens(80)});
    // The gateway waits for the missing shard until its deadline, so all are asked at the same time.
    let [_, gateway] = &site.daemons;
    let address = gateway.http_address().unwrap();
    let ask = async |path: &str, body: Option<&Value>| {
        let mut gateway = HttpClient::connect(address).await;
        match body {
            Some(body) => gateway.post(path, body).await,
            None => gateway.get(path).await,
        }
    };
    let (contract, other, status, workers) = tokio::join!(
        ask("/v1/query", Some(&query)),
        ask("/query", Some(&dialect)),
        ask("/v1/status?model=llama", None),
        ask("/workers", None),
    );
    for answer in [&contract, &other, &status] {
        assert_eq!((answer.status, answer.is_exact()), (200, false));
    }
    assert_eq!(
        contract.json()["gathered"],
        json!({"shards": SHARDS, "missing": [0]})
    );
    // An answer that is a list cannot tell that a shard is missing, so the request is refused.
    let said = String::from_utf8_lossy(&workers.body);
    assert_eq!(workers.status, 503, "{said}");
    site.shards.remove(0).stop().await;
    assert_eq!(site.gateway.post("/v1/query", &query).await.status, 503);
}
