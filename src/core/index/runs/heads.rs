//! Hash table of the runs, which readers use without a lock. The key of a run is the block that the run branches off,
//! together with the hash of the run's first block.
//!
//! A slot has a tag of 36 bits, which is a fingerprint of the key, and a run's number. The table consists of parts
//! that grow separately, so that no growth takes long. Entries never move within an array. So a search finds every
//! run that is in the table during the whole search.
//!
//! In addition to the table, there is a Bloom filter for runs at position 0. It has 131,072 bits and one hash function.
//! If the bit of a hash is not set, no run at position 0 begins with that hash. The bits usually stay in the
//! processor's caches. If no holder has a query's first block, the search usually ends at this filter.

use crate::epoch::Guard;

use super::{RunId, Spot};
use crate::ahead::prefetch;
use crate::mix::{fold, random_key};
use crate::sync::{AtomicU64, IS_MODEL, Ordering};
use crate::words::Words;

const PARTS: usize = if IS_MODEL { 1 } else { 256 };
/// Number of bits of a run's number in a slot of the table. The tag, a fingerprint of the run's key, is in the bits
/// above.
const RUN_BITS: u32 = 28;
const EMPTY: u64 = 0;
/// Tombstone: value of a slot whose run has been removed.
const GONE: u64 = u64::MAX;
const SLOTS_MIN: usize = if IS_MODEL { 2 } else { 8 };
/// Number of words of Bloom filter bits for each part of the table.
const BIT_WORDS: usize = if IS_MODEL { 1 } else { 8 };
/// Bound on the number of removed runs at position 0 whose Bloom filter bits are still set. In a part of the table, it
/// is the number of slots divided by this constant. Beyond the bound, the bits of the part are recomputed, which reads
/// every slot.
const SLOTS_PER_GONE: usize = 32;
/// Bit of a key's hash: set if the run begins at position 0. The tag and the slot that are made from the hash have the
/// same bit, so a slot tells whether its run begins at position 0.
const IS_FIRST: u64 = 1 << 63;

/// Hash table of the runs, in the form that readers use. Its keys are the block before a run and the hash of the run's
/// first block.
#[derive(Debug)]
pub(super) struct Heads {
    parts: Vec<Words>,
    /// Bits of the Bloom filter. A bit is set for each run at position 0 in the table, and for some runs that have
    /// been removed.
    bits: Vec<AtomicU64>,
    keys: [u64; 3],
}

/// Counts of the slots in one part of the table. Only the writer uses these counts.
#[derive(Debug, Clone, Copy, Default)]
struct PartCounts {
    /// Number of slots with a run.
    taken: u32,
    /// Number of slots that are not empty: each has a run or a tombstone.
    used: u32,
    /// Number of runs at position 0 that were removed since the filter bits were last recomputed.
    gone: u32,
}

/// Counts of the slots in all parts of the table. Only the writer uses these counts.
#[derive(Debug)]
pub(super) struct HeadCounts(Vec<PartCounts>);

impl Default for HeadCounts {
    fn default() -> Self {
        Self(vec![PartCounts::default(); PARTS])
    }
}

fn tag(hash: u64) -> u64 {
    hash >> RUN_BITS
}

/// Returns the home of a tag (fingerprint of a key): the slot where a search for the tag begins. `slots` is the number
/// of slots, a power of two.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "masked to the number of slots")]
fn home(tag: u64, slots: usize) -> usize {
    tag as usize & (slots - 1)
}

fn part_of(hash: u64) -> usize {
    // The part is chosen by the lowest bits of the hash, which the tag does not contain.
    home(hash, PARTS)
}

/// Returns the place of a tag's bit in the Bloom filter: the word within its part, and the bit in that word.
#[inline]
fn bit_of(tag: u64) -> (usize, u64) {
    (home(tag / 64, BIT_WORDS), 1 << (tag % 64))
}

impl Heads {
    pub(super) fn new() -> Self {
        Self {
            parts: (0..PARTS).map(|_| Words::default()).collect(),
            bits: (0..PARTS * BIT_WORDS).map(|_| AtomicU64::new(0)).collect(),
            keys: std::array::from_fn(|number| random_key(number as u64)),
        }
    }

    /// Returns the hash under which the table keeps a run. It is computed from `parent`, the block before the run, and
    /// from the fragment of the run's first hash.
    #[inline]
    pub(super) fn hash(&self, parent: Option<Spot>, fragment: u64) -> u64 {
        let first = if parent.is_none() { IS_FIRST } else { 0 };
        let parent = parent.map_or(0, Spot::bits);
        fold(fold(parent ^ self.keys[0], self.keys[1]) ^ fragment, self.keys[2]) & !IS_FIRST | first
    }

    /// Whether a run at position 0 may have this hash, according to the Bloom filter. Needs no guard.
    #[inline]
    pub(super) fn may_have_first(&self, hash: u64) -> bool {
        let (word, bit) = bit_of(tag(hash));
        self.bits[part_of(hash) * BIT_WORDS + word].load(Ordering::Acquire) & bit != 0
    }

