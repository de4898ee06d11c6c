//! Reuse at engines that hash overlapping pairs of tokens, as SGLang does with EAGLE.
//!
//! There a request computes the last two tokens of its prompt. So if the prompt's last block would have one token, the
//! request can reuse one block less than at other engines. The block before that one need not be resumable, so that a
//! second search finds the last resumable one.

use std::collections::HashMap;
use std::sync::Arc;

use kvatlas_core::index::{HolderRecord, Match, Matches, NearBlocks};

/// Second search for the holders that hash pairs of tokens, with the maximum that holds for them. All that an answer says of
/// such a holder is of this search: batches may have been applied since the first one.
pub(super) struct OfPairs {
    found: Matches,
    /// Numbers of leading blocks by the record of the holder: `matched_blocks`, `matched_blocks_max` and `usable_blocks`.
    /// `None` if the holder has no block any more.
    blocks: HashMap<*const HolderRecord, Option<[u32; 3]>>,
}

impl OfPairs {
    /// Searches again with `search` and the maximum `bound` if `whole` says that a request can reuse more than `bound`
    /// blocks at a holder for which `hashes_pairs` holds. Otherwise, `None`.
    pub(super) fn find(
        whole: &Matches,
        bound: u32,
        hashes_pairs: impl Fn(&HolderRecord) -> bool,
        search: impl FnOnce(u32) -> Matches,
    ) -> Option<Self> {
        let beyond = whole
            .holders()
            .filter(|found| found.usable_blocks > bound && hashes_pairs(found.holder));
        let mut blocks: HashMap<_, _> = beyond.map(|found| (Arc::as_ptr(found.holder), None)).collect();
        if blocks.is_empty() {
            return None;
        }
        let found = search(bound);
        for again in found.holders() {
            if let Some(blocks) = blocks.get_mut(&Arc::as_ptr(again.holder)) {
                *blocks = Some([
                    again.matched_blocks,
                    again.matched_blocks_max,
                    again.usable_blocks,
                ]);
            }
        }
        Some(Self { found, blocks })
    }

    /// Returns what is true of a holder that the first search has found. `None` if it has no block any more.
    pub(super) fn again<'a>(&self, found: Match<'a>) -> Option<Match<'a>> {
        match self.blocks.get(&Arc::as_ptr(found.holder)) {
            None => Some(found),
            Some(blocks) => {
                let [matched_blocks, matched_blocks_max, usable_blocks] = (*blocks)?;
                Some(Match {
                    holder: found.holder,
                    matched_blocks,
                    matched_blocks_max,
                    usable_blocks,
                })
            }
        }
    }

    /// Returns the numbers of a holder's leading blocks on the device, and on device and host, as
    /// [`Matches::near_blocks`] does. `whole` is the first search.
    pub(super) fn near_blocks(&self, whole: &Matches, holder: &HolderRecord) -> Option<[NearBlocks; 2]> {
        match self.blocks.contains_key(&std::ptr::from_ref(holder)) {
            true => self.found.near_blocks(holder),
            false => whole.near_blocks(holder),
        }
    }
}
