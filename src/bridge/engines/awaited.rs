//! Engines that are known and not followed: their servers have not told yet how to follow them, or the bridge refuses
//! them. Nobody knows which blocks such an engine has. So the bridge announces the engine to daemons as out of sight.
//! Without the announcement, daemons would give exact answers that leave the engine out.
//!
//! Of the engines that are refused, the bridge announces one for each model: that is enough for answers to say that
//! somebody is missing. An engine is not announced if its name or its address is taken: mostly it is the same engine,
//! described twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::Client;
use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::ModelKey;
use kvatlas_engines::Format;
use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::{EngineKey, GivenEngine, NewEngine, RegisterRefusal, ServerKey};

use super::super::check::check_block_size;
use super::super::progress::log_untold;
use super::super::server::ServerHandle;
use super::presumed::presumed;
use super::{Bridge, BridgeState, Inner};

/// Maximum number of models of which a refused engine is announced.
const REFUSED_MODELS_MAX: usize = 64;
/// Pause between two looks whether the server of an announced engine is there.
const PAUSE: Duration = Duration::from_secs(5);

/// Party that gives engines which the bridge refuses: a source, a server that has told its publishers, or clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GivenBy {
    Source(String),
    Server(ServerKey),
    /// Registrations with earlier or other bridges.
    Registrations,
}

/// Announcement of an engine that the bridge refuses.
#[derive(Debug)]
pub(super) struct RefusedAnnouncement {
    by: GivenBy,
    pub(super) announcement: Announcement,
}

impl RefusedAnnouncement {
    pub(super) fn key(&self) -> &EngineKey {
        &self.announcement.key
    }
}

/// Holder of which daemons are told under an engine's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ToldHolder {
    is_pool: bool,
    block_size: u32,
}

impl ToldHolder {
    /// Returns the holder of an engine; `None` if the holders are the workers of a plane, which have other names.
    pub(super) fn of_engine(engine: &NewEngine) -> Option<Self> {
        (engine.format != Format::Dynamo).then_some(Self {
            is_pool: engine.format == Format::Mooncake,
            block_size: engine.block_size,
        })
    }
}

/// Announcements of engines that the bridge refuses, one for each model.
pub(super) type RefusedAnnouncements = Vec<RefusedAnnouncement>;

/// Report to daemons that the state of an engine is not known. The bridge repeats the report until the server that the
/// engine runs in has told how to follow the engine's events.
#[derive(Debug)]
pub(super) struct Announcement {
    key: EngineKey,
    pub(super) block_size: u32,
    stop: CancellationToken,
    says_goodbye: Arc<AtomicBool>,
    /// Token that is cancelled once the task of this report has ended.
    ended: CancellationToken,
}

impl Announcement {
    pub(super) fn holder(&self) -> ToldHolder {
        ToldHolder {
            is_pool: false,
            block_size: self.block_size,
        }
    }

    /// Ends the report. With `says_goodbye`, daemons forget the engine. Returns the token that is cancelled once the
    /// report's task has ended.
    pub(super) fn end(self, says_goodbye: bool) -> CancellationToken {
        self.says_goodbye.store(says_goodbye, Ordering::Release);
        self.stop.cancel();
        self.ended
    }
}

impl Bridge {
    /// Reports the engine of a server to daemons as out of sight. Does nothing if it is reported already, or if its
    /// model or block size is not given.
    pub(crate) fn announce(&self, handle: &ServerHandle) {
        let mut state = self.inner.state.lock();
        let key = handle.server.key();
        let asked = state.servers.get(&key);
        if asked.is_some_and(|asked| asked.handle.is_same(handle)) {
            self.announce_server(&mut state, &key);
        }
    }

    pub(super) fn announce_server(&self, state: &mut BridgeState, key: &ServerKey) {
        let Some(asked) = state.servers.get(key) else {
            return;
        };
        let Some(mut engine) = asked.awaited() else {
            return;
        };
        let server = Some(asked.handle.clone());
        let namespaces = self.inner.options.namespaces.as_ref();
        let is_refused = namespaces.is_some_and(|namespaces| check_block_size(&engine, namespaces).is_err());
        let mut announced = state.refused.iter().map(RefusedAnnouncement::key);
        if is_refused || state.engines.contains_key(&engine.key) || announced.any(|key| *key == engine.key) {
            return;
        }
        engine.block_size = state.size_in_force(&engine);
        let awaited = Announced {
            engine,
            trouble: "its server has not told how to follow it".to_owned(),
            server,
        };
        let announcement = self.spawn_announcement(state, awaited);
        if let Some(asked) = state.servers.get_mut(key) {
            asked.announcement = announcement;
        }
    }

