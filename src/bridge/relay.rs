//! Relay: turns an engine's payloads into batches of the contract, and publishes them to daemons. It also reports *doubts*,
//! that is, reasons why the holder's blocks may be wrong.
//!
//! Untold events are events that are applied but not reported to daemons yet.

mod blocks;
mod doubts;
mod ending;
mod labels;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_client::publish::{
    Beginning, CutBounds, HolderPublisher, PublishConnection, PublishedHolder, PublisherError,
    PublisherOptions, SharedState, cut_events,
};
use kvatlas_core::wire::{DegradedReason, DegradedReasons, Labels, ModelKey, Profile, Rank, Subjects};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, EngineEvent, Format, Reason, Translation, Translator,
};
use tokio::sync::{OwnedMutexGuard, watch};

use kvatlas_telemetry::{BridgeMetrics, EngineMetrics};

use super::continuity::Continuity;
use super::farewells::{Farewell, Farewells};
use super::kin::{Kin, Member};
use super::lease::{Lease, LeaseShare, Turns};
use super::republish::Tap;
use super::state::KeptEngine;
use blocks::Blocks;
use doubts::BlockDoubts;
use labels::AddedLabels;

pub(super) use blocks::SharedBlocks;

/// Maximum number and size of the events that are passed to the publisher at once. The publisher may divide these
/// events further, by the bounds of a batch and of a NATS message.
const PIECE: CutBounds = CutBounds {
    events_max: 512,
    bytes_max: 256 << 10,
};
/// Approximate number of translated payload bytes at which the relay passes their events to the publisher.
const UNTOLD_BYTES_MAX: usize = 32 << 10;

/// Time for which an engine that was never in sight (known to be alive) is announced to daemons. So daemons that start after the
/// bridge learn of the engine, too.
pub(super) const PENDING_TOLD_FOR: Duration = Duration::from_secs(600);

/// Time for which an engine that was in sight, and is lost, is told of after each sign that it lives.
pub(super) const LOST_TOLD_FOR: Duration = Duration::from_secs(60);

/// Lock on the engine's blocks, held from the translation of events until the publisher has these events. So other
/// tasks never see blocks of which the publisher has not heard yet.
struct UntoldBlocks {
    blocks: OwnedMutexGuard<Blocks>,
    payload_bytes: usize,
}

/// Everything that a [`Relay`] needs to tell daemons of its holder.
pub(super) struct Way {
    pub(super) nats: PublishConnection,
    pub(super) subjects: Subjects,
    pub(super) holder: PublishedHolder,
    pub(super) options: PublisherOptions,
    /// Lease that decides which bridge reports the holder; `None` if no other bridge follows the holder.
    pub(super) lease: Option<Lease>,
    /// Other engines of the bridge. They are asked for the meaning of block names that this engine has lost.
    pub(super) kin: Kin,
    /// Ended epochs above which a holder's next epoch has to begin.
    pub(super) farewells: Farewells,
    /// Receiver that follows the holder's address and labels.
    pub(super) profiles: watch::Receiver<Profile>,
}

/// Reports the events of one engine to daemons.
pub(super) struct Relay {
    /// Name of the engine in metrics and logs.
    name: String,
    publisher: HolderPublisher,
    farewell: Farewell,
    profiles: watch::Receiver<Profile>,
    decoder: Decoder,
    batch: EngineBatch,
    blocks: Arc<SharedBlocks>,
    kin: Member,
    translation: Translation,
    /// Applied events that are not reported to daemons yet; `None` if all are reported. This task has to report them
    /// before it waits for a message, because the lock on the blocks stops other tasks.
    untold: Option<UntoldBlocks>,
    /// The rank that the engine's batches name.
    rank: Option<Rank>,
    /// Whether a batch with the rank in `rank` was published on the engine's own connection.
    has_published_rank: bool,
    /// Doubts about the engine's blocks, as the translator knew them at the last change.
    block_doubts: BlockDoubts,
    /// Labels that the bridge adds to the engine's given labels.
    added: AddedLabels,
    /// Added labels as they were last reported to daemons.
    told_added: AddedLabels,
    /// Whether the engine is out of sight: it is silent, or batches may be missing.
    is_lost: bool,
    /// Whether the engine has ever been in sight, that is, alive with no batch known to be missing.
    was_seen: bool,
    /// Doubts as they were last reported to daemons.
    told: DegradedReasons,
    /// The holder's entry in the lease, which decides which bridge reports it; `None` if no other bridge follows the holder.
    share: Option<LeaseShare>,
    /// Tap that passes the engine's events on to routers; `None` if the engine is not republished.
    tap: Option<Tap>,
    metrics: Arc<BridgeMetrics>,
    engine_metrics: EngineMetrics,
}

