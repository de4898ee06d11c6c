//! Reading the tokens of a stored event. The tokens can be single numbers or overlapping pairs. There can be texts among
//! them, and lookahead tokens after them.

use kvatlas_core::hash::Token;
use kvatlas_core::wire::{DecodeError, Reader, Value};

use crate::batch::{Content, EngineBatch, Span};

use super::array_or_nil;
use super::extra_keys::identifier_hash;

/// The token that stands for a text; the text itself is an object of the block.
pub(super) const TEXT_TOKEN: Token = 0;

/// Tokens of an event, which came as a list or as overlapping pairs. Engines with speculative decoding by bigrams write pairs.
#[derive(Debug, Clone)]
pub(super) struct TokenList<'a> {
    pub(super) tokens: Span,
    pub(super) is_bigram: bool,
    /// Set if some elements of the token list are texts, which stand for images. Holds the number of tokens, and a
    /// reader at the first token.
    pub(super) with_texts: Option<(usize, Reader<'a>)>,
}

/// Reads single tokens, or overlapping pairs: each pair begins with the second token of the pair before. `None` for nil.
pub(super) fn read_tokens<'a>(
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
) -> Result<Option<TokenList<'a>>, DecodeError> {
    let Some(count) = array_or_nil(reader, "token_ids")? else {
        return Ok(None);
    };
    let start = batch.tokens.len();
    let mut with_texts = None;
    let is_bigram = count > 0 && matches!(reader.clone().value()?, Value::Array(_));
    let list = reader.clone();
    if is_bigram {
        read_pairs(count, reader, &mut batch.tokens)?;
    } else if let Err(error) = reader.unsigned_32_list("token_ids", count, &mut batch.tokens) {
        batch.tokens.truncate(start);
        *reader = list.clone();
        if !read_tokens_with_texts(count, reader, &mut batch.tokens)? {
            return Err(error);
        }
        with_texts = Some((count, list));
    }
    Ok(Some(TokenList {
        tokens: batch.tokens_since(start),
        is_bigram,
        with_texts,
    }))
}

/// Reads tokens and texts; each text takes the place of a token. Returns whether there is a text.
fn read_tokens_with_texts(
    count: usize,
    reader: &mut Reader<'_>,
    tokens: &mut Vec<Token>,
) -> Result<bool, DecodeError> {
    let mut has_texts = false;
    for _ in 0..count {
        if let Value::Text([_, ..]) = reader.clone().value()? {
            reader.skip()?;
            has_texts = true;
            tokens.push(TEXT_TOKEN);
        } else {
            tokens.push(reader.unsigned_32("token_ids")?);
        }
    }
    Ok(has_texts)
}

/// Reads `count` tokens and appends an object for each text among them. The tokens belong to blocks of `size` tokens,
/// and `reader` stands at the first token.
pub(super) fn read_text_tokens(
    size: usize,
    count: usize,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
) -> Result<(), DecodeError> {
    for place in 0..count {
        if let Value::Text(text) = reader.value()? {
            let text = std::str::from_utf8(text).map_err(|_| DecodeError::NotUtf8 { field: "token_ids" })?;
            let block = u32::try_from(place / size.max(1)).unwrap_or(u32::MAX);
            batch.push_object(block, identifier_hash(text), None);
        }
    }
    Ok(())
}

/// Whether the first block's name is Python's hash of only the page's own tokens (a page is SGLang's block). Such a
/// name does not depend on the prefix, so different blocks can have the same name.
pub(super) fn names_one_page(names: Span, content: Content, batch: &EngineBatch) -> bool {
    let Content::Tokens { tokens, step, .. } = content else {
        return false;
    };
    let page = batch.tokens(tokens).get(..step);
    page.is_some_and(|page| batch.hashes(names).first() == Some(&python_hash(page)))
}

/// Python's hash of a tuple of small integers, which is computed with xxHash's steps.
fn python_hash(tuple: &[Token]) -> u64 {
    const PRIMES: [u64; 3] = [
        11_400_714_785_074_694_791,
        14_029_467_366_897_019_727,
        2_870_177_450_012_600_261,
    ];
    let step = |hash: u64, item: &Token| {
        let sum = hash.wrapping_add(u64::from(*item).wrapping_mul(PRIMES[1]));
        sum.rotate_left(31).wrapping_mul(PRIMES[0])
    };
    let hash = tuple.iter().fold(PRIMES[2], step);
    hash.wrapping_add(tuple.len() as u64 ^ PRIMES[2] ^ 3_527_539)
}

fn read_pairs(count: usize, reader: &mut Reader<'_>, tokens: &mut Vec<Token>) -> Result<(), DecodeError> {
    let broken = DecodeError::Combination("pairs of tokens that do not overlap");
    let mut last = None;
    tokens.reserve(count + 1);
    for _ in 0..count {
        if reader.array("token_ids", 2)? != 2 {
            return Err(broken);
        }
        let first = reader.unsigned_32("token_ids")?;
        if last.is_some_and(|last| last != first) {
            return Err(broken);
        }
        tokens.push(first);
        last = Some(reader.unsigned_32("token_ids")?);
    }
    tokens.extend(last);
    Ok(())
}

/// Reads the event's lookahead tokens. Appends to the batch the tokens of each block, each followed by the lookahead
/// tokens of that block, and returns them as content. Returns `None` if the event has no lookahead tokens.
pub(super) fn widen(
    tokens: Span,
    size: usize,
    blocks: usize,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
) -> Result<Option<Content>, DecodeError> {
    let Some(lists) = array_or_nil(reader, "lookahead_token_ids")? else {
        return Ok(None);
    };
    if lists != blocks {
        return Err(DecodeError::LengthMismatch {
            field: "lookahead_token_ids",
            count: lists,
            blocks,
        });
    }
    let start = batch.tokens.len();
    let mut ahead = None;
    for block in 0..blocks {
        let count = reader.array("lookahead_token_ids", usize::MAX)?;
        if *ahead.get_or_insert(count) != count {
            return Err(DecodeError::Combination(
                "lookahead_token_ids of different lengths",
            ));
        }
        batch.extend_tokens_from(tokens, block * size, size);
        reader.unsigned_32_list("lookahead_token_ids", count, &mut batch.tokens)?;
    }
    let window = size + ahead.unwrap_or_default();
    Ok(Some(Content::Tokens {
        tokens: batch.tokens_since(start),
        step: window,
        window,
    }))
}
