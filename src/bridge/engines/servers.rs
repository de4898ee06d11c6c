//! Engines' servers in the registry. Each server has a task that asks it, and a list of the publishers that it has reported.

use kvatlas_core::wire::ModelKey;
use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::{
    EngineKey, GivenEngine, MeantEngines, NewEngine, NewServer, RegisterRefusal, RemovedEngines, ServerKey,
    ServerState,
};

use super::super::check::check_server;
use super::super::server::{OriginServer, ServerHandle, ServerTask};
use super::awaited::{GivenBy, RefusedEngine};
use super::freed::Freed;
use super::lifetimes::Lifetime;
use super::presumed::{key_of_server, presumed};
use super::{Bridge, BridgeState};

/// A server, and the task that asks it.
pub(super) struct AskedServer {
    pub(super) handle: ServerHandle,
    /// Registration of the server; `None` if it was not registered. A registered server stays when a source that gives it,
    /// too, drops it.
    pub(super) registered: Option<Lifetime>,
    pub(super) stop: CancellationToken,
}

impl AskedServer {
    pub(super) fn state(&self) -> ServerState {
        let progress = self.handle.progress();
        ServerState {
            server: self.handle.given(),
            engines: progress.engines,
            last_error: progress.trouble,
            is_idle: progress.is_idle,
        }
    }

    /// Returns the server as it was registered; `None` if it was not.
    pub(super) fn given(&self) -> Option<GivenEngine> {
        Some(self.registered.as_ref()?.engine().clone())
    }

    /// Returns the engine to announce, with the settings that are given for it. The server's URL takes the place of the
    /// sockets, which are not known yet. `None` if the engine is followed, or if its model or block size is not given.
    pub(super) fn awaited(&self) -> Option<NewEngine> {
        let is_followed = !self.handle.progress().engines.is_empty();
        presumed(&self.handle.server, self.handle.profile()).filter(|_| !is_followed)
    }

    fn presumed_key(&self) -> EngineKey {
        key_of_server(&self.handle.server)
    }
}

impl Bridge {
    pub(super) fn add_server(
        &self,
        state: &mut BridgeState,
        server: NewServer,
    ) -> Result<(), RegisterRefusal> {
        let address = check_server(&server)?;
        if state.is_stopping {
            return Err(RegisterRefusal::Stopping);
        }
        let key = server.key();
        if let Some(known) = state.servers.get(&key) {
            if known.handle.server.is_asked_like(&server) {
                let handle = known.handle.clone();
                if handle.is_labelled_otherwise(&server) {
                    state.relabel(&handle, &server);
                }
                return Ok(());
            }
            return Err(RegisterRefusal::Conflict {
                endpoint: known.handle.server.url.clone(),
                key: Box::new(known.presumed_key()),
            });
        }
        let options = &self.inner.options;
        if state.servers.len() >= options.engines_max {
            let engines = options.engines_max;
            return Err(RegisterRefusal::TooMany { engines });
        }
        let asked = AskedServer {
            handle: ServerHandle::new(server),
            registered: None,
            stop: CancellationToken::new(),
        };
        let task = ServerTask {
            handle: asked.handle.clone(),
            address,
            bridge: self.clone(),
            patience: options.follow.patience,
            backoff: options.follow.backoff,
            metrics: self.inner.metrics.clone(),
            logged: parking_lot::Mutex::default(),
            stop: asked.stop.clone(),
        };
        self.inner.tasks.spawn_on(task.run(), &self.inner.runtime);
        if let Some(awaited) = asked.awaited() {
            // It is announced as one whose server is awaited from now on.
            state.end_announcement_of(&awaited);
        }
        state.servers.insert(key.clone(), asked);
        self.announce_server(state, &key);
        Ok(())
    }

