//! What the blocks of a stored event are: their places in the index's chain, and what the engine calls them.

use std::borrow::Cow;

use crate::hash::{
    BlockHash, HashSeed, Position, PositionalLineageHash, SequenceHash, block_hash, block_hashes,
    lineage_hashes_from, next_sequence_hash, sequence_hashes_after,
};
use crate::wire::{BlockContent, BlockNames, StoredBlocks};

use crate::index::block::NewBlock;
use crate::index::runs::Spot;
use crate::index::settings::{Hashing, NamespaceSettings};

use super::RejectReason;
use super::store::Sequence;

/// The parent of an event's blocks, where the holder has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    pub(super) key: PositionalLineageHash,
    /// The whole sequence hash, where it is known.
    pub(super) sequence_hash: Option<SequenceHash>,
    /// Where it is, if it has a place.
    pub(super) spot: Option<Spot>,
}

/// Why the blocks of an event have no place yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unresolved {
    UnknownParent(u64),
    Rejected(RejectReason),
}

/// The blocks of an event.
#[derive(Debug)]
pub(super) enum Resolved<'e> {
    /// Named by lineage hashes, in any order.
    Keys(Vec<NewBlock>),
    /// One after the other.
    Sequence(ResolvedSequence<'e>),
}

/// Consecutive blocks. None of their positions is out of range.
#[derive(Debug)]
pub(super) struct ResolvedSequence<'e> {
    start: Start,
    /// Their hashes in the index's chain.
    pub(super) hashes: Cow<'e, [SequenceHash]>,
    /// What the engine calls them, where that is not their hashes.
    pub(super) names: Option<Cow<'e, [u64]>>,
    /// Whether the hashes are not the contract's chain over the content beside them.
    pub(super) is_foreign: bool,
}

/// Where a sequence begins: at position 0, or after a block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Start {
    /// Position of the first block.
    position: u64,
    /// Sequence hash of the block before it, or the fragment of it that is known.
    parent: Option<SequenceHash>,
    /// Whether `parent` is the whole sequence hash in the index's own chain.
    parent_is_known: bool,
    /// Where the parent is, if it has a place.
    spot: Option<Spot>,
}

impl ResolvedSequence<'_> {
    /// The sequence hash that the event gives for a parent which the holder does not have, and the parent's position; where the engine has
    /// names of its own, so that it may have meant one of them.
    pub(super) fn claim(&self) -> Option<(u64, u64)> {
        let parent = self.start.parent.filter(|_| !self.start.parent_is_known)?;
        let position = self.start.position.checked_sub(1)?;
        self.names.as_ref().map(|_| (parent.as_u64(), position))
    }

    /// As blocks that have places; none where the block before the first has none.
    pub(super) fn placed(&self) -> Option<Sequence<'_>> {
        if self.start.position > 0 && self.start.spot.is_none() {
            return None;
        }
        Some(Sequence {
            parent: self.start.spot,
            // `resolve` has checked it.
            position: u32::try_from(self.start.position).unwrap_or(u32::MAX),
            hashes: &self.hashes,
            names: self.names.as_deref(),
        })
    }

    /// The blocks one by one.
    pub(super) fn blocks(&self) -> Vec<NewBlock> {
        let keys = lineage_hashes_from(self.start.position, self.start.parent, &self.hashes);
        let block = |(index, (key, hash)): (usize, (Result<_, _>, &SequenceHash))| {
            Some(NewBlock {
                // None is out of range: `resolve` has looked at the last.
                key: key.ok()?,
                sequence_hash: Some(*hash),
                name: match &self.names {
                    Some(names) => Some(*names.get(index)?),
                    None => Some(hash.as_u64()),
                },
            })
        };
        let blocks = keys.zip(self.hashes.iter()).enumerate();
        blocks.filter_map(block).collect()
    }
}

/// Where the blocks of an event begin, if they are given one after the other. `find_parent` gives the block that an event names as a parent,
/// if the holder has it; it gets the position of the first child, where the event has one.
pub(super) fn start_of(
    stored: &StoredBlocks,
    find_parent: impl FnOnce(u64, Option<u64>) -> Option<Resident>,
) -> Result<Option<Start>, Unresolved> {
    let BlockNames::Sequence {
        parent,
        position,
        hashes,
    } = &stored.names
    else {
        return Ok(None);
    };
    let Some(parent) = parent.filter(|_| !hashes.is_empty()) else {
        return Ok((!hashes.is_empty()).then(Start::default));
    };
    let position = position.map(|position| position.as_u64());
    match (find_parent(parent.as_u64(), position), position) {
        (Some(block), _) => {
            // The fragment is all that a lineage hash needs of its parent, so it can stand in for the whole.
            let fragment = SequenceHash::from(block.key.current_hash_fragment());
            Ok(Some(Start {
                position: block.key.position() + 1,
                parent: Some(block.sequence_hash.unwrap_or(fragment)),
                parent_is_known: block.sequence_hash.is_some(),
                spot: block.spot,
            }))
        }
        (None, Some(position)) => Ok(Some(Start {
            position,
            parent: Some(parent),
            ..Start::default()
        })),
        (None, None) => Err(Unresolved::UnknownParent(parent.as_u64())),
    }
}

