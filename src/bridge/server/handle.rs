//! Handle of an engine's server, which the bridge asks. The server's own task, its publishers' tasks and the bridge share it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_core::wire::{Profile, Rank};
use parking_lot::Mutex;
use tokio::sync::watch;

use kvatlas_process::registry::{Discovered, EngineKey, NewEngine, NewServer};

use super::super::grpc::Frames;
use super::super::http::ServerAddress;
use super::super::sockets::{SocketError, Subscription};
use super::super::sources::FollowedSourceError;

/// The state of a server that is asked.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServerProgress {
    /// Publishers of the server that are followed.
    pub(crate) engines: Vec<EngineKey>,
    /// Trouble with the server, in words; `None` while nothing is wrong.
    pub(crate) trouble: Option<String>,
    /// Whether the bridge only waits for the engine's first block. Then `trouble` says so.
    pub(crate) is_idle: bool,
    /// Whether the server has answered the last question, also where its answer cannot be used.
    pub(crate) answers: bool,
}

impl ServerProgress {
    /// Returns whether an error keeps the server's engine from being followed. A wait for the first block is no error.
    pub(super) fn is_troubled(&self) -> bool {
        self.trouble.is_some() && !self.is_idle
    }
}

/// Connection to a publisher that was made before the publisher was followed.
#[derive(Debug)]
pub(super) struct EarlyConnection {
    pub(super) rank: Rank,
    pub(super) endpoint: String,
    pub(super) topic: String,
    pub(super) made: MadeConnection,
}

/// The connection itself.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one for each rank, while its server is being asked"
)]
pub(super) enum MadeConnection {
    /// A subscription to sockets.
    Sockets(Subscription),
    /// A stream over gRPC.
    Stream(Box<Frames>),
}

/// State that the task of a server shares with the tasks that follow the server's publishers.
#[derive(Debug)]
pub(super) struct SharedServerState {
    /// Number of questions to the server that tasks have requested so far.
    pub(super) wanted: watch::Sender<u64>,
    /// Number of the last requested question whose answer the server's task has acted on. Earlier questions count as
    /// answered, too.
    pub(super) answered: watch::Sender<u64>,
    pub(super) progress: Mutex<ServerProgress>,
    /// Address and labels of the server's engine, which may change while the server is asked.
    pub(super) profile: Mutex<Profile>,
    /// Labels that the source found with the server. They may change while the server is asked.
    pub(super) found_labels: Mutex<BTreeMap<String, String>>,
    /// Connections over which the block size was looked for. The tasks that follow the publishers take them over.
    connections: Mutex<Vec<EarlyConnection>>,
    /// Name of the engine's process, as the server last reported it; `None` if the server reports none.
    pub(super) process: Mutex<Option<String>>,
    /// Number of ranks whose events one publisher sends, as the server last reported it; `None` if the server does not
    /// report it.
    pub(super) ranks: Mutex<Option<u32>>,
}

/// Handle of an engine's server, which reports publishers. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct ServerHandle {
    /// Settings of the server, from the flags, the file, the discovery or the registration that named it first.
    pub(crate) server: Arc<NewServer>,
    pub(super) shared: Arc<SharedServerState>,
}

/// Server that reported a publisher, as the task that follows the publisher knows it.
#[derive(Debug, Clone)]
pub(crate) struct OriginServer {
    pub(crate) handle: ServerHandle,
    /// Hint for an error text if nobody listens at the publisher's endpoint: it names the flag to set.
    pub(crate) refused_hint: Option<&'static str>,
}

impl OriginServer {
    /// Requests that the server is asked again, and returns the number of that question. Called when the connection
    /// broke or cannot be made, because the server's answer may have changed.
    pub(crate) fn ask_again(&self) -> u64 {
        let mut ticket = 0;
        self.handle.shared.wanted.send_modify(|wanted| {
            *wanted = wanted.wrapping_add(1);
            ticket = *wanted;
        });
        ticket
    }

    /// Asks the server again. The caller waits until its answer names the publisher as before.
    pub(crate) fn confirmation(&self) -> Confirmation {
        Confirmation {
            ticket: self.ask_again(),
            answered: self.handle.shared.answered.subscribe(),
            handle: self.handle.clone(),
        }
    }

    /// Returns a subscription to this publisher that was made before the publisher was followed; `None` if there is none. It
    /// is returned once.
    pub(crate) fn take_subscription(&self, engine: &NewEngine) -> Option<Subscription> {
        match self.handle.take_connection(engine)? {
            MadeConnection::Sockets(subscription) => Some(subscription),
            MadeConnection::Stream(_) => None,
        }
    }

    /// Returns a stream of this publisher that was opened before the publisher was followed; `None` if there is none. It is
    /// returned once.
    pub(crate) fn take_frames(&self, engine: &NewEngine) -> Option<Frames> {
        match self.handle.take_connection(engine)? {
            MadeConnection::Stream(frames) => Some(*frames),
            MadeConnection::Sockets(_) => None,
        }
    }

    /// Returns the name of the engine's process, as the server last reported it; `None` if the server reports none.
    pub(crate) fn process(&self) -> Option<String> {
        self.handle.shared.process.lock().clone()
    }

    /// Returns the number of ranks whose events one publisher sends, as the server last reported it; `None` if the server
    /// does not report it.
    pub(crate) fn ranks(&self) -> Option<u32> {
        *self.handle.shared.ranks.lock()
    }

