//! Values that a reload may replace while the daemon runs.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

/// A value that a reload may replace. Clones share it.
#[derive(Debug)]
pub struct Live<T>(Arc<ArcSwap<T>>);

impl<T> Clone for Live<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Live<T> {
    /// Makes a shared value that begins with `value`.
    pub fn new(value: T) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(value)))
    }

    /// Returns the current value. Don't keep it: it is outdated after the next reload.
    pub fn now(&self) -> Guard<Arc<T>> {
        self.0.load()
    }

    /// Replaces the value for all clones.
    pub fn replace(&self, value: T) {
        self.0.store(Arc::new(value));
    }
}

impl<T: PartialEq> PartialEq for Live<T> {
    fn eq(&self, other: &Self) -> bool {
        **self.now() == **other.now()
    }
}

impl<T: Eq> Eq for Live<T> {}

impl<T> From<T> for Live<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}
