//! Decoders of a `tokenizer.json`, applied to one token's text.
//!
//! A decoder is a sequence of steps. A step is supported only if its result for a token does not depend on neighbouring tokens,
//! except at the ends of the whole text. A file with any other step is refused, because the bytes of its tokens might be wrong.
//! Masks would then allow forbidden tokens.

use serde::Deserialize;
use serde_json::Value;

use super::{LoadError, byte_level};

/// Decoder in a `tokenizer.json`, or several decoders in a sequence.
#[derive(Deserialize)]
pub(super) struct TokenizerComponent {
    #[serde(rename = "type")]
    pub(super) kind: String,
    #[serde(default)]
    decoders: Vec<TokenizerComponent>,
    #[serde(default)]
    pretokenizers: Vec<TokenizerComponent>,
    #[serde(default)]
    pattern: Value,
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    replacement: Option<String>,
}

impl TokenizerComponent {
    /// Whether the component, or a part of it, is of this kind.
    pub(super) fn has(&self, kind: &str) -> bool {
        let mut parts = self.decoders.iter().chain(&self.pretokenizers);
        // serde_json limits the depth of nested values, so this recursion is bounded.
        self.kind == kind || parts.any(|part| part.has(kind))
    }
}

/// One step of a `tokenizer.json` decoder, which turns the text of a token into another text or into bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DecoderStep {
    /// Turns a text in the alphabet of GPT-2 into bytes. A text with any other character stays as it is.
    ByteLevel,
    /// Turns a text such as `<0x0A>` into that byte.
    ByteFallback,
    Replace {
        from: String,
        to: String,
    },
}

/// Steps of a decoder, in order.
#[derive(Debug, Default)]
pub(super) struct TokenDecoder {
    steps: Vec<DecoderStep>,
    /// Whether a step has joined the tokens to one text, so that any further step is applied to the whole text and not
    /// to single tokens.
    is_fused: bool,
}

fn unknown(step: &str) -> LoadError {
    LoadError::UnsupportedDecoder {
        step: step.chars().take(40).collect(),
    }
}

impl TokenDecoder {
    pub(super) fn of_steps(steps: Vec<DecoderStep>) -> Self {
        Self {
            steps,
            is_fused: false,
        }
    }

    /// Makes the decoder that a file describes.
    pub(super) fn new(component: &TokenizerComponent) -> Result<Self, LoadError> {
        let mut decoder = Self::default();
        decoder.add(component)?;
        Ok(decoder)
    }

    fn add(&mut self, component: &TokenizerComponent) -> Result<(), LoadError> {
        let kind = component.kind.as_str();
        match kind {
            "Sequence" => return component.decoders.iter().try_for_each(|part| self.add(part)),
            // When the step is applied to the whole text, it changes only the ends of the text.
            "Strip" if self.is_fused => {}
            "Fuse" => self.is_fused = true,
            "ByteLevel" if !self.is_fused => {
                self.steps.push(DecoderStep::ByteLevel);
                self.is_fused = true;
            }
            "ByteFallback" if !self.is_fused => self.steps.push(DecoderStep::ByteFallback),
            "Replace" => {
                let from = component.pattern.get("String").and_then(Value::as_str);
                self.replace(kind, from, component.content.as_deref())?;
            }
            // Apart from this replacement, the step changes only the first token.
            "Metaspace" => {
                let from = component.replacement.as_deref().or(Some("▁"));
                self.replace(kind, from, Some(" "))?;
            }
            other => return Err(unknown(other)),
        }
        Ok(())
    }

    fn replace(&mut self, kind: &str, from: Option<&str>, to: Option<&str>) -> Result<(), LoadError> {
        let (Some(from), Some(to)) = (from.filter(|from| !from.is_empty()), to) else {
            return Err(unknown(kind));
        };
        // In the whole text, a pattern of several characters can lie across two tokens. And bytes of two tokens can make one
        // character together.
        let is_one = from.chars().count() == 1 && !self.steps.contains(&DecoderStep::ByteLevel);
        if self.is_fused && !is_one {
            return Err(unknown(kind));
        }
        let (from, to) = (from.to_owned(), to.to_owned());
        self.steps.push(DecoderStep::Replace { from, to });
        Ok(())
    }

    /// Whether the texts of the model's tokens are in the alphabet of GPT-2.
    pub(super) fn is_byte_level(&self) -> bool {
        self.steps.first() == Some(&DecoderStep::ByteLevel)
    }

    /// Returns the bytes that a token stands for when other tokens come before and after it.
    pub(super) fn bytes(&self, text: &str) -> Vec<u8> {
        let mut text = text.to_owned();
        for step in &self.steps {
            let bytes = match step {
                DecoderStep::Replace { from, to } => {
                    text = text.replace(from, to);
                    None
                }
                DecoderStep::ByteFallback => fallback_byte(&text).map(|byte| vec![byte]),
                DecoderStep::ByteLevel => text.chars().map(byte_level::byte_of).collect(),
            };
            if let Some(bytes) = bytes {
                return bytes;
            }
        }
        text.into_bytes()
    }
}

/// Returns the byte of a text such as `<0x0A>`. `None` for any other text.
fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| is_byte)
}
