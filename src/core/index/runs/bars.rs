//! Bars of a run: marks that tell which of its blocks are not resumable, and for which holders. At a holder for which
//! a block is *barred*, a request cannot resume after this block.
//!
//! Usually a run has no bars: every block of every holder is resumable. Otherwise the run has one array of bars,
//! which is copied on write: each change publishes a new array. The array divides the run into stretches. For each
//! holder, the blocks of a stretch are either all barred or all resumable. The array has a row for each stretch:
//!
//! ```text
//! word 0          four numbers: of rows, of words in a set, of sets in an entry, of entries
//! then            indexes of the words that a set has; each such word has the bits of 64 slots
//! then entries    a set of barred holders for each step of tiers, or one set if all steps are alike
//! then rows       two in a word, each with the offset of its first block, and the number of its entry
//! ```
//!
//! Usually the rows refer to few different entries.
//!
//! Holders that share prompts usually have the same resumable blocks. So a search handles all of these holders with a
//! few operations on sets.

use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::index::directory::{HolderSlot, SlotBits};
use crate::words::word_at;

/// Number of cumulative tier steps: device only, device and host, all tiers.
pub(crate) const STEPS: usize = 3;
const WORDS_SHIFT: u32 = 16;
const SETS_SHIFT: u32 = 32;
const ENTRIES_SHIFT: u32 = 48;
/// Number of bits of a packed row. A row stands for a stretch of blocks that are barred alike. Its lowest
/// [`OFFSET_BITS`] bits are the offset of the first of these blocks.
const ROW_BITS: usize = 32;
const OFFSET_BITS: u32 = 16;
/// Number of earlier entries (stored sets of barred holders) with which the sets of a row are compared. If one of these
/// entries has the same sets, the row refers to it. Otherwise the row gets a new entry.
const ENTRIES_LIKE: usize = 4;

/// Distance between the guessed row and the rows that a search for a block's row looks at first. The search looks at
/// one row before the guessed row, and at one row after it.
const GUESSED: usize = 2;

/// Consecutive blocks of one holder that are not resumable in some of the [`STEPS`] tier steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Barred {
    pub(crate) from: u16,
    pub(crate) to: u16,
    pub(crate) steps: [bool; STEPS],
}

/// Bars of one run, as readers use them: marks of the blocks after which no request can resume, for each holder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bars<'g> {
    rows: usize,
    sets: usize,
    words: &'g [AtomicU64],
    entries: &'g [AtomicU64],
    packed: &'g [AtomicU64],
}

impl<'g> Bars<'g> {
    #[inline]
    pub(super) fn new(array: &'g [AtomicU64]) -> Self {
        let (head, rest) = (word_at(array, 0), array.get(1..).unwrap_or_default());
        let part = |shift: u32| (head >> shift & 0xffff) as usize;
        let (words, rest) = rest.split_at(rest.len().min(part(WORDS_SHIFT)));
        let (rows, sets) = (part(0), part(SETS_SHIFT));
        let (entries, packed) = rest.split_at(rest.len().min(part(ENTRIES_SHIFT) * sets * words.len()));
        Self {
            rows,
            sets,
            words,
            entries,
            packed,
        }
    }

    /// Whether every block of every holder is resumable.
    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.rows == 0
    }

    /// Returns row number `row`, packed, in the lowest 32 bits of the word. A row is a stretch of blocks that are
    /// barred alike.
    #[inline]
    fn row(self, row: usize) -> u64 {
        word_at(self.packed, row / 2) >> (row % 2 * ROW_BITS)
    }

    /// Returns the offset, in the run, of the first block of a row. A row is a stretch of blocks that are barred alike.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "an offset has 16 bits")]
    pub(crate) fn from(self, row: usize) -> u32 {
        (self.row(row) & 0xffff) as u32
    }

    /// Returns the set of holders for whom the blocks of a row are barred (not resumable) in the tiers of `step`. A row
    /// is a stretch of blocks that are barred alike.
    #[inline]
    fn set(self, row: usize, step: usize) -> &'g [AtomicU64] {
        let entry = (self.row(row) >> OFFSET_BITS & 0xffff) as usize;
        let set = entry * self.sets + step.min(self.sets.saturating_sub(1));
        let from = set * self.words.len();
        self.entries
            .get(from..from + self.words.len())
            .unwrap_or_default()
    }

    /// Returns the number of the row that contains the block at `offset`. A row is a stretch of blocks that are barred
    /// alike. `blocks` is the length of the run; it gives the first guess of the row.
    pub(crate) fn row_of(self, offset: u32, blocks: u16) -> usize {
        let (mut low, mut high) = (0, self.rows);
        // Mostly rows are spread evenly.
        let guess = offset as usize * self.rows / usize::from(blocks.max(1));
        let last = self.rows.saturating_sub(1);
        for near in [guess.saturating_sub(GUESSED), guess + GUESSED] {
            let near = near.min(last);
            match self.from(near) <= offset {
                true => low = low.max(near),
                false => high = high.min(near),
            }
        }
        while low + 1 < high {
            let middle = usize::midpoint(low, high);
            match self.from(middle) <= offset {
                true => low = middle,
                false => high = middle,
            }
        }
        low
    }

    /// Removes from `slots` the holders for whom the blocks of a row are resumable in the tiers of `step`. A row is a
    /// stretch of blocks that are barred alike. Returns the removed holders.
    #[inline]
    pub(super) fn take_free<S: SlotBits>(self, row: usize, step: u32, slots: &mut S) -> S {
        let mut free = std::mem::take(slots);
        slots.grow(free.words().len());
        for (number, bits) in self.words.iter().zip(self.set(row, step as usize)) {
            let number = usize::try_from(number.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
            let words = (
                slots.words_mut().get_mut(number),
                free.words_mut().get_mut(number),
            );
            if let (Some(barred), Some(free)) = words {
                let bits = bits.load(Ordering::Relaxed);
                *barred = *free & bits;
                *free &= !bits;
            }
        }
        free
    }
}

