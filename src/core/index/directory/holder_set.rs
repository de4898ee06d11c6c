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

/// A working set of a search: one bit a slot. Searches come in one form for each kind of set.
pub(crate) trait SlotBits: Clone + Default {
    /// The slots of these words of 64 bits each, from slot 0; without those that this kind of set has no room for.
    fn from_words(words: &[u64]) -> Self;
    /// The words of 64 slots each, from slot 0.
    fn words(&self) -> &[u64];
    /// Adds the slots of one word of 64, unless this kind of set has no room for them.
    fn insert_word(&mut self, word: usize, bits: u64);
    /// Adds all that are in `others`.
    fn unite(&mut self, others: &Self);
    /// Changes each word by that of `others`, which is 0 where they have none.
    fn combine(&mut self, others: &Self, change: impl Fn(&mut u64, u64));

    /// Takes out all that are in `others`.
    #[inline]
    fn subtract(&mut self, others: &Self) {
        self.combine(others, |ours, theirs| *ours &= !theirs);
    }

    /// Keeps only those that are in `others`.
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

/// The first 64 slots, all that most namespaces have. A set is in a register.
impl SlotBits for u64 {
    #[inline]
    fn from_words(words: &[u64]) -> Self {
        words.first().copied().unwrap_or_default()
    }

    #[inline]
    fn words(&self) -> &[u64] {
        std::slice::from_ref(self)
    }

    #[inline]
    fn insert_word(&mut self, word: usize, bits: u64) {
        if word == 0 {
            *self |= bits;
        }
    }

    #[inline]
    fn contains(&self, slot: HolderSlot) -> bool {
        slot.word() == 0 && self & slot.bit() != 0
    }

    #[inline]
    fn unite(&mut self, others: &Self) {
        *self |= others;
    }

    #[inline]
    fn combine(&mut self, others: &Self, change: impl Fn(&mut u64, u64)) {
        change(self, *others);
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
    #[inline]
    fn words_mut(&mut self) -> &mut [u64] {
        match self {
            Self::Inline(words) => words,
            Self::Heap(words) => words,
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
    fn words(&self) -> &[u64] {
        match self {
            Self::Inline(words) => words,
            Self::Heap(words) => words,
        }
    }

    #[inline]
    fn insert_word(&mut self, word: usize, bits: u64) {
        self.grow(word + 1);
        if let Some(own) = self.words_mut().get_mut(word) {
            *own |= bits;
        }
    }

    #[inline]
    fn unite(&mut self, others: &Self) {
        self.grow(others.words().len());
        self.combine(others, |ours, theirs| *ours |= theirs);
    }

    #[inline]
    fn combine(&mut self, others: &Self, change: impl Fn(&mut u64, u64)) {
        if let (Self::Inline(ours), Self::Inline(theirs)) = (&mut *self, others) {
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                change(ours, *theirs);
            }
            return;
        }
        let theirs = others.words().iter().copied().chain(std::iter::repeat(0));
        for (ours, theirs) in self.words_mut().iter_mut().zip(theirs) {
            change(ours, theirs);
        }
    }
}

impl FromIterator<HolderSlot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = HolderSlot>>(slots: I) -> Self {
        let mut set = SlotGatherer::new();
        slots.into_iter().for_each(|slot| set.insert(slot));
        set.finish()
    }
}

/// Adds slots to a set, cheaply where many of one word come one after the other.
#[derive(Debug)]
pub(crate) struct SlotGatherer<S> {
    set: S,
    word: usize,
    bits: u64,
}

impl<S: SlotBits> SlotGatherer<S> {
    #[inline]
    pub(crate) fn new() -> Self {
        Self {
            set: S::default(),
            word: 0,
            bits: 0,
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, slot: HolderSlot) {
        if slot.word() != self.word {
            self.set.insert_word(self.word, self.bits);
            (self.word, self.bits) = (slot.word(), 0);
        }
        self.bits |= slot.bit();
    }

    /// The set of all that were added.
    #[inline]
    pub(crate) fn finish(mut self) -> S {
        self.set.insert_word(self.word, self.bits);
        self.set
    }
}
