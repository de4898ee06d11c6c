//! Shards' replies to one request, grouped by division. A division is a way to divide the workers into shards, named by its
//! number of shards.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kvatlas_core::wire::{SHARDS_MAX, Shard};

/// Maximum number of replies to one request that are kept. Replies of several divisions of the workers into shards can
/// come at the same time.
const REPLIES_MAX: usize = 4 * SHARDS_MAX as usize;

/// Use of a shard's reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyUse {
    /// An answer to the request, or an error about the request.
    Answer,
    /// The shard does not know the namespace. Beside an answer of another shard, this is an answer without holders.
    Unknown,
    /// The shard cannot answer now.
    Refusal,
}

/// Shards' replies to one request that have come so far. Their number and size are bounded, because any client that sees the
/// request can reply for any number of shards.
#[derive(Debug)]
pub(super) struct Collection<T> {
    /// Replies, grouped by the number of shards of their division.
    divisions: BTreeMap<u32, DivisionReplies<T>>,
    /// Number of shards of the division that gave the last whole answer to an earlier request; `None` if there is none.
    expected: Option<u32>,
    /// Number of replies that may still be kept.
    replies_left: usize,
    /// Number of bytes of replies that may still be kept.
    bytes_left: usize,
}

/// Replies of the shards of one division, each with its use, by the shard's index.
type DivisionReplies<T> = BTreeMap<u32, (ReplyUse, T)>;

/// Replies of the shards of one division, that is, of one way to divide the workers into shards.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Division<T> {
    /// Number of shards into which the division divides the workers.
    pub(super) shards: u32,
    /// The replies, by the shard's index.
    pub(super) replies: BTreeMap<u32, T>,
}

impl<T> Collection<T> {
    /// Makes an empty collection, which keeps at most `bytes_max` bytes of replies. The shards of the division with
    /// `expected` shards count as heard of before they reply.
    pub(super) fn within(bytes_max: usize, expected: Option<u32>) -> Self {
        Self {
            divisions: BTreeMap::new(),
            expected,
            replies_left: REPLIES_MAX,
            bytes_left: bytes_max,
        }
    }

    /// Adds a reply of `bytes`. If a shard replies twice, its first reply is kept. Returns whether collecting ends. It
    /// ends in three cases:
    ///
    /// - The reply's division (way to divide the workers) is whole.
    /// - All shards of all divisions that have been heard of have replied. Only refusals may be among the replies.
    /// - There is no room for the reply.
    pub(super) fn add(&mut self, shard: Shard, reply_use: ReplyUse, reply: T, bytes: usize) -> bool {
        let replies = self.divisions.entry(shard.count()).or_default();
        if let Entry::Vacant(place) = replies.entry(shard.index()) {
            if self.replies_left == 0 || self.bytes_left < bytes {
                return true;
            }
            self.replies_left -= 1;
            self.bytes_left -= bytes;
            place.insert((reply_use, reply));
        }
        self.is_whole(shard.count()) || self.have_all_replied()
    }

    /// Whether all shards of the division with this number of shards have replied.
    fn have_replied(&self, shards: u32) -> bool {
        let replies = self.divisions.get(&shards);
        replies.is_some_and(|replies| replies.len() as u64 == u64::from(shards))
    }

    /// Whether all shards of all divisions that have been heard of have replied.
    fn have_all_replied(&self) -> bool {
        let mut heard_of = self.divisions.keys().copied().chain(self.expected);
        heard_of.all(|shards| self.have_replied(shards))
    }

    /// Whether the division with this number of shards is whole: all its shards have replied, and none has refused to
    /// answer. At least one has an answer, or the division gave the last whole answer.
    fn is_whole(&self, shards: u32) -> bool {
        let is_whole = |replies| {
            let uses = Uses::of(replies);
            uses.useful == u64::from(shards) && (uses.has_answer || self.expected == Some(shards))
        };
        self.have_replied(shards) && self.divisions.get(&shards).is_some_and(is_whole)
    }

    /// Returns the number of shards of the division that later requests are to expect: of one that is whole, or else of
    /// the expected one if all its shards have replied.
    pub(super) fn expected_next(&self) -> Option<u32> {
        let mut shards = self.divisions.keys().copied();
        let whole = shards.find(|shards| self.is_whole(*shards));
        whole.or(self.expected.filter(|shards| self.have_replied(*shards)))
    }

    /// Whether no reply is kept.
    pub(super) fn is_empty(&self) -> bool {
        self.divisions.values().all(BTreeMap::is_empty)
    }

    /// Returns the replies of the best division (way to divide the workers into shards). `None` if there is no reply.
    /// Divisions are compared by these properties, in this order:
    ///
    /// 1. whether the division has an answer
    /// 2. the share of its shards that have not refused to answer
    /// 3. the share of its shards that have replied
    /// 4. the number of its shards
    pub(super) fn into_best(self) -> Option<Division<T>> {
        let divisions = self
            .divisions
            .into_iter()
            .filter(|(_, replies)| !replies.is_empty());
        let (shards, replies) = divisions.max_by(|(shards, replies), (other_shards, other_replies)| {
            let (one, other) = (Uses::of(replies), Uses::of(other_replies));
            // Shares are compared as products, which are exact.
            let compared = |part: u64, other_part: u64| {
                (part * u64::from(*other_shards)).cmp(&(other_part * u64::from(*shards)))
            };
            one.has_answer
                .cmp(&other.has_answer)
                .then(compared(one.useful, other.useful))
                .then(compared(one.all, other.all))
                .then(shards.cmp(other_shards))
        })?;
        let replies = replies.into_iter().map(|(index, (_, reply))| (index, reply));
        Some(Division {
            shards,
            replies: replies.collect(),
        })
    }
}

