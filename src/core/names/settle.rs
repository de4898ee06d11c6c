//! Storing single blocks by their lineage hashes. Each block gets its place as soon as its parent has one.

use crate::hash::{Position, SequenceHash};
use crate::index::runs::{Places, RunWriter, Spot, Wanted, is_same_at};
use crate::index::share::{classes, tier_bit};

use super::applied::RejectReason;
use super::blocks::NewBlock;
use super::find::FoundBlock;
use super::form::{self, Form, NameNotes};
use super::orphans::{Key, Orphan};
use super::state::{HolderState, Work};

/// Maximum number of steps before the locks are released for a moment, when orphans (blocks whose parent was unknown)
/// get their places. A step gives one orphan its place, or finds that no more orphans wait for a block.
const ADOPTING_STEPS: usize = 2048;

impl HolderState {
    /// Stores one block by its lineage hash. The block's whole sequence hash need not be known.
    pub(super) fn store_block(&mut self, block: &NewBlock, work: &mut Work<'_>) {
        let NewBlock {
            key,
            sequence_hash,
            name,
            is_barred,
        } = *block;
        if self.refuses_nameless && name.is_none() {
            return work.reject_full(1);
        }
        let mut placed = self.find_keys(key, &work.runs).into_iter();
        let own =
            placed.find(|spot| sequence_hash.is_none_or(|hash| work.runs.is(*spot, Wanted::whole(hash.0))));
        let mut has_moved = false;
        if let Some(name) = name
            && let Some(other) = self.find_name(name, &work.runs)
            && other != own.map_or(FoundBlock::Orphan(key), FoundBlock::Placed)
        {
            has_moved = true;
            self.drop_name(other, name);
        }
        // Two blocks can have one lineage hash. As long as neither has a place, the later block replaces the earlier
        // one.
        let known = self.orphans.get(key).and_then(Orphan::sequence_hash);
        let is_other = known.is_some() && sequence_hash.is_some() && known != sequence_hash;
        if own.is_none() && is_other {
            has_moved = true;
            self.orphans.remove(key);
        }
        work.applied.reject(RejectReason::Moved, usize::from(has_moved));
        if let Some(spot) = own {
            if let Some(hash) = sequence_hash {
                work.runs.refine(spot, &[hash]);
            }
            return self.extend(spot, name, sequence_hash.is_some(), is_barred, work);
        }
        let tiers = tier_bit(work.tier);
        if self.orphans.get(key).is_some() {
            return match self.orphans.extend(key, sequence_hash, name, tiers) {
                true => {
                    self.orphans.mark(key, work.tier, is_barred);
                    work.applied.stored += 1;
                }
                false => work.reject_full(1),
            };
        }
        if self.blocks() >= work.blocks_max {
            return work.reject_full(1);
        }
        let mut orphan = Orphan::new(sequence_hash, name, tiers);
        orphan.mark(work.tier, is_barred);
        self.settle(key, orphan, work);
    }

    /// Gives a new block its place in the runs if its parent has one. Otherwise makes the block an orphan.
    fn settle(&mut self, key: Key, orphan: Orphan, work: &mut Work<'_>) {
        let parent = self.find_before(key, &work.runs);
        let has_place = parent.is_some() || key.position() == 0;
        if !has_place && !work.runs.store.has_room_aside() {
            return work.reject_full(1);
        }
        work.applied.stored += 1;
        if !has_place {
            let is_crowded = work.runs.places_of(key.parent_hash_fragment()) == Places::TooMany;
            work.applied
                .reject(RejectReason::CrowdedHash, usize::from(is_crowded));
            return self.orphans.insert(key, orphan);
        }
        self.settle_after(parent, key, &orphan, work);
    }

    /// Returns the place in the runs of the parent of the block with this lineage hash. `None` if the holder does not
    /// have the parent.
    fn find_before(&self, key: Key, runs: &RunWriter<'_>) -> Option<Spot> {
        let (position, fragment) = (key.position(), key.parent_hash_fragment());
        runs.find_place(fragment, |spot| {
            let own = runs.position(spot);
            let is_it = u64::from(own) + 1 == position
                && is_same_at(own, runs.hash(spot), fragment)
                && self.attributes(spot).is_some();
            is_it.then_some(spot)
        })
    }

