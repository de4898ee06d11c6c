//! Hooks for tests. A test can run its own code at certain points of a search. A test can also count how often a writer
//! releases the lock that is needed to change the index's blocks. Outside of tests the hooks do nothing.

/// Marks a point just before a search looks at something that writers change.
#[inline]
pub(crate) fn point() {
    #[cfg(test)]
    super::tests::hook::run();
}

/// Marks a point at which a writer releases the lock on the index's blocks, so that other writers can take it.
#[inline]
pub(crate) fn turn_ends() {
    #[cfg(test)]
    super::tests::hook::end_turn();
}
