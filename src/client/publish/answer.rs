//! Answers to daemons that ask for batches or blocks that they miss.

use kvatlas_core::index::Hashing;
use kvatlas_core::wire::{
    BlockNames, DegradedReasons, ErrorCode, Event, EventBatch, ResyncAnswerKind, ResyncChunk, ResyncRequest,
    StoredBlocks, Tier, WireError,
};

use super::cut::{CutBounds, cut_events};
use super::options::BATCH_EVENTS_MAX;
use super::outbox::{Clocks, Outbox};
use super::sizes::{BATCH_BYTES, event_bytes};

/// An answer to a daemon: the payloads of its chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResyncAnswerChunks {
    pub(super) kind: ResyncAnswerKind,
    pub(super) chunks: Vec<Vec<u8>>,
}

impl Outbox {
    /// Whether the answer must be the full state: the daemon asks for the full state or knows another epoch, or the
    /// publisher can no longer send all batches that the daemon lacks.
    pub(super) fn needs_state(&self, request: &ResyncRequest) -> bool {
        self.missing(request).is_none()
    }

    /// Returns the batches that a daemon lacks, from the ring (the last batches that the publisher keeps). Returns
    /// `None` in these cases:
    ///
    /// - The daemon asks for the full state, or knows another epoch.
    /// - The ring no longer has all these batches.
    /// - One of these batches exceeds the server's present limit.
    fn missing(&self, request: &ResyncRequest) -> Option<Vec<Vec<u8>>> {
        let ResyncRequest { cursor, full, .. } = *request;
        if full || cursor.epoch != self.cursor.epoch {
            return None;
        }
        let bytes_max = self.within_server_limit(usize::MAX);
        let batches = self.ring.after(cursor.seq)?;
        batches
            .map(|payload| (payload.len() <= bytes_max).then(|| payload.to_vec()))
            .collect()
    }

    /// Makes the answer to a daemon: the missing batches if the publisher can still send them all, or else the full
    /// state. The full state comes from `kept`; if that is `None`, from the publisher's own table of blocks.
    ///
    /// # Errors
    ///
    /// An error of the wire contract if the request is for another rank, or if the publisher cannot give the full state now.
    pub(super) fn answer(
        &mut self,
        request: &ResyncRequest,
        kept: Option<Vec<(Tier, Event)>>,
        clocks: Clocks,
    ) -> Result<ResyncAnswerChunks, WireError> {
        if request.rank != self.rank {
            let text = format!("this publisher is for rank {}", self.rank);
            return Err(WireError::new(ErrorCode::BadRequest, text));
        }
        if let Some(batches) = self.missing(request) {
            return Ok(self.chunks(ResyncAnswerKind::Missing, batches));
        }
        let state = match kept {
            Some(events) => self.encode_state(events, self.doubts),
            None => self.table_state(clocks)?,
        };
        Ok(self.chunks(ResyncAnswerKind::Full, state))
    }

    /// Returns the full state from the publisher's own table of the holder's blocks, as encoded batches.
    fn table_state(&mut self, clocks: Clocks) -> Result<Vec<Vec<u8>>, WireError> {
        let unavailable = |text| WireError::new(ErrorCode::Unavailable, text);
        // The table is taken out, so that its events can be encoded one by one.
        let mut table = self.table.take().ok_or_else(|| {
            unavailable("this publisher took up an epoch of another one and does not know the full state")
        })?;
        let settled = table.settle(clocks.monotonic_us);
        let encoded = settled.map(|doubts| self.encode_state(table.state(), self.doubts.union(doubts)));
        self.table = Some(table);
        encoded.ok_or_else(|| unavailable("stored blocks wait for their parent; ask again when they have it"))
    }

