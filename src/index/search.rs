//! The search: which holders hold how long a prefix.
//!
//! A look at one run says of every holder how many of its blocks it has, and comparing two arrays says how far the query agrees
//! with it. So one look settles all holders that drop out inside of the run, at any depth. The others have everything up to where the
//! query leaves the run; they are looked for where it goes on, at the last position first: who has that needs no more looks.
//!
//! Why the answers are exact although other looks are at other instants: see the index's own documentation.

use std::sync::Arc;

use arc_swap::Guard as DirectoryGuard;
use crossbeam_epoch::Guard;
use smallvec::SmallVec;

use crate::tracking::{DegradedReasons, StreamTrust};
use crate::wire::WorkerName;

use super::chain::QueryChain;
use super::holder_set::SlotSet;
use super::runs::{BlockKey, Found, RunStore, View, is_same_at};
use super::slots::{Directory, HolderRecord, Slots};

/// Whom a search asks about.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// Only these workers; all where it is absent.
    pub workers: Option<&'a [WorkerName]>,
}

/// One holder and how long a prefix it holds.
#[derive(Debug, Clone, Copy)]
pub struct Match<'a> {
    /// The holder.
    pub holder: &'a Arc<HolderRecord>,
    /// How many leading blocks it holds, without a hole; at least 1.
    pub matched_blocks: u32,
}

/// Holders that hold the same number of leading blocks.
#[derive(Debug, Clone)]
pub(super) struct MatchGroup {
    matched_blocks: u32,
    slots: SlotSet,
}

/// Mostly there are one or two.
pub(super) type Groups = SmallVec<[MatchGroup; 2]>;

/// The holders found, in groups of equal depth.
#[derive(Debug)]
pub struct Matches {
    /// Borrowed from the current version, without counting a reference that all queries share.
    /// None where nobody has anything: most such queries end before they need it.
    directory: Option<DirectoryGuard<Arc<Directory>>>,
    groups: Groups,
    /// How many states had been replaced when the search began.
    replacements: u64,
}

impl Matches {
    /// Nobody has the first block.
    fn none() -> Self {
        Self {
            directory: None,
            groups: Groups::new(),
            replacements: 0,
        }
    }

    /// The `groups` of one search; `directory` must have been taken before.
    pub(super) fn of(directory: DirectoryGuard<Arc<Directory>>, mut groups: Groups) -> Self {
        // A slot that was given out since has a holder that was not there when the query came.
        groups.retain(|group| {
            group.slots.intersect(directory.taken());
            !group.slots.is_empty()
        });
        groups.sort_unstable_by_key(|group| std::cmp::Reverse(group.matched_blocks));
        Self {
            directory: Some(directory),
            groups,
            replacements: 0,
        }
    }

    pub(crate) fn begun_at(mut self, replacements: u64) -> Self {
        self.replacements = replacements;
        self
    }

    /// Why the state in which `holder` was found is not certain.
    ///
    /// Where it has been replaced since the search began, the reasons of now are those of another state than the one that was
    /// searched: the holder counts as unverified.
    pub fn reasons(&self, holder: &HolderRecord, trust: &StreamTrust) -> DegradedReasons {
        holder.reasons_since(self.replacements, trust)
    }

    /// How many groups of holders of equal depth there are.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The holders with at least one matched block, deepest first; in no particular order within one depth.
    ///
    /// A holder that left while the search ran is left out: it holds nothing now.
    pub fn holders(&self) -> impl Iterator<Item = Match<'_>> {
        let found = self.groups.iter().map(|group| group.slots.len()).sum();
        let directory = self.directory.as_ref().map(|directory| &***directory);
        Holders {
            // Mostly nobody has left, and then there is no need to look at every holder.
            nobody_left: directory.is_none_or(Directory::is_complete),
            directory,
            groups: self.groups.iter(),
            matched_blocks: 0,
            words: [].iter(),
            word: 0,
            first_slot: 0,
            left: found,
        }
    }
}