impl Relay {
    /// Begins to report an engine to daemons, and gives them all of its known blocks. The engine is out of sight until
    /// [`Self::seen`], and daemons are told so before anything else. `rank` is the rank that the engine's batches have
    /// named so far.
    pub(super) async fn start(
        format: Format,
        name: &str,
        blocks: Translator,
        rank: Option<Rank>,
        way: Way,
        metrics: Arc<BridgeMetrics>,
    ) -> Result<Self, String> {
        let (block_doubts, layers) = (BlockDoubts::of(&blocks), blocks.layers());
        let blocks = Arc::new(SharedBlocks::new(Blocks(blocks)));
        let state: SharedState = blocks.clone();
        let Way {
            nats,
            subjects,
            holder,
            mut options,
            lease,
            kin,
            farewells,
            profiles,
        } = way;
        let farewell = farewells.of(&holder);
        options.beginning = match (farewell.epoch(), options.beginning) {
            (Some(ended), Beginning::NewEpoch) => Beginning::Above(ended),
            (Some(ended), Beginning::Above(epoch)) => Beginning::Above(epoch.max(ended)),
            (_, beginning) => beginning,
        };
        let kin = kin.join((holder.namespace.clone(), options.settings.block_size), &blocks);
        let added = AddedLabels {
            layers,
            trouble: None,
        };
        options.profile = added.to(&options.profile);
        let told = block_doubts.to_tell(true);
        options.doubts = told;
        let model = ModelKey::of_namespace(&holder.namespace);
        let engine_metrics = metrics.of_engine(holder.namespace.as_str(), name);
        let share = match lease {
            Some(lease) => Some(lease.share(&holder).ok_or("too many holders share a lease")?),
            None => None,
        };
        let (publisher, share) = match share {
            Some((share, voice)) => {
                let starting = HolderPublisher::start_in_turn(nats, &subjects, holder, options, state, voice);
                (starting.await, Some(share))
            }
            None => {
                let starting = HolderPublisher::start_with_state(nats, &subjects, holder, options, state);
                (starting.await, None)
            }
        };
        let publisher = publisher.map_err(|error| error.to_string())?;
        let mut relay = Self {
            name: name.to_owned(),
            publisher,
            farewell,
            profiles,
            decoder: Decoder::new(format, DecodeLimits::default()).of_model(model),
            batch: EngineBatch::default(),
            blocks,
            kin,
            translation: Translation::default(),
            untold: None,
            rank,
            has_published_rank: false,
            block_doubts,
            told_added: added.clone(),
            added,
            is_lost: false,
            was_seen: false,
            told,
            share,
            tap: None,
            metrics,
            engine_metrics,
        };
        relay.note_told(told);
        relay.lost().await.map_err(|error| error.to_string())?;
        Ok(relay)
    }

    /// Passes all batches that are applied from now on through `tap`, which republishes them to routers.
    pub(super) fn set_tap(&mut self, tap: Option<Tap>) {
        self.tap = tap;
    }

    /// The engine's name in metrics and logs.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether all of the engine's blocks are known for certain.
    pub(super) fn is_exact(&self) -> bool {
        self.doubts().of_all_queries().is_empty()
    }

    /// Returns the reason why the engine's blocks are in doubt; `None` if there is none. That the engine is out of
    /// sight (silent, or with batches missing for now) does not count as a reason here.
    pub(super) fn doubt(&self) -> Option<Reason> {
        self.block_doubts.reason
    }

