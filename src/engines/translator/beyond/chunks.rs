//! Chunks that have a single name. A chunk is several blocks that load only together.
//!
//! vLLM's offloading names a chunk by the name of its last block. LMCache gives a chunk a name of its own, and
//! differs in three ways:
//!
//! - The name covers tokens only. LMCache keeps a copy of a chunk for each salt, and all copies have the same name.
//!   An event does not tell the salt of the copy that was stored or removed.
//! - The connector always tells which chunks it stores. It tells which chunks are removed only if it receives a
//!   stream of events from LMCache's server.
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

/// The chunks that have names of their own (LMCache's chunks), in each tier.
#[derive(Debug, Default)]
pub(super) struct OwnChunks(PerTier<TierChunks>);

/// The chunks of one tier that have names of their own.
#[derive(Debug, Default)]
struct TierChunks {
    /// The names of the held chunks. Each comes with the name of the chunk before it, or `None` for the first chunk
    /// of a sequence.
    parents: HashMap<u64, Option<u64>>,
    /// For each chunk, by its name, the number of held chunks that directly follow it. A chunk can be removed while
    /// chunks that follow it are still held.
    followers: HashMap<u64, usize>,
    /// Number of held chunks whose preceding chunk is not held.
    orphans: usize,
    /// Whether a stored event has named a chunk by a name of its own.
    is_used: bool,
    /// Whether the connector tells which chunks are removed. This counts as shown if the last removal left other
    /// chunks in the tier. A removal of all chunks shows the opposite: the connector removes all chunks when it loses
    /// the stream of events from LMCache's server, and may then tell no further removals.
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
    /// Returns the reason why the blocks of `tier` are in doubt because of its chunks; `None` if the chunks leave no
    /// doubt.
    pub(super) fn doubt(&self, tier: TierIndex, has_no_salts: bool) -> Option<Reason> {
        match &self.0[tier] {
            chunks if !chunks.is_used => None,
            _ if !has_no_salts => Some(Reason::Untold),
            chunks if !chunks.has_removals => Some(Reason::NoRemovals),
            chunks if chunks.orphans > 0 => Some(Reason::UnknownParent),
            _ => None,
        }
    }

    /// Notes that the chunks `names` were stored in `tier`. The first chunk follows the chunk `parent`, and each
    /// other chunk follows the one before it in the list.
    pub(super) fn hold(&mut self, tier: TierIndex, names: &[u64], mut parent: Option<u64>) {
        let chunks = &mut self.0[tier];
        for name in names {
            chunks.hold(*name, parent);
            parent = Some(*name);
        }
    }

    /// Notes that a copy of the chunk `name` was removed from `tier`. `is_held` tells whether the tier still has
    /// another copy of this chunk.
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

    /// Whether a stored event about `tier` has named a chunk by a name of its own.
    pub(super) fn is_used(&self, tier: TierIndex) -> bool {
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

    /// Restores the saved chunks of each tier. If the state was saved before chunks had names of their own, `saved`
    /// is empty. If `has_chunks` then tells that there were chunks, each tier counts as one that has chunks with such
    /// names, because any of its chunks may have had one.
    pub(super) fn restore(saved: Vec<SavedOwnChunks>, has_chunks: bool) -> Self {
        let mut restored = Self::default();
        if saved.is_empty() && has_chunks {
            for tier in TierIndex::ALL {
                restored.0[tier].is_used = true;
            }
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
    /// Removes the blocks of the chunk `name`, except for its last block. A chunk is several blocks that load only
    /// together. If the engine gives it a single name, this is the name of its last block.
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

    /// Whether the names in a stored event are the chunks' own names, and not the names of the chunks' last blocks.
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
