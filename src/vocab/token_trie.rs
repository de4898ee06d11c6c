//! Token tries: the flat trie of a vocabulary's tokens.

use super::flat;
use super::mask::TokenMask;
use super::token::{Links, TokenId, TokenNode};
use super::tokens::Vocabulary;

/// Root of the trie: the first byte of some tokens, and the range of nodes of its subtree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Root {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) byte: u8,
}

/// The flat trie of a vocabulary's tokens. It does not change, and can be shared among threads.
#[derive(Debug, Clone)]
pub struct TokenTrie {
    nodes: Vec<TokenNode>,
    roots: Vec<Root>,
    /// For each byte, the index of the first root with this byte; `None` if no root has it.
    first_roots: Vec<Option<u32>>,
    vocabulary_size: usize,
}

impl TokenTrie {
    /// Builds the trie of a vocabulary.
    #[must_use]
    pub fn new(vocabulary: &Vocabulary) -> Self {
        let nodes = flat::nodes(vocabulary);
        let mut roots = Vec::new();
        let mut first_roots = vec![None; 1 << u8::BITS];
        // A vocabulary has at most 4 GiB of bytes, and the trie no more nodes than that.
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        for (index, node) in flat::siblings(&nodes, 0) {
            let size = flat::links(&nodes, index).map_or(1, |links| links.subtree_size);
            let (start, end) = (number(index), number(index + size));
            let byte = node.byte();
            roots.push(Root { start, end, byte });
            if let Some(first) = first_roots.get_mut(usize::from(byte)) {
                first.get_or_insert(start);
            }
        }
        Self {
            nodes,
            roots,
            first_roots,
            vocabulary_size: vocabulary.size(),
        }
    }

    /// Returns the nodes in depth-first order, for callers that walk over them themselves.
    #[must_use]
    pub fn nodes(&self) -> &[TokenNode] {
        &self.nodes
    }

    /// Returns the links of the node at `index`. It computes them if they do not fit in the node. `None` if there is no
    /// such node.
    #[must_use]
    pub fn links(&self, index: usize) -> Option<Links> {
        flat::links(&self.nodes, index)
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether no token has any bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the size of the vocabulary, in tokens.
    #[must_use]
    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary_size
    }

    /// Returns an empty mask for this vocabulary.
    #[must_use]
    pub fn empty_mask(&self) -> TokenMask {
        TokenMask::new(self.vocabulary_size)
    }

    /// Returns the lowest token with exactly these bytes; `None` if there is none.
    #[must_use]
    pub fn token(&self, bytes: &[u8]) -> Option<TokenId> {
        let found = self.longest_prefix(bytes)?;
        (found.1 == bytes.len()).then_some(found.0)
    }

    /// Returns the token that is the longest prefix of `bytes`, and its length in bytes; `None` if no token is a prefix.
    #[must_use]
    pub fn longest_prefix(&self, bytes: &[u8]) -> Option<(TokenId, usize)> {
        let (first, rest) = bytes.split_first()?;
        let root = self.first_roots.get(usize::from(*first)).copied().flatten()?;
        let mut index = root as usize;
        let mut longest = self.token_at(index).map(|token| (token, 1));
        for (length, byte) in (2..).zip(rest) {
            if self.nodes.get(index).is_none_or(|node| node.is_leaf()) {
                break;
            }
            // Siblings are in order.
            let mut children = flat::siblings(&self.nodes, index + 1);
            let found = children.find(|(_, node)| node.byte() >= *byte);
            let Some((child, _)) = found.filter(|(_, node)| node.byte() == *byte) else {
                break;
            };
            index = child;
            longest = self.token_at(index).map(|token| (token, length)).or(longest);
        }
        longest
    }

    /// Returns the token of the node at `index`; `None` for a node without a token.
    fn token_at(&self, index: usize) -> Option<TokenId> {
        let token = TokenId(self.nodes.get(index)?.token_bits());
        (token.index() < self.vocabulary_size).then_some(token)
    }

    pub(super) fn roots(&self) -> &[Root] {
        &self.roots
    }
}