/// Numbers of the replies of one division.
struct Uses {
    has_answer: bool,
    /// Number of replies that are no refusals.
    useful: u64,
    all: u64,
}

impl Uses {
    fn of<T>(replies: &DivisionReplies<T>) -> Self {
        let uses = || replies.values().map(|(reply_use, _)| *reply_use);
        Self {
            has_answer: uses().any(|reply_use| reply_use == ReplyUse::Answer),
            useful: uses().filter(|reply_use| *reply_use != ReplyUse::Refusal).count() as u64,
            all: replies.len() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ReplyUse::{Answer, Refusal, Unknown};
    use super::*;

    fn shard(index: u32, count: u32) -> Shard {
        Shard::new(index, count).unwrap()
    }

    #[test]
    fn the_first_whole_division_ends_the_wait() {
        let mut collection = Collection::within(3, None);
        assert!(!collection.add(shard(0, 2), Answer, "a", 1));
        assert!(!collection.add(shard(2, 3), Answer, "b", 1));
        assert!(!collection.add(shard(0, 2), Answer, "a again", 1));
        assert!(collection.add(shard(1, 2), Unknown, "c", 1));
        assert_eq!(collection.expected_next(), Some(2));
        let best = collection.into_best().unwrap();
        assert_eq!(
            (best.shards, best.replies),
            (2, BTreeMap::from([(0, "a"), (1, "c")]))
        );
    }

    #[test]
    fn a_division_without_an_answer_waits_for_the_others() {
        for useless in [Refusal, Unknown] {
            let mut collection = Collection::within(9, None);
            assert!(!collection.add(shard(0, 2), Answer, "old", 1));
            for index in 0..3 {
                assert!(!collection.add(shard(index, 3), useless, "new", 1), "{useless:?}");
            }
            assert!(collection.add(shard(1, 2), Answer, "old", 1));
            assert_eq!(collection.into_best().unwrap().shards, 2);
        }
        // The division that has answered before knows what there is, so its word counts at once.
        let mut collection = Collection::within(9, Some(2));
        assert!(!collection.add(shard(0, 3), Refusal, "new", 1));
        assert!(!collection.add(shard(0, 2), Unknown, "old", 1));
        assert!(collection.add(shard(1, 2), Unknown, "old", 1));
        assert_eq!(collection.expected_next(), Some(2));
        // Half an answer is better than none.
        let mut collection = Collection::within(9, None);
        for index in 0..3 {
            collection.add(shard(index, 3), Unknown, "new", 1);
        }
        collection.add(shard(0, 2), Answer, "old", 1);
        assert_eq!(collection.into_best().unwrap().shards, 2);
    }

    #[test]
    fn a_division_alone_ends_the_wait_whatever_its_shards_reply() {
        for uses in [[Refusal; 2], [Unknown; 2], [Answer, Refusal], [Unknown, Refusal]] {
            let mut collection = Collection::within(9, None);
            assert!(!collection.add(shard(0, 2), uses[0], (), 1));
            assert!(collection.add(shard(1, 2), uses[1], (), 1), "{uses:?}");
            assert_eq!(collection.expected_next(), None);
        }
    }

    #[test]
    fn the_division_that_has_answered_before_is_waited_for() {
        let mut collection = Collection::within(9, Some(2));
        for index in 0..3 {
            assert!(!collection.add(shard(index, 3), Refusal, "new", 1));
        }
        // The old division has gone if the time is up now.
        assert_eq!(collection.expected_next(), None);
        assert!(!collection.add(shard(0, 2), Refusal, "old", 1));
        assert!(collection.add(shard(1, 2), Unknown, "old", 1));
        assert_eq!(collection.expected_next(), Some(2));
        assert_eq!(collection.into_best().unwrap().shards, 2);
    }

    #[test]
    fn nothing_is_no_division() {
        assert_eq!(Collection::<()>::within(1, None).into_best(), None);
    }

    #[test]
    fn replies_for_shards_without_end_are_not_collected() {
        let mut collection = Collection::within(10, None);
        assert!(!collection.add(shard(0, 3), Answer, "a", 6));
        assert!(collection.add(shard(0, 200), Answer, "no room for its bytes", 6));
        let best = collection.into_best().unwrap();
        assert_eq!((best.shards, best.replies), (3, BTreeMap::from([(0, "a")])));
        let mut collection = Collection::within(usize::MAX, None);
        let all = (2..=SHARDS_MAX).flat_map(|count| (0..count - 1).map(move |index| shard(index, count)));
        let kept = all
            .take_while(|shard| !collection.add(*shard, Answer, (), 0))
            .count();
        assert_eq!(kept, REPLIES_MAX);
    }

    proptest! {
        #[test]
        fn the_best_division_has_the_largest_part(
            replies in prop::collection::vec((1..6_u32).prop_flat_map(|count| (0..count, Just(count))), 1..20),
        ) {
            let mut collection = Collection::within(usize::MAX, None);
            for (index, count) in &replies {
                collection.add(shard(*index, *count), Answer, (), 1);
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
