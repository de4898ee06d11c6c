//! Sets of holders, each holder given by its slot: its small number in the index.

use smallvec::SmallVec;

/// Small number that identifies a holder in one index and in sets of holders. It is reused after the holder has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct HolderSlot(u16);

impl HolderSlot {
    /// Returns the slot with the number `index`. `None` if `index` is 65,536 or more.
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

/// Set of holders in a search: one bit for each slot (a holder's number). Search code is compiled separately for each
/// kind of set.
pub(crate) trait SlotBits: Clone + Default {
    /// Whether this kind of set has room only for the first 64 slots.
    const IS_WORD: bool;

    /// Returns the words of the set. Each word has the bits of 64 slots, from slot 0 on.
    fn words(&self) -> &[u64];
    fn words_mut(&mut self) -> &mut [u64];
    /// Makes room for `words` words of 64 slots each, if this kind of set can have so many words.
    fn grow(&mut self, words: usize);

    /// Makes the set of the slots in these words. Leaves out slots for which this kind of set has no room.
    #[inline]
    fn from_words(words: impl ExactSizeIterator<Item = u64>) -> Self {
        let mut set = Self::default();
        set.grow(words.len());
        for (own, word) in set.words_mut().iter_mut().zip(words) {
            *own = word;
        }
        set
    }

    /// Adds the slots in `bits`, which are the 64 slots of word number `word`. Does nothing if this kind of set has
    /// no room for that word.
    #[inline]
    fn insert_word(&mut self, word: usize, bits: u64) {
        self.grow(word + 1);
        if let Some(own) = self.words_mut().get_mut(word) {
            *own |= bits;
        }
    }

    /// Calls `change` on each word, with the word of `others` at the same place, or 0 if `others` has none there.
    #[inline]
    fn combine(&mut self, others: &Self, change: impl Fn(&mut u64, u64)) {
        let theirs = others.words().iter().copied().chain(std::iter::repeat(0));
        for (ours, theirs) in self.words_mut().iter_mut().zip(theirs) {
            change(ours, theirs);
        }
    }

    /// Adds all slots that are in `others`.
    #[inline]
    fn unite(&mut self, others: &Self) {
        self.grow(others.words().len());
        self.combine(others, |ours, theirs| *ours |= theirs);
    }

    /// Removes all slots that are in `others`.
    #[inline]
    fn subtract(&mut self, others: &Self) {
        self.combine(others, |ours, theirs| *ours &= !theirs);
    }

    /// Keeps only the slots that are in `others`.
    #[inline]
    fn intersect(&mut self, others: &Self) {
        self.combine(others, |ours, theirs| *ours &= theirs);
    }

    /// Adds a slot, unless this kind of set has no room for it.
    #[inline]
    fn insert(&mut self, slot: HolderSlot) {
        self.insert_word(slot.word(), slot.bit());
    }

    #[inline]
    fn contains(&self, slot: HolderSlot) -> bool {
        let word = self.words().get(slot.word());
        word.is_some_and(|word| word & slot.bit() != 0)
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.words().iter().fold(0, |any, word| any | word) == 0
    }
}

/// Set of the first 64 slots. Most namespaces have no further slots. The set fits in a register.
impl SlotBits for u64 {
    const IS_WORD: bool = true;

    #[inline]
    fn words(&self) -> &[u64] {
        std::slice::from_ref(self)
    }

    #[inline]
    fn words_mut(&mut self) -> &mut [u64] {
        std::slice::from_mut(self)
    }

    #[inline]
    fn grow(&mut self, _: usize) {}
}

/// Set of any slots. Up to 256 slots it needs no allocation.
#[derive(Debug, Clone, Default)]
pub(crate) struct SlotSet(SmallVec<[u64; 4]>);

impl SlotSet {
    pub(crate) fn remove(&mut self, slot: HolderSlot) {
        if let Some(word) = self.0.get_mut(slot.word()) {
            *word &= !slot.bit();
        }
    }
}

impl SlotBits for SlotSet {
    const IS_WORD: bool = false;

    #[inline]
    fn words(&self) -> &[u64] {
        &self.0
    }

    #[inline]
    fn words_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }

    #[inline]
    fn grow(&mut self, words: usize) {
        if words > self.0.len() {
            self.0.resize(words, 0);
        }
    }
}

impl FromIterator<HolderSlot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = HolderSlot>>(slots: I) -> Self {
        let mut set = SlotGatherer::default();
        slots.into_iter().for_each(|slot| set.insert(slot));
        set.finish()
    }
}

/// Collector of slots, which makes a set of them. Adding is cheap if consecutive slots mostly lie in the same word of
/// the set.
#[derive(Debug, Default)]
pub(crate) struct SlotGatherer<S> {
    set: S,
    word: usize,
    bits: u64,
}

impl<S: SlotBits> SlotGatherer<S> {
    #[inline]
    pub(crate) fn insert(&mut self, slot: HolderSlot) {
        if S::IS_WORD {
            self.bits |= if slot.word() == 0 { slot.bit() } else { 0 };
            return;
        }
        if slot.word() != self.word {
            self.set.insert_word(self.word, self.bits);
            (self.word, self.bits) = (slot.word(), 0);
        }
        self.bits |= slot.bit();
    }

    /// Returns the set of all slots that were added.
    #[inline]
    pub(crate) fn finish(mut self) -> S {
        self.set.insert_word(self.word, self.bits);
        self.set
    }
}
