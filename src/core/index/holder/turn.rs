//! A turn of a lane: what one event does to its holder.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::hash::SequenceHash;
use crate::index::block::NewBlock;
use crate::index::directory::{HolderRecord, HolderSlot};
use crate::index::runs::{GIVEN_BACK, RunId, RunStore, RunWriter, give_back};
use crate::index::settings::{Hashing, IndexLimits, NamespaceSettings};
use crate::wire::{BlockContent, DegradedReason, RemovedBlocks, StoredBlocks, Tier};

use super::claims::Claims;
use super::names::Found;
use super::parking::{ParkedEvent, Unplaced, names_in};
use super::remove::Others;
use super::resolve::{self, Resolved, ResolvedSequence, Unresolved};
use super::store::{Sequence, Terms};
use super::{Applied, Holder, HolderState, RejectReason};

/// What a turn of a lane works with.
pub(in crate::index) struct Turn<'a, 's> {
    settings: &'a NamespaceSettings,
    limits: &'a IndexLimits,
    holder: &'a Holder,
    state: &'a mut MutexGuard<'s, HolderState>,
    runs: RunWriter<'s>,
    applied: &'a mut Applied,
    claims: &'a mut Claims,
}

/// The index that a holder is of.
#[derive(Debug, Clone, Copy)]
pub(in crate::index) struct Home<'a> {
    pub(in crate::index) settings: &'a NamespaceSettings,
    pub(in crate::index) limits: &'a IndexLimits,
    pub(in crate::index) runs: &'a RunStore,
}

/// After so many blocks others have a turn.
const TURN_BLOCKS: usize = 1024;
/// And after so many runs.
const TURN_RUNS: usize = 16;

impl Holder {
    pub(in crate::index) fn new(record: Arc<HolderRecord>, slot: HolderSlot) -> Self {
        let state = Mutex::new(HolderState::new(slot));
        Self { record, state }
    }

    /// How many blocks are held, behind holes too.
    pub(in crate::index) fn blocks(&self) -> usize {
        self.state.lock().blocks()
    }

    /// Makes one step.
    pub(in crate::index) fn change(
        &self,
        home: Home<'_>,
        claims: &mut Claims,
        applied: &mut Applied,
        uses_names: bool,
        change: impl FnOnce(&mut Turn<'_, '_>),
    ) {
        let mut state = self.state.lock();
        state.uses_names |= uses_names;
        let mut turn = Turn {
            settings: home.settings,
            limits: home.limits,
            holder: self,
            state: &mut state,
            runs: home.runs.write(),
            applied,
            claims,
        };
        turn.prepare();
        change(&mut turn);
        turn.state.publish(&mut turn.runs);
        drop(turn);
        self.publish_sizes(&state);
        drop(state);
        give_back(GIVEN_BACK);
    }

    /// Drops stored events whose parent did not come in time.
    pub(in crate::index) fn expire_parked(&self, now_us: u64, runs: &RunStore) -> Applied {
        let mut applied = Applied::default();
        let mut state = self.state.lock();
        let dropped = state.parking.expire(now_us);
        if dropped > 0 {
            applied.reject(RejectReason::ParkingExpired, dropped);
            state.parking.settle();
            state.account(&mut runs.write());
            self.publish_sizes(&state);
        }
        applied
    }

    /// Removes all blocks and forgets what waits for a parent.
    pub(in crate::index) fn clear(&self, runs: &RunStore) {
        let mut state = self.state.lock();
        let mut runs = runs.write();
        for number in 0..state.parts.splits() {
            let held: Vec<RunId> = state.parts.keys_of(number).copied().collect();
            let mut rest = held.as_slice();
            while let Some((now, later)) = rest
                .split_at_checked(state.turn_of(rest))
                .filter(|(now, _)| !now.is_empty())
            {
                state.clear_runs(now, &mut runs);
                runs.pause_for(|| MutexGuard::bump(&mut state));
                rest = later;
            }
        }
        let rest = state.reset(&mut runs);
        drop(runs);
        self.publish_sizes(&state);
        drop(state);
        // It may be much: nobody waits for it.
        drop(rest);
    }

