//! Engines that are named by the address of their server. The bridge asks the server which publishers the engine has, and asks
//! again after each broken connection.
//!
//! ```text
//!                     ┌───────── asks ─────────┐
//! engine's server ◀───┤ ServerTask             │ follows the reported publishers, and drops those that are no longer reported
//!                     └──▲────────────────┬────┘
//!              «ask it»  │                ▼ «it has told the same»
//!                     SourceTask of each rank: connects, waits for that, and only then believes what comes
//! ```
//!
//! A server over HTTP tells of ZeroMQ publishers. A server over gRPC either sends events itself, or tells of ZeroMQ publishers,
//! too.
//!
//! An answer counts for the connections that were open when the question was sent. So nothing that comes over a new connection
//! is believed before the server has shown that it belongs to the same engine, that is, has the same model, topics, block size
//! and sockets. Two engines may be alike in all of these. Only the source that found the engines can tell them apart, so the
//! bridge asks the source, too.
//!
//! | file | subject |
//! |---|---|
//! | `handle.rs` | state of a server, which its own task shares with its publishers' tasks and the bridge |
//! | `answers.rs`, `ask.rs`, `control.rs` | asking over HTTP, and over gRPC |
//! | `size.rs` | the size of blocks, from the engine's first block |
//! | `mod.rs` | the task that asks, and registers what the server tells |

mod answers;
mod ask;
mod control;
mod handle;
mod size;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_client::Backoff;
use kvatlas_core::wire::ModelKey;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::{EngineKey, NewEngine, RegisterRefusal};
use kvatlas_telemetry::{BridgeMetrics, log_gated};

use super::discovery::LookError;
use super::engines::Bridge;
use super::hosts::{host_of, is_here};
use super::http::ServerAddress;
use ask::{AskError, Described, ask};
use handle::explain;
pub(super) use handle::{OriginServer, ServerHandle};
use size::{SizeError, SizeSearch};

/// Maximum time for all answers of a server together: a server that handles requests may be busy.
const ASK_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two checks whether another engine of the model is followed, whose block size is then used.
const SIZE_INTERVAL: Duration = Duration::from_secs(1);

