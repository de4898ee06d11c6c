//! `SubscribeKvEvents`: an engine's server sends its KV events over gRPC, in numbered frames.
//!
//! Every connection asks for the frames from the start. The first frame of each rank decides the state of the rank's
//! holder:
//!
//! | First frame | State of the holder |
//! |---|---|
//! | number 0 | whole (all blocks are known) from this frame on |
//! | chunk 0 of a snapshot | out of sight until the last chunk; then whole, unless the server itself has missed batches |
//! | a number above 0 | in doubt until the engine clears, because the server sends live events only |
//!
//! Each first frame begins a new epoch: the new connection may be to another process, and numbers do not tell processes
//! apart. The connection ends if a frame's number is not one above the number of the rank's previous frame.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName};
use kvatlas_engines::subscribe::{KvEventFrame, SnapshotChunk};
use kvatlas_engines::{DecodeLimits, EngineBatch, Reason};

use super::grpc::Frames;
use super::holders::Holders;
use super::relay::LOST_TOLD_FOR;
use super::server::OriginServer;
use super::sources::{FollowedSource, FollowedSourceError, Quiet, SourceTask};

/// Error that ends a stream of frames.
#[derive(Debug, thiserror::Error)]
enum FrameStreamError {
    /// A frame's number is not one above the number of the rank's previous frame.
    #[error("rank {rank}: batch {due} was due, and {got} came")]
    Gap {
        /// Rank of the frames.
        rank: Rank,
        /// Number of the frame that was expected.
        due: u64,
        /// Number of the frame that came.
        got: u64,
    },
    /// A chunk of a snapshot is not the chunk that was expected next.
    #[error("rank {rank}: a snapshot lacks its chunk {due}")]
    Chunk {
        /// Rank of the snapshot.
        rank: Rank,
        /// Index of the snapshot's chunk that was expected.
        due: u32,
    },
}

/// State of one rank's frames on the connection.
#[derive(Debug)]
struct RankStream {
    /// The number of the last frame.
    last: u64,
    /// Index of the snapshot's next chunk, and the number of its chunks; `None` while no snapshot is being received.
    due: Option<(u32, u32)>,
    /// Number of batches that the bridge cannot get: the server itself has missed them, or has sent them before the
    /// bridge subscribed.
    missed: u64,
}

/// Reports the frames of one server to daemons.
pub(super) struct SubscribedEvents {
    worker: WorkerName,
    /// Rank of frames that name no rank.
    rank: Rank,
    holders: Holders,
    batch: EngineBatch,
    ranks: BTreeMap<Rank, RankStream>,
    /// Whether a rank that was in sight before has begun with a whole snapshot on this connection. Then snapshots of all other
    /// ranks come, too, of which the server's process knows something.
    has_snapshots: bool,
}

impl FollowedSource for SubscribedEvents {
    async fn follow(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowedSourceError> {
        let (engine, patience) = (&task.engine, task.options.patience);
        let made = task.origin.as_ref().and_then(|origin| origin.take_frames(engine));
        let mut frames = match made {
            Some(frames) => frames,
            None => Frames::subscribe(&engine.endpoint, engine.format, patience)
                .await
                .map_err(FollowedSourceError::broken)?,
        };
        if let Some(origin) = &task.origin {
            let mut confirmation = origin.confirmation();
            while confirmation.is_open(LOST_TOLD_FOR / 2).await {
                self.holders.told_alive().await?;
            }
        }
        self.connected().await?;
        let mut quiet = Quiet::new(task.stall_watch(), task.options.poll_interval);
        loop {
            let frame = tokio::select! {
                biased;
                frame = frames.next() => Some(frame.map_err(FollowedSourceError::broken)?),
                () = quiet.tick() => None,
            };
            if quiet.has_stalled(frame.is_none()) {
                self.holders.lost().await?;
            }
            if let Some(frame) = &frame {
                self.apply(frame).await?;
                // A connection that brings nothing whole is a failed one, like one that cannot be made.
                if self.ranks.values().any(|stream| stream.due.is_none()) {
                    *failures = 0;
                }
            }
            // The server is alive here: without a sign of life from it, the frames would have ended with an error.
            if !quiet.is_behind() {
                let count = task.origin.as_ref().and_then(OriginServer::ranks);
                self.seen(task.options.look_interval_max(), count).await?;
            }
            self.note_followed(task);
        }
    }

    async fn disconnected(&mut self, _: &SourceTask) -> Result<(), FollowedSourceError> {
        Ok(self.holders.lost().await?)
    }

    async fn told_alive(&mut self) -> Result<(), FollowedSourceError> {
        Ok(self.holders.told_alive().await?)
    }

    async fn end(self, _: &SourceTask, says_goodbye: bool) -> Result<(), FollowedSourceError> {
        Ok(self.holders.end(says_goodbye).await?)
    }
}

impl SubscribedEvents {
    pub(super) fn new(worker: WorkerName, rank: Rank, holders: Holders) -> Self {
        Self {
            worker,
            rank,
            holders,
            batch: EngineBatch::default(),
            ranks: BTreeMap::new(),
            has_snapshots: false,
        }
    }

