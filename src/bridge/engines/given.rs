//! Engines that flags, files and discovery give. Each of these sources reports all engines that it knows now. This
//! module compares the report with the source's previous report, and applies the difference.

use std::collections::BTreeMap;

use kvatlas_process::registry::{EngineKey, GivenEngine, NewEngine, NewServer, RegisterRefusal, ServerKey};

use super::super::discovery::{LookError, Reports};
use super::super::hosts::host_of;
use super::Bridge;

/// Engines of one source, by name. Of two engines with one name, only the first is in the set. The bridge refuses the
/// second.
#[derive(Debug, Default)]
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

    fn endpoints(&self) -> impl Iterator<Item = &str> {
        let publishers = self.publishers.values().flat_map(NewEngine::endpoints);
        publishers.chain(self.servers.values().map(|server| server.url.as_str()))
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

    /// Returns whether flags, files or discovery give an engine with the name of `engine`.
    pub(super) fn has(&self, engine: &GivenEngine) -> bool {
        self.0.values().any(|set| match engine {
            GivenEngine::Publisher(engine) => set.publishers.contains_key(&engine.key),
            GivenEngine::Server(server) => set.servers.contains_key(&server.key()),
        })
    }

    /// Whether `source` gives this server, with the same settings for asking it as in `server`.
    fn is_of(&self, source: &str, server: &NewServer) -> bool {
        let known = self.0.get(source).and_then(|set| set.servers.get(&server.key()));
        known.is_some_and(|known| known.is_asked_like(server))
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
    /// - An engine that is no longer among them is forgotten.
    /// - An engine with another identity, or another setting, is followed anew, from the beginning.
    /// - An engine that differs only in its address or labels is still followed.
    ///
    /// Engines that other sources give, or that were registered, stay.
    ///
    /// # Errors
    ///
    /// One refusal for each engine that is not followed. The engine is tried again with the next call.
    pub fn replace(&self, source: &str, engines: &[GivenEngine]) -> Result<(), Vec<RegisterRefusal>> {
        {
            let mut state = self.inner.state.lock();
            let now = Set::new(engines);
            let before = state.given.0.remove(source).unwrap_or_default();
            for (key, server) in &before.servers {
                let is_wanted = |wanted: &NewServer| wanted.is_asked_like(server);
                if !now.servers.get(key).is_some_and(is_wanted) {
                    self.remove_server(&mut state, key, server);
                }
            }
            for (key, engine) in &before.publishers {
                let is_own = state
                    .engines
                    .get(key)
                    .is_some_and(|followed| followed.engine.is_followed_like(engine));
                let is_wanted = |wanted: &NewEngine| wanted.is_followed_like(engine);
                if is_own && !now.publishers.get(key).is_some_and(is_wanted) {
                    state.remove(key);
                }
            }
            state.given.0.insert(source.to_owned(), now);
        }
        let refused: Vec<RegisterRefusal> = engines
            .iter()
            .filter_map(|engine| self.follow(engine.clone()).err())
            .collect();
        // A registered engine that a source gives, too, is no longer saved as a registered engine.
        self.keep_registered();
        if refused.is_empty() { Ok(()) } else { Err(refused) }
    }
}
