//! Proofs of continuity: decides from the numbers and bytes of an engine's batches whether any batch is missing. Does no I/O,
//! and reads no clock.
//!
//! A publisher numbers its batches 0, 1, 2, … for as long as its process lives.
//!
//! - Within one connection, a number that continues the count proves that no batch was lost.
//! - Across connections, such a number proves nothing, because another process may have counted equally far.
//! - No number proves that the replay socket and the connection belong to the same engine.
//!
//! So this module remembers digests of the last batches. Each question to the replay socket begins at a batch that the socket
//! has given before. If that batch now has other bytes, another process has sent it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Maximum number of remembered batches, at 16 bytes each.
const REMEMBERED_MAX: usize = 1024;

/// Record of a batch that was applied: its number and a digest of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct RecentBatch {
    seq: u64,
    digest: u64,
}

/// Record of a batch that the publisher has sent, or that an earlier bridge heard: the batch's number and a digest of its
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeardBatch {
    pub(super) seq: u64,
    digest: u64,
}

impl HeardBatch {
    /// Makes the record of a batch with this number and these bytes.
    pub(super) fn new(seq: u64, payload: &[u8]) -> Self {
        let digest = xxh3_64(payload);
        Self { seq, digest }
    }
}

/// Verdict on a published batch, from its number and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Published {
    /// The batch continues the count of the applied batches.
    Next,
    /// The batch was applied before, with the same bytes.
    Duplicate,
    /// A batch of this number came from the replay socket so long ago that its digest is no longer remembered.
    Forgotten,
    /// Batches between the last applied one and this one are missing.
    Gap,
    /// An applied batch of this number had other bytes, or the numbers run backwards. Either another process sends the
    /// batches, or the replay socket belongs to another engine.
    Other,
}

/// The verdict on a batch of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replayed {
    /// The batch was applied before. Its bytes are the same, or its digest is no longer remembered.
    Known,
    /// The batch continues the count of the applied batches.
    Next,
    /// The replay lacks batches between the last applied batch and this batch.
    Gap,
    /// The batch differs in bytes from the applied batch of the same number, so it comes from another process.
    Stranger,
    /// The replay begins after the last applied batch, so that it proves nothing about earlier batches.
    Beyond,
}

/// State of one publisher's batch numbers: which batches were applied, published and replayed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Continuity {
    /// The last batches that were applied, in the order of their numbers.
    recent: VecDeque<RecentBatch>,
    /// Highest batch number that came by replay. Batches up to this number may still arrive on the connection.
    replayed: Option<u64>,
    /// Number of the last batch that was published on this connection.
    #[serde(skip)]
    published: Option<u64>,
    /// Number of the last batch that the replay socket has given.
    confirmed: Option<u64>,
    /// Highest number that the first batch of a process can have.
    #[serde(skip)]
    first_max: u64,
    /// Change counter: number of changes so far that are worth keeping on disk.
    #[serde(skip)]
    changes: u64,
}

impl Continuity {
    /// Makes the state of a publisher that has no known batch yet. The number of the publisher's first batch is
    /// `first_max` at most.
    pub(super) fn from(first_max: u64) -> Self {
        Self {
            first_max,
            ..Self::default()
        }
    }

    /// Restores the publisher's state that an earlier bridge has saved; `None` if that state contradicts itself. The
    /// publisher has to show that it is still the same process, as after a reconnect.
    pub(super) fn kept(self, first_max: u64) -> Option<Self> {
        let numbers = self.recent.iter().map(|batch| batch.seq);
        let is_sound = self.recent.len() <= REMEMBERED_MAX && numbers.is_sorted_by(|one, next| one < next);
        is_sound.then_some(Self { first_max, ..self })
    }

    /// Returns the number of changes so far that are worth keeping on disk.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether the batch `seq` can be the first of a process.
    pub(super) fn is_first(&self, seq: u64) -> bool {
        seq <= self.first_max
    }

    /// Returns the batch number at which the next question to the replay socket begins. The socket has given that batch
    /// before, so the batch's bytes show whether the process is the same.
    pub(super) fn replay_from(&self) -> u64 {
        let is_remembered = |confirmed: &u64| self.digest_of(*confirmed).is_some();
        let oldest = self.recent.front().map(|batch| batch.seq);
        self.confirmed
            .filter(is_remembered)
            .or(oldest)
            .unwrap_or_default()
    }

    /// Returns the number of the last batch that was applied; `None` if there is none.
    pub(super) fn last(&self) -> Option<u64> {
        self.recent.back().map(|batch| batch.seq)
    }

    /// Returns the number and digest of the last batch that was applied; `None` if there is none.
    pub(super) fn last_batch(&self) -> Option<HeardBatch> {
        let RecentBatch { seq, digest } = *self.recent.back()?;
        Some(HeardBatch { seq, digest })
    }

    /// Whether a batch has been published on this connection.
    pub(super) fn is_heard(&self) -> bool {
        self.published.is_some()
    }

