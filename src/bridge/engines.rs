//! The engines that a bridge follows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_nats::Client;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_client::publish::{PublishedHolder, PublisherOptions};
use kvatlas_core::hash::BlockSize;
use kvatlas_core::index::{Hashing, NamespaceSettings, Namespaces};
use kvatlas_core::wire::{
    Profile, Rank, Subjects, WorkerName, instance_of_worker, pool_of_instance, worker_of_instance,
};
use kvatlas_engines::{Format, HashMode, TranslatorSettings};

use crate::daemon::config::Secret;
use crate::daemon::http::{
    EngineKey, EngineRegistry, EngineState, NewEngine, RegisterRefusal, RemovedEngines, SizeOf,
};
use crate::daemon::metrics::BridgeMetrics;

use super::follower::{FollowOptions, Follower};
use super::holders::{Holders, StartRelay};
use super::hosts::{AllowedHosts, host_of};
use super::progress::{Progress, SharedProgress};
use super::relay::{Relay, Way};
use super::sources::{Source, SourceTask};
use super::spec::{check_block_size, check_engine};
use super::stalls::{BridgeClock, StallWatch};
use super::task::EngineTask;

/// Of a source whose hashes are the contract's, one block in so many is checked against its tokens.
const TRUSTED_SAMPLE: u32 = 64;

/// How a bridge works.
#[derive(Debug, Clone)]
pub struct BridgeOptions {
    /// How engines are followed.
    pub follow: FollowOptions,
    /// How daemons are told. The settings of the namespace are the engine's.
    pub publisher: PublisherOptions,
    /// The namespaces of the daemon in the same process, if there is one: an engine whose blocks have another size than its namespace's is
    /// refused. A daemon elsewhere refuses its batches.
    pub namespaces: Option<Arc<Namespaces>>,
    /// Most engines that are followed.
    pub engines_max: usize,
    /// Which hosts engines may have that are registered over HTTP, beside those of engines that are given and the client's own.
    pub register_hosts: AllowedHosts,
    /// The token that clients need that register engines over HTTP, unless they are programs on this machine; none where it is not needed.
    pub register_token: Option<Secret>,
    /// The clock by which the bridge notices that it has stood still.
    pub clock: BridgeClock,
}

impl Default for BridgeOptions {
    fn default() -> Self {
        Self {
            follow: FollowOptions::default(),
            publisher: PublisherOptions {
                // An engine's batches are whole already; only a burst of them is sent together.
                batch_delay: std::time::Duration::from_micros(500),
                ring_bytes_max: 4 << 20,
                ..PublisherOptions::default()
            },
            namespaces: None,
            engines_max: 1024,
            register_hosts: AllowedHosts::default(),
            register_token: None,
            clock: BridgeClock::default(),
        }
    }
}

/// An engine, and the task that follows it.
struct Followed {
    engine: NewEngine,
    progress: SharedProgress,
    stop: CancellationToken,
    says_goodbye: Arc<AtomicBool>,
    /// Its address and labels, which may change while it is followed.
    profiles: watch::Sender<Profile>,
}

struct Inner {
    subjects: Subjects,
    options: BridgeOptions,
    runtime: Handle,
    tasks: TaskTracker,
    metrics: Arc<BridgeMetrics>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None until the bridge is started.
    nats: Option<Client>,
    is_stopping: bool,
    engines: BTreeMap<EngineKey, Followed>,
    /// Those that flags and files gave.
    given: BTreeSet<EngineKey>,
}

impl State {
    /// An engine that is followed at the same address, and has another model or block size.
    fn at_same_address(&self, engine: &NewEngine) -> Option<&NewEngine> {
        let mut others = self.engines.values().map(|followed| &followed.engine);
        others.find(|other| {
            let is_same_address = other.endpoint == engine.endpoint && other.topic == engine.topic;
            let is_same_cache = other.key.model == engine.key.model && other.block_size == engine.block_size;
            is_same_address && !is_same_cache
        })
    }

