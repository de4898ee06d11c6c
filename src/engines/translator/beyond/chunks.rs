//! Chunks under one name: several blocks that load only together.
//!
//! vLLM's offloading gives a chunk the name of its last block. LMCache gives it a name of its own, for which three things
//! hold:
//!
//! - The name covers tokens only. LMCache keeps a copy of a chunk for each salt, and all copies have the same name. An
//!   event does not tell the salt of the copy that was stored or removed.
//! - Without a stream of events from LMCache's server, the connector tells what it stores, and never what is removed.
//! - LMCache loads a chunk only together with all chunks before it.

use hashbrown::HashMap;

use kvatlas_core::hash::{BlockHash, SequenceHash, next_sequence_hash};

use crate::batch::{Content, EngineBatch, EngineStored};
use crate::reason::Reason;

use super::super::Translator;
use super::super::forms::SavedOwnChunks;
use super::super::groups::GroupLaneId;
use super::super::output::Translation;
use super::super::tiers::{PerTier, TierIndex, TierSet};
use super::{NamedBlock, UnplacedReason};

/// The chunks with names of their own, in each tier.
#[derive(Debug, Default)]
pub(super) struct OwnChunks(PerTier<TierChunks>);

/// The chunks with names of their own in one tier.
#[derive(Debug, Default)]
struct TierChunks {
    /// The names of the held chunks, each with the name of the chunk before it.
    parents: HashMap<u64, Option<u64>>,
    /// For each name, the number of held chunks that follow the chunk of that name. The chunk itself may have gone.
    followers: HashMap<u64, usize>,
    /// Number of held chunks that follow a chunk which is not held.
    orphans: usize,
    /// Whether an event has told of such a chunk.
    is_used: bool,
    /// Whether removals are told: the last removal left chunks behind. The connector removes all chunks when it loses
    /// the stream of its server's events, and then it may tell no more removals.
    has_removals: bool,
}

impl TierChunks {
    fn hold(&mut self, name: u64, parent: Option<u64>) {
        self.is_used = true;
        if self.parents.insert(name, parent).is_some() {
            return;
        }
        self.orphans = self.orphans.saturating_sub(self.followers_of(name));
        if let Some(parent) = parent {
            *self.followers.entry(parent).or_default() += 1;
            self.orphans += usize::from(!self.parents.contains_key(&parent));
        }
    }

    fn remove(&mut self, name: u64) {
        let Some(parent) = self.parents.remove(&name) else {
            return;
        };
        self.orphans += self.followers_of(name);
        let Some(parent) = parent else {
            return;
        };
        let was_orphan = !self.parents.contains_key(&parent);
        self.orphans = self.orphans.saturating_sub(usize::from(was_orphan));
        if let Some(followers) = self.followers.get_mut(&parent) {
            *followers = followers.saturating_sub(1);
            if *followers == 0 {
                self.followers.remove(&parent);
            }
        }
    }

    fn followers_of(&self, name: u64) -> usize {
        self.followers.get(&name).copied().unwrap_or_default()
    }
}

impl OwnChunks {
    /// The reason why the chunks of `tier` leave the tier in doubt; `None` if they don't.
    pub(super) fn doubt(&self, tier: TierIndex, has_no_salts: bool) -> Option<Reason> {
        match &self.0[tier] {
            chunks if !chunks.is_used => None,
            _ if !has_no_salts => Some(Reason::Untold),
            chunks if !chunks.has_removals => Some(Reason::NoRemovals),
            chunks if chunks.orphans > 0 => Some(Reason::UnknownParent),
            _ => None,
        }
    }

    /// Notes that chunks have been stored in `tier`. The first of them follows `parent`, each other one the chunk
    /// before it.
    pub(super) fn hold(&mut self, tier: TierIndex, names: &[u64], mut parent: Option<u64>) {
        let chunks = &mut self.0[tier];
        for name in names {
            chunks.hold(*name, parent);
            parent = Some(*name);
        }
    }

    /// Notes that a copy of the chunk `name` was removed from `tier`. `is_held` tells whether another copy is left.
    fn note_removal(&mut self, tier: TierIndex, name: u64, is_held: bool) {
        let chunks = &mut self.0[tier];
        if !chunks.parents.contains_key(&name) {
            return;
        }
        if !is_held {
            chunks.remove(name);
        }
        chunks.has_removals = !chunks.parents.is_empty();
    }

    fn is_used(&self, tier: TierIndex) -> bool {
        self.0[tier].is_used
    }

    /// Returns the chunks of each tier in saved form.
    pub(super) fn save(&self) -> Vec<SavedOwnChunks> {
        let saved = |chunks: &TierChunks| SavedOwnChunks {
            parents: chunks
                .parents
                .iter()
                .map(|(name, parent)| (*name, *parent))
                .collect(),
            is_used: chunks.is_used,
            has_removals: chunks.has_removals,
        };
        TierIndex::ALL.map(|tier| saved(&self.0[tier])).to_vec()
    }

