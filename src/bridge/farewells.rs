//! Remembers epochs that are ahead of the clock and that the bridge has ended, most often with a goodbye.
//!
//! After a goodbye, daemons drop batches of the holder's lower epochs for a minute. An epoch's number is usually the
//! time of its start. If the clock was ahead at that time, and has been set back since, the holder's next epoch would
//! be lower. So the bridge begins that next epoch above the remembered epoch.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use kvatlas_client::publish::PublishedHolder;
use kvatlas_client::unix_time_us;
use kvatlas_core::wire::{NamespaceName, Rank, WorkerName};

/// Maximum number of holders whose epochs are kept.
const HOLDERS_MAX: usize = 4096;

type FarewellKey = (NamespaceName, WorkerName, Rank);

/// Ended epochs that are ahead of the clock, by holder. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Farewells(Arc<Mutex<HashMap<FarewellKey, u64>>>);

/// Entry of one holder in [`Farewells`], which notes the holder's ended epoch.
#[derive(Debug)]
pub(super) struct Farewell {
    farewells: Farewells,
    holder: FarewellKey,
}

impl Farewells {
    /// Returns the entry of `holder`.
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
    /// Notes that the holder's `epoch` has ended. Does nothing if `epoch` is not ahead of the clock, or if the epochs
    /// of [`HOLDERS_MAX`] holders are noted already.
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

    /// Returns the holder's noted epoch, above which its next epoch has to begin. `None` if no ended epoch was ahead of
    /// the clock.
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
