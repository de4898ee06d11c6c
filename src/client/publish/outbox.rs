//! Outbox: the publisher's logic without I/O. It numbers batches, and keeps the batches and blocks that daemons may ask for.

use bytes::Bytes;

use kvatlas_core::hash::BlockSize;
use kvatlas_core::index::RegisterError;
use kvatlas_core::wire::{
    BatchCursor, DegradedReason, DegradedReasons, Event, EventBatch, HolderId, Profile, Rank, Tier,
};

use super::cut::{CutBounds, cut_events};
use super::epochs::{RISE_US, SKEW_US, first_of, is_far_ahead, second_above};
use super::options::{Beginning, PublisherOptions};
use super::profile::ToldProfile;
use super::ring::Ring;
use super::sizes::events_bytes;
use super::table::BlockTable;

/// A batch that can be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SealedBatch {
    pub(super) cursor: BatchCursor,
    pub(super) payload: Bytes,
    pub(super) is_heartbeat: bool,
}

/// Readings of two clocks at one instant.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Clocks {
    /// Microseconds on a clock that does not run backwards.
    pub(super) monotonic_us: u64,
    /// Microseconds since the Unix epoch.
    pub(super) unix_us: u64,
}

/// Events that wait for more events to share their batch (the *open batch*).
#[derive(Debug)]
struct OpenBatch {
    tier: Tier,
    events: Vec<Event>,
    bytes: usize,
}

/// Numbers batches, and keeps the batches and blocks that daemons may ask for.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) options: PublisherOptions,
    pub(super) rank: Rank,
    pub(super) cursor: BatchCursor,
    /// Time at which the last numbered batch was made, in microseconds since the Unix epoch. `None` if another process made that
    /// batch, or if there is no such batch.
    pub(super) made_us: Option<u64>,
    pub(super) ring: Ring,
    /// Table of the holder's blocks. `None` if the blocks of earlier batches are not known, or if the caller keeps the holder's
    /// blocks itself.
    pub(super) table: Option<BlockTable>,
    /// Holder whose present epoch another process began, so that the blocks of earlier batches are not known, and whether its
    /// table is made with the next epoch. `None` if this publisher knows the whole epoch.
    taken_up: Option<(HolderId, bool)>,
    open: Option<OpenBatch>,
    /// Time at which the last batch got its number, in microseconds on the monotonic clock.
    numbered_us: Option<u64>,
    /// End of the period in which the publisher counts as newly started, in microseconds on the monotonic clock; see
    /// [`Self::rise_above`].
    new_until_us: u64,
    /// Time at which [`Self::rise_above`] last began an epoch, in microseconds on the monotonic clock.
    risen_us: Option<u64>,
    /// Doubts about the holder that the publisher has reported. They are part of the full state.
    pub(super) doubts: DegradedReasons,
    /// The holder's address and labels.
    pub(super) profile: ToldProfile,
    /// Whether the last batch said goodbye. The holder then no longer exists, and no heartbeat is sent for it.
    pub(super) has_left: bool,
    /// Maximum size of a message that the server accepts, in bytes; `usize::MAX` until the server's limit is known.
    server_bytes_max: usize,
}

/// Maximum number of bytes that a message has in addition to its batches: its headers, and the fields of a chunk.
const MESSAGE_HEAD_BYTES: usize = 512;

impl Outbox {
    pub(super) fn new(
        options: PublisherOptions,
        id: &HolderId,
        has_table: bool,
        clocks: Clocks,
    ) -> Result<Self, RegisterError> {
        let (cursor, knows_blocks) = match options.beginning {
            Beginning::NewEpoch => (first_of(clocks.unix_us), true),
            Beginning::Epoch(epoch) => (first_of(epoch), true),
            Beginning::Above(known) => (second_above(known, clocks.unix_us), true),
            Beginning::After(cursor) => (cursor, cursor.seq == 0),
        };
        let keeps_table = has_table && options.answers_resyncs;
        let table = (knows_blocks && keeps_table)
            .then(|| BlockTable::new(options.settings, id))
            .transpose()?;
        let taken_up = (!knows_blocks).then(|| (id.clone(), keeps_table));
        Ok(Self {
            ring: Ring::of(&options, cursor.seq),
            profile: ToldProfile::new(options.profile.clone()),
            doubts: options.doubts,
            options,
            rank: id.rank,
            cursor,
            made_us: None,
            table,
            taken_up,
            open: None,
            numbered_us: None,
            new_until_us: clocks.monotonic_us.saturating_add(RISE_US),
            risen_us: None,
            has_left: false,
            server_bytes_max: usize::MAX,
        })
    }

