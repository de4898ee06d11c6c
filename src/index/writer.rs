//! Applying events to one holder.

use std::sync::Arc;

use crate::hash::{
    BlockHash, BlockSize, HashSeed, PositionalLineageHash, SequenceHash, block_hash, block_hashes,
    lineage_hashes_from, sequence_hashes_after,
};
use crate::tracking::{DegradedReasons, HolderStatus};
use crate::wire::{BlockContent, BlockNames, Event, RemovedBlocks, StoredBlocks, Tier};

use super::forest::{BlockNumber, Forest, NewBlock, Publication, Removed, Stored};
use super::holder_set::HolderSlot;
use super::indexer::Shared;
use super::namespace::{Hashing, NamespaceSettings};
use super::parking::Parking;
use super::slots::HolderRecord;

/// Why blocks of an event were not taken, or were taken with a note. Label values of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum RejectReason {
    /// A removed block was not held; nothing is lost by that.
    UnknownBlock,
    /// A block lost its place or its name to another one, which has moved there.
    Moved,
    /// A position beyond what a lineage hash can carry.
    PositionOutOfRange,
    /// The holder is full.
    Capacity,
    /// The namespace recomputes the chain, but the event has no block hashes or tokens, or its parent no sequence hash.
    MissingContent,
    /// The tokens do not make whole blocks of the namespace's size.
    ContentMismatch,
    /// The engine's hashes are not the contract's chain. The blocks are held, but only under the engine's hashes.
    ForeignChain,
    /// Blocks whose parent had not come were dropped to make room.
    ParkingFull,
    /// Blocks were dropped because their parent did not come in time.
    ParkingExpired,
}

impl RejectReason {
    /// All reasons, by their number.
    pub const ALL: [Self; 9] = [
        Self::UnknownBlock,
        Self::Moved,
        Self::PositionOutOfRange,
        Self::Capacity,
        Self::MissingContent,
        Self::ContentMismatch,
        Self::ForeignChain,
        Self::ParkingFull,
        Self::ParkingExpired,
    ];

    /// A stable word for metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::UnknownBlock => "unknown_block",
            Self::Moved => "moved",
            Self::PositionOutOfRange => "position_out_of_range",
            Self::Capacity => "capacity",
            Self::MissingContent => "missing_content",
            Self::ContentMismatch => "content_mismatch",
            Self::ForeignChain => "foreign_chain",
            Self::ParkingFull => "parking_full",
            Self::ParkingExpired => "parking_expired",
        }
    }
}

/// What applying events did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// Blocks stored; those that were held already count too.
    pub stored: u64,
    /// Blocks removed; those that another tier still holds count too.
    pub removed: u64,
    /// Whether everything was cleared.
    pub cleared: bool,
    /// Whether the holder said goodbye.
    pub goodbye: bool,
    /// Stored events that began to wait for their parent.
    pub parked: u64,
    rejected: [u64; RejectReason::ALL.len()],
}

impl Applied {
    /// How many blocks met this fate.
    pub fn rejected(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize]
    }

    fn reject(&mut self, reason: RejectReason, blocks: usize) {
        self.rejected[reason as usize] += blocks as u64;
    }
}

/// The only one who may change what a holder holds. Owned by the holder's lane.
#[derive(Debug)]
pub struct HolderWriter {
    shared: Arc<Shared>,
    slot: HolderSlot,
    record: Arc<HolderRecord>,
    forest: Forest,
    parking: Parking,
    has_foreign_chain: bool,
}

