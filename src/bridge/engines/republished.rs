//! Engines whose events are republished to routers: their sockets, and the routers' flags that name these sockets.

use kvatlas_process::registry::{GivenEngine, NewEngine};

use super::super::republish::{RouterQuestion, SocketPair, router_flags};
use super::Bridge;

impl Bridge {
    /// Assigns the addresses at which events are republished. Each of `engines` without an address gets the next one, in the
    /// order of the list.
    pub fn assign_republished(&self, engines: &[GivenEngine]) {
        if let Some(republisher) = &self.inner.republisher {
            republisher.assign(engines);
        }
    }

    /// Returns the sockets at which an engine's events are republished, or a text that says why the engine has no sockets.
    /// `None` if its events are not republished.
    pub fn republished_at(&self, engine: &NewEngine) -> Option<Result<SocketPair, String>> {
        self.inner.republisher.as_ref()?.sockets_of(engine)
    }

    /// Returns the flags of vLLM's router for the engines that are republished and have an address, on one line. `None` if this
    /// bridge republishes nothing.
    pub fn router_flags(&self, question: &RouterQuestion) -> Option<String> {
        let republisher = self.inner.republisher.as_ref()?;
        let state = self.inner.state.lock();
        let engines = state.engines.values().map(|followed| &followed.engine);
        let is_meant = |engine: &&NewEngine| {
            let model = question.model.as_ref();
            model.is_none_or(|model| engine.key.model.model == *model)
        };
        let with_sockets = engines.filter(is_meant).filter_map(|engine| {
            let sockets = republisher.sockets_of(engine)?.ok()?;
            Some((engine.profile.address.clone()?, engine.key.rank, sockets))
        });
        Some(router_flags(&question.host, with_sockets))
    }
}
