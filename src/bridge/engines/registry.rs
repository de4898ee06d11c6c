//! The bridge as an [`EngineRegistry`], which the listeners for registrations use.

use std::net::IpAddr;

use kvatlas_config::Secret;
use kvatlas_process::registry::{
    EngineKey, EngineRegistry, EngineState, GivenEngine, NewEngine, NewServer, RegisterRefusal,
    RemovedEngines, ServerState,
};

use super::servers::AskedServer;
use super::{Bridge, Followed};
use crate::hosts::host_of;

impl EngineRegistry for Bridge {
    fn may_register(&self, engine: &GivenEngine, peer: Option<IpAddr>) -> Result<(), RegisterRefusal> {
        let own = peer.map(|peer| peer.to_string());
        for endpoint in engine.endpoints() {
            // A text without a host is refused later, as no endpoint.
            let Some(host) = host_of(endpoint) else {
                continue;
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
        self.follow(GivenEngine::Publisher(engine))?;
        self.keep_registered();
        Ok(())
    }

    fn register_server(&self, server: NewServer) -> Result<(), RegisterRefusal> {
        self.follow(GivenEngine::Server(server))?;
        self.keep_registered();
        Ok(())
    }

    fn unregister(&self, is_meant: &dyn Fn(&EngineKey) -> bool) -> RemovedEngines {
        let mut state = self.inner.state.lock();
        let mut removed = self.remove_servers(&mut state, is_meant);
        let meant = state.engines.keys().filter(|key| is_meant(key));
        let meant: RemovedEngines = meant.cloned().collect();
        for key in &meant {
            state.remove(key);
        }
        removed.extend(meant);
        drop(state);
        self.keep_registered();
        removed
    }

    fn engines(&self) -> Vec<EngineState> {
        let state = self.inner.state.lock();
        state.engines.values().map(Followed::state).collect()
    }

    fn servers(&self) -> Vec<ServerState> {
        let state = self.inner.state.lock();
        state.servers.values().map(AskedServer::state).collect()
    }
}
