//! A lane: one thread that applies the events of the workers assigned to it, in order.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use kvatlas_config::Live;
use kvatlas_core::index::{Namespace, RegisterError};
use kvatlas_core::stream::RefusedName;
use kvatlas_core::wire::{BatchCursor, DecodeError, EventBatch, HolderId, Tier};
use kvatlas_telemetry::EventMetrics;
use kvatlas_telemetry::labels::{DropReason, LabelValue};

use super::clock::{LaneClock, now_us};
use super::flow::Flows;
use super::freshness::MessageArrival;
use super::holder::{Afterwards, Holder, JobClocks, LaneParts};
use super::job::{BatchesJob, Job, LaneTimes};
use super::line::{Assignments, HolderKey, InFlight, Sender, WorkerKey, ranks_of};
use super::liveness::{ListeningClock, Silence};
use super::lost::LostJob;
use super::queue::JobReceiver;
use super::sequence::{HighWater, ReceivedBatch};
use super::server_clock::ServerClock;
use super::settings::{LaneLimits, LaneSettings, LivenessSettings, epoch_max_at};
use super::tally::BatchTally;
use super::unheld::{self, Goodbye, NoHolder, Unheld};

/// Holders of one lane, and the parts that the lane needs to do its jobs.
pub(crate) struct Lane {
    pub(super) holders: BTreeMap<HolderKey, Box<Holder>>,
    /// Holders whose blocks come in a snapshot's forests (the blocks of many holders together), by the numbers that the
    /// forests give them. Filled only while a snapshot is restored.
    pub(super) in_forest: HashMap<u32, (HolderKey, Tier)>,
    pub(super) unheld: Arc<Unheld>,
    assignments: Arc<Assignments>,
    flows: Arc<Flows>,
    pub(super) limits: Live<LaneLimits>,
    pub(super) parts: LaneParts,
    liveness: Arc<LivenessSettings>,
    listening: ListeningClock,
    /// Notification that a holder has begun to wait for missing batches.
    pub(super) doubts: Arc<Notify>,
    /// Holder of the last batch, taken out of `holders` for now. The next batch is usually for the same holder.
    current: Option<(HolderKey, Box<Holder>)>,
}

impl Lane {
    pub(super) fn new(
        assignments: Arc<Assignments>,
        flows: Arc<Flows>,
        unheld: Arc<Unheld>,
        settings: &LaneSettings,
        liveness: Arc<LivenessSettings>,
        doubts: Arc<Notify>,
        limits: Live<LaneLimits>,
    ) -> Self {
        Self {
            holders: BTreeMap::new(),
            in_forest: HashMap::new(),
            unheld,
            assignments,
            flows,
            limits,
            parts: LaneParts {
                holding: settings.holding_limits(),
                clock: LaneClock::new(),
                tally: BatchTally::default(),
            },
            liveness,
            listening: ListeningClock::default(),
            doubts,
            current: None,
        }
    }

    /// Does the jobs of the queue until the queue's sending end is gone and the queue is empty.
    pub(crate) fn run(mut self, queue: &JobReceiver<Job>, times: &LaneTimes) {
        let mut jobs = Vec::new();
        let mut done = None;
        while let Some(turn) = queue.next(done, &mut jobs) {
            self.parts.clock.begin_turn();
            let mut since = Duration::ZERO;
            let mut rest = jobs.drain(..).peekable();
            while let Some(job) = rest.next() {
                let work = job.work();
                self.work(job);
                if rest.peek().is_none_or(|next| next.work() != work) {
                    self.parts.clock.lap();
                    let now = self.parts.clock.turn_elapsed();
                    times.spend(work, now - since);
                    since = now;
                }
            }
            drop(rest);
            self.parts.tally.count();
            done = Some((turn, since));
        }
    }

    /// Does one job.
    fn work(&mut self, job: Job) {
        if !matches!(job, Job::Batches(_)) {
            self.put_back();
        }
        match job {
            Job::Batches(batches) => self.apply(batches),
            Job::Lost(lost) => self.note_lost(lost),
            Job::Run(_, task) => task(self),
        }
    }

