//! Publishers whose batches are dropped, so that their holders' blocks are not known. There are four reasons: there is
//! no room for the holders; their block size differs from the block size of the namespace; their messages cannot be
//! read; their subjects have a worker's name that is not accepted.
//!
//! A message that cannot be read does not tell its rank. So it can be of a rank without a holder, even if other ranks
//! of its worker have holders.

use std::borrow::Borrow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use serde::Serialize;

use crate::wire::{HolderId, Rank, WorkerName};

/// Maximum number of workers in the list of workers whose batches are dropped. Once so many are listed, further workers
/// may be refused without being listed.
const WORKERS_MAX: usize = 4096;
/// Maximum number of ranks of one worker that are listed separately because their batches are dropped. All other ranks
/// together count as one.
const RANKS_MAX: usize = 64;

/// Minimum time for which a message of a worker with holders counts after it could not be read, in microseconds. A
/// publisher sends something every second, so its next message comes within this time. If that message can be read,
/// its holder shows what was lost.
const UNREAD_US_MIN: u64 = 1_500_000;

/// Silence in microseconds after which one of two publishers of a holder counts as gone. Publishers send something every
/// second.
pub const SILENT_US: u64 = 3_000_000;

/// Holders of one namespace whose batches are dropped, so that their blocks are unknown. They count among the doubtful
/// holders of the namespace.
#[derive(Debug, Default)]
pub struct RefusedHolders {
    workers: RwLock<HashMap<RefusedName, RefusedWorker>>,
    /// Change counter. It is raised after a holder was added to the list or removed from it.
    changes: AtomicU64,
}

/// Name of the entry for messages that may be of any worker. No subject has such a name, because of the space.
const ANYBODY: &str = "any worker";

/// Maximum number of characters that are kept of a worker's name that is not accepted.
const NAME_CHARACTERS_MAX: usize = 64;

/// Name of a worker whose batches are dropped. Unlike a [`WorkerName`], it may have any printable character of ASCII,
/// because the batches may be dropped for their worker's name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct RefusedName(Box<str>);

impl RefusedName {
    /// Returns the name that a subject has in the place of a worker's name. Characters that are not printable become
    /// `?`. A text of more than 64 characters is cut, and ends with `...` then.
    pub fn in_subject(text: &str) -> Self {
        let printable = |character: char| match character.is_ascii_graphic() {
            true => character,
            false => '?',
        };
        let mut name: String = text.chars().take(NAME_CHARACTERS_MAX).map(printable).collect();
        if text.chars().nth(NAME_CHARACTERS_MAX).is_some() {
            // No worker can have such a name, because of the dots.
            name.push_str("...");
        }
        Self(name.into())
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&WorkerName> for RefusedName {
    fn from(name: &WorkerName) -> Self {
        Self(name.as_str().into())
    }
}

impl Borrow<str> for RefusedName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RefusedName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A worker whose batches are dropped, so that it has no holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RefusedPublisher {
    /// Name of the worker.
    pub worker: RefusedName,
    /// Reason why the last batch was dropped, as the word that metrics use.
    pub reason: &'static str,
    /// Time of the first dropped batch, in microseconds since the Unix epoch.
    pub since_us: u64,
}

/// Time at which a batch was dropped, on two clocks.
#[derive(Debug, Clone, Copy)]
pub struct RefusedAt {
    /// Time in microseconds, on a clock that does not run backwards.
    pub listened_us: u64,
    /// Time in microseconds since the Unix epoch.
    pub unix_us: u64,
}

/// Entry under which a worker's dropped batches are listed: one rank, or several together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RefusedRank {
    Rank(Rank),
    /// All ranks other than the first [`RANKS_MAX`] listed ones.
    Further,
    /// All batches that cannot be read, of a worker without a holder. Their ranks are not known.
    Unread,
    /// All batches that cannot be read, of a worker with holders. Any of them may be of a rank without a holder.
    UnreadBeside,
}

/// The dropped batches of a worker.
#[derive(Debug, Default)]
struct RefusedWorker {
    /// Time of the first dropped batch, in microseconds since the Unix epoch.
    since_us: u64,
    /// Reason why the last batch was dropped, in one word.
    reason: &'static str,
    /// Last dropped batch of each listed rank or group of ranks.
    last: BTreeMap<RefusedRank, LastDropped>,
}

/// Last dropped batch of a rank, or of a group of ranks.
#[derive(Debug, Clone, Copy)]
struct LastDropped {
    /// Time in microseconds, on a clock that does not run backwards.
    at_us: u64,
    /// Time for which the batch counts, in microseconds; `None` for as long as a silent holder is kept.
    kept_us: Option<u64>,
}

impl RefusedWorker {
    /// Returns the entry of a rank. The ranks beyond the first [`RANKS_MAX`] ones share an entry.
    fn part(&self, rank: Rank) -> RefusedRank {
        let part = RefusedRank::Rank(rank);
        let has_room = || self.last.range(..RefusedRank::Further).count() < RANKS_MAX;
        match self.last.contains_key(&part) || has_room() {
            true => part,
            false => RefusedRank::Further,
        }
    }
}

impl RefusedHolders {
    /// Records that a batch of an unregistered holder was dropped, so that the holder's blocks are not known. `reason`
    /// is the reason in one word. Returns whether this is the first dropped batch of the holder.
    pub fn note(&self, worker: &RefusedName, rank: Rank, reason: &'static str, at: RefusedAt) -> bool {
        self.note_part(worker, reason, at, None, |known| known.part(rank))
    }

