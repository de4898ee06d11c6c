//! Arrays of words that readers read without a lock. To grow an array, a writer replaces the whole array.
//!
//! Only writers free replaced arrays: a reader that freed an array would contend with the writer for the writer's part
//! of the allocator. But the last reader of an array may be the first to notice that the array is unused. It then only
//! adds the array to a list, and a writer frees the arrays of the list later.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr;
use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;

use crate::epoch::Guard;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

type Array = Box<[AtomicU64]>;

/// Array of words that readers reach through a single atomic word. This word has the array's address in its lower 48
/// bits, and the array's length in the bits above. An empty array takes no memory.
///
/// Only one writer at a time may replace the array. The words in the array may change without a replacement.
#[derive(Debug, Default)]
pub(crate) struct Words(AtomicPtr<AtomicU64>);

#[cfg(not(target_pointer_width = "64"))]
compile_error!("an address of 48 bits and a length share a word of 64 bits");

const ADDRESS_BITS: u32 = 48;
/// Minimum length of a long array. The length of a long array is a power of two, and only its logarithm is stored.
pub(crate) const LONG: usize = 1 << 15;

/// Replaced arrays that no reader sees any more, and that are still to be freed. They come from all indexes of the
/// process. [`COUNT`] is the number of these arrays.
static PUT_ASIDE: Mutex<Vec<Array>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Packs the address and the length of an array into one word. The word is null if the array is empty.
fn packed(array: Array) -> *mut AtomicU64 {
    let (len, layout) = (array.len(), Layout::for_value(&*array));
    if len == 0 {
        return ptr::null_mut();
    }
    let length = match len {
        ..LONG => len,
        LONG.. => LONG | len.ilog2() as usize,
    };
    let first = Box::into_raw(array).cast::<AtomicU64>();
    if first.addr() >> ADDRESS_BITS != 0 {
        // No system gives addresses beyond 48 bits to a program that has not asked for them.
        handle_alloc_error(layout);
    }
    first.map_addr(|address| length << ADDRESS_BITS | address)
}

/// Returns the length to allocate for an array of `len` words: `len`, or the next power of two if `len` is [`LONG`] or
/// more.
pub(crate) fn rounded(len: usize) -> usize {
    if len < LONG { len } else { len.next_power_of_two() }
}

/// Returns the array whose address and length [`packed`] has put into `word`.
#[inline]
fn unpacked(word: *mut AtomicU64) -> *mut [AtomicU64] {
    let len = match word.addr() >> ADDRESS_BITS {
        length @ ..LONG => length,
        length => 1 << (length - LONG),
    };
    ptr::slice_from_raw_parts_mut(word.map_addr(|address| address & ((1 << ADDRESS_BITS) - 1)), len)
}

/// The word at `index`; 0 beyond the array.
#[inline]
pub(crate) fn word_at(words: &[AtomicU64], index: usize) -> u64 {
    words.get(index).map_or(0, |word| word.load(Ordering::Relaxed))
}

