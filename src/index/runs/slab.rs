//! Runs by number.

use std::sync::atomic::Ordering;

use crossbeam_epoch::{Atomic, Guard, Owned, Shared};

use super::run::Run;

/// A run's number; given out again after the run is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RunId(u32);

/// The table's words for "empty" and "was taken" look like these numbers, so no run has them.
const FIRST: u32 = 2;

impl RunId {
    /// No run has it.
    pub(crate) const NONE: Self = Self(0);

    pub(super) fn new(index: usize) -> Option<Self> {
        u32::try_from(index).ok()?.checked_add(FIRST).map(Self)
    }

    pub(super) fn from_bits(bits: u32) -> Self {
        Self(bits.max(FIRST))
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }

    pub(super) fn index(self) -> usize {
        // `NONE` becomes a number far beyond all chunks.
        self.0.wrapping_sub(FIRST) as usize
    }
}

/// Pointers in the first chunk; each further chunk is twice as large as the one before, so that nothing ever moves.
const FIRST_CHUNK: usize = 64;
const CHUNKS: usize = 27;

type Chunk = Vec<Atomic<Run>>;

/// The pointers to all runs, by number.
#[derive(Debug)]
pub(super) struct Slab {
    chunks: [Atomic<Chunk>; CHUNKS],
}

/// The chunk of a number, and its place there.
#[inline]
fn place_of(index: usize) -> (usize, usize) {
    let chunk = (index / FIRST_CHUNK + 1).ilog2();
    let chunk_start = (FIRST_CHUNK << chunk) - FIRST_CHUNK;
    (chunk as usize, index - chunk_start)
}

impl Slab {
    pub(super) fn new() -> Self {
        Self {
            chunks: std::array::from_fn(|_| Atomic::null()),
        }
    }

    #[inline]
    fn slot<'g>(&self, id: RunId, guard: &'g Guard) -> Option<&'g Atomic<Run>> {
        let (chunk, place) = place_of(id.index());
        let chunk = self.chunks.get(chunk)?.load(Ordering::Acquire, guard);
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: a chunk comes from `Owned` in `set` and is freed only by `clear`, deferred until every guard held then is
        // dropped; ours is held and lives as long as the reference.
        let chunk = unsafe { chunk.as_ref() }?;
        chunk.get(place)
    }

    /// The run `id`, if there is one now.
    #[inline]
    pub(super) fn get<'g>(&self, id: RunId, guard: &'g Guard) -> Option<&'g Run> {
        let run = self.slot(id, guard)?.load(Ordering::Acquire, guard);
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: a run comes from `Owned` in `set` and is freed only by the `set` that replaces it or by `clear`, deferred
        // until every guard held then is dropped; ours is held and lives as long as the reference.
        unsafe {
            run.as_ref()
        }
    }

    /// Puts `run` in the place of what `id` named before. Only for the one writer.
    pub(super) fn set(&self, id: RunId, run: Option<Owned<Run>>, guard: &Guard) {
        if self.slot(id, guard).is_none() {
            let (chunk, _) = place_of(id.index());
            let new: Chunk = (0..FIRST_CHUNK << chunk).map(|_| Atomic::null()).collect();
            if let Some(place) = self.chunks.get(chunk) {
                place.store(Owned::new(new), Ordering::Release);
            }
        }
        let Some(slot) = self.slot(id, guard) else { return };
        let next = run.map_or(Shared::null(), |run| run.into_shared(guard));
        let before = slot.swap(next, Ordering::AcqRel, guard);
        if !before.is_null() {
            #[allow(unsafe_code, reason = "frees what `set` allocated")]
            // SAFETY: the swap has taken `before` out of the one place that led to it; new readers cannot find it any
            // more, present ones hold a guard.
            unsafe {
                guard.defer_destroy(before);
            }
        }
    }

    /// Gives back the chunks of a slab without runs. Only for the one writer.
    pub(super) fn clear(&self, guard: &Guard) {
        for chunk in &self.chunks {
            let before = chunk.swap(Shared::null(), Ordering::AcqRel, guard);
            if !before.is_null() {
                #[allow(unsafe_code, reason = "frees what `set` allocated")]
                // SAFETY: as in `set`; the pointers in the chunk are null, so dropping it drops no run.
                unsafe {
                    guard.defer_destroy(before);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_dense_and_distinct() {
        let mut expected = (0, 0);
        for index in 0..100_000 {
            assert_eq!(place_of(index), expected, "{index}");
            expected.1 += 1;
            if expected.1 == FIRST_CHUNK << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        let (chunk, _) = place_of(u32::MAX as usize - 2);
        assert!(chunk < CHUNKS, "{chunk}");
    }
}
