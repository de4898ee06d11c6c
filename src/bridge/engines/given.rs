//! Engines that flags, files and discovery give. Each of these sources reports all engines that it knows now. This
//! module compares the report with the source's previous report, and applies the difference.

use std::collections::BTreeMap;

use kvatlas_process::registry::{
    EngineKey, GivenEngine, MeantEngines, NewEngine, NewServer, RegisterRefusal, ServerKey,
};

use super::super::discovery::{LookError, Reports};
use super::super::hosts::host_of;
use super::awaited::{GivenBy, RefusedEngine};
use super::presumed::presumed_key;
use super::servers::AskedServer;
use super::{Bridge, BridgeState, FollowedEngine};

/// Engines of one source, by name. Of two engines with one name, only the first is in the set. The bridge refuses the
/// second.
#[derive(Debug, Clone, Default)]
struct Set {
    publishers: BTreeMap<EngineKey, NewEngine>,
    servers: BTreeMap<ServerKey, NewServer>,
}

impl Set {
    fn new(engines: &[GivenEngine]) -> Self {
        let mut set = Self::default();
        for engine in engines {
            match engine {
                GivenEngine::Publisher(engine) => {
                    set.publishers
                        .entry(engine.key.clone())
                        .or_insert_with(|| engine.clone());
                }
                GivenEngine::Server(server) => {
                    set.servers.entry(server.key()).or_insert_with(|| server.clone());
                }
            }
        }
        set
    }

    /// Whether this set has `engine`, with the settings by which it is followed.
    fn has_publisher(&self, engine: &NewEngine) -> bool {
        let given = self.publishers.get(&engine.key);
        given.is_some_and(|given| given.is_followed_like(engine))
    }

    /// Whether this set has `server`, with the settings by which it is asked.
    fn has_server(&self, server: &NewServer) -> bool {
        let given = self.servers.get(&server.key());
        given.is_some_and(|given| given.is_asked_like(server))
    }

    /// Whether this set has `engine`, with the settings by which it is followed.
    fn has(&self, engine: &GivenEngine) -> bool {
        match engine {
            GivenEngine::Publisher(engine) => self.has_publisher(engine),
            GivenEngine::Server(server) => self.has_server(server),
        }
    }

    fn endpoints(&self) -> impl Iterator<Item = &str> {
        let publishers = self.publishers.values().flat_map(NewEngine::endpoints);
        publishers.chain(self.servers.values().map(|server| server.url.as_str()))
    }
}

/// Whether two engines have one name, and the same settings by which they are followed or asked.
fn is_like(one: &GivenEngine, other: &GivenEngine) -> bool {
    match (one, other) {
        (GivenEngine::Publisher(one), GivenEngine::Publisher(other)) => {
            one.key == other.key && one.is_followed_like(other)
        }
        (GivenEngine::Server(one), GivenEngine::Server(other)) => {
            one.key() == other.key() && one.is_asked_like(other)
        }
        _ => false,
    }
}

/// Engines of all sources, by the names of the sources.
#[derive(Debug, Default)]
pub(super) struct Given(BTreeMap<String, Set>);

impl Given {
    /// Whether an engine that flags, files or discovery gave has an endpoint on `host`.
    pub(super) fn has_host(&self, host: &str) -> bool {
        let mut endpoints = self.0.values().flat_map(Set::endpoints);
        endpoints.any(|endpoint| host_of(endpoint).as_deref() == Some(host))
    }

    /// Whether flags, files or discovery give this engine, with the same settings.
    fn has_publisher(&self, engine: &NewEngine) -> bool {
        self.0.values().any(|set| set.has_publisher(engine))
    }

    /// Whether flags, files or discovery give this server, with the same settings.
    fn has_server(&self, server: &NewServer) -> bool {
        self.0.values().any(|set| set.has_server(server))
    }

    /// Returns the engines that sources give under the names in `dropped`.
    fn named_like(&self, dropped: &Set) -> Vec<GivenEngine> {
        let mut named = Vec::new();
        for set in self.0.values() {
            let publishers = dropped
                .publishers
                .keys()
                .filter_map(|key| set.publishers.get(key));
            let servers = dropped.servers.keys().filter_map(|key| set.servers.get(key));
            named.extend(publishers.cloned().map(GivenEngine::Publisher));
            named.extend(servers.cloned().map(GivenEngine::Server));
        }
        named
    }

    /// Whether flags, files or discovery give `engine`, with the same settings.
    pub(super) fn has(&self, engine: &GivenEngine) -> bool {
        self.0.values().any(|set| set.has(engine))
    }

    /// Whether `source` gives this server, with the same settings for asking it as in `server`.
    fn is_of(&self, source: &str, server: &NewServer) -> bool {
        self.0.get(source).is_some_and(|set| set.has_server(server))
    }
}

impl Bridge {
    /// Asks the sources that have found `server` whether that server is still there, and still belongs to the same
    /// engine.
    pub(crate) async fn confirm_found(&self, server: &NewServer) -> Result<(), LookError> {
        let finders: Vec<Reports> = {
            let state = self.inner.state.lock();
            let finds = |reports: &&Reports| state.given.is_of(reports.source(), server);
            state.sources.iter().filter(finds).cloned().collect()
        };
        for finder in finders {
            finder.confirm(server).await?;
        }
        Ok(())
    }

