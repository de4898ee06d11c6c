//! The engines that a bridge follows.

mod awaited;
mod freed;
mod given;
mod kept;
mod lifetimes;
mod presumed;
mod refused;
mod registry;
mod republished;
mod servers;
mod shared;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_nats::Client;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_client::publish::PublisherOptions;
use kvatlas_core::index::Namespaces;
use kvatlas_core::wire::{Profile, Subjects, worker_of_instance};
use kvatlas_engines::Format;

use kvatlas_config::Secret;
use kvatlas_process::registry::{
    EngineKey, EngineState, EngineStatus, GivenEngine, NewEngine, RegisterRefusal, ServerKey, SizeOf,
};
use kvatlas_telemetry::BridgeMetrics;

use super::check::{check_block_size, check_engine, check_shared};
use super::discovery::Reports;
use super::dynamo::{RecordReaders, Records};
use super::farewells::Farewells;
use super::follower::FollowOptions;
use super::hosts::AllowedHosts;
use super::http::address_of;
use super::kin::Kin;
use super::lease::{Lease, LeaseOptions};
use super::progress::{Progress, SharedProgress};
use super::refused::RefusedSubjects;
use super::republish::{RepublishOptions, Republisher};
use super::server::{OriginServer, ServerHandle};
use super::sources::SourceTask;
use super::stalls::BridgeClock;
use super::state::{KeptPlaces, Registered, StateDirectory};
use awaited::{Announcement, GivenBy, RefusedEngine};
use freed::Freed;
use given::Given;
use kept::KeptRegistrations;
use kvatlas_process::broker::RefusedSubscriptions;
use lifetimes::Lifetime;
use servers::AskedServer;

/// Settings of a bridge.
#[derive(Debug, Clone)]
pub struct BridgeOptions {
    /// Settings for following engines.
    pub follow: FollowOptions,
    /// Settings of the publishers that report to daemons. A namespace's own settings come from its engine instead.
    pub publisher: PublisherOptions,
    /// Namespaces of the daemon in this process; `None` if there is no daemon. If they are given, the bridge refuses an
    /// engine whose block size differs from the block size of its namespace. Otherwise the bridge follows the engine,
    /// and a daemon elsewhere refuses its batches.
    pub namespaces: Option<Arc<Namespaces>>,
    /// Maximum number of engines that are followed.
    pub engines_max: usize,
    /// Hosts that are allowed for engines that are registered over HTTP. The hosts of engines from flags, files and discovery,
    /// and the client's own host, are always allowed.
    pub register_hosts: AllowedHosts,
    /// Token that clients need to register engines over HTTP, except programs on this machine; `None` if no token is needed.
    pub register_token: Option<Secret>,
    /// Clock by which the bridge notices that it has stood still.
    pub clock: BridgeClock,
    /// Directory, or place in JetStream, in which the state of engines is kept; `None` if none is kept.
    pub state: Option<StateDirectory>,
    /// Lease by which bridges that follow the same engines agree which bridge reports them; `None` if the bridge shares no
    /// engine with others.
    pub lease: Option<LeaseOptions>,
    /// Sockets at which engines' events are republished; `None` if events are not republished.
    pub republish: Option<RepublishOptions>,
}

impl Default for BridgeOptions {
    fn default() -> Self {
        Self {
            follow: FollowOptions::default(),
            publisher: PublisherOptions {
                // An engine's batches are complete already. The delay only joins bursts of them.
                batch_delay: std::time::Duration::from_micros(500),
                ring_bytes_max: 4 << 20,
                ..PublisherOptions::default()
            },
            namespaces: None,
            engines_max: 1024,
            register_hosts: AllowedHosts::default(),
            register_token: None,
            clock: BridgeClock::default(),
            state: None,
            lease: None,
            republish: None,
        }
    }
}

/// An engine, and the task that follows it.
struct FollowedEngine {
    engine: NewEngine,
    /// Server that reported the engine; `None` if no server did.
    origin: Option<OriginServer>,
    /// Registration of the engine; `None` if it was not registered. A registered engine stays when a source that gives it,
    /// too, drops it.
    registered: Option<Lifetime>,
    progress: SharedProgress,
    stop: CancellationToken,
    says_goodbye: Arc<AtomicBool>,
    /// Address and labels of the engine, which may change while it is followed.
    profiles: watch::Sender<Profile>,
}

