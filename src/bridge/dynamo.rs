//! Dynamo's event plane: router events of many workers, over NATS or ZeroMQ.
//!
//! Each message is an envelope with its publisher and the publisher's count. A count that goes on proves that nothing of that publisher is
//! missing; a hole puts its workers in doubt until they clear. Nothing can be asked for again: of a publisher that was heard late, what it
//! said before is missing. A worker is as alive as what was heard of it last, as the plane carries no heartbeats.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName, worker_of_instance};
use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, EngineEvent, Envelope, Format};

use super::holders::Holders;

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
    /// Its last number; none before the first.
    last: Option<u64>,
    /// Whether a message came since the connection was made.
    is_heard: bool,
    holders: BTreeSet<(WorkerName, Rank)>,
}

/// What a message's number proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Next,
    Duplicate,
    Hole,
}

impl Publisher {
    /// Notes the number of a message.
    fn note(&mut self, number: u64) -> Number {
        let due = self.last.map_or(0, |last| last.saturating_add(1));
        if number < due {
            return Number::Duplicate;
        }
        self.last = Some(number);
        match number == due {
            true => Number::Next,
            false => Number::Hole,
        }
    }
}

/// Tells daemons what the event plane says.
pub(super) struct PlaneEvents {
    holders: Holders,
    decoder: Decoder,
    batch: EngineBatch,
    /// By their numbers; those without an envelope are 0.
    publishers: BTreeMap<u64, Publisher>,
}

impl PlaneEvents {
    pub(super) fn new(holders: Holders) -> Self {
        Self {
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
        self.holders.lost().await
    }

    /// Applies a message. Where the bridge `is_behind`, it does not show that anyone is alive now.
    pub(super) async fn apply(&mut self, payload: &[u8], is_behind: bool) -> Result<(), PublisherError> {
        let mut batch = std::mem::take(&mut self.batch);
        let decoded = self.decoder.decode(payload, &mut batch);
        let applied = match decoded {
            Ok(()) => self.apply_batch(&batch, is_behind).await,
            Err(error) => {
                tracing::warn!(%error, "a message of the event plane cannot be decoded");
                // Nobody knows whose it was.
                self.lose_all().await
            }
        };
        self.batch = batch;
        applied
    }

    async fn apply_batch(&mut self, batch: &EngineBatch, is_behind: bool) -> Result<(), PublisherError> {
        let named: BTreeSet<(WorkerName, Rank)> = batch
            .events()
            .iter()
            .filter_map(|event| holder_of(batch, event))
            .collect();
        let Envelope { publisher, sequence } = batch.envelope.unwrap_or_default();
        let is_full = self.publishers.len() >= PUBLISHERS_MAX && !self.publishers.contains_key(&publisher);
        if is_full {
            tracing::warn!(
                publisher,
                "too many publishers on the event plane; this one is not followed"
            );
            return Ok(());
        }
        let known = self.publishers.entry(publisher).or_default();
        // Without an envelope nothing proves that all is there.
        let number = match batch.envelope {
            Some(_) => known.note(sequence),
            None => Number::Hole,
        };
        if number == Number::Duplicate {
            return Ok(());
        }
        let was_heard = std::mem::replace(&mut known.is_heard, !is_behind);
        known.holders.extend(named.iter().cloned());
        let concerned = match was_heard && number == Number::Next && batch.reasons.doubt().is_none() {
            true => named,
            // What is missing may have been about any of them.
            false => known.holders.clone(),
        };
        for (worker, rank) in &concerned {
            let has_lost = number == Number::Hole;
            self.leave_others(publisher, worker, *rank, has_lost).await?;
            let Some(relay) = self.holders.get(worker, *rank).await else {
                continue;
            };
            if is_behind {
                relay.lost().await?;
            }
            // Without numbers, the doubt that there is need not be told again.
            if number == Number::Hole && (batch.envelope.is_some() || relay.is_exact()) {
                relay.lose().await?;
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
            Some(relay) => relay.restart(has_lost).await,
            None => Ok(()),
        }
    }

    async fn lose_all(&mut self) -> Result<(), PublisherError> {
        for (_, _, relay) in self.holders.all() {
            relay.lose().await?;
        }
        Ok(())
    }
}

/// Whom an event is about.
fn holder_of(batch: &EngineBatch, event: &EngineEvent) -> Option<(WorkerName, Rank)> {
    let worker = worker_of_instance(batch.text(event.owner?)).ok()?;
    Some((worker, event.rank.or(batch.rank).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(frames: &[&[u8]]) -> Vec<Bytes> {
        frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect()
    }

    #[test]
    fn an_envelope_has_a_head() {
        let message = frames(&[b"kv", &[0; 8], &[0; 8], b"\x01\0\0\0\x02ab"]);
        assert_eq!(parse_plane_message(&message), Ok(Bytes::from_static(b"ab")));
        for bad in [
            &b"\x02\0\0\0\x02ab"[..],
            b"\x01\0\0\0\x03ab",
            b"\x01\0\0\0\x01ab",
            b"\x01\0",
            b"",
        ] {
            let message = frames(&[b"kv", &[0; 8], &[0; 8], bad]);
            assert_eq!(parse_plane_message(&message), Err(PlaneFrameError::Head));
        }
        assert_eq!(
            parse_plane_message(&frames(&[b"kv"])),
            Err(PlaneFrameError::Count(1))
        );
    }

    #[test]
    fn a_publishers_count_proves_what_is_missing() {
        let mut publisher = Publisher::default();
        assert_eq!(publisher.note(0), Number::Next);
        assert_eq!(publisher.note(1), Number::Next);
        assert_eq!(publisher.note(1), Number::Duplicate);
        assert_eq!(publisher.note(3), Number::Hole);
        assert_eq!(publisher.note(2), Number::Duplicate);
        assert_eq!(publisher.note(4), Number::Next);
        assert_eq!(Publisher::default().note(5), Number::Hole);
    }
}
