//! Registrations with a time to live. Such a registration ends unless its client renews it, that is, registers the engine
//! again. It also gives way to whatever a client registers at its address.

use std::time::{Duration, SystemTime};

use kvatlas_process::registry::{GivenEngine, RegisterRefusal};
use kvatlas_telemetry::log_gated;

use super::awaited::GivenBy;
use super::{Bridge, BridgeState};

/// Pause between two looks at registrations that may be over.
const TICK: Duration = Duration::from_secs(1);

/// Registration, and the time that has passed of its time to live. A stall of this process counts as one tick at most,
/// because renewals may wait to be read then.
#[derive(Debug)]
pub(super) struct Lifetime {
    /// The engine as it was registered. Its address and labels may differ from those that the engine has now.
    engine: GivenEngine,
    /// Time since the registration was made, renewed or read.
    age: Duration,
    /// Time since other bridges were told of the registration.
    untold: Duration,
}

impl Lifetime {
    pub(super) fn of(engine: &GivenEngine) -> Self {
        Self {
            engine: engine.clone(),
            age: Duration::ZERO,
            untold: Duration::ZERO,
        }
    }

    pub(super) fn engine(&self) -> &GivenEngine {
        &self.engine
    }

    /// Returns the time after which the other bridges are told of a renewal.
    fn pause(&self) -> Duration {
        self.engine.ttl().unwrap_or_default() / 3
    }

    /// Lets `time` pass. Returns whether the registration is over. One that is shared counts a third longer, because its
    /// renewals reach other bridges later.
    pub(super) fn pass(&mut self, time: Duration, is_shared: bool) -> bool {
        self.age = self.age.saturating_add(time);
        self.untold = self.untold.saturating_add(time);
        let more = if is_shared { self.pause() } else { Duration::ZERO };
        let ttl = self.engine.ttl();
        ttl.is_some_and(|ttl| self.age >= ttl.saturating_add(more))
    }
}

/// Returns whether two engines are one, or are publishers at one address.
fn is_same_place(engine: &GivenEngine, other: &GivenEngine) -> bool {
    let is_same_address = match (engine, other) {
        (GivenEngine::Publisher(engine), GivenEngine::Publisher(other)) => {
            (&engine.endpoint, &engine.topic) == (&other.endpoint, &other.topic)
        }
        _ => false,
    };
    is_same_address || engine.is_same_engine(other)
}

impl BridgeState {
    /// Returns the registration of a followed engine by its name; `None` if the engine is not followed.
    pub(super) fn lifetime_mut(&mut self, engine: &GivenEngine) -> Option<&mut Option<Lifetime>> {
        match engine {
            GivenEngine::Publisher(engine) => {
                let followed = self.engines.get_mut(&engine.key);
                followed.map(|followed| &mut followed.registered)
            }
            GivenEngine::Server(server) => {
                let asked = self.servers.get_mut(&server.key());
                asked.map(|asked| &mut asked.registered)
            }
        }
    }

    /// Whether the registration `old` gives way to `engine`: it has a time to live, and is in its place. One that a source
    /// gives, too, does not.
    fn gives_way(&self, old: &GivenEngine, engine: &GivenEngine) -> bool {
        old.ttl().is_some() && !self.given.has(old) && is_same_place(old, engine)
    }

    /// Notes that an engine, which is followed, was registered with this bridge. Returns whether the other bridges have to be
    /// told. They are told of a renewal, which has the same words, at most once per third of the time to live.
    pub(super) fn renew(&mut self, engine: &GivenEngine) -> bool {
        let known = self.lifetime_mut(engine).and_then(Option::as_mut);
        match known.filter(|life| life.engine == *engine && life.untold < life.pause()) {
            Some(life) => {
                life.age = Duration::ZERO;
                false
            }
            None => {
                self.set_registered(engine, true);
                true
            }
        }
    }

