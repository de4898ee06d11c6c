//! Interface that a type must implement to be a node of a flat trie.

/// Maximum number of nodes of a trie.
pub const NODES_MAX: usize = u32::MAX as usize;

/// Two numbers of a node that replace all pointers. A drawing in the module's documentation shows them.
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
/// To find damage, the links of a stored trie are computed again, and its nodes are compared with the result. So
/// `with_links` must always give the same node for the same label, payload and links.
pub trait FlatNode: Copy + PartialEq {
    /// Type of the labels. A label distinguishes a node from its siblings.
    type Label: Copy + Ord;

    /// Maximum `num_parents` that a leaf has room for. It is also the maximum depth of a trie.
    const DEPTH_MAX: usize;

    /// Returns the label of the node.
    fn label(&self) -> Self::Label;

    /// Returns the links that the node carries. `None` if the node has children and has no room for its links. The
    /// links then follow from those of its children.
    fn links(&self) -> Option<Links>;

    /// Returns the same node with other links. A leaf always has room for its links, as `num_parents` is at most
    /// [`DEPTH_MAX`](Self::DEPTH_MAX). Afterwards, the node's `links` returns these links, or `None` if the node has
    /// no room for them.
    #[must_use]
    fn with_links(self, links: Links) -> Self;
}
