//! Resynchronisation: a daemon asks a publisher for the batches that it has missed.
//!
//! The daemon sends a [`ResyncRequest`] with its cursor: the batch up to which it has applied everything. The
//! publisher answers, on the request's reply subject, with one or more [`ResyncChunk`]s. The chunks are numbered from
//! 0, and the last chunk is marked. Together they contain either the batches after that cursor, as they were
//! published, or the holder's full state. Every chunk also has the cursor that the daemon reaches by applying all
//! chunks.
//!
//! A publisher that cannot answer now replies with the contract's error headers instead.

use super::batch::EventBatch;
use super::cursor::BatchCursor;
use super::entries::{Entries, Message};
use super::error::DecodeError;
use super::limits::WireLimits;
use super::reader::{Reader, check_version, set_once};
use super::subject::Rank;
use super::writer::encode;
use crate::worded;

/// A daemon's request for all events after `cursor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResyncRequest {
    /// Rank that the request is about. The request's subject contains it too.
    pub rank: Rank,
    /// Last batch that the daemon has applied, together with all batches before it. Number 0 of epoch 0 means that
    /// the daemon has applied no batch.
    pub cursor: BatchCursor,
    /// Whether the publisher must send the full state, because the daemon's state of the holder is too damaged for
    /// the missed batches to repair it.
    pub full: bool,
}

impl ResyncRequest {
    /// Encodes the request as the payload for a resync subject.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a payload within `limits`.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload is not a request of this version.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let (mut version, mut rank, mut epoch, mut seq, mut full) = (None, None, None, None, None);
        reader.map("the request", |reader, key| match key {
            b"v" => set_once(&mut version, "v", reader.unsigned("v")?),
            b"rank" => set_once(&mut rank, "rank", reader.unsigned_32("rank")?),
            b"epoch" => set_once(&mut epoch, "epoch", reader.unsigned("epoch")?),
            b"seq" => set_once(&mut seq, "seq", reader.unsigned("seq")?),
            b"full" => set_once(&mut full, "full", reader.boolean("full")?),
            _ => reader.skip(),
        })?;
        reader.finish()?;
        check_version(version)?;
        Ok(Self {
            rank: rank.unwrap_or_default(),
            cursor: given_cursor(epoch, seq)?,
            full: full.unwrap_or_default(),
        })
    }
}

impl Message for ResyncRequest {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", super::PROTOCOL_VERSION)?;
        entries.number("rank", u64::from(self.rank))?;
        entries.number("epoch", self.cursor.epoch)?;
        entries.number("seq", self.cursor.seq)?;
        entries.flag("full", self.full)
    }
}

worded! {
    /// Kind of a publisher's answer, which is the same for all its chunks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum ResyncAnswerKind {
        /// The answer is the batches after the request's cursor, in order. There are none if the daemon has missed
        /// nothing.
        Missing => "missing",
        /// The answer is the holder's full state, parents before children. It replaces the daemon's state of the
        /// holder.
        Full => "full",
    }
}

/// Chunk: a part of a publisher's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResyncChunk {
    /// Rank that the answer is about.
    pub rank: Rank,
    /// Cursor of the daemon after it has applied the whole answer. The same in every chunk.
    pub cursor: BatchCursor,
    /// Kind of the answer. The same in every chunk.
    pub kind: ResyncAnswerKind,
    /// Number of the chunk, from 0 without a gap.
    pub number: u32,
    /// Whether the chunk is the last one.
    pub is_last: bool,
    /// Time at which the batch at `cursor` was made, copied from that batch. The time helps to classify a later message
    /// with a lower batch number. A batch made after this time comes from a publisher that has restarted in the same
    /// epoch. A batch made before it is a redelivery.
    pub time_us: Option<u64>,
    /// Block size with which the publisher computed the sequence hashes of a full state from the blocks' content.
    /// Absent if the hashes are the names of the blocks in the publisher's events.
    pub recomputed_block_size: Option<u32>,
    /// Encoded event batches. In a full state they contain only [`stored`](super::Event::Stored) events, and their
    /// `seq` has no meaning.
    pub batches: Vec<Vec<u8>>,
}

/// Maximum length of a word that is read as a `kind`, in bytes.
const KIND_BYTES_MAX: usize = 64;

