//! Trimming: cutting off blocks at the end of a run that no holder has any more.

use std::sync::atomic::Ordering;

use super::books::Queue;
use super::entry::RosterEntry;
use super::numbers::Unneeded;
use super::writer::RunWriter;
use super::{RunId, current_mask};

/// Number of blocks cut off before the lock on the runs is released, so that other writers can take it. Each run counts
/// as [`TRIM_RUN`] additional blocks.
const TRIM_BLOCKS: usize = 4096;
const TRIM_RUN: usize = 4;

impl RunWriter<'_> {
    /// Cuts off the last blocks of a run, as far as no holder has them and no child branches off them. If that removes
    /// the whole run, trims its parent run next.
    ///
    /// The call releases the lock on the runs after many blocks, so that other writers can change the runs. So before
    /// the call, the holders' entries in the runs must show every block that holders have.
    pub(crate) fn trim(&mut self, id: RunId) {
        let (mut next, mut done) = (Some(id), 0);
        while let Some(id) = next.take() {
            if done >= TRIM_BLOCKS {
                done = 0;
                self.pause();
            }
            let Some(run) = self.store.run(id, &self.guard) else {
                return;
            };
            let len = run.len();
            let is_kept = run.tops.load(Ordering::Relaxed) > 0 || run.pins.load(Ordering::Relaxed) > 0;
            if is_kept || len == 0 {
                return;
            }
            let ends = || run.entries(&self.guard).map(RosterEntry::end);
            let end = ends().max().unwrap_or(0);
            let kept = end.max(self.attached_end(id));
            let tops = ends().filter(|end| *end == kept).count();
            run.tops
                .store(u32::try_from(tops).unwrap_or(u32::MAX), Ordering::Relaxed);
            if kept < len {
                done += usize::from(len - kept) + TRIM_RUN;
                self.cut(id, kept, len);
                next = if kept == 0 { self.drop_run(id) } else { None };
            }
        }
    }

    fn cut(&mut self, id: RunId, kept: u16, len: u16) {
        self.displace(id, kept.into()..len.into());
        let Some(run) = self.store.run(id, &self.guard) else {
            return;
        };
        let (column, kept_blocks) = (run.column(&self.guard), usize::from(kept));
        if let Some(last) = kept_blocks.checked_sub(1) {
            run.last.store(column.hash(last), Ordering::Release);
        }
        run.header.set_len(kept);
        self.state.change.blocks -= i64::from(len - kept);
        let room = kept_blocks + kept_blocks / 8;
        if kept > 0 && column.capacity() > 64 && room < column.capacity() / 2 {
            self.state.resize(run, kept_blocks, room, &self.guard);
        }
    }

    /// Removes an empty run, and returns its parent run.
    fn drop_run(&mut self, id: RunId) -> Option<RunId> {
        let state = &mut *self.state;
        let run = self.store.run(id, &self.guard)?;
        let parent = run.parent();
        let (first, start) = (run.first.load(Ordering::Relaxed), run.start());
        let key = self.store.heads.hash(parent, first & current_mask(start));
        state.change.bytes += self.store.heads.remove(&mut state.heads, key, id, &self.guard);
        if run.is_twin.swap(false, Ordering::Relaxed) {
            if let Some(before) = parent.and_then(|parent| self.store.run(parent.run, &self.guard)) {
                before.twins.fetch_sub(1, Ordering::AcqRel);
            }
            self.store.doubts.twins.fetch_sub(1, Ordering::AcqRel);
        }
        for words in [&run.column, &run.more, &run.short, &run.bars] {
            state.replace(words, 0, |_| (), &self.guard);
        }
        let gone = match state.numbers.give_back(id) {
            Unneeded::Nothing => 0,
            Unneeded::Chunk(chunk) => self.store.slab.release(chunk, &self.guard),
            Unneeded::All => {
                state.queue = Queue::new();
                state.spared = Queue::new();
                self.store.slab.clear(&self.guard)
            }
        };
        state.garbage += gone;
        state.change.bytes -= gone.cast_signed() as i64;
        let used = run.used.load(Ordering::Relaxed);
        let parent = parent?;
        if state.detach(parent)
            && let Some(run) = self.store.run(parent.run, &self.guard)
        {
            run.header.set_followed(false);
        }
        self.use_run(parent.run, used);
        Some(parent.run)
    }
}
