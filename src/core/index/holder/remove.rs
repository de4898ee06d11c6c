//! What removed events do to a holder's blocks.

use std::ops::Range;

use hashbrown::HashSet;
use smallvec::SmallVec;

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::wire::Tier;

use crate::index::holder::parking::Unplaced;

use super::names::Found;
use super::part::{Form, Interval, tier_bit};
use super::{Applied, HolderState, Outcome, RejectReason};
use crate::index::runs::{AHEAD, RunId, RunWriter, Spot};

/// Neighbours that have been named and are removed together, all in one interval.
struct Stretch {
    run: RunId,
    from: u16,
    to: u16,
    interval: Interval,
}

impl Stretch {
    fn contains(&self, spot: Spot) -> bool {
        spot.run == self.run && (self.from..self.to).contains(&spot.offset)
    }

    /// Takes those neighbours in that have these names, one after the other in either direction; says how many. `after` and `before` are
    /// what the blocks on its two sides are called.
    fn take_in(
        &mut self,
        names: &[SequenceHash],
        after: impl Iterator<Item = u64>,
        before: impl DoubleEndedIterator<Item = u64>,
    ) -> usize {
        let is_same = |(own, name): &(u64, &SequenceHash)| *own == name.0;
        let forward = after.zip(names).take_while(is_same).count();
        self.to += u16::try_from(forward).unwrap_or(0);
        if forward > 0 {
            // A name has one place: at most one of the two goes on.
            return forward;
        }
        let backward = before.rev().zip(names).take_while(is_same).count();
        self.from -= u16::try_from(backward).unwrap_or(0);
        backward
    }

    /// Takes a neighbour in.
    fn extend(&mut self, spot: Spot) -> bool {
        let is_inside = (self.interval.from..self.interval.to).contains(&spot.offset);
        if spot.run != self.run || !is_inside {
            return false;
        }
        if spot.offset == self.to {
            self.to += 1;
        } else if spot.offset + 1 == self.from {
            self.from -= 1;
        } else {
            return false;
        }
        true
    }
}

/// What an event removes by hashes that are no names, in the event's order.
#[derive(Debug, Default)]
pub(super) struct Others(Vec<Other>);

#[derive(Debug)]
struct Other {
    /// Where in the event it is.
    index: usize,
    hash: u64,
    /// Whether an event that waits has a block of that name.
    waits: bool,
}

impl Others {
    /// The hashes, each with whether an event that waits has a block of that name, and how many have been left out. `names` are all that
    /// the event removes: what was a name before in it, and is gone now, is left out.
    pub(super) fn into_hashes(self, names: &[SequenceHash]) -> (Vec<(u64, bool)>, usize) {
        if self.0.len() == names.len() {
            // None was a name.
            return (self.0.iter().map(|other| (other.hash, other.waits)).collect(), 0);
        }
        let all: HashSet<u64> = self.0.iter().map(|other| other.hash).collect();
        let (mut hashes, mut named) = (Vec::with_capacity(self.0.len()), HashSet::new());
        let (others, mut next) = (self.0.len(), 0);
        for other in self.0 {
            let before = names.get(next..other.index).unwrap_or_default();
            named.extend(before.iter().map(|name| name.0).filter(|name| all.contains(name)));
            next = other.index + 1;
            if !named.contains(&other.hash) {
                hashes.push((other.hash, other.waits));
            }
        }
        let left_out = others - hashes.len();
        (hashes, left_out)
    }
}

impl HolderState {
    /// Removes blocks while every block of the holder has names of its own, and no event waits; says how many. The next name, if there is
    /// one left, means no block.
    pub(super) fn remove_own(
        &mut self,
        names: &[SequenceHash],
        tier: Tier,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) -> usize {
        let has_others = self.orphans.len() > 0 || self.has_hash_names();
        if has_others || self.parking.len() > 0 {
            return 0;
        }
        self.aside(names.len(), runs, |state, _| {
            let mut done = 0;
            while let Some(name) = names.get(done) {
                let Some(spot) = state.find_own(name.0) else {
                    break;
                };
                done += 1;
                if let Some(outcome) = state.withdraw_many(spot, Some(name.0), tier_bit(tier)) {
                    if let Some(ahead) = names.get(done + AHEAD) {
                        state.own.prefetch(ahead.0);
                    }
                    count(outcome, applied);
                    continue;
                }
                let Some(mut stretch) = state.stretch_at(spot) else {
                    break;
                };
                while let along @ 1.. = state.follow_own(&mut stretch, names.get(done..).unwrap_or_default())
                {
                    done += along;
                }
                state.close(&stretch, tier, applied);
            }
            done
        })
    }

