//! vLLM's own front end over gRPC. It reports the sockets, the model, the block size and the process of an engine, but
//! passes on no events.
//!
//! The front end is simulated, with the messages of vLLM 0.33. The publishers behind it are real.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kvatlas_process::registry::EngineRegistry;
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::DropGuard;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::NamedService;
use tower::Service;

use super::python::{Publishers, Spec, python};
use super::servers::{follow, troubled};
use super::subscribed::{answered, serve_grpc};
use super::{BLOCK, Site, stored};
use crate::support::eventually;

/// Messages in the form in which the front end sends them. The bridge itself declares only the fields that it reads.
mod sent {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Sources {
        #[prost(message, repeated, tag = "1")]
        pub(super) sources: Vec<Source>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Source {
        #[prost(string, tag = "1")]
        pub(super) transport: String,
        #[prost(string, tag = "2")]
        pub(super) endpoint: String,
        #[prost(string, tag = "3")]
        pub(super) topic: String,
        #[prost(string, tag = "4")]
        pub(super) replay_endpoint: String,
        #[prost(uint32, optional, tag = "5")]
        pub(super) data_parallel_rank: Option<u32>,
        #[prost(string, tag = "6")]
        pub(super) encoding: String,
        #[prost(uint32, tag = "7")]
        pub(super) schema_version: u32,
        #[prost(uint32, tag = "8")]
        pub(super) buffer_steps: u32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Server {
        #[prost(string, tag = "2")]
        pub(super) api_version: String,
        #[prost(string, tag = "3")]
        pub(super) instance_id: String,
        #[prost(uint32, tag = "6")]
        pub(super) kv_block_size: u32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Model {
        #[prost(string, tag = "1")]
        pub(super) model_id: String,
        #[prost(string, tag = "2")]
        pub(super) served_model_name: String,
    }
}

/// Answers of a simulated front end. `None` stands for a method that the front end does not have.
#[derive(Clone)]
struct Answers {
    sources: Option<sent::Sources>,
    server: sent::Server,
    model: sent::Model,
}

impl Answers {
    /// Makes the answers of a front end whose ranks are these engines, in this order.
    fn of(publishers: &Publishers, engines: &[usize]) -> Self {
        let at_any = |endpoint: &str| format!("tcp://*:{}", endpoint.rsplit_once(':').unwrap().1);
        let source = |(rank, engine): (usize, &usize)| sent::Source {
            transport: "zmq".to_owned(),
            endpoint: at_any(&publishers.endpoint(*engine)),
            topic: String::new(),
            replay_endpoint: publishers
                .replay(*engine)
                .as_deref()
                .map(at_any)
                .unwrap_or_default(),
            data_parallel_rank: u32::try_from(rank).ok(),
            encoding: "msgpack".to_owned(),
            schema_version: 1,
            buffer_steps: 10_000,
        };
        Self {
            sources: Some(sent::Sources {
                sources: engines.iter().enumerate().map(source).collect(),
            }),
            server: sent::Server {
                api_version: "vllm".to_owned(),
                instance_id: "first".to_owned(),
                kv_block_size: BLOCK,
            },
            model: sent::Model {
                model_id: "/models/m".to_owned(),
                served_model_name: "m".to_owned(),
            },
        }
    }
}

#[derive(Clone)]
struct Control(Arc<Mutex<Answers>>);

impl NamedService for Control {
    const NAME: &'static str = "vllm.Control";
}

impl Service<http::Request<Body>> for Control {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Answers {
            sources,
            server,
            model,
        } = self.0.lock().clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/vllm.Control/GetServerInfo" => answered(Some(server), request).await,
                "/vllm.Control/GetModelInfo" => answered(Some(model), request).await,
                "/vllm.Control/GetKvEventSources" => answered(sources, request).await,
                path => panic!("{path}"),
            })
        })
    }
}

/// Simulated front end on a free port. It ends when the value is dropped.
struct FrontEnd {
    address: SocketAddr,
    answers: Arc<Mutex<Answers>>,
    _serving: DropGuard,
}

