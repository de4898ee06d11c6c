//! Engines that are known and not followed: their servers have not told yet how to follow them, or the bridge refuses
//! them. Nobody knows which blocks such an engine has. So the bridge announces the engine to daemons as out of sight.
//! Without the announcement, daemons would give exact answers that leave the engine out.
//!
//! Of the engines that are refused, the bridge announces one for each model: that is enough for answers to say that
//! somebody is missing. An engine is not announced if its name or its address is taken: mostly it is the same engine,
//! described twice.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::Client;
use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::ModelKey;
use kvatlas_engines::Format;
use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::{EngineKey, GivenEngine, NewEngine, NewServer, RegisterRefusal, ServerKey};
use kvatlas_telemetry::log_gated;

use super::super::check::check_block_size;
use super::super::progress::log_untold;
use super::super::server::{OriginServer, ServerHandle};
use super::freed::Freed;
use super::presumed::{key_of_server, presumed, presumed_key};
use super::{Bridge, BridgeState, Inner};

/// Least bound on the models of which a refused engine is announced. Where more engines may be followed, that is the bound.
const ANNOUNCED_MIN: usize = 64;
/// Pause between two looks whether the server of an announced engine is there.
const PAUSE: Duration = Duration::from_secs(5);

/// Party that gives engines which are announced: a source, a server that has told its publishers, or clients.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GivenBy {
    Source(String),
    Server(ServerKey),
    /// Registrations with earlier or other bridges.
    Registrations,
    /// A server that has not told its publishers yet. The bridge refuses none of them.
    Awaited(ServerKey),
}

/// Engine that the bridge refuses.
pub(super) struct RefusedEngine {
    pub(super) engine: GivenEngine,
    pub(super) key: EngineKey,
    /// Refusal at the last attempt; `None` if there was no attempt yet.
    pub(super) refusal: Option<RegisterRefusal>,
    /// Server that has told the engine; `None` if a source gives it.
    pub(super) origin: Option<OriginServer>,
}

impl RefusedEngine {
    pub(super) fn new(engine: GivenEngine, refusal: Option<RegisterRefusal>) -> Self {
        Self {
            key: presumed_key(&engine),
            engine,
            refusal,
            origin: None,
        }
    }

    /// Whether the engine may be announced: it is not one that is followed under another name or description, and its model
    /// and block size are given.
    pub(super) fn may_be_announced(&self) -> bool {
        let is_described = match &self.engine {
            GivenEngine::Publisher(_) => true,
            GivenEngine::Server(server) => server.block_size.is_some() && server.model.is_some(),
        };
        let is_left_out = matches!(
            self.refusal,
            Some(RegisterRefusal::TooMany { .. } | RegisterRefusal::OtherBlockSize { .. })
        );
        is_described && is_left_out
    }