    /// Notes a new connection. Nothing is known of a rank until its first frame.
    async fn connected(&mut self) -> Result<(), PublisherError> {
        self.ranks.clear();
        self.has_snapshots = false;
        self.holders.get(&self.worker, self.rank).await;
        self.holders.lost().await
    }

    /// Returns a text for operators that says why the blocks of a rank are not known for certain; `None` if they are
    /// known for all ranks.
    fn trouble(&self) -> Option<String> {
        if self.ranks.is_empty() {
            return Some(
                "the server has sent nothing yet: it may be idle, or know nothing from before it was asked"
                    .to_owned(),
            );
        }
        let (rank, stream) = self.ranks.iter().find(|(_, stream)| stream.missed > 0)?;
        Some(format!(
            "rank {rank}: {} batches came before the server knew of them; reset the engine's prefix cache, or start its server with \
             --servicer-impl rust",
            stream.missed
        ))
    }

    /// Returns a text that says that some of the engine's `count` ranks have not sent a frame yet; `None` if all ranks
    /// have. A rank may be idle and send nothing, so a missing rank does not put the other ranks in doubt.
    fn unheard(&self, count: u32) -> Option<String> {
        let heard = self.ranks.len();
        (heard < count as usize).then(|| {
            format!(
                "{heard} of {count} ranks have sent events: the others may be idle, or the server hands on rank 0 only, as with \
                 --servicer-impl rust and no engine attached; then name the engine's sockets, NAME=tcp://HOST:PORT,ranks={count}"
            )
        })
    }

    /// Notes the progress of following the stream. Ranks that have sent frames stay exact even if other ranks have not
    /// sent any.
    fn note_followed(&self, task: &SourceTask) {
        let in_doubt = self.trouble().or_else(|| self.holders.trouble());
        let ranks = task.origin.as_ref().and_then(OriginServer::ranks);
        let trouble = in_doubt.clone().or_else(|| self.unheard(ranks?));
        task.note_followed(in_doubt.is_none(), trouble.as_deref());
    }

    /// Applies a frame. A report of load changes nothing.
    async fn apply(&mut self, frame: &KvEventFrame) -> Result<(), FollowedSourceError> {
        if frame.is_load() {
            return Ok(());
        }
        let rank = frame.rank().unwrap_or(self.rank);
        // A server whose frames have holes may send them so each time. So the pauses before new connections grow.
        let begins = self
            .note(rank, frame)
            .map_err(|error| FollowedSourceError::Cut(error.into()))?;
        let has_missed = self.ranks.get(&rank).is_some_and(|stream| stream.missed > 0);
        let Some(relay) = self.holders.get(&self.worker, rank).await else {
            return Ok(());
        };
        if begins {
            self.has_snapshots |= frame.snapshot().is_some() && relay.was_seen() && !has_missed;
            // The rank is out of sight until its snapshot is whole.
            relay.lost().await?;
            relay.restart(has_missed.then_some(Reason::LostBatches)).await?;
        }
        frame.read(&DecodeLimits::default(), &mut self.batch);
        relay.apply_events(&self.batch, |_| true).await?;
        if has_missed && frame.snapshot().is_some() {
            // The clear at the start of a snapshot ends all doubts. But the server itself lacks batches, so the doubt
            // begins again.
            relay.lose(Reason::LostBatches).await?;
        }
        if relay.doubt().is_none() {
            self.forgive(rank);
        }
        Ok(())
    }

    /// Checks and notes a frame's number. Returns whether the frame is the first of the rank's state: the first frame
    /// on the connection, or chunk 0 of a snapshot.
    fn note(&mut self, rank: Rank, frame: &KvEventFrame) -> Result<bool, FrameStreamError> {
        let got = frame.number();
        match (frame.snapshot(), self.ranks.get_mut(&rank)) {
            (
                Some(SnapshotChunk {
                    index: 0,
                    count,
                    unknown_before,
                    ..
                }),
                _,
            ) => {
                let stream = RankStream {
                    last: got,
                    due: (count > 1).then_some((1, count)),
                    missed: unknown_before,
                };
                self.ranks.insert(rank, stream);
                Ok(true)
            }
            (Some(_), None) => Err(FrameStreamError::Chunk { rank, due: 0 }),
            (None, None) => {
                let stream = RankStream {
                    last: got,
                    due: None,
                    missed: got,
                };
                self.ranks.insert(rank, stream);
                Ok(true)
            }
            (chunk, Some(stream)) => {
                let due = stream.last.saturating_add(1);
                if got != due {
                    return Err(FrameStreamError::Gap { rank, due, got });
                }
                stream.last = got;
                match (chunk, stream.due) {
                    (None, None) => {}
                    (Some(chunk), Some((index, count))) if chunk.index == index => {
                        stream.due = (index + 1 < count).then_some((index + 1, count));
                    }
                    (_, Some((index, _))) => return Err(FrameStreamError::Chunk { rank, due: index }),
                    (Some(_), None) => return Err(FrameStreamError::Chunk { rank, due: 0 }),
                }
                Ok(false)
            }
        }
    }

