//! Engines that are named by the address of their server. The bridge asks the server for the rest, and asks again after each broken
//! connection.
//!
//! ```text
//!                     ┌───────── asks ─────────┐
//! engine's server ◀───┤ ServerTask             │ registers, and ends to follow, by the difference to what was told before
//!                     └──▲────────────────┬────┘
//!              «ask it»  │                ▼ «it has told the same»
//!                     EngineTask of each rank: connects, waits for that, and only then believes what comes
//! ```
//!
//! A server over HTTP tells of ZeroMQ publishers. A server over gRPC either hands on events itself, or tells of ZeroMQ publishers, too.
//!
//! An answer counts for the connections that stood when the question was sent. So nothing that comes over a new connection is believed
//! before the server behind it has shown that it is the same engine. The same engine means the same model, topics, block size and sockets.
//! Two engines may be alike in all of that. Only the source that found them can tell them apart, so that the source is asked, too.

mod answers;
mod ask;
mod control;
mod size;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_client::Backoff;
use kvatlas_core::wire::{ModelKey, Profile};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::{Discovered, EngineKey, NewEngine, NewServer, RegisterRefusal};
use kvatlas_telemetry::{BridgeMetrics, log_gated};

use super::discovery::LookError;
use super::engines::Bridge;
use super::follower::FollowError;
use super::hosts::host_of;
use super::http::ServerAddress;
use super::sockets::SocketError;
use ask::{AskError, Described, ask};
use size::{SizeError, first_size};

/// Longest time for all answers of a server together: a server that handles requests may be busy.
const ASK_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two checks whether another engine of the model has told the block size.
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
}

/// The state of a server that is asked.
#[derive(Debug, Clone, Default)]
pub(super) struct ServerProgress {
    /// Publishers of the server that are followed.
    pub(super) engines: Vec<EngineKey>,
    /// Trouble with the server, in words; `None` while nothing is wrong.
    pub(super) trouble: Option<String>,
}

/// The state that the task of a server shares with those of its publishers.
#[derive(Debug)]
struct Shared {
    /// Number of questions that tasks have wanted so far.
    wanted: watch::Sender<u64>,
    /// Number of the last wanted question whose answer was followed. All questions up to that number are answered.
    answered: watch::Sender<u64>,
    progress: Mutex<ServerProgress>,
    /// Address and labels of the server's engine, which may change while the server is asked.
    profile: Mutex<Profile>,
    /// Labels with which the server was found, which may change, too.
    found_labels: Mutex<BTreeMap<String, String>>,
    /// Name of the engine's process, as the server has told it last; `None` if it tells none.
    process: Mutex<Option<String>>,
    /// Number of ranks that one publisher tells of, as the server has said last; `None` if it says nothing of that.
    ranks: Mutex<Option<u32>>,
}

/// A server that tells of publishers. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ServerHandle {
    /// The server as it was given first.
    pub(super) server: Arc<NewServer>,
    shared: Arc<Shared>,
}

/// Server that has told of a publisher, as the publisher's task knows it.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub(super) handle: ServerHandle,
    /// Hint with the flag to set if nobody listens at the publisher's endpoint.
    pub(super) refused_hint: Option<&'static str>,
}

impl Origin {
    /// Has the server asked again, and returns the number of the question. Called when the connection broke or cannot be made: the server
    /// may tell something else by now.
    pub(super) fn ask_again(&self) -> u64 {
        let mut ticket = 0;
        self.handle.shared.wanted.send_modify(|wanted| {
            *wanted = wanted.wrapping_add(1);
            ticket = *wanted;
        });
        ticket
    }

