//! Holders whose batches are dropped because there is no room for them, or because their blocks are others than their namespace's: nothing
//! is known of what they have.

use std::collections::HashMap;

use parking_lot::RwLock;

use crate::wire::HolderId;

/// Most of them that are known at a time. Where there are as many, anybody may be one of those that came later.
const REFUSED_MAX: usize = 4096;

/// Those of one namespace, each with the time of its last batch.
#[derive(Debug, Default)]
pub(crate) struct RefusedHolders(RwLock<HashMap<HolderId, u64>>);

impl RefusedHolders {
    /// Notes a batch that was dropped; says whether its holder is new here.
    pub(crate) fn note(&self, id: &HolderId, now_us: u64) -> bool {
        let mut refused = self.0.write();
        if let Some(last_us) = refused.get_mut(id) {
            *last_us = now_us;
            return false;
        }
        let has_room = refused.len() < REFUSED_MAX;
        if has_room {
            refused.insert(id.clone(), now_us);
        }
        has_room
    }

    /// Forgets those for whom it `is_over`, told of who they are and when their last batch came; says whether there were any.
    pub(crate) fn forget(&self, is_over: impl Fn(&HolderId, u64) -> bool) -> bool {
        if self.0.read().is_empty() {
            return false;
        }
        let mut refused = self.0.write();
        let before = refused.len();
        refused.retain(|id, last_us| !is_over(id, *last_us));
        if refused.is_empty() {
            *refused = HashMap::new();
        }
        refused.len() < before
    }

    /// How many there are for whom this holds; at least one where not all are known.
    pub(crate) fn count(&self, is_meant: impl Fn(&HolderId) -> bool) -> usize {
        let refused = self.0.read();
        let meant = refused.keys().filter(|id| is_meant(id)).count();
        meant.max(refused.len() / REFUSED_MAX)
    }
}

#[cfg(test)]
mod tests {
    use crate::wire::WorkerName;

    use super::*;

    #[test]
    fn as_many_are_known_as_there_is_room_for() {
        let refused = RefusedHolders::default();
        let id = |rank| HolderId {
            worker: WorkerName::new("gpu-0").unwrap(),
            rank,
        };
        let all = u32::try_from(REFUSED_MAX).unwrap() + 10;
        for rank in 0..all {
            assert_eq!(refused.note(&id(rank), u64::from(rank)), rank + 10 < all);
        }
        assert_eq!(refused.count(|_| true), REFUSED_MAX);
        assert_eq!(refused.count(|id| id.rank == all - 1), 1, "it may be");
        // Whoever is heard again stays.
        assert!(!refused.note(&id(3), 1_000_000));
        assert!(refused.forget(|_, last_us| last_us < 2000));
        assert_eq!(refused.count(|_| true), REFUSED_MAX - 1999);
        assert_eq!(refused.count(|refused| refused.rank < 2000), 1);
        assert_eq!(refused.count(|id| id.rank == all - 1), 0);
        assert!(!refused.forget(|_, last_us| last_us < 2000));
        assert!(refused.forget(|_, _| true));
        assert_eq!(refused.count(|_| true), 0);
    }
}
