//! Points of a search at which a test can let something happen, and turns that tests count. Nothing, outside of tests.

/// A look at what writers change is about to be taken.
#[inline]
pub(crate) fn point() {
    #[cfg(test)]
    super::tests::hook::run();
}

/// A writer lets others have a turn.
#[inline]
pub(crate) fn turn_ends() {
    #[cfg(test)]
    super::tests::hook::end_turn();
}
