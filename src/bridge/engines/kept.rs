//! State of engines that outlives the bridge: the list of registered engines, and the engines' files.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvatlas_process::registry::{GivenEngine, MeantEngines, NewEngine, RegisterRefusal};
use kvatlas_telemetry::{BridgeMetrics, log_gated};

use super::awaited::RefusedEngine;
use super::lifetimes::Lifetime;
use super::presumed::presumed_key;
use super::{Bridge, BridgeState, Inner};
use crate::state::Registered;

/// Time between two looks for files of engines that have not been followed for long.
const CLEANED_AFTER: Duration = Duration::from_secs(3600);
/// Minimum pause between two looks at a state directory.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Pause before registrations of other bridges are tried again that were refused.
const REFUSED_PAUSE: Duration = Duration::from_secs(2);

/// Maximum number of requests to unregister engines that are remembered while the list of registered engines cannot be read.
const GONE_MAX: usize = 1024;
/// Maximum number of refused registrations of other bridges that are tried again.
const REFUSED_MAX: usize = 4096;

/// Registrations with earlier or other bridges that are not followed: they were not tried yet, or were refused. They stay
/// in the list of registered engines until they are unregistered.
#[derive(Default)]
pub(super) struct KeptRegistrations {
    engines: Vec<KeptRegistration>,
    /// Requests to unregister engines that came while the list could not be read, with their times; `None` if the list has
    /// been read.
    gone: Option<BTreeMap<MeantEngines, SystemTime>>,
}

/// Registration with an earlier or another bridge that is not followed.
struct KeptRegistration {
    tried: RefusedEngine,
    lifetime: Lifetime,
}

impl KeptRegistration {
    fn new(engine: GivenEngine, refusal: Option<RegisterRefusal>) -> Self {
        let lifetime = Lifetime::of(&engine);
        Self {
            tried: RefusedEngine::new(engine, refusal),
            lifetime,
        }
    }
}

/// Whether `engine` is `meant`. If one rank of a server is meant, the server is.
fn is_meant(engine: &GivenEngine, meant: &MeantEngines) -> bool {
    let key = presumed_key(engine);
    match engine {
        GivenEngine::Publisher(_) => meant.has(&key),
        GivenEngine::Server(_) => meant.has_any_rank(&key),
    }
}

impl KeptRegistrations {
    /// Makes the registrations of a list; `None` stands for a list that cannot be read for now.
    pub(super) fn new(listed: Option<Vec<GivenEngine>>) -> Self {
        Self {
            gone: listed.is_none().then(BTreeMap::new),
            engines: listed
                .into_iter()
                .flatten()
                .map(|engine| KeptRegistration::new(engine, None))
                .collect(),
        }
    }

    /// Takes over a list that could not be read before, but for the engines that were unregistered since then.
    fn read_late(&mut self, listed: Vec<GivenEngine>) {
        // The list is older than all requests.
        let left = listed
            .into_iter()
            .filter(|engine| !self.is_gone(engine, SystemTime::UNIX_EPOCH));
        let left = left.map(|engine| KeptRegistration::new(engine, None));
        let left: Vec<_> = left.collect();
        self.engines.extend(left);
        self.gone = None;
    }

    /// Notes whether the registrations that all bridges share have been read. As long as they have not, requests to
    /// unregister engines are remembered.
    pub(super) fn set_read(&mut self, is_read: bool) {
        if is_read {
            self.gone = None;
        } else {
            self.gone.get_or_insert_default();
        }
    }

    /// Whether an engine whose registration was asked for at the time `asked` has been unregistered since, while the list
    /// could not be read.
    pub(super) fn is_gone(&self, engine: &GivenEngine, asked: SystemTime) -> bool {
        let mut gone = self.gone.iter().flatten();
        gone.any(|(meant, at)| *at > asked && is_meant(engine, meant))
    }

    /// Takes a registration of another bridge that was refused, to be tried again. Counts one for which there is no room.
    pub(super) fn keep(&mut self, engine: GivenEngine, refusal: RegisterRefusal, metrics: &BridgeMetrics) {
        if self.engines.len() >= REFUSED_MAX {
            return metrics.state_failed(&"registered", &"too many registrations are refused");
        }
        self.engines.push(KeptRegistration::new(engine, Some(refusal)));
    }

    /// Whether the list of registered engines, or the registrations that all bridges share, cannot be read for now.
    pub(super) fn is_unread(&self) -> bool {
        self.gone.is_some()
    }

    /// Lets `time` pass. Removes and returns the registrations that are over.
    pub(super) fn pass(&mut self, time: Duration, is_shared: bool) -> Vec<GivenEngine> {
        let over = self
            .engines
            .extract_if(.., |kept| kept.lifetime.pass(time, is_shared));
        over.map(|kept| kept.tried.engine).collect()
    }

    /// Returns the registrations as engines that are refused, or were not tried yet.
    pub(super) fn refused(&self) -> impl Iterator<Item = &RefusedEngine> {
        self.engines.iter().map(|kept| &kept.tried)
    }

