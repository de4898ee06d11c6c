//! Building a trie in depth-first order, node by node.

use super::flat::FlatTrie;
use super::node::{FlatNode, Links, NODES_MAX};

/// Reason why a trie cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A path is longer than this type of node can express.
    #[error("a path of the trie is longer than {depth_max} nodes; shorten the longest key")]
    TooDeep {
        /// Maximum depth of this type of node.
        depth_max: usize,
    },
    /// There are more nodes than an index can number.
    #[error("the trie has more than {NODES_MAX} nodes; split its entries into several tries")]
    TooManyNodes,
    /// [`FlatTrieBuilder::leave`] was called although no node was open.
    #[error("no node is open to be left; leave each node once")]
    NothingOpen,
}

/// Builds a [`FlatTrie`] in one pass: a node is entered, then its children are built, then the node is left.
///
/// In addition to the nodes, the builder holds only the open path, and the nodes left since the last node was
/// entered.
#[derive(Debug, Clone)]
pub struct FlatTrieBuilder<N> {
    nodes: Vec<N>,
    /// Indexes of the nodes on the path to the current node.
    open: Vec<usize>,
    /// Nodes that were left and do not have their links yet, deepest first. Their links depend on the next node.
    left: Vec<Left>,
    depth_max: usize,
}

#[derive(Debug, Clone)]
struct Left {
    index: usize,
    depth: usize,
    subtree_size: usize,
}

impl<N: FlatNode> Default for FlatTrieBuilder<N> {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            open: Vec::new(),
            left: Vec::new(),
            depth_max: 0,
        }
    }
}

impl<N: FlatNode> FlatTrieBuilder<N> {
    /// A builder without nodes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of open nodes, that is, nodes that were entered and not left.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// Appends `node` as the last child of the open node, or as the last root, and opens it. Links that `node`
    /// already has are ignored.
    ///
    /// # Errors
    ///
    /// If the trie becomes too deep or too large. Then nothing has changed.
    pub fn enter(&mut self, node: N) -> Result<(), BuildError> {
        let depth = self.open.len() + 1;
        if depth > N::DEPTH_MAX {
            return Err(BuildError::TooDeep {
                depth_max: N::DEPTH_MAX,
            });
        }
        if self.nodes.len() >= NODES_MAX {
            return Err(BuildError::TooManyNodes);
        }
        self.settle(depth);
        self.open.push(self.nodes.len());
        self.nodes.push(node);
        self.depth_max = self.depth_max.max(depth);
        Ok(())
    }

    /// Ends the open node's subtree.
    ///
    /// # Errors
    ///
    /// If no node is open.
    pub fn leave(&mut self) -> Result<(), BuildError> {
        let depth = self.open.len();
        let index = self.open.pop().ok_or(BuildError::NothingOpen)?;
        self.left.push(Left {
            index,
            depth,
            subtree_size: self.nodes.len() - index,
        });
        Ok(())
    }

    /// Leaves nodes (ends their subtrees) until `depth` nodes are open. Does nothing if at most `depth` nodes are open.
    pub fn leave_to(&mut self, depth: usize) {
        while self.open.len() > depth && self.leave().is_ok() {}
    }

    /// Leaves all open nodes, that is, ends their subtrees. Returns the trie.
    #[must_use]
    pub fn finish(mut self) -> FlatTrie<N> {
        self.leave_to(0);
        self.settle(1);
        FlatTrie::from_parts(self.nodes, self.depth_max)
    }

    /// Writes the [`Links`] of the nodes that were left. `next` is the depth of the next node, from which the number of
    /// levels to pop follows.
    fn settle(&mut self, next: usize) {
        for left in self.left.drain(..) {
            if let Some(node) = self.nodes.get_mut(left.index) {
                *node = node.with_links(Links {
                    subtree_size: left.subtree_size,
                    // The next node is no deeper than any node that was left.
                    num_parents: (left.depth + 1).saturating_sub(next),
                });
            }
        }
    }
}
