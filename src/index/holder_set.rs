//! Sets of holders, by slot.

use smallvec::SmallVec;

/// A holder's place in the sets of one index: a small dense number, reused after the holder has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HolderSlot(u16);

impl HolderSlot {
    /// Most slots an index can have.
    pub(crate) const COUNT_MAX: usize = 1 << 16;

    /// The slot `index`, below [`Self::COUNT_MAX`].
    pub(crate) fn new(index: usize) -> Option<Self> {
        u16::try_from(index).ok().map(Self)
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    fn word(self) -> usize {
        self.index() / 64
    }

    fn bit(self) -> u64 {
        1 << (self.index() % 64)
    }
}

/// Slots that fit into an entry without an allocation of their own.
const INLINE_SLOTS: usize = 7;

/// The holders of one entry: a few inline, many as a bitmap on the heap. 16 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HolderSet {
    /// The first `count` of `slots`, sorted.
    Inline {
        count: u8,
        slots: [HolderSlot; INLINE_SLOTS],
    },
    /// One bit a slot. Boxed twice over so that an entry stays small: most entries have few holders.
    #[allow(clippy::box_collection, reason = "a thin pointer keeps the set at 16 bytes")]
    Bitmap(Box<Vec<u64>>),
}

impl Default for HolderSet {
    fn default() -> Self {
        Self::Inline {
            count: 0,
            slots: [HolderSlot(0); INLINE_SLOTS],
        }
    }
}

impl HolderSet {
    pub(crate) fn single(slot: HolderSlot) -> Self {
        let mut slots = [HolderSlot(0); INLINE_SLOTS];
        slots[0] = slot;
        Self::Inline { count: 1, slots }
    }

    /// Adds `slot`; says whether it is new.
    pub(crate) fn insert(&mut self, slot: HolderSlot) -> bool {
        match self {
            Self::Inline { count, slots } => {
                let used = usize::from(*count);
                let Err(place) = slots[..used].binary_search(&slot) else {
                    return false;
                };
                if used == INLINE_SLOTS {
                    let mut words = Vec::new();
                    for member in slots.iter().chain([&slot]) {
                        set_bit(&mut words, *member);
                    }
                    *self = Self::Bitmap(Box::new(words));
                } else {
                    slots.copy_within(place..used, place + 1);
                    slots[place] = slot;
                    *count += 1;
                }
                true
            }
            Self::Bitmap(words) => set_bit(words, slot),
        }
    }

    /// Takes `slot` out; says whether it was in.
    pub(crate) fn remove(&mut self, slot: HolderSlot) -> bool {
        match self {
            Self::Inline { count, slots } => {
                let used = usize::from(*count);
                let Ok(place) = slots[..used].binary_search(&slot) else {
                    return false;
                };
                slots.copy_within(place + 1..used, place);
                *count -= 1;
                true
            }
            Self::Bitmap(words) => {
                let Some(word) = words.get_mut(slot.word()) else {
                    return false;
                };
                let was_in = *word & slot.bit() != 0;
                *word &= !slot.bit();
                // Back to inline only at half the inline capacity, so that a set at the boundary does not flip-flop.
                if was_in && self.len() <= INLINE_SLOTS / 2 {
                    *self = self.to_inline();
                }
                was_in
            }
        }
    }

    fn to_inline(&self) -> Self {
        let mut slots = [HolderSlot(0); INLINE_SLOTS];
        let mut count = 0;
        for (place, slot) in slots.iter_mut().zip(self.to_slots().iter()) {
            *place = slot;
            count += 1;
        }
        Self::Inline { count, slots }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Inline { count, .. } => usize::from(*count),
            Self::Bitmap(words) => words.iter().map(|word| word.count_ones() as usize).sum(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn contains(&self, slot: HolderSlot) -> bool {
        match self {
            Self::Inline { count, slots } => slots[..usize::from(*count)].contains(&slot),
            Self::Bitmap(words) => words.get(slot.word()).is_some_and(|word| word & slot.bit() != 0),
        }
    }

    /// Whether all of `others` are in this set.
    pub(crate) fn contains_all(&self, others: &SlotSet) -> bool {
        match self {
            Self::Inline { .. } => others.iter().all(|slot| self.contains(slot)),
            Self::Bitmap(words) => {
                let ours = words.iter().chain(std::iter::repeat(&0));
                others
                    .words
                    .iter()
                    .zip(ours)
                    .all(|(theirs, ours)| theirs & !ours == 0)
            }
        }
    }

    /// What the set takes beside its own size, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Self::Inline { .. } => 0,
            Self::Bitmap(words) => size_of::<Vec<u64>>() + words.capacity() * size_of::<u64>(),
        }
    }

    /// The one member of a set that has no other.
    pub(crate) fn only(&self) -> Option<HolderSlot> {
        match self {
            Self::Inline { count: 1, slots } => Some(slots[0]),
            _ => None,
        }
    }

    /// The set as a working set of a search.
    pub(crate) fn to_slots(&self) -> SlotSet {
        match self {
            Self::Inline { count, slots } => slots[..usize::from(*count)].iter().copied().collect(),
            Self::Bitmap(words) => SlotSet {
                words: SmallVec::from_slice(words),
            },
        }
    }

