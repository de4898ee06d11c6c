//! State of engines that outlives the bridge: the list of registered engines, and the engines' files.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas_process::registry::{GivenEngine, MeantEngines, NewEngine, RegisterRefusal, RemovedEngines};
use kvatlas_telemetry::{BridgeMetrics, log_gated};

use super::servers::presumed_key;
use super::{Bridge, BridgeState, Inner};

/// Time between two looks for files of engines that have not been followed for long.
const CLEANED_AFTER: Duration = Duration::from_secs(3600);
/// Minimum pause between two looks at a state directory.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Maximum number of requests to unregister engines that are remembered while the list of registered engines cannot be read.
const GONE_MAX: usize = 1024;

/// Registrations with earlier bridges that are not followed: they were not tried yet, or were refused. They stay in the
/// list of registered engines until they are unregistered.
#[derive(Default)]
pub(super) struct KeptRegistrations {
    engines: Vec<KeptRegistration>,
    /// Requests to unregister engines that came while the list could not be read; `None` if the list has been read. The
    /// list is older than these requests.
    gone: Option<BTreeSet<MeantEngines>>,
}

/// Registration with an earlier bridge that is not followed.
struct KeptRegistration {
    engine: GivenEngine,
    /// Refusal at the last attempt; `None` if there was no attempt yet.
    refusal: Option<RegisterRefusal>,
}

impl KeptRegistration {
    fn new(engine: GivenEngine) -> Self {
        let refusal = None;
        Self { engine, refusal }
    }

    /// Whether the registration is `meant`. If one rank of a server is meant, the server is.
    fn is_meant(&self, meant: &MeantEngines) -> bool {
        let key = presumed_key(&self.engine);
        match self.engine {
            GivenEngine::Publisher(_) => meant.has(&key),
            GivenEngine::Server(_) => meant.has_any_rank(&key),
        }
    }
}

impl KeptRegistrations {
    /// Makes the registrations of a list; `None` stands for a list that cannot be read for now.
    pub(super) fn new(listed: Option<Vec<GivenEngine>>) -> Self {
        Self {
            gone: listed.is_none().then(BTreeSet::new),
            engines: listed.into_iter().flatten().map(KeptRegistration::new).collect(),
        }
    }

    /// Takes over a list that could not be read before, but for the engines that were unregistered since then.
    fn read_late(&mut self, listed: Vec<GivenEngine>) {
        let gone = self.gone.take().unwrap_or_default();
        let listed = listed.into_iter().map(KeptRegistration::new);
        self.engines
            .extend(listed.filter(|kept| !gone.iter().any(|meant| kept.is_meant(meant))));
    }

    /// Removes the registrations that are `meant`, also from a list that is read later. Returns the keys of those that were
    /// here. Counts a request that cannot be remembered until the list is read.
    pub(super) fn unregister(&mut self, meant: &MeantEngines, metrics: &BridgeMetrics) -> RemovedEngines {
        if let Some(gone) = &mut self.gone
            && !gone.contains(meant)
        {
            if gone.len() < GONE_MAX {
                gone.insert(meant.clone());
            } else {
                metrics.state_failed(&"registered", &"too many engines were unregistered");
            }
        }
        let keys = self
            .engines
            .extract_if(.., |kept| kept.is_meant(meant))
            .map(|kept| presumed_key(&kept.engine));
        keys.collect()
    }
}

impl BridgeState {
    /// Returns the engines that were registered, whether sources give them, too, or not; `None` while the list of an
    /// earlier bridge cannot be read.
    fn all_registered(&self) -> Option<Vec<GivenEngine>> {
        let kept = self.kept.gone.is_none().then_some(&self.kept.engines)?;
        let kept = kept.iter().map(|kept| kept.engine.clone());
        Some(self.registered().chain(kept).collect())
    }

    /// Notes that an engine was registered, if it is followed with the same settings. Returns whether it is. Its address and
    /// labels stay.
    pub(super) fn note_registered(&mut self, engine: &GivenEngine) -> bool {
        let is_followed = match engine {
            GivenEngine::Publisher(engine) => {
                let followed = self.engines.get(&engine.key);
                followed.is_some_and(|followed| {
                    followed.origin.is_none() && followed.engine.is_followed_like(engine)
                })
            }
            GivenEngine::Server(server) => {
                let asked = self.servers.get(&server.key());
                asked.is_some_and(|asked| asked.handle.server.is_asked_like(server))
            }
        };
        if is_followed {
            self.set_registered(engine, true);
        }
        is_followed
    }

