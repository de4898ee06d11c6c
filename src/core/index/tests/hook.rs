//! Hooks in tests: code that a test runs at a point of a search, and the number of turns that have ended.

use std::cell::{Cell, RefCell};

type Hook = Box<dyn FnOnce()>;

thread_local! {
    /// Number of times that this thread has released the lock on the index's blocks in the middle of its work.
    pub(super) static TURNS: Cell<usize> = const { Cell::new(0) };
    static NEXT: RefCell<Option<(usize, Hook)>> = const { RefCell::new(None) };
}

/// Counts one release of the lock on the index's blocks.
pub(in crate::index) fn end_turn() {
    TURNS.set(TURNS.get() + 1);
}

/// Sets `hook` to run on this thread, at a point of a search or of a writer's work. The first `points` points are
/// passed over; the hook runs at the next one.
pub(super) fn set(points: usize, hook: impl FnOnce() + 'static) {
    NEXT.with(|next| *next.borrow_mut() = Some((points, Box::new(hook))));
}

/// Removes the hook. Returns whether the hook was still there, which means that it did not run.
pub(super) fn clear() -> bool {
    NEXT.with(|next| next.borrow_mut().take().is_some())
}

/// Marks a point of a search. Runs the hook if it was set for this point.
pub(in crate::index) fn run() {
    let now = NEXT.with(|next| {
        let (points, hook) = next.borrow_mut().take()?;
        if points == 0 {
            return Some(hook);
        }
        *next.borrow_mut() = Some((points - 1, hook));
        None
    });
    if let Some(hook) = now {
        hook();
    }
}