    /// Returns a text for operators that says why the engine is not exact; `None` if it is exact.
    pub(super) fn trouble(&self) -> Option<Cow<'static, str>> {
        let out_of_sight = self.is_lost.then_some(match self.was_seen {
            true => "what the engine has said since it was last in sight is not known yet",
            false => "what the engine has said so far is not known yet",
        });
        let hidden = self
            .block_doubts
            .hides_groups
            .then(|| DegradedReason::UnknownGroups.as_str());
        let in_words = |doubt: Reason| {
            match (doubt, self.block_doubts.other_block_size) {
            (Reason::BlockSize, Some(size)) => format!(
                "block_size: its blocks have {size} tokens, and it is followed with another size: start it with that, or give all block_size={size}"
            )
            .into(),
            (Reason::BlockSize, None) => Cow::Borrowed(
                "block_size: its blocks have another size than it is followed with: start it with that, or give all block_size=N",
            ),
            (doubt, _) => Cow::Borrowed(doubt.as_str()),
        }
        };
        let others = out_of_sight.or(hidden).map(Cow::Borrowed);
        self.doubt().map(in_words).or(others)
    }

    /// Tells daemons, in a label, what the trouble with the engine is. An exact engine has none.
    pub(super) async fn explain(&mut self, trouble: Option<&str>) -> Result<(), PublisherError> {
        let trouble = trouble.filter(|_| !self.is_exact()).map(Labels::value_of);
        if self.added.trouble == trouble {
            return Ok(());
        }
        self.added.trouble = trouble;
        self.tell_profile_if_new().await
    }

    /// Returns the largest sequence number that the first batch of an engine's process can have. It depends on the format of the
    /// engine's events.
    pub(super) fn first_number(&self) -> u64 {
        self.decoder.format().first_number_max()
    }

    pub(super) fn metrics(&self) -> &EngineMetrics {
        &self.engine_metrics
    }

    pub(super) fn bridge_metrics(&self) -> &Arc<BridgeMetrics> {
        &self.metrics
    }

    /// Applies one payload. Its events may stay unreported until the next [`Self::tell`], which the caller has to call
    /// before this task waits.
    pub(super) async fn apply(&mut self, payload: &[u8]) -> Result<(), PublisherError> {
        self.engine_metrics.received(payload.len());
        let decoded = self.decoder.decode(payload, &mut self.batch);
        if decoded.is_ok() && self.doubt().is_some() {
            self.learn_names().await?;
        }
        let mut untold = self.take_untold().await;
        let UntoldBlocks { blocks, .. } = &mut untold;
        match decoded {
            Ok(()) if is_of_other_rank(&mut self.rank, &self.batch) => {
                self.batch.reasons.count(Reason::OtherRank);
                blocks.0.note_reasons(&self.batch.reasons, &mut self.translation);
                self.doubt_tap();
            }
            Ok(()) => match &self.tap {
                None => blocks.0.translate(&self.batch, &mut self.translation),
                Some(tap) => tap.translate(&mut blocks.0, &self.batch, &mut self.translation),
            },
            Err(error) => {
                self.metrics.undecodable(&self.name, &error);
                blocks.0.note_doubt(Reason::Malformed);
                self.doubt_tap();
            }
        }
        untold.payload_bytes += payload.len();
        let is_full = untold.payload_bytes >= UNTOLD_BYTES_MAX;
        self.keep(untold);
        // An event that begins or ends a doubt is told at once, so that daemons get events and doubts in the right
        // order.
        if is_full || self.doubts() != self.told || self.translation.has_cleared() {
            return self.tell().await;
        }
        Ok(())
    }

    /// Asks other engines which blocks the unknown names in the decoded batch stand for. Names are unknown if the batches
    /// that introduced them were lost.
    async fn learn_names(&mut self) -> Result<(), PublisherError> {
        let untold = self.take_untold().await;
        let strange = untold.blocks.0.strange_parents(&self.batch);
        self.keep(untold);
        if strange.is_empty() {
            return Ok(());
        }
        // The lock on the blocks is released first, because other engines may ask this one at the same time.
        self.tell().await?;
        let known = self.kin.ask(&self.blocks, strange).await;
        let mut untold = self.take_untold().await;
        let learn = |named| untold.blocks.0.learn_names(named);
        known.into_iter().for_each(learn);
        self.keep(untold);
        Ok(())
    }

    /// Notes that the last applied batch came on the engine's own connection, so that the engine itself has told its
    /// rank. A batch from the replay socket does not show that, because the socket may belong to another engine.
    pub(super) fn note_published(&mut self) {
        self.has_published_rank |= self.rank.is_some() && self.batch.rank == self.rank;
    }

    /// Notes that the events that were republished to routers may be wrong.
    fn doubt_tap(&self) {
        if let Some(tap) = &self.tap {
            tap.doubt();
        }
    }

    /// Returns the lock on the engine's blocks: the lock that is still held for events that daemons have not been told
    /// yet, or else a new lock.
    async fn take_untold(&mut self) -> UntoldBlocks {
        match self.untold.take() {
            Some(untold) => untold,
            None => UntoldBlocks {
                blocks: Arc::clone(&self.blocks).lock_owned().await,
                payload_bytes: 0,
            },
        }
    }

    fn keep(&mut self, untold: UntoldBlocks) {
        self.block_doubts = BlockDoubts::of(&untold.blocks.0);
        self.added.layers = untold.blocks.0.layers();
        self.untold = Some(untold);
    }

    /// Whether applied events have not been reported to daemons yet.
    pub(super) fn has_untold(&self) -> bool {
        self.untold.is_some()
    }

    /// Applies those events of `batch` for which `is_ours` holds, and reports them to daemons. The caller has decoded
    /// the batch. If events were left out in decoding, the doubts about them hold for this holder, too.
    pub(super) async fn apply_events(
        &mut self,
        batch: &EngineBatch,
        is_ours: impl Fn(&EngineEvent) -> bool,
    ) -> Result<(), PublisherError> {
        let mut untold = self.take_untold().await;
        let UntoldBlocks { blocks, .. } = &mut untold;
        blocks.0.translate_some(batch, is_ours, &mut self.translation);
        self.keep(untold);
        self.tell().await
    }

    /// Reports the applied events and the doubts to daemons.
    pub(super) async fn tell(&mut self) -> Result<(), PublisherError> {
        // The blocks stay locked until the publisher has all of their events.
        let untold = self.untold.take();
        if let Some(tap) = &self.tap {
            tap.publish();
        }
        for (reason, times) in self.translation.reasons.iter() {
            self.metrics.left_out(reason, times, &self.name);
        }
        let has_cleared = self.translation.has_cleared();
        let doubts = self.doubts();
        // A new doubt comes before the events that it concerns.
        if !doubts.is_empty() && doubts != self.told {
            self.tell_doubts(doubts).await?;
        }
        if has_cleared && !doubts.is_empty() {
            self.doubt_what_was_cleared(doubts);
        }
        self.publish().await?;
        if has_cleared {
            self.note_told(doubts);
        }
        self.translation.clear();
        drop(untold);
        // Another bridge may have taken over the reports, or this bridge may have, since the last call.
        self.engine_metrics.speaks.set(f64::from(self.speaks()));
        self.tell_doubts_if_new().await?;
        self.tell_profile_if_new().await
    }

    /// Reports the holder's address and labels to daemons, if they have changed.
    async fn tell_profile_if_new(&mut self) -> Result<(), PublisherError> {
        if !self.profiles.has_changed().unwrap_or_default() && self.added == self.told_added {
            return Ok(());
        }
        self.told_added = self.added.clone();
        let profile = self.added.to(&self.profiles.borrow_and_update());
        self.publisher.set_profile(profile).await
    }

    /// Publishes the translated events, in pieces that fit the publisher.
    async fn publish(&mut self) -> Result<(), PublisherError> {
        for part in self.translation.parts.drain(..) {
            for piece in cut_events(part.events, PIECE) {
                self.publisher.publish(part.tier, piece).await?;
            }
        }
        Ok(())
    }

    /// Returns the turns of this bridge. A turn is a period in which this bridge reports the holder to daemons.
    pub(super) fn turns(&self) -> Turns {
        self.share.as_ref().map_or_else(Turns::always, LeaseShare::turns)
    }

    /// Whether this bridge is the one that reports the holder.
    pub(super) fn speaks(&self) -> bool {
        self.share.as_ref().is_none_or(LeaseShare::speaks)
    }

    /// Returns the state from which a later bridge can continue to report the engine. `cache` is a text that identifies
    /// the settings with which the engine's blocks are translated.
    pub(super) async fn save(
        &mut self,
        cache: &str,
        continuity: Continuity,
    ) -> Result<KeptEngine, PublisherError> {
        self.tell().await?;
        Ok(KeptEngine {
            cache: cache.to_owned(),
            epoch: self.publisher.cursor().epoch,
            rank: self.rank,
            topic: None,
            continuity,
            blocks: self.blocks.lock().await.0.save(),
            republished: self.tap.as_ref().map(Tap::save),
        })
    }

    /// Notes that batches of the engine are lost for good, or cannot be used, for `reason`.
    pub(super) async fn lose(&mut self, reason: Reason) -> Result<(), PublisherError> {
        self.engine_metrics.lost_batches(&self.name);
        self.note_doubt(reason).await
    }

    /// Notes that the bridge has left out a batch that cannot come from this engine. The engine's blocks are in doubt
    /// from now on.
    pub(super) async fn refuse(&mut self, reason: Reason) -> Result<(), PublisherError> {
        self.translation.reasons.count(reason);
        self.note_doubt(reason).await
    }

    /// Marks the engine's blocks as in doubt for `reason`, until the engine clears its cache.
    pub(super) async fn note_doubt(&mut self, reason: Reason) -> Result<(), PublisherError> {
        // The doubt is noted in the translator, where a clear ends it.
        let mut untold = self.take_untold().await;
        untold.blocks.0.note_doubt(reason);
        self.doubt_tap();
        self.keep(untold);
        self.tell().await
    }

    /// Whether the engine is in sight, that is, alive with no batch known to be missing.
    pub(super) fn is_in_sight(&self) -> bool {
        !self.is_lost
    }

    /// Whether the engine has ever been in sight.
    pub(super) fn was_seen(&self) -> bool {
        self.was_seen
    }

    /// Puts the engine out of sight: it is silent, or batches may be missing.
    pub(super) async fn lost(&mut self) -> Result<(), PublisherError> {
        let was_lost = std::mem::replace(&mut self.is_lost, true);
        if let Some(tap) = &self.tap {
            tap.set_in_sight(false);
        }
        if was_lost && !self.has_untold() {
            return self.tell_profile_if_new().await;
        }
        self.tell().await?;
        match self.was_seen {
            true => self.publisher.set_heartbeats(false).await,
            false => self.publisher.heartbeat_for(PENDING_TOLD_FOR).await,
        }
    }

    /// Goes on telling daemons of an engine out of sight that is known to live: nobody knows its blocks. Without that,
    /// daemons would forget the engine, and give exact answers that leave it out. Does nothing if the engine is in sight.
    pub(super) async fn told_alive(&mut self) -> Result<(), PublisherError> {
        let time = match self.was_seen {
            true => LOST_TOLD_FOR,
            false => PENDING_TOLD_FOR,
        };
        match self.is_lost {
            true => self.publisher.heartbeat_for(time).await,
            false => Ok(()),
        }
    }

    /// Puts the engine out of sight as one that was never in sight: nothing has come of it since its process began.
    pub(super) async fn unseen(&mut self) -> Result<(), PublisherError> {
        self.lost().await?;
        match std::mem::take(&mut self.was_seen) {
            true => self.publisher.heartbeat_for(PENDING_TOLD_FOR).await,
            false => Ok(()),
        }
    }

    /// Puts the engine in sight: it is alive, and no batch is known to be missing. Heartbeats are sent for `time` from
    /// now on. Each call replaces the end that an earlier call has set.
    pub(super) async fn seen(&mut self, time: Duration) -> Result<(), PublisherError> {
        // Daemons first get the events that were applied while the engine was out of sight. Only then does the doubt
        // about the engine end.
        self.tell().await?;
        (self.is_lost, self.was_seen) = (false, true);
        if let Some(tap) = &self.tap {
            tap.set_in_sight(true);
        }
        self.tell_doubts_if_new().await?;
        self.publisher.heartbeat_for(time).await
    }

    /// Begins a new epoch without any block, because the engine is another process. If batches of the new process are
    /// already missing, `doubt` is the reason to report.
    pub(super) async fn restart(&mut self, doubt: Option<Reason>) -> Result<(), PublisherError> {
        self.engine_metrics.restarted(&self.name);
        if let Some(tap) = &self.tap {
            tap.clear();
        }
        self.begin_anew(doubt, Translator::reset).await
    }

    /// Begins a new epoch in which no block is known, because batches of the engine are missing and cannot be fetched
    /// any more. The meanings of block names are kept, because the engine may be the same process.
    pub(super) async fn restart_behind_a_gap(&mut self) -> Result<(), PublisherError> {
        self.doubt_tap();
        self.begin_anew(None, Translator::reset_but_names).await
    }

    async fn begin_anew(
        &mut self,
        doubt: Option<Reason>,
        reset: fn(&mut Translator),
    ) -> Result<(), PublisherError> {
        self.tell().await?;
        let mut untold = self.take_untold().await;
        reset(&mut untold.blocks.0);
        if !self.has_published_rank {
            self.rank = None;
        }
        if let Some(reason) = doubt {
            untold.blocks.0.note_doubt(reason);
        }
        self.keep(untold);
        // The epoch's first batch tells the doubts. Without them, daemons would take an empty holder as exact. The
        // blocks stay locked until the new epoch has begun, because the old epoch had other blocks.
        let doubts = self.doubts();
        self.publisher.begin_epoch_in_doubt(doubts).await?;
        self.note_told(doubts);
        self.tell().await
    }
}

/// Whether a batch names another rank than the first rank that a batch named, which is kept in `own`. A publisher
/// reports one rank only, which may differ from the rank with which the engine was registered. So a batch of another
/// rank, such as a clear, does not concern this engine.
fn is_of_other_rank(own: &mut Option<Rank>, batch: &EngineBatch) -> bool {
    batch.rank.is_some_and(|rank| *own.get_or_insert(rank) != rank)
}

#[cfg(test)]
pub(super) mod tests;