impl FollowedEngine {
    /// Ends the task that follows the engine.
    fn end(&self, says_goodbye: bool) {
        self.says_goodbye.store(says_goodbye, Ordering::Release);
        self.stop.cancel();
    }

    /// Takes over the address and labels of `engine`, if both engines are followed with the same settings and come from the
    /// same server. Otherwise refuses `engine`, as another engine of the same name.
    fn take_over(&mut self, engine: NewEngine, origin: Option<&OriginServer>) -> Result<(), RegisterRefusal> {
        let is_same_origin = match (&self.origin, origin) {
            (Some(own), Some(other)) => own.handle.is_same(&other.handle),
            (own, other) => own.is_none() && other.is_none(),
        };
        if is_same_origin && self.engine.is_followed_like(&engine) {
            self.set_profile(engine.profile);
            return Ok(());
        }
        Err(RegisterRefusal::Conflict {
            endpoint: self.engine.endpoint.clone(),
            key: Box::new(engine.key),
        })
    }

    /// Whether the server of `handle` has reported the engine.
    fn is_of(&self, handle: &ServerHandle) -> bool {
        let origin = self.origin.as_ref();
        origin.is_some_and(|origin| origin.handle.is_same(handle))
    }

    fn set_profile(&mut self, profile: Profile) {
        if self.engine.profile != profile {
            self.profiles.send_replace(profile.clone());
            self.engine.profile = profile;
        }
    }

    /// Returns the engine as it was registered; `None` if it was not.
    fn given(&self) -> Option<GivenEngine> {
        Some(self.registered.as_ref()?.engine().clone())
    }

    fn state(&self) -> EngineState {
        let Progress { status, last_error } = self.progress.get();
        let is_seen = matches!(status, EngineStatus::Exact | EngineStatus::Degraded);
        let of_server = self.origin.as_ref().filter(|_| !is_seen);
        let of_server = of_server.and_then(|origin| origin.handle.progress().trouble);
        EngineState {
            engine: self.engine.clone(),
            status,
            last_error: of_server.or(last_error),
        }
    }
}

/// A followed engine, as commands of operators see it.
pub(super) struct NamedEngine {
    pub(super) engine: NewEngine,
    /// URL of the server that reported the engine; `None` if no server did.
    pub(super) server: Option<String>,
}

pub(super) struct Inner {
    pub(super) subjects: Subjects,
    pub(super) options: BridgeOptions,
    /// The lease, shared with other bridges that follow the same engines.
    pub(super) lease: Option<Lease>,
    pub(super) metrics: Arc<BridgeMetrics>,
    pub(super) republisher: Option<Republisher>,
    /// Refusals by the NATS server.
    pub(super) refused: RefusedSubjects,
    /// Count of the refusals of subscriptions without which the bridge still reports engines.
    pub(super) refused_optional: RefusedSubscriptions,
    pub(super) kin: Kin,
    pub(super) farewells: Farewells,
    /// Token that stops the tasks that find engines.
    stop: CancellationToken,
    runtime: Handle,
    tasks: TaskTracker,
    state: Mutex<BridgeState>,
    registered: Option<Registered>,
    record_readers: RecordReaders,
}

#[derive(Default)]
struct BridgeState {
    /// NATS connection; `None` until the bridge is started.
    nats: Option<Client>,
    is_stopping: bool,
    engines: BTreeMap<EngineKey, FollowedEngine>,
    servers: BTreeMap<ServerKey, AskedServer>,
    /// The engines that flags, files and discovery gave.
    given: Given,
    /// The sources of engines.
    sources: Vec<Reports>,
    /// Task of the lease, with the token that stops it.
    leasing: Option<(CancellationToken, JoinHandle<()>)>,
    kept: KeptRegistrations,
    /// Engines that are refused, by those that give them.
    refused: BTreeMap<GivenBy, Vec<RefusedEngine>>,
    /// Announcements of engines that are not followed.
    announced: BTreeMap<EngineKey, Announcement>,
    /// Engines that are no longer followed, until [`Bridge::fill`].
    freed: Vec<Freed>,
    /// Engines that sources give and that a client has unregistered. Each stays away until no source gives it as it was.
    dismissed: Vec<GivenEngine>,
}

impl BridgeState {
    /// Stops following an engine. Its task ends with [`Bridge::fill`].
    fn remove(&mut self, key: &EngineKey) {
        let Some(removed) = self.engines.remove(key) else {
            return;
        };
        if removed.origin.is_none() {
            self.dismiss(GivenEngine::Publisher(removed.engine.clone()));
        }
        self.freed.push(Freed::of_engine(removed));
    }

