//! Applying events to one holder.

use std::sync::Arc;

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::tracking::{DegradedReason, DegradedReasons, HolderStatus};
use crate::wire::{BlockContent, BlockNames, Event, RemovedBlocks, StoredBlocks, Tier};

use super::applied::{Applied, RejectReason};
use super::dump;
use super::forest::{BlockNumber, Forest, NewBlock, Publication, Removed, Stored};
use super::holder_set::HolderSlot;
use super::indexer::Shared;
use super::namespace::{Hashing, NamespaceSettings};
use super::parking::Parking;
use super::plain::{Plain, Stopped};
use super::resolve::{self, Resident, Resolved, ResolvedSequence, Unresolved};
use super::runs::{BlockKey, RunWriter};
use super::slots::HolderRecord;
use super::storage::Turn;

/// What a holder holds, in the form that is just enough for it.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Nothing while there is a forest, and in a radix tree.
    pub(super) plain: Plain,
    pub(super) forest: Option<Box<Forest>>,
    /// Counts whatever is more than storing and removing blocks in the form that there is.
    pub(super) reshaped: u64,
}

/// The only one who may change what a holder holds. Owned by the holder's lane.
#[derive(Debug)]
pub struct HolderWriter {
    pub(super) shared: Arc<Shared>,
    pub(super) slot: HolderSlot,
    record: Arc<HolderRecord>,
    pub(super) blocks: Blocks,
    parking: Parking,
    has_foreign_chain: bool,
    /// Whether the engine names blocks; not all need have names.
    pub(super) uses_names: bool,
    /// Whether blocks without a name are not taken, see [`Self::take_turn`].
    refuses_nameless: bool,
}

impl HolderWriter {
    pub(crate) fn new(shared: Arc<Shared>, slot: HolderSlot, record: Arc<HolderRecord>) -> Self {
        Self {
            shared,
            slot,
            record,
            blocks: Blocks::default(),
            parking: Parking::default(),
            has_foreign_chain: false,
            uses_names: false,
            refuses_nameless: false,
        }
    }

    /// The holder as queries see it.
    pub fn record(&self) -> &Arc<HolderRecord> {
        &self.record
    }

    /// Whether queries can trust it.
    pub fn status(&self) -> &HolderStatus {
        &self.record.status
    }

    /// Takes the reasons for doubt away that are not in `kept`: the state has been replaced as a whole. Searches that began before
    /// notice it. Returns what is left.
    pub fn replace_reasons(&self, kept: DegradedReasons) -> DegradedReasons {
        let replacement = self.shared.count_replacement();
        self.status().replace_reasons(kept, replacement)
    }

    /// Block size and hashing of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// How many blocks are held, behind holes too.
    pub fn blocks(&self) -> usize {
        let forest = self.blocks.forest.as_ref();
        forest.map_or(self.blocks.plain.len(), |forest| forest.len())
    }

    /// Applies one event. `now_us` is any clock in microseconds that does not run backwards; it only times out
    /// what waits for a parent.
    pub fn apply(&mut self, event: Event, tier: Tier, now_us: u64) -> Applied {
        let mut applied = Applied::default();
        self.uses_names |= has_names(&event);
        match event {
            Event::Stored(stored) => {
                let shared = Arc::clone(&self.shared);
                let mut turn = self.take_turn(&shared, &mut applied);
                self.store(stored, tier, now_us, &mut turn, &mut applied);
                self.store_ready(&mut turn, &mut applied);
                drop(turn);
                shared.make_room();
            }
            Event::Removed(removed) => self.remove(&removed, tier, &mut applied),
            Event::Cleared => {
                self.clear();
                applied.cleared = true;
            }
            Event::Goodbye => {
                self.clear();
                applied.goodbye = true;
            }
        }
        self.publish_sizes();
        applied
    }