/// See [`Matches::holders`].
struct Holders<'m> {
    directory: Option<&'m Directory>,
    nobody_left: bool,
    groups: std::slice::Iter<'m, MatchGroup>,
    /// Of the group whose turn it is.
    matched_blocks: u32,
    /// What is left of that group, and of the word that begins with `first_slot`.
    words: std::slice::Iter<'m, u64>,
    word: u64,
    first_slot: usize,
    left: usize,
}

impl<'m> Iterator for Holders<'m> {
    type Item = Match<'m>;

    #[inline]
    fn next(&mut self) -> Option<Match<'m>> {
        loop {
            while self.word == 0 {
                if let Some(word) = self.words.next() {
                    (self.word, self.first_slot) = (*word, self.first_slot + 64);
                } else {
                    let group = self.groups.next()?;
                    self.matched_blocks = group.matched_blocks;
                    self.words = group.slots.words();
                    // The first word adds 64.
                    self.first_slot = 0;
                }
            }
            let slot = self.first_slot + self.word.trailing_zeros() as usize - 64;
            self.word &= self.word - 1;
            self.left -= 1;
            let directory = self.directory;
            if let Some(holder) = directory.and_then(|directory| directory.holder_at(slot))
                && (self.nobody_left || !holder.is_retired())
            {
                let matched_blocks = self.matched_blocks;
                return Some(Match {
                    holder,
                    matched_blocks,
                });
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // A search keeps only slots that the directory has.
        let least = if self.nobody_left { self.left } else { 0 };
        (least, Some(self.left))
    }
}

/// Runs one search.
pub(crate) fn find(
    store: &RunStore,
    slots: &Slots,
    chain: &mut QueryChain<'_>,
    search: Search<'_>,
) -> Matches {
    let guard = &crossbeam_epoch::pin();
    if chain.is_empty() || !store.may_have_root(chain.hash(0), guard) {
        return Matches::none();
    }
    // Before the first look: a holder that joins later was not there when the query came.
    let directory = slots.load();
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    let mut finder = Finder {
        store,
        guard,
        is_rolled: chain.is_rolled(),
        chain,
        asked: asked.as_ref(),
        tick: store.tick(),
        groups: Groups::new(),
    };
    let conflicts = store.chain_conflicts();
    if conflicts == 0 {
        finder.follow();
    }
    if conflicts > 0 || store.chain_conflicts() != conflicts {
        finder.groups.clear();
        finder.walk();
    }
    Matches::of(directory, finder.groups)
}

/// How many holders a block has.
pub(crate) fn holders_of(store: &RunStore, key: &BlockKey) -> usize {
    let guard = &crossbeam_epoch::pin();
    let mut holders = 0;
    store.for_each(key, guard, |found| {
        let offset = u16::try_from(found.offset).unwrap_or(u16::MAX);
        holders += found.run.view(guard).holders_beyond(offset);
    });
    holders
}

/// The holders of a block. One that has it counts, so it has all blocks before it, too.
pub(super) fn holders_at(store: &RunStore, key: &BlockKey, guard: &Guard) -> SlotSet {
    let mut holding = SlotSet::default();
    let tick = store.tick();
    store.for_each(key, guard, |found| {
        if let Some(tick) = tick {
            found.run.touch(tick);
        }
        let look = Look {
            start: 0,
            end: found.offset + 1,
            view: found.run.view(guard),
        };
        holding.unite(&look.split(None, |_, _| {}));
    });
    holding
}

/// How many hashes of a query are computed before they are compared.
const ROLLED_AT_ONCE: usize = 64;
/// Into how many parts a run is cut at once to find where a query leaves it.
const WAYS: usize = 16;

/// How many runs are looked at one after the other before the search halves what is left instead.
const STEPS_MAX: usize = 8;

/// Holders that at one instant had `held` blocks at least, and at one had `limit` at most.
struct Stretch {
    held: usize,
    limit: usize,
    candidates: SlotSet,
}

/// One look at a run.
struct Look<'g> {
    /// Position of the run's first block.
    start: usize,
    /// Where the query leaves the run; after the block that was looked for.
    end: usize,
    view: View<'g>,
}