/// Finds out what the blocks of an event are, which begin at `start`.
pub(super) fn resolve<'e>(
    stored: &'e StoredBlocks,
    settings: &NamespaceSettings,
    start: Option<Start>,
) -> Result<Resolved<'e>, Unresolved> {
    let names = stored.engine_hashes.as_deref();
    let (start, hashes) = match (&stored.names, start) {
        (BlockNames::Lineage(keys), _) => return Ok(Resolved::Keys(blocks_of(keys, names))),
        (BlockNames::Sequence { hashes, .. }, Some(start)) => (start, hashes),
        (BlockNames::Sequence { .. }, None) => return Ok(Resolved::Keys(Vec::new())),
    };
    let recomputes = settings.hashing == Hashing::Recompute && names.is_none();
    let content = stored.content.as_ref();
    let (hashes, names, is_foreign) = if recomputes {
        let chain = recompute(content, hashes.len(), start, settings)?;
        let names = hashes.iter().map(|hash| hash.as_u64()).collect();
        (Cow::Owned(chain), Some(Cow::Owned(names)), false)
    } else {
        let is_foreign = is_foreign_chain(content, start, hashes, settings);
        (
            Cow::Borrowed(hashes.as_slice()),
            names.map(Cow::Borrowed),
            is_foreign,
        )
    };
    let last = start.position.saturating_add(hashes.len() as u64 - 1);
    if last > Position::MAX.as_u64() || (start.position == 0 && start.parent.is_some()) {
        return Err(Unresolved::Rejected(RejectReason::PositionOutOfRange));
    }
    let is_named_by_hash = |names: &Cow<'_, [u64]>| names.iter().eq(hashes.iter().map(|hash| &hash.0));
    Ok(Resolved::Sequence(ResolvedSequence {
        start,
        names: names.filter(|names| !is_named_by_hash(names)),
        hashes,
        is_foreign,
    }))
}

fn blocks_of(keys: &[PositionalLineageHash], names: Option<&[u64]>) -> Vec<NewBlock> {
    let name_at = |index: usize| names.and_then(|names| names.get(index)).copied();
    let block = |(index, key): (usize, &PositionalLineageHash)| NewBlock {
        key: *key,
        sequence_hash: None,
        name: name_at(index),
    };
    keys.iter().enumerate().map(block).collect()
}

/// The contract's chain over the content of an event.
fn recompute(
    content: Option<&BlockContent>,
    blocks: usize,
    start: Start,
    settings: &NamespaceSettings,
) -> Result<Vec<SequenceHash>, Unresolved> {
    if start.parent.is_some() && !start.parent_is_known {
        return Err(Unresolved::Rejected(RejectReason::MissingContent));
    }
    let content = content.ok_or(Unresolved::Rejected(RejectReason::MissingContent))?;
    let hashes: Cow<'_, [BlockHash]> = match content {
        BlockContent::BlockHashes(hashes) if hashes.len() != blocks => {
            return Err(Unresolved::Rejected(RejectReason::ContentMismatch));
        }
        BlockContent::BlockHashes(hashes) => Cow::Borrowed(hashes),
        BlockContent::Tokens {
            tokens,
            lora_name,
            cache_salt,
        } => {
            let size = settings.block_size;
            if tokens.len() != blocks.saturating_mul(size.as_usize()) {
                return Err(Unresolved::Rejected(RejectReason::ContentMismatch));
            }
            let seed = HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref());
            block_hashes(tokens, size, seed).collect()
        }
    };
    let mut chain = Vec::with_capacity(hashes.len());
    chain.extend(sequence_hashes_after(start.parent, hashes.iter().copied()));
    Ok(chain)
}

/// Whether hashes are not the contract's chain. One block an event is enough: a foreign engine's never are.
fn is_foreign_chain(
    content: Option<&BlockContent>,
    start: Start,
    hashes: &[SequenceHash],
    settings: &NamespaceSettings,
) -> bool {
    let Some((last, before)) = hashes.split_last() else {
        return false;
    };
    let parent = before.last().copied().or(start.parent);
    if before.is_empty() && start.parent.is_some() && !start.parent_is_known {
        return false;
    }
    let block = match content {
        None => return false,
        Some(BlockContent::BlockHashes(hashes)) => hashes.last().copied(),
        Some(BlockContent::Tokens {
            tokens,
            lora_name,
            cache_salt,
        }) => {
            let size = settings.block_size.as_usize();
            if tokens.len() != hashes.len().saturating_mul(size) {
                // Another block size: queries by tokens cut the prompt elsewhere and cannot find these blocks.
                return true;
            }
            let seed = HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref());
            tokens
                .rchunks_exact(size)
                .next()
                .map(|tokens| block_hash(tokens, seed))
        }
    };
    block.is_some_and(|block| next_sequence_hash(parent, block) != *last)
}
