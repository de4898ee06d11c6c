//! Assembly of the chunks of a publisher's answer into one checked answer. This file does no I/O and reads no clock.

use crate::lanes::ResyncAnswer;
use kvatlas_core::index::{Hashing, NamespaceSettings};
use kvatlas_core::wire::{
    BatchCursor, BlockNames, Event, EventBatch, ResyncAnswerKind, ResyncChunk, ResyncRequest, WireLimits,
};
use kvatlas_telemetry::labels::ResyncFailure;

/// Maximum memory of a decoded answer, as a multiple of [`AnswerLimits::bytes_max`]. The factor leaves room for honest
/// publishers: single blocks and heartbeats take up to five times their length.
const DECODED_TIMES_MAX: usize = 6;

/// Bounds on one answer of a publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerLimits {
    /// Maximum size of the payloads of all chunks together, in bytes. Once decoded, they take at most
    /// [`DECODED_TIMES_MAX`] times as much.
    pub(super) bytes_max: usize,
    /// Maximum number of chunks in one answer.
    pub(super) chunks_max: u32,
}

/// Facts that are known before the answer comes. An answer that contradicts them fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Evidence {
    /// Epoch and number of the newest batch that had been received when the publisher was asked.
    pub(super) seen: BatchCursor,
    /// Largest epoch that is accepted. An answer with a higher epoch fails.
    pub(super) epoch_max: u64,
}

/// State of an answer after a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AnswerProgress {
    /// More chunks of the answer follow.
    More,
    /// Chunk belongs to an epoch that has ended, and is ignored.
    Outdated,
    /// Chunk was the last one. The value is the whole answer.
    Whole(ResyncAnswer),
}

/// Assembly of one answer from its chunks.
///
/// If several publishers claim the worker, all of them answer. The answer with the highest epoch wins, just as events
/// of the highest epoch win.
#[derive(Debug)]
pub(super) struct Assembly {
    request: ResyncRequest,
    evidence: Evidence,
    /// Settings of the namespace to which the holder belongs.
    settings: NamespaceSettings,
    limits: AnswerLimits,
    wire: WireLimits,
    /// Answer of which chunks have come. `None` before the first chunk.
    begun: Option<PartialAnswer>,
    bytes: usize,
    /// Number of chunks that have come, from any publisher. A bound on this number ends a flood of chunks.
    chunks: u32,
    has_seen_outdated: bool,
}

/// Answer of which some chunks have come, but not all.
#[derive(Debug)]
struct PartialAnswer {
    answer: ResyncAnswer,
    /// Memory that the answer's batches take, in bytes.
    decoded_bytes: usize,
    next_chunk: u32,
    /// Whether the full state must have the blocks' content (their tokens). True if the daemon computes the hashes: the
    /// namespace recomputes hashes, and the publisher has computed none.
    needs_content: bool,
}

impl Assembly {
    pub(super) fn new(
        request: ResyncRequest,
        evidence: Evidence,
        settings: NamespaceSettings,
        limits: AnswerLimits,
        wire: WireLimits,
    ) -> Self {
        Self {
            request,
            evidence,
            settings,
            limits,
            wire,
            begun: None,
            bytes: 0,
            chunks: 0,
            has_seen_outdated: false,
        }
    }

    /// Whether a chunk of an epoch that has ended was received.
    pub(super) fn has_seen_outdated(&self) -> bool {
        self.has_seen_outdated
    }

    /// Takes the next message that came on the reply subject, as a chunk of the answer.
    pub(super) fn take(&mut self, payload: &[u8]) -> Result<AnswerProgress, ResyncFailure> {
        self.chunks = self.chunks.saturating_add(1);
        self.bytes = self.bytes.saturating_add(payload.len());
        if self.chunks > self.limits.chunks_max || self.bytes > self.limits.bytes_max {
            return Err(ResyncFailure::TooLarge);
        }
        let chunk = ResyncChunk::decode(payload, &self.wire).map_err(|_| ResyncFailure::Undecodable)?;
        if chunk.rank != self.request.rank {
            return Err(ResyncFailure::WrongRank);
        }
        if chunk.cursor.epoch > self.evidence.epoch_max {
            return Err(ResyncFailure::EpochAhead);
        }
        let known = self.request.cursor.epoch.max(self.evidence.seen.epoch);
        let begun = self.begun.as_ref().map(|begun| begun.answer.cursor.epoch);
        if chunk.cursor.epoch < begun.unwrap_or(known) {
            self.has_seen_outdated = true;
            return Ok(AnswerProgress::Outdated);
        }
        if begun.is_some_and(|epoch| chunk.cursor.epoch > epoch) {
            self.begun = None;
        }
        self.add(&chunk)
    }

