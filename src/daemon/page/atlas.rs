//! The atlas: a tree of the hottest prefixes, that is, those with the greatest weight. A [`Lens`] says how prefixes are
//! weighed.
//!
//! A node is a stretch of blocks that all paths through it have in common. Its children are the different
//! continuations. The weight of a node is at least the sum of its children's weights. If there are too many nodes, the
//! lightest are left out and counted.

use std::collections::BinaryHeap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::queries::{Answerer, search_whole, with_wait};
use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::index::{Namespace, QueryChain, Search};
use kvatlas_core::wire::QueryKey;

/// Maximum number of nodes of an atlas, the page's tree of hot prefixes.
pub(super) const NODES_MAX: usize = 400;
/// Maximum number of holders whose names a node of the tree lists. The explanation of a node lists up to 200.
const NAMES_MAX: usize = 4;

/// Meaning of the weights of prefixes in an atlas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Lens {
    /// Weight is the number of sampled queries that asked for the prefix.
    Asked,
    /// Weight is the number of copies of the prefix's last stretch of blocks and of all blocks that continue it. A
    /// block has as many copies as there are holders that have it.
    Held,
}

/// Node of the tree of prefixes, before nodes of little weight are left out.
#[derive(Debug, Clone)]
pub(super) struct Branch {
    /// Index of the parent, which comes earlier in the list. `None` for a root.
    pub(super) parent: Option<usize>,
    /// Position of the branch's first block.
    pub(super) start: usize,
    /// Position after the branch's last block.
    pub(super) end: usize,
    pub(super) weight: u64,
    /// Path with all blocks from position 0 up to `end`, and possibly further blocks.
    pub(super) path: Arc<[PositionalLineageHash]>,
}

/// Hottest prefixes of a namespace at one moment, as a tree.
#[derive(Debug, Serialize)]
pub(super) struct Atlas {
    /// Sum of the weights of all prefixes.
    pub(super) total: u64,
    /// Seconds that the sample of queries covers, if the weights are from that sample; else `None`.
    pub(super) seconds: Option<u64>,
    /// Whether the walk over the index stopped early, at a bound on its size or time, so that prefixes may be missing.
    pub(super) partial: bool,
    /// Number of nodes that were left out because their weight is too small.
    pub(super) left_out: usize,
    pub(super) block_size: u32,
    pub(super) nodes: Vec<Node>,
}

/// Node of the tree of hot prefixes: a stretch of blocks that all paths through it share. A parent comes before its
/// children.
#[derive(Debug, Serialize)]
pub(super) struct Node {
    pub(super) parent: Option<usize>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) weight: u64,
    /// Number of holders that have the node's first block.
    some: usize,
    /// Number of holders that have all blocks of the node. `exact` is the number of those holders that are exact.
    all: usize,
    exact: usize,
    /// Number of the holders counted in `all` that can serve a request with at least one of the node's blocks.
    usable: usize,
    /// Names of some holders that have all blocks of the node.
    names: Vec<String>,
    /// Hash of the node's last block, by which requests name the node.
    block: String,
    #[serde(skip)]
    pub(super) path: Arc<[PositionalLineageHash]>,
}

impl Node {
    /// Returns all blocks from position 0 to the last block of the node.
    pub(super) fn prefix(&self) -> &[PositionalLineageHash] {
        self.path.get(..self.end).unwrap_or(&self.path)
    }
}

impl Atlas {
    /// Builds an atlas (a tree of hot prefixes) of the heaviest branches, with their present holders.
    pub(super) fn new(namespace: &Namespace, answerer: &Answerer, branches: &[Branch], total: u64) -> Self {
        let kept = heaviest(branches, NODES_MAX);
        let mut places = vec![None; branches.len()];
        let mut nodes = Vec::with_capacity(kept.len());
        for index in kept.iter().copied() {
            let Some(branch) = branches.get(index) else {
                continue;
            };
            places[index] = Some(nodes.len());
            let parent = branch.parent.and_then(|parent| places[parent]);
            nodes.push(node(namespace, answerer, branch, parent));
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

    /// Returns the node whose last block is `block`, if there is one.
    pub(super) fn node(&self, block: PositionalLineageHash) -> Option<&Node> {
        let ends_with = |node: &&Node| node.prefix().last() == Some(&block);
        self.nodes.iter().find(ends_with)
    }
}

/// Returns the indices of the `count` branches with the greatest weight, in ascending order, so that each comes after
/// its parent.
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

fn node(namespace: &Namespace, answerer: &Answerer, branch: &Branch, parent: Option<usize>) -> Node {
    let path = branch.path.get(..branch.end).unwrap_or(&branch.path);
    let key = QueryKey::LineageHashes(path.to_vec());
    let (indexer, trust) = (&namespace.indexer, answerer.trust());
    let was_stalled = trust.is_stalled();
    let look = answerer.freshness.look(&namespace.name);
    let (mut some, mut all, mut exact, mut usable, mut names) = (0, 0, 0, 0, Vec::new());
    // The chain fails only for a path that is deeper than any index.
    if let Ok(mut chain) = QueryChain::new(&key, indexer.settings().block_size) {
        let seen = search_whole(&look, || indexer.find_chain(&mut chain, Search::default()));
        for found in seen.found.holders() {
            let number = |blocks| usize::try_from(blocks).unwrap_or(usize::MAX);
            let depth = number(found.matched_blocks);
            some += usize::from(depth > branch.start);
            if depth < branch.end {
                continue;
            }
            all += 1;
            usable += usize::from(number(found.usable_blocks) > branch.start);
            let id = &found.holder.id;
            let reasons = seen.found.reasons(found.holder, trust).of_all_queries();
            let reasons = with_wait(reasons, &look, &namespace.name, id);
            let is_exact = !was_stalled && reasons.is_empty() && !seen.is_changing(id);
            exact += usize::from(is_exact);
            if names.len() < NAMES_MAX {
                names.push(format!("{}/{}", id.worker, id.rank));
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