    /// Records what [`Self::note`] does, of a publisher that may have ended. The record counts until the publisher would
    /// have been silent for [`SILENT_US`].
    pub fn note_briefly(&self, worker: &RefusedName, rank: Rank, reason: &'static str, at: RefusedAt) {
        self.note_part(worker, reason, at, Some(SILENT_US), |known| known.part(rank));
    }

    /// Records that a batch was dropped because it cannot be read. `has_holders` says whether the batch's worker has
    /// holders.
    pub fn note_unread(&self, worker: &RefusedName, has_holders: bool, reason: &'static str, at: RefusedAt) {
        let (part, kept_us) = match has_holders {
            true => (RefusedRank::UnreadBeside, Some(UNREAD_US_MIN)),
            false => (RefusedRank::Unread, None),
        };
        self.note_part(worker, reason, at, kept_us, |_| part);
    }

    /// Notes that a message was dropped that may be of any worker. It counts for every worker, until `UNREAD_US_MIN` has
    /// passed.
    pub fn note_anybody(&self, reason: &'static str, at: RefusedAt) {
        let (anybody, kept_us) = (RefusedName(ANYBODY.into()), Some(UNREAD_US_MIN));
        self.note_part(&anybody, reason, at, kept_us, |_| RefusedRank::UnreadBeside);
    }

    fn note_part(
        &self,
        worker: &RefusedName,
        reason: &'static str,
        at: RefusedAt,
        kept_us: Option<u64>,
        part: impl FnOnce(&RefusedWorker) -> RefusedRank,
    ) -> bool {
        let mut refused = self.workers.write();
        let has_room = refused.len() < WORKERS_MAX;
        let known = match refused.entry(worker.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if !has_room => return false,
            Entry::Vacant(place) => place.insert(RefusedWorker {
                since_us: at.unix_us,
                ..RefusedWorker::default()
            }),
        };
        let part = part(known);
        let is_lasting = |last: &LastDropped| last.kept_us.is_none() && kept_us.is_some();
        if known.last.get(&part).is_some_and(is_lasting) {
            // It is of another process, or of the same one. In both cases it says more.
            return false;
        }
        known.reason = reason;
        let at_us = at.listened_us;
        let is_first = known.last.insert(part, LastDropped { at_us, kept_us }).is_none();
        self.note_change(is_first)
    }

    /// Takes the holders of `other`, which another namespace of the same name had, in place of its own.
    pub(crate) fn adopt(&self, other: &Self) {
        let taken = std::mem::take(&mut *other.workers.write());
        let has_changed = !taken.is_empty();
        *self.workers.write() = taken;
        self.note_change(has_changed);
    }

    /// Forgets a holder that has left. Returns whether it was listed as a holder whose batches are dropped.
    pub fn forget(&self, worker: &RefusedName, rank: Rank) -> bool {
        self.remove(worker.as_str(), |part| part == RefusedRank::Rank(rank)) > 0
    }