    /// Notes the server's limit on messages. Batches and chunks that are made from now on stay within this limit.
    pub(super) fn note_server_limit(&mut self, message_bytes_max: usize) {
        self.server_bytes_max = message_bytes_max;
    }

    /// Returns `bytes_max`, or the number of bytes that a message can have in addition to its headers, if that is less.
    pub(super) fn within_server_limit(&self, bytes_max: usize) -> usize {
        let head_bytes = MESSAGE_HEAD_BYTES.min(self.server_bytes_max / 2);
        bytes_max.min(self.server_bytes_max - head_bytes)
    }

    /// Adds the events of one call. Returns the batches that must be sent now, because they are full or must not wait. Events
    /// that are too large for the server are cut.
    pub(super) fn add(&mut self, tier: Tier, events: Vec<Event>, clocks: Clocks) -> Vec<SealedBatch> {
        let bytes_max = self.within_server_limit(self.options.batch_bytes_max);
        let bounds = CutBounds {
            events_max: self.options.batch_events_max,
            bytes_max: bytes_max.saturating_sub(self.profile.bytes()),
        };
        if events_bytes(&events) <= bounds.bytes_max {
            return self.add_whole(tier, events, bounds, clocks);
        }
        cut_events(events, bounds)
            .into_iter()
            .flat_map(|piece| self.add_whole(tier, piece, bounds, clocks))
            .collect()
    }

    fn add_whole(
        &mut self,
        tier: Tier,
        events: Vec<Event>,
        bounds: CutBounds,
        clocks: Clocks,
    ) -> Vec<SealedBatch> {
        let bytes = events_bytes(&events);
        let mut sealed = Vec::new();
        let is_full = |open: &OpenBatch| {
            open.tier != tier
                || open.events.len() + events.len() > bounds.events_max
                || open.bytes + bytes > bounds.bytes_max
        };
        if self.open.as_ref().is_some_and(is_full) {
            sealed.extend(self.seal(clocks));
        }
        // A goodbye or a doubt is sent immediately, and no event may follow it in the same batch.
        let is_last = |event: &Event| matches!(event, Event::Goodbye | Event::Doubted(_));
        let is_urgent = events.is_empty() || events.iter().any(is_last);
        match &mut self.open {
            Some(open) => {
                open.events.extend(events);
                open.bytes += bytes;
            }
            None => self.open = Some(OpenBatch { tier, events, bytes }),
        }
        if is_urgent || self.options.batch_delay.is_zero() {
            sealed.extend(self.seal(clocks));
        }
        sealed
    }

    /// Returns the block size that batches carry; `None` if they carry none.
    pub(super) fn told_block_size(&self) -> Option<BlockSize> {
        let block_size = self.options.settings.block_size;
        self.options.tells_block_size.then_some(block_size)
    }

    /// Sets the profile (address and labels), and returns the batches to send immediately. If events are waiting to
    /// share a batch, their batch comes first, without the new profile. Then comes a heartbeat that tells the new
    /// profile. Adds no heartbeat if the profile has not changed, or if the holder has left.
    pub(super) fn set_profile(&mut self, profile: Profile, clocks: Clocks) -> Vec<SealedBatch> {
        let rest = self.seal(clocks);
        let is_new = self.profile.replace(profile);
        let told = is_new.then(|| self.heartbeat(clocks)).flatten();
        rest.into_iter().chain(told).collect()
    }

