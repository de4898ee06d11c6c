//! Follower of one publisher: reacts to connections, gaps and restarts. The task around it decides when to connect and
//! when to give up.
//!
//! - An engine is *in sight* while it shows signs of life and no batch is known to be missing.
//! - Otherwise the engine is *out of sight*, and the bridge sends daemons no heartbeats for it. An engine that has
//!   never been in sight is an exception: for ten minutes, the bridge sends heartbeats, so that daemons learn of the
//!   engine.
//! - A *look* is a check whether the engine lives and no batch is missing.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use kvatlas_client::Backoff;
use kvatlas_client::publish::PublisherError;
use kvatlas_engines::Reason;

use kvatlas_telemetry::log_gated;

use super::continuity::{Continuity, HeardBatch, Published};
use super::dynamo::AnswerPorts;
use super::frames::Numbered;
use super::relay::Relay;
use super::sockets::{ReplaySocket, SocketError};
use super::stalls::StallWatch;
use super::state::KeptEngine;
use super::topics::Topics;

mod asking;
mod identity;
mod standing;
mod trust;

use asking::Verified;
use identity::Identity;
use standing::{ConnectionChange, ConnectionState, Hearing, ReplayChange, ReplayState, Useless};

/// Settings for following engines.
#[derive(Debug, Clone)]
pub struct FollowOptions {
    /// Maximum time to make a connection, and to wait for each message of a replay.
    pub patience: Duration,
    /// Interval between questions to the replay socket while nothing seems to be missing. The answer shows that the engine
    /// lives, and brings the newest batches if they were lost.
    pub poll_interval: Duration,
    /// Silence after which an engine counts as out of sight, so that daemons get no more heartbeats for it. An engine without a
    /// replay socket goes out of sight only if its connection breaks.
    pub silent_after: Duration,
    /// The pauses between attempts to connect.
    pub backoff: Backoff,
    /// Maximum number of block names that are kept for one engine.
    pub blocks_max: usize,
    /// Time for which an engine may be out of sight (silent, or with batches missing). After that time, a new process at its
    /// sockets no longer counts as that engine.
    pub give_up_after: Duration,
    /// Ports at which the bridge receives the answers of Dynamo's workers.
    pub answer_ports: AnswerPorts,
}

impl Default for FollowOptions {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(2),
            poll_interval: Duration::from_secs(1),
            silent_after: Duration::from_secs(3),
            backoff: Backoff {
                pause_min: Duration::from_millis(50),
                pause_max: Duration::from_secs(5),
            },
            blocks_max: 1 << 22,
            // Daemons, too, keep a holder for this time after its last message.
            give_up_after: Duration::from_secs(600),
            answer_ports: AnswerPorts::default(),
        }
    }
}

impl FollowOptions {
    /// Returns the maximum time between two looks (checks) at an engine. If more time passes, this process has stood still,
    /// while the engine has not.
    pub(super) fn look_interval_max(&self) -> Duration {
        self.poll_interval + Duration::from_secs(1)
    }

    /// Returns how long a pause of this process has to be to count as a stall. Daemons consider a holder stale after
    /// three seconds without a heartbeat. The bridge notices a stall before that, even if it had missed one heartbeat
    /// before the pause. After a stall, the engine is out of sight until a check of the engine (a look) succeeds.
    pub(super) fn pause_max(&self) -> Duration {
        // A delay that a busy machine may cause is no stall.
        self.poll_interval + Duration::from_millis(500)
    }
}

/// Error because of which a publisher cannot be followed at the moment.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    /// A socket of the engine failed.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// State of the engine that could not be read at the start can be read now, so the engine has to be begun again.
    #[error("what was kept can be read now")]
    BeginAgain,
    /// The publisher that reports to daemons failed, which ends following.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
}

impl FollowError {
    /// Whether the connection was ended because the engine broke a bound on its messages.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, Self::Socket(error) if error.is_cut())
    }
}

/// Number of consecutive connections at which the replay socket has to fail before the bridge follows the engine
/// without that socket. An engine that starts may open one of its sockets before the other.
const REPLAY_ATTEMPTS: u32 = 4;

/// Pauses between questions to a replay socket that does not answer.
const REPLAY_BACKOFF: Backoff = Backoff {
    pause_min: Duration::from_secs(1),
    pause_max: Duration::from_secs(60),
};

