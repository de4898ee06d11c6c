//! Starts to follow an engine: either nothing is known of the engine, or an earlier bridge has saved its state.

use std::sync::Arc;

use async_nats::Client;

use kvatlas_client::publish::{Beginning, PublishConnection, PublishedHolder, PublisherOptions};
use kvatlas_core::hash::BlockSize;
use kvatlas_core::index::{Hashing, NamespaceSettings};
use kvatlas_core::wire::{Rank, WorkerName, instance_of_worker, pool_of_instance, worker_of_instance};
use kvatlas_engines::{Format, HashMode, SavedMirror, Translator, TranslatorSettings};

use kvatlas_process::registry::{Connection, NewEngine};
use kvatlas_telemetry::log_gated;

use super::continuity::Continuity;
use super::dynamo::{PlaneAddress, PlaneEvents};
use super::engines::Inner;
use super::follower::Follower;
use super::holders::{Holders, StartRelay};
use super::relay::{Relay, Way};
use super::sources::{RunEnd, SourceTask};
use super::state::{Keeper, KeptEngine, StateDirectory, cache_of, engine_bytes_max};
use super::subscribed::SubscribedEvents;
use super::task::SocketEvents;
use super::tensorrt::ServerEvents;

/// Sampling interval, in blocks, for sources that use the contract's hashes. For one block in each interval, the bridge
/// checks whether the hash fits the tokens.
const TRUSTED_SAMPLE: u32 = 64;

/// Returns the name under which daemons know the holder; an error in words if the engine's model gives no valid namespace.
fn holder_of(engine: &NewEngine, worker: WorkerName, rank: Rank) -> Result<PublishedHolder, String> {
    let namespace = engine.key.model.namespace();
    Ok(PublishedHolder {
        namespace: namespace.map_err(|error| error.to_string())?,
        worker,
        rank,
    })
}

impl Inner {
    /// Begins to report an engine with sockets to daemons, as one holder; an error in words if that is not possible.
    async fn begin(&self, task: &SourceTask) -> Result<SocketEvents, String> {
        let engine = &task.engine;
        let holder = self.own_holder(engine)?;
        let kept = match &self.options.state {
            Some(directory) => self.take_up(directory, engine, &holder).await?,
            None => None,
        };
        let bytes_max = self.state_bytes_max();
        let is_of_earlier = kept.is_some();
        let keeper = self.options.state.clone().map(|directory| {
            let metrics = Arc::clone(&self.metrics);
            Keeper::new(directory, holder.clone(), bytes_max, is_of_earlier, metrics)
        });
        let name = name_of(&holder);
        let settings = self.translator_settings(engine)?;
        let mut way = self.way(engine, holder, task.nats.clone())?;
        let (blocks, rank, before, republished) = match kept {
            Some(kept) => {
                way.options.beginning = Beginning::Above(kept.epoch);
                (kept.blocks, kept.rank, Some(kept.heard), kept.republished)
            }
            None => (Translator::new(settings.clone()), None, None, None),
        };
        let metrics = Arc::clone(&self.metrics);
        let mut relay = Relay::start(engine.format, &name, blocks, rank, way, metrics).await?;
        if let Some(republisher) = &self.republisher {
            let tap = republisher.tap(engine, &name, &settings, republished, relay.turns());
            relay.set_tap(tap.await);
        }
        let (replay, options) = (engine.replay.clone(), task.options.clone());
        let mut follower = Follower::new(relay, &engine.topic, replay, options, task.stall_watch());
        if let Some(before) = before {
            follower.go_on(before);
        }
        // Until the engine is connected, nothing is known of it.
        follower.lost().await.map_err(|error| error.to_string())?;
        Ok(SocketEvents::new(follower, keeper))
    }

