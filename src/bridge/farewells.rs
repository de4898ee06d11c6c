//! Epochs in which the bridge has said goodbye. Daemons drop batches of a lower epoch for a minute after a goodbye. If the
//! clock was ahead when the epoch began, the holder's next epoch would be lower. So that one begins above the old one.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use kvatlas_client::publish::PublishedHolder;
use kvatlas_client::unix_time_us;
use kvatlas_core::wire::{NamespaceName, Rank, WorkerName};

/// Maximum number of holders whose epochs are kept.
const HOLDERS_MAX: usize = 4096;

type FarewellKey = (NamespaceName, WorkerName, Rank);

/// Epochs ahead of the clock in which holders were said goodbye. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Farewells(Arc<Mutex<HashMap<FarewellKey, u64>>>);

/// Place where the goodbye of one holder is noted.
#[derive(Debug)]
pub(super) struct Farewell {
    farewells: Farewells,
    holder: FarewellKey,
}

impl Farewells {
    /// Returns the place where the goodbye of `holder` is noted.
    pub(super) fn of(&self, holder: &PublishedHolder) -> Farewell {
        let PublishedHolder {
            namespace,
            worker,
            rank,
        } = holder.clone();
        Farewell {
            farewells: self.clone(),
            holder: (namespace, worker, rank),
        }
    }
}

impl Farewell {
    /// Notes that the holder was said goodbye in `epoch`. An epoch of the past needs no note.
    pub(super) fn note(&self, epoch: u64) {
        self.note_at(epoch, unix_time_us());
    }

    fn note_at(&self, epoch: u64, now_us: u64) {
        let mut epochs = self.farewells.0.lock();
        epochs.retain(|_, epoch| *epoch > now_us);
        if epoch > now_us && epochs.len() < HOLDERS_MAX {
            epochs.insert(self.holder.clone(), epoch);
        }
    }

    /// Returns the epoch of the holder's last goodbye; `None` if that lay in the past.
    pub(super) fn epoch(&self) -> Option<u64> {
        self.farewells.0.lock().get(&self.holder).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_goodbyes_ahead_of_the_clock_are_kept() {
        let farewells = Farewells::default();
        let of = |worker: &str| {
            farewells.of(&PublishedHolder {
                namespace: NamespaceName::new("m").unwrap(),
                worker: WorkerName::new(worker).unwrap(),
                rank: 0,
            })
        };
        of("early").note_at(70, 60);
        of("late").note_at(50, 60);
        assert_eq!((of("early").epoch(), of("late").epoch()), (Some(70), None));
        of("late").note_at(80, 75);
        assert_eq!((of("early").epoch(), of("late").epoch()), (None, Some(80)));
    }
}
