//! Atomics for the modules that `tests/loom` checks. In these checks, loom's atomics replace the atomics of the
//! standard library, and loom tries all orders of steps.

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

/// Whether loom checks this code in all orders of steps. Sizes are then small, so that a few steps reach every bound.
pub(crate) const IS_MODEL: bool = false;
