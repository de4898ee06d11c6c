//! Roster of one run: an entry for each holder that has any block of the run.
//!
//! The first few entries are stored in the run itself. The other entries are in a list, which begins with a summary
//! of all entries. Usually every holder of a run has all of the run's blocks that agree with a query. In this case
//! the summary is enough, and a search reads no entry. The list consists of:
//!
//! ```text
//! word 0           the numbers `words` and `least`
//! `words` words    a bit for each slot that has an entry
//! the rest         the entries that are not stored in the run itself
//! ```
//!
//! In each entry, the number of leading blocks over all tiers is at least `least`. With many entries, `least` may be
//! lower than the smallest of these numbers. The bits are left out if they would take much memory compared with the
//! entries.

use super::entry::RosterEntry;
use crate::index::directory::{HolderSlot, SlotBits};
use crate::index::hook::point;
use crate::sync::{AtomicU64, Ordering};
use crate::words::{LONG, copy};

/// Step of tiers to which `least` refers: all tiers. `least` is a lower bound on the number of leading blocks of every
/// holder of the run.
const STEP: u32 = 2;
const LEAST_MASK: u64 = 0xffff;
const WORDS_SHIFT: u32 = 16;
/// Maximum number of entries of a roster in which `least` is recomputed after the smallest entry has changed. `least`
/// is a lower bound on the number of leading blocks of every holder. In a longer roster it may be lower than necessary.
const FEW: usize = 256;
/// Number of entries that a list must have room for, for each word of bits in its summary. Otherwise the summary has no
/// bits. Every list has room for at least this many entries.
const ENTRIES_OF_WORD: usize = 4;

/// Holders of one run, with the number of blocks that each has: entries stored in the run itself, and entries in a
/// list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Roster<'g> {
    inline: &'g [AtomicU64],
    head: Option<&'g AtomicU64>,
    slots: &'g [AtomicU64],
    listed: &'g [AtomicU64],
}

#[inline]
fn entry(word: &AtomicU64) -> RosterEntry {
    RosterEntry::from_bits(word.load(Ordering::Acquire))
}

impl<'g> Roster<'g> {
    /// Makes the roster from the entries stored in the run (`inline`) and the entries in the list.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "no more than the list has")]
    pub(super) fn new(inline: &'g [AtomicU64], list: &'g [AtomicU64]) -> Self {
        let (head, rest) = list.split_at(list.len().min(1));
        let head = head.first();
        let words = head.map_or(0, |head| head.load(Ordering::Acquire) >> WORDS_SHIFT);
        let (slots, listed) = rest.split_at(rest.len().min(words as usize));
        Self {
            inline,
            head,
            slots,
            listed,
        }
    }

    /// Returns all holders of the run if, according to the summary, each of them has the first `blocks` blocks in the
    /// tiers of `step`. Otherwise returns `None`.
    #[inline]
    pub(crate) fn all<S: SlotBits>(self, step: u32, blocks: usize) -> Option<S> {
        let least = self.head?.load(Ordering::Acquire) & LEAST_MASK;
        let is_known = step == STEP && !self.slots.is_empty() && least >= blocks as u64;
        point();
        let slots = self.slots.iter();
        is_known.then(|| S::from_words(slots.map(|word| word.load(Ordering::Acquire))))
    }

    /// Returns all entries, including empty ones, in two lists. So a search can read each list in a loop of few
    /// instructions.
    #[inline]
    pub(crate) fn lists(self) -> [impl Iterator<Item = RosterEntry> + 'g; 2] {
        [self.inline, self.listed].map(|words| words.iter().map(entry))
    }