    /// Takes a turn, and forgets what the index has evicted since the last one.
    pub(super) fn take_turn<'s>(&mut self, shared: &'s Shared, applied: &mut Applied) -> Turn<'s> {
        let mut turn = shared.storage.write();
        let is_cut_shorter = turn.runs_mut().is_some_and(|runs| self.forget_evicted(runs));
        if self.uses_names && !self.refuses_nameless && self.is_cut_short() {
            // A block without a name may have had one that is forgotten. When that is removed, nobody would know which block is
            // meant: so such blocks go now, and are no longer taken.
            self.refuses_nameless = true;
            if let Some(forest) = &mut self.blocks.forest {
                let (turn, slot) = (&mut turn, self.slot);
                let dropped = forest.drop_nameless(&mut Publication { turn, slot });
                applied.reject(RejectReason::Capacity, dropped);
            }
        }
        if is_cut_shorter {
            // What they wait for may have gone just now.
            for event in self.parking.clear() {
                self.leave_out(&event.stored, &mut turn, applied);
            }
        }
        turn
    }

    /// Forgets what has been evicted since the last turn; says whether that is anything.
    fn forget_evicted(&mut self, runs: &mut RunWriter<'_>) -> bool {
        let evicted = runs.take_evicted(self.slot);
        let is_cut_shorter = !evicted.is_empty();
        for evicted in evicted {
            match &mut self.blocks.forest {
                None => self
                    .blocks
                    .plain
                    .forget(evicted.run, evicted.parent, evicted.cutoff),
                Some(forest) => evicted.keys.iter().for_each(|key| forest.forget(*key)),
            }
        }
        // What is empty is regular again.
        if self.blocks.forest.take_if(|forest| forest.len() == 0).is_some() {
            runs.set_keyed(self.slot, false);
        }
        is_cut_shorter
    }

    /// Does not take blocks that cannot be placed because the index has no room for those before them. A name that the engine gives
    /// to one of them means no other block any more.
    fn leave_out(&mut self, stored: &StoredBlocks, turn: &mut Turn<'_>, applied: &mut Applied) {
        applied.reject(RejectReason::Capacity, stored.names.len());
        let hashes = match &stored.names {
            BlockNames::Sequence { hashes, .. } => hashes.as_slice(),
            BlockNames::Lineage(_) => &[],
        };
        let hashes = hashes.iter().map(|hash| hash.as_u64());
        let names: Vec<u64> = match &stored.engine_hashes {
            Some(names) => names.clone(),
            None => hashes.collect(),
        };
        for name in names {
            if self.blocks.has_name(name, turn) {
                let slot = self.slot;
                let forest = self.blocks.as_forest(slot, turn);
                if let Some(number) = forest.find_name(name) {
                    forest.drop_name(number, name, &mut Publication { turn, slot });
                }
            }
        }
    }

    /// Whether the engine has blocks that the index has no room for. Then a parent that is unknown here need not have been lost.
    fn is_cut_short(&self) -> bool {
        self.status().own_reasons().contains(DegradedReason::Capacity)
    }

    /// Drops stored events whose parent did not come in time.
    pub fn expire_parked(&mut self, now_us: u64) -> Applied {
        let mut applied = Applied::default();
        let dropped = self.parking.expire(now_us);
        if dropped > 0 {
            applied.reject(RejectReason::ParkingExpired, dropped);
            self.publish_sizes();
        }
        applied
    }

    /// Removes all blocks and forgets what waits for a parent.
    pub fn clear(&mut self) {
        let shared = Arc::clone(&self.shared);
        let turn = &mut self.take_turn(&shared, &mut Applied::default());
        let slot = self.slot;
        self.blocks.reshaped += 1;
        if let Turn::Runs(runs) = turn {
            self.blocks.plain.clear(slot, runs);
        }
        if let Some(mut forest) = self.blocks.forest.take() {
            forest.clear(&mut Publication { turn, slot });
        }
        if let Turn::Runs(runs) = turn {
            // What was evicted while others had turns is gone as well.
            runs.take_evicted(slot);
            runs.set_keyed(slot, false);
        }
        (self.uses_names, self.refuses_nameless) = (false, false);
        self.parking.clear();
        self.set_foreign_chain(false);
        self.publish_sizes();
    }

    /// Removes all blocks and gives the holder's slot back.
    pub fn retire(mut self) {
        self.clear();
        self.shared.slots.release(self.slot);
    }

    pub(super) fn publish_sizes(&self) {
        let parked = u32::try_from(self.parking.len()).unwrap_or(u32::MAX);
        self.status().set_sizes(self.blocks() as u64, parked);
    }

    /// Notes whether the holder's hashes are not the contract's chain.
    pub(crate) fn set_foreign_chain(&mut self, is_foreign: bool) {
        if self.has_foreign_chain != is_foreign {
            self.has_foreign_chain = is_foreign;
            self.status().set_foreign_chain(is_foreign);
            self.shared.count_foreign_holder(is_foreign);
        }
    }

    fn store(
        &mut self,
        stored: StoredBlocks,
        tier: Tier,
        now_us: u64,
        turn: &mut Turn<'_>,
        applied: &mut Applied,
    ) {
        let blocks = stored.names.len();
        if let (Turn::Runs(runs), BlockNames::Sequence { hashes, .. }) = (&*turn, &stored.names)
            && let Some(first) = hashes.first()
        {
            // Looked for after the parent.
            runs.prefetch(first.as_u64());
        }
        match self.resolve(&stored, turn, applied) {
            Ok(Resolved::Keys(blocks)) => self.store_blocks(blocks, tier, turn, applied),
            Ok(Resolved::Sequence(sequence)) => self.store_sequence(&sequence, tier, turn, applied),
            Err(Unresolved::UnknownParent(_)) if self.is_cut_short() => {
                self.leave_out(&stored, turn, applied);
            }
            Err(Unresolved::UnknownParent(parent)) => {
                let Some(stored) = self.without_surplus_content(stored) else {
                    applied.reject(RejectReason::ContentMismatch, blocks);
                    return;
                };
                applied.parked += 1;
                let dropped = self
                    .parking
                    .park(parent, stored, tier, now_us, self.shared.limits.parking);
                applied.reject(RejectReason::ParkingFull, dropped);
            }
            Err(Unresolved::Rejected(reason)) => applied.reject(reason, blocks),
        }
    }

    /// The event as it may wait. What waits is bounded in blocks, so its content must not be more than the blocks need: where
    /// the engine's hashes are the keys it needs none.
    fn without_surplus_content(&self, mut stored: StoredBlocks) -> Option<StoredBlocks> {
        if self.shared.settings.hashing == Hashing::Engine || stored.engine_hashes.is_some() {
            stored.content = None;
        }
        match &stored.content {
            Some(BlockContent::Tokens { tokens, .. }) => {
                let block_size = self.shared.settings.block_size.as_usize();
                let expected = stored.names.len().saturating_mul(block_size);
                (tokens.len() == expected).then_some(stored)
            }
            _ => Some(stored),
        }
    }

    fn resolve<'e>(
        &mut self,
        stored: &'e StoredBlocks,
        turn: &Turn<'_>,
        applied: &mut Applied,
    ) -> Result<Resolved<'e>, Unresolved> {
        let find_parent = |name| self.blocks.resident(name, turn);
        let resolved = resolve::resolve(stored, &self.shared.settings, find_parent)?;
        if let Resolved::Sequence(sequence) = &resolved
            && sequence.is_foreign
        {
            applied.reject(RejectReason::ForeignChain, sequence.hashes.len());
            self.set_foreign_chain(true);
        }
        Ok(resolved)
    }

    /// Stores a sequence in the plain form as far as it fits, and the rest, if any, in a forest.
    pub(super) fn store_sequence(
        &mut self,
        sequence: &ResolvedSequence<'_>,
        tier: Tier,
        turn: &mut Turn<'_>,
        applied: &mut Applied,
    ) {
        let blocks_max = self.shared.limits.blocks_per_holder_max;
        let mut stored = 0;
        let plain = &mut self.blocks.plain;
        let was = (plain.tier(), plain.has_own_names());
        if let Turn::Runs(runs) = turn
            && self.blocks.forest.is_none()
            && sequence.follows_resident()
            && plain.suits(tier, sequence.names.is_some())
        {
            self.blocks.reshaped += u64::from(was != (plain.tier(), plain.has_own_names()));
            let outcome = plain.store(sequence.as_plain(), blocks_max, self.slot, runs);
            stored = outcome.stored;
            applied.stored += stored as u64;
            match outcome.stopped {
                None => return,
                Some(Stopped::Full) => {
                    applied.reject(RejectReason::Capacity, sequence.hashes.len() - stored);
                    return;
                }
                Some(Stopped::Irregular) => {}
            }
        }
        let mut blocks = sequence.blocks();
        blocks.drain(..stored.min(blocks.len()));
        self.store_blocks(blocks, tier, turn, applied);
    }

    fn store_blocks(
        &mut self,
        blocks: Vec<NewBlock>,
        tier: Tier,
        turn: &mut Turn<'_>,
        applied: &mut Applied,
    ) {
        if blocks.is_empty() {
            return;
        }
        let blocks_max = self.shared.limits.blocks_per_holder_max;
        let (slot, refuses_nameless) = (self.slot, self.refuses_nameless);
        let forest = self.blocks.as_forest(slot, turn);
        for block in blocks {
            if refuses_nameless && block.name.is_none() {
                applied.reject(RejectReason::Capacity, 1);
                continue;
            }
            let publication = &mut Publication { turn, slot };
            let (stored, moved) = forest.store(block, tier, blocks_max, publication);
            applied.reject(RejectReason::Moved, usize::from(moved));
            match stored {
                Stored::New | Stored::Known => applied.stored += 1,
                Stored::Full => applied.reject(RejectReason::Capacity, 1),
            }
        }
    }

    /// Stores what waited for blocks that are there now, and then what waited for these.
    fn store_ready(&mut self, turn: &mut Turn<'_>, applied: &mut Applied) {
        while self.parking.len() > 0 {
            let blocks = &self.blocks;
            let Some(event) = self.parking.take_ready(|name| blocks.has_name(name, turn)) else {
                break;
            };
            // What was removed meanwhile stays away, even if an event that came later has stored it again.
            let remains = |name| event.remaining.contains(&name);
            match self.resolve(&event.stored, turn, applied) {
                Ok(Resolved::Sequence(sequence)) if sequence.names().all(remains) => {
                    self.store_sequence(&sequence, event.tier, turn, applied);
                }
                Ok(Resolved::Sequence(sequence)) => {
                    let mut blocks = sequence.blocks();
                    blocks.retain(|block| block.name.is_some_and(remains));
                    self.store_blocks(blocks, event.tier, turn, applied);
                }
                // Not reached: lineage hashes wait for nobody.
                Ok(Resolved::Keys(_)) => {}
                Err(Unresolved::Rejected(reason)) => applied.reject(reason, event.stored.names.len()),
                // Not reached: the parent was found just now.
                Err(Unresolved::UnknownParent(_)) => {}
            }
        }
    }

    fn remove(&mut self, removed: &RemovedBlocks, tier: Tier, applied: &mut Applied) {
        let shared = Arc::clone(&self.shared);
        let turn = &mut self.take_turn(&shared, applied);
        if self.blocks.plain.has_own_names() && !removed.lineage_hashes.is_empty() {
            self.blocks.as_forest(self.slot, turn);
        }
        match turn {
            Turn::Runs(runs) if self.blocks.forest.is_none() => {
                let left = self.remove_plain(removed, tier, runs, applied);
                if !left.is_empty() {
                    self.remove_keys(left, tier, turn, applied);
                }
            }
            Turn::Runs(_) | Turn::Radix(_) => self.remove_blocks(removed, tier, turn, applied),
        }
    }

    /// Removes what goes without leaving a hole; gives back the blocks that don't.
    fn remove_plain(
        &mut self,
        removed: &RemovedBlocks,
        tier: Tier,
        runs: &mut RunWriter<'_>,
        applied: &mut Applied,
    ) -> Vec<PositionalLineageHash> {
        let plain = &mut self.blocks.plain;
        if self.parking.len() == 0
            && tier == plain.tier()
            && removed.lineage_hashes.is_empty()
            && plain.remove_tail(&removed.hashes, self.slot, runs)
        {
            applied.removed += removed.hashes.len() as u64;
            return Vec::new();
        }
        let mut spots = Vec::with_capacity(removed.hashes.len() + removed.lineage_hashes.len());
        let mut finder = plain.finder(&removed.hashes);
        for hash in &removed.hashes {
            let name = hash.as_u64();
            // A block that is held can be part of an event that waits, too: it must not come back with that.
            let waits = self.parking.note_removed(name, tier);
            match finder.next(plain, runs) {
                Some(spot) => spots.push(spot),
                None if waits => applied.removed += 1,
                None => applied.reject(RejectReason::UnknownBlock, 1),
            }
        }
        for key in &removed.lineage_hashes {
            match plain.find_key(&BlockKey::from(*key), runs) {
                Some(spot) => spots.push(spot),
                None => applied.reject(RejectReason::UnknownBlock, 1),
            }
        }
        let found = spots.len();
        if tier != plain.tier() {
            applied.reject(RejectReason::UnknownBlock, found);
            return Vec::new();
        }
        let (gone, left) = plain.remove(spots, self.slot, runs);
        applied.removed += gone as u64;
        // Named twice.
        applied.reject(RejectReason::UnknownBlock, found - gone - left.len());
        let keys = left.into_iter().filter_map(|spot| runs.key(spot));
        keys.map(Into::into).collect()
    }

    fn remove_blocks(
        &mut self,
        removed: &RemovedBlocks,
        tier: Tier,
        turn: &mut Turn<'_>,
        applied: &mut Applied,
    ) {
        let slot = self.slot;
        let forest = self.blocks.as_forest(slot, turn);
        let mut named: Vec<(PositionalLineageHash, u64)> = Vec::with_capacity(removed.hashes.len());
        for hash in &removed.hashes {
            let name = hash.as_u64();
            let waits = self.parking.note_removed(name, tier);
            match forest.find_name(name) {
                Some(number) => named.push((forest.block(number).key, name)),
                None if waits => applied.removed += 1,
                None => applied.reject(RejectReason::UnknownBlock, 1),
            }
        }
        // Deepest first: no block is removed before its children in the same event, so that no hole opens in between.
        // Lineage hashes order by position.
        named.sort_unstable_by_key(|(key, _)| std::cmp::Reverse(*key));
        for (_, name) in named {
            let outcome = forest.remove_name(name, tier, &mut Publication { turn, slot });
            count_removed(outcome, applied);
        }
        self.remove_keys(removed.lineage_hashes.clone(), tier, turn, applied);
    }

    fn remove_keys(
        &mut self,
        mut keys: Vec<PositionalLineageHash>,
        tier: Tier,
        turn: &mut Turn<'_>,
        applied: &mut Applied,
    ) {
        let slot = self.slot;
        let forest = self.blocks.as_forest(slot, turn);
        keys.sort_unstable_by_key(|key| std::cmp::Reverse(*key));
        for key in keys {
            let number: Option<BlockNumber> = forest.find_key(key);
            let outcome = number.map_or(Removed::Unknown, |number| {
                forest.remove_tier(number, tier, &mut Publication { turn, slot })
            });
            count_removed(outcome, applied);
        }
    }

    /// Events that, applied in this order, make a fresh holder equal to this one: same blocks, names, tiers and holes,
    /// parents before children. Stored events that wait for their parent are not part of it.
    ///
    /// `blocks_per_event_max` bounds each event.
    pub fn dump_events(&mut self, blocks_per_event_max: usize) -> impl Iterator<Item = (Tier, Event)> + '_ {
        let shared = Arc::clone(&self.shared);
        drop(self.take_turn(&shared, &mut Applied::default()));
        self.publish_sizes();
        let (blocks, slot) = (&self.blocks.plain, self.slot);
        let hashing = self.shared.settings.hashing;
        let runs = self.shared.storage.runs().into_iter();
        let plain = runs.flat_map(move |runs| dump::plain(runs, blocks, slot, hashing, blocks_per_event_max));
        let forest = self.blocks.forest.as_deref();
        plain.chain(
            forest
                .into_iter()
                .flat_map(move |forest| dump::forest(forest, blocks_per_event_max)),
        )
    }
}

