//! Numbers of tokens, and the nodes of a token trie in eight bytes.

use std::fmt;

/// Maximum number of tokens of a vocabulary. All token numbers are below it.
pub const VOCABULARY_SIZE_MAX: usize = 1 << 24;

/// Maximum number of bytes of a token. The longest known token, 1,024 blanks, has exactly this length.
pub const TOKEN_BYTES_MAX: usize = 1 << (PARENTS_BITS - 1);

/// Number of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

impl TokenId {
    /// Returns the token's number as an index.
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
const INNER_PARENTS_BITS: u32 = 5;
const SIZE_BITS: u32 = 15;
/// Number of bits for a token's number. It is one more than real tokens need, for the bogus (made-up) numbers of
/// nodes without a token.
const TOKEN_BITS: u32 = 25;
/// Number of bits of the field for the change of depth on the way into a node's subtree, its sign included.
const PARENTS_BITS: u32 = 11;

const INNER_PARENTS_SHIFT: u32 = BYTE_BITS;
const SIZE_SHIFT: u32 = INNER_PARENTS_SHIFT + INNER_PARENTS_BITS;
const TOKEN_SHIFT: u32 = SIZE_SHIFT + SIZE_BITS;
const PARENTS_SHIFT: u32 = TOKEN_SHIFT + TOKEN_BITS;
const _: () = assert!(PARENTS_SHIFT + PARENTS_BITS == u64::BITS);

const INNER_PARENTS_MAX: u64 = (1 << INNER_PARENTS_BITS) - 1;
const SIZE_MAX: u64 = (1 << SIZE_BITS) - 1;
const TOKEN_MASK: u64 = (1 << TOKEN_BITS) - 1;

/// Two numbers of a node that take the place of pointers to other nodes. A drawing in `flat.rs` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Number of nodes of the subtree, the node itself included.
    pub subtree_size: usize,
    /// Number of levels to pop to get to the parent of the node after the subtree; at least 1.
    pub num_parents: usize,
}

/// A node of a token trie, in 64 bits:
///
/// ```text
/// bit   63             53 52                        28 27            13 12         8 7      0
///      ┌─────────────────┬────────────────────────────┬────────────────┬────────────┬────────┐
/// leaf │ 1 - num_parents │ token                      │ 1              │ 0          │ byte   │
///      ├─────────────────┼────────────────────────────┼────────────────┼────────────┼────────┤
/// inner│ 1               │ token                      │ subtree_size   │ num_parents│ byte   │
///      ├─────────────────┼────────────────────────────┼────────────────┼────────────┼────────┤
/// large│ 1               │ token                      │ 1              │ 0          │ byte   │
///      └─────────────────┴────────────────────────────┴────────────────┴────────────┴────────┘
///       11 bits, signed   25, bogus if no token ends   15               5            8
/// ```
///
/// `num_parents` is the number of levels to pop after the node's subtree. The first field is the change of depth on the
/// way *into* the subtree: 1 for a node with children, and `1 - num_parents` for a leaf. So a walk adds the same field
/// at every node, without a choice. On the way *past* the subtree, the change of depth is the first field minus the
/// field `num_parents`.
///
/// A large node has children, but its `subtree_size` or its `num_parents` does not fit in its fields, so it stores
/// neither number. To skip a large node, the walk for tables enters it with a state that rejects everything, so it
/// needs no test for large nodes. Other walks compute the two numbers from the node's children.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct TokenNode(u64);

impl TokenNode {
    /// Makes a node without links. `token` is the number of a token, or a made-up (bogus) number if no token ends at
    /// the node.
    pub(super) fn new(byte: u8, token: u32) -> Self {
        Self(u64::from(byte) | ((u64::from(token) & TOKEN_MASK) << TOKEN_SHIFT))
    }

    /// Returns the node's byte, which is the last byte of the path to the node.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the byte is the lowest")]
    pub fn byte(self) -> u8 {
        self.0 as u8
    }

