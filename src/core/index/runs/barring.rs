//! Changing the bars of a run, which mark the blocks of a holder that are not resumable: no request can continue
//! after them.

use std::sync::atomic::{AtomicU64, Ordering};

use super::RunId;
use super::bars::{Barred, Bars, Table};
use super::writer::RunWriter;
use crate::index::directory::HolderSlot;

/// Number of bytes that a stretch of barred (not resumable) blocks takes in the holder's own record. The run's array of
/// bars takes further bytes.
const STRETCH_BYTES: i64 = 12;

impl RunWriter<'_> {
    /// Whether any holder has a block that is not resumable.
    pub(crate) fn has_bars(&self) -> bool {
        self.store.has_bars()
    }

    /// Replaces one holder's bars in a run: the marks of blocks after which no request can resume. Must be called
    /// within a [`Self::step`] that changes the run.
    pub(crate) fn set_bars(&mut self, id: RunId, slot: HolderSlot, barred: impl Iterator<Item = Barred>) {
        let Some(run) = self.store.run(id, &self.guard) else {
            return;
        };
        let mut barred = barred.peekable();
        let array = run.bars.get(&self.guard);
        if array.is_empty() && barred.peek().is_none() {
            return;
        }
        let mut table = Table::of(Bars::new(array));
        let before = table.stretches(slot);
        table.free(slot);
        barred.for_each(|stretch| table.bar(slot, stretch));
        self.state.change.bytes += STRETCH_BYTES * (table.stretches(slot) - before);
        let next = table.finish();
        if array.len() == next.len()
            && array
                .iter()
                .zip(&next)
                .all(|(old, new)| old.load(Ordering::Relaxed) == *new)
        {
            return;
        }
        let doubts = &self.store.doubts;
        if array.is_empty() {
            // The count is raised before any reader can see the end of the step.
            doubts.barred.fetch_add(1, Ordering::Relaxed);
        }
        let fill = |words: &[AtomicU64]| {
            for (word, next) in words.iter().zip(&next) {
                word.store(*next, Ordering::Relaxed);
            }
        };
        let (was_empty, is_empty) = (array.is_empty(), next.is_empty());
        self.state.replace(&run.bars, next.len(), fill, &self.guard);
        if is_empty && !was_empty {
            doubts.barred.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
