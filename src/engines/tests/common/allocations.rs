//! An allocator that counts the memory that the current thread takes.

#![allow(
    unsafe_code,
    reason = "an allocator is unsafe by its nature; it only passes on to the system's"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

/// Allocator that counts allocations, and leaves the work to the system's allocator.
pub(crate) struct Counting;

fn note_taken(bytes: usize) {
    COUNT.set(COUNT.get() + 1);
    HELD.set(HELD.get() + bytes);
    PEAK.set(PEAK.get().max(HELD.get()));
}

fn note_given_back(bytes: usize) {
    HELD.set(HELD.get().saturating_sub(bytes));
}

// SAFETY: every call goes to the system's allocator with the same arguments. The counters are thread-local cells with
// constant initial values: they neither allocate nor have a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note_taken(layout.size());
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        note_given_back(layout.size());
        // SAFETY: `place` came from the system's allocator, with this layout.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old and the new memory may exist at once.
        note_taken(size);
        note_given_back(layout.size());
        // SAFETY: `place` came from the system's allocator, with this layout; the caller's promise about `size` is passed on.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// The memory that a piece of work took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    /// Number of allocations.
    pub(crate) count: usize,
    /// Largest amount of memory that the work held at one time, in bytes. Memory from before the work does not count.
    pub(crate) peak: usize,
    /// Memory that the result of the work holds, in bytes.
    pub(crate) held: usize,
}

/// The result of `work`, and the memory that it takes on this thread. The binary has to have [`Counting`] as its allocator.
pub(crate) fn taken_by<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let (count, held) = (COUNT.get(), HELD.get());
    PEAK.set(held);
    let result = work();
    let taken = Taken {
        count: COUNT.get() - count,
        peak: PEAK.get().saturating_sub(held),
        held: HELD.get().saturating_sub(held),
    };
    (result, taken)
}
