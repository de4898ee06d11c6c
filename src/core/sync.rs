//! Atomics of the modules that `tests/loom` checks in all orders of their steps. In these checks, loom's atomics take
//! their place.

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

/// Whether the code runs as a model under loom. In a model sizes are small, so that few steps reach every bound.
pub(crate) const IS_MODEL: bool = false;
