//! Design 5: the concurrent radix tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use hashbrown::{HashMap, HashSet};
use parking_lot::RwLock;

use super::prefix_tree::{HolderGroup, PrefixTree, SharedNode};
use kvatlas_core::hash::{BlockHash, SequenceHash};

use super::drain::Drain;
use super::pool::SharedIndex;
use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndexSize, PrefixQuery};

type NodeHolders = HashSet<HolderNumber>;

type NodesByName = HashMap<SequenceHash, SharedNode<BlockHash, NodeHolders>>;

impl HolderGroup for NodeHolders {
    type Holder = HolderNumber;

    fn add(&mut self, holder: HolderNumber) {
        self.insert(holder);
    }

    fn take(&mut self, holder: HolderNumber) {
        self.remove(&holder);
    }

    fn has_nobody(&self) -> bool {
        self.is_empty()
    }

    fn heap_bytes(&self) -> usize {
        self.allocation_size()
    }
}

/// Design 5: the radix tree of design 4 with a lock in every node, and with the holders' names in a concurrent map. The
/// design is made for a [`ThreadPool`](super::ThreadPool): each holder's events are applied by one thread, and queries
/// run on the calling thread.
///
/// # Promise
///
/// Exact at rest, as the [`RadixTree`](super::RadixTree) is. While events are applied, a query sees the blocks of its path at
/// different instants. If a holder that has a hole removes and stores blocks before the hole during a query, the answer can be
/// a depth that the holder never had.
///
/// # Locks
///
/// A holder's names are locked while an event of that holder is applied. The tree's locks are taken under that lock.
///
/// # Cost
///
/// The cost of design 4, and in addition two atomic writes for each block that a query passes. The writes are to the lock of
/// the block's node, which all queries of that prefix share.
#[derive(Debug, Default)]
pub struct ConcurrentRadixTree {
    tree: PrefixTree<BlockHash, NodeHolders>,
    names: DashMap<HolderNumber, RwLock<NodesByName>>,
    refused_stores: AtomicU64,
}

impl SharedIndex for ConcurrentRadixTree {
    fn store(&self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        if blocks.is_empty() {
            return;
        }
        let parent = match parent {
            None => Some(Arc::clone(self.tree.root())),
            Some(name) => self
                .names
                .get(&holder)
                .and_then(|names| names.read().get(&name).cloned()),
        };
        let Some(mut node) = parent else {
            self.refused_stores.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let names = self.names.entry(holder).or_default().downgrade();
        let mut names = names.write();
        for block in blocks {
            node = self.tree.enter(&node, block.content, holder);
            let before = names.insert(block.name, Arc::clone(&node));
            // If the name stood for another block, the holder leaves that block's node.
            if let Some(before) = before.filter(|before| !Arc::ptr_eq(before, &node)) {
                self.tree.leave(before, holder);
            }
        }
    }

    fn remove(&self, holder: HolderNumber, names: &[SequenceHash]) {
        let is_empty = {
            let Some(held) = self.names.get(&holder) else {
                return;
            };
            let mut held = held.write();
            for name in names {
                if let Some(node) = held.remove(name) {
                    self.tree.leave(node, holder);
                }
            }
            held.is_empty()
        };
        // Nobody else changes this holder, so it is empty still.
        if is_empty {
            self.names.remove(&holder);
        }
    }

    fn clear(&self, holder: HolderNumber) {
        let Some((_, held)) = self.names.remove(&holder) else {
            return;
        };
        for node in held.into_inner().into_values() {
            self.tree.leave(node, holder);
        }
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        let mut drain = Drain::default();
        let key = |depth: usize| query.blocks().get(depth).copied();
        self.tree.walk(key, |_, holders| drain.step(holders));
        drain.finish()
    }

    fn refused_stores(&self) -> u64 {
        self.refused_stores.load(Ordering::Relaxed)
    }

    fn sizes(&self) -> PrefixIndexSize {
        PrefixIndexSize {
            entries: usize::try_from(self.tree.len()).unwrap_or(usize::MAX),
            names: self.names.iter().map(|names| names.read().len()).sum(),
            holders: self.names.len(),
        }
    }
}
