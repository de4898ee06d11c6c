//! Atomics for the modules that `tests/loom` checks. In these checks, loom's atomics replace the atomics of the
//! standard library, and loom tries all orders of steps.

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

/// Whether the code is checked as a model under loom. In a model, sizes are small, so that few steps reach every
/// bound.
pub(crate) const IS_MODEL: bool = false;