    fn add(&mut self, chunk: &ResyncChunk) -> Result<AnswerProgress, ResyncFailure> {
        let next_chunk = self.begun.as_ref().map_or(0, |begun| begun.next_chunk);
        if chunk.number != next_chunk {
            return Err(ResyncFailure::OutOfOrder);
        }
        let begun = match &mut self.begun {
            Some(PartialAnswer { answer, .. })
                if answer.cursor != chunk.cursor || answer.kind != chunk.kind =>
            {
                return Err(ResyncFailure::Contradiction);
            }
            Some(begun) => begun,
            none => {
                check_beginning(&self.request, self.evidence.seen, chunk)?;
                let is_recomputed = self.settings.hashing == Hashing::Recompute;
                let recomputed = is_recomputed.then(|| self.settings.block_size.as_u32());
                // A publisher that does not recompute hashes sends the hashes and the content that it publishes.
                let is_computed = chunk.recomputed_block_size.is_some();
                if chunk.kind == ResyncAnswerKind::Full
                    && is_computed
                    && chunk.recomputed_block_size != recomputed
                {
                    return Err(ResyncFailure::OtherSettings);
                }
                none.insert(PartialAnswer {
                    answer: ResyncAnswer {
                        kind: chunk.kind,
                        cursor: chunk.cursor,
                        time_us: chunk.time_us,
                        batches: Vec::new(),
                    },
                    decoded_bytes: 0,
                    next_chunk,
                    needs_content: is_recomputed && !is_computed,
                })
            }
        };
        begun.next_chunk += 1;
        let answer = &mut begun.answer;
        let decoded_max = self.limits.bytes_max.saturating_mul(DECODED_TIMES_MAX);
        for payload in &chunk.batches {
            let batch = EventBatch::decode(payload, &self.wire).map_err(|_| ResyncFailure::Undecodable)?;
            begun.decoded_bytes = begun.decoded_bytes.saturating_add(decoded_bytes(&batch));
            if begun.decoded_bytes > decoded_max {
                return Err(ResyncFailure::TooLarge);
            }
            if !self.settings.takes(batch.block_size) {
                return Err(ResyncFailure::OtherSettings);
            }
            check_batch(&self.request, answer, &batch)?;
            if answer.kind == ResyncAnswerKind::Full && begun.needs_content && lacks_content(&batch) {
                return Err(ResyncFailure::OtherSettings);
            }
            answer.batches.push(batch);
        }
        if !chunk.is_last {
            return Ok(AnswerProgress::More);
        }
        let Some(PartialAnswer { answer, .. }) = self.begun.take() else {
            return Ok(AnswerProgress::More);
        };
        let reached = answer
            .batches
            .last()
            .map_or(self.request.cursor.seq, |last| last.seq);
        if answer.kind == ResyncAnswerKind::Missing && reached != answer.cursor.seq {
            return Err(ResyncFailure::WrongBatches);
        }
        Ok(AnswerProgress::Whole(answer))
    }
}

/// Checks that the first chunk can begin an answer to the request.
fn check_beginning(
    request: &ResyncRequest,
    seen: BatchCursor,
    chunk: &ResyncChunk,
) -> Result<(), ResyncFailure> {
    let is_behind = |known: BatchCursor| chunk.cursor.epoch == known.epoch && chunk.cursor.seq < known.seq;
    if is_behind(request.cursor) || is_behind(seen) {
        return Err(ResyncFailure::CursorBehind);
    }
    let is_same_epoch = chunk.cursor.epoch == request.cursor.epoch;
    // Missing batches complete only a state of the same epoch that is not damaged.
    if chunk.kind == ResyncAnswerKind::Missing && (request.full || !is_same_epoch) {
        return Err(ResyncFailure::Contradiction);
    }
    Ok(())
}

