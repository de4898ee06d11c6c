//! Engines that are given by the address of their server. The bridge asks the server for everything else, and asks
//! again after each new connection.
//!
//! The servers are simulated, with the answers of vLLM 0.33's front end and SGLang's. The publishers behind them are
//! real.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use kvatlas_bridge::{Bridge, EngineDefaults, parse_engine};
use kvatlas_process::registry::{EngineRegistry, EngineStatus, MeantEngines, RegisterRefusal, ServerState};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::python::{Publishers, Spec, python};
use super::{Site, stored};
use crate::support::eventually;
use crate::support::http::HttpClient;
use crate::support::process::Process;

/// Answers of a simulated server, one for each route. If an answer is null, the server answers with status 404.
#[derive(Clone)]
pub(super) struct Answers {
    sources: Value,
    info: Value,
    models: Value,
    /// Answer to the request to drop the cache.
    pub(super) reset: Value,
}

impl Answers {
    /// Makes the answers of a server that belongs to no engine.
    pub(super) fn none() -> Self {
        Self {
            sources: Value::Null,
            info: Value::Null,
            models: Value::Null,
            reset: Value::Null,
        }
    }

    /// Makes the answers of a vLLM server whose events are off.
    pub(super) fn without_events(publishers: &Publishers) -> Self {
        Self {
            sources: json!({}),
            ..Self::vllm(publishers, &[0])
        }
    }

    /// Makes the answers of a vLLM server whose ranks are these engines, in this order.
    pub(super) fn vllm(publishers: &Publishers, engines: &[usize]) -> Self {
        let source = |engine: usize| {
            let port_of = |endpoint: &str| endpoint.rsplit_once(':').unwrap().1.to_owned();
            let replay = publishers.replay(engine);
            json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{}", port_of(&publishers.endpoint(engine))),
                "replay_endpoint": replay.map(|replay| format!("tcp://*:{}", port_of(&replay))), "buffer_steps": 10_000, "hwm": 100_000,
                "max_queue_size": 100_000, "topic": ""})
        };
        let ranks = engines.iter().enumerate();
        Self {
            sources: ranks
                .map(|(rank, engine)| (rank.to_string(), source(*engine)))
                .collect(),
            info: Value::Null,
            models: models("m"),
            reset: Value::Null,
        }
    }
}

fn models(name: &str) -> Value {
    json!({"object": "list", "data": [{"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": name, "parent": null}]})
}

/// Simulated server of an engine. It ends when the value is dropped.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    pub(super) answers: Arc<Mutex<Answers>>,
    asked: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Shared = (Arc<Mutex<Answers>>, Arc<AtomicUsize>);

fn answer(body: Value) -> Response {
    match body {
        Value::Null => StatusCode::NOT_FOUND.into_response(),
        body => axum::Json(body).into_response(),
    }
}

