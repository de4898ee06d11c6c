//! Flat tries: a forest in depth-first order, in one array, walked without recursion.
//!
//! # The layout
//!
//! Every node is followed by its children, each with its own subtree. Two numbers of each node replace all pointers:
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
//! label          a    x    y    a    b    z    a    b    c
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
//! and skips to index 2 + 3 = 5. Then come `az` (2) and `aza` (3). After `aza` the walk pops three levels, to `b` (1),
//! and then visits `c` (1). [`DepthFirst`] is this walk. A walk that keeps a stack of its own, such as the walk over
//! the token trie, pops `num_parents` entries where the depth falls.
//!
//! # One layout, two uses
//!
//! The user defines the content and packing of a node by a type that implements [`FlatNode`]. This module provides
//! building ([`FlatTrieBuilder`], [`FlatTrie::from_entries`]), the walk, look-ups, and the check of data from
//! elsewhere ([`FlatTrie::from_nodes`]). If the two numbers of a node with children do not fit their fields, the node
//! carries neither: both follow from its children (see [`FlatTrie::links`]). So the fields can be narrow, with just
//! enough room for nearly all nodes. A leaf's `num_parents` always fits.
//!
//! A forest can be written to a file or read from one without an array of all nodes. It then needs no `subtree_size`.
//! [`Outline`] gives for each node only the levels to pop after it, and [`OutlineReader`] reads these numbers and
//! checks them. [`Outline`] is a type of its own because a stream cannot go back to write a size into a node that is
//! already written.

mod builder;
mod entries;
mod flat;
mod node;
mod outline;
mod validate;
mod walk;

#[cfg(test)]
mod tests;

pub use builder::{BuildError, FlatTrieBuilder};
pub use entries::EntryError;
pub use flat::{Children, FlatTrie};
pub use node::{FlatNode, Links, NODES_MAX};
pub use outline::{Outline, OutlineError, OutlineReader, OutlineRecord};
pub use validate::LayoutError;
pub use walk::{DepthFirst, Visit};
