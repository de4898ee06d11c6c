//! Design 3: the inverted index.

use hashbrown::{HashMap, HashSet};

use kvatlas_core::hash::{BlockHash, SequenceHash};

use super::drain::Drain;
use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};

/// Design 3, two maps: block hash → holders for queries, and holder → (sequence hash → block hash) for removals.
///
/// # Promise
///
/// The same as that of [`NestedDictionary`](super::NestedDictionary): answers are exact as long as a holder's
/// different blocks have different block hashes, and the parent of every stored block is held.
///
/// # Wrong by design
///
/// - **It conflates blocks of equal content**: the entry of a block hash has no positions or prefixes. So a holder of
///   `A B` matches both blocks of the query `B A`. A holder of the prompts `X B` and `A` matches both blocks of `A B`.
/// - **The first removal takes the content away.** The names of a holder's blocks are kept exactly. But the entry of a
///   content tells only that the holder has such a block, not how many. Removing one of two blocks with the same
///   content hides the other.
/// - **It does not look at parents**, so it refuses nothing.
///
/// # Cost
///
/// A query takes depth + holders steps: it follows the prompt once, and drops each holder once. Each position needs
/// one look-up in a table of all blocks.
#[derive(Debug, Default)]
pub struct InvertedIndex {
    holders_of: HashMap<BlockHash, HashSet<HolderNumber>>,
    names: HashMap<HolderNumber, HashMap<SequenceHash, BlockHash>>,
}

impl InvertedIndex {
    fn withdraw(&mut self, holder: HolderNumber, content: BlockHash) {
        if let Some(holders) = self.holders_of.get_mut(&content) {
            holders.remove(&holder);
            if holders.is_empty() {
                self.holders_of.remove(&content);
            }
        }
    }
}

impl PrefixIndex for InvertedIndex {
    fn store(&mut self, holder: HolderNumber, _parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        if blocks.is_empty() {
            return;
        }
        let names = self.names.entry(holder).or_default();
        for block in blocks {
            names.insert(block.name, block.content);
            self.holders_of.entry(block.content).or_default().insert(holder);
        }
    }

    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]) {
        for name in names {
            let Some(held) = self.names.get_mut(&holder) else {
                return;
            };
            let content = held.remove(name);
            if held.is_empty() {
                self.names.remove(&holder);
            }
            if let Some(content) = content {
                self.withdraw(holder, content);
            }
        }
    }

    fn clear(&mut self, holder: HolderNumber) {
        for content in self.names.remove(&holder).unwrap_or_default().into_values() {
            self.withdraw(holder, content);
        }
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        let mut drain = Drain::default();
        for content in query.blocks() {
            match self.holders_of.get(content) {
                Some(holders) if drain.step(holders) => {}
                _ => break,
            }
        }
        drain.finish()
    }

    fn refused_stores(&self) -> u64 {
        0
    }

    fn sizes(&self) -> PrefixIndexSize {
        PrefixIndexSize {
            entries: self.holders_of.len(),
            names: self.names.values().map(HashMap::len).sum(),
            holders: self.names.len(),
        }
    }
}
