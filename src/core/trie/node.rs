//! The interface that a type must offer to be a node.

/// Most nodes of a trie.
pub const NODES_MAX: usize = u32::MAX as usize;

/// The two numbers that replace all pointers. The module's documentation shows them in a drawing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Number of nodes of the subtree, the node itself included.
    pub subtree_size: usize,
    /// Number of levels to pop to get to the parent of the node after the subtree; at least 1.
    pub num_parents: usize,
}

impl Links {
    /// Whether the node has no children.
    #[must_use]
    pub fn is_leaf(self) -> bool {
        self.subtree_size == 1
    }
}

/// A node of a flat trie: a label, any other payload of the user, and room for [`Links`].
///
/// Nodes are compared to find damage, so `with_links` must always give the same node for the same label, payload and
/// links.
pub trait FlatNode: Copy + PartialEq {
    /// The type of labels. A label distinguishes a node from its siblings.
    type Label: Copy + Ord;

    /// The largest `num_parents` that a leaf has room for, and so the greatest depth of a trie.
    const DEPTH_MAX: usize;

    /// The node's label.
    fn label(&self) -> Self::Label;

    /// The links that the node carries. `None` if it has children and no room for its links, which then follow from
    /// the children's.
    fn links(&self) -> Option<Links>;

    /// The same node with other links. A leaf always has room for its links, as `num_parents` is at most [`DEPTH_MAX`](Self::DEPTH_MAX).
    /// Afterwards, the node's `links` returns them, or `None` if they have no room.
    #[must_use]
    fn with_links(self, links: Links) -> Self;
}
