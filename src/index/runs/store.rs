//! The runs of one index, and how readers find them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_epoch::Guard;
use crossbeam_utils::CachePadded;
use parking_lot::{Mutex, RwLock};

use super::super::capacity::{Capacity, Usage};
use super::Spot;
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
    /// What all indexes together use.
    total: Arc<Usage>,
    /// Whether there is a bound on how large the index may be.
    is_bounded: bool,
    /// The clock of recency.
    pub(super) tick: AtomicU32,
    pub(super) turns: CachePadded<Turns>,
}

/// What every turn changes. On cache lines of its own: searches would wait for all that is beside it.
#[derive(Debug)]
pub(super) struct Turns {
    /// Odd while a writer has its turn.
    pub(super) version: AtomicU64,
    pub(super) state: Mutex<State>,
    /// What this index uses.
    usage: Usage,
    /// Blocks forgotten because there were too many.
    pub(super) evicted: AtomicU64,
}

/// A block found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<'g> {
    pub(crate) run: &'g Run,
    pub(crate) offset: usize,
}

/// Where a first block may be, as far as its hash says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Root {
    /// Nobody has one.
    Nobody,
    /// Here, if it is not another one with some of the same bits.
    At(Spot),
    /// Not in the small table, which has not all.
    Elsewhere,
}

impl RunStore {
    pub(crate) fn new(capacity: Capacity, total: Arc<Usage>) -> Self {
        let usage = Usage::of(capacity);
        let store = Self {
            is_bounded: usage.is_bounded() || total.is_bounded(),
            table: Table::new(),
            roots: Table::new(),
            has_all_roots: AtomicBool::new(true),
            slab: Slab::new(),
            doubles: RwLock::default(),
            doubles_count: AtomicU64::new(0),
            chain_conflicts: AtomicU64::new(0),
            total,
            tick: AtomicU32::new(1),
            turns: CachePadded::new(Turns {
                version: AtomicU64::new(0),
                state: Mutex::default(),
                usage,
                evicted: AtomicU64::new(0),
            }),
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
        let version = self.turns.version.load(Ordering::Acquire);
        version.is_multiple_of(2).then_some(version)
    }

    /// How many distinct blocks there are.
    pub(crate) fn len(&self) -> u64 {
        self.turns.usage.blocks()
    }

    /// What the runs and the table take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.turns.usage.bytes()
    }

    /// How many blocks were forgotten because there were too many.
    pub(crate) fn evicted(&self) -> u64 {
        self.turns.evicted.load(Ordering::Relaxed)
    }

    /// Accounts for what a turn has changed.
    pub(super) fn change_usage(&self, blocks: i64, bytes: i64) {
        self.turns.usage.change(blocks, bytes);
        self.total.change(blocks, bytes);
    }

    /// Whether there is a bound on how large the index may be.
    #[inline]
    pub(super) fn is_bounded(&self) -> bool {
        self.is_bounded
    }

    /// How many blocks fit, roughly.
    pub(super) fn blocks_max(&self) -> u64 {
        self.turns.usage.blocks_max().min(self.total.blocks_max())
    }

    /// How many blocks are more than this index may have.
    pub(crate) fn excess_blocks(&self) -> u64 {
        self.turns.usage.excess_blocks()
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

    /// What the small table says of a first block with this hash.
    #[inline]
    pub(crate) fn root(&self, hash: u64, guard: &Guard) -> Root {
        match self.roots.find(hash, guard, Some) {
            Some(spot) => Root::At(spot),
            None if self.has_all_roots.load(Ordering::SeqCst) => Root::Nobody,
            None => Root::Elsewhere,
        }
    }

    /// The first block that `key` names, if it is where [`Self::root`] said.
    #[inline]
    pub(crate) fn at_root<'g>(&self, root: Root, key: &BlockKey, guard: &'g Guard) -> Option<Found<'g>> {
        let Root::At(spot) = root else { return None };
        self.found_at(spot, key, guard)
    }

    #[inline]
    fn found_at<'g>(&self, spot: Spot, key: &BlockKey, guard: &'g Guard) -> Option<Found<'g>> {
        let offset = usize::from(spot.offset);
        let run = self.slab.get(spot.run, guard)?;
        run.is_at(offset, key).then_some(Found { run, offset })
    }

    /// The block that `key` names. Where hashes are no chain there may be several; see [`Self::for_each`].
    #[inline]
    pub(crate) fn locate<'g>(&self, key: &BlockKey, guard: &'g Guard) -> Option<Found<'g>> {
        let check = |spot: Spot| self.found_at(spot, key, guard);
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
        let usage = &self.turns.usage;
        self.total
            .change(-usage.blocks().cast_signed(), -usage.bytes().cast_signed());
        let guard = &crossbeam_epoch::pin();
        for index in 0..self.turns.state.get_mut().runs_ever() {
            if let Some(id) = RunId::new(index)
                && let Some(run) = self.slab.get(id, guard)
            {
                run.clear_coverage(guard);
                self.slab.set(id, None, guard);
            }
        }
        self.slab.clear(guard);
    }
}
