//! Hooks for tests: points of a search at which a test can run its own code, and ends of turns, which tests count.
//! Outside of tests the hooks do nothing.

/// Marks a point just before a search looks at something that writers change.
#[inline]
pub(crate) fn point() {
    #[cfg(test)]
    super::tests::hook::run();
}

/// Marks that a writer lets others have a turn.
#[inline]
pub(crate) fn turn_ends() {
    #[cfg(test)]
    super::tests::hook::end_turn();
}
