//! Tiers beyond the device: host, disk, remote storage. Their events often come from another component than the device's
//! events, and tell less:
//!
//! - An event may give only a block's name. Then the device's events, earlier or later ones, tell which block has that name.
//! - An event with content gives only tokens. It leaves out salts and multimodal objects, by which blocks differ, too. So if
//!   the block of a name is known, the name decides, and not the event's tokens.
//! - Children may come before their parents, within a batch.
//! - One event, or one name, may stand for a *chunk*: several blocks that can be loaded only together.
//!
//! To *place* an event is to find the blocks that its names stand for. An event that can't be placed would only have added
//! blocks to its own tier. So only that tier is in doubt after such an event.

mod chunks;
mod saved;

use hashbrown::{HashMap, HashSet};

use kvatlas_core::wire::Tier;

use crate::batch::{Content, EngineBatch, EngineStored, PlacedDoubt};
use crate::reason::Reason;

use super::block::{Block, ChainSlot};
use super::groups::GroupLaneId;
use super::output::Translation;
use super::past::Past;
use super::tiers::{PerTier, TierIndex, TierSet};
use super::{HashMode, StoredStart, Translator};

use chunks::OwnChunks;

/// State of the tiers beyond the device (host, disk, remote storage), except for the blocks that they have.
#[derive(Debug, Default)]
pub(super) struct Beyond {
    /// The reason why each tier's blocks are in doubt; `None` if they are certain.
    doubts: PerTier<Option<Reason>>,
    /// For each tier, the greatest common divisor of the sizes of all chunks that events have shown, in blocks. A
    /// chunk is several blocks that load only together. The real chunk size divides this number. The number is 0
    /// while no event has shown a chunk.
    chunks: PerTier<u32>,
    late: Late,
    past: Past,
    own_chunks: OwnChunks,
    /// Whether any stored event so far was about a tier beyond the device (host, disk or remote storage).
    is_used: bool,
    /// Whether a stored event about a tier beyond the device has told the kind of its group of layers. Connectors with a
    /// pool of blocks always tell the kind, and few others do.
    has_kinds: bool,
    /// Whether an event has given only names, without tokens. Each such name is the name of the last block of a chunk: several
    /// blocks that load only together.
    has_ends: bool,
    /// Whether at least one name stands for a chunk, that is, for several blocks that load only together.
    has_parts: bool,
    /// Whether any stored event so far had a salt. The field `has_objects` tells the same for multimodal objects.
    has_salts: bool,
    has_objects: bool,
    /// The blocks of the current event that have been found so far, with their names.
    named: Vec<NamedBlock>,
}

/// Changes that wait for the end of their batch. Stored events wait if it is not known yet which blocks they name.
/// Removals of the same names, if they come after the stored events, wait, too.
#[derive(Debug, Default)]
struct Late {
    stored: Vec<EngineStored>,
    names: HashSet<u64>,
    removed: Vec<(Option<GroupLaneId>, u64, TierSet)>,
}

impl Late {
    fn clear(&mut self) {
        self.stored.clear();
        self.names.clear();
        self.removed.clear();
    }
}

/// A block of an event, with the engine's name for the block.
#[derive(Debug, Clone, Copy)]
struct NamedBlock {
    name: u64,
    block: Block,
    is_within_chunk: bool,
}

/// Reason why the blocks of an event could not be found from the event's names.
enum UnplacedReason {
    /// The block with this name is not known yet. A later event of the batch may tell it. If none does, the event is
    /// left out for the given reason.
    Until(u64, Reason),
    /// The event has to be left out for the given reason, whatever later events of the batch tell.
    Ever(Reason),
}

impl From<Reason> for UnplacedReason {
    fn from(reason: Reason) -> Self {
        Self::Ever(reason)
    }
}

impl Beyond {
    /// Whether the engine may have a connector with a pool of blocks. A clear of such a pool looks like a clear of
    /// the device.
    pub(super) fn may_have_pool(&self) -> bool {
        self.has_kinds
    }

    /// Notes whether a stored event has a salt or multimodal objects.
    pub(super) fn note_keys(&mut self, stored: &EngineStored) {
        self.has_salts |= stored.cache_salt.is_some();
        self.has_objects |= !stored.objects.is_empty();
    }

