//! The runs that go on after a block, by the first hash of each; read without a lock.
//!
//! A slot is a tag of 36 bits and a run's number. A table is cut into parts that grow one by one, so that no growth takes long.
//! Entries never move while a table lives: who is in it when a search begins, and still is when it ends, is found.

use crossbeam_epoch::Guard;

use super::words::Words;
use super::{RunId, Spot, fold, random_key};
use crate::sync::{AtomicU64, IS_MODEL, Ordering};

const PARTS: usize = if IS_MODEL { 1 } else { 256 };
/// Bits of a run's number in a slot; above it is the tag.
const RUN_BITS: u32 = 28;
const EMPTY: u64 = 0;
/// Was taken.
const GONE: u64 = u64::MAX;
const SLOTS_MIN: usize = if IS_MODEL { 2 } else { 8 };

/// The table as readers see it.
#[derive(Debug)]
pub(super) struct Heads {
    parts: Vec<Words>,
    keys: [u64; 3],
}

/// What only the writer knows: how many slots of each part are taken, and how many are not empty.
#[derive(Debug)]
pub(super) struct HeadCounts(Vec<(u32, u32)>);

impl Default for HeadCounts {
    fn default() -> Self {
        Self(vec![(0, 0); PARTS])
    }
}

fn tag(hash: u64) -> u64 {
    hash >> RUN_BITS
}

/// Where a tag belongs among so many slots, a power of two.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "masked to the number of slots")]
fn home(tag: u64, slots: usize) -> usize {
    tag as usize & (slots - 1)
}

fn part_of(hash: u64) -> usize {
    // These bits are not in the tag.
    home(hash, PARTS)
}

impl Heads {
    pub(super) fn new() -> Self {
        Self {
            parts: (0..PARTS).map(|_| Words::default()).collect(),
            keys: std::array::from_fn(|number| random_key(number as u64)),
        }
    }

    /// The number under which a run is kept that begins after `parent` with a block of this fragment.
    #[inline]
    pub(super) fn hash(&self, parent: Option<Spot>, fragment: u64) -> u64 {
        let parent = parent.map_or(0, Spot::bits);
        fold(fold(parent ^ self.keys[0], self.keys[1]) ^ fragment, self.keys[2])
    }

    /// Asks for the memory that [`Self::find`] looks at first.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64, guard: &Guard) {
        let slots = self.parts[part_of(hash)].get(guard);
        probe(slots, tag(hash)).take(1).for_each(super::prefetch);
    }

    /// What `check` gives for the first run of this number for which it gives something.
    #[inline]
    pub(super) fn find<T>(
        &self,
        hash: u64,
        guard: &Guard,
        mut check: impl FnMut(RunId) -> Option<T>,
    ) -> Option<T> {
        let tag = tag(hash);
        for slot in probe(self.parts[part_of(hash)].get(guard), tag) {
            let word = slot.load(Ordering::Acquire);
            if word == EMPTY {
                return None;
            }
            if word >> RUN_BITS == tag
                && word != GONE
                && let Some(found) = check(run_of(word))
            {
                return Some(found);
            }
        }
        None
    }

    /// Adds a run that is not there. Gives back by how many bytes the table has grown.
    pub(super) fn insert(&self, counts: &mut HeadCounts, hash: u64, run: RunId, guard: &Guard) -> i64 {
        let part = part_of(hash);
        let (taken, used) = &mut counts.0[part];
        *taken += 1;
        let mut grown = 0;
        if (*used as usize + 1) * 4 > self.parts[part].get(guard).len() * 3 {
            grown = self.rebuild(part, *taken as usize * 2, guard);
            *used = *taken - 1;
        }
        *used += u32::from(put(self.parts[part].get(guard), word_of(hash, run)));
        grown
    }

    /// Takes a run out that is there. Gives back by how many bytes the table has grown, a negative number.
    pub(super) fn remove(&self, counts: &mut HeadCounts, hash: u64, run: RunId, guard: &Guard) -> i64 {
        let part = part_of(hash);
        let slots = self.parts[part].get(guard);
        let is_it = |slot: &&AtomicU64| slot.load(Ordering::Relaxed) == word_of(hash, run);
        let mut behind = probe(slots, tag(hash)).skip_while(|slot| !is_it(slot));
        let Some(slot) = behind.next() else {
            return 0;
        };
        // Where nothing is behind it, no search has to go on from here.
        let is_last = behind.next().map(|next| next.load(Ordering::Relaxed)) == Some(EMPTY);
        slot.store(if is_last { EMPTY } else { GONE }, Ordering::Release);
        let (taken, used) = &mut counts.0[part];
        (*taken, *used) = (*taken - 1, *used - u32::from(is_last));
        if *taken as usize * 8 >= slots.len() {
            return 0;
        }
        *used = *taken;
        self.rebuild(part, *taken as usize * 2, guard)
    }

    /// Moves the runs of a part to a table with room for `wanted` slots at least; to none where there are none.
    fn rebuild(&self, part: usize, wanted: usize, guard: &Guard) -> i64 {
        let len = match wanted {
            0 => 0,
            wanted => wanted.next_power_of_two().max(SLOTS_MIN),
        };
        let next: Vec<_> = (0..len).map(|_| AtomicU64::new(EMPTY)).collect();
        for slot in self.parts[part].get(guard) {
            let word = slot.load(Ordering::Relaxed);
            if word != EMPTY && word != GONE {
                put(&next, word);
            }
        }
        let before = self.parts[part].replace(len, |index| next[index].load(Ordering::Relaxed), guard);
        (len.cast_signed() - before.cast_signed()) as i64 * 8
    }
}

fn word_of(hash: u64, run: RunId) -> u64 {
    tag(hash) << RUN_BITS | u64::from(run.0)
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "the number is in the lowest 28 bits"
)]
fn run_of(word: u64) -> RunId {
    RunId((word & ((1 << RUN_BITS) - 1)) as u32)
}

/// The slots from a tag's home on, each once.
#[inline]
fn probe(slots: &[AtomicU64], tag: u64) -> impl Iterator<Item = &AtomicU64> {
    (0..slots.len() as u64).map(move |step| &slots[home(tag + step, slots.len())])
}

/// Puts a word into the first slot from its home on that is not taken; says whether that was empty before.
fn put(slots: &[AtomicU64], word: u64) -> bool {
    for slot in probe(slots, word >> RUN_BITS) {
        let before = slot.load(Ordering::Relaxed);
        if before == EMPTY || before == GONE {
            slot.store(word, Ordering::Release);
            return before == EMPTY;
        }
    }
    false
}
