//! The storage of an index that is kept as a radix tree: one node a block, found by following a prompt from its first block on.
//!
//! It takes several times the memory and the time of [`super::runs`], see [`IndexKind::Radix`](super::IndexKind::Radix). What it
//! has over them: nothing depends on hashes being a chain, because a block is known by the path that leads to it.
//!
//! Only blocks that count are here, parents first, so that holders are prefix-closed and every search is exact; why, says
//! [`super::prefix_tree`].

use crate::hash::PositionalLineageHash;

use super::chain::QueryChain;
use super::holder_set::{HolderSet, HolderSlot, SlotBits, SlotSet};
use super::matches::{Groups, Matches, push_group};
use super::prefix_tree::{HolderGroup, PrefixTree, SharedNode};
use super::search::Search;
use super::slots::Slots;

/// A block of the tree. Its key is its current fragment: position and parent follow from where it stands.
pub(crate) type RadixNode = SharedNode<u64, HolderSet>;

impl HolderGroup for HolderSet {
    type Holder = HolderSlot;

    fn add(&mut self, holder: HolderSlot) {
        self.insert(holder);
    }

    fn take(&mut self, holder: HolderSlot) {
        self.remove(holder);
    }

    fn has_nobody(&self) -> bool {
        self.is_empty()
    }

    fn heap_bytes(&self) -> usize {
        HolderSet::heap_bytes(self)
    }
}

/// All blocks of one index.
#[derive(Debug, Default)]
pub(crate) struct RadixStore {
    tree: PrefixTree<u64, HolderSet>,
}

impl RadixStore {
    /// How many distinct blocks there are.
    pub(crate) fn len(&self) -> u64 {
        self.tree.len()
    }

    /// What they take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.tree.bytes()
    }

    /// Lets queries find a block under its parent, which the holder has; at position 0 there is none.
    pub(crate) fn insert(
        &self,
        parent: Option<&RadixNode>,
        key: PositionalLineageHash,
        slot: HolderSlot,
    ) -> RadixNode {
        let parent = parent.unwrap_or(self.tree.root());
        self.tree.enter(parent, key.current_hash_fragment(), slot)
    }

    /// Takes a block that has no children any more in this holder from queries.
    pub(crate) fn remove(&self, node: RadixNode, slot: HolderSlot) {
        self.tree.leave(node, slot);
    }

    /// Runs one search.
    pub(crate) fn find(&self, slots: &Slots, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
        // Before the first look: a holder that joins later was not there when the query came.
        let directory = slots.load();
        let asked = search.workers.map(|workers| directory.slots_of(workers));
        let mut drain = Drain {
            asked,
            ..Drain::default()
        };
        self.tree
            .walk(path_of(chain), |depth, holders| drain.step(depth, holders));
        Matches::of(directory, drain.finish())
    }

    /// How many holders the block at `position` of a query has.
    pub(crate) fn holders_of(&self, chain: &mut QueryChain<'_>, position: usize) -> usize {
        let mut found = 0;
        self.tree.walk(path_of(chain), |depth, holders| {
            if depth > position {
                found = holders.len();
            }
            depth <= position
        });
        found
    }
}

/// The keys of a query's path. It ends where lineage hashes do not follow one another: nobody has such a prefix.
fn path_of<'c>(chain: &'c mut QueryChain<'_>) -> impl FnMut(usize) -> Option<u64> + 'c {
    let mut before = None;
    move |index| {
        if index >= chain.len() {
            return None;
        }
        let key = chain.key(index);
        let parent = (key.position() > 0).then(|| key.parent_hash_fragment());
        let follows = key.position() == index as u64 && parent == before;
        before = Some(key.current_hash_fragment());
        before.filter(|_| follows)
    }
}

/// Holders of all blocks so far, which become fewer from block to block.
#[derive(Debug, Default)]
struct Drain {
    /// Whom the query asks about; all where absent.
    asked: Option<SlotSet>,
    depth: usize,
    holding: SlotSet,
    groups: Groups<SlotSet>,
}

impl Drain {
    /// Goes on to a block that `depth` blocks end with; says whether anybody is left.
    fn step(&mut self, depth: usize, holders: &HolderSet) -> bool {
        if depth == 1 {
            self.holding = match &self.asked {
                Some(asked) => holders.intersection(asked),
                None => holders.to_slots(),
            };
        } else if !holders.contains_all(&self.holding) {
            let staying = holders.intersection(&self.holding);
            let mut dropped = std::mem::replace(&mut self.holding, staying);
            dropped.subtract(&self.holding);
            push_group(&mut self.groups, self.depth, dropped);
        }
        self.depth = depth;
        !self.holding.is_empty()
    }

    /// All groups, when no more blocks come.
    fn finish(mut self) -> Groups<SlotSet> {
        push_group(&mut self.groups, self.depth, self.holding);
        self.groups
    }
}
