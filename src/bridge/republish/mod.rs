//! Republishing: publishes engines' events again, compacted, for routers that keep an index of their own.
//!
//! ```text
//! engine ─▶ Relay ─▶ Translator
//!              └──▶ Mirror ─▶ Stream ─▶ PUB ─────▶ router
//!                                  └──▶ ROUTER ◀──▶ (replay)
//! ```
//!
//! Each engine has two sockets, in the form of vLLM's publisher: one for events, one for replays. A replay from number
//! N on always gives one whole state. Its first batches, from number N on, clear and then store all blocks. Its other
//! batches, up to the last number that was published, are empty. So the bridge keeps no history, and every answer is
//! whole.
//!
//! The bridge promises routers:
//!
//! 1. A router that connects is first sent batch 0, which clears, and then a batch with the last number. The router treats
//!    batch 0 as a restart and the next batch as a gap, so it asks for a replay. So it keeps no block that an earlier bridge
//!    reported.
//! 2. A router that asks for a replay at the first batch that it hears gets all blocks, however many batches came before. An
//!    empty batch is sent every second, so that such a router can ask even if the engine is silent.
//! 3. If published batches may be wrong, their numbers begin anew in the same way, and every router asks again. The same
//!    happens after every [`NUMBERS_MAX`] numbers.
//! 4. Clients cannot harm the bridge. The size of their messages and the number of clients are bounded. So are the bytes of the
//!    messages that wait for a client, and their waiting time. Each connection that is ended for such a bound is counted
//!    (`door`).
//! 5. Of several bridges that share a lease, the one that speaks for an engine listens at its sockets. The others refuse
//!    connections, and end those that they have when another bridge begins to speak. A bridge that has just started
//!    does not listen yet. A router may take the stream of one bridge and the replays of another, but only while both
//!    believe that they speak. Test: `republish_lease::the_bridge_that_speaks_publishes`.
//!
//! An engine gets its ports in one of three ways. An address names the engine (`addresses`). Or its order in flags and
//! file gives it an address (`addresses`). Or it gets a pair of ports from a range (`ports`, `places`).

mod addresses;
mod door;
mod flags;
mod places;
mod ports;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use kvatlas_engines::{Format, Mirror, MirrorSettings, SavedMirror, TranslatorSettings};

use kvatlas_process::registry::{GivenEngine, NewEngine};
use kvatlas_telemetry::BridgeMetrics;

use super::lease::Turns;
use super::state::KeptPlaces;
use addresses::Addresses;
use door::serve_in_turns;
use ports::{PortUser, Ports};
use stream::Stream;

pub use addresses::{RepublishAddress, RepublishAddressError, SocketPair, TwoAddresses};
pub use flags::RouterQuestion;
pub(super) use flags::router_flags;
pub(super) use places::PortPlaces;
pub(super) use stream::Tap;

/// Number of batches after which their numbers begin anew. It bounds the empty batches that follow the state in a
/// replay.
const NUMBERS_MAX: u64 = 1 << 15;
/// Usual pause between empty batches.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Settings by which engines' events are republished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepublishOptions {
    /// Addresses of the sockets that routers connect to.
    pub addresses: Vec<RepublishAddress>,
    /// Whether blocks with a salt, an adapter or an image are published, too.
    pub has_special: bool,
    /// Maximum memory for one engine's blocks, in bytes.
    pub bytes_max: usize,
}

impl RepublishOptions {
    /// Refuses two addresses for the same engines.
    ///
    /// # Errors
    ///
    /// [`TwoAddresses`] names the engines.
    pub fn check(&self) -> Result<(), TwoAddresses> {
        addresses::check(&self.addresses)
    }

    /// Whether engines get their ports from a range. Bridges that share a lease then have to share the table of ports,
    /// too, so their state has to be in JetStream.
    pub fn has_range(&self) -> bool {
        self.addresses.iter().any(RepublishAddress::is_range)
    }
}

/// Republishes engines' events to routers.
pub(super) struct Republisher {
    has_special: bool,
    bytes_max: usize,
    addresses: Mutex<Addresses>,
    /// Ports from a range; `None` if no range is configured.
    ports: Option<Arc<Ports>>,
    metrics: Arc<BridgeMetrics>,
}

impl Republisher {
    /// Makes a republisher whose table of ports is in `kept`.
    pub(super) fn new(options: &RepublishOptions, kept: KeptPlaces, metrics: Arc<BridgeMetrics>) -> Self {
        let addresses = Addresses::new(&options.addresses);
        let range = addresses.range().cloned();
        let ports = range.map(|range| Arc::new(Ports::new(range, kept, Arc::clone(&metrics))));
        Self {
            has_special: options.has_special,
            bytes_max: options.bytes_max,
            addresses: Mutex::new(addresses),
            ports,
            metrics,
        }
    }

    /// Takes over the table of ports that another bridge has written, if its revision is newer.
    pub(super) fn heard_places(&self, revision: u64, places: PortPlaces) {
        if let Some(ports) = &self.ports {
            ports.heard(revision, places);
        }
    }

    /// Assigns the next addresses to engines that have none, in the order of `engines`.
    pub(super) fn assign(&self, engines: &[GivenEngine]) {
        let mut addresses = self.addresses.lock();
        for engine in engines {
            match engine {
                GivenEngine::Publisher(engine) if is_republished(engine) => {
                    addresses.assign(&engine.key.instance, engine.key.rank);
                }
                // The number of the engine's ranks is not known yet.
                GivenEngine::Server(server) if server.scheme.is_none() => {
                    addresses.assign(&server.instance, 0);
                }
                _ => {}
            }
        }
    }