impl Look<'_> {
    /// The cutoff of those that have everything up to `end`. Runs are shorter than 2^16.
    fn needed(&self) -> u16 {
        u16::try_from(self.end - self.start).unwrap_or(u16::MAX)
    }

    /// Splits `candidates` (all holders where absent): those that have everything up to `end` are returned, those that have
    /// something of the run go to `settled` with their depth, and the others stay.
    fn split(&self, candidates: Option<&mut SlotSet>, mut settled: impl FnMut(usize, SlotSet)) -> SlotSet {
        let needed = self.needed();
        let full = self.view.full(candidates.as_deref());
        let mut seen = candidates.as_ref().map(|_| full.clone());
        let mut depth = usize::from(self.view.len());
        let (mut through, mut shallow) = if needed <= self.view.len() {
            (full, SlotSet::default())
        } else {
            (SlotSet::default(), full)
        };
        for partial in self.view.partial() {
            if candidates
                .as_ref()
                .is_some_and(|candidates| !candidates.contains(partial.slot))
            {
                continue;
            }
            if let Some(seen) = &mut seen {
                seen.insert(partial.slot);
            }
            if partial.cutoff >= needed {
                through.insert(partial.slot);
                continue;
            }
            if usize::from(partial.cutoff) != depth && !shallow.is_empty() {
                settled(self.start + depth, std::mem::take(&mut shallow));
            }
            depth = usize::from(partial.cutoff);
            shallow.insert(partial.slot);
        }
        if !shallow.is_empty() {
            settled(self.start + depth, shallow);
        }
        if let (Some(candidates), Some(seen)) = (candidates, seen) {
            candidates.subtract(&seen);
        }
        through
    }
}

struct Finder<'f, 'q, 'g> {
    store: &'f RunStore,
    guard: &'g Guard,
    chain: &'f mut QueryChain<'q>,
    /// Whom the query asks about; all where absent.
    asked: Option<&'f SlotSet>,
    /// Whether the hashes of the query have to be computed, one after the other.
    is_rolled: bool,
    /// When what is looked at is used, where the index forgets what is not.
    tick: Option<u32>,
    groups: Groups,
}

impl<'g> Finder<'_, '_, 'g> {
    fn settle(&mut self, depth: usize, slots: SlotSet) {
        push_group(&mut self.groups, depth, slots);
    }

