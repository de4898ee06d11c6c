//! The atomics of those pieces that `tests/loom` checks in all orders of their steps: there, loom's are in their place.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Whether this is a model: sizes are small then, so that few steps reach every bound.
pub(crate) const IS_MODEL: bool = false;
