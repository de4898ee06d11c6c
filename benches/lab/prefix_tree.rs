//! A concurrent radix tree of blocks. Every node has a lock, and queries follow one pointer for each block.
//!
//! A node is a block. It has its children, by key, and its holders. It exists as long as it has holders or children.
//! Look-ups, and changes of different holders, can run at the same time.
//!
//! # Locks
//!
//! A thread may take a node's lock while it holds the lock of the node's parent, but never the other way round. Whoever
//! adds a holder to a node, or erases an empty node, has the lock of the node's parent. So no holder enters a node that
//! is being erased. While a holder enters a node, the node's parent cannot be erased either: the holder is in the
//! parent, and only the writer of that holder removes it from there. (The root is never erased.) A walk holds one lock
//! at a time, and only while it reads a node's holders and finds one child.
//!
//! # What a walk sees
//!
//! A walk reads the nodes one after another, from the root on, each at a different instant. Suppose that a holder
//! enters parents before children and leaves children before parents. Then at every instant, the nodes that the holder
//! is in form whole paths from the root. Suppose further that a walk finds the holder in the first k nodes of the
//! walk's path and not in the next node. Then the holder's depth on that path was
//!
//! - at least k when the walk read the k-th node, because the holder was in that node;
//! - at most k at a later instant: when the walk read the next node, or did not find it among the children of the k-th
//!   node. If one of these two nodes was erased during the walk, the instant is that of the erasure, when no holder was
//!   in the node.
//!
//! Since the depth changes by one node at a time, it was exactly k in between. So the walk's answer is exact, per
//! holder, at some point between its start and its end.

use std::fmt;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

mod children;

use children::NodeChildren;

/// The holders of one node.
pub(crate) trait HolderGroup: Default {
    /// Type that identifies one holder.
    type Holder: Copy;

    /// Adds `holder`, if it is not in the group.
    fn add(&mut self, holder: Self::Holder);

    /// Removes `holder`, if it is in the group.
    fn take(&mut self, holder: Self::Holder);

    /// Whether the group has no holder.
    fn has_nobody(&self) -> bool;

    /// Number of bytes that the group takes on the heap, in addition to its own size.
    fn heap_bytes(&self) -> usize;
}

/// A node, shared by the tree and the tables of each holder's nodes.
pub(crate) type SharedNode<K, G> = Arc<TreeNode<K, G>>;

/// Node of the tree: one block. The root is no block, and comes before position 0.
pub(crate) struct TreeNode<K, G> {
    /// Parent of the node, and the key of the node in its parent. `None` for the root.
    place: Option<(Weak<Self>, K)>,
    state: RwLock<NodeState<K, G>>,
}

struct NodeState<K, G> {
    children: NodeChildren<K, G>,
    holders: G,
}

impl<K: Copy + Eq + Hash, G: HolderGroup> NodeState<K, G> {
    fn new() -> Self {
        Self {
            children: NodeChildren::default(),
            holders: G::default(),
        }
    }

    fn is_empty(&self) -> bool {
        self.holders.has_nobody() && self.children.is_empty()
    }

    fn heap_bytes(&self) -> usize {
        self.children.heap_bytes() + self.holders.heap_bytes()
    }
}

impl<K: Copy + Eq + Hash, G: HolderGroup> TreeNode<K, G> {
    fn new(place: Option<(Weak<Self>, K)>) -> Self {
        Self {
            place,
            state: RwLock::new(NodeState::new()),
        }
    }

    /// Returns the parent, and the key of this node in its parent. `None` for the root, and if this node and its
    /// parent have been erased.
    fn above(&self) -> Option<(SharedNode<K, G>, K)> {
        let (parent, key) = self.place.as_ref()?;
        Some((parent.upgrade()?, *key))
    }
}

/// A concurrent radix tree of blocks. The module's documentation has its contract.
pub(crate) struct PrefixTree<K: Copy + Eq + Hash, G: HolderGroup> {
    root: SharedNode<K, G>,
    /// Number of nodes, not counting the root.
    nodes: AtomicU64,
    /// Number of bytes that the tables and the holders of the nodes take on the heap. The nodes' own size is not
    /// included.
    heap_bytes: AtomicU64,
}

impl<K: Copy + Eq + Hash, G: HolderGroup> Default for PrefixTree<K, G> {
    fn default() -> Self {
        Self {
            root: Arc::new(TreeNode::new(None)),
            nodes: AtomicU64::new(0),
            heap_bytes: AtomicU64::new(0),
        }
    }
}

impl<K: Copy + Eq + Hash, G: HolderGroup> PrefixTree<K, G> {
    /// Number of bytes of a node without its tables: its own size and two reference counts.
    const NODE_BYTES: u64 = (size_of::<TreeNode<K, G>>() + 2 * size_of::<usize>()) as u64;

