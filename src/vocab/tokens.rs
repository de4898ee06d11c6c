//! Vocabularies: the bytes of each token.

use std::collections::BTreeMap;

use super::error::VocabularyError;
use super::token::{TOKEN_BYTES_MAX, TokenId, VOCABULARY_SIZE_MAX};

/// The bytes of all tokens of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// Offset at which each token's bytes end. The next token's bytes begin there.
    ends: Vec<u32>,
}

impl Vocabulary {
    /// Returns the size of the vocabulary: one more than the largest token number in use. Unused numbers below it
    /// count, too.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of a token; empty for special tokens and unused numbers. `None` for a number outside of the
    /// vocabulary.
    #[must_use]
    pub fn bytes(&self, token: TokenId) -> Option<&[u8]> {
        let end = *self.ends.get(token.index())?;
        let before = token
            .index()
            .checked_sub(1)
            .and_then(|before| self.ends.get(before));
        self.bytes
            .get(before.copied().unwrap_or(0) as usize..end as usize)
    }

    /// Returns all tokens with their bytes, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (TokenId, &[u8])> {
        (0..)
            .map(TokenId)
            .map_while(|token| Some((token, self.bytes(token)?)))
    }

    /// Returns the number of tokens without bytes: special tokens and unused numbers.
    #[must_use]
    pub fn without_bytes(&self) -> usize {
        self.iter().filter(|(_, bytes)| bytes.is_empty()).count()
    }
}

/// Builder of a vocabulary. Tokens are added in any order.
#[derive(Debug, Clone, Default)]
pub struct VocabularyBuilder {
    tokens: BTreeMap<u32, Vec<u8>>,
    size_min: usize,
}

impl VocabularyBuilder {
    /// Makes a builder without tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a token. Special tokens have no bytes.
    ///
    /// # Errors
    ///
    /// If the number is too large, if the number already has other bytes, or if there are too many bytes.
    pub fn insert(&mut self, id: u64, bytes: Vec<u8>) -> Result<(), VocabularyError> {
        let token = checked(id, &bytes)?;
        match self.tokens.get(&token.0) {
            Some(before) if *before != bytes => Err(VocabularyError::IdTwice { id: token }),
            _ => self.replace(id, bytes),
        }
    }

    /// Adds a token, or replaces the bytes of a token that exists.
    ///
    /// # Errors
    ///
    /// If the number is too large, or if there are too many bytes.
    pub fn replace(&mut self, id: u64, bytes: Vec<u8>) -> Result<(), VocabularyError> {
        let token = checked(id, &bytes)?;
        self.tokens.insert(token.0, bytes);
        Ok(())
    }

    /// Makes the vocabulary at least `size` tokens large, for models with more logits than tokens.
    ///
    /// # Errors
    ///
    /// If `size` is too large.
    pub fn reserve(&mut self, size: u64) -> Result<(), VocabularyError> {
        let too_large = VocabularyError::IdTooLarge {
            id: size.saturating_sub(1),
        };
        let size = usize::try_from(size)
            .ok()
            .filter(|size| *size <= VOCABULARY_SIZE_MAX);
        self.size_min = self.size_min.max(size.ok_or(too_large)?);
        Ok(())
    }

    /// Builds the vocabulary of the added tokens.
    ///
    /// # Errors
    ///
    /// If all tokens together have more than 4 GiB.
    pub fn build(self) -> Result<Vocabulary, VocabularyError> {
        let last = self.tokens.last_key_value().map_or(0, |(id, _)| *id as usize + 1);
        let mut vocabulary = Vocabulary {
            bytes: Vec::new(),
            ends: Vec::with_capacity(last.max(self.size_min)),
        };
        let end = |bytes: &Vec<u8>| u32::try_from(bytes.len()).map_err(|_| VocabularyError::TooManyBytes);
        for (id, bytes) in &self.tokens {
            vocabulary.ends.resize(*id as usize, end(&vocabulary.bytes)?);
            vocabulary.bytes.extend_from_slice(bytes);
            vocabulary.ends.push(end(&vocabulary.bytes)?);
        }
        let size = vocabulary.ends.len().max(self.size_min);
        vocabulary.ends.resize(size, end(&vocabulary.bytes)?);
        Ok(vocabulary)
    }
}

fn checked(id: u64, bytes: &[u8]) -> Result<TokenId, VocabularyError> {
    let number = u32::try_from(id)
        .ok()
        .filter(|id| (*id as usize) < VOCABULARY_SIZE_MAX);
    let token = TokenId(number.ok_or(VocabularyError::IdTooLarge { id })?);
    if bytes.len() > TOKEN_BYTES_MAX {
        return Err(VocabularyError::TokenTooLong {
            id: token,
            bytes: bytes.len(),
        });
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_have_no_bytes() {
        let mut builder = VocabularyBuilder::new();
        builder.insert(4, b"four".to_vec()).unwrap();
        builder.insert(1, b"one".to_vec()).unwrap();
        builder.insert(1, b"one".to_vec()).unwrap();
        builder.reserve(7).unwrap();
        let vocabulary = builder.build().unwrap();
        let tokens: Vec<&[u8]> = vocabulary.iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(tokens, [&b""[..], b"one", b"", b"", b"four", b"", b""]);
        assert_eq!((vocabulary.size(), vocabulary.without_bytes()), (7, 5));
        assert_eq!(vocabulary.bytes(TokenId(7)), None);
        assert_eq!(VocabularyBuilder::new().build().unwrap().size(), 0);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut builder = VocabularyBuilder::new();
        let too_large = VocabularyError::IdTooLarge { id: 1 << 24 };
        assert_eq!(builder.insert(1 << 24, Vec::new()), Err(too_large.clone()));
        assert_eq!(builder.reserve((1 << 24) + 1), Err(too_large));
        assert_eq!(builder.reserve(1 << 24), Ok(()));
        assert_eq!(builder.insert(0, vec![b' '; TOKEN_BYTES_MAX]), Ok(()));
        let taken = VocabularyError::IdTwice { id: TokenId(0) };
        assert_eq!(builder.insert(0, b"other".to_vec()), Err(taken));
        let too_long = VocabularyError::TokenTooLong {
            id: TokenId(0),
            bytes: TOKEN_BYTES_MAX + 1,
        };
        assert_eq!(builder.replace(0, vec![b' '; TOKEN_BYTES_MAX + 1]), Err(too_long));
    }
}
