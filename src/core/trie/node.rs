//! The interface that a type must offer to be a node.

/// The most nodes of a trie.
pub const NODES_MAX: usize = u32::MAX as usize;

/// The two numbers that stand for all pointers; the module's documentation draws them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Nodes of the subtree, the node itself included.
    pub subtree_size: usize,
    /// Levels to pop to get to the parent of the node after the subtree; at least 1.
    pub num_parents: usize,
}

impl Links {
    /// Whether the node has no children.
    #[must_use]
    pub fn is_leaf(self) -> bool {
        self.subtree_size == 1
    }
}

/// A node of a flat trie: a label, whatever else the user packs into it, and room for [`Links`].
///
/// Nodes are compared to find damage: `with_links` gives each node with the same label, payload and links in one form only.
pub trait FlatNode: Copy + PartialEq {
    /// The label, which tells a node from its siblings.
    type Label: Copy + Ord;

    /// The largest `num_parents` that a leaf has room for, and so the greatest depth of a trie.
    const DEPTH_MAX: usize;

    /// The node's label.
    fn label(&self) -> Self::Label;

    /// The links that the node carries; none if it has children and no room, so that its links follow from theirs.
    fn links(&self) -> Option<Links>;

    /// The same node with other links. Those of a leaf always have room, for `num_parents` is at most [`DEPTH_MAX`](Self::DEPTH_MAX).
    /// `links` gives them back, or, if they have no room, nothing.
    #[must_use]
    fn with_links(self, links: Links) -> Self;
}
