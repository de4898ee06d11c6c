//! Questions of a follower to the replay socket.

use std::sync::Arc;
use std::time::Instant;

use kvatlas_engines::Reason;

use kvatlas_telemetry::log_gated;

use super::super::continuity::{HeardBatch, Replayed};
use super::super::frames::Numbered;
use super::super::sockets::ReplaySocket;
use super::standing::ConnectionChange;
use super::{FollowError, Follower};

/// The outcome of a replay.
pub(super) enum Verified {
    /// Everything that the engine has published has been applied.
    Whole,
    /// The answer comes from another process. The bridge has to ask again, from the first batch.
    Stranger,
    /// The answer has a hole. The batches before the hole have been applied.
    Torn,
    /// The answer begins after the last applied batch, so it does not show whether the process is the same. On an
    /// unbroken connection, the batches that the socket no longer has still arrive as published batches.
    Beyond,
    /// The socket has no batch, and has never given one, although batches have been applied.
    Empty,
}

/// Number of consecutive questions without progress after which missing batches count as lost.
const ASK_ATTEMPTS: u32 = 3;

impl Follower {
    /// Asks the socket for all of its batches. Called only while no batch is applied. Returns `true` once all of them
    /// are applied. Returns `false` if another process answers, or if the answer begins too late.
    pub(super) async fn ask_all(&mut self) -> Result<bool, FollowError> {
        Ok(!matches!(
            self.ask().await?,
            Verified::Stranger | Verified::Beyond
        ))
    }

    /// Asks the replay socket, and repeats the question while answers have holes, at most [`ASK_ATTEMPTS`] times without
    /// progress. Holes come from engines that drop batches for a slow reader.
    pub(super) async fn ask(&mut self) -> Result<Verified, FollowError> {
        self.relay.tell().await?;
        let mut attempts = ASK_ATTEMPTS;
        loop {
            let before = self.continuity.reached();
            attempts -= 1;
            match self.ask_once(attempts == 0).await? {
                Verified::Torn if self.continuity.reached() > before => attempts = ASK_ATTEMPTS,
                Verified::Torn => {}
                verified => return Ok(verified),
            }
        }
    }

    /// Asks the replay socket once. Batches after a hole in the answer are applied only if `is_last`: the missing batches then
    /// count as lost.
    async fn ask_once(&mut self, is_last: bool) -> Result<Verified, FollowError> {
        let from = self.continuity.replay_from();
        let mut replay = self.question(from).await?;
        let mut largest = None;
        let mut verified = Verified::Whole;
        while let Some(numbered) = self.next_of(&mut replay).await? {
            let (seq, is_first) = (numbered.seq, largest.is_none());
            // An unusable answer is read to its end, too, because the next answer comes after it on the same
            // connection.
            if let Verified::Whole = verified {
                match self.continuity.replayed(seq, &numbered.payload, is_first) {
                    Replayed::Known => self.continuity.confirm(seq),
                    Replayed::Next => self.apply(&numbered, true).await?,
                    Replayed::Gap if !is_first && !is_last => verified = Verified::Torn,
                    Replayed::Gap => {
                        if is_first {
                            self.note_short_replay(seq);
                        }
                        self.relay.lose(Reason::LostBatches).await?;
                        self.apply(&numbered, true).await?;
                    }
                    Replayed::Stranger => verified = Verified::Stranger,
                    Replayed::Beyond => {
                        self.note_short_replay(seq);
                        verified = Verified::Beyond;
                    }
                }
            }
            largest = largest.max(Some(seq));
        }
        // Only a socket that has answered to the end can be asked again.
        self.replay = Some(replay);
        match verified {
            Verified::Whole if largest < self.continuity.last() => match largest {
                None => self.nothing_since(from).await,
                // A publisher keeps the batches that it has published last. This answer lacks them, so it comes from
                // another process.
                Some(_) if is_last => Ok(Verified::Stranger),
                Some(_) => Ok(Verified::Torn),
            },
            verified => Ok(verified),
        }
    }

    /// Logs that an answer begins with the batch `begins`, although an earlier batch is needed. Does nothing on a
    /// verified connection, which may still bring the missing batches.
    fn note_short_replay(&mut self, begins: u64) {
        let is_told = self.short_replay.is_some() && self.continuity.last().is_none();
        if self.connection.is_verified() || is_told {
            return;
        }
        let needed = self.continuity.last().map_or(0, |last| last.saturating_add(1));
        let text = format!("the replay begins at {begins}, needed {needed}: raise buffer_steps");
        log_gated!(
            warn "{text}";
            endpoint = self.replay_endpoint.as_deref().unwrap_or_default(), begins, needed
        );
        self.short_replay = Some(text);
    }

