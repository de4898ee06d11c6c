//! The effect of stored events on a holder's blocks.

use smallvec::SmallVec;

use crate::hash::SequenceHash;

use super::marks::Marks;
use super::names::Found;
use super::orphans::{Alias, Key};
use super::part::{Attributes, Form, tier_bit};
use super::resolve::new_blocks;
use super::turn::TURN_BLOCKS;
use super::{HolderState, RejectReason, Work};
use crate::index::runs::{Places, RunWriter, Spot, Wanted};
use crate::wire::Tier;

/// Consecutive blocks to be stored. The first follows `parent`, a block that the holder has or had, or is at position
/// 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub(super) parent: Option<Spot>,
    pub(super) position: u32,
    pub(super) hashes: &'a [SequenceHash],
    /// Engine's names for the blocks.
    pub(super) names: &'a [u64],
    /// Which of the blocks are to be held; `None` for all. The other blocks only get their places.
    pub(super) kept: Option<&'a [bool]>,
    /// Which of the blocks are resumable.
    pub(super) marks: Marks<'a>,
}

impl<'a> Sequence<'a> {
    /// Leaves out the first `blocks` blocks. The last block left out is at `parent`.
    fn skip(&mut self, blocks: usize, parent: Option<Spot>) {
        self.parent = parent;
        self.position = self
            .position
            .saturating_add(u32::try_from(blocks).unwrap_or(u32::MAX));
        self.hashes = self.hashes.get(blocks..).unwrap_or_default();
        self.names = self.names.get(blocks..).unwrap_or_default();
        self.kept = self.kept.map(|kept| kept.get(blocks..).unwrap_or_default());
        self.marks.skip(blocks);
    }
}

impl HolderState {
    /// Stores as much of a sequence as suits one turn, and leaves the rest in `sequence`. Returns whether the rest is
    /// for another turn: then the holder has the block before it.
    pub(super) fn store_sequence(&mut self, sequence: &mut Sequence<'_>, work: &mut Work<'_>) -> bool {
        let mut done = 0;
        while let Some(first) = sequence.hashes.first() {
            let (parent, position) = (sequence.parent, sequence.position);
            let room = work.blocks_max.saturating_sub(self.blocks());
            let is_short = sequence.hashes.len() <= TURN_BLOCKS.min(room);
            let wanted = Wanted::whole(first.0);
            // The bounds concern only longer sequences, so a short one needs no lookup.
            let most = match is_short || work.runs.child(parent, position, wanted).is_some() {
                // Known blocks can take much longer than new ones: each can get a further name.
                true => TURN_BLOCKS,
                // If the holder is full, no block is made that it cannot have.
                false if sequence.kept.is_none() => room,
                false => usize::MAX,
            };
            let hashes = &sequence.hashes[..sequence.hashes.len().min(most)];
            if hashes.is_empty() {
                self.store_beyond(sequence, work);
                return false;
            }
            let Some((first, count)) = work.runs.put(parent, position, hashes, true) else {
                work.reject_full(sequence.hashes.len());
                return false;
            };
            self.touch(first.run);
            let end = first.offset + u16::try_from(count).unwrap_or(0);
            self.hold(*sequence, first, end, work);
            let offset = end - 1;
            let last = Spot { offset, ..first };
            sequence.skip(count, Some(last));
            done += count;
            self.adopt(first, end);
            // A block that nobody is known to have would be cut off meanwhile.
            let is_held = self.attributes(last).is_some();
            let is_turn = done >= TURN_BLOCKS || !self.adopting.is_empty();
            if is_turn && !sequence.hashes.is_empty() && is_held {
                return true;
            }
        }
        false
    }

    /// Stores, in a full holder, blocks of which it does not have the first. Only blocks that the holder has already
    /// can be stored again. Without orphans, all are rejected.
    fn store_beyond(&mut self, sequence: &Sequence<'_>, work: &mut Work<'_>) {
        if self.orphans.len() == 0 {
            return work.reject_full(sequence.hashes.len());
        }
        let before = sequence.parent.map(|parent| SequenceHash(work.runs.hash(parent)));
        let Sequence {
            hashes, names, marks, ..
        } = *sequence;
        for block in new_blocks(sequence.position.into(), before, hashes, names, marks) {
            self.store_block(&block, work);
        }
    }

