//! A turn of a lane at its holder: applying one event.

use std::sync::Arc;

use bytemuck::TransparentWrapper;
use parking_lot::{Mutex, MutexGuard};

use crate::hash::SequenceHash;
use crate::index::block::NewBlock;
use crate::index::directory::{HolderRecord, HolderSlot};
use crate::index::runs::{Run, RunId, RunStore};
use crate::index::settings::{Hashing, IndexLimits, NamespaceSettings};
use crate::wire::{BlockContent, DegradedReason, RemovedBlocks, ResumableBlocks, StoredBlocks, Tier};
use crate::words::{GIVEN_BACK, give_back};

use super::marks::Marks;
use super::names::Found;
use super::parking::{ParkedEvent, Unplaced, bytes_to_wait, names_in};
use super::part::{Form, tier_bit};
use super::remove::{leave_out_named, leave_out_waiting};
use super::resolve::{self, Resolved, Unresolved};
use super::store::Sequence;
use super::{Applied, Holder, HolderState, RejectReason, Work};

/// Turn of a lane at a holder, with the locks of the holder and of the runs.
pub(in crate::index) struct Turn<'a> {
    home: Home<'a>,
    record: &'a HolderRecord,
    state: MutexGuard<'a, HolderState>,
    work: Work<'a>,
}

/// Parts of the index that a holder belongs to.
#[derive(Debug, Clone, Copy)]
pub(in crate::index) struct Home<'a> {
    pub(in crate::index) settings: &'a NamespaceSettings,
    pub(in crate::index) limits: &'a IndexLimits,
    pub(in crate::index) runs: &'a RunStore,
}

/// Number of blocks after which others have a turn.
pub(super) const TURN_BLOCKS: usize = 1024;
/// Number of runs after which others have a turn.
const TURN_RUNS: usize = 16;
/// Bounds of a turn in which all blocks are removed: number of blocks, and number of runs.
const CLEARED_BLOCKS: usize = 4096;
const CLEARED_RUNS: usize = 256;

impl Holder {
    pub(in crate::index) fn new(record: Arc<HolderRecord>, slot: HolderSlot) -> Self {
        let state = HolderState {
            slot,
            ..HolderState::default()
        };
        Self {
            record,
            state: Mutex::new(state),
        }
    }

    /// Runs `change` in one turn at the holder, and publishes the result. `uses_names` tells that the engine names
    /// blocks.
    pub(in crate::index) fn change(
        &self,
        home: Home<'_>,
        applied: &mut Applied,
        uses_names: bool,
        change: impl FnOnce(&mut Turn<'_>),
    ) {
        let mut turn = Turn {
            home,
            record: &self.record,
            state: self.state.lock(),
            work: Work {
                runs: home.runs.write(),
                applied,
                tier: Tier::DEVICE,
                blocks_max: home.limits.blocks_per_holder_max,
                waiting_bytes_max: home.limits.parking.bytes_max,
            },
        };
        turn.state.uses_names |= uses_names;
        turn.prepare();
        change(&mut turn);
        turn.state.publish(&mut turn.work.runs);
        let Turn { state, work, .. } = turn;
        drop(work);
        self.publish_sizes(&state);
        drop(state);
        give_back(GIVEN_BACK);
    }

    /// Drops stored events whose parent did not come in time.
    pub(in crate::index) fn expire_parked(&self, now_us: u64, runs: &RunStore) -> Applied {
        let mut applied = Applied::default();
        let mut state = self.state.lock();
        let waiting = state.parking.len();
        let dropped = state.parking.expire(now_us);
        if state.parking.len() < waiting {
            applied.reject(RejectReason::ParkingExpired, dropped);
            state.parking.settle();
            state.account(&mut runs.write());
            self.publish_sizes(&state);
        }
        applied
    }

    /// Removes all blocks, and forgets the events that wait for a parent.
    pub(in crate::index) fn clear(&self, runs: &RunStore) {
        let mut state = self.state.lock();
        let mut runs = runs.write();
        let mut blocks = 0;
        for number in 0..state.parts.splits() {
            let held: Vec<RunId> = state.parts.keys_of(number).copied().collect();
            for run in held {
                let Some(part) = state.parts.get_mut(&run) else {
                    continue;
                };
                blocks += usize::from(part.end());
                part.set(0, part.end(), None);
                state.touch(run);
                if blocks >= CLEARED_BLOCKS || state.touched.len() >= CLEARED_RUNS {
                    blocks = 0;
                    state.publish(&mut runs);
                    runs.pause_for(|| MutexGuard::bump(&mut state));
                }
            }
        }
        state.publish(&mut runs);
        let fresh = HolderState {
            slot: state.slot,
            reshaped: state.reshaped + 1,
            bytes: state.bytes,
            aside: state.aside,
            waiting: state.waiting,
            ..HolderState::default()
        };
        let rest = std::mem::replace(&mut *state, fresh);
        state.account(&mut runs);
        drop(runs);
        self.publish_sizes(&state);
        drop(state);
        // The rest may be much, so it is dropped when nobody waits for it.
        drop(rest);
    }

    /// Returns the holder's slot, its tier, and how often it has been reshaped, if the holder is regular. It is regular
    /// if it has each block together with all blocks before it, all in one tier, each under its sequence hash. `None`
    /// if the holder is not regular, or has nothing.
    pub(in crate::index) fn regular(&self, runs: &RunStore) -> Option<(HolderSlot, Tier, u64)> {
        let (state, runs) = (self.state.lock(), runs.write());
        if state.orphans.len() > 0 {
            return None;
        }
        let mut tiers = 0;
        for (run, part) in state.parts.iter() {
            let parent = runs.run(*run).and_then(Run::parent);
            if !part.is_simple() || parent.is_some_and(|parent| state.attributes(parent).is_none()) {
                return None;
            }
            tiers |= part.get(0)?.tiers();
        }
        let tier = Tier::new(u8::try_from(tiers.trailing_zeros()).ok()?)?;
        (tier_bit(tier) == tiers).then_some((state.slot, tier, state.reshaped))
    }

    fn publish_sizes(&self, state: &HolderState) {
        let parked = u32::try_from(state.parking.len()).unwrap_or(u32::MAX);
        self.record.status.blocks.store(state.blocks() as u64);
        self.record.status.parked_events.store(parked);
    }
}

impl Turn<'_> {
    /// Applies a stored event, and then events that have waited for its blocks.
    pub(in crate::index) fn stored(&mut self, stored: StoredBlocks, tier: Tier, now_us: u64) {
        self.work.tier = tier;
        self.store(stored, now_us);
        self.store_ready();
    }

