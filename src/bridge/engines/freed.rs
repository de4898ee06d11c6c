//! Engines that are no longer followed, and what is followed in their place.
//!
//! An engine that was refused may be followed where another one goes: it has the same name or address, or there is room now. So
//! the bridge tries the refused ones before it tells daemons that an engine is gone. Daemons would otherwise give exact answers
//! that leave out whatever has the name from then on.

use kvatlas_process::registry::{Connection, EngineKey, GivenEngine, NewEngine, NewServer};

use super::awaited::{Announcement, GivenBy, RefusedEngine, ToldHolder};
use super::{Bridge, BridgeState, FollowedEngine};

/// Engine that is no longer followed, or whose server is no longer asked. Its task goes on until [`Bridge::fill`].
pub(super) struct Freed {
    pub(super) key: EngineKey,
    pub(super) endpoint: String,
    /// The engine's holder; `None` if it may have several.
    pub(super) holder: Option<ToldHolder>,
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
            end: Box::new(move |says_goodbye| followed.end(says_goodbye)),
        }
    }

    /// Makes an engine that is announced no longer.
    pub(super) fn of_announced(key: EngineKey, endpoint: String, announcement: Option<Announcement>) -> Self {
        Self {
            key,
            endpoint,
            holder: announcement.as_ref().and_then(|told| told.holder),
            end: Box::new(move |says_goodbye| {
                if let Some(announcement) = announcement {
                    announcement.end(says_goodbye);
                }
            }),
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
}

/// Whether one of the engines in `freed` had the name or the address of `engine`, or the name of the server that it is.
fn takes_place(freed: &[Freed], engine: &GivenEngine) -> bool {
    freed.iter().any(|freed| match engine {
        GivenEngine::Publisher(engine) => freed.has_place_of(engine),
        GivenEngine::Server(server) => freed.has_name_of(server),
    })
}

impl Bridge {
    /// Follows refused engines in the place of those that were freed, announces one of each model that is refused still, and
    /// ends the tasks of the former. Daemons forget an engine, unless one with its name is followed or announced from now on.
    /// Call it before the lock on the state is released.
    pub(super) fn fill(&self, state: &mut BridgeState) {
        let mut freed = std::mem::take(&mut state.freed);
        if !freed.is_empty() {
            self.try_refused(state, &freed, |by| matches!(by, GivenBy::Source(_)));
            self.take_up(state, |engine| takes_place(&freed, engine));
            self.try_refused(state, &freed, |by| matches!(by, GivenBy::Server(_)));
        }
        freed.extend(self.announce_refused(state));
        for Freed { key, holder, end, .. } in freed {
            let is_taken = holder.is_some() && state.told_holder(&key) == holder;
            end(!is_taken);
        }
        self.count(state);
    }

    /// Follows the refused engines for which there is room now, those with the names or the addresses of engines in `freed`
    /// first. One that was unregistered stays away.
    pub(super) fn try_refused(
        &self,
        state: &mut BridgeState,
        freed: &[Freed],
        is_meant: impl Fn(&GivenBy) -> bool,
    ) {
        let mut refused = std::mem::take(&mut state.refused);
        for is_first in [true, false] {
            for (_, refused) in refused.iter_mut().filter(|(by, _)| is_meant(by)) {
                refused.retain_mut(|refused| {
                    takes_place(freed, &refused.engine) != is_first
                        || self.is_refused_again(state, refused, is_first)
                });
            }
        }
        state.refused = refused;
    }

    /// Tries a refused engine again, and returns whether it is refused still. A server that does not answer may be gone, so
    /// its publishers wait for its next answer, but for one that takes a free place (`takes_place`): nobody else tells
    /// daemons of that name then.
    fn is_refused_again(
        &self,
        state: &mut BridgeState,
        refused: &mut RefusedEngine,
        takes_place: bool,
    ) -> bool {
        if refused.origin.is_none() && state.is_dismissed(&refused.engine) {
            return false;
        }
        let (is_known, count) = match &refused.engine {
            GivenEngine::Publisher(engine) => (state.engines.contains_key(&engine.key), state.engines.len()),
            GivenEngine::Server(server) => (state.servers.contains_key(&server.key()), state.servers.len()),
        };
        let origin = refused.origin.clone();
        let is_away = !takes_place && origin.as_ref().is_some_and(|origin| !origin.handle.answers());
        // Without room, what is not known is refused for want of room. That has to be known, so that it is announced.
        let is_full = count >= self.inner.options.engines_max && refused.may_be_announced();
        if is_known || is_away || is_full {
            return true;
        }
        let tried = match (refused.engine.clone(), origin) {
            (GivenEngine::Publisher(mut engine), Some(origin)) => {
                let handle = origin.handle.clone();
                engine.profile = handle.profile();
                let tried = self.add(state, engine, Some(origin));
                // The server is asked again before anything of it is believed.
                state.list_publishers(&handle);
                tried
            }
            (engine, _) => self.follow_in(state, engine),
        };
        refused.refusal = tried.err();
        refused.refusal.is_some()
    }
}

#[cfg(test)]
mod tests;
