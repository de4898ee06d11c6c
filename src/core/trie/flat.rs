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

    /// The links of the node at `index`, carried by it or not.
    ///
    /// Those of a node that has no room for them follow from its children's, and so on down. That takes as many steps as
    /// those nodes have children: as a rule far fewer than the subtree has nodes.
    #[must_use]
    pub fn links(&self, index: usize) -> Option<Links> {
        links(&self.nodes, index)
    }

    /// The index after the subtree of the node at `index`.
    #[must_use]
    pub fn subtree_end(&self, index: usize) -> usize {
        subtree_end(&self.nodes, index)
    }

    /// The roots, in order.
    #[must_use]
    pub fn roots(&self) -> Children<'_, N> {
        Children {
            nodes: &self.nodes,
            first: Some(0),
            last: None,
        }
    }

    /// The children of the node at `index`, in order; none beyond the last node.
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

/// The links of the node at `index`; none beyond the last node.
pub(super) fn links<N: FlatNode>(nodes: &[N], index: usize) -> Option<Links> {
    match nodes.get(index)?.links() {
        Some(links) => Some(links),
        None => links_of_children(nodes, index),
    }
}

/// The links of a node that carries none: its subtree ends where the pops lead to its own level or above.
fn links_of_children<N: FlatNode>(nodes: &[N], index: usize) -> Option<Links> {
    // Below the node, which has depth 0 here.
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

/// The index after the subtree at `index`; never beyond the end of the nodes.
pub(super) fn subtree_end<N: FlatNode>(nodes: &[N], index: usize) -> usize {
    let size = links(nodes, index).map_or(nodes.len(), |links| links.subtree_size);
    index.saturating_add(size).min(nodes.len())
}

/// Siblings with their indices, in order.
#[derive(Debug, Clone)]
pub struct Children<'a, N> {
    nodes: &'a [N],
    /// The index of the first one, until it is given.
    first: Option<usize>,
    /// The one given last. The next one is sought only when it is wanted: look-ups end at most nodes.
    last: Option<usize>,
}

impl<'a, N: FlatNode> Iterator for Children<'a, N> {
    type Item = (usize, &'a N);

    fn next(&mut self) -> Option<Self::Item> {
        let index = match self.last.take() {
            None => self.first.take()?,
            Some(last) => {
                let links = links(self.nodes, last)?;
                // What follows has another parent if more than one level is popped.
                (links.num_parents == 1).then_some(last + links.subtree_size)?
            }
        };
        let node = self.nodes.get(index)?;
        self.last = Some(index);
        Some((index, node))
    }
}