    /// Publishes what is done so far, in the middle of a long event, and lets others have turns. Blocks may be evicted
    /// meanwhile.
    fn breathe(&mut self) {
        self.state.publish(&mut self.work.runs);
        let state = &mut self.state;
        self.work.runs.pause_for(|| MutexGuard::bump(state));
    }

    /// Calls `some` with all of these items, as many at a time as suit one turn.
    fn in_turns<T>(&mut self, all: &[T], mut some: impl FnMut(&mut Self, &[T])) {
        for (number, now) in all.chunks(TURN_BLOCKS).enumerate() {
            if number > 0 {
                self.breathe();
            }
            some(self, now);
        }
    }

    fn reject(&mut self, reason: RejectReason, blocks: usize) {
        self.work.applied.reject(reason, blocks);
    }

    /// Does what is due for blocks that have been evicted since the last turn.
    fn prepare(&mut self) {
        if self.state.uses_names && !self.state.refuses_nameless && self.is_cut_short() {
            // A block without a name may have had a name that is forgotten. When that name is removed, nobody would
            // know which block is meant. So such blocks go now, and are refused from now on.
            self.state.refuses_nameless = true;
            self.drop_nameless();
        }
        if std::mem::take(&mut self.state.is_cut) {
            // The parents of events that wait may have been evicted.
            for event in self.state.parking.clear() {
                self.leave_out(&event.stored);
            }
        }
    }

    /// Whether the engine has blocks for which the index has no room. Then a parent that is unknown here need not have
    /// been lost.
    fn is_cut_short(&self) -> bool {
        let reasons = self.record.status.own_reasons();
        reasons.contains(DegradedReason::Capacity)
    }

    /// Leaves out the blocks of an event, because the index has no room for blocks before them. Each name that the
    /// engine gives to one of them is taken from any other block that has it.
    fn leave_out(&mut self, stored: &StoredBlocks) {
        self.work.reject_full(stored.names.len());
        self.in_turns(&names_in(stored), |turn, names| {
            for name in names {
                if let Some(found) = turn.state.find_name(*name, &turn.work.runs) {
                    turn.state.drop_name(found, *name);
                }
            }
        });
    }

