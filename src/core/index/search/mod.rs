//! The search: finds the length of the prefix that each holder has.
//!
//! A search goes from run to run, from position 0 on. In each run it first finds the leading blocks that agree with
//! the query. Then it reads how many of these blocks each holder has. A holder that lacks some of them drops out. For
//! the other holders the search goes on to the run that continues with the query's next block.
//!
//! By the contract, a sequence hash stands for its whole prefix. So if the query gives hashes, the search finds the
//! last block that agrees by bisection, and compares only a few hashes. Marks tell where to look: a mark is one byte
//! of every 64th hash, stored in the run. The search compares every hash if hashes may not stand for their prefixes:
//! if a hash has two parents, or if a holder's hashes are not the contract's chain.
//!
//! The documentation of the index explains why the answers are exact although the runs are read at different
//! instants. If a writer changes one of the runs during the search, the search is repeated. After some repetitions
//! the search takes a turn at the runs.

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
use matches::{FoundGroups, MatchedGroups, Near};

pub use chain::QueryChain;
pub use matches::{Match, Matches, NearBlocks};
pub use sparse::SparseChain;
pub(crate) use sparse::find_bounds;

/// Number of parts into which a stretch of blocks is divided to find the first block at which query and run differ.
const PIVOTS: usize = 8;

/// Maximum number of tries of a search while writers change the runs that it reads. After that, the search takes the
/// writers' lock.
pub(crate) const ATTEMPTS_MAX: usize = 3;

/// Tiers that count in a search. Each value includes the tiers of the previous value: with [`Self::Host`], blocks on
/// the device count, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TierDepth {
    /// The device only.
    Device,
    /// Device and host.
    Host,
    /// All tiers.
    #[default]
    All,
    /// All tiers, as with [`Self::All`]. In addition, the search tells how many blocks lie on the device, and how many
    /// on device and host together: see [`Matches::near_blocks`]. With a [`SparseChain`] this is the same as
    /// [`Self::All`].
    Each,
}

impl TierDepth {
    /// Returns the number of this step of tiers, as roster entries count it: 0 for the device, 1 for device and host,
    /// 2 for all.
    pub(crate) fn step(self) -> u32 {
        match self {
            Self::Device => 0,
            Self::Host => 1,
            Self::All | Self::Each => 2,
        }
    }
}

/// Scope of a search: the workers whose holders are searched, and the blocks that count.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// Workers whose holders are searched; all workers if `None`.
    pub workers: Option<&'a [WorkerName]>,
    /// Tiers whose blocks count.
    pub tiers: TierDepth,
    /// Maximum number of blocks that count as usable. A request always computes its last token, so it cannot use every
    /// block. `None` is no bound.
    pub usable_max: Option<u32>,
}

impl Search<'_> {
    fn usable_max(&self) -> u32 {
        self.usable_max.unwrap_or(u32::MAX)
    }
}

/// Returns, for each holder, the length of the prefix of `chain` that it holds.
pub(crate) fn find(shared: &IndexShared, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
    // The count is read before any run, so that the search notices each state that is replaced from now on.
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
        // The search need not be repeated: at some instant of the look-up, no holder had the block.
        return Matches(None);
    };
    chain.prefetch();
    // A holder that joins later was not there when the query came, and its slot may have belonged to another holder.
    let directory = shared.slots.load();
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    let usable_max = search.usable_max();
    let (groups, near) = if directory.is_small() {
        let asked = asked.map(|asked| u64::from_words(asked.words().iter().copied()));
        let start = SearchStart {
            asked,
            head,
            wraps,
            usable_max,
        };
        let (groups, near) = find_in(shared, chain, search.tiers, &start, &directory, guard);
        (FoundGroups::Small(groups), near)
    } else {
        let start = SearchStart {
            asked,
            head,
            wraps,
            usable_max,
        };
        let (groups, near) = find_in(shared, chain, search.tiers, &start, &directory, guard);
        (FoundGroups::Any(Box::new(groups)), near)
    };
    Matches(Some(Box::new(MatchedGroups {
        directory,
        groups,
        near,
        replacements,
    })))
}

