//! One run, as readers see it.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crossbeam_epoch::{Guard, Owned, Pointable};

use crate::hash::{Position, PositionalLineageHash, SequenceHash};

use super::cover_word::CoverWord;
use super::coverage::{Cover, View};
use super::few::Packed;

/// Most blocks of one run; a longer sequence goes on in a child.
pub(crate) const RUN_BLOCKS_MAX: usize = 4096;

/// What a block is found by: position, sequence hash (or the fragment of it that is known), and the parent's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockKey {
    pub(crate) position: u32,
    pub(crate) current: u64,
    /// None at position 0, and where any parent will do.
    pub(crate) parent: Option<u64>,
}

impl BlockKey {
    /// Whether `current` is this block's hash, as far as a lineage hash at its position keeps it.
    #[inline]
    pub(crate) fn is_current(&self, current: u64) -> bool {
        (self.current ^ current) & current_mask(self.position) == 0
    }

    /// Whether `parent` is the hash of the block before it, as far as a lineage hash keeps it.
    #[inline]
    pub(super) fn is_parent(&self, parent: u64) -> bool {
        self.parent
            .is_none_or(|own| (own ^ parent) & current_mask(self.position.wrapping_sub(1)) == 0)
    }
}

impl From<PositionalLineageHash> for BlockKey {
    fn from(key: PositionalLineageHash) -> Self {
        let position = Position::from(key).as_u32();
        Self {
            position,
            current: key.current_hash_fragment(),
            parent: (position > 0).then(|| key.parent_hash_fragment()),
        }
    }
}

impl From<BlockKey> for PositionalLineageHash {
    fn from(key: BlockKey) -> Self {
        // Positions of stored blocks have been checked.
        let position = Position::new(u64::from(key.position)).unwrap_or(Position::MAX);
        let parent = SequenceHash(key.parent.unwrap_or_default());
        Self::at(position, parent, SequenceHash(key.current))
    }
}

/// Whether two sequence hashes, or fragments of them, are of one block at `position`, as far as a lineage hash can tell.
#[inline]
pub(crate) fn is_same_at(position: usize, one: u64, other: u64) -> bool {
    let position = u32::try_from(position).unwrap_or(u32::MAX);
    (one ^ other) & current_mask(position) == 0
}

/// The bits of a sequence hash that the block at `position` keeps. They are also those that its child keeps of it.
#[inline]
pub(super) fn current_mask(position: u32) -> u64 {
    let position = Position::new(u64::from(position)).unwrap_or(Position::MAX);
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(position))
}

/// The bits of a sequence hash that every block keeps, whatever its position: what the table is keyed by.
pub(super) const COMMON_MASK: u64 =
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(Position::MAX));

/// A run's allocation: what is known of the run, and behind it the array of its hashes. So whoever knows where the run is knows where
/// each hash is, and a short run is a few neighbouring cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Run {
    head: Head,
    hashes: [AtomicU64],
}

#[derive(Debug)]
#[repr(C)]
struct Head {
    coverage: CoverWord,
    /// Hash of the first block's parent, as far as it is known; 0 at position 0.
    parent: u64,
    /// Position of the first block.
    start: u32,
    /// How many blocks there is room for.
    capacity: u32,
    /// The tick in which it was last used, where there is a capacity.
    used: AtomicU32,
    /// Runs follow only blocks before this offset; 0 where none does.
    attached_end: AtomicU16,
}

/// What a new allocation begins with: a head, and how many hashes, all of them 0.
pub(crate) struct Blank(Head);

impl Run {
    /// A run of nothing yet, with room for `capacity` blocks.
    pub(super) fn new(start: u32, parent: u64, capacity: usize) -> Owned<Self> {
        Owned::init(Blank(Head {
            coverage: CoverWord::default(),
            parent,
            start,
            capacity: u32::try_from(capacity.min(RUN_BLOCKS_MAX)).unwrap_or_default(),
            used: AtomicU32::new(0),
            attached_end: AtomicU16::new(0),
        }))
    }

