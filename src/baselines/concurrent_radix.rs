//! Design 5: the concurrent radix tree.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use dashmap::DashMap;
use hashbrown::{HashMap, HashSet};
use parking_lot::RwLock;

use crate::hash::{BlockHash, SequenceHash};

use super::drain::Drain;
use super::pool::SharedIndex;
use super::prefix_index::{Block, Depth, HolderNumber, PrefixQuery, Sizes};

type SharedNode = Arc<Node>;

/// One block of the tree; the root stands before position 0.
#[derive(Debug, Default)]
struct Node {
    /// Its parent, and the content under which that knows it; the root has none.
    place: Option<(Weak<Node>, BlockHash)>,
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    children: HashMap<BlockHash, SharedNode>,
    holders: HashSet<HolderNumber>,
}

impl State {
    fn is_empty(&self) -> bool {
        self.holders.is_empty() && self.children.is_empty()
    }
}

impl Node {
    /// The parent, and the content under which that knows this node; none at the root, and when both have been erased.
    fn above(&self) -> Option<(SharedNode, BlockHash)> {
        let (parent, content) = self.place.as_ref()?;
        Some((parent.upgrade()?, *content))
    }
}

/// Design 5: design 4 with a lock in every node, and the holders' names in a concurrent map. Made to be put in a
/// [`ThreadPool`](super::ThreadPool): events on sticky threads, queries inline.
///
/// # Promise
///
/// Exact at rest, as the [`RadixTree`](super::RadixTree) is. While events are applied, a query sees the blocks of its path at
/// different instants: where a holder removes and stores in front of a hole meanwhile, its depth can be one that it never had.
///
/// # Locks
///
/// A node's lock is taken while its parent's is held, never the other way. A holder enters a node, and an empty node is erased,
/// under the lock of the parent; so no holder enters a node that is being erased. The node under which a holder stores cannot be
/// erased either: the holder is in it, and only the holder's own thread takes it out.
///
/// # Cost
///
/// As design 4, and two atomic writes a block that a query passes, to the lock of a node that all queries of that prefix share.
#[derive(Debug, Default)]
pub struct ConcurrentRadixTree {
    root: SharedNode,
    names: DashMap<HolderNumber, RwLock<HashMap<SequenceHash, SharedNode>>>,
    refused_stores: AtomicU64,
}

/// The child of `parent` with this content, made if it is not there, with `holder` among its holders.
fn enter(parent: &SharedNode, content: BlockHash, holder: HolderNumber) -> SharedNode {
    let above = parent.state.read();
    if let Some(child) = above.children.get(&content) {
        child.state.write().holders.insert(holder);
        return Arc::clone(child);
    }
    drop(above);
    let mut above = parent.state.write();
    let child = above.children.entry(content).or_insert_with(|| {
        Arc::new(Node {
            place: Some((Arc::downgrade(parent), content)),
            state: RwLock::default(),
        })
    });
    child.state.write().holders.insert(holder);
    Arc::clone(child)
}

/// Takes `holder` from a node, and erases it and its ancestors as far as they have neither holders nor children.
fn withdraw(mut node: SharedNode, holder: HolderNumber) {
    {
        let mut here = node.state.write();
        here.holders.remove(&holder);
        // Most nodes that are left have children or other holders, and their parents' locks are not needed.
        if !here.is_empty() {
            return;
        }
    }
    while let Some((parent, content)) = node.above() {
        let mut above = parent.state.write();
        if !node.state.read().is_empty() {
            return;
        }
        // Another thread may have erased it first, and another node may stand in its place.
        if !above
            .children
            .get(&content)
            .is_some_and(|child| Arc::ptr_eq(child, &node))
        {
            return;
        }
        above.children.remove(&content);
        if !above.is_empty() {
            return;
        }
        drop(above);
        node = parent;
    }
}

impl SharedIndex for ConcurrentRadixTree {
    fn store(&self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[Block]) {
        if blocks.is_empty() {
            return;
        }
        let parent = match parent {
            None => Some(Arc::clone(&self.root)),
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
            node = enter(&node, block.content, holder);
            let before = names.insert(block.name, Arc::clone(&node));
            // A name that moves leaves its old place.
            if let Some(before) = before.filter(|before| !Arc::ptr_eq(before, &node)) {
                withdraw(before, holder);
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
                    withdraw(node, holder);
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
            withdraw(node, holder);
        }
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        let mut drain = Drain::default();
        let mut node = Arc::clone(&self.root);
        for content in query.blocks() {
            let child = node.state.read().children.get(content).cloned();
            let Some(child) = child else {
                break;
            };
            if !drain.step(&child.state.read().holders) {
                break;
            }
            node = child;
        }
        drain.finish()
    }

    fn refused_stores(&self) -> u64 {
        self.refused_stores.load(Ordering::Relaxed)
    }

    fn sizes(&self) -> Sizes {
        let mut entries = 0;
        let mut pending = vec![Arc::clone(&self.root)];
        while let Some(node) = pending.pop() {
            let here = node.state.read();
            entries += here.children.len();
            pending.extend(here.children.values().cloned());
        }
        Sizes {
            entries,
            names: self.names.iter().map(|names| names.read().len()).sum(),
            holders: self.names.len(),
        }
    }
}

impl Drop for ConcurrentRadixTree {
    /// Node by node: a chain of nodes that drop one another would need a stack as deep as the longest prompt.
    fn drop(&mut self) {
        self.names.clear();
        let mut pending = vec![Arc::clone(&self.root)];
        while let Some(node) = pending.pop() {
            pending.extend(node.state.write().children.drain().map(|(_, child)| child));
        }
    }
}
