//! The extra keys of a block. Two blocks with the same tokens and different extra keys are different blocks.
//!
//! vLLM lists the extra keys of each block in this order: the adapter's name, images, the salt, digests of prompt embeddings.
//! Only the first block of a sequence has the salt. An image is a pair of its identifier and an offset. Before vLLM 0.19, an
//! image was its identifier alone.

use kvatlas_core::hash::object_hash;
use kvatlas_core::wire::{DecodeError, Reader, Value};

use crate::batch::EngineBatch;
use crate::limits::DecodeLimits;

use super::array_or_nil;

/// The prefix that Dynamo puts before a salt, so that it can be told from other texts.
const DYNAMO_SALT_PREFIX: &str = "dynamo-cache-salt:";
/// The length of an identifier that is a hash in hexadecimal digits.
const DIGEST_DIGITS: usize = 64;
/// Number of hexadecimal digits from which the object hash is read: the first 16 of an identifier.
const HASH_DIGITS: usize = 16;

/// The facts of an event that are needed to read its extra keys.
pub(super) struct ExtraKeys<'a> {
    pub(super) blocks: usize,
    pub(super) lora_name: Option<&'a str>,
    /// Whether the event's first block begins its sequence. Only then can the extra keys have a salt.
    pub(super) starts_sequence: bool,
    /// Whether the engine writes every image as a pair. A text that is not in a pair can then only be a salt, or an
    /// image of Dynamo.
    pub(super) images_are_pairs: bool,
    pub(super) text_bytes_max: usize,
}

/// Appends the objects that the extra keys name, and returns the salt, if it is among the keys.
pub(super) fn read_extra_keys<'a>(
    keys: &ExtraKeys<'_>,
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
) -> Result<Option<&'a str>, DecodeError> {
    let mut salt = None;
    for block in 0..lists_of_blocks("extra_keys", keys.blocks, reader)? {
        let start = batch.objects.len();
        let found = read_block(keys, block, reader, batch)?;
        batch.objects.get_mut(start..).unwrap_or_default().sort_unstable();
        salt = salt.or(found);
    }
    Ok(salt)
}

/// Reads the head of an array that should have one element for each of `blocks` blocks. Returns the number of
/// elements: `blocks`, or 0 if the array is empty or nil. Any other number is an error.
fn lists_of_blocks(
    field: &'static str,
    blocks: usize,
    reader: &mut Reader<'_>,
) -> Result<usize, DecodeError> {
    match array_or_nil(reader, field)?.unwrap_or_default() {
        count if count == blocks || count == 0 => Ok(count),
        count => Err(DecodeError::LengthMismatch { field, count, blocks }),
    }
}

/// Reads the extra keys of one block: appends the objects, and returns the salt.
fn read_block<'a>(
    keys: &ExtraKeys<'_>,
    block: usize,
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
) -> Result<Option<&'a str>, DecodeError> {
    let may_have_salt = keys.starts_sequence && block == 0;
    let mut lora_name = keys.lora_name;
    // Only the last text can be the salt. Texts before it are images.
    let mut last_text: Option<&str> = None;
    for _ in 0..array_or_nil(reader, "extra_keys")?.unwrap_or_default() {
        match reader.value()? {
            Value::Text(bytes) => {
                let text = checked_text(bytes, keys.text_bytes_max)?;
                if lora_name == Some(text) {
                    lora_name = None;
                    continue;
                }
                // A text that may be the salt is held back. If another text follows, that one may be the salt, and this
                // one is an image.
                let image = match may_have_salt && !text.is_empty() {
                    true => last_text.replace(text),
                    false => Some(text).filter(|text| !text.is_empty()),
                };
                if let Some(image) = image {
                    push(batch, block, identifier_hash(image), Some(image));
                }
            }
            Value::Blob(bytes) => push(batch, block, object_hash(bytes), None),
            Value::Unsigned(number) => push(batch, block, number, None),
            Value::Negative(number) => push(batch, block, number.cast_unsigned(), None),
            Value::Array(2) => {
                let (hash, text) = identifier(reader, keys.text_bytes_max)?;
                // The offset of an image is not needed: the block's tokens show where the image is.
                match reader.value()? {
                    Value::Unsigned(_) | Value::Negative(_) => push(batch, block, hash, text),
                    other => return Err(DecodeError::wrong_type("extra_keys", "an offset", other)),
                }
            }
            other => {
                return Err(DecodeError::wrong_type(
                    "extra_keys",
                    "texts, blobs, integers or pairs",
                    other,
                ));
            }
        }
    }
    Ok(match last_text {
        Some(text) if is_image(text, keys.images_are_pairs) => {
            push(batch, block, identifier_hash(text), Some(text));
            None
        }
        Some(text) => Some(text.strip_prefix(DYNAMO_SALT_PREFIX).unwrap_or(text)),
        None => None,
    })
}

