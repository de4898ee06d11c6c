//! Applying one event to a holder, in one or more turns. In a turn, the lane has the locks of the holder and of the
//! runs. Between two turns of a long event, other writers have turns, and blocks may be evicted.

use bytemuck::TransparentWrapper;
use parking_lot::MutexGuard;

use crate::hash::SequenceHash;
use crate::index::directory::HolderRecord;
use crate::index::settings::Hashing;
use crate::index::shared::IndexShared;
use crate::wire::{BlockContent, DegradedReason, RemovedBlocks, ResumableBlocks, StoredBlocks, Tier};
use crate::words::{GIVEN_BACK, give_back};

use super::applied::{Applied, RejectReason};
use super::blocks::{NewBlock, Sequence};
use super::find::FoundBlock;
use super::form::Form;
use super::holder::SharedHolder;
use super::marks::Marks;
use super::parking::{ParkedEvent, Unplaced, bytes_to_wait, names_in};
use super::remove::{leave_out_named, leave_out_waiting};
use super::resolve::{self, Resolved, Unresolved};
use super::state::{HolderState, TURN_BLOCKS, Work};

/// Turn of a lane (a thread that applies events) at a holder: it has the locks of the holder and of the runs.
pub(super) struct HolderTurn<'a> {
    index: &'a IndexShared,
    record: &'a HolderRecord,
    state: MutexGuard<'a, HolderState>,
    work: Work<'a>,
}

/// Number of runs after which the locks are released for a moment, so that other writers can have them.
const TURN_RUNS: usize = 16;

impl SharedHolder {
    /// Runs `change` with the locks of the holder and of the runs, and publishes the result. `uses_names` tells whether
    /// the engine names blocks.
    pub(super) fn change(
        &self,
        index: &IndexShared,
        applied: &mut Applied,
        uses_names: bool,
        change: impl FnOnce(&mut HolderTurn<'_>),
    ) {
        let mut turn = HolderTurn {
            index,
            record: &self.record,
            state: self.state.lock(),
            work: Work {
                runs: index.runs.write(),
                applied,
                tier: Tier::DEVICE,
                blocks_max: index.limits.blocks_per_holder_max,
                waiting_bytes_max: index.limits.parking.bytes_max,
            },
        };
        turn.state.uses_names |= uses_names;
        turn.prepare();
        change(&mut turn);
        turn.state.publish(&mut turn.work.runs);
        let HolderTurn { state, work, .. } = turn;
        drop(work);
        self.publish_sizes(&state);
        drop(state);
        give_back(GIVEN_BACK);
    }
}

impl HolderTurn<'_> {
    /// Applies a stored event, then the events that waited for its blocks.
    pub(super) fn stored(&mut self, stored: StoredBlocks, tier: Tier, now_us: u64) {
        self.work.tier = tier;
        self.store(stored, now_us);
        self.store_ready();
    }

    /// Publishes the changes made so far, in the middle of a long event. Then releases the locks for a moment, so that
    /// other writers can have them. Blocks may be evicted meanwhile.
    fn breathe(&mut self) {
        self.state.publish(&mut self.work.runs);
        let state = &mut self.state;
        self.work.runs.pause_for(|| MutexGuard::bump(state));
    }

    /// Calls `some` with one part of `all` after another, and releases the locks for a moment between parts. Each part
    /// is as large as may be handled at one time.
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