    /// Returns whether another process at this address counts as the same engine. It does in two cases: the source that
    /// found the engine confirms its identity, or the engine's name is nothing but its address.
    pub(crate) fn vouches(&self) -> bool {
        let server = &self.handle.server;
        let address = ServerAddress::of_server(&server.url);
        let is_name = |address: ServerAddress| address.authority() == server.instance;
        !server.discovered.identity.is_empty() || address.is_some_and(is_name)
    }

    /// Returns the text of an error, with the flag that corrects it.
    pub(crate) fn explain(&self, error: &FollowedSourceError) -> String {
        let of_socket = match error {
            FollowedSourceError::Broken(error) => error.downcast_ref::<SocketError>(),
            _ => None,
        };
        of_socket.map_or_else(|| error.to_string(), |error| explain(error, self.refused_hint))
    }
}

/// Question to a server whether a publisher is still its own.
pub(crate) struct Confirmation {
    handle: ServerHandle,
    ticket: u64,
    answered: watch::Receiver<u64>,
}

impl Confirmation {
    /// Waits until the server has answered, and returns `false` then. Returns `true` after each `pause` before that in which
    /// the server is known to be there. If the answer names the publisher otherwise, the publisher is no longer followed,
    /// and this call never returns `false`.
    pub(crate) async fn is_open(&mut self, pause: Duration) -> bool {
        loop {
            let answer = self.answered.wait_for(|answered| *answered >= self.ticket);
            let is_answered = tokio::time::timeout(pause, answer)
                .await
                .map(|answer| answer.is_ok());
            match is_answered {
                Ok(true) => return false,
                Ok(false) => std::future::pending().await,
                Err(_) if self.handle.is_there() => return true,
                Err(_) => {}
            }
        }
    }
}

/// Returns the text of a socket's error. If nobody listens at the endpoint, the text names the flag that corrects it.
pub(super) fn explain(error: &SocketError, refused_hint: Option<&str>) -> String {
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
    pub(crate) fn new(server: NewServer) -> Self {
        let profile = Mutex::new(server.profile.clone());
        let found_labels = Mutex::new(server.discovered.labels.clone());
        Self {
            server: Arc::new(server),
            shared: Arc::new(SharedServerState {
                profile,
                found_labels,
                wanted: watch::Sender::new(0),
                answered: watch::Sender::new(0),
                progress: Mutex::default(),
                connections: Mutex::default(),
                process: Mutex::default(),
                ranks: Mutex::default(),
            }),
        }
    }

    /// Returns the state of the server as it is now.
    pub(crate) fn progress(&self) -> ServerProgress {
        self.shared.progress.lock().clone()
    }

    /// Returns the server as it is given now, with its latest address and labels.
    pub(crate) fn given(&self) -> NewServer {
        NewServer {
            profile: self.profile(),
            discovered: Discovered {
                labels: self.shared.found_labels.lock().clone(),
                ..self.server.discovered.clone()
            },
            ..NewServer::clone(&self.server)
        }
    }

    pub(crate) fn profile(&self) -> Profile {
        self.shared.profile.lock().clone()
    }

    /// Whether the address or labels of `server` are not those that this server has now.
    pub(crate) fn is_labelled_otherwise(&self, server: &NewServer) -> bool {
        *self.shared.profile.lock() != server.profile
            || *self.shared.found_labels.lock() != server.discovered.labels
    }

    /// Takes over the address and all labels of `server`, which is asked in the same way as this server.
    pub(crate) fn relabel(&self, server: &NewServer) {
        *self.shared.profile.lock() = server.profile.clone();
        *self.shared.found_labels.lock() = server.discovered.labels.clone();
    }

    /// Returns whether an error keeps the server's engine from being followed (see [`ServerProgress::is_troubled`]).
    pub(crate) fn is_troubled(&self) -> bool {
        self.shared.progress.lock().is_troubled()
    }

    /// Whether the server has answered the last question.
    pub(crate) fn answers(&self) -> bool {
        self.shared.progress.lock().answers
    }

    pub(crate) fn set_answers(&self, answers: bool) {
        self.shared.progress.lock().answers = answers;
    }

    /// Whether the server is known to be there: it has answered the last question, or the source that has found it, such as
    /// Kubernetes, still has it.
    pub(crate) fn is_there(&self) -> bool {
        self.answers() || !self.server.discovered.identity.is_empty()
    }

    /// Returns whether both handles belong to the same server.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Sets the connections that the tasks of the server's publishers take over.
    pub(super) fn set_connections(&self, connections: impl IntoIterator<Item = EarlyConnection>) {
        *self.shared.connections.lock() = connections.into_iter().collect();
    }

    fn take_connection(&self, engine: &NewEngine) -> Option<MadeConnection> {
        let mut connections = self.shared.connections.lock();
        let place = connections.iter().position(|early| {
            early.rank == engine.key.rank && early.endpoint == engine.endpoint && early.topic == engine.topic
        })?;
        Some(connections.swap_remove(place).made)
    }

    /// Ends the connection to a publisher that was made before the bridge refused to follow the publisher.
    pub(crate) fn drop_connection(&self, engine: &NewEngine) {
        drop(self.take_connection(engine));
    }

    pub(crate) fn set_engines(&self, engines: Vec<EngineKey>) {
        self.shared.progress.lock().engines = engines;
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