impl Server {
    pub(super) async fn start(answers: Answers) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), answers).await
    }

    async fn start_at(address: SocketAddr, answers: Answers) -> Self {
        // A connection of another test may have the port for a moment.
        let listener = eventually("the address is free", async || {
            tokio::net::TcpListener::bind(address).await.ok()
        })
        .await;
        let address = listener.local_addr().unwrap();
        let (answers, asked) = (Arc::new(Mutex::new(answers)), Arc::new(AtomicUsize::new(0)));
        let shared: Shared = (Arc::clone(&answers), Arc::clone(&asked));
        let sources = |State((answers, asked)): State<Shared>| async move {
            asked.fetch_add(1, Ordering::Relaxed);
            answer(answers.lock().sources.clone())
        };
        let info = |State((answers, _)): State<Shared>| async move { answer(answers.lock().info.clone()) };
        let models =
            |State((answers, _)): State<Shared>| async move { answer(answers.lock().models.clone()) };
        let reset = |State((answers, _)): State<Shared>| async move { answer(answers.lock().reset.clone()) };
        let routes = Router::new()
            .route("/kv_event_sources", get(sources))
            .route("/server_info", get(info))
            .route("/v1/models", get(models))
            .route("/reset_prefix_cache", post(reset))
            .with_state(shared);
        let task = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self {
            address,
            answers,
            asked,
            task,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Makes the bridge follow the engines that `text` describes in the form of `--engine`.
pub(super) fn follow(bridge: &Bridge, text: &str) -> Result<(), RegisterRefusal> {
    for engine in parse_engine(text, &EngineDefaults::default()).unwrap() {
        bridge.register_given(engine)?;
    }
    Ok(())
}

/// Waits until the error of the bridge's only server satisfies `is_it`.
pub(super) async fn troubled(bridge: &Bridge, what: &str, is_it: impl Fn(&str) -> bool) -> ServerState {
    eventually(what, async || {
        let state = bridge.servers().remove(0);
        let is_it = state.last_error.as_deref().is_some_and(&is_it);
        is_it.then_some(state)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_is_enough_for_an_engine_with_ranks() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    publishers.publish(1, &json!([stored(1, 0, 2)]));
    let server = Server::start(Answers::vllm(&publishers, &[0, 1])).await;
    follow(&site.bridge, &format!("gpu-0={}", server.url())).unwrap();
    eventually("both ranks are exact", async || {
        let status = site.client.queries.status(&super::namespace()).await.ok()?;
        let exact = status.holders.iter().filter(|holder| holder.exact);
        let blocks: Vec<_> = exact.map(|holder| (holder.rank, holder.blocks)).collect();
        (blocks == [(0, 3), (1, 2)]).then_some(())
    })
    .await;
    let state = site.bridge.servers().remove(0);
    assert_eq!((state.engines.len(), state.last_error), (2, None));
    // The block size is taken from the first block.
    assert!(
        site.bridge
            .engines()
            .iter()
            .all(|state| state.engine.block_size == 4)
    );
    publishers.publish(1, &json!([stored(1, 2, 2)]));
    eventually("what comes later is known", async || {
        let holders = site.ask(1, 64).await;
        let found = holders.iter().find(|holder| holder.rank == 1)?;
        (found.matched_blocks == 4 && found.exact).then_some(())
    })
    .await;
    // Removing one rank removes the whole server.
    let removed = site.bridge.unregister(&MeantEngines::Named {
        instance: "gpu-0".to_owned(),
        model: "m".to_owned(),
        tenant: None,
        rank: Some(1),
    });
    assert_eq!(removed.len(), 2);
    assert!(site.bridge.servers().is_empty() && site.bridge.engines().is_empty());
    eventually("daemons forget it", async || {
        let status = site.client.queries.status(&super::namespace()).await.ok()?;
        status.holders.is_empty().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_sglang_tells_ports_and_block_size() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let port = |endpoint: String| -> u16 { endpoint.rsplit_once(':').unwrap().1.parse().unwrap() };
    let events = json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port(publishers.endpoint(0)), "topic": "",
        "block_size": 4, "dp_size": 1, "replay_endpoint_port_base": port(publishers.replay(0).unwrap())});
    let answers = Answers {
        sources: Value::Null,
        info: json!({"model_path": "/models/m", "kv_events": events}),
        models: models("m"),
        reset: Value::Null,
    };
    let server = Server::start(answers).await;
    // An engine without a name gets the address of its server as its name.
    follow(&site.bridge, &server.url()).unwrap();
    let name = kvatlas_core::wire::worker_of_instance(&server.address.to_string()).unwrap();
    site.settles(name.as_str(), 3, &[]).await;
    let engine = site.bridge.engines().remove(0).engine;
    assert_eq!(engine.format, kvatlas_engines::Format::Sglang);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_yet_is_asked_again() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let answers = Answers::vllm(&publishers, &[0]);
    let address = Server::start(answers.clone()).await.address;
    follow(&site.bridge, &format!("gpu-0=http://{address},block_size=4")).unwrap();
    let state = troubled(&site.bridge, "it is refused", |error| error.contains("refused")).await;
    assert!(state.engines.is_empty() && site.bridge.engines().is_empty());
    let _server = Server::start_at(address, answers).await;
    site.settles("gpu-0", 3, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_server_does_not_answer_is_out_of_sight() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    // Connections are made, and no question is answered.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    for name in ["gpu-0", "gpu-1"] {
        follow(
            &site.bridge,
            &format!("{name}=http://{address},model=m,block_size=4"),
        )
        .unwrap();
    }
    site.settles("gpu-0", 0, &["unverified", "upstream_lost"]).await;
    site.settles("gpu-1", 0, &["unverified", "upstream_lost"]).await;
    let is_told = |state: &ServerState| state.last_error.is_some() && state.engines.is_empty();
    assert!(site.bridge.servers().iter().all(is_told));
    site.bridge.unregister(&MeantEngines::Named {
        instance: "gpu-1".to_owned(),
        model: "m".to_owned(),
        tenant: None,
        rank: None,
    });
    eventually("daemons forget an engine that is unregistered", async || {
        site.holder("gpu-1").await.is_none().then_some(())
    })
    .await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    drop(silent);
    let _server = Server::start_at(address, Answers::vllm(&publishers, &[0])).await;
    site.settles("gpu-0", 3, &[]).await;
}

/// A refused engine that is told by its server is out of sight, too. It is announced with the block size that its model
/// has here.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_its_server_tells_and_that_is_refused_is_out_of_sight() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let publishers = Publishers::start(&python, &[Spec::default()]);
    follow(&site.bridge, "gpu-0=tcp://127.0.0.1:1,model=m,block_size=4").unwrap();
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let text = format!("gpu-1={},model=m,block_size=8", server.url());
    follow(&site.bridge, &text).unwrap();
    troubled(&site.bridge, "its size is refused", |error| {
        error.contains("block_size is 8")
    })
    .await;
    eventually("daemons hear why", async || {
        let told = serde_json::to_string(&site.holder("gpu-1").await?).unwrap();
        (told.contains("upstream_lost") && told.contains("it is not followed: block_size is 8")).then_some(())
    })
    .await;
    site.bridge.unregister(&MeantEngines::Named {
        instance: "gpu-1".to_owned(),
        model: "m".to_owned(),
        tenant: None,
        rank: None,
    });
    eventually("daemons forget it", async || {
        site.holder("gpu-1").await.is_none().then_some(())
    })
    .await;
}

/// When another engine has taken over the address of an engine, the bridge must never attribute the new engine's blocks
/// to the old one.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_tells_something_else_behind_a_new_connection_is_another_engine() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    follow(&site.bridge, &format!("gpu-0={}", server.url())).unwrap();
    site.settles("gpu-0", 3, &[]).await;
    // Another process serves the same model, and its blocks replace the old ones.
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 2)]));
    site.settles("gpu-0", 2, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
        (0, 2)
    );
    // Another model is served on the same ports.
    server.answers.lock().models = models("other");
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(3, 0, 2)]));
    let other = kvatlas_core::wire::NamespaceName::new("other").unwrap();
    eventually("it is followed as what it is", async || {
        let status = site.client.queries.status(&other).await.ok()?;
        let holder = status.holders.first()?;
        (holder.blocks == 2 && holder.exact).then_some(())
    })
    .await;
    eventually("nothing is left of the old one", async || {
        site.holder("gpu-0").await.is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_another_model_than_it_should_have_is_refused_in_words() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    follow(
        &site.bridge,
        &format!("gpu-0={},model=m,block_size=4", server.url()),
    )
    .unwrap();
    site.settles("gpu-0", 3, &[]).await;
    server.answers.lock().models = models("other");
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 1)]));
    let state = troubled(&site.bridge, "it says why", |error| {
        error.contains("\"other\", not \"m\"")
    })
    .await;
    assert!(state.engines.is_empty() && site.bridge.engines().is_empty());
    eventually("its old blocks are gone", async || {
        site.holder("gpu-0").await.is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_cannot_be_followed_is_told_with_the_flag_that_mends_it() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let good = Answers::vllm(&publishers, &[0]);
    let server = Server::start(Answers::without_events(&publishers)).await;
    follow(&site.bridge, &format!("gpu-0={},block_size=4", server.url())).unwrap();
    troubled(&site.bridge, "events are off", |error| {
        error.contains("publishes no KV events") && error.contains("--kv-events-config")
    })
    .await;
    server.answers.lock().sources["0"] =
        json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"});
    troubled(&site.bridge, "it connects", |error| {
        error.contains("connects to tcp://127.0.0.1:5557") && error.contains("tcp://*:5557")
    })
    .await;
    // The configuration does not allow the bridge to connect to this host.
    server.answers.lock().sources["0"] =
        json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://192.0.2.1:5557"});
    troubled(&site.bridge, "elsewhere", |error| {
        error.contains("--register-hosts")
    })
    .await;
    server.answers.lock().sources = Value::Null;
    // A vLLM server in development mode that is too old to tell its sockets has a page of another content at SGLang's path.
    server.answers.lock().info = json!({"vllm_config": "VllmConfig(...)"});
    troubled(&site.bridge, "it tells no sockets", |error| {
        error.contains("neither")
    })
    .await;
    *server.answers.lock() = good;
    site.settles("gpu-0", 3, &[]).await;
    assert_eq!(site.bridge.servers()[0].last_error, None);
}

/// A server that tells no block size names a socket on a host to which the bridge may not connect, not even to learn the
/// block size.
#[tokio::test(flavor = "multi_thread")]
async fn the_block_size_is_not_looked_for_elsewhere() {
    let site = Site::new(&[]).await;
    let sources = json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://192.0.2.1:5557"}});
    let server = Server::start(Answers {
        sources,
        models: models("m"),
        ..Answers::none()
    })
    .await;
    follow(&site.bridge, &format!("gpu-0={}", server.url())).unwrap();
    troubled(&site.bridge, "elsewhere", |error| {
        error.contains("--register-hosts")
    })
    .await;
}

/// An engine has no replay socket, and its server tells no block size. The batch that tells the size must not be lost.
#[tokio::test(flavor = "multi_thread")]
async fn the_batch_that_tells_the_block_size_counts() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::without_replay(); 2]);
    let server = Server::start(Answers::vllm(&publishers, &[0, 1])).await;
    follow(&site.bridge, &format!("gpu-0={}", server.url())).unwrap();
    (0..2).for_each(|rank| publishers.wait_for_subscriber(rank));
    // The first batch tells no size, and the second rank has told nothing that does.
    publishers.publish(1, &json!([["AllBlocksCleared"]]));
    publishers.publish(0, &json!([["AllBlocksCleared"]]));
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(0, &json!([stored(1, 2, 1)]));
    publishers.publish(1, &json!([stored(1, 0, 1)]));
    eventually("both ranks are exact", async || {
        let mut holders = site.holders("gpu-0").await;
        holders.sort_by_key(|holder| holder.rank);
        let known: Vec<_> = holders
            .iter()
            .map(|holder| (holder.blocks, holder.exact))
            .collect();
        (known == [(3, true), (1, true)]).then_some(())
    })
    .await;
}

