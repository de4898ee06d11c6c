//! Points of a search at which a test can let something happen, and turns that tests count. Nothing, outside of tests.

/// A look at what writers change is about to be taken.
#[inline]
pub(crate) fn point() {
    #[cfg(test)]
    tests::run();
}

/// A writer lets others have a turn.
#[inline]
pub(crate) fn turn_ends() {
    #[cfg(test)]
    tests::TURNS.set(tests::TURNS.get() + 1);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::{Cell, RefCell};

    type Hook = Box<dyn FnOnce()>;

    thread_local! {
        /// How many turns this thread has ended in the middle of its work.
        pub(crate) static TURNS: Cell<usize> = const { Cell::new(0) };
        static NEXT: RefCell<Option<(usize, Hook)>> = const { RefCell::new(None) };
    }

    /// Runs `hook` on this thread at the point after `points` others.
    pub(crate) fn set(points: usize, hook: impl FnOnce() + 'static) {
        NEXT.with(|next| *next.borrow_mut() = Some((points, Box::new(hook))));
    }

    /// Forgets the hook; says whether it was still there.
    pub(crate) fn clear() -> bool {
        NEXT.with(|next| next.borrow_mut().take().is_some())
    }

    pub(super) fn run() {
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
}
