//! What stored events do to a holder's blocks.

use std::borrow::Cow;
use std::ops::Range;

use crate::hash::{SequenceHash, lineage_hashes_from};
use crate::wire::Tier;

use super::orphans::Alias;
use super::part::{Attributes, Form, tier_bit};
use super::{Applied, HolderState, RejectReason, reject_full};
use crate::index::block::NewBlock;
use crate::index::runs::{AHEAD, RunWriter, Spot, Wanted};

/// Blocks one after the other, the first after `parent`, a block that the holder has or had, or at position 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub(super) parent: Option<Spot>,
    pub(super) position: u32,
    pub(super) hashes: &'a [SequenceHash],
    /// What the engine calls them; none where that is their hashes.
    pub(super) names: Option<&'a [u64]>,
}

/// How stored blocks are taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    pub(super) tier: Tier,
    /// Most blocks of the holder.
    pub(super) blocks_max: usize,
}

impl<'a> Sequence<'a> {
    /// What follows the first `done` blocks, the last of which is at `parent`.
    pub(super) fn after(&self, done: usize, parent: Spot) -> Sequence<'a> {
        Sequence {
            parent: Some(parent),
            position: self.position + u32::try_from(done).unwrap_or(u32::MAX),
            hashes: self.hashes.get(done..).unwrap_or_default(),
            names: self.names.map(|names| names.get(done..).unwrap_or_default()),
        }
    }

    fn name(&self, index: usize) -> Option<u64> {
        match self.names {
            Some(names) => names.get(index).copied(),
            None => self.hashes.get(index).map(|hash| hash.0),
        }
    }

    fn names_of(&self, blocks: Range<usize>) -> Cow<'a, [u64]> {
        match self.names {
            Some(names) => Cow::Borrowed(names.get(blocks).unwrap_or_default()),
            None => blocks.filter_map(|index| self.name(index)).collect(),
        }
    }
}

/// After so many blocks others have a turn.
const TURN_BLOCKS: usize = 1024;

impl HolderState {
    /// Stores a sequence, as much of it as is good for a turn. Of the blocks that are not `kept`, where that says which are, only the places
    /// are made, and no more.
    ///
    /// Where something is left, gives how many blocks are done, and the place of the last of them, which is held.
    pub(super) fn store_sequence(
        &mut self,
        sequence: &Sequence<'_>,
        kept: Option<&[bool]>,
        terms: Terms,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) -> Option<(usize, Spot)> {
        let (mut parent, mut done) = (sequence.parent, 0);
        while let Some(rest) = sequence.hashes.get(done..).filter(|rest| !rest.is_empty()) {
            let room = terms.blocks_max.saturating_sub(self.blocks());
            // Where the holder is full, nothing is made that it cannot have.
            let position = sequence.position + u32::try_from(done).unwrap_or(u32::MAX);
            let known = runs.child(parent, position, Wanted::whole(rest[0].0));
            let most = match known {
                // These can take much longer than new ones: each can get a further name.
                Some(_) => TURN_BLOCKS,
                None if kept.is_none() => room,
                None => usize::MAX,
            };
            let rest = &rest[..rest.len().min(most)];
            if rest.is_empty() {
                self.store_beyond(sequence, done, parent, terms, runs, applied);
                return None;
            }
            let Some((first, count)) = runs.put(parent, position, rest, true) else {
                reject_full(applied, sequence.hashes.len() - done);
                return None;
            };
            self.touch(first.run);
            let end = first.offset + u16::try_from(count).unwrap_or(0);
            if let Some(kept) = kept {
                for (index, offset) in (done..).zip(first.offset..end) {
                    if kept.get(index) == Some(&true) {
                        let spot = Spot { offset, ..first };
                        self.hold(sequence, index, spot, offset + 1, terms, runs, applied);
                    }
                }
            } else {
                self.hold(sequence, done, first, end, terms, runs, applied);
            }
            done += count;
            let last = Spot {
                offset: end - 1,
                ..first
            };
            parent = Some(last);
            self.adopt(first.run, first.offset, end);
            // What nobody is known to have would be cut off meanwhile.
            let is_held = self.attributes(last).is_some();
            let is_turn = done >= TURN_BLOCKS || !self.adopting.is_empty();
            if is_turn && done < sequence.hashes.len() && is_held {
                return Some((done, last));
            }
        }
        None
    }

