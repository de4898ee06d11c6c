//! The effect of removed events on a holder's blocks.

use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;

use crate::ahead::AHEAD;
use crate::hash::SequenceHash;
use crate::index::runs::{RunView, Spot};
use crate::index::share::{Interval, tier_bit};
use crate::wire::Tier;

use super::applied::{Applied, RejectReason};
use super::find::FoundBlock;
use super::form::{Form, NameNotes};
use super::orphans::Key;
use super::parking::Unplaced;
use super::state::{HolderState, Work};

/// Hash in a removed event that is not the name of a held block. The flag tells whether an event that waits for its
/// parent has a block of that name.
pub(super) type Other = (u64, bool);

/// Removes repeated hashes from `others`. Suppose that an event gives a hash twice, and the first one is the name of a
/// block, which is removed. The second one is then in `others`, and must not remove another block. `names` are all
/// hashes of the event. Returns the number of hashes taken out of `others`.
pub(super) fn leave_out_named(others: &mut Vec<Other>, names: &[SequenceHash]) -> usize {
    if others.len() == names.len() {
        // No hash of the event was a name.
        return 0;
    }
    // A hash that first was a name occurs more often in `names` than in `others`.
    let mut left: HashMap<u64, usize> = others.iter().map(|(hash, _)| (*hash, 0)).collect();
    for name in names {
        if let Some(left) = left.get_mut(&name.0) {
            *left += 1;
        }
    }
    for (hash, _) in &*others {
        left.entry(*hash).and_modify(|left| *left -= 1);
    }
    let before = others.len();
    others.retain(|(hash, _)| left.get(hash) == Some(&0));
    before - others.len()
}

/// Removes repeated hashes of waiting blocks from `others`. A waiting block belongs to a stored event whose parent has
/// not arrived. The first occurrence of its hash keeps the block from being stored, and stays in `others`. Returns the
/// number of hashes taken out.
pub(super) fn leave_out_waiting(others: &mut Vec<Other>) -> usize {
    let waited = others.iter().filter(|(_, waits)| *waits);
    let waited: HashSet<u64> = waited.map(|(hash, _)| *hash).collect();
    let before = others.len();
    if !waited.is_empty() {
        others.retain(|(hash, waits)| *waits || !waited.contains(hash));
    }
    before - others.len()
}

/// Returns the start and end of the blocks to remove: the block at `offset` and some of its neighbours. The neighbours
/// after it are removed as far as their names are the first ones of `names`, in order. If there is no such neighbour,
/// those before it are removed in the same way, going backwards. `names` does not contain the name of the block at
/// `offset`. `after` and `before` are the names of the neighbours, in the order of offsets.
fn along(
    offset: u16,
    names: &[SequenceHash],
    after: impl Iterator<Item = u64>,
    before: impl DoubleEndedIterator<Item = u64>,
) -> (u16, u16) {
    let is_same = |(own, name): &(u64, &SequenceHash)| *own == name.0;
    let forward = after.zip(names).take_while(is_same).count();
    if forward > 0 {
        // The next name belongs to one block, so the block before does not have it.
        return (offset, offset + 1 + u16::try_from(forward).unwrap_or(0));
    }
    let backward = before.rev().zip(names).take_while(is_same).count();
    (offset - u16::try_from(backward).unwrap_or(0), offset + 1)
}

impl HolderState {
    /// Removes blocks by name with less work than [`Self::remove_names`]. Works only while every block of the holder
    /// has a name other than its hash and no event is waiting; otherwise returns 0. Returns the number of names
    /// handled. It stops at the first name that no block has.
    fn remove_own(&mut self, names: &[SequenceHash], work: &mut Work<'_>) -> usize {
        let has_others = self.orphans.len() > 0 || self.has_hash_names();
        if has_others || self.parking.len() > 0 {
            return 0;
        }
        self.aside(names.len(), &mut work.runs, |state, runs| {
            let mut done = 0;
            while let Some(name) = names.get(done)
                && let Some(spot) = state.names.find(name.0)
            {
                let found = FoundBlock::Placed(spot);
                done += state.remove_along(found, &names[done..], work.tier, runs, work.applied);
            }
            done
        })
    }

    /// Removes the blocks that an event gives by `names`. Appends to `others` the hashes that are not the name of any
    /// block.
    pub(super) fn remove_names(
        &mut self,
        names: &[SequenceHash],
        others: &mut Vec<Other>,
        work: &mut Work<'_>,
    ) {
        let mut index = self.remove_own(names, work);
        // Engines mostly name neighbouring blocks one after the other. Such names need no look-up in a table.
        let mut is_in_order = false;
        while let Some(SequenceHash(name)) = names.get(index) {
            if let Some(ahead) = names.get(index + AHEAD)
                && !is_in_order
            {
                if self.names.len() > 0 {
                    self.names.prefetch(ahead.0);
                } else {
                    work.runs.prefetch_place(ahead.0);
                }
            }
            let found = self.find_name(*name, &work.runs);
            let (runs, applied) = (work.runs.view(), &mut *work.applied);
            let done = found.map_or(1, |found| {
                self.remove_along(found, &names[index..], work.tier, runs, applied)
            });
            // If a held block is also part of an event that waits, it must not be stored again with that event.
            let mut waits = false;
            if self.parking.len() > 0 {
                for name in &names[index..index + done] {
                    waits = self.parking.note_removed(name.0, work.tier);
                }
            }
            if found.is_none() {
                others.push((*name, waits));
            }
            is_in_order = done > 1;
            index += done;
        }
    }