    /// The holder's slot and tier, and how often it has been reshaped, where it has every block with all that come before it, in one
    /// tier, by its sequence hash; none where it is not so, or it has nothing.
    pub(in crate::index) fn regular(&self, runs: &RunStore) -> Option<(HolderSlot, Tier, u64)> {
        let state = self.state.lock();
        let tier = state.regular_tier(&runs.write())?;
        Some((state.slot, tier, state.reshaped))
    }

    fn publish_sizes(&self, state: &HolderState) {
        let parked = u32::try_from(state.parking.len()).unwrap_or(u32::MAX);
        self.record.status.set_sizes(state.blocks() as u64, parked);
    }
}

impl Turn<'_, '_> {
    /// Applies a stored event, and then what has waited for its blocks.
    pub(in crate::index) fn stored(&mut self, stored: StoredBlocks, tier: Tier, now_us: u64) {
        self.store(stored, tier, now_us);
        self.store_ready(self.terms(tier));
    }

    fn terms(&self, tier: Tier) -> Terms {
        Terms {
            tier,
            blocks_max: self.limits.blocks_per_holder_max,
        }
    }

    /// Lets queries and others see what there is so far, in the middle of a long event. Blocks may be evicted meanwhile.
    fn breathe(&mut self) {
        self.state.publish(&mut self.runs);
        let state = &mut *self.state;
        self.runs.pause_for(|| MutexGuard::bump(state));
    }

    /// Makes up for what has been evicted since the last turn.
    fn prepare(&mut self) {
        if self.state.uses_names && !self.state.refuses_nameless && self.is_cut_short() {
            // A block without a name may have had one that is forgotten. When that is removed, nobody would know which block is
            // meant: so such blocks go now, and are no longer taken.
            self.state.refuses_nameless = true;
            self.drop_nameless();
        }
        if std::mem::take(&mut self.state.is_cut) {
            // What they wait for may have gone.
            for event in self.state.parking.clear() {
                self.leave_out(&event.stored);
            }
        }
    }

    /// Whether the engine has blocks that the index has no room for. Then a parent that is unknown here need not have been lost.
    fn is_cut_short(&self) -> bool {
        let reasons = self.holder.record.status.own_reasons();
        reasons.contains(DegradedReason::Capacity)
    }

    /// Does not take blocks that cannot be placed because the index has no room for those before them. A name that the engine gives
    /// to one of them means no other block any more.
    fn leave_out(&mut self, stored: &StoredBlocks) {
        self.applied.reject(RejectReason::Capacity, stored.names.len());
        for (number, names) in names_in(stored).chunks(TURN_BLOCKS).enumerate() {
            if number > 0 {
                self.breathe();
            }
            for name in names {
                if let Some(found) = self.state.find_name(*name, &self.runs) {
                    self.state.drop_name(found, *name);
                }
            }
        }
    }

    /// Takes the blocks that have no name from the holder.
    fn drop_nameless(&mut self) {
        let mut last = None;
        loop {
            let (dropped, next) = self.state.orphans.drop_nameless(last);
            self.applied.reject(RejectReason::Capacity, dropped);
            last = next;
            if last.is_none() {
                break;
            }
            self.breathe();
        }
        for number in 0..self.state.parts.splits() {
            let held: Vec<RunId> = self.state.parts.keys_of(number).copied().collect();
            for runs in held.chunks(TURN_RUNS) {
                let dropped = runs.iter().map(|run| self.state.drop_nameless_of(*run)).sum();
                self.applied.reject(RejectReason::Capacity, dropped);
                self.breathe();
            }
        }
    }

    /// Gives blocks that waited for those that have come their places.
    fn adopt(&mut self) {
        while self.state.adopt_some(&mut self.runs, self.applied) {
            self.breathe();
        }
    }