    /// Decodes a worker's messages. Applies the batch in each message to the worker's holder with the batch's rank.
    fn apply(&mut self, mut job: BatchesJob) {
        let limits = self.limits.now();
        let mut has_holder = true;
        for payload in job.payloads.iter() {
            has_holder = match EventBatch::decode(payload, &limits.wire) {
                Err(error) => {
                    if let Some(span) = &mut job.span {
                        span.fail(&error);
                    }
                    self.put_back();
                    let Sender {
                        namespace,
                        metrics,
                        worker,
                        ..
                    } = &*job.sender;
                    let clocks = self.clocks_at(job.arrival);
                    self.note_undecodable(namespace, metrics, worker, error, clocks);
                    false
                }
                Ok(batch) => {
                    let received = ReceivedBatch {
                        batch,
                        generation: job.generation,
                        bytes: payload.len(),
                    };
                    self.apply_batch(&job.sender, received, job.arrival, limits.epoch_ahead_max)
                }
            };
        }
        if !has_holder {
            self.finish_messages(job.sender);
        }
    }

    /// Ends a job with messages of a worker. Frees the worker's lane if the worker has no holder, and no job on its
    /// way.
    pub(super) fn finish_messages(&mut self, sender: Arc<Sender>) {
        self.put_back();
        let worker = sender.worker.clone();
        // Messages that were sorted together share one sender, which keeps the worker assigned. So it is dropped first.
        drop(sender);
        self.release_if_empty(&worker);
    }

    /// Puts the holder of the last batch back into `holders`.
    pub(super) fn put_back(&mut self) {
        if let Some((key, holder)) = self.current.take() {
            self.holders.insert(key, holder);
        }
    }

    /// Applies a batch. Returns whether the batch's holder exists afterwards.
    fn apply_batch(
        &mut self,
        sender: &Sender,
        received: ReceivedBatch,
        arrival: MessageArrival,
        epoch_ahead_max: Option<Duration>,
    ) -> bool {
        let (worker, rank) = (&sender.worker, received.batch.rank);
        let clocks = self.clocks_at(arrival);
        let epoch = received.batch.epoch;
        if epoch > epoch_max_at(clocks.unix_us, epoch_ahead_max) {
            return self.refuse_epoch(sender, &received.batch, clocks);
        }
        let settings = sender.namespace.indexer.settings();
        if !settings.takes(received.batch.block_size) {
            self.refuse_block_size(sender, &received.batch, clocks);
            return self.holders.contains_key(&(worker.clone(), rank));
        }
        let (key, mut holder) = match self.take_holder(sender, &received.batch, clocks) {
            Ok(taken) => taken,
            Err(refusal) => {
                self.unheld.refuse(sender, &received.batch, &refusal, &clocks);
                return false;
            }
        };
        let context = self.parts.context(clocks);
        let waited = holder.is_waiting();
        let afterwards = holder.apply(received, context);
        if holder.is_waiting() && !waited {
            self.doubts.notify_one();
        }
        match afterwards {
            Afterwards::Stays => self.current = Some((key, holder)),
            Afterwards::Leaves => self.retire_left(key, holder),
        }
        afterwards == Afterwards::Stays
    }

    /// Takes the holder of a batch out of `holders`. If the holder is new, registers it in the index.
    fn take_holder(
        &mut self,
        sender: &Sender,
        batch: &EventBatch,
        clocks: JobClocks,
    ) -> Result<(HolderKey, Box<Holder>), NoHolder> {
        let rank = batch.rank;
        let is_same = |(key, _): &(HolderKey, Box<Holder>)| key.0 == sender.worker && key.1 == rank;
        if let Some(current) = self.current.take_if(|current| is_same(current)) {
            return Ok(current);
        }
        self.put_back();
        let key = (sender.worker.clone(), rank);
        if let Some(holder) = self.holders.remove(&key) {
            return Ok((key, holder));
        }
        if let Some(reason) = self.unheld.goodbyes.is_over(&key, batch, clocks.is_new, now_us()) {
            return Err(NoHolder::Left(reason));
        }
        let holder = self.register(&sender.namespace, &sender.metrics, &key, clocks);
        Ok((key, holder.map_err(NoHolder::NoRoom)?))
    }