/// Follows one publisher of an engine: takes its batches, and reacts to gaps and restarts.
pub(super) struct Follower {
    relay: Relay,
    continuity: Continuity,
    topics: Topics,
    /// Address of the replay socket; `None` if the engine has none.
    replay_endpoint: Option<String>,
    replay: Option<ReplaySocket>,
    options: FollowOptions,
    /// State of the replay socket, which says whether the socket is believed.
    replay_state: ReplayState,
    /// Whether the replay socket was proven to be the engine's when it was contradicted last. Another process is there then.
    is_own_socket: bool,
    /// Number of consecutive failures of the replay socket. For a believed socket, only a missing answer at a new
    /// connection counts as a failure. For a socket that is not believed, each question without a useful answer counts.
    replay_failures: u32,
    /// Number of answers with all batches that the replay socket has broken off since the last one that was complete.
    broken_answers: u32,
    /// Number of consecutive answers of the replay socket that had no batch, although batches have been applied.
    empty_answers: u32,
    /// Whether batches may have been lost while the replay socket was silent. If so, the lost batches are fetched when
    /// the socket answers again.
    has_missed: bool,
    /// Verdict on this connection so far: whether its batches come from the process whose batches have been applied.
    connection: ConnectionState,
    /// Whether new batches of the replay socket have also come over this connection.
    hearing: Hearing,
    /// Latest time at which it was certain that no batch is missing.
    known_at: Instant,
    stalls: StallWatch,
    /// Text that says that a replay began after the first missing batch; `None` if no replay did.
    short_replay: Option<String>,
    identity: Identity,
    /// Whether a step that changes the blocks and the batch numbers has begun, and has not ended yet. Until its end,
    /// the two do not belong together. A stop may cut the step off at any wait.
    is_in_step: bool,
    /// Text that says that another process answers, which does not count as the engine; `None` if there was no such
    /// process.
    stranger: Option<String>,
}

impl Follower {
    /// Makes a follower of one publisher. `topic` is the beginning of its topics; empty for all.
    pub(super) fn new(
        relay: Relay,
        topic: &str,
        replay_endpoint: Option<String>,
        options: FollowOptions,
        stalls: StallWatch,
    ) -> Self {
        Self {
            continuity: Continuity::from(relay.first_number()),
            relay,
            topics: Topics::new(topic),
            replay_endpoint,
            replay: None,
            replay_state: ReplayState::Believed,
            is_own_socket: false,
            replay_failures: 0,
            broken_answers: 0,
            empty_answers: 0,
            has_missed: false,
            options,
            connection: ConnectionState::Unverified,
            hearing: Hearing::Heard,
            known_at: Instant::now(),
            stalls,
            short_replay: None,
            identity: Identity::Known,
            is_in_step: false,
            stranger: None,
        }
    }

    /// Continues after the batches that an earlier bridge heard. The relay, which reports to daemons, already has the
    /// blocks of these batches. The engine has to show that it is still the same process.
    pub(super) fn go_on(&mut self, continuity: Continuity) {
        self.continuity = continuity;
    }

    /// Returns the number of changes so far that are worth keeping on disk.
    pub(super) fn changes(&self) -> u64 {
        self.continuity.changes()
    }

    /// Returns all that is known of the engine, to be saved on disk. `cache` is a text that identifies the settings
    /// with which the engine's blocks are translated. `None` in two cases, in which an earlier file stays right:
    ///
    /// - A stop has cut off a step, so the blocks and the batch numbers do not belong together.
    /// - Another process answers, and it is not settled yet that its blocks are in doubt.
    pub(super) async fn keep(&mut self, cache: &str) -> Result<Option<KeptEngine>, FollowError> {
        if self.is_in_step || matches!(self.identity, Identity::Stranger(_)) {
            return Ok(None);
        }
        let continuity = self.continuity.clone();
        Ok(Some(self.relay.save(cache, continuity).await?))
    }

    /// Waits until all messages for daemons have been sent to NATS.
    pub(super) async fn flush(&mut self) -> Result<(), FollowError> {
        Ok(self.relay.flush().await?)
    }

    pub(super) fn relay(&self) -> &Relay {
        &self.relay
    }

    pub(super) fn into_relay(self) -> Relay {
        self.relay
    }

    /// Whether applied events have not been reported to daemons yet.
    pub(super) fn has_untold(&self) -> bool {
        self.relay.has_untold()
    }

    /// Reports the applied events to daemons. Call it before this task waits for the engine.
    pub(super) async fn tell(&mut self) -> Result<(), FollowError> {
        Ok(self.relay.tell().await?)
    }

    /// Whether the engine has a replay socket, and the socket is believed.
    pub(super) fn can_ask(&self) -> bool {
        self.replay_endpoint.is_some() && self.replay_state.is_believed()
    }