    /// Adapts the holder to evictions that happened since the locks were last held. If blocks were evicted, drops the
    /// waiting events, because their parents may be gone. If the engine uses names, also drops blocks without a name.
    fn prepare(&mut self) {
        if self.state.uses_names && !self.state.refuses_nameless && self.is_cut_short() {
            // A block without a name may have had a name that is forgotten. A removal by that name would not find the
            // block. So blocks without a name are dropped now, and refused from now on.
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

    /// Whether the engine has blocks for which the index had no room. If so, an unknown parent does not mean that an
    /// event was lost.
    fn is_cut_short(&self) -> bool {
        let reasons = self.record.status.own_reasons();
        reasons.contains(DegradedReason::Capacity)
    }

    /// Rejects the blocks of an event that come after blocks for which the index had no room. The event has given these
    /// blocks names. If another block has one of these names, the block loses the name.
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

    /// Removes from the holder the blocks that have no name.
    fn drop_nameless(&mut self) {
        let mut last = None;
        while let (dropped, next @ Some(_)) = self.state.orphans.drop_nameless(last) {
            self.work.reject_full(dropped);
            last = next;
            self.breathe();
        }
        for group in self.state.share.groups() {
            for runs in self.state.share.runs_of(group).chunks(TURN_RUNS) {
                let before = self.state.share.blocks();
                for run in runs {
                    self.state.erase(*run, 0, u16::MAX, |form| form == Form::Nameless);
                }
                self.work.reject_full(before - self.state.share.blocks());
                self.breathe();
            }
        }
    }

    /// Gives places in the runs to orphans whose parents have arrived.
    fn adopt(&mut self) {
        while self.state.adopt_some(&mut self.work) {
            self.breathe();
        }
    }

    /// Determines the hashes and names of an event's blocks. Adds to the event's outcome the blocks that may be the
    /// unclear parent of orphans, and the blocks with foreign hashes.
    fn resolve<'e>(&mut self, stored: &'e StoredBlocks) -> Result<Resolved<'e>, Unresolved> {
        let (runs, settings) = (&mut self.work.runs, &self.index.settings);
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
            // Searches must know before they can see the blocks.
            self.index.set_foreign_chain(&self.record.status, true);
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
                let (tier, limits) = (self.work.tier, self.index.limits.parking);
                let (own, more) = (self.state.parking.bytes() as u64, bytes_to_wait(&stored) as u64);
                let room = self.index.runs.room_to_wait(own, limits.bytes_max);
                if !self.index.runs.has_room_aside() || own + more > room {
                    return self.reject(RejectReason::ParkingFull, blocks);
                }
                self.work.applied.parked += 1;
                let dropped = self.state.parking.park(parent, stored, tier, now_us, limits);
                self.reject(RejectReason::ParkingFull, dropped);
            }
        }
    }

    /// Returns the event in the form in which it can wait for its parent: with block hashes as content, or without
    /// content if the hash chain need not be computed from it. The content then takes memory in proportion to the
    /// number of blocks, which is limited. `None` if the content does not fit the blocks.
    fn without_surplus_content(&self, mut stored: StoredBlocks) -> Option<StoredBlocks> {
        if self.index.settings.hashing == Hashing::Engine || stored.engine_hashes.is_some() {
            stored.content = None;
        }
        let (blocks, size) = (stored.names.len(), self.index.settings.block_size);
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

    /// Stores the blocks of an event. `waited` is the event itself if it has waited for its parent. Blocks that were
    /// removed while it waited are then left out.
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

    /// Stores consecutive blocks whose places in the runs are known.
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

    /// Stores the waiting events whose parent has arrived. Goes on with waiting events whose parent is a block stored
    /// in this way, until no such event is left.
    fn store_ready(&mut self) {
        let mut blocks = 0;
        while self.state.parking.len() > 0 {
            if blocks >= TURN_BLOCKS {
                blocks = 0;
                self.breathe();
            }
            let mut parking = std::mem::take(&mut self.state.parking);
            let runs = &self.work.runs;
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
    pub(super) fn remove(&mut self, removed: &RemovedBlocks, tier: Tier) {
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

    /// Applies an event that marks blocks as resumable or not, to the holder's blocks and to blocks of waiting events.
    pub(super) fn mark(&mut self, blocks: &ResumableBlocks, tier: Tier) {
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

    /// Stores blocks that a walk over an earlier index found, after the block with the hash `parent`. Each block gets
    /// its hash as its name. If the parent is absent, the blocks are counted as rejected.
    pub(super) fn restore(
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
                Some(FoundBlock::Placed(spot)) if self.work.runs.position(spot) + 1 == position => Some(spot),
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