impl HolderWriter {
    pub(crate) fn new(shared: Arc<Shared>, slot: HolderSlot, record: Arc<HolderRecord>) -> Self {
        Self {
            shared,
            slot,
            record,
            forest: Forest::default(),
            parking: Parking::default(),
            has_foreign_chain: false,
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

    /// Replaces the reasons for doubt: the state has been replaced as a whole. Searches that began before notice it.
    pub fn replace_reasons(&self, reasons: DegradedReasons) {
        let replacement = self.shared.count_replacement();
        self.status().replace_reasons(reasons, replacement);
    }

    /// Block size and hashing of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// How many blocks are held, behind holes too.
    pub fn blocks(&self) -> usize {
        self.forest.len()
    }

    pub(crate) fn forest(&self) -> &Forest {
        &self.forest
    }

    /// Applies one event. `now_us` is any clock in microseconds that does not run backwards; it only times out
    /// what waits for a parent.
    pub fn apply(&mut self, event: Event, tier: Tier, now_us: u64) -> Applied {
        let mut applied = Applied::default();
        match event {
            Event::Stored(stored) => {
                self.store(stored, tier, now_us, &mut applied);
                self.store_ready(&mut applied);
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
        let publication = Publication {
            table: &self.shared.table,
            slot: self.slot,
        };
        self.forest.clear(publication);
        self.parking.clear();
        self.set_foreign_chain(false);
        self.publish_sizes();
    }

    /// Removes all blocks and gives the holder's slot back.
    pub fn retire(mut self) {
        self.clear();
        self.shared.slots.release(self.slot);
    }

    fn publish_sizes(&self) {
        let parked = u32::try_from(self.parking.len()).unwrap_or(u32::MAX);
        self.status().set_sizes(self.forest.len() as u64, parked);
    }

    /// Notes whether the holder's hashes are not the contract's chain.
    pub(crate) fn set_foreign_chain(&mut self, is_foreign: bool) {
        if self.has_foreign_chain != is_foreign {
            self.has_foreign_chain = is_foreign;
            self.status().set_foreign_chain(is_foreign);
            self.shared.count_foreign_holder(is_foreign);
        }
    }

    fn store(&mut self, stored: StoredBlocks, tier: Tier, now_us: u64, applied: &mut Applied) {
        let blocks = stored.names.len();
        match self.resolve(&stored, applied) {
            Ok(resolved) => self.store_resolved(resolved, tier, applied),
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
                let expected = stored.names.len().saturating_mul(self.block_size().as_usize());
                (tokens.len() == expected).then_some(stored)
            }
            _ => Some(stored),
        }
    }

    fn store_resolved(&mut self, blocks: Vec<NewBlock>, tier: Tier, applied: &mut Applied) {
        let publication = Publication {
            table: &self.shared.table,
            slot: self.slot,
        };
        for block in blocks {
            let (stored, moved) =
                self.forest
                    .store(block, tier, self.shared.limits.blocks_per_holder_max, publication);
            applied.reject(RejectReason::Moved, usize::from(moved));
            match stored {
                Stored::New | Stored::Known => applied.stored += 1,
                Stored::Full => applied.reject(RejectReason::Capacity, 1),
            }
        }
    }

    /// Stores what waited for blocks that are there now, and then what waited for these.
    fn store_ready(&mut self, applied: &mut Applied) {
        while self.parking.len() > 0 {
            let forest = &self.forest;
            let Some(event) = self.parking.take_ready(|name| forest.find_name(name).is_some()) else {
                break;
            };
            match self.resolve(&event.stored, applied) {
                Ok(mut blocks) => {
                    // What was removed meanwhile stays away, even if an event that came later has stored it again.
                    blocks.retain(|block| block.name.is_some_and(|name| event.remaining.contains(&name)));
                    self.store_resolved(blocks, event.tier, applied);
                }
                Err(Unresolved::Rejected(reason)) => applied.reject(reason, event.stored.names.len()),
                // Not reached: the parent was found just now.
                Err(Unresolved::UnknownParent(_)) => {}
            }
        }
    }

    fn remove(&mut self, removed: &RemovedBlocks, tier: Tier, applied: &mut Applied) {
        let mut named: Vec<(PositionalLineageHash, u64)> = Vec::with_capacity(removed.hashes.len());
        for hash in &removed.hashes {
            let name = hash.as_u64();
            // A block that is held can be part of an event that waits, too: it must not come back with that.
            let waits = self.parking.note_removed(name, tier);
            match self.forest.find_name(name) {
                Some(number) => named.push((self.forest.block(number).key, name)),
                None if waits => applied.removed += 1,
                None => applied.reject(RejectReason::UnknownBlock, 1),
            }
        }
        // Deepest first: no block is removed before its children in the same event, so that no hole opens in between.
        // Lineage hashes order by position.
        named.sort_unstable_by_key(|(key, _)| std::cmp::Reverse(*key));
        let publication = Publication {
            table: &self.shared.table,
            slot: self.slot,
        };
        for (_, name) in named {
            let outcome = self.forest.remove_name(name, tier, publication);
            count_removed(outcome, applied);
        }
        let mut keys = removed.lineage_hashes.clone();
        keys.sort_unstable_by_key(|key| std::cmp::Reverse(*key));
        for key in keys {
            let number: Option<BlockNumber> = self.forest.find_key(key);
            let outcome = number.map_or(Removed::Unknown, |number| {
                self.forest.remove_tier(number, tier, publication)
            });
            count_removed(outcome, applied);
        }
    }

    /// Finds out the lineage hash of every block of an event.
    fn resolve(&mut self, stored: &StoredBlocks, applied: &mut Applied) -> Result<Vec<NewBlock>, Unresolved> {
        let names = stored.engine_hashes.as_deref();
        match &stored.names {
            BlockNames::Lineage(keys) => {
                let name_at = |index: usize| names.and_then(|names| names.get(index)).copied();
                let block = |(index, key): (usize, &PositionalLineageHash)| NewBlock {
                    key: *key,
                    sequence_hash: None,
                    name: name_at(index),
                };
                Ok(keys.iter().enumerate().map(block).collect())
            }
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                if hashes.is_empty() {
                    return Ok(Vec::new());
                }
                let start = self.start(*parent, position.map(|position| position.as_u64()))?;
                let recomputes = self.shared.settings.hashing == Hashing::Recompute && names.is_none();
                if recomputes {
                    let chain = self.recompute(stored.content.as_ref(), hashes.len(), start)?;
                    return name_blocks(start, &chain, hashes.iter().map(|hash| hash.as_u64()));
                }
                self.check_chain(stored.content.as_ref(), start, hashes, applied);
                match names {
                    Some(names) => name_blocks(start, hashes, names.iter().copied()),
                    None => name_blocks(start, hashes, hashes.iter().map(|hash| hash.as_u64())),
                }
            }
        }
    }

    /// Where a run of blocks begins.
    fn start(&self, parent: Option<SequenceHash>, position: Option<u64>) -> Result<RunStart, Unresolved> {
        let Some(parent) = parent else {
            return Ok(RunStart {
                position: 0,
                parent: None,
                parent_is_known: true,
            });
        };
        let resident = self
            .forest
            .find_name(parent.as_u64())
            .map(|number| self.forest.block(number));
        match (resident, position) {
            // Where hashes are no chain, the holder can hold a block of this name at another position.
            (Some(block), _) if position.is_none_or(|position| position == block.key.position() + 1) => {
                // The fragment is all that a lineage hash needs of its parent, so it can stand in for the whole.
                let fragment = SequenceHash::from(block.key.current_hash_fragment());
                Ok(RunStart {
                    position: block.key.position() + 1,
                    parent: Some(block.sequence_hash.unwrap_or(fragment)),
                    parent_is_known: block.sequence_hash.is_some(),
                })
            }
            (_, Some(position)) => Ok(RunStart {
                position,
                parent: Some(parent),
                parent_is_known: false,
            }),
            (_, None) => Err(Unresolved::UnknownParent(parent.as_u64())),
        }
    }

    /// The contract's chain over the content of an event.
    fn recompute(
        &self,
        content: Option<&BlockContent>,
        blocks: usize,
        start: RunStart,
    ) -> Result<Vec<SequenceHash>, Unresolved> {
        match start.parent {
            Some(_) if !start.parent_is_known => {
                return Err(Unresolved::Rejected(RejectReason::MissingContent));
            }
            _ => {}
        }
        let content = content.ok_or(Unresolved::Rejected(RejectReason::MissingContent))?;
        let hashes: Vec<BlockHash> = match content {
            BlockContent::BlockHashes(hashes) if hashes.len() != blocks => {
                return Err(Unresolved::Rejected(RejectReason::ContentMismatch));
            }
            BlockContent::BlockHashes(hashes) => hashes.clone(),
            BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt,
            } => {
                let size = self.block_size();
                if tokens.len() != blocks.saturating_mul(size.as_usize()) {
                    return Err(Unresolved::Rejected(RejectReason::ContentMismatch));
                }
                let seed = HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref());
                block_hashes(tokens, size, seed).collect()
            }
        };
        Ok(sequence_hashes_after(start.parent, hashes).collect())
    }

