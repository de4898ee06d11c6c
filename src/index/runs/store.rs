//! The runs of one index, and how readers find them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_epoch::Guard;
use parking_lot::{Mutex, RwLock};

use super::super::capacity::{Capacity, Usage};
use super::Spot;
use super::coverage::Cover;
use super::run::{BlockKey, COMMON_MASK, Run};
use super::slab::{RunId, Slab};
use super::table::Table;
use super::writer::{RunWriter, State};

/// Blocks whose hash another block has, too, by the bits of it that the table is keyed by.
pub(super) type Doubles = HashMap<u64, Vec<Spot>>;

/// All runs of one index.
#[derive(Debug)]
pub(crate) struct RunStore {
    pub(super) table: Table,
    /// The first blocks of chains once more: so few that they stay in the processor's cache, where a query that nobody has anything
    /// of is answered.
    pub(super) roots: Table,
    /// Whether all first blocks are there. Hashes that are no chain, or meet in one place, can be too much for it.
    pub(super) has_all_roots: AtomicBool,
    pub(super) slab: Slab,
    /// The table has one place a hash. Where hashes are no chain, one hash can have several; the others are here.
    pub(super) doubles: RwLock<Doubles>,
    /// How many places `doubles` has. Readers look there, under its lock, only where there are any.
    pub(super) doubles_count: AtomicU64,
    pub(super) chain_conflicts: AtomicU64,
    /// What this index uses, and what all together do.
    usage: Usage,
    total: Arc<Usage>,
    /// Blocks forgotten because there were too many.
    pub(super) evicted: AtomicU64,
    /// The clock of recency.
    pub(super) tick: AtomicU32,
    /// Odd while a writer has its turn.
    pub(super) turns: AtomicU64,
    pub(super) state: Mutex<State>,
}

/// A block found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<'g> {
    pub(crate) run: &'g Run,
    pub(crate) offset: usize,
}

impl RunStore {
    pub(crate) fn new(capacity: Capacity, total: Arc<Usage>) -> Self {
        let store = Self {
            table: Table::new(),
            roots: Table::new(),
            has_all_roots: AtomicBool::new(true),
            slab: Slab::new(),
            doubles: RwLock::default(),
            doubles_count: AtomicU64::new(0),
            chain_conflicts: AtomicU64::new(0),
            usage: Usage::of(capacity),
            total,
            evicted: AtomicU64::new(0),
            tick: AtomicU32::new(1),
            turns: AtomicU64::new(0),
            state: Mutex::default(),
        };
        // Accounts for the table.
        drop(store.write());
        store
    }

    /// Takes a turn at changing the store.
    pub(crate) fn write(&self) -> RunWriter<'_> {
        RunWriter::new(self)
    }

    /// A number that is the same as long as no writer changes anything; none while one has its turn.
    pub(crate) fn version(&self) -> Option<u64> {
        // What was read before belongs to before.
        fence(Ordering::Acquire);
        let turns = self.turns.load(Ordering::Acquire);
        turns.is_multiple_of(2).then_some(turns)
    }

    /// How many distinct blocks there are.
    pub(crate) fn len(&self) -> u64 {
        self.usage.blocks()
    }

    /// What the runs and the table take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.usage.bytes()
    }

    /// How many blocks were forgotten because there were too many.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    pub(super) fn add_used(&self, blocks: u64, bytes: u64) {
        self.usage.add(blocks, bytes);
        self.total.add(blocks, bytes);
    }

    pub(super) fn subtract_used(&self, blocks: u64, bytes: u64) {
        self.usage.subtract(blocks, bytes);
        self.total.subtract(blocks, bytes);
    }

    /// Whether there is a bound on how large the index may be.
    pub(super) fn is_bounded(&self) -> bool {
        self.usage.is_bounded() || self.total.is_bounded()
    }

    /// How many blocks fit, roughly.
    pub(super) fn blocks_max(&self) -> u64 {
        self.usage.blocks_max().min(self.total.blocks_max())
    }

    /// How many blocks are more than this index may have.
    pub(crate) fn excess_blocks(&self) -> u64 {
        self.usage.excess_blocks()
    }

    /// The tick in which what a search looks at is used; none where nobody asks.
    #[inline]
    pub(crate) fn tick(&self) -> Option<u32> {
        self.is_bounded().then(|| self.tick.load(Ordering::Relaxed))
    }

    /// How often one place (position and current fragment) was stored with two parents.
    pub(crate) fn chain_conflicts(&self) -> u64 {
        self.chain_conflicts.load(Ordering::SeqCst)
    }

    /// Asks for the memory that [`Self::locate`] looks at first.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64, guard: &Guard) {
        self.table.prefetch(hash, guard);
    }

    /// Whether there may be a block with this hash at position 0; if not, nobody has one.
    #[inline]
    pub(crate) fn may_have_root(&self, hash: u64, guard: &Guard) -> bool {
        self.roots.find(hash, guard, Some).is_some() || !self.has_all_roots.load(Ordering::SeqCst)
    }

    /// The block that `key` names. Where hashes are no chain there may be several; see [`Self::for_each`].
    #[inline]
    pub(crate) fn locate<'g>(&self, key: &BlockKey, guard: &'g Guard) -> Option<Found<'g>> {
        let check = |spot: Spot| {
            let offset = usize::from(spot.offset);
            let run = self.slab.get(spot.run, guard)?;
            run.is_at(offset, key).then_some(Found { run, offset })
        };
        if key.position == 0 && self.has_all_roots.load(Ordering::SeqCst) {
            return self.roots.find(key.current, guard, check);
        }
        self.find(key.current, guard, check)
    }

    /// The place of a block that `key` names.
    pub(crate) fn spot(&self, key: &BlockKey) -> Option<Spot> {
        let guard = &crossbeam_epoch::pin();
        self.find(key.current, guard, |spot| {
            let run = self.slab.get(spot.run, guard)?;
            run.is_at(usize::from(spot.offset), key).then_some(spot)
        })
    }

    /// Every block that `key` names.
    pub(crate) fn for_each<'g>(&self, key: &BlockKey, guard: &'g Guard, mut each: impl FnMut(Found<'g>)) {
        self.find(key.current, guard, |spot| {
            let offset = usize::from(spot.offset);
            if let Some(run) = self.slab.get(spot.run, guard)
                && run.is_at(offset, key)
            {
                each(Found { run, offset });
            }
            None::<()>
        });
    }

    /// The first place that may be of `hash` for which `check` gives something.
    #[inline]
    pub(super) fn find<T>(
        &self,
        hash: u64,
        guard: &Guard,
        mut check: impl FnMut(Spot) -> Option<T>,
    ) -> Option<T> {
        if self.doubles_count.load(Ordering::SeqCst) == 0 {
            return self.table.find(hash, guard, check);
        }
        // Under the lock while looking in both, so that no place moves from one to the other in between.
        let doubles = self.doubles.read();
        self.table.find(hash, guard, &mut check).or_else(|| {
            let places = doubles.get(&(hash & COMMON_MASK))?;
            places.iter().copied().find_map(check)
        })
    }
}

impl Drop for RunStore {
    fn drop(&mut self) {
        self.total.subtract(self.usage.blocks(), self.usage.bytes());
        let guard = &crossbeam_epoch::pin();
        for index in 0..self.state.get_mut().runs_ever() {
            if let Some(id) = RunId::new(index)
                && let Some(run) = self.slab.get(id, guard)
            {
                run.set_coverage(Cover::Nobody, guard);
                self.slab.set(id, None, guard);
            }
        }
        self.slab.clear(guard);
    }
}
