//! Token tries: the flat trie of a vocabulary's tokens.

use super::error::VocabularyError;
use super::mask::{TokenMask, bogus_token};
use super::token::{TokenId, TokenNode};
use super::tokens::Vocabulary;
use kvatlas_core::trie::FlatTrie;

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
    flat: FlatTrie<TokenNode>,
    roots: Vec<Root>,
    /// For each byte, the index of the first root with this byte; `None` if no root has it.
    first_roots: Vec<Option<u32>>,
    vocabulary_size: usize,
}

impl TokenTrie {
    /// Builds the trie of a vocabulary.
    ///
    /// # Errors
    ///
    /// If the tokens make more than 2^32 nodes.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, VocabularyError> {
        let vocabulary_size = vocabulary.size();
        let entries = vocabulary.iter().filter(|(_, bytes)| !bytes.is_empty());
        let entries = entries.map(|(token, bytes)| (bytes, token)).collect();
        let mut ordinal = 0;
        let flat = FlatTrie::from_entries(entries, |byte, token: Option<TokenId>| {
            ordinal += 1;
            let bogus = || bogus_token(vocabulary_size, ordinal);
            TokenNode::new(byte, token.map_or_else(bogus, |token| token.0))
        })?;
        let mut roots = Vec::new();
        let mut first_roots = vec![None; 1 << u8::BITS];
        // A trie has at most 2^32 nodes, so every index fits.
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        for (index, node) in flat.roots() {
            let (start, end) = (number(index), number(flat.subtree_end(index)));
            let byte = node.byte();
            roots.push(Root { start, end, byte });
            if let Some(first) = first_roots.get_mut(usize::from(byte)) {
                first.get_or_insert(start);
            }
        }
        Ok(Self {
            flat,
            roots,
            first_roots,
            vocabulary_size,
        })
    }

    /// Returns the flat trie, for callers that walk over it themselves.
    #[must_use]
    pub fn flat(&self) -> &FlatTrie<TokenNode> {
        &self.flat
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.flat.len()
    }

    /// Whether no token has any bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flat.is_empty()
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
            // Siblings are in order.
            let mut siblings = self
                .flat
                .children(index)
                .skip_while(|(_, node)| node.byte() < *byte);
            let Some((child, _)) = siblings.next().filter(|(_, node)| node.byte() == *byte) else {
                break;
            };
            index = child;
            longest = self.token_at(index).map(|token| (token, length)).or(longest);
        }
        longest
    }

    /// Returns the token of the node at `index`; `None` for a node without a token.
    fn token_at(&self, index: usize) -> Option<TokenId> {
        let token = TokenId(self.flat.get(index)?.token_bits());
        (token.index() < self.vocabulary_size).then_some(token)
    }

    pub(super) fn nodes(&self) -> &[TokenNode] {
        self.flat.nodes()
    }

    pub(super) fn roots(&self) -> &[Root] {
        &self.roots
    }
}
