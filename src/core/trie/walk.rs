//! Walk in depth-first order, used by the rest of the module. The state of a walk is an index and a depth.

use super::flat::links;
use super::node::FlatNode;

/// A node that a walk visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visit<'a, N> {
    /// Index of the node.
    pub index: usize,
    /// Depth of the node. Roots have depth 1.
    pub depth: usize,
    /// The node.
    pub node: &'a N,
}

/// A walk in depth-first order. [`skip_subtree`](Self::skip_subtree) leaves out the nodes below the node visited
/// last.
#[derive(Debug, Clone)]
pub struct DepthFirst<'a, N> {
    nodes: &'a [N],
    next: usize,
    depth: usize,
    last: Option<Visit<'a, N>>,
}

impl<'a, N: FlatNode> DepthFirst<'a, N> {
    pub(super) fn new(nodes: &'a [N]) -> Self {
        Self {
            nodes,
            next: 0,
            depth: 1,
            last: None,
        }
    }

    /// Continues after the subtree of the node visited last. Does nothing before the first visit, or if called a
    /// second time after the same visit.
    pub fn skip_subtree(&mut self) {
        let Some(Visit { index, depth, .. }) = self.last.take() else {
            return;
        };
        if let Some(links) = links(self.nodes, index) {
            self.next = index + links.subtree_size;
            self.depth = depth_after(depth, links.num_parents);
        }
    }
}

impl<'a, N: FlatNode> Iterator for DepthFirst<'a, N> {
    type Item = Visit<'a, N>;

    fn next(&mut self) -> Option<Visit<'a, N>> {
        let node = self.nodes.get(self.next)?;
        let visit = Visit {
            index: self.next,
            depth: self.depth,
            node,
        };
        self.next += 1;
        self.depth = match node.links() {
            Some(links) if links.is_leaf() => depth_after(self.depth, links.num_parents),
            _ => self.depth + 1,
        };
        self.last = Some(visit);
        Some(visit)
    }
}

/// Returns the depth of the node after a subtree whose root has depth `depth`.
pub(super) fn depth_after(depth: usize, num_parents: usize) -> usize {
    (depth + 1).saturating_sub(num_parents)
}
