//! What the numbers of an engine's batches prove. No I/O, no clock.
//!
//! A publisher numbers its batches 0, 1, 2, … for as long as its process lives. Within one connection a number that continues the count
//! proves that nothing was lost. Across connections it proves nothing: another process may have counted as far. So the last batch is
//! remembered by a digest, and the replay socket is asked for it.

use xxhash_rust::xxh3::xxh3_128;

/// The last batch that was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Last {
    seq: u64,
    digest: u128,
}

/// What to do with a published batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Published {
    /// It continues the count.
    Next,
    /// It was applied before, from the replay.
    Duplicate,
    /// Batches before it are missing.
    Gap,
    /// The count runs backwards: it is another process.
    Backwards,
}

/// What to do with a batch of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replayed {
    /// It is the last one that was applied: the process is the same.
    Known,
    /// It continues the count.
    Next,
    /// It was applied before.
    Duplicate,
    /// Batches before it cannot be had any more.
    Gap,
    /// It shows that the process is another one than that of the batches applied so far.
    Stranger,
    /// The replay begins behind the last one that was applied: it proves nothing about what came before.
    Beyond,
}

/// Follows the count of one publisher.
#[derive(Debug, Clone, Default)]
pub(super) struct Continuity {
    last: Option<Last>,
    /// The largest number that came by replay. What is published up to it may come twice.
    replayed: Option<u64>,
    /// The last number that was published on this connection.
    published: Option<u64>,
}

impl Continuity {
    /// The number from which the replay is to be asked: the last one applied, so that the process shows whether it is the same.
    pub(super) fn replay_from(&self) -> u64 {
        self.last.map_or(0, |last| last.seq)
    }

    /// Whether a batch has been applied.
    pub(super) fn has_begun(&self) -> bool {
        self.last.is_some()
    }

    fn next(&self) -> u64 {
        self.last.map_or(0, |last| last.seq.saturating_add(1))
    }

    /// A new connection: what is published on it begins anywhere.
    pub(super) fn reconnect(&mut self) {
        self.published = None;
    }

    /// Another process: nothing has been applied of it.
    pub(super) fn restart(&mut self) {
        *self = Self {
            published: self.published,
            ..Self::default()
        };
    }

    /// What to do with the batch `seq` that was published on this connection.
    pub(super) fn published(&mut self, seq: u64) -> Published {
        let before = self.published.replace(seq);
        if before.is_some_and(|before| seq <= before) {
            return Published::Backwards;
        }
        match seq.cmp(&self.next()) {
            std::cmp::Ordering::Equal => Published::Next,
            std::cmp::Ordering::Greater => Published::Gap,
            std::cmp::Ordering::Less if self.replayed.is_some_and(|replayed| seq <= replayed) => {
                Published::Duplicate
            }
            std::cmp::Ordering::Less => Published::Backwards,
        }
    }

    /// What to do with a batch for which [`Self::published`] was asked before, after a replay.
    pub(super) fn published_again(&self, seq: u64) -> Published {
        match seq.cmp(&self.next()) {
            std::cmp::Ordering::Equal => Published::Next,
            std::cmp::Ordering::Greater => Published::Gap,
            std::cmp::Ordering::Less => Published::Duplicate,
        }
    }

    /// What to do with a batch of a replay; `is_first` says whether it is the first of it.
    pub(super) fn replayed(&self, seq: u64, payload: &[u8], is_first: bool) -> Replayed {
        let Some(last) = self.last else {
            return if seq == 0 { Replayed::Next } else { Replayed::Gap };
        };
        if is_first {
            return match seq.cmp(&last.seq) {
                std::cmp::Ordering::Greater => Replayed::Beyond,
                std::cmp::Ordering::Equal if xxh3_128(payload) == last.digest => Replayed::Known,
                _ => Replayed::Stranger,
            };
        }
        match seq.cmp(&self.next()) {
            std::cmp::Ordering::Equal => Replayed::Next,
            std::cmp::Ordering::Greater => Replayed::Gap,
            std::cmp::Ordering::Less => Replayed::Duplicate,
        }
    }

    /// Whether a replay that gave nothing back fits the batches that were applied.
    pub(super) fn fits_nothing(&self) -> bool {
        self.last.is_none()
    }

    /// Notes that a batch has been applied.
    pub(super) fn applied(&mut self, seq: u64, payload: &[u8], by_replay: bool) {
        let digest = xxh3_128(payload);
        self.last = Some(Last { seq, digest });
        if by_replay {
            self.replayed = self.replayed.max(Some(seq));
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
        assert_eq!(continuity.published(0), Published::Next);
        continuity.applied(0, b"a", false);
        assert_eq!(continuity.published(2), Published::Gap);
        // The replay gives back what was missing, and more than has been published here yet.
        for seq in 1..=4 {
            continuity.applied(seq, b"x", true);
        }
        assert_eq!(continuity.published(3), Published::Duplicate);
        assert_eq!(continuity.published(4), Published::Duplicate);
        assert_eq!(continuity.published(5), Published::Next);
        continuity.applied(5, b"y", false);
        assert_eq!(continuity.published(5), Published::Backwards);
        assert_eq!(continuity.published(0), Published::Backwards);
    }

    #[test]
    fn who_begins_late_has_missed_something() {
        let mut continuity = Continuity::default();
        assert_eq!(continuity.published(7), Published::Gap);
        assert_eq!(Continuity::default().replayed(0, b"a", true), Replayed::Next);
        assert_eq!(Continuity::default().replayed(3, b"a", true), Replayed::Gap);
        assert!(Continuity::default().fits_nothing());
    }

    #[test]
    fn the_same_process_gives_back_the_same_batch() {
        let continuity = applied(&[(0, b"a"), (1, b"b")]);
        assert_eq!(continuity.replay_from(), 1);
        assert_eq!(continuity.replayed(1, b"b", true), Replayed::Known);
        assert_eq!(continuity.replayed(2, b"c", false), Replayed::Next);
        assert_eq!(continuity.replayed(3, b"d", false), Replayed::Gap);
        assert_eq!(continuity.replayed(1, b"b", false), Replayed::Duplicate);
    }

    #[test]
    fn another_process_does_not() {
        let continuity = applied(&[(0, b"a"), (1, b"b")]);
        assert_eq!(continuity.replayed(1, b"other", true), Replayed::Stranger);
        assert_eq!(continuity.replayed(0, b"a", true), Replayed::Stranger);
        assert_eq!(continuity.replayed(9, b"b", true), Replayed::Beyond);
        assert!(!continuity.fits_nothing());
        let mut continuity = continuity;
        continuity.reconnect();
        assert_eq!(continuity.published(0), Published::Backwards);
        continuity.restart();
        assert_eq!((continuity.has_begun(), continuity.replay_from()), (false, 0));
    }
}
