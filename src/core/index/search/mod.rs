//! The search: which holders hold how long a prefix.
//!
//! A search goes from run to run, from position 0 on. In each run it compares fingerprints to find where the query leaves the run,
//! and then looks at what each holder has of it: who has less drops out there; who has all of it goes on to the run that continues
//! with the query's next block.
//!
//! A sequence hash stands for its whole prefix: the contract says so. So the last block that agrees is looked for by its own hash, where
//! the query has it given; a byte of every 64th hash, beside the run, says where to look. Every hash is compared where anything
//! contradicts that, or could without being noticed: a hash under two parents, a holder whose hashes are a foreign chain, blocks that
//! are not found by their hashes.
//!
//! Why the answers are exact although looks are at different instants: see the index's own documentation. Where a step about one of the
//! runs was made meanwhile, the search is repeated, in the end in a turn at the runs.

mod branches;
mod chain;
mod depths;
mod matches;
mod rolled;
mod sparse;

use crate::epoch::Guard;
use smallvec::SmallVec;

use crate::wire::WorkerName;

use crate::index::directory::{Directory, HolderSlot, SlotBits, SlotGatherer};
use crate::sync::{Ordering, fence};

use super::hook::point;
use super::runs::{
    CHUNK, Column, Head, Roster, Run, RunId, RunStore, Spot, Version, Wanted, split_by_usable,
};
use super::shared::IndexShared;

use depths::{Depths, Groups};
use matches::{Found, FoundGroups, Near};

pub use chain::QueryChain;
pub use matches::{Match, Matches, NearBlocks};
pub use sparse::SparseChain;
pub(crate) use sparse::find_bounds;

/// In how many parts a stretch is cut to find where a query and a run part.
const PIVOTS: usize = 8;

/// How often a search is tried that steps come into, before it takes a turn at the runs.
pub(crate) const ATTEMPTS_MAX: usize = 3;

/// Which tiers count. Each step counts those before it, too: a block that is on the device is as near as one on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TierDepth {
    /// The device alone.
    Device,
    /// Device and host.
    Host,
    /// Wherever blocks lie.
    #[default]
    All,
    /// As [`Self::All`], and beside it how much lies on the device, and on device and host: see [`Matches::near_blocks`]. Bounds of a
    /// [`SparseChain`] are as of [`Self::All`] alone.
    Each,
}

impl TierDepth {
    /// The number of the step, as entries count them.
    pub(crate) fn step(self) -> u32 {
        match self {
            Self::Device => 0,
            Self::Host => 1,
            Self::All | Self::Each => 2,
        }
    }
}

/// The scope of a search: which holders it asks about, and which blocks count.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// Only these workers; all where it is absent.
    pub workers: Option<&'a [WorkerName]>,
    /// Only blocks in these tiers.
    pub tiers: TierDepth,
    /// No more blocks than these are usable: a request always computes its last token. No bound where it is absent.
    pub usable_max: Option<u32>,
}

impl Search<'_> {
    fn usable_max(&self) -> u32 {
        self.usable_max.unwrap_or(u32::MAX)
    }
}

/// Runs one search.
pub(crate) fn find(shared: &IndexShared, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
    // Before the first look, so that what is replaced from now on is noticed.
    let replacements = shared.replacements.load();
    if chain.is_empty() {
        return Matches(None);
    }
    let first = wanted(chain, 0);
    point();
    if !shared.runs.may_begin(first.hash) {
        return Matches(None);
    }
    let guard = &crate::epoch::pin();
    let wraps = shared.runs.wraps();
    point();
    let Some(head) = shared.runs.head(None, 0, first, guard) else {
        // One look: nobody had it all the time.
        return Matches(None);
    };
    chain.prefetch();
    // Holders that join later were not there when the query came, and their slots may have been others'.
    let directory = shared.slots.load();
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    let usable_max = search.usable_max();
    let (groups, near) = if directory.is_small() {
        let asked = asked.map(|asked| u64::from_words(asked.words().iter().copied()));
        let start = Start {
            asked,
            head,
            wraps,
            usable_max,
        };
        let (groups, near) = find_in(shared, chain, search.tiers, &start, &directory, guard);
        (FoundGroups::Small(groups), near)
    } else {
        let start = Start {
            asked,
            head,
            wraps,
            usable_max,
        };
        let (groups, near) = find_in(shared, chain, search.tiers, &start, &directory, guard);
        (FoundGroups::Any(Box::new(groups)), near)
    };
    Matches(Some(Box::new(Found {
        directory,
        groups,
        near,
        replacements,
    })))
}