    /// Announces a refused engine for each model of which none is announced yet. `refused` has the engines that `by`
    /// gives now and that are not followed. Ends the announcements of other engines that `by` has given.
    pub(super) fn announce_refused(
        &self,
        state: &mut BridgeState,
        by: &GivenBy,
        refused: &[(NewEngine, RegisterRefusal)],
    ) {
        let still = |key: &EngineKey| refused.iter().any(|(engine, _)| engine.key == *key);
        state.end_refused(true, |announced| announced.by == *by && !still(announced.key()));
        for (engine, refusal) in refused {
            let Some(mut engine) = announced_size(engine, refusal) else {
                continue;
            };
            engine.block_size = state.size_in_force(&engine);
            let mut refused = state.refused.iter();
            let is_known = state.told_holder(&engine.key).is_some()
                || refused.any(|announced| state.stands_for(announced, &engine.key.model));
            if is_known || state.refused.len() >= REFUSED_MODELS_MAX {
                continue;
            }
            let told = Announced {
                engine,
                trouble: trouble_of(refusal),
                server: state.handle_of(by),
            };
            if let Some(announcement) = self.spawn_announcement(state, told) {
                let by = by.clone();
                state.refused.push(RefusedAnnouncement { by, announcement });
            }
        }
    }

    /// Does what [`Self::announce_refused`] does, with engines as they were given.
    pub(super) fn announce_refused_given(
        &self,
        state: &mut BridgeState,
        by: &GivenBy,
        refused: &[(&GivenEngine, RegisterRefusal)],
    ) {
        let announced = |(engine, refusal): &(&GivenEngine, RegisterRefusal)| {
            let engine = match engine {
                GivenEngine::Publisher(engine) => engine.clone(),
                GivenEngine::Server(server) => presumed(server, server.profile.clone())?,
            };
            Some((engine, refusal.clone()))
        };
        let refused: Vec<_> = refused.iter().filter_map(announced).collect();
        self.announce_refused(state, by, &refused);
    }

    /// Begins to announce an engine. Returns `None` before the bridge is started, and once it is stopped.
    fn spawn_announcement(&self, state: &BridgeState, announced: Announced) -> Option<Announcement> {
        let nats = state.nats.clone().filter(|_| !state.is_stopping)?;
        let announcement = Announcement {
            key: announced.engine.key.clone(),
            block_size: announced.engine.block_size,
            stop: CancellationToken::new(),
            says_goodbye: Arc::default(),
            ended: CancellationToken::new(),
        };
        let inner = Arc::clone(&self.inner);
        let (stop, says_goodbye) = (announcement.stop.clone(), Arc::clone(&announcement.says_goodbye));
        let ended = announcement.ended.clone().drop_guard();
        let task = async move {
            let _ended = ended;
            if let Err(error) = inner.tell_awaited(&announced, nats, stop, &says_goodbye).await {
                log_untold(&announced.engine, &error);
            }
        };
        self.inner.tasks.spawn_on(task, &self.inner.runtime);
        Some(announcement)
    }

    /// Ends the announcement of a server's engine, and waits for its end. Daemons forget the engine, unless its key is
    /// among those in `told`, which the server has told and which are followed next.
    pub(crate) async fn end_announcement(&self, handle: &ServerHandle, told: &[EngineKey]) {
        let ended = {
            let mut state = self.inner.state.lock();
            let asked = state.servers.get_mut(&handle.server.key());
            let asked = asked.filter(|asked| asked.handle.is_same(handle));
            let announcement = asked.and_then(|asked| asked.announcement.take());
            announcement.map(|announcement| {
                let is_told = told.contains(&announcement.key);
                announcement.end(!is_told)
            })
        };
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
    }
}

impl BridgeState {
    /// Ends the announcement of an engine that is followed from now on, whether its server or another source has told
    /// how.
    pub(super) fn end_announcement_of(&mut self, key: &EngineKey) {
        for asked in self.servers.values_mut() {
            let is_it = |announcement: &mut Announcement| announcement.key == *key;
            if let Some(announcement) = asked.announcement.take_if(is_it) {
                announcement.end(false);
            }
        }
        self.end_refused(false, |announced| announced.key() == key);
    }

    /// Returns the announcements of engines that are not followed.
    fn announcements(&self) -> impl Iterator<Item = &Announcement> {
        let awaited = self
            .servers
            .values()
            .filter_map(|asked| asked.announcement.as_ref());
        awaited.chain(self.refused.iter().map(|refused| &refused.announcement))
    }