    /// Gives a block its place in the runs: after `parent`, or at position 0 if there is no parent.
    fn settle_after(&mut self, parent: Option<Spot>, key: Key, orphan: &Orphan, work: &mut Work<'_>) {
        let fragment = SequenceHash(key.current_hash_fragment());
        let (known, position) = (orphan.sequence_hash(), Position::from(key).as_u32());
        let hashes = [known.unwrap_or(fragment)];
        let Some((spot, _)) = work.runs.put(parent, position, &hashes, known.is_some()) else {
            return work.reject_full(1);
        };
        if self.without_twins(spot, 1, &work.runs) == 0 {
            self.share.touch(spot.run);
            return work.applied.reject(RejectReason::CrowdedHash, 1);
        }
        if orphan.nameless != 0 && !work.runs.is_placed(spot) {
            // A removal will not find this block.
            work.applied.reject(RejectReason::CrowdedHash, 1);
        }
        self.settle_at(spot, orphan, &work.runs);
        self.adopt(spot, spot.offset + 1);
    }

    /// Moves an orphan to its place in the runs, at `spot`. If the holder already has a block there, that block gets
    /// the orphan's tiers and names.
    fn settle_at(&mut self, spot: Spot, orphan: &Orphan, runs: &RunWriter<'_>) {
        let (end, is_whole) = (spot.offset + 1, orphan.sequence_hash().is_some());
        let held = self.attributes(spot);
        let held = held.unwrap_or(form::held(0, Form::Nameless, is_whole));
        let is_nameless = held.form() == Form::Nameless;
        let nameless = if is_nameless { orphan.nameless } else { 0 };
        let held = held.with_whole(is_whole).with_more(nameless);
        self.share.set(spot, end, Some(held));
        for alias in &orphan.names {
            self.name_again(spot, Some(alias.name), alias.tiers, runs);
        }
        if let Some(held) = self.attributes(spot) {
            // In tiers that have both blocks, the marks of the orphan replace those of the block, because the orphan
            // has an event of its own.
            let others = held.barred() & !classes(orphan.tiers());
            self.share
                .set(spot, end, Some(held.with_barred(others | orphan.barred)));
        }
    }

    /// Looks for the block at `at` among the orphans (blocks whose parent was unknown). If it is there, moves the
    /// orphan to this place. Returns whether it was there.
    pub(super) fn merge_orphan(&mut self, at: Spot, runs: &RunWriter<'_>) -> bool {
        let key = runs.key(at);
        let is_it = self.orphans.get(key).is_some_and(|orphan| {
            let hash = orphan.sequence_hash();
            hash.is_none_or(|hash| runs.is(at, Wanted::whole(hash.0)))
        });
        if is_it && let Some(orphan) = self.orphans.remove(key) {
            self.settle_at(at, &orphan, runs);
        }
        is_it
    }

    /// Records that the blocks from `first` up to the offset `end` may be parents of orphans. The caller must call
    /// [`Self::adopt_some`] afterwards.
    pub(super) fn adopt(&mut self, first: Spot, end: u16) {
        if self.orphans.len() > 0 {
            let spots = (first.offset..end).map(|offset| Spot { offset, ..first });
            self.adopting.extend(spots);
        }
    }

    /// Gives places in the runs to some orphans whose parents have arrived, and then to the children of these orphans.
    /// Returns whether more orphans may be left to place.
    pub(super) fn adopt_some(&mut self, work: &mut Work<'_>) -> bool {
        for _ in 0..ADOPTING_STEPS {
            let Some(parent) = self.adopting.last().copied() else {
                // The list can have been long, so its memory is freed.
                self.adopting = Vec::new();
                return false;
            };
            let has_parent = self.attributes(parent).is_some();
            let (position, hash) = (work.runs.position(parent), work.runs.hash(parent));
            let child = has_parent.then(|| self.orphans.take_child(position, hash));
            let Some((key, orphan)) = child.flatten() else {
                self.adopting.pop();
                continue;
            };
            self.settle_after(Some(parent), key, &orphan, work);
        }
        true
    }
}