impl ResyncChunk {
    /// Encodes the chunk as the payload for the request's reply subject.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a payload within `limits`. The batches in it stay encoded; see [`Self::decode_batches`].
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload is not a chunk of this version.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let (mut version, mut rank, mut epoch, mut seq) = (None, None, None, None);
        let (mut kind, mut number, mut is_last, mut batches) = (None, None, None, None);
        let (mut block_size, mut time_us) = (None, None);
        reader.map("the chunk", |reader, key| match key {
            b"v" => set_once(&mut version, "v", reader.unsigned("v")?),
            b"rank" => set_once(&mut rank, "rank", reader.unsigned_32("rank")?),
            b"epoch" => set_once(&mut epoch, "epoch", reader.unsigned("epoch")?),
            b"seq" => set_once(&mut seq, "seq", reader.unsigned("seq")?),
            b"kind" => set_once(&mut kind, "kind", decode_kind(reader)?),
            b"chunk" => set_once(&mut number, "chunk", reader.unsigned_32("chunk")?),
            b"last" => set_once(&mut is_last, "last", reader.boolean("last")?),
            b"time_us" => set_once(&mut time_us, "time_us", reader.optional_unsigned("time_us")?),
            b"recomputed_block_size" => {
                let value = reader.optional_unsigned_32("recomputed_block_size")?;
                set_once(&mut block_size, "recomputed_block_size", value)
            }
            b"batches" => set_once(&mut batches, "batches", decode_blobs(reader, limits)?),
            _ => reader.skip(),
        })?;
        reader.finish()?;
        check_version(version)?;
        Ok(Self {
            rank: rank.unwrap_or_default(),
            cursor: given_cursor(epoch, seq)?,
            kind: kind.ok_or(DecodeError::Missing { field: "kind" })?,
            number: number.ok_or(DecodeError::Missing { field: "chunk" })?,
            is_last: is_last.unwrap_or_default(),
            time_us: time_us.flatten(),
            recomputed_block_size: block_size.flatten(),
            batches: batches.unwrap_or_default(),
        })
    }

    /// Decodes the batches in the chunk, in their order.
    ///
    /// # Errors
    ///
    /// The [`DecodeError`] of the first payload that is not a batch.
    pub fn decode_batches(&self, limits: &WireLimits) -> Result<Vec<EventBatch>, DecodeError> {
        self.batches
            .iter()
            .map(|payload| EventBatch::decode(payload, limits))
            .collect()
    }
}

impl Message for ResyncChunk {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", super::PROTOCOL_VERSION)?;
        entries.number("rank", u64::from(self.rank))?;
        entries.number("epoch", self.cursor.epoch)?;
        entries.number("seq", self.cursor.seq)?;
        entries.text("kind", self.kind.as_str())?;
        entries.optional_number("time_us", self.time_us)?;
        entries.optional_number("recomputed_block_size", self.recomputed_block_size.map(u64::from))?;
        entries.number("chunk", u64::from(self.number))?;
        entries.flag("last", self.is_last)?;
        entries.blobs("batches", &self.batches)
    }
}

fn decode_kind(reader: &mut Reader<'_>) -> Result<ResyncAnswerKind, DecodeError> {
    let kind = ResyncAnswerKind::of_word(reader.text("kind", KIND_BYTES_MAX)?);
    kind.ok_or(DecodeError::UnknownWord {
        field: "kind",
        expected: "missing, full",
    })
}

fn decode_blobs(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Vec<Vec<u8>>, DecodeError> {
    let blobs = reader.array("batches", limits.events_max)?;
    (0..blobs)
        .map(|_| reader.blob("batches").map(<[u8]>::to_vec))
        .collect()
}

/// Returns the cursor in a message. Both of its numbers are required.
fn given_cursor(epoch: Option<u64>, seq: Option<u64>) -> Result<BatchCursor, DecodeError> {
    Ok(BatchCursor {
        epoch: epoch.ok_or(DecodeError::Missing { field: "epoch" })?,
        seq: seq.ok_or(DecodeError::Missing { field: "seq" })?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn cursor() -> impl Strategy<Value = BatchCursor> {
        (any::<u64>(), any::<u64>()).prop_map(|(epoch, seq)| BatchCursor { epoch, seq })
    }

    fn chunk() -> impl Strategy<Value = ResyncChunk> {
        let kind = prop_oneof![Just(ResyncAnswerKind::Missing), Just(ResyncAnswerKind::Full)];
        let blobs = vec(vec(any::<u8>(), 0..40), 0..5);
        let optional = (
            proptest::option::of(any::<u64>()),
            proptest::option::of(any::<u32>()),
        );
        let flags = (any::<u32>(), any::<bool>());
        (any::<u32>(), cursor(), kind, flags, optional, blobs).prop_map(
            |(rank, cursor, kind, (number, is_last), (time_us, recomputed_block_size), batches)| {
                ResyncChunk {
                    rank,
                    cursor,
                    kind,
                    number,
                    is_last,
                    time_us,
                    recomputed_block_size,
                    batches,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_back(rank in any::<u32>(), cursor in cursor(), full in any::<bool>(), chunk in chunk()) {
            let limits = WireLimits::default();
            let request = ResyncRequest { rank, cursor, full };
            prop_assert_eq!(ResyncRequest::decode(&request.encode(), &limits), Ok(request));
            prop_assert_eq!(ResyncChunk::decode(&chunk.encode(), &limits), Ok(chunk));
        }

        #[test]
        fn damage_is_an_error_and_never_a_panic(chunk in chunk(), at in any::<prop::sample::Index>(), flip in 1_u8..) {
            let limits = WireLimits::default();
            let whole = chunk.encode();
            let cut = at.index(whole.len());
            prop_assert!(ResyncChunk::decode(&whole[..cut], &limits).is_err());
            let mut damaged = whole;
            damaged[cut] ^= flip;
            if let Ok(decoded) = ResyncChunk::decode(&damaged, &limits) {
                let _ = decoded.decode_batches(&limits);
            }
        }
    }

    #[test]
    fn more_batches_than_allowed_are_refused() {
        let limits = WireLimits {
            events_max: 2,
            ..WireLimits::default()
        };
        let chunk = ResyncChunk {
            rank: 0,
            cursor: BatchCursor::default(),
            kind: ResyncAnswerKind::Full,
            number: 0,
            is_last: true,
            time_us: None,
            recomputed_block_size: None,
            batches: vec![Vec::new(); 3],
        };
        let refused = ResyncChunk::decode(&chunk.encode(), &limits);
        assert!(matches!(
            refused,
            Err(DecodeError::TooLong { count: 3, max: 2, .. })
        ));
    }
}