    /// What a full holder does with the blocks of a sequence from `index` on, the first of which it does not have.
    fn store_beyond(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        parent: Option<Spot>,
        terms: Terms,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) {
        if self.orphans.len() == 0 {
            return reject_full(applied, sequence.hashes.len() - index);
        }
        let before = match index.checked_sub(1) {
            Some(before) => sequence.hashes.get(before).copied(),
            None => parent.map(|parent| SequenceHash(runs.hash(parent))),
        };
        let position = u64::from(sequence.position) + index as u64;
        let hashes = sequence.hashes.get(index..).unwrap_or_default();
        let keys = lineage_hashes_from(position, before, hashes);
        for (index, (key, hash)) in (index..).zip(keys.zip(hashes)) {
            if let Ok(key) = key {
                let (sequence_hash, name) = (Some(*hash), sequence.name(index));
                let block = NewBlock {
                    key,
                    sequence_hash,
                    name,
                };
                self.store_block(&block, terms, runs, applied);
            }
        }
    }

    /// Holds the blocks of a run from `first` up to `end`: those of the sequence from `index` on.
    #[allow(
        clippy::too_many_arguments,
        reason = "a stretch of a sequence and where it lies"
    )]
    fn hold(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        first: Spot,
        end: u16,
        terms: Terms,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) {
        if self.is_keyed {
            runs.place(first.run, end);
        }
        let mut at = first;
        while at.offset < end {
            let own = index + usize::from(at.offset - first.offset);
            let part = self.parts.or_default(at.run);
            let (to, held) = part.extent(at.offset, end);
            at.offset += match held {
                None => self.hold_new(sequence, own, at, to, terms, runs, applied),
                Some(held) => self.hold_again(sequence, own, at, to, held, terms, runs, applied),
            };
        }
    }

    /// Holds new blocks, as many as go together; says how many are done.
    #[allow(clippy::too_many_arguments, reason = "as `hold`")]
    fn hold_new(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        to: u16,
        terms: Terms,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) -> u16 {
        let Some(name) = sequence.name(index) else {
            return to - at.offset;
        };
        let form = self.form_of(at, name, true, runs);
        if form == Form::Hash {
            runs.place(at.run, to);
        }
        if self.orphans.len() > 0 && self.merge_orphan(at, runs) {
            return 0;
        }
        if let Some(other) = self.find_other(name, at, form, runs) {
            applied.reject(RejectReason::Moved, 1);
            self.drop_name(other, name);
            return 0;
        }
        let room = terms.blocks_max.saturating_sub(self.blocks());
        if room == 0 {
            reject_full(applied, 1);
            return 1;
        }
        // Blocks without a place may be at one of those after the first.
        let together = if self.orphans.len() > 0 { 1 } else { room };
        let wanted = usize::from(to - at.offset).min(together);
        let held = Attributes::new(tier_bit(terms.tier), form, true);
        let count = if form == Form::Own {
            self.hold_named(sequence, index, at, wanted, held, runs)
        } else {
            self.hold_by_hash(sequence, index, at, wanted, held, runs)
        };
        self.placed += count;
        applied.stored += count as u64;
        self.touch(at.run);
        u16::try_from(count).unwrap_or(u16::MAX)
    }

    /// Holds those of the blocks from `at` on, at least the first, that are found by their hashes; says how many.
    fn hold_by_hash(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        wanted: usize,
        held: Attributes,
        runs: &RunWriter<'_>,
    ) -> usize {
        let clashes = self.own.len() > 0 || runs.has_doubles();
        let end = at.offset + u16::try_from(wanted).unwrap_or(0);
        let mut count = 0;
        for (offset, hash) in (at.offset..).zip(runs.hashes(at.run, at.offset, end)) {
            let Some(name) = sequence.name(index + count) else {
                break;
            };
            let is_other = |spot| self.find_other(name, spot, Form::Hash, runs).is_some();
            let spot = Spot { offset, ..at };
            let is_clash = || clashes && (!runs.is_placed(spot) || is_other(spot));
            if count > 0 && (name != hash || is_clash()) {
                break;
            }
            // Equal hashes may be in one stretch.
            if runs.has_double(hash) {
                count = count.max(1);
                break;
            }
            count += 1;
        }
        if let Some(part) = self.parts.get_mut(&at.run) {
            part.set(
                at.offset,
                at.offset + u16::try_from(count).unwrap_or(0),
                Some(held),
            );
        }
        count
    }

    /// Holds those of the blocks from `at` on, at least the first, that have names of their own; says how many.
    fn hold_named(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        wanted: usize,
        held: Attributes,
        runs: &mut RunWriter<'_>,
    ) -> usize {
        let end = at.offset + u16::try_from(wanted).unwrap_or(0);
        if self.has_hash_names() {
            let hashes = runs.hashes(at.run, at.offset, end);
            let is_other =
                |state: &Self, name, spot| state.find_spot(name, runs).is_some_and(|other| other != spot);
            return self.take_names(sequence, index, at, held, hashes, is_other);
        }
        self.aside(wanted, runs, |state, runs| {
            let hashes = runs.hashes(at.run, at.offset, end);
            state.take_names(sequence, index, at, held, hashes, |_, _, _| false)
        })
    }

    /// Puts the names of new blocks from `at` on into the holder's table and their part, as [`Self::enter_names`].
    fn take_names(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        held: Attributes,
        hashes: impl Iterator<Item = u64>,
        is_other: impl Fn(&Self, u64, Spot) -> bool,
    ) -> usize {
        let count = self.enter_names(sequence, index, at, hashes, is_other);
        let names = sequence.names_of(index..index + count);
        let end = at.offset + u16::try_from(count).unwrap_or(0);
        if let Some(part) = self.parts.get_mut(&at.run) {
            part.set(at.offset, end, Some(held));
            part.set_names(at.offset, &names);
        }
        count
    }

    /// Puts the names of blocks from `at` on, of which these are the hashes, into the holder's table: that of the first, and of those after
    /// it that are new and no hashes. `is_other` says whether a name means a block elsewhere that this table does not have.
    fn enter_names(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        hashes: impl Iterator<Item = u64>,
        is_other: impl Fn(&Self, u64, Spot) -> bool,
    ) -> usize {
        let first = (index..index + AHEAD).filter_map(|index| sequence.name(index));
        first.for_each(|name| self.own.prefetch(name));
        let mut count = 0;
        for (offset, hash) in (at.offset..).zip(hashes) {
            let Some(name) = sequence.name(index + count) else {
                break;
            };
            if let Some(ahead) = sequence.name(index + count + AHEAD) {
                self.own.prefetch(ahead);
            }
            let spot = Spot { offset, ..at };
            if count > 0 && (name == hash || is_other(self, name, spot)) {
                break;
            }
            let parts = &self.parts;
            // Those before it in the same stretch are not in the part yet.
            let is_equal = |other: Spot| {
                let is_before = other.run == at.run && (at.offset..offset).contains(&other.offset);
                let before = || sequence.name(index + usize::from(other.offset - at.offset));
                let part = parts.get(&other.run);
                is_before && before() == Some(name)
                    || part.is_some_and(|part| part.has_name(other.offset, name))
            };
            // The caller has looked for the first.
            let equal_max = if count == 0 { usize::MAX } else { 1 };
            if self.own.insert_unless(name, spot, equal_max, is_equal) >= equal_max {
                break;
            }
            count += 1;
        }
        count
    }

    /// Stores blocks again that are held already; says how many are done.
    #[allow(clippy::too_many_arguments, reason = "as `hold`")]
    fn hold_again(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        to: u16,
        held: Attributes,
        terms: Terms,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) -> u16 {
        let Some(part) = self.parts.get_mut(&at.run) else {
            return to - at.offset;
        };
        let is_same = |(offset, hash): (u16, u64)| {
            let name = sequence.name(index + usize::from(offset - at.offset));
            match held.form() {
                Form::Hash => name == Some(hash),
                Form::Own => name == Some(part.name(offset)),
                Form::Nameless | Form::Many => false,
            }
        };
        let hashes = runs.hashes(at.run, at.offset, to);
        let same = (at.offset..to)
            .zip(hashes)
            .take_while(|pair| is_same(*pair))
            .count();
        if same > 0 {
            let count = u16::try_from(same).unwrap_or(u16::MAX);
            let tiers = held.tiers() | tier_bit(terms.tier);
            let next = held.with_tiers(tiers).with_whole(true);
            if next != held {
                part.set(at.offset, at.offset + count, Some(next));
                self.touch(at.run);
            }
            applied.stored += same as u64;
            return count;
        }
        let name = sequence.name(index);
        let is_own = self.orphans.len() == 0 && !self.has_hash_names();
        if is_own && !self.is_full(at) && name.is_some_and(|name| self.find_own(name).is_none()) {
            let copies = self.aside(usize::from(to - at.offset), runs, |state, runs| {
                let hashes = runs.hashes(at.run, at.offset, to);
                state.hold_copies(sequence, index, at, held, hashes, terms)
            });
            applied.stored += copies as u64;
            return u16::try_from(copies).unwrap_or(u16::MAX);
        }
        self.extend(at, name, true, terms, runs, applied);
        1
    }

    /// Whether a block with names of its own has too many for one more.
    fn is_full(&self, spot: Spot) -> bool {
        let part = self.parts.get(&spot.run);
        part.is_none_or(|part| !part.has_room(spot.offset))
    }

    /// Gives blocks from `at` on, all with `held` in common, a further name each: the first, and those after it whose names are new. Says how
    /// many. Every block of the holder has names of its own.
    fn hold_copies(
        &mut self,
        sequence: &Sequence<'_>,
        index: usize,
        at: Spot,
        held: Attributes,
        hashes: impl Iterator<Item = u64>,
        terms: Terms,
    ) -> usize {
        let is_full = |state: &Self, _, spot| state.is_full(spot);
        let count = self.enter_names(sequence, index, at, hashes, is_full);
        let names = sequence.names_of(index..index + count);
        let Some(part) = self.parts.get_mut(&at.run) else {
            return 0;
        };
        let before = part.copies_bytes();
        let tiers = tier_bit(terms.tier);
        for (offset, name) in (at.offset..).zip(names.iter()) {
            part.add_name(offset, held.tiers(), Alias { name: *name, tiers });
        }
        self.copies_bytes = self.copies_bytes - before + part.copies_bytes();
        self.further += count;
        let held = held.with_tiers(held.tiers() | tiers).with_whole(true);
        let end = at.offset + u16::try_from(count).unwrap_or(0);
        part.set(at.offset, end, Some(held.with_form(Form::Many)));
        self.touch(at.run);
        count
    }

    /// Stores one block again that has a place: with a tier, a name, or a whole hash more.
    pub(super) fn extend(
        &mut self,
        at: Spot,
        name: Option<u64>,
        is_whole: bool,
        terms: Terms,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) {
        if let Some(name) = name
            && let Some(other) = self.find_other(name, at, Form::Many, runs)
        {
            applied.reject(RejectReason::Moved, 1);
            self.drop_name(other, name);
        }
        let Some(held) = self.attributes(at) else { return };
        self.set(at, Some(held.with_whole(is_whole)));
        let tiers = tier_bit(terms.tier);
        let name = name.or_else(|| self.names_of(at, runs).first().map(|alias| alias.name));
        let is_taken = match name {
            Some(name) => self.name_again(at, name, tiers, runs),
            None => {
                let held = held.with_whole(is_whole);
                self.set(at, Some(held.with_tiers(held.tiers() | tiers)));
                true
            }
        };
        if is_taken {
            applied.stored += 1;
        } else {
            reject_full(applied, 1);
        }
    }
}