    /// Returns the holder of the engine that is followed or announced under `key`; `None` if there is none.
    pub(super) fn told_holder(&self, key: &EngineKey) -> Option<ToldHolder> {
        match self.engines.get(key) {
            Some(followed) => ToldHolder::of_engine(&followed.engine),
            None => {
                let mut announced = self.announcements();
                announced
                    .find(|announced| announced.key == *key)
                    .map(Announcement::holder)
            }
        }
    }

    /// Returns the block size with which `engine` is announced: that of an engine of its model which is followed, or else
    /// announced. Its own size could shut the others out, where daemons take the size that they hear of first.
    fn size_in_force(&self, engine: &NewEngine) -> u32 {
        let model = &engine.key.model;
        let announced = || {
            self.announcements()
                .find(|announced| announced.key.model == *model)
        };
        let in_force = self.size_of(model).or_else(|| Some(announced()?.block_size));
        in_force.unwrap_or(engine.block_size)
    }

    /// Whether an announced engine stands for all refused engines of `model`: it is of that model. Daemons are not told for
    /// ever of one whose server is not there, so that one stands for no other.
    fn stands_for(&self, announced: &RefusedAnnouncement, model: &ModelKey) -> bool {
        let server = self.handle_of(&announced.by);
        announced.key().model == *model && server.is_none_or(|server| server.is_there())
    }

    /// Returns the server that `by` is; `None` if it is none.
    fn handle_of(&self, by: &GivenBy) -> Option<ServerHandle> {
        match by {
            GivenBy::Source(_) | GivenBy::Registrations => None,
            GivenBy::Server(key) => Some(self.servers.get(key)?.handle.clone()),
        }
    }

    /// Whether a refused engine is announced that `by` has given.
    pub(super) fn announces_refused_of(&self, by: &GivenBy) -> bool {
        self.refused.iter().any(|announced| announced.by == *by)
    }

    /// Ends all announcements of refused engines that `by` has given.
    pub(super) fn end_refused_of(&mut self, by: &GivenBy) {
        self.end_refused(true, |announced| announced.by == *by);
    }

    /// Ends the announcements of refused engines for which `is_meant` holds. With `says_goodbye`, daemons forget the engines.
    pub(super) fn end_refused(
        &mut self,
        says_goodbye: bool,
        mut is_meant: impl FnMut(&RefusedAnnouncement) -> bool,
    ) {
        for ended in self.refused.extract_if(.., |announced| is_meant(announced)) {
            ended.announcement.end(says_goodbye);
        }
    }
}

/// Returns a refused engine as it is announced: with the block size that its model has here. `None` if it must not be
/// announced.
fn announced_size(engine: &NewEngine, refusal: &RegisterRefusal) -> Option<NewEngine> {
    let mut engine = engine.clone();
    match refusal {
        RegisterRefusal::TooMany { .. } => Some(engine),
        RegisterRefusal::OtherBlockSize { in_force, .. } => {
            engine.block_size = *in_force;
            Some(engine)
        }
        _ => None,
    }
}

/// Returns the words that say why an engine is not followed. They are short enough for a label.
fn trouble_of(refusal: &RegisterRefusal) -> String {
    match refusal {
        RegisterRefusal::OtherBlockSize { asked, in_force, .. } => {
            format!(
                "it is not followed: block_size is {asked}, but its model has blocks of {in_force} tokens here"
            )
        }
        other => format!("it is not followed: {other}"),
    }
}

/// Engine to announce.
struct Announced {
    engine: NewEngine,
    /// Reason, in words, why the engine is not followed.
    trouble: String,
    /// Server of the engine, which is announced for as long as the server is known to be there. `None` if a source gives
    /// the engine, which is announced until the source no longer does.
    server: Option<ServerHandle>,
}

impl Inner {
    /// Tells daemons that an engine is out of sight, until `stop`.
    async fn tell_awaited(
        &self,
        announced: &Announced,
        nats: Client,
        stop: CancellationToken,
        says_goodbye: &AtomicBool,
    ) -> Result<(), String> {
        let in_words = |error: PublisherError| error.to_string();
        let engine = &announced.engine;
        let holder = self.own_holder(engine)?;
        // A relay begins out of sight.
        let mut relay = self.relay(engine, holder.worker, holder.rank, nats).await?;
        relay.explain(Some(&announced.trouble)).await.map_err(in_words)?;
        while stop
            .run_until_cancelled(tokio::time::sleep(PAUSE))
            .await
            .is_some()
        {
            if announced.server.as_ref().is_none_or(ServerHandle::is_there) {
                relay.told_alive().await.map_err(in_words)?;
            }
        }
        let ending = match says_goodbye.load(Ordering::Acquire) {
            true => relay.say_goodbye().await,
            false => relay.fall_silent().await,
        };
        ending.map_err(in_words)
    }
}