    /// One block as a stretch, where the holder has it.
    fn stretch_at(&self, spot: Spot) -> Option<Stretch> {
        let interval = self.parts.get(&spot.run)?.interval_at(spot.offset)?;
        Some(Stretch {
            run: spot.run,
            from: spot.offset,
            to: spot.offset + 1,
            interval,
        })
    }

    /// Removes some of the blocks that an event gives by `names`. What is none goes to `others`.
    pub(super) fn remove_names(
        &mut self,
        names: &[SequenceHash],
        blocks: Range<usize>,
        tier: Tier,
        others: &mut Others,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) {
        let mut open: Option<Stretch> = None;
        // Whether the block before was the neighbour of another: then the next mostly is, too, and no table is asked for it.
        let mut is_in_order = false;
        let mut index = blocks.start;
        while let Some(SequenceHash(name)) = names[..blocks.end].get(index) {
            // A block that is held can be part of an event that waits, too: it must not come back with that.
            let waits = self.parking.len() > 0 && self.parking.note_removed(*name, tier);
            // Mostly engines name neighbours one after the other: then no table is asked.
            let end = if self.parking.len() > 0 {
                index + 1
            } else {
                blocks.end
            };
            if let Some(stretch) = &mut open {
                let along = self.follow(stretch, &names[index..end], runs);
                if along > 0 {
                    (index, is_in_order) = (index + along, true);
                    continue;
                }
            }
            index += 1;
            if let Some(ahead) = names.get(index - 1 + AHEAD)
                && !is_in_order
            {
                if self.own.len() > 0 {
                    self.own.prefetch(ahead.0);
                } else {
                    runs.prefetch_place(ahead.0);
                }
            }
            is_in_order = false;
            let mut found = self.find_name(*name, runs);
            if let Some(stretch) = open.take() {
                let is_named_again = matches!(found, Some(Found::Placed(spot)) if stretch.contains(spot));
                if let Some(Found::Placed(spot)) = found
                    && !is_named_again
                {
                    let mut stretch = stretch;
                    if stretch.extend(spot) {
                        open = Some(stretch);
                        continue;
                    }
                    self.close(&stretch, tier, applied);
                } else {
                    self.close(&stretch, tier, applied);
                    found = self.find_name(*name, runs);
                }
            }
            match found {
                None => others.0.push(Other {
                    index: index - 1,
                    hash: *name,
                    waits,
                }),
                Some(Found::Orphan(key)) => {
                    let outcome = self.orphans.withdraw(key, Some(*name), tier_bit(tier));
                    count(outcome, applied);
                }
                Some(Found::Placed(spot)) => {
                    if let Some(outcome) = self.withdraw_many(spot, Some(*name), tier_bit(tier)) {
                        count(outcome, applied);
                    } else {
                        open = self.stretch_at(spot);
                    }
                }
            }
        }
        if let Some(stretch) = open {
            self.close(&stretch, tier, applied);
        }
    }

    /// Notes removals that may mean blocks of events that wait.
    pub(super) fn note_unplaced(
        &mut self,
        removed: impl Iterator<Item = Unplaced>,
        tier: Tier,
        applied: &mut Applied,
    ) {
        if self.parking.len() > 0 {
            let dropped = removed.map(|removed| self.parking.note_unplaced(removed, tier));
            applied.reject(RejectReason::ParkingFull, dropped.sum());
        }
    }

    /// Removes blocks by sequence hashes: each goes under all its names, as by its lineage hash.
    pub(super) fn remove_hashes(
        &mut self,
        hashes: &[(u64, bool)],
        tier: Tier,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) {
        let unplaced = hashes.iter().filter(|(_, waits)| !waits);
        let unplaced = unplaced.map(|(hash, _)| Unplaced::Hash(*hash));
        self.note_unplaced(unplaced, tier, applied);
        for (hash, waits) in hashes.iter().copied() {
            let found = self.find_hash(hash, runs);
            if found.is_empty() {
                let outcome = if waits { Outcome::Gone } else { Outcome::Unknown };
                count(outcome, applied);
            }
            for (_, found) in found {
                self.remove_found(found, tier, applied);
            }
        }
    }

