//! Guards, which readers hold while they look at data that writers may replace.
//!
//! This is epoch-based reclamation: a writer that replaces memory has the old memory freed only after all guards are
//! gone that were held at the time of the replacement. That is safe only if all guards belong to one collector, but
//! `crossbeam_epoch` lets safe code make further collectors. Only this module makes a [`Guard`], so every guard belongs
//! to the collector of the process.

use crossbeam_epoch::{Guard as Pinned, Shared};

/// Registration of the current thread as a reader. While the guard lives, memory that the reader may have a reference
/// to is not freed.
#[derive(Debug)]
pub(crate) struct Guard(Pinned);

/// Registers the caller as a reader, and returns the guard.
#[inline]
pub(crate) fn pin() -> Guard {
    Guard(crossbeam_epoch::pin())
}

impl Guard {
    /// Returns the guard as the type that the atomic pointers of `crossbeam_epoch` take.
    #[inline]
    pub(crate) fn pinned(&self) -> &Pinned {
        &self.0
    }

    /// Releases the guard and takes it again. The call borrows the guard exclusively, so no reference that was read
    /// under the guard can outlive the call.
    #[inline]
    pub(crate) fn repin(&mut self) {
        self.0.repin();
    }

    /// Frees some of the memory that writers have released and that no guard protects any more.
    pub(crate) fn flush(&self) {
        self.0.flush();
    }

    /// Runs `free`, on any thread, once every guard held at the time of the call is gone.
    ///
    /// # Safety
    ///
    /// No thread that takes a guard from now on can reach the memory that `free` frees. `free` may run on another
    /// thread, so it must be sound to send the freed values to one.
    #[allow(unsafe_code, reason = "the one way to free what readers may still look at")]
    pub(crate) unsafe fn defer(&self, free: impl FnOnce()) {
        // SAFETY: the caller's promise; `crossbeam_epoch` asks for no other.
        unsafe { self.0.defer_unchecked(free) }
    }

    /// Frees `old`, which was made from a [`crossbeam_epoch::Owned`], once every guard held at the time of the call is
    /// gone.
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::defer`].
    #[allow(unsafe_code, reason = "the one way to free what readers may still look at")]
    pub(crate) unsafe fn defer_destroy<T>(&self, old: Shared<'_, T>) {
        // SAFETY: the caller's promise; `crossbeam_epoch` asks for no other.
        unsafe { self.0.defer_destroy(old) }
    }
}
