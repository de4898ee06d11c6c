//! The trie itself: an array of nodes whose links are known to be sound.

use super::node::{FlatNode, Links};
use super::walk::DepthFirst;

/// A forest in depth-first order. Every link is sound: sizes nest, and pops lead to where the next node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatTrie<N> {
    nodes: Vec<N>,
    depth_max: usize,
}

impl<N: FlatNode> FlatTrie<N> {
    /// For those who have made sure that the links are sound.
    pub(super) fn from_parts(nodes: Vec<N>, depth_max: usize) -> Self {
        Self { nodes, depth_max }
    }

    /// All nodes, in depth-first order.
    #[must_use]
    pub fn nodes(&self) -> &[N] {
        &self.nodes
    }

    /// Gives the nodes away.
    #[must_use]
    pub fn into_nodes(self) -> Vec<N> {
        self.nodes
    }

    /// How many nodes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The depth of the deepest node; roots have depth 1, and an empty trie has 0.
    #[must_use]
    pub fn depth_max(&self) -> usize {
        self.depth_max
    }

    /// The node at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&N> {
        self.nodes.get(index)
    }

    /// The index after the subtree of the node at `index`.
    ///
    /// For a node whose size has no room in it, this adds up its children's sizes, and so on down: as many steps as those nodes have
    /// children, never as many as the subtree has nodes.
    #[must_use]
    pub fn subtree_end(&self, index: usize) -> usize {
        subtree_end(&self.nodes, index)
    }

    /// The roots, in order.
    #[must_use]
    pub fn roots(&self) -> Children<'_, N> {
        Children {
            nodes: &self.nodes,
            next: 0,
            end: self.nodes.len(),
        }
    }

    /// The children of the node at `index`, in order; none beyond the last node.
    #[must_use]
    pub fn children(&self, index: usize) -> Children<'_, N> {
        Children {
            nodes: &self.nodes,
            next: index.saturating_add(1),
            end: self.subtree_end(index),
        }
    }

    /// The first child of the node at `parent`, or the first root, that has this label.
    #[must_use]
    pub fn child(&self, parent: Option<usize>, label: N::Label) -> Option<usize> {
        let mut siblings = match parent {
            Some(parent) => self.children(parent),
            None => self.roots(),
        };
        siblings.find_map(|(index, node)| (node.label() == label).then_some(index))
    }

    /// The node that the labels lead to from the roots; none for no labels.
    #[must_use]
    pub fn find(&self, labels: impl IntoIterator<Item = N::Label>) -> Option<usize> {
        let mut found = None;
        for label in labels {
            found = Some(self.child(found, label)?);
        }
        found
    }

    /// All nodes with their depths; subtrees can be skipped.
    #[must_use]
    pub fn depth_first(&self) -> DepthFirst<'_, N> {
        DepthFirst::new(&self.nodes)
    }
}

/// The index after the subtree at `index`; never beyond the end of the nodes.
pub(super) fn subtree_end<N: FlatNode>(nodes: &[N], index: usize) -> usize {
    let Some(node) = nodes.get(index) else {
        return nodes.len();
    };
    let size = node.links().subtree_size;
    if size != Links::OVERSIZE {
        return (index + size).min(nodes.len());
    }
    // Depths are relative: 0 is the node itself.
    let mut depth = 1;
    let mut next = index + 1;
    while let Some(node) = nodes.get(next) {
        let links = node.links();
        if links.subtree_size == Links::OVERSIZE {
            next += 1;
            depth += 1;
            continue;
        }
        next += links.subtree_size;
        match (depth + 1_usize).checked_sub(links.num_parents) {
            None | Some(0) => break,
            Some(above) => depth = above,
        }
    }
    next.min(nodes.len())
}

/// Siblings with their indices, in order.
#[derive(Debug, Clone)]
pub struct Children<'a, N> {
    nodes: &'a [N],
    next: usize,
    end: usize,
}

impl<'a, N: FlatNode> Iterator for Children<'a, N> {
    type Item = (usize, &'a N);

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next;
        if index >= self.end {
            return None;
        }
        let node = self.nodes.get(index)?;
        self.next = subtree_end(self.nodes, index);
        Some((index, node))
    }
}
