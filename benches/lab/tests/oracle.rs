//! Oracle for tests: a model of the index that stores the whole prefix of every block of each holder.

use std::collections::{BTreeMap, HashSet};

use crate::random::Random;
use kvatlas_core::hash::{BlockHash, SequenceHash, sequence_hashes};

use crate::{Depth, HolderNumber, PrefixBlock, PrefixQuery};

/// Block in the form that the oracle uses: the symbols of the whole prefix up to and including the block. Collisions
/// are impossible, because there are no hashes.
pub(super) type Prefix = Vec<u32>;

/// Returns the block hash that a symbol stands for.
pub(super) fn content(symbol: u32) -> BlockHash {
    BlockHash(Random::new(u64::from(symbol)).next())
}

/// Returns the blocks of a prompt, with their names.
pub(super) fn blocks(symbols: &[u32]) -> Vec<PrefixBlock> {
    let contents: Vec<BlockHash> = symbols.iter().copied().map(content).collect();
    let names = sequence_hashes(contents.iter().copied());
    contents
        .iter()
        .zip(names)
        .map(|(content, name)| PrefixBlock {
            content: *content,
            name,
        })
        .collect()
}

/// Returns the name of the last block of a prefix; `None` for an empty prefix.
pub(super) fn name(prefix: &[u32]) -> Option<SequenceHash> {
    blocks(prefix).last().map(|block| block.name)
}

pub(super) fn query(symbols: &[u32]) -> PrefixQuery {
    let contents: Vec<BlockHash> = symbols.iter().copied().map(content).collect();
    PrefixQuery::new(&contents)
}

/// Oracle: the blocks of each holder, and the number of refused stores.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    held: BTreeMap<HolderNumber, HashSet<Prefix>>,
    pub(super) refused_stores: u64,
}

impl Oracle {
    pub(super) fn holds(&self, holder: HolderNumber, prefix: &[u32]) -> bool {
        prefix.is_empty() || self.held.get(&holder).is_some_and(|held| held.contains(prefix))
    }

    /// Stores the blocks of `path` from position `from` on. Counts a refused store if the holder lacks the block
    /// before position `from`.
    pub(super) fn store(&mut self, holder: HolderNumber, path: &[u32], from: usize) {
        if from == path.len() {
            return;
        }
        if !self.holds(holder, &path[..from]) {
            self.refused_stores += 1;
            return;
        }
        let held = self.held.entry(holder).or_default();
        held.extend((from + 1..=path.len()).map(|end| path[..end].to_vec()));
    }

    pub(super) fn remove(&mut self, holder: HolderNumber, prefixes: &[Prefix]) {
        if let Some(held) = self.held.get_mut(&holder) {
            for prefix in prefixes {
                held.remove(prefix);
            }
        }
    }

    pub(super) fn clear(&mut self, holder: HolderNumber) {
        self.held.remove(&holder);
    }

    /// Returns the depths of all holders that have the first block, sorted by holder.
    pub(super) fn matches(&self, path: &[u32]) -> Vec<Depth> {
        let depth = |(holder, held): (&HolderNumber, &HashSet<Prefix>)| {
            let is_held = |end: &usize| held.contains(&path[..*end]);
            Depth::new(*holder, (1..=path.len()).take_while(is_held).count())
        };
        let depths = self.held.iter().map(depth);
        depths.filter(|depth| depth.matched_blocks > 0).collect()
    }

    /// Returns all blocks that a holder has, in no particular order.
    pub(super) fn prefixes(&self, holder: HolderNumber) -> Vec<Prefix> {
        self.held
            .get(&holder)
            .map_or_else(Vec::new, |held| held.iter().cloned().collect())
    }

    /// Returns the number of held blocks, summed over all holders.
    pub(super) fn held_blocks(&self) -> usize {
        self.held.values().map(HashSet::len).sum()
    }
}