/// The publisher of one rank is not there yet, and the engine has no replay sockets. What the other rank tells meanwhile
/// must not be lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_is_not_there_yet_costs_the_others_nothing() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::without_replay()]);
    let mut answers = Answers::vllm(&publishers, &[0]);
    // Nobody listens at a socket that is only bound, and no other process gets its port.
    let absent = tokio::net::TcpSocket::new_v4().unwrap();
    absent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut absent_rank = answers.sources["0"].clone();
    absent_rank["endpoint"] = json!(format!("tcp://*:{}", absent.local_addr().unwrap().port()));
    answers.sources["1"] = absent_rank;
    let server = Server::start(answers).await;
    follow(&site.bridge, &format!("gpu-0={}", server.url())).unwrap();
    eventually("several attempts have failed", async || {
        (server.asked.load(Ordering::Relaxed) > 3).then_some(())
    })
    .await;
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([["AllBlocksCleared"]]));
    let asked = server.asked.load(Ordering::Relaxed);
    eventually("another attempt has failed", async || {
        (server.asked.load(Ordering::Relaxed) > asked + 1).then_some(())
    })
    .await;
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    eventually("the rank that is there is exact", async || {
        let holders = site.holders("gpu-0").await;
        let holder = holders.iter().find(|holder| holder.rank == 0)?;
        (holder.blocks == 2 && holder.exact).then_some(())
    })
    .await;
}

