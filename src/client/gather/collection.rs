//! Shards' replies to one request, grouped by division. A division is a way to divide the workers into shards, named by its
//! number of shards.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kvatlas_core::wire::{SHARDS_MAX, Shard};

/// Maximum number of replies to one request that are kept. Replies of several divisions of the workers into shards can
/// come at the same time.
const REPLIES_MAX: usize = 4 * SHARDS_MAX as usize;

/// Shards' replies to one request that have come so far. Their number and size are bounded, because any client that sees the
/// request can reply for any number of shards.
#[derive(Debug)]
pub(super) struct Collection<T> {
    /// Replies, grouped by the number of shards of their division. In each group, the key of a reply is the index of
    /// its shard.
    divisions: BTreeMap<u32, BTreeMap<u32, T>>,
    /// Number of replies that may still be kept.
    replies_left: usize,
    /// Number of bytes of replies that may still be kept.
    bytes_left: usize,
}

/// Replies of the shards of one division, that is, of one way to divide the workers into shards.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Division<T> {
    /// Number of shards into which the division divides the workers.
    pub(super) shards: u32,
    /// The replies, by the shard's index.
    pub(super) replies: BTreeMap<u32, T>,
}

impl<T> Collection<T> {
    /// Makes an empty collection, which keeps at most `bytes_max` bytes of replies.
    pub(super) fn within(bytes_max: usize) -> Self {
        Self {
            divisions: BTreeMap::new(),
            replies_left: REPLIES_MAX,
            bytes_left: bytes_max,
        }
    }

    /// Adds a reply of `bytes`. If a shard replies twice, its first reply is kept. Returns whether collecting ends. It
    /// ends if all shards of the reply's division (way to divide the workers) have replied, or if there is no room for
    /// the reply.
    pub(super) fn add(&mut self, shard: Shard, reply: T, bytes: usize) -> bool {
        let replies = self.divisions.entry(shard.count()).or_default();
        if let Entry::Vacant(place) = replies.entry(shard.index()) {
            if self.replies_left == 0 || self.bytes_left < bytes {
                return true;
            }
            self.replies_left -= 1;
            self.bytes_left -= bytes;
            place.insert(reply);
        }
        u32::try_from(replies.len()).is_ok_and(|answered| answered == shard.count())
    }

    /// Whether no reply is kept.
    pub(super) fn is_empty(&self) -> bool {
        self.divisions.values().all(BTreeMap::is_empty)
    }

    /// Returns the replies of the division (way to divide the workers into shards) in which the largest share of the
    /// shards has answered. If two shares are equal, returns the division with more shards. `None` if there is no
    /// reply.
    pub(super) fn into_best(self) -> Option<Division<T>> {
        let parts = |division: &Division<T>| (division.replies.len() as u64, u64::from(division.shards));
        let divisions = self
            .divisions
            .into_iter()
            .filter(|(_, replies)| !replies.is_empty());
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
        let mut collection = Collection::within(3);
        assert!(!collection.add(shard(0, 2), "a", 1));
        assert!(!collection.add(shard(2, 3), "b", 1));
        assert!(!collection.add(shard(0, 2), "a again", 1));
        assert!(collection.add(shard(1, 2), "c", 1));
        let best = collection.into_best().unwrap();
        assert_eq!(
            (best.shards, best.replies),
            (2, BTreeMap::from([(0, "a"), (1, "c")]))
        );
    }

    #[test]
    fn nothing_is_no_division() {
        assert_eq!(Collection::<()>::within(1).into_best(), None);
    }

    #[test]
    fn replies_for_shards_without_end_are_not_collected() {
        let mut collection = Collection::within(10);
        assert!(!collection.add(shard(0, 3), "a", 6));
        assert!(collection.add(shard(0, 200), "no room for its bytes", 6));
        let best = collection.into_best().unwrap();
        assert_eq!((best.shards, best.replies), (3, BTreeMap::from([(0, "a")])));
        let mut collection = Collection::within(usize::MAX);
        let all = (2..=SHARDS_MAX).flat_map(|count| (0..count - 1).map(move |index| shard(index, count)));
        let kept = all.take_while(|shard| !collection.add(*shard, (), 0)).count();
        assert_eq!(kept, REPLIES_MAX);
    }

    proptest! {
        #[test]
        fn the_best_division_has_the_largest_part(
            replies in prop::collection::vec((1..6_u32).prop_flat_map(|count| (0..count, Just(count))), 1..20),
        ) {
            let mut collection = Collection::within(usize::MAX);
            for (index, count) in &replies {
                collection.add(shard(*index, *count), (), 1);
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