    /// Returns the sockets of an engine that is followed, or a text that says why the engine has no sockets. `None` if the
    /// engine is not republished.
    pub(super) fn sockets_of(&self, engine: &NewEngine) -> Option<Result<SocketPair, String>> {
        if !is_republished(engine) {
            return None;
        }
        match self.own_sockets_of(engine) {
            Some(sockets) => Some(Ok(sockets)),
            None => self.ports.as_ref()?.of(&engine.key.to_string()),
        }
    }

    /// Returns the sockets that the engine's name, or its order among the engines, gives it; `None` if it has none.
    fn own_sockets_of(&self, engine: &NewEngine) -> Option<SocketPair> {
        let addresses = self.addresses.lock();
        addresses.of(&engine.key.instance, engine.key.rank)
    }

    /// Returns where an engine listens for routers; `None` if it has no address of its own and there is no range.
    fn place_of(&self, engine: &NewEngine) -> Option<DoorPlace> {
        if let Some(sockets) = self.own_sockets_of(engine) {
            return Some(DoorPlace::Own(sockets));
        }
        if let Some(ports) = &self.ports {
            return Some(DoorPlace::Range(ports.user(engine.key.to_string())));
        }
        if self.addresses.lock().is_by_order() {
            tracing::warn!(
                engine = %engine.key,
                "not republished, as it has no place in the order of flags and file: give --republish tcp://HOST:PORT-PORT or NAME=tcp://HOST:PORT"
            );
        }
        None
    }

    /// Begins to republish the events of an engine, during the given turns. The stream begins with the `kept` blocks.
    /// `settings` must be the settings of the engine's translator. Returns the tap for the relay; `None` if the engine
    /// is not republished.
    pub(super) async fn tap(
        &self,
        engine: &NewEngine,
        name: &str,
        settings: &TranslatorSettings,
        kept: Option<SavedMirror>,
        turns: Turns,
    ) -> Option<Tap> {
        if !is_republished(engine) {
            return None;
        }
        let place = self.place_of(engine)?;
        let settings = MirrorSettings {
            block_size: settings.block_size,
            bytes_max: self.bytes_max,
            has_special: self.has_special,
            proves_ancestors: settings.proves_ancestors,
        };
        let namespace = engine.key.model.namespace().ok()?;
        let metrics = self.metrics.of_engine(namespace.as_str(), name);
        let stream = Arc::new(Stream::new(
            mirror_of(engine, settings, kept).await,
            engine.key.rank,
            (Arc::clone(&self.metrics), metrics),
        ));
        let engine = engine.key.to_string();
        let tasks = [
            tokio::spawn(open(place, engine, Arc::clone(&stream), turns)),
            tokio::spawn(beat(Arc::clone(&stream))),
        ];
        Some(Tap::new(stream, tasks.map(AbortOnDropHandle::new)))
    }
}

/// Place at which an engine listens for routers.
enum DoorPlace {
    /// Sockets that the engine's name, or its order among the engines, gives it.
    Own(SocketPair),
    /// Sockets on ports from a range.
    Range(PortUser),
}

/// Serves the sockets of an engine, for ever. Sockets on ports from a range may change.
async fn open(place: DoorPlace, engine: String, stream: Arc<Stream>, mut turns: Turns) {
    match place {
        DoorPlace::Own(sockets) => serve_in_turns(&engine, &sockets, &stream, &mut turns).await,
        DoorPlace::Range(user) => loop {
            let (place, sockets) = user.take().await;
            tokio::select! {
                () = serve_in_turns(&engine, &sockets, &stream, &mut turns) => {}
                () = user.lost(place) => {
                    tracing::info!(engine, events = %sockets.events(), "the ports are another engine's by now");
                }
            }
        },
    }
}

/// Returns the mirror of the `kept` blocks; an empty mirror if there are no usable blocks. The blocks are restored on a
/// thread that may block, because 1.2 million blocks take half a second.
async fn mirror_of(engine: &NewEngine, settings: MirrorSettings, kept: Option<SavedMirror>) -> Mirror {
    let Some(kept) = kept else {
        return Mirror::new(settings);
    };
    let given = settings.clone();
    let restoring = tokio::task::spawn_blocking(move || Mirror::restore(given, &kept));
    let restored = restoring.await.map_err(|error| error.to_string());
    match restored.and_then(|restored| restored.map_err(|error| error.to_string())) {
        Ok(mirror) => mirror,
        Err(error) => {
            tracing::warn!(engine = %engine.key, %error, "the blocks that were republished are of no use: begun without them");
            Mirror::new(settings)
        }
    }
}

/// Whether an engine can be republished: its events must tell tokens, come from the engine's own sockets, and use the
/// contract's hashes.
fn is_republished(engine: &NewEngine) -> bool {
    !engine.is_source() && engine.format != Format::Mooncake && engine.key.model.chains().is_none()
}

/// Sends an empty batch every [`HEARTBEAT`], for ever.
async fn beat(stream: Arc<Stream>) {
    let mut interval = tokio::time::interval(HEARTBEAT);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        stream.beat();
    }
}
