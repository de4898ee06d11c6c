//! Engines that are no longer followed, and what is followed in their place.
//!
//! Where an engine goes, one that was refused may be followed, because it has the same name or address, or because there is room
//! now. So the bridge tries the refused ones before it tells daemons that an engine is gone. Daemons would otherwise give exact
//! answers that leave out whatever has the name from then on.

use std::collections::BTreeMap;

use kvatlas_process::registry::{Connection, EngineKey, GivenEngine, NewEngine, NewServer, RegisterRefusal};

use super::awaited::{GivenBy, ToldHolder};
use super::presumed::presumed_key;
use super::{Bridge, BridgeState, FollowedEngine};

/// Engine that is no longer followed, or whose server is no longer asked. Its task goes on until [`Bridge::fill`].
pub(super) struct Freed {
    pub(super) key: EngineKey,
    pub(super) endpoint: String,
    /// The engine's holder; `None` if it may have several.
    pub(super) holder: Option<ToldHolder>,
    /// The engine as a source may give it; `None` if a server had told it. The source has to give it anew.
    pub(super) given: Option<GivenEngine>,
    /// Function that ends the engine's task, with or without a goodbye.
    pub(super) end: Box<dyn FnOnce(bool) + Send>,
}

impl Freed {
    pub(super) fn of_engine(followed: FollowedEngine) -> Self {
        let engine = &followed.engine;
        let has_one_holder = matches!(engine.connection(), Connection::Sockets);
        let holder = ToldHolder::of_engine(engine).filter(|_| has_one_holder);
        Self {
            key: engine.key.clone(),
            endpoint: engine.endpoint.clone(),
            holder,
            given: followed
                .origin
                .is_none()
                .then(|| GivenEngine::Publisher(engine.clone())),
            end: Box::new(move |says_goodbye| followed.end(says_goodbye)),
        }
    }

    /// Whether `engine` has the name or the address that this engine had.
    fn has_place_of(&self, engine: &NewEngine) -> bool {
        self.key == engine.key || self.endpoint == engine.endpoint
    }

    /// Whether `server` has the name that this engine had. Any rank may be the server's.
    fn has_name_of(&self, server: &NewServer) -> bool {
        self.key.instance == server.instance && self.key.model == server.key().cache()
    }

    /// Whether `engine` has the settings that this engine had.
    fn was(&self, engine: &GivenEngine) -> bool {
        match (&self.given, engine) {
            (Some(GivenEngine::Publisher(old)), GivenEngine::Publisher(engine)) => {
                old.key == engine.key && old.is_followed_like(engine)
            }
            (Some(GivenEngine::Server(old)), GivenEngine::Server(server)) => {
                old.key() == server.key() && old.is_asked_like(server)
            }
            _ => false,
        }
    }
}

/// Whether one of the engines in `freed` had the name or the address of `engine`, or the name of the server that it is.
fn takes_place(freed: &[Freed], engine: &GivenEngine) -> bool {
    freed.iter().any(|freed| match engine {
        GivenEngine::Publisher(engine) => freed.has_place_of(engine),
        GivenEngine::Server(server) => freed.has_name_of(server),
    })
}

impl BridgeState {
    /// Returns the engines that sources give and that are not followed, each with its source. Those with the names or the
    /// addresses of engines in `freed` come first. An engine that was unregistered is not among them.
    fn refused_given(&mut self, freed: &[Freed]) -> Vec<(String, GivenEngine)> {
        let given = self.given.all_of(
            |engine| !self.engines.contains_key(&engine.key),
            |server| !self.servers.contains_key(&server.key()),
        );
        let was_followed = |(_, engine): &(String, GivenEngine)| freed.iter().any(|freed| freed.was(engine));
        let (unregistered, mut refused): (Vec<_>, Vec<_>) = given.into_iter().partition(was_followed);
        let unregistered = unregistered.iter().map(|(_, engine)| presumed_key(engine));
        self.dismissed.extend(unregistered);
        refused.retain(|(_, engine)| !self.dismissed.contains(&presumed_key(engine)));
        refused.sort_by_key(|(_, engine)| !takes_place(freed, engine));
        refused
    }
}

impl Bridge {
    /// Follows refused engines in the place of those that were freed, and ends the tasks of the latter. Daemons forget an
    /// engine, unless one with its name is followed or announced from now on. Call it before the lock on the state is
    /// released.
    pub(super) fn fill(&self, state: &mut BridgeState) {
        let freed = std::mem::take(&mut state.freed);
        if freed.is_empty() {
            return;
        }
        self.fill_from_sources(state, &freed);
        self.take_up(state, |engine| takes_place(&freed, engine));
        self.fill_from_servers(state);
        for Freed { key, holder, end, .. } in freed {
            let is_taken = holder.is_some() && state.told_holder(&key) == holder;
            end(!is_taken);
        }
    }

    /// Follows the refused engines of sources for which there is room now. Announces those that are refused again: one that
    /// is followed no longer stands for the others.
    fn fill_from_sources(&self, state: &mut BridgeState, freed: &[Freed]) {
        let mut refused: BTreeMap<String, Vec<(GivenEngine, RegisterRefusal)>> = BTreeMap::new();
        for (source, engine) in state.refused_given(freed) {
            let refusal = self.follow_in(state, engine.clone()).err();
            let of_source = refused.entry(source).or_default();
            of_source.extend(refusal.map(|refusal| (engine, refusal)));
        }
        for (source, refused) in refused {
            let refused = refused.iter().map(|(engine, refusal)| (engine, refusal.clone()));
            let refused: Vec<_> = refused.collect();
            self.announce_refused_given(state, &GivenBy::Source(source), &refused);
        }
    }

    /// Follows the refused publishers of servers, and announces the others, as with the engines of sources. A server that
    /// does not answer may be gone, so its publishers wait for its next answer.
    fn fill_from_servers(&self, state: &mut BridgeState) {
        let answering = state.servers.values().filter(|asked| asked.handle.answers());
        let told: Vec<_> = answering
            .map(|asked| (asked.handle.clone(), asked.refused.clone()))
            .collect();
        for (handle, mut refused) in told {
            refused.retain(|(engine, _)| !state.engines.contains_key(&engine.key));
            if refused.is_empty() {
                continue;
            }
            let refused = refused.into_iter().filter_map(|(engine, origin)| {
                let refusal = self.add(state, engine.clone(), Some(origin)).err()?;
                Some((engine, refusal))
            });
            let refused: Vec<_> = refused.collect();
            // The server is asked again before anything of it is believed.
            state.list_publishers(&handle);
            self.announce_refused(state, &GivenBy::Server(handle.server.key()), &refused);
        }
    }
}

#[cfg(test)]
mod tests;