/// Whether a batch stores blocks only by opaque names, without the content from which their hashes can be computed.
fn lacks_content(batch: &EventBatch) -> bool {
    batch.events.iter().any(|event| {
        let Event::Stored(stored) = event else {
            return false;
        };
        let is_opaque = matches!(stored.names, BlockNames::Sequence { .. });
        is_opaque && stored.content.is_none() && stored.engine_hashes.is_none()
    })
}

fn check_batch(
    request: &ResyncRequest,
    answer: &ResyncAnswer,
    batch: &EventBatch,
) -> Result<(), ResyncFailure> {
    let is_right = match answer.kind {
        ResyncAnswerKind::Missing => {
            let before = answer.batches.last().map_or(request.cursor.seq, |last| last.seq);
            batch.epoch == answer.cursor.epoch
                && batch.seq.checked_sub(1) == Some(before)
                && batch.seq <= answer.cursor.seq
        }
        ResyncAnswerKind::Full => {
            let may_have = |event: &Event| matches!(event, Event::Stored(_) | Event::Doubted(_));
            batch.events.iter().all(may_have)
        }
    };
    if is_right && batch.rank == request.rank {
        Ok(())
    } else {
        Err(ResyncFailure::WrongBatches)
    }
}

/// Returns the memory that a decoded batch takes, in bytes.
fn decoded_bytes(batch: &EventBatch) -> usize {
    let lists = batch.events.iter().map(Event::list_bytes);
    size_of::<EventBatch>() + size_of_val(&*batch.events) + lists.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::{BlockSize, SequenceHash};
    use kvatlas_core::wire::{BlockContent, StoredBlocks, Tier};

    use super::*;

    const LIMITS: AnswerLimits = AnswerLimits {
        bytes_max: 1 << 16,
        chunks_max: 8,
    };

    fn at(epoch: u64, seq: u64) -> BatchCursor {
        BatchCursor { epoch, seq }
    }

    fn assembly(full: bool) -> Assembly {
        let request = ResyncRequest {
            rank: 2,
            cursor: at(5, 10),
            full,
        };
        let evidence = Evidence {
            seen: at(5, 11),
            epoch_max: 1_000,
        };
        Assembly::new(
            request,
            evidence,
            NamespaceSettings::default(),
            LIMITS,
            WireLimits::default(),
        )
    }

    fn batch(seq: u64, events: Vec<Event>) -> EventBatch {
        EventBatch {
            epoch: 5,
            seq,
            rank: 2,
            time_us: None,
            tier: Tier::DEVICE,
            block_size: None,
            profile: None,
            events,
        }
    }

    fn stored() -> Event {
        Event::Stored(StoredBlocks::by_sequence(None, None, vec![SequenceHash(1)]))
    }

    fn chunk(kind: ResyncAnswerKind, number: u32, is_last: bool, batches: &[EventBatch]) -> ResyncChunk {
        ResyncChunk {
            rank: 2,
            cursor: at(5, 12),
            kind,
            number,
            is_last,
            time_us: None,
            recomputed_block_size: None,
            batches: batches.iter().map(EventBatch::encode).collect(),
        }
    }

    fn missing(number: u32, is_last: bool, seqs: &[u64]) -> ResyncChunk {
        let batches: Vec<_> = seqs.iter().map(|seq| batch(*seq, Vec::new())).collect();
        chunk(ResyncAnswerKind::Missing, number, is_last, &batches)
    }

    fn full(number: u32, is_last: bool) -> ResyncChunk {
        chunk(
            ResyncAnswerKind::Full,
            number,
            is_last,
            &[batch(1, vec![stored()])],
        )
    }

    fn failure(assembly: &mut Assembly, chunks: &[ResyncChunk]) -> Option<ResyncFailure> {
        chunks
            .iter()
            .find_map(|chunk| assembly.take(&chunk.encode()).err())
    }

    #[test]
    fn chunks_in_order_make_an_answer() {
        let mut missing_batches = assembly(false);
        assert_eq!(
            missing_batches.take(&missing(0, false, &[11]).encode()),
            Ok(AnswerProgress::More)
        );
        let Ok(AnswerProgress::Whole(answer)) = missing_batches.take(&missing(1, true, &[12]).encode())
        else {
            panic!("the second chunk is the last");
        };
        assert_eq!((answer.cursor, answer.batches.len()), (at(5, 12), 2));
        let mut state = assembly(true);
        assert_eq!(state.take(&full(0, false).encode()), Ok(AnswerProgress::More));
        assert!(matches!(
            state.take(&full(1, true).encode()),
            Ok(AnswerProgress::Whole(_))
        ));
        // The answer has only the batch that the holder holds already.
        let nothing = ResyncChunk {
            cursor: at(5, 11),
            ..missing(0, true, &[11])
        };
        assert!(matches!(
            assembly(false).take(&nothing.encode()),
            Ok(AnswerProgress::Whole(_))
        ));
    }

    #[test]
    fn lies_are_told_apart() {
        use ResyncFailure as F;
        let other_rank = ResyncChunk {
            rank: 3,
            ..missing(0, true, &[11, 12])
        };
        let behind = ResyncChunk {
            cursor: at(5, 9),
            ..full(0, true)
        };
        // Batch 11 has been received, although it is not applied.
        let behind_the_held = ResyncChunk {
            cursor: at(5, 10),
            ..missing(0, true, &[])
        };
        let from_the_future = ResyncChunk {
            cursor: at(1_001, 1),
            ..full(0, true)
        };
        let moved = ResyncChunk {
            cursor: at(5, 13),
            ..full(1, true)
        };
        let foreign_events = chunk(ResyncAnswerKind::Full, 0, true, &[batch(1, vec![Event::Cleared])]);
        let other_chain = ResyncChunk {
            recomputed_block_size: Some(16),
            ..full(0, true)
        };
        let other_size = EventBatch {
            block_size: Some(BlockSize::new(64).unwrap()),
            ..batch(11, Vec::new())
        };
        let other_size = chunk(ResyncAnswerKind::Missing, 0, true, &[other_size]);
        let cases: [(bool, Vec<ResyncChunk>, F); 14] = [
            (false, vec![other_size], F::OtherSettings),
            (false, vec![behind_the_held], F::CursorBehind),
            (true, vec![from_the_future], F::EpochAhead),
            (true, vec![other_chain], F::OtherSettings),
            (false, vec![other_rank], F::WrongRank),
            (true, vec![behind], F::CursorBehind),
            (true, vec![full(0, false), moved], F::Contradiction),
            (true, vec![missing(0, true, &[11, 12])], F::Contradiction),
            (true, vec![full(1, true)], F::OutOfOrder),
            (true, vec![full(0, false), full(2, true)], F::OutOfOrder),
            (true, vec![full(0, false), full(0, true)], F::OutOfOrder),
            (false, vec![missing(0, true, &[12])], F::WrongBatches),
            (false, vec![missing(0, true, &[11])], F::WrongBatches),
            (true, vec![foreign_events], F::WrongBatches),
        ];
        for (is_full, chunks, expected) in cases {
            assert_eq!(
                failure(&mut assembly(is_full), &chunks),
                Some(expected),
                "{chunks:?}"
            );
        }
        assert_eq!(assembly(true).take(b"garbage"), Err(F::Undecodable));
    }

    #[test]
    fn where_hashes_are_recomputed_a_state_comes_computed_or_with_its_content() {
        let take = |recomputed_block_size, content| {
            let Event::Stored(blocks) = stored() else {
                unreachable!("blocks are stored")
            };
            let event = Event::Stored(StoredBlocks { content, ..blocks });
            let answer = ResyncChunk {
                recomputed_block_size,
                ..chunk(ResyncAnswerKind::Full, 0, true, &[batch(1, vec![event])])
            };
            let mut assembly = assembly(true);
            assembly.settings.hashing = Hashing::Recompute;
            assembly.take(&answer.encode())
        };
        let blocks = match stored() {
            Event::Stored(blocks) => blocks.names.len(),
            _ => 0,
        };
        let content = || Some(BlockContent::BlockHashes(vec![7.into(); blocks]));
        assert!(matches!(take(Some(16), None), Ok(AnswerProgress::Whole(_))));
        assert!(matches!(take(None, content()), Ok(AnswerProgress::Whole(_))));
        assert_eq!(take(None, None), Err(ResyncFailure::OtherSettings));
        assert_eq!(take(Some(32), content()), Err(ResyncFailure::OtherSettings));
    }

    #[test]
    fn an_answer_without_end_is_cut_off() {
        let endless: Vec<_> = (0..20).map(|number| full(number, false)).collect();
        assert_eq!(
            failure(&mut assembly(true), &endless),
            Some(ResyncFailure::TooLarge)
        );
        let mut assembly = assembly(true);
        assert_eq!(
            assembly.take(&vec![0; LIMITS.bytes_max + 1]),
            Err(ResyncFailure::TooLarge)
        );
    }

    /// A batch whose only event has `hashes` hashes as an array of integers of one byte.
    fn of_short_integers(hashes: u16) -> Vec<u8> {
        let mut payload = vec![0x84, 0xa5];
        payload.extend(
            b"epoch\x05\xa3seq\x01\xa4rank\x02\xa6events\x91\x82\xa4type\xa6stored\xafsequence_hashes\xdc",
        );
        payload.extend(hashes.to_be_bytes());
        payload.extend(vec![1; usize::from(hashes)]);
        payload
    }

    #[test]
    fn an_answer_that_takes_far_more_memory_than_its_length_is_too_large() {
        let answer = |hashes| {
            let chunk = ResyncChunk {
                batches: vec![of_short_integers(hashes)],
                ..chunk(ResyncAnswerKind::Full, 0, true, &[])
            };
            assembly(true).take(&chunk.encode())
        };
        assert!(matches!(answer(1000), Ok(AnswerProgress::Whole(_))));
        assert_eq!(answer(60_000), Err(ResyncFailure::TooLarge));
    }

    #[test]
    fn honest_answers_of_the_largest_length_have_room() {
        let fill = |kind, one: &dyn Fn(u64) -> EventBatch| {
            let request = ResyncRequest {
                rank: 2,
                cursor: at(1_700_000_000_000_000, 0),
                full: kind == ResyncAnswerKind::Full,
            };
            let evidence = Evidence {
                seen: request.cursor,
                epoch_max: u64::MAX,
            };
            let (settings, wire) = (NamespaceSettings::default(), WireLimits::default());
            let mut assembly = Assembly::new(request, evidence, settings, LIMITS, wire);
            let length = one(60_000).encode().len() + 3;
            let count = ((LIMITS.bytes_max - 200) / length) as u64;
            let batches: Vec<EventBatch> = (1..=count).map(one).collect();
            let chunk = ResyncChunk {
                cursor: at(request.cursor.epoch, count),
                ..chunk(kind, 0, true, &batches)
            };
            let payload = chunk.encode();
            assert!(payload.len() > LIMITS.bytes_max * 17 / 20);
            assert!(matches!(assembly.take(&payload), Ok(AnswerProgress::Whole(_))));
        };
        let batch = |seq, events| EventBatch {
            epoch: 1_700_000_000_000_000,
            time_us: Some(1_700_000_000_000_000),
            ..batch(seq, events)
        };
        let one_block = |hash: u64| {
            let hashes = vec![SequenceHash(u64::MAX - hash)];
            Event::Stored(StoredBlocks::by_sequence(None, None, hashes))
        };
        fill(ResyncAnswerKind::Full, &|seq| {
            batch(seq, (0..100).map(one_block).collect())
        });
        fill(ResyncAnswerKind::Missing, &|seq| batch(seq, vec![one_block(seq)]));
        fill(ResyncAnswerKind::Missing, &|seq| batch(seq, Vec::new()));
    }

    #[test]
    fn the_newest_incarnation_is_believed() {
        let newer = |number, is_last| ResyncChunk {
            cursor: at(6, 1),
            ..full(number, is_last)
        };
        let older = ResyncChunk {
            cursor: at(4, 99),
            ..full(0, true)
        };
        let mut assembly = assembly(false);
        assert_eq!(assembly.take(&older.encode()), Ok(AnswerProgress::Outdated));
        assert_eq!(
            assembly.take(&missing(0, false, &[11]).encode()),
            Ok(AnswerProgress::More)
        );
        assert_eq!(assembly.take(&newer(0, false).encode()), Ok(AnswerProgress::More));
        assert_eq!(
            assembly.take(&missing(1, true, &[12]).encode()),
            Ok(AnswerProgress::Outdated)
        );
        let Ok(AnswerProgress::Whole(answer)) = assembly.take(&newer(1, true).encode()) else {
            panic!("the newer answer is whole");
        };
        assert_eq!(answer.cursor, at(6, 1));
    }
}