/// The name of one rank is another engine's. The other rank is followed, and counts.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_is_refused_costs_the_others_nothing() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(); 3]);
    for engine in 0..3 {
        publishers.publish(engine, &json!([stored(1, 0, 3)]));
    }
    let taken = format!("gpu-0={},rank=1,model=m,block_size=4", publishers.endpoint(2));
    follow(&site.bridge, &taken).unwrap();
    let server = Server::start(Answers::vllm(&publishers, &[1, 0, 1])).await;
    server.answers.lock().sources.as_object_mut().unwrap().remove("0");
    follow(&site.bridge, &format!("gpu-0={}", server.url())).unwrap();
    eventually("the rank that is not refused is exact", async || {
        let holders = site.holders("gpu-0").await;
        let holder = holders.iter().find(|holder| holder.rank == 2)?;
        (holder.blocks == 3 && holder.exact).then_some(())
    })
    .await;
    let state = troubled(&site.bridge, "the refusal is told", |_| true).await;
    let followed: Vec<_> = state.engines.iter().map(|key| key.rank).collect();
    assert_eq!(followed, [2]);
}

/// The bridge must ask an engine's server only after a new connection. While the engine stays connected, further
/// batches cause no question.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_asked_behind_new_connections_only() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 1)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    follow(&site.bridge, &format!("gpu-0={},block_size=4", server.url())).unwrap();
    site.settles("gpu-0", 1, &[]).await;
    let asked = server.asked.load(Ordering::Relaxed);
    for part in 1..20 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    site.settles("gpu-0", 20, &[]).await;
    assert_eq!(server.asked.load(Ordering::Relaxed), asked);
    assert_eq!(site.bridge.engines()[0].status, EngineStatus::Exact);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_registered_over_http() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let mut bridge = Process::bridge(site.broker.url(), &["--http-listen", "127.0.0.1:0"]);
    let line = bridge.wait_for_line(|line| line["message"] == "query listener started");
    let mut http = HttpClient::connect(line["local_addr"].as_str().unwrap().parse().unwrap()).await;
    let registration = json!({"instance_id": "gpu-0", "endpoint": server.url(), "model_name": "m"});
    assert_eq!(http.post("/register", &registration).await.status, 201);
    assert_eq!(http.post("/register", &registration).await.status, 201);
    site.settles("gpu-0", 3, &[]).await;
    let workers = http.get("/workers").await.json();
    assert_eq!(
        (&workers[0]["block_size"], &workers[0]["status"]),
        (&json!(4), &json!("active"))
    );
    for (change, status) in [
        (json!({"endpoint": "http://127.0.0.1:1"}), 409),
        (
            json!({"instance_id": "gpu-1", "endpoint": "http://192.0.2.1:8000"}),
            403,
        ),
        (
            json!({"instance_id": "gpu-1", "endpoint": format!("{}/v1", server.url())}),
            400,
        ),
        (
            json!({"instance_id": "gpu-1", "replay_endpoint": publishers.replay(0)}),
            400,
        ),
        (
            json!({"instance_id": "gpu-1", "endpoint": publishers.endpoint(0)}),
            400,
        ),
    ] {
        let mut changed = registration.clone();
        changed
            .as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        assert_eq!(http.post("/register", &changed).await.status, status, "{changed}");
    }
    // The registration is in Mooncake's form, and for a model that the server does not have.
    let other = json!({"instance_id": "gpu-2", "endpoint": server.url(), "modelname": "other"});
    assert_eq!(http.post("/register", &other).await.status, 200);
    eventually("it is said why it is not followed", async || {
        let workers = http.get("/workers?model_name=other").await.json();
        let error = workers[0]["listeners"]["0"]["last_error"].as_str()?.to_owned();
        error.contains("\"m\", not \"other\"").then_some(())
    })
    .await;
    for (instance, model, status) in [
        ("gpu-0", "m", 200),
        ("gpu-2", "other", 200),
        ("gpu-2", "other", 404),
    ] {
        let meant = json!({"instance_id": instance, "model_name": model});
        assert_eq!(http.post("/unregister", &meant).await.status, status);
    }
    eventually("daemons forget it", async || {
        site.holder("gpu-0").await.is_none().then_some(())
    })
    .await;
    assert_eq!(http.get("/workers").await.json(), json!([]));
}