    /// Returns the number of the node's token. A node without a token has a bogus number, which is not below the
    /// vocabulary's size.
    #[inline(always)]
    #[must_use]
    pub fn token_bits(self) -> u32 {
        ((self.0 >> TOKEN_SHIFT) & TOKEN_MASK) as u32
    }

    /// Whether the node has no children.
    #[inline(always)]
    #[must_use]
    pub fn is_leaf(self) -> bool {
        self.depth_into() < 1
    }

    /// Whether the node is large: it has children, but its `subtree_size` or its `num_parents` does not fit in its
    /// fields.
    #[inline(always)]
    pub(super) fn is_large(self) -> bool {
        self.depth_past() > 0
    }

    /// Returns the field `subtree_size`, which is 1 for a large node.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the field has 15 bits")]
    pub(super) fn stored_size(self) -> usize {
        (self.0 >> SIZE_SHIFT & SIZE_MAX) as usize
    }

    /// Returns the difference between the depth of the next node in depth-first order and the depth of this node. For a
    /// node with children it is 1, for a leaf `1 - num_parents`.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the field has 11 bits")]
    pub(super) fn depth_into(self) -> isize {
        (self.0 as i64 >> PARENTS_SHIFT) as isize
    }

    /// Returns the field `num_parents`, which is 0 for a leaf and for a large node.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the field has 5 bits")]
    pub(super) fn inner_parents(self) -> usize {
        (self.0 >> INNER_PARENTS_SHIFT & INNER_PARENTS_MAX) as usize
    }

    /// Returns the change of depth to the node after this node's subtree: `1 - num_parents`. For a large node it
    /// returns 1, because a walk skips a large node by entering it.
    #[inline(always)]
    pub(super) fn depth_past(self) -> isize {
        self.depth_into() - self.inner_parents().cast_signed()
    }

    /// Returns the links that the node stores. `None` for a large node, whose links follow from those of its children.
    #[must_use]
    pub fn links(self) -> Option<Links> {
        (!self.is_large()).then(|| Links {
            subtree_size: self.stored_size(),
            num_parents: (1 - self.depth_past()).cast_unsigned(),
        })
    }

    /// Returns the same node with other links. A leaf always has room for its links.
    pub(super) fn with_links(self, links: Links) -> Self {
        let (size, pops) = (links.subtree_size as u64, links.num_parents as u64);
        let has_room = size <= SIZE_MAX && pops <= INNER_PARENTS_MAX;
        let (change, size, inner) = match size {
            1 => (1_u64.wrapping_sub(pops), 1, 0),
            _ if has_room => (1, size, pops),
            _ => (1, 1, 0),
        };
        let kept = TOKEN_MASK << TOKEN_SHIFT | u64::from(u8::MAX);
        Self(self.0 & kept | change << PARENTS_SHIFT | size << SIZE_SHIFT | inner << INNER_PARENTS_SHIFT)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_node_gives_back_what_was_packed(
            byte in any::<u8>(),
            token in 0..1_u32 << TOKEN_BITS,
            subtree_size in prop_oneof![1..100_usize, 1..1_usize << 17],
            num_parents in prop_oneof![1..100_usize, 1..=TOKEN_BYTES_MAX],
            before in 1..100_usize,
        ) {
            let links = Links { subtree_size, num_parents };
            let other = Links { subtree_size: before, num_parents: before };
            let node = TokenNode::new(byte, token).with_links(other).with_links(links);
            prop_assert_eq!(node.byte(), byte);
            prop_assert_eq!(node.token_bits(), token);
            prop_assert_eq!(node.is_leaf(), subtree_size == 1);
            let has_room = subtree_size == 1 || subtree_size < 1 << 15 && num_parents < 1 << 5;
            prop_assert_eq!(node.links(), has_room.then_some(links));
        }
    }

    #[test]
    fn a_node_has_eight_bytes() {
        assert_eq!(size_of::<TokenNode>(), 8);
    }
}
