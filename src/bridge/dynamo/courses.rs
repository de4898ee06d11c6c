//! Courses of the workers of an event plane that the bridge can ask for events. A *course* says how far the bridge
//! knows the events of one worker (see `course`). This module updates the courses from the plane's messages and from
//! the workers' answers.
//!
//! The bridge asks a worker for events if some are missing, if the known ones are in doubt, or if the bridge began to
//! listen after the worker's first event.
//!
//! - A worker is exact while its event numbers continue without a gap.
//! - After a gap, the worker is out of sight, and its messages wait. It is in sight again once all events up to the
//!   highest number that the bridge has heard of are applied, from an answer and from the waiting messages.
//! - A silent worker is asked from time to time. Its answer shows that it lives, and brings the newest events if they
//!   were lost.
//! - A worker whose record is removed from Dynamo's discovery is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName};
use kvatlas_engines::{EngineBatch, Reason};

use super::super::relay::Relay;
use super::super::stalls::PendingLook;
use super::answers::{AnswerError, Caught, DecodedEvents};
use super::course::{Course, Pace};
use super::records::{Records, SourceRecord};
use super::{MessageOrder, PUBLISHERS_MAX, PlaneEvents, holder_of};

/// Maximum size of the workers' messages that wait for earlier events, in bytes. If there is no room, a message is
/// dropped, and its events are asked for later.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Maximum number of publishers that are remembered as gone. Messages that still come from them are left out.
const GONE_MAX: usize = 4096;

/// Address of an event plane (a source of events). It shows which records belong to publishers of this plane.
#[derive(Debug, Clone)]
pub(in super::super) struct PlaneAddress {
    pub(in super::super) endpoint: String,
    pub(in super::super) topic: String,
}

impl PlaneAddress {
    /// Returns whether `publisher`, whose record is `record`, publishes at this address.
    fn has(&self, records: &Records, publisher: u64, record: &SourceRecord) -> bool {
        match self.endpoint.starts_with("nats://") {
            true => record.subject == self.topic,
            false => records.channels.get(&self.endpoint) == Some(&publisher),
        }
    }
}

/// A question to a worker for its events.
#[derive(Debug)]
pub(in super::super) struct WorkerQuestion {
    publisher: u64,
    /// Number of the question.
    number: u64,
    pub(super) record: SourceRecord,
    /// First event that is asked for; `None` for everything.
    pub(super) start: Option<u64>,
    asked_at: Instant,
    look: PendingLook,
}

/// Courses of the workers that can be asked, by their publishers. A course says how far a worker's events are known.
pub(super) struct Courses {
    address: PlaneAddress,
    pace: Pace,
    records: Arc<Records>,
    pub(super) all: BTreeMap<u64, Course>,
    gone: BTreeSet<u64>,
    questions: u64,
    waiting_bytes: usize,
    /// Time from which the bridge assumes that the connection brings messages, even if no message has come over it.
    settled_at: Instant,
}

impl Courses {
    pub(super) fn new(address: PlaneAddress, pace: Pace) -> Self {
        Self {
            settled_at: pace.settled_at(),
            address,
            pace,
            records: Arc::default(),
            all: BTreeMap::new(),
            gone: BTreeSet::new(),
            questions: 0,
            waiting_bytes: 0,
        }
    }

    /// Whether a publisher's worker is gone, according to the records.
    pub(super) fn is_gone(&self, publisher: u64) -> bool {
        self.gone.contains(&publisher)
    }

    /// Notes for all workers that the connection broke.
    pub(super) fn disconnect(&mut self) {
        self.all.values_mut().for_each(Course::disconnect);
    }

    /// Returns the error of a failed question, or of reading discovery's records, in words; `None` if nothing is wrong.
    pub(super) fn trouble(&self) -> Option<String> {
        let failed = self.all.values().find_map(|course| {
            let trouble = course.trouble.as_ref()?;
            Some(format!(
                "worker {}/{}: {trouble}",
                course.record.worker, course.record.rank
            ))
        });
        failed.or_else(|| self.records.trouble.clone())
    }

