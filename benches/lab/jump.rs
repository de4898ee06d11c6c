//! Design 6: the positional index with jump search.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use hashbrown::{HashMap, HashSet};
use parking_lot::RwLock;

use kvatlas_core::hash::{BlockHash, SequenceHash};

use super::jump_search;
use super::pool::SharedIndex;
use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndexSize, PrefixQuery};
use super::sequence_entry::SeqEntry;

/// Default number of blocks that a search jumps over. It is the number of the published design.
pub const DEFAULT_JUMP_SIZE: NonZeroUsize = NonZeroUsize::new(32).expect("32 is not zero");

/// Design 6, two maps: (position, block hash) → [`SeqEntry`] for queries, and holder → (sequence hash → position and
/// block hash) for events. The design is made for a [`ThreadPool`](super::ThreadPool).
///
/// # Promise
///
/// Exact at rest, if the sequence hashes are the contract's chain over the block hashes: a search computes them from
/// the query. If they are another chain, a prompt is not found. While events are applied, a query reads the blocks at
/// different instants.
///
/// # What is mended
///
/// - The published search compares how many holders two positions have. The numbers can be equal although some holders
///   have dropped out, because others have joined. Here the *sets* of holders are compared.
/// - The published search assumes that the prefix of an entry is the query's prefix, without comparing hashes. So it
///   also matches blocks of equal content after another prefix. Here such an entry is believed only during the search.
///   Then the rolling hash is computed up to the deepest found block, and **the prefix of every answer is verified**.
///   If a holder has another prefix, its depth is searched for once more, and this search compares hashes at every
///   step.
/// - The published search can count blocks after a holder's hole. Here the holders with holes are known, and their
///   depths are found block by block.
///
/// # Cost
///
/// A query takes depth / jump look-ups, a scan of one jump for each holder that drops out, and a rolling hash of 4 ns
/// for each matched block. A miss needs no hash.
#[derive(Debug)]
pub struct JumpIndex {
    pub(super) entries: DashMap<(usize, BlockHash), SeqEntry>,
    held: DashMap<HolderNumber, RwLock<HeldBlocks>>,
    /// Holders that have any block whose parent they do not have.
    pub(super) holed: RwLock<HashSet<HolderNumber>>,
    pub(super) jump_size: usize,
    refused_stores: AtomicU64,
}

/// Position and content of a block that a holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeldBlock {
    position: usize,
    content: BlockHash,
    parent: Option<SequenceHash>,
}

/// Blocks that one holder has, by name.
#[derive(Debug, Default)]
struct HeldBlocks {
    blocks: HashMap<SequenceHash, HeldBlock>,
    /// Number of children that the holder has of each block, by the block's name. The holder need not have the block
    /// itself.
    children: HashMap<SequenceHash, usize>,
    /// Number of blocks above position 0 whose parent is not held.
    orphans: usize,
}

impl HeldBlocks {
    fn insert(&mut self, name: SequenceHash, held: HeldBlock) {
        self.orphans -= self.children.get(&name).copied().unwrap_or_default();
        if let Some(parent) = held.parent {
            *self.children.entry(parent).or_default() += 1;
            self.orphans += usize::from(!self.blocks.contains_key(&parent));
        }
        self.blocks.insert(name, held);
    }

    fn remove(&mut self, name: SequenceHash) -> Option<HeldBlock> {
        let held = self.blocks.remove(&name)?;
        if let Some(parent) = held.parent {
            self.orphans -= usize::from(!self.blocks.contains_key(&parent));
            if let Some(children) = self.children.get_mut(&parent) {
                *children -= 1;
                if *children == 0 {
                    self.children.remove(&parent);
                }
            }
        }
        self.orphans += self.children.get(&name).copied().unwrap_or_default();
        Some(held)
    }
}

impl Default for JumpIndex {
    fn default() -> Self {
        Self::new(DEFAULT_JUMP_SIZE)
    }
}

