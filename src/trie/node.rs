//! What a type must offer to be a node.

/// The most nodes of a trie.
pub const NODES_MAX: usize = u32::MAX as usize;

/// The two numbers that stand for all pointers; the module's documentation draws them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Nodes of the subtree, the node itself included; or [`Links::OVERSIZE`].
    pub subtree_size: usize,
    /// Levels to pop to get to the parent of the node after the subtree; at least 1.
    pub num_parents: usize,
}

impl Links {
    /// Stands for a `subtree_size` above [`FlatNode::SUBTREE_SIZE_MAX`]. Such a node has children, whose sizes add up to its own.
    pub const OVERSIZE: usize = 0;

    /// Of a node that is not linked yet.
    pub const UNSET: Self = Self {
        subtree_size: 1,
        num_parents: 1,
    };

    /// Whether the node has no children.
    #[must_use]
    pub fn is_leaf(self) -> bool {
        self.subtree_size == 1
    }
}

/// A node of a flat trie: a label, whatever else the user packs into it, and room for [`Links`].
pub trait FlatNode: Copy {
    /// What tells a node from its siblings.
    type Label: Copy + Ord;

    /// The largest `subtree_size` that has room in the node; at least 1.
    const SUBTREE_SIZE_MAX: usize;

    /// The largest `num_parents` that has room in the node, and so the greatest depth of a trie.
    const NUM_PARENTS_MAX: usize;

    /// The node's label.
    fn label(&self) -> Self::Label;

    /// The links that the node carries.
    fn links(&self) -> Links;

    /// The same node with other links, which are within the two limits or [`Links::OVERSIZE`]. `links` gives them back.
    #[must_use]
    fn with_links(self, links: Links) -> Self;
}

/// `size` as a node of type `N` stores it.
pub(super) fn stored_size<N: FlatNode>(size: usize) -> usize {
    if size > N::SUBTREE_SIZE_MAX {
        Links::OVERSIZE
    } else {
        size
    }
}