    /// Makes the holder have the first blocks of a sequence, which are the blocks of a run from `at` up to the offset
    /// `end`.
    fn hold(&mut self, mut sequence: Sequence<'_>, mut at: Spot, end: u16, work: &mut Work<'_>) {
        while at.offset < end {
            // Blocks go one by one if some are left out.
            let kept = sequence.kept.map(|kept| kept.first() == Some(&true));
            let alike = u16::try_from(sequence.marks.alike).unwrap_or(u16::MAX);
            let most = if kept.is_some() { at.offset + 1 } else { end };
            let most = most.min(at.offset.saturating_add(alike));
            let (to, held) = self.parts.or_default(at.run).extent(at.offset, most);
            let done = match held {
                _ if kept == Some(false) => 1,
                None => self.hold_new(&sequence, at, to, work),
                Some(held) => self.hold_again(&sequence, at, to, held, work),
            };
            at.offset += done;
            sequence.skip(done.into(), None);
        }
    }

    /// Makes the holder have new blocks, as many as go together. Returns how many are done.
    fn hold_new(&mut self, sequence: &Sequence<'_>, at: Spot, to: u16, work: &mut Work<'_>) -> u16 {
        let Some(name) = sequence.names.first().copied() else {
            return to - at.offset;
        };
        let form = self.form_of(at, name, true, &work.runs);
        if self.orphans.len() > 0 && self.merge_orphan(at, &work.runs) {
            return 0;
        }
        if let Some(other) = self.find_other(name, at, form, &work.runs) {
            work.applied.reject(RejectReason::Moved, 1);
            self.drop_name(other, name);
            return 0;
        }
        let room = work.blocks_max.saturating_sub(self.blocks());
        if room == 0 {
            work.reject_full(1);
            return 1;
        }
        // Orphans may turn out to be one of the blocks after the first.
        let together = if self.orphans.len() > 0 { 1 } else { room };
        let wanted = usize::from(to - at.offset).min(together);
        let held = Attributes::new(tier_bit(work.tier), form, true);
        let held = held.marked(work.tier, sequence.marks.is_barred);
        let count = if form == Form::Own {
            self.hold_named(sequence, at, wanted, held, &mut work.runs)
        } else {
            self.hold_by_hash(sequence, at, wanted, held, &work.runs)
        };
        self.placed += count;
        work.applied.stored += count as u64;
        self.touch(at.run);
        u16::try_from(count).unwrap_or(u16::MAX)
    }

    /// Makes the holder have new blocks from `at` on that are named by their hashes: at least the first, and at most
    /// `wanted`. Returns how many.
    fn hold_by_hash(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        wanted: usize,
        held: Attributes,
        runs: &RunWriter<'_>,
    ) -> usize {
        let clashes = self.own.len() > 0 || runs.has_doubles();
        let end = at.offset + u16::try_from(wanted).unwrap_or(0);
        let mut count = 0;
        for (offset, hash) in (at.offset..).zip(runs.view().hashes(at.run, at.offset, end)) {
            let Some(name) = sequence.names.get(count).copied() else {
                break;
            };
            let is_other = |spot| self.find_other(name, spot, Form::Hash, runs).is_some();
            let spot = Spot { offset, ..at };
            let is_clash = || clashes && (!runs.is_placed(spot) || is_other(spot));
            if count > 0 && (name != hash || is_clash()) {
                break;
            }
            // Equal hashes may be in one stretch.
            if runs.places_of(hash) != Places::Single {
                count = count.max(1);
                break;
            }
            count += 1;
        }
        self.set(at, at.offset + u16::try_from(count).unwrap_or(0), held);
        count
    }

    /// Makes the holder have new blocks from `at` on that have names of their own: at least the first, and at most
    /// `wanted`. Returns how many.
    fn hold_named(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        wanted: usize,
        held: Attributes,
        runs: &mut RunWriter<'_>,
    ) -> usize {
        let end = at.offset + u16::try_from(wanted).unwrap_or(0);
        if self.has_hash_names() {
            let hashes = runs.view().hashes(at.run, at.offset, end);
            let is_other =
                |state: &Self, name, spot| state.find_spot(name, runs).is_some_and(|other| other != spot);
            return self.take_names(sequence, at, held, hashes, is_other);
        }
        self.aside(wanted, runs, |state, runs| {
            let hashes = runs.hashes(at.run, at.offset, end);
            state.take_names(sequence, at, held, hashes, |_, _, _| false)
        })
    }

