//! The search: which holders hold how long a prefix.
//!
//! A look at one run says of every holder how many of its blocks it has, and comparing two arrays says how far the query agrees
//! with it. So one look settles all holders that drop out inside of the run, at any depth. The others have everything up to where the
//! query leaves the run; they are looked for where it goes on, at the last position first: who has that needs no more looks.
//! Where no run follows, nobody has more.
//!
//! Why the answers are exact although other looks are at other instants: see the index's own documentation.

use crossbeam_epoch::Guard;
use smallvec::SmallVec;

use crate::wire::WorkerName;

use super::chain::QueryChain;
use super::holder_set::{SlotBits, SlotSet};
use super::matches::{Groups, Matches, push_group};
use super::runs::{BlockKey, Found, Root, RunStore, View, is_same_at};
use super::slots::Slots;

/// Whom a search asks about.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// Only these workers; all where it is absent.
    pub workers: Option<&'a [WorkerName]>,
}

/// Runs one search.
pub(crate) fn find(
    store: &RunStore,
    slots: &Slots,
    chain: &mut QueryChain<'_>,
    search: Search<'_>,
) -> Matches {
    let guard = &crossbeam_epoch::pin();
    if chain.is_empty() {
        return Matches::none();
    }
    let root = store.root(chain.hash(0), guard);
    if root == Root::Nobody {
        return Matches::none();
    }
    // Before the first look, and so before any run is found, which may show the past: a holder that joins later was not there when the
    // query came, and its slot may have been another's.
    let directory = slots.load();
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    // A slot that was given out since is left out in the end, so that sets need no room for it.
    if directory.is_small() {
        let groups = groups_of::<u64>(store, chain, root, asked.as_ref(), guard);
        Matches::of(directory, groups)
    } else {
        let groups = groups_of::<SlotSet>(store, chain, root, asked.as_ref(), guard);
        Matches::of(directory, groups)
    }
}

/// Searches with one kind of sets.
#[inline]
fn groups_of<S: SlotBits>(
    store: &RunStore,
    chain: &mut QueryChain<'_>,
    root: Root,
    asked: Option<&SlotSet>,
    guard: &Guard,
) -> Groups<S> {
    let mut finder: Finder<'_, '_, '_, S> = Finder {
        store,
        guard,
        is_rolled: chain.is_rolled(),
        chain,
        asked: asked.map(|asked| S::from_words(asked.words().as_slice())),
        tick: store.tick(),
        groups: Groups::new(),
    };
    let conflicts = store.chain_conflicts();
    if conflicts == 0 {
        finder.follow(root);
    }
    if conflicts > 0 || store.chain_conflicts() != conflicts {
        finder.groups.clear();
        finder.walk();
    }
    finder.groups
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
pub(super) fn holders_at<S: SlotBits>(store: &RunStore, key: &BlockKey, guard: &Guard) -> S {
    let mut holding = S::default();
    let tick = store.tick();
    store.for_each(key, guard, |found| {
        if let Some(tick) = tick {
            found.run.touch(tick);
        }
        let look = Look {
            start: 0,
            end: found.offset + 1,
            may_go_on: true,
            view: found.run.view(guard),
        };
        holding.unite(&look.split(None, |_, _| {}));
    });
    holding
}

/// How many hashes of a query are computed before they are compared.
const ROLLED_AT_ONCE: usize = 64;
/// Into how many parts a run is cut at once to find where a query leaves it.
const WAYS: usize = 4;

/// How many cutoffs are tried before that.
const HINTS: usize = 3;

/// How many runs are looked at one after the other before the search halves what is left instead.
const STEPS_MAX: usize = 8;

/// Holders that at one instant had `held` blocks at least, and at one had `limit` at most.
struct Stretch<S> {
    held: usize,
    limit: usize,
    candidates: S,
}

/// One look at a run.
struct Look<'g> {
    /// Position of the run's first block.
    start: usize,
    /// Where the query leaves the run; after the block that was looked for.
    end: usize,
    /// Whether other runs may go on from there.
    may_go_on: bool,
    view: View<'g>,
}

impl Look<'_> {
    /// The cutoff of those that have everything up to `end`. Runs are shorter than 2^16.
    fn needed(&self) -> u16 {
        u16::try_from(self.end - self.start).unwrap_or(u16::MAX)
    }

    /// Splits `candidates` (all holders where absent): those that have everything up to `end` are returned, those that have
    /// something of the run go to `settled` with their depth, and the others stay.
    fn split<S: SlotBits>(&self, candidates: Option<&mut S>, mut settled: impl FnMut(usize, S)) -> S {
        let needed = self.needed();
        let (mut through, mut seen) = (S::default(), S::default());
        let is_chosen = candidates.is_some();
        self.view.for_each_level(candidates.as_deref(), |cutoff, slots| {
            if is_chosen {
                seen.unite(&slots);
            }
            if cutoff < needed {
                settled(self.start + usize::from(cutoff), slots);
            } else if through.is_empty() {
                through = slots;
            } else {
                through.unite(&slots);
            }
        });
        if let Some(candidates) = candidates {
            candidates.subtract(&seen);
        }
        through
    }
}

