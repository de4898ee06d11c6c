//! Changing the runs.

use std::sync::atomic::{Ordering, fence};

use crossbeam_epoch::Guard;
use parking_lot::MutexGuard;

use crate::hash::SequenceHash;

use super::super::holder_set::{HolderSlot, SlotSet};
use super::Spot;
use super::eviction::EvictionState;
use super::run::{BlockKey, COMMON_MASK, RUN_BLOCKS_MAX, Run};
use super::slab::RunId;
use super::store::RunStore;
use super::table::{Inserted, Mixed};
use super::walk::Life;

/// What only writers know of a run.
#[derive(Debug, Clone, Copy, Default)]
struct Meta {
    /// The block that the first block of the run follows; none at position 0.
    parent: Option<Spot>,
    /// Blocks in the table.
    len: u16,
    /// Blocks ever written into the current allocation.
    written: u16,
    /// Whether the hashes are whole, and not the fragments of lineage hashes.
    is_whole: bool,
    /// Runs that follow a block of this one.
    children: u32,
    /// Whether the run waits in the queue of eviction; kept when the number is given out again.
    is_queued: bool,
    /// What tells the run from others that had its number before or will have it; 0 while nobody has it.
    birth: u32,
}

/// What only writers know.
#[derive(Debug, Default)]
pub(super) struct State {
    meta: Vec<Meta>,
    free: Vec<RunId>,
    /// How many runs there have been.
    births: u32,
    pub(super) eviction: EvictionState,
    /// What the table took when that was last looked at.
    table_bytes: u64,
    /// What readers could see, step by step, where a test of the consistency contract asks for it.
    #[cfg(test)]
    pub(super) steps: Option<Vec<Step>>,
}

/// One change of what a holder has of a run: keys of consecutive blocks that came or went at once.
#[cfg(test)]
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) is_insertion: bool,
}

impl State {
    /// One more than the largest number of a run.
    pub(super) fn runs_ever(&self) -> usize {
        self.meta.len()
    }

    /// The run that has this number now, unless nobody has it.
    pub(super) fn life(&self, run: RunId) -> Option<Life> {
        let meta = self.meta.get(run.index())?;
        (meta.birth > 0).then_some(Life {
            run,
            birth: meta.birth,
        })
    }

    /// The block that a run follows.
    pub(super) fn parent(&self, run: RunId) -> Option<Spot> {
        self.meta.get(run.index())?.parent
    }

    /// Whether a run's hashes are whole, and not the fragments of lineage hashes.
    pub(super) fn is_whole(&self, run: RunId) -> bool {
        self.meta.get(run.index()).is_some_and(|meta| meta.is_whole)
    }
}

/// Blocks that were added to the end of one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Added {
    pub(crate) run: RunId,
    /// The run's length now.
    pub(crate) end: u16,
    /// How many of the blocks were added.
    pub(crate) count: usize,
}

/// A writer's turn at one index; the others wait. Readers don't.
pub(crate) struct RunWriter<'a> {
    pub(super) store: &'a RunStore,
    pub(super) state: MutexGuard<'a, State>,
    guard: Guard,
    /// Blocks and bytes used since the turn began; negative where less is.
    used: (i64, i64),
}

impl<'a> RunWriter<'a> {
    pub(super) fn new(store: &'a RunStore) -> Self {
        let state = store.turns.state.lock();
        let writer = Self {
            store,
            state,
            guard: crossbeam_epoch::pin(),
            used: (0, 0),
        };
        writer.begin();
        writer
    }