    /// Enters the names of new blocks from `at` on into the holder's table and their part, and sets the blocks'
    /// attributes to `held`. Returns how many, as [`Self::enter_names`].
    fn take_names(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        held: Attributes,
        hashes: impl Iterator<Item = u64>,
        is_other: impl Fn(&Self, u64, Spot) -> bool,
    ) -> usize {
        let count = self.enter_names(sequence, at, hashes, is_other);
        let end = at.offset + u16::try_from(count).unwrap_or(0);
        if let Some(part) = self.parts.get_mut(&at.run) {
            part.set(at.offset, end, Some(held));
            part.set_names(at.offset, &sequence.names[..count]);
        }
        count
    }

    /// Enters the names of blocks from `at` on into the holder's table. Takes the name of the first block, and the
    /// names after it as long as they are new and not the block's hash. Returns how many. `hashes` are the hashes of
    /// the blocks. `is_other` tells that a name is not to be taken: it means a block elsewhere that this table does not
    /// have, or its block has too many names.
    fn enter_names(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        hashes: impl Iterator<Item = u64>,
        is_other: impl Fn(&Self, u64, Spot) -> bool,
    ) -> usize {
        let is_own = |(offset, (name, hash)): &(u16, (&u64, u64))| {
            let (offset, name) = (*offset, **name);
            offset == at.offset || name != *hash && !is_other(self, name, Spot { offset, ..at })
        };
        let blocks = (at.offset..).zip(sequence.names.iter().zip(hashes));
        let names = &sequence.names[..blocks.take_while(is_own).count()];
        let parts = &self.parts;
        let is_equal = |index: usize, other: Spot| {
            let name = names[index];
            // Names before it in the same stretch are not in the part yet.
            let before = usize::from(other.offset.wrapping_sub(at.offset));
            let part = parts.get(&other.run);
            other.run == at.run && before < index && names[before] == name
                || part.is_some_and(|part| part.has_name(other.offset, name))
        };
        // The caller has looked for the first.
        let is_new = |index, equal| index == 0 || equal == 0;
        self.own.insert_run(names.iter().copied(), at, is_equal, is_new)
    }

    /// Stores blocks again that the holder has already, all with the attributes `held`. Returns how many are done.
    fn hold_again(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        to: u16,
        held: Attributes,
        work: &mut Work<'_>,
    ) -> u16 {
        let Some(part) = self.parts.get(&at.run) else {
            return to - at.offset;
        };
        let is_same = |(offset, hash): &(u16, u64)| {
            let name = sequence.names.get(usize::from(offset - at.offset)).copied();
            match held.form() {
                Form::Hash => name == Some(*hash),
                Form::Own => name == Some(part.name(*offset)),
                Form::Nameless | Form::Many => false,
            }
        };
        let hashes = work.runs.view().hashes(at.run, at.offset, to);
        let same = (at.offset..to).zip(hashes).take_while(is_same).count();
        if same > 0 {
            let count = u16::try_from(same).unwrap_or(u16::MAX);
            let next = held.with_more(tier_bit(work.tier)).with_whole(true);
            let next = next.marked(work.tier, sequence.marks.is_barred);
            if next != held {
                self.set(at, at.offset + count, next);
            }
            work.applied.stored += same as u64;
            return count;
        }
        let name = sequence.names.first().copied();
        let is_own = self.orphans.len() == 0 && !self.has_hash_names();
        if is_own && !self.is_full(at) && name.is_some_and(|name| self.find_own(name).is_none()) {
            let tier = work.tier;
            let copies = self.aside(usize::from(to - at.offset), &mut work.runs, |state, runs| {
                let hashes = runs.hashes(at.run, at.offset, to);
                state.hold_copies(sequence, at, held, hashes, tier)
            });
            work.applied.stored += copies as u64;
            return u16::try_from(copies).unwrap_or(u16::MAX);
        }
        self.extend(at, name, true, sequence.marks.is_barred, work);
        1
    }