    /// Registers a new holder in the index.
    fn register(
        &self,
        namespace: &Namespace,
        metrics: &Arc<EventMetrics>,
        key: &HolderKey,
        clocks: JobClocks,
    ) -> Result<Box<Holder>, RegisterError> {
        let writer = namespace.indexer.register(&HolderId {
            worker: key.0.worker.clone(),
            rank: key.1,
        })?;
        let flow = self.flows.of(&key.0.namespace);
        let mut holder = Holder::new(writer, Arc::clone(metrics), flow, clocks);
        if self.unheld.unreadable.has(&key.0, now_us()) {
            holder.note_undecodable(clocks);
            // The message may have been of another rank.
            let (worker, reason) = (RefusedName::from(&key.0.worker), DropReason::Undecodable);
            self.unheld
                .note_unread(namespace, &worker, true, reason.as_str(), clocks.unix_us);
        }
        Ok(Box::new(holder))
    }

    /// Returns the holder of `key`. If the holder is new, registers it in the index.
    pub(super) fn holder(
        &mut self,
        namespace: &Namespace,
        metrics: &Arc<EventMetrics>,
        key: &HolderKey,
    ) -> Result<&mut Holder, RegisterError> {
        let holder = match self.holders.remove(key) {
            Some(holder) => holder,
            None => {
                let clocks = self.clocks_when_seen();
                self.register(namespace, metrics, key, clocks)?
            }
        };
        Ok(self.holders.entry(key.clone()).or_insert(holder))
    }

    /// Removes a holder from the lane and from the index.
    pub(super) fn forget(&mut self, key: &HolderKey) {
        if let Some(holder) = self.holders.remove(key) {
            holder.retire();
        }
    }

    /// Removes a holder whose publisher has said goodbye, and remembers the goodbye, so that late batches do not bring
    /// the holder back.
    pub(super) fn take_leave(&mut self, key: &HolderKey) {
        if let Some(holder) = self.holders.remove(key) {
            self.retire_left(key.clone(), holder);
        }
    }

    /// Removes a holder whose publisher has said goodbye. If another publisher claims the holder too, answers say that it
    /// may have unknown blocks. They do so until its next batch makes the holder anew, or until it has been silent.
    fn retire_left(&self, key: HolderKey, holder: Box<Holder>) {
        let (unix_us, other) = (self.parts.clock.unix_us(), holder.other_left());
        // The goodbye may have waited in the stream.
        let said_us = match holder.seen_us {
            0 => unix_us,
            seen_us => unix_us.saturating_sub(now_us().saturating_sub(seen_us)),
        };
        if other.is_some() {
            let refused = holder.writer.refused();
            self.unheld.note_stale(refused, &key.0.worker, key.1, unix_us);
        }
        self.retire(key, holder, Some(said_us), other);
    }

    /// Removes a holder whose publisher has ended, and remembers it.
    fn retire(&self, key: HolderKey, holder: Box<Holder>, said_us: Option<u64>, other: Option<BatchCursor>) {
        let goodbye = Goodbye {
            at_us: now_us(),
            said_us,
            known: holder.high_water,
            other,
        };
        self.unheld.goodbyes.note(key, goodbye);
        holder.retire();
    }

    /// Ends a job for a worker. Frees the worker's lane if the worker has no holder, and no other job on its way.
    pub(super) fn finish(&mut self, worker: &WorkerKey, in_flight: InFlight) {
        drop(in_flight);
        self.release_if_empty(worker);
    }

    fn release_if_empty(&mut self, worker: &WorkerKey) {
        if self.ranks(worker).next().is_none() {
            self.assignments.release(worker);
        }
    }

    /// Returns the holders of all ranks of a worker.
    fn ranks(&mut self, worker: &WorkerKey) -> impl Iterator<Item = &mut Holder> {
        self.holders
            .range_mut(ranks_of(worker))
            .map(|(_, holder)| &mut **holder)
    }