    /// Returns the engines that were registered and are followed, whether sources give them, too, or not.
    fn registered(&self) -> impl Iterator<Item = GivenEngine> {
        let publishers = self.engines.values().filter_map(FollowedEngine::given);
        publishers.chain(self.servers.values().filter_map(AskedServer::given))
    }

    /// Returns the registration of the followed engine that has the name of `engine`; `None` if there is none.
    fn registered_as(&self, engine: &GivenEngine) -> Option<GivenEngine> {
        match engine {
            GivenEngine::Publisher(engine) => self.engines.get(&engine.key)?.given(),
            GivenEngine::Server(server) => self.servers.get(&server.key())?.given(),
        }
    }

    /// Notes whether an engine that is followed was registered, just now.
    fn set_registered(&mut self, engine: &GivenEngine, is_registered: bool) {
        if let Some(noted) = self.lifetime_mut(engine) {
            *noted = is_registered.then(|| Lifetime::of(engine));
        }
    }

    /// Returns the followed engines, but for those that give way.
    fn staying(&self, gives_way: &dyn Fn(&FollowedEngine) -> bool) -> impl Iterator<Item = &NewEngine> {
        let staying = self.engines.values().filter(move |followed| !gives_way(followed));
        staying.map(|followed| &followed.engine)
    }
}

/// Whether two engines are of one model, with different block sizes.
fn has_other_size(other: &NewEngine, engine: &NewEngine) -> bool {
    other.key.model == engine.key.model && other.block_size != engine.block_size
}

/// Whether two engines are at one address, with different models or block sizes.
fn is_in_the_way(other: &NewEngine, engine: &NewEngine) -> bool {
    let is_same_address = other.endpoint == engine.endpoint && other.topic == engine.topic;
    let is_same_cache =
        other.key.model.is_same_cache(&engine.key.model) && other.block_size == engine.block_size;
    is_same_address && !is_same_cache
}

/// Follows engines. Cheap to clone; all clones are one bridge.
#[derive(Clone)]
pub struct Bridge {
    inner: Arc<Inner>,
}

impl Bridge {
    /// Makes a bridge that follows no engine yet. If an engine is registered before [`Self::start`], following it
    /// begins with that call.
    ///
    /// The bridge's tasks run on the current tokio runtime.
    pub fn new(subjects: Subjects, options: BridgeOptions) -> Self {
        // Registrations in JetStream are read later: the bridge watches them once it is connected.
        let own = options.state.clone().filter(|state| state.shared().is_none());
        let (kept, registered) = own.map(Registered::open).unzip();
        let kept = kept.or_else(|| options.state.as_ref().map(|_| None));
        let state = BridgeState {
            kept: kept.map(KeptRegistrations::new).unwrap_or_default(),
            ..BridgeState::default()
        };
        let metrics = Arc::new(BridgeMetrics::new());
        let republished = options.republish.as_ref();
        Self {
            inner: Arc::new(Inner {
                kin: Kin::default(),
                farewells: Farewells::default(),
                refused: RefusedSubjects::default(),
                refused_optional: RefusedSubscriptions::default(),
                republisher: republished.map(|republish| {
                    let kept = KeptPlaces::of(options.state.as_ref());
                    Republisher::new(republish, kept, Arc::clone(&metrics))
                }),
                subjects,
                lease: options.lease.as_ref().map(|lease| Lease::new(lease.times)),
                options,
                registered,
                record_readers: RecordReaders::default(),
                stop: CancellationToken::new(),
                runtime: Handle::current(),
                tasks: TaskTracker::new(),
                metrics,
                state: Mutex::new(state),
            }),
        }
    }

    /// Begins to follow engines, and to report them to daemons through `nats`.
    pub fn start(&self, nats: &Client) {
        let mut state = self.inner.state.lock();
        state.nats = Some(nats.clone());
        if let (Some(lease), Some(options)) = (&self.inner.lease, &self.inner.options.lease) {
            let _entered = self.inner.runtime.enter();
            let (subject, stop) = (
                self.inner.subjects.bridges(&options.group),
                CancellationToken::new(),
            );
            let task = lease.start(nats.clone(), subject, options.times.beat, stop.clone());
            state.leasing = Some((stop, task));
        }
        for followed in state.engines.values() {
            self.spawn(followed, nats.clone(), None);
        }
        let awaited: Vec<ServerKey> = state.servers.keys().cloned().collect();
        for key in &awaited {
            self.announce_server(&mut state, key);
        }
        self.fill(&mut state);
        drop(state);
        self.spawn_source(self.clone().carry_out_commands(nats.clone()));
        self.spawn_source(self.clone().tend_state());
        self.spawn_source(self.clone().end_unrenewed());
        self.spawn_source(self.clone().watch_connection(nats.clone()));
        if let Some(shared) = self.shared_registrations() {
            let metrics = Arc::clone(&self.inner.metrics);
            self.spawn_source(shared.clone().run(nats.clone(), metrics, self.clone()));
        }
    }