/// Row of a table of bars that is being changed: the offset of its first block, and the set of barred holders for each
/// tier step, as words.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    from: u16,
    sets: [SmallVec<[u64; 2]>; STEPS],
}

/// Unpacked form of a run's [`Bars`], in which a writer changes bars.
pub(super) struct Table {
    /// Numbers of the words that are stored for each set of holders. Word number n has the bits of 64 slots, from slot
    /// 64 n on. A word that is not stored is 0 in every set.
    words: SmallVec<[usize; 4]>,
    rows: Vec<Row>,
}

impl Table {
    /// Unpacks the [`Bars`] of a run.
    pub(super) fn of(bars: Bars<'_>) -> Self {
        let words: SmallVec<[usize; 4]> = bars
            .words
            .iter()
            .map(|word| usize::try_from(word.load(Ordering::Relaxed)).unwrap_or(0))
            .collect();
        let row = |row: usize| {
            let set = |step: usize| {
                let words = bars.set(row, step).iter();
                words.map(|word| word.load(Ordering::Relaxed)).collect()
            };
            Row {
                from: u16::try_from(bars.from(row)).unwrap_or(0),
                sets: std::array::from_fn(set),
            }
        };
        let rows: Vec<Row> = (0..bars.rows).map(row).collect();
        Self { words, rows }
    }

    /// Returns the place in `words` of the word that has the bit of `slot`. If that word is absent, adds it to `words`
    /// and to the sets of all rows.
    fn word_of(&mut self, slot: HolderSlot) -> usize {
        let number = slot.index() / 64;
        if let Some(word) = self.words.iter().position(|word| *word == number) {
            return word;
        }
        self.words.push(number);
        for set in self.rows.iter_mut().flat_map(|row| &mut row.sets) {
            set.push(0);
        }
        self.words.len() - 1
    }

    /// Number of separate stretches of blocks that are barred (not resumable) for the holder in `slot`.
    pub(super) fn stretches(&mut self, slot: HolderSlot) -> i64 {
        let (word, bit) = (self.word_of(slot), 1 << (slot.index() % 64));
        let is_barred = |row: &Row| row.sets.iter().any(|set| set[word] & bit != 0);
        let before = std::iter::once(false).chain(self.rows.iter().map(is_barred));
        let begins = before.zip(self.rows.iter().map(is_barred));
        begins.map(|(before, now)| i64::from(now && !before)).sum()
    }

    /// Removes all bars of the holder in `slot`, so that all its blocks of the run are resumable.
    pub(super) fn free(&mut self, slot: HolderSlot) {
        let (word, bit) = (self.word_of(slot), 1 << (slot.index() % 64));
        for set in self.rows.iter_mut().flat_map(|row| &mut row.sets) {
            set[word] &= !bit;
        }
    }

    /// Marks a stretch of blocks as barred (not resumable) for the holder in `slot`.
    pub(super) fn bar(&mut self, slot: HolderSlot, stretch: Barred) {
        let (word, bit) = (self.word_of(slot), 1 << (slot.index() % 64));
        let first = self.cut(stretch.from);
        let end = self.cut(stretch.to);
        for row in &mut self.rows[first..end] {
            for (set, _) in row
                .sets
                .iter_mut()
                .zip(stretch.steps)
                .filter(|(_, is_barred)| *is_barred)
            {
                set[word] |= bit;
            }
        }
    }

    /// Returns the number of the row that begins at `offset`. If no row begins there, first cuts the row that contains
    /// the offset in two.
    fn cut(&mut self, offset: u16) -> usize {
        if self.rows.is_empty() {
            let none: SmallVec<[u64; 2]> = self.words.iter().map(|_| 0).collect();
            let sets = std::array::from_fn(|_| none.clone());
            self.rows.push(Row { from: 0, sets });
        }
        let index = self.rows.partition_point(|row| row.from < offset);
        if self.rows.get(index).is_none_or(|row| row.from != offset)
            && let Some(before) = index.checked_sub(1)
        {
            let sets = self.rows[before].sets.clone();
            self.rows.insert(index, Row { from: offset, sets });
        }
        index
    }

