//! Sets of holders, by slot.

/// A holder's place in the sets of one index: a small dense number, reused after the holder has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct HolderSlot(u16);

impl HolderSlot {
    /// Most slots an index can have.
    pub(crate) const COUNT_MAX: usize = 1 << 16;

    /// The slot `index`, below [`Self::COUNT_MAX`].
    pub(crate) fn new(index: usize) -> Option<Self> {
        u16::try_from(index).ok().map(Self)
    }

    pub(crate) fn from_bits(bits: u16) -> Self {
        Self(bits)
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
        for (place, slot) in slots.iter_mut().zip(self.to_slots::<SlotSet>().iter()) {
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
                others.words().zip(ours).all(|(theirs, ours)| theirs & !ours == 0)
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

    /// The set as a working set of a search.
    #[inline]
    pub(crate) fn to_slots<S: SlotBits>(&self) -> S {
        match self {
            Self::Inline { count, slots } => slots_of(slots[..usize::from(*count)].iter().copied()),
            Self::Bitmap(words) => S::from_words(words),
        }
    }

    /// `candidates` that are in this set.
    #[inline]
    pub(crate) fn intersection<S: SlotBits>(&self, candidates: &S) -> S {
        let mut both: S = self.to_slots();
        both.intersect(candidates);
        both
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

/// A working set of a search: one bit a slot. Searches come in one form for each kind of set.
pub(crate) trait SlotBits: Clone + Default {
    /// The slots of these words of 64 bits each, from slot 0; without those that this kind of set has no room for.
    fn from_words(words: &[u64]) -> Self;
    /// Adds a slot, unless this kind of set has no room for it.
    fn insert(&mut self, slot: HolderSlot);
    fn contains(&self, slot: HolderSlot) -> bool;
    fn is_empty(&self) -> bool;
    /// Adds all that are in `others`.
    fn unite(&mut self, others: &Self);
    /// Takes out all that are in `others`.
    fn subtract(&mut self, others: &Self);
    /// Keeps only those that are in `others`.
    fn intersect(&mut self, others: &Self);
}

/// The first 64 slots, all that most namespaces have. A set is in a register.
impl SlotBits for u64 {
    #[inline]
    fn from_words(words: &[u64]) -> Self {
        words.first().copied().unwrap_or_default()
    }

    #[inline]
    fn insert(&mut self, slot: HolderSlot) {
        if slot.word() == 0 {
            *self |= slot.bit();
        }
    }

    #[inline]
    fn contains(&self, slot: HolderSlot) -> bool {
        slot.word() == 0 && self & slot.bit() != 0
    }

    #[inline]
    fn is_empty(&self) -> bool {
        *self == 0
    }

    #[inline]
    fn unite(&mut self, others: &Self) {
        *self |= others;
    }

    #[inline]
    fn subtract(&mut self, others: &Self) {
        *self &= !others;
    }

    #[inline]
    fn intersect(&mut self, others: &Self) {
        *self &= others;
    }
}

/// Words of a working set that are in the set itself.
const INLINE_WORDS: usize = 4;

/// Any slots, up to 256 without an allocation.
#[derive(Debug, Clone)]
pub(crate) enum SlotSet {
    /// All of the words, so that what is done to a set takes no loop over as many as there happen to be.
    Inline([u64; INLINE_WORDS]),
    /// As many words as are needed.
    Heap(Vec<u64>),
}

impl Default for SlotSet {
    #[inline]
    fn default() -> Self {
        Self::Inline([0; INLINE_WORDS])
    }
}

impl SlotSet {
    /// The words of 64 slots each, from slot 0.
    #[inline]
    pub(crate) fn words(&self) -> std::slice::Iter<'_, u64> {
        match self {
            Self::Inline(words) => words.iter(),
            Self::Heap(words) => words.iter(),
        }
    }

    #[inline]
    fn words_mut(&mut self) -> &mut [u64] {
        match self {
            Self::Inline(words) => words,
            Self::Heap(words) => words,
        }
    }

    /// Changes each word by that of `others`, which is 0 where they have none.
    #[inline]
    fn combine(&mut self, others: &Self, change: impl Fn(&mut u64, u64)) {
        if let (Self::Inline(ours), Self::Inline(theirs)) = (&mut *self, others) {
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                change(ours, *theirs);
            }
            return;
        }
        let theirs = others.words().copied().chain(std::iter::repeat(0));
        for (ours, theirs) in self.words_mut().iter_mut().zip(theirs) {
            change(ours, theirs);
        }
    }

    /// As many words, at least.
    fn grow(&mut self, words: usize) {
        match self {
            Self::Inline(inline) if words > INLINE_WORDS => {
                let mut heap = Vec::with_capacity(words);
                heap.extend_from_slice(inline);
                heap.resize(words, 0);
                *self = Self::Heap(heap);
            }
            Self::Heap(heap) if words > heap.len() => heap.resize(words, 0),
            Self::Inline(_) | Self::Heap(_) => {}
        }
    }

    pub(crate) fn remove(&mut self, slot: HolderSlot) {
        if let Some(word) = self.words_mut().get_mut(slot.word()) {
            *word &= !slot.bit();
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.words().map(|word| word.count_ones() as usize).sum()
    }

    /// The slots in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = HolderSlot> + '_ {
        self.words().enumerate().flat_map(|(index, word)| {
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

impl SlotBits for SlotSet {
    #[inline]
    fn from_words(words: &[u64]) -> Self {
        if words.len() > INLINE_WORDS {
            return Self::Heap(words.to_vec());
        }
        let mut inline = [0; INLINE_WORDS];
        for (own, word) in inline.iter_mut().zip(words) {
            *own = *word;
        }
        Self::Inline(inline)
    }

    #[inline]
    fn insert(&mut self, slot: HolderSlot) {
        self.grow(slot.word() + 1);
        if let Some(word) = self.words_mut().get_mut(slot.word()) {
            *word |= slot.bit();
        }
    }

    #[inline]
    fn contains(&self, slot: HolderSlot) -> bool {
        let word = self.words().as_slice().get(slot.word());
        word.is_some_and(|word| word & slot.bit() != 0)
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.words().fold(0, |any, word| any | word) == 0
    }

    #[inline]
    fn unite(&mut self, others: &Self) {
        self.grow(others.words().len());
        self.combine(others, |ours, theirs| *ours |= theirs);
    }

    #[inline]
    fn subtract(&mut self, others: &Self) {
        self.combine(others, |ours, theirs| *ours &= !theirs);
    }

    #[inline]
    fn intersect(&mut self, others: &Self) {
        self.combine(others, |ours, theirs| *ours &= theirs);
    }
}

impl FromIterator<HolderSlot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = HolderSlot>>(slots: I) -> Self {
        slots_of(slots)
    }
}

/// The slots as a working set.
#[inline]
pub(crate) fn slots_of<S: SlotBits>(slots: impl IntoIterator<Item = HolderSlot>) -> S {
    let mut set = S::default();
    for slot in slots {
        set.insert(slot);
    }
    set
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
                let slots: Vec<usize> = set.to_slots::<SlotSet>().iter().map(HolderSlot::index).collect();
                prop_assert_eq!(slots, model.iter().copied().collect::<Vec<_>>());
            }
        }

        #[test]
        fn working_sets_intersect_and_subtract(
            ours in proptest::collection::btree_set(0_usize..200, 0..30),
            theirs in proptest::collection::btree_set(0_usize..200, 1..30),
            spread in 1_usize..4,
        ) {
            let slot = |member: &usize| HolderSlot::new(member * spread).unwrap();
            let slots = |members: &BTreeSet<usize>| members.iter().map(slot).collect::<SlotSet>();
            let indices = |set: &SlotSet| set.iter().map(|slot| slot.index() / spread).collect::<BTreeSet<_>>();
            let mut entry = HolderSet::single(slot(theirs.first().unwrap()));
            for member in &theirs {
                entry.insert(slot(member));
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
            let mut set = slots(&ours);
            set.unite(&slots(&theirs));
            prop_assert_eq!((set.len(), set.is_empty()), ((&ours | &theirs).len(), false));
            prop_assert_eq!(indices(&set), &ours | &theirs);
        }
    }
}
