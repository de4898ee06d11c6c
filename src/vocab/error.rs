//! Errors in making or using a vocabulary.

use super::token::{TOKEN_BYTES_MAX, TokenId, VOCABULARY_SIZE_MAX};

/// Reason why tokens do not make a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The number of a token is too large.
    #[error(
        "token {id} is beyond the largest vocabulary, of {VOCABULARY_SIZE_MAX} tokens; renumber the tokens"
    )]
    IdTooLarge {
        /// Number of the token.
        id: u64,
    },
    /// Two entries have the same number.
    #[error("token {id} is there twice, with different bytes; remove one of them")]
    IdTwice {
        /// Number of both entries.
        id: TokenId,
    },
    /// A token has too many bytes.
    #[error("token {id} has {bytes} bytes, and at most {TOKEN_BYTES_MAX} are allowed; remove it")]
    TokenTooLong {
        /// Number of the token.
        id: TokenId,
        /// Number of bytes of the token.
        bytes: usize,
    },
    /// All tokens together have too many bytes.
    #[error("the tokens have more than 4 GiB of bytes together; remove the longest")]
    TooManyBytes,
}

/// Error for a mask that is for a vocabulary of another size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the mask is for {mask} tokens, but the vocabulary has {vocabulary}; make it with `TokenTrie::empty_mask`"
)]
pub struct MaskError {
    /// Size of the mask, in tokens.
    pub mask: usize,
    /// Size of the vocabulary, in tokens.
    pub vocabulary: usize,
}

/// Error for a list with too few logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are {logits} logits, and the vocabulary needs {needed}: one a token, and one for nodes without a token"
)]
pub struct LogitsError {
    /// Number of logits given.
    pub logits: usize,
    /// Number of logits needed.
    pub needed: usize,
}

/// Error for a byte of a text with which no token begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no token matches at byte {offset} of the text (0x{byte:02x}); use a vocabulary that has all single bytes"
)]
pub struct UnknownByte {
    /// Offset of the byte from the beginning of the text, in bytes.
    pub offset: usize,
    /// Byte with which no token begins.
    pub byte: u8,
}
