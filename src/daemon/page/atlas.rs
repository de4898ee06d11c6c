//! The tree of the hottest prefixes.
//!
//! A node is a stretch of blocks that every path through it has in common; its children are the ways on. The weight of a node is at least
//! that of its children together. What is too light to be drawn is left out, lightest first, and told as a number.

use std::collections::BinaryHeap;
use std::sync::Arc;

use serde::Serialize;

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::index::{Namespace, Search};
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::QueryKey;

/// Nodes of an atlas at most.
pub(super) const NODES_MAX: usize = 400;
/// Names of holders that a node has at most; explaining it gives all.
const NAMES_MAX: usize = 4;

/// The weight that a prefix has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lens {
    /// How many queries of the sample asked for it.
    Asked,
    /// How many copies of its blocks, and of those behind it, are held.
    Held,
}

/// One node of a tree that has not been cut yet.
#[derive(Debug, Clone)]
pub(super) struct Branch {
    /// The node that this one hangs on; it comes earlier.
    pub(super) parent: Option<usize>,
    /// Position of the first block.
    pub(super) start: usize,
    /// Position behind the last block.
    pub(super) end: usize,
    pub(super) weight: u64,
    /// All blocks from position 0 up to `end`, or more.
    pub(super) path: Arc<[PositionalLineageHash]>,
}

/// The hottest prefixes of a namespace, at one time.
#[derive(Debug, Serialize)]
pub(super) struct Atlas {
    /// The sum of all weights.
    pub(super) total: u64,
    /// Over how many seconds the sample reaches; none where it is no sample.
    pub(super) seconds: Option<u64>,
    /// Whether the walk ended at its bound.
    pub(super) partial: bool,
    /// Nodes that were too light.
    pub(super) left_out: usize,
    pub(super) block_size: u32,
    pub(super) nodes: Vec<Node>,
}

/// A node of the tree; a parent comes before its children.
#[derive(Debug, Serialize)]
pub(super) struct Node {
    pub(super) parent: Option<usize>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) weight: u64,
    /// Holders of its first block.
    some: usize,
    /// Holders of all its blocks, and how many of them are exact.
    all: usize,
    exact: usize,
    /// Holders of all its blocks from which a request can reuse some of them.
    usable: usize,
    /// Some of the latter.
    names: Vec<String>,
    /// The last block, which names the node.
    block: String,
    #[serde(skip)]
    pub(super) path: Arc<[PositionalLineageHash]>,
}

impl Node {
    /// All blocks from position 0 to the last of the node.
    pub(super) fn prefix(&self) -> &[PositionalLineageHash] {
        self.path.get(..self.end).unwrap_or(&self.path)
    }
}

impl Atlas {
    /// The heaviest of the branches, and who holds them now.
    pub(super) fn new(namespace: &Namespace, trust: &StreamTrust, branches: &[Branch], total: u64) -> Self {
        let kept = heaviest(branches, NODES_MAX);
        let mut places = vec![None; branches.len()];
        let mut nodes = Vec::with_capacity(kept.len());
        for index in kept.iter().copied() {
            let Some(branch) = branches.get(index) else {
                continue;
            };
            places[index] = Some(nodes.len());
            let parent = branch.parent.and_then(|parent| places[parent]);
            nodes.push(node(namespace, trust, branch, parent));
        }
        Self {
            total,
            seconds: None,
            partial: false,
            left_out: branches.len() - nodes.len(),
            block_size: namespace.indexer.settings().block_size.as_u32(),
            nodes,
        }
    }

    /// The node whose last block this is.
    pub(super) fn node(&self, block: PositionalLineageHash) -> Option<&Node> {
        let ends_with = |node: &&Node| node.prefix().last() == Some(&block);
        self.nodes.iter().find(ends_with)
    }
}

/// The heaviest branches, each after its parent, in their order.
pub(super) fn heaviest(branches: &[Branch], count: usize) -> Vec<usize> {
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); branches.len()];
    let mut open = BinaryHeap::new();
    for (index, branch) in branches.iter().enumerate() {
        match branch.parent {
            Some(parent) => children[parent].push(index),
            None => open.push((branch.weight, std::cmp::Reverse(index))),
        }
    }
    let mut kept = Vec::new();
    while kept.len() < count
        && let Some((_, std::cmp::Reverse(index))) = open.pop()
    {
        kept.push(index);
        for child in children[index].iter().copied() {
            open.push((branches[child].weight, std::cmp::Reverse(child)));
        }
    }
    kept.sort_unstable();
    kept
}

fn node(namespace: &Namespace, trust: &StreamTrust, branch: &Branch, parent: Option<usize>) -> Node {
    let path = branch.path.get(..branch.end).unwrap_or(&branch.path);
    let key = QueryKey::LineageHashes(path.to_vec());
    let was_stalled = trust.is_stalled();
    let (mut some, mut all, mut exact, mut usable, mut names) = (0, 0, 0, 0, Vec::new());
    // Fails only for paths that are deeper than any index.
    if let Ok(matches) = namespace.indexer.find_matches(&key, Search::default()) {
        for found in matches.holders() {
            let number = |blocks| usize::try_from(blocks).unwrap_or(usize::MAX);
            let depth = number(found.matched_blocks);
            some += usize::from(depth > branch.start);
            if depth < branch.end {
                continue;
            }
            all += 1;
            usable += usize::from(number(found.usable_blocks) > branch.start);
            let reasons = matches.reasons(found.holder, trust).of_all_queries();
            let is_exact = !was_stalled && reasons.is_empty();
            exact += usize::from(is_exact);
            if names.len() < NAMES_MAX {
                names.push(format!("{}/{}", found.holder.id.worker, found.holder.id.rank));
            }
        }
    }
    Node {
        parent,
        start: branch.start,
        end: branch.end,
        weight: branch.weight,
        some,
        all,
        exact,
        usable,
        names,
        block: path.last().map(ToString::to_string).unwrap_or_default(),
        path: Arc::clone(&branch.path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn branch(parent: Option<usize>, weight: u64) -> Branch {
        Branch {
            parent,
            start: 0,
            end: 0,
            weight,
            path: Arc::default(),
        }
    }

    #[test]
    fn the_lightest_are_left_out_and_a_parent_never_before_its_child() {
        let branches = [
            branch(None, 10),
            branch(Some(0), 9),
            branch(Some(0), 1),
            branch(None, 8),
            branch(Some(1), 8),
            branch(Some(3), 7),
        ];
        assert_eq!(heaviest(&branches, 4), [0, 1, 3, 4]);
        assert_eq!(heaviest(&branches, 100), [0, 1, 2, 3, 4, 5]);
        assert_eq!(heaviest(&branches, 0), [] as [usize; 0]);
    }
}
