//! SGLang's router asks kvatlas as its indexer, over gRPC: the answers, the status codes, health, reflection, and odd
//! requests.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{
    Event, EventBatch, ModelKey, NamespaceName, Profile, RemovedBlocks, Resumable, StoredBlocks, Subjects,
    Tier, WorkerName,
};
use kvatlas_daemon::Daemon;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_prost::ProstCodec;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::support::http::HttpClient;
use crate::support::{Client, PATIENCE, broker, daemon, eventually, subjects};

/// Messages as SGLang's router declares them. The messages about tiers are tested by a client in Python, in
/// tests/routers.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Question {
    #[prost(sfixed64, repeated, tag = "1")]
    pub(crate) hashes: Vec<i64>,
    #[prost(uint32, tag = "2")]
    pub(crate) max_blocks: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Match {
    #[prost(string, tag = "1")]
    worker_address: String,
    #[prost(uint32, tag = "2")]
    matched_prefix_blocks: u32,
    #[prost(string, tag = "3")]
    worker_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Answer {
    #[prost(message, repeated, tag = "1")]
    matches: Vec<Match>,
    #[prost(uint32, tag = "2")]
    pub(crate) best_prefix_blocks: u32,
    #[prost(uint32, tag = "3")]
    blocks_read: u32,
}

/// Simulated router.
pub(crate) struct Router(Channel);

impl Router {
    pub(crate) async fn connect(daemon: &Daemon) -> Self {
        let address = daemon.grpc_address().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        Self(endpoint.connect().await.unwrap())
    }

    async fn call(&self, method: &str, request: Request<Question>) -> Result<Response<Answer>, Status> {
        self.send(method, request).await
    }

    /// Sends a message to a method.
    pub(crate) async fn send<Q, A>(&self, method: &str, request: Request<Q>) -> Result<Response<A>, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut client = tonic::client::Grpc::new(self.0.clone());
        client.ready().await.unwrap();
        let path = PathAndQuery::from_maybe_shared(format!("/kv_indexer.v1.KVIndexer/{method}")).unwrap();
        let codec: ProstCodec<Q, A> = ProstCodec::default();
        client.unary(request, path, codec).await
    }

    pub(crate) async fn ask(&self, hashes: &[SequenceHash]) -> Result<Response<Answer>, Status> {
        let question = Question {
            hashes: hashes.iter().map(|hash| hash.as_u64().cast_signed()).collect(),
            max_blocks: 0,
        };
        self.call("MatchExternalKvPrefix", Request::new(question)).await
    }

    /// Queries the blocks `hashes`. Returns how many leading blocks (pages) the holder at each address has, and whether
    /// the whole answer is certain.
    pub(crate) async fn told(&self, hashes: &[SequenceHash]) -> (BTreeMap<String, u32>, bool) {
        let response = self.ask(hashes).await.unwrap();
        let is_exact = response.metadata().get("x-kvatlas-exact").unwrap() == "true";
        let answer = response.into_inner();
        let depths = answer.matches.iter().map(|found| found.matched_prefix_blocks);
        assert!(
            depths.is_sorted_by(|one, other| one >= other),
            "the deepest first"
        );
        let best = answer
            .matches
            .first()
            .map_or(0, |best| best.matched_prefix_blocks);
        assert_eq!(answer.best_prefix_blocks, best);
        let of_address = |found: Match| (found.worker_address, found.matched_prefix_blocks);
        (answer.matches.into_iter().map(of_address).collect(), is_exact)
    }
}

fn model() -> ModelKey {
    ModelKey::new("m").speaking(Some("sglang".parse().unwrap()))
}

pub(crate) fn namespace() -> NamespaceName {
    model().namespace().unwrap()
}

/// Returns the block hashes of a prompt with `pages` blocks (pages). Prompts with different `which` differ from block
/// `from` on.
pub(crate) fn prompt(which: u32, from: u32, pages: u32) -> Vec<SequenceHash> {
    let token = |page: u32| if page < from { page } else { page + which * 1000 };
    let tokens: Vec<u32> = (0..pages).flat_map(|page| [token(page); 16]).collect();
    let chains = model().chains().unwrap();
    chains.sequence_hashes(&tokens, BlockSize::DEFAULT, None, None)
}

fn stored(hashes: Vec<SequenceHash>) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, hashes))
}

