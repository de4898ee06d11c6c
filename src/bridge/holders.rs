//! Holders of one source that reports several workers or ranks.

use std::collections::{BTreeMap, BTreeSet};

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName};
use kvatlas_engines::Reason;

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
    /// Holders whose relays could not be started, so that events of them were dropped. If they are followed later, they
    /// are in doubt. At [`HOLDERS_MAX`] entries, so is every other holder that is followed later.
    dropped: BTreeSet<(WorkerName, Rank)>,
}

impl Holders {
    pub(super) fn new(start: StartRelay) -> Self {
        Self {
            start,
            relays: BTreeMap::new(),
            dropped: BTreeSet::new(),
        }
    }

    /// Returns the relay that reports a holder to daemons, and starts it if there is none yet; `None` if that fails or
    /// the source has too many holders. A holder for which this was `None` before is in doubt from its start on.
    pub(super) async fn get(&mut self, worker: &WorkerName, rank: Rank) -> Option<&mut Relay> {
        let holder = (worker.clone(), rank);
        if !self.relays.contains_key(&holder) {
            match self.started(worker, rank).await {
                Ok(relay) => drop(self.relays.insert(holder.clone(), relay)),
                Err(error) => {
                    log_gated!(error "a holder cannot be followed"; %worker, rank, error);
                    if self.dropped.len() < HOLDERS_MAX {
                        self.dropped.insert(holder.clone());
                    }
                }
            }
        }
        self.relays.get_mut(&holder)
    }

    /// Starts the relay of a holder; an error in words if that fails.
    async fn started(&mut self, worker: &WorkerName, rank: Rank) -> Result<Relay, String> {
        if self.relays.len() >= HOLDERS_MAX {
            return Err(format!("the source has {HOLDERS_MAX} holders already"));
        }
        let mut relay = (self.start)(worker.clone(), rank).await?;
        if self.dropped.len() >= HOLDERS_MAX || self.dropped.contains(&(worker.clone(), rank)) {
            let doubted = relay.lose(Reason::LostBatches).await;
            doubted.map_err(|error| error.to_string())?;
        }
        Ok(relay)
    }

    /// Returns all relays, each with the worker and the rank of the holder that it reports.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (&WorkerName, Rank, &mut Relay)> {
        self.relays
            .iter_mut()
            .map(|((worker, rank), relay)| (worker, *rank, relay))
    }

    /// Ends the relay that reports a holder, so that daemons forget the holder.
    pub(super) async fn forget(&mut self, worker: &WorkerName, rank: Rank) -> Result<(), PublisherError> {
        let holder = (worker.clone(), rank);
        if self.dropped.len() < HOLDERS_MAX {
            self.dropped.remove(&holder);
        }
        match self.relays.remove(&holder) {
            Some(relay) => match relay.say_goodbye().await {
                // The source is still followed.
                Err(PublisherError::Connection(_)) => Ok(()),
                said => said,
            },
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

    /// Goes on telling daemons of holders out of sight: their engine is known to live.
    pub(super) async fn told_alive(&mut self) -> Result<(), PublisherError> {
        for relay in self.relays.values_mut() {
            relay.told_alive().await?;
        }
        Ok(())
    }

    /// Returns a text for operators that says why a holder is not exact; `None` if all holders are exact. A holder
    /// whose relay cannot be started is not exact, because its events are dropped.
    pub(super) fn trouble(&self) -> Option<String> {
        let mut troubled = self
            .relays
            .iter()
            .filter_map(|(holder, relay)| Some((holder, relay.trouble()?)));
        let Some(((worker, rank), trouble)) = troubled.next() else {
            let mut dropped = self.dropped.iter();
            let (worker, rank) = dropped.find(|holder| !self.relays.contains_key(*holder))?;
            return Some(format!(
                "{worker}/{rank}: cannot be followed, so its events are dropped"
            ));
        };
        Some(match self.relays.len() {
            1 => trouble.into_owned(),
            _ => format!("{worker}/{rank}: {trouble}"),
        })
    }

    /// Ends all relays, which report the holders. With `says_goodbye` daemons forget the holders; otherwise daemons are told that
    /// the holders are no longer watched (out of sight).
    pub(super) async fn end(self, says_goodbye: bool) -> Result<(), PublisherError> {
        let mut said = Ok(());
        for mut relay in self.relays.into_values() {
            match says_goodbye {
                true => said = said.and(relay.say_goodbye().await),
                false => {
                    relay.lost().await?;
                    relay.flush().await?;
                }
            }
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use kvatlas_engines::{Format, Translator, TranslatorSettings};
    use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

    use super::super::kin::Kin;
    use super::super::relay::tests::{started, way};
    use super::*;

    #[tokio::test]
    async fn a_holder_that_could_not_be_followed_at_first_is_in_doubt() {
        let server = find_nats_server(None).unwrap();
        let broker = Arc::new(EmbeddedBroker::start(&server).await.unwrap());
        let fails = Arc::new(AtomicBool::new(true));
        let (way_to, is_failing) = (Arc::clone(&broker), Arc::clone(&fails));
        let mut holders = Holders::new(Box::new(move |worker, _| {
            let (broker, fails) = (Arc::clone(&way_to), Arc::clone(&is_failing));
            Box::pin(async move {
                if fails.load(Ordering::Relaxed) {
                    return Err("the lease is full".to_owned());
                }
                let way = way(&broker, worker.as_str(), Kin::default()).await;
                let blocks = Translator::new(TranslatorSettings::for_format(Format::Vllm));
                Ok(started(blocks, way).await)
            })
        }));
        let [first, second] = ["gpu-0", "gpu-1"].map(|name| WorkerName::new(name).unwrap());
        assert!(holders.get(&first, 0).await.is_none());
        assert!(holders.trouble().unwrap().contains("dropped"));
        fails.store(false, Ordering::Relaxed);
        assert_eq!(
            holders.get(&first, 0).await.unwrap().doubt(),
            Some(Reason::LostBatches)
        );
        assert_eq!(holders.trouble().as_deref(), Some("lost_batches"));
        assert_eq!(holders.get(&second, 0).await.unwrap().doubt(), None);
        // A worker that has gone and comes back is a new one.
        holders.forget(&first, 0).await.unwrap();
        assert_eq!(holders.get(&first, 0).await.unwrap().doubt(), None);
        // Events of a worker that is gone are no longer dropped.
        fails.store(true, Ordering::Relaxed);
        let third = WorkerName::new("gpu-2").unwrap();
        assert!(holders.get(&third, 0).await.is_none());
        holders.forget(&third, 0).await.unwrap();
        assert!(!holders.trouble().unwrap_or_default().contains("dropped"));
    }
}