    /// Waits until the server, asked after this call, has told the same as before. Never returns if it tells something else: the publisher
    /// is then no longer followed.
    pub(super) async fn confirmed(&self) {
        let ticket = self.ask_again();
        let mut answered = self.handle.shared.answered.subscribe();
        if answered.wait_for(|answered| *answered >= ticket).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns the name of the engine's process, as the server has told it last; `None` if it tells none.
    pub(super) fn process(&self) -> Option<String> {
        self.handle.shared.process.lock().clone()
    }

    /// Returns the number of ranks that one publisher tells of, as the server has said last; `None` if it says nothing of that.
    pub(super) fn ranks(&self) -> Option<u32> {
        *self.handle.shared.ranks.lock()
    }

    /// Tells whether another process at this address counts as the same engine. It does if the source that found the engine confirms its
    /// identity, or if the engine's name is nothing but its address.
    pub(super) fn vouches(&self) -> bool {
        let server = &self.handle.server;
        let address = ServerAddress::of_server(&server.url);
        let is_name = |address: ServerAddress| address.authority() == server.instance;
        !server.discovered.identity.is_empty() || address.is_some_and(is_name)
    }

    /// Returns an error in words, with the flag that mends it.
    pub(super) fn explain(&self, error: &FollowError) -> String {
        match error {
            FollowError::Socket(error) => explain(error, self.refused_hint),
            FollowError::Publisher(error) => error.to_string(),
        }
    }
}

/// Returns an error of a socket in words. If nobody listens at the endpoint, the words name the flag that mends it.
fn explain(error: &SocketError, refused_hint: Option<&str>) -> String {
    let is_refused =
        matches!(error, SocketError::Network(error) if error.kind() == io::ErrorKind::ConnectionRefused);
    match refused_hint.filter(|_| is_refused) {
        Some(hint) => {
            format!("{error}: the engine's publisher may connect there instead of listening: {hint}")
        }
        None => error.to_string(),
    }
}

impl ServerHandle {
    pub(super) fn new(server: NewServer) -> Self {
        let profile = Mutex::new(server.profile.clone());
        let found_labels = Mutex::new(server.discovered.labels.clone());
        Self {
            server: Arc::new(server),
            shared: Arc::new(Shared {
                profile,
                found_labels,
                wanted: watch::Sender::new(0),
                answered: watch::Sender::new(0),
                progress: Mutex::default(),
                process: Mutex::default(),
                ranks: Mutex::default(),
            }),
        }
    }

    /// Returns the state of the server as it is now.
    pub(super) fn progress(&self) -> ServerProgress {
        self.shared.progress.lock().clone()
    }

    /// Returns the server as it is given now, with its latest address and labels.
    pub(super) fn given(&self) -> NewServer {
        NewServer {
            profile: self.profile(),
            discovered: Discovered {
                identity: self.server.discovered.identity.clone(),
                labels: self.shared.found_labels.lock().clone(),
            },
            ..NewServer::clone(&self.server)
        }
    }

    pub(super) fn profile(&self) -> Profile {
        self.shared.profile.lock().clone()
    }

    /// Takes over the address and all labels of `server`, which is asked like this one.
    pub(super) fn relabel(&self, server: &NewServer) {
        *self.shared.profile.lock() = server.profile.clone();
        *self.shared.found_labels.lock() = server.discovered.labels.clone();
    }

    /// Tells whether the server is in trouble.
    pub(super) fn is_troubled(&self) -> bool {
        self.shared.progress.lock().trouble.is_some()
    }

