//! Loading vocabularies from the files that are distributed with models.

mod byte_level;
mod decoder;
mod hugging_face;
mod tekken;
mod tiktoken;

use kvatlas_core::worded;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::error::VocabularyError;
use super::tokens::Vocabulary;

/// Maximum size of a file, in bytes. The largest known file has 35 MB.
pub const VOCABULARY_FILE_BYTES_MAX: u64 = 1 << 29;

worded! {
    /// Formats of vocabulary files that can be read.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum VocabularyFormat {
        /// Hugging Face `tokenizer.json`.
        HuggingFace => "hugging-face",
        /// tiktoken's files: each line has a token in base64 and its rank.
        Tiktoken => "tiktoken",
        /// Mistral's `tekken.json`.
        Tekken => "tekken",
    }
}

impl FromStr for VocabularyFormat {
    type Err = LoadError;

    fn from_str(text: &str) -> Result<Self, LoadError> {
        Self::of_word(text).ok_or(LoadError::UnknownFormat)
    }
}

/// Reason why a file cannot be loaded as a vocabulary.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("the file cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// The file is too large.
    #[error("the file has more than {VOCABULARY_FILE_BYTES_MAX} bytes; name the file of a vocabulary")]
    FileTooLarge,
    /// The file is in no known format.
    #[error(
        "the file is not known to be a vocabulary: name a Hugging Face `tokenizer.json`, a tiktoken file, or a `tekken.json`; \
         or say which it is: hugging-face, tiktoken or tekken"
    )]
    UnknownFormat,
    /// The file is not the JSON that was expected.
    #[error("the file is not a {format} file: {source}", format = .format.as_str())]
    Json {
        /// Format in which the file was expected to be.
        format: VocabularyFormat,
        /// Error of the JSON parser, with the place in the file.
        source: serde_json::Error,
    },
    /// A line of a tiktoken file is wrong.
    #[error("line {line} is not a token in base64, a blank, and a rank; check that the file is whole")]
    Line {
        /// Number of the line, from 1.
        line: usize,
    },
    /// A token is not base64.
    #[error("the bytes of token {id} are not base64; check that the file is whole")]
    Base64 {
        /// Number of the token.
        id: u64,
    },
    /// The kind of model is not supported.
    #[error("models of type {model:?} are not supported; BPE and Unigram are")]
    UnsupportedModel {
        /// Kind of the model in the file.
        model: String,
    },
    /// The bytes of a token cannot be known: they depend on neighbouring tokens, or the decoder has a step that is not
    /// known.
    #[error(
        "the file's decoder has {step:?}, which is not supported: what a token stands for is not known for certain. ByteLevel, \
         ByteFallback, Fuse, Metaspace, Replace of a text, and Strip behind Fuse are"
    )]
    UnsupportedDecoder {
        /// Name of the decoder's step, or of the model's field, that makes the bytes of a token uncertain.
        step: String,
    },
    /// A token of a byte-level vocabulary has a character that stands for no byte.
    #[error(
        "token {id} has the character {character:?}, which stands for no byte; check the decoder in the file"
    )]
    NotByteLevel {
        /// Number of the token.
        id: u64,
        /// Character that stands for no byte.
        character: char,
    },
    /// The numbers of tokens in a tekken file contradict each other.
    #[error("the file has {special} special tokens in a vocabulary of {size}; check its `config`")]
    Config {
        /// Number of special tokens according to the file's `config`.
        special: u64,
        /// Size of the vocabulary according to the file's `config`.
        size: u64,
    },
    /// The tokens of the file do not make a vocabulary.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
}

impl Vocabulary {
    /// Loads a vocabulary from a file. Detects the format if it is not given, and returns it too.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not contain a vocabulary.
    pub fn load(
        path: &Path,
        format: Option<VocabularyFormat>,
    ) -> Result<(Self, VocabularyFormat), LoadError> {
        let mut content = Vec::new();
        let file = File::open(path)?;
        file.take(VOCABULARY_FILE_BYTES_MAX + 1)
            .read_to_end(&mut content)?;
        if content.len() as u64 > VOCABULARY_FILE_BYTES_MAX {
            return Err(LoadError::FileTooLarge);
        }
        Self::parse(&content, format)
    }

    /// Loads a vocabulary from the content of a file. Detects the format if it is not given, and returns it too.
    ///
    /// # Errors
    ///
    /// If the content is not a vocabulary.
    pub fn parse(
        content: &[u8],
        format: Option<VocabularyFormat>,
    ) -> Result<(Self, VocabularyFormat), LoadError> {
        let format = match format {
            Some(format) => format,
            None => detect(content)?,
        };
        let vocabulary = match format {
            VocabularyFormat::HuggingFace => hugging_face::parse(content),
            VocabularyFormat::Tiktoken => tiktoken::parse(content),
            VocabularyFormat::Tekken => tekken::parse(content),
        }?;
        Ok((vocabulary, format))
    }
}

/// Fields of a JSON file by which its format is detected.
#[derive(Deserialize)]
struct Signs {
    model: Option<IgnoredAny>,
    config: Option<IgnoredAny>,
    vocab: Option<IgnoredAny>,
}

fn detect(content: &[u8]) -> Result<VocabularyFormat, LoadError> {
    if content.trim_ascii_start().first() != Some(&b'{') {
        let first_line = content.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let is_tiktoken = tiktoken::parse_line(first_line).is_some();
        return is_tiktoken
            .then_some(VocabularyFormat::Tiktoken)
            .ok_or(LoadError::UnknownFormat);
    }
    match serde_json::from_slice(content) {
        Ok(Signs { model: Some(_), .. }) => Ok(VocabularyFormat::HuggingFace),
        Ok(Signs {
            config: Some(_),
            vocab: Some(_),
            ..
        }) => Ok(VocabularyFormat::Tekken),
        _ => Err(LoadError::UnknownFormat),
    }
}

fn from_json<'a, T: Deserialize<'a>>(content: &'a [u8], format: VocabularyFormat) -> Result<T, LoadError> {
    serde_json::from_slice(content).map_err(|source| LoadError::Json { format, source })
}

fn decode_base64(text: impl AsRef<[u8]>) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

#[cfg(test)]
mod tests;
