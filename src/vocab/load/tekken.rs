//! Mistral's `tekken.json`. The special tokens come first, then tokens in base64 by rank, up to the size of the
//! vocabulary.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{LoadError, VocabularyFormat, decode_base64, from_json};
use crate::tokens::{Vocabulary, VocabularyBuilder};

#[derive(Deserialize)]
struct TekkenFile<'a> {
    config: TekkenConfig,
    #[serde(borrow)]
    vocab: Vec<TekkenToken<'a>>,
    /// The special tokens. Their names are ignored, because special tokens stand for no text.
    #[serde(rename = "special_tokens")]
    _special_tokens: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    /// Number of all tokens, including special tokens. The file may contain more tokens than that.
    default_vocab_size: u64,
    default_num_special_tokens: u64,
}

#[derive(Deserialize)]
struct TekkenToken<'a> {
    rank: u64,
    #[serde(borrow)]
    token_bytes: Cow<'a, str>,
}

pub(super) fn parse(content: &[u8]) -> Result<Vocabulary, LoadError> {
    let file: TekkenFile = from_json(content, VocabularyFormat::Tekken)?;
    let size = file.config.default_vocab_size;
    let special = file.config.default_num_special_tokens;
    let ranks = size
        .checked_sub(special)
        .ok_or(LoadError::Config { special, size })?;
    let mut builder = VocabularyBuilder::new();
    builder.reserve(size)?;
    for token in file.vocab.iter().filter(|token| token.rank < ranks) {
        let id = token.rank + special;
        let bytes = decode_base64(token.token_bytes.as_bytes()).ok_or(LoadError::Base64 { id })?;
        builder.insert(id, bytes)?;
    }
    Ok(builder.build()?)
}