    /// `candidates` that are in this set.
    pub(crate) fn intersection(&self, candidates: &SlotSet) -> SlotSet {
        match self {
            Self::Inline { count, slots } => slots[..usize::from(*count)]
                .iter()
                .copied()
                .filter(|slot| candidates.contains(*slot))
                .collect(),
            Self::Bitmap(words) => {
                let words = words
                    .iter()
                    .zip(&candidates.words)
                    .map(|(ours, theirs)| ours & theirs);
                SlotSet {
                    words: words.collect(),
                }
            }
        }
    }
}

fn set_bit(words: &mut Vec<u64>, slot: HolderSlot) -> bool {
    if words.len() <= slot.word() {
        words.resize(slot.word() + 1, 0);
    }
    let word = &mut words[slot.word()];
    let is_new = *word & slot.bit() == 0;
    *word |= slot.bit();
    is_new
}

/// A working set of a search: one bit a slot, up to 256 slots without an allocation.
#[derive(Debug, Clone, Default)]
pub(crate) struct SlotSet {
    words: SmallVec<[u64; 4]>,
}

impl SlotSet {
    pub(crate) fn insert(&mut self, slot: HolderSlot) {
        if self.words.len() <= slot.word() {
            self.words.resize(slot.word() + 1, 0);
        }
        self.words[slot.word()] |= slot.bit();
    }

    pub(crate) fn contains(&self, slot: HolderSlot) -> bool {
        self.words
            .get(slot.word())
            .is_some_and(|word| word & slot.bit() != 0)
    }

    pub(crate) fn remove(&mut self, slot: HolderSlot) {
        if let Some(word) = self.words.get_mut(slot.word()) {
            *word &= !slot.bit();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    pub(crate) fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The words of 64 slots each, from slot 0.
    pub(crate) fn words(&self) -> std::slice::Iter<'_, u64> {
        self.words.iter()
    }

    /// Adds all that are in `others`.
    pub(crate) fn unite(&mut self, others: &Self) {
        if self.words.len() < others.words.len() {
            self.words.resize(others.words.len(), 0);
        }
        for (ours, theirs) in self.words.iter_mut().zip(&others.words) {
            *ours |= theirs;
        }
    }

    /// Takes out all that are in `others`.
    pub(crate) fn subtract(&mut self, others: &Self) {
        for (ours, theirs) in self.words.iter_mut().zip(&others.words) {
            *ours &= !theirs;
        }
    }

    /// Keeps only those that are in `others`.
    pub(crate) fn intersect(&mut self, others: &Self) {
        self.words.truncate(others.words.len());
        for (ours, theirs) in self.words.iter_mut().zip(&others.words) {
            *ours &= theirs;
        }
    }

    /// The slots in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = HolderSlot> + '_ {
        self.words.iter().enumerate().flat_map(|(index, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let bit = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                HolderSlot::new(index * 64 + bit)
            })
        })
    }
}

impl FromIterator<HolderSlot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = HolderSlot>>(slots: I) -> Self {
        let mut set = Self::default();
        for slot in slots {
            set.insert(slot);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_set_stays_small() {
        assert_eq!(std::mem::size_of::<HolderSet>(), 16);
    }

    proptest! {
        #[test]
        fn a_set_equals_a_model(changes in proptest::collection::vec((any::<bool>(), 0_usize..300), 0..200)) {
            let mut model = BTreeSet::new();
            let mut set = HolderSet::single(HolderSlot(0));
            model.insert(0);
            for (insert, index) in changes {
                let slot = HolderSlot::new(index).unwrap();
                if insert {
                    prop_assert_eq!(set.insert(slot), model.insert(index));
                } else {
                    prop_assert_eq!(set.remove(slot), model.remove(&index));
                }
                prop_assert_eq!(set.len(), model.len());
                prop_assert_eq!(set.is_empty(), model.is_empty());
                let slots: Vec<usize> = set.to_slots().iter().map(HolderSlot::index).collect();
                prop_assert_eq!(slots, model.iter().copied().collect::<Vec<_>>());
            }
        }

        #[test]
        fn working_sets_intersect_and_subtract(
            ours in proptest::collection::btree_set(0_usize..200, 0..30),
            theirs in proptest::collection::btree_set(0_usize..200, 1..30),
        ) {
            let slots = |members: &BTreeSet<usize>| members.iter().filter_map(|m| HolderSlot::new(*m)).collect::<SlotSet>();
            let indices = |set: &SlotSet| set.iter().map(HolderSlot::index).collect::<BTreeSet<_>>();
            let mut entry = HolderSet::single(HolderSlot::new(*theirs.first().unwrap()).unwrap());
            for member in &theirs {
                entry.insert(HolderSlot::new(*member).unwrap());
            }
            let both: BTreeSet<usize> = &ours & &theirs;
            prop_assert_eq!(&indices(&entry.intersection(&slots(&ours))), &both);
            let mut set = slots(&ours);
            set.intersect(&slots(&theirs));
            prop_assert_eq!(indices(&set), both);
            prop_assert_eq!(entry.contains_all(&slots(&ours)), ours.is_subset(&theirs));
            prop_assert!(entry.contains_all(&set));
            let mut set = slots(&ours);
            set.subtract(&slots(&theirs));
            prop_assert_eq!(indices(&set), &ours - &theirs);
        }
    }
}
