//! The runs that go on after a block, by the first hash of each; read without a lock.
//!
//! A slot is a tag of 36 bits and a run's number. A table is cut into parts that grow one by one, so that no growth takes long.
//! Entries never move while a table lives: who is in it when a search begins, and still is when it ends, is found.

use std::sync::atomic::AtomicU8;

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
    /// How many bits of a tag say where its home is, of each part: to ask for that without waiting for the part's own length.
    home_bits: Vec<AtomicU8>,
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

#[allow(clippy::cast_possible_truncation, reason = "masked to the part's size")]
fn home(tag: u64, slots: usize) -> usize {
    tag as usize & (slots - 1)
}

#[allow(clippy::cast_possible_truncation, reason = "masked to the number of parts")]
fn part_of(hash: u64) -> usize {
    // These bits are not in the tag.
    (hash & (PARTS as u64 - 1)) as usize
}

impl Heads {
    pub(super) fn new() -> Self {
        Self {
            parts: (0..PARTS).map(|_| Words::default()).collect(),
            home_bits: (0..PARTS).map(|_| AtomicU8::new(0)).collect(),
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
        let part = part_of(hash);
        let slots = 1 << self.home_bits[part].load(Ordering::Relaxed);
        self.parts[part].prefetch_len(guard);
        self.parts[part].prefetch(home(tag(hash), slots), guard);
    }

    /// The run of this number for which `check` is true.
    #[inline]
    pub(super) fn find(
        &self,
        hash: u64,
        guard: &Guard,
        mut check: impl FnMut(RunId) -> bool,
    ) -> Option<RunId> {
        let slots = self.parts[part_of(hash)].get(guard);
        if slots.is_empty() {
            return None;
        }
        let tag = tag(hash);
        let mut place = home(tag, slots.len());
        for _ in 0..slots.len() {
            let slot = slots[place].load(Ordering::Acquire);
            if slot == EMPTY {
                return None;
            }
            if slot >> RUN_BITS == tag && slot != GONE {
                let run = run_of(slot);
                if check(run) {
                    return Some(run);
                }
            }
            place = (place + 1) & (slots.len() - 1);
        }
        None
    }

    /// Adds a run that is not there. Gives back by how many bytes the table has grown.
    pub(super) fn insert(&self, counts: &mut HeadCounts, hash: u64, run: RunId, guard: &Guard) -> i64 {
        let part = part_of(hash);
        let (taken, used) = &mut counts.0[part];
        let mut grown = 0;
        let slots = self.parts[part].get(guard).len();
        if (*used as usize + 1) * 4 > slots * 3 {
            grown = self.rebuild(part, (*taken as usize + 1) * 2, guard);
            *used = *taken;
        }
        let slots = self.parts[part].get(guard);
        *taken += 1;
        *used += u32::from(put(slots, tag(hash) << RUN_BITS | u64::from(run.0)));
        grown
    }

    /// Takes a run out. Gives back by how many bytes the table has grown, a negative number.
    pub(super) fn remove(&self, counts: &mut HeadCounts, hash: u64, run: RunId, guard: &Guard) -> i64 {
        let part = part_of(hash);
        let slots = self.parts[part].get(guard);
        let wanted = tag(hash) << RUN_BITS | u64::from(run.0);
        let mut place = if slots.is_empty() {
            0
        } else {
            home(tag(hash), slots.len())
        };
        for _ in 0..slots.len() {
            let slot = slots[place].load(Ordering::Relaxed);
            if slot == wanted {
                slots[place].store(GONE, Ordering::Release);
                let (taken, used) = &mut counts.0[part];
                *taken -= 1;
                if *taken as usize * 8 < slots.len() {
                    *used = *taken;
                    return self.rebuild(part, *taken as usize * 2, guard);
                }
                return 0;
            }
            if slot == EMPTY {
                break;
            }
            place = (place + 1) & (slots.len() - 1);
        }
        0
    }

    /// Moves the runs of a part to a table with room for `wanted` slots at least; to none where there are none.
    fn rebuild(&self, part: usize, wanted: usize, guard: &Guard) -> i64 {
        let old = self.parts[part].get(guard);
        let len = match wanted {
            0 => 0,
            wanted => wanted.next_power_of_two().max(SLOTS_MIN),
        };
        let next: Vec<_> = (0..len).map(|_| AtomicU64::new(EMPTY)).collect();
        for slot in old {
            let slot = slot.load(Ordering::Relaxed);
            if slot != EMPTY && slot != GONE {
                put(&next, slot);
            }
        }
        let bits = u8::try_from(len.checked_ilog2().unwrap_or(0)).unwrap_or(0);
        self.home_bits[part].store(bits, Ordering::Relaxed);
        let before = self.parts[part].replace(len, |index| next[index].load(Ordering::Relaxed), guard);
        (i64::try_from(len).unwrap_or(i64::MAX) - i64::try_from(before).unwrap_or(i64::MAX)) * 8
    }
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "the number is in the lowest 28 bits"
)]
fn run_of(slot: u64) -> RunId {
    RunId((slot & ((1 << RUN_BITS) - 1)) as u32)
}

/// Puts a word in its place; says whether that was empty before.
fn put(slots: &[AtomicU64], word: u64) -> bool {
    let mut place = home(word >> RUN_BITS, slots.len());
    loop {
        let slot = slots[place].load(Ordering::Relaxed);
        if slot == EMPTY || slot == GONE {
            slots[place].store(word, Ordering::Release);
            return slot == EMPTY;
        }
        place = (place + 1) & (slots.len() - 1);
    }
}