    /// Forgets the dropped batches of one rank of a worker, or of all its ranks. Returns the number of entries that were
    /// listed.
    pub fn forget_all(&self, worker: &WorkerName, rank: Option<Rank>) -> u64 {
        let is_meant = |part: RefusedRank| rank.is_none_or(|rank| part == RefusedRank::Rank(rank));
        self.remove(worker.as_str(), is_meant)
    }

    /// Forgets the dropped batches of a holder that has been registered. Also forgets the unreadable batches of a
    /// worker that had no holder. If they are recent, the caller notes them again, as batches of a worker with holders.
    pub(crate) fn forget_registered(&self, id: &HolderId) {
        let parts = [RefusedRank::Rank(id.rank), RefusedRank::Unread];
        self.remove(id.worker.as_str(), |part| parts.contains(&part));
    }

    /// Forgets each holder whose last dropped batch is too old at `now_us`. Returns whether any holder was forgotten.
    ///
    /// Batches that count for a time of their own are forgotten after this time, and `step_us` for the steps in which the
    /// clock is read. All others are forgotten after `kept_us`. `None` means never.
    pub fn expire(&self, now_us: u64, step_us: u64, kept_us: Option<u64>) -> bool {
        if self.workers.read().is_empty() {
            return false;
        }
        let mut refused = self.workers.write();
        let mut has_changed = false;
        refused.retain(|_, known| {
            let before = known.last.len();
            known.last.retain(|_, last| {
                let kept_us = last.kept_us.map(|own_us| own_us + step_us).or(kept_us);
                let silent_us = now_us.saturating_sub(last.at_us);
                kept_us.is_none_or(|kept_us| silent_us <= kept_us)
            });
            has_changed |= known.last.len() < before;
            !known.last.is_empty()
        });
        if refused.is_empty() {
            *refused = HashMap::new();
        }
        self.note_change(has_changed)
    }

    /// Number of holders of `workers`, or of all workers if `None`, whose batches are dropped. If the list of refused
    /// workers is full, some refused workers may be missing in it. The number is then at least 1, as it is after a
    /// message that may be of any worker.
    pub fn count(&self, workers: Option<&[WorkerName]>) -> usize {
        let refused = self.workers.read();
        if refused.is_empty() {
            return 0;
        }
        let anybody = usize::from(refused.contains_key(ANYBODY));
        let holders = match workers {
            None => refused.values().map(|known| known.last.len()).sum::<usize>() - anybody,
            Some(workers) => {
                let workers: HashSet<_> = workers.iter().collect();
                let known = workers.iter().filter_map(|worker| refused.get(worker.as_str()));
                known.map(|known| known.last.len()).sum()
            }
        };
        holders.max(anybody).max(refused.len() / WORKERS_MAX)
    }

    /// Returns the first `max` refused workers, in the order of their names.
    pub fn named(&self, max: usize) -> Vec<RefusedPublisher> {
        let refused = self.workers.read();
        let known = refused.iter().map(|(name, known)| RefusedPublisher {
            worker: name.clone(),
            reason: known.reason,
            since_us: known.since_us,
        });
        let mut named: Vec<_> = known.collect();
        named.sort_unstable_by(|one, other| one.worker.cmp(&other.worker));
        named.truncate(max);
        named
    }

    /// Returns the value of the change counter.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    fn note_change(&self, has_changed: bool) -> bool {
        self.changes.fetch_add(u64::from(has_changed), Ordering::Release);
        has_changed
    }

