//! Queries over HTTP to a real daemon, in kvatlas's own form and in the forms of other indexers.

use futures_util::future::LocalBoxFuture;
use kvatlas_core::hash::{BlockHash, BlockSize, HashSeed, SequenceHash, block_hashes, sequence_hashes};
use kvatlas_core::wire::{
    BatchCursor, BlockContent, DegradedReason, DegradedReasons, Event, ModelKey, NamespaceName, QueryKey,
    Rank, SingleQuery, StoredBlocks, Tier, WorkerName, pool_of_instance, worker_of_instance,
};
use kvatlas_daemon::Daemon;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

use crate::support::http::{Answer, HttpClient};
use crate::support::publisher::Publisher;
use crate::support::{Client, broker, daemon, eventually, hashes, subjects};

const MODEL: &str = "meta-llama/Llama-3.1-8B-Instruct";

/// A daemon with one model. Worker `10.0.0.1:8000` has four blocks of the tokens 1, 2, … on rank 0, and two on rank 1.
/// Worker `7` has three.
struct Site {
    _broker: kvatlas_process::broker::embedded::EmbeddedBroker,
    daemon: Daemon,
    client: Client,
    http: HttpClient,
}

fn namespace() -> NamespaceName {
    ModelKey::new(MODEL).namespace().unwrap()
}

fn tokens(blocks: u32) -> Vec<u32> {
    (1..=blocks * 16).collect()
}

fn blocks(count: u32) -> Vec<BlockHash> {
    block_hashes(
        &tokens(count),
        BlockSize::DEFAULT,
        HashSeed::for_cache(None, None),
    )
    .collect()
}

fn chain(count: u32) -> Vec<SequenceHash> {
    sequence_hashes(blocks(count)).collect()
}

fn stored(count: u32) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, chain(count)))
}

fn site<'s>(settings: &'s [(&'s str, &'s str)]) -> LocalBoxFuture<'s, Site> {
    Box::pin(async move {
        let broker = broker().await;
        let mut all = vec![("http.listen", "127.0.0.1:0")];
        all.extend_from_slice(settings);
        let daemon = daemon(broker.url(), &all).await;
        let client = Client::connect(broker.url()).await;
        client.listed().await;
        let http = HttpClient::connect(daemon.http_address().unwrap()).await;
        let site = Site {
            _broker: broker,
            daemon,
            client,
            http,
        };
        site.tell("10.0.0.1:8000", 0, Tier::DEVICE, stored(4), 1).await;
        site.tell("10.0.0.1:8000", 1, Tier::DEVICE, stored(2), 1).await;
        site.tell("7", 0, Tier::DEVICE, stored(3), 1).await;
        site
    })
}

impl Site {
    /// Publishes batch `seq` of a holder, and waits until it is applied.
    async fn tell(&self, instance: &str, rank: Rank, tier: Tier, event: Event, seq: u64) {
        let worker = worker_of_instance(instance).unwrap();
        self.tell_of(worker, rank, tier, event, seq).await;
    }

    /// Publishes a batch as [`Self::tell`] does, for a worker or a pool.
    async fn tell_of(&self, worker: WorkerName, rank: Rank, tier: Tier, event: Event, seq: u64) {
        let nats = self.client.nats.clone();
        let publisher =
            Publisher::new(nats, &subjects(), &namespace(), &worker, rank).of_blocks(BlockSize::DEFAULT);
        let cursor = BatchCursor {
            epoch: 1,
            seq: seq - 1,
        };
        publisher
            .resuming(cursor)
            .publish(tier, vec![event])
            .await
            .unwrap();
        eventually("the batch is applied", async || {
            let status = self.client.queries.status(&namespace()).await.ok()?;
            let is_it = |holder: &&kvatlas_core::wire::HolderStatusReply| {
                holder.worker == worker && holder.rank == rank && holder.seq >= seq
            };
            status.holders.iter().find(is_it).map(|_| ())
        })
        .await;
    }

