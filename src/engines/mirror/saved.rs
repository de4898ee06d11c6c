//! A mirror in a form that can be written down, so that the next process can give the same blocks to routers.

use kvatlas_core::hash::{HashSeed, SequenceHash, Token, block_hash, next_sequence_hash};
use serde::{Deserialize, Serialize};

use crate::translator::SavedError;

use super::nodes::{BlockState, Nodes, Slot};
use super::{Mirror, MirrorSettings};

/// One block of a saved mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct SavedNode {
    sequence: u64,
    /// Index in `blocks` of the block before this one; smaller than this block's own index. `None` at position 0.
    parent: Option<u32>,
    /// Index in `caches` of the block's salt and adapter.
    cache: u16,
    held: BlockState,
}

/// All blocks of a mirror, with their tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMirror {
    block_size: u32,
    has_special: bool,
    /// Combinations of salt and adapter, to which blocks refer by index.
    caches: Vec<(HashSeed, Option<String>)>,
    blocks: Vec<SavedNode>,
    /// The tokens of all blocks, in the order of `blocks`.
    tokens: Vec<Token>,
}

impl Mirror {
    /// Returns all blocks of the mirror in saved form. The caller must also call [`crate::Translator::save`], and
    /// must not translate a batch between the two calls: else mirror and translator would not fit together.
    pub fn save(&self) -> SavedMirror {
        let nodes = &self.nodes;
        let mut saved = SavedMirror {
            block_size: self.settings.block_size.as_u32(),
            has_special: self.settings.has_special,
            caches: nodes.caches(),
            blocks: Vec::with_capacity(nodes.len()),
            tokens: Vec::with_capacity(nodes.len() * self.settings.block_size.as_usize()),
        };
        let mut places = vec![None; nodes.places()];
        nodes.walk(|slot| {
            let (Some(block), Some(cache)) = (nodes.block(slot), nodes.cache_place(slot)) else {
                return;
            };
            let parent = nodes.parent(slot);
            let place = u32::try_from(saved.blocks.len()).ok();
            if let Some(own) = places.get_mut(slot.index()) {
                *own = place;
            }
            saved.tokens.extend_from_slice(block.tokens);
            saved.blocks.push(SavedNode {
                sequence: block.sequence.as_u64(),
                parent: parent.and_then(|parent| places.get(parent.index()).copied().flatten()),
                cache,
                held: nodes.held(slot),
            });
        });
        saved
    }

    /// Makes a mirror with the blocks of `saved`. The saved held blocks count as held again only after
    /// [`Self::regain_sight`]. Blocks for which the memory has no room are left out.
    ///
    /// # Errors
    ///
    /// [`SavedError`] if `saved` contradicts itself, or doesn't fit these settings. For this check, the blocks'
    /// hashes are computed from their tokens, except in a mirror that also keeps blocks with salts, adapters or
    /// images.
    pub fn restore(settings: MirrorSettings, saved: &SavedMirror) -> Result<Self, SavedError> {
        let (found, expected) = (saved.block_size, settings.block_size.as_u32());
        if found != expected {
            return Err(SavedError::BlockSize { found, expected });
        }
        if saved.has_special != settings.has_special {
            return Err(SavedError::Contradiction(
                "other blocks are published once more by now",
            ));
        }
        let mut mirror = Self::new(settings);
        restore_nodes(&mut mirror.nodes, saved)?;
        (mirror.is_all_due, mirror.has_unseen) = (true, true);
        Ok(mirror)
    }
}

fn restore_nodes(nodes: &mut Nodes, saved: &SavedMirror) -> Result<(), SavedError> {
    let size = saved.block_size as usize;
    if saved.blocks.len().checked_mul(size) != Some(saved.tokens.len()) {
        return Err(SavedError::Contradiction("blocks without tokens"));
    }
    let mut slots: Vec<Slot> = Vec::new();
    for (block, tokens) in saved.blocks.iter().zip(saved.tokens.chunks_exact(size)) {
        let parent = match block.parent {
            None => None,
            Some(place) => {
                let before = saved.blocks.get(place as usize).zip(slots.get(place as usize));
                let before = before.filter(|(parent, _)| parent.cache == block.cache);
                let (_, slot) = before.ok_or(SavedError::Contradiction("a block follows none"))?;
                Some(*slot)
            }
        };
        let cache = saved.caches.get(usize::from(block.cache));
        let (seed, lora) = cache.ok_or(SavedError::Contradiction("a block is of no cache"))?;
        let sequence = SequenceHash(block.sequence);
        if nodes.find(sequence).is_some() {
            return Err(SavedError::Contradiction("a block is there twice"));
        }
        // A block's hash covers its images, but the saved form has no images. So hashes are compared only if there are
        // none.
        let before = parent.and_then(|parent| nodes.sequence(parent));
        if !saved.has_special && !is_plain(sequence, before, *seed, tokens) {
            return Err(SavedError::Contradiction("a block has other tokens"));
        }
        let Ok(slot) = nodes.find_or_insert(sequence, parent, *seed, lora.as_deref(), tokens) else {
            // This mirror has less room than the saved one had. Without this block, the blocks after it would have no
            // parent.
            break;
        };
        nodes.set_held(slot, block.held.once_kept());
        slots.push(slot);
    }
    nodes.prune_all();
    Ok(())
}

/// Tells whether `sequence` is the hash of a block with these `tokens`, which follows the block `before` and has no
/// salt, adapter or image.
fn is_plain(sequence: SequenceHash, before: Option<SequenceHash>, seed: HashSeed, tokens: &[Token]) -> bool {
    seed == HashSeed::default() && sequence == next_sequence_hash(before, block_hash(tokens, seed))
}
