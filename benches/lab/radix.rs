//! Design 4: the radix tree.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use hashbrown::{HashMap, HashSet};

use kvatlas_core::hash::{BlockHash, SequenceHash};

use super::drain::Drain;
use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};

type SharedRadixNode = Rc<RefCell<RadixNode>>;

/// Node of the tree: one block. The root is no block, and comes before position 0.
#[derive(Debug, Default)]
struct RadixNode {
    /// Parent of the node, and the content of the node, which is its key in the parent. `None` for the root.
    place: Option<(Weak<RefCell<RadixNode>>, BlockHash)>,
    children: HashMap<BlockHash, SharedRadixNode>,
    holders: HashSet<HolderNumber>,
}

/// Design 4: a tree in which each node has its holders, and its children by block hash. A separate map holder →
/// (sequence hash → node) is for events.
///
/// # Promise
///
/// Exact for any kind of sequence hashes. The design uses them only as names. So the hashes of any engine will do, if
/// each holder has only one name for a block. Blocks of equal content share a node only if they have the same parent,
/// and then they are the same block.
///
/// # What is mended
///
/// When a node loses its last holder, the published tree drops the node's children. That loses blocks that are still
/// held after a hole, so that they do not match when the hole is filled. Here a node stays as long as it has holders
/// or children, and nodes that a removal empties are erased upwards.
///
/// # Cost
///
/// A query follows one pointer for each block, which is probably a cache miss, and reads the holders of every block.
/// The tree can be used by one thread only.
#[derive(Debug)]
pub struct RadixTree {
    root: SharedRadixNode,
    names: HashMap<HolderNumber, HashMap<SequenceHash, SharedRadixNode>>,
    refused_stores: u64,
}

impl Default for RadixTree {
    fn default() -> Self {
        Self {
            root: SharedRadixNode::default(),
            names: HashMap::new(),
            refused_stores: 0,
        }
    }
}

/// Adds `holder` to the child of `parent` with this content, and returns the child. Makes the child if it is missing.
fn enter(parent: &SharedRadixNode, content: BlockHash, holder: HolderNumber) -> SharedRadixNode {
    let mut above = parent.borrow_mut();
    let child = above.children.entry(content).or_insert_with(|| {
        Rc::new(RefCell::new(RadixNode {
            place: Some((Rc::downgrade(parent), content)),
            ..RadixNode::default()
        }))
    });
    child.borrow_mut().holders.insert(holder);
    Rc::clone(child)
}

/// Removes `holder` from a node. Then erases the node, and each ancestor in turn, as long as it has neither holders
/// nor children.
fn withdraw(node: SharedRadixNode, holder: HolderNumber) {
    node.borrow_mut().holders.remove(&holder);
    let mut node = node;
    loop {
        let place = {
            let here = node.borrow();
            if !here.holders.is_empty() || !here.children.is_empty() {
                return;
            }
            here.place.clone()
        };
        let Some((parent, content)) = place.and_then(|(parent, content)| Some((parent.upgrade()?, content)))
        else {
            return;
        };
        parent.borrow_mut().children.remove(&content);
        node = parent;
    }
}

impl PrefixIndex for RadixTree {
    fn store(&mut self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        if blocks.is_empty() {
            return;
        }
        let parent = match parent {
            None => Some(&self.root),
            Some(name) => self.names.get(&holder).and_then(|names| names.get(&name)),
        };
        let Some(mut node) = parent.cloned() else {
            self.refused_stores += 1;
            return;
        };
        let names = self.names.entry(holder).or_default();
        for block in blocks {
            node = enter(&node, block.content, holder);
            let before = names.insert(block.name, Rc::clone(&node));
            // A name that moves leaves its old place.
            if let Some(before) = before.filter(|before| !Rc::ptr_eq(before, &node)) {
                withdraw(before, holder);
            }
        }
    }

    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]) {
        let Some(held) = self.names.get_mut(&holder) else {
            return;
        };
        for name in names {
            if let Some(node) = held.remove(name) {
                withdraw(node, holder);
            }
        }
        if held.is_empty() {
            self.names.remove(&holder);
        }
    }

    fn clear(&mut self, holder: HolderNumber) {
        for node in self.names.remove(&holder).unwrap_or_default().into_values() {
            withdraw(node, holder);
        }
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        let mut drain = Drain::default();
        let mut node = Rc::clone(&self.root);
        for content in query.blocks() {
            let child = node.borrow().children.get(content).cloned();
            let Some(child) = child else {
                break;
            };
            if !drain.step(&child.borrow().holders) {
                break;
            }
            node = child;
        }
        drain.finish()
    }

    fn refused_stores(&self) -> u64 {
        self.refused_stores
    }

    fn sizes(&self) -> PrefixIndexSize {
        let mut entries = 0;
        let mut pending = vec![Rc::clone(&self.root)];
        while let Some(node) = pending.pop() {
            let here = node.borrow();
            entries += here.children.len();
            pending.extend(here.children.values().cloned());
        }
        PrefixIndexSize {
            entries,
            names: self.names.values().map(HashMap::len).sum(),
            holders: self.names.len(),
        }
    }
}

impl Drop for RadixTree {
    /// Drops the nodes one by one. If nodes dropped their children recursively, the stack would have to be as deep as
    /// the longest prompt.
    fn drop(&mut self) {
        self.names.clear();
        let mut pending = vec![Rc::clone(&self.root)];
        while let Some(node) = pending.pop() {
            pending.extend(node.borrow_mut().children.drain().map(|(_, child)| child));
        }
    }
}