    fn note_doubt(&mut self, tier: TierIndex, reason: Reason) {
        self.doubts[tier].get_or_insert(reason);
    }

    /// Notes an observation: the number of blocks in a chunk of `tier` divides `blocks`. A chunk is several blocks
    /// that load only together.
    fn note_chunk(&mut self, tier: TierIndex, blocks: u32) {
        self.chunks[tier] = gcd(self.chunks[tier], blocks);
    }

    /// Notes that a clear has emptied the tiers up to `up_to`. `held` tells for each tier whether it had blocks
    /// before. If a tier beyond `up_to` had blocks, it may still have them, so it is in doubt from now on.
    pub(super) fn clear(&mut self, mut held: PerTier<bool>, up_to: Tier) {
        for stored in &self.late.stored {
            if let Some(tier) = TierIndex::of(stored.tier) {
                held[tier] = true;
            }
        }
        self.doubts = PerTier::of(|tier| {
            let is_unclear = held[tier] && tier.tier() > up_to;
            is_unclear.then(|| self.doubts[tier].unwrap_or(Reason::UnclearTier))
        });
        self.chunks = PerTier::default();
        self.late.clear();
        self.past.clear();
        self.own_chunks = OwnChunks::default();
        (self.has_ends, self.has_parts) = (false, false);
    }
}

fn gcd(mut one: u32, mut other: u32) -> u32 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