    /// Whether an engine that flags or files gave has an endpoint on `host`.
    fn is_host_given(&self, host: &str) -> bool {
        let mut given = self.given.iter().filter_map(|key| self.engines.get(key));
        given.any(|followed| {
            endpoints_of(&followed.engine).any(|endpoint| host_of(endpoint).as_deref() == Some(host))
        })
    }

    /// An engine of the same namespace whose blocks have another size.
    fn other_size(&self, engine: &NewEngine) -> Option<&NewEngine> {
        let others = self.engines.values().map(|followed| &followed.engine);
        let mut others = others.filter(|other| other.key.model == engine.key.model);
        others.find(|other| other.block_size != engine.block_size)
    }
}

/// Follows engines. Cheap to clone; all clones are one bridge.
#[derive(Clone)]
pub struct Bridge {
    inner: Arc<Inner>,
}

impl Bridge {
    /// A bridge that follows nobody yet; engines that are registered before [`Self::start`] wait for it.
    ///
    /// Belongs to the current tokio runtime.
    pub fn new(subjects: Subjects, options: BridgeOptions) -> Self {
        Self {
            inner: Arc::new(Inner {
                subjects,
                options,
                runtime: Handle::current(),
                tasks: TaskTracker::new(),
                metrics: Arc::new(BridgeMetrics::new()),
                state: Mutex::default(),
            }),
        }
    }

    /// Begins to follow, and to tell daemons through `nats`.
    pub fn start(&self, nats: &Client) {
        let mut state = self.inner.state.lock();
        state.nats = Some(nats.clone());
        for followed in state.engines.values() {
            self.spawn(followed, nats.clone());
        }
    }

    /// Makes the engines that are given by flags and files those in `engines`: others of them are forgotten, changed ones begin anew.
    /// Engines that were registered otherwise stay.
    ///
    /// # Errors
    ///
    /// Why each of those engines that are not followed is not.
    pub fn replace(&self, engines: &[NewEngine]) -> Result<(), Vec<RegisterRefusal>> {
        let given = {
            let mut state = self.inner.state.lock();
            let keys = engines.iter().map(|engine| engine.key.clone()).collect();
            std::mem::replace(&mut state.given, keys)
        };
        let is_wanted = |known: &NewEngine| engines.iter().any(|engine| engine.is_followed_like(known));
        let is_outdated =
            |state: &EngineState| given.contains(&state.engine.key) && !is_wanted(&state.engine);
        let outdated: BTreeSet<EngineKey> = self
            .engines()
            .into_iter()
            .filter(is_outdated)
            .map(|state| state.engine.key)
            .collect();
        self.unregister(&|key| outdated.contains(key));
        let refused: Vec<RegisterRefusal> = engines
            .iter()
            .filter_map(|engine| self.register(engine.clone()).err())
            .collect();
        if refused.is_empty() { Ok(()) } else { Err(refused) }
    }

