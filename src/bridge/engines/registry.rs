//! The bridge as an [`EngineRegistry`], which the listeners for registrations use.

use std::net::IpAddr;
use std::time::Instant;

use kvatlas_config::Secret;
use kvatlas_process::registry::{
    EngineRegistry, EngineState, GivenEngine, MeantEngines, NewEngine, NewServer, RegisterRefusal,
    RemovedEngines, ServerState, SourceState,
};

use super::Bridge;
use super::presumed::presumed_key;
use super::servers::AskedServer;
use crate::discovery::Reports;
use crate::hosts::host_of;

impl Bridge {
    fn register_engine(&self, engine: GivenEngine) -> Result<(), RegisterRefusal> {
        let mut state = self.inner.state.lock();
        let is_renewal = state.registered_as(&engine).as_ref() == Some(&engine);
        // The same words leave the address and labels that a source gives.
        if !(is_renewal && state.given.has(&engine)) {
            let followed = self.follow_over(&mut state, &engine, None);
            self.fill(&mut state);
            for old in followed? {
                self.share_replaced(old, None);
            }
        }
        let is_told = state.renew(&engine);
        if is_told {
            self.share(engine, true);
        }
        drop(state);
        self.keep_registered();
        Ok(())
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
        let mut removed = state.remove_servers(meant);
        let followed = state.engines.keys().filter(|key| meant.has(key));
        let followed: RemovedEngines = followed.cloned().collect();
        for key in &followed {
            state.remove(key);
        }
        removed.extend(followed);
        let kept = state.kept.unregister(meant, &self.inner.metrics);
        for key in kept.iter().map(presumed_key) {
            if !removed.contains(&key) {
                removed.push(key);
            }
        }
        let after: Vec<GivenEngine> = state.registered().collect();
        for engine in before.into_iter().chain(kept) {
            if !after.contains(&engine) {
                self.share(engine, false);
            }
        }
        self.fill(&mut state);
        drop(state);
        self.keep_registered();
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