/// Copies words from `from` to `to`, as many as the shorter of the two has.
#[inline]
pub(crate) fn copy(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Maximum number of replaced arrays that may wait to be freed. If as many wait after a change of the index, the thread
/// that made the change frees them.
pub(crate) const GIVEN_BACK: usize = 64;

/// Frees all replaced arrays that no reader sees any more, if there are at least `arrays_min` of them.
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

fn put_aside(array: Array) {
    let mut arrays = PUT_ASIDE.lock();
    arrays.push(array);
    COUNT.store(arrays.len(), Ordering::Relaxed);
}

impl Words {
    /// Returns the current array. The reference lives no longer than the guard, which keeps a replaced array from
    /// being freed. The reference also lives no longer than `self`: dropping `self` frees its array immediately,
    /// whatever guards are held.
    #[inline]
    pub(crate) fn get<'g>(&'g self, _: &'g Guard) -> &'g [AtomicU64] {
        let word = self.0.load(Ordering::Acquire);
        if word.is_null() {
            return &[];
        }
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: a word that is not null comes from `packed`. It stands for an array with all its words, which was
        // complete before the word was published. The array is freed in one of two cases. After a replacement, it is
        // freed when every guard held then is dropped: the caller's guard is among them and lives as long as the
        // reference, and all guards are of one collector. When `self` is dropped, the array is freed at once, but the
        // reference borrows `self`.
        unsafe {
            &*unpacked(word)
        }
    }

    /// Replaces the array by a new one of [`rounded`]`(len)` words, and returns the length of the old array. `fill`
    /// fills the new array, whose words are all 0, before readers can see it.
    pub(crate) fn replace(&self, len: usize, fill: impl FnOnce(&[AtomicU64]), guard: &Guard) -> usize {
        let next: Array = (0..rounded(len)).map(|_| AtomicU64::new(0)).collect();
        fill(&next);
        let old = self.0.swap(packed(next), Ordering::AcqRel);
        if old.is_null() {
            return 0;
        }
        let old = unpacked(old);
        #[allow(unsafe_code, reason = "frees what `packed` was given")]
        // SAFETY: the swap has taken `old` out of the only place that led to it. So new readers cannot find it. Present
        // readers hold a guard, and `old` is put aside only after all of these guards are gone. That may happen on any
        // thread: an array of atomics can be sent.
        unsafe {
            guard.defer(move || put_aside(Box::from_raw(old)));
        }
        old.len()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let old = self.0.load(Ordering::Relaxed);
        if !old.is_null() {
            #[allow(unsafe_code, reason = "frees what `packed` was given")]
            // SAFETY: the caller has `self` exclusively, and references from `get` borrow `self`. So no one else can
            // reach the array.
            drop(unsafe { Box::from_raw(unpacked(old)) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_comes_back_as_it_was() {
        let (words, guard) = (Words::default(), crate::epoch::pin());
        let mut before = 0;
        for len in [1, 2, LONG - 1, LONG, LONG + 1, 0, 0, LONG * 4, 5] {
            let fill = |words: &[AtomicU64]| {
                let words = words.iter().enumerate();
                words.for_each(|(index, word)| word.store(index as u64 * 3, Ordering::Relaxed));
            };
            assert_eq!(words.replace(len, fill, &guard), before);
            before = rounded(len);
            let array = words.get(&guard);
            assert_eq!(array.len(), before);
            let is_so = |(index, word): (usize, &AtomicU64)| word.load(Ordering::Relaxed) == index as u64 * 3;
            assert!(array.iter().enumerate().all(is_so));
        }
    }
    /// Whether every word of the array equals the array's length, as [`fill_with_length`] writes it.
    fn is_whole(array: &[AtomicU64]) -> bool {
        let len = array.len() as u64;
        array.iter().all(|word| word.load(Ordering::Relaxed) == len)
    }

    fn fill_with_length(array: &[AtomicU64]) {
        let len = array.len() as u64;
        array.iter().for_each(|word| word.store(len, Ordering::Relaxed));
    }

    /// Checks that a reader of a replaced array still sees the old array. The test is small enough for Miri, which
    /// reports each read of freed memory.
    #[test]
    fn readers_of_a_replaced_array_go_on_with_what_they_have() {
        let steps = if cfg!(miri) { 40 } else { 20_000 };
        let words = Words::default();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let guard = crate::epoch::pin();
                        let array = words.get(&guard);
                        assert!(is_whole(array));
                        // By now, most of the arrays have been replaced.
                        std::thread::yield_now();
                        assert!(is_whole(array) && is_whole(words.get(&guard)));
                    }
                });
            }
            for step in 0..steps {
                let guard = crate::epoch::pin();
                words.replace(step % 67, fill_with_length, &guard);
                guard.flush();
                give_back(1);
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