    /// Stops following all engines, and waits for their tasks. With `says_goodbye`, daemons forget the holders immediately.
    /// Without it, daemons keep the holders until another bridge reports them, or until they are stale.
    pub async fn stop(&self, says_goodbye: bool) {
        {
            let mut state = self.inner.state.lock();
            state.is_stopping = true;
            self.inner.stop.cancel();
            for server in state.servers.values() {
                server.stop.cancel();
            }
            for (_, announcement) in std::mem::take(&mut state.announced) {
                announcement.end(says_goodbye);
            }
            for followed in state.engines.values() {
                followed.end(says_goodbye);
            }
        }
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        let leasing = self.inner.state.lock().leasing.take();
        if let Some((stop, task)) = leasing {
            stop.cancel();
            // A task that has failed has logged that.
            let _ = task.await;
        }
    }

    /// Begins to follow an engine from any origin. If the engine is already followed with the same settings, only its
    /// address and labels are updated. An engine without an address gets its server's address.
    fn follow_in(&self, state: &mut BridgeState, engine: GivenEngine) -> Result<(), RegisterRefusal> {
        match engine {
            GivenEngine::Publisher(mut engine) => {
                // Only TensorRT-LLM's publisher is also the server that takes requests.
                if engine.format == Format::TensorRt && engine.profile.address.is_none() {
                    engine.profile.address = address_of(&engine.endpoint);
                }
                self.add(state, engine, None)
            }
            GivenEngine::Server(mut server) => {
                if server.profile.address.is_none() {
                    server.profile.address = address_of(&server.url);
                }
                self.add_server(state, server)
            }
        }
    }

    /// Begins to follow `engine` as [`Self::follow_in`] does. `origin` is the server that reported the engine; `None` if the
    /// engine was given directly.
    fn add(
        &self,
        state: &mut BridgeState,
        engine: NewEngine,
        origin: Option<OriginServer>,
    ) -> Result<(), RegisterRefusal> {
        check_engine(&engine)?;
        if self.inner.lease.is_some() {
            check_shared(&engine)?;
        }
        if state.is_stopping {
            return Err(RegisterRefusal::Stopping);
        }
        if let Some(known) = state.engines.get_mut(&engine.key) {
            return known.take_over(engine, origin.as_ref());
        }
        self.check_beside(state, &engine, &|_| false)?;
        let ended = state.end_announcement_of(&engine);
        let followed = FollowedEngine {
            engine: engine.clone(),
            origin,
            registered: None,
            progress: SharedProgress::default(),
            stop: CancellationToken::new(),
            says_goodbye: Arc::default(),
            profiles: watch::Sender::new(engine.profile.clone()),
        };
        if let Some(nats) = &state.nats {
            self.spawn(&followed, nats.clone(), ended);
        }
        state.engines.insert(engine.key, followed);
        Ok(())
    }

    /// Fails if `engine` cannot be followed beside the engines that are followed, but for those that give way.
    fn check_beside(
        &self,
        state: &BridgeState,
        engine: &NewEngine,
        gives_way: &dyn Fn(&FollowedEngine) -> bool,
    ) -> Result<(), RegisterRefusal> {
        if let Some(other) = state
            .staying(gives_way)
            .find(|other| has_other_size(other, engine))
        {
            return Err(RegisterRefusal::OtherBlockSize {
                asked: engine.block_size,
                in_force: other.block_size,
                whose: SizeOf::Engine(Box::new(other.key.clone())),
            });
        }
        if let Some(other) = state
            .staying(gives_way)
            .find(|other| is_in_the_way(other, engine))
        {
            return Err(RegisterRefusal::SameAddress {
                key: Box::new(other.key.clone()),
                endpoint: other.endpoint.clone(),
                block_size: other.block_size,
            });
        }
        if let Some(namespaces) = &self.inner.options.namespaces {
            check_block_size(engine, namespaces)?;
        }
        let engines_max = self.inner.options.engines_max;
        match state.staying(gives_way).count() >= engines_max {
            true => Err(RegisterRefusal::TooMany { engines: engines_max }),
            false => Ok(()),
        }
    }

