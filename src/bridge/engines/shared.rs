//! The bridge's side of the registrations that bridges share.

use std::time::SystemTime;

use kvatlas_process::registry::{GivenEngine, RegisterRefusal};
use kvatlas_telemetry::LogGate;

use super::{Bridge, BridgeState};
use crate::republish::PortPlaces;
use crate::state::{HeardRegistration, Registration, SharedRegistrations, SharedRegistry};

static REFUSED_GATE: LogGate = LogGate::of_bursts(16);

impl Bridge {
    /// Returns the registrations that this bridge shares with others; `None` if it shares none.
    pub(super) fn shared_registrations(&self) -> Option<&SharedRegistrations> {
        self.inner.options.state.as_ref()?.shared()
    }

    /// Tells the other bridges that `engine` was registered here, or unregistered. Does nothing if no registrations are shared.
    /// Never waits. Call it while the bridge's state is locked, so that the last of two requests is told last.
    pub(super) fn share(&self, engine: GivenEngine, is_registered: bool) {
        if let Some(shared) = self.shared_registrations() {
            let registration = Registration {
                engine,
                is_registered,
            };
            shared.note(registration, &self.inner.metrics);
        }
    }

    /// Tells the other bridges that the registration `old` has given way to the entry with the revision `by`; `None` if it has
    /// given way to a request of this bridge's client. Locking is as with [`Self::share`].
    pub(super) fn share_replaced(&self, old: GivenEngine, by: Option<u64>) {
        if let Some(shared) = self.shared_registrations() {
            shared.note_replaced(old, by.unwrap_or(u64::MAX), &self.inner.metrics);
        }
    }

    /// Whether `engine` was registered here after the time `asked`, and the other bridges have not been told yet.
    pub(super) fn is_untold_since(&self, engine: &GivenEngine, asked: SystemTime) -> bool {
        let shared = self.shared_registrations();
        shared.is_some_and(|shared| shared.is_noted_since(engine, asked))
    }

    /// Follows an engine that was registered with another bridge, whose client asked for it at the time `asked`. An engine that
    /// is refused is tried again. Returns the registrations that give way to it.
    fn follow_shared(
        &self,
        state: &mut BridgeState,
        engine: GivenEngine,
        asked: SystemTime,
    ) -> Vec<GivenEngine> {
        let followed = match self.follow_over(state, &engine, Some(asked)) {
            // The other bridge has registered the engine anew, with other settings.
            Err(RegisterRefusal::Conflict { .. }) => {
                self.drop_registered(state, &engine);
                self.follow_over(state, &engine, Some(asked))
            }
            followed => followed,
        };
        let refusal = match followed {
            Ok(replaced) => {
                state.set_registered(&engine, true);
                return replaced;
            }
            Err(refusal) => refusal,
        };
        if let Some(suppressed) = REFUSED_GATE.admit() {
            let engine = engine.instance();
            tracing::warn!(engine, %refusal, suppressed, "an engine that was registered with another bridge is not followed");
        }
        state.kept.keep(engine, refusal, &self.inner.metrics);
        Vec::new()
    }

    /// Stops following an engine that was registered. An engine that a source gives, too, is still followed.
    pub(super) fn drop_registered(&self, state: &mut BridgeState, engine: &GivenEngine) {
        state.set_registered(engine, false);
        match engine {
            GivenEngine::Publisher(engine) => state.release(&engine.key),
            GivenEngine::Server(server) => state.release_server(&server.key()),
        }
    }
}

impl SharedRegistry for Bridge {
    fn registered(&self) -> Vec<GivenEngine> {
        self.inner.state.lock().known_registered()
    }

    /// Follows the engine, or stops following it. The other bridge has checked the engine's host. A known registration leaves
    /// the address and labels of an engine as they are now; so does one that is renewed, if a source gives the engine.
    fn apply(&self, heard: HeardRegistration) {
        let mut state = self.inner.state.lock();
        self.apply_in(&mut state, heard);
        self.fill(&mut state);
    }

    fn set_read(&self, is_read: bool) {
        self.inner.state.lock().kept.set_read(is_read);
    }

    fn heard_places(&self, revision: u64, places: PortPlaces) {
        if let Some(republisher) = &self.inner.republisher {
            republisher.heard_places(revision, places);
        }
    }
}

impl Bridge {
    /// Applies an entry as [`SharedRegistry::apply`] does.
    fn apply_in(&self, state: &mut BridgeState, heard: HeardRegistration) {
        let HeardRegistration {
            registration: Registration {
                engine,
                is_registered,
            },
            asked,
            revision,
            is_known,
        } = heard;
        let registered = state.registered_as(&engine);
        // Hearing a registration again is no renewal: its time to live goes on.
        let is_heard_again = is_known && is_registered;
        if is_heard_again && (registered.as_ref() == Some(&engine) || state.kept.has(&engine)) {
            return;
        }
        state.kept.forget(&engine);
        if !is_registered {
            self.drop_registered(state, &engine);
            return;
        }
        // An engine that is registered here was registered after the last request to unregister it.
        if registered.is_none() && state.kept.is_gone(&engine, asked) {
            return self.share(engine, false);
        }
        let is_renewal = registered.as_ref() == Some(&engine) && state.given.has(&engine);
        if (is_known || is_renewal) && state.note_registered(&engine) {
            return;
        }
        let replaced = self.follow_shared(state, engine.clone(), asked);
        // The other bridge may not have known them. An entry from before this bridge may be older than they are. One of the
        // same name has the same key, which the entry has taken.
        for old in replaced {
            if !is_known && !old.is_same_engine(&engine) {
                self.share_replaced(old, Some(revision));
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