    /// Removes the blocks that have no name from the holder.
    fn drop_nameless(&mut self) {
        let mut last = None;
        while let (dropped, next @ Some(_)) = self.state.orphans.drop_nameless(last) {
            self.work.reject_full(dropped);
            last = next;
            self.breathe();
        }
        for number in 0..self.state.parts.splits() {
            let held: Vec<RunId> = self.state.parts.keys_of(number).copied().collect();
            for runs in held.chunks(TURN_RUNS) {
                let before = self.state.placed;
                for run in runs {
                    self.state.erase(*run, 0, u16::MAX, |form| form == Form::Nameless);
                }
                self.work.reject_full(before - self.state.placed);
                self.breathe();
            }
        }
    }

    /// Gives places to orphans whose parents have come.
    fn adopt(&mut self) {
        while self.state.adopt_some(&mut self.work) {
            self.breathe();
        }
    }

    /// Finds out the hashes and names of an event's blocks, and notes what they contradict.
    fn resolve<'e>(&mut self, stored: &'e StoredBlocks) -> Result<Resolved<'e>, Unresolved> {
        let (runs, settings) = (&mut self.work.runs, self.home.settings);
        let start = self.state.start_of(stored, runs)?;
        // Without content there is nothing to hash.
        let hashed = stored.content.as_ref().map_or(0, |_| stored.names.len());
        let resolved = self
            .state
            .aside(hashed, runs, |_, _| resolve::resolve(stored, settings, start))?;
        let ambiguous = self.state.contradicted_by(&resolved);
        self.reject(RejectReason::AmbiguousParent, ambiguous);
        if let Resolved::Sequence(sequence) = &resolved
            && sequence.is_foreign
        {
            self.reject(RejectReason::ForeignChain, sequence.hashes.len());
        }
        Ok(resolved)
    }

    fn store(&mut self, stored: StoredBlocks, now_us: u64) {
        let blocks = stored.names.len();
        match self.resolve(&stored) {
            Ok(resolved) => self.store_resolved(&resolved, None),
            Err(Unresolved::Rejected(reason)) => self.reject(reason, blocks),
            Err(Unresolved::UnknownParent(_)) if self.is_cut_short() => self.leave_out(&stored),
            Err(Unresolved::UnknownParent(parent)) => {
                let Some(stored) = self.without_surplus_content(stored) else {
                    return self.reject(RejectReason::ContentMismatch, blocks);
                };
                let (tier, limits) = (self.work.tier, self.home.limits.parking);
                let (own, more) = (self.state.parking.bytes() as u64, bytes_to_wait(&stored) as u64);
                let room = self.home.runs.room_to_wait(own, limits.bytes_max);
                if !self.home.runs.has_room_aside() || own + more > room {
                    return self.reject(RejectReason::ParkingFull, blocks);
                }
                self.work.applied.parked += 1;
                let dropped = self.state.parking.park(parent, stored, tier, now_us, limits);
                self.reject(RejectReason::ParkingFull, dropped);
            }
        }
    }

    /// Returns the event in the form in which it may wait. `None` if its content does not fit its blocks. Waiting
    /// events are bounded in blocks, so the content is reduced to what the blocks need: their block hashes, or nothing
    /// if the engine's hashes are the keys.
    fn without_surplus_content(&self, mut stored: StoredBlocks) -> Option<StoredBlocks> {
        if self.home.settings.hashing == Hashing::Engine || stored.engine_hashes.is_some() {
            stored.content = None;
        }
        let (blocks, size) = (stored.names.len(), self.home.settings.block_size);
        let fits = |content: &BlockContent| content.is_of(blocks, size);
        if !stored.content.as_ref().is_none_or(fits) {
            return None;
        }
        if let Some(content) = &stored.content {
            let hashes = content.hashes_from(0, size).into_owned();
            stored.content = Some(BlockContent::BlockHashes(hashes));
        }
        Some(stored)
    }

    /// Stores the blocks of an event. If the event has `waited`, leaves out blocks that were removed meanwhile.
    fn store_resolved(&mut self, resolved: &Resolved<'_>, waited: Option<&ParkedEvent>) {
        let sequence = match resolved {
            Resolved::Keys(blocks) => return self.store_blocks(blocks),
            Resolved::Sequence(sequence) => sequence,
        };
        let kept = waited.map(|event| {
            let blocks = sequence.blocks();
            let kept = blocks.iter().map(|block| self.state.parking.keeps(event, block));
            kept.collect::<Vec<bool>>()
        });
        let kept = kept.filter(|kept| kept.contains(&false));
        if let Some(placed) = sequence.placed(kept.as_deref()) {
            return self.store_placed(placed);
        }
        let mut blocks = sequence.blocks();
        blocks.retain(|block| waited.is_none_or(|event| self.state.parking.keeps(event, block)));
        self.store_blocks(&blocks);
    }

    fn store_blocks(&mut self, blocks: &[NewBlock]) {
        self.in_turns(blocks, |turn, blocks| {
            for block in blocks {
                turn.state.store_block(block, &mut turn.work);
                turn.adopt();
            }
        });
    }

    /// Stores consecutive blocks that have places.
    fn store_placed(&mut self, mut sequence: Sequence<'_>) {
        loop {
            let is_left = self.state.store_sequence(&mut sequence, &mut self.work);
            self.adopt();
            if !is_left {
                return;
            }
            self.breathe();
            if sequence
                .parent
                .is_none_or(|last| self.state.attributes(last).is_none())
            {
                // The block before the rest has been evicted meanwhile.
                return self.work.reject_full(sequence.hashes.len());
            }
        }
    }

    /// Stores events that waited for blocks that are there now, and then events that waited for these.
    fn store_ready(&mut self) {
        let mut blocks = 0;
        while self.state.parking.len() > 0 {
            if blocks >= TURN_BLOCKS {
                blocks = 0;
                self.breathe();
            }
            let mut parking = std::mem::take(&mut self.state.parking);
            let runs = &mut self.work.runs;
            let ready = parking.take_ready(|name| self.state.find_parent(name, None, runs).is_some());
            self.state.parking = parking;
            let Some(event) = ready else { return };
            blocks += event.stored.names.len();
            self.work.tier = event.tier;
            match self.resolve(&event.stored) {
                Ok(resolved) => self.store_resolved(&resolved, Some(&event)),
                Err(Unresolved::Rejected(reason)) => self.reject(reason, event.stored.names.len()),
                // Not reached: the parent was found just now.
                Err(Unresolved::UnknownParent(_)) => {}
            }
        }
        self.state.parking.settle();
    }

    /// Applies a removed event.
    pub(in crate::index) fn remove(&mut self, removed: &RemovedBlocks, tier: Tier) {
        self.work.tier = tier;
        let (names, mut others) = (&removed.hashes, Vec::new());
        let keys = removed.lineage_hashes.iter().copied().map(Unplaced::Key);
        self.state.note_unplaced(keys, &mut self.work);
        self.in_turns(names, |turn, names| {
            turn.state.remove_names(names, &mut others, &mut turn.work);
        });
        if !others.is_empty() {
            let left_out = self.state.aside(names.len(), &mut self.work.runs, |_, _| {
                leave_out_named(&mut others, names) + leave_out_waiting(&mut others)
            });
            self.reject(RejectReason::UnknownBlock, left_out);
        }
        self.in_turns(&others, |turn, others| {
            turn.state.remove_hashes(others, &mut turn.work)
        });
        self.in_turns(&removed.lineage_hashes, |turn, keys| {
            turn.state.remove_keys(keys, &mut turn.work);
        });
    }

    /// Applies a resumable event, to the holder's blocks and to blocks of events that wait.
    pub(in crate::index) fn mark(&mut self, blocks: &ResumableBlocks, tier: Tier) {
        self.work.tier = tier;
        let is_barred = !blocks.resumable;
        let dropped = self.state.parking.mark(blocks, tier);
        self.reject(RejectReason::ParkingFull, dropped);
        self.in_turns(&blocks.hashes, |turn, names| {
            turn.state.mark_names(names, is_barred, &mut turn.work);
        });
        self.in_turns(&blocks.lineage_hashes, |turn, keys| {
            turn.state.mark_keys(keys, is_barred, &mut turn.work);
        });
    }

    /// Stores blocks that were in an index before, under their hashes as names, after the block with the hash `parent`.
    /// If that block is absent, the blocks are counted and left out.
    pub(in crate::index) fn restore(
        &mut self,
        parent: Option<SequenceHash>,
        position: u32,
        hashes: &[SequenceHash],
        tier: Tier,
    ) {
        self.work.tier = tier;
        let parent = match parent {
            None => None,
            Some(parent) => match self.state.find_name(parent.0, &self.work.runs) {
                Some(Found::Placed(spot)) if self.work.runs.position(spot) + 1 == position => Some(spot),
                _ => return self.work.reject_full(hashes.len()),
            },
        };
        self.store_placed(Sequence {
            parent,
            position,
            hashes,
            names: SequenceHash::peel_slice(hashes),
            kept: None,
            marks: Marks::ALL,
        });
    }
}