    /// Returns the last batch that was published on this connection; `None` if there is none or it is no longer remembered.
    pub(super) fn heard(&self) -> Option<HeardBatch> {
        let seq = self.published?;
        let digest = self.digest_of(seq)?;
        Some(HeardBatch { seq, digest })
    }

    /// Whether the replay socket has given the last batch that was applied.
    pub(super) fn is_confirmed(&self) -> bool {
        self.confirmed.is_some() && self.confirmed == self.last()
    }

    fn next(&self) -> u64 {
        self.last().map_or(0, |last| last.saturating_add(1))
    }

    fn digest_of(&self, seq: u64) -> Option<u64> {
        let place = self.recent.binary_search_by_key(&seq, |batch| batch.seq).ok()?;
        self.recent.get(place).map(|batch| batch.digest)
    }

    /// Notes a new connection, whose first batch may have any number.
    pub(super) fn reconnect(&mut self) {
        self.published = None;
    }

    /// Starts over for another process. No batch of that process has been applied yet.
    pub(super) fn restart(&mut self) {
        *self = Self {
            published: self.published,
            first_max: self.first_max,
            changes: self.changes + 1,
            ..Self::default()
        };
    }

    /// Notes that the batch `seq`, which was applied, has come from the replay socket.
    pub(super) fn confirm(&mut self, seq: u64) {
        self.confirmed = self.confirmed.max(Some(seq));
    }

    /// Whether the replay socket has ever given a batch.
    pub(super) fn was_given_any(&self) -> bool {
        self.confirmed.is_some()
    }

    /// Returns the progress so far: the number of the last batch that was applied, and the last number that the replay
    /// socket has given.
    pub(super) fn reached(&self) -> (Option<u64>, Option<u64>) {
        (self.last(), self.confirmed)
    }

    /// Judges the batch `seq`, which was published on this connection.
    pub(super) fn published(&mut self, seq: u64, payload: &[u8]) -> Published {
        let before = self.published;
        let is_again = before.is_some_and(|before| seq <= before);
        let found = self.published_again(seq, payload);
        if is_again && found == Published::Duplicate {
            // Something between the bridge and the publisher has sent the batch twice.
            return found;
        }
        self.published = Some(seq);
        if is_again { Published::Other } else { found }
    }

    /// Judges a published batch again, after a replay that has brought missing batches. [`Self::published`] judges it
    /// the first time.
    pub(super) fn published_again(&self, seq: u64, payload: &[u8]) -> Published {
        if self.recent.is_empty() && self.is_first(seq) {
            return Published::Next;
        }
        match seq.cmp(&self.next()) {
            std::cmp::Ordering::Equal => Published::Next,
            std::cmp::Ordering::Greater => Published::Gap,
            std::cmp::Ordering::Less => match self.digest_of(seq) {
                Some(digest) if digest == xxh3_64(payload) => Published::Duplicate,
                None if self.replayed.is_some_and(|replayed| seq <= replayed) => Published::Forgotten,
                _ => Published::Other,
            },
        }
    }

    /// Judges a batch of a replay; `is_first` says whether it is the first batch of that replay.
    pub(super) fn replayed(&self, seq: u64, payload: &[u8], is_first: bool) -> Replayed {
        let next = self.next();
        match seq.cmp(&next) {
            std::cmp::Ordering::Less => match self.digest_of(seq) {
                Some(digest) if digest != xxh3_64(payload) => Replayed::Stranger,
                _ => Replayed::Known,
            },
            _ if is_first && next > 0 => Replayed::Beyond,
            std::cmp::Ordering::Equal => Replayed::Next,
            std::cmp::Ordering::Greater => Replayed::Gap,
        }
    }

