//! Hugging Face's `tokenizer.json`.
//!
//! The file's decoder turns the text of a token into the token's bytes. This is also true of added tokens. A file
//! without a decoder is read in one of two ways:
//!
//! - If its pre-tokeniser is `ByteLevel`, its texts are in the alphabet of GPT-2.
//! - Otherwise `▁` is a blank, as in SentencePiece, and a text such as `<0x0A>` is a byte if the model falls back to bytes.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::decoder::{DecoderStep, TokenDecoder, TokenizerComponent};
use super::{LoadError, VocabularyFormat, byte_level, from_json};
use crate::tokens::{Vocabulary, VocabularyBuilder};

#[derive(Deserialize)]
struct TokenizerFile {
    model: TokenizerModel,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    decoder: Option<TokenizerComponent>,
    pre_tokenizer: Option<TokenizerComponent>,
}

#[derive(Deserialize)]
struct TokenizerModel {
    /// Kind of the model. `None` in old files, in which the kind is `BPE`.
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Vocab,
    #[serde(default)]
    byte_fallback: bool,
    /// Suffix of tokens that end a word.
    end_of_word_suffix: Option<String>,
    /// Prefix of tokens that continue a word.
    continuing_subword_prefix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    /// Vocabulary of a BPE model: the number of each token.
    Numbers(HashMap<String, u64>),
    /// Vocabulary of a Unigram model: tokens with scores, in the order of their numbers.
    Scores(Vec<(String, f64)>),
}

#[derive(Deserialize)]
struct AddedToken {
    id: u64,
    content: String,
    #[serde(default)]
    special: bool,
}

pub(super) fn parse(content: &[u8]) -> Result<Vocabulary, LoadError> {
    let file: TokenizerFile = from_json(content, VocabularyFormat::HuggingFace)?;
    let kind = file.model.kind.as_deref().unwrap_or("BPE");
    if !matches!(kind, "BPE" | "Unigram") {
        return Err(LoadError::UnsupportedModel {
            model: kind.chars().take(40).collect(),
        });
    }
    let marks = [
        ("end_of_word_suffix", &file.model.end_of_word_suffix),
        ("continuing_subword_prefix", &file.model.continuing_subword_prefix),
    ];
    if let Some((mark, _)) = marks
        .iter()
        .find(|(_, text)| text.as_ref().is_some_and(|text| !text.is_empty()))
    {
        let step = (*mark).to_owned();
        return Err(LoadError::UnsupportedDecoder { step });
    }
    let decoder = decoder(&file)?;
    let added: BTreeMap<u64, AddedToken> = file
        .added_tokens
        .into_iter()
        .map(|token| (token.id, token))
        .collect();
    let mut builder = VocabularyBuilder::new();
    let mut insert = |id: u64, text: &str| match added.contains_key(&id) {
        true => Ok(()),
        false => Ok::<_, LoadError>(builder.insert(id, bytes(id, text, &decoder)?)?),
    };
    match &file.model.vocab {
        Vocab::Numbers(numbers) => numbers.iter().try_for_each(|(text, id)| insert(*id, text))?,
        Vocab::Scores(scores) => (0..)
            .zip(scores)
            .try_for_each(|(id, (text, _))| insert(id, text))?,
    }
    for (id, token) in added {
        // No text stands for a special token.
        let bytes = if token.special {
            Vec::new()
        } else {
            decoder.bytes(&token.content)
        };
        builder.replace(id, bytes)?;
    }
    Ok(builder.build()?)
}

/// Returns the decoder that the file describes. If it describes none, returns one that suits the file's model and
/// pre-tokeniser.
fn decoder(file: &TokenizerFile) -> Result<TokenDecoder, LoadError> {
    if let Some(decoder) = &file.decoder {
        return TokenDecoder::new(decoder);
    }
    let is_byte_level = |part: &TokenizerComponent| part.has("ByteLevel");
    let blanks = DecoderStep::Replace {
        from: "▁".to_owned(),
        to: " ".to_owned(),
    };
    let steps = match file.model.byte_fallback {
        _ if file.pre_tokenizer.as_ref().is_some_and(is_byte_level) => vec![DecoderStep::ByteLevel],
        true => vec![DecoderStep::ByteFallback, blanks],
        false => vec![blanks],
    };
    Ok(TokenDecoder::of_steps(steps))
}

/// Returns the bytes of a token of the model. In a byte-level file each character of a token stands for a byte.
fn bytes(id: u64, text: &str, decoder: &TokenDecoder) -> Result<Vec<u8>, LoadError> {
    if decoder.is_byte_level()
        && let Some(character) = text.chars().find(|one| byte_level::byte_of(*one).is_none())
    {
        return Err(LoadError::NotByteLevel { id, character });
    }
    Ok(decoder.bytes(text))
}