    /// Returns the publishers of the engine whose instance or worker is called `name`.
    pub(super) fn called(&self, name: &str) -> Vec<NamedEngine> {
        let state = self.inner.state.lock();
        let is_it = |key: &EngineKey| {
            let worker = worker_of_instance(&key.instance);
            key.instance == name || worker.is_ok_and(|worker| worker.as_str() == name)
        };
        let named = state
            .engines
            .values()
            .filter(|followed| is_it(&followed.engine.key));
        let named = named.map(|followed| NamedEngine {
            engine: followed.engine.clone(),
            server: followed
                .origin
                .as_ref()
                .map(|origin| origin.handle.server.url.clone()),
        });
        named.collect()
    }

    pub(super) fn subjects(&self) -> &Subjects {
        &self.inner.subjects
    }

    /// Whether the bridge may connect to an engine on `host`. It may if flags, files or discovery give an engine on
    /// this host, or if the operator allows the host.
    pub(super) fn allows_host(&self, host: &str) -> bool {
        self.inner.options.register_hosts.allows(host) || self.inner.state.lock().given.has_host(host)
    }

    /// Returns how many engines the sources for which `is_meant` holds know together, and how many of these are not
    /// followed.
    pub(super) fn found_by(&self, is_meant: impl Fn(&Reports) -> bool) -> (usize, usize) {
        let state = self.inner.state.lock();
        let sources = state.sources.iter().filter(|reports| is_meant(reports));
        let sources = sources.map(Reports::state);
        sources.fold((0, 0), |(engines, refused), source| {
            (engines + source.engines, refused + source.refused)
        })
    }

    pub(super) fn add_source(&self, reports: Reports) {
        self.inner.state.lock().sources.push(reports);
    }

    /// Runs `part`, a task of a source of engines, until the bridge stops.
    pub(super) fn spawn_source(&self, part: impl Future<Output = ()> + Send + 'static) {
        self.inner.spawn(part);
    }

    pub(super) fn metrics(&self) -> &Arc<BridgeMetrics> {
        &self.inner.metrics
    }

    /// Begins to follow an engine, once the task of `before` has ended, which reported the same holder.
    fn spawn(&self, followed: &FollowedEngine, nats: Client, before: Option<CancellationToken>) {
        let inner = Arc::clone(&self.inner);
        let task = SourceTask {
            engine: followed.engine.clone(),
            origin: followed.origin.clone(),
            records: inner.records_of(&followed.engine),
            options: inner.options.follow.clone(),
            clock: inner.options.clock.clone(),
            progress: followed.progress.clone(),
            metrics: Arc::clone(&inner.metrics),
            stop: followed.stop.clone(),
            says_goodbye: Arc::clone(&followed.says_goodbye),
            nats,
        };
        let task = Box::pin(inner.follow_source(task));
        let task = async move {
            if let Some(before) = before {
                before.cancelled().await;
            }
            task.await;
        };
        self.inner.tasks.spawn_on(task, &self.inner.runtime);
    }
}

impl Inner {
    fn spawn(&self, part: impl Future<Output = ()> + Send + 'static) {
        let task = self.stop.clone().run_until_cancelled_owned(part);
        self.tasks.spawn_on(task, &self.runtime);
    }

    /// Returns a receiver that follows the address and the labels of an engine.
    pub(super) fn profiles_of(&self, engine: &NewEngine) -> watch::Receiver<Profile> {
        let state = self.state.lock();
        let followed = state.engines.get(&engine.key);
        // If the engine is not in the list, it was just unregistered, and the task that follows it is about to end.
        followed.map_or_else(
            || watch::channel(engine.profile.clone()).1,
            |followed| followed.profiles.subscribe(),
        )
    }

    /// Returns the records of Dynamo's discovery, which say how to reach the engine's workers; `None` if the engine's
    /// settings name no place of such records.
    fn records_of(&self, engine: &NewEngine) -> Option<watch::Receiver<Arc<Records>>> {
        let discovery = engine.discovery.as_ref()?;
        Some(self.record_readers.of(discovery, |looking| self.spawn(looking)))
    }
}