    /// Returns the time at which the open batch (events that wait to share a batch) must be sent, in microseconds on
    /// the monotonic clock; `None` if no batch is open. The time is one `batch_delay` after the previous batch. If that
    /// time is in the past, the open batch is sent immediately.
    pub(super) fn due_us(&self) -> Option<u64> {
        self.open.as_ref()?;
        let delay = u64::try_from(self.options.batch_delay.as_micros()).unwrap_or(u64::MAX);
        Some(self.numbered_us.map_or(0, |before| before.saturating_add(delay)))
    }

    /// Closes and numbers the open batch (events that wait to share a batch), if there is one.
    pub(super) fn seal(&mut self, clocks: Clocks) -> Option<SealedBatch> {
        let open = self.open.take()?;
        Some(self.number(open.tier, open.events, clocks))
    }

    /// Makes the publisher's first batch, if there are doubts to tell from the start.
    pub(super) fn first(&mut self, clocks: Clocks) -> Option<SealedBatch> {
        let doubts = self.doubts;
        (!doubts.is_empty()).then(|| self.number(Tier::DEVICE, vec![Event::Doubted(doubts)], clocks))
    }

    /// Makes a heartbeat. A heartbeat is a batch without events, which shows daemons that the holder lives and that they have
    /// missed no batch. `None` after a goodbye.
    pub(super) fn heartbeat(&mut self, clocks: Clocks) -> Option<SealedBatch> {
        (!self.has_left).then(|| self.number(Tier::DEVICE, Vec::new(), clocks))
    }

    fn number(&mut self, tier: Tier, mut events: Vec<Event>, clocks: Clocks) -> SealedBatch {
        if self.has_left {
            self.come_back(clocks);
        }
        // A new doubt replaces all doubts that a full state has told. So it repeats the doubt that the table of blocks
        // left some blocks out.
        let mut left_out = self.table.as_ref().map(BlockTable::doubts).unwrap_or_default();
        for event in &mut events {
            match event {
                Event::Doubted(doubts) => {
                    self.doubts = *doubts;
                    *doubts = doubts.union(left_out);
                }
                Event::Cleared | Event::Goodbye => {
                    (self.doubts, left_out) = (DegradedReasons::default(), DegradedReasons::default());
                }
                Event::Stored(_) | Event::Removed(_) | Event::Resumable(_) => {}
            }
        }
        self.cursor.seq += 1;
        // Times grow, also where the clock is set back.
        let later = self.made_us.map(|last| last.saturating_add(1));
        self.made_us = later.max(Some(clocks.unix_us));
        self.numbered_us = Some(clocks.monotonic_us);
        let batch = EventBatch {
            epoch: self.cursor.epoch,
            seq: self.cursor.seq,
            rank: self.rank,
            time_us: self.made_us,
            tier,
            block_size: self.told_block_size(),
            profile: self
                .profile
                .take(events.is_empty() || events.contains(&Event::Cleared)),
            events,
        };
        let payload = Bytes::from(batch.encode());
        self.ring.push(payload.clone());
        let is_heartbeat = batch.events.is_empty();
        self.has_left = batch.events.contains(&Event::Goodbye);
        if let Some(table) = &mut self.table {
            for event in batch.events {
                table.apply(event, tier, clocks.monotonic_us);
            }
        }
        SealedBatch {
            cursor: self.cursor,
            payload,
            is_heartbeat,
        }
    }

    /// Begins a new epoch, in which the holder has no blocks. Returns the batches to send. If events were still
    /// waiting, the first batch has these, and belongs to the old epoch. The last batch begins the new epoch, and tells
    /// the `doubts`.
    pub(super) fn begin_epoch(&mut self, doubts: DegradedReasons, clocks: Clocks) -> Vec<SealedBatch> {
        let rest = self.seal(clocks);
        self.come_back(clocks);
        let doubted = (!doubts.is_empty()).then_some(Event::Doubted(doubts));
        let first = self.number(Tier::DEVICE, doubted.into_iter().collect(), clocks);
        rest.into_iter().chain([first]).collect()
    }

