//! The errors in making a vocabulary, or in asking it.

use super::token::{TOKEN_BYTES_MAX, TokenId, VOCABULARY_SIZE_MAX};
use kvatlas_core::trie::EntryError;

/// Why tokens don't make a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// A token's number does not fit.
    #[error(
        "token {id} is beyond the largest vocabulary, of {VOCABULARY_SIZE_MAX} tokens; renumber the tokens"
    )]
    IdTooLarge {
        /// The number.
        id: u64,
    },
    /// Two entries claim one number.
    #[error("token {id} is there twice, with different bytes; remove one of them")]
    IdTwice {
        /// The number.
        id: TokenId,
    },
    /// A token's bytes are too many.
    #[error("token {id} has {bytes} bytes, and at most {TOKEN_BYTES_MAX} are allowed; remove it")]
    TokenTooLong {
        /// The number.
        id: TokenId,
        /// How many bytes it has.
        bytes: usize,
    },
    /// All tokens together are too many bytes.
    #[error("the tokens have more than 4 GiB of bytes together; remove the longest")]
    TooManyBytes,
    /// The trie cannot be built.
    #[error("the vocabulary's trie cannot be built: {0}")]
    Trie(#[from] EntryError),
}

/// A mask is for a vocabulary of another size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the mask is for {mask} tokens, but the vocabulary has {vocabulary}; make it with `TokenTrie::empty_mask`"
)]
pub struct MaskError {
    /// The mask's size in tokens.
    pub mask: usize,
    /// The vocabulary's size in tokens.
    pub vocabulary: usize,
}

/// The logits are too few.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are {logits} logits, and the vocabulary needs {needed}: one a token, and one for nodes without a token"
)]
pub struct LogitsError {
    /// How many logits there are.
    pub logits: usize,
    /// How many are needed.
    pub needed: usize,
}

/// No token begins with a byte of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no token matches at byte {offset} of the text (0x{byte:02x}); use a vocabulary that has all single bytes"
)]
pub struct UnknownByte {
    /// The offset, in bytes from the beginning.
    pub offset: usize,
    /// The byte that no token begins with.
    pub byte: u8,
}