    /// Drops a message that cannot be read, and puts the holders of its worker in doubt.
    pub(super) fn note_undecodable(
        &mut self,
        namespace: &Namespace,
        metrics: &EventMetrics,
        worker: &WorkerKey,
        error: DecodeError,
        clocks: JobClocks,
    ) {
        let why = NoHolder::from(error);
        metrics.batch_dropped(why.reason(), worker.worker.as_str(), &why);
        self.doubt(worker, clocks);
        self.note_unread(namespace, worker, why.reason());
    }

    /// Degrades all holders of a worker after a message that cannot be read. The message may have been for any rank,
    /// even for one that is not known yet.
    fn doubt(&mut self, worker: &WorkerKey, clocks: JobClocks) {
        self.ranks(worker)
            .for_each(|holder| holder.note_undecodable(clocks));
        self.unheld.unreadable.note(worker, now_us());
    }

    /// Notes in the index that a batch of `worker` was dropped whose rank is not known. Answers then say that the
    /// worker may have unknown blocks, even if it has holders: what their publishers answer says nothing of other ranks.
    fn note_unread(&self, namespace: &Namespace, worker: &WorkerKey, reason: DropReason) {
        let has_holders = self.holders.range(ranks_of(worker)).next().is_some();
        let unix_us = self.clocks().unix_us;
        self.unheld.note_unread(
            namespace,
            &(&worker.worker).into(),
            has_holders,
            reason.as_str(),
            unix_us,
        );
    }

    /// Puts holders in doubt: those whose batches were dropped because the queue was full.
    fn note_lost(&mut self, lost: LostJob) {
        let sender = lost.sender;
        let worker = &sender.worker;
        let clocks = self.clocks_when_seen();
        if lost.has_unknown {
            self.doubt(worker, clocks);
        }
        let context = self.parts.context(clocks);
        let unix_us = context.clocks.unix_us;
        let epoch_max = epoch_max_at(unix_us, self.limits.now().epoch_ahead_max);
        let mut leaving = Vec::new();
        for head in &lost.newest {
            let key = (worker.clone(), head.rank);
            match self.holders.get_mut(&key) {
                // The worker is noted, because a late batch could still make this holder. That holder must then be in
                // doubt.
                None => {
                    self.unheld.unreadable.note(worker, now_us());
                    let (namespace, name) = (&sender.namespace, RefusedName::from(&worker.worker));
                    self.unheld
                        .note_batch(namespace, &name, head, DropReason::LaneFull, unix_us);
                }
                Some(holder) if head.epoch > epoch_max => holder.note_unbelieved(head, context),
                Some(holder) => match holder.note_lost(head, context) {
                    Afterwards::Leaves => leaving.push(key),
                    Afterwards::Stays => {}
                },
            }
        }
        for key in leaving {
            self.take_leave(&key);
        }
        if lost.has_unknown {
            self.note_unread(&sender.namespace, worker, DropReason::LaneFull);
        }
        self.doubts.notify_one();
        self.finish_messages(sender);
    }

    /// Drops a batch whose epoch lies too far ahead of the clock. Returns whether the batch's holder exists.
    fn refuse_epoch(&mut self, sender: &Sender, batch: &EventBatch, clocks: JobClocks) -> bool {
        let why = NoHolder::EpochAhead(batch.epoch);
        self.put_back();
        let Some(holder) = self.holders.get_mut(&(sender.worker.clone(), batch.rank)) else {
            self.unheld.refuse(sender, batch, &why, &clocks);
            return false;
        };
        unheld::count(sender, batch, &why, false);
        let context = self.parts.context(clocks);
        holder.note_unbelieved(batch, context);
        true
    }

