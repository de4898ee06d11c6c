//! Probe of the doctor: a holder of its own, for which the doctor publishes one event and takes it back.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::Client;
use kvatlas_client::publish::{HolderPublisher, PublishedHolder, PublisherError, PublisherOptions};
use kvatlas_core::hash::{BlockHash, BlockSize, SequenceHash};
use kvatlas_core::index::NamespaceSettings;
use kvatlas_core::wire::{
    BlockContent, Event, NamespaceName, PROBE_NAME, Rank, StoredBlocks, Subjects, Tier, WorkerName,
};
use tokio::sync::OnceCell;

/// Holder of the probe, and its publisher once the publisher has been started.
pub(super) struct Probe {
    holder: PublishedHolder,
    publisher: OnceCell<HolderPublisher>,
    /// Whether the goodbye has been published.
    is_gone: AtomicBool,
}

impl Probe {
    /// Makes the probe of a worker. It has a random rank, so that doctors that run at the same time have different
    /// holders. All ranks of a worker publish on one subject.
    pub(super) fn of(namespace: NamespaceName, worker: WorkerName) -> Self {
        let random = RandomState::new().hash_one(PROBE_NAME) >> (u64::BITS - Rank::BITS);
        Self::at(namespace, worker, Rank::try_from(random).unwrap_or_default())
    }

    /// Makes the probe of a worker at `rank`.
    fn at(namespace: NamespaceName, worker: WorkerName, rank: Rank) -> Self {
        Self {
            holder: PublishedHolder {
                namespace,
                worker,
                rank,
            },
            publisher: OnceCell::new(),
            is_gone: AtomicBool::new(false),
        }
    }

    /// Makes a probe from the names of its namespace and worker.
    #[cfg(test)]
    pub(super) fn named(namespace: &str, worker: &str, rank: Rank) -> Self {
        let namespace = NamespaceName::new(namespace).unwrap();
        Self::at(namespace, WorkerName::new(worker).unwrap(), rank)
    }

    /// Returns the holder for which the probe is published.
    pub(super) fn holder(&self) -> &PublishedHolder {
        &self.holder
    }

    /// Whether a holder is the probe's, or is one in the namespace that only probes use.
    pub(super) fn is_holder(&self, namespace: &str, worker: &str, rank: Rank) -> bool {
        let own = &self.holder;
        let own = (own.namespace.as_str(), own.worker.as_str(), own.rank);
        namespace == PROBE_NAME || (namespace, worker, rank) == own
    }

    /// Returns the probe's publisher. Starts it if it has not been started. `block_size` is the block size of the
    /// namespace, if a daemon has told it.
    pub(super) async fn publisher(
        &self,
        nats: &Client,
        subjects: &Subjects,
        block_size: Option<BlockSize>,
    ) -> Result<&HolderPublisher, PublisherError> {
        let options = PublisherOptions {
            batch_delay: Duration::ZERO,
            // The probe's block has no tokens, so it fits every block size. But a namespace that has its block size
            // from its publishers takes no batch without one.
            tells_block_size: block_size.is_some(),
            settings: NamespaceSettings {
                block_size: block_size.unwrap_or_default(),
                ..NamespaceSettings::default()
            },
            ..PublisherOptions::default()
        };
        let start = || HolderPublisher::start(nats.clone(), subjects, self.holder.clone(), options);
        self.publisher.get_or_try_init(start).await
    }

    /// Returns the event that stores the probe's block, and the block's sequence hash. The event has the block's
    /// content, so it is taken also where daemons recompute hashes.
    pub(super) fn block(publisher: &HolderPublisher) -> (Event, SequenceHash) {
        let hash = publisher.cursor().epoch;
        let event = StoredBlocks {
            // The first block of a chain has its block hash as its sequence hash.
            content: Some(BlockContent::BlockHashes(vec![BlockHash(hash)])),
            ..StoredBlocks::by_sequence(None, None, vec![SequenceHash(hash)])
        };
        (Event::Stored(event), SequenceHash(hash))
    }

    /// Publishes the probe's goodbye, so that daemons forget its holder at once. Does nothing if the publisher has not
    /// been started, or if the goodbye has been published. `patience` is the longest wait.
    pub(super) async fn take_back(&self, patience: Duration) {
        let publisher = self.publisher.get();
        let Some(publisher) = publisher.filter(|_| !self.is_gone.load(Ordering::Relaxed)) else {
            return;
        };
        let goodbye = async {
            let _ = publisher.publish(Tier::DEVICE, vec![Event::Goodbye]).await;
            let _ = publisher.flush().await;
        };
        let _ = tokio::time::timeout(patience, goodbye).await;
        self.is_gone.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctors_at_the_same_time_have_different_holders() {
        let namespace = NamespaceName::new("m").unwrap();
        let worker = WorkerName::new("own").unwrap();
        let ranks: std::collections::BTreeSet<Rank> = (0..8)
            .map(|_| Probe::of(namespace.clone(), worker.clone()).holder.rank)
            .collect();
        assert_eq!(ranks.len(), 8);
    }

    #[test]
    fn only_the_probe_and_its_namespace_are_the_doctors() {
        let probe = Probe::named("m", "own", 7);
        assert!(probe.is_holder("m", "own", 7) && probe.is_holder(PROBE_NAME, "other", 1));
        // The probe of an interrupted doctor makes answers about a real namespace inexact.
        assert!(!probe.is_holder("m", "own", 8));
        assert!(!probe.is_holder("m", "gpu-0", 7));
        assert!(!probe.is_holder("n", "own", 7));
    }
}