    /// Returns the holder that represents `engine` as a whole: a pool for Mooncake, and a worker's rank for any other
    /// engine. Returns an error in words if a name is not valid.
    pub(super) fn own_holder(&self, engine: &NewEngine) -> Result<PublishedHolder, String> {
        let instance = &engine.key.instance;
        let worker = match engine.format {
            Format::Mooncake => pool_of_instance(instance),
            _ => worker_of_instance(instance),
        };
        holder_of(
            engine,
            worker.map_err(|error| error.to_string())?,
            engine.key.rank,
        )
    }

    /// Reads the saved state of an engine; `None` if there is none, or it cannot be used.
    async fn take_up(
        &self,
        directory: &StateDirectory,
        engine: &NewEngine,
        holder: &PublishedHolder,
    ) -> Result<Option<TakenUp>, String> {
        let bytes_max = self.state_bytes_max();
        let settings = self.translator_settings(engine)?;
        let first_max = engine.format.first_number_max();
        let (directory, holder, cache) = (directory.clone(), holder.clone(), cache_of(engine));
        let reading = tokio::task::spawn_blocking(move || {
            let kept = directory.engine(&holder, &cache, bytes_max)?;
            let (epoch, last) = (kept.epoch, kept.continuity.last());
            let taken = taken_up(kept, settings, first_max);
            let taken = taken
                .inspect_err(|error| directory.refuse_engine(&holder, error))
                .ok()?;
            log_gated!(
                info "what was kept of an engine is taken up" up to 64;
                worker = %&holder.worker, blocks = taken.blocks.blocks(), epoch, last
            );
            Some(taken)
        });
        reading.await.map_err(|error| error.to_string())
    }

    /// Returns the maximum size of an engine's saved state, in bytes.
    fn state_bytes_max(&self) -> u64 {
        let republish = self.options.republish.as_ref();
        engine_bytes_max(
            self.options.follow.blocks_max,
            republish.map_or(0, |republish| republish.bytes_max),
        )
    }

    /// Starts the relay, which reports one holder of `engine` to daemons; an error in words if that is not possible.
    pub(super) async fn relay(
        &self,
        engine: &NewEngine,
        worker: WorkerName,
        rank: Rank,
        nats: Client,
    ) -> Result<Relay, String> {
        let holder = holder_of(engine, worker, rank)?;
        let name = name_of(&holder);
        let blocks = Translator::new(self.translator_settings(engine)?);
        let way = self.way(engine, holder, nats)?;
        Relay::start(engine.format, &name, blocks, None, way, Arc::clone(&self.metrics)).await
    }

    fn way(&self, engine: &NewEngine, holder: PublishedHolder, nats: Client) -> Result<Way, String> {
        let block_size = BlockSize::new(engine.block_size).map_err(|error| error.to_string())?;
        let profiles = self.profiles_of(engine);
        let options = PublisherOptions {
            profile: profiles.borrow().clone(),
            settings: NamespaceSettings {
                block_size,
                is_size_told: true,
                // The translator has computed the hashes.
                hashing: Hashing::Engine,
                ..NamespaceSettings::default()
            },
            ..self.options.publisher.clone()
        };
        Ok(Way {
            nats: PublishConnection::new(nats, self.refused.heard.clone()),
            subjects: self.subjects.clone(),
            holder,
            options,
            lease: self.lease.clone(),
            kin: self.kin.clone(),
            farewells: self.farewells.clone(),
            profiles,
        })
    }

    /// Follows an engine with sockets. Begins again when state that could not be read at the start can be read. If the
    /// engine was unregistered, removes its saved state at the end.
    async fn follow_sockets(&self, task: SourceTask) {
        loop {
            let ended = match self.begin(&task).await {
                Ok(source) => Box::pin(task.run(source)).await,
                Err(error) => return task.progress.ended(&task.engine, &error),
            };
            match ended {
                RunEnd::BeginAgain => {}
                RunEnd::Over => break,
            }
        }
        self.forget_unless_followed(&task.engine).await;
    }