    /// Sets a rank's number of missed batches to 0, because a clear has ended the doubt about the rank.
    fn forgive(&mut self, rank: Rank) {
        if let Some(stream) = self.ranks.get_mut(&rank) {
            stream.missed = 0;
        }
    }

    /// Reports that ranks are alive for `time`, because the server is alive. `count` is the number of its ranks; `None` if
    /// the server does not tell it. A rank without a frame on this connection, or without its whole snapshot, stays out of
    /// sight, and daemons are still told of it. Daemons forget three kinds of ranks that stay without a frame. Those beside
    /// `count` others, and those with numbers from `count` on, are gone. Those that were never heard while others are may be. And
    /// where a rank has begun [with a snapshot](Self::has_snapshots), the process has nothing of the others.
    async fn seen(&mut self, time: Duration, count: Option<u32>) -> Result<(), PublisherError> {
        let heard = self.ranks.len();
        let is_all = count.is_some_and(|count| heard >= count as usize);
        for (_, rank, relay) in self.holders.all() {
            match self.ranks.get(&rank) {
                Some(stream) if stream.due.is_none() => relay.seen(time).await?,
                None if is_all || (heard > 0 && !relay.was_seen()) => {}
                None if self.has_snapshots || count.is_some_and(|count| rank >= count) => {
                    relay.unseen().await?
                }
                _ => relay.told_alive().await?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_engines::Format;
    use prost::Message;

    use super::super::relay::tests::{heard, holders, next_batch, told_lost};
    use super::*;

    /// Returns the frame `number` of rank 0, without events.
    fn frame(number: u8) -> KvEventFrame {
        KvEventFrame::decode(&[8, number, 32, 0][..]).unwrap()
    }

    /// The count of failures goes on after a hole, so that the pauses before new connections grow.
    #[tokio::test]
    async fn a_hole_ends_the_connection_like_a_broken_bound() {
        let holders = Holders::new(Box::new(|_, _| {
            Box::pin(std::future::ready(Err("not here".to_owned())))
        }));
        let mut events = SubscribedEvents::new(WorkerName::new("gpu-0").unwrap(), 0, holders);
        for number in 0..2 {
            events.apply(&frame(number)).await.unwrap();
        }
        let ended = events.apply(&frame(3)).await.unwrap_err();
        assert!(matches!(ended, FollowedSourceError::Cut(_)), "{ended:?}");
    }

    /// The server was started anew with fewer ranks, and does not tell their number.
    #[tokio::test]
    async fn a_rank_of_which_a_new_process_says_nothing_is_told_of_for_a_while() {
        let frame_of = |rank: u8, number: u8| KvEventFrame::decode(&[8, number, 32, rank][..]).unwrap();
        let seen = |events: &mut SubscribedEvents| -> Vec<bool> {
            let ranks = events.holders.all();
            ranks.map(|(_, _, relay)| relay.was_seen()).collect()
        };
        // The number of ranks that is told, the number of the first frame of rank 0, and whether rank 2 stays.
        for (count, number, stays) in [
            (None, 0, true),
            (None, 3, true),
            (Some(3), 3, true),
            (Some(2), 3, false),
        ] {
            let (broker, _batches) = heard().await;
            let mut events = SubscribedEvents::new(
                WorkerName::new("gpu-0").unwrap(),
                0,
                holders(broker, Format::Vllm),
            );
            events.connected().await.unwrap();
            for rank in [0, 2] {
                events.apply(&frame_of(rank, 0)).await.unwrap();
            }
            events.seen(Duration::ZERO, None).await.unwrap();
            assert_eq!(seen(&mut events), [true, true], "nothing is begun anew");
            events.connected().await.unwrap();
            events.seen(Duration::ZERO, None).await.unwrap();
            assert_eq!(seen(&mut events), [true, true], "nothing has come yet");
            events.apply(&frame_of(0, number)).await.unwrap();
            events.seen(Duration::ZERO, count).await.unwrap();
            assert_eq!(seen(&mut events), [true, stays], "{count:?} {number}");
        }
    }

    /// The engine is idle, and its server sends live events only, so no frame comes over the new connection.
    #[tokio::test]
    async fn an_idle_rank_behind_a_new_connection_is_told_of() {
        let (broker, mut batches) = heard().await;
        let holders = holders(broker, Format::Vllm);
        let mut events = SubscribedEvents::new(WorkerName::new("gpu-0").unwrap(), 0, holders);
        events.connected().await.unwrap();
        events.apply(&frame(0)).await.unwrap();
        events.seen(Duration::ZERO, None).await.unwrap();
        events.connected().await.unwrap();
        told_lost(&mut batches).await;
        events.seen(Duration::ZERO, None).await.unwrap();
        let heartbeat = tokio::time::timeout(Duration::from_secs(60), next_batch(&mut batches));
        assert!(heartbeat.await.unwrap().events.is_empty());
    }
}