impl Translator {
    /// Returns the tiers beyond the device that are in doubt, each with its first reason for doubt. A clear does not
    /// end all of these doubts, because the clear may have emptied only the device.
    pub fn tier_doubts(&self) -> impl Iterator<Item = (Tier, Reason)> + '_ {
        let doubted = |tier: TierIndex| Some((tier.tier(), self.tier_doubt(tier)?));
        TierIndex::BEYOND.into_iter().filter_map(doubted)
    }

    pub(super) fn tier_doubt(&self, tier: TierIndex) -> Option<Reason> {
        let has_ends = self.beyond.chunks[tier] > 1 && self.beyond.has_ends;
        self.beyond.doubts[tier]
            .or(has_ends.then_some(Reason::UnknownChunk))
            .or_else(|| self.has_load_minimum(tier).then_some(Reason::LoadMinimum))
            .or(self.beyond.own_chunks.doubt(tier, self.settings.has_no_salts))
            .or_else(|| {
                let may_have = self.settings.is_relayed || self.groups.has_in(tier);
                let is_silent = !self.settings.tells_beyond && may_have;
                is_silent.then_some(Reason::NoRemovals)
            })
            .or_else(|| (self.groups.mixed_in(tier) > 0).then_some(Reason::HiddenKey))
    }

    /// Whether a request loads blocks from `tier` only if enough of them are beyond those on the device. vLLM's
    /// offloading needs as many as a chunk has, and SGLang needs a certain number of tokens.
    fn has_load_minimum(&self, tier: TierIndex) -> bool {
        let beyond = &self.beyond;
        // LMCache loads a part of a chunk, too.
        let has_chunks = beyond.chunks[tier] > 1 && !beyond.own_chunks.is_used(tier);
        let has_small = self.settings.block_size.as_u32() < self.settings.loaded_tokens_min;
        (has_chunks || has_small) && self.groups.has_in(tier)
    }

    /// Notes a doubt of the current batch. Must be called when all events before the doubt have been translated.
    pub(super) fn note_placed(&mut self, doubt: PlacedDoubt) {
        match doubt.tier.and_then(TierIndex::of) {
            Some(tier) if tier.is_beyond_device() => self.beyond.note_doubt(tier, doubt.reason),
            _ => self.note_doubt(doubt.reason),
        }
    }

    /// Counts `reason` for a left-out event about `tier` (`None` if the event is about all tiers), and notes the
    /// doubt that follows from the reason.
    pub(super) fn count_in(&mut self, tier: Option<TierIndex>, reason: Reason, output: &mut Translation) {
        match tier {
            Some(tier) if tier.is_beyond_device() => {
                output.reasons.count(reason);
                if reason.hides_tier() {
                    self.beyond.note_doubt(tier, reason);
                }
            }
            _ => self.count(reason, output),
        }
    }

    /// The block that has the name `name` at present. [`Self::known`] also finds blocks that had the name before.
    pub(super) fn known_now(&self, lane: GroupLaneId, name: u64) -> Option<Block> {
        self.groups.find(lane, name).and_then(|slot| self.chain.get(slot))
    }

    /// The block that `name` stands for, or recently stood for.
    pub(super) fn known(&self, lane: GroupLaneId, name: u64) -> Option<Block> {
        self.known_now(lane, name).or_else(|| self.beyond.past.get(name))
    }

    /// Remembers which block had the name `name`, because later events may still use the name. To be called when the
    /// last copy under this name is removed.
    pub(super) fn remember(&mut self, name: u64, slot: ChainSlot) {
        if self.beyond.is_used
            && let Some(block) = self.chain.get(slot)
        {
            self.beyond.past.remember(name, block);
        }
    }

    /// Translates a stored event about a tier beyond the device. If the event's blocks are not known yet, the event
    /// waits: a later event of the batch may tell them.
    pub(super) fn store_beyond(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        output: &mut Translation,
    ) {
        self.beyond.is_used = true;
        self.beyond.has_kinds |= stored.group.kind.is_some();
        match self.place_beyond(batch, stored, output) {
            Ok(()) => {}
            Err(UnplacedReason::Ever(reason)) => self.count_in(TierIndex::of(stored.tier), reason, output),
            Err(UnplacedReason::Until(..)) => {
                self.beyond.late.names.extend(batch.hashes(stored.names));
                self.beyond.late.stored.push(*stored);
            }
        }
    }

    /// Postpones removals of blocks to the end of the batch, if stored events of the same blocks wait.
    pub(super) fn remove_later(&mut self, lane: Option<GroupLaneId>, names: &[u64], tiers: TierSet) {
        let late = &mut self.beyond.late;
        if late.stored.is_empty() {
            return;
        }
        let groups = &self.groups;
        let is_held = |name: u64| {
            let mut lanes = groups.lanes_with(lane, name);
            lanes.any(|lane| tiers.iter().any(|tier| groups.has_copy(lane, name, tier)))
        };
        let waiting = names
            .iter()
            .filter(|name| late.names.contains(*name) && !is_held(**name));
        let waiting: Vec<_> = waiting.map(|name| (lane, *name, tiers)).collect();
        late.removed.extend(waiting);
    }

    /// Ends a batch. Translates the waiting stored events, each as soon as the name is known for which it waits, and
    /// counts the events for which that does not happen. Then applies the postponed removals.
    pub(super) fn settle(&mut self, batch: &EngineBatch, output: &mut Translation) {
        if self.beyond.late.stored.is_empty() {
            return;
        }
        let late = std::mem::take(&mut self.beyond.late);
        let mut waiting: HashMap<u64, Vec<(&EngineStored, Reason)>> = HashMap::new();
        let mut ready: Vec<&EngineStored> = late.stored.iter().rev().collect();
        while let Some(stored) = ready.pop() {
            match self.place_beyond(batch, stored, output) {
                Ok(()) => {
                    let woken = batch
                        .hashes(stored.names)
                        .iter()
                        .filter_map(|name| waiting.remove(name));
                    ready.extend(woken.flatten().map(|(stored, _)| stored));
                }
                Err(UnplacedReason::Until(name, reason)) => {
                    waiting.entry(name).or_default().push((stored, reason));
                }
                Err(UnplacedReason::Ever(reason)) => {
                    self.count_in(TierIndex::of(stored.tier), reason, output)
                }
            }
        }
        for (stored, reason) in waiting.into_values().flatten() {
            self.count_in(TierIndex::of(stored.tier), reason, output);
        }
        let left = (!self.settings.counts_copies).then_some(0);
        for (lane, name, tiers) in &late.removed {
            self.remove_one(*lane, *name, *tiers, left, output);
            self.remove_parts(*lane, *name, *tiers, output);
        }
    }

    fn place_beyond(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        output: &mut Translation,
    ) -> Result<(), UnplacedReason> {
        let tier = TierIndex::of(stored.tier).ok_or(Reason::UnknownMedium)?;
        let lane = self.lane_for(self.stated(stored.group), output)?;
        self.beyond.named.clear();
        let parts = self.parts_of(stored)?;
        let blocks = stored.names.len().saturating_mul(parts as usize);
        if self.names().saturating_add(blocks) > self.settings.blocks_max {
            return Err(Reason::TableFull.into());
        }
        let has_own_names = match parts {
            1 => {
                self.name_blocks(batch, stored, lane, tier)?;
                false
            }
            parts => {
                let has_own_names = self.has_own_names(batch, stored, lane, tier);
                self.name_parts(batch, stored, lane, parts)?;
                has_own_names
            }
        };
        self.hold_named(lane, tier)?;
        if has_own_names {
            let names = batch.hashes(stored.names);
            self.beyond.own_chunks.hold(tier, names, stored.parent);
        }
        self.publish_named(tier, output);
        Ok(())
    }

    /// Finds the event's blocks and writes them to `named`. The leading names that are known give the first blocks.
    /// From the first unknown name on, the blocks are computed from the event's content.
    fn name_blocks(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        lane: GroupLaneId,
        tier: TierIndex,
    ) -> Result<(), UnplacedReason> {
        let names = batch.hashes(stored.names);
        let mut named = std::mem::take(&mut self.beyond.named);
        let known = names
            .iter()
            .map_while(|name| Some((*name, self.known(lane, *name)?)));
        named.extend(known.map(|(name, block)| NamedBlock {
            name,
            block,
            is_within_chunk: false,
        }));
        let outcome = match names.get(named.len()) {
            None => Ok(()),
            Some(unknown) => self.compute_named(batch, stored, lane, *unknown, &mut named),
        };
        self.beyond.named = named;
        outcome?;
        self.note_chunk(stored, tier);
        Ok(())
    }

    /// Notes the size of a chunk (blocks that load only together), as far as an event shows it. The event's blocks must be in
    /// `named`.
    fn note_chunk(&mut self, stored: &EngineStored, tier: TierIndex) {
        if !self.settings.has_connector {
            return;
        }
        let mut named = std::mem::take(&mut self.beyond.named);
        if stored.content == Content::Absent {
            // Each of these blocks is the last block of a chunk.
            self.beyond.has_ends = true;
            for NamedBlock { block, .. } in &named {
                self.beyond.note_chunk(tier, block.position.saturating_add(1));
            }
        } else {
            let blocks = u32::try_from(named.len()).unwrap_or(u32::MAX);
            self.beyond.note_chunk(tier, blocks);
            named
                .iter_mut()
                .rev()
                .skip(1)
                .for_each(|named| named.is_within_chunk = true);
        }
        self.beyond.named = named;
    }

    /// Computes the rest of an event's blocks, and appends them to `named`. `unknown` is the name of the first of these blocks.
    fn compute_named(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        lane: GroupLaneId,
        unknown: u64,
        named: &mut Vec<NamedBlock>,
    ) -> Result<(), UnplacedReason> {
        let names = batch.hashes(stored.names);
        let is_trusted = matches!(self.settings.mode, HashMode::Trust { .. });
        if stored.content == Content::Absent && !is_trusted {
            return Err(UnplacedReason::Until(unknown, Reason::Placeholder));
        }
        if is_trusted || !stored.objects.is_empty() {
            // In two cases, the event is computed as a whole. In trust mode, all names are taken as hashes. And objects
            // refer to blocks by their number in the event.
            named.clear();
        }
        self.check_untold(stored, named.is_empty())?;
        let start = match named.last() {
            Some(NamedBlock { block, .. }) => StoredStart::behind(block),
            None => self.start_beyond(batch, stored, lane)?,
        };
        let rest = stored.without_first(named.len());
        match is_trusted {
            true => self.compute_chain(batch, stored, &start)?,
            false => self.compute_blocks(batch, &rest, &start, rest.names.len())?,
        }
        let blocks = start.blocks(self.contents.chain());
        let rest = names.iter().skip(named.len()).zip(blocks);
        let rest = rest.map(|(name, block)| NamedBlock {
            name: *name,
            block,
            is_within_chunk: false,
        });
        let rest: Vec<NamedBlock> = rest.collect();
        named.extend(rest);
        Ok(())
    }

    /// Refuses an event of a KV connector if its tokens don't determine its blocks. The connector's events leave out
    /// salts, multimodal objects and lookahead tokens, so several different blocks can have the same tokens.
    fn check_untold(&self, stored: &EngineStored, is_first_unknown: bool) -> Result<(), Reason> {
        if !self.settings.has_connector || stored.cache_salt.is_some() || !stored.objects.is_empty() {
            return Ok(());
        }
        let may_have_salt = self.beyond.has_salts && stored.parent.is_none() && is_first_unknown;
        if self.beyond.has_objects || may_have_salt {
            return Err(Reason::Untold);
        }
        let Content::Tokens { step, window, .. } = stored.content else {
            return Ok(());
        };
        // The event may also leave out lookahead tokens: tokens after a block that the block's name covers.
        match self
            .lookahead
            .is_none_or(|known| known == window.saturating_sub(step))
            || window > step
        {
            true => Ok(()),
            false => Err(Reason::Lookahead),
        }
    }

    /// Finds the place in a sequence at which the first block of an event about a tier beyond the device stands.
    fn start_beyond(
        &self,
        batch: &EngineBatch,
        stored: &EngineStored,
        lane: GroupLaneId,
    ) -> Result<StoredStart, UnplacedReason> {
        self.start_of(batch, stored, lane)
            .map_err(|reason| match (reason, stored.parent) {
                (Reason::UnknownParent, Some(parent)) => UnplacedReason::Until(parent, reason),
                _ => UnplacedReason::Ever(reason),
            })
    }

    /// Adds a copy of each block in `named`, the blocks of the current event. If a copy can't be added, takes back
    /// the copies added before and returns the reason.
    fn hold_named(&mut self, lane: GroupLaneId, tier: TierIndex) -> Result<(), Reason> {
        self.slots.clear();
        for place in 0..self.beyond.named.len() {
            let Some(NamedBlock { name, block, .. }) = self.beyond.named.get(place).copied() else {
                break;
            };
            match self.groups.add(lane, name, block, tier, &mut self.chain) {
                Ok(added) => self.slots.push(added.slot),
                Err(reason) => {
                    for named in self.beyond.named.iter().take(place).rev() {
                        self.groups.take(lane, named.name, tier, &mut self.chain);
                    }
                    self.slots
                        .drain(..)
                        .rev()
                        .for_each(|slot| self.chain.free_unnamed(slot));
                    return Err(reason);
                }
            }
            if !self.settings.counts_copies {
                self.groups.set_copies(lane, name, tier, 1);
            }
        }
        Ok(())
    }

    /// Emits those of the current event's blocks (in `named`) that are held and not published yet. Also tells after which of
    /// these blocks a request can resume.
    fn publish_named(&mut self, tier: TierIndex, output: &mut Translation) {
        let has_tree = self.chain.has_tree();
        let has_chunk = self.beyond.named.iter().any(|named| named.is_within_chunk);
        if has_chunk {
            output.seal();
        }
        let begun = output.mark();
        let mut told = Vec::new();
        let slots = std::mem::take(&mut self.slots);
        for (slot, named) in slots.iter().zip(&self.beyond.named) {
            let was_within = self.chain.is_within_chunk(*slot, tier);
            self.chain.set_within_chunk(*slot, tier, named.is_within_chunk);
            let is_published = self.chain.is_published(*slot, tier);
            if is_published && was_within && !named.is_within_chunk {
                // The block has now come outside of a chunk, so it can be loaded alone.
                self.chain.touch(*slot);
                let told = (!has_tree).then(|| self.chain.set_resumable(*slot, tier, true));
                if let Some(sequence) = told.flatten() {
                    output.push_resumable(tier.tier(), vec![sequence], true, None);
                }
            }
            if !is_published && self.groups.holds(*slot, tier) {
                self.chain.publish(*slot, tier, output);
                if !has_tree {
                    self.chain.set_resumable(*slot, tier, !named.is_within_chunk);
                    told.push(!named.is_within_chunk);
                }
            }
        }
        self.slots = slots;
        self.slots.clear();
        if has_chunk && !has_tree {
            let mut told = told.into_iter();
            output.set_resumable(begun, |_, _| told.next().unwrap_or_default());
            output.seal();
        }
    }
}