    fn resolve<'e>(&mut self, stored: &'e StoredBlocks) -> Result<Resolved<'e>, Unresolved> {
        let (state, runs) = (&mut **self.state, &mut self.runs);
        let start = resolve::start_of(stored, |name, position| state.find_parent(name, position, runs))?;
        let resolved = state.aside(stored.names.len(), runs, |_, _| {
            resolve::resolve(stored, self.settings, start)
        })?;
        if let Resolved::Sequence(sequence) = &resolved
            && sequence.is_foreign
        {
            self.applied
                .reject(RejectReason::ForeignChain, sequence.hashes.len());
        }
        Ok(resolved)
    }

    fn store(&mut self, stored: StoredBlocks, tier: Tier, now_us: u64) {
        let blocks = stored.names.len();
        let terms = self.terms(tier);
        match self.resolve(&stored) {
            Ok(Resolved::Keys(blocks)) => {
                let contradicted = self.claims.contradicted_by(&blocks);
                self.applied.reject(RejectReason::AmbiguousParent, contradicted);
                self.store_blocks(&blocks, terms);
            }
            Ok(Resolved::Sequence(sequence)) => {
                self.note_claims(&sequence);
                self.store_sequence(&sequence, terms);
            }
            Err(Unresolved::UnknownParent(_)) if self.is_cut_short() => self.leave_out(&stored),
            Err(Unresolved::UnknownParent(parent)) => {
                let Some(stored) = self.without_surplus_content(stored) else {
                    return self.applied.reject(RejectReason::ContentMismatch, blocks);
                };
                if !self.runs.store.has_room_aside() {
                    return self.applied.reject(RejectReason::ParkingFull, blocks);
                }
                self.applied.parked += 1;
                let limits = self.limits.parking;
                let dropped = self.state.parking.park(parent, stored, tier, now_us, limits);
                self.applied.reject(RejectReason::ParkingFull, dropped);
            }
            Err(Unresolved::Rejected(reason)) => self.applied.reject(reason, blocks),
        }
    }

    /// Notes a parent that is not held, and whether a block comes under the name that was noted as another's sequence hash.
    fn note_claims(&mut self, sequence: &ResolvedSequence<'_>) {
        let claims_max = self.limits.parking.blocks_max;
        if let Some((parent, position)) = sequence.claim()
            && !self.claims.add(parent, position, claims_max)
        {
            self.applied
                .reject(RejectReason::AmbiguousParent, sequence.hashes.len());
        }
        if sequence.names.is_some() && !self.claims.is_empty() {
            let contradicted = self.claims.contradicted_by(&sequence.blocks());
            self.applied.reject(RejectReason::AmbiguousParent, contradicted);
        }
    }

    /// The event as it may wait. What waits is bounded in blocks, so its content must not be more than the blocks need: where
    /// the engine's hashes are the keys it needs none.
    fn without_surplus_content(&self, mut stored: StoredBlocks) -> Option<StoredBlocks> {
        if self.settings.hashing == Hashing::Engine || stored.engine_hashes.is_some() {
            stored.content = None;
        }
        match &stored.content {
            Some(BlockContent::Tokens { tokens, .. }) => {
                let block_size = self.settings.block_size.as_usize();
                let expected = stored.names.len().saturating_mul(block_size);
                (tokens.len() == expected).then_some(stored)
            }
            _ => Some(stored),
        }
    }

    fn store_blocks(&mut self, blocks: &[NewBlock], terms: Terms) {
        for (number, blocks) in blocks.chunks(TURN_BLOCKS).enumerate() {
            if number > 0 {
                self.breathe();
            }
            for block in blocks {
                self.state.store_block(block, terms, &mut self.runs, self.applied);
                self.adopt();
            }
        }
    }

    /// Stores blocks that have places; only those that are `kept`, where that says which are.
    fn store_placed(&mut self, sequence: &Sequence<'_>, kept: Option<&[bool]>, terms: Terms) {
        let (mut sequence, mut kept) = (*sequence, kept);
        loop {
            let (state, runs) = (&mut **self.state, &mut self.runs);
            let next = state.store_sequence(&sequence, kept, terms, runs, self.applied);
            self.adopt();
            let Some((done, last)) = next else { return };
            self.breathe();
            sequence = sequence.after(done, last);
            kept = kept.and_then(|kept| kept.get(done..));
            if self.state.attributes(last).is_none() {
                // It has been evicted meanwhile.
                return self.applied.reject(RejectReason::Capacity, sequence.hashes.len());
            }
        }
    }

    fn store_sequence(&mut self, sequence: &ResolvedSequence<'_>, terms: Terms) {
        match sequence.placed() {
            Some(placed) => self.store_placed(&placed, None, terms),
            None => self.store_blocks(&sequence.blocks(), terms),
        }
    }

    /// As [`Self::store_sequence`], of an event that has waited: without the blocks that were removed meanwhile.
    fn store_rest(&mut self, sequence: &ResolvedSequence<'_>, event: &ParkedEvent, terms: Terms) {
        let mut blocks = sequence.blocks();
        let parking = &self.state.parking;
        let remains = |block: &NewBlock| {
            let is_there = block.name.is_some_and(|name| event.remaining.contains(&name));
            is_there && !parking.is_gone(event, block)
        };
        let kept: Vec<bool> = blocks.iter().map(remains).collect();
        if kept.iter().all(|kept| *kept) {
            return self.store_sequence(sequence, terms);
        }
        if let Some(placed) = sequence.placed() {
            return self.store_placed(&placed, Some(&kept), terms);
        }
        let mut kept = kept.into_iter();
        blocks.retain(|_| kept.next() == Some(true));
        self.store_blocks(&blocks, terms);
    }

    /// Stores what waited for blocks that are there now, and then what waited for these.
    fn store_ready(&mut self, terms: Terms) {
        let mut blocks = 0;
        while self.state.parking.len() > 0 {
            if blocks >= TURN_BLOCKS {
                blocks = 0;
                self.breathe();
            }
            let (state, runs) = (&mut **self.state, &mut self.runs);
            let mut parking = std::mem::take(&mut state.parking);
            let ready = parking.take_ready(|name| state.find_parent(name, None, runs).is_some());
            self.state.parking = parking;
            let Some(event) = ready else { return };
            blocks += event.stored.names.len();
            let terms = Terms {
                tier: event.tier,
                ..terms
            };
            match self.resolve(&event.stored) {
                Ok(Resolved::Sequence(sequence)) => {
                    self.note_claims(&sequence);
                    self.store_rest(&sequence, &event, terms);
                }
                // Not reached: lineage hashes wait for nobody.
                Ok(Resolved::Keys(_)) => {}
                Err(Unresolved::Rejected(reason)) => self.applied.reject(reason, event.stored.names.len()),
                // Not reached: the parent was found just now.
                Err(Unresolved::UnknownParent(_)) => {}
            }
        }
        self.state.parking.settle();
    }

    /// Applies a removed event.
    pub(in crate::index) fn remove(&mut self, removed: &RemovedBlocks, tier: Tier) {
        let (names, mut others) = (&removed.hashes, Others::default());
        let keys = removed.lineage_hashes.iter().copied();
        self.state
            .note_unplaced(keys.map(Unplaced::Key), tier, self.applied);
        for from in (0..names.len()).step_by(TURN_BLOCKS) {
            if from > 0 {
                self.breathe();
            }
            let end = names.len().min(from + TURN_BLOCKS);
            let (state, runs) = (&mut **self.state, &mut self.runs);
            let done = state.remove_own(&names[from..end], tier, runs, self.applied);
            state.remove_names(names, from + done..end, tier, &mut others, runs, self.applied);
        }
        let (state, runs) = (&mut **self.state, &mut self.runs);
        let (hashes, left_out) = state.aside(names.len(), runs, |_, _| others.into_hashes(names));
        self.applied.reject(RejectReason::UnknownBlock, left_out);
        for (number, hashes) in hashes.chunks(TURN_BLOCKS).enumerate() {
            if number > 0 {
                self.breathe();
            }
            let (state, runs) = (&mut **self.state, &mut self.runs);
            state.remove_hashes(hashes, tier, runs, self.applied);
        }
        for (number, keys) in removed.lineage_hashes.chunks(TURN_BLOCKS).enumerate() {
            if number > 0 {
                self.breathe();
            }
            let (state, runs) = (&mut **self.state, &mut self.runs);
            state.remove_keys(keys, tier, runs, self.applied);
        }
    }

    /// Stores blocks that were in an index before, under the names that are their hashes, after the block that has the hash `parent`.
    /// Where that is not there, they are counted and left out.
    pub(in crate::index) fn restore(
        &mut self,
        parent: Option<SequenceHash>,
        position: u32,
        hashes: &[SequenceHash],
        tier: Tier,
    ) {
        let spot = match parent {
            None => None,
            Some(parent) => match self.state.find_name(parent.0, &self.runs) {
                Some(Found::Placed(spot)) if self.runs.position(spot) + 1 == position => Some(spot),
                _ => return self.applied.reject(RejectReason::Capacity, hashes.len()),
            },
        };
        let sequence = Sequence {
            parent: spot,
            position,
            hashes,
            names: None,
        };
        let terms = self.terms(tier);
        self.store_placed(&sequence, None, terms);
    }
}