    async fn post(&mut self, path: &str, body: Value) -> Answer {
        self.http.post(path, &body).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_contract_is_the_same_as_on_nats() {
    let mut site = site(&[]).await;
    let key = QueryKey::Tokens {
        tokens: tokens(5),
        lora_name: None,
        cache_salt: None,
    };
    let on_nats = site
        .client
        .queries
        .query(&namespace(), SingleQuery::new(key))
        .await
        .unwrap();
    let over_http = site
        .post("/v1/query", json!({"model": MODEL, "tokens": tokens(5)}))
        .await;
    assert_eq!((over_http.status, over_http.is_exact()), (200, true));
    assert_eq!(over_http.json(), serde_json::to_value(&on_nats).unwrap());
    assert_eq!(over_http.json()["query_blocks"], 5);

    let status = site
        .http
        .get("/v1/status?namespace=meta-llama__Llama-3_d1-8B-Instruct")
        .await;
    let on_nats = site.client.queries.status(&namespace()).await.unwrap();
    assert_eq!(status.json(), serde_json::to_value(&on_nats).unwrap());

    let batch = json!({"model": MODEL, "queries": [{"tokens": tokens(1)}, {"sequence_hashes": [1], "positions": [0]}]});
    let answer = site.post("/v1/query", batch).await;
    assert!(answer.is_exact());
    let batch = answer.json();
    assert_eq!(batch["results"][0]["reply"]["holders_total"], 3);
    assert_eq!(batch["results"][1]["reply"]["holders_total"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_with_a_mistake_is_refused_and_guessed() {
    let mut site = site(&[]).await;
    for (body, said) in [
        (
            json!({"model": MODEL, "tokens": [1], "lora_nam": "a"}),
            "\"lora_nam\": did you mean lora_name?",
        ),
        (
            json!({"model": MODEL, "queries": [{"tokens": [1], "cache_sal": "a"}]}),
            "did you mean cache_salt?",
        ),
        (
            json!({"model": MODEL, "tokens": [1], "temperature": 1}),
            "GET /openapi.json has them all",
        ),
        (
            json!({"model": MODEL, "outcomes": [], "tokens": [1]}),
            "no field \"outcomes\"",
        ),
    ] {
        let answer = site.post("/v1/query", body).await;
        let text = answer.json()["error"]["text"].as_str().unwrap().to_owned();
        assert!(
            answer.status == 400 && text.contains(said),
            "{}: {text}",
            answer.status
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_and_outcomes_with_a_mistake_are_refused() {
    let mut site = site(&[]).await;
    for path in [
        "/v1/status?namespace=meta-llama__Llama-3_d1-8B-Instruct&tenent=acme",
        "/workers?model=other",
    ] {
        assert_eq!(site.http.get(path).await.status, 400, "{path}");
    }
    for (field, status) in [("exact", 200), ("exat", 400)] {
        let outcome = json!({"worker": "7", "promised_blocks": 1, "found_tokens": 16, field: true});
        let answer = site
            .post("/v1/outcomes", json!({"model": MODEL, "outcomes": [outcome]}))
            .await;
        assert_eq!(answer.status, status, "{field}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_as_they_are_served() {
    let mut site = site(&[]).await;
    // A pool is no worker.
    let pool = pool_of_instance("store").unwrap();
    site.tell_of(pool, 0, Tier::DEVICE, stored(2), 1).await;
    let list = site.http.get("/v1/models").await.json();
    let namespace = namespace().to_string();
    let expected = json!({
        "id": MODEL, "object": "model", "owned_by": "kvatlas", "tenant": "default", "namespace": namespace,
        "block_size": 16, "workers": 2,
    });
    assert_eq!(list, json!({ "object": "list", "data": [expected] }));
}

#[tokio::test(flavor = "multi_thread")]
async fn dialects_count_tokens() {
    let mut site = site(&[]).await;
    // An empty name counts as absent, and an absent field may be null.
    let asked = json!({
        "model": MODEL, "seq_hashes": chain(5), "block_hash": null, "block_size": 16, "instance_id": "",
    });
    let answer = site.post("/query_by_hash", asked).await;
    assert_eq!(answer.json()["default"]["7"]["longest_matched"], 48);
    let signed: Vec<i64> = blocks(5).iter().map(|hash| hash.as_u64().cast_signed()).collect();
    let dynamo = json!({
        "scores": {"10.0.0.1:8000": {"0": 64, "1": 32}, "7": {"0": 48}},
        "frequencies": [],
        "instances": {
            "10.0.0.1:8000": {"longest_matched": 64, "gpu": 64, "cpu": 64, "disk": 64, "dp": {"0": 64, "1": 32}},
            "7": {"longest_matched": 48, "gpu": 48, "cpu": 48, "disk": 48, "dp": {"0": 48}},
        }
    });
    let asked = site
        .post("/query", json!({"model_name": MODEL, "token_ids": tokens(5)}))
        .await;
    assert_eq!(
        (asked.status, asked.is_exact(), asked.json()),
        (200, true, dynamo.clone())
    );
    let asked =
        json!({"model_name": MODEL, "block_hashes": signed, "cache_salt": null, "tenant_id": "ignored"});
    assert_eq!(site.post("/query_by_hash", asked).await.json(), dynamo);

    let figures = json!({"longest_matched": 48, "GPU": 48, "CPU": 48, "DISK": 48, "DP": {"0": 48}});
    let mooncake = json!({"default": {"7": figures}});
    let asked = json!({"model": MODEL, "token_ids": tokens(5), "block_size": 16, "instance_id": "7"});
    assert_eq!(site.post("/query", asked).await.json(), mooncake);
    let asked = json!({"model": MODEL, "seq_hashes": chain(5), "block_size": 16, "instance_id": "7"});
    assert_eq!(site.post("/query_by_hash", asked).await.json(), mooncake);

    // The worker has four blocks on the host, five on the disk, and three of them on the device.
    for (seq, tier, count) in [(2, 1, 4), (3, 2, 5)] {
        site.tell("7", 0, Tier::new(tier).unwrap(), stored(count), seq)
            .await;
    }
    let asked = site
        .post("/query", json!({"model_name": MODEL, "token_ids": tokens(5)}))
        .await
        .json();
    assert_eq!(
        asked["instances"]["7"],
        json!({"longest_matched": 80, "gpu": 48, "cpu": 64, "disk": 80, "dp": {"0": 48}})
    );
    assert_eq!(asked["scores"]["7"], json!({"0": 48}));
    // A clear of the device leaves no block in other tiers.
    site.tell("7", 0, Tier::DEVICE, Event::Cleared, 4).await;
    site.tell("7", 0, Tier::DEVICE, stored(1), 5).await;
    let asked = site
        .post("/query", json!({"model_name": MODEL, "token_ids": tokens(5)}))
        .await
        .json();
    assert_eq!(asked["instances"]["7"]["gpu"], 16);
}

/// Returns the layout in the answer of `/lookup`, and whether the answer is certain.
async fn layout(site: &mut Site, body: &Value) -> (Value, bool) {
    let answer = site.http.post("/lookup", body).await;
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    let told = answer.json();
    assert!(told["event_id"].as_str().unwrap().starts_with("Lookup"), "{told}");
    (told["layout_info"].clone(), answer.is_exact())
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_of_lmcache_name_the_nearest_tier() {
    let mut site = site(&[]).await;
    // The worker has four blocks on the host, and three of them on the device.
    site.tell("7", 0, Tier::new(1).unwrap(), stored(4), 2).await;
    let expected = json!({"10.0.0.1:8000": ["GPU", 64], "7": ["LocalCPUBackend", 64]});
    let plain = json!({"tokens": tokens(5)});
    let named = json!({"tokens": tokens(5), "model": MODEL, "tenant_id": "", "lora_name": ""});
    for asked in [&plain, &named] {
        assert_eq!(layout(&mut site, asked).await, (expected.clone(), true));
    }
    for nobody in [
        json!({"tokens": tokens(5), "cache_salt": "red"}),
        json!({"tokens": []}),
        json!({"tokens": [3]}),
    ] {
        assert_eq!(layout(&mut site, &nobody).await.0, json!({}));
    }
    site.tell("7", 0, Tier::new(2).unwrap(), stored(5), 3).await;
    let (told, _) = layout(&mut site, &plain).await;
    assert_eq!(told["7"], json!(["LocalDiskBackend", 80]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lookup_of_lmcache_has_to_name_one_of_several_models() {
    let mut site = site(&[]).await;
    let plain = json!({"tokens": tokens(5)});
    let other = ModelKey::new("other").namespace().unwrap();
    let worker = WorkerName::new("9").unwrap();
    let mut publisher = Publisher::new(site.client.nats.clone(), &subjects(), &other, &worker, 0);
    publisher.publish(Tier::DEVICE, vec![stored(1)]).await.unwrap();
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(30);
    let refused = loop {
        let answer = site.http.post("/lookup", &plain).await;
        if answer.status != 200 {
            break answer;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "the other model is not known"
        );
    };
    assert_eq!(refused.status, 400);
    let text = "several models are known; send model, and tenant_id if it has one";
    assert_eq!(refused.json()["error"], text);
    // The default tenant is none.
    let default = json!({"tokens": tokens(5), "tenant_id": "default"});
    assert_eq!(site.post("/lookup", default).await.json()["error"], text);
    let named = json!({"tokens": tokens(5), "model": MODEL});
    assert_eq!(layout(&mut site, &named).await.0["7"], json!(["GPU", 48]));
    let other = json!({"tokens": tokens(5), "model": "other"});
    assert_eq!(layout(&mut site, &other).await.0, json!({"9": ["GPU", 16]}));
    // The other model's last worker goes, so only one model can be meant.
    publisher
        .publish(Tier::DEVICE, vec![Event::Goodbye])
        .await
        .unwrap();
    eventually("the other model's worker has gone", async || {
        let answer = site.http.post("/lookup", &plain).await;
        (answer.status == 200).then(|| assert_eq!(answer.json()["layout_info"]["7"], json!(["GPU", 48])))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lookup_without_a_model_is_not_certain_while_events_of_another_model_are_dropped() {
    let mut site = site(&[("limits.max_namespaces", "1")]).await;
    let plain = json!({"tokens": tokens(5)});
    assert!(layout(&mut site, &plain).await.1);
    let other = ModelKey::new("other").namespace().unwrap();
    let worker = WorkerName::new("9").unwrap();
    let mut publisher = Publisher::new(site.client.nats.clone(), &subjects(), &other, &worker, 0);
    publisher.publish(Tier::DEVICE, vec![stored(5)]).await.unwrap();
    eventually("the dropped events are noticed", async || {
        (!layout(&mut site, &plain).await.1).then_some(())
    })
    .await;
    let named = json!({"tokens": tokens(5), "model": MODEL});
    assert!(layout(&mut site, &named).await.1, "this model has all its events");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_in_doubt_shows_in_the_header_whether_it_has_the_prompt_or_not() {
    let mut site = site(&[]).await;
    let pool = pool_of_instance("store").unwrap();
    let doubted = Event::Doubted(DegradedReasons::of(DegradedReason::HostGap));
    site.tell_of(pool.clone(), 0, Tier::DEVICE, stored(2), 1).await;
    let prompts = [json!({"tokens": tokens(5)}), json!({"tokens": vec![7; 80]})];
    for asked in &prompts {
        assert!(layout(&mut site, asked).await.1);
    }
    site.tell_of(pool, 0, Tier::DEVICE, doubted, 2).await;
    for asked in &prompts {
        assert!(!layout(&mut site, asked).await.1, "{asked}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doubt_shows_in_the_header() {
    let mut site = site(&[("resync.concurrency", "0")]).await;
    // Batch 2 is missing for good.
    site.tell("7", 0, Tier::DEVICE, stored(3), 3).await;
    for (path, body) in [
        ("/v1/query", json!({"model": MODEL, "tokens": tokens(1)})),
        ("/query", json!({"model_name": MODEL, "token_ids": tokens(1)})),
        (
            "/query",
            json!({"model": MODEL, "token_ids": tokens(1), "block_size": 16}),
        ),
        ("/lookup", json!({"tokens": tokens(1)})),
    ] {
        let answer = site.post(path, body).await;
        assert_eq!((answer.status, answer.is_exact()), (200, false), "{path}");
    }
    // The lost batch may be about any blocks, even those that no holder is known to have.
    let others = json!([[7_u32; 16]].concat());
    for (path, body) in [
        ("/v1/query", json!({"model": MODEL, "tokens": others})),
        ("/query", json!({"model_name": MODEL, "token_ids": others})),
    ] {
        let answer = site.post(path, body).await;
        assert_eq!((answer.status, answer.is_exact()), (200, false), "{path}");
    }
    // The query asks only for the holders of another instance.
    let asked =
        json!({"model": MODEL, "token_ids": tokens(1), "block_size": 16, "instance_id": "10.0.0.1:8000"});
    assert!(site.post("/query", asked).await.is_exact());
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_that_cannot_be_found_by_tokens_show_in_the_header() {
    let mut site = site(&[]).await;
    let foreign = StoredBlocks {
        content: Some(BlockContent::BlockHashes(blocks(3))),
        ..StoredBlocks::by_sequence(None, None, hashes(900, 3))
    };
    site.tell("8", 0, Tier::DEVICE, Event::Stored(foreign), 1).await;
    for (path, body, is_exact) in [
        ("/v1/query", json!({"model": MODEL, "tokens": tokens(5)}), false),
        (
            "/v1/query",
            json!({"model": MODEL, "queries": [{"tokens": tokens(5)}]}),
            false,
        ),
        (
            "/query",
            json!({"model_name": MODEL, "token_ids": tokens(5)}),
            false,
        ),
        (
            "/query",
            json!({"model": MODEL, "token_ids": tokens(5), "block_size": 16}),
            false,
        ),
        (
            "/query_by_hash",
            json!({"model_name": MODEL, "block_hashes": blocks(5)}),
            false,
        ),
        // A query by the engine's own hashes finds the block.
        (
            "/query_by_hash",
            json!({"model": MODEL, "seq_hashes": hashes(900, 3), "block_size": 16}),
            true,
        ),
    ] {
        let answer = site.post(path, body.clone()).await;
        assert_eq!(
            (answer.status, answer.is_exact()),
            (200, is_exact),
            "{path} {body}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_have_typed_answers() {
    let mut site = site(&[("http.max_body_bytes", "4096"), ("queries.max_depth_blocks", "8")]).await;
    for (path, body, status) in [
        ("/v1/query", json!({"model": "other", "tokens": [1]}), 404),
        ("/v1/query", json!({"tokens": [1]}), 400),
        ("/v1/query", json!({"model": MODEL}), 400),
        ("/v1/query", json!({"model": MODEL, "tokens": [1], "v": 2}), 400),
        ("/v1/query", json!({"model": MODEL, "tokens": [-1]}), 400),
        ("/v1/query", json!({"model": MODEL, "tokens": tokens(9)}), 413),
        ("/v1/query", json!([1]), 400),
        ("/v1/nothing", json!({}), 404),
        ("/query", json!({"model_name": "other", "token_ids": [1]}), 404),
        (
            "/query",
            json!({"model_name": MODEL, "model": MODEL, "token_ids": [1]}),
            400,
        ),
        ("/query", json!({"model_name": MODEL}), 400),
        // An array in place of an object is refused, because its values have no names.
        ("/query", json!([]), 400),
        (
            "/query",
            json!([
                null,
                MODEL,
                [1],
                null,
                null,
                null,
                null,
                null,
                null,
                null,
                null,
                null,
                null
            ]),
            400,
        ),
        (
            "/query",
            json!({"model": MODEL, "token_ids": [1], "block_size": 16, "instance_id": -1}),
            400,
        ),
        ("/query", json!({"model": MODEL, "token_ids": [1]}), 400),
        (
            "/query",
            json!({"model": MODEL, "token_ids": [1], "block_size": 32}),
            400,
        ),
        (
            "/query",
            json!({"model": MODEL, "token_ids": [1], "block_size": 16, "lora_id": 3}),
            400,
        ),
        // Neither route supports the number of an adapter. Without it, the answer would be about the base model.
        (
            "/query",
            json!({"model_name": MODEL, "token_ids": [1], "lora_id": 3}),
            400,
        ),
        (
            "/query_by_hash",
            json!({"model_name": MODEL, "block_hashes": [1], "cache_salt": "x"}),
            400,
        ),
        ("/lookup", json!({"tokens": [1], "model": "other"}), 404),
        ("/lookup", json!({"tokens": [1], "tenant_id": "acme"}), 400),
        ("/lookup", json!({}), 400),
        ("/lookup", json!({"tokens": [-1]}), 400),
        ("/lookup", json!({"tokens": tokens(9)}), 413),
        // Hashes of blocks of another size cannot be found.
        (
            "/query_by_hash",
            json!({"model_name": MODEL, "block_hashes": [1], "block_size": 32}),
            400,
        ),
        // The request names the namespace, so its queries must not.
        (
            "/v1/query",
            json!({"model": MODEL, "queries": [{"model": "other", "tokens": [1]}]}),
            400,
        ),
        (
            "/v1/query",
            json!({"model": MODEL, "queries": [{"namespace": "other", "tokens": [1]}]}),
            400,
        ),
        (
            "/query",
            json!({"model_name": MODEL, "token_ids": [0], "x": "y".repeat(5000)}),
            413,
        ),
        (
            "/register",
            json!({"instance_id": 1, "endpoint": "tcp://a:1", "model_name": MODEL, "block_size": 16}),
            404,
        ),
        ("/nothing", json!({}), 404),
        ("/workers", json!({}), 405),
    ] {
        let answer = site.post(path, body.clone()).await;
        assert_eq!(
            answer.status,
            status,
            "{path} {body}: {}",
            String::from_utf8_lossy(&answer.body)
        );
        let error = &answer.json()["error"];
        match path.starts_with("/v1/") {
            true => assert!(error["code"].is_u64() && error["text"].is_string(), "{error}"),
            false => assert!(error.is_string(), "{error}"),
        }
        if status == 413 {
            // The rest of a refused body must not be read as a request, so a new connection is needed.
            site.http = HttpClient::connect(site.daemon.http_address().unwrap()).await;
        }
    }
    let batch = json!({"model": MODEL, "queries": [{"tokens": tokens(1)}, {"tokens": tokens(9)}]});
    let answer = site.post("/v1/query", batch).await;
    assert_eq!(answer.json()["results"][1]["error"]["code"], 413);
    assert_eq!((answer.status, answer.is_exact()), (200, false));
    for body in [&b"{"[..], b"", b"\xff", b"{\"model\":\"a\",\"tokens\":[1e99]}"] {
        assert_eq!(site.http.ask("POST", "/v1/query", body).await.status, 400);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_guards_every_route_but_health() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "s3cret\n").unwrap();
    let mut site = site(&[("http.token_file", path.to_str().unwrap())]).await;
    let asked = json!({"model": MODEL, "tokens": tokens(1)});
    let refused = site.post("/v1/query", asked.clone()).await;
    assert_eq!(
        (refused.status, refused.headers["www-authenticate"].as_str()),
        (401, "Bearer")
    );
    for path in ["/workers", "/dump", "/metrics", "/openapi.json", "/nothing"] {
        assert_eq!(site.http.get(path).await.status, 401, "{path}");
    }
    assert_eq!(site.http.get("/health").await.status, 200);
    let mut http = HttpClient::connect(site.daemon.http_address().unwrap())
        .await
        .with_token("s3cret");
    assert_eq!(http.post("/v1/query", &asked).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_and_times_are_bounded() {
    let site = site(&[
        ("http.max_connections", "2"),
        ("http.idle_timeout_ms", "200"),
        ("http.request_timeout_ms", "50"),
    ])
    .await;
    let address = site.daemon.http_address().unwrap();
    // The idle connection of the site is closed after the time limit.
    let mut idle = site.http;
    assert!(idle.is_closed().await);
    let mut slow = HttpClient::connect(address).await;
    slow.send(b"POST /v1/query HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        .await;
    let answer = slow.answer().await;
    assert_eq!(answer.status, 408);
    // Two connections have begun a request. A third connection takes the place of the first.
    let busy = "POST /v1/query HTTP/1.1\r\nHost: a\r\n";
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = HttpClient::connect(address).await;
        client.send(busy.as_bytes()).await;
        held.push(client);
    }
    let mut third = HttpClient::connect(address).await;
    assert_eq!(third.get("/health").await.status, 200);
    assert!(held[0].is_closed().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_and_dumps_show_what_is_known() {
    let mut site = site(&[]).await;
    // A pool is not a worker, even if they have the same name.
    let pool = pool_of_instance("7").unwrap();
    site.tell_of(pool, 0, Tier::DEVICE, stored(2), 1).await;
    let workers = site
        .http
        .get(&format!("/workers?model_name={}", MODEL.replace('/', "%2F")))
        .await
        .json();
    let listed: Vec<_> = workers
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| {
            (
                worker["instance_id"].clone(),
                worker["source"].clone(),
                worker["exact"].clone(),
            )
        })
        .collect();
    assert_eq!(
        listed,
        [
            (json!("10.0.0.1:8000"), json!("nats"), json!(true)),
            (json!(7), json!("nats"), json!(true))
        ]
    );
    assert_eq!(site.http.get("/workers?model_name=other").await.json(), json!([]));

    let dump = site.http.get("/dump").await.json();
    let model = &dump[format!("{MODEL}:default")];
    assert_eq!(model["block_size"], 16);
    let of_seven: Vec<_> = model["events"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["instance_id"] == "7")
        .collect();
    let expected: Vec<String> = chain(3).iter().map(SequenceHash::to_string).collect();
    assert_eq!(of_seven.len(), 1);
    assert_eq!(of_seven[0]["sequence_hashes"], json!(expected));
    // A further dump is answered after the first one.
    assert_eq!(site.http.get("/dump").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_called_as_another_instance_keeps_its_own_blocks() {
    let mut site = site(&[]).await;
    // A publisher is named as the instance `gpu_0` is called, whose worker is `gpu_u0`.
    for (worker, count) in [("gpu_0", 2), ("gpu_u0", 1)] {
        let worker = WorkerName::new(worker).unwrap();
        site.tell_of(worker, 0, Tier::DEVICE, stored(count), 1).await;
    }
    let asked = json!({"model_name": MODEL, "token_ids": tokens(5)});
    let scores = &site.post("/query", asked).await.json()["scores"];
    assert_eq!(
        (&scores["gpu_0"]["0"], &scores["gpu_u0"]["0"]),
        (&json!(32), &json!(16))
    );
    for (instance, matched) in [("gpu_0", 32), ("gpu_u0", 16), ("7", 48)] {
        let asked =
            json!({"model": MODEL, "token_ids": tokens(5), "block_size": 16, "instance_id": instance});
        let answer = site.post("/query", asked).await;
        let known = &answer.json()["default"];
        assert!(
            answer.is_exact() && known.as_object().unwrap().len() == 1,
            "{known}"
        );
        assert_eq!(known[instance]["longest_matched"], matched, "{instance}");
    }
    let workers = site.http.get("/workers").await.json();
    let workers = workers.as_array().unwrap().iter();
    let names: Vec<&Value> = workers.map(|worker| &worker["instance_id"]).collect();
    assert_eq!(
        names,
        [
            &json!("10.0.0.1:8000"),
            &json!(7),
            &json!("gpu_0"),
            &json!("gpu_u0")
        ]
    );
    let dump = site.http.get("/dump").await.json();
    let events = dump[format!("{MODEL}:default")]["events"]
        .as_array()
        .unwrap()
        .iter();
    let of_two: Vec<_> = events.filter(|event| event["instance_id"] == "gpu_u0").collect();
    assert_eq!(of_two.len(), 1);
    assert_eq!(of_two[0]["sequence_hashes"].as_array().unwrap().len(), 1);
    // A name stands for the same worker where only one of them has the prompt.
    let other = hashes(1 << 40, 1);
    let event = Event::Stored(StoredBlocks::by_sequence(None, None, other.clone()));
    site.tell_of(WorkerName::new("gpu_u0").unwrap(), 0, Tier::DEVICE, event, 2)
        .await;
    for (instance, figures) in [("gpu_0", json!(null)), ("gpu_u0", json!(16))] {
        let asked = json!({"model": MODEL, "seq_hashes": other, "block_size": 16, "instance_id": instance});
        let answer = site.post("/query_by_hash", asked).await;
        let known = &answer.json()["default"][instance]["longest_matched"];
        assert_eq!((answer.is_exact(), known), (true, &figures), "{instance}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_a_dump_keeps_nobody_else_from_one() {
    let site = site(&[("http.request_timeout_ms", "200")]).await;
    // The dump has more bytes than the socket and the waiting pieces can hold.
    for seq in 1..=20 {
        let blocks = hashes(seq << 32, 50_000);
        let event = Event::Stored(StoredBlocks::by_sequence(None, None, blocks));
        site.tell("8", 0, Tier::DEVICE, event, seq).await;
    }
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let address = site.daemon.http_address().unwrap();
    let mut idle = socket.connect(address).await.unwrap();
    let request = b"GET /dump HTTP/1.1\r\nhost: kvatlas\r\n\r\n";
    idle.write_all(request).await.unwrap();
    // The answer has begun.
    idle.readable().await.unwrap();
    let is_free = async || {
        let mut other = HttpClient::connect(address).await;
        (other.get("/dump").await.status == 200).then_some(())
    };
    eventually("the dump is given up", is_free).await;
    // The answer lacks its last chunk, so the client notices that the answer is not complete.
    let mut answer = Vec::new();
    let _ = idle.read_to_end(&mut answer).await;
    assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"));
    assert!(!answer.ends_with(b"\r\n0\r\n\r\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_have_the_form_of_the_document() {
    let mut site = site(&[]).await;
    let document = site.http.get("/openapi.json").await.json();
    let answers = [
        (
            "post",
            "/v1/query",
            "200",
            site.post(
                "/v1/query",
                json!({"model": MODEL, "tokens": tokens(5), "explain": true, "tiers": true}),
            )
            .await,
        ),
        (
            "post",
            "/v1/query",
            "200",
            site.post("/v1/query", json!({"model": MODEL, "queries": [{"tokens": [1]}]}))
                .await,
        ),
        (
            "post",
            "/v1/query",
            "default",
            site.post("/v1/query", json!({})).await,
        ),
        (
            "get",
            "/v1/status",
            "200",
            site.http.get(&format!("/v1/status?model={MODEL}")).await,
        ),
        (
            "post",
            "/query",
            "200",
            site.post("/query", json!({"model_name": MODEL, "token_ids": tokens(5)}))
                .await,
        ),
        (
            "post",
            "/query",
            "200",
            site.post(
                "/query",
                json!({"model": MODEL, "token_ids": tokens(5), "block_size": 16}),
            )
            .await,
        ),
        ("post", "/query", "default", site.post("/query", json!({})).await),
        (
            "post",
            "/lookup",
            "200",
            site.post("/lookup", json!({"tokens": tokens(5)})).await,
        ),
        ("get", "/workers", "200", site.http.get("/workers").await),
        ("get", "/dump", "200", site.http.get("/dump").await),
        ("get", "/health", "200", site.http.get("/health").await),
    ];
    for (method, path, status, answer) in answers {
        let mut response = &document["paths"][path][method]["responses"][status];
        if let Some(reference) = response["$ref"].as_str() {
            response = document.pointer(&reference[1..]).unwrap();
        }
        let schema = &response["content"]["application/json"]["schema"];
        check(&document, schema, &answer.json()).unwrap_or_else(|fault| panic!("{path} {status}: {fault}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_taken_has_the_form_of_the_document() {
    let mut site = site(&[]).await;
    let document = site.http.get("/openapi.json").await.json();
    let hash = chain(1)[0].to_string();
    for (path, body) in [
        (
            "/v1/query",
            json!({"v": null, "model": MODEL, "namespace": null, "tenant": null, "tokens": tokens(1), "limit": null, "queries": null}),
        ),
        (
            "/v1/query",
            json!({"model": MODEL, "queries": [{"tokens": tokens(1), "workers": null, "explain": null}]}),
        ),
        (
            "/query",
            json!({"model": MODEL, "token_ids": tokens(1), "block_size": 16, "lora_id": 0, "tenant_id": null, "instance_id": null}),
        ),
        (
            "/query",
            json!({"model": MODEL, "token_ids": tokens(1), "block_size": 16, "lora_id": null, "instance_id": 7}),
        ),
        (
            "/query",
            json!({"model_name": MODEL, "token_ids": tokens(1), "block_size": null, "routing_group": null, "tenant_id": null}),
        ),
        (
            "/query_by_hash",
            json!({"model": MODEL, "block_hash": [hash], "block_size": 16, "tenant_id": null, "instance_id": null}),
        ),
        (
            "/query_by_hash",
            json!({"model_name": MODEL, "block_hashes": [1], "block_size": 16, "cache_salt": null, "routing_group": null}),
        ),
        (
            "/lookup",
            json!({"tokens": tokens(1), "model": null, "tenant_id": null, "lora_name": null, "cache_salt": null}),
        ),
    ] {
        let answer = site.post(path, body.clone()).await;
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.json());
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        check(&document, schema, &body).unwrap_or_else(|fault| panic!("{path} {body}: {fault}"));
    }
}

/// Whether a value fits a schema. Supports the part of JSON Schema that the document uses.
fn check(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document
            .pointer(&reference[1..])
            .ok_or_else(|| format!("no {reference}"))?;
        return check(document, target, value);
    }
    if let Some(forms) = schema["oneOf"].as_array() {
        let faults: Vec<String> = forms
            .iter()
            .filter_map(|form| check(document, form, value).err())
            .collect();
        let fitting = forms.len() - faults.len();
        // An empty object fits several kinds of answers.
        return if fitting >= 1 {
            Ok(())
        } else {
            Err(faults.join("; or "))
        };
    }
    for form in schema["allOf"].as_array().into_iter().flatten() {
        check(document, form, value)?;
    }
    if let Some(forms) = schema["anyOf"].as_array()
        && forms.iter().all(|form| check(document, form, value).is_err())
    {
        return Err(format!("{value} is of none of the forms {forms:?}"));
    }
    check_type(&schema["type"], value)?;
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        return Err(format!("{value} is none of {allowed:?}"));
    }
    if let Some(items) = value.as_array() {
        return items
            .iter()
            .try_for_each(|item| check(document, &schema["items"], item));
    }
    let Some(fields) = value.as_object() else {
        return Ok(());
    };
    for name in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(name.as_str().unwrap()) {
            return Err(format!("{name} is missing in {value}"));
        }
    }
    for (name, field) in fields {
        match (&schema["properties"][name], &schema["additionalProperties"]) {
            (Value::Null, Value::Bool(false)) => return Err(format!("{name} is not in the document")),
            (Value::Null, Value::Null) => {}
            (Value::Null, others) => check(document, others, field)?,
            (known, _) => check(document, known, field).map_err(|fault| format!("{name}: {fault}"))?,
        }
    }
    Ok(())
}

fn check_type(types: &Value, value: &Value) -> Result<(), String> {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_allowed = match types {
        Value::Null => true,
        Value::Array(types) => types.iter().any(|name| name == found),
        name => name == found,
    };
    is_allowed
        .then_some(())
        .ok_or_else(|| format!("{value} is not {types}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_takes_no_more_memory_than_its_limits_let_it() {
    let mut site = site(&[("http.max_body_bytes", "1 MiB")]).await;
    // Each of these queries has two bytes. Without a limit while they are read, each would take hundreds of bytes of
    // memory.
    let bomb = format!(
        "{{\"model\":\"{MODEL}\",\"queries\":[{}{{}}]}}",
        "{},".repeat(70_000)
    );
    let answer = site.http.ask("POST", "/v1/query", bomb.as_bytes()).await;
    assert_eq!(answer.status, 400);
    let text = String::from_utf8(answer.body).unwrap();
    assert!(text.contains("at most 65536 queries"), "{text}");
    // This smaller number of queries is read, and then refused by the limit on queries in one message.
    let many = json!({ "model": MODEL, "queries": vec![json!({ "sequence_hashes": [1] }); 300] });
    assert_eq!(site.http.post("/v1/query", &many).await.status, 413);
    for field in ["lora_name", "cache_salt"] {
        let long = "x".repeat(1025);
        let query = json!({ "model_name": MODEL, "token_ids": tokens(1), field: long });
        let answer = site.http.post("/query", &query).await;
        assert_eq!(answer.status, 413, "{field}");
        let allowed = "x".repeat(1024);
        let query = json!({ "model_name": MODEL, "token_ids": tokens(1), field: allowed });
        assert_eq!(site.http.post("/query", &query).await.status, 200, "{field}");
    }
    site.daemon.stop().await;
}

/// Sends a request whose body has `length` bytes, but sends only `sent` of them. Returns the connection when the server
/// waits for the rest.
async fn unfinished(address: std::net::SocketAddr, length: usize, sent: usize) -> tokio::net::TcpStream {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/query HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server sends this when it begins to read the body.
    let mut answer = [0; 25];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 100 Continue\r\n\r\n");
    let _ = stream.write_all(&vec![b' '; sent]).await;
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_do_not_come_keep_nobody_out() {
    let site = site(&[
        ("http.max_connections", "4"),
        ("http.max_body_bytes", "1 MiB"),
        ("http.max_receiving_bytes", "2 MiB"),
    ])
    .await;
    let address = site.daemon.http_address().unwrap();
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(unfinished(address, 1000, 0).await);
    }
    // All places are taken by requests that wait for their clients. The oldest connection is closed for a new one.
    let mut http = HttpClient::connect(address).await;
    assert_eq!(http.get("/health").await.status, 200);
    drop(held);
    // Bodies that end too early do not take memory from others.
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(unfinished(address, 1 << 20, 900_000).await);
    }
    let refused = async || {
        let mut http = HttpClient::connect(address).await;
        let metrics = http.get("/metrics").await;
        let text = String::from_utf8(metrics.body).unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with("kvatlas_http_bodies_refused_total"));
        let count = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        count.filter(|count| *count >= 1.0)
    };
    eventually("a body was given up", refused).await;
    let asked = json!({"model": MODEL, "sequence_hashes": [1]});
    let mut http = HttpClient::connect(address).await;
    let answer = http.post("/v1/query", &asked).await;
    assert_ne!(answer.status, 503, "{}", String::from_utf8_lossy(&answer.body));
}
