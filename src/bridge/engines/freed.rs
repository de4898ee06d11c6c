//! Engines that are no longer followed, and what is followed in their place.
//!
//! Where an engine goes, one that was refused may be followed, because it has the same name or address. So the bridge tries that
//! one before it tells daemons that an engine is gone. Daemons would otherwise give exact answers that leave out whatever has
//! the name from then on.

use kvatlas_process::registry::{Connection, EngineKey, GivenEngine, NewEngine, NewServer};

use super::presumed::presumed_key;
use super::{Bridge, BridgeState, FollowedEngine};

/// Engine that is no longer followed, or whose server is no longer asked. Its task goes on until [`Bridge::fill`].
pub(super) struct Freed {
    pub(super) key: EngineKey,
    pub(super) endpoint: String,
    /// Block size of the engine, if it has one holder only.
    pub(super) block_size: Option<u32>,
    /// The engine as a source may give it; `None` if a server had told it. The source has to give it anew.
    pub(super) given: Option<GivenEngine>,
    /// Function that ends the engine's task, with or without a goodbye.
    pub(super) end: Box<dyn FnOnce(bool) + Send>,
}

impl Freed {
    pub(super) fn of_engine(followed: FollowedEngine) -> Self {
        let engine = &followed.engine;
        let has_one_holder = matches!(engine.connection(), Connection::Sockets);
        Self {
            key: engine.key.clone(),
            endpoint: engine.endpoint.clone(),
            block_size: has_one_holder.then_some(engine.block_size),
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

/// Whether one of the engines in `freed` had the name or the address of `engine`.
fn is_free(freed: &[Freed], engine: &NewEngine) -> bool {
    freed.iter().any(|freed| freed.has_place_of(engine))
}

/// Whether one of the engines in `freed` had the name of `server`.
fn is_named(freed: &[Freed], server: &NewServer) -> bool {
    freed.iter().any(|freed| freed.has_name_of(server))
}

impl BridgeState {
    /// Returns the engines that sources give, with the names or the addresses of those in `freed`, and that are not followed.
    /// An engine that was unregistered is not among them.
    fn refused_given(&mut self, freed: &[Freed]) -> Vec<GivenEngine> {
        let given = self.given.all_of(
            |engine| is_free(freed, engine) && !self.engines.contains_key(&engine.key),
            |server| is_named(freed, server) && !self.servers.contains_key(&server.key()),
        );
        let was_followed = |engine: &GivenEngine| freed.iter().any(|freed| freed.was(engine));
        let (unregistered, mut refused): (Vec<_>, Vec<_>) = given.into_iter().partition(was_followed);
        self.dismissed.extend(unregistered.iter().map(presumed_key));
        refused.retain(|engine| !self.dismissed.contains(&presumed_key(engine)));
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
        for engine in state.refused_given(&freed) {
            // One that is refused again is told of already.
            let _ = self.follow_in(state, engine);
        }
        self.take_up(state, |engine| match engine {
            GivenEngine::Publisher(engine) => is_free(&freed, engine),
            GivenEngine::Server(server) => is_named(&freed, server),
        });
        let told = state.servers.values().flat_map(|asked| &asked.refused);
        let told: Vec<_> = told.cloned().collect();
        for (engine, origin) in told {
            let handle = origin.handle.clone();
            if !state.engines.contains_key(&engine.key) && self.add(state, engine, Some(origin)).is_ok() {
                // The server is asked again before anything of it is believed.
                state.list_publishers(&handle);
            }
        }
        for Freed {
            key, block_size, end, ..
        } in freed
        {
            let is_taken = block_size.is_some() && state.told_size(&key) == block_size;
            end(!is_taken);
        }
    }
}

#[cfg(test)]
mod tests;
