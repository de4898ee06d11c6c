//! A holder's part in snapshots: how its state is dumped, and how the holder is rebuilt from a file.

use kvatlas_core::index::{RestoredRun, WalkedHolder};
use kvatlas_core::snapshot::HolderFrame;
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{
    BatchCursor, DegradedReason, DegradedReasons, Event, EventBatch, NamespaceName, Profile, Rank, Tier,
};

use super::clock::now_us;
use super::holder::Holder;
use super::job::RestoreOrigin;
use super::phase::Phase;
use super::sequence::{HighWater, SequenceTracker, UNKNOWN_US};
use super::server_clock::ServerClock;
use super::standing::BlocksChange;

/// Maximum number of blocks in one event of a dump. This bound keeps frames (records of a snapshot) small, even if
/// the configuration allows larger events in messages.
const DUMP_EVENT_BLOCKS_MAX: usize = 4096;
/// Number of blocks at which a batch of a dump is closed.
const DUMP_BATCH_BLOCKS: usize = 16_384;

/// State of a holder at one instant: its cursor, and events that rebuild its blocks.
#[derive(Debug)]
pub struct HolderDump {
    /// Name and cursor of the holder.
    pub frame: HolderFrame,
    /// Events that rebuild the holder, in order, each with its tier.
    events: Vec<(Tier, Event)>,
    /// Record by which the holder's blocks are found later, when the snapshot walks over the whole index. If it is
    /// set, `events` is empty. `None` if such a walk cannot describe the holder completely. In that case the blocks
    /// are in `events`.
    pub walked: Option<WalkedHolder>,
}

/// Result of comparing a holder with its dump, after a walk over the index has collected the holder's blocks.
#[derive(Debug)]
pub enum Revisited {
    /// The dump is valid, although blocks may have been stored or removed since: the blocks from the walk and the later
    /// batches together give the holder's present state.
    Unchanged,
    /// The dump does not describe the holder any more. The value is a new dump, with the blocks as events.
    Changed(Box<HolderDump>),
    /// The holder has been removed.
    Gone,
}

impl HolderDump {
    /// Returns the events in order, each with its tier.
    pub fn into_events(self) -> Vec<(Tier, Event)> {
        self.events
    }

    /// Returns the events as encoded batches, in order. The caller's thread does the encoding, not the lane's.
    pub fn batches(self) -> impl Iterator<Item = Vec<u8>> {
        let HolderFrame { epoch, seq, rank, .. } = self.frame;
        let mut events = self.events.into_iter().peekable();
        std::iter::from_fn(move || {
            let tier = events.peek()?.0;
            let mut batch = empty_batch(epoch, seq, rank, tier);
            let mut blocks = 0;
            while blocks < DUMP_BATCH_BLOCKS
                && batch.events.len() < DUMP_EVENT_BLOCKS_MAX
                && let Some((_, event)) = events.next_if(|(next, _)| *next == tier)
            {
                blocks += match &event {
                    Event::Stored(stored) => stored.names.len(),
                    _ => 0,
                };
                batch.events.push(event);
            }
            Some(batch.encode())
        })
    }
}

fn empty_batch(epoch: u64, seq: u64, rank: Rank, tier: Tier) -> EventBatch {
    EventBatch {
        epoch,
        seq: seq.max(1),
        rank,
        time_us: None,
        tier,
        block_size: None,
        profile: None,
        events: Vec::new(),
    }
}