    /// Replaces the engines that `source` gives with `engines`:
    ///
    /// - An engine that is no longer among them is forgotten. If another source gives an engine of that name with
    ///   other settings, the bridge follows that one from now on.
    /// - An engine with another identity, or another setting, is followed anew, from the beginning.
    /// - An engine that differs only in its address or labels is still followed.
    ///
    /// Engines that other sources give, or that were registered, stay. The registration of an engine ends if `source`
    /// gave the engine with the same settings as the registration, and now gives it with others.
    ///
    /// # Errors
    ///
    /// One refusal for each engine that is not followed. The engine is tried again with the next call.
    pub fn replace(&self, source: &str, engines: &[GivenEngine]) -> Result<(), Vec<RegisterRefusal>> {
        let mut state = self.inner.state.lock();
        let mut before = state.given.0.remove(source).unwrap_or_default();
        let now = Set::new(engines);
        state.given.0.insert(source.to_owned(), now.clone());
        let BridgeState { dismissed, given, .. } = &mut *state;
        dismissed.retain(|engine| given.has(engine));
        let ended = state.end_changed(&before, &now);
        for engine in &ended {
            let meant = MeantEngines::One(presumed_key(engine));
            state.kept.unregister(&meant, &self.inner.metrics);
            self.share(engine.clone(), false);
        }
        for key in before.servers.keys() {
            state.release_server(key);
        }
        for key in before.publishers.keys() {
            state.release(key);
        }
        before.servers.retain(|key, _| !now.servers.contains_key(key));
        before
            .publishers
            .retain(|key, _| !now.publishers.contains_key(key));
        let mut refused = Vec::new();
        for engine in engines {
            if !state.is_dismissed(engine)
                && let Err(refusal) = self.follow_in(&mut state, engine.clone())
            {
                refused.push((engine, refusal));
            }
        }
        for other in state.given.named_like(&before) {
            if !state.is_dismissed(&other) {
                // The other source tries an engine that is refused here again.
                let _ = self.follow_in(&mut state, other);
            }
        }
        let kept = refused.iter().filter(|(engine, _)| now.has(engine));
        let kept = kept
            .map(|(engine, refusal)| RefusedEngine::new(GivenEngine::clone(engine), Some(refusal.clone())));
        let by = GivenBy::Source(source.to_owned());
        state.refused.insert(by, kept.collect());
        self.fill(&mut state);
        drop(state);
        if !ended.is_empty() {
            self.keep_registered();
        }
        match refused.is_empty() {
            true => Ok(()),
            false => Err(refused.into_iter().map(|(_, refusal)| refusal).collect()),
        }
    }
}

impl BridgeState {
    /// Ends the registration of each engine whose present settings are those of `before`, and which a source gives with
    /// other settings `now`. Otherwise the source could not change the engine. Returns the engines whose registrations
    /// have ended.
    fn end_changed(&mut self, before: &Set, now: &Set) -> Vec<GivenEngine> {
        let mut ended = Vec::new();
        for key in now.publishers.keys() {
            if let Some(followed) = self.engines.get_mut(key)
                && before.has_publisher(&followed.engine)
                && !now.has_publisher(&followed.engine)
            {
                ended.extend(followed.given());
                followed.registered = None;
            }
        }
        for key in now.servers.keys() {
            if let Some(asked) = self.servers.get_mut(key)
                && before.has_server(&asked.handle.server)
                && !now.has_server(&asked.handle.server)
            {
                ended.extend(asked.given());
                asked.registered = None;
            }
        }
        ended
    }

    /// Stops asking a server that was not registered and that no source gives with its present settings.
    pub(super) fn release_server(&mut self, key: &ServerKey) {
        let is_held =
            |asked: &AskedServer| asked.registered.is_some() || self.given.has_server(&asked.handle.server);
        if !self.servers.get(key).is_none_or(is_held) {
            self.end_server(key);
        }
    }

    /// Notes that `engine` is no longer followed. One that a source gives was unregistered by a client.
    pub(super) fn dismiss(&mut self, engine: GivenEngine) {
        if self.given.has(&engine) && !self.dismissed.iter().any(|gone| is_like(gone, &engine)) {
            self.dismissed.push(engine);
        }
    }

    /// Whether `engine`, which a source gives, stays away because a client has unregistered it. One of the same name with other
    /// settings does not.
    pub(super) fn is_dismissed(&self, engine: &GivenEngine) -> bool {
        let is_followed = match engine {
            GivenEngine::Publisher(engine) => self.engines.contains_key(&engine.key),
            GivenEngine::Server(server) => self.servers.contains_key(&server.key()),
        };
        !is_followed && self.dismissed.iter().any(|gone| is_like(gone, engine))
    }

    /// Stops following an engine that was not registered and that no source gives with its present settings. An engine
    /// that a server has reported stays.
    pub(super) fn release(&mut self, key: &EngineKey) {
        let is_held = |followed: &FollowedEngine| {
            followed.registered.is_some()
                || followed.origin.is_some()
                || self.given.has_publisher(&followed.engine)
        };
        if !self.engines.get(key).is_none_or(is_held) {
            self.remove(key);
        }
    }
}
