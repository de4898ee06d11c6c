//! The flat trie: an array of nodes whose links are known to be sound.

use super::node::{FlatNode, Links};
use super::walk::DepthFirst;

/// A forest in depth-first order. Every link is sound: each size covers exactly the subtree, and popping the given
/// number of levels leads to the parent of the next node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatTrie<N> {
    nodes: Vec<N>,
    depth_max: usize,
}

impl<N: FlatNode> FlatTrie<N> {
    /// Makes a trie from nodes whose links the caller knows to be sound.
    pub(super) fn from_parts(nodes: Vec<N>, depth_max: usize) -> Self {
        Self { nodes, depth_max }
    }

    /// Returns all nodes, in depth-first order.
    #[must_use]
    pub fn nodes(&self) -> &[N] {
        &self.nodes
    }

    /// Takes the nodes out of the trie.
    #[must_use]
    pub fn into_nodes(self) -> Vec<N> {
        self.nodes
    }

    /// Number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there are no nodes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Depth of the deepest node. Roots have depth 1, and an empty trie has depth 0.
    #[must_use]
    pub fn depth_max(&self) -> usize {
        self.depth_max
    }

    /// Returns the node at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&N> {
        self.nodes.get(index)
    }

    /// Returns the [`Links`] (subtree size and levels to pop) of the node at `index`, whether or not the node carries
    /// them.
    ///
    /// If the node has no room for its links, they are computed from the links of its children. If a child has no
    /// room either, its links are computed from its children, and so on. This takes as many steps as these nodes have
    /// children, which is usually far fewer than the nodes of the subtree.
    #[must_use]
    pub fn links(&self, index: usize) -> Option<Links> {
        links(&self.nodes, index)
    }

    /// Returns the index after the subtree of the node at `index`.
    #[must_use]
    pub fn subtree_end(&self, index: usize) -> usize {
        subtree_end(&self.nodes, index)
    }

    /// Returns the roots, in order.
    #[must_use]
    pub fn roots(&self) -> Children<'_, N> {
        Children {
            nodes: &self.nodes,
            first: Some(0),
            last: None,
        }
    }

    /// Returns the children of the node at `index`, in order. Empty if there is no such node.
    #[must_use]
    pub fn children(&self, index: usize) -> Children<'_, N> {
        let node = self.nodes.get(index);
        let has_children = node.is_some_and(|node| !node.links().is_some_and(Links::is_leaf));
        Children {
            nodes: &self.nodes,
            first: has_children.then_some(index.saturating_add(1)),
            last: None,
        }
    }

    /// Returns the index of the first child of the node at `parent` with the label `label`. Without `parent`, returns
    /// the index of the first root with that label.
    #[must_use]
    pub fn child(&self, parent: Option<usize>, label: N::Label) -> Option<usize> {
        let mut siblings = match parent {
            Some(parent) => self.children(parent),
            None => self.roots(),
        };
        siblings.find_map(|(index, node)| (node.label() == label).then_some(index))
    }

    /// Returns the index of the node to which `labels` lead from the roots. `None` if there is no such node, or if
    /// `labels` is empty.
    #[must_use]
    pub fn find(&self, labels: impl IntoIterator<Item = N::Label>) -> Option<usize> {
        let mut found = None;
        for label in labels {
            found = Some(self.child(found, label)?);
        }
        found
    }

    /// Returns a walk over all nodes with their depths. The walk can skip subtrees.
    #[must_use]
    pub fn depth_first(&self) -> DepthFirst<'_, N> {
        DepthFirst::new(&self.nodes)
    }
}

/// Returns the [`Links`] (subtree size and levels to pop) of the node at `index`. `None` if there is no such node.
pub(super) fn links<N: FlatNode>(nodes: &[N], index: usize) -> Option<Links> {
    match nodes.get(index)?.links() {
        Some(links) => Some(links),
        None => links_of_children(nodes, index),
    }
}

/// Computes the [`Links`] of a node that does not carry them. Its subtree ends where the pops lead to the node's own
/// level or above.
fn links_of_children<N: FlatNode>(nodes: &[N], index: usize) -> Option<Links> {
    // Depth relative to the node, which has depth 0 here.
    let mut depth = 1;
    let mut next = index + 1;
    loop {
        let Some(links) = nodes.get(next)?.links() else {
            next += 1;
            depth += 1;
            continue;
        };
        next += links.subtree_size;
        if links.num_parents > depth {
            return Some(Links {
                subtree_size: next - index,
                num_parents: links.num_parents - depth,
            });
        }
        depth = depth + 1 - links.num_parents;
    }
}

/// Returns the index after the subtree of the node at `index`. It is at most the number of nodes.
pub(super) fn subtree_end<N: FlatNode>(nodes: &[N], index: usize) -> usize {
    let size = links(nodes, index).map_or(nodes.len(), |links| links.subtree_size);
    index.saturating_add(size).min(nodes.len())
}

/// Siblings in order, each with its index.
#[derive(Debug, Clone)]
pub struct Children<'a, N> {
    nodes: &'a [N],
    /// Index of the first sibling, until the iterator has returned that sibling.
    first: Option<usize>,
    /// Index of the sibling that was returned last. The iterator searches for the next sibling only when it is asked
    /// for, because most look-ups end earlier.
    last: Option<usize>,
}

impl<'a, N: FlatNode> Iterator for Children<'a, N> {
    type Item = (usize, &'a N);

    fn next(&mut self) -> Option<Self::Item> {
        let index = match self.last.take() {
            None => self.first.take()?,
            Some(last) => {
                let links = links(self.nodes, last)?;
                // The next node has another parent if more than one level is popped.
                (links.num_parents == 1).then_some(last + links.subtree_size)?
            }
        };
        let node = self.nodes.get(index)?;
        self.last = Some(index);
        Some((index, node))
    }
}
