//! Who holds how much of a run, as one word that changes as a whole.

use std::sync::atomic::{AtomicPtr, Ordering};

use crossbeam_epoch::Guard;

use super::coverage::{Cover, Coverage, View};
use super::few::Packed;

/// A few holders, packed, or a [`Coverage`] on the heap, owned by the run's current allocation.
#[derive(Debug, Default)]
pub(super) struct CoverWord(AtomicPtr<Coverage>);

impl CoverWord {
    /// The same word for the allocation that takes over.
    pub(super) fn handed_over(&self) -> Self {
        Self(AtomicPtr::new(self.0.load(Ordering::Relaxed)))
    }

    #[inline]
    pub(super) fn view<'g>(&self, _guard: &'g Guard) -> View<'g> {
        let word = self.0.load(Ordering::Acquire);
        if let Some(packed) = Packed::from_word(word.addr()) {
            return View::Few(packed.unpack());
        }
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: the word is not packed, so `set` made it from a box. It is freed only by the `set` that replaces it
        // (deferred until every guard that was held then is dropped) or with the whole store (which no reader outlives).
        // A guard is held and lives as long as the reference. Coverages are never changed in place.
        View::Many(unsafe { &*word })
    }

    pub(super) fn set(&self, cover: Cover, guard: &Guard) {
        let next = match cover {
            Cover::Few(packed) => std::ptr::without_provenance_mut(packed.as_word()),
            Cover::Many(coverage) => Box::into_raw(coverage),
        };
        let before = self.0.swap(next, Ordering::AcqRel);
        if Packed::from_word(before.addr()).is_none() {
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

const _: () = assert!(
    usize::BITS == 64,
    "a few holders are packed into a word of 64 bits"
);
const _: () = assert!(
    align_of::<Coverage>() >= 8,
    "the three lowest bits of a pointer to a coverage are free"
);
