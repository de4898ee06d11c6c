//! The bridge as an [`EngineRegistry`], which the listeners for registrations use.

use std::net::IpAddr;
use std::time::Instant;

use kvatlas_config::Secret;
use kvatlas_process::registry::{
    EngineRegistry, EngineState, GivenEngine, MeantEngines, NewEngine, NewServer, RegisterRefusal,
    RemovedEngines, ServerState, SourceState,
};

use kvatlas_telemetry::LogGate;

use super::Bridge;
use super::servers::AskedServer;
use crate::discovery::Reports;
use crate::hosts::host_of;
use crate::state::{Registration, SharedRegistrations};

static REFUSED_GATE: LogGate = LogGate::of_bursts(16);

impl Bridge {
    fn register_engine(&self, engine: GivenEngine) -> Result<(), RegisterRefusal> {
        self.follow_registered(&engine)?;
        self.keep_registered();
        self.share(engine, true);
        Ok(())
    }

    /// Returns the registrations that this bridge shares with others; `None` if it shares none.
    pub(super) fn shared_registrations(&self) -> Option<&SharedRegistrations> {
        self.inner.options.state.as_ref()?.shared()
    }

    /// Tells the other bridges that `engine` was registered here, or unregistered. Does nothing if no registrations are shared.
    pub(super) fn share(&self, engine: GivenEngine, is_registered: bool) {
        if let Some(shared) = self.shared_registrations() {
            let registration = Registration {
                engine,
                is_registered,
            };
            shared.note(registration, &self.inner.metrics);
        }
    }

    /// Applies a registration that another bridge has taken: follows the engine, or stops following it. The other bridge has
    /// checked the engine's host. A registration from before this bridge, or that it has heard before (`is_known`), leaves the
    /// address and labels of an engine as they are now.
    pub(super) fn apply(&self, registration: Registration, is_known: bool) {
        let Registration {
            engine,
            is_registered,
        } = registration;
        if !is_registered {
            return self.drop_registered(&engine);
        }
        if is_known && self.inner.state.lock().note_registered(&engine) {
            return;
        }
        let followed = match self.follow_registered(&engine) {
            // The other bridge has registered the engine anew, with other settings.
            Err(RegisterRefusal::Conflict { .. }) => {
                self.drop_registered(&engine);
                self.follow_registered(&engine)
            }
            followed => followed,
        };
        if let Err(refusal) = followed
            && let Some(suppressed) = REFUSED_GATE.admit()
        {
            let engine = engine.instance();
            tracing::warn!(engine, %refusal, suppressed, "an engine that was registered with another bridge is not followed");
        }
    }

    /// Stops following an engine that was registered. An engine that a source gives, too, is still followed.
    fn drop_registered(&self, engine: &GivenEngine) {
        let mut state = self.inner.state.lock();
        state.set_registered(engine, false);
        match engine {
            GivenEngine::Publisher(engine) => state.release(&engine.key),
            GivenEngine::Server(server) => self.release_server(&mut state, &server.key()),
        }
    }
}

impl EngineRegistry for Bridge {
    fn may_register(&self, engine: &GivenEngine, peer: Option<IpAddr>) -> Result<(), RegisterRefusal> {
        let own = peer.map(|peer| peer.to_string());
        for endpoint in engine.endpoints() {
            let Some(host) = host_of(endpoint) else {
                let text = format!("endpoint {endpoint:?} names no host; an IPv6 address needs brackets");
                return Err(RegisterRefusal::Invalid(text));
            };
            if own.as_ref() != Some(&host) && !self.allows_host(&host) {
                let endpoint = endpoint.to_owned();
                return Err(RegisterRefusal::Host { host, endpoint });
            }
        }
        Ok(())
    }

    fn register_token(&self) -> Option<&Secret> {
        self.inner.options.register_token.as_ref()
    }

    fn register(&self, engine: NewEngine) -> Result<(), RegisterRefusal> {
        self.register_engine(GivenEngine::Publisher(engine))
    }

    fn register_server(&self, server: NewServer) -> Result<(), RegisterRefusal> {
        self.register_engine(GivenEngine::Server(server))
    }

    fn unregister(&self, meant: &MeantEngines) -> RemovedEngines {
        let mut state = self.inner.state.lock();
        let before: Vec<GivenEngine> = state.registered().collect();
        let mut removed = self.remove_servers(&mut state, meant);
        let followed = state.engines.keys().filter(|key| meant.has(key));
        let followed: RemovedEngines = followed.cloned().collect();
        for key in &followed {
            state.remove(key);
        }
        removed.extend(followed);
        let kept = state.kept.unregister(meant, &self.inner.metrics).into_iter();
        let kept: RemovedEngines = kept.filter(|key| !removed.contains(key)).collect();
        removed.extend(kept);
        let after: Vec<GivenEngine> = state.registered().collect();
        drop(state);
        self.keep_registered();
        for engine in before {
            if !after.contains(&engine) {
                self.share(engine, false);
            }
        }
        removed
    }

    fn engines(&self) -> Vec<EngineState> {
        let state = self.inner.state.lock();
        let engines = state.engines.values();
        let nats = state.nats.as_ref();
        engines
            .map(|followed| self.inner.state_of(followed, nats))
            .collect()
    }

    fn servers(&self) -> Vec<ServerState> {
        let state = self.inner.state.lock();
        state.servers.values().map(AskedServer::state).collect()
    }

    fn sources(&self) -> Vec<SourceState> {
        let state = self.inner.state.lock();
        state.sources.iter().map(Reports::state).collect()
    }

    fn refusals(&self) -> Vec<String> {
        self.inner.refused.words(Instant::now())
    }

    fn is_unheard(&self) -> bool {
        self.inner
            .refused
            .has_events(&self.inner.subjects, Instant::now())
    }
}