/// With what a search begins.
struct Start<'g, S> {
    /// The holders that it asks about; all where it is absent.
    asked: Option<S>,
    /// The first run.
    head: Head<'g>,
    /// How many counts of steps had begun anew before that was found.
    wraps: u64,
    /// No more blocks are usable.
    usable_max: u32,
}

/// Searches with one kind of sets. Gives groups in order, and what lies near where that is asked.
#[inline]
fn find_in<S: SlotBits>(
    shared: &IndexShared,
    chain: &mut QueryChain<'_>,
    tiers: TierDepth,
    start: &Start<'_, S>,
    directory: &Directory,
    guard: &Guard,
) -> (Groups<S>, Option<Near>) {
    let usable_max = start.usable_max;
    let step = match tiers {
        TierDepth::Each => {
            let [all, near @ ..] = find_steps(shared, chain, [2, 0, 1], start, guard);
            let near = Near::of(&near.map(|depths| depths.finish(usable_max, directory)));
            return (all.finish(usable_max, directory), Some(near));
        }
        tiers => tiers.step(),
    };
    let [depths] = find_steps(shared, chain, [step], start, guard);
    (depths.finish(usable_max, directory), None)
}

/// Finds how deep holders are at each of some steps of tiers: all at one instant.
#[inline(never)]
fn find_steps<S: SlotBits, const STEPS: usize>(
    shared: &IndexShared,
    chain: &mut QueryChain<'_>,
    steps: [u32; STEPS],
    start: &Start<'_, S>,
    guard: &Guard,
) -> [Depths<S>; STEPS] {
    let (mut head, mut attempts) = (Some(start.head), 0..ATTEMPTS_MAX);
    loop {
        // Nobody makes a step in another one's turn.
        let turn = attempts.next().is_none().then(|| shared.runs.write());
        let mut finder = Finder {
            store: &shared.runs,
            chain: &mut *chain,
            steps,
            guard,
            is_chain: shared.is_chain(),
            found: std::array::from_fn(|_| Depths::default()),
            usable_max: start.usable_max,
            looked: SmallVec::new(),
            is_split: false,
        };
        finder.follow(head.take(), start.asked.as_ref());
        point();
        if shared.runs.has_bars() && !finder.is_split {
            finder.split();
        }
        point();
        if turn.is_some() || finder.is_of_one_instant() && shared.runs.wraps() == start.wraps {
            return finder.found;
        }
    }
}

