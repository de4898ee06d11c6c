//! Cutting off what nobody has any more.

use std::sync::atomic::Ordering;

use super::entry::Entry;
use super::writer::{RunWriter, resize, words_changed};
use super::{RunId, current_mask};

/// After so many blocks of runs that go one after the other others have a turn; a run counts for some more.
const TRIM_BLOCKS: usize = 4096;
const TRIM_RUN: usize = 4;

impl RunWriter<'_> {
    /// Takes the blocks from the end of a run that nobody has and no run follows. Where that is all of the run, goes on with the one before
    /// it. Others have turns meanwhile where that is much: so all that a holder has must be in the entries.
    pub(crate) fn trim(&mut self, id: RunId) {
        let (mut next, mut done) = (Some(id), 0);
        while let Some(id) = next.take() {
            if done >= TRIM_BLOCKS {
                done = 0;
                self.pause();
            }
            let Some(run) = self.store.slab.get(id, &self.guard) else {
                return;
            };
            let len = run.len();
            let is_kept = run.tops.load(Ordering::Relaxed) > 0 || run.pins.load(Ordering::Relaxed) > 0;
            if is_kept || len == 0 {
                return;
            }
            let ends = || run.entries(&self.guard).map(Entry::end);
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
        let placed = self.run(id).map_or(0, |run| run.placed.load(Ordering::Relaxed));
        self.displace(id, kept, u16::try_from(placed).unwrap_or(0));
        let Some(run) = self.store.slab.get(id, &self.guard) else {
            return;
        };
        let still_placed = placed.min(u32::from(kept));
        run.placed.store(still_placed, Ordering::Relaxed);
        let unplaced = |len: u16, placed: u32| u64::from(u32::from(len) - placed);
        let (before, after) = (unplaced(len, placed), unplaced(kept, still_placed));
        if let Some(last) = kept.checked_sub(1) {
            let last = run.column(&self.guard).hash(usize::from(last));
            run.last.store(last, Ordering::Release);
        }
        run.header.set_len(kept);
        self.state.change.blocks += i64::from(kept) - i64::from(len);
        self.state.unplaced -= before - after;
        let column = run.column(&self.guard);
        let room = usize::from(kept) + usize::from(kept) / 8;
        if kept > 0 && column.capacity() > 64 && room < column.capacity() / 2 {
            let bytes = resize(run, usize::from(kept), room, &mut self.state, &self.guard);
            self.state.change.bytes += bytes;
        }
    }

    /// Gives back an empty run; says which run it followed.
    fn drop_run(&mut self, id: RunId) -> Option<RunId> {
        let state = &mut *self.state;
        let run = self.store.slab.get(id, &self.guard)?;
        let parent = run.parent();
        let (first, start) = (run.first.load(Ordering::Relaxed), run.start());
        let key = self.store.heads.hash(parent, first & current_mask(start));
        let mut bytes = self.store.heads.remove(&mut state.heads, key, id, &self.guard);
        if run.is_twin.swap(0, Ordering::Relaxed) == 1 {
            self.store.count_twin(false);
        }
        for words in [&run.column, &run.more, &run.short] {
            let before = words.replace(0, |_| 0, &self.guard);
            state.garbage += before * 8;
            bytes += words_changed(0, before);
        }
        state.free.push(id);
        state.runs -= 1;
        if state.runs == 0 {
            state.free = Vec::new();
            state.next = 1;
            state.queue.clear();
            let gone = self.store.slab.clear(&self.guard);
            state.garbage += gone;
            bytes -= i64::try_from(gone).unwrap_or(0);
        }
        state.change.bytes += bytes;
        let used = run.used.load(Ordering::Relaxed);
        let parent = parent?;
        if let Some(attached) = state.attached.get_mut(&parent.run) {
            if let Some(count) = attached.get_mut(&parent.offset) {
                *count -= 1;
                if *count == 0 {
                    attached.remove(&parent.offset);
                }
            }
            if attached.is_empty() {
                state.attached.remove(&parent.run);
                if let Some(run) = self.store.slab.get(parent.run, &self.guard) {
                    run.header.set_followed(false);
                }
            }
        }
        self.use_run(parent.run, used);
        Some(parent.run)
    }
}