impl Holder {
    /// Sets the cursor, the profile and the reasons for doubt from a holder's frame in a snapshot. The holder's
    /// blocks come later, through [`Self::restore_blocks`] and [`Self::restore_runs`].
    ///
    /// Clears the holder first, because a restore can bring the same holder twice. One cause is that the holder moved
    /// to another lane while the snapshot was written. Another is that a newer snapshot could not be read to its end,
    /// so an older one is restored after it.
    ///
    /// A holder that was not in doubt in the snapshot counts as confirmed in the stream generation of `origin`. A new
    /// generation begins when messages may have been lost.
    pub(super) fn restore_cursor(&mut self, frame: &HolderFrame, origin: RestoreOrigin) {
        self.phase = Phase::default();
        self.writer.clear();
        self.writer.set_size_known(frame.is_size_told);
        self.writer.set_foreign_chain(frame.foreign_chain);
        let cursor = BatchCursor {
            epoch: frame.epoch,
            seq: frame.seq,
        };
        self.tracker = SequenceTracker::resuming(cursor);
        let status = self.writer.status();
        status.cursor.store(cursor);
        status.set_profile(Profile {
            address: frame.address.clone(),
            labels: frame.labels.clone(),
        });
        self.profile_epoch = frame.epoch;
        let reasons = DegradedReasons::from_bits(frame.degraded_bits);
        // `Unverified` does not last: the next batch that continues the count withdraws it.
        let lasting = reasons.filtered(DegradedReason::is_lasting);
        status.reset_reasons(lasting);
        self.is_known_short = lasting.contains(DegradedReason::Capacity);
        self.note_blocks(BlocksChange::Replaced);
        if !lasting.filtered(|reason| !reason.is_upstream()).is_empty() {
            self.note_blocks(BlocksChange::Missed);
        }
        // A stream redelivers batches that are part of the snapshot. They must not look like a restart of the
        // publisher's numbering.
        self.high_water = HighWater {
            seen: cursor,
            made_us: frame.made_us.unwrap_or(UNKNOWN_US),
        };
        if frame.made_us.is_some() && !reasons.contains(DegradedReason::Unverified) {
            self.writer.status().confirm(origin.generation);
            // A stream that has been read shows that no event is missing. It does not show that the publisher is alive
            // now.
            self.restored_us = frame.seen_us;
            self.seen_us = match frame.seen_us {
                Some(_) => 0,
                None => origin.taken_us,
            };
        } else {
            // An earlier frame of the holder may have confirmed it.
            self.writer.status().unconfirm();
        }
    }

    /// Converts the restored time at which the publisher was last seen to the local clock, once the server has told its
    /// time.
    pub(super) fn date_restored(&mut self, stream_clock: &ServerClock) {
        if let Some(age_us) = self.restored_us.and_then(|seen_us| stream_clock.age_us(seen_us)) {
            self.seen_us = self.seen_us.max(now_us().saturating_sub(age_us));
            self.restored_us = None;
        }
    }

    /// Returns the time at which the publisher was last seen, on the clock of the server that has the stream. `None` if
    /// the server has told no time.
    fn seen_on(&self, stream_clock: &ServerClock) -> Option<u64> {
        let seen_us = match self.seen_us {
            0 => stream_clock.time_us().map(|_| 0),
            seen_us => stream_clock.server_us(seen_us),
        };
        seen_us.max(self.restored_us)
    }

    /// Stores a batch of blocks from a snapshot.
    pub(super) fn restore_blocks(&mut self, batch: EventBatch, now_us: u64) {
        for event in batch.events {
            let applied = self.writer.apply(event, batch.tier, now_us);
            self.report_rejects(&applied);
        }
    }

    /// Restores a holder from a snapshot without its blocks, because they do not fit the settings of the namespace.
    /// Puts the holder in doubt, so that its publisher is asked for the full state.
    pub(super) fn refuse_blocks(&mut self, frame: &HolderFrame) {
        self.restore_cursor(frame, RestoreOrigin::default());
        self.forget_size();
        self.degrade(DegradedReason::Rejected);
        self.note_blocks(BlocksChange::Missed);
    }