    /// Whether the engine is to be checked (a look) immediately, even while it publishes. That is so in three cases:
    ///
    /// - A replay socket that was silent is to be asked again.
    /// - The socket has answered again, after batches may have been lost.
    /// - Nothing shows yet that the socket belongs to the engine that publishes on this connection.
    pub(super) fn wants_look(&self) -> bool {
        let is_unproven = self.connection != ConnectionState::Proven && self.continuity.is_heard();
        match self.can_ask() {
            true => is_unproven || self.has_missed,
            false => self.replay_state.is_silence_over(Instant::now()),
        }
    }

    /// Returns a text that says what is wrong with an engine that is followed; `None` if nothing is wrong.
    pub(super) fn trouble(&self) -> Option<Cow<'_, str>> {
        const UNHEARD: &str =
            "the replay socket has batches that the engine does not publish on its endpoint";
        let useless = self.replay_state.error();
        let unheard = (self.hearing == Hearing::Unheard).then_some(UNHEARD);
        let doubt = self.relay.doubt();
        let short = self.short_replay.as_deref();
        let short = short.filter(|_| doubt == Some(Reason::LostBatches));
        let stranger = self.stranger.as_deref();
        let stranger = stranger.filter(|_| doubt == Some(Reason::OtherEngine));
        let certain = useless.or(unheard).or(short).or(stranger);
        certain.map(Cow::Borrowed).or_else(|| self.relay.trouble())
    }

    /// Tells daemons what the `trouble` with the engine is.
    pub(super) async fn explain(&mut self, trouble: Option<&str>) -> Result<(), FollowError> {
        Ok(self.relay.explain(trouble).await?)
    }

    /// Begins to follow the engine over a new connection. The engine is in sight (alive, with no batch missing) once
    /// the replay socket has given the missed batches. An engine without a replay socket comes in sight with its next
    /// batch.
    pub(super) async fn connected(&mut self) -> Result<(), FollowError> {
        self.continuity.reconnect();
        self.note_connection(ConnectionChange::Reconnected);
        self.hearing = Hearing::Heard;
        self.replay = None;
        self.stalls.begin();
        match &mut self.replay_state {
            // The next published batch may show that the socket no longer contradicts them.
            ReplayState::Contradicting(useless)
                if self.continuity.last().is_some() && !self.is_own_socket =>
            {
                useless.ask_at = Instant::now();
                Ok(())
            }
            // The connection that contradicted the socket has ended. So no doubt of the contradiction is left.
            ReplayState::Contradicting(_) if self.is_own_socket => {
                self.restart(None).await?;
                self.verify_if_possible().await
            }
            _ if self.replay_endpoint.is_some() => self.verify_if_possible().await,
            _ => Ok(()),
        }
    }

    /// Asks the replay socket. After [`REPLAY_ATTEMPTS`] consecutive questions without an answer, the engine is
    /// followed by its published batches only. The bridge then asks the socket at growing intervals, because this task
    /// cannot read the connection while it waits for an answer.
    async fn verify_if_possible(&mut self) -> Result<(), FollowError> {
        self.note_replay(ReplayChange::Asked);
        let error = match self.verify().await {
            Ok(()) => {
                if self.can_ask() {
                    self.replay_failures = 0;
                }
                return Ok(());
            }
            Err(FollowError::Socket(error)) if !error.is_cut() => error,
            Err(error) => return Err(error),
        };
        self.replay_failures = self.replay_failures.saturating_add(1);
        if self.replay_failures < REPLAY_ATTEMPTS {
            return Err(error.into());
        }
        let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
        if self.replay_failures == REPLAY_ATTEMPTS {
            log_gated!(warn "the replay socket does not answer: followed without it"; endpoint, %error);
        }
        let pause = REPLAY_BACKOFF.pause(self.replay_failures - (REPLAY_ATTEMPTS - 1));
        self.follow_without_replay(&error, pause);
        Ok(())
    }

    /// Follows the engine without its replay socket, which does not answer, and asks the socket again after `pause`.
    fn follow_without_replay(&mut self, error: &SocketError, pause: Duration) {
        self.replay = None;
        let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
        let useless = Useless {
            ask_at: Instant::now() + pause,
            error: format!("replay socket {endpoint}: {error}"),
        };
        self.note_replay(ReplayChange::Unanswered(useless));
        self.has_missed = true;
    }

    /// Applies `change` to the state of the connection.
    fn note_connection(&mut self, change: ConnectionChange) {
        self.connection = self.connection.after(change);
    }

    /// Applies `change` to the state of the replay socket.
    fn note_replay(&mut self, change: ReplayChange) {
        let before = std::mem::replace(&mut self.replay_state, ReplayState::Believed);
        self.replay_state = before.after(change);
    }

    /// Notices a stall (a time in which this process stood still), and returns whether there was one. Call it whenever
    /// this task has waited, before it publishes anything. After a stall, the engine is out of sight. It is in sight
    /// again once a look (a check), begun after this call, has succeeded.
    pub(super) async fn awake(&mut self) -> Result<bool, FollowError> {
        let has_stalled = self.stalls.has_stalled();
        if has_stalled {
            self.lost().await?;
        }
        Ok(has_stalled)
    }

    /// Returns the time, by the bridge's clock, until which the engine was watched. A stall behind which the engine has not
    /// been in sight does not count.
    pub(super) fn watched_until(&self) -> Instant {
        self.stalls.watched_until()
    }

    /// Puts the engine in sight (alive, with no batch missing) until the next look at most.
    async fn seen(&mut self) -> Result<(), FollowError> {
        self.stalls.seen();
        Ok(self.relay.seen(self.options.look_interval_max()).await?)
    }

    /// Puts the engine out of sight, because the connection broke or the engine is silent: batches may be missing.
    pub(super) async fn lost(&mut self) -> Result<(), FollowError> {
        self.replay = None;
        Ok(self.relay.lost().await?)
    }

    /// Goes on telling daemons of the engine if it is out of sight: it is known to live.
    pub(super) async fn told_alive(&mut self) -> Result<(), FollowError> {
        Ok(self.relay.told_alive().await?)
    }

    /// Checks that the engine lives and no batch is missing. For an engine without a replay socket, an unbroken connection
    /// without unread messages is enough.
    pub(super) async fn look(&mut self) -> Result<(), FollowError> {
        if self.can_ask() {
            self.verify().await?;
        } else if self.replay_state.is_silence_over(Instant::now()) {
            self.verify_if_possible().await?;
        }
        if self.can_ask() {
            return self.make_up().await;
        }
        self.stalls.caught_up();
        if self.connection.is_verified() {
            self.seen().await?;
        }
        Ok(())
    }

    /// Asks the replay socket for missed batches. The answer also shows whether the engine's process is still the same.
    pub(super) async fn verify(&mut self) -> Result<(), FollowError> {
        let look = self.stalls.look();
        let (was_verified, before) = (self.connection.is_verified(), self.continuity.last());
        match self.ask().await? {
            Verified::Whole | Verified::Torn => self.empty_answers = 0,
            Verified::Empty => return self.note_empty_answer().await,
            // The replay socket no longer has the missing batches, and they are still unread on the connection. The
            // next look shows whether they have been read.
            Verified::Beyond if was_verified => return self.lost().await,
            Verified::Stranger if was_verified => return self.settle_contradiction().await,
            behind @ (Verified::Stranger | Verified::Beyond) => {
                // The blocks of the old process are dropped. The engine is out of sight until the new process has told its blocks.
                self.relay.lost().await?;
                match behind {
                    Verified::Beyond => self.restart_behind_a_gap().await?,
                    _ => {
                        self.short_replay = None;
                        self.restart(None).await?;
                    }
                }
                if !self.ask_all().await? {
                    // The socket has dropped some of the batches since it was asked. The next look fetches those that
                    // are still missing.
                    return self.lost().await;
                }
            }
        }
        if !was_verified {
            self.settle_identity().await?;
        }
        self.note_connection(ConnectionChange::Checked);
        if self.continuity.is_heard() {
            self.note_connection(ConnectionChange::Agreed);
        }
        self.known_at = Instant::now();
        if was_verified && self.continuity.last() > before {
            // If the replay socket alone has a batch, the batch may be lost on the connection, or may still be on its
            // way.
            let unheard_max = self.options.silent_after / 2;
            self.hearing = self
                .hearing
                .after_unpublished(self.known_at, Instant::now(), unheard_max);
        }
        if self.hearing == Hearing::Unheard {
            return self.lost().await;
        }
        if !self.stalls.is_news(look) {
            return Ok(());
        }
        self.seen().await
    }

    /// Takes a batch that was published on the current connection.
    pub(super) async fn published(&mut self, numbered: Numbered) -> Result<(), FollowError> {
        match self.connection.is_verified() {
            true => self.next_of_connection(&numbered).await?,
            false => self.first_of_connection(&numbered).await?,
        }
        self.hearing = Hearing::Heard;
        match self.replay_state.is_contradiction_due(Instant::now()) {
            true => self.try_to_believe(&numbered).await,
            false => Ok(()),
        }
    }

    async fn next_of_connection(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        let Numbered { seq, payload, .. } = numbered;
        match self.continuity.published(*seq, payload) {
            Published::Next => self.apply(numbered, false).await,
            Published::Duplicate => {
                self.note_connection(ConnectionChange::Agreed);
                // The replay socket may not have told the topic.
                match self.topics.is_other(&numbered.topic, false) {
                    true => Ok(self.relay.refuse(Reason::OtherEngine).await?),
                    false => Ok(()),
                }
            }
            Published::Forgotten
                if self.connection != ConnectionState::Proven
                    && !self.agrees(HeardBatch::new(*seq, payload)).await? =>
            {
                self.distrust(Some(numbered)).await
            }
            Published::Forgotten => Ok(()),
            Published::Gap if self.can_ask() => {
                self.verify().await?;
                self.after_gap(numbered).await
            }
            Published::Gap => {
                self.relay.lose(Reason::LostBatches).await?;
                self.apply(numbered, false).await
            }
            // Either another process is behind the same connection, or the replay socket belongs to another engine.
            Published::Other if self.can_ask() => self.distrust(Some(numbered)).await,
            Published::Other => self.begin_with(numbered).await,
        }
    }

    /// Takes a batch that came after a gap. The replay socket has been asked for the missing batches.
    async fn after_gap(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        if !self.connection.is_verified() {
            return self.begin_with(numbered).await;
        }
        match self.continuity.published_again(numbered.seq, &numbered.payload) {
            Published::Next => self.apply(numbered, false).await,
            Published::Duplicate | Published::Forgotten => Ok(()),
            // The replay socket has given all of its batches, and lacks one that was published before the question.
            Published::Gap if self.continuity.is_confirmed() => self.distrust(Some(numbered)).await,
            Published::Gap => {
                self.relay.lose(Reason::LostBatches).await?;
                self.apply(numbered, false).await
            }
            Published::Other => self.distrust(Some(numbered)).await,
        }
    }

    /// Takes the first batch after a reconnect, if no replay socket can be asked. Batches before this one may be missing, and
    /// this one may come from another process. Only one case is certain: a count that begins anew shows another process.
    async fn first_of_connection(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        self.note_connection(ConnectionChange::Continued);
        let has_begun = self.continuity.last().is_some();
        match self.continuity.published(numbered.seq, &numbered.payload) {
            Published::Next => {
                if has_begun {
                    // The earlier blocks are kept, but are in doubt.
                    self.relay.lose(Reason::LostBatches).await?;
                }
                self.settle_identity().await?;
                self.apply(numbered, false).await?;
            }
            _ => self.begin_with(numbered).await?,
        }
        self.seen_unless_behind().await
    }

    /// Puts the engine in sight (alive, with no batch missing). Does nothing if batches that came during a stall of
    /// this process may still be unread.
    async fn seen_unless_behind(&mut self) -> Result<(), FollowError> {
        match self.stalls.is_behind() {
            true => Ok(()),
            false => self.seen().await,
        }
    }

    /// Extends the time for which heartbeats are sent for an engine in sight, because a batch has just come in place of a
    /// look. The batch shows that the engine lives, and its number shows that no batch is missing.
    pub(super) async fn still_seen(&mut self) -> Result<(), FollowError> {
        self.seen().await
    }

    /// Starts over for another process. `numbered` is the first batch that came from it.
    async fn begin_with(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        self.note_connection(ConnectionChange::Continued);
        let is_first = self.continuity.is_first(numbered.seq);
        let doubt = (!is_first).then_some(Reason::LostBatches);
        self.restart(doubt).await?;
        if let Some(doubt) = doubt {
            self.relay.lose(doubt).await?;
        }
        self.settle_identity().await?;
        self.apply(numbered, false).await
    }

    async fn apply(&mut self, numbered: &Numbered, by_replay: bool) -> Result<(), FollowError> {
        let Numbered { seq, payload, topic } = numbered;
        self.is_in_step = true;
        match self.topics.is_other(topic, by_replay) {
            true => self.relay.refuse(Reason::OtherEngine).await?,
            false => self.relay.apply(payload).await?,
        }
        self.continuity.applied(*seq, payload, by_replay);
        self.is_in_step = false;
        match by_replay {
            // The task waits for the next message of the replay after this.
            true => self.relay.tell().await?,
            false => {
                self.relay.note_published();
                self.known_at = Instant::now();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
