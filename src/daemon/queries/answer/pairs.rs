//! Reuse at engines that hash overlapping pairs of tokens, as SGLang does with EAGLE.
//!
//! There a request computes the last two tokens of its prompt. So if the prompt's last block would have one token, the
//! request can reuse one block less than at other engines. The block before that one need not be resumable, so that a
//! second search finds the last resumable one.

use std::collections::HashMap;
use std::sync::Arc;

use kvatlas_core::index::{HolderRecord, Matches, NearBlocks};

/// Second search for the holders that hash pairs of tokens, with the maximum that holds for them.
pub(super) struct OfPairs {
    found: Matches,
    /// Number of blocks that a request can reuse, by the record of the holder.
    usable: HashMap<*const HolderRecord, u32>,
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
        let mut usable: HashMap<_, _> = beyond.map(|found| (Arc::as_ptr(found.holder), 0)).collect();
        if usable.is_empty() {
            return None;
        }
        let found = search(bound);
        for again in found.holders() {
            if let Some(usable) = usable.get_mut(&Arc::as_ptr(again.holder)) {
                *usable = again.usable_blocks;
            }
        }
        Some(Self { found, usable })
    }

    /// Returns the number of blocks that a request can reuse at `holder`. `None` if the first search has it right.
    pub(super) fn usable(&self, holder: &HolderRecord) -> Option<u32> {
        self.usable.get(&std::ptr::from_ref(holder)).copied()
    }

    /// Returns the numbers of a holder's leading blocks on the device, and on device and host, as
    /// [`Matches::near_blocks`] does.
    pub(super) fn near_blocks(&self, holder: &HolderRecord) -> Option<[NearBlocks; 2]> {
        self.found.near_blocks(holder)
    }
}