    /// Stores runs of consecutive blocks that a snapshot has in its forest (the blocks of many holders together).
    pub(super) fn restore_runs<'r>(&mut self, tier: Tier, runs: impl Iterator<Item = RestoredRun<'r>>) {
        let applied = self.writer.restore_runs(tier, runs);
        self.report_rejects(&applied);
    }

    /// Returns the holder's present state. If a walk over the index can find all blocks of the holder later, the state
    /// has no blocks. Otherwise it has events that rebuild the blocks.
    ///
    /// A holder that no batch has confirmed in `generation` of the event stream is dumped as unverified. So is a holder
    /// that is silent, or that two publishers claim.
    /// `stream_clock` tells when the publisher was last seen.
    pub(super) fn dump(
        &mut self,
        namespace: &NamespaceName,
        generation: StreamGeneration,
        stream_clock: &ServerClock,
    ) -> HolderDump {
        match self.as_walked() {
            Some(walked) => HolderDump {
                frame: self.frame(namespace, generation, stream_clock),
                events: Vec::new(),
                walked: Some(walked),
            },
            None => self.dump_as_events(namespace, generation, stream_clock),
        }
    }

    /// Returns the holder's present state, with events that rebuild its blocks.
    pub(super) fn dump_as_events(
        &mut self,
        namespace: &NamespaceName,
        generation: StreamGeneration,
        stream_clock: &ServerClock,
    ) -> HolderDump {
        // The frame is made last, because evicted blocks can add a reason for doubt.
        self.catch_up();
        let events = self.writer.dump_events(DUMP_EVENT_BLOCKS_MAX).collect();
        HolderDump {
            frame: self.frame(namespace, generation, stream_clock),
            events,
            walked: None,
        }
    }

    fn as_walked(&mut self) -> Option<WalkedHolder> {
        self.catch_up();
        self.writer.as_walked()
    }

    /// Compares the holder with its earlier dump. `before` is the record by which the walk found the holder's blocks.
    /// `dumped` is the frame of the dump.
    pub(super) fn revisit(
        &mut self,
        before: &WalkedHolder,
        dumped: &HolderFrame,
        generation: StreamGeneration,
        stream_clock: &ServerClock,
    ) -> Revisited {
        let is_same = self.as_walked().is_some_and(|now| now.is_same_as(before));
        // A reason that no later batch withdraws, such as `Capacity`, must be in the dump already.
        let known = DegradedReasons::from_bits(dumped.degraded_bits);
        let is_as_certain = self
            .writer
            .status()
            .lasting_reasons()
            .filtered(|reason| !known.contains(reason))
            .is_empty();
        if is_same && is_as_certain {
            return Revisited::Unchanged;
        }
        Revisited::Changed(Box::new(self.dump_as_events(
            &dumped.namespace,
            generation,
            stream_clock,
        )))
    }

    fn frame(
        &self,
        namespace: &NamespaceName,
        generation: StreamGeneration,
        stream_clock: &ServerClock,
    ) -> HolderFrame {
        let id = &self.writer.record().id;
        let cursor = self.tracker.cursor().unwrap_or_default();
        let mut reasons = self.writer.status().lasting_reasons();
        if self.writer.status().parked_events.load() > 0 {
            // Events that wait for a parent are not dumped.
            reasons = reasons.with(DegradedReason::UnknownParent);
        }
        // A snapshot does not record a contest or a silence. Messages after the restart have to show that both are
        // over.
        let own = self.writer.status().own_reasons();
        let is_in_doubt = own.contains(DegradedReason::Contested) || own.contains(DegradedReason::Stale);
        if is_in_doubt || !self.writer.status().is_confirmed(generation) {
            reasons = reasons.with(DegradedReason::Unverified);
        }
        if self.phase.held().is_some_and(|held| !held.is_empty()) {
            // The dump lacks the held batches, and after a restart the stream is read from a later message on. So the
            // dump has the reason for unreadable messages, which later batches do not withdraw.
            reasons = reasons.with(DegradedReason::Undecodable);
        }
        // A profile that was told in an ended epoch belongs to another process.
        let Profile { address, labels } = match self.profile_epoch == cursor.epoch {
            true => self.writer.status().profile(),
            false => Profile::default(),
        };
        HolderFrame {
            namespace: namespace.clone(),
            worker: id.worker.clone(),
            rank: id.rank,
            epoch: cursor.epoch,
            seq: cursor.seq,
            degraded_bits: reasons.bits(),
            blocks: self.writer.blocks() as u64,
            hashing: self.writer.settings().hashing,
            block_size: self.writer.settings().block_size.as_u32(),
            is_size_told: self.writer.status().is_size_known.load(),
            foreign_chain: self.writer.status().has_foreign_chain.load(),
            made_us: Some(self.high_water.made_us),
            seen_us: self.seen_on(stream_clock),
            address,
            labels,
            forest: None,
        }
    }
}