    /// Restores the saved chunks of each tier. An earlier program has saved none. `has_chunks` tells whether it had
    /// chunks at all: any of them may have had a name of its own.
    pub(super) fn restore(saved: Vec<SavedOwnChunks>, has_chunks: bool) -> Self {
        let mut restored = Self::default();
        if saved.is_empty() && has_chunks {
            TierIndex::ALL
                .into_iter()
                .for_each(|tier| restored.0[tier].is_used = true);
        }
        for (tier, saved) in TierIndex::ALL.into_iter().zip(saved) {
            let chunks = &mut restored.0[tier];
            for (name, parent) in saved.parents {
                chunks.hold(name, parent);
            }
            (chunks.is_used, chunks.has_removals) = (saved.is_used, saved.has_removals);
        }
        restored
    }
}

/// A made-up name for block number `part` of the chunk `name`, whose blocks load only together. No engine uses the made-up name.
fn part_name(name: u64, part: u32) -> u64 {
    let part = BlockHash::from(u64::from(part));
    u64::from(next_sequence_hash(Some(SequenceHash::from(name)), part))
}

impl Translator {
    /// Removes the blocks of the chunk `name` before its last block. A chunk is several blocks that load only together;
    /// if it has a single name, that is the name of its last block.
    pub(in super::super) fn remove_parts(
        &mut self,
        lane: Option<GroupLaneId>,
        name: u64,
        tiers: TierSet,
        output: &mut Translation,
    ) {
        let left = (!self.settings.counts_copies).then_some(0);
        let mut part = 0;
        while self.beyond.has_parts && self.remove_one(lane, part_name(name, part), tiers, left, output) {
            part += 1;
        }
        if part == 0 {
            return;
        }
        for tier in tiers.iter() {
            let mut lanes = self.groups.lanes_with(lane, name);
            let is_held = lanes.any(|lane| self.groups.has_copy(lane, name, tier));
            self.beyond.own_chunks.note_removal(tier, name, is_held);
        }
    }

    /// Whether the chunks of an event have names of their own, and not the names of their last blocks.
    pub(super) fn has_own_names(
        &self,
        batch: &EngineBatch,
        stored: &EngineStored,
        lane: GroupLaneId,
        tier: TierIndex,
    ) -> bool {
        let Some(name) = batch.hashes(stored.names).first().copied() else {
            return false;
        };
        let is_of_device = self.groups.has_copy(lane, name, TierIndex::DEVICE);
        let is_known = self.known(lane, name).is_some();
        // A chunk's own name is known, too, once the chunk has been told.
        !is_known || (!is_of_device && self.beyond.own_chunks.is_used(tier))
    }

    /// Number of the contract's blocks in one block of the event. If there are several, the event's block is a chunk:
    /// the contract's blocks in it load only together.
    pub(super) fn parts_of(&self, stored: &EngineStored) -> Result<u32, Reason> {
        let size = u64::from(self.settings.block_size.as_u32());
        let told = match (stored.block_size, stored.content) {
            (Some(0), Content::Absent) => return Ok(1),
            (Some(told), _) => told,
            (None, Content::Tokens { step, .. }) => step as u64,
            (None, _) => return Ok(1),
        };
        let has_all = matches!(stored.content, Content::Tokens { step, window, .. } if step == window);
        match told {
            _ if told == size => Ok(1),
            _ if told > size && told.is_multiple_of(size) && has_all => {
                u32::try_from(told / size).map_err(|_| Reason::BlockSize)
            }
            // An incomplete block ends a sequence, as on the device.
            _ if told < size && stored.names.len() == 1 => Err(match stored.parent {
                Some(parent) if !self.groups.has_name(parent) => Reason::BlockSize,
                _ => Reason::PartOfBlock,
            }),
            _ => Err(Reason::BlockSize),
        }
    }

    /// Cuts the chunks of an event into blocks of the contract. A chunk is `parts` blocks that load only together. The last block
    /// of each chunk has the chunk's name.
    pub(super) fn name_parts(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        lane: GroupLaneId,
        parts: u32,
    ) -> Result<(), UnplacedReason> {
        let size = self.settings.block_size.as_u32() as usize;
        let Content::Tokens { tokens, .. } = stored.content else {
            return Err(Reason::BlockSize.into());
        };
        let names = batch.hashes(stored.names);
        let mut start = self.start_beyond(batch, stored, lane)?;
        let cut = EngineStored {
            content: Content::Tokens {
                tokens,
                step: size,
                window: size,
            },
            ..*stored
        };
        let count = names.len() * parts as usize;
        let known = names.first().and_then(|name| self.known(lane, *name));
        match known {
            // A known name tells the salt and the adapter.
            Some(known) if known.position.checked_sub(parts - 1) == Some(start.position) => {
                (start.seed, start.adapter) = (known.seed, known.adapter);
            }
            Some(_) => return Err(Reason::NameConflict.into()),
            None => self.check_untold(&cut, true)?,
        }
        self.compute_blocks(batch, &cut, &start, count)?;
        for (place, block) in (0..).zip(start.blocks(self.contents.chain())) {
            let (chunk, part): (u32, u32) = (place / parts, place % parts);
            let Some(name) = names.get(chunk as usize) else {
                break;
            };
            let is_within_chunk = part + 1 < parts;
            self.beyond.named.push(NamedBlock {
                name: if is_within_chunk {
                    part_name(*name, part)
                } else {
                    *name
                },
                block,
                is_within_chunk,
            });
        }
        self.beyond.has_parts = true;
        Ok(())
    }
}