    /// Decides why the replay socket has no batch from the number `from` on, although the batch `from` was applied.
    /// Either another process answers ([`Verified::Stranger`]), or the socket keeps no batches ([`Verified::Empty`]).
    async fn nothing_since(&mut self, from: u64) -> Result<Verified, FollowError> {
        // A publisher with a replay socket keeps the batches that it has published last. So the engine's own socket
        // would have the batch `from`.
        let mut keeps_any = self.continuity.was_given_any();
        if !keeps_any && from > 0 {
            self.read_answer(0, |_| keeps_any = true).await?;
        }
        Ok(match keeps_any {
            true => Verified::Stranger,
            false => Verified::Empty,
        })
    }

    /// Asks for all batches from the number `from` on. Returns the socket, from which the caller reads the answer.
    async fn question(&mut self, from: u64) -> Result<ReplaySocket, FollowError> {
        let mut replay = match self.replay.take() {
            Some(replay) => replay,
            None => {
                let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
                let metrics = Arc::clone(self.relay.bridge_metrics());
                ReplaySocket::connect(endpoint, self.options.patience, metrics).await?
            }
        };
        self.relay.metrics().replays.increment(1);
        replay.ask(from).await?;
        Ok(replay)
    }

    /// Waits for the next batch of an answer; `None` at its end. If the answer takes longer than an engine may be
    /// silent, the engine goes out of sight: batches may be missing, because published batches are not read during the
    /// wait.
    async fn next_of(&mut self, replay: &mut ReplaySocket) -> Result<Option<Numbered>, FollowError> {
        let overdue_at = self.known_at.checked_add(self.options.silent_after);
        let message = {
            let mut next = std::pin::pin!(replay.next());
            match overdue_at.filter(|_| self.relay.is_in_sight()) {
                Some(overdue_at) if overdue_at > Instant::now() => tokio::select! {
                    biased;
                    message = &mut next => message,
                    () = tokio::time::sleep_until(overdue_at.into()) => {
                        self.relay.lost().await?;
                        next.await
                    }
                },
                Some(_) => {
                    self.relay.lost().await?;
                    next.await
                }
                None => next.await,
            }
        };
        let message = message?;
        self.awake().await?;
        Ok(message)
    }

    /// Asks for all batches from the number `from` on, and reads the answer to its end without applying it. Calls `note`
    /// with each batch.
    async fn read_answer(&mut self, from: u64, mut note: impl FnMut(&Numbered)) -> Result<(), FollowError> {
        self.relay.tell().await?;
        let mut replay = self.question(from).await?;
        while let Some(numbered) = self.next_of(&mut replay).await? {
            note(&numbered);
        }
        self.replay = Some(replay);
        Ok(())
    }

    /// Asks the replay socket whether it has all batches, from the first one on.
    pub(super) async fn reaches_back(&mut self) -> Result<bool, FollowError> {
        let mut first = None;
        self.read_answer(0, |numbered| {
            first.get_or_insert(numbered.seq);
        })
        .await?;
        Ok(first.is_some_and(|first| self.continuity.is_first(first)))
    }

    /// Asks the replay socket whether it has `batch`, with the same bytes.
    async fn has(&mut self, batch: HeardBatch) -> Result<bool, FollowError> {
        let mut has_it = false;
        self.read_answer(batch.seq, |numbered| {
            has_it |= numbered.seq == batch.seq && HeardBatch::new(numbered.seq, &numbered.payload) == batch;
        })
        .await?;
        Ok(has_it)
    }

    /// Whether an engine that is begun again with the state after the batch `last` can go on from there without a loss:
    /// the replay socket still has that batch, and so all that came after it. If the batch has other bytes now, it is of
    /// another process, and the state is of no use. Also true if no batch was heard since. Returns `None` if the socket does
    /// not answer now.
    pub(in super::super) async fn can_go_on_after(
        &mut self,
        last: HeardBatch,
    ) -> Result<Option<bool>, FollowError> {
        if self.continuity.last().is_none() {
            return Ok(Some(true));
        }
        if !self.can_ask() {
            return Ok((!self.replay_state.is_silent()).then_some(false));
        }
        match self.has(last).await {
            Err(error @ FollowError::Publisher(_)) => Err(error),
            Err(error) => {
                tracing::debug!(%error, "a replay socket does not say whether it reaches back to what was kept");
                Ok(None)
            }
            Ok(has_it) => Ok(Some(has_it)),
        }
    }

    /// Asks the replay socket whether it has the batch `heard`, which was published, with the same bytes.
    pub(super) async fn agrees(&mut self, heard: HeardBatch) -> Result<bool, FollowError> {
        let agrees = self.has(heard).await?;
        if agrees {
            self.note_connection(ConnectionChange::Agreed);
        }
        Ok(agrees)
    }
}
