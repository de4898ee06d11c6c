//! Design 1: the naive nested dictionary.

use hashbrown::HashMap;

use kvatlas_core::hash::{BlockHash, SequenceHash};

use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};

/// Design 1: holder → (block hash → sequence hash).
///
/// # Promise
///
/// Exact as long as a holder's different blocks have different block hashes, and the parent of every stored block is
/// held.
///
/// # Wrong by design
///
/// - **It conflates blocks of equal content.** A query matches all blocks of these contents, in any order and after any
///   prefix. A holder of `A B` matches both blocks of the query `B A`.
/// - **A content has one name.** If a holder stores several blocks of one content, only the name of the last one is
///   kept. A removal by an earlier name finds nothing. A removal by the last name removes the content, although the
///   holder still has it at another place.
/// - **It does not look at parents**, so it refuses nothing.
///
/// # Cost
///
/// A query takes depth × holders steps. Removing a block takes a scan of all blocks of its holder.
#[derive(Debug, Default)]
pub struct NestedDictionary {
    holders: HashMap<HolderNumber, HashMap<BlockHash, SequenceHash>>,
}

impl PrefixIndex for NestedDictionary {
    fn store(&mut self, holder: HolderNumber, _parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        if blocks.is_empty() {
            return;
        }
        let held = self.holders.entry(holder).or_default();
        held.extend(blocks.iter().map(|block| (block.content, block.name)));
    }

    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]) {
        let Some(held) = self.holders.get_mut(&holder) else {
            return;
        };
        for name in names {
            held.retain(|_, other| other != name);
        }
        if held.is_empty() {
            self.holders.remove(&holder);
        }
    }

    fn clear(&mut self, holder: HolderNumber) {
        self.holders.remove(&holder);
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        let depths = self.holders.iter().map(|(holder, held)| {
            let is_held = |content: &&BlockHash| held.contains_key(*content);
            Depth::new(*holder, query.blocks().iter().take_while(is_held).count())
        });
        depths.filter(|depth| depth.matched_blocks > 0).collect()
    }

    fn refused_stores(&self) -> u64 {
        0
    }

    fn sizes(&self) -> PrefixIndexSize {
        let entries = self.holders.values().map(HashMap::len).sum();
        PrefixIndexSize {
            entries,
            names: entries,
            holders: self.holders.len(),
        }
    }
}