    /// Whether an engine of this name was registered with this bridge.
    fn is_registered(&self, engine: &GivenEngine) -> bool {
        match engine {
            GivenEngine::Publisher(engine) => {
                let followed = self.engines.get(&engine.key);
                followed.is_some_and(|followed| followed.is_registered)
            }
            GivenEngine::Server(server) => {
                let asked = self.servers.get(&server.key());
                asked.is_some_and(|asked| asked.is_registered)
            }
        }
    }
}

impl Bridge {
    /// Follows the engines that were registered with an earlier bridge, as the state directory lists them. Call it
    /// before discovery begins, and after the engines of flags and files were given, because these have priority.
    /// An engine that is refused stays in the list, and is tried again. Each change of its refusal is logged. An engine that
    /// has been registered anew is as it was registered last.
    pub fn take_up_registered(&self) {
        let mut changes = Vec::new();
        let mut state = self.inner.state.lock();
        for KeptRegistration { engine, refusal } in std::mem::take(&mut state.kept.engines) {
            if state.is_registered(&engine) || state.note_registered(&engine) {
                continue;
            }
            let refused = self.follow_in(&mut state, engine.clone()).err();
            if refused != refusal {
                changes.push((engine.instance().to_owned(), refused.clone()));
            }
            match refused {
                None => state.set_registered(&engine, true),
                refusal => state.kept.engines.push(KeptRegistration { engine, refusal }),
            }
        }
        drop(state);
        self.keep_registered();
        for (engine, refusal) in changes {
            match refusal {
                Some(refusal) => {
                    log_gated!(warn "an engine that was registered before is not followed" up to 64; engine, %refusal);
                }
                None => {
                    log_gated!(info "an engine that was registered before is followed after all" up to 64; engine)
                }
            }
        }
    }

    /// Writes the list of registered engines to the state directory, so that the next bridge follows them, too.
    pub(super) fn keep_registered(&self) {
        if let Some(registered) = &self.inner.registered {
            registered.keep(|| self.inner.state.lock().all_registered(), &self.inner.metrics);
        }
    }

    /// Tends a state directory until the bridge stops. Reads or writes the list of registered engines again if that failed.
    /// Tries the engines again that were refused. Removes files of engines that have not been followed for long.
    pub(super) async fn tend_state(self) {
        let Some(registered) = &self.inner.registered else {
            return;
        };
        let pause = registered.interval().max(PAUSE_MIN);
        let mut cleaned_at = Instant::now();
        loop {
            tokio::time::sleep(pause).await;
            let has_refused = !self.inner.state.lock().kept.engines.is_empty();
            let (is_behind, is_due) = (registered.is_behind(), cleaned_at.elapsed() >= CLEANED_AFTER);
            if is_due {
                cleaned_at = Instant::now();
            }
            if is_behind || has_refused || is_due {
                let bridge = self.clone();
                let tending = tokio::task::spawn_blocking(move || {
                    if is_behind || has_refused {
                        bridge.catch_up_registered();
                    }
                    if is_due {
                        bridge.remove_forgotten();
                    }
                });
                // A thread that has failed has logged that.
                let _ = tending.await;
            }
        }
    }

    /// Reads or writes the list of registered engines, because that failed before, and tries the engines again that were
    /// refused. Blocks the thread.
    fn catch_up_registered(&self) {
        let inner = &self.inner;
        let Some(registered) = inner.registered.as_ref() else {
            return;
        };
        if inner.state.lock().kept.gone.is_some() {
            let Some(listed) = registered.read_late(&inner.metrics) else {
                return;
            };
            inner.state.lock().kept.read_late(listed);
        }
        self.take_up_registered();
    }

    /// Removes files of engines that have not been followed for long. Blocks the thread.
    fn remove_forgotten(&self) {
        let inner = &self.inner;
        let Some(directory) = &inner.options.state else {
            return;
        };
        let state = inner.state.lock();
        let engines = state.engines.values().map(|followed| &followed.engine);
        let followed: Vec<_> = engines
            .filter_map(|engine| inner.own_holder(engine).ok())
            .collect();
        drop(state);
        directory.remove_forgotten(&followed, &inner.metrics);
    }
}

impl Inner {
    /// Removes the saved state of an engine that was unregistered. Does nothing if the engine is followed again.
    pub(in super::super) async fn forget_unless_followed(&self, engine: &NewEngine) {
        if self.state.lock().engines.contains_key(&engine.key) {
            return;
        }
        if let (Some(directory), Ok(holder)) = (self.options.state.clone(), self.own_holder(engine)) {
            let metrics = Arc::clone(&self.metrics);
            let removing = tokio::task::spawn_blocking(move || directory.forget_engine(&holder, &metrics));
            // A thread that has failed has logged that.
            let _ = removing.await;
        }
    }
}

#[cfg(test)]
mod tests;
