//! Guard under which readers look at data that writers may replace.
//!
//! This is epoch-based reclamation: memory that a writer takes out is freed when every guard held at that moment is
//! gone. That is safe only if all guards belong to one collector, but `crossbeam_epoch` lets safe code make further
//! collectors. Only this module makes a [`Guard`], so every guard belongs to the collector of the process.

use crossbeam_epoch::{Guard as Pinned, Shared};

/// Registration of the current thread as a reader. While the guard lives, no memory that the reader can have found is
/// freed.
#[derive(Debug)]
pub(crate) struct Guard(Pinned);

/// Registers the caller as a reader, and returns the guard.
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
    /// No thread that takes a guard from now on can reach the memory that `free` frees. The freed values can be sent to
    /// another thread.
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