/// Makes a batch of a holder. A worker's first batch also tells its address.
fn batch(worker: &str, rank: u32, seq: u64, tier: u8, event: Event) -> (WorkerName, EventBatch) {
    let address = format!("http://{}:30000", worker.trim_start_matches('_'));
    let has_address = seq == 1 && worker != "nowhere";
    let batch = EventBatch {
        epoch: 1,
        seq,
        rank,
        time_us: Some(seq),
        tier: Tier::new(tier).unwrap(),
        block_size: Some(BlockSize::DEFAULT),
        profile: has_address.then(|| Profile {
            address: address.parse().ok(),
            ..Profile::default()
        }),
        events: vec![event],
    };
    (worker.parse().unwrap(), batch)
}

/// Returns the batches of a fleet. Between them, the workers have several ranks and tiers, a block missing in the
/// middle, a window, and a missing batch. There is also a pool, and a worker without an address.
fn fleet() -> Vec<(WorkerName, EventBatch)> {
    let windowed = Event::Stored(StoredBlocks {
        resumable: Resumable::from_flags([true, true, false, false]),
        ..StoredBlocks::by_sequence(None, None, prompt(0, 0, 4))
    });
    let hole = Event::Removed(RemovedBlocks::by_sequence(vec![prompt(0, 0, 2)[1]]));
    vec![
        batch("gpu-0", 0, 1, 0, stored(prompt(0, 0, 4))),
        batch("gpu-0", 1, 1, 0, stored(prompt(1, 2, 9))),
        batch("gpu-1", 0, 1, 0, stored(prompt(0, 0, 1))),
        batch("gpu-1", 0, 2, 1, stored(prompt(0, 0, 3))),
        batch("gpu-1", 0, 3, 2, stored(prompt(0, 0, 6))),
        batch("gpu-2", 0, 1, 0, windowed),
        batch("gpu-3", 0, 1, 0, stored(prompt(2, 1, 5))),
        batch("gpu-3", 0, 2, 0, stored(prompt(0, 0, 5))),
        batch("gpu-3", 0, 3, 0, hole),
        // A batch is missing, and no publisher answers for it.
        batch("gpu-4", 0, 1, 0, stored(prompt(0, 0, 7))),
        batch("gpu-4", 0, 3, 0, stored(prompt(3, 1, 4))),
        batch("_pstore", 0, 1, 3, stored(prompt(0, 0, 8))),
        batch("nowhere", 0, 1, 0, stored(prompt(0, 0, 8))),
    ]
}

/// Settings with which a batch that is missing stays missing, because the daemon asks no publisher, and with which no
/// holder becomes stale.
pub(crate) const PATIENT: [(&str, &str); 3] = [
    ("resync.concurrency", "0"),
    ("namespace_defaults.stale_after_ms", "600000"),
    ("namespace_defaults.remove_after_ms", "900000"),
];
pub(crate) const LISTEN: (&str, &str) = ("grpc.listen", "127.0.0.1:0");

/// Publishes the batches of the fleet under `prefix`.
pub(crate) async fn publish(client: &Client, prefix: &str) {
    let subjects = Subjects::new(prefix).unwrap();
    for (worker, batch) in fleet() {
        let subject = subjects.events(&namespace(), &worker);
        client.nats.publish(subject, batch.encode().into()).await.unwrap();
    }
    client.nats.flush().await.unwrap();
}

/// Returns the expected answer about the prompt `prompt(0, …)`, of which most workers of the fleet have blocks. For
/// worker `gpu-2`, a request can reuse only two of its four blocks. Worker `gpu-4` is in doubt, so it is left out.
pub(crate) fn told_of_first() -> BTreeMap<String, u32> {
    let depths = [(0, 4), (1, 6), (2, 2), (3, 1)];
    depths
        .map(|(number, pages)| (format!("http://gpu-{number}:30000"), pages))
        .into()
}

