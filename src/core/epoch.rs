//! The guard under which readers look at what writers may replace.
//!
//! Epoch-based reclamation: what a writer takes out is freed when every guard held at that moment is gone. That holds among guards of one
//! collector alone, and `crossbeam_epoch` lets anyone make another one, in safe code. A [`Guard`] is of the process's own collector,
//! because nothing else makes one.

use crossbeam_epoch::{Guard as Pinned, Shared};

/// A reader's presence: while it lives, nothing that it can have found is freed.
#[derive(Debug)]
pub(crate) struct Guard(Pinned);

/// Makes the caller present.
#[inline]
pub(crate) fn pin() -> Guard {
    Guard(crossbeam_epoch::pin())
}

impl Guard {
    /// The guard as `crossbeam_epoch` wants it for loads and swaps.
    #[inline]
    pub(crate) fn pinned(&self) -> &Pinned {
        &self.0
    }

    /// As if dropped and taken anew: references that were taken under it are gone, because it is borrowed as a whole.
    #[inline]
    pub(crate) fn repin(&mut self) {
        self.0.repin();
    }

    /// Gives what has waited to be freed a chance to be.
    pub(crate) fn flush(&self) {
        self.0.flush();
    }

    /// Runs `free` when every guard held now is gone, on any thread.
    ///
    /// # Safety
    ///
    /// Nobody who takes a guard from now on can reach what `free` frees, and that can be sent to another thread.
    #[allow(unsafe_code, reason = "the one way to free what readers may still look at")]
    pub(crate) unsafe fn defer(&self, free: impl FnOnce()) {
        // SAFETY: the caller's promise; `crossbeam_epoch` asks for no other.
        unsafe { self.0.defer_unchecked(free) }
    }

    /// As [`Self::defer`], for what an [`crossbeam_epoch::Owned`] was.
    ///
    /// # Safety
    ///
    /// As of [`Self::defer`].
    #[allow(unsafe_code, reason = "the one way to free what readers may still look at")]
    pub(crate) unsafe fn defer_destroy<T>(&self, old: Shared<'_, T>) {
        // SAFETY: the caller's promise; `crossbeam_epoch` asks for no other.
        unsafe { self.0.defer_destroy(old) }
    }
}