    /// Tells whether both handles are of one server.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(super) fn set_engines(&self, engines: Vec<EngineKey>) {
        self.shared.progress.lock().engines = engines;
    }
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
        let mut failures = 0;
        loop {
            let ticket = *wanted.borrow_and_update();
            match self.ask_once().await {
                Ok(()) => {
                    failures = 0;
                    self.note(None);
                    self.handle.shared.answered.send_replace(ticket);
                    // Its sender lives as long as this task.
                    if wanted.changed().await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    failures += 1;
                    if let ServerError::Ask(error) = &error
                        && error.is_other_engine()
                    {
                        self.bridge.forget_publishers(&self.handle);
                    }
                    self.note(Some(&error));
                    tokio::time::sleep(self.backoff.pause(failures)).await;
                }
            }
        }
    }

    /// Asks the server once, and follows the publishers that it tells of.
    async fn ask_once(&self) -> Result<(), ServerError> {
        let described = ask(&self.handle.server, &self.address, ASK_PATIENCE).await?;
        let server = &self.handle.server;
        let model = ModelKey::of_tenant(described.model.clone(), &server.tenant);
        let model = model.speaking(server.scheme.clone());
        let block_size = self.block_size(&described, &model).await?;
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
                    beside: self.handle.server.beside.clone(),
                    groups: self.handle.server.groups.clone(),
                    profile: self.handle.profile(),
                    discovery: None,
                };
                (engine, sockets.refused_hint)
            })
            .collect();
        for (engine, _) in &followed {
            self.check_hosts(engine, &described)?;
        }
        self.bridge.confirm_found(server).await?;
        *self.handle.shared.process.lock() = described.process;
        *self.handle.shared.ranks.lock() = described.ranks;
        Ok(self.bridge.follow_publishers(&self.handle, followed)?)
    }

    /// Checks the hosts of an engine's sockets: a server may name sockets on its own machine, or on hosts that the operator allows.
    fn check_hosts(&self, engine: &NewEngine, described: &Described) -> Result<(), RegisterRefusal> {
        for endpoint in engine.endpoints() {
            let host = host_of(endpoint).unwrap_or_default();
            let is_peer = |peer: &IpAddr| host == peer.to_canonical().to_string();
            let is_own = host == self.address.host || described.peers.iter().any(is_peer);
            if !is_own && !self.bridge.allows_host(&host) {
                let endpoint = endpoint.to_owned();
                return Err(RegisterRefusal::Host { host, endpoint });
            }
        }
        Ok(())
    }

    /// Returns the size of the engine's blocks. Sources in this order: the given size, the server's answer, other engines of the model, the
    /// engine's first block.
    async fn block_size(&self, described: &Described, model: &ModelKey) -> Result<u32, ServerError> {
        let told = self.handle.server.block_size.or(described.publishers.block_size);
        if let Some(size) = told.or_else(|| self.bridge.size_of(model)) {
            return Ok(size);
        }
        self.note_waiting();
        let first = first_size(&described.publishers, self.patience, &self.metrics);
        let of_others = async {
            loop {
                tokio::time::sleep(SIZE_INTERVAL).await;
                if let Some(size) = self.bridge.size_of(model) {
                    return size;
                }
            }
        };
        tokio::select! {
            size = first => size.map_err(|error| {
                let mut hints = described.publishers.sockets.iter().map(|sockets| sockets.refused_hint);
                let hint = hints.find_map(|hint| hint);
                ServerError::Size(match &error {
                    SizeError::Socket(error) => explain(error, hint),
                    error => error.to_string(),
                })
            }),
            size = of_others => Ok(size),
        }
    }

    fn note_waiting(&self) {
        let text = "waits for the first block, which tells the block size; block_size=N says it at once";
        self.set_trouble(Some(text.to_owned()));
    }

    /// Notes why the engine is not followed, and logs the reason if it has changed. `None` notes that it is followed.
    fn note(&self, error: Option<&dyn Display>) {
        let trouble = error.map(ToString::to_string);
        let server = &self.handle.server;
        self.set_trouble(trouble.clone());
        let logged = std::mem::replace(&mut *self.logged.lock(), trouble.clone());
        match (trouble, logged) {
            (Some(error), logged) if logged.as_ref() != Some(&error) => {
                log_gated!(
                    warn "an engine's server does not tell how to follow it" up to 64;
                    engine = &server.instance, url = &server.url, error
                );
            }
            (None, Some(_)) => {
                log_gated!(
                    info "the engine's server tells how to follow it" up to 64;
                    engine = &server.instance, url = &server.url
                );
            }
            _ => {}
        }
    }

    fn set_trouble(&self, trouble: Option<String>) {
        let is_troubled = trouble.is_some();
        let before = std::mem::replace(&mut self.handle.shared.progress.lock().trouble, trouble);
        if before.is_some() != is_troubled {
            self.bridge.count_servers();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connection_is_explained_where_the_publisher_may_connect_there() {
        let network = |kind: io::ErrorKind| SocketError::Network(kind.into());
        let hint = Some("give it tcp://*:5557");
        let refused = explain(&network(io::ErrorKind::ConnectionRefused), hint);
        assert!(
            refused.contains("instead of listening: give it tcp://*:5557"),
            "{refused}"
        );
        for (error, hint) in [
            (network(io::ErrorKind::ConnectionRefused), None),
            (network(io::ErrorKind::ConnectionReset), hint),
            (SocketError::Closed, hint),
        ] {
            assert_eq!(explain(&error, hint), error.to_string());
        }
    }
}