    /// Follows the publishers that a server reports now. Publishers that the server no longer reports, or now describes in
    /// another way, are forgotten.
    ///
    /// # Errors
    ///
    /// The refusal of the first publisher that is not followed. All others are followed.
    pub(crate) fn follow_publishers(
        &self,
        handle: &ServerHandle,
        mut told: Vec<(NewEngine, Option<&'static str>)>,
    ) -> Result<(), RegisterRefusal> {
        let mut state = self.inner.state.lock();
        let asked = state.servers.get(&handle.server.key());
        // If the server was removed while it was asked, its publishers are not followed.
        if !asked.is_some_and(|asked| asked.handle.is_same(handle)) {
            return Err(RegisterRefusal::Stopping);
        }
        for (engine, _) in &mut told {
            // The profile may have changed since the server was asked.
            engine.profile = handle.profile();
        }
        let is_told = |engine: &NewEngine| told.iter().any(|(known, _)| known.is_followed_like(engine));
        state.forget_publishers(handle, &is_told);
        let mut refused = Vec::new();
        for (engine, refused_hint) in told {
            let origin = OriginServer {
                handle: handle.clone(),
                refused_hint,
            };
            if let Err(refusal) = self.add(&mut state, engine.clone(), Some(origin.clone())) {
                handle.drop_connection(&engine);
                refused.push(RefusedEngine {
                    origin: Some(origin),
                    ..RefusedEngine::new(GivenEngine::Publisher(engine), Some(refusal))
                });
            }
        }
        if let Some((key, announcement)) = state.take_awaited(&handle.server) {
            // Daemons are told of its publishers from now on, or, where all of these are refused, of none.
            let freed = Freed::of_announced(key, String::new(), Some(announcement));
            state.freed.push(freed);
        }
        let first = refused.first().and_then(|refused| refused.refusal.clone());
        let by = GivenBy::Server(handle.server.key());
        state.refused.insert(by, refused);
        state.list_publishers(handle);
        self.fill(&mut state);
        first.map_or(Ok(()), Err)
    }

    /// Stops following the publishers of a server, because the server now belongs to another engine.
    pub(crate) fn forget_publishers(&self, handle: &ServerHandle) {
        let mut state = self.inner.state.lock();
        state.refused.remove(&GivenBy::Server(handle.server.key()));
        state.forget_publishers(handle, &|_| false);
        self.fill(&mut state);
    }

    /// Returns what [`BridgeState::size_of`] does.
    pub(crate) fn size_of(&self, model: &ModelKey) -> Option<u32> {
        self.inner.state.lock().size_of(model)
    }

    /// Returns the handle of a server that is asked.
    #[cfg(test)]
    pub(crate) fn handle_of(&self, instance: &str) -> Option<ServerHandle> {
        let state = self.inner.state.lock();
        let mut asked = state.servers.values();
        let asked = asked.find(|asked| asked.handle.server.instance == instance)?;
        Some(asked.handle.clone())
    }

    /// Notes in metrics how many servers are asked, and how many servers are in trouble.
    pub(crate) fn count_servers(&self) {
        self.count(&self.inner.state.lock());
    }

    pub(super) fn count(&self, state: &BridgeState) {
        let is_troubled = |asked: &&AskedServer| asked.handle.is_troubled();
        let troubled = state.servers.values().filter(is_troubled).count();
        self.inner.metrics.set_servers(state.servers.len(), troubled);
    }
}

impl BridgeState {
    /// Returns the block size of the followed engines of a model; `None` if no engine of the model is followed.
    pub(super) fn size_of(&self, model: &ModelKey) -> Option<u32> {
        let mut engines = self.engines.values().map(|followed| &followed.engine);
        let engine = engines.find(|engine| engine.key.model == *model)?;
        Some(engine.block_size)
    }

    /// Ends each server that has an engine that is `meant`, and stops following all engines of that server. Returns the
    /// keys of these engines. A server that has not reported its engines may have any rank.
    pub(super) fn remove_servers(&mut self, meant: &MeantEngines) -> RemovedEngines {
        let ended = self.servers.iter().filter(|(_, asked)| {
            let (presumed, engines) = (asked.presumed_key(), asked.handle.progress().engines);
            match engines.is_empty() {
                true => meant.has_any_rank(&presumed),
                false => meant.has(&presumed) || engines.iter().any(|key| meant.has(key)),
            }
        });
        let ended: Vec<ServerKey> = ended.map(|(key, _)| key.clone()).collect();
        ended.iter().flat_map(|key| self.end_server(key)).collect()
    }

    /// Gives a server's engine the address and labels of `server`, from now on.
    fn relabel(&mut self, handle: &ServerHandle, server: &NewServer) {
        handle.relabel(server);
        for key in handle.progress().engines {
            if let Some(followed) = self.engines.get_mut(&key)
                && followed.is_of(handle)
            {
                followed.set_profile(server.profile.clone());
            }
        }
    }

    /// Stops asking a server and following its publishers. Returns the keys of these publishers. If the server has
    /// none, returns the key that its engine is assumed to have.
    pub(super) fn end_server(&mut self, key: &ServerKey) -> RemovedEngines {
        let Some(asked) = self.servers.remove(key) else {
            return RemovedEngines::new();
        };
        asked.stop.cancel();
        self.refused.remove(&GivenBy::Server(key.clone()));
        self.dismiss(GivenEngine::Server(asked.handle.given()));
        let engines = self.forget_publishers(&asked.handle, &|_| false);
        let presumed = asked.presumed_key();
        let server = &asked.handle.server;
        let announced = self.take_awaited(server).map(|(_, announcement)| announcement);
        let freed = Freed::of_announced(presumed.clone(), server.url.clone(), announced);
        self.freed.push(freed);
        match engines.is_empty() {
            true => vec![presumed],
            false => engines,
        }
    }

    /// Stops following the publishers of a server that are not in `kept`, and returns their keys.
    fn forget_publishers(
        &mut self,
        handle: &ServerHandle,
        kept: &dyn Fn(&NewEngine) -> bool,
    ) -> RemovedEngines {
        let mut outdated = handle.progress().engines;
        outdated.retain(|key| {
            let followed = self.engines.get(key);
            followed.is_some_and(|followed| followed.is_of(handle) && !kept(&followed.engine))
        });
        for key in &outdated {
            self.remove(key);
        }
        self.list_publishers(handle);
        outdated
    }

    /// Notes which publishers of a server are followed.
    pub(super) fn list_publishers(&self, handle: &ServerHandle) {
        let engines = self.engines.iter().filter(|(_, followed)| followed.is_of(handle));
        handle.set_engines(engines.map(|(key, _)| key.clone()).collect());
    }
}