    /// Returns the records that concern this plane, by publisher. These are the records of publishers at the plane's
    /// address, and of publishers for which `heard` says that the plane has brought a message. A worker that two
    /// publishers report is left out, because nobody knows which publisher is right.
    fn wanted(&self, heard: impl Fn(u64) -> bool) -> BTreeMap<u64, SourceRecord> {
        let records = &self.records;
        let mut publishers_of: BTreeMap<(&WorkerName, Rank), usize> = BTreeMap::new();
        for record in records.sources.values() {
            *publishers_of.entry((&record.worker, record.rank)).or_default() += 1;
        }
        let is_wanted = |publisher: &u64, record: &SourceRecord| {
            let is_here = heard(*publisher) || self.address.has(records, *publisher, record);
            is_here && publishers_of.get(&(&record.worker, record.rank)) == Some(&1)
        };
        let wanted = records
            .sources
            .iter()
            .filter(|(publisher, record)| is_wanted(publisher, record));
        let wanted = wanted.map(|(publisher, record)| (*publisher, record.clone()));
        wanted.take(PUBLISHERS_MAX).collect()
    }

    /// Keeps a message until the events before it have come. If there is no room, the message is dropped, and its events are
    /// asked for again. The message is copied, because it is a part of a read buffer, all of which it would keep in memory.
    pub(super) fn wait(&mut self, publisher: u64, message: &Bytes) {
        let bytes = self.waiting_bytes.saturating_add(message.len());
        if bytes <= WAITING_BYTES_MAX
            && let Some(course) = self.all.get_mut(&publisher)
        {
            course.waiting.push(Bytes::copy_from_slice(message));
            self.waiting_bytes = bytes;
        }
    }

    fn take_waiting(&mut self, publisher: u64) -> Vec<Bytes> {
        let course = self.all.get_mut(&publisher);
        let waiting = course
            .map(|course| std::mem::take(&mut course.waiting))
            .unwrap_or_default();
        let bytes: usize = waiting.iter().map(Bytes::len).sum();
        self.waiting_bytes = self.waiting_bytes.saturating_sub(bytes);
        waiting
    }
}

impl PlaneEvents {
    /// Notes that the subscription is made. From `settled_at` on, the bridge assumes that the connection brings
    /// messages, even if none has come.
    pub(in super::super) fn connected(&mut self, settled_at: Option<Instant>) {
        self.courses.settled_at = settled_at.unwrap_or_else(|| self.courses.pace.settled_at());
    }

    /// Replaces the records of discovery by `records`, and applies them. Records that have never been read without an
    /// error are not applied.
    pub(in super::super) async fn take_records(
        &mut self,
        records: Arc<Records>,
    ) -> Result<(), PublisherError> {
        self.courses.records = records;
        match self.courses.records.is_known {
            true => self.apply_records().await,
            false => Ok(()),
        }
    }

    /// Goes on telling daemons of the workers out of sight whose records stand.
    pub(super) async fn told_recorded(&mut self) -> Result<(), PublisherError> {
        if self.courses.records.trouble.is_some() {
            return Ok(());
        }
        for SourceRecord { worker, rank, .. } in self.courses.all.values().map(|course| &course.record) {
            if let Some(relay) = self.holders.get(worker, *rank).await {
                relay.told_alive().await?;
            }
        }
        Ok(())
    }

    pub(super) async fn apply_records(&mut self) -> Result<(), PublisherError> {
        let wanted = self
            .courses
            .wanted(|publisher| self.publishers.contains_key(&publisher));
        let known: Vec<u64> = self.courses.all.keys().copied().collect();
        for publisher in known
            .into_iter()
            .filter(|publisher| !wanted.contains_key(publisher))
        {
            self.end_course(publisher).await?;
        }
        for (publisher, record) in wanted {
            self.courses.gone.remove(&publisher);
            let known = self.courses.all.get(&publisher);
            if known.is_some_and(|course| course.record == record) {
                continue;
            }
            drop(self.courses.take_waiting(publisher));
            self.courses.all.insert(publisher, Course::new(record.clone()));
            if let Some(relay) = self.holders.get(&record.worker, record.rank).await {
                relay.lost().await?;
            }
        }
        Ok(())
    }

    /// Stops tracking which events of a worker are known, and asking the worker. Either the worker's record is gone, so
    /// the worker is, too. Or nobody knows any more which publisher reports the worker, and its holder is in doubt.
    async fn end_course(&mut self, publisher: u64) -> Result<(), PublisherError> {
        drop(self.courses.take_waiting(publisher));
        let Some(course) = self.courses.all.remove(&publisher) else {
            return Ok(());
        };
        let SourceRecord { worker, rank, .. } = course.record;
        if self.courses.records.sources.contains_key(&publisher) {
            return match self.holders.get(&worker, rank).await {
                Some(relay) => relay.lose(Reason::LostBatches).await,
                None => Ok(()),
            };
        }
        self.publishers.remove(&publisher);
        if self.courses.gone.len() >= GONE_MAX {
            self.courses.gone.pop_first();
        }
        self.courses.gone.insert(publisher);
        self.holders.forget(&worker, rank).await
    }