    /// Makes the version odd before anything is changed. Only whoever has the turn changes it (Boehm, *Can seqlocks get along with
    /// programming language memory models?*, 2012).
    fn begin(&self) {
        let version = &self.store.turns.version;
        version.store(version.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// Makes the version even after everything has been changed, and accounts for it.
    fn end(&mut self) {
        let bytes = self.store.table.bytes() + self.store.roots.bytes();
        let before = std::mem::replace(&mut self.state.table_bytes, bytes);
        self.use_more(0, bytes.cast_signed() - before.cast_signed());
        let (blocks, bytes) = std::mem::take(&mut self.used);
        self.store.change_usage(blocks, bytes);
        let version = &self.store.turns.version;
        version.store(version.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    fn use_more(&mut self, blocks: i64, bytes: i64) {
        self.used.0 += blocks;
        self.used.1 += bytes;
    }

    /// Begins to note steps, and gives those noted so far.
    #[cfg(test)]
    pub(crate) fn take_steps(&mut self) -> Vec<Step> {
        self.state.steps.replace(Vec::new()).unwrap_or_default()
    }

    /// Lets another writer have a turn, if one waits; for whoever changes much. Readers' garbage can go meanwhile.
    pub(crate) fn pause(&mut self) {
        self.end();
        MutexGuard::bump(&mut self.state);
        self.begin();
        self.guard.repin();
    }

    fn meta(&self, run: RunId) -> Meta {
        self.state.meta.get(run.index()).copied().unwrap_or_default()
    }

    fn run(&self, run: RunId) -> Option<&Run> {
        self.store.slab.get(run, &self.guard)
    }

    /// The position of a run's first block.
    pub(crate) fn start(&self, run: RunId) -> usize {
        self.run(run).map_or(0, Run::start)
    }

    /// The block that the first block of `run` follows.
    pub(crate) fn parent(&self, run: RunId) -> Option<Spot> {
        self.meta(run).parent
    }

    /// The sequence hash of a block, or the fragment of it that is known.
    pub(crate) fn hash(&self, spot: Spot) -> u64 {
        self.run(spot.run)
            .map_or(0, |run| run.hash(usize::from(spot.offset)))
    }

    /// What names a block.
    pub(crate) fn key(&self, spot: Spot) -> Option<BlockKey> {
        Some(self.run(spot.run)?.key(usize::from(spot.offset)))
    }

    /// Whether the hashes of a run are whole, and not the fragments of lineage hashes.
    pub(crate) fn is_whole(&self, run: RunId) -> bool {
        self.meta(run).is_whole
    }

    /// Whether some hash has several places.
    pub(crate) fn has_doubles(&self) -> bool {
        self.store.doubles_count.load(Ordering::Relaxed) > 0
    }

    /// Asks for the memory that a search for `hash` looks at first.
    pub(crate) fn prefetch(&self, hash: u64) {
        self.store.prefetch(hash, &self.guard);
    }

    /// The first place with the whole hash `hash` that `is_wanted`.
    pub(crate) fn find_hash(&self, hash: u64, mut is_wanted: impl FnMut(Spot) -> bool) -> Option<Spot> {
        self.store.find(hash, &self.guard, |spot| {
            let is_it = self.meta(spot.run).is_whole && self.hash(spot) == hash && is_wanted(spot);
            is_it.then_some(spot)
        })
    }

    /// The first place that `key` names and that `is_wanted`.
    pub(crate) fn find_key(&self, key: &BlockKey, mut is_wanted: impl FnMut(Spot) -> bool) -> Option<Spot> {
        self.store.find(key.current, &self.guard, |spot| {
            let run = self.run(spot.run)?;
            let is_it = run.is_at(usize::from(spot.offset), key) && is_wanted(spot);
            is_it.then_some(spot)
        })
    }

    /// Whether another block with these hash bits than the one at `spot` is `wanted`.
    pub(crate) fn has_double(&self, hash: u64, spot: Spot, mut is_wanted: impl FnMut(Spot) -> bool) -> bool {
        let found = self.store.find(hash, &self.guard, |other| {
            let is_it = other != spot && (self.hash(other) ^ hash) & COMMON_MASK == 0 && is_wanted(other);
            is_it.then_some(())
        });
        found.is_some()
    }

    /// The block `key` that follows the one at `parent`.
    pub(crate) fn child(&self, parent: Option<Spot>, key: &BlockKey) -> Option<Spot> {
        if let Some(parent) = parent
            && parent.offset + 1 < self.meta(parent.run).len
        {
            let next = Spot {
                offset: parent.offset + 1,
                ..parent
            };
            if key.is_current(self.hash(next)) {
                return Some(next);
            }
        }
        self.find_key(key, |spot| {
            spot.offset == 0 && self.meta(spot.run).parent == parent
        })
    }

    /// How many of `hashes` are the whole hashes of the blocks from `spot` on.
    pub(crate) fn agreement(&self, spot: Spot, hashes: &[SequenceHash]) -> usize {
        let Some(run) = self.run(spot.run) else { return 0 };
        let from = usize::from(spot.offset);
        let to = usize::from(self.meta(spot.run).len);
        (from..to)
            .zip(hashes)
            .take_while(|(offset, hash)| run.hash(*offset) == hash.as_u64())
            .count()
    }

    /// Whether `hashes` are the whole hashes of the block at `last` and of those before it.
    pub(crate) fn are_backwards(&self, last: Spot, hashes: &[SequenceHash]) -> bool {
        let Some(run) = self.run(last.run) else {
            return false;
        };
        let end = usize::from(last.offset) + 1;
        hashes.len() <= end
            && (end - hashes.len()..end)
                .rev()
                .zip(hashes)
                .all(|(offset, hash)| run.hash(offset) == hash.as_u64())
    }

    /// Adds blocks that are not there yet: `first`, which follows the one at `parent`, and those after it; as many as one run
    /// can take. Nobody has them before [`Self::set_cutoff`] says so.
    ///
    /// A `strict` one stops before a block whose hash another block has already.
    pub(crate) fn add(
        &mut self,
        parent: Option<Spot>,
        first: BlockKey,
        hashes: &[SequenceHash],
        is_whole: bool,
        strict: bool,
    ) -> Option<Added> {
        let run = match parent.filter(|parent| self.can_append(*parent, is_whole)) {
            Some(parent) => parent.run,
            None => self.create(parent, first, hashes.len().min(RUN_BLOCKS_MAX), is_whole)?,
        };
        let len = usize::from(self.meta(run).len);
        let hashes = &hashes[..hashes.len().min(RUN_BLOCKS_MAX - len)];
        self.write(run, hashes);
        let count = self.publish(run, hashes, strict);
        let meta = self.state.meta.get_mut(run.index())?;
        // At most RUN_BLOCKS_MAX.
        meta.len = u16::try_from(len + count).unwrap_or(meta.len);
        let end = meta.len;
        if len == 0 && count > 0 && first.position == 0 {
            self.add_root(first.current, Spot { run, offset: 0 });
        }
        self.use_more((count as u64).cast_signed(), 0);
        if end == 0 {
            self.free(run);
        }
        Some(Added { run, end, count })
    }

    fn can_append(&self, parent: Spot, is_whole: bool) -> bool {
        let meta = self.meta(parent.run);
        parent.offset + 1 == meta.len && meta.is_whole == is_whole && usize::from(meta.len) < RUN_BLOCKS_MAX
    }

    fn create(
        &mut self,
        parent: Option<Spot>,
        first: BlockKey,
        capacity: usize,
        is_whole: bool,
    ) -> Option<RunId> {
        let id = match self.state.free.pop() {
            Some(id) => id,
            None => {
                let id = RunId::new(self.state.meta.len())?;
                self.state.meta.push(Meta::default());
                id
            }
        };
        // Never 0. Numbers come again only after billions of runs: no walk takes that long.
        self.state.births = self.state.births.checked_add(1).unwrap_or(1);
        let birth = self.state.births;
        let meta = self.state.meta.get_mut(id.index())?;
        *meta = Meta {
            parent,
            is_whole,
            birth,
            is_queued: meta.is_queued,
            ..Meta::default()
        };
        if let Some(parent) = parent
            && let Some(meta) = self.state.meta.get_mut(parent.run.index())
        {
            meta.children += 1;
            if let Some(run) = self.run(parent.run) {
                run.set_attached_end(run.attached_end().max(parent.offset + 1));
            }
        }
        let run = Run::new(first.position, first.parent.unwrap_or_default(), capacity);
        self.use_more(0, run.bytes().cast_signed());
        self.store.slab.set(id, Some(run), &self.guard);
        Some(id)
    }

    /// Writes hashes behind the end of a run. What was there before is never overwritten: readers may still compare with it.
    fn write(&mut self, id: RunId, hashes: &[SequenceHash]) {
        let Meta { len, written, .. } = self.meta(id);
        let (len, written) = (usize::from(len), usize::from(written));
        let Some(mut run) = self.run(id) else { return };
        let end = len + hashes.len();
        let is_same_again = (len..written)
            .zip(hashes)
            .all(|(offset, hash)| run.hash(offset) == hash.as_u64());
        let is_replaced = end > run.capacity() || !is_same_again;
        if is_replaced {
            let capacity = if end > run.capacity() {
                (run.capacity() * 2).min(RUN_BLOCKS_MAX).max(end)
            } else {
                run.capacity()
            };
            let grown = run.grown(capacity, len);
            let more = grown.bytes().cast_signed() - run.bytes().cast_signed();
            self.store.slab.set(id, Some(grown), &self.guard);
            self.use_more(0, more);
            let Some(replacement) = self.run(id) else { return };
            run = replacement;
        }
        let kept = if is_replaced { len } else { written };
        for (offset, hash) in (len..end).zip(hashes).skip(kept - len) {
            run.write(offset, hash.as_u64());
        }
        if let Some(meta) = self.state.meta.get_mut(id.index()) {
            meta.written = u16::try_from(end.max(kept)).unwrap_or(u16::MAX);
        }
    }

    /// Makes the blocks behind the end of a run findable; says how many.
    fn publish(&self, id: RunId, hashes: &[SequenceHash], strict: bool) -> usize {
        let table = &self.store.table;
        let ahead = table.ahead(hashes.iter().map(|hash| hash.as_u64()), &self.guard);
        for (index, ((hash, mixed), offset)) in ahead.zip(self.meta(id).len..).enumerate() {
            let spot = Spot { run: id, offset };
            if self.is_double(hash) {
                if strict {
                    return index;
                }
                self.note_conflicts(spot, hash);
                self.add_double(spot, hash);
                continue;
            }
            let is_same = |other| (self.hash(other) ^ hash) & COMMON_MASK == 0;
            let spill = |other| self.add_double(other, self.hash(other));
            match table.insert_mixed(mixed, spot, &self.guard, is_same, spill) {
                Inserted::Placed => {}
                Inserted::Same if strict => return index,
                Inserted::Same => {
                    self.note_conflicts(spot, hash);
                    self.add_double(spot, hash);
                }
                Inserted::NoRoom => self.add_double(spot, hash),
            }
        }
        hashes.len()
    }

    /// Lets queries see that a chain begins with `hash`; before anybody has it.
    fn add_root(&self, hash: u64, spot: Spot) {
        let mut is_complete = true;
        let spill = |_| is_complete = false;
        let inserted = self.store.roots.insert(hash, spot, &self.guard, |_| false, spill);
        if inserted != Inserted::Placed || !is_complete {
            self.store.has_all_roots.store(false, Ordering::SeqCst);
        }
    }

    /// Whether the hash has places beside the table, so that even if the table has none now, this is not the only one.
    fn is_double(&self, hash: u64) -> bool {
        self.has_doubles() && self.store.doubles.read().contains_key(&(hash & COMMON_MASK))
    }

    /// Counts a place that is stored with a second parent; before that can be seen, so that no search that sees it trusts
    /// the chain.
    fn note_conflicts(&self, spot: Spot, hash: u64) {
        let Some(key) = self.key(spot) else { return };
        let meets = |other: Spot| {
            let own = self.key(other);
            own.is_some_and(|own| own.position == key.position && key.is_current(own.current))
        };
        if self.has_double(hash, spot, meets) {
            self.store.chain_conflicts.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn add_double(&self, spot: Spot, hash: u64) {
        self.store.doubles_count.fetch_add(1, Ordering::SeqCst);
        let mut doubles = self.store.doubles.write();
        doubles.entry(hash & COMMON_MASK).or_default().push(spot);
    }

    /// Says how many blocks of `run` the holder has from now on; returns how many it had.
    ///
    /// What nobody has any more is gone with it: blocks behind the largest cutoff, and a run without any.
    pub(crate) fn set_cutoff(&mut self, run: RunId, slot: HolderSlot, cutoff: u16) -> u16 {
        let Some(found) = self.run(run) else { return 0 };
        let view = found.view(&self.guard);
        let before = view.cutoff(slot);
        if before == cutoff {
            return before;
        }
        #[cfg(test)]
        let step = self.step(run, before, cutoff);
        let cover = view.with(slot, cutoff);
        found.set_coverage(cover, &self.guard);
        let len = found.view(&self.guard).len();
        #[cfg(test)]
        if let Some(steps) = &mut self.state.steps {
            steps.push(step);
        }
        if len < self.meta(run).len {
            self.truncate(run, len);
        }
        if cutoff > before {
            self.note_stored(run, u64::from(cutoff - before));
        }
        before
    }

    #[cfg(test)]
    fn step(&self, run: RunId, before: u16, after: u16) -> Step {
        let offsets = before.min(after)..before.max(after);
        Step {
            keys: offsets
                .filter_map(|offset| self.key(Spot { run, offset }))
                .collect(),
            is_insertion: after > before,
        }
    }

    /// Forgets the blocks of a run from `len` on.
    fn truncate(&mut self, id: RunId, len: u16) {
        let end = self.meta(id).len;
        let Some(run) = self.run(id) else { return };
        if len == 0 && run.start() == 0 {
            let spill = |_| self.store.has_all_roots.store(false, Ordering::SeqCst);
            let first = Spot { run: id, offset: 0 };
            self.store.roots.remove(run.hash(0), first, &self.guard, spill);
        }
        let hashes = (len..end).map(|offset| run.hash(usize::from(offset)));
        for ((hash, mixed), offset) in self.store.table.ahead(hashes, &self.guard).zip(len..) {
            self.forget(Spot { run: id, offset }, hash, mixed);
        }
        let (capacity, bytes) = (run.capacity(), run.bytes());
        let is_sparse = capacity > 64 && usize::from(len) < capacity / 4;
        let shrunk = (is_sparse && len > 0).then(|| run.grown(usize::from(len), usize::from(len)));
        self.use_more(-i64::from(end - len), 0);
        if let Some(meta) = self.state.meta.get_mut(id.index()) {
            meta.len = len;
            if shrunk.is_some() {
                meta.written = len;
            }
        }
        if let Some(shrunk) = shrunk {
            self.use_more(0, shrunk.bytes().cast_signed() - bytes.cast_signed());
            self.store.slab.set(id, Some(shrunk), &self.guard);
        }
        if len == 0 {
            self.free(id);
        }
    }

    /// Makes a block unfindable.
    #[inline]
    fn forget(&self, spot: Spot, hash: u64, mixed: Mixed) {
        let table = &self.store.table;
        let spill = |other| self.add_double(other, self.hash(other));
        let was_in = table.remove_mixed(mixed, spot, &self.guard, spill);
        if self.has_doubles() {
            self.forget_double(spot, hash, was_in);
        }
    }

    /// Where one hash may have several places, and the one that was in the table or not has gone.
    #[cold]
    fn forget_double(&self, spot: Spot, hash: u64, was_in: bool) {
        let mut doubles = self.store.doubles.write();
        let Some(places) = doubles.get_mut(&(hash & COMMON_MASK)) else {
            return;
        };
        // Either the block itself is here, or one of these takes its place in the table.
        let own = places.iter().position(|other| *other == spot);
        if own.is_none() && !was_in {
            return;
        }
        let other = places.swap_remove(own.unwrap_or_default());
        if places.is_empty() {
            doubles.remove(&(hash & COMMON_MASK));
        }
        let mut homeless = Vec::new();
        if own.is_none() {
            let spill = |spot| homeless.push(spot);
            let inserted = self
                .store
                .table
                .insert(hash, other, &self.guard, |_| false, spill);
            if inserted != Inserted::Placed {
                homeless.push(other);
            }
        }
        for spot in &homeless {
            let key = self.hash(*spot) & COMMON_MASK;
            doubles.entry(key).or_default().push(*spot);
        }
        self.store
            .doubles_count
            .fetch_add(homeless.len() as u64, Ordering::SeqCst);
        self.store.doubles_count.fetch_sub(1, Ordering::SeqCst);
    }

    /// A run's length, and from where on no other run follows its blocks.
    pub(super) fn leaf(&self, id: RunId) -> (u16, u16) {
        (self.meta(id).len, self.run(id).map_or(0, Run::attached_end))
    }

    /// The holders that have more than `offset` blocks of a run.
    pub(super) fn holders_beyond(&self, id: RunId, offset: u16) -> Vec<HolderSlot> {
        let Some(run) = self.run(id) else {
            return Vec::new();
        };
        let mut holders = Vec::new();
        run.view(&self.guard)
            .for_each_level::<SlotSet>(None, |cutoff, slots| {
                if cutoff > offset {
                    holders.extend(slots.iter());
                }
            });
        holders
    }

    /// How many blocks of `run` the holder has.
    pub(crate) fn cutoff(&self, run: RunId, slot: HolderSlot) -> u16 {
        self.run(run)
            .map_or(0, |found| found.view(&self.guard).cutoff(slot))
    }

    /// When a run was last used; none where it is gone.
    pub(super) fn last_used(&self, id: RunId) -> Option<u32> {
        self.run(id).map(Run::last_used)
    }

    pub(super) fn touch(&self, id: RunId, tick: u32) {
        if let Some(run) = self.run(id) {
            run.touch(tick);
        }
    }

    /// Lets eviction look at a run, unless it will anyway.
    pub(super) fn enqueue(&mut self, id: RunId) {
        let used = self.last_used(id);
        if let (Some(used), Some(meta)) = (used, self.state.meta.get_mut(id.index()))
            && !meta.is_queued
        {
            meta.is_queued = true;
            self.state.eviction.put(used, id);
        }
    }

    pub(super) fn unmark_queued(&mut self, id: RunId) {
        if let Some(meta) = self.state.meta.get_mut(id.index()) {
            meta.is_queued = false;
        }
    }

    /// A run that goes away leaves its parent with a child less, and as recently used as itself.
    fn leave_parent(&mut self, id: RunId) {
        let Some(parent) = self.meta(id).parent else {
            return;
        };
        if let Some(meta) = self.state.meta.get_mut(parent.run.index()) {
            meta.children -= 1;
            if meta.children == 0
                && let Some(run) = self.store.slab.get(parent.run, &self.guard)
            {
                run.set_attached_end(0);
            }
        }
        if !self.store.is_bounded() {
            return;
        }
        self.touch(parent.run, self.last_used(id).unwrap_or_default());
        self.enqueue(parent.run);
    }

    fn free(&mut self, id: RunId) {
        self.leave_parent(id);
        let bytes = self.run(id).map_or(0, Run::bytes);
        self.use_more(0, -bytes.cast_signed());
        self.store.slab.set(id, None, &self.guard);
        if let Some(meta) = self.state.meta.get_mut(id.index()) {
            meta.birth = 0;
        }
        self.state.free.push(id);
        if self.state.free.len() == self.state.meta.len() {
            // The numbers in the queue mean nothing any more.
            self.state.eviction.forget_queue();
            self.store.slab.clear(&self.guard);
            self.state.free = Vec::new();
            self.state.meta = Vec::new();
            self.store.has_all_roots.store(true, Ordering::SeqCst);
            // There may be no further changes with which it would go: see `give_back_memory`.
            self.guard.flush();
        }
    }
}

impl Drop for RunWriter<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