/// One pass over the runs along a query.
struct Finder<'f, 'q, 'g, S, const STEPS: usize> {
    store: &'f RunStore,
    chain: &'f mut QueryChain<'q>,
    /// Which steps of tiers are asked about.
    steps: [u32; STEPS],
    guard: &'g Guard,
    /// Whether no hash is known that does not name all before it.
    is_chain: bool,
    /// The holders found so far with their depths, for each of the steps.
    found: [Depths<S>; STEPS],
    /// The runs that were looked at, each with its version before the first look.
    looked: SmallVec<[(&'g Run, Version); 4]>,
    /// No more blocks are usable.
    usable_max: u32,
    /// Whether it is found out how many blocks are usable.
    is_split: bool,
}

impl<'f, 'q, 'g: 'f, S: SlotBits, const STEPS: usize> Finder<'f, 'q, 'g, S, STEPS> {
    /// Whether what holders have of the runs that were looked at was the same from the first look to now.
    #[inline]
    fn is_of_one_instant(&self) -> bool {
        // Whoever has seen a change of a step sees that it has begun.
        fence(Ordering::Acquire);
        let mut looked = self.looked.iter();
        looked.all(|(run, version)| run.is_still(*version))
    }

    /// Finds out how many of their blocks holders can use, where the runs that were looked at are those along the query.
    #[inline(never)]
    fn split(&mut self) {
        let (looked, guard, usable_max) = (&self.looked, self.guard, self.usable_max);
        if !looked.iter().any(|(run, _)| run.has_bars(guard)) {
            return;
        }
        for (step, found) in self.steps.iter().zip(&mut self.found) {
            found.split(|depth, slots, told| {
                let path = looked.iter().rev().map(|(run, _)| *run);
                split_by_usable(path, depth.min(usable_max), *step, slots, guard, told);
            });
        }
    }

    /// Settles all holders, or the `candidates`; from the first run on, if that has been found.
    #[inline]
    fn follow(&mut self, mut found: Option<Head<'g>>, candidates: Option<&S>) {
        if !self.chain.is_whole() && self.store.twins() > 0 {
            // What the query gives of a hash may be that of several blocks after the same one.
            return self.follow_branches(candidates);
        }
        let mut candidates = [(); STEPS].map(|()| candidates.cloned());
        let (tick, has_bars) = (self.store.tick(), self.store.has_bars());
        let (mut before, mut start): (Option<Spot>, usize) = (None, 0);
        loop {
            point();
            let head = found.take().or_else(|| {
                let first = wanted(self.chain, start);
                self.store.head(before, position(start), first, self.guard)
            });
            let Some(Head { id, run, version }) = head else {
                break;
            };
            self.looked.push((run, version));
            if let Some(tick) = tick {
                run.touch(tick);
            }
            if has_bars {
                run.prefetch_bars_word();
            }
            point();
            let agreed = match self.whole_agreement(run, start) {
                Some(agreed) => agreed,
                None => self.agreement(run, start),
            };
            if agreed == 0 {
                break;
            }
            if has_bars {
                run.prefetch_bars(agreed, self.guard);
            }
            let end = start + agreed;
            point();
            let is_last = end >= self.chain.len() || !run.is_followed();
            if !is_last {
                // The next hash decides where it goes on, if it does.
                let next = self.chain.hash(end);
                let spot = spot(id, agreed - 1);
                self.store.prefetch_head(spot, position(end), next, self.guard);
            }
            point();
            for (step, candidates) in candidates.iter_mut().enumerate() {
                *candidates = Some(self.look_for(step, candidates.take(), run, start, agreed));
            }
            start = end;
            before = spot(id, agreed - 1);
            if is_last || candidates.iter().flatten().all(S::is_empty) {
                break;
            }
        }
        for (found, candidates) in self.found.iter_mut().zip(&candidates) {
            if let Some(candidates) = candidates {
                found.settle(position(start), candidates);
            }
        }
    }

    /// The holders of the first `agreed` blocks of a run that begins at `start`, if they are asked about. Notes those that have fewer.
    // In the loop of its caller, which is long, its few words would not stay in registers.
    #[inline(never)]
    fn look_at(
        &mut self,
        step: usize,
        roster: Roster<'g>,
        start: usize,
        agreed: usize,
        mut is_asked: impl FnMut(HolderSlot) -> bool,
    ) -> S {
        let (found, step) = (&mut self.found[step], self.steps[step]);
        let mut through = SlotGatherer::default();
        for list in roster.lists() {
            for entry in list {
                point();
                let slot = entry.slot();
                // Mostly they have all; who is nobody has nothing.
                if entry.reaches(step, agreed) {
                    if is_asked(slot) {
                        through.insert(slot);
                    }
                    continue;
                }
                let end = start + usize::from(entry.reach(step));
                if end > 0 && !entry.is_none() && is_asked(slot) {
                    found.leave(position(end), slot);
                }
            }
        }
        through.finish()
    }

    /// As [`Self::look_at`], among `candidates` where there are any. Those that have nothing of the run end with the block before.
    #[inline]
    fn look_for(
        &mut self,
        step: usize,
        candidates: Option<S>,
        run: &'g Run,
        start: usize,
        agreed: usize,
    ) -> S {
        let roster = run.roster(self.guard);
        let all = roster.all::<S>(self.steps[step], agreed);
        let Some(mut candidates) = candidates else {
            return all.unwrap_or_else(|| self.look_at(step, roster, start, agreed, |_| true));
        };
        let (seen, through) = if let Some(mut all) = all {
            all.intersect(&candidates);
            (all.clone(), all)
        } else {
            let mut seen = SlotGatherer::default();
            let through = self.look_at(step, roster, start, agreed, |slot| {
                let is_candidate = candidates.contains(slot);
                if is_candidate {
                    seen.insert(slot);
                }
                is_candidate
            });
            (seen.finish(), through)
        };
        candidates.subtract(&seen);
        self.found[step].settle(position(start), &candidates);
        through
    }

    /// Whether the query's hashes are given, and each names all before it.
    #[inline]
    fn names_all_before(&mut self) -> bool {
        self.is_chain && self.chain.rolled().is_none()
    }

    /// How many blocks a run has, where each hash names all before it and the query has the last one in its place.
    #[inline]
    fn whole_agreement(&mut self, run: &Run, start: usize) -> Option<usize> {
        if !self.names_all_before() {
            return None;
        }
        let len = usize::from(run.len());
        point();
        let last = start + len.checked_sub(1)?;
        (last < self.chain.len() && self.chain.hash(last) == run.last()).then_some(len)
    }

    /// How many of a run's blocks, from its first, the query has from `start` on.
    fn agreement(&mut self, run: &Run, start: usize) -> usize {
        let column = run.column(self.guard);
        point();
        let own = usize::from(run.len()).min(column.capacity());
        let len = own.min(self.chain.len() - start);
        if self.names_all_before() {
            return self.last_agreement(run, column, start, len);
        }
        let (guard, prints) = (self.guard, &self.store.prints);
        if let Some(rolled) = self.chain.rolled() {
            column.prefetch_prints(len / CHUNK, true);
            let is = |offset: usize, wanted| column.is(offset, position(start + offset), wanted, guard);
            rolled.agreement(column, start, len, prints, is)
        } else {
            self.first_difference(run, column, start, len)
        }
    }

    /// As [`Self::agreement`], where each hash names all before it, of `len` blocks that both have. Where the run is longer than the query, the
    /// query's end is looked at first: [`Self::whole_agreement`] has not.
    fn last_agreement(&mut self, run: &Run, column: Column<'_>, start: usize, len: usize) -> usize {
        point();
        let unknown = run.marked(len, |offset| self.chain.hash(start + offset));
        point();
        // All before `same` are the same, the one at `different` is not, or is none.
        let (mut same, mut different) = (unknown.start, unknown.end);
        let may_have_all = different == len && (1..usize::from(run.len())).contains(&len);
        column.prefetch(same.saturating_sub(1));
        if may_have_all {
            column.prefetch(len - 1);
        } else {
            prefetch_pivots(column, same, different);
        }
        if same > 0 && !self.is_same(column, start, same - 1) {
            (same, different) = (0, same - 1);
            prefetch_pivots(column, same, different);
        } else if may_have_all {
            if self.is_same(column, start, len - 1) {
                return len;
            }
            different = len - 1;
            prefetch_pivots(column, same, different);
        }
        while same < different {
            point();
            let (mut from, mut to) = (same, different);
            for pivot in pivots(same, different) {
                if !self.is_same(column, start, pivot) {
                    to = pivot;
                    break;
                }
                from = pivot + 1;
            }
            (same, different) = (from, to);
            prefetch_pivots(column, same, different);
        }
        same
    }

    fn is_same(&mut self, column: Column<'_>, start: usize, offset: usize) -> bool {
        let wanted = wanted(self.chain, start + offset);
        column.is(offset, position(start + offset), wanted, self.guard)
    }

    /// As [`Self::agreement`], whatever the hashes are: all are compared.
    fn first_difference(&mut self, run: &Run, column: Column<'_>, start: usize, len: usize) -> usize {
        column.prefetch_prints(len / CHUNK, false);
        if len > 0 && self.chain.hash(start + len - 1) != run.last() {
            // What is compared last is asked for first.
            let unknown = run.marked(len, |offset| self.chain.hash(start + offset));
            prefetch_pivots(column, unknown.start, unknown.end);
        }
        let (is_whole, mut agreed) = (self.chain.is_whole(), 0);
        while agreed < len {
            point();
            let at = start + agreed;
            // Fingerprints are of blocks from a multiple of 32 on.
            if at.is_multiple_of(CHUNK)
                && agreed + CHUNK <= len
                && self.chain.print(at, &self.store.prints) == Some(column.print(agreed / CHUNK))
            {
                agreed += CHUNK;
                continue;
            }
            let hash = self.chain.hash(at);
            if !column.is(agreed, position(at), Wanted { hash, is_whole }, self.guard) {
                break;
            }
            agreed += 1;
        }
        agreed
    }
}

/// The offsets at which a stretch is cut.
#[inline]
fn pivots(from: usize, to: usize) -> impl Iterator<Item = usize> {
    let step = (to - from).div_ceil(PIVOTS).max(1);
    (from + step - 1..to).step_by(step)
}

/// Asks for what is compared first between two offsets.
#[inline]
fn prefetch_pivots(column: Column<'_>, from: usize, to: usize) {
    pivots(from, to).for_each(|pivot| column.prefetch(pivot));
}

/// The hash by which the block of a query at `index` is found.
fn wanted(chain: &mut QueryChain<'_>, index: usize) -> Wanted {
    Wanted {
        hash: chain.hash(index),
        is_whole: chain.is_whole(),
    }
}

/// Positions are below 2^24.
fn position(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn spot(run: RunId, offset: usize) -> Option<Spot> {
    let offset = u16::try_from(offset).ok()?;
    Some(Spot { run, offset })
}