    /// The same run with room for `capacity` blocks, of which the first `kept` are there.
    /// The holders belong to the new allocation from now on.
    pub(super) fn grown(&self, capacity: usize, kept: usize) -> Owned<Self> {
        let mut grown = Self::new(self.head.start, self.head.parent, capacity);
        grown.head.coverage = self.head.coverage.handed_over();
        grown.head.used = AtomicU32::new(self.last_used());
        grown.head.attached_end = AtomicU16::new(self.attached_end());
        for (own, hash) in grown.hashes.iter_mut().zip(&self.hashes).take(kept) {
            *own.get_mut() = hash.load(Ordering::Relaxed);
        }
        grown
    }

    /// Notes that the run is used in this tick. Writes only if that is not known, so that readers of one run mostly only read.
    #[inline]
    pub(crate) fn touch(&self, tick: u32) {
        if self.head.used.load(Ordering::Relaxed) < tick {
            self.head.used.store(tick, Ordering::Relaxed);
        }
    }

    pub(super) fn last_used(&self) -> u32 {
        self.head.used.load(Ordering::Relaxed)
    }

    /// Whether another run may follow the block before `offset`. If not, nobody has more than `offset` blocks of a chain that leaves
    /// the run there: a run is attached before anybody has anything of it.
    #[inline]
    pub(crate) fn may_go_on_at(&self, offset: usize) -> bool {
        offset <= usize::from(self.attached_end())
    }

    /// Runs follow only blocks before this offset; 0 where none does.
    #[inline]
    pub(super) fn attached_end(&self) -> u16 {
        self.head.attached_end.load(Ordering::Acquire)
    }

    /// From now on, runs may follow blocks before `end`.
    pub(super) fn set_attached_end(&self, end: u16) {
        self.head.attached_end.store(end, Ordering::Release);
    }

    /// What the allocation takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        size_of_val(self) as u64
    }

    pub(super) fn capacity(&self) -> usize {
        self.hashes.len()
    }

    /// The hash of the block at `offset`; 0 beyond the array.
    #[inline]
    pub(crate) fn hash(&self, offset: usize) -> u64 {
        self.hashes
            .get(offset)
            .map_or(0, |hash| hash.load(Ordering::Relaxed))
    }

    /// Writes a block that nobody reads yet.
    #[inline]
    pub(super) fn write(&self, offset: usize, hash: u64) {
        if let Some(place) = self.hashes.get(offset) {
            place.store(hash, Ordering::Relaxed);
        }
    }

    /// Position of the first block.
    pub(crate) fn start(&self) -> usize {
        self.head.start as usize
    }

    /// The hash of the parent of the block at `offset`.
    #[inline]
    fn parent_of(&self, offset: usize) -> u64 {
        match offset.checked_sub(1) {
            Some(before) => self.hash(before),
            None => self.head.parent,
        }
    }

    /// Whether the block at `offset` is the one that `key` names.
    #[inline]
    pub(super) fn is_at(&self, offset: usize, key: &BlockKey) -> bool {
        self.head.start as usize + offset == key.position as usize
            && key.is_current(self.hash(offset))
            && key.is_parent(self.parent_of(offset))
    }

    /// What names the block at `offset`.
    pub(super) fn key(&self, offset: usize) -> BlockKey {
        // Below 2^24, as every position.
        let position = u32::try_from(self.head.start as usize + offset).unwrap_or(u32::MAX);
        BlockKey {
            position,
            current: self.hash(offset),
            parent: (position > 0).then(|| self.parent_of(offset)),
        }
    }

    /// Who holds how much at this instant.
    #[inline]
    pub(crate) fn view<'g>(&self, guard: &'g Guard) -> View<'g> {
        self.head.coverage.view(guard)
    }

    pub(super) fn set_coverage(&self, cover: Cover, guard: &Guard) {
        self.head.coverage.set(cover, guard);
    }

    /// Nobody has anything of it any more.
    pub(super) fn clear_coverage(&self, guard: &Guard) {
        self.set_coverage(Cover::Few(Packed::NOBODY), guard);
    }

    /// What an allocation for `capacity` hashes takes.
    fn layout(capacity: usize) -> Layout {
        let hashes = Layout::array::<AtomicU64>(capacity);
        let both = hashes.and_then(|hashes| Layout::new::<Head>().extend(hashes));
        // A run's capacity is bounded, so none of this overflows.
        both.map_or(Layout::new::<Head>(), |(layout, _)| layout)
            .pad_to_align()
    }

    /// The whole of an allocation, of which only the address is known.
    ///
    /// # Safety
    ///
    /// `address` comes from `init`, and the allocation has not been freed.
    #[inline]
    #[allow(
        unsafe_code,
        reason = "the capacity, which a pointer to a run needs, is in the run"
    )]
    unsafe fn at(address: usize) -> *mut Self {
        let head = address as *mut Head;
        // SAFETY: the caller says that there is an allocation, which begins with a head that `init` has written.
        let capacity = unsafe { (*head).capacity };
        std::ptr::slice_from_raw_parts_mut(head.cast::<AtomicU64>(), capacity as usize) as *mut Self
    }
}