    /// Notices hashes that are not the contract's chain. One block an event is enough: a foreign engine's never are.
    fn check_chain(
        &mut self,
        content: Option<&BlockContent>,
        start: RunStart,
        hashes: &[SequenceHash],
        applied: &mut Applied,
    ) {
        let Some((last, before)) = hashes.split_last() else {
            return;
        };
        let parent = before.last().copied().or(start.parent);
        if before.is_empty() && start.parent.is_some() && !start.parent_is_known {
            return;
        }
        let block = match content {
            None => return,
            Some(BlockContent::BlockHashes(hashes)) => hashes.last().copied(),
            Some(BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt,
            }) => {
                let size = self.block_size().as_usize();
                if tokens.len() != hashes.len().saturating_mul(size) {
                    // Another block size: queries by tokens cut the prompt elsewhere and cannot find these blocks.
                    applied.reject(RejectReason::ForeignChain, hashes.len());
                    self.set_foreign_chain(true);
                    return;
                }
                let seed = HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref());
                tokens
                    .rchunks_exact(size)
                    .next()
                    .map(|tokens| block_hash(tokens, seed))
            }
        };
        if block.is_some_and(|block| crate::hash::next_sequence_hash(parent, block) != *last) {
            applied.reject(RejectReason::ForeignChain, hashes.len());
            self.set_foreign_chain(true);
        }
    }

    fn block_size(&self) -> BlockSize {
        self.shared.settings.block_size
    }
}

