//! Decodes an engine's bytes into an [`EngineBatch`].
//!
//! | format | payload | decoded by |
//! |---|---|---|
//! | vLLM, SGLang, Mooncake Store | MessagePack, a batch of tagged maps or tagged arrays | `tagged` |
//! | Dynamo | MessagePack or JSON: one router event, a list, or either in an envelope | `dynamo` |
//! | TensorRT-LLM | JSON: a list of events | `tensorrt` |
//!
//! JSON is turned into MessagePack first, so that one reader checks all formats. Decoding MessagePack does not recurse, and
//! takes memory only for as much as the payload's bytes can hold.
//!
//! An event that can't be read is counted and skipped; the other events of its batch are kept. A batch that can't be read is
//! an error.

mod components;
mod dynamo;
mod event;
mod extra_keys;
mod field;
mod json;
mod media;
mod pool;
mod tagged;
mod tensorrt;
mod tokens;

pub(crate) use event::group_of_kind;
pub(crate) use extra_keys::identifier_hash;
pub(crate) use media::{is_never_removed, tier_of_medium};

use kvatlas_core::wire::{DecodeError, ModelKey, Reader, Tier, Value};

use crate::batch::{EngineBatch, KEPT_BYTES_MAX};
use crate::format::Format;
use crate::limits::DecodeLimits;
use crate::reason::Reason;

/// Reason why a payload could not be decoded. No part of the payload is used, and the holders that it is about are in doubt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The payload's top level does not have the form that the format requires.
    #[error(transparent)]
    Payload(#[from] DecodeError),
    /// The payload begins like JSON, but is no valid JSON.
    #[error("the payload is not JSON: line {line}, column {column}")]
    Json {
        /// Line of the first mistake, from 1.
        line: usize,
        /// Column of the first mistake, from 1.
        column: usize,
    },
    /// An envelope within an envelope.
    #[error("an envelope within an envelope")]
    Nested,
}

/// Decodes the payloads of one publisher.
#[derive(Debug)]
pub struct Decoder {
    format: Format,
    limits: DecodeLimits,
    /// MessagePack form of a payload that came as JSON.
    transcoded: Vec<u8>,
    /// Buffer for the payload of an envelope, if the envelope has the payload's bytes as a list of numbers.
    enveloped: Vec<u8>,
    scratch: Vec<u64>,
    pool: pool::Pool,
}

impl Decoder {
    /// A decoder of one publisher's payloads.
    pub fn new(format: Format, limits: DecodeLimits) -> Self {
        Self {
            format,
            limits,
            transcoded: Vec::new(),
            enveloped: Vec::new(),
            scratch: Vec::new(),
            pool: pool::Pool::default(),
        }
    }

    /// Restricts the decoder to the objects of this model and tenant, in a store that several models share. With `None`, all
    /// objects count.
    #[must_use]
    pub fn of_model(mut self, model: Option<ModelKey>) -> Self {
        self.pool.model = model;
        self
    }

    /// The format of the payloads.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Decodes `payload` into `batch`, which is emptied first.
    ///
    /// Parts that can't be read are counted in [`EngineBatch::reasons`].
    ///
    /// # Errors
    ///
    /// [`BatchError`] when the payload is no batch at all. The batch is empty then.
    pub fn decode(&mut self, payload: &[u8], batch: &mut EngineBatch) -> Result<(), BatchError> {
        batch.begin(|| payload.len());
        let decoded = self.decode_payload(payload, batch);
        if decoded.is_err() {
            batch.clear();
        }
        decoded
    }

