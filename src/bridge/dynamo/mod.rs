//! Dynamo's event plane: router events of many workers, over NATS or ZeroMQ.
//!
//! Each message is an envelope that names its publisher by a number. The envelope also has the message's own number,
//! which the publisher counts. There are two kinds of workers:
//!
//! - A worker with a record in Dynamo's discovery numbers its events. If the numbers show that events are missing, the
//!   bridge asks the worker for them (`courses`).
//! - Other workers cannot be asked. For them, a publisher's message count without a hole proves that no message is
//!   missing.
//!
//! Three events put the workers of the second kind in doubt, until they clear their caches:
//!
//! - The count has a hole.
//! - The count runs backwards, or begins anew. Another process may then have the same publisher number.
//! - The first message that the bridge hears of a publisher does not have the number 0, so earlier messages are
//!   missing.
//!
//! The plane carries no heartbeats. So a message shows only that its workers were alive when it came.
//!
//! | file | content |
//! |---|---|
//! | `records` | discovery: which worker a publisher reports, and where that worker is asked |
//! | `ports` | the ports at which workers answer |
//! | `questions` | one question over the request plane, and its answer |
//! | `answers` | a worker's missing events, read from its answers |
//! | `course` | how far the events of one worker are known |
//! | `courses` | messages and answers of all workers that can be asked |
//! | `healing` | the open questions to workers |
//! | `plane` | the subscription |

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName, worker_of_instance};
use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, EngineEvent, Envelope, Format, Reason};
use xxhash_rust::xxh3::xxh3_128;

use kvatlas_telemetry::log_gated;

use super::follower::FollowOptions;
use super::holders::Holders;

mod answers;
mod course;
mod courses;
mod healing;
mod plane;
mod ports;
mod questions;
mod records;

use course::Pace;
use courses::Courses;

pub(super) use courses::PlaneAddress;
pub use ports::AnswerPorts;
pub(super) use records::{CHANNELS, Pair, RecordReaders, Records, RecordsError, look_at};

/// Maximum number of publishers that are followed. Workers of other publishers are in doubt.
const PUBLISHERS_MAX: usize = 4096;
/// Number of bytes before the envelope in a ZeroMQ message: a version, and the length of the envelope.
const FRAME_HEAD_BYTES: usize = 5;
const FRAME_VERSION: u8 = 1;

/// Fault of a ZeroMQ message that does not have the form of the event plane's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum PlaneFrameError {
    /// The message has a wrong number of frames.
    #[error("a message has {0} frames; the event plane's have topic, publisher, number and envelope")]
    Count(usize),
    /// The head of the last frame has another version or length.
    #[error("the envelope's frame is of another version, or of another length than it says")]
    Head,
}

/// Returns the envelope in a message `[topic, publisher, number, head and envelope]`.
fn parse_plane_message(frames: &[Bytes]) -> Result<Bytes, PlaneFrameError> {
    let [_topic, _publisher, _number, frame] = frames else {
        return Err(PlaneFrameError::Count(frames.len()));
    };
    let head = frame.first_chunk::<FRAME_HEAD_BYTES>();
    let Some([FRAME_VERSION, length @ ..]) = head else {
        return Err(PlaneFrameError::Head);
    };
    let envelope = frame.slice(FRAME_HEAD_BYTES..);
    match usize::try_from(u32::from_be_bytes(*length)) {
        Ok(length) if length == envelope.len() => Ok(envelope),
        _ => Err(PlaneFrameError::Head),
    }
}

/// One publisher: a worker's process.
#[derive(Debug, Default)]
struct Publisher {
    /// Number and digest of the publisher's last message; `None` before its first message.
    last: Option<(u64, u128)>,
    /// Whether a message has come since the connection was made.
    is_heard: bool,
    holders: BTreeSet<(WorkerName, Rank)>,
}

/// Meaning of a message's number, compared with the publisher's last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageOrder {
    Next,
    /// The message is the publisher's last message again.
    Duplicate,
    Hole,
    /// The message is the first one of another process that has the same publisher number.
    Anew,
    /// The number is from another process, or the message came late.
    Backwards,
}