    /// Removes a block from a tier, under all its names.
    fn remove_found(&mut self, found: Found, tier: Tier, applied: &mut Applied) {
        let bit = tier_bit(tier);
        let spot = match found {
            Found::Orphan(key) => return count(self.orphans.withdraw(key, None, bit), applied),
            Found::Placed(spot) => spot,
        };
        if let Some(outcome) = self.withdraw_many(spot, None, bit) {
            return count(outcome, applied);
        }
        if let Some(stretch) = self.stretch_at(spot) {
            self.close(&stretch, tier, applied);
        }
    }

    /// Takes those neighbours of a stretch in that have these names, one after the other in either direction; says how many.
    fn follow(&self, stretch: &mut Stretch, names: &[SequenceHash], runs: &RunWriter<'_>) -> usize {
        let (run, interval) = (stretch.run, stretch.interval);
        match interval.attributes.form() {
            Form::Hash => stretch.take_in(
                names,
                runs.hashes(run, stretch.to, interval.to),
                runs.hashes(run, interval.from, stretch.from),
            ),
            Form::Own => self.follow_own(stretch, names),
            Form::Nameless | Form::Many => 0,
        }
    }

    /// As [`Self::follow`], of blocks that have names of their own.
    fn follow_own(&self, stretch: &mut Stretch, names: &[SequenceHash]) -> usize {
        let Some(part) = self.parts.get(&stretch.run) else {
            return 0;
        };
        let interval = stretch.interval;
        let (after, before) = (
            part.names(stretch.to, interval.to),
            part.names(interval.from, stretch.from),
        );
        stretch.take_in(names, after.iter().copied(), before.iter().copied())
    }

    /// Takes the blocks of a stretch from a tier.
    fn close(&mut self, stretch: &Stretch, tier: Tier, applied: &mut Applied) {
        let (held, bit) = (stretch.interval.attributes, tier_bit(tier));
        let blocks = usize::from(stretch.to - stretch.from);
        if held.tiers() & bit == 0 {
            return applied.reject(RejectReason::UnknownBlock, blocks);
        }
        applied.removed += blocks as u64;
        if held.tiers() == bit {
            return self.erase_uniform(stretch.run, stretch.from, stretch.to, held.form());
        }
        if let Some(part) = self.parts.get_mut(&stretch.run) {
            part.set(
                stretch.from,
                stretch.to,
                Some(held.with_tiers(held.tiers() & !bit)),
            );
            self.touch(stretch.run);
        }
    }

    /// Removes blocks by lineage hashes, each under all its names.
    pub(super) fn remove_keys(
        &mut self,
        keys: &[PositionalLineageHash],
        tier: Tier,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) {
        for key in keys {
            let orphan = self.orphans.get(*key).map(|_| Found::Orphan(*key));
            let placed = self.find_keys(*key, runs).into_iter().map(Found::Placed);
            let found: SmallVec<[Found; 2]> = placed.chain(orphan).collect();
            if found.is_empty() {
                count(Outcome::Unknown, applied);
            }
            for found in found {
                self.remove_found(found, tier, applied);
            }
        }
    }

    /// Takes the blocks of a run that have no name from the holder; says how many.
    pub(super) fn drop_nameless_of(&mut self, run: RunId) -> usize {
        let intervals = self.parts.get(&run).map_or(&[][..], |part| part.intervals());
        let nameless = |interval: &&Interval| interval.attributes.form() == Form::Nameless;
        let stretches: Vec<Interval> = intervals.iter().filter(nameless).copied().collect();
        for interval in &stretches {
            self.erase_uniform(run, interval.from, interval.to, Form::Nameless);
        }
        stretches
            .iter()
            .map(|interval| usize::from(interval.to - interval.from))
            .sum()
    }
}

fn count(outcome: Outcome, applied: &mut Applied) {
    match outcome {
        Outcome::Gone | Outcome::Remains => applied.removed += 1,
        Outcome::Unknown => applied.reject(RejectReason::UnknownBlock, 1),
    }
}