    /// Notes that the batch `seq` has been applied. `by_replay` says that it came from the replay socket.
    pub(super) fn applied(&mut self, seq: u64, payload: &[u8], by_replay: bool) {
        if self.recent.len() >= REMEMBERED_MAX {
            self.recent.pop_front();
        }
        self.changes += 1;
        let digest = xxh3_64(payload);
        self.recent.push_back(RecentBatch { seq, digest });
        if by_replay {
            self.replayed = self.replayed.max(Some(seq));
            self.confirm(seq);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(batches: &[(u64, &[u8])]) -> Continuity {
        let mut continuity = Continuity::default();
        for (seq, payload) in batches {
            continuity.applied(*seq, payload, false);
        }
        continuity
    }

    #[test]
    fn a_count_within_a_connection_proves_what_was_lost() {
        let mut continuity = Continuity::default();
        assert_eq!(continuity.published(0, b"a"), Published::Next);
        continuity.applied(0, b"a", false);
        assert_eq!(continuity.published(2, b"x"), Published::Gap);
        // The replay gives the missing batch 1, and batches 3 and 4, which have not been published on this connection
        // yet.
        for seq in 1..=4 {
            continuity.applied(seq, b"x", true);
        }
        assert_eq!(continuity.published(3, b"x"), Published::Duplicate);
        assert_eq!(continuity.published(4, b"x"), Published::Duplicate);
        assert_eq!(continuity.published(5, b"y"), Published::Next);
        continuity.applied(5, b"y", false);
        // The last batch may come twice. Its number alone does not show that the count begins anew.
        assert_eq!(continuity.published(5, b"y"), Published::Duplicate);
        assert_eq!(continuity.published(5, b"z"), Published::Other);
        assert_eq!(continuity.published(0, b"z"), Published::Other);
    }

    #[test]
    fn a_count_that_begins_anew_below_the_last_number_is_noticed() {
        let mut continuity = applied(&[(0, b"a")]);
        (1..1180).for_each(|seq| continuity.applied(seq, b"x", true));
        assert_eq!(continuity.published(1180, b"y"), Published::Next);
        continuity.applied(1180, b"y", false);
        assert_eq!(continuity.published(0, b"b"), Published::Other);
    }

    #[test]
    fn who_begins_late_has_missed_something() {
        let mut continuity = Continuity::default();
        assert_eq!(continuity.published(7, b"a"), Published::Gap);
        assert_eq!(Continuity::default().replayed(0, b"a", true), Replayed::Next);
        assert_eq!(Continuity::default().replayed(3, b"a", true), Replayed::Gap);
    }

    #[test]
    fn the_same_process_gives_back_the_same_batches() {
        let mut continuity = applied(&[(0, b"a"), (1, b"b")]);
        assert_eq!(continuity.replay_from(), 0);
        assert_eq!(continuity.replayed(0, b"a", true), Replayed::Known);
        assert_eq!(continuity.replayed(1, b"b", false), Replayed::Known);
        assert_eq!(continuity.replayed(2, b"c", false), Replayed::Next);
        assert_eq!(continuity.replayed(3, b"d", false), Replayed::Gap);
        assert!(!continuity.is_confirmed());
        (0..=1).for_each(|seq| continuity.confirm(seq));
        assert_eq!((continuity.is_confirmed(), continuity.replay_from()), (true, 1));
        // Batch 2 was published, but the replay socket has not given it yet.
        continuity.applied(2, b"c", false);
        assert_eq!((continuity.is_confirmed(), continuity.replay_from()), (false, 1));
    }

    #[test]
    fn another_process_does_not() {
        let continuity = applied(&[(0, b"a"), (1, b"b")]);
        assert_eq!(continuity.replayed(1, b"other", true), Replayed::Stranger);
        assert_eq!(continuity.replayed(0, b"other", true), Replayed::Stranger);
        assert_eq!(continuity.replayed(1, b"other", false), Replayed::Stranger);
        assert_eq!(continuity.replayed(9, b"b", true), Replayed::Beyond);
        let mut continuity = continuity;
        continuity.reconnect();
        assert_eq!(continuity.published(0, b"other"), Published::Other);
        continuity.restart();
        assert_eq!((continuity.last(), continuity.replay_from()), (None, 0));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut continuity = Continuity::default();
        let count = REMEMBERED_MAX as u64 + 10;
        (0..count).for_each(|seq| continuity.applied(seq, b"x", true));
        assert_eq!(continuity.recent.len(), REMEMBERED_MAX);
        assert_eq!(continuity.published(9, b"x"), Published::Forgotten);
        assert_eq!(continuity.published(10, b"y"), Published::Other);
        (count..count * 2).for_each(|seq| continuity.applied(seq, b"x", false));
        let oldest = count * 2 - REMEMBERED_MAX as u64;
        assert_eq!(continuity.replay_from(), oldest);
    }

    #[test]
    fn what_was_kept_is_as_after_a_reconnect() {
        let mut before = applied(&[(0, b"a"), (1, b"b")]);
        before.confirm(1);
        assert_eq!(before.changes(), 2);
        before.published(2, b"c");
        let written = rmp_serde::to_vec(&before).unwrap();
        let read = |written: &[u8]| rmp_serde::from_slice::<Continuity>(written).unwrap();
        let mut kept = read(&written).kept(0).unwrap();
        assert_eq!(
            (kept.last(), kept.replay_from(), kept.is_heard()),
            (Some(1), 1, false)
        );
        assert_eq!(kept.replayed(1, b"other", true), Replayed::Stranger);
        assert_eq!(kept.published(2, b"c"), Published::Next);
        let backwards = applied(&[(5, b"a"), (1, b"b")]);
        assert!(read(&rmp_serde::to_vec(&backwards).unwrap()).kept(0).is_none());
    }

    #[test]
    fn a_process_may_count_from_one() {
        let mut one = Continuity::from(1);
        assert_eq!(one.published(1, b"a"), Published::Next);
        one.applied(1, b"a", false);
        assert_eq!(one.published(2, b"b"), Published::Next);
        assert!(one.is_first(1) && !one.is_first(2));
        one.restart();
        assert_eq!(one.published_again(1, b"c"), Published::Next);
        assert_eq!(Continuity::from(1).published(0, b"a"), Published::Next);
        assert_eq!(Continuity::from(1).published(2, b"a"), Published::Gap);
        assert_eq!(Continuity::from(0).published(1, b"a"), Published::Gap);
    }
}