    /// Begins an epoch above `known`, the epoch that a daemon knows, with all blocks of the holder. Returns whether an
    /// epoch was begun. A new epoch is needed if the clock of an earlier process was ahead, because daemons then take
    /// this process for an outdated one.
    ///
    /// The epoch's first number is skipped. So all other daemons see a gap, and ask for the blocks, too.
    ///
    /// The call does nothing in these cases:
    /// - `known` is not above this publisher's epoch.
    /// - The blocks of earlier batches are not known, or the holder has left.
    /// - This machine's clock has already passed the time for which the epoch `known` stands. Then a process that was
    ///   started after this one may have begun that epoch. If this publisher was not newly started, a time up to
    ///   [`SKEW_US`] ahead of the clock counts as passed, too.
    /// - `known` [is too far ahead](is_far_ahead) of this machine's clock: daemons would drop all batches of an epoch
    ///   above it.
    /// - An earlier call began an epoch less than a minute ago. Without this pause, two living publishers of one holder
    ///   would begin higher and higher epochs without end.
    pub(super) fn rise_above(&mut self, known: u64, clocks: Clocks) -> bool {
        let is_older = self.taken_up.is_some() || self.has_left;
        let tolerated_us = match clocks.monotonic_us > self.new_until_us {
            true => SKEW_US,
            false => 0,
        };
        let has_begun = known <= clocks.unix_us.saturating_add(tolerated_us);
        let is_too_soon = self
            .risen_us
            .is_some_and(|last| clocks.monotonic_us.saturating_sub(last) < RISE_US);
        let Some(above) = known.checked_add(1).filter(|_| known > self.cursor.epoch) else {
            return false;
        };
        if is_older || has_begun || is_too_soon || is_far_ahead(known, clocks.unix_us) {
            return false;
        }
        self.risen_us = Some(clocks.monotonic_us);
        self.go_on_above(above - 1, clocks);
        true
    }

    /// Makes the last batch of the publisher's turn. It tells daemons that they may miss the holder's later events.
    /// This doubt is only for this batch: the publisher does not tell it again in its next turn. `None` after a
    /// goodbye.
    pub(super) fn doubt_last(&mut self, clocks: Clocks) -> Option<SealedBatch> {
        if self.has_left {
            return None;
        }
        let doubts = self.doubts;
        let doubted = Event::Doubted(doubts.with(DegradedReason::UpstreamLost));
        let sealed = self.number(Tier::DEVICE, vec![doubted], clocks);
        self.doubts = doubts;
        Some(sealed)
    }

    /// Begins the turn of this publisher, which shares its holder with other publishers. Begins an epoch above `known`
    /// and above the publisher's own last epoch, with all blocks of the holder. Returns the epoch's first batch, which
    /// tells the doubts. Events that were still waiting are dropped, because the full state contains them.
    pub(super) fn take_turn(&mut self, known: u64, clocks: Clocks) -> SealedBatch {
        self.open = None;
        self.go_on_above(known, clocks);
        let doubted = (!self.doubts.is_empty()).then_some(Event::Doubted(self.doubts));
        self.number(Tier::DEVICE, doubted.into_iter().collect(), clocks)
    }

    /// Begins an epoch with a number above `known` and above the last epoch, in which the holder keeps all its blocks. The
    /// first batch gets number 2, not 1. So daemons see a gap, and ask for the blocks.
    fn go_on_above(&mut self, known: u64, clocks: Clocks) {
        let next = self.cursor.epoch.saturating_add(1);
        self.cursor = second_above(known, clocks.unix_us.max(next));
        self.profile.begin_epoch();
        self.made_us = self.made_us.max(Some(clocks.unix_us));
        self.ring = Ring::of(&self.options, 1);
    }

