//! Resolving a stored event: finding the positions, hashes and names of its blocks, and the place of their parent.

use std::borrow::Cow;

use bytemuck::TransparentWrapper;

use crate::hash::{Position, PositionalLineageHash, SequenceHash, next_sequence_hash, sequence_hashes_after};
use crate::index::runs::RunWriter;
use crate::index::settings::{Hashing, NamespaceSettings};
use crate::wire::{BlockContent, BlockNames, StoredBlocks};

use super::applied::RejectReason;
use super::blocks::{NewBlock, Sequence, new_blocks};
use super::find::Start;
use super::marks::Marks;
use super::state::HolderState;

/// Reason why an event's blocks cannot be stored, or cannot be stored yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unresolved {
    UnknownParent(u64),
    Rejected(RejectReason),
}

/// Blocks of a stored event, with their hashes and names known.
#[derive(Debug)]
pub(super) enum Resolved<'e> {
    /// Blocks named by lineage hashes, in any order.
    Keys(Vec<NewBlock>),
    /// Consecutive blocks.
    Sequence(ResolvedSequence<'e>),
}

/// Consecutive blocks of a stored event. All their positions are in range.
#[derive(Debug)]
pub(super) struct ResolvedSequence<'e> {
    start: Start,
    /// Sequence hashes of the blocks in the index's chain.
    pub(super) hashes: Cow<'e, [SequenceHash]>,
    /// Engine's names for the blocks; `None` if the names are the sequence hashes.
    pub(super) names: Option<&'e [u64]>,
    /// Whether the hashes differ from the contract's chain over the event's content.
    pub(super) is_foreign: bool,
    /// Marks that tell which of the blocks are resumable.
    pub(super) marks: Marks<'e>,
}

impl ResolvedSequence<'_> {
    /// Returns the blocks as a sequence that can be stored in the runs. `kept` tells which of them the holder keeps.
    /// `None` if the block before the first block has no place.
    pub(super) fn placed<'a>(&'a self, kept: Option<&'a [bool]>) -> Option<Sequence<'a>> {
        (self.start.position == 0 || self.start.spot.is_some()).then(|| Sequence {
            parent: self.start.spot,
            // `resolve` has checked that the position is in range.
            position: u32::try_from(self.start.position).unwrap_or(u32::MAX),
            hashes: &self.hashes,
            names: self.all_names(),
            kept,
            marks: self.marks,
        })
    }

    /// Returns the blocks one by one.
    pub(super) fn blocks(&self) -> Vec<NewBlock> {
        let Start { position, parent, .. } = self.start;
        new_blocks(position, parent, &self.hashes, self.all_names(), self.marks)
    }

    /// Returns the engine's names for the blocks, also if the names are the hashes.
    fn all_names(&self) -> &[u64] {
        self.names
            .unwrap_or_else(|| SequenceHash::peel_slice(&self.hashes))
    }
}

impl HolderState {
    /// Returns where the consecutive blocks of an event start. Fails if the parent is unknown and the event gives no
    /// position.
    pub(super) fn start_of(&self, stored: &StoredBlocks, runs: &RunWriter<'_>) -> Result<Start, Unresolved> {
        let (parent, position) = match &stored.names {
            BlockNames::Sequence {
                parent: Some(parent),
                position,
                hashes,
            } if !hashes.is_empty() => (*parent, position.map(Position::as_u64)),
            _ => return Ok(Start::default()),
        };
        let absent = position.map(|position| Start {
            position,
            parent: Some(parent),
            ..Start::default()
        });
        let start = self.find_parent(parent.0, position, runs).or(absent);
        start.ok_or(Unresolved::UnknownParent(parent.0))
    }
}

/// Determines the hashes and names of an event's blocks. If the blocks are consecutive, the first block is at
/// `start`.
pub(super) fn resolve<'e>(
    stored: &'e StoredBlocks,
    settings: &NamespaceSettings,
    start: Start,
) -> Result<Resolved<'e>, Unresolved> {
    let (names, marks) = (stored.engine_hashes.as_deref(), Marks::of(&stored.resumable));
    let hashes = match &stored.names {
        BlockNames::Lineage(keys) => return Ok(Resolved::Keys(blocks_of(keys, names, marks))),
        BlockNames::Sequence { hashes, .. } if hashes.is_empty() => return Ok(Resolved::Keys(Vec::new())),
        BlockNames::Sequence { hashes, .. } => hashes,
    };
    let (content, given) = (stored.content.as_ref(), SequenceHash::peel_slice(hashes));
    let (hashes, names, is_foreign) = if settings.hashing == Hashing::Recompute && names.is_none() {
        let chain = recompute(content, hashes.len(), start, settings)?;
        (Cow::Owned(chain), Some(given), false)
    } else {
        let is_foreign = !settings.has_scheme && is_foreign_chain(content, start, hashes, settings);
        (Cow::Borrowed(hashes.as_slice()), names, is_foreign)
    };
    let last = start.position.saturating_add(hashes.len() as u64 - 1);
    if last > Position::MAX.as_u64() || (start.position == 0 && start.parent.is_some()) {
        return Err(Unresolved::Rejected(RejectReason::PositionOutOfRange));
    }
    let is_named_by_hash = |names: &&[u64]| *names == SequenceHash::peel_slice(&hashes);
    Ok(Resolved::Sequence(ResolvedSequence {
        start,
        names: names.filter(|names| !is_named_by_hash(names)),
        hashes,
        is_foreign,
        marks,
    }))
}

fn blocks_of(keys: &[PositionalLineageHash], names: Option<&[u64]>, marks: Marks<'_>) -> Vec<NewBlock> {
    let block = |((index, key), is_barred): ((usize, &PositionalLineageHash), bool)| NewBlock {
        key: *key,
        sequence_hash: None,
        name: names.and_then(|names| names.get(index)).copied(),
        is_barred,
    };
    keys.iter().enumerate().zip(marks.flags()).map(block).collect()
}

/// Computes the contract's hash chain from the content of an event.
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
    if !content.is_of(blocks, settings.block_size) {
        return Err(Unresolved::Rejected(RejectReason::ContentMismatch));
    }
    let hashes = content.hashes_from(0, settings.block_size);
    Ok(sequence_hashes_after(start.parent, hashes.iter().copied()).collect())
}

/// Whether `hashes` differ from the contract's chain over `content`. Only the last block is compared. That is enough:
/// if an engine hashes in another way, all its hashes differ.
fn is_foreign_chain(
    content: Option<&BlockContent>,
    start: Start,
    hashes: &[SequenceHash],
    settings: &NamespaceSettings,
) -> bool {
    let (Some((last, before)), Some(content)) = (hashes.split_last(), content) else {
        return false;
    };
    let parent = before.last().copied().or(start.parent);
    if before.is_empty() && start.parent.is_some() && !start.parent_is_known {
        return false;
    }
    if !content.is_of(hashes.len(), settings.block_size) {
        // The content has another block size. Queries by tokens then cut the prompt at other places, and cannot find
        // these blocks. An empty list of block hashes tells nothing.
        return !matches!(content, BlockContent::BlockHashes(hashes) if hashes.is_empty());
    }
    let block = content
        .hashes_from(before.len(), settings.block_size)
        .last()
        .copied();
    block.is_some_and(|block| next_sequence_hash(parent, block) != *last)
}