    /// Whether a block with names of its own has too many for one more.
    fn is_full(&self, spot: Spot) -> bool {
        let part = self.parts.get(&spot.run);
        part.is_none_or(|part| !part.has_room(spot.offset))
    }

    /// Gives a further name to each of some blocks from `at` on: the first block, and the blocks after it whose names
    /// are new. Returns how many. All these blocks have the attributes `held`, and every block of the holder has names
    /// of its own.
    fn hold_copies(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        held: Attributes,
        hashes: impl Iterator<Item = u64>,
        tier: Tier,
    ) -> usize {
        let tiers = tier_bit(tier);
        let is_full = |state: &Self, _, spot| state.is_full(spot);
        let count = self.enter_names(sequence, at, hashes, is_full);
        let Some(part) = self.parts.get_mut(&at.run) else {
            return 0;
        };
        let before = part.copies_bytes();
        for (offset, name) in (at.offset..).zip(&sequence.names[..count]) {
            part.add_name(offset, held.tiers(), Alias { name: *name, tiers });
        }
        self.copies_bytes = self.copies_bytes - before + part.copies_bytes();
        self.further += count;
        let held = held.with_more(tiers).with_whole(true).with_form(Form::Many);
        let held = held.marked(tier, sequence.marks.is_barred);
        self.set(at, at.offset + u16::try_from(count).unwrap_or(0), held);
        count
    }

    /// Stores one block again that has a place. It gets a tier, a name, or a whole hash in addition.
    pub(super) fn extend(
        &mut self,
        at: Spot,
        name: Option<u64>,
        is_whole: bool,
        is_barred: bool,
        work: &mut Work<'_>,
    ) {
        if let Some(name) = name
            && let Some(other) = self.find_other(name, at, Form::Many, &work.runs)
        {
            work.applied.reject(RejectReason::Moved, 1);
            self.drop_name(other, name);
        }
        let Some(held) = self.attributes(at) else { return };
        self.set(at, at.offset + 1, held.with_whole(is_whole));
        match self.name_again(at, name, tier_bit(work.tier), &work.runs) {
            true => {
                self.mark(Found::Placed(at), work.tier, is_barred);
                work.applied.stored += 1;
            }
            false => work.reject_full(1),
        }
    }

    /// Notes whether a block is barred in a tier. Returns false if the block is not in that tier.
    pub(super) fn mark(&mut self, found: Found, tier: Tier, is_barred: bool) -> bool {
        let spot = match found {
            Found::Placed(spot) => spot,
            Found::Orphan(key) => return self.orphans.mark(key, tier, is_barred),
        };
        let held = self.attributes(spot);
        let Some(held) = held.filter(|held| held.tiers() & tier_bit(tier) != 0) else {
            return false;
        };
        let next = held.marked(tier, is_barred);
        if next != held {
            self.set(spot, spot.offset + 1, next);
        }
        true
    }

    /// Notes whether blocks are barred in the event's tier. `names` are names, or else sequence hashes.
    pub(super) fn mark_names(&mut self, names: &[SequenceHash], is_barred: bool, work: &mut Work<'_>) {
        for SequenceHash(name) in names {
            let mut found: SmallVec<[Found; 2]> = self.find_name(*name, &work.runs).into_iter().collect();
            if found.is_empty() {
                found = self.find_hash(*name, &work.runs);
            }
            self.mark_found(&found, is_barred, work);
        }
    }

    /// Does as [`Self::mark_names`], by lineage hashes.
    pub(super) fn mark_keys(&mut self, keys: &[Key], is_barred: bool, work: &mut Work<'_>) {
        for key in keys {
            let orphan = self.orphans.get(*key).map(|_| Found::Orphan(*key));
            let placed = self.find_keys(*key, &work.runs).into_iter().map(Found::Placed);
            let found: SmallVec<[Found; 2]> = placed.chain(orphan).collect();
            self.mark_found(&found, is_barred, work);
        }
    }

    fn mark_found(&mut self, found: &[Found], is_barred: bool, work: &mut Work<'_>) {
        let mut is_held = false;
        for found in found {
            is_held |= self.mark(*found, work.tier, is_barred);
        }
        work.applied
            .reject(RejectReason::UnknownBlock, usize::from(!is_held));
    }
}