    /// Removes a block under the first of `names`. Goes on with the neighbours on one side of it, as long as they have
    /// the next names. Returns the number of names handled. If `names` is empty, removes the block under all its names.
    fn remove_along(
        &mut self,
        found: FoundBlock,
        names: &[SequenceHash],
        tier: Tier,
        runs: RunView<'_>,
        applied: &mut Applied,
    ) -> usize {
        let (name, bit) = (names.first().map(|name| name.0), tier_bit(tier));
        let spot = match found {
            FoundBlock::Placed(spot) => spot,
            FoundBlock::Orphan(key) => {
                applied.count_removed(self.orphans.withdraw(key, name, bit));
                return 1;
            }
        };
        if let Some(was_held) = self.withdraw_many(spot, name, bit) {
            if let Some(ahead) = names.get(AHEAD) {
                self.names.prefetch(ahead.0);
            }
            applied.count_removed(was_held);
            return 1;
        }
        let others = names.get(1..).unwrap_or_default();
        let Some(stretch) = self.stretch_at(spot, others, runs) else {
            return 1;
        };
        let (from, to, held) = (stretch.from, stretch.to, stretch.attributes);
        let blocks = usize::from(to - from);
        if held.tiers() & bit == 0 {
            applied.reject(RejectReason::UnknownBlock, blocks);
            return blocks;
        }
        applied.removed += blocks as u64;
        if held.tiers() == bit {
            self.erase_uniform(spot.run, from, to, held.form());
        } else {
            let from = Spot { offset: from, ..spot };
            let next = held.with_tiers(held.tiers() & !bit);
            self.share.set(from, to, Some(next));
        }
        blocks
    }

    /// Returns the stretch of blocks to remove: the block at `spot`, and its neighbours on one side. Each neighbour
    /// must have the same attributes as the block, and the next of `names` as its name. The block at `spot` has at most
    /// one name.
    fn stretch_at(&self, spot: Spot, names: &[SequenceHash], runs: RunView<'_>) -> Option<Interval> {
        let part = self.share.part(spot.run)?;
        let Interval { from, to, attributes } = part.interval_at(spot.offset)?;
        let (run, at, next) = (spot.run, spot.offset, spot.offset + 1);
        let (from, to) = match attributes.form() {
            Form::Hash => along(at, names, runs.hashes(run, next, to), runs.hashes(run, from, at)),
            Form::Own => {
                let firsts = |from, to| self.names.firsts(run, from, to);
                let (after, before) = (firsts(next, to), firsts(from, at));
                along(at, names, after.iter().copied(), before.iter().copied())
            }
            Form::Nameless | Form::Many => (at, next),
        };
        Some(Interval { from, to, attributes })
    }

    /// Records removals for the waiting events (stored events whose parent has not arrived): a removed block may belong
    /// to one of these events. Drops waiting events if there is no room.
    pub(super) fn note_unplaced(&mut self, removed: impl Iterator<Item = Unplaced>, work: &mut Work<'_>) {
        if self.parking.len() > 0 {
            let dropped = removed.map(|removed| self.parking.note_unplaced(removed, work.tier));
            work.applied.reject(RejectReason::ParkingFull, dropped.sum());
            let own = self.parking.bytes() as u64;
            if own > work.runs.store.room_to_wait(own, work.waiting_bytes_max) {
                work.applied
                    .reject(RejectReason::ParkingFull, self.parking.drop_all());
            }
        }
    }

    /// Removes blocks by sequence hashes. Each block is removed under all its names, as by a lineage hash. If the hash
    /// is the name of a block of a waiting event, removes only that block: it will not be stored with its event, and no
    /// held block is removed.
    pub(super) fn remove_hashes(&mut self, hashes: &[Other], work: &mut Work<'_>) {
        let unplaced = hashes.iter().filter(|(_, waits)| !waits);
        self.note_unplaced(unplaced.map(|(hash, _)| Unplaced::Hash(*hash)), work);
        for (hash, waits) in hashes {
            match waits {
                true => work.applied.count_removed(true),
                false => {
                    let found = self.find_hash(*hash, &work.runs);
                    self.doubt_crowded(*hash, work);
                    self.remove_found(found, work);
                }
            }
        }
    }

    /// Removes the blocks that lineage hashes give. Each block is removed under all its names.
    pub(super) fn remove_keys(&mut self, keys: &[Key], work: &mut Work<'_>) {
        for key in keys {
            let orphan = self.orphans.get(*key).map(|_| FoundBlock::Orphan(*key));
            let placed = self.find_keys(*key, &work.runs).into_iter();
            let found = placed.map(FoundBlock::Placed).chain(orphan).collect();
            self.doubt_crowded(key.current_hash_fragment(), work);
            self.remove_found(found, work);
        }
    }

    /// Removes the blocks in `found`. Each block is removed under all its names.
    fn remove_found(&mut self, found: SmallVec<[FoundBlock; 2]>, work: &mut Work<'_>) {
        if found.is_empty() {
            work.applied.count_removed(false);
        }
        for found in found {
            self.remove_along(found, &[], work.tier, work.runs.view(), work.applied);
        }
    }
}
