//! The full state of a holder, for a resync.

use hashbrown::HashMap;

use kvatlas_core::hash::SequenceHash;

use super::Translator;
use super::block::Block;
use super::output::Translation;
use super::tiers::TierIndex;

/// Index that means "no block".
const NONE: usize = usize::MAX;

impl Translator {
    /// Appends to `output` all blocks that the holder has, as stored events only: tier by tier, parents before children.
    ///
    /// Takes time and memory in proportion to the held blocks.
    pub fn full_state(&self, output: &mut Translation) {
        for tier in TierIndex::ALL {
            let blocks: Vec<(Block, bool)> = self.chain.published(tier).collect();
            let mut flags = Vec::with_capacity(blocks.len());
            output.seal();
            let begun = output.mark();
            for (block, is_resumable) in in_order(&blocks) {
                output.push_stored(tier.tier(), block);
                flags.push(*is_resumable);
            }
            let mut flags = flags.into_iter();
            output.set_resumable(begun, |_, _| flags.next().unwrap_or_default());
        }
    }
}

/// The blocks, parents before children, each chain in one piece as far as possible.
fn in_order(blocks: &[(Block, bool)]) -> impl Iterator<Item = &(Block, bool)> {
    let places: HashMap<SequenceHash, usize> = blocks
        .iter()
        .enumerate()
        .map(|(place, (block, _))| (block.sequence, place))
        .collect();
    let mut first_child = vec![NONE; blocks.len()];
    let mut next_sibling = vec![NONE; blocks.len()];
    let mut ready = Vec::new();
    for (place, (block, _)) in blocks.iter().enumerate() {
        let parent = block.parent.and_then(|parent| places.get(&parent).copied());
        match parent.and_then(|parent| first_child.get_mut(parent)) {
            Some(first) => {
                let before = std::mem::replace(first, place);
                if let Some(next) = next_sibling.get_mut(place) {
                    *next = before;
                }
            }
            // The parent of this block is not held in this tier.
            None => ready.push(place),
        }
    }
    std::iter::from_fn(move || {
        let place = ready.pop()?;
        // The children come next. The last child is pushed first, so that the first child is taken at once.
        let mut child = first_child.get(place).copied().unwrap_or(NONE);
        while child != NONE {
            ready.push(child);
            child = next_sibling.get(child).copied().unwrap_or(NONE);
        }
        blocks.get(place)
    })
}
