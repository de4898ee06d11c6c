//! Arrays of words that readers look at without a lock, replaced as a whole where they grow.
//!
//! An array that has been replaced is put aside when no reader can see it any more, and then given back to the allocator by a writer. Who finds
//! out that nobody sees it can be a reader: if that gave it back, it would wait for the part of the allocator that the writer works with,
//! and the writer for it.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_epoch::{Atomic, Guard, Owned, Pointer, Shared};
use parking_lot::Mutex;

use super::prefetch_at;

type Array = [MaybeUninit<AtomicU64>];

/// A pointer to an array of words. An empty array takes no memory.
///
/// One writer at a time replaces arrays; words may change in place.
#[derive(Debug, Default)]
pub(crate) struct Words(Atomic<Array>);

/// Arrays of all indexes that nobody sees any more, and how many those are.
static PUT_ASIDE: Mutex<Vec<Owned<Array>>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// How many arrays are worth giving back in the middle of other work.
pub(crate) const GIVEN_BACK: usize = 64;

/// Gives arrays back that nobody sees any more, where those are at least so many.
#[inline]
pub(crate) fn give_back(arrays_min: usize) {
    if COUNT.load(Ordering::Relaxed) >= arrays_min {
        give_back_all();
    }
}

#[cold]
fn give_back_all() {
    let room = Vec::with_capacity(GIVEN_BACK * 2);
    let arrays = {
        let mut aside = PUT_ASIDE.lock();
        COUNT.store(0, Ordering::Relaxed);
        std::mem::replace(&mut *aside, room)
    };
    drop(arrays);
}

fn put_aside(array: Owned<Array>) {
    let mut arrays = PUT_ASIDE.lock();
    arrays.push(array);
    COUNT.store(arrays.len(), Ordering::Relaxed);
}

impl Words {
    /// The array as it is now.
    #[inline]
    pub(crate) fn get<'g>(&self, guard: &'g Guard) -> &'g [AtomicU64] {
        let words = self.0.load(Ordering::Acquire, guard);
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: an array comes from `replace`, which has initialized every word before it published the pointer, and
        // `MaybeUninit<T>` has the layout of `T`. It is freed only when every guard held at its replacement is dropped;
        // ours is held and lives as long as the reference.
        unsafe {
            words
                .as_ref()
                .map_or(&[], |words| &*(std::ptr::from_ref(words) as *const [AtomicU64]))
        }
    }

    /// Asks for one of the array's words, which need not exist, without waiting for the array's length.
    #[inline]
    pub(crate) fn prefetch(&self, index: usize, guard: &Guard) {
        let array = self.0.load(Ordering::Relaxed, guard).into_usize();
        // The length comes first.
        prefetch_at(array.wrapping_add((index + 1) * size_of::<u64>()));
    }

    /// Asks for the array's length.
    #[inline]
    pub(crate) fn prefetch_len(&self, guard: &Guard) {
        prefetch_at(self.0.load(Ordering::Relaxed, guard).into_usize());
    }

    /// Publishes an array of `len` words in place of the one before; gives back how many words that had.
    pub(crate) fn replace(&self, len: usize, word: impl Fn(usize) -> u64, guard: &Guard) -> usize {
        let mut next = Shared::null();
        if len > 0 {
            let mut words = Owned::<Array>::init(len);
            for (index, place) in words.iter_mut().enumerate() {
                place.write(AtomicU64::new(word(index)));
            }
            next = words.into_shared(guard);
        }
        let before = self.get(guard).len();
        let old = self.0.swap(next, Ordering::AcqRel, guard);
        if !old.is_null() {
            #[allow(unsafe_code, reason = "frees what `replace` has allocated")]
            // SAFETY: the swap has taken `old` out of the one place that led to it. New readers cannot find it; present
            // ones hold a guard, and what is deferred happens when those are gone. It may happen on any thread: an array of
            // atomics can be sent.
            unsafe {
                guard.defer_unchecked(move || put_aside(old.into_owned()));
            }
        }
        before
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let old = std::mem::replace(&mut self.0, Atomic::null());
        #[allow(unsafe_code, reason = "frees what `replace` has allocated")]
        // SAFETY: whoever drops `self` is the only one who can reach the array.
        drop(unsafe { old.try_into_owned() });
    }
}