/// A thin pointer leads to a run: its capacity is in its head.
#[allow(
    unsafe_code,
    reason = "a box of hashes beside the head costs every search a cache miss that waits for another one"
)]
impl Pointable for Run {
    const ALIGN: usize = align_of::<Head>();

    type Init = Blank;

    unsafe fn init(Blank(head): Blank) -> usize {
        let layout = Self::layout(head.capacity as usize);
        // SAFETY: the layout is not empty: it has a head.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            handle_alloc_error(layout);
        }
        #[allow(clippy::cast_ptr_alignment, reason = "the layout is aligned for a head")]
        // SAFETY: the allocation is new, begins with room for a head, and is aligned for it. The hashes behind it are zeroes,
        // which an `AtomicU64` may be.
        unsafe {
            memory.cast::<Head>().write(head);
        }
        memory as usize
    }

    unsafe fn deref<'a>(address: usize) -> &'a Self {
        // SAFETY: the caller says that `address` comes from `init`, was not dropped, and that nobody changes the run but through
        // its atomics. Head and array are initialised.
        unsafe { &*Self::at(address) }
    }

    unsafe fn deref_mut<'a>(address: usize) -> &'a mut Self {
        // SAFETY: as in `deref`; and the caller says that there is no other reference.
        unsafe { &mut *Self::at(address) }
    }

    unsafe fn drop(address: usize) {
        // SAFETY: the caller says that `address` comes from `init` and that nobody will use it any more. A box of this type has the
        // layout with which `init` allocated: see the assertion below, and the test.
        unsafe {
            drop(Box::from_raw(Self::at(address)));
        }
    }
}

const _: () = assert!(
    size_of::<Head>().is_multiple_of(align_of::<AtomicU64>())
        && align_of::<Head>() >= align_of::<AtomicU64>(),
    "the array begins right behind the head"
);

#[cfg(test)]
mod tests {
    use super::super::super::holder_set::HolderSlot;
    use super::*;

    fn slot(index: usize) -> HolderSlot {
        HolderSlot::new(index).unwrap()
    }

    #[test]
    fn a_coverage_survives_packing() {
        let guard = &crossbeam_epoch::pin();
        let run = Run::new(0, 0, 1);
        assert_eq!(run.view(guard).len(), 0);
        let last = slot(HolderSlot::COUNT_MAX - 1);
        run.set_coverage(run.view(guard).with(last, 4096), guard);
        assert_eq!(
            (run.view(guard).len(), run.view(guard).cutoff(last)),
            (4096, 4096)
        );
        for index in 0..9 {
            run.set_coverage(run.view(guard).with(slot(index), 7), guard);
            assert_eq!(run.view(guard).cutoff(slot(index)), 7);
        }
        assert_eq!(run.view(guard).cutoff(last), 4096);
        run.clear_coverage(guard);
        assert_eq!(run.view(guard).len(), 0);
    }

    #[test]
    fn an_allocation_is_a_head_and_its_hashes() {
        for capacity in [0, 1, 5, RUN_BLOCKS_MAX] {
            let run = Run::new(3, 4, capacity);
            assert_eq!(run.capacity(), capacity);
            assert_eq!(Layout::for_value(&*run), Run::layout(capacity));
            assert!((0..capacity).all(|offset| run.hash(offset) == 0));
            run.write(capacity.saturating_sub(1), 77);
            let grown = run.grown(capacity + 1, capacity);
            assert_eq!((grown.start(), grown.parent_of(0)), (3, 4));
            assert_eq!(
                grown.hash(capacity.saturating_sub(1)),
                run.hash(capacity.saturating_sub(1))
            );
        }
    }
}
