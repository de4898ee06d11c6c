//! One run, as readers see it.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crossbeam_epoch::Guard;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};

use super::super::holder_set::HolderSlot;
use super::coverage::{Cover, Coverage, View};

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

/// A run's allocation.
#[derive(Debug)]
pub(crate) struct Run {
    coverage: CoverageWord,
    /// The tick in which it was last used, where there is a capacity.
    used: AtomicU32,
    /// Position of the first block.
    pub(super) start: u32,
    /// Hash of the first block's parent, as far as it is known; 0 at position 0.
    pub(super) parent: u64,
    hashes: Box<[AtomicU64]>,
}

impl Run {
    /// A run of nothing yet, with room for `capacity` blocks.
    pub(super) fn new(start: u32, parent: u64, capacity: usize) -> Self {
        Self {
            coverage: CoverageWord::default(),
            used: AtomicU32::new(0),
            start,
            parent,
            hashes: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The same run with room for `capacity` blocks, of which the first `kept` are there.
    /// The holders belong to the new allocation from now on.
    pub(super) fn grown(&self, capacity: usize, kept: usize) -> Self {
        let mut hashes = Vec::with_capacity(capacity);
        hashes.extend(
            self.hashes
                .iter()
                .take(kept)
                .map(|hash| AtomicU64::new(hash.load(Ordering::Relaxed))),
        );
        hashes.resize_with(capacity, AtomicU64::default);
        Self {
            coverage: CoverageWord(AtomicPtr::new(self.coverage.0.load(Ordering::Relaxed))),
            used: AtomicU32::new(self.last_used()),
            start: self.start,
            parent: self.parent,
            hashes: hashes.into_boxed_slice(),
        }
    }

    /// Notes that the run is used in this tick. Writes only if that is not known, so that readers of one run mostly only read.
    #[inline]
    pub(crate) fn touch(&self, tick: u32) {
        if self.used.load(Ordering::Relaxed) < tick {
            self.used.store(tick, Ordering::Relaxed);
        }
    }

    pub(super) fn last_used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// What the allocation takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.hashes.len() * size_of::<AtomicU64>()) as u64
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
        self.start as usize
    }

    /// The hash of the parent of the block at `offset`.
    #[inline]
    fn parent_of(&self, offset: usize) -> u64 {
        match offset.checked_sub(1) {
            Some(before) => self.hash(before),
            None => self.parent,
        }
    }

    /// Whether the block at `offset` is the one that `key` names.
    #[inline]
    pub(super) fn is_at(&self, offset: usize, key: &BlockKey) -> bool {
        self.start as usize + offset == key.position as usize
            && key.is_current(self.hash(offset))
            && key.is_parent(self.parent_of(offset))
    }

    /// What names the block at `offset`.
    pub(super) fn key(&self, offset: usize) -> BlockKey {
        // Below 2^24, as every position.
        let position = u32::try_from(self.start as usize + offset).unwrap_or(u32::MAX);
        BlockKey {
            position,
            current: self.hash(offset),
            parent: (position > 0).then(|| self.parent_of(offset)),
        }
    }

    /// Who holds how much at this instant.
    #[inline]
    pub(crate) fn view<'g>(&self, guard: &'g Guard) -> View<'g> {
        self.coverage.view(guard)
    }

    pub(super) fn set_coverage(&self, cover: Cover, guard: &Guard) {
        self.coverage.set(cover, guard);
    }
}

/// Who holds how much of a run, as one word that changes as a whole.
///
/// Null: nobody. Odd: one holder of all, packed. Else: a [`Coverage`] on the heap, owned by the run's current allocation.
#[derive(Debug, Default)]
struct CoverageWord(AtomicPtr<Coverage>);

const ONE: usize = 1;
const SLOT_SHIFT: u32 = 16;
const LEN_SHIFT: u32 = 32;

impl CoverageWord {
    #[inline]
    fn view<'g>(&self, _guard: &'g Guard) -> View<'g> {
        let word = self.0.load(Ordering::Acquire);
        let packed = word.addr();
        if packed == 0 {
            return View::Nobody;
        }
        if packed & ONE == ONE {
            let slot = HolderSlot::new(packed >> SLOT_SHIFT & 0xffff);
            let len = u16::try_from(packed >> LEN_SHIFT).unwrap_or_default();
            return slot.map_or(View::Nobody, |slot| View::One { slot, len });
        }
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: the word is neither null nor packed, so `set` made it from a box. It is freed only by the `set` that
        // replaces it (deferred until every guard that was held then is dropped) or with the whole store (which no
        // reader outlives). A guard is held and lives as long as the reference. Coverages are never changed in place.
        View::Many(unsafe { &*word })
    }

    fn set(&self, cover: Cover, guard: &Guard) {
        let next = match cover {
            Cover::Nobody => std::ptr::null_mut(),
            Cover::One { slot, len } => std::ptr::without_provenance_mut(
                ONE | slot.index() << SLOT_SHIFT | usize::from(len) << LEN_SHIFT,
            ),
            Cover::Many(coverage) => Box::into_raw(coverage),
        };
        let before = self.0.swap(next, Ordering::AcqRel);
        if !before.is_null() && before.addr() & ONE == 0 {
            #[allow(unsafe_code, reason = "frees what `set` allocated")]
            // SAFETY: `before` came from the box of an earlier `set`, and the swap has taken it out of the word, so this is
            // the only place that frees it: writers take turns, and only the run's current allocation is ever set. New
            // readers cannot find it any more, present ones hold a guard.
            unsafe {
                let before = crossbeam_epoch::Shared::from(before.cast_const());
                guard.defer_destroy(before);
            }
        }
    }
}

const _: () = assert!(usize::BITS == 64, "a coverage is packed into a word of 64 bits");
const _: () = assert!(
    align_of::<Coverage>() > 1,
    "the lowest bit of a pointer to a coverage is free"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coverage_survives_packing() {
        let guard = &crossbeam_epoch::pin();
        let run = Run::new(0, 0, 1);
        assert_eq!(run.view(guard).len(), 0);
        let last = HolderSlot::new(HolderSlot::COUNT_MAX - 1).unwrap();
        for (slot, len) in [(HolderSlot::new(0).unwrap(), 1), (last, 4096)] {
            run.set_coverage(Cover::One { slot, len }, guard);
            assert_eq!((run.view(guard).len(), run.view(guard).cutoff(slot)), (len, len));
        }
        let both = run.view(guard).with(HolderSlot::new(3).unwrap(), 7);
        run.set_coverage(both, guard);
        assert_eq!(run.view(guard).cutoff(HolderSlot::new(3).unwrap()), 7);
        assert_eq!(run.view(guard).cutoff(last), 4096);
        run.set_coverage(Cover::Nobody, guard);
        assert_eq!(run.view(guard).len(), 0);
    }
}