    /// Returns the root, which comes before all blocks at position 0. No holder enters the root.
    pub(crate) fn root(&self) -> &SharedNode<K, G> {
        &self.root
    }

    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that the blocks take.
    pub(crate) fn bytes(&self) -> u64 {
        self.len() * Self::NODE_BYTES + self.heap_bytes.load(Ordering::Relaxed)
    }

    /// Calls `change` with the state of a node, and updates the sum of the nodes' memory by the difference that this
    /// makes.
    fn change<R>(&self, state: &mut NodeState<K, G>, change: impl FnOnce(&mut NodeState<K, G>) -> R) -> R {
        let before = state.heap_bytes();
        let result = change(state);
        let after = state.heap_bytes();
        if before != after {
            // The difference wraps if memory shrinks, and the sum comes out right.
            let grown = (after as u64).wrapping_sub(before as u64);
            self.heap_bytes.fetch_add(grown, Ordering::Relaxed);
        }
        result
    }

    /// Adds `holder` to the child `key` of `parent`, and returns the child. Makes the child if it is missing. The
    /// holder must be in `parent`, unless `parent` is the root.
    pub(crate) fn enter(&self, parent: &SharedNode<K, G>, key: K, holder: G::Holder) -> SharedNode<K, G> {
        let above = parent.state.read();
        if let Some(child) = above.children.get(&key) {
            self.change(&mut child.state.write(), |state| state.holders.add(holder));
            return Arc::clone(child);
        }
        drop(above);
        let mut above = parent.state.write();
        // Another thread may have made the child meanwhile.
        let child = above.children.get(&key).cloned().unwrap_or_else(|| {
            let child = Arc::new(TreeNode::new(Some((Arc::downgrade(parent), key))));
            self.nodes.fetch_add(1, Ordering::Relaxed);
            self.change(&mut above, |above| above.children.insert(key, Arc::clone(&child)));
            child
        });
        self.change(&mut child.state.write(), |state| state.holders.add(holder));
        child
    }

    /// Removes `holder` from `node`. Then erases the node, and each ancestor in turn, as long as it has neither
    /// holders nor children.
    pub(crate) fn leave(&self, mut node: SharedNode<K, G>, holder: G::Holder) {
        {
            let mut here = node.state.write();
            self.change(&mut here, |here| here.holders.take(holder));
            // Most nodes that are left have children or other holders, and their parents' locks are not needed.
            if !here.is_empty() {
                return;
            }
        }
        while let Some((parent, key)) = node.above() {
            let mut above = parent.state.write();
            if !node.state.read().is_empty() {
                return;
            }
            // Another thread may have erased the node meanwhile, and made another node in its place.
            if !above
                .children
                .get(&key)
                .is_some_and(|child| Arc::ptr_eq(child, &node))
            {
                return;
            }
            self.change(&mut above, |above| above.children.remove(&key));
            self.nodes.fetch_sub(1, Ordering::Relaxed);
            if !above.is_empty() {
                return;
            }
            drop(above);
            node = parent;
        }
    }

    /// Follows a path from the root. `key` returns the key at each depth, from 0, up to the end of the path. At each
    /// node, `visit` gets the number of blocks of the path so far, and the node's holders. The walk continues as long
    /// as `visit` returns true and there is a next node.
    pub(crate) fn walk(
        &self,
        mut key: impl FnMut(usize) -> Option<K>,
        mut visit: impl FnMut(usize, &G) -> bool,
    ) {
        let Some(first) = key(0) else { return };
        let mut child = self.root.state.read().children.get(&first).cloned();
        let mut depth = 0;
        while let Some(node) = child {
            depth += 1;
            // The key is asked for before the lock is taken, since hashes may have to be computed for it.
            let next = key(depth);
            let state = node.state.read();
            if !visit(depth, &state.holders) {
                return;
            }
            child = next.and_then(|key| state.children.get(&key).cloned());
        }
    }
}

impl<K: Copy + Eq + Hash, G: HolderGroup> Drop for PrefixTree<K, G> {
    /// Drops the nodes one by one. If nodes dropped their children recursively, the stack would have to be as deep as
    /// the longest prompt.
    fn drop(&mut self) {
        let mut pending = vec![Arc::clone(&self.root)];
        while let Some(node) = pending.pop() {
            pending.extend(node.state.write().children.take());
        }
    }
}

impl<K, G> fmt::Debug for TreeNode<K, G> {
    /// Writes the name of the type only. The nodes below may be many levels deep, so they are not written.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TreeNode").finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash, G: HolderGroup> fmt::Debug for PrefixTree<K, G> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PrefixTree")
            .field("nodes", &self.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