async fn serve(answers: Answers) -> FrontEnd {
    let answers = Arc::new(Mutex::new(answers));
    let (address, serving) = serve_grpc(Control(Arc::clone(&answers))).await;
    FrontEnd {
        address,
        answers,
        _serving: serving,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_end_over_grpc_tells_sockets_model_and_block_size() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    publishers.publish(1, &json!([stored(1, 0, 2)]));
    let front_end = serve(Answers::of(&publishers, &[0, 1])).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", front_end.address)).unwrap();
    eventually("both ranks are exact", async || {
        let status = site.client.queries.status(&super::namespace()).await.ok()?;
        let exact = status.holders.iter().filter(|holder| holder.exact);
        let blocks: Vec<_> = exact.map(|holder| (holder.rank, holder.blocks)).collect();
        (blocks == [(0, 3), (1, 2)]).then_some(())
    })
    .await;
    let engines = site.bridge.engines();
    let sockets: Vec<_> = engines
        .iter()
        .map(|state| state.engine.endpoint.clone())
        .collect();
    assert_eq!(sockets, [publishers.endpoint(0), publishers.endpoint(1)]);
    assert!(engines.iter().all(|state| state.engine.block_size == BLOCK));
    // Another model behind the same address is another engine.
    front_end.answers.lock().model.served_model_name = "other".to_owned();
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(3, 0, 1)]));
    eventually("nothing is left of the old one", async || {
        let models = site
            .bridge
            .engines()
            .into_iter()
            .map(|state| state.engine.key.model.model);
        let is_other = models.collect::<Vec<_>>() == ["other", "other"];
        (is_other && site.holder("gpu-0").await.is_none()).then_some(())
    })
    .await;
}

/// An engine has no replay socket, and its new process continues the batch numbers of the old process. Only the process
/// name that the front end tells has changed. Then the bridge must not attribute blocks of the old process to the new
/// one.
#[tokio::test(flavor = "multi_thread")]
async fn another_process_by_its_name_has_nothing_of_the_old_one() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::without_replay()]);
    let front_end = serve(Answers::of(&publishers, &[0])).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", front_end.address)).unwrap();
    eventually("it is followed", async || {
        let state = site.bridge.engines().into_iter().next()?;
        (state.status == kvatlas_process::registry::EngineStatus::Degraded).then_some(())
    })
    .await;
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    site.settles("gpu-0", 3, &[]).await;
    front_end.answers.lock().server.instance_id = "second".to_owned();
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 1)]));
    eventually("what it publishes is its own", async || {
        publishers.publish(0, &json!([stored(3, 0, 1)]));
        (site.depth(3, "gpu-0").await == 1).then_some(())
    })
    .await;
    assert_eq!(site.depth(1, "gpu-0").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_end_that_cannot_be_followed_says_what_mends_it() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let good = Answers::of(&publishers, &[0]);
    let source = good.sources.clone().unwrap().sources.remove(0);
    let with = |sources: Vec<sent::Source>| Answers {
        sources: Some(sent::Sources { sources }),
        ..good.clone()
    };
    let at = |endpoint: &str| sent::Source {
        endpoint: endpoint.to_owned(),
        ..source.clone()
    };
    let front_end = serve(with(vec![])).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", front_end.address)).unwrap();
    troubled(&site.bridge, "events are off", |error| {
        error.contains("publishes no KV events") && error.contains("--kv-events-config")
    })
    .await;
    *front_end.answers.lock() = with(vec![at("tcp://127.0.0.1:5557")]);
    troubled(&site.bridge, "it connects", |error| {
        error.contains("connects to tcp://127.0.0.1:5557") && error.contains("tcp://*:5557")
    })
    .await;
    *front_end.answers.lock() = with(vec![at("tcp://192.0.2.1:5557")]);
    troubled(&site.bridge, "elsewhere", |error| {
        error.contains("--register-hosts")
    })
    .await;
    let sources = None;
    *front_end.answers.lock() = Answers {
        sources,
        ..good.clone()
    };
    troubled(&site.bridge, "it tells of nothing", |error| {
        error.contains("neither SubscribeKvEvents")
    })
    .await;
    *front_end.answers.lock() = good;
    site.settles("gpu-0", 3, &[]).await;
    assert_eq!(site.bridge.servers()[0].last_error, None);
}