    fn decode_payload(&mut self, payload: &[u8], batch: &mut EngineBatch) -> Result<(), BatchError> {
        let bytes_max = self.limits.payload_bytes_max;
        let mut transcoded = std::mem::take(&mut self.transcoded);
        let bytes = match json::is_json(payload) {
            true => json::transcode(payload, bytes_max, &mut transcoded).map(|()| transcoded.as_slice()),
            false => Ok(payload),
        };
        let decoded = bytes.and_then(|bytes| {
            // The length of the payload was checked. Its transcoded form may be longer.
            let mut reader = Reader::new(bytes, bytes_max.max(transcoded.len()))?;
            let limits = self.limits.for_payload(payload.len());
            self.decode_messagepack(&mut reader, batch, &limits)?;
            Ok(reader.finish()?)
        });
        self.transcoded = kept(transcoded);
        decoded
    }

    fn decode_messagepack(
        &mut self,
        reader: &mut Reader<'_>,
        batch: &mut EngineBatch,
        limits: &DecodeLimits,
    ) -> Result<(), BatchError> {
        match self.format {
            Format::Vllm | Format::Sglang | Format::Mooncake | Format::TokenSpeed => {
                tagged::decode_batch(reader, batch, self.format, limits, &mut self.pool)
            }
            Format::Dynamo => {
                let mut enveloped = std::mem::take(&mut self.enveloped);
                let mut scratch = std::mem::take(&mut self.scratch);
                let decoded = dynamo::decode(reader, batch, &mut scratch, &mut enveloped, limits);
                (self.scratch, self.enveloped) = (kept(scratch), kept(enveloped));
                decoded
            }
            Format::TensorRt => tensorrt::decode(reader, batch, limits),
        }
    }
}

/// Returns the buffer, empty, for the next payload. If it is large, its memory is given back first.
fn kept<T>(mut buffer: Vec<T>) -> Vec<T> {
    buffer.clear();
    if buffer.capacity().saturating_mul(size_of::<T>()) > KEPT_BYTES_MAX {
        return Vec::new();
    }
    buffer
}

/// The outcome for one event that could be read.
enum Verdict {
    /// The event was added to the batch.
    Taken,
    /// The event is left out of the batch, for this reason.
    LeftOut(Reason),
    /// The event stores blocks in the given tier. The event is left out of the batch for the given reason.
    LeftOutOf(Tier, Reason),
}

/// Decodes `count` events with `decode_event`. An event that can't be read is skipped and counted.
fn decode_each<'a>(
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
    count: usize,
    mut decode_event: impl FnMut(&mut Reader<'a>, &mut EngineBatch) -> Result<Verdict, DecodeError>,
) -> Result<(), DecodeError> {
    for _ in 0..count {
        let mark = batch.mark();
        let mut attempt = reader.clone();
        match decode_event(&mut attempt, batch) {
            Ok(verdict) => {
                *reader = attempt;
                match verdict {
                    Verdict::Taken => {}
                    Verdict::LeftOut(reason) => batch.leave_out(reason, None, mark),
                    Verdict::LeftOutOf(tier, reason) => batch.leave_out(reason, Some(tier), mark),
                }
            }
            Err(_) => {
                reader.skip()?;
                batch.leave_out(Reason::Malformed, None, mark);
            }
        }
    }
    Ok(())
}

/// Whether a block of `tokens` tokens is the incomplete block at the end of a sequence whose other blocks have `size`
/// tokens. Only the last block of an event can be such a block (`is_last`). At any other place, another size is an
/// error.
pub(crate) fn ends_sequence(tokens: usize, size: usize, is_last: bool) -> bool {
    is_last && (1..size).contains(&tokens)
}

/// Reads the head of an array and returns the number of its elements; `None` for nil.
fn array_or_nil(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<usize>, DecodeError> {
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Array(count) => Ok(Some(count)),
        other => Err(DecodeError::wrong_type(field, "an array or nil", other)),
    }
}

/// Reads the head of a map and returns the number of its entries.
fn entries_of(reader: &mut Reader<'_>, field: &'static str) -> Result<usize, DecodeError> {
    match reader.value()? {
        Value::Map(entries) => Ok(entries),
        other => Err(DecodeError::wrong_type(field, "a map", other)),
    }
}