/// An error that keeps the engine of a server from being followed, for now.
#[derive(Debug, thiserror::Error)]
enum ServerError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("its events do not tell the block size: {0}")]
    Size(String),
    #[error(transparent)]
    Look(#[from] LookError),
    #[error(transparent)]
    Refused(#[from] RegisterRefusal),
    /// A publisher is not followed. What the server tells of the other ones counts.
    #[error(transparent)]
    RefusedPublisher(RegisterRefusal),
}

/// Asks one server, for as long as its engine is followed.
pub(super) struct ServerTask {
    pub(super) handle: ServerHandle,
    pub(super) address: ServerAddress,
    pub(super) bridge: Bridge,
    pub(super) patience: Duration,
    pub(super) backoff: Backoff,
    pub(super) metrics: Arc<BridgeMetrics>,
    /// Error that was logged last; `None` once the server has told how to follow its engine.
    pub(super) logged: Mutex<Option<String>>,
    pub(super) stop: CancellationToken,
}

impl ServerTask {
    pub(super) async fn run(self) {
        let stop = self.stop.clone();
        stop.run_until_cancelled(Box::pin(self.ask_for_ever())).await;
    }

    async fn ask_for_ever(self) {
        let mut wanted = self.handle.shared.wanted.subscribe();
        let (mut failures, mut search) = (0, None);
        self.set_progress(Some("the server has not answered yet".to_owned()), false);
        loop {
            let ticket = *wanted.borrow_and_update();
            let asked = self.ask_once(&mut search).await;
            match asked {
                Ok(()) => {
                    failures = 0;
                    self.note(None);
                    self.handle.shared.answered.send_replace(ticket);
                    // This task holds the sender, too, so the channel never closes here.
                    if wanted.changed().await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    failures += 1;
                    if matches!(error, ServerError::RefusedPublisher(_)) {
                        self.handle.shared.answered.send_replace(ticket);
                    }
                    // Only these errors leave no doubt that the same process is there.
                    if !matches!(error, ServerError::Size(_) | ServerError::Look(_)) {
                        search = None;
                    }
                    if let ServerError::Ask(error) = &error
                        && error.is_other_engine()
                    {
                        self.bridge.forget_publishers(&self.handle);
                        self.bridge.end_announcement(&self.handle).await;
                    } else if !matches!(error, ServerError::RefusedPublisher(_)) {
                        self.bridge.announce(&self.handle);
                    }
                    self.note(Some(&error));
                    let pause = self.backoff.pause(failures);
                    match &mut search {
                        Some(search) => search.read_on(pause).await,
                        None => tokio::time::sleep(pause).await,
                    }
                }
            }
        }
    }

    /// Asks the server once, and follows the publishers that the server reports. `search` is the search for the block size
    /// of an earlier attempt.
    async fn ask_once(&self, search: &mut Option<SizeSearch>) -> Result<(), ServerError> {
        let asked = ask(&self.handle.server, &self.address, ASK_PATIENCE).await;
        self.handle
            .set_answers(asked.as_ref().err().is_none_or(AskError::is_answer));
        let described = asked?;
        let server = &self.handle.server;
        let model = ModelKey::of_tenant(described.model.clone(), &server.tenant);
        let model = model.speaking(server.scheme.clone());
        // The search for the block size connects to the sockets, too.
        self.check_hosts(&described)?;
        search.take_if(|search| !search.is_of(&described.publishers));
        let block_size = self.block_size(&described, &model, search).await?;
        let mut beside = self.handle.server.beside.clone();
        beside.tells_beyond |= described.publishers.has_no_connector;
        let followed: Vec<_> = described
            .publishers
            .sockets
            .iter()
            .map(|sockets| {
                let engine = NewEngine {
                    key: EngineKey {
                        instance: self.handle.server.instance.clone(),
                        model: model.clone(),
                        rank: sockets.rank,
                    },
                    endpoint: sockets.endpoint.clone(),
                    replay: sockets.replay.clone(),
                    format: described.publishers.format,
                    block_size,
                    topic: sockets.topic.clone(),
                    beside: beside.clone(),
                    groups: self.handle.server.groups.clone(),
                    profile: self.handle.profile(),
                    discovery: None,
                    ttl: None,
                };
                (engine, sockets.refused_hint)
            })
            .collect();
        self.bridge.confirm_found(server).await?;
        *self.handle.shared.process.lock() = described.process;
        *self.handle.shared.ranks.lock() = described.ranks;
        if let Some(search) = search.take() {
            self.handle.set_connections(search.into_connections());
        }
        let followed = self.bridge.follow_publishers(&self.handle, followed);
        followed.map_err(ServerError::RefusedPublisher)
    }

    /// Checks the hosts of the sockets that a server names: they may be on its own machine, or on hosts that the operator
    /// allows. A server elsewhere may not name the bridge's own machine, where another engine may listen.
    fn check_hosts(&self, described: &Described) -> Result<(), RegisterRefusal> {
        let sockets = described.publishers.sockets.iter();
        let endpoints = sockets.flat_map(|sockets| std::iter::once(&sockets.endpoint).chain(&sockets.replay));
        let is_loopback = |peer: &IpAddr| peer.to_canonical().is_loopback();
        let is_server_here = is_here(&self.address.host) || described.peers.iter().any(is_loopback);
        for endpoint in endpoints {
            let host = host_of(endpoint).unwrap_or_default();
            let is_peer = |peer: &IpAddr| host == peer.to_canonical().to_string();
            let is_own = host == self.address.host || described.peers.iter().any(is_peer);
            let is_elsewhere = is_here(&host) && !is_server_here;
            if !is_own && (is_elsewhere || !self.bridge.allows_host(&host)) {
                let endpoint = endpoint.to_owned();
                return Err(RegisterRefusal::Host { host, endpoint });
            }
        }
        Ok(())
    }

    /// Returns the size of the engine's blocks, from the first of these sources that knows it: the given size, the
    /// server's answer, other engines of the model, the engine's first block.
    async fn block_size(
        &self,
        described: &Described,
        model: &ModelKey,
        search: &mut Option<SizeSearch>,
    ) -> Result<u32, ServerError> {
        let told = self.handle.server.block_size.or(described.publishers.block_size);
        if let Some(size) = told.or_else(|| self.bridge.size_of(model)) {
            return Ok(size);
        }
        let search = search.get_or_insert_with(|| SizeSearch::new(described.publishers.clone()));
        self.found_size(search, described, model).await
    }

    /// Returns the size of the engine's blocks from other engines of the model, or from the engine's first block.
    async fn found_size(
        &self,
        search: &mut SizeSearch,
        described: &Described,
        model: &ModelKey,
    ) -> Result<u32, ServerError> {
        let in_words = |error: &SizeError| {
            let mut hints = described
                .publishers
                .sockets
                .iter()
                .map(|sockets| sockets.refused_hint);
            let hint = hints.find_map(|hint| hint);
            ServerError::Size(match error {
                SizeError::Socket(error) => explain(error, hint),
                error => error.to_string(),
            })
        };
        let first = search.first_size(self.patience, &self.metrics, |absent| match absent {
            Some(error) => self.set_progress(Some(in_words(error).to_string()), false),
            None => self.note_waiting(),
        });
        let of_others = async {
            loop {
                tokio::time::sleep(SIZE_INTERVAL).await;
                if let Some(size) = self.bridge.size_of(model) {
                    return size;
                }
            }
        };
        tokio::select! {
            size = first => size.map_err(|error| in_words(&error)),
            size = of_others => Ok(size),
        }
    }

    fn note_waiting(&self) {
        let text = "waits for the first block, which tells the block size; block_size=N says it at once";
        self.set_progress(Some(text.to_owned()), true);
    }

    /// Notes why the engine is not followed, and logs the reason if it has changed. `None` means that the engine is
    /// followed.
    fn note(&self, error: Option<&ServerError>) {
        let trouble = error.map(ToString::to_string);
        let server = &self.handle.server;
        self.set_progress(trouble.clone(), false);
        let logged = std::mem::replace(&mut *self.logged.lock(), trouble.clone());
        if trouble == logged {
            return;
        }
        let (engine, url) = (&server.instance, &server.url);
        match error {
            Some(error @ (ServerError::Refused(_) | ServerError::RefusedPublisher(_))) => {
                log_gated!(warn "the bridge refuses an engine as its server tells it" up to 64; engine, url, %error);
            }
            Some(error) => {
                log_gated!(warn "an engine's server does not tell how to follow it" up to 64; engine, url, %error);
            }
            None => {
                log_gated!(info "the engine's server tells how to follow it" up to 64; engine, url);
            }
        }
    }

    fn set_progress(&self, trouble: Option<String>, is_idle: bool) {
        let mut progress = self.handle.shared.progress.lock();
        let was_troubled = progress.is_troubled();
        (progress.trouble, progress.is_idle) = (trouble, is_idle);
        let is_troubled = progress.is_troubled();
        drop(progress);
        if was_troubled != is_troubled {
            self.bridge.count_servers();
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::Subjects;
    use kvatlas_engines::Format;
    use kvatlas_process::registry::GivenEngine;

    use super::super::engines::BridgeOptions;
    use super::super::sockets::Subscription;
    use super::super::spec::{EngineDefaults, parse_engine};
    use super::super::zmtp::{PeerConnection, Role};
    use super::answers::{Publishers, Sockets};
    use super::handle::{EarlyConnection, MadeConnection};
    use super::*;

    /// Checks an endpoint that the server `url` tells, whose bridge also follows an engine of its own machine.
    fn checked(url: &str, peer: &str, endpoint: &str) -> Result<(), RegisterRefusal> {
        let parse = |text: &str| parse_engine(text, &EngineDefaults::default()).unwrap();
        let GivenEngine::Server(server) = parse(&format!("gpu-0={url}")).remove(0) else {
            panic!("it is a server");
        };
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let here = parse("gpu-1=tcp://127.0.0.1:1,model=m,block_size=16");
        bridge.replace("flags", &here).unwrap();
        let task = ServerTask {
            address: ServerAddress::of_server(&server.url).unwrap(),
            handle: ServerHandle::new(server),
            patience: Duration::from_secs(1),
            backoff: BridgeOptions::default().follow.backoff,
            metrics: Arc::clone(bridge.metrics()),
            bridge,
            logged: Mutex::default(),
            stop: CancellationToken::new(),
        };
        let sockets = Sockets {
            rank: 0,
            endpoint: endpoint.to_owned(),
            replay: None,
            topic: String::new(),
            refused_hint: None,
        };
        task.check_hosts(&Described {
            model: "m".to_owned(),
            publishers: Publishers {
                format: Format::Vllm,
                block_size: None,
                has_no_connector: false,
                sockets: vec![sockets],
            },
            peers: vec![peer.parse().unwrap()],
            process: None,
            ranks: None,
        })
    }

    /// The block size was looked for over early connections. One rank is followed already, from a flag.
    #[tokio::test]
    async fn the_early_connections_of_followed_ranks_stay() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut peers = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                peers.push(PeerConnection::open(stream, Role::Publisher).await);
            }
        });
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let parse = |text: &str| parse_engine(text, &EngineDefaults::default()).unwrap();
        let flag = parse("gpu-0=tcp://127.0.0.1:1,model=m,block_size=16,rank=1");
        bridge.replace("flags", &flag).unwrap();
        let server = parse("gpu-0=http://127.0.0.1:2,model=m").remove(0);
        bridge.replace("file", std::slice::from_ref(&server)).unwrap();
        let handle = bridge.handle_of("gpu-0").unwrap();
        let (mut told, mut early) = (Vec::new(), Vec::new());
        for rank in 0..2 {
            let text = format!("gpu-0={endpoint},model=m,block_size=16,rank={rank}");
            let GivenEngine::Publisher(engine) = parse(&text).remove(0) else {
                panic!("it is a publisher");
            };
            let metrics = Arc::clone(bridge.metrics());
            let made = Subscription::connect(&endpoint, "", Duration::from_secs(60), metrics).await;
            early.push(EarlyConnection {
                rank,
                endpoint: endpoint.clone(),
                topic: String::new(),
                made: MadeConnection::Sockets(made.unwrap()),
            });
            told.push((engine, None));
        }
        handle.set_connections(early);
        bridge.follow_publishers(&handle, told.clone()).unwrap_err();
        let has = told.iter().map(|(engine, _)| {
            let origin = OriginServer {
                handle: handle.clone(),
                refused_hint: None,
            };
            origin.take_subscription(engine).is_some()
        });
        assert_eq!(has.collect::<Vec<_>>(), [true, false]);
    }

    #[tokio::test]
    async fn a_server_elsewhere_names_no_socket_of_this_machine() {
        let (here, elsewhere) = ("http://127.0.0.1:8000", "http://192.0.2.1:8000");
        for endpoint in ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1"] {
            checked(here, "127.0.0.1", endpoint).unwrap();
            checked("http://gpu-0:8000", "::1", endpoint).unwrap();
            let refused = checked(elsewhere, "192.0.2.1", endpoint);
            assert!(matches!(refused, Err(RegisterRefusal::Host { .. })), "{endpoint}");
        }
        checked(elsewhere, "192.0.2.1", "tcp://192.0.2.1:1").unwrap();
    }
}