    /// Returns all entries that are not empty. Each entry was true at one instant, but different entries may be of
    /// different instants.
    #[inline]
    pub(crate) fn entries(self) -> impl Iterator<Item = RosterEntry> + 'g {
        let all = self.lists().into_iter().flatten();
        all.filter(|entry| !entry.is_none())
    }

    fn word(self, index: usize) -> Option<&'g AtomicU64> {
        let listed = || self.listed.get(index - self.inline.len());
        self.inline.get(index).or_else(listed)
    }

    /// Returns the entry at place `index`, or the empty entry (of no holder) beyond the end.
    pub(super) fn get(self, index: usize) -> RosterEntry {
        self.word(index).map_or(RosterEntry::default(), entry)
    }

    pub(super) fn places(self) -> usize {
        self.inline.len() + self.listed.len()
    }

    /// Returns the place of the first entry that satisfies `is_it`.
    pub(super) fn find(self, is_it: impl Fn(RosterEntry) -> bool) -> Option<usize> {
        (0..self.places()).find(|index| is_it(self.get(*index)))
    }

    /// Whether there is a list of entries and all entries in it are empty.
    pub(super) fn has_empty_list(self) -> bool {
        self.head.is_some() && self.listed.iter().all(|word| entry(word).is_none())
    }

    /// Returns the size of the larger list that is needed so that the entry of `slot` can be stored at `index`: the
    /// number of words of bits, and the number of entries. `None` if this list is large enough.
    pub(super) fn wanting(self, slot: HolderSlot, index: usize) -> Option<[usize; 2]> {
        let is_full = index >= self.places();
        let has_bits = self.slots.is_empty() || slot.index() < self.slots.len() * 64;
        if !is_full && has_bits {
            return None;
        }
        let others = self.entries().map(RosterEntry::slot);
        let words = others.fold(slot, Ord::max).index() / 64 + 1;
        let wide = words.next_power_of_two();
        let room = match is_full {
            // Long arrays have lengths that are powers of two. The next such length is enough.
            true if 1 + wide + 2 * self.listed.len() > LONG => {
                (2 + wide + self.listed.len()).next_power_of_two() - wide - 1
            }
            true => 2 * self.listed.len(),
            // If only bits are missing, the places beyond the last entry are not asked for again.
            false => self.used().max((index + 1).saturating_sub(self.inline.len())),
        };
        let room = room.max(ENTRIES_OF_WORD);
        let words = [wide, words]
            .into_iter()
            .find(|words| words * ENTRIES_OF_WORD <= room);
        Some([words.unwrap_or(0), room])
    }

    /// Number of places in the list up to the last one with an entry.
    fn used(self) -> usize {
        let last = self.listed.iter().rposition(|word| !entry(word).is_none());
        last.map_or(0, |last| last + 1)
    }

    /// Copies the entries of the list to the new array `list`, which is all 0. Also writes the summary of the new list,
    /// with `words` words of bits. The summary has one bit for each slot with an entry.
    pub(super) fn copy_to(self, list: &[AtomicU64], words: usize) {
        let Some(head) = list.first() else { return };
        head.store((words as u64) << WORDS_SHIFT, Ordering::Relaxed);
        let next = Roster::new(self.inline, list);
        copy(self.listed, next.listed);
        next.entries().for_each(|entry| next.mark(entry.slot(), true));
        next.sum_up(head);
    }

    /// Sets the roster entry of the holder in `slot`, at an existing place. An empty entry removes the holder's entry.
    pub(super) fn set(self, index: usize, slot: HolderSlot, next: RosterEntry) {
        let Some(word) = self.word(index) else { return };
        let before = entry(word);
        word.store(next.bits(), Ordering::Release);
        let Some(head) = self.head else { return };
        self.mark(slot, !next.is_none());
        let now = head.load(Ordering::Relaxed);
        let least = now & LEAST_MASK;
        let reach = u64::from(next.reach(STEP));
        if !next.is_none() && reach < least {
            head.store(now - least + reach, Ordering::Release);
        } else if !before.is_none() && u64::from(before.reach(STEP)) == least && self.places() <= FEW {
            self.sum_up(head);
        }
    }

    /// Sets or clears the bit of a slot in the list's summary. Does nothing if the list has no bits.
    fn mark(self, slot: HolderSlot, is_there: bool) {
        if let Some(word) = self.slots.get(slot.index() / 64) {
            let (bits, bit) = (word.load(Ordering::Relaxed), 1 << (slot.index() % 64));
            word.store(if is_there { bits | bit } else { bits & !bit }, Ordering::Release);
        }
    }

    fn sum_up(self, head: &AtomicU64) {
        let least = self.entries().map(|entry| entry.reach(STEP)).min();
        let words = (self.slots.len() as u64) << WORDS_SHIFT;
        head.store(words | u64::from(least.unwrap_or(0)), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvatlas_lab::random::Random;

    use super::*;
    use crate::index::directory::SlotSet;
    use crate::words::rounded;

    /// Roster entries of a run. The test changes them as a writer does.
    #[derive(Default)]
    struct Run {
        inline: [AtomicU64; 2],
        list: Vec<AtomicU64>,
    }

    impl Run {
        fn roster(&self) -> Roster<'_> {
            Roster::new(&self.inline, &self.list)
        }

        fn set(&mut self, slot: HolderSlot, entry: RosterEntry) {
            let own = self
                .roster()
                .find(|entry| !entry.is_none() && entry.slot() == slot);
            let index = own.or_else(|| self.roster().find(RosterEntry::is_none));
            let index = index.unwrap_or(self.roster().places());
            if let Some([words, room]) = self.roster().wanting(slot, index) {
                self.resize(words, room);
            }
            self.roster().set(index, slot, entry);
        }

        fn resize(&mut self, words: usize, room: usize) {
            let len = rounded(1 + words + room);
            let next: Vec<AtomicU64> = (0..len).map(|_| AtomicU64::new(0)).collect();
            self.roster().copy_to(&next, words);
            self.list = next;
        }
    }

    #[test]
    fn a_long_roster_has_a_few_words_for_each_holder() {
        let mut run = Run::default();
        let mut resized = 0;
        for index in 0..40_000 {
            let slot = HolderSlot::new(index).unwrap();
            if let Some([words, room]) = run.roster().wanting(slot, index) {
                run.resize(words, room);
                resized += 1;
            }
            let entry = RosterEntry::new(slot, [0, 0, 1], 1);
            run.roster().set(index, slot, entry);
            assert!(
                run.list.len() <= (index * 3).max(300),
                "{} for {index}",
                run.list.len()
            );
        }
        assert!(resized < 50, "{resized}");
        assert_eq!(run.roster().entries().count(), 40_000);
        assert!(run.roster().all::<SlotSet>(STEP, 1).is_some());
    }

    #[test]
    fn a_roster_equals_a_model() {
        let mut random = Random::new(11);
        let (mut answered, mut others) = (0, 0);
        for (slots, reaches) in [(3, 4), (60, 3), (60, 50), (300, 3), (9000, 3)] {
            let (mut run, mut model) = (Run::default(), BTreeMap::new());
            for _ in 0..3000 {
                let slot = HolderSlot::new(random.below(slots)).unwrap();
                let reach = u16::try_from(random.below(reaches)).unwrap();
                let entry = RosterEntry::new(slot, [0, 0, reach], reach.max(1));
                if random.chance(25) {
                    if model.remove(&slot).is_some() {
                        run.set(slot, RosterEntry::default());
                    }
                } else {
                    model.insert(slot, entry);
                    run.set(slot, entry);
                }
                let mut entries: Vec<RosterEntry> = run.roster().entries().collect();
                entries.sort_by_key(|entry| entry.slot());
                assert!(entries.iter().eq(model.values()));
                assert!(
                    run.list.len() <= (model.len() * 4).max(300),
                    "{} for {}",
                    run.list.len(),
                    model.len()
                );
                assert!(run.roster().all::<SlotSet>(1, 0).is_none());
                for blocks in 0..reaches {
                    let all = model
                        .values()
                        .all(|entry| usize::from(entry.reach(STEP)) >= blocks);
                    match run.roster().all::<SlotSet>(STEP, blocks) {
                        Some(found) => {
                            assert!(all);
                            let expected: SlotSet = model.keys().copied().collect();
                            let words = found.words().iter().chain(std::iter::repeat(&0));
                            assert!(
                                words
                                    .zip(expected.words())
                                    .all(|(found, expected)| found == expected)
                            );
                            assert!(found.words().len() >= expected.words().len());
                            answered += 1;
                        }
                        None => others += usize::from(all),
                    }
                }
            }
        }
        assert!(answered > 10_000 && others < answered, "{answered} and {others}");
    }
}