    /// Encodes a full state as batches. The batches also tell daemons the `doubts` about this state.
    fn encode_state(
        &self,
        events: impl IntoIterator<Item = (Tier, Event)>,
        doubts: DegradedReasons,
    ) -> Vec<Vec<u8>> {
        let bounds = CutBounds {
            events_max: usize::MAX,
            bytes_max: self.within_server_limit(self.options.chunk_bytes_max),
        };
        let bytes_max = bounds.bytes_max.saturating_sub(BATCH_BYTES);
        // A batch of a full state has no more, also for publishers whose other batches may.
        let events_max = self.options.batch_events_max.min(BATCH_EVENTS_MAX);
        let is_recomputed = self.options.settings.hashing == Hashing::Recompute;
        let mut batches = Vec::new();
        let mut open = self.empty(Tier::DEVICE);
        let mut bytes = 0;
        let pieces = events.into_iter().flat_map(|(tier, event)| {
            let event = if is_recomputed {
                event
            } else {
                without_repetition(event)
            };
            let messages = cut_events(vec![event], bounds).into_iter();
            messages.flatten().map(move |piece| (tier, piece))
        });
        for (tier, event) in pieces {
            let more = event_bytes(&event);
            let is_full = open.events.len() >= events_max || bytes + more > bytes_max;
            if !open.events.is_empty() && (open.tier != tier || is_full) {
                batches.push(std::mem::replace(&mut open, self.empty(tier)).encode());
                bytes = 0;
            }
            open.tier = tier;
            open.events.push(event);
            bytes += more;
        }
        if !open.events.is_empty() {
            batches.push(open.encode());
        }
        if let Some(profile) = self.profile.all() {
            let mut told = self.empty(Tier::DEVICE);
            told.profile = Some(profile.clone());
            batches.push(told.encode());
        }
        if !doubts.is_empty() {
            let mut doubt = self.empty(Tier::DEVICE);
            doubt.events.push(Event::Doubted(doubts));
            batches.push(doubt.encode());
        }
        batches
    }

    /// Makes a batch for a full state. The batch has no events yet.
    fn empty(&self, tier: Tier) -> EventBatch {
        EventBatch {
            epoch: self.cursor.epoch,
            // A state from before the first batch is empty. It still needs a number, and 0 is no batch number.
            seq: self.cursor.seq.max(1),
            rank: self.rank,
            time_us: None,
            tier,
            block_size: self.told_block_size(),
            profile: None,
            events: Vec::new(),
        }
    }

    /// Spreads batches over the chunks of an answer. There is always at least one chunk, because a chunk tells the publisher's
    /// cursor.
    fn chunks(&self, kind: ResyncAnswerKind, batches: Vec<Vec<u8>>) -> ResyncAnswerChunks {
        const BATCHES_MAX: usize = 1024;
        let bytes_max = self.within_server_limit(self.options.chunk_bytes_max);
        let mut groups = vec![Vec::new()];
        let mut bytes = 0;
        for batch in batches {
            let is_full = |group: &Vec<Vec<u8>>| {
                !group.is_empty() && (bytes + batch.len() > bytes_max || group.len() >= BATCHES_MAX)
            };
            if groups.last().is_some_and(is_full) {
                groups.push(Vec::new());
                bytes = 0;
            }
            bytes += batch.len() + BATCH_HEAD_BYTES;
            if let Some(group) = groups.last_mut() {
                group.push(batch);
            }
        }
        let settings = &self.options.settings;
        let is_recomputed = kind == ResyncAnswerKind::Full && settings.hashing == Hashing::Recompute;
        let last = groups.len() - 1;
        let chunk = |(number, batches)| ResyncChunk {
            rank: self.rank,
            cursor: self.cursor,
            kind,
            number: u32::try_from(number).unwrap_or(u32::MAX),
            is_last: number == last,
            time_us: self.made_us,
            recomputed_block_size: is_recomputed.then(|| settings.block_size.as_u32()),
            batches,
        };
        let chunks = groups
            .into_iter()
            .enumerate()
            .map(|numbered| chunk(numbered).encode());
        ResyncAnswerChunks {
            kind,
            chunks: chunks.collect(),
        }
    }
}

/// Maximum number of bytes that the header of a batch takes in a chunk.
const BATCH_HEAD_BYTES: usize = 5;

