//! The effect of stored events on a holder's blocks.

use smallvec::SmallVec;

use crate::ahead::AHEAD;
use crate::hash::SequenceHash;
use crate::index::runs::{Places, RunWriter, Spot, Wanted};
use crate::index::share::{Attributes, tier_bit};
use crate::wire::Tier;

use super::applied::RejectReason;
use super::blocks::{Sequence, new_blocks};
use super::find::FoundBlock;
use super::form::{self, Form, NameNotes};
use super::orphans::Key;
use super::state::{HolderState, TURN_BLOCKS, Work};

impl HolderState {
    /// Stores as many blocks of a sequence as may be handled before the locks are released, and leaves the rest in
    /// `sequence`. Returns whether there is a rest. If so, the holder has the block before the rest.
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
                // The holder has room for so many new blocks; the runs get no more.
                false if sequence.kept.is_none() => room,
                false => usize::MAX,
            };
            let hashes = &sequence.hashes[..sequence.hashes.len().min(most)];
            if hashes.is_empty() {
                self.store_beyond(sequence, work);
                return false;
            }
            if self.names.len() > 0 {
                // The table needs these names after the blocks have been put into the runs.
                let names = sequence.names.iter().take(AHEAD);
                names.for_each(|name| self.names.prefetch(*name));
            }
            let Some((first, count)) = work.runs.put(parent, position, hashes, true) else {
                work.reject_full(sequence.hashes.len());
                return false;
            };
            self.share.touch(first.run);
            let count = self.without_twins(first, count, &work.runs);
            if count == 0 {
                work.applied
                    .reject(RejectReason::CrowdedHash, sequence.hashes.len());
                return false;
            }
            let end = first.offset + u16::try_from(count).unwrap_or(0);
            self.hold(*sequence, first, end, work);
            let offset = end - 1;
            let last = Spot { offset, ..first };
            sequence.skip(count, Some(last));
            done += count;
            self.adopt(first, end);
            // While the locks are released, a block that no holder has would be cut off.
            let is_held = self.attributes(last).is_some();
            let is_turn = done >= TURN_BLOCKS || !self.adopting.is_empty();
            if is_turn && !sequence.hashes.is_empty() && is_held {
                return true;
            }
        }
        false
    }

    /// Handles the blocks of a sequence when the holder is full and lacks the first block. Rejects the blocks that the
    /// holder does not have, and stores the others again. If there are no orphans (blocks whose parent is unknown),
    /// rejects all blocks.
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

    /// Stores the first blocks of a sequence for the holder. These blocks already have places in a run, from `at` up to
    /// the offset `end`.
    fn hold(&mut self, mut sequence: Sequence<'_>, mut at: Spot, end: u16, work: &mut Work<'_>) {
        while at.offset < end {
            // If some blocks are left out, the blocks are handled one by one.
            let kept = sequence.kept.map(|kept| kept.first() == Some(&true));
            let alike = u16::try_from(sequence.marks.alike).unwrap_or(u16::MAX);
            let most = if kept.is_some() { at.offset + 1 } else { end };
            let most = most.min(at.offset.saturating_add(alike));
            let (to, held) = self.share.extent(at, most);
            let done = match held {
                _ if kept == Some(false) => 1,
                None => self.hold_new(&sequence, at, to, work),
                Some(held) => self.hold_again(&sequence, at, to, held, work),
            };
            at.offset += done;
            sequence.skip(done.into(), None);
        }
    }

    /// Stores some new blocks for the holder, as many as can be stored together. If the holder is full, rejects the
    /// first block instead. Returns the number of blocks handled. 0 means that the caller must handle the first block
    /// again.
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
        // If there are orphans, one of them may turn out to be one of these blocks, so each block is handled alone.
        let together = if self.orphans.len() > 0 { 1 } else { room };
        let wanted = usize::from(to - at.offset).min(together);
        let held = form::held(tier_bit(work.tier), form, true);
        let held = held.marked(work.tier, sequence.marks.is_barred);
        let count = if form == Form::Own {
            self.enter_own(sequence, at, wanted, &mut work.runs)
        } else {
            self.named_by_hash(sequence, at, wanted, &work.runs)
        };
        let count = u16::try_from(count).unwrap_or(0);
        self.share.set(at, at.offset + count, Some(held));
        work.applied.stored += u64::from(count);
        count
    }

    /// Number of new blocks, from `at` on, that can be stored in one go under their hashes as names. At least 1, at
    /// most `wanted`.
    fn named_by_hash(&self, sequence: &Sequence<'_>, at: Spot, wanted: usize, runs: &RunWriter<'_>) -> usize {
        let clashes = self.names.len() > 0 || runs.has_doubles();
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
            // Two of these blocks may have the same hash.
            if runs.places_of(hash) != Places::Single {
                count = count.max(1);
                break;
            }
            count += 1;
        }
        count
    }

    /// Inserts names of new blocks into the holder's table, beginning with the block at `at`. The name of this block
    /// differs from the block's hash. Stops at the next block that is named by its hash, and after at most `wanted`
    /// names. Returns the number of inserted names.
    fn enter_own(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        wanted: usize,
        runs: &mut RunWriter<'_>,
    ) -> usize {
        let end = at.offset + u16::try_from(wanted).unwrap_or(0);
        if self.has_hash_names() {
            let hashes = runs.view().hashes(at.run, at.offset, end);
            let is_other = |spot, name| self.find_spot(name, runs).is_some_and(|other| other != spot);
            let names = own_names(sequence, at, hashes, is_other);
            self.names.insert(at, names)
        } else {
            self.aside(wanted, runs, |state, runs| {
                let hashes = runs.hashes(at.run, at.offset, end);
                state
                    .names
                    .insert(at, own_names(sequence, at, hashes, |_, _| false))
            })
        }
    }

    /// Stores blocks again that the holder already has. All of them have the attributes `held`: the tiers, and how the
    /// engine names the blocks. Returns the number of blocks handled.
    fn hold_again(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        to: u16,
        held: Attributes,
        work: &mut Work<'_>,
    ) -> u16 {
        let same = match held.form() {
            Form::Hash => {
                let hashes = work.runs.view().hashes(at.run, at.offset, to);
                agreement(sequence.names, hashes)
            }
            Form::Own => {
                let firsts = self.names.firsts(at.run, at.offset, to);
                agreement(sequence.names, firsts.iter().copied())
            }
            Form::Nameless | Form::Many => 0,
        };
        if same > 0 {
            let count = u16::try_from(same).unwrap_or(u16::MAX);
            let next = held.with_more(tier_bit(work.tier)).with_whole(true);
            let next = next.marked(work.tier, sequence.marks.is_barred);
            if next != held {
                self.share.set(at, at.offset + count, Some(next));
            }
            work.applied.stored += same as u64;
            return count;
        }
        let name = sequence.names.first().copied();
        let is_own = self.orphans.len() == 0 && !self.has_hash_names();
        if is_own && self.names.has_room(at) && name.is_some_and(|name| self.names.find(name).is_none()) {
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

    /// Gives one more name to the block at `at` and to the blocks after it. Stops at a block that can have no more
    /// names, or whose name another block has. All these blocks have the attributes `held`. Returns the number of
    /// blocks that got a name. Can be used only if every block of the holder has a name other than its hash.
    fn hold_copies(
        &mut self,
        sequence: &Sequence<'_>,
        at: Spot,
        held: Attributes,
        hashes: impl Iterator<Item = u64>,
        tier: Tier,
    ) -> usize {
        let names = own_names(sequence, at, hashes, |spot, _| !self.names.has_room(spot));
        let count = self.names.insert_further(at, names, held.tiers(), tier_bit(tier));
        let held = held
            .with_more(tier_bit(tier))
            .with_whole(true)
            .with_form(Form::Many);
        let held = held.marked(tier, sequence.marks.is_barred);
        self.share
            .set(at, at.offset + u16::try_from(count).unwrap_or(0), Some(held));
        count
    }

    /// Marks blocks as barred (not resumable) or not barred in the event's tier. Each of `names` is a block's name, or
    /// a sequence hash if no block has that name.
    pub(super) fn mark_names(&mut self, names: &[SequenceHash], is_barred: bool, work: &mut Work<'_>) {
        for SequenceHash(name) in names {
            let mut found: SmallVec<[FoundBlock; 2]> =
                self.find_name(*name, &work.runs).into_iter().collect();
            if found.is_empty() {
                found = self.find_hash(*name, &work.runs);
                self.doubt_crowded(*name, work);
            }
            self.mark_found(&found, is_barred, work);
        }
    }

    /// Marks blocks, given by lineage hashes, as barred (not resumable) or not barred in the event's tier.
    pub(super) fn mark_keys(&mut self, keys: &[Key], is_barred: bool, work: &mut Work<'_>) {
        for key in keys {
            let orphan = self.orphans.get(*key).map(|_| FoundBlock::Orphan(*key));
            let placed = self
                .find_keys(*key, &work.runs)
                .into_iter()
                .map(FoundBlock::Placed);
            let found: SmallVec<[FoundBlock; 2]> = placed.chain(orphan).collect();
            self.doubt_crowded(key.current_hash_fragment(), work);
            self.mark_found(&found, is_barred, work);
        }
    }

    fn mark_found(&mut self, found: &[FoundBlock], is_barred: bool, work: &mut Work<'_>) {
        let mut is_held = false;
        for found in found {
            is_held |= self.mark(*found, work.tier, is_barred);
        }
        work.applied
            .reject(RejectReason::UnknownBlock, usize::from(!is_held));
    }
}

/// Returns the first names of a sequence that can be inserted into the table together. They belong to the blocks from
/// `at` on, and `hashes` are the hashes of these blocks. Ends before a name that equals its block's hash, or for which
/// `is_other` is true. The first name is always included.
fn own_names<'a>(
    sequence: &Sequence<'a>,
    at: Spot,
    hashes: impl Iterator<Item = u64>,
    is_other: impl Fn(Spot, u64) -> bool,
) -> &'a [u64] {
    let is_own = |(offset, (name, hash)): &(u16, (&u64, u64))| {
        let (offset, name) = (*offset, **name);
        offset == at.offset || name != *hash && !is_other(Spot { offset, ..at }, name)
    };
    let blocks = (at.offset..).zip(sequence.names.iter().zip(hashes));
    &sequence.names[..blocks.take_while(is_own).count()]
}

/// Number of leading elements of `names` that equal those of `own`.
fn agreement(names: &[u64], own: impl Iterator<Item = u64>) -> usize {
    own.zip(names).take_while(|(own, name)| own == *name).count()
}
