//! A gateway over shards answers over HTTP as one daemon with all workers does, in every dialect.

use kvatlas_client::QueryClient;
use kvatlas_core::hash::{BlockHash, BlockSize, HashSeed, SequenceHash, block_hashes, sequence_hashes};
use kvatlas_core::wire::{
    Event, EventBatch, NamespaceName, Profile, RemovedBlocks, Resumable, Shard, StoredBlocks, Subjects, Tier,
    WorkerName,
};
use kvatlas_daemon::Daemon;
use serde_json::{Value, json};

use crate::support::http::{Answer, HttpClient};
use crate::support::{Client, broker, daemon, eventually};

const SHARDS: u32 = 2;

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

/// A batch of a holder: namespace, worker, rank, and the rest.
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

/// Holders of both shards: deep and shallow, of several ranks and tiers, with a hole, a window, a gap, a pool, and another tenant.
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

/// One daemon, and shards with a gateway, that have heard the same.
struct Site {
    client: Client,
    one: HttpClient,
    shards: Vec<Daemon>,
    _others: [Daemon; 2],
    gateway: HttpClient,
    _broker: kvatlas_process::broker::embedded::EmbeddedBroker,
}

async fn site() -> Site {
    let broker = broker().await;
    let start = async |settings: &[(&str, &str)]| {
        // Nobody is asked about the gap, which stays.
        let patient = [
            ("resync.concurrency", "0"),
            ("namespace_defaults.stale_after_ms", "600000"),
            ("namespace_defaults.remove_after_ms", "900000"),
        ];
        let all = [&patient[..], settings].concat();
        daemon(broker.url(), &all).await
    };
    let http = ("http.listen", "127.0.0.1:0");
    let one = start(&[("subjects.prefix", "one"), http]).await;
    let mut shards = Vec::new();
    for index in 0..SHARDS {
        let shard = format!("{index}/{SHARDS}");
        shards.push(start(&[("subjects.prefix", "many"), ("sharding.shard", &shard)]).await);
    }
    let settings = [
        ("subjects.prefix", "many"),
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "2000"),
        http,
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let site = Site {
        one: HttpClient::connect(one.http_address().unwrap()).await,
        gateway: HttpClient::connect(gateway.http_address().unwrap()).await,
        client,
        shards,
        _others: [one, gateway],
        _broker: broker,
    };
    site.tell_all().await;
    site
}

impl Site {
    /// Publishes the fleet to both, and waits until all of it is known and nobody else can be.
    async fn tell_all(&self) {
        for prefix in ["one", "many"] {
            let subjects = Subjects::new(prefix).unwrap();
            for (namespace, worker, batch) in fleet() {
                let (namespace, worker): (NamespaceName, WorkerName) =
                    (namespace.parse().unwrap(), worker.parse().unwrap());
                let payload = batch.encode().into();
                let subject = subjects.events(&namespace, &worker);
                self.client.nats.publish(subject, payload).await.unwrap();
            }
            let queries = QueryClient::new(self.client.nats.clone(), subjects);
            for (namespace, blocks) in [("llama", 30), ("llama_tacme", 3)] {
                let namespace: NamespaceName = namespace.parse().unwrap();
                eventually("the fleet is known", async || {
                    let status = queries.status(&namespace).await.ok()?;
                    let held: u64 = status.holders.iter().map(|holder| holder.blocks).sum();
                    (held == blocks && status.batches_waiting == 0).then_some(())
                })
                .await;
            }
            eventually("everybody is known", async || {
                let unknown = queries.status(&"nobody".parse().unwrap()).await.unwrap_err();
                unknown.to_string().contains("404").then_some(())
            })
            .await;
        }
    }

    /// Asks both the same, and returns both answers.
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

/// The body without what must differ: what it was put together from, and a count that each shard makes for itself.
fn comparable(answer: &Answer) -> String {
    let body = String::from_utf8(answer.body.clone()).unwrap();
    let body = body.replace(&format!(r#","gathered":{{"shards":{SHARDS},"missing":[]}}"#), "");
    // Each daemon has looked at another moment.
    ["distinct_blocks", "other_holders", "since_us"]
        .iter()
        .fold(body, |body, key| {
            let marker = format!(r#""{key}":"#);
            let mut parts = body.split(&marker).map(str::to_owned);
            let first = parts.next().unwrap();
            let without_number =
                |part: String| part.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
            parts.fold(first, |all, part| {
                format!(r#"{all}"{key}":N{}"#, without_number(part))
            })
        })
}

fn questions() -> Vec<(&'static str, Option<Value>)> {
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
    let post = |path, body| (path, Some(body));
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
    ];
    // Prompts of whole blocks, and one that ends in the middle of a block.
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

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_answers_as_one_daemon_would() {
    let mut site = Box::pin(site()).await;
    let owned = |worker: &str| Shard::new(0, SHARDS).unwrap().owns(&worker.parse().unwrap());
    let workers = ["gpu-0", "gpu-1", "gpu-2", "gpu-3"].map(owned);
    assert!(
        workers.contains(&true) && workers.contains(&false),
        "both shards have some"
    );
    let mut found = 0;
    for (path, body) in questions() {
        let [one, gateway] = site.ask(path, body.as_ref()).await;
        let what = format!("{path} {}", body.map_or(String::new(), |body| body.to_string()));
        assert_eq!(gateway.status, one.status, "{what}");
        assert_eq!(comparable(&gateway), comparable(&one), "{what}");
        let exact = |answer: &Answer| answer.headers.get("x-kvatlas-exact").cloned();
        assert_eq!(exact(&gateway), exact(&one), "{what}");
        found += usize::from(comparable(&one).contains("gpu-1"));
    }
    assert!(found > 12, "most questions find somebody: {found}");
    // The question has a number of its own.
    let asked = json!({"model": "llama", "tokens": tokens(80)});
    let [one, gateway] = site.ask("/lookup", Some(&asked)).await;
    assert_eq!(gateway.json()["layout_info"], one.json()["layout_info"]);
    assert!(gateway.json()["layout_info"]["gpu-1"][1].is_u64());
    let unnamed = json!({"tokens": tokens(80)});
    assert_eq!(site.gateway.post("/lookup", &unnamed).await.status, 400);
    // Blocks stay with the shards.
    let [one, gateway] = site.ask("/dump", None).await;
    assert_eq!((one.status, gateway.status), (200, 404));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_says_over_http_that_a_shard_is_missing() {
    let mut site = Box::pin(site()).await;
    site.shards.remove(0).stop().await;
    let asked = json!({"model": "llama", "tokens": tokens(80)});
    let answer = site.gateway.post("/v1/query", &asked).await;
    assert_eq!((answer.status, answer.is_exact()), (200, false));
    assert_eq!(
        answer.json()["gathered"],
        json!({"shards": SHARDS, "missing": [0]})
    );
    let asked = json!({"model_name": "llama", "token_ids": tokens(80)});
    let answer = site.gateway.post("/query", &asked).await;
    assert_eq!((answer.status, answer.is_exact()), (200, false));
    let answer = site.gateway.get("/v1/status?model=llama").await;
    assert_eq!((answer.status, answer.is_exact()), (200, false));
    // A list has no place to say so.
    let answer = site.gateway.get("/workers").await;
    assert_eq!(answer.status, 503, "{}", String::from_utf8_lossy(&answer.body));
    site.shards.remove(0).stop().await;
    let asked = json!({"model": "llama", "tokens": tokens(80)});
    assert_eq!(site.gateway.post("/v1/query", &asked).await.status, 503);
}