    /// Begins a new epoch, in which the holder has no blocks. It is used after a goodbye, when daemons have forgotten
    /// the holder and its batch numbers, and when daemons are to forget the holder's blocks.
    fn come_back(&mut self, clocks: Clocks) {
        let epoch = clocks.unix_us.max(self.cursor.epoch.saturating_add(1));
        self.cursor = first_of(epoch);
        self.ring = Ring::of(&self.options, 0);
        if let Some(table) = &mut self.table {
            table.clear();
        }
        if let Some((id, true)) = self.taken_up.take() {
            // A table of one holder has room for it. Without one, full states are refused as before.
            self.table = BlockTable::new(self.options.settings, &id).ok();
        }
        self.doubts = DegradedReasons::default();
        self.profile.begin_epoch();
        self.has_left = false;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvatlas_core::hash::SequenceHash;
    use kvatlas_core::wire::{BlockContent, DegradedReason, Resumable, StoredBlocks, WireLimits, WorkerName};

    use super::*;

    fn outbox(options: PublisherOptions) -> Outbox {
        let id = HolderId {
            worker: WorkerName::new("w").unwrap(),
            rank: 3,
        };
        Outbox::new(options, &id, true, at(1)).unwrap()
    }

    fn at(us: u64) -> Clocks {
        Clocks {
            monotonic_us: us,
            unix_us: us,
        }
    }

    fn stored(first: u64, count: u64) -> Event {
        let hashes = (first..first + count).map(SequenceHash).collect();
        Event::Stored(StoredBlocks::by_sequence(None, None, hashes))
    }

    fn decoded(sealed: &SealedBatch) -> EventBatch {
        EventBatch::decode(&sealed.payload, &WireLimits::default()).unwrap()
    }

    #[test]
    fn calls_share_a_batch_until_it_is_full_or_due() {
        let mut outbox = outbox(PublisherOptions {
            batch_delay: Duration::from_micros(100),
            batch_events_max: 3,
            ..PublisherOptions::default()
        });
        assert!(outbox.add(Tier::DEVICE, vec![stored(1, 2)], at(10)).is_empty());
        assert!(outbox.add(Tier::DEVICE, vec![stored(1, 3)], at(20)).is_empty());
        // The open batch has two events, so two more would exceed its maximum of three.
        let full = outbox.add(Tier::DEVICE, vec![stored(5, 1), stored(6, 1)], at(30));
        assert_eq!(full.len(), 1);
        assert_eq!((decoded(&full[0]).seq, decoded(&full[0]).events.len()), (1, 2));
        assert_eq!(outbox.due_us(), Some(130));
        // Another tier needs another batch.
        let other = outbox.add(Tier::new(1).unwrap(), vec![stored(7, 1)], at(40));
        assert_eq!(
            (decoded(&other[0]).seq, decoded(&other[0]).tier),
            (2, Tier::DEVICE)
        );
        let rest = outbox.seal(at(50)).unwrap();
        assert_eq!((decoded(&rest).seq, decoded(&rest).tier.as_u8()), (3, 1));
        assert_eq!((decoded(&rest).rank, outbox.due_us()), (3, None));
    }

    #[test]
    fn times_grow_where_the_clock_is_set_back() {
        let mut outbox = outbox(PublisherOptions::default());
        let times = [100, 50, 200].map(|us| decoded(&outbox.heartbeat(at(us)).unwrap()).time_us);
        assert_eq!(times, [Some(100), Some(101), Some(200)]);
    }

    #[test]
    fn only_what_follows_a_batch_closely_waits() {
        let mut outbox = outbox(PublisherOptions {
            batch_delay: Duration::from_micros(100),
            ..PublisherOptions::default()
        });
        assert_eq!(outbox.due_us(), None);
        outbox.add(Tier::DEVICE, vec![stored(1, 2)], at(10));
        assert!(outbox.due_us().unwrap() <= 10, "nothing was sent before it");
        outbox.seal(at(10)).unwrap();
        outbox.add(Tier::DEVICE, vec![stored(5, 1)], at(20));
        assert_eq!(outbox.due_us(), Some(110));
        outbox.seal(at(110)).unwrap();
        outbox.add(Tier::DEVICE, vec![stored(6, 1)], at(500));
        assert!(outbox.due_us().unwrap() <= 500, "the last one is long ago");
    }

    #[test]
    fn without_a_delay_every_call_is_a_batch() {
        let mut outbox = outbox(PublisherOptions {
            batch_delay: Duration::ZERO,
            beginning: Beginning::Epoch(9),
            ..PublisherOptions::default()
        });
        let sealed = outbox.add(Tier::DEVICE, vec![stored(1, 2)], at(10));
        assert_eq!(sealed[0].cursor, BatchCursor { epoch: 9, seq: 1 });
        let heartbeat = outbox.heartbeat(at(20)).unwrap();
        assert!(heartbeat.is_heartbeat);
        assert_eq!(heartbeat.cursor.seq, 2);
    }

    #[test]
    fn who_comes_back_after_a_goodbye_begins_anew() {
        let mut outbox = outbox(PublisherOptions::default());
        let last = outbox.add(Tier::DEVICE, vec![stored(1, 2), Event::Goodbye], at(10));
        assert_eq!(last.len(), 1);
        assert_eq!(outbox.heartbeat(at(20)), None);
        outbox.add(Tier::DEVICE, vec![stored(8, 1)], at(30));
        let back = outbox.seal(at(40)).unwrap();
        assert!(back.cursor.epoch > last[0].cursor.epoch);
        assert_eq!(back.cursor.seq, 1);
        let blocks = outbox.table.as_mut().unwrap().state().count();
        assert_eq!(blocks, 1, "only what was stored since");
    }

    #[test]
    fn a_new_epoch_has_nothing_of_the_old_one() {
        let mut outbox = outbox(PublisherOptions::default());
        let gap = DegradedReasons::of(DegradedReason::UpstreamGap);
        let first = outbox.add(Tier::DEVICE, vec![stored(1, 2), Event::Doubted(gap)], at(10));
        assert_eq!((first.len(), outbox.doubts), (1, gap));
        outbox.add(Tier::DEVICE, vec![stored(5, 1)], at(20));
        let sealed = outbox.begin_epoch(DegradedReasons::default(), at(30));
        let batches: Vec<EventBatch> = sealed.iter().map(decoded).collect();
        assert_eq!(
            (batches.len(), batches[0].epoch, batches[0].seq),
            (2, first[0].cursor.epoch, 2)
        );
        assert_eq!((batches[1].seq, batches[1].events.len()), (1, 0));
        assert!(batches[1].epoch > batches[0].epoch);
        assert!(outbox.doubts.is_empty());
        assert_eq!(outbox.table.as_mut().unwrap().state().count(), 0);
    }

    #[test]
    fn an_epoch_is_put_above_the_one_that_a_daemon_knows() {
        const MINUTE: u64 = 60_000_000;
        let mut risen = outbox(PublisherOptions::default());
        risen.add(Tier::DEVICE, vec![stored(1, 2)], at(10));
        assert!(!risen.rise_above(1, at(20)), "it is not above");
        assert!(!risen.rise_above(u64::MAX, at(20)), "nothing is above that");
        assert!(!risen.rise_above(15, at(20)), "a younger process has begun");
        assert!(risen.rise_above(500, at(20)));
        assert_eq!(risen.cursor, BatchCursor { epoch: 501, seq: 1 });
        // Events that waited go into the new epoch. The epoch's number 1 is skipped.
        let next = decoded(&risen.seal(at(30)).unwrap());
        assert_eq!((next.epoch, next.seq, next.events.len()), (501, 2, 1));
        assert!(risen.ring.after(0).is_none() && risen.ring.after(1).is_some());
        assert_eq!(risen.table.as_mut().unwrap().state().count(), 1);
        assert!(!risen.rise_above(600, at(40)), "the other one lives");
        assert!(risen.rise_above(MINUTE * 2, at(40 + MINUTE)));
        // A publisher that is no longer new may have been replaced by a younger process.
        let mut old = outbox(PublisherOptions::default());
        assert!(!old.rise_above(2 * MINUTE, at(3 * MINUTE)));
        assert!(!old.rise_above(3 * MINUTE + SKEW_US, at(3 * MINUTE)));
        assert!(
            old.rise_above(4 * MINUTE, at(3 * MINUTE)),
            "by the clock it has not begun"
        );
        let mut continuing = outbox(PublisherOptions {
            beginning: Beginning::After(BatchCursor { epoch: 5, seq: 7 }),
            ..PublisherOptions::default()
        });
        assert!(!continuing.rise_above(6, at(2)));
        // Daemons would drop all that comes in an epoch above it.
        let (now_us, mut asked) = (1_800_000_000_000_000, outbox(PublisherOptions::default()));
        assert!(!asked.rise_above(4_000_000_000_000_000_000, at(now_us)));
        assert!(asked.rise_above(now_us + MINUTE, at(now_us)));
        asked.take_turn(u64::MAX, at(now_us));
        assert_eq!(asked.cursor.epoch, now_us + MINUTE + 2);
    }

    #[test]
    fn who_knows_from_before_what_there_is_goes_on_above_all_that_was_heard_of() {
        let mut outbox = outbox(PublisherOptions {
            beginning: Beginning::Above(70),
            ..PublisherOptions::default()
        });
        let cursor = |epoch, seq| BatchCursor { epoch, seq };
        assert_eq!(outbox.cursor, cursor(71, 1));
        let doubts = DegradedReasons::of(DegradedReason::UpstreamGap);
        let doubted = Event::Doubted(doubts);
        let first = outbox.add(Tier::DEVICE, vec![doubted.clone()], at(2)).remove(0);
        assert_eq!(decoded(&first).seq, 2, "daemons ask for what came before");
        outbox.add(Tier::DEVICE, vec![stored(1, 4)], at(3));
        let taken = outbox.take_turn(90, at(4));
        assert_eq!(
            (outbox.cursor, decoded(&taken).events),
            (cursor(91, 2), vec![doubted.clone()])
        );
        assert!(outbox.seal(at(5)).is_none(), "it is part of the full state");
        // The doubt that ends a turn is not part of the next one.
        let last = outbox.doubt_last(at(5)).unwrap();
        let doubts = doubts.with(DegradedReason::UpstreamLost);
        assert_eq!(decoded(&last).events, [Event::Doubted(doubts)]);
        // The clock is ahead of both epochs, and the ring has no batch of an earlier epoch.
        assert_eq!(decoded(&outbox.take_turn(5, at(1000))).events, [doubted]);
        assert_eq!(outbox.cursor, cursor(1000, 2));
        assert!(outbox.ring.after(0).is_none() && outbox.ring.after(1).is_some());
    }

    #[test]
    fn estimates_are_never_too_low() {
        let tokens = StoredBlocks {
            content: Some(BlockContent::Tokens {
                tokens: (0..64).collect(),
                lora_name: Some("x".repeat(1000)),
                cache_salt: Some("y".repeat(500)),
            }),
            engine_hashes: Some(vec![7; 4]),
            resumable: Resumable::from_flags([false, true, false, true]),
            ..StoredBlocks::by_sequence(Some(SequenceHash(1)), None, vec![SequenceHash(2); 4])
        };
        let cases = [
            vec![stored(1, 4096)],
            vec![Event::Stored(tokens)],
            vec![Event::Cleared; 100],
            Vec::new(),
        ];
        for events in cases {
            let estimate = events_bytes(&events);
            let mut outbox = outbox(PublisherOptions::default());
            outbox.add(Tier::DEVICE, events, at(u64::MAX / 2));
            let bytes = outbox
                .seal(at(u64::MAX / 2))
                .map_or(0, |sealed| sealed.payload.len());
            assert!(bytes <= estimate, "{bytes} > {estimate}");
        }
    }
}