struct Finder<'f, 'q, 'g, S> {
    store: &'f RunStore,
    guard: &'g Guard,
    chain: &'f mut QueryChain<'q>,
    /// Whom the query asks about; all where absent.
    asked: Option<S>,
    /// Whether the hashes of the query have to be computed, one after the other.
    is_rolled: bool,
    /// When what is looked at is used, where the index forgets what is not.
    tick: Option<u32>,
    groups: Groups<S>,
}

impl<'g, S: SlotBits> Finder<'_, '_, 'g, S> {
    fn settle(&mut self, depth: usize, slots: S) {
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
        let end = self.agreement(found, &view, position + 1, end_max);
        Some(Look {
            start,
            end,
            may_go_on: found.run.may_go_on_at(end - start),
            view,
        })
    }

    /// Up to where the query agrees with a run: it does up to `agreed`, and it cannot beyond `end_max`.
    fn agreement(
        &mut self,
        found: Found<'g>,
        view: &View<'_>,
        mut agreed: usize,
        mut end_max: usize,
    ) -> usize {
        let start = found.run.start();
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
        // The agreement ends no sooner than at `agreed`, and no later than at `limit`.
        let mut limit = end_max;
        // Where holders have parted from a run, others have mostly, too: after a common prompt.
        for end in view
            .cutoffs()
            .take(HINTS)
            .map(|cutoff| start + usize::from(cutoff))
        {
            if end <= agreed || end > limit {
                continue;
            }
            if !is_same(end - 1) {
                limit = end - 1;
            } else if end == limit || !is_same(end) {
                return end;
            } else {
                agreed = end + 1;
                break;
            }
        }
        if agreed < limit && limit == end_max {
            if is_same(end_max - 1) {
                return end_max;
            }
            limit = end_max - 1;
        }
        bisect(agreed, limit, is_same)
    }

    /// Settles all holders, where hashes are a chain.
    fn follow(&mut self, root: Root) {
        let Some(last) = self.chain.len().checked_sub(1) else {
            return;
        };
        self.chain.prefetch();
        let key = self.chain.block_key(0);
        let first = self.store.at_root(root, &key, self.guard);
        if let Some(first) = first.or_else(|| self.store.locate(&key, self.guard)) {
            self.follow_from(first, last);
        }
    }

    /// Settles the holders of the first block.
    fn follow_from(&mut self, first: Found<'g>, last: usize) {
        let Some(look) = self.look(0, first) else { return };
        if look.end <= last && look.may_go_on && !self.is_rolled {
            // Both are looked at next, unless all have dropped out.
            for position in [look.end, last] {
                self.store.prefetch(self.chain.known_hash(position), self.guard);
            }
        }
        let mut asked = self.asked.clone();
        let groups = &mut self.groups;
        let through = look.split(asked.as_mut(), |depth, slots| push_group(groups, depth, slots));
        let begin = Stretch {
            held: look.end,
            limit: if look.may_go_on { last + 1 } else { look.end },
            candidates: through,
        };
        let mut stretches: SmallVec<[Stretch<S>; 4]> = SmallVec::new();
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
    fn leave(&mut self, stretch: Stretch<S>, open: &mut SmallVec<[Stretch<S>; 4]>) {
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
    fn advance(&mut self, mut stretch: Stretch<S>, position: usize, open: &mut SmallVec<[Stretch<S>; 4]>) {
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
            limit: if !look.may_go_on {
                look.end
            } else if look.end <= stretch.limit {
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
        let mut candidates: Option<S> = self.asked.clone();
        for position in 0..self.chain.len() {
            let key = self.chain.block_key(position);
            let mut holding: S = holders_at(self.store, &key, self.guard);
            let mut dropped = match candidates.take() {
                Some(candidates) => {
                    holding.intersect(&candidates);
                    candidates
                }
                None => S::default(),
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

/// The first position that is not the same, from `agreed` to `limit`, which is one: all before it are.
#[inline]
fn bisect(mut agreed: usize, mut limit: usize, is_same: impl Fn(usize) -> bool) -> usize {
    while agreed < limit {
        let step = (limit - agreed).div_ceil(WAYS);
        let points = (limit - agreed) / step;
        let point = |index: usize| agreed + (index + 1) * step - 1;
        // All points are compared, without a choice in between: so their memory is waited for once.
        let same: usize = (0..points).map(|index| usize::from(is_same(point(index)))).sum();
        if same < points {
            limit = point(same);
        }
        if same > 0 {
            agreed = point(same - 1) + 1;
        }
    }
    agreed
}