    /// Prefetches the memory that [`Self::find`] reads first.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64, guard: &Guard) {
        let slots = self.parts[part_of(hash)].get(guard);
        probe(slots, tag(hash)).take(1).for_each(prefetch);
    }

    /// Calls `check` with each run that may be in the table under this hash, until `check` returns `Some`. Returns this
    /// value.
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

    /// Inserts `run`, which must be absent. Returns the table's growth in bytes.
    pub(super) fn insert(&self, counts: &mut HeadCounts, hash: u64, run: RunId, guard: &Guard) -> i64 {
        let part = part_of(hash);
        let PartCounts { taken, used, .. } = &mut counts.0[part];
        *taken += 1;
        let mut grown = 0;
        if (*used as usize + 1) * 4 > self.parts[part].get(guard).len() * 3 {
            grown = self.rebuild(part, *taken as usize * 2, guard);
            *used = *taken - 1;
        }
        if hash & IS_FIRST != 0 {
            let (word, bit) = bit_of(tag(hash));
            self.bits[part * BIT_WORDS + word].fetch_or(bit, Ordering::Release);
        }
        *used += u32::from(put(self.parts[part].get(guard), word_of(hash, run)));
        grown
    }

    /// Removes `run`. Returns the table's growth in bytes, which is 0 or negative.
    pub(super) fn remove(&self, counts: &mut HeadCounts, hash: u64, run: RunId, guard: &Guard) -> i64 {
        let part = part_of(hash);
        let slots = self.parts[part].get(guard);
        let is_it = |slot: &&AtomicU64| slot.load(Ordering::Relaxed) == word_of(hash, run);
        let mut behind = probe(slots, tag(hash)).skip_while(|slot| !is_it(slot));
        let Some(slot) = behind.next() else {
            return 0;
        };
        // If the next slot is empty, no search needs to go beyond this slot. Then it needs no tombstone.
        let is_last = behind.next().map(|next| next.load(Ordering::Relaxed)) == Some(EMPTY);
        slot.store(if is_last { EMPTY } else { GONE }, Ordering::Release);
        let counts = &mut counts.0[part];
        counts.taken -= 1;
        counts.used -= u32::from(is_last);
        counts.gone += u32::from(hash & IS_FIRST != 0);
        if counts.gone as usize * SLOTS_PER_GONE > slots.len() || counts.taken == 0 {
            counts.gone = 0;
            self.clear_bits(part, slots);
        }
        if counts.taken as usize * 8 >= slots.len() {
            return 0;
        }
        counts.used = counts.taken;
        self.rebuild(part, counts.taken as usize * 2, guard)
    }

    /// Recomputes the Bloom filter bits of one part of the table from the runs in it.
    fn clear_bits(&self, part: usize, slots: &[AtomicU64]) {
        let mut bits = [0; BIT_WORDS];
        let words = slots.iter().map(|slot| slot.load(Ordering::Relaxed));
        for word in words.filter(|word| word & IS_FIRST != 0 && *word != GONE) {
            let (word, bit) = bit_of(tag(word));
            bits[word] |= bit;
        }
        for (own, bits) in self.bits[part * BIT_WORDS..].iter().zip(bits) {
            own.store(bits, Ordering::Release);
        }
    }

    /// Copies the runs of a part to a new array with room for at least `wanted` slots, and publishes the array. If
    /// `wanted` is 0, the new array is empty. Returns the table's growth in bytes.
    fn rebuild(&self, part: usize, wanted: usize, guard: &Guard) -> i64 {
        let len = match wanted {
            0 => 0,
            wanted => wanted.next_power_of_two().max(SLOTS_MIN),
        };
        let (part, old) = (&self.parts[part], self.parts[part].get(guard));
        let fill = |next: &[AtomicU64]| {
            for slot in old {
                let word = slot.load(Ordering::Relaxed);
                if word != EMPTY && word != GONE {
                    put(next, word);
                }
            }
        };
        let before = part.replace(len, fill, guard);
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

/// Returns every slot of a part once, beginning with the slot where a search for `tag` begins.
#[inline]
fn probe(slots: &[AtomicU64], tag: u64) -> impl Iterator<Item = &AtomicU64> {
    (0..slots.len() as u64).map(move |step| &slots[home(tag + step, slots.len())])
}

/// Writes a word into the first slot that has no run, searching from the home slot of the word's tag on. Returns `true`
/// if that slot was empty, `false` if it had a tombstone.
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

#[cfg(test)]
mod tests {
    use kvatlas_lab::random::Random;

    use super::*;

    #[test]
    fn the_first_runs_that_are_there_have_their_bits_and_few_others() {
        let (heads, mut counts) = (Heads::new(), HeadCounts::default());
        let guard = crate::epoch::pin();
        let mut random = Random::new(3);
        let (mut there, mut elsewhere) = (Vec::new(), Vec::new());
        for number in 1..60_000 {
            let (hash, run) = (heads.hash(None, random.next()), RunId(number));
            heads.insert(&mut counts, hash, run, &guard);
            there.push((hash, run));
            // Runs at later positions have no bit.
            let after = Some(Spot { run, offset: 0 });
            let hash = heads.hash(after, random.next());
            heads.insert(&mut counts, hash, run, &guard);
            elsewhere.push((hash, run));
            if there.len() > 2000 {
                let (hash, run) = there.swap_remove(random.below(there.len()));
                heads.remove(&mut counts, hash, run, &guard);
            }
            if number % 5000 == 0 {
                assert!(there.iter().all(|(hash, _)| heads.may_have_first(*hash)));
            }
        }
        let others = (0..10_000).filter(|other| heads.may_have_first(heads.hash(None, *other)));
        // 2,000 of the runs at position 0 are left, out of 60,000. So about 2,000 of the 131,072 bits are set, and not
        // many more: the bits of removed runs are cleared from time to time.
        assert!((200..1500).contains(&others.count()));
        for (hash, run) in there.into_iter().chain(elsewhere) {
            heads.remove(&mut counts, hash, run, &guard);
        }
        assert!(heads.bits.iter().all(|bits| bits.load(Ordering::Relaxed) == 0));
    }
}
