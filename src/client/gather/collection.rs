//! Replies as they come in, sorted by the division that their shard belongs to.

use std::collections::BTreeMap;

use kvatlas_core::wire::Shard;

/// The replies to one request so far.
#[derive(Debug)]
pub(super) struct Collection<T> {
    /// By the number of shards, then by the shard's index.
    divisions: BTreeMap<u32, BTreeMap<u32, T>>,
}

/// The replies of one division of the workers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Division<T> {
    /// How many shards there are.
    pub(super) shards: u32,
    /// The replies, by the shard's index.
    pub(super) replies: BTreeMap<u32, T>,
}

impl<T> Default for Collection<T> {
    fn default() -> Self {
        Self {
            divisions: BTreeMap::new(),
        }
    }
}

impl<T> Collection<T> {
    /// Adds a reply; says whether its division is complete. Of two replies of one shard the first is kept.
    pub(super) fn add(&mut self, shard: Shard, reply: T) -> bool {
        let replies = self.divisions.entry(shard.count()).or_default();
        replies.entry(shard.index()).or_insert(reply);
        u32::try_from(replies.len()).is_ok_and(|answered| answered == shard.count())
    }

    /// The division of which the largest part has answered; of equals that with more shards. None without a reply.
    pub(super) fn into_best(self) -> Option<Division<T>> {
        let parts = |division: &Division<T>| (division.replies.len() as u64, u64::from(division.shards));
        let divisions = self.divisions.into_iter();
        divisions
            .map(|(shards, replies)| Division { shards, replies })
            .max_by(|one, other| {
                let ((answered, shards), (other_answered, other_shards)) = (parts(one), parts(other));
                (answered * other_shards)
                    .cmp(&(other_answered * shards))
                    .then(shards.cmp(&other_shards))
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shard(index: u32, count: u32) -> Shard {
        Shard::new(index, count).unwrap()
    }

    #[test]
    fn the_first_complete_division_ends_the_wait() {
        let mut collection = Collection::default();
        assert!(!collection.add(shard(0, 2), "a"));
        assert!(!collection.add(shard(2, 3), "b"));
        assert!(!collection.add(shard(0, 2), "a again"));
        assert!(collection.add(shard(1, 2), "c"));
        let best = collection.into_best().unwrap();
        assert_eq!(
            (best.shards, best.replies),
            (2, BTreeMap::from([(0, "a"), (1, "c")]))
        );
    }

    #[test]
    fn nothing_is_no_division() {
        assert_eq!(Collection::<()>::default().into_best(), None);
    }

    proptest! {
        #[test]
        fn the_best_division_has_the_largest_part(
            replies in prop::collection::vec((1..6_u32).prop_flat_map(|count| (0..count, Just(count))), 1..20),
        ) {
            let mut collection = Collection::default();
            for (index, count) in &replies {
                collection.add(shard(*index, *count), ());
            }
            let part = |count: u32| {
                let answered: std::collections::BTreeSet<_> =
                    replies.iter().filter(|(_, of)| *of == count).map(|(index, _)| *index).collect();
                f64::from(u32::try_from(answered.len()).unwrap()) / f64::from(count)
            };
            let best = collection.into_best().unwrap();
            let largest = replies.iter().map(|(_, count)| part(*count)).fold(0.0, f64::max);
            prop_assert!((part(best.shards) - largest).abs() < 1e-9);
        }
    }
}
