//! The layout of a token trie: a forest in depth-first order, in one array, walked without recursion.
//!
//! # The layout
//!
//! Every node is followed by its children, each with its own subtree. Two numbers of each node replace all pointers,
//! its [`Links`]:
//!
//! - `subtree_size`: number of nodes of the subtree, the node itself included. Adding it to a node's index skips the
//!   subtree.
//! - `num_parents`: number of levels to pop from the node, to get to the parent of the node that comes after its
//!   subtree. It is 1 if a sibling comes next, and one more for each ancestor that ends there too. After the last
//!   node it leads back to the roots.
//!
//! The root in the drawing is not stored: the array has the root's children with their subtrees. In the same way, the
//! children of any node form a forest with their subtrees.
//!
//! ```text
//!                (ε)                        depth 0, not stored
//!         ┌───────┼───────┐
//!        a,1     b,1     c,1                depth 1: letter, num_parents
//!    ┌────┼────┐
//!   x,1  y,1  z,2                           depth 2: after az comes b, two levels up
//!      ┌──┴─┐  └─┐
//!     a,1  b,2  a,3                         depth 3: after aza comes b, three levels up
//!
//! index          0    1    2    3    4    5    6    7    8
//! letter         a    x    y    a    b    z    a    b    c
//! subtree_size   7    1    3    1    1    2    1    1    1
//! num_parents    1    1    1    1    2    2    3    1    1
//! ```
//!
//! # The walk
//!
//! The state of a walk is an index and a depth. At node `n` of depth `d` it goes one of two ways:
//!
//! - *into* the subtree: the index grows by 1. If `n` has children, the next depth is `d + 1`; if `n` is a leaf
//!   (`subtree_size` is 1), it is `d + 1 - num_parents`.
//! - *past* the subtree: the index grows by `subtree_size`, and the next depth is `d + 1 - num_parents`.
//!
//! As an example, a walk leaves out everything that begins with `ay`. It visits `a` (depth 1), `ax` (2) and `ay` (2),
//! and skips to index 2 + 3 = 5. Then come `az` (2) and `aza` (3). After `aza` the walk pops three levels, to `b`
//! (1), and then visits `c` (1). A walk that keeps a stack of its own pops `num_parents` entries where the depth falls.
//!
//! If the two numbers of a node with children do not fit its fields, the node carries neither: both follow from its
//! children (see [`links`]). A leaf's `num_parents` always fits.

use super::mask::bogus_token;
use super::token::{Links, TokenId, TokenNode};
use super::tokens::Vocabulary;

/// Returns the nodes of a vocabulary's trie. Every link is sound: each size covers exactly the subtree, and popping the
/// given number of levels leads to the parent of the next node.
///
/// Siblings are ordered by their bytes. Tokens with the same bytes are siblings, the lowest first. The first of these
/// siblings has the subtree.
pub(super) fn nodes(vocabulary: &Vocabulary) -> Vec<TokenNode> {
    let mut entries: Vec<_> = vocabulary.iter().filter(|(_, bytes)| !bytes.is_empty()).collect();
    entries.sort_by_key(|(_, bytes)| *bytes);
    let mut path = Path::default();
    let mut before: &[u8] = &[];
    for (token, bytes) in entries {
        if bytes == before {
            path.repeat(token);
            continue;
        }
        let pairs = before.iter().zip(bytes);
        let shared = pairs.take_while(|(one, other)| one == other).count();
        path.leave_to(shared);
        for (length, byte) in (1..).zip(bytes).skip(shared) {
            let bogus = bogus_token(vocabulary.size(), path.nodes.len());
            let token = if length == bytes.len() { token.0 } else { bogus };
            path.enter(TokenNode::new(*byte, token));
        }
        before = bytes;
    }
    path.leave_to(0);
    path.nodes
}

/// Nodes of a trie that is being built, and the path from the root to the last node.
#[derive(Default)]
struct Path {
    nodes: Vec<TokenNode>,
    open: Vec<OpenNode>,
}

/// A node on the path from the root to the last node. Its links are not known before its subtree ends.
struct OpenNode {
    index: usize,
    /// Nodes for further tokens that have the same bytes as this node's token. They come after the node's subtree.
    repeats: Vec<TokenNode>,
}

impl Path {
    fn enter(&mut self, node: TokenNode) {
        self.open.push(OpenNode {
            index: self.nodes.len(),
            repeats: Vec::new(),
        });
        self.nodes.push(node);
    }

    /// Adds a token with the same bytes as the last node.
    fn repeat(&mut self, token: TokenId) {
        if let (Some(last), Some(node)) = (self.open.last_mut(), self.nodes.last()) {
            last.repeats.push(TokenNode::new(node.byte(), token.0));
        }
    }

    /// Leaves the path's nodes below the first `depth` nodes. When a node is left, its repeats become its siblings.
    fn leave_to(&mut self, depth: usize) {
        for level in (depth..self.open.len()).rev() {
            let node = self.open.get_mut(level);
            for repeat in node.map_or(Vec::new(), |node| std::mem::take(&mut node.repeats)) {
                self.end_to(level);
                self.enter(repeat);
            }
        }
        self.end_to(depth);
    }

    /// Takes nodes off the path until `depth` nodes are left, and sets the links of each node taken off. The next node,
    /// if there is one, has depth `depth + 1`.
    fn end_to(&mut self, depth: usize) {
        while self.open.len() > depth {
            let num_parents = self.open.len() - depth;
            let Some(OpenNode { index, .. }) = self.open.pop() else {
                return;
            };
            let subtree_size = self.nodes.len() - index;
            if let Some(node) = self.nodes.get_mut(index) {
                *node = node.with_links(Links {
                    subtree_size,
                    num_parents,
                });
            }
        }
    }
}

/// Returns the [`Links`] of the node at `index`, whether or not the node stores them. `None` if there is no such node.
///
/// A large node does not store its links, because they do not fit. They are computed from the links of the node's
/// children. The links of a large child are computed from those of its own children, and so on. This takes as many
/// steps as these large nodes have children, which is usually far fewer than the nodes of the subtree.
pub(super) fn links(nodes: &[TokenNode], index: usize) -> Option<Links> {
    if let Some(links) = nodes.get(index)?.links() {
        return Some(links);
    }
    // Depth relative to the node, which has depth 0 here. Its subtree ends where the pops lead to its own level or above.
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

/// Returns the node at `first` and the siblings after it, each with its index. Looks for the next sibling only when the
/// iterator is asked for it, because most callers stop early.
pub(super) fn siblings(nodes: &[TokenNode], first: usize) -> impl Iterator<Item = (usize, TokenNode)> {
    let mut last = None;
    std::iter::from_fn(move || {
        let index = match last {
            None => first,
            Some(last) => {
                let links = links(nodes, last)?;
                // The next node has another parent if more than one level is popped.
                (links.num_parents == 1).then_some(last + links.subtree_size)?
            }
        };
        last = Some(index);
        Some((index, *nodes.get(index)?))
    })
}

#[cfg(test)]
#[path = "flat_tests.rs"]
mod tests;