    /// Returns the array of bars to publish, which is empty if no block is barred.
    pub(super) fn finish(mut self) -> Vec<u64> {
        self.rows.dedup_by(|next, before| next.sets == before.sets);
        let is_used = |word: usize| {
            self.rows
                .iter()
                .flat_map(|row| &row.sets)
                .any(|set| set[word] != 0)
        };
        let used: SmallVec<[usize; 4]> = (0..self.words.len()).filter(|word| is_used(*word)).collect();
        if used.is_empty() {
            return Vec::new();
        }
        let is_alike = self
            .rows
            .iter()
            .all(|row| row.sets.iter().all(|set| *set == row.sets[0]));
        let sets = if is_alike { 1 } else { STEPS };
        let width = sets * used.len();
        let (mut entries, mut packed) = (Vec::<u64>::new(), vec![0_u64; self.rows.len().div_ceil(2)]);
        for (number, row) in self.rows.iter().enumerate() {
            let cells = row.sets[..sets]
                .iter()
                .flat_map(|set| used.iter().map(|word| set[*word]));
            let known = entries.len() / width;
            let like = (known.saturating_sub(ENTRIES_LIKE)..known).find(|entry| {
                entries[entry * width..][..width]
                    .iter()
                    .copied()
                    .eq(cells.clone())
            });
            let entry = like.unwrap_or_else(|| {
                entries.extend(cells);
                known
            });
            let bits = u64::from(row.from) | (entry as u64) << OFFSET_BITS;
            packed[number / 2] |= bits << (number % 2 * ROW_BITS);
        }
        let head = [
            (self.rows.len(), 0),
            (used.len(), WORDS_SHIFT),
            (sets, SETS_SHIFT),
            (entries.len() / width, ENTRIES_SHIFT),
        ];
        let mut array = vec![
            head.into_iter()
                .fold(0, |head, (part, shift)| head | (part as u64) << shift),
        ];
        array.extend(used.iter().map(|word| self.words[*word] as u64));
        array.extend(entries);
        array.extend(packed);
        array
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_lab::random::Random;

    use super::*;
    use crate::index::directory::SlotSet;

    #[test]
    fn an_array_equals_a_model() {
        const BLOCKS: usize = 40;
        let mut random = Random::new(7);
        for slots in [1, 3, 64, 500] {
            let mut array: Vec<u64> = Vec::new();
            let mut model = vec![[[false; BLOCKS]; STEPS]; slots];
            for _ in 0..300 {
                let slot = random.below(slots);
                let mut stretches: Vec<Barred> = Vec::new();
                model[slot] = [[false; BLOCKS]; STEPS];
                let mut at = random.below(8);
                while random.chance(70) && at < BLOCKS {
                    let to = (at + 1 + random.below(6)).min(BLOCKS);
                    let device_only = random.chance(20);
                    let steps = [true, !device_only, !device_only];
                    for (step, is_barred) in steps.into_iter().enumerate() {
                        model[slot][step][at..to].fill(is_barred);
                    }
                    let [from, end] = [at, to].map(|offset| u16::try_from(offset).unwrap());
                    stretches.push(Barred { from, to: end, steps });
                    at = to + random.below(5);
                }
                let published: Vec<AtomicU64> = array.iter().copied().map(AtomicU64::new).collect();
                let mut table = Table::of(Bars::new(&published));
                let own = HolderSlot::new(slot).unwrap();
                table.free(own);
                stretches.iter().for_each(|stretch| table.bar(own, *stretch));
                array = table.finish();
                let published: Vec<AtomicU64> = array.iter().copied().map(AtomicU64::new).collect();
                let bars = Bars::new(&published);
                let is_free = model.iter().flatten().flatten().all(|is_barred| !is_barred);
                assert_eq!(bars.is_empty(), is_free);
                for offset in 0..if is_free { 0 } else { BLOCKS } {
                    // The length of the run may have changed, so the first guess of the row can be far off.
                    let blocks = [0, 1, 40, 1024][random.below(4)];
                    let row = bars.row_of(u32::try_from(offset).unwrap(), blocks);
                    for step in 0..STEPS {
                        let mut found = SlotSet::from_words(vec![u64::MAX; slots.div_ceil(64)].into_iter());
                        let free = bars.take_free(row, u32::try_from(step).unwrap(), &mut found);
                        for (slot, own) in model.iter().enumerate() {
                            let expected = own[step][offset];
                            let slot = HolderSlot::new(slot).unwrap();
                            assert_eq!((found.contains(slot), free.contains(slot)), (expected, !expected));
                        }
                    }
                }
            }
        }
    }
}