    /// Returns the next question that is due; `None` if no worker is to be asked now.
    pub(in super::super) fn question(&mut self, look: PendingLook) -> Option<WorkerQuestion> {
        let number = self.courses.questions.wrapping_add(1);
        let due = self.courses.all.iter_mut().find_map(|(publisher, course)| {
            let start = course.question(number)?;
            Some((*publisher, course.record.clone(), start))
        });
        let (publisher, record, start) = due?;
        self.courses.questions = number;
        Some(WorkerQuestion {
            publisher,
            number,
            record,
            start,
            asked_at: Instant::now(),
            look,
        })
    }

    /// Applies a message of a publisher whose worker can be asked. If the message does not continue the known events,
    /// it waits, and the worker goes out of sight.
    pub(super) async fn follow_course(
        &mut self,
        publisher: u64,
        batch: &EngineBatch,
        message: &Bytes,
        number: MessageOrder,
        is_behind: bool,
    ) -> Result<(), PublisherError> {
        let courses = &mut self.courses;
        let Some(course) = courses.all.get_mut(&publisher) else {
            return Ok(());
        };
        let counts_anew = matches!(number, MessageOrder::Anew | MessageOrder::Backwards);
        if counts_anew {
            course.break_off(true);
        }
        course.hear(batch);
        course.is_heard |= !is_behind;
        let Some(relay) = self.holders.get(&course.record.worker, course.record.rank).await else {
            return Ok(());
        };
        let goes_on = course.is_whole && apply(relay, course, batch, false).await?;
        if !goes_on || relay.doubt().is_some() {
            course.break_off(false);
            // Daemons do not get the messages that wait. So the holder is out of sight until they are applied.
            relay.lost().await?;
        }
        if !goes_on {
            if !is_behind {
                relay.told_alive().await?;
            }
            courses.wait(publisher, message);
            return Ok(());
        }
        if course.is_whole && !is_behind {
            course.is_alive(&courses.pace);
            relay.seen(courses.pace.alive_for()).await?;
        }
        Ok(())
    }

    /// Notes a contradiction: a publisher reports a worker whose record names another publisher. Either the message or the record
    /// may be outdated. So the worker's holder goes out of sight (its events may be missing), and the message is left out.
    /// Returns whether there is such a record.
    pub(super) async fn contradict_course(
        &mut self,
        worker: &WorkerName,
        rank: Rank,
    ) -> Result<bool, PublisherError> {
        let mut courses = self.courses.all.values_mut();
        let of_worker = |course: &&mut Course| course.record.worker == *worker && course.record.rank == rank;
        let Some(course) = courses.find(of_worker) else {
            return Ok(false);
        };
        course.break_off(true);
        if let Some(relay) = self.holders.get(worker, rank).await {
            relay.lost().await?;
        }
        Ok(true)
    }

    /// Puts all workers out of sight (their events may be missing), because an unreadable message may have been about
    /// any of them. The bridge then asks each worker.
    pub(super) async fn doubt_courses(&mut self) -> Result<(), PublisherError> {
        for course in self.courses.all.values_mut() {
            course.break_off(false);
            if let Some(relay) = self.holders.get(&course.record.worker, course.record.rank).await {
                relay.lost().await?;
            }
        }
        Ok(())
    }

    /// Takes in the answer to a question. `is_news` tells whether the answer still counts, that is, whether this
    /// process has not stood still since the question.
    pub(in super::super) async fn answered(
        &mut self,
        asked: WorkerQuestion,
        answer: Result<Caught, AnswerError>,
        is_news: impl FnOnce(PendingLook) -> bool,
    ) -> Result<(), PublisherError> {
        let publisher = asked.publisher;
        let settled_at = self.courses.settled_at;
        let Some(course) = self.courses.all.get_mut(&publisher) else {
            return Ok(());
        };
        // The connection or the worker's record was replaced after the question was asked, so the answer no longer
        // counts.
        if course.asked != Some(asked.number) {
            return Ok(());
        }
        course.asked = None;
        let proves = is_news(asked.look) && (course.is_heard || asked.asked_at >= settled_at);
        let Some(relay) = self.holders.get(&course.record.worker, course.record.rank).await else {
            return Ok(());
        };
        let caught = match answer {
            Ok(caught) => caught,
            Err(error) => {
                course.has_failed(error.to_string(), &self.courses.pace);
                if course.alive_at.elapsed() >= self.courses.pace.silent_after {
                    relay.lost().await?;
                }
                return match self.courses.records.trouble {
                    // The worker's record stands.
                    None => relay.told_alive().await,
                    Some(_) => Ok(()),
                };
            }
        };
        let counts_anew = asked.start.is_some_and(|start| caught.newest < start);
        if counts_anew {
            course.break_off(true);
        }
        let is_known = course.is_whole && course.due.is_some_and(|due| caught.newest < due);
        let goes_on = is_known || catch_up(relay, course, &caught).await?;
        if goes_on && !is_known {
            self.apply_waiting(publisher).await?;
        }
        self.settle(publisher, goes_on, proves).await
    }