    /// Returns the engine as it is announced, with the block size that its model has here, and the words that say why it is
    /// not followed. They are short enough for a label.
    fn announced(&self) -> Option<(NewEngine, String)> {
        let mut engine = match &self.engine {
            GivenEngine::Publisher(engine) => engine.clone(),
            GivenEngine::Server(server) => presumed(server, server.profile.clone())?,
        };
        let why = match self.refusal.as_ref()? {
            RegisterRefusal::OtherBlockSize { asked, in_force, .. } => {
                engine.block_size = *in_force;
                format!("block_size is {asked}, but its model has blocks of {in_force} tokens here")
            }
            other => other.to_string(),
        };
        Some((engine, format!("it is not followed: {why}")))
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

/// Report to daemons that the state of an engine is not known. The bridge repeats the report until the server that the
/// engine runs in has told how to follow the engine's events.
#[derive(Debug)]
pub(super) struct Announcement {
    pub(super) by: GivenBy,
    pub(super) block_size: u32,
    /// Holder of which daemons are told; `None` if it has the name of a plane, which no engine that is followed has.
    pub(super) holder: Option<ToldHolder>,
    stop: CancellationToken,
    pub(super) says_goodbye: Arc<AtomicBool>,
    /// Token that is cancelled once the task of this report has ended.
    ended: CancellationToken,
}

impl Announcement {
    /// Whether the bridge refuses the engine.
    pub(super) fn is_refused(&self) -> bool {
        !matches!(self.by, GivenBy::Awaited(_))
    }

    /// Whether daemons are told of `holder`.
    fn is_of(&self, holder: Option<ToldHolder>) -> bool {
        self.holder.is_some() && self.holder == holder
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
        let namespaces = self.inner.options.namespaces.as_ref();
        let is_refused = namespaces.is_some_and(|namespaces| check_block_size(&engine, namespaces).is_err());
        let is_known = state.engines.contains_key(&engine.key) || state.announced.contains_key(&engine.key);
        if is_refused || is_known {
            return;
        }
        engine.block_size = state.size_in_force(&engine);
        let trouble = "its server has not told how to follow it".to_owned();
        self.spawn_announcement(state, GivenBy::Awaited(key.clone()), engine, trouble);
    }

    /// Announces a refused engine of each model for which none stands. Returns the announcements of engines that are no
    /// longer refused, which end with that.
    pub(super) fn announce_refused(&self, state: &mut BridgeState) -> Vec<Freed> {
        let (ended, awaited) = state.take_ended();
        for server in awaited {
            self.announce_server(state, &server);
        }
        let (missing, untold) = state.missing(self.inner.options.engines_max);
        self.inner.metrics.models_untold.set(untold as f64);
        for (by, mut engine, trouble) in missing {
            engine.block_size = state.size_in_force(&engine);
            self.spawn_announcement(state, by, engine, trouble);
        }
        ended
    }

    /// Begins to announce an engine. Does nothing before the bridge is started, and once it is stopped.
    fn spawn_announcement(&self, state: &mut BridgeState, by: GivenBy, engine: NewEngine, trouble: String) {
        let Some(nats) = state.nats.clone().filter(|_| !state.is_stopping) else {
            return;
        };
        let server = state.handle_of(&by);
        let key = engine.key.clone();
        let announcement = Announcement {
            by,
            block_size: engine.block_size,
            holder: ToldHolder::of_engine(&engine),
            stop: CancellationToken::new(),
            says_goodbye: Arc::default(),
            ended: CancellationToken::new(),
        };
        let announced = Announced {
            engine,
            trouble,
            server,
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
        state.announced.insert(key, announcement);
    }

    /// Ends the announcement of a server's engine, and waits for its end. Daemons forget the engine, unless another one has
    /// its name.
    pub(crate) async fn end_announcement(&self, handle: &ServerHandle) {
        let ended = {
            let mut state = self.inner.state.lock();
            let asked = state.servers.get(&handle.server.key());
            let is_asked = asked.is_some_and(|asked| asked.handle.is_same(handle));
            let announced = is_asked.then(|| state.take_awaited(&handle.server)).flatten();
            announced.map(|(key, announcement)| {
                self.fill(&mut state);
                let is_told = announcement.is_of(state.told_holder(&key));
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
    /// how. Returns the token that is cancelled once the announcement's task has ended.
    pub(super) fn end_announcement_of(&mut self, engine: &NewEngine) -> Option<CancellationToken> {
        let announcement = self.announced.remove(&engine.key)?;
        let is_told = announcement.is_of(ToldHolder::of_engine(engine));
        Some(announcement.end(!is_told))
    }

    /// Removes and returns the announcement of a server whose engine is awaited.
    pub(super) fn take_awaited(&mut self, server: &NewServer) -> Option<(EngineKey, Announcement)> {
        let key = key_of_server(server);
        let announced = self.announced.get(&key);
        announced.filter(|told| told.by == GivenBy::Awaited(server.key()))?;
        self.announced.remove_entry(&key)
    }

    /// Removes and returns the announcements of engines that are no longer refused, and of those whose model has engines with
    /// another block size by now: daemons would drop all batches of these. Also returns the servers whose engines are still
    /// awaited, and have to be announced anew.
    fn take_ended(&mut self) -> (Vec<Freed>, Vec<ServerKey>) {
        let refused: BTreeSet<(&GivenBy, &EngineKey)> = self
            .to_announce()
            .map(|(by, refused)| (by, &refused.key))
            .collect();
        let is_over = |key: &EngineKey, told: &Announcement| {
            let has_other_size = self
                .size_of(&key.model)
                .is_some_and(|size| size != told.block_size);
            has_other_size || told.is_refused() && !refused.contains(&(&told.by, key))
        };
        let announced = self.announced.iter();
        let over = announced.filter(|(key, told)| is_over(key, told));
        let over: Vec<EngineKey> = over.map(|(key, _)| key.clone()).collect();
        let mut awaited = Vec::new();
        let ended = over.iter().filter_map(|key| self.announced.remove_entry(key));
        let ended = ended.map(|(key, announcement)| {
            if let GivenBy::Awaited(server) = &announcement.by {
                awaited.push(server.clone());
            }
            Freed::of_announced(key, String::new(), Some(announcement))
        });
        (ended.collect(), awaited)
    }

    /// Returns the refused engines that may be announced, each with the party that gives it.
    fn to_announce(&self) -> impl Iterator<Item = (&GivenBy, &RefusedEngine)> {
        let given = self.refused.iter();
        let given = given.flat_map(|(by, refused)| refused.iter().map(move |refused| (by, refused)));
        let kept = self
            .kept
            .refused()
            .map(|refused| (&GivenBy::Registrations, refused));
        given
            .chain(kept)
            .filter(|(_, refused)| refused.may_be_announced())
    }

    /// Returns the holder of the engine that is followed or announced under `key`; `None` if there is none.
    pub(super) fn told_holder(&self, key: &EngineKey) -> Option<ToldHolder> {
        match self.engines.get(key) {
            Some(followed) => ToldHolder::of_engine(&followed.engine),
            None => self.announced.get(key)?.holder,
        }
    }

    /// Returns the block size with which `engine` is announced: that of an engine of its model which is followed, or else
    /// announced. Its own size could shut the others out, where daemons take the size that they hear of first.
    fn size_in_force(&self, engine: &NewEngine) -> u32 {
        let model = &engine.key.model;
        let announced = || self.announced.iter().find(|(key, _)| key.model == *model);
        let in_force = self.size_of(model).or_else(|| Some(announced()?.1.block_size));
        in_force.unwrap_or(engine.block_size)
    }

    /// Returns a refused engine to announce of each model for which none stands, with the party that gives it and the words for
    /// it. An announced engine stands for its model. Daemons are not told for ever of one whose server is not there: that one
    /// stands only for others whose servers are not there, either. Also returns the number of models for which there is no
    /// room.
    fn missing(&self, engines_max: usize) -> (Vec<(GivenBy, NewEngine, String)>, usize) {
        let told = self.announced.iter().filter(|(_, told)| told.is_refused());
        let told: Vec<(&GivenBy, &ModelKey)> = told.map(|(key, told)| (&told.by, &key.model)).collect();
        let mut room = engines_max.max(ANNOUNCED_MIN).saturating_sub(told.len());
        let (mut missing, mut untold) = (Vec::new(), 0);
        let mut stand: BTreeSet<&ModelKey> = BTreeSet::new();
        for is_there in [true, false] {
            let standing = told.iter().filter(|(by, _)| self.is_there(by) == is_there);
            stand.extend(standing.map(|(_, model)| model));
            for (by, refused) in self.to_announce().filter(|(by, _)| self.is_there(by) == is_there) {
                let model = &refused.key.model;
                if stand.contains(model) || self.told_holder(&refused.key).is_some() {
                    continue;
                }
                if room == 0 {
                    log_gated!(warn "daemons do not know that engines of a model are not followed: too many are announced"; %model);
                    untold += 1;
                    stand.insert(model);
                } else if let Some((engine, trouble)) = refused.announced() {
                    room -= 1;
                    stand.insert(model);
                    missing.push((by.clone(), engine, trouble));
                }
            }
        }
        (missing, untold)
    }

    /// Whether the party `by` is there. Sources and clients always are.
    fn is_there(&self, by: &GivenBy) -> bool {
        self.handle_of(by).is_none_or(|server| server.is_there())
    }

    /// Returns the server that `by` is; `None` if it is none.
    fn handle_of(&self, by: &GivenBy) -> Option<ServerHandle> {
        match by {
            GivenBy::Source(_) | GivenBy::Registrations => None,
            GivenBy::Server(key) | GivenBy::Awaited(key) => Some(self.servers.get(key)?.handle.clone()),
        }
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
