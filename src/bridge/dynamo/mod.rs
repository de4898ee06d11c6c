//! Dynamo's event plane: router events of many workers, over NATS or ZeroMQ.
//!
//! Each message is an envelope with its publisher and the publisher's count. A worker with a record in Dynamo's discovery is asked for what is
//! missing: there its own numbers of events count (`courses`). Of other workers nothing can be asked for again. A publisher's count that goes
//! on proves that nothing of it is missing; a hole puts its workers in doubt until they clear, and so does a count that runs backwards:
//! another process. Of a publisher that was heard late, what it said before is missing. Such a worker is as alive as what was heard of it
//! last, as the plane carries no heartbeats.
//!
//! | file | what |
//! |---|---|
//! | `records` | discovery: which worker a publisher tells of, and where that one is asked |
//! | `ports` | the ports at which workers answer |
//! | `questions` | one question over the request plane, and its answer |
//! | `answers` | from answers to what is missing |
//! | `course` | how far the events of one worker are known |
//! | `courses` | messages and answers of all workers that can be asked |
//! | `healing` | the questions that are open, beside the subscription |

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName, worker_of_instance};
use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, EngineEvent, Envelope, Format, Reason};
use xxhash_rust::xxh3::xxh3_128;

use kvatlas_telemetry::LogGate;

use super::follower::FollowOptions;
use super::holders::Holders;

mod answers;
mod course;
mod courses;
mod healing;
mod ports;
mod questions;
mod records;

use course::Pace;
use courses::Courses;

pub(super) use courses::PlaneAddress;
pub(super) use healing::{Healing, News};
pub use ports::AnswerPorts;
pub(super) use records::{CHANNELS, Pair, RecordReaders, Records, RecordsError, look_at};

static UNDECODABLE_GATE: LogGate = LogGate::new();
static FULL_GATE: LogGate = LogGate::new();

/// Most publishers that are told apart; what further ones say is in doubt.
const PUBLISHERS_MAX: usize = 4096;
/// Version, and length of what follows, in front of an envelope on ZeroMQ.
const FRAME_HEAD_BYTES: usize = 5;
const FRAME_VERSION: u8 = 1;

/// Why a message of the event plane over ZeroMQ is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlaneFrameError {
    /// The number of frames is another.
    #[error("a message has {0} frames; the event plane's have topic, publisher, number and envelope")]
    Count(usize),
    /// The head of the last frame is another.
    #[error("the envelope's frame is of another version, or of another length than it says")]
    Head,
}

/// The envelope in a message `[topic, publisher, number, head and envelope]`.
pub(super) fn parse_plane_message(frames: &[Bytes]) -> Result<Bytes, PlaneFrameError> {
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
    /// The number and the digest of its last message; none before the first.
    last: Option<(u64, u128)>,
    /// Whether a message came since the connection was made.
    is_heard: bool,
    holders: BTreeSet<(WorkerName, Rank)>,
}

/// The proof that a message's number gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Next,
    /// The last message has come twice.
    Duplicate,
    Hole,
    /// Another process has the number of this one, and this is its first message.
    Anew,
    /// Another process, or a message that came late.
    Backwards,
}

impl Publisher {
    /// Notes the number and the digest of a message.
    fn note(&mut self, number: u64, digest: u128) -> Number {
        let due = self.last.map_or(0, |(last, _)| last.saturating_add(1));
        let found = match number.cmp(&due) {
            Ordering::Equal => Number::Next,
            Ordering::Greater => Number::Hole,
            Ordering::Less if self.last == Some((number, digest)) => Number::Duplicate,
            Ordering::Less if number == 0 => Number::Anew,
            Ordering::Less => return Number::Backwards,
        };
        self.last = Some((number, digest));
        found
    }
}

/// Tells daemons what the event plane says.
pub(super) struct PlaneEvents {
    holders: Holders,
    decoder: Decoder,
    batch: EngineBatch,
    /// By their numbers; those without an envelope are 0.
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

    pub(super) fn holders(&mut self) -> &mut Holders {
        &mut self.holders
    }

    pub(super) fn into_holders(self) -> Holders {
        self.holders
    }