    /// Ends to follow all engines, and waits for their tasks. With `says_goodbye`, daemons forget the holders at once; without, they keep
    /// them until another bridge tells more, or until they are stale.
    pub async fn stop(&self, says_goodbye: bool) {
        {
            let mut state = self.inner.state.lock();
            state.is_stopping = true;
            for followed in state.engines.values() {
                followed.says_goodbye.store(says_goodbye, Ordering::Release);
                followed.stop.cancel();
            }
        }
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    fn spawn(&self, followed: &Followed, nats: Client) {
        let inner = Arc::clone(&self.inner);
        let (engine, progress) = (followed.engine.clone(), followed.progress.clone());
        let (stop, says_goodbye) = (followed.stop.clone(), Arc::clone(&followed.says_goodbye));
        let profiles = followed.profiles.subscribe();
        let task = async move {
            if engine.is_source() {
                let task = SourceTask {
                    options: inner.options.follow.clone(),
                    clock: inner.options.clock.clone(),
                    engine,
                    progress,
                    metrics: Arc::clone(&inner.metrics),
                    stop,
                    says_goodbye,
                };
                return inner.follow_source(task, nats, profiles).await;
            }
            let relay = match inner.own_relay(&engine, nats, profiles).await {
                Ok(relay) => relay,
                Err(error) => {
                    return progress.ended(&engine, &error);
                }
            };
            let options = inner.options.follow.clone();
            let stalls = StallWatch::new(inner.options.clock.clone(), &options);
            let replay = engine.replay.clone();
            let follower = Follower::new(relay, &engine.topic, replay, options.clone(), stalls);
            let task = EngineTask {
                engine,
                follower,
                options,
                progress,
                stop,
                says_goodbye,
            };
            task.run().await;
        };
        self.inner.tasks.spawn_on(task, &self.inner.runtime);
    }
}

impl Inner {
    /// Follows a source that tells of several holders.
    async fn follow_source(
        self: Arc<Self>,
        task: SourceTask,
        nats: Client,
        profiles: watch::Receiver<Profile>,
    ) {
        let (inner, engine) = (Arc::clone(&self), task.engine.clone());
        let start: StartRelay = Box::new(move |worker, rank| {
            let (inner, engine, nats) = (Arc::clone(&inner), engine.clone(), nats.clone());
            let profiles = profiles.clone();
            Box::pin(async move { inner.relay(&engine, (worker, rank), nats, profiles).await })
        });
        let holders = Holders::new(start);
        let source = match task.engine.format {
            Format::Dynamo => Source::plane(holders),
            _ if task.engine.is_grpc() => match worker_of_instance(&task.engine.key.instance) {
                Ok(worker) => Source::stream(&task.engine, worker, holders),
                Err(error) => return tracing::error!(%error, "an engine cannot be followed"),
            },
            _ => match worker_of_instance(&task.engine.key.instance) {
                Ok(worker) => Source::server(&task.engine, worker, holders),
                // Engines are checked before they are followed.
                Err(error) => return tracing::error!(%error, "an engine cannot be followed"),
            },
        };
        task.run(source).await;
    }

    /// What tells daemons of `engine` itself, in words where that is not possible.
    async fn own_relay(
        &self,
        engine: &NewEngine,
        nats: Client,
        profiles: watch::Receiver<Profile>,
    ) -> Result<Relay, String> {
        let instance = &engine.key.instance;
        let worker = match engine.format {
            Format::Mooncake => pool_of_instance(instance),
            _ => worker_of_instance(instance),
        };
        let worker = worker.map_err(|error| error.to_string())?;
        self.relay(engine, (worker, engine.key.rank), nats, profiles)
            .await
    }