    fn locate(&mut self, position: usize) -> Option<Found<'g>> {
        self.store.locate(&self.chain.block_key(position), self.guard)
    }

    /// Looks at the run of the block that was found for `position`; none where nobody has the block now.
    fn look(&mut self, position: usize, found: Found<'g>) -> Option<Look<'g>> {
        let view = found.run.view(self.guard);
        let len = usize::from(view.len());
        if found.offset >= len {
            return None;
        }
        if let Some(tick) = self.tick {
            found.run.touch(tick);
        }
        let start = found.run.start();
        let end_max = (start + len).min(self.chain.len());
        Some(Look {
            start,
            end: self.agreement(found, position + 1, end_max),
            view,
        })
    }

    /// Up to where the query agrees with a run: it does up to `agreed`, and it cannot beyond `end_max`.
    fn agreement(&mut self, found: Found<'g>, mut agreed: usize, end_max: usize) -> usize {
        let start = found.run.start();
        let mut end_max = end_max;
        while self.is_rolled && agreed < end_max {
            // Little is computed beyond the first difference.
            let end = end_max.min(agreed + ROLLED_AT_ONCE);
            self.chain.roll(end);
            if is_same_at(end - 1, self.chain.hash(end - 1), found.run.hash(end - 1 - start)) {
                agreed = end;
            } else {
                end_max = end - 1;
                break;
            }
        }
        let chain = &*self.chain;
        let is_same = |position: usize| {
            is_same_at(
                position,
                chain.known_hash(position),
                found.run.hash(position - start),
            )
        };
        if agreed >= end_max || is_same(end_max - 1) {
            return end_max.max(agreed);
        }
        // The first that is known to differ.
        let mut differs = end_max - 1;
        while agreed < differs {
            let step = (differs - agreed).div_ceil(WAYS);
            let points = (differs - agreed) / step;
            let point = |index: usize| agreed + (index + 1) * step - 1;
            // All points are compared, without a choice in between: so their memory is waited for once.
            let same: usize = (0..points).map(|index| usize::from(is_same(point(index)))).sum();
            if same < points {
                differs = point(same);
            }
            if same > 0 {
                agreed = point(same - 1) + 1;
            }
        }
        agreed
    }

    /// Settles all holders, where hashes are a chain.
    fn follow(&mut self) {
        let Some(last) = self.chain.len().checked_sub(1) else {
            return;
        };
        if let Some(first) = self.locate(0) {
            self.follow_from(first, last);
        }
    }

    /// Settles the holders of the first block.
    fn follow_from(&mut self, first: Found<'g>, last: usize) {
        let Some(look) = self.look(0, first) else { return };
        if look.end <= last && !self.is_rolled {
            // Both are looked at next, unless all have dropped out.
            for position in [look.end, last] {
                self.store.prefetch(self.chain.known_hash(position), self.guard);
            }
        }
        let mut asked = self.asked.cloned();
        let groups = &mut self.groups;
        let through = look.split(asked.as_mut(), |depth, slots| push_group(groups, depth, slots));
        let begin = Stretch {
            held: look.end,
            limit: last + 1,
            candidates: through,
        };
        let mut stretches: SmallVec<[Stretch; 4]> = SmallVec::new();
        self.leave(begin, &mut stretches);
        let mut steps = 0;
        while let Some(stretch) = stretches.pop() {
            steps += 1;
            let next = match steps {
                // Whoever has the last block needs no more looks.
                2 if !self.is_rolled => stretch.limit - 1,
                ..STEPS_MAX => stretch.held,
                _ if self.is_rolled => stretch.held,
                _ => stretch.held + (stretch.limit - stretch.held) / 2,
            };
            self.advance(stretch, next, &mut stretches);
        }
    }

    /// Settles a stretch that is certain, and keeps one that is not.
    fn leave(&mut self, stretch: Stretch, open: &mut SmallVec<[Stretch; 4]>) {
        if stretch.candidates.is_empty() {
            return;
        }
        if stretch.limit <= stretch.held {
            self.settle(stretch.held, stretch.candidates);
        } else {
            open.push(stretch);
        }
    }

    /// Looks for the holders of a stretch at `position`, and leaves behind what is still open.
    fn advance(&mut self, mut stretch: Stretch, position: usize, open: &mut SmallVec<[Stretch; 4]>) {
        let found = self.locate(position);
        let Some(look) = found.and_then(|found| self.look(position, found)) else {
            stretch.limit = position;
            self.leave(stretch, open);
            return;
        };
        let groups = &mut self.groups;
        let through = look.split(Some(&mut stretch.candidates), |depth, slots| {
            push_group(groups, depth, slots);
        });
        let deeper = Stretch {
            held: look.end,
            // A limit that they have passed by now is none any more.
            limit: if look.end <= stretch.limit {
                stretch.limit
            } else {
                self.chain.len()
            },
            candidates: through,
        };
        stretch.limit = stretch.limit.min(look.start);
        self.leave(stretch, open);
        self.leave(deeper, open);
    }

    /// Block by block, for an index whose hashes are no chain: finding a block proves nothing about those before it.
    fn walk(&mut self) {
        let mut candidates: Option<SlotSet> = self.asked.cloned();
        for position in 0..self.chain.len() {
            let key = self.chain.block_key(position);
            let mut holding = holders_at(self.store, &key, self.guard);
            let mut dropped = match candidates.take() {
                Some(candidates) => {
                    holding.intersect(&candidates);
                    candidates
                }
                None => SlotSet::default(),
            };
            dropped.subtract(&holding);
            if position > 0 {
                self.settle(position, dropped);
            }
            if holding.is_empty() {
                return;
            }
            candidates = Some(holding);
        }
        self.settle(self.chain.len(), candidates.unwrap_or_default());
    }
}

pub(super) fn push_group(groups: &mut Groups, depth: usize, slots: SlotSet) {
    if !slots.is_empty() {
        groups.push(MatchGroup {
            // Positions are below 2^24.
            matched_blocks: u32::try_from(depth).unwrap_or(u32::MAX),
            slots,
        });
    }
}