    /// The connection broke: each publisher's next message shows whether something was missed.
    pub(super) async fn lost(&mut self) -> Result<(), PublisherError> {
        for publisher in self.publishers.values_mut() {
            publisher.is_heard = false;
        }
        self.courses.disconnect();
        self.holders.lost().await
    }

    /// The trouble with discovery, or with what was asked of a worker, in words; none where nothing is wrong.
    pub(super) fn trouble(&self) -> Option<String> {
        self.courses.trouble()
    }

    /// Applies a message. Where the bridge `is_behind`, it does not show that anyone is alive now.
    pub(super) async fn apply(&mut self, payload: &Bytes, is_behind: bool) -> Result<(), PublisherError> {
        let mut batch = std::mem::take(&mut self.batch);
        let decoded = self.decoder.decode(payload, &mut batch);
        let applied = match decoded {
            Ok(()) => self.apply_batch(&batch, payload, is_behind).await,
            Err(error) => {
                if let Some(suppressed) = UNDECODABLE_GATE.admit() {
                    tracing::warn!(%error, suppressed, "a message of the event plane cannot be decoded");
                }
                // Nobody knows whose it was.
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
            if let Some(suppressed) = FULL_GATE.admit() {
                tracing::warn!(
                    publisher,
                    suppressed,
                    "too many publishers on the event plane; this one is not followed"
                );
            }
            return self.doubt(publisher, named).await;
        }
        let known = self.publishers.entry(publisher).or_default();
        // Without an envelope nothing proves that all is there.
        let number = match batch.envelope {
            Some(_) => known.note(sequence, xxh3_128(payload)),
            None => Number::Hole,
        };
        if number == Number::Duplicate {
            return Ok(());
        }
        if is_new {
            // Its record may be known already.
            self.apply_records().await?;
        }
        if let Some(course) = self.courses.all.get(&publisher) {
            named.remove(&(course.record.worker.clone(), course.record.rank));
            self.follow_course(publisher, batch, payload, number, is_behind)
                .await?;
            // Nobody can be asked about others.
            return self.doubt(publisher, named).await;
        }
        let known = self.publishers.entry(publisher).or_default();
        let was_heard = std::mem::replace(&mut known.is_heard, !is_behind);
        let mut concerned = named;
        if !was_heard || number != Number::Next || batch.reasons.doubt().is_some() {
            // What is missing may have been about any of them.
            concerned.extend(known.holders.iter().cloned());
        }
        let has_lost = number != Number::Next;
        for (worker, rank) in &concerned {
            if self.contradict_course(worker, *rank).await? {
                continue;
            }
            self.leave_others(publisher, worker, *rank, has_lost).await?;
            let Some(relay) = self.holders.get(worker, *rank).await else {
                continue;
            };
            // Those that are not followed take no room.
            let known = self.publishers.entry(publisher).or_default();
            known.holders.insert((worker.clone(), *rank));
            if is_behind {
                relay.lost().await?;
            }
            if number == Number::Anew {
                // Two processes may share the number, so that not even this count is certain.
                relay.restart(Some(Reason::LostBatches)).await?;
            }
            // Without numbers, the doubt that there is need not be told again.
            if has_lost && (batch.envelope.is_some() || relay.is_whole()) {
                relay.lose(Reason::LostBatches).await?;
            }
            if number == Number::Backwards {
                // Where it belongs is not known.
                continue;
            }
            relay
                .apply_events(batch, |event| {
                    holder_of(batch, event).is_some_and(|holder| holder == (worker.clone(), *rank))
                })
                .await?;
            if !is_behind {
                // Alive now; later messages have to show it again.
                relay.seen(Duration::ZERO).await?;
            }
        }
        Ok(())
    }

    /// Doubts the holders that a publisher tells of that is not followed. Of a worker that another one told of, it is another process: what
    /// that one told is outdated.
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
                && relay.is_whole()
            {
                relay.lose(Reason::LostBatches).await?;
            }
        }
        Ok(())
    }

    /// A holder that another publisher told of before is another process now.
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

/// The holder that an event is about.
fn holder_of(batch: &EngineBatch, event: &EngineEvent) -> Option<(WorkerName, Rank)> {
    let worker = worker_of_instance(batch.text(event.owner?)).ok()?;
    Some((worker, event.rank.or(batch.rank).unwrap_or_default()))
}

#[cfg(test)]
mod tests;