/// Waits until the daemon knows the whole fleet.
pub(crate) async fn knows_all(router: &Router) {
    eventually("the fleet is known", async || {
        let second = router.ask(&prompt(1, 2, 9)).await.ok()?.into_inner();
        let (first, _) = router.told(&prompt(0, 0, 8)).await;
        (second.best_prefix_blocks == 9 && first == told_of_first()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_is_told_what_each_address_can_reuse() {
    let broker = broker().await;
    let settings = [&PATIENT[..], &[LISTEN, ("http.listen", "127.0.0.1:0")]].concat();
    let daemon = daemon(broker.url(), &settings).await;
    let router = Router::connect(&daemon).await;
    let client = Client::connect(broker.url()).await;
    publish(&client, "kvatlas").await;
    knows_all(&router).await;
    assert_eq!(router.told(&prompt(0, 0, 8)).await, (told_of_first(), false));
    // Only one of the worker's ranks has all these pages.
    let (told, _) = router.told(&prompt(1, 2, 9)).await;
    assert_eq!(told.get("http://gpu-0:30000"), Some(&9));
    assert_eq!(router.told(&[]).await.0, BTreeMap::new());
    let asked = Question {
        hashes: prompt(0, 0, 8)
            .iter()
            .map(|hash| hash.as_u64().cast_signed())
            .collect(),
        max_blocks: 3,
    };
    let answer = router
        .call("MatchExternalKvPrefix", Request::new(asked))
        .await
        .unwrap()
        .into_inner();
    assert_eq!((answer.best_prefix_blocks, answer.blocks_read), (3, 3));
    let metrics = HttpClient::connect(daemon.http_address().unwrap())
        .await
        .get("/metrics")
        .await;
    let text = String::from_utf8(metrics.body).unwrap();
    let left_out = text
        .lines()
        .find_map(|line| line.strip_prefix("kvatlas_grpc_without_address_total "));
    assert!(left_out.is_some_and(|count| count != "0"), "{left_out:?}");
}

/// Sends the same query to `/v1/query`. Returns the answer that a gRPC router must get: how many leading blocks (pages)
/// a request can use at each address, and whether the whole answer is certain.
async fn by_http(http: &mut HttpClient, hashes: &[SequenceHash]) -> (BTreeMap<String, u32>, bool) {
    let hashes: Vec<String> = hashes
        .iter()
        .map(|hash| format!("0x{:016x}", hash.as_u64()))
        .collect();
    let asked = json!({"namespace": namespace().as_str(), "sequence_hashes": hashes});
    let answer = http.post("/v1/query", &asked).await;
    let reply: Value = serde_json::from_slice(&answer.body).unwrap();
    let mut told = BTreeMap::new();
    let holders = reply["holders"].as_array().unwrap();
    for holder in holders.iter().filter(|holder| holder["exact"] == json!(true)) {
        let usable = holder.get("usable_blocks").unwrap_or(&holder["matched_blocks"]);
        let usable = u32::try_from(usable.as_u64().unwrap()).unwrap();
        let is_pool = holder["worker"].as_str().unwrap().starts_with("_p");
        if let (Some(address), 1.., false) = (holder["address"].as_str(), usable, is_pool) {
            let known = told.entry(address.to_owned()).or_insert(usable);
            *known = usable.max(*known);
        }
    }
    (told, answer.is_exact())
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_of_the_query_route_and_of_a_gateway() {
    let broker = broker().await;
    let one = [
        &PATIENT[..],
        &[("subjects.prefix", "one"), LISTEN, ("http.listen", "127.0.0.1:0")],
    ]
    .concat();
    let one = daemon(broker.url(), &one).await;
    let mut shards = Vec::new();
    for shard in ["0/2", "1/2"] {
        let settings = [("subjects.prefix", "many"), ("sharding.shard", shard)];
        shards.push(daemon(broker.url(), &[&PATIENT[..], &settings].concat()).await);
    }
    let name = namespace();
    let settings = [
        ("subjects.prefix", "many"),
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "2000"),
        ("grpc.namespace", name.as_str()),
        LISTEN,
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let routers = [Router::connect(&one).await, Router::connect(&gateway).await];
    for (prefix, router) in ["one", "many"].into_iter().zip(&routers) {
        publish(&client, prefix).await;
        knows_all(router).await;
    }
    for daemon in std::iter::once(&one).chain(&shards) {
        daemon.listed().await;
    }
    let mut http = HttpClient::connect(one.http_address().unwrap()).await;
    let mut random = fastrand::Rng::with_seed(7);
    for number in 0..300 {
        let mut asked = prompt(random.u32(0..5), random.u32(0..4), random.u32(0..10));
        if random.u8(0..4) == 0 {
            // No worker has pages of the shuffled prompt.
            random.shuffle(&mut asked);
        }
        let expected = by_http(&mut http, &asked).await;
        let [by_one, by_gateway] = &routers;
        assert_eq!(by_one.told(&asked).await, expected, "question {number}");
        assert_eq!(
            by_gateway.told(&asked).await,
            expected,
            "question {number} to the gateway"
        );
    }
    drop(shards);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_whose_events_are_dropped_makes_answers_uncertain() {
    let broker = broker().await;
    let settings = [
        LISTEN,
        PATIENT[0],
        PATIENT[1],
        PATIENT[2],
        ("limits.max_namespaces", "1"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let router = Router::connect(&daemon).await;
    let client = Client::connect(broker.url()).await;
    let publish = async |model: &str, hashes: Vec<SequenceHash>| {
        let model = ModelKey::new(model).speaking(Some("sglang".parse().unwrap()));
        let (worker, batch) = batch("gpu-0", 0, 1, 0, stored(hashes));
        let subject = subjects().events(&model.namespace().unwrap(), &worker);
        client.nats.publish(subject, batch.encode().into()).await.unwrap();
    };
    publish("m", prompt(0, 0, 4)).await;
    let others = prompt(5, 0, 4);
    eventually("the first model is known", async || {
        let told = router.ask(&others).await.ok()?;
        (told.metadata().get("x-kvatlas-exact").unwrap() == "true").then_some(())
    })
    .await;
    publish("other", others.clone()).await;
    eventually("the dropped events are noticed", async || {
        let (found, is_exact) = router.told(&others).await;
        assert!(found.is_empty());
        (!is_exact).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_answered_makes_the_router_go_by_load() {
    let broker = broker().await;
    let small = [LISTEN, ("grpc.max_message_bytes", "4KiB")];
    let daemon = daemon(broker.url(), &small).await;
    let router = Router::connect(&daemon).await;
    // If nothing is known about any worker, the answer is an error and not an empty list.
    let unknown = router.ask(&prompt(0, 0, 2)).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unavailable, "{unknown}");
    assert!(unknown.message().contains("scheme=sglang"), "{unknown}");
    let long = router.ask(&prompt(0, 0, 600)).await.unwrap_err();
    assert_eq!(long.code(), Code::OutOfRange, "{long}");
    for method in ["ApplyExternalKvBatch", "ConfigureExpectedWorkers", "Other"] {
        let status = router
            .call(method, Request::new(Question::default()))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{method}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_asked_for_but_not_by_health() {
    let broker = broker().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "secret\n").unwrap();
    let settings = [LISTEN, ("grpc.token_file", path.to_str().unwrap())];
    let daemon = daemon(broker.url(), &settings).await;
    let router = Router::connect(&daemon).await;
    let refused = router.ask(&[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let mut with_token = Request::new(Question::default());
    with_token
        .metadata_mut()
        .insert("authorization", "Bearer secret".parse().unwrap());
    let answered = router.call("MatchExternalKvPrefix", with_token).await;
    assert_eq!(answered.unwrap_err().code(), Code::Unavailable, "it is let in");
    let mut health = HealthClient::new(router.0.clone());
    let about = |service: &str| HealthCheckRequest {
        service: service.to_owned(),
    };
    for service in ["", "kv_indexer.v1.KVIndexer"] {
        let status = health.check(about(service)).await.unwrap().into_inner().status;
        assert_eq!(status, i32::from(ServingStatus::Serving));
    }
    assert_eq!(health.check(about("x")).await.unwrap_err().code(), Code::NotFound);
    let mut watched = health.watch(about("")).await.unwrap().into_inner();
    let first = watched.message().await.unwrap().unwrap();
    assert_eq!(first.status, i32::from(ServingStatus::Serving));
    // When the daemon stops, the stream ends or reports that nothing is served.
    daemon.stop().await;
    while let Ok(Some(last)) = watched.message().await {
        assert_eq!(last.status, i32::from(ServingStatus::NotServing));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_says_what_it_takes() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[LISTEN]).await;
    let router = Router::connect(&daemon).await;
    let mut reflection = ServerReflectionClient::new(router.0.clone());
    let mut ask = async |message: MessageRequest| {
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(message),
        };
        let mut answers = reflection
            .server_reflection_info(stream::iter([request]))
            .await
            .unwrap()
            .into_inner();
        answers
            .message()
            .await
            .unwrap()
            .unwrap()
            .message_response
            .unwrap()
    };
    let MessageResponse::ListServicesResponse(services) =
        ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("no list");
    };
    let mut names: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    names.sort();
    assert_eq!(
        names,
        [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "kv_indexer.v1.KVIndexer"
        ]
    );
    let symbol = "kv_indexer.v1.KVIndexer.MatchExternalKvPrefix".to_owned();
    let described = ask(MessageRequest::FileContainingSymbol(symbol)).await;
    assert!(
        matches!(described, MessageResponse::FileDescriptorResponse(_)),
        "{described:?}"
    );
}

/// Connection for messages that no normal gRPC client sends.
struct Odd {
    sender: http2::SendRequest<OddBody>,
    connection: JoinHandle<hyper::Result<()>>,
}

type OddBody = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

impl Odd {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        let connection = tokio::spawn(connection);
        Self { sender, connection }
    }

    /// Sends a request. Returns its gRPC status, from the headers or the trailers.
    async fn send(
        &mut self,
        headers: &[(&str, &str)],
        body: impl Body<Data = Bytes, Error = Infallible> + Send + 'static,
    ) -> i32 {
        let mut request = hyper::Request::post("http://x/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(body.boxed_unsync()).unwrap();
        let answering = self.sender.send_request(request);
        let response = tokio::time::timeout(PATIENCE, answering)
            .await
            .expect("an answer")
            .unwrap();
        let head = response.headers().get("grpc-status").cloned();
        let collected = response.into_body().collect().await.unwrap();
        let end = collected
            .trailers()
            .and_then(|trailers| trailers.get("grpc-status").cloned());
        head.or(end).expect("a status").to_str().unwrap().parse().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_does_not_come_ends_at_its_deadline() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[LISTEN]).await;
    let mut odd = Odd::connect(daemon.grpc_address().unwrap()).await;
    let begun = stream::iter([Ok(Frame::data(Bytes::from_static(&[0, 0])))]);
    let never_ends = StreamBody::new(begun.chain(stream::pending()));
    let headers = [("content-type", "application/grpc"), ("grpc-timeout", "20m")];
    assert_eq!(
        odd.send(&headers, never_ends).await,
        Code::DeadlineExceeded as i32
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_to_a_question_that_is_cut_is_not_exact() {
    let broker = broker().await;
    let settings = [&PATIENT[..], &[LISTEN, ("queries.max_depth_blocks", "4")]].concat();
    let daemon = daemon(broker.url(), &settings).await;
    let router = Router::connect(&daemon).await;
    let client = Client::connect(broker.url()).await;
    let (worker, batch) = batch("gpu-9", 0, 1, 0, stored(prompt(0, 0, 8)));
    let subject = subjects().events(&namespace(), &worker);
    client.nats.publish(subject, batch.encode().into()).await.unwrap();
    let whole = (BTreeMap::from([("http://gpu-9:30000".to_owned(), 4)]), true);
    eventually("the worker is known", async || {
        // Before its first batch, the namespace is not known.
        router.ask(&prompt(0, 0, 4)).await.ok()?;
        (router.told(&prompt(0, 0, 4)).await == whole).then_some(())
    })
    .await;
    assert_eq!(router.told(&prompt(0, 0, 5)).await, (whole.0, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_input_gets_a_status_and_harms_nobody() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[&PATIENT[..], &[LISTEN]].concat()).await;
    let router = Router::connect(&daemon).await;
    let client = Client::connect(broker.url()).await;
    publish(&client, "kvatlas").await;
    knows_all(&router).await;
    let mut odd = Odd::connect(daemon.grpc_address().unwrap()).await;
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let sound = prost::Message::encode_to_vec(&Question {
        hashes: vec![1, -1],
        max_blocks: 1,
    });
    for number in 0..400 {
        let mut message = sound.clone();
        for _ in 0..random.usize(0..4) {
            let place = random.usize(0..message.len());
            message[place] = random.u8(..);
        }
        message.truncate(random.usize(0..=message.len()));
        let length = match random.u8(0..4) {
            0 => random.u32(..),
            _ => u32::try_from(message.len()).unwrap(),
        };
        let mut body = vec![random.u8(0..2)];
        body.extend(length.to_be_bytes());
        body.extend(message);
        body.truncate(random.usize(0..=body.len()));
        let encoding = ["identity", "gzip", "x"][random.usize(0..3)];
        let timeout = ["1S", "x", "99999999H"][random.usize(0..3)];
        let headers = [
            ("content-type", "application/grpc"),
            ("grpc-encoding", encoding),
            ("grpc-timeout", timeout),
        ];
        let status = odd.send(&headers, Full::new(Bytes::from(body))).await;
        assert!(
            (0..=16).contains(&status),
            "request {number} of seed {seed}: {status}"
        );
    }
    assert_eq!(
        router
            .ask(&prompt(0, 0, 8))
            .await
            .unwrap()
            .into_inner()
            .best_prefix_blocks,
        6
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_questions_is_closed_and_the_client_comes_back() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[LISTEN, ("grpc.idle_timeout_ms", "100")]).await;
    let odd = Odd::connect(daemon.grpc_address().unwrap()).await;
    let closed = tokio::time::timeout(PATIENCE, odd.connection).await;
    closed.expect("it is closed").unwrap().unwrap();
    let router = Router::connect(&daemon).await;
    assert_eq!(router.ask(&[]).await.unwrap_err().code(), Code::Unavailable);
}