/// Where a run of blocks begins.
#[derive(Debug, Clone, Copy)]
struct RunStart {
    /// Position of the first block.
    position: u64,
    /// Sequence hash of the block before it, or the fragment of it that is known.
    parent: Option<SequenceHash>,
    /// Whether `parent` is the whole sequence hash in the index's own chain.
    parent_is_known: bool,
}

/// Why the blocks of an event have no place yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unresolved {
    UnknownParent(u64),
    Rejected(RejectReason),
}

/// Blocks of one run, with their names.
fn name_blocks(
    start: RunStart,
    chain: &[SequenceHash],
    names: impl Iterator<Item = u64>,
) -> Result<Vec<NewBlock>, Unresolved> {
    let out_of_range = |_| Unresolved::Rejected(RejectReason::PositionOutOfRange);
    lineage_hashes_from(start.position, start.parent, chain)
        .zip(chain)
        .zip(names)
        .map(|((key, sequence_hash), name)| {
            Ok(NewBlock {
                key: key.map_err(out_of_range)?,
                sequence_hash: Some(*sequence_hash),
                name: Some(name),
            })
        })
        .collect()
}

fn count_removed(outcome: Removed, applied: &mut Applied) {
    match outcome {
        Removed::Gone | Removed::Remains => applied.removed += 1,
        Removed::Unknown => applied.reject(RejectReason::UnknownBlock, 1),
    }
}