fn checked_text(bytes: &[u8], bytes_max: usize) -> Result<&str, DecodeError> {
    let field = "extra_keys";
    if bytes.len() > bytes_max {
        return Err(DecodeError::TextTooLong {
            field,
            bytes: bytes.len(),
            max: bytes_max,
        });
    }
    std::str::from_utf8(bytes).map_err(|_| DecodeError::NotUtf8 { field })
}

/// The object hash of an image's identifier, and the identifier itself if it is a text.
fn identifier<'a>(
    reader: &mut Reader<'a>,
    text_bytes_max: usize,
) -> Result<(u64, Option<&'a str>), DecodeError> {
    match reader.value()? {
        Value::Text(bytes) => {
            let text = checked_text(bytes, text_bytes_max)?;
            Ok((identifier_hash(text), Some(text)))
        }
        Value::Blob(bytes) => Ok((object_hash(bytes), None)),
        other => Err(DecodeError::wrong_type("extra_keys", "an identifier", other)),
    }
}

/// The object hash of an identifier, as Dynamo computes it. For 64 hexadecimal digits it is the number in the first 16 digits,
/// for any other text the text's hash.
pub(crate) fn identifier_hash(identifier: &str) -> u64 {
    digest_head(identifier).unwrap_or_else(|| object_hash(identifier.as_bytes()))
}

fn digest_head(identifier: &str) -> Option<u64> {
    let is_digest =
        identifier.len() == DIGEST_DIGITS && identifier.bytes().all(|byte| byte.is_ascii_hexdigit());
    let head = identifier.get(..HASH_DIGITS).filter(|_| is_digest)?;
    u64::from_str_radix(head, 16).ok()
}

/// Whether a text that is not in a pair is an image and not a salt. Old versions of vLLM write an image as 64
/// hexadecimal digits without an offset. Dynamo writes an image in the same way, but with zeros after the first 16
/// digits.
fn is_image(text: &str, images_are_pairs: bool) -> bool {
    let is_marked = || text.bytes().skip(HASH_DIGITS).all(|byte| byte == b'0');
    digest_head(text).is_some() && (!images_are_pairs || is_marked())
}

fn push(batch: &mut EngineBatch, block: usize, hash: u64, identifier: Option<&str>) {
    // A payload has fewer blocks than bytes, and fewer than 2^32 bytes.
    let block = u32::try_from(block).unwrap_or(u32::MAX);
    batch.push_object(block, hash, identifier);
}

/// Appends the objects of Dynamo's `block_mm_infos`: for each block nil, or a map with the list `mm_objects`, whose elements
/// are maps with `mm_hash`.
pub(super) fn read_object_lists(
    blocks: usize,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
) -> Result<(), DecodeError> {
    for block in 0..lists_of_blocks("block_mm_infos", blocks, reader)? {
        let start = batch.objects.len();
        read_block_info(block, reader, batch)?;
        batch.objects.get_mut(start..).unwrap_or_default().sort_unstable();
    }
    Ok(())
}

fn read_block_info(
    block: usize,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
) -> Result<(), DecodeError> {
    let entries = match reader.value()? {
        Value::Nil => return Ok(()),
        Value::Map(entries) => entries,
        other => return Err(DecodeError::wrong_type("block_mm_infos", "maps or nil", other)),
    };
    for _ in 0..entries {
        if !matches!(reader.value()?, Value::Text(b"mm_objects")) {
            reader.skip()?;
            continue;
        }
        for _ in 0..array_or_nil(reader, "mm_objects")?.unwrap_or_default() {
            let mut hash = None;
            reader.map("mm_objects", |reader, key| {
                match key {
                    b"mm_hash" => hash = Some(reader.unsigned("mm_hash")?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            let hash = hash.ok_or(DecodeError::Missing { field: "mm_hash" })?;
            push(batch, block, hash, None);
        }
    }
    Ok(())
}

/// Appends the images of one block, which are maps with a `hash`, a text of hexadecimal digits.
pub(super) fn read_image_keys(
    block: u32,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    for _ in 0..array_or_nil(reader, "mm_keys")?.unwrap_or_default() {
        let mut identifier = None;
        reader.map("mm_keys", |reader, key| {
            match key {
                b"hash" => identifier = Some(reader.text("hash", limits.text_bytes_max)?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let identifier = identifier.ok_or(DecodeError::Missing { field: "hash" })?;
        batch.push_object(block, identifier_hash(identifier), Some(identifier));
    }
    Ok(())
}

/// Appends the images of each block, as TensorRT-LLM lists them.
pub(super) fn read_image_lists(
    blocks: usize,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    for block in 0..lists_of_blocks("mm_keys", blocks, reader)? {
        let block = u32::try_from(block).unwrap_or(u32::MAX);
        read_image_keys(block, reader, batch, limits)?;
    }
    Ok(())
}