/// Returns the event, without its engine hashes if these equal the sequence hashes.
fn without_repetition(event: Event) -> Event {
    let Event::Stored(stored) = event else {
        return event;
    };
    let is_repetition = match (&stored.names, &stored.engine_hashes) {
        (BlockNames::Sequence { hashes, .. }, Some(names)) => {
            hashes.iter().map(|hash| hash.as_u64()).eq(names.iter().copied())
        }
        _ => false,
    };
    if !is_repetition {
        return Event::Stored(stored);
    }
    Event::Stored(StoredBlocks {
        engine_hashes: None,
        ..stored
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvatlas_core::hash::SequenceHash;
    use kvatlas_core::index::NamespaceSettings;
    use kvatlas_core::wire::{BatchCursor, DegradedReason, HolderId, RemovedBlocks, WireLimits, WorkerName};

    use super::super::options::{Beginning, PublisherOptions};
    use super::*;

    fn outbox(options: PublisherOptions) -> Outbox {
        let id = HolderId {
            worker: WorkerName::new("w").unwrap(),
            rank: 0,
        };
        Outbox::new(options, &id, true, Clocks::default()).unwrap()
    }

    fn options() -> PublisherOptions {
        PublisherOptions {
            beginning: Beginning::Epoch(5),
            batch_delay: Duration::ZERO,
            ring_batches_max: 3,
            chunk_bytes_max: 1000,
            ..PublisherOptions::default()
        }
    }

    fn request(epoch: u64, seq: u64, full: bool) -> ResyncRequest {
        ResyncRequest {
            rank: 0,
            cursor: BatchCursor { epoch, seq },
            full,
        }
    }

    fn publish(outbox: &mut Outbox, batches: u64) {
        for number in 0..batches {
            let hashes = (0..50)
                .map(|block| SequenceHash(1 + number * 100 + block))
                .collect();
            let event = Event::Stored(StoredBlocks::by_sequence(None, None, hashes));
            outbox.add(Tier::DEVICE, vec![event], Clocks::default());
        }
    }

    fn chunks(answer: &ResyncAnswerChunks) -> Vec<ResyncChunk> {
        let decode = |payload: &Vec<u8>| ResyncChunk::decode(payload, &WireLimits::default()).unwrap();
        answer.chunks.iter().map(decode).collect()
    }

    #[test]
    fn the_ring_answers_where_it_reaches_back() {
        let mut outbox = outbox(options());
        publish(&mut outbox, 5);
        let answer = outbox
            .answer(&request(5, 2, false), None, Clocks::default())
            .unwrap();
        let found = chunks(&answer);
        assert!(found.len() > 1 && found.last().unwrap().is_last);
        assert!(found.iter().all(|chunk| chunk.kind == ResyncAnswerKind::Missing));
        let batches: Vec<_> = found
            .iter()
            .flat_map(|chunk| chunk.decode_batches(&WireLimits::default()).unwrap())
            .map(|batch| batch.seq)
            .collect();
        assert_eq!(batches, [3, 4, 5]);
        // A daemon that lacks no batch gets an answer without batches.
        let nothing = chunks(
            &outbox
                .answer(&request(5, 5, false), None, Clocks::default())
                .unwrap(),
        );
        assert_eq!(
            (nothing.len(), nothing[0].is_last, nothing[0].batches.len()),
            (1, true, 0)
        );
    }

    #[test]
    fn a_publisher_that_answers_nothing_keeps_no_batches() {
        let mut outbox = outbox(PublisherOptions {
            answers_resyncs: false,
            ..options()
        });
        let mut check = |begin: fn(&mut Outbox)| {
            begin(&mut outbox);
            publish(&mut outbox, 2);
            let BatchCursor { epoch, seq } = outbox.cursor;
            assert!(outbox.needs_state(&request(epoch, seq - 1, false)));
        };
        check(|_| {});
        check(|outbox| drop(outbox.begin_epoch(DegradedReasons::default(), Clocks::default())));
        check(|outbox| drop(outbox.take_turn(100, Clocks::default())));
    }

    #[test]
    fn a_batch_of_a_full_state_has_no_more_events_than_others() {
        for (given, roots, expected) in [
            (5, 12, vec![5, 5, 2]),
            (usize::MAX, 1026, vec![BATCH_EVENTS_MAX, 2]),
        ] {
            let mut outbox = outbox(PublisherOptions {
                batch_events_max: given,
                chunk_bytes_max: 1 << 20,
                ..options()
            });
            let roots =
                (1..=roots).map(|root| StoredBlocks::by_sequence(None, None, vec![SequenceHash(root << 32)]));
            for root in roots {
                outbox.add(Tier::DEVICE, vec![Event::Stored(root)], Clocks::default());
            }
            let answer = outbox
                .answer(&request(5, 0, true), None, Clocks::default())
                .unwrap();
            let events: Vec<_> = chunks(&answer)
                .iter()
                .flat_map(|chunk| chunk.decode_batches(&WireLimits::default()).unwrap())
                .map(|batch| batch.events.len())
                .collect();
            assert_eq!(events, expected);
        }
    }

    #[test]
    fn nothing_is_larger_than_the_server_takes() {
        let limit = 1500;
        let fits = |payload: &[u8]| payload.len() <= limit - 200;
        let mut outbox = outbox(options());
        publish(&mut outbox, 1);
        // After a reconnect, the new server takes smaller messages than the old one.
        outbox.note_server_limit(limit);
        let hashes = (1..=5000).map(SequenceHash).collect();
        let large = Event::Stored(StoredBlocks::by_sequence(None, None, hashes));
        let sealed = outbox.add(Tier::DEVICE, vec![large], Clocks::default());
        assert!(sealed.len() > 20 && sealed.iter().all(|batch| fits(&batch.payload)));
        let blocks = |answer: &ResyncAnswerChunks| {
            assert!(answer.chunks.iter().all(|chunk| fits(chunk)));
            let batches = chunks(answer)
                .into_iter()
                .flat_map(|chunk| chunk.decode_batches(&WireLimits::default()).unwrap());
            let stored = batches.flat_map(|batch| batch.events).map(|event| match event {
                Event::Stored(stored) => stored.names.len(),
                other => panic!("{other:?}"),
            });
            stored.sum::<usize>()
        };
        let state = outbox
            .answer(&request(5, 0, true), None, Clocks::default())
            .unwrap();
        assert_eq!((state.kind, blocks(&state)), (ResyncAnswerKind::Full, 5000));
        // A full state that the caller keeps may have all blocks in one event.
        let hashes = (1..=5000).map(SequenceHash).collect();
        let kept = vec![(
            Tier::DEVICE,
            Event::Stored(StoredBlocks::by_sequence(None, None, hashes)),
        )];
        let state = outbox
            .answer(&request(5, 0, true), Some(kept), Clocks::default())
            .unwrap();
        assert_eq!(blocks(&state), 5000);
        // Batches that exceed the server's new limit are not sent again.
        outbox.note_server_limit(900);
        let last = outbox.cursor.seq;
        let again = request(5, last - 1, false);
        assert!(outbox.needs_state(&again));
        let answer = outbox.answer(&again, None, Clocks::default()).unwrap();
        assert_eq!(answer.kind, ResyncAnswerKind::Full);
    }

    #[test]
    fn the_table_answers_everything_else() {
        let mut outbox = outbox(options());
        publish(&mut outbox, 5);
        let removed = RemovedBlocks::by_sequence(vec![SequenceHash(50)]);
        outbox.add(Tier::DEVICE, vec![Event::Removed(removed)], Clocks::default());
        for question in [
            request(5, 1, false),
            request(4, 6, false),
            request(5, 6, true),
            request(5, 99, false),
        ] {
            let found = chunks(&outbox.answer(&question, None, Clocks::default()).unwrap());
            assert!(found.iter().all(|chunk| chunk.kind == ResyncAnswerKind::Full));
            assert!(
                found
                    .iter()
                    .all(|chunk| chunk.cursor == BatchCursor { epoch: 5, seq: 6 })
            );
            let blocks: usize = found
                .iter()
                .flat_map(|chunk| chunk.decode_batches(&WireLimits::default()).unwrap())
                .flat_map(|batch| batch.events)
                .map(|event| match event {
                    Event::Stored(stored) => stored.names.len(),
                    other => panic!("{other:?} is no stored blocks"),
                })
                .sum();
            assert_eq!(blocks, 5 * 50 - 1);
        }
    }

    /// Returns the doubts in a full answer of `outbox`.
    fn doubts(outbox: &mut Outbox, clocks: Clocks) -> DegradedReasons {
        let answer = outbox.answer(&request(0, 0, true), None, clocks).unwrap();
        let batches = chunks(&answer)
            .into_iter()
            .flat_map(|chunk| chunk.decode_batches(&WireLimits::default()).unwrap());
        let doubted = batches.flat_map(|batch| batch.events).map(|event| match event {
            Event::Doubted(doubts) => doubts,
            _ => DegradedReasons::default(),
        });
        doubted.fold(DegradedReasons::default(), DegradedReasons::union)
    }

    #[test]
    fn a_full_answer_tells_that_blocks_were_left_out() {
        let gap = DegradedReasons::of(DegradedReason::UpstreamGap);
        let at = |monotonic_us| Clocks {
            monotonic_us,
            unix_us: monotonic_us,
        };
        let mut outbox = outbox(options());
        publish(&mut outbox, 1);
        assert!(doubts(&mut outbox, at(0)).is_empty());
        // The parent never comes.
        let orphan = StoredBlocks::by_sequence(Some(SequenceHash(7000)), None, vec![SequenceHash(7001)]);
        outbox.add(Tier::DEVICE, vec![Event::Stored(orphan)], at(0));
        let asked = outbox.answer(&request(5, 0, true), None, at(999_999));
        assert_eq!(asked.unwrap_err().code, ErrorCode::Unavailable);
        assert_eq!(doubts(&mut outbox, at(1_000_000)), gap, "it is left out");
        assert_eq!(doubts(&mut outbox, at(60_000_000)), gap);
        // An event without doubts does not end the doubt about the blocks that were left out.
        let sealed = outbox.add(
            Tier::DEVICE,
            vec![Event::Doubted(DegradedReasons::default())],
            at(60_000_001),
        );
        let sent = EventBatch::decode(&sealed[0].payload, &WireLimits::default()).unwrap();
        assert_eq!(sent.events, [Event::Doubted(gap)]);
        assert_eq!(doubts(&mut outbox, at(60_000_001)), gap);
        let events = vec![Event::Cleared, Event::Doubted(DegradedReasons::default())];
        let sealed = outbox.add(Tier::DEVICE, events.clone(), at(60_000_002));
        let sent = EventBatch::decode(&sealed[0].payload, &WireLimits::default()).unwrap();
        assert_eq!(sent.events, events, "nothing is left out any more");
        assert!(doubts(&mut outbox, at(60_000_002)).is_empty());
    }

    #[test]
    fn a_state_is_whole_again_once_what_waited_has_its_parent() {
        let gap = DegradedReasons::of(DegradedReason::UpstreamGap);
        let at = |monotonic_us| Clocks {
            monotonic_us,
            unix_us: monotonic_us,
        };
        let stored = |parent: Option<u64>, hash| {
            let parent = parent.map(SequenceHash);
            Event::Stored(StoredBlocks::by_sequence(parent, None, vec![SequenceHash(hash)]))
        };
        let mut outbox = outbox(options());
        outbox.add(Tier::DEVICE, vec![stored(Some(7000), 7001)], at(0));
        assert_eq!(doubts(&mut outbox, at(1_000_000)), gap, "it is left out");
        outbox.add(Tier::DEVICE, vec![stored(None, 7000)], at(2_000_000));
        assert!(doubts(&mut outbox, at(2_000_000)).is_empty(), "nothing waits");
        // Who got the state that lacked it still lacks it.
        let doubted = Event::Doubted(DegradedReasons::default());
        let sealed = outbox.add(Tier::DEVICE, vec![doubted], at(3_000_000));
        let sent = EventBatch::decode(&sealed[0].payload, &WireLimits::default()).unwrap();
        assert_eq!(sent.events, [Event::Doubted(gap)]);
    }

    #[test]
    fn a_full_answer_tells_of_blocks_whose_content_is_missing() {
        let settings = NamespaceSettings {
            hashing: Hashing::Recompute,
            ..NamespaceSettings::default()
        };
        let mut outbox = outbox(PublisherOptions {
            settings,
            ..options()
        });
        publish(&mut outbox, 1);
        let gap = DegradedReasons::of(DegradedReason::UpstreamGap);
        assert_eq!(doubts(&mut outbox, Clocks::default()), gap);
        outbox.begin_epoch(DegradedReasons::default(), Clocks::default());
        assert!(doubts(&mut outbox, Clocks::default()).is_empty());
    }

    #[test]
    fn doubts_at_the_start_are_in_the_first_batch_and_in_every_answer() {
        let lost = DegradedReasons::of(DegradedReason::UpstreamLost);
        let mut outbox = outbox(PublisherOptions {
            doubts: lost,
            ..options()
        });
        assert_eq!(doubts(&mut outbox, Clocks::default()), lost);
        let first = outbox.first(Clocks::default()).unwrap();
        let sent = EventBatch::decode(&first.payload, &WireLimits::default()).unwrap();
        assert_eq!((sent.seq, sent.events), (1, vec![Event::Doubted(lost)]));
        publish(&mut outbox, 1);
        assert_eq!(doubts(&mut outbox, Clocks::default()), lost);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let mut outbox = outbox(PublisherOptions {
            beginning: Beginning::After(BatchCursor { epoch: 5, seq: 7 }),
            ..options()
        });
        publish(&mut outbox, 1);
        assert!(
            outbox
                .answer(&request(5, 7, false), None, Clocks::default())
                .is_ok()
        );
        let refused = outbox
            .answer(&request(5, 6, false), None, Clocks::default())
            .unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unavailable);
        let other_rank = ResyncRequest {
            rank: 1,
            ..request(5, 7, false)
        };
        let refused = outbox.answer(&other_rank, None, Clocks::default()).unwrap_err();
        assert_eq!(refused.code, ErrorCode::BadRequest);
        // It knows the epochs that it begins.
        outbox.begin_epoch(DegradedReasons::default(), Clocks::default());
        let epoch = outbox.cursor.epoch;
        let answer = outbox.answer(&request(epoch, 0, true), None, Clocks::default());
        assert_eq!(answer.unwrap().kind, ResyncAnswerKind::Full);
    }
}
