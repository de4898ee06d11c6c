//! Sets of tokens, as bits or as logits.

#![allow(unsafe_code, reason = "one write a node, whose place the types promise")]

use super::error::MaskError;
use super::token::TokenId;

/// Number of words at the end of a mask for bogus tokens. A bogus token is a made-up number for a node without a token.
///
/// Nodes without a token write to these words in turn. About half of all nodes have no token. If there were only one
/// word, each of their writes would wait for the previous one.
const BOGUS_WORDS: usize = 16;

/// Returns the number of words that a mask needs for the tokens of a vocabulary of `size` tokens.
fn real_words(size: usize) -> usize {
    size.div_ceil(u64::BITS as usize)
}

/// Returns the bogus token for a node without a token. `ordinal` is the number of the node in the order in which nodes
/// are made; `size` is the size of the vocabulary in tokens.
pub(super) fn bogus_token(size: usize, ordinal: usize) -> u32 {
    let word = real_words(size) + ordinal % BOGUS_WORDS;
    // The number is at most 2^24 plus 16 words of 64 bits, which fits the 25 bits of a node.
    u32::try_from(word * u64::BITS as usize).unwrap_or(u32::MAX)
}

/// Set of tokens of one vocabulary: one bit for each token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// Bits of the tokens, followed by words for bogus tokens. These last words are zero except during a traversal.
    words: Vec<u64>,
    size: usize,
}

impl TokenMask {
    /// Makes the empty set for a vocabulary of `size` tokens.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self {
            words: vec![0; real_words(size) + BOGUS_WORDS],
            size,
        }
    }

    /// Returns the size of the vocabulary, in tokens.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the bits: token `t` is bit `t % 64` of word `t / 64`. Bits beyond the vocabulary are zero.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        self.words.get(..real_words(self.size)).unwrap_or_default()
    }

    /// Whether the token is in the set.
    #[must_use]
    pub fn contains(&self, token: TokenId) -> bool {
        let word = self.words().get(token.index() / 64).copied().unwrap_or_default();
        word >> (token.0 % 64) & 1 == 1
    }

    /// Adds a token, such as the one that ends a text. For a token out of range, returns `false` and adds nothing.
    pub fn insert(&mut self, token: TokenId) -> bool {
        let is_real = token.index() < self.size;
        match self.words.get_mut(token.index() / 64) {
            Some(word) if is_real => *word |= 1 << (token.0 % 64),
            _ => {}
        }
        is_real
    }

    /// Makes the set empty.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Returns the number of tokens in the set.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words().iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the tokens of the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> {
        (0_u32..).zip(self.words()).flat_map(|(index, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros())?;
                rest &= rest - 1;
                Some(TokenId(index * 64 + bit))
            })
        })
    }

    /// Checks that the mask is for a vocabulary of `size` tokens.
    pub(super) fn check(&self, size: usize) -> Result<(), MaskError> {
        if self.size == size {
            Ok(())
        } else {
            Err(MaskError {
                mask: self.size,
                vocabulary: size,
            })
        }
    }

    /// Returns all words, including those for bogus tokens (made-up numbers of nodes without a token).
    pub(super) fn all_words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Removes the bogus tokens (made-up numbers of nodes without a token) from the set.
    pub(super) fn clear_bogus(&mut self) {
        if let Some(bogus) = self.words.get_mut(real_words(self.size)..) {
            bogus.fill(0);
        }
    }
}

/// Receiver of the tokens that a traversal allows.
pub(super) trait AllowToken {
    /// Marks a token as allowed. `token` is the number in a node: a token, or the bogus (made-up) number of a node
    /// without a token.
    ///
    /// # Safety
    ///
    /// `token` is the number in a node. The vocabulary of the node's trie must have the same size as the vocabulary for
    /// which `self` was made.
    unsafe fn allow_of_node(&mut self, token: u32);
}

impl AllowToken for TokenMask {
    #[inline(always)]
    unsafe fn allow_of_node(&mut self, token: u32) {
        // SAFETY: there are words for all tokens and all bogus ones.
        unsafe { *self.words.get_unchecked_mut((token >> 6) as usize) |= 1_u64.wrapping_shl(token) };
    }
}

/// Receiver that writes logits: the logit of an allowed token becomes 0. The last logit is for all bogus tokens, the
/// made-up numbers of nodes without a token.
pub(super) struct Logits<'a>(pub(super) &'a mut [f32]);

impl AllowToken for Logits<'_> {
    #[inline(always)]
    unsafe fn allow_of_node(&mut self, token: u32) {
        let last = self.0.len().saturating_sub(1);
        if let Some(logit) = self.0.get_mut((token as usize).min(last)) {
            *logit = 0.0;
        }
    }
}