    /// Follows a source of events.
    pub(super) async fn follow_source(self: Arc<Self>, task: SourceTask) {
        let engine = task.engine.clone();
        if let Connection::Sockets = engine.connection() {
            return Box::pin(self.follow_sockets(task)).await;
        }
        let (followed, nats) = (engine.clone(), task.nats.clone());
        let start: StartRelay = Box::new(move |worker, rank| {
            let (inner, engine, nats) = (Arc::clone(&self), followed.clone(), nats.clone());
            Box::pin(async move { inner.relay(&engine, worker, rank, nats).await })
        });
        let holders = Holders::new(start);
        let (worker, rank) = (worker_of_instance(&engine.key.instance), engine.key.rank);
        match (engine.connection(), worker) {
            (Connection::Plane, _) => {
                let address = PlaneAddress {
                    endpoint: engine.endpoint,
                    topic: engine.topic,
                };
                let plane = PlaneEvents::new(holders, address, &task.options);
                task.run(plane).await;
            }
            (Connection::Stream, Ok(worker)) => {
                task.run(SubscribedEvents::new(worker, rank, holders)).await;
            }
            (Connection::Drain, Ok(worker)) => {
                task.run(ServerEvents::new(worker, rank, holders)).await;
            }
            // This cannot happen, because the settings of engines are checked before.
            (Connection::Stream | Connection::Drain, Err(_)) | (Connection::Sockets, _) => {
                tracing::error!(engine = %engine.key, "an engine cannot be followed as a source");
            }
        }
    }

    fn translator_settings(&self, engine: &NewEngine) -> Result<TranslatorSettings, String> {
        let known = match engine.connection() {
            Connection::Stream => TranslatorSettings::for_server(engine.format),
            Connection::Sockets | Connection::Plane | Connection::Drain => {
                TranslatorSettings::for_format(engine.format)
            }
        };
        Ok(TranslatorSettings {
            block_size: BlockSize::new(engine.block_size).map_err(|error| error.to_string())?,
            blocks_max: self.options.follow.blocks_max,
            groups: engine.groups.clone(),
            mode: match engine.format {
                // Mooncake's names are the contract's hashes, and its events may come without tokens.
                Format::Mooncake => HashMode::Trust {
                    sample: TRUSTED_SAMPLE,
                },
                _ => HashMode::Recompute,
            },
            chains: engine.key.model.chains(),
            lora_names: engine.beside.adapters.clone().into_iter().collect(),
            has_no_salts: engine.beside.has_no_salts,
            is_untold: engine.beside.is_untold || known.is_untold,
            tells_beyond: engine.beside.tells_beyond || known.tells_beyond,
            ..known
        })
    }
}

/// Returns an engine's name in metrics and logs.
fn name_of(holder: &PublishedHolder) -> String {
    format!("{}/{}", instance_of_worker(&holder.worker), holder.rank)
}

/// State of an engine that an earlier bridge has saved, in the form in which the relay and the follower take it over.
struct TakenUp {
    blocks: Translator,
    /// The rank that the engine's batches named.
    rank: Option<Rank>,
    /// The holder's last epoch.
    epoch: u64,
    /// The numbers and digests of the batches that the earlier bridge heard.
    heard: Continuity,
    /// Blocks that the earlier bridge had republished to routers; `None` if the engine was not republished.
    republished: Option<SavedMirror>,
}

/// Converts an engine's saved state to the form in which the relay and the follower take it over. Returns an error text
/// if the saved state contradicts itself.
fn taken_up(kept: KeptEngine, settings: TranslatorSettings, first_max: u64) -> Result<TakenUp, String> {
    let continuity = kept
        .continuity
        .kept(first_max)
        .ok_or("the numbers of its batches contradict each other")?;
    Ok(TakenUp {
        blocks: Translator::restore(settings, kept.blocks).map_err(|error| error.to_string())?,
        rank: kept.rank,
        epoch: kept.epoch,
        heard: continuity,
        republished: kept.republished,
    })
}