    /// Removes the entries of a worker for which `is_meant` holds from the list of dropped batches. Returns their number.
    fn remove(&self, worker: &str, is_meant: impl Fn(RefusedRank) -> bool) -> u64 {
        if !self.workers.read().contains_key(worker) {
            return 0;
        }
        let mut refused = self.workers.write();
        let Some(known) = refused.get_mut(worker) else {
            return 0;
        };
        let before = known.last.len();
        known.last.retain(|part, _| !is_meant(*part));
        let removed = before - known.last.len();
        if known.last.is_empty() {
            refused.remove(worker);
        }
        self.note_change(removed > 0);
        removed as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(number: usize) -> WorkerName {
        WorkerName::new(&format!("gpu-{number}")).unwrap()
    }

    fn name(number: usize) -> RefusedName {
        RefusedName::from(&worker(number))
    }

    fn id(rank: Rank) -> HolderId {
        HolderId {
            worker: worker(0),
            rank,
        }
    }

    fn at(now_us: u64) -> RefusedAt {
        RefusedAt {
            listened_us: now_us,
            unix_us: 1000 + now_us,
        }
    }

    #[test]
    fn many_ranks_of_one_worker_take_no_room_of_others() {
        let refused = RefusedHolders::default();
        for rank in 0..10_000 {
            refused.note(&name(0), rank, "undecodable", at(u64::from(rank)));
        }
        assert_eq!(refused.count(None), RANKS_MAX + 1);
        assert!(refused.note(&name(1), 0, "undecodable", at(1)));
        let of = |workers: &[usize]| {
            let workers: Vec<_> = workers.iter().map(|number| worker(*number)).collect();
            refused.count(Some(&workers))
        };
        assert_eq!(of(&[2]), 0, "nothing of it was dropped");
        let first = RefusedPublisher {
            worker: name(0),
            reason: "undecodable",
            since_us: 1000,
        };
        assert_eq!(refused.named(1), [first], "since its first batch");
        assert_eq!(refused.named(9).len(), 2);
        assert_eq!((of(&[1]), of(&[1, 1])), (1, 1));
        // The ranks that are listed together are not forgotten one by one, only after all of them have been silent for
        // too long.
        for rank in 0..10_000 {
            refused.forget_registered(&id(rank));
        }
        assert_eq!(of(&[0]), 1);
        assert!(refused.expire(10_000, 0, Some(0)));
        assert_eq!(refused.count(None), 0);
    }

    #[test]
    fn as_many_workers_are_known_as_there_is_room_for() {
        let refused = RefusedHolders::default();
        for number in 0..WORKERS_MAX + 10 {
            assert_eq!(
                refused.note(&name(number), 0, "undecodable", at(number as u64)),
                number < WORKERS_MAX
            );
        }
        assert_eq!(refused.count(None), WORKERS_MAX);
        let last = [worker(WORKERS_MAX + 9)];
        assert_eq!(refused.count(Some(&last)), 1, "it may be");
        // A worker that has another batch dropped later stays longer.
        assert!(!refused.note(&name(3), 0, "undecodable", at(1_000_000)));
        assert!(refused.expire(2010, 0, Some(10)));
        assert!(!refused.expire(2010, 0, Some(10)));
        assert_eq!(refused.count(None), WORKERS_MAX - 1999);
        assert_eq!(refused.count(Some(&[worker(3), worker(1999)])), 1);
        assert_eq!(refused.count(Some(&last)), 0);
        assert!(!refused.expire(u64::MAX, 0, None));
        assert!(refused.expire(u64::MAX, 0, Some(10)));
        assert_eq!(refused.count(None), 0);
    }

    #[test]
    fn what_cannot_be_read_is_the_doubt_of_the_workers_next_holder() {
        let refused = RefusedHolders::default();
        refused.note_unread(&name(0), false, "undecodable", at(1));
        let changes = refused.changes();
        refused.note_unread(&name(0), false, "undecodable", at(2));
        assert_eq!(refused.changes(), changes);
        assert!(refused.note(&name(0), 1, "undecodable", at(2)));
        assert_eq!(refused.count(None), 2);
        assert!(!refused.forget(&name(0), 0) && refused.forget(&name(0), 1) && !refused.forget(&name(0), 1));
        assert_eq!(refused.count(None), 1);
        refused.forget_registered(&id(0));
        assert_eq!(refused.count(None), 0);
    }

    #[test]
    fn what_cannot_be_read_beside_a_holder_is_doubtful_until_the_next_message_is_due() {
        let refused = RefusedHolders::default();
        let (step_us, last_us) = (500_000, 9_000_000);
        refused.note_unread(&name(0), true, "undecodable", at(8_000_000));
        refused.note_unread(&name(0), true, "undecodable", at(last_us));
        refused.note_unread(&name(1), false, "undecodable", at(last_us));
        // The holder of another rank says nothing of the rank that cannot be read.
        refused.forget_registered(&id(0));
        assert!(!refused.expire(last_us + 2_000_000, step_us, None));
        assert_eq!(refused.count(None), 2);
        assert!(refused.expire(last_us + 2_000_001, step_us, None));
        assert_eq!(refused.count(Some(&[worker(0)])), 0);
        assert_eq!(refused.count(None), 1, "a worker without a holder");
    }

    #[test]
    fn who_may_have_ended_is_doubtful_until_its_silence_shows_it() {
        let refused = RefusedHolders::default();
        refused.note_briefly(&name(0), 3, "stale_epoch", at(7));
        assert!(!refused.expire(8 + SILENT_US, 1, None));
        assert_eq!(refused.count(Some(&[worker(0)])), 1);
        assert!(refused.expire(9 + SILENT_US, 1, None));
        assert_eq!(refused.count(None), 0);
        refused.note_briefly(&name(0), 3, "stale_epoch", at(7));
        refused.forget_registered(&id(3));
        assert_eq!(refused.count(None), 0, "it has a holder now");
        refused.note(&name(0), 3, "other_settings", at(7));
        refused.note_briefly(&name(0), 3, "stale_epoch", at(8));
        assert!(
            !refused.expire(9 + SILENT_US, 0, None),
            "another process may go on"
        );
        assert_eq!(refused.named(1)[0].reason, "other_settings");
    }

    #[test]
    fn what_an_operator_names_is_forgotten() {
        let refused = RefusedHolders::default();
        for rank in [0, 1, 2] {
            refused.note(&name(0), rank, "other_settings", at(1));
        }
        refused.note_unread(&name(0), true, "undecodable", at(1));
        refused.note(&name(1), 0, "other_settings", at(1));
        assert_eq!(refused.forget_all(&worker(0), Some(1)), 1);
        assert_eq!(refused.forget_all(&worker(0), Some(1)), 0);
        assert_eq!(refused.forget_all(&worker(0), None), 3);
        assert_eq!(refused.count(None), 1);
    }

    #[test]
    fn what_may_be_of_anybody_counts_for_each_worker_until_its_next_message_is_due() {
        let refused = RefusedHolders::default();
        refused.note_anybody("undecodable", at(5));
        refused.note_anybody("undecodable", at(6));
        assert_eq!(
            (refused.count(None), refused.count(Some(&[worker(7), worker(8)]))),
            (1, 1)
        );
        refused.forget_registered(&id(0));
        assert_eq!(refused.count(Some(&[worker(0)])), 1);
        assert!(refused.expire(7 + UNREAD_US_MIN, 0, None));
        assert_eq!(refused.count(Some(&[worker(0)])), 0);
    }

    #[test]
    fn a_name_that_no_worker_may_have_is_kept_short_and_printable() {
        let in_subject = |text: &str| RefusedName::in_subject(text).to_string();
        assert_eq!(in_subject("gpu-0"), "gpu-0");
        assert_eq!(in_subject("gpu:0"), "gpu:0");
        assert_eq!(in_subject(""), "");
        assert_eq!(in_subject("a\u{1b}[2J\u{e9}"), "a?[2J?");
        let longest = "x".repeat(NAME_CHARACTERS_MAX);
        assert_eq!(in_subject(&longest), longest);
        assert_eq!(in_subject(&format!("{longest}yz")), format!("{longest}..."));
    }

    #[test]
    fn a_worker_of_a_name_that_is_accepted_later_is_the_same() {
        let refused = RefusedHolders::default();
        for text in ["gpu-0", "gpu:0"] {
            refused.note_unread(&RefusedName::in_subject(text), false, "bad_subject", at(1));
        }
        assert_eq!(refused.count(None), 2);
        assert_eq!(refused.count(Some(&[worker(0)])), 1);
        refused.forget_registered(&id(0));
        let left: Vec<_> = refused.named(9).into_iter().map(|known| known.worker).collect();
        assert_eq!(left, [RefusedName::in_subject("gpu:0")]);
    }
}
