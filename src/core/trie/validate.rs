//! Checks of nodes that come from elsewhere.

use super::flat::FlatTrie;
use super::node::{FlatNode, Links, NODES_MAX};
use super::walk::depth_after;

/// Why nodes are not a trie.
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
        /// The greatest depth of this type of node.
        depth_max: usize,
    },
    /// `subtree_size` is not the number of nodes of the subtree.
    #[error(
        "node {index} says that its subtree has {stored} nodes, but it has {actual}; the data is damaged"
    )]
    WrongSize {
        /// Index of the node.
        index: usize,
        /// The stored size. 0 if the node carries no links although there is room for them.
        stored: usize,
        /// The size that follows from the pops.
        actual: usize,
    },
    /// `num_parents` does not lead to the parent of the next node.
    #[error("node {index} says to pop {stored} levels, and {expected} would be right; the data is damaged")]
    WrongPops {
        /// Index of the node.
        index: usize,
        /// The stored number.
        stored: usize,
        /// The right number, or the largest that would be right.
        expected: usize,
    },
    /// The links are right, but not in the form in which this type of node stores them.
    #[error("node {index} has its links in no valid form; the data is damaged")]
    Malformed {
        /// Index of the node.
        index: usize,
    },
    /// The last node's links say that it has children.
    #[error("the last node says that it has children, but there are no more nodes; the data has been cut")]
    Cut,
}

impl<N: FlatNode> FlatTrie<N> {
    /// Makes a trie from nodes from elsewhere, after checking every link. Takes one pass, and memory for the deepest
    /// path.
    ///
    /// The leaves and their pops determine the shape; every size and every other pop must agree with it. So in an accepted trie no subtree
    /// overlaps another, and no link leads out of the array or round in circles.
    ///
    /// # Errors
    ///
    /// If any link is wrong. The error names the first wrong one.
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
    /// The indices of the nodes on the path to the current node, without that node.
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

/// Checks that a node with children carries the links `actual`, or no links if there is no room for them.
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
