//! Checks of nodes that come from an untrusted source.

use super::flat::FlatTrie;
use super::node::{FlatNode, Links, NODES_MAX};
use super::walk::depth_after;

/// Reason why nodes are not a trie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// There are more nodes than an index can number.
    #[error("there are {nodes} nodes, and at most {NODES_MAX} are allowed; split the data")]
    TooManyNodes {
        /// Number of nodes.
        nodes: usize,
    },
    /// A path is longer than this type of node can express.
    #[error("node {index} is {depth} deep, and at most {depth_max} is allowed; the data is damaged")]
    TooDeep {
        /// Index of the node.
        index: usize,
        /// The node's depth.
        depth: usize,
        /// Maximum depth of this type of node.
        depth_max: usize,
    },
    /// A node's `subtree_size` is not the number of nodes in its subtree.
    #[error(
        "node {index} says that its subtree has {stored} nodes, but it has {actual}; the data is damaged"
    )]
    WrongSize {
        /// Index of the node.
        index: usize,
        /// The subtree size that the node stores. 0 if the node carries no links although it has room for them.
        stored: usize,
        /// The size that follows from the pops of the leaves.
        actual: usize,
    },
    /// A node's `num_parents` does not lead to the parent of the next node.
    #[error("node {index} says to pop {stored} levels, and {expected} would be right; the data is damaged")]
    WrongPops {
        /// Index of the node.
        index: usize,
        /// The `num_parents` that the node stores.
        stored: usize,
        /// The right `num_parents`. For a leaf that is not the last node, the greatest one that would be right.
        expected: usize,
    },
    /// The [`Links`] of a node are right, but this type of node does not store them in this form.
    #[error("node {index} has its links in no valid form; the data is damaged")]
    Malformed {
        /// Index of the node.
        index: usize,
    },
    /// The data ends early: the [`Links`] of the last node say that it has children.
    #[error("the last node says that it has children, but there are no more nodes; the data has been cut")]
    Cut,
}

impl<N: FlatNode> FlatTrie<N> {
    /// Makes a trie from nodes of an untrusted source, after checking every link. Takes one pass, and memory for the
    /// deepest path.
    ///
    /// The leaves and their pops determine the shape; every size and every other pop must agree with it. So in an
    /// accepted trie no subtree overlaps another, and no link leads out of the array or in circles.
    ///
    /// # Errors
    ///
    /// If any link is wrong. The error tells the first wrong link.
    pub fn from_nodes(nodes: Vec<N>) -> Result<Self, LayoutError> {
        if nodes.len() > NODES_MAX {
            return Err(LayoutError::TooManyNodes { nodes: nodes.len() });
        }
        let mut check = LayoutCheck {
            nodes: &nodes,
            open: Vec::new(),
            depth_max: 0,
        };
        for (index, node) in nodes.iter().enumerate() {
            check.take(index, node)?;
        }
        let depth_max = check.depth_max;
        Ok(Self::from_parts(nodes, depth_max))
    }
}

struct LayoutCheck<'a, N> {
    nodes: &'a [N],
    /// Indexes of the nodes on the path to the current node, without that node.
    open: Vec<usize>,
    depth_max: usize,
}

impl<N: FlatNode> LayoutCheck<'_, N> {
    fn take(&mut self, index: usize, node: &N) -> Result<(), LayoutError> {
        let depth = self.open.len() + 1;
        if depth > N::DEPTH_MAX {
            return Err(LayoutError::TooDeep {
                index,
                depth,
                depth_max: N::DEPTH_MAX,
            });
        }
        self.depth_max = self.depth_max.max(depth);
        let is_last = index + 1 == self.nodes.len();
        let Some(links) = node.links().filter(|links| links.is_leaf()) else {
            self.open.push(index);
            return if is_last { Err(LayoutError::Cut) } else { Ok(()) };
        };
        let is_sound = if is_last {
            links.num_parents == depth
        } else {
            (1..=depth).contains(&links.num_parents)
        };
        if !is_sound {
            return Err(LayoutError::WrongPops {
                index,
                stored: links.num_parents,
                expected: depth,
            });
        }
        if *node != node.with_links(links) {
            return Err(LayoutError::Malformed { index });
        }
        self.close(index + 1, depth_after(depth, links.num_parents))
    }

    /// Checks the ancestors whose subtrees end at index `end`, where a node of depth `next` begins.
    fn close(&mut self, end: usize, next: usize) -> Result<(), LayoutError> {
        while self.open.len() >= next {
            let depth = self.open.len();
            let Some(index) = self.open.pop() else { break };
            let Some(node) = self.nodes.get(index) else { break };
            let actual = Links {
                subtree_size: end - index,
                num_parents: depth + 1 - next,
            };
            check_links(index, node, actual)?;
        }
        Ok(())
    }
}

/// Checks that a node with children carries the [`Links`] `actual`. If the node has no room for them, it must carry no
/// links.
fn check_links<N: FlatNode>(index: usize, node: &N, actual: Links) -> Result<(), LayoutError> {
    let expected = node.with_links(actual);
    if *node == expected {
        return Ok(());
    }
    let stored = node.links();
    let stored_size = stored.map_or(0, |links| links.subtree_size);
    Err(match stored {
        stored if stored == expected.links() => LayoutError::Malformed { index },
        Some(stored) if stored_size == actual.subtree_size => LayoutError::WrongPops {
            index,
            stored: stored.num_parents,
            expected: actual.num_parents,
        },
        _ => LayoutError::WrongSize {
            index,
            stored: stored_size,
            actual: actual.subtree_size,
        },
    })
}