/// State with which a search begins.
struct SearchStart<'g, S> {
    /// Holders that are searched; all holders if `None`.
    asked: Option<S>,
    /// The run that begins with the query's first block.
    head: Head<'g>,
    /// Number of wrap-arounds of change counters before the search found its first run. If the number has grown after
    /// the search, the change counters prove nothing.
    wraps: u64,
    /// Maximum number of blocks that count as usable.
    usable_max: u32,
}

/// Searches with sets of the kind `S`. Returns the found holders in groups, in order. With [`TierDepth::Each`], also
/// returns the numbers of leading blocks on the device, and on device and host.
#[inline]
fn find_in<S: SlotBits>(
    shared: &IndexShared,
    chain: &mut QueryChain<'_>,
    tiers: TierDepth,
    start: &SearchStart<'_, S>,
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

/// Finds how many leading blocks each holder has at each of the tier steps in `steps`: 0 is the device, 1 is device and
/// host, 2 is all tiers. All these numbers were true at the same instant.
#[inline(never)]
fn find_steps<S: SlotBits, const STEPS: usize>(
    shared: &IndexShared,
    chain: &mut QueryChain<'_>,
    steps: [u32; STEPS],
    start: &SearchStart<'_, S>,
    guard: &Guard,
) -> [Depths<S>; STEPS] {
    let (mut head, mut attempts) = (Some(start.head), 0..ATTEMPTS_MAX);
    loop {
        // After the last attempt, this thread takes the lock of the writers. While it has the lock, no writer makes a
        // step.
        let turn = attempts.next().is_none().then(|| shared.runs.write());
        let mut finder = Finder {
            store: &shared.runs,
            chain: &mut *chain,
            steps,
            guard,
            is_chain: shared.is_chain(),
            found: std::array::from_fn(|_| Depths::default()),
            usable_max: start.usable_max,
            twin_births: shared.runs.twin_births(),
            looked: SmallVec::new(),
            is_split: false,
        };
        finder.follow(head.take(), start.asked.as_ref());
        point();
        if shared.runs.has_bars() && !finder.is_split {
            finder.split();
        }
        point();
        // A step that gives a hash a second parent counts it before anything of the step is seen.
        let was_chain = || !finder.is_chain || shared.is_chain();
        let knew_all = || shared.runs.wraps() == start.wraps && was_chain() && finder.knew_twins();
        if turn.is_some() || finder.is_of_one_instant() && knew_all() {
            return finder.found;
        }
    }
}

/// State of one pass of a search, which follows the query from run to run. A search makes several passes if writers
/// change the runs.
struct Finder<'f, 'q, 'g, S, const STEPS: usize> {
    store: &'f RunStore,
    chain: &'f mut QueryChain<'q>,
    /// Tier steps for which the search finds depths: 0 is the device, 1 is device and host, 2 is all tiers.
    steps: [u32; STEPS],
    guard: &'g Guard,
    /// Whether, as far as is known, each hash identifies its whole prefix.
    is_chain: bool,
    /// Holders found so far and their depths, separately for each step in `steps`.
    found: [Depths<S>; STEPS],
    /// Runs that the search has read in this pass, each with its change counter before the first read.
    looked: SmallVec<[(&'g Run, Version); 4]>,
    /// Maximum number of blocks that count as usable.
    usable_max: u32,
    /// Number of twins that had ever been made before this pass.
    twin_births: u64,
    /// Whether the found holders have been split by their numbers of usable blocks.
    is_split: bool,
}

impl<'f, 'q, 'g: 'f, S: SlotBits, const STEPS: usize> Finder<'f, 'q, 'g, S, STEPS> {
    /// Whether each run that this pass has read is still unchanged: the same holders have the same blocks of the run as
    /// at the first read.
    #[inline]
    fn is_of_one_instant(&self) -> bool {
        // A search that has seen a change of a step also sees that the step has begun.
        fence(Ordering::Acquire);
        let mut looked = self.looked.iter();
        looked.all(|(run, version)| run.is_still(*version))
    }

    /// Whether no twin has been made during this pass, if it matters. Then the pass knew every block that fits the query.
    #[inline]
    fn knew_twins(&self) -> bool {
        self.chain.is_whole() || self.store.twin_births() == self.twin_births
    }

    /// Splits the found holders by how many of their blocks they can use. At the call, `looked` must contain exactly
    /// the runs that the query has gone through.
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

    /// Follows the query from run to run, and records the depth of each holder. If `candidates` are given, only these
    /// holders count. `found` is the run at position 0, if it has been found already.
    #[inline]
    fn follow(&mut self, mut found: Option<Head<'g>>, candidates: Option<&S>) {
        if !self.chain.is_whole() && self.store.twins() > 0 {
            // The fragments that the query gives may fit several blocks after the same block.
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
                // The query's next hash decides which child run the search goes on to.
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

    /// Returns the holders that have the first `agreed` blocks of a run, which begins at position `start`. Records
    /// the depth of holders that have fewer of these blocks. Holders for which `is_asked` is false are left out.
    // Not inlined: within the long loop of its caller, the compiler would not keep the values of this function in
    // registers.
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
                // Most holders have all `agreed` blocks. The empty entry never has them.
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

    /// Returns the holders that have the first `agreed` blocks of a run, as [`Self::look_at`] does. If `candidates` are
    /// given, only these holders count, and a candidate without any block of the run gets the depth `start`.
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

    /// Whether the query gives its hashes, and each hash identifies its whole prefix.
    #[inline]
    fn names_all_before(&mut self) -> bool {
        self.is_chain && self.chain.rolled().is_none()
    }

    /// Returns the length of a run if the query has the run's last block at the same position. Then the whole run
    /// agrees with the query, because each hash identifies its prefix. `None` if the block differs, or if
    /// [`Self::names_all_before`] is false.
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

    /// Number of leading blocks of a run that equal the query's blocks from `start` on.
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

    /// Number of leading blocks of a run that equal the query's blocks from `start` on, found by bisection. Each hash
    /// must identify its whole prefix. `len` is the number of blocks that both query and run have. If the run is longer
    /// than the query, the query's last block is compared first, because [`Self::whole_agreement`] has not compared it.
    fn last_agreement(&mut self, run: &Run, column: Column<'_>, start: usize, len: usize) -> usize {
        point();
        let unknown = run.marked(len, |offset| self.chain.hash(start + offset));
        point();
        // All blocks before `same` are the same. The block at `different` is not the same, or does not exist.
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

    /// Number of leading blocks of a run that equal the query's blocks from `start` on. Takes every hash into account,
    /// so the result is correct even if the hashes are not a chain. `len` is the number of blocks that both query and
    /// run have.
    fn first_difference(&mut self, run: &Run, column: Column<'_>, start: usize, len: usize) -> usize {
        column.prefetch_prints(len / CHUNK, false);
        if len > 0 && self.chain.hash(start + len - 1) != run.last() {
            // Prefetches first the hashes that are compared last.
            let unknown = run.marked(len, |offset| self.chain.hash(start + offset));
            prefetch_pivots(column, unknown.start, unknown.end);
        }
        let (is_whole, mut agreed) = (self.chain.is_whole(), 0);
        while agreed < len {
            point();
            let at = start + agreed;
            // Each fingerprint covers 32 blocks, from a position on that is a multiple of 32.
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

/// Returns the offsets that divide the stretch from `from` to `to` into parts.
#[inline]
fn pivots(from: usize, to: usize) -> impl Iterator<Item = usize> {
    let step = (to - from).div_ceil(PIVOTS).max(1);
    (from + step - 1..to).step_by(step)
}

/// Prefetches the hashes with which a search for the first difference begins. The search looks between the offsets
/// `from` and `to`.
#[inline]
fn prefetch_pivots(column: Column<'_>, from: usize, to: usize) {
    pivots(from, to).for_each(|pivot| column.prefetch(pivot));
}

/// Returns the hash by which the block of a query at `index` is found.
fn wanted(chain: &mut QueryChain<'_>, index: usize) -> Wanted {
    Wanted {
        hash: chain.hash(index),
        is_whole: chain.is_whole(),
    }
}

/// Returns the position of a query's block, which is below 2^24.
fn position(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn spot(run: RunId, offset: usize) -> Option<Spot> {
    let offset = u16::try_from(offset).ok()?;
    Some(Spot { run, offset })
}
