//! tiktoken's files: each line has a token's bytes in base64 and its rank, which is the token's number.

use super::{LoadError, decode_base64};
use crate::tokens::{Vocabulary, VocabularyBuilder};

pub(super) fn parse(content: &[u8]) -> Result<Vocabulary, LoadError> {
    let mut builder = VocabularyBuilder::new();
    for (index, line) in content.split(|byte| *byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let (bytes, rank) = parse_line(line).ok_or(LoadError::Line { line: index + 1 })?;
        builder.insert(rank, bytes)?;
    }
    Ok(builder.build()?)
}

/// Returns the bytes and the rank of a line. `None` if the line does not contain a token.
pub(super) fn parse_line(line: &[u8]) -> Option<(Vec<u8>, u64)> {
    let text = std::str::from_utf8(line).ok()?;
    let (bytes, rank) = text.trim_end().split_once(' ')?;
    // `parse` would let a plus sign pass.
    let is_number = rank.bytes().all(|digit| digit.is_ascii_digit());
    let rank = rank.parse().ok().filter(|_| is_number)?;
    // OpenAI's multilingual file for Whisper ends with a token of no bytes, written so.
    let bytes = if bytes == "=" { "" } else { bytes };
    Some((decode_base64(bytes)?, rank))
}
