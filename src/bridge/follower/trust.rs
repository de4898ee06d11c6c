//! Trust in a replay socket: decides whether a socket that contradicts the published batches belongs to the same
//! engine.
//!
//! | origin of the contradiction | reaction of the bridge |
//! |---|---|
//! | an answer, on an unbroken connection | asks the socket for the last published batch, or else for the next one |
//! | a published batch | asks the socket for that batch |
//! | a socket without any batch | asks again, as a batch may be on its way; later the socket counts as useless |
//!
//! If the socket has the published batch, with the same bytes, then the socket and the connection belong to one
//! process, which is a new one. The bridge then takes all batches from the socket. Otherwise the engine is followed
//! without the socket. The bridge asks the socket again after later published batches, with growing pauses.

use std::time::Instant;

use kvatlas_engines::Reason;

use kvatlas_telemetry::log_gated;

use super::super::continuity::HeardBatch;
use super::super::frames::Numbered;
use super::standing::{ConnectionChange, ConnectionState, ReplayChange, Useless};
use super::{FollowError, Follower, REPLAY_ATTEMPTS, REPLAY_BACKOFF};

/// Number of consecutive answers without a batch, on an unbroken connection, after which the socket counts as one that
/// keeps no batches.
const EMPTY_ANSWERS_MAX: u32 = 3;

impl Follower {
    /// Settles a contradiction between the replay socket and the applied batches, on a connection that has not broken.
    /// Either the socket and the connection both belong to a new process now, or the socket belongs to another engine.
    /// To find out, the bridge asks the socket for the batch that was published last. If the socket lacks that batch,
    /// the bridge stops believing the socket, and asks it for the next published batch.
    pub(super) async fn settle_contradiction(&mut self) -> Result<(), FollowError> {
        self.relay.lost().await?;
        let Some(heard) = self.continuity.heard().filter(|_| !self.topics.hears_other()) else {
            return self.distrust(None).await;
        };
        match self.agrees(heard).await {
            Ok(true) => self.take_all().await,
            Err(error) if error.is_cut() || matches!(error, FollowError::Publisher(_)) => Err(error),
            Ok(false) | Err(_) => self.distrust(None).await,
        }
    }

    /// Stops believing the replay socket, which contradicts the batches published on the connection. Drops all blocks,
    /// whether they came from the socket or from the connection. Then follows the connection, from its batch `heard`
    /// on; without `heard`, from the next published batch on. The bridge believes the socket again once the socket has
    /// the same bytes as a published batch.
    pub(super) async fn distrust(&mut self, heard: Option<&Numbered>) -> Result<(), FollowError> {
        self.relay.lost().await?;
        self.is_own_socket = self.connection == ConnectionState::Proven;
        // The content is certain only if the connection brings the batches from a process's first batch on.
        let is_whole = heard.is_some_and(|heard| self.continuity.is_first(heard.seq));
        self.restart((!is_whole).then_some(Reason::OtherEngine)).await?;
        self.topics.forget_replayed();
        self.note_connection(ConnectionChange::Contradicted);
        if heard.is_some() {
            self.note_connection(ConnectionChange::Continued);
        }
        self.contradicted("it has other batches than the engine publishes on its endpoint");
        self.replay_failures = 0;
        match heard {
            Some(heard) => {
                self.apply(heard, false).await?;
                self.seen_unless_behind().await
            }
            None => Ok(()),
        }
    }

    /// Notes that the replay socket has no batch, although batches have been applied. A socket that keeps no batches
    /// cannot show which batches are missing. Nor can it show whether a new connection leads to the same process.
    pub(super) async fn note_empty_answer(&mut self) -> Result<(), FollowError> {
        self.empty_answers = self.empty_answers.saturating_add(1);
        let is_verified = self.connection.is_verified();
        if is_verified && self.empty_answers < EMPTY_ANSWERS_MAX {
            return self.lost().await;
        }
        let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
        log_gated!(warn "the replay socket keeps no batches: followed without it"; endpoint);
        self.is_own_socket = false;
        self.contradicted("it keeps no batches (buffer_steps)");
        // This failure was logged above. So [`Self::ask_later`] does not log it again.
        self.replay_failures = 1;
        match is_verified {
            true => Ok(()),
            false => self.lost().await,
        }
    }