impl Blocks {
    fn has_name(&self, name: u64, turn: &Turn<'_>) -> bool {
        match (&self.forest, turn) {
            (Some(forest), _) => forest.find_name(name).is_some(),
            (None, Turn::Runs(runs)) => self.plain.find_name(name, runs).is_some(),
            (None, Turn::Radix(_)) => false,
        }
    }

    /// The block that the engine calls `name`.
    pub(super) fn resident(&self, name: u64, turn: &Turn<'_>) -> Option<Resident> {
        if let Some(forest) = &self.forest {
            let block = forest.block(forest.find_name(name)?);
            return Some(Resident {
                key: block.key,
                sequence_hash: block.sequence_hash,
                spot: None,
            });
        }
        let runs = turn.runs()?;
        let spot = self.plain.find_name(name, runs)?;
        let key = runs.key(spot)?;
        Some(Resident {
            key: key.into(),
            sequence_hash: Some(SequenceHash(key.current)),
            spot: Some(spot),
        })
    }

    /// As a forest, which can keep anything.
    fn as_forest(&mut self, slot: HolderSlot, turn: &mut Turn<'_>) -> &mut Forest {
        let plain = std::mem::take(&mut self.plain);
        self.forest.get_or_insert_with(|| match turn {
            Turn::Runs(runs) => {
                self.reshaped += 1;
                runs.set_keyed(slot, true);
                Box::new(plain.to_forest(runs))
            }
            Turn::Radix(_) => Box::default(),
        })
    }
}

/// Whether an event names blocks by anything but their lineage hashes.
fn has_names(event: &Event) -> bool {
    match event {
        Event::Stored(stored) => {
            let is_sequence = matches!(stored.names, BlockNames::Sequence { .. });
            is_sequence || stored.engine_hashes.is_some()
        }
        Event::Removed(removed) => !removed.hashes.is_empty(),
        Event::Cleared | Event::Goodbye => false,
    }
}

fn count_removed(outcome: Removed, applied: &mut Applied) {
    match outcome {
        Removed::Gone | Removed::Remains => applied.removed += 1,
        Removed::Unknown => applied.reject(RejectReason::UnknownBlock, 1),
    }
}
