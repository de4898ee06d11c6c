//! Hooks for tests. A test can run its own code at certain points of a search. A test can also count how often a
//! writer ends its turn at the runs. Outside of tests the hooks do nothing.

/// Marks a point just before a search looks at something that writers change.
#[inline]
pub(crate) fn point() {
    #[cfg(test)]
    super::tests::hook::run();
}

/// Marks that a writer ends its turn, so that other writers can have theirs.
#[inline]
pub(crate) fn turn_ends() {
    #[cfg(test)]
    super::tests::hook::end_turn();
}