impl JumpIndex {
    /// Makes an empty index whose searches jump over `jump_size` blocks.
    pub fn new(jump_size: NonZeroUsize) -> Self {
        Self {
            entries: DashMap::new(),
            held: DashMap::new(),
            holed: RwLock::default(),
            jump_size: jump_size.get(),
            refused_stores: AtomicU64::new(0),
        }
    }

    fn publish(&self, holder: HolderNumber, name: SequenceHash, held: HeldBlock) {
        self.entries
            .entry((held.position, held.content))
            .or_insert_with(|| SeqEntry::vacant(name))
            .insert(name, holder);
    }

    /// Removes the holder from a block's entry. If the entry has no holders left, erases it.
    fn withdraw(&self, holder: HolderNumber, name: SequenceHash, held: HeldBlock) {
        if let Entry::Occupied(mut entry) = self.entries.entry((held.position, held.content))
            && entry.get_mut().remove(name, holder)
        {
            entry.remove();
        }
    }

    fn note_holes(&self, holder: HolderNumber, has_holes: bool) {
        // Most events do not change whether the holder has holes. For them the lock for reading is enough, as searches
        // hold it.
        if self.holed.read().contains(&holder) == has_holes {
            return;
        }
        let mut holed = self.holed.write();
        if has_holes {
            holed.insert(holder);
        } else {
            holed.remove(&holder);
        }
    }

    /// Returns the position of the block after `parent`. `None` if the holder does not have `parent`.
    fn next_position(&self, holder: HolderNumber, parent: Option<SequenceHash>) -> Option<usize> {
        let Some(parent) = parent else {
            return Some(0);
        };
        let held = self.held.get(&holder)?;
        let parent = held.read().blocks.get(&parent).map(|held| held.position);
        parent.map(|position| position + 1)
    }
}

impl SharedIndex for JumpIndex {
    fn store(&self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        if blocks.is_empty() {
            return;
        }
        let Some(first) = self.next_position(holder, parent) else {
            self.refused_stores.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let held_blocks = self.held.entry(holder).or_default().downgrade();
        let mut held_blocks = held_blocks.write();
        let mut parent = parent;
        for (position, block) in (first..).zip(blocks) {
            let held = HeldBlock {
                position,
                content: block.content,
                parent,
            };
            parent = Some(block.name);
            if held_blocks.blocks.get(&block.name) == Some(&held) {
                continue;
            }
            // If the name stood for another block, the holder is removed from that block's entry.
            if let Some(before) = held_blocks.remove(block.name) {
                self.withdraw(holder, block.name, before);
            }
            held_blocks.insert(block.name, held);
            self.publish(holder, block.name, held);
        }
        self.note_holes(holder, held_blocks.orphans > 0);
    }

    fn remove(&self, holder: HolderNumber, names: &[SequenceHash]) {
        let is_empty = {
            let Some(held_blocks) = self.held.get(&holder) else {
                return;
            };
            let mut held_blocks = held_blocks.write();
            for name in names {
                if let Some(held) = held_blocks.remove(*name) {
                    // The hole is noted before the block is withdrawn, so that no search at rest jumps over the hole.
                    self.note_holes(holder, held_blocks.orphans > 0);
                    self.withdraw(holder, *name, held);
                }
            }
            held_blocks.blocks.is_empty()
        };
        // Nobody else changes this holder, so it is empty still.
        if is_empty {
            self.held.remove(&holder);
        }
    }

    fn clear(&self, holder: HolderNumber) {
        let Some((_, held_blocks)) = self.held.remove(&holder) else {
            return;
        };
        for (name, held) in held_blocks.into_inner().blocks {
            self.withdraw(holder, name, held);
        }
        self.note_holes(holder, false);
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        jump_search::find(self, query.blocks())
    }

    fn refused_stores(&self) -> u64 {
        self.refused_stores.load(Ordering::Relaxed)
    }

    fn sizes(&self) -> PrefixIndexSize {
        PrefixIndexSize {
            entries: self.entries.len(),
            names: self.held.iter().map(|held| held.read().blocks.len()).sum(),
            holders: self.held.len().max(self.holed.read().len()),
        }
    }
}