    /// Applies the waiting messages of a publisher, as far as they continue the known events.
    async fn apply_waiting(&mut self, publisher: u64) -> Result<(), PublisherError> {
        let mut batch = EngineBatch::default();
        for message in self.courses.take_waiting(publisher) {
            // The message was decoded before without an error.
            if self.decoder.decode(&message, &mut batch).is_err() {
                continue;
            }
            let Some(course) = self.courses.all.get_mut(&publisher) else {
                return Ok(());
            };
            if let Some(relay) = self.holders.get(&course.record.worker, course.record.rank).await {
                // If the message does not continue the known events, nothing is applied. The course has noted the
                // message's numbers, so the bridge asks for the missing events.
                apply(relay, course, &batch, false).await?;
            }
        }
        Ok(())
    }

    /// Decides after an answer whether a worker is in sight again.
    ///
    /// - `goes_on` says whether the answer continued the known events without a gap.
    /// - `proves` says whether a complete answer is enough to put the worker in sight. It is if two conditions hold.
    ///   This process has not stalled since the question. And the connection surely brings the worker's messages: it
    ///   has brought one, or the question was asked after `settled_at`.
    async fn settle(&mut self, publisher: u64, goes_on: bool, proves: bool) -> Result<(), PublisherError> {
        let pace = &self.courses.pace;
        let Some(course) = self.courses.all.get_mut(&publisher) else {
            return Ok(());
        };
        let Some(relay) = self.holders.get(&course.record.worker, course.record.rank).await else {
            return Ok(());
        };
        if let Some(doubt) = relay.doubt() {
            course.is_doubtful(doubt, pace);
            relay.lost().await?;
            return relay.told_alive().await;
        }
        if !goes_on || !course.is_complete() {
            if !goes_on {
                course.due = None;
            }
            course.is_whole = false;
            course.has_failed("events are missing in the answer".to_owned(), pace);
            relay.lost().await?;
            return relay.told_alive().await;
        }
        course.is_healed(pace);
        if proves {
            return relay.seen(pace.alive_for()).await;
        }
        // The worker is asked again soon. That answer brings the events that the connection may not have brought.
        course.is_alive(pace);
        Ok(())
    }
}

/// Applies the events of `batch` that were not applied before. Returns whether these events continue the known events.
async fn apply(
    relay: &mut Relay,
    course: &mut Course,
    batch: &EngineBatch,
    clears_all: bool,
) -> Result<bool, PublisherError> {
    let Some(due) = course.due else {
        return Ok(false);
    };
    let Some(next) = course.next_due(due, batch, clears_all) else {
        return Ok(false);
    };
    if next > due {
        let own = (course.record.worker.clone(), course.record.rank);
        let is_due = |id: Option<u64>| id.is_some_and(|id| id >= due);
        relay
            .apply_events(batch, |event| {
                is_due(event.id) && holder_of(batch, event).as_ref() == Some(&own)
            })
            .await?;
        course.due = Some(next);
    }
    Ok(true)
}

/// Applies a worker's answer. Returns whether all events are known now, without a gap, up to the last number that the
/// answer names.
async fn catch_up(relay: &mut Relay, course: &mut Course, caught: &Caught) -> Result<bool, PublisherError> {
    if let Some(DecodedEvents { batch, last }) = &caught.base {
        // The worker is out of sight until its state is whole.
        relay.lost().await?;
        relay.restart(None).await?;
        relay.apply_events(batch, |_| true).await?;
        // An empty dump that ends at 0 does not show whether event 0 has happened. So event 0 is still expected.
        let has_begun = *last > 0 || !batch.events().is_empty();
        course.due = Some(if has_begun { last.saturating_add(1) } else { 0 });
    }
    if let Some(DecodedEvents { batch, last }) = &caught.tail {
        let goes_on = apply(relay, course, batch, true).await?;
        return Ok(goes_on && course.due.is_some_and(|due| due > *last));
    }
    Ok(course.due.is_some())
}