    /// Whether `engine` is among these registrations, with the same words.
    pub(super) fn has(&self, engine: &GivenEngine) -> bool {
        self.engines.iter().any(|kept| kept.tried.engine == *engine)
    }

    /// Removes an earlier registration of `engine`.
    pub(super) fn forget(&mut self, engine: &GivenEngine) {
        self.engines
            .retain(|kept| !kept.tried.engine.is_same_engine(engine));
    }

    /// Removes the registrations that are `meant`, also from a list that is read later. Returns those that were here.
    /// Counts a request that cannot be remembered until the list is read.
    pub(super) fn unregister(&mut self, meant: &MeantEngines, metrics: &BridgeMetrics) -> Vec<GivenEngine> {
        if let Some(gone) = &mut self.gone {
            if gone.len() < GONE_MAX || gone.contains_key(meant) {
                gone.insert(meant.clone(), SystemTime::now());
            } else {
                metrics.state_failed(&"registered", &"too many engines were unregistered");
            }
        }
        let removed = self
            .engines
            .extract_if(.., |kept| is_meant(&kept.tried.engine, meant));
        removed.map(|kept| kept.tried.engine).collect()
    }
}

impl BridgeState {
    /// Returns the registered engines that the bridge knows, whether they are followed or not, and whether sources give
    /// them, too, or not.
    pub(super) fn known_registered(&self) -> Vec<GivenEngine> {
        let kept = self.kept.engines.iter().map(|kept| kept.tried.engine.clone());
        self.registered().chain(kept).collect()
    }

    /// Returns all engines that were registered; `None` while the list of an earlier bridge cannot be read.
    fn all_registered(&self) -> Option<Vec<GivenEngine>> {
        (!self.kept.is_unread()).then(|| self.known_registered())
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
}

impl Bridge {
    /// Follows the engines that were registered with an earlier bridge, as the state directory lists them, and those that
    /// were registered with another bridge and refused. Call it before discovery begins, and after the engines of flags and
    /// files were given, because these have priority. An engine that is refused stays in the list, and is tried again. Each change of its refusal is logged. An engine that
    /// has been registered anew is as it was registered last.
    pub fn take_up_registered(&self) {
        let mut state = self.inner.state.lock();
        self.take_up(&mut state, |_| true);
        self.fill(&mut state);
        drop(state);
        self.keep_registered();
    }

    /// Follows the kept registrations that are meant, as [`Self::take_up_registered`] does.
    pub(super) fn take_up(&self, state: &mut BridgeState, is_meant: impl Fn(&GivenEngine) -> bool) {
        for mut kept in std::mem::take(&mut state.kept.engines) {
            let engine = &kept.tried.engine;
            if !is_meant(engine) {
                state.kept.engines.push(kept);
                continue;
            }
            if state.registered_as(engine).is_some() {
                continue;
            }
            if !state.note_registered(engine) {
                let refused = self.follow_in(state, engine.clone()).err();
                if refused != kept.tried.refusal {
                    log_change(engine.instance(), refused.as_ref());
                }
                if refused.is_some() {
                    kept.tried.refusal = refused;
                    state.kept.engines.push(kept);
                    continue;
                }
            }
            if let Some(registered) = state.lifetime_mut(engine) {
                *registered = Some(kept.lifetime);
            }
        }
    }

    /// Writes the list of registered engines to the state directory, so that the next bridge follows them, too.
    pub(super) fn keep_registered(&self) {
        if let Some(registered) = &self.inner.registered {
            registered.keep(|| self.inner.state.lock().all_registered(), &self.inner.metrics);
        }
    }

    /// Tends the bridge's state until the bridge stops. Reads or writes the list of registered engines again if that failed.
    /// Tries the engines again that were refused. Removes files of engines that have not been followed for long.
    pub(super) async fn tend_state(self) {
        let registered = self.inner.registered.as_ref();
        if registered.is_none() && self.shared_registrations().is_none() {
            return;
        }
        let pause = registered
            .map_or(REFUSED_PAUSE, Registered::interval)
            .max(PAUSE_MIN);
        let mut cleaned_at = Instant::now();
        loop {
            tokio::time::sleep(pause).await;
            let has_refused = !self.inner.state.lock().kept.engines.is_empty();
            let is_behind = registered.is_some_and(Registered::is_behind);
            let is_due = registered.is_some() && cleaned_at.elapsed() >= CLEANED_AFTER;
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
        if let Some(registered) = &inner.registered
            && inner.state.lock().kept.is_unread()
        {
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

/// Logs that an engine that was registered before is followed, or is refused for another reason than before.
fn log_change(engine: &str, refusal: Option<&RegisterRefusal>) {
    match refusal {
        Some(refusal) => {
            log_gated!(warn "an engine that was registered before is not followed" up to 64; engine, %refusal);
        }
        None => {
            log_gated!(info "an engine that was registered before is followed after all" up to 64; engine)
        }
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
pub(super) mod tests;