    /// Notes that the replay socket is not to be believed, for this reason in words.
    fn contradicted(&mut self, error: &str) {
        self.replay = None;
        let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
        let useless = Useless {
            ask_at: Instant::now(),
            error: format!("replay socket {endpoint}: {error}"),
        };
        self.note_replay(ReplayChange::Contradicted(useless));
    }

    /// Asks a replay socket that is not believed for the batch `heard`, which was just published. If the socket has the
    /// same bytes, it belongs to the process that publishes, and the bridge takes all batches from the socket.
    pub(super) async fn try_to_believe(&mut self, heard: &Numbered) -> Result<(), FollowError> {
        if self.topics.hears_other() {
            return self.ask_later().await;
        }
        match self.agrees(HeardBatch::new(heard.seq, &heard.payload)).await {
            Ok(true) => self.take_all().await,
            Ok(false) => self.ask_later().await,
            Err(FollowError::Socket(error)) if !error.is_cut() => {
                tracing::debug!(%error, "a replay socket is not believed, and does not answer");
                self.replay = None;
                self.ask_later().await
            }
            Err(error) => Err(error),
        }
    }

    /// Recovers batches that were lost while the replay socket was silent: takes everything from the socket anew, if it
    /// still has all batches. Does nothing until the socket has proved to belong to the engine. If the socket breaks
    /// its answer off, the bridge tries again later, with growing pauses.
    pub(super) async fn make_up(&mut self) -> Result<(), FollowError> {
        if self.connection != ConnectionState::Proven || !std::mem::take(&mut self.has_missed) {
            return Ok(());
        }
        if self.relay.doubt() != Some(Reason::LostBatches) {
            return Ok(());
        }
        let made_up = match self.reaches_back().await {
            Ok(true) => self.take_all().await,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        match made_up {
            Err(FollowError::Socket(error)) if !error.is_cut() => {
                if self.relay.doubt() != Some(Reason::LostBatches) {
                    // Only a part of the batches has been taken anew.
                    self.relay.lose(Reason::LostBatches).await?;
                }
                self.broken_answers = self.broken_answers.saturating_add(1);
                // A question without an answer must not end the connection, which is still good.
                self.replay_failures = self.replay_failures.max(REPLAY_ATTEMPTS);
                self.follow_without_replay(&error, REPLAY_BACKOFF.pause(self.broken_answers));
                Ok(())
            }
            made_up => made_up,
        }
    }

    /// Takes all batches from a replay socket that agrees with the connection, as if they came from a new process.
    async fn take_all(&mut self) -> Result<(), FollowError> {
        let look = self.stalls.look();
        self.short_replay = None;
        self.relay.lost().await?;
        self.restart(None).await?;
        self.note_replay(ReplayChange::Agreed);
        self.note_connection(ConnectionChange::Continued);
        self.note_connection(ConnectionChange::Agreed);
        if !self.ask_all().await? {
            return self.lost().await;
        }
        self.broken_answers = 0;
        self.settle_identity().await?;
        self.known_at = Instant::now();
        match self.stalls.is_news(look) {
            true => self.seen().await,
            false => Ok(()),
        }
    }

    async fn ask_later(&mut self) -> Result<(), FollowError> {
        self.replay_failures = self.replay_failures.saturating_add(1);
        let pause = REPLAY_BACKOFF.pause(self.replay_failures);
        if self.replay_failures == 1 {
            let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
            log_gated!(
                warn "the replay socket has other batches than the engine publishes: followed without it";
                endpoint
            );
        }
        self.replay_state.ask_at(Instant::now() + pause);
        Ok(())
    }
}