    /// What tells daemons of one holder of `engine`, in words where that is not possible.
    async fn relay(
        &self,
        engine: &NewEngine,
        (worker, rank): (WorkerName, Rank),
        nats: Client,
        profiles: watch::Receiver<Profile>,
    ) -> Result<Relay, String> {
        let block_size = BlockSize::new(engine.block_size).map_err(|error| error.to_string())?;
        let namespace = engine.key.model.namespace();
        let name = format!("{}/{rank}", instance_of_worker(&worker));
        let holder = PublishedHolder {
            namespace: namespace.map_err(|error| error.to_string())?,
            worker,
            rank,
        };
        let options = PublisherOptions {
            settings: NamespaceSettings {
                block_size,
                is_size_told: true,
                // The translator has computed the contract's hashes.
                hashing: Hashing::Engine,
            },
            profile: profiles.borrow().clone(),
            ..self.options.publisher.clone()
        };
        let settings = TranslatorSettings {
            block_size,
            blocks_max: self.options.follow.blocks_max,
            groups: engine.groups.clone(),
            mode: match engine.format {
                // Its standard is the contract's, and it need not tell tokens.
                Format::Mooncake => HashMode::Trust {
                    sample: TRUSTED_SAMPLE,
                },
                _ => HashMode::Recompute,
            },
            lora_names: engine.beside.adapters.clone().into_iter().collect(),
            is_untold: engine.beside.is_untold,
            ..TranslatorSettings::for_format(engine.format)
        };
        let way = Way {
            nats,
            subjects: self.subjects.clone(),
            holder,
            options,
            profiles,
        };
        let metrics = Arc::clone(&self.metrics);
        let relay = Relay::start(engine.format, &name, settings, way, metrics).await;
        relay.map_err(|error| error.to_string())
    }
}

/// Where the bridge connects to for an engine.
fn endpoints_of(engine: &NewEngine) -> impl Iterator<Item = &str> {
    std::iter::once(engine.endpoint.as_str()).chain(engine.replay.as_deref())
}

impl EngineRegistry for Bridge {
    fn may_register(&self, engine: &NewEngine, peer: Option<IpAddr>) -> Result<(), RegisterRefusal> {
        let own = peer.map(|peer| peer.to_string());
        for endpoint in endpoints_of(engine) {
            // Without a host it is refused as no endpoint.
            let Some(host) = host_of(endpoint) else {
                continue;
            };
            let is_allowed = self.inner.options.register_hosts.allows(&host)
                || own.as_ref() == Some(&host)
                || self.inner.state.lock().is_host_given(&host);
            if !is_allowed {
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
        check_engine(&engine)?;
        let mut state = self.inner.state.lock();
        if state.is_stopping {
            return Err(RegisterRefusal::Stopping);
        }
        if let Some(known) = state.engines.get_mut(&engine.key) {
            if known.engine.is_followed_like(&engine) {
                known.profiles.send_replace(engine.profile.clone());
                known.engine.profile = engine.profile;
                return Ok(());
            }
            return Err(RegisterRefusal::Conflict {
                endpoint: known.engine.endpoint.clone(),
                key: Box::new(engine.key),
            });
        }
        if let Some(other) = state.other_size(&engine) {
            return Err(RegisterRefusal::OtherBlockSize {
                asked: engine.block_size,
                in_force: other.block_size,
                whose: SizeOf::Engine(Box::new(other.key.clone())),
            });
        }
        if let Some(other) = state.at_same_address(&engine) {
            return Err(RegisterRefusal::SameAddress {
                key: Box::new(other.key.clone()),
                endpoint: other.endpoint.clone(),
                block_size: other.block_size,
            });
        }
        if let Some(namespaces) = &self.inner.options.namespaces {
            check_block_size(&engine, namespaces)?;
        }
        let engines_max = self.inner.options.engines_max;
        if state.engines.len() >= engines_max {
            return Err(RegisterRefusal::TooMany { engines: engines_max });
        }
        let followed = Followed {
            engine: engine.clone(),
            progress: SharedProgress::default(),
            stop: CancellationToken::new(),
            says_goodbye: Arc::default(),
            profiles: watch::Sender::new(engine.profile.clone()),
        };
        if let Some(nats) = &state.nats {
            self.spawn(&followed, nats.clone());
        }
        state.engines.insert(engine.key, followed);
        Ok(())
    }

    fn unregister(&self, is_meant: &dyn Fn(&EngineKey) -> bool) -> RemovedEngines {
        let mut state = self.inner.state.lock();
        let removed: RemovedEngines = state
            .engines
            .keys()
            .filter(|key| is_meant(key))
            .cloned()
            .collect();
        for key in &removed {
            if let Some(followed) = state.engines.remove(key) {
                followed.says_goodbye.store(true, Ordering::Release);
                followed.stop.cancel();
            }
        }
        removed
    }

    fn engines(&self) -> Vec<EngineState> {
        let state = self.inner.state.lock();
        let describe = |followed: &Followed| {
            let Progress { status, last_error } = followed.progress.get();
            EngineState {
                engine: followed.engine.clone(),
                status,
                last_error,
            }
        };
        state.engines.values().map(describe).collect()
    }
}
