//! A token's number, and the eight bytes of a node.

use std::fmt;

use crate::trie::{FlatNode, Links};

/// The most tokens of a vocabulary: numbers from 0 to one less.
pub const VOCABULARY_SIZE_MAX: usize = 1 << 24;

/// The most bytes of a token. The longest token met so far, 1,024 blanks, has just as many.
pub const TOKEN_BYTES_MAX: usize = 1 << (PARENTS_BITS - 1);

/// A token's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

impl TokenId {
    /// The number as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

const BYTE_BITS: u32 = 8;
/// One more than a token's number needs, for the bogus numbers of nodes without a token.
const TOKEN_BITS: u32 = 25;
const SIZE_BITS: u32 = 20;
/// With a sign.
const PARENTS_BITS: u32 = 11;

const TOKEN_SHIFT: u32 = BYTE_BITS;
const SIZE_SHIFT: u32 = TOKEN_SHIFT + TOKEN_BITS;
const PARENTS_SHIFT: u32 = SIZE_SHIFT + SIZE_BITS;
const _: () = assert!(PARENTS_SHIFT + PARENTS_BITS == u64::BITS);

const TOKEN_MASK: u64 = (1 << TOKEN_BITS) - 1;
/// In place, so that a leaf is told by one test.
const SIZE_MASK: u64 = ((1 << SIZE_BITS) - 1) << SIZE_SHIFT;

/// A node of a token trie, in 64 bits:
///
/// ```text
/// bit   63              53 52                  33 32                         8 7      0
///      ┌──────────────────┬──────────────────────┬────────────────────────────┬────────┐
///      │ -num_parents     │ subtree_size - 1     │ token                      │ byte   │
///      └──────────────────┴──────────────────────┴────────────────────────────┴────────┘
///        11 bits, signed    20, all ones: larger   25, bogus if no token ends   8
/// ```
///
/// `num_parents` is stored below zero because it is subtracted: from the depth of the node's children, to give that of the node after its
/// subtree.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct TokenNode(u64);

impl TokenNode {
    /// A node with these bits of a token's number, bogus or not, and without links.
    pub(super) fn new(byte: u8, token: u32) -> Self {
        Self(u64::from(byte) | ((u64::from(token) & TOKEN_MASK) << TOKEN_SHIFT))
    }

    /// The last byte of the path to the node.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the byte is the lowest")]
    pub fn byte(self) -> u8 {
        self.0 as u8
    }

    /// The token, or a bogus one: a number that is not below the vocabulary's size.
    #[inline(always)]
    #[must_use]
    pub fn token_bits(self) -> u32 {
        ((self.0 >> TOKEN_SHIFT) & TOKEN_MASK) as u32
    }

    /// Whether the node has no children.
    #[inline(always)]
    #[must_use]
    pub fn is_leaf(self) -> bool {
        self.0 & SIZE_MASK == 0
    }

    /// Whether `subtree_size` has no room.
    #[inline(always)]
    pub(super) fn is_oversize(self) -> bool {
        self.0 & SIZE_MASK == SIZE_MASK
    }

    /// `subtree_size` of a node that is not oversize.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the field has 20 bits")]
    pub(super) fn stored_size(self) -> usize {
        ((self.0 & SIZE_MASK) >> SIZE_SHIFT) as usize + 1
    }

    /// `-num_parents`: from -1024 to -1. Added to the depth of children, it gives the depth after the subtree.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the field has 11 bits")]
    pub(super) fn depth_change(self) -> isize {
        (self.0 as i64 >> PARENTS_SHIFT) as isize
    }

    /// Levels to pop after the subtree.
    #[inline(always)]
    #[must_use]
    pub fn num_parents(self) -> usize {
        // Not by `unsigned_abs`, which knows nothing of the sign: this is in the inner loop.
        self.depth_change().wrapping_neg().cast_unsigned()
    }
}

impl fmt::Debug for TokenNode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TokenNode")
            .field("byte", &self.byte())
            .field("token", &self.token_bits())
            .field("links", &self.links())
            .finish()
    }
}

impl FlatNode for TokenNode {
    type Label = u8;
    const SUBTREE_SIZE_MAX: usize = (1 << SIZE_BITS) - 1;
    const NUM_PARENTS_MAX: usize = TOKEN_BYTES_MAX;

    fn label(&self) -> u8 {
        self.byte()
    }

    fn links(&self) -> Links {
        Links {
            subtree_size: if self.is_oversize() {
                Links::OVERSIZE
            } else {
                self.stored_size()
            },
            num_parents: self.num_parents(),
        }
    }

    fn with_links(self, links: Links) -> Self {
        // A size of 0 wraps to all ones, which is how `OVERSIZE` is stored.
        let size = (links.subtree_size.wrapping_sub(1) as u64) << SIZE_SHIFT & SIZE_MASK;
        let pops = (links.num_parents as u64).wrapping_neg() << PARENTS_SHIFT;
        let kept = (1 << SIZE_SHIFT) - 1;
        Self(self.0 & kept | size | pops)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_node_gives_back_what_was_packed(
            byte in any::<u8>(),
            token in 0..1_u32 << TOKEN_BITS,
            subtree_size in 0..=TokenNode::SUBTREE_SIZE_MAX,
            num_parents in 1..=TokenNode::NUM_PARENTS_MAX,
        ) {
            let links = Links { subtree_size, num_parents };
            let node = TokenNode::new(byte, token).with_links(Links::UNSET).with_links(links);
            prop_assert_eq!(node.byte(), byte);
            prop_assert_eq!(node.token_bits(), token);
            prop_assert_eq!(node.links(), links);
            prop_assert_eq!(node.is_leaf(), subtree_size == 1);
        }
    }

    #[test]
    fn a_node_has_eight_bytes() {
        assert_eq!(size_of::<TokenNode>(), 8);
        let largest = TokenNode::SUBTREE_SIZE_MAX;
        for subtree_size in [1, largest, Links::OVERSIZE] {
            for num_parents in [1, TokenNode::NUM_PARENTS_MAX] {
                let links = Links {
                    subtree_size,
                    num_parents,
                };
                assert_eq!(TokenNode::new(0xff, u32::MAX).with_links(links).links(), links);
            }
        }
    }
}