impl Publisher {
    /// Notes the number and the digest of a message, and returns the meaning of the number.
    fn note(&mut self, number: u64, digest: u128) -> MessageOrder {
        let due = self.last.map_or(0, |(last, _)| last.saturating_add(1));
        let found = match number.cmp(&due) {
            Ordering::Equal => MessageOrder::Next,
            Ordering::Greater => MessageOrder::Hole,
            Ordering::Less if self.last == Some((number, digest)) => MessageOrder::Duplicate,
            Ordering::Less if number == 0 => MessageOrder::Anew,
            Ordering::Less => return MessageOrder::Backwards,
        };
        self.last = Some((number, digest));
        found
    }
}

/// Reports the events of an event plane to daemons.
pub(super) struct PlaneEvents {
    holders: Holders,
    decoder: Decoder,
    batch: EngineBatch,
    /// Publishers by their numbers. Messages without an envelope count as those of publisher 0.
    publishers: BTreeMap<u64, Publisher>,
    courses: Courses,
}

impl PlaneEvents {
    pub(super) fn new(holders: Holders, address: PlaneAddress, options: &FollowOptions) -> Self {
        Self {
            courses: Courses::new(address, Pace::new(options)),
            holders,
            decoder: Decoder::new(Format::Dynamo, DecodeLimits::default()),
            batch: EngineBatch::default(),
            publishers: BTreeMap::new(),
        }
    }

    /// Puts all holders out of sight (events may be missing), because the connection broke. Each publisher's next message shows
    /// whether something was missed.
    async fn lost(&mut self) -> Result<(), PublisherError> {
        for publisher in self.publishers.values_mut() {
            publisher.is_heard = false;
        }
        self.courses.disconnect();
        self.holders.lost().await
    }

    /// Returns the error of a failed question to a worker, or of reading discovery's records, in words; `None` if
    /// nothing is wrong.
    fn trouble(&self) -> Option<String> {
        self.courses.trouble()
    }

    /// Applies a message. `is_behind` says that the message may have waited during a stall. It then does not show that
    /// a worker is alive now.
    async fn apply(&mut self, payload: &Bytes, is_behind: bool) -> Result<(), PublisherError> {
        let mut batch = std::mem::take(&mut self.batch);
        let decoded = self.decoder.decode(payload, &mut batch);
        let applied = match decoded {
            Ok(()) => self.apply_batch(&batch, payload, is_behind).await,
            Err(error) => {
                log_gated!(warn "a message of the event plane cannot be decoded"; %error);
                // A message that cannot be decoded may come from any publisher.
                self.lose_all().await
            }
        };
        self.batch = batch;
        applied
    }

