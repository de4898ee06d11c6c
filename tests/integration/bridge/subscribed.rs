//! Servers of engines that pass on events over gRPC: `SubscribeKvEvents`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures_util::{Stream, StreamExt};
use kvatlas_process::registry::{EngineRegistry, EngineStatus};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::Service;

use super::resets::reset;
use super::servers::{follow, troubled};
use super::{BLOCK, Site, follow_text, name_of, tokens};
use crate::support::eventually;

/// Messages in the form in which a server sends them. The bridge itself declares only the fields that it reads.
mod sent {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Subscribe {
        #[prost(uint64, tag = "1")]
        pub(super) start_sequence_number: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Frame {
        #[prost(uint64, tag = "1")]
        pub(super) sequence_number: u64,
        #[prost(message, repeated, tag = "3")]
        pub(super) events: Vec<Event>,
        #[prost(int32, optional, tag = "4")]
        pub(super) dp_rank: Option<i32>,
        #[prost(message, optional, tag = "7")]
        pub(super) snapshot: Option<Chunk>,
        #[prost(message, optional, tag = "8")]
        pub(super) load: Option<Load>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Chunk {
        #[prost(uint32, tag = "1")]
        pub(super) index: u32,
        #[prost(uint32, tag = "2")]
        pub(super) count: u32,
        #[prost(uint64, tag = "4")]
        pub(super) unknown_before: u64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Load {
        #[prost(bool, tag = "9")]
        pub(super) load_only: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Event {
        #[prost(oneof = "Data", tags = "2, 3, 4")]
        pub(super) data: Option<Data>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum Data {
        #[prost(message, tag = "2")]
        Stored(Stored),
        #[prost(message, tag = "3")]
        Removed(Removed),
        #[prost(message, tag = "4")]
        Cleared(Cleared),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Stored {
        #[prost(message, repeated, tag = "1")]
        pub(super) blocks: Vec<Block>,
        #[prost(int64, optional, tag = "2")]
        pub(super) parent_block_hash: Option<i64>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Block {
        #[prost(int64, tag = "1")]
        pub(super) block_hash: i64,
        #[prost(uint32, repeated, tag = "2")]
        pub(super) token_ids: Vec<u32>,
        #[prost(int32, tag = "3")]
        pub(super) block_size: i32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Removed {
        #[prost(int64, repeated, tag = "1")]
        pub(super) block_hashes: Vec<i64>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Cleared {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Model {
        #[prost(string, tag = "1")]
        pub(super) model_path: String,
        #[prost(string, tag = "6")]
        pub(super) served_model_name: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Flushed {
        #[prost(bool, tag = "1")]
        pub(super) success: bool,
        #[prost(string, tag = "2")]
        pub(super) message: String,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Info {
        #[prost(int32, tag = "9")]
        pub(super) data_parallel_size: i32,
        #[prost(int32, tag = "12")]
        pub(super) block_size: i32,
    }
}

use sent::{Data, Frame};

type Sender = mpsc::UnboundedSender<Result<Frame, Status>>;

/// Simulated server of an engine. It sends each subscriber the frames in `history`, and then the published frames.
#[derive(Clone, Default)]
struct Servicer {
    history: Arc<Mutex<Vec<Frame>>>,
    subscribers: Arc<Mutex<Vec<Sender>>>,
    subscriptions: Arc<AtomicUsize>,
    is_off: bool,
    model: Option<sent::Model>,
    info: Option<sent::Info>,
    flushed: Arc<Mutex<Option<sent::Flushed>>>,
}

impl Servicer {
    fn publish(&self, frame: &Frame) {
        let subscribers = self.subscribers.lock();
        subscribers
            .iter()
            .for_each(|one| drop(one.send(Ok(frame.clone()))));
    }

    /// Ends all streams with `status`. The next streams begin with `history`.
    fn end(&self, status: &Status, history: Vec<Frame>) {
        *self.history.lock() = history;
        for subscriber in self.subscribers.lock().drain(..) {
            drop(subscriber.send(Err(status.clone())));
        }
    }
}

impl ServerStreamingService<sent::Subscribe> for Servicer {
    type Response = Frame;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<Frame, Status>> + Send>>;
    type Future = std::future::Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<sent::Subscribe>) -> Self::Future {
        if self.is_off {
            return std::future::ready(Err(Status::unimplemented("no publisher")));
        }
        if request.into_inner().start_sequence_number != 0 {
            // The real server refuses a cursor, too, because a cursor does not name a process.
            return std::future::ready(Err(Status::out_of_range("resubscribe with zero")));
        }
        self.subscriptions.fetch_add(1, Ordering::SeqCst);
        let (sender, mut receiver) = mpsc::unbounded_channel();
        for frame in self.history.lock().iter() {
            sender.send(Ok(frame.clone())).unwrap();
        }
        self.subscribers.lock().push(sender);
        let frames = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
        std::future::ready(Ok(Response::new(frames.boxed())))
    }
}

/// Answer to a request; `None` if the server does not have the method.
pub(super) struct Answer<Message>(pub(super) Option<Message>);

/// A request without fields.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct Ask {}

impl<Message: prost::Message + Clone> UnaryService<Ask> for Answer<Message> {
    type Response = Message;
    type Future = std::future::Ready<Result<Response<Message>, Status>>;

    fn call(&mut self, _: Request<Ask>) -> Self::Future {
        let answer = self.0.clone().map(Response::new);
        std::future::ready(answer.ok_or_else(|| Status::unimplemented("")))
    }
}

/// Answers a request.
pub(super) async fn answered<Message>(
    answer: Option<Message>,
    request: http::Request<Body>,
) -> http::Response<Body>
where
    Message: prost::Message + Default + Clone + 'static,
{
    let codec: ProstCodec<Message, Ask> = ProstCodec::default();
    Grpc::new(codec).unary(Answer(answer), request).await
}

/// Simulated server as a gRPC service with the name that vLLM gives it.
#[derive(Clone)]
struct VllmEngine(Servicer);

impl NamedService for VllmEngine {
    const NAME: &'static str = "vllm.grpc.engine.VllmEngine";
}

impl Service<http::Request<Body>> for VllmEngine {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let servicer = self.0.clone();
        Box::pin(async move {
            let codec: ProstCodec<Frame, sent::Subscribe> = ProstCodec::default();
            Ok(match request.uri().path().rsplit_once('/') {
                Some((_, "GetModelInfo")) => answered(servicer.model, request).await,
                Some((_, "GetServerInfo")) => answered(servicer.info, request).await,
                Some((_, "FlushCache")) => {
                    let flushed = servicer.flushed.lock().clone();
                    answered(flushed, request).await
                }
                _ => Grpc::new(codec).server_streaming(servicer, request).await,
            })
        })
    }
}

/// Starts a gRPC server with this service on a free port. It ends when the guard is dropped.
pub(super) async fn serve_grpc<S>(service: S) -> (SocketAddr, DropGuard)
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S: NamedService + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    serve_grpc_by(tonic::transport::Server::builder(), service).await
}

/// Starts a gRPC server as [`serve_grpc`] does, with the settings of `server`.
async fn serve_grpc_by<S>(mut server: tonic::transport::Server, service: S) -> (SocketAddr, DropGuard)
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S: NamedService + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        server
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, stopped.cancelled_owned())
            .await
            .unwrap();
    });
    (address, stop.drop_guard())
}

/// Simulated server on a free port. It ends when the value is dropped.
struct Served {
    address: SocketAddr,
    servicer: Servicer,
    _serving: DropGuard,
}

async fn serve(servicer: Servicer) -> Served {
    let (address, serving) = serve_grpc(VllmEngine(servicer.clone())).await;
    Served {
        address,
        servicer,
        _serving: serving,
    }
}

fn stored(which: u32, first: u32, count: u32) -> Data {
    let block = |number: u32| sent::Block {
        block_hash: name_of(which, number).cast_signed(),
        token_ids: tokens(which, number, 1),
        block_size: i32::try_from(BLOCK).unwrap(),
    };
    Data::Stored(sent::Stored {
        blocks: (first..first + count).map(block).collect(),
        parent_block_hash: first
            .checked_sub(1)
            .map(|before| name_of(which, before).cast_signed()),
    })
}

fn frame(number: u64, events: impl IntoIterator<Item = Data>) -> Frame {
    Frame {
        sequence_number: number,
        events: events
            .into_iter()
            .map(|data| sent::Event { data: Some(data) })
            .collect(),
        dp_rank: Some(0),
        ..Frame::default()
    }
}

fn chunk(number: u64, index: u32, count: u32, events: impl IntoIterator<Item = Data>) -> Frame {
    let snapshot = sent::Chunk {
        index,
        count,
        unknown_before: 0,
    };
    Frame {
        snapshot: Some(snapshot),
        ..frame(number, events)
    }
}

fn cleared() -> Data {
    Data::Cleared(sent::Cleared {})
}

async fn followed(site: &Site, history: Vec<Frame>) -> Served {
    let servicer = Servicer::default();
    *servicer.history.lock() = history;
    let served = serve(servicer).await;
    follow_text(&site.bridge, &format!("gpu-0=grpc://{}", served.address));
    served
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_from_its_first_batch_is_whole() {
    let site = Site::new(&[]).await;
    let served = followed(&site, vec![frame(0, [stored(1, 0, 4)])]).await;
    site.settles("gpu-0", 4, &[]).await;
    served
        .servicer
        .publish(&frame(1, [stored(1, 4, 2), stored(2, 0, 1)]));
    let removed = sent::Removed {
        block_hashes: vec![name_of(1, 5).cast_signed()],
    };
    served.servicer.publish(&frame(2, [Data::Removed(removed)]));
    // A frame about load repeats an event number, and has no effect.
    let load = Some(sent::Load { load_only: true });
    served.servicer.publish(&Frame { load, ..frame(2, []) });
    served.servicer.publish(&frame(3, [stored(1, 5, 1)]));
    site.settles("gpu-0", 7, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
        (6, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_counts_when_all_its_chunks_have_come() {
    let site = Site::new(&[]).await;
    let served = followed(&site, vec![chunk(98, 0, 2, [cleared(), stored(1, 0, 3)])]).await;
    site.settles("gpu-0", 3, &["unverified", "upstream_lost"]).await;
    served.servicer.publish(&chunk(99, 1, 2, [stored(1, 3, 2)]));
    site.settles("gpu-0", 5, &[]).await;
    served.servicer.publish(&frame(100, [stored(2, 0, 2)]));
    site.settles("gpu-0", 7, &[]).await;
    // The server reports a loss of data. A new snapshot replaces all blocks.
    let again = vec![chunk(7, 0, 1, [cleared(), stored(2, 0, 1)])];
    served.servicer.end(&Status::data_loss("incarnation 1"), again);
    site.settles("gpu-0", 1, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
        (0, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_has_missed_is_in_doubt_until_the_engine_clears() {
    let site = Site::new(&[]).await;
    let mut late = chunk(50, 0, 1, [cleared(), stored(1, 0, 2)]);
    late.snapshot.as_mut().unwrap().unknown_before = 12;
    let served = followed(&site, vec![late]).await;
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
    served.servicer.publish(&frame(51, [cleared(), stored(1, 0, 1)]));
    site.settles("gpu-0", 1, &[]).await;
    // The server now passes on only live events, as a relay does.
    served.servicer.end(
        &Status::unavailable("restarted"),
        vec![frame(52, [stored(1, 1, 1), stored(2, 0, 1)])],
    );
    site.settles("gpu-0", 1, &["upstream_gap"]).await;
    let error = eventually("it is said how to start the other relay", async || {
        let error = site.bridge.engines().first()?.last_error.clone()?;
        error.contains("--servicer-impl rust").then_some(error)
    })
    .await;
    assert!(
        error.contains("rank 0: 52 batches came before") && error.contains("reset the engine's prefix cache"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hole_is_asked_for_from_the_start() {
    let site = Site::new(&[]).await;
    let served = followed(&site, vec![frame(0, [stored(1, 0, 1)])]).await;
    site.settles("gpu-0", 1, &[]).await;
    let all = vec![
        frame(0, [stored(1, 0, 1)]),
        frame(1, [stored(1, 1, 1)]),
        frame(2, [stored(1, 2, 1)]),
    ];
    *served.servicer.history.lock() = all;
    served.servicer.publish(&frame(2, [stored(1, 2, 1)]));
    site.settles("gpu-0", 3, &[]).await;
    assert_eq!(served.servicer.subscriptions.load(Ordering::SeqCst), 2);
    // The server ends, so the bridge no longer sees the engine.
    let servicer = served.servicer.clone();
    drop(served);
    servicer.end(&Status::unavailable("shutting down"), Vec::new());
    site.settles("gpu-0", 3, &["unverified", "upstream_lost"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_events_says_what_to_start() {
    let site = Site::new(&[]).await;
    let servicer = Servicer {
        is_off: true,
        ..Servicer::default()
    };
    let served = serve(servicer).await;
    follow_text(&site.bridge, &format!("gpu-0=grpc://{}", served.address));
    troubled(&site.bridge, "the reason is told", |error| {
        error.contains("--kv-events-config")
    })
    .await;
}

fn told(model: &str, block_size: i32, history: Vec<Frame>) -> Servicer {
    let servicer = Servicer {
        model: Some(sent::Model {
            model_path: "/models/m".to_owned(),
            served_model_name: model.to_owned(),
        }),
        info: Some(sent::Info {
            data_parallel_size: 0,
            block_size,
        }),
        ..Servicer::default()
    };
    *servicer.history.lock() = history;
    servicer
}

/// Starts a gRPC server, with the settings of `server`, for an engine of model `m` that has three blocks of sequence 1.
pub(super) async fn serve_three_blocks(server: tonic::transport::Server) -> (SocketAddr, DropGuard) {
    let block_size = i32::try_from(BLOCK).unwrap();
    let servicer = told("m", block_size, vec![frame(0, [stored(1, 0, 3)])]);
    serve_grpc_by(server, VllmEngine(servicer)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hands_on_events_tells_model_and_block_size() {
    let site = Site::new(&[]).await;
    let block_size = i32::try_from(BLOCK).unwrap();
    let served = serve(told("m", block_size, vec![frame(0, [stored(1, 0, 4)])])).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", served.address)).unwrap();
    site.settles("gpu-0", 4, &[]).await;
    // The server does not know its block size yet. The first block of the engine gives the size.
    let site = Site::new(&[]).await;
    let served = serve(told("m", 0, vec![frame(0, [stored(2, 0, 3)])])).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", served.address)).unwrap();
    site.settles("gpu-0", 3, &[]).await;
    assert_eq!(site.bridge.engines()[0].engine.block_size, BLOCK);
}

/// A server hands on live events only, and does not tell the block size. The frame that tells the size must not be lost.
#[tokio::test(flavor = "multi_thread")]
async fn the_frame_that_tells_the_block_size_counts() {
    let site = Site::new(&[]).await;
    let served = serve(told("m", 0, Vec::new())).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", served.address)).unwrap();
    eventually("the bridge subscribes", async || {
        (served.servicer.subscriptions.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    served.servicer.publish(&frame(0, [cleared()]));
    served.servicer.publish(&frame(1, [stored(1, 0, 3)]));
    site.settles("gpu-0", 3, &[]).await;
}

/// A server states two ranks, but passes on the events of only one, as vLLM's Rust server does. The bridge must report
/// this in the engine's last error, and the rank that is heard must stay exact.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_are_not_heard_are_told_and_the_others_stay_exact() {
    let site = Site::new(&[]).await;
    let block_size = i32::try_from(BLOCK).unwrap();
    let mut servicer = told("m", block_size, vec![frame(0, [stored(1, 0, 4)])]);
    servicer.info = Some(sent::Info {
        data_parallel_size: 2,
        block_size,
    });
    let served = serve(servicer).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", served.address)).unwrap();
    site.settles("gpu-0", 4, &[]).await;
    let says = async |is_it: fn(Option<&str>) -> bool| {
        eventually("the bridge says so", async || {
            let state = site.bridge.engines().into_iter().next()?;
            is_it(state.last_error.as_deref()).then_some(state.status)
        })
        .await
    };
    let told =
        says(|error| error.is_some_and(|error| error.contains("1 of 2 ranks") && error.contains("ranks=2")));
    assert_eq!(told.await, EngineStatus::Exact);
    let second = Frame {
        dp_rank: Some(1),
        ..frame(0, [stored(2, 0, 1)])
    };
    served.servicer.publish(&second);
    assert_eq!(says(|error| error.is_none()).await, EngineStatus::Exact);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hands_on_events_of_another_model_is_refused_in_words() {
    let site = Site::new(&[]).await;
    let served = serve(told("other", 4, vec![frame(0, [stored(1, 0, 4)])])).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{},model=m", served.address)).unwrap();
    let state = troubled(&site.bridge, "it says why", |error| {
        error.contains("\"other\", not \"m\"")
    })
    .await;
    assert!(state.engines.is_empty() && site.bridge.engines().is_empty());
    // A server that names no model needs a model in the registration.
    let site = Site::new(&[]).await;
    let served = serve(Servicer::default()).await;
    follow(&site.bridge, &format!("gpu-0=grpc://{}", served.address)).unwrap();
    troubled(&site.bridge, "it asks for the model", |error| {
        error.contains("--model")
    })
    .await;
}

/// The bridge has missed the first events of an engine, so its holder is in doubt. An operator can make the engine drop
/// its cache over gRPC; then the holder is exact. Refusals of the server must reach the operator.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_asked_to_drop_its_cache_over_grpc() {
    let site = Site::new(&[]).await;
    let served = followed(&site, vec![frame(52, [stored(1, 0, 2)])]).await;
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
    let error = reset(&site, "gpu-0").await.error.unwrap();
    assert!(error.contains("FlushCache is not served"), "{error}");
    let answer = |success: bool, message: &str| {
        *served.servicer.flushed.lock() = Some(sent::Flushed {
            success,
            message: message.to_owned(),
        });
    };
    answer(false, "2 requests run");
    let error = reset(&site, "gpu-0").await.error.unwrap();
    assert!(
        error.contains("while requests run") && error.contains("2 requests run"),
        "{error}"
    );
    answer(true, "");
    let reply = reset(&site, "gpu-0").await;
    assert_eq!((reply.holders, reply.error), (1, None));
    served.servicer.publish(&frame(53, [cleared(), stored(2, 0, 1)]));
    site.settles("gpu-0", 1, &[]).await;
}