    /// Lets `time` pass for all registrations of followed engines. Returns those that are over.
    fn pass(&mut self, time: Duration, is_shared: bool) -> Vec<GivenEngine> {
        let is_over = |registered: &mut Option<Lifetime>| {
            let life = registered.as_mut();
            life.is_some_and(|life| life.pass(time, is_shared))
        };
        let mut over = Vec::new();
        for followed in self.engines.values_mut() {
            if is_over(&mut followed.registered) {
                over.extend(followed.given());
            }
        }
        for asked in self.servers.values_mut() {
            if is_over(&mut asked.registered) {
                over.extend(asked.given());
            }
        }
        over
    }
}

impl Bridge {
    /// Begins to follow an engine that a client registers. Registrations with a time to live that are in its place end,
    /// because what is registered last is there now. Returns those that have ended. If the engine would be refused
    /// nevertheless, none ends. `asked` is the time at which a client of another bridge asked for it; `None` if a client of
    /// this bridge does now.
    pub(super) fn follow_over(
        &self,
        state: &mut BridgeState,
        engine: &GivenEngine,
        asked: Option<SystemTime>,
    ) -> Result<Vec<GivenEngine>, RegisterRefusal> {
        let mut replaced: Vec<GivenEngine> = Vec::new();
        loop {
            let Err(refusal) = self.follow_in(state, engine.clone()) else {
                for old in &replaced {
                    let (old, name) = (old.instance(), engine.instance());
                    log_gated!(info "a registration with a time to live gives way to another one" up to 64; engine = old, by = name);
                }
                return Ok(replaced);
            };
            let is_in_the_way = |old: &GivenEngine| match refusal {
                RegisterRefusal::Conflict { .. } => old.is_same_engine(engine),
                RegisterRefusal::SameAddress { .. } | RegisterRefusal::OtherBlockSize { .. } => true,
                _ => false,
            };
            let is_newer = |old: &GivenEngine| {
                engine.ttl().is_some() && asked.is_some_and(|asked| self.is_untold_since(old, asked))
            };
            let in_place = state
                .registered()
                .find(|old| is_in_the_way(old) && state.gives_way(old, engine) && !is_newer(old));
            let Some(old) = in_place else {
                return Err(refusal);
            };
            if let GivenEngine::Publisher(publisher) = engine {
                self.check_beside(state, publisher, &|followed| {
                    followed.given().is_some_and(|old| state.gives_way(&old, engine))
                })?;
            }
            self.drop_registered(state, &old);
            replaced.push(old);
        }
    }

    /// Ends registrations that are not renewed, until the bridge stops.
    pub(super) async fn end_unrenewed(self) {
        loop {
            tokio::time::sleep(TICK).await;
            self.pass(TICK);
            let mut state = self.inner.state.lock();
            if self.inner.options.namespaces.is_some() {
                // A holder with another block size may be gone since.
                self.try_refused(&mut state, &[], |by| matches!(by, GivenBy::Source(_)));
            }
            // The server of an announced engine may be gone since, so that the engine stands for no other.
            self.fill(&mut state);
        }
    }

    /// Lets `time` pass, and ends the registrations that were not renewed in time. None ends while those that bridges
    /// share, with their renewals, cannot be read.
    pub(super) fn pass(&self, time: Duration) {
        let is_shared = self.shared_registrations().is_some();
        let mut state = self.inner.state.lock();
        if state.kept.is_unread() {
            return;
        }
        let over = state.pass(time, is_shared);
        for engine in &over {
            self.drop_registered(&mut state, engine);
        }
        let kept = state.kept.pass(time, is_shared);
        if over.is_empty() && kept.is_empty() {
            return;
        }
        for engine in over.into_iter().chain(kept) {
            let name = engine.instance();
            log_gated!(info "a registration was not renewed and has ended" up to 64; engine = name);
            self.share(engine, false);
        }
        self.fill(&mut state);
        drop(state);
        self.keep_registered();
    }
}

#[cfg(test)]
pub(super) mod tests;