    /// Drops a batch whose block size differs from the namespace's. If the batch's holder exists, and has received no
    /// batch of a higher epoch, removes the holder: the process that stored its blocks has ended. If it has, the batch
    /// is of another publisher, which is believed once it has outlived the other one. Batches of the process that has ended
    /// make no holder, as long as the other one goes on.
    ///
    /// Once the namespace has no holder left, a batch can replace the namespace by one with another block size.
    fn refuse_block_size(&mut self, sender: &Sender, batch: &EventBatch, clocks: JobClocks) {
        let why = NoHolder::OtherSize {
            namespace: sender.namespace.name.clone(),
            in_force: sender.namespace.indexer.settings().block_size,
            told: batch.block_size,
        };
        self.put_back();
        let key = (sender.worker.clone(), batch.rank);
        // The batch is from before its publisher's goodbye.
        let goodbyes = &self.unheld.goodbyes;
        let late = goodbyes.is_over(&key, batch, clocks.is_new, now_us());
        let mut is_outdated = false;
        if let Some(holder) = self.holders.get_mut(&key) {
            let context = self.parts.context(clocks);
            let is_outlived = holder.is_outlived(batch, context);
            is_outdated = is_outlived || holder.high_water.seen.epoch <= batch.epoch;
            if is_outlived {
                holder.high_water = HighWater::of(batch);
            } else if is_outdated {
                // Noted, so that a redelivered batch of the old process makes no holder.
                holder.high_water.note(batch);
            } else {
                holder.contest(batch, context);
            }
        }
        let has_holder = self.holders.contains_key(&key);
        if late.is_some() || (has_holder && !is_outdated) {
            unheld::count(sender, batch, &why, false);
            if let Some(reason) = late.filter(|_| !has_holder) {
                self.unheld.note_left(sender, batch, reason, &clocks);
            }
        } else {
            self.unheld.refuse(sender, batch, &why, &clocks);
            // A goodbye that is the first that is heard of its process leaves the one before it, which may live.
            let is_left = is_outdated && batch.says_goodbye();
            if goodbyes.renew(&key, batch, now_us(), clocks.unix_us) || is_left {
                let refused = sender.namespace.indexer.refused();
                self.unheld
                    .note_stale(refused, &key.0.worker, key.1, clocks.unix_us);
            }
        }
        // Removed last, so that answers know the blocks to be unknown all the time.
        if is_outdated && let Some(holder) = self.holders.remove(&key) {
            let said_us = batch.says_goodbye().then_some(clocks.unix_us);
            self.retire(key, holder, said_us, None);
        }
    }

    /// Gives up events and held batches that have waited for too long, and looks for silent holders. `is_listening`
    /// says whether messages can be received at present. `stream_clock` dates restored holders.
    pub(super) fn tick(&mut self, is_listening: bool, stream_clock: &ServerClock) {
        self.listening.look(self.clocks().monotonic_us, is_listening);
        let context = self.parts.context(self.clocks());
        // `None` while no messages can be received. Every holder is then in doubt for another reason.
        let now_us_if_listening = is_listening.then(now_us);
        let mut leaving = Vec::new();
        for (key, holder) in &mut self.holders {
            let afterwards = holder.tick(context);
            holder.date_restored(stream_clock);
            let limits = self.liveness.of_worker(&key.0.namespace, &key.0.worker);
            let silence = holder.check_liveness(limits, now_us_if_listening, context);
            if silence == Silence::Gone || afterwards == Afterwards::Leaves {
                leaving.push((key.clone(), afterwards));
            }
        }
        for (key, afterwards) in leaving {
            match afterwards {
                Afterwards::Leaves => self.take_leave(&key),
                Afterwards::Stays => self.forget(&key),
            }
            self.release_if_empty(&key.0);
        }
    }

    /// Returns the clock readings for a job with a message. `arrival` says when the message came.
    fn clocks_at(&self, arrival: MessageArrival) -> JobClocks {
        JobClocks {
            seen_us: arrival.sent_us,
            is_new: arrival.is_new,
            ..self.clocks()
        }
    }

    /// Returns the clock readings for a job that counts as a sign that the publisher is alive now.
    pub(super) fn clocks_when_seen(&self) -> JobClocks {
        JobClocks {
            seen_us: now_us(),
            is_new: true,
            ..self.clocks()
        }
    }

    /// Returns the clock readings for a job without a message.
    pub(super) fn clocks(&self) -> JobClocks {
        JobClocks {
            monotonic_us: self.parts.clock.monotonic_us(),
            unix_us: self.parts.clock.unix_us(),
            listening_us: self.listening.now_us(),
            seen_us: 0,
            is_new: false,
        }
    }
}
