//! Ports: gives engines pairs of ports from a range. The table of these pairs may be kept for later bridges, and shared with
//! other bridges.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use kvatlas_telemetry::{BridgeMetrics, log_gated};

use super::addresses::{PortRange, SocketPair};
use super::places::PortPlaces;
use crate::state::{KeptPlaces, PlacesError};

/// Pause before the bridge asks again for the table of ports, if it could not be read or written.
const PAUSE: Duration = Duration::from_secs(1);

/// State of an engine that is followed and gets its ports from the range.
#[derive(Debug, Default)]
struct PortUserState {
    /// Number of the engine's taps, each of which passes the engine's events to routers. While the bridge begins to
    /// follow an engine anew, the engine may have two taps.
    taps: usize,
    /// Trouble that keeps the engine from having ports, in words; `None` if the engine has ports, or is about to get them.
    trouble: Option<String>,
}

/// Pairs of ports in a range, and the engines that have them.
pub(super) struct Ports {
    range: PortRange,
    kept: KeptPlaces,
    /// Last known table of the engines' places (pairs of ports), with its revision.
    places: watch::Sender<(u64, PortPlaces)>,
    /// Engines that are followed. Their places are not given to others.
    known: Mutex<BTreeMap<String, PortUserState>>,
    /// Signal that an engine is not followed any more.
    freed: Notify,
    /// Lock that a task holds while it changes the table of ports.
    changing: tokio::sync::Mutex<()>,
    metrics: Arc<BridgeMetrics>,
}

/// Claim to a pair of ports from the range, for an engine that is followed. Dropping the value ends the claim.
pub(super) struct PortUser {
    ports: Arc<Ports>,
    engine: String,
}

impl Drop for PortUser {
    fn drop(&mut self) {
        let mut known = self.ports.known.lock();
        if let Some(own) = known.get_mut(&self.engine) {
            own.taps -= 1;
            if own.taps == 0 {
                known.remove(&self.engine);
            }
        }
        self.ports.count(&known);
        drop(known);
        self.ports.freed.notify_waiters();
    }
}

impl Ports {
    pub(super) fn new(range: PortRange, kept: KeptPlaces, metrics: Arc<BridgeMetrics>) -> Self {
        let places = kept.read();
        Self {
            range,
            kept,
            places: watch::Sender::new((0, places)),
            known: Mutex::default(),
            freed: Notify::new(),
            changing: tokio::sync::Mutex::default(),
            metrics,
        }
    }

    /// Notes that an engine is followed. Returns its claim to a pair of ports from the range.
    pub(super) fn user(self: &Arc<Self>, engine: String) -> PortUser {
        self.known.lock().entry(engine.clone()).or_default().taps += 1;
        PortUser {
            ports: Arc::clone(self),
            engine,
        }
    }

    /// Returns the sockets of an engine that is followed, or a text that says why the engine has no sockets. `None` for
    /// an engine that is not followed.
    pub(super) fn of(&self, engine: &str) -> Option<Result<SocketPair, String>> {
        let trouble = self.known.lock().get(engine)?.trouble.clone();
        let place = self.places.borrow().1.of(engine);
        match place.and_then(|place| self.range.pair(place)) {
            Some(pair) => Some(Ok(pair)),
            None => Some(Err(
                trouble.unwrap_or_else(|| "it is about to get ports".to_owned())
            )),
        }
    }

    /// Takes over the table of ports that another bridge has written, if its revision is newer.
    pub(super) fn heard(&self, revision: u64, places: PortPlaces) {
        self.places.send_if_modified(|known| {
            let is_news = revision > known.0;
            if is_news {
                *known = (revision, places);
            }
            is_news
        });
    }

    fn is_known(&self, engine: &str) -> bool {
        self.known.lock().contains_key(engine)
    }

    fn set_trouble(&self, engine: &str, trouble: Option<String>) {
        let mut known = self.known.lock();
        if let Some(own) = known.get_mut(engine) {
            own.trouble = trouble;
        }
        self.count(&known);
    }

    fn count(&self, known: &BTreeMap<String, PortUserState>) {
        let without = known.values().filter(|own| own.trouble.is_some()).count();
        self.metrics.republish_without_ports.set(without as f64);
    }

    /// Gives the engine a place (pair of ports) in the table, which is written before this returns. `None` if all places belong
    /// to engines that are followed.
    async fn give(&self, engine: &str) -> Result<Option<usize>, PlacesError> {
        let _changing = self.changing.lock().await;
        if let Some(own) = self.places.borrow().1.of(engine)
            && own < self.range.pairs
        {
            return Ok(Some(own));
        }
        let before = self.places.borrow().clone();
        let mut given = None;
        let change = |places: &mut PortPlaces| {
            given = places.give(engine, self.range.pairs, |other| self.is_known(other));
        };
        let changed = self.kept.change(before, change, &self.metrics).await?;
        self.places.send_replace(changed);
        Ok(given)
    }
}

impl PortUser {
    /// Waits until the engine has sockets. Returns the number of its place (pair of ports), and the sockets.
    pub(super) async fn take(&self) -> (usize, SocketPair) {
        let Ports { range, freed, .. } = &*self.ports;
        loop {
            // This is called before the table is asked, so that no engine that gives up its ports is missed.
            let freed = freed.notified();
            match self.ports.give(&self.engine).await {
                Ok(Some(place)) => {
                    if let Some(pair) = range.pair(place) {
                        self.ports.set_trouble(&self.engine, None);
                        return (place, pair);
                    }
                }
                Ok(None) => {
                    let (engine, pairs) = (&self.engine, range.pairs);
                    let trouble = format!("all {pairs} pairs of ports of --republish are taken by engines");
                    log_gated!(error "an engine is not republished: the range of --republish has no ports left" up to 16; engine, pairs);
                    self.ports.set_trouble(&self.engine, Some(trouble));
                    freed.await;
                    continue;
                }
                Err(error) => {
                    let engine = &self.engine;
                    log_gated!(warn "an engine has no ports yet at which it is republished; tried again" up to 16; engine, %error);
                    self.ports
                        .set_trouble(&self.engine, Some(format!("it has no ports yet: {error}")));
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until the place (pair of ports) with this number belongs to another engine.
    pub(super) async fn lost(&self, place: usize) {
        let mut places = self.ports.places.subscribe();
        let is_lost = |(_, places): &(u64, PortPlaces)| !places.is_of(place, &self.engine);
        if places.wait_for(is_lost).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
