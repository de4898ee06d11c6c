//! The holders of one source that tells of several workers or ranks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName};

use kvatlas_telemetry::LogGate;

use super::relay::Relay;

static FULL_GATE: LogGate = LogGate::new();
static FAILED_GATE: LogGate = LogGate::new();

/// Most holders of one source; events of further ones are not told.
const HOLDERS_MAX: usize = 4096;

/// Begins to tell daemons of a worker's rank.
pub(super) type StartRelay = Box<dyn Fn(WorkerName, Rank) -> StartedRelay + Send + Sync>;

/// A relay that is being started, or in words why there is none.
pub(super) type StartedRelay = std::pin::Pin<Box<dyn Future<Output = Result<Relay, String>> + Send>>;

/// The relays of a source, by worker and rank.
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

    /// The relay of a holder, started where there is none yet; none where that fails.
    pub(super) async fn get(&mut self, worker: &WorkerName, rank: Rank) -> Option<&mut Relay> {
        let is_full = self.relays.len() >= HOLDERS_MAX;
        match self.relays.entry((worker.clone(), rank)) {
            Entry::Occupied(entry) => Some(entry.into_mut()),
            Entry::Vacant(_) if is_full => {
                if let Some(suppressed) = FULL_GATE.admit() {
                    tracing::warn!(
                        %worker,
                        rank,
                        suppressed,
                        "a source has too many holders; this one is not followed"
                    );
                }
                None
            }
            Entry::Vacant(entry) => match (self.start)(worker.clone(), rank).await {
                Ok(relay) => Some(entry.insert(relay)),
                Err(error) => {
                    if let Some(suppressed) = FAILED_GATE.admit() {
                        tracing::error!(%worker, rank, error, suppressed, "a holder cannot be followed");
                    }
                    None
                }
            },
        }
    }

    /// All of them, with whose they are.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (&WorkerName, Rank, &mut Relay)> {
        self.relays
            .iter_mut()
            .map(|((worker, rank), relay)| (worker, *rank, relay))
    }

    /// Ends one of them: daemons forget the holder.
    pub(super) async fn forget(&mut self, worker: &WorkerName, rank: Rank) -> Result<(), PublisherError> {
        match self.relays.remove(&(worker.clone(), rank)) {
            Some(relay) => relay.say_goodbye().await,
            None => Ok(()),
        }
    }

    /// The source is out of sight, and so are they.
    pub(super) async fn lost(&mut self) -> Result<(), PublisherError> {
        for relay in self.relays.values_mut() {
            relay.lost().await?;
        }
        Ok(())
    }

    /// Why one of them is not exact, in words for operators; none where all are.
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

    /// Ends: daemons forget the holders, or learn that nobody sees them any more.
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