    async fn apply_batch(
        &mut self,
        batch: &EngineBatch,
        payload: &Bytes,
        is_behind: bool,
    ) -> Result<(), PublisherError> {
        let mut named: BTreeSet<(WorkerName, Rank)> = batch
            .events()
            .iter()
            .filter_map(|event| holder_of(batch, event))
            .collect();
        let Envelope { publisher, sequence } = batch.envelope.unwrap_or_default();
        if self.courses.is_gone(publisher) {
            return Ok(());
        }
        let is_new = !self.publishers.contains_key(&publisher);
        if is_new && self.publishers.len() >= PUBLISHERS_MAX {
            log_gated!(warn "too many publishers on the event plane; this one is not followed"; publisher);
            return self.doubt(publisher, named).await;
        }
        let known = self.publishers.entry(publisher).or_default();
        // Without an envelope, nothing proves that no message is missing.
        let number = match batch.envelope {
            Some(_) => known.note(sequence, xxh3_128(payload)),
            None => MessageOrder::Hole,
        };
        if number == MessageOrder::Duplicate {
            return Ok(());
        }
        if is_new {
            // The record of the new publisher may be known already.
            self.apply_records().await?;
        }
        if let Some(course) = self.courses.all.get(&publisher) {
            named.remove(&(course.record.worker.clone(), course.record.rank));
            self.follow_course(publisher, batch, payload, number, is_behind)
                .await?;
            // Workers cannot be asked about the other holders in this message, because the publisher's record names
            // only one worker.
            return self.doubt(publisher, named).await;
        }
        let known = self.publishers.entry(publisher).or_default();
        let was_heard = std::mem::replace(&mut known.is_heard, !is_behind);
        let mut concerned = named;
        if !was_heard || number != MessageOrder::Next || batch.reasons.doubt().is_some() {
            // The missing messages may have been about any holder of the publisher.
            concerned.extend(known.holders.iter().cloned());
        }
        let has_lost = number != MessageOrder::Next;
        for (worker, rank) in &concerned {
            if self.contradict_course(worker, *rank).await? {
                continue;
            }
            self.leave_others(publisher, worker, *rank, has_lost).await?;
            let Some(relay) = self.holders.get(worker, *rank).await else {
                continue;
            };
            // A holder without a relay is not noted for the publisher, so that notes do not grow without bound.
            let known = self.publishers.entry(publisher).or_default();
            known.holders.insert((worker.clone(), *rank));
            if is_behind {
                relay.lost().await?;
            }
            if number == MessageOrder::Anew {
                // The old and the new process may both use this publisher number. So even the new process's count is
                // not certain.
                relay.restart(Some(Reason::LostBatches)).await?;
            }
            // Without numbers, a doubt that already exists need not be reported again.
            if has_lost && (batch.envelope.is_some() || relay.doubt().is_none()) {
                relay.lose(Reason::LostBatches).await?;
            }
            if number == MessageOrder::Backwards {
                // Nobody knows where the message belongs in the count, so its events are not applied.
                continue;
            }
            relay
                .apply_events(batch, |event| {
                    holder_of(batch, event).is_some_and(|holder| holder == (worker.clone(), *rank))
                })
                .await?;
            if !is_behind {
                // The message shows only that the worker is alive at this moment. So no heartbeats follow it.
                relay.seen(Duration::ZERO).await?;
            }
        }
        Ok(())
    }

    /// Marks the holders in `named` as in doubt, because they are reported by a publisher that is not followed for
    /// them. If another publisher reported such a holder before, a new process has taken over the holder, and the
    /// earlier reports are outdated.
    async fn doubt(
        &mut self,
        publisher: u64,
        named: BTreeSet<(WorkerName, Rank)>,
    ) -> Result<(), PublisherError> {
        for (worker, rank) in named {
            if self.contradict_course(&worker, rank).await? {
                continue;
            }
            self.leave_others(publisher, &worker, rank, true).await?;
            if let Some(relay) = self.holders.get(&worker, rank).await
                && relay.doubt().is_none()
            {
                relay.lose(Reason::LostBatches).await?;
            }
        }
        Ok(())
    }

    /// Makes `publisher` the only publisher that reports a holder. If another publisher has reported the holder before,
    /// a new process has taken over the holder, so the holder begins anew.
    async fn leave_others(
        &mut self,
        publisher: u64,
        worker: &WorkerName,
        rank: Rank,
        has_lost: bool,
    ) -> Result<(), PublisherError> {
        let holder = (worker.clone(), rank);
        let mut has_left = false;
        self.publishers.retain(|number, known| {
            if *number != publisher {
                has_left |= known.holders.remove(&holder);
            }
            *number == publisher || !known.holders.is_empty()
        });
        if !has_left {
            return Ok(());
        }
        match self.holders.get(worker, rank).await {
            Some(relay) => relay.restart(has_lost.then_some(Reason::LostBatches)).await,
            None => Ok(()),
        }
    }

    async fn lose_all(&mut self) -> Result<(), PublisherError> {
        let asked = self.courses.all.values();
        let asked: BTreeSet<_> = asked
            .map(|course| (course.record.worker.clone(), course.record.rank))
            .collect();
        for (worker, rank, relay) in self.holders.all() {
            if !asked.contains(&(worker.clone(), rank)) {
                relay.lose(Reason::Malformed).await?;
            }
        }
        self.doubt_courses().await
    }
}

/// Returns the holder that an event is about; `None` if the event names no valid worker.
fn holder_of(batch: &EngineBatch, event: &EngineEvent) -> Option<(WorkerName, Rank)> {
    let worker = worker_of_instance(batch.text(event.owner?)).ok()?;
    Some((worker, event.rank.or(batch.rank).unwrap_or_default()))
}

#[cfg(test)]
mod tests;
