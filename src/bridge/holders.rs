//! Holders of one source that reports several workers or ranks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName};

use kvatlas_telemetry::log_gated;

use super::relay::Relay;

/// Maximum number of holders of one source. Events of further holders are not reported.
const HOLDERS_MAX: usize = 4096;

/// Function that starts the relay of a worker's rank. A relay reports one holder's blocks to daemons.
pub(super) type StartRelay = Box<dyn Fn(WorkerName, Rank) -> StartedRelay + Send + Sync>;

/// Future that starts a relay, which reports one holder's blocks to daemons. Yields the relay, or a text that says why no relay
/// could be started.
pub(super) type StartedRelay = std::pin::Pin<Box<dyn Future<Output = Result<Relay, String>> + Send>>;

/// The relays of a source, by worker and rank. Each reports one holder's blocks to daemons.
pub(super) struct Holders {
    start: StartRelay,
    relays: BTreeMap<(WorkerName, Rank), Relay>,
}

impl Holders {
    pub(super) fn new(start: StartRelay) -> Self {
        Self {
            start,
            relays: BTreeMap::new(),
        }
    }

    /// Returns the relay that reports a holder to daemons, and starts it if there is none yet; `None` if that fails or the source
    /// has too many holders.
    pub(super) async fn get(&mut self, worker: &WorkerName, rank: Rank) -> Option<&mut Relay> {
        let is_full = self.relays.len() >= HOLDERS_MAX;
        match self.relays.entry((worker.clone(), rank)) {
            Entry::Occupied(entry) => Some(entry.into_mut()),
            Entry::Vacant(_) if is_full => {
                log_gated!(warn "a source has too many holders; this one is not followed"; %worker, rank);
                None
            }
            Entry::Vacant(entry) => match (self.start)(worker.clone(), rank).await {
                Ok(relay) => Some(entry.insert(relay)),
                Err(error) => {
                    log_gated!(error "a holder cannot be followed"; %worker, rank, error);
                    None
                }
            },
        }
    }

    /// Returns all relays, each with the worker and the rank of the holder that it reports.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (&WorkerName, Rank, &mut Relay)> {
        self.relays
            .iter_mut()
            .map(|((worker, rank), relay)| (worker, *rank, relay))
    }

    /// Ends the relay that reports a holder, so that daemons forget the holder.
    pub(super) async fn forget(&mut self, worker: &WorkerName, rank: Rank) -> Result<(), PublisherError> {
        match self.relays.remove(&(worker.clone(), rank)) {
            Some(relay) => relay.say_goodbye().await,
            None => Ok(()),
        }
    }

    /// Puts all holders out of sight, because their source is silent, or its events may be missing.
    pub(super) async fn lost(&mut self) -> Result<(), PublisherError> {
        for relay in self.relays.values_mut() {
            relay.lost().await?;
        }
        Ok(())
    }

    /// Returns a text for operators that says why a holder is not exact; `None` if all holders are exact.
    pub(super) fn trouble(&self) -> Option<String> {
        let mut troubled = self
            .relays
            .iter()
            .filter_map(|(holder, relay)| Some((holder, relay.trouble()?)));
        let ((worker, rank), trouble) = troubled.next()?;
        Some(match self.relays.len() {
            1 => trouble.to_owned(),
            _ => format!("{worker}/{rank}: {trouble}"),
        })
    }

    /// Ends all relays, which report the holders. With `says_goodbye` daemons forget the holders; otherwise daemons are told that
    /// the holders are no longer watched (out of sight).
    pub(super) async fn end(self, says_goodbye: bool) -> Result<(), PublisherError> {
        for mut relay in self.relays.into_values() {
            match says_goodbye {
                true => relay.say_goodbye().await?,
                false => {
                    relay.lost().await?;
                    relay.flush().await?;
                }
            }
        }
        Ok(())
    }
}
