//! Jump search of design 6.

use hashbrown::HashSet;

use kvatlas_core::hash::{BlockHash, SequenceHash, next_sequence_hash};

use super::jump::JumpIndex;
use super::prefix_index::{Depth, HolderNumber};
use super::sequence_entry::SeqEntry;

type HolderNumbers = HashSet<HolderNumber>;

/// Degree to which a search relies on a [`SeqEntry`] that has a single sequence hash. The entry's blocks may follow
/// another prefix than the query's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// The search assumes, without comparing hashes, that the entry's blocks follow the query's prefix. It may find
    /// holders of another prefix, but misses no holder.
    Believe,
    /// The search compares the entry's sequence hash with the query's.
    Verify,
}

/// State of one search: the query, and the query's sequence hashes up to the last position at which one was needed.
struct JumpSearch<'a> {
    index: &'a JumpIndex,
    blocks: &'a [BlockHash],
    rolled: Vec<SequenceHash>,
    depths: Vec<Depth>,
}

/// Returns the holders of leading blocks of a prompt, each with the number of leading blocks that it holds.
pub(super) fn find(index: &JumpIndex, blocks: &[BlockHash]) -> Vec<Depth> {
    if blocks.is_empty() {
        return Vec::new();
    }
    let mut search = JumpSearch {
        index,
        blocks,
        rolled: Vec::new(),
        depths: Vec::new(),
    };
    let mut active = search.look(0, Trust::Verify, |holders| holders.cloned().unwrap_or_default());
    let holed = search.take_holed(&mut active);
    search.walk(holed);
    search.jump(active, Trust::Believe);
    let failed = search.take_unverified();
    if !failed.is_empty() {
        search.jump(failed, Trust::Verify);
    }
    search.depths
}

impl JumpSearch<'_> {
    /// Returns the query's sequence hash at `position`. Computes the hashes up to there that have not been computed
    /// yet.
    fn name(&mut self, position: usize) -> Option<SequenceHash> {
        let missing = self.blocks.get(self.rolled.len()..=position).unwrap_or_default();
        for block in missing {
            self.rolled
                .push(next_sequence_hash(self.rolled.last().copied(), *block));
        }
        self.rolled.get(position).copied()
    }

    /// Calls `view` with the holders of the query's block at `position`, or with `None` if there is no such block. Returns the
    /// result of `view`.
    fn look<T>(
        &mut self,
        position: usize,
        trust: Trust,
        view: impl FnOnce(Option<&HolderNumbers>) -> T,
    ) -> T {
        let index = self.index;
        let Some(content) = self.blocks.get(position).copied() else {
            return view(None);
        };
        let entry = index.entries.get(&(position, content));
        let name = match entry.as_deref() {
            None => return view(None),
            Some(SeqEntry::Single(_, holders)) if trust == Trust::Believe => return view(Some(holders)),
            Some(_) => self.name(position),
        };
        let holders = entry.as_deref().zip(name);
        view(holders.and_then(|(entry, name)| entry.holders(name)))
    }

    fn take_holed(&self, active: &mut HolderNumbers) -> HolderNumbers {
        let holed = self.index.holed.read();
        if holed.is_empty() {
            return HolderNumbers::new();
        }
        active.extract_if(|holder| holed.contains(holder)).collect()
    }

    fn note(&mut self, holders: impl IntoIterator<Item = HolderNumber>, matched_blocks: usize) {
        let depths = holders
            .into_iter()
            .map(|holder| Depth::new(holder, matched_blocks));
        self.depths.extend(depths);
    }

    /// Splits `active` at the block at `position`: keeps the holders that have the block, and returns the others.
    fn split_missing(&mut self, position: usize, trust: Trust, active: &mut HolderNumbers) -> HolderNumbers {
        self.look(position, trust, |here| match here {
            None => std::mem::take(active),
            Some(here) if active.iter().all(|holder| here.contains(holder)) => HolderNumbers::new(),
            Some(here) => active.extract_if(|holder| !here.contains(holder)).collect(),
        })
    }

    /// Finds the depths of holders with holes, block by block. `active` are these holders; each has the block at
    /// position 0.
    fn walk(&mut self, mut active: HolderNumbers) {
        for position in 1..self.blocks.len() {
            if active.is_empty() {
                return;
            }
            let missing = self.split_missing(position, Trust::Verify, &mut active);
            self.note(missing, position);
        }
        self.note(active, self.blocks.len());
    }

    /// Finds the depths of holders without holes, jump by jump. `active` are these holders; each has the block at
    /// position 0.
    fn jump(&mut self, mut active: HolderNumbers, trust: Trust) {
        let last = self.blocks.len() - 1;
        let mut current = 0;
        while current < last && !active.is_empty() {
            let next = (current + self.index.jump_size).min(last);
            // Sets are compared, not counts: the active holders that are not in the entry are missing.
            let mut missing = self.split_missing(next, trust, &mut active);
            for position in current + 1..=next {
                if missing.is_empty() {
                    break;
                }
                let dropped = self.split_missing(position, trust, &mut missing);
                self.note(dropped, position);
            }
            // The remaining holders have stored the block at `next` again meanwhile, so they continue the search.
            active.extend(missing);
            current = next;
        }
        self.note(active, self.blocks.len());
    }

    /// Takes wrong depths out of the result, and returns their holders. A depth is wrong if its last block follows
    /// another prefix than the query's.
    ///
    /// The other depths are right. A holder without holes that has the query's block at `depth - 1` has all blocks
    /// before it. The search has also found that the holder does not have the query's content at `depth`.
    fn take_unverified(&mut self) -> HolderNumbers {
        let mut depths = std::mem::take(&mut self.depths);
        depths.sort_unstable_by_key(|depth| depth.matched_blocks);
        let mut failed = HolderNumbers::new();
        for group in depths.chunk_by(|one, other| one.matched_blocks == other.matched_blocks) {
            let last = group
                .first()
                .map_or(0, |depth| depth.matched_blocks as usize)
                .saturating_sub(1);
            let mut holders: HolderNumbers = group.iter().map(|depth| depth.holder).collect();
            failed.extend(self.split_missing(last, Trust::Verify, &mut holders));
            self.note(holders, last + 1);
        }
        failed
    }
}
