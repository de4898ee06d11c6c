//! Hugging Face's `tokenizer.json`.
//!
//! How a token is written depends on the file: in the alphabet of GPT-2 if the decoder or the pre-tokeniser is `ByteLevel`; otherwise as
//! text, in which `▁` is a blank, and `<0x0A>` is a byte where the file says that it falls back to bytes, as SentencePiece has it.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::{LoadError, VocabularyFormat, byte_level, from_json};
use crate::tokens::{Vocabulary, VocabularyBuilder};

#[derive(Deserialize)]
struct TokenizerFile {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    decoder: Option<Component>,
    pre_tokenizer: Option<Component>,
}

#[derive(Deserialize)]
struct Model {
    /// Old files don't say that they are `BPE`.
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Vocab,
    #[serde(default)]
    byte_fallback: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    /// Of BPE: numbers by token.
    Numbers(HashMap<String, u64>),
    /// Of Unigram: tokens with scores, in order.
    Scores(Vec<(String, f64)>),
}

#[derive(Deserialize)]
struct AddedToken {
    id: u64,
    content: String,
    #[serde(default)]
    special: bool,
}

/// A decoder or a pre-tokeniser, or several in a sequence.
#[derive(Deserialize)]
struct Component {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    decoders: Vec<Component>,
    #[serde(default)]
    pretokenizers: Vec<Component>,
}

impl Component {
    fn has(&self, kind: &str) -> bool {
        let mut parts = self.decoders.iter().chain(&self.pretokenizers);
        // serde_json bounds the depth.
        self.kind == kind || parts.any(|part| part.has(kind))
    }
}

/// How tokens are written.
#[derive(Clone, Copy)]
enum Writing {
    ByteLevel,
    Text { has_bytes: bool },
}

pub(super) fn parse(content: &[u8]) -> Result<Vocabulary, LoadError> {
    let file: TokenizerFile = from_json(content, VocabularyFormat::HuggingFace)?;
    let kind = file.model.kind.as_deref().unwrap_or("BPE");
    if !matches!(kind, "BPE" | "Unigram") {
        return Err(LoadError::UnsupportedModel {
            model: kind.chars().take(40).collect(),
        });
    }
    let writing = writing(&file);
    let added: BTreeMap<u64, AddedToken> = file
        .added_tokens
        .into_iter()
        .map(|token| (token.id, token))
        .collect();
    let mut builder = VocabularyBuilder::new();
    let mut insert = |id: u64, text: &str| match added.contains_key(&id) {
        true => Ok(()),
        false => Ok::<_, LoadError>(builder.insert(id, bytes(id, text, writing)?)?),
    };
    match &file.model.vocab {
        Vocab::Numbers(numbers) => numbers.iter().try_for_each(|(text, id)| insert(*id, text))?,
        Vocab::Scores(scores) => (0..)
            .zip(scores)
            .try_for_each(|(id, (text, _))| insert(id, text))?,
    }
    for (id, token) in added {
        // Added tokens are plain text, and no text stands for a special one.
        let bytes = if token.special {
            Vec::new()
        } else {
            token.content.into_bytes()
        };
        builder.replace(id, bytes)?;
    }
    Ok(builder.build()?)
}

fn writing(file: &TokenizerFile) -> Writing {
    let has = |component: &Option<Component>, kind| component.as_ref().is_some_and(|part| part.has(kind));
    if has(&file.decoder, "ByteLevel") || has(&file.pre_tokenizer, "ByteLevel") {
        Writing::ByteLevel
    } else {
        Writing::Text {
            has_bytes: file.model.byte_fallback || has(&file.decoder, "ByteFallback"),
        }
    }
}

fn bytes(id: u64, text: &str, writing: Writing) -> Result<Vec<u8>, LoadError> {
    match writing {
        Writing::ByteLevel => {
            let byte =
                |character| byte_level::byte_of(character).ok_or(LoadError::NotByteLevel { id, character });
            text.chars().map(byte).collect()
        }
        Writing::Text { has_bytes } => {
            let byte = fallback_byte(text).filter(|_| has_bytes);
            Ok(byte.map_or_else(|| text.replace('▁', " ").into_bytes(), |byte| vec![byte]))
        }
    }
}

/// The byte of `<0x0A>`.
fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| is_byte)
}
