//! Following one publisher: what connections, gaps and restarts mean. The task around it decides when to connect and when to give up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas_client::Backoff;
use kvatlas_client::publish::PublisherError;

use super::continuity::{Continuity, Published, Replayed};
use super::frames::{Numbered, ReplayMessage};
use super::relay::Relay;
use super::sockets::{Replay, SocketError};
use super::stalls::StallWatch;

/// How engines are followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowOptions {
    /// How long a connection, and each message of a replay, may take.
    pub patience: Duration,
    /// How often the replay socket is asked while nothing seems to be missing: it shows that the engine lives, and what was lost last.
    pub poll_interval: Duration,
    /// Silence after which an engine is out of sight. Without a replay socket, only a broken connection shows that.
    pub silent_after: Duration,
    /// The pauses between attempts to connect.
    pub backoff: Backoff,
    /// Most names of blocks that are kept for one engine.
    pub blocks_max: usize,
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
        }
    }
}

impl FollowOptions {
    /// The longest time between two looks at an engine: after a longer one, this process has stood still, and the engine has not.
    pub(super) fn look_interval_max(&self) -> Duration {
        // What a busy machine may take is no stall.
        self.poll_interval + Duration::from_secs(1)
    }
}

/// Why a publisher cannot be followed just now.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    /// A socket of the engine.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The way to the daemons: without it there is no following.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
}

impl FollowError {
    /// Whether the engine broke a bound, so that its connection was ended.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, Self::Socket(error) if error.is_cut())
    }
}

/// What has been learnt from a replay.
enum Verified {
    /// All that the engine has published has been applied.
    Whole,
    /// It is another process; the replay has to be asked again, from its start.
    Stranger,
    /// Something in the middle of the answer is missing: what comes before it has been applied.
    Torn,
    /// The answer begins behind what has been applied. On an unbroken connection everything still comes.
    Beyond,
}

/// A replay socket that does not answer.
struct SilentReplay {
    /// When it is asked again.
    ask_at: Instant,
    /// Why, for people.
    error: String,
}

/// So many connections in a row have to fail at the replay socket before the engine is followed without it: while an engine starts, one socket
/// comes before the other.
const REPLAY_ATTEMPTS: u32 = 4;

/// How often the replay socket is asked for what does not come, before it is given up.
const ASK_ATTEMPTS: u32 = 3;
/// The pauses between questions to one that does not answer.
const REPLAY_BACKOFF: Backoff = Backoff {
    pause_min: Duration::from_secs(1),
    pause_max: Duration::from_secs(60),
};

/// Follows one publisher.
pub(super) struct Follower {
    relay: Relay,
    continuity: Continuity,
    /// Where the replay socket is; none where there is none.
    replay_endpoint: Option<String>,
    replay: Option<Replay>,
    options: FollowOptions,
    /// The replay socket where it does not answer. Meanwhile the engine is followed as one without.
    silent_replay: Option<SilentReplay>,
    /// How often in a row it has not answered a new connection, or, once it is silent, at all.
    replay_failures: u32,
    /// Whether the batches of this connection continue what has been applied. After a reconnect that has to be shown.
    is_verified: bool,
    stalls: StallWatch,
}

impl Follower {
    pub(super) fn new(
        relay: Relay,
        replay_endpoint: Option<String>,
        options: FollowOptions,
        stalls: StallWatch,
    ) -> Self {
        Self {
            relay,
            continuity: Continuity::default(),
            replay_endpoint,
            replay: None,
            silent_replay: None,
            replay_failures: 0,
            options,
            is_verified: false,
            stalls,
        }
    }

    pub(super) fn relay(&self) -> &Relay {
        &self.relay
    }

    pub(super) fn into_relay(self) -> Relay {
        self.relay
    }

    /// Whether something has been applied that daemons have not been told.
    pub(super) fn has_untold(&self) -> bool {
        self.relay.has_untold()
    }

    /// Tells it. To be called before this task waits for the engine.
    pub(super) async fn tell(&mut self) -> Result<(), FollowError> {
        Ok(self.relay.tell().await?)
    }

    /// Whether there is a replay socket to ask, which answers.
    pub(super) fn can_ask(&self) -> bool {
        self.replay_endpoint.is_some() && self.silent_replay.is_none()
    }

    /// What is wrong although the engine is followed.
    pub(super) fn trouble(&self) -> Option<&str> {
        let silent = self.silent_replay.as_ref().map(|silent| silent.error.as_str());
        silent.or_else(|| self.relay.trouble())
    }

    /// A connection stands, for the first time or again. Where the replay socket shows what has been missed, the engine is in sight
    /// afterwards; without one, its next batch has to show it.
    pub(super) async fn connected(&mut self) -> Result<(), FollowError> {
        self.continuity.reconnect();
        self.is_verified = false;
        self.replay = None;
        // It is out of sight until now.
        self.stalls.begin();
        if self.replay_endpoint.is_some() {
            return self.verify_if_possible().await;
        }
        Ok(())
    }

    /// Asks the replay socket. Where it does not answer, for long enough, the engine is followed as one without: what it publishes is worth more
    /// than nothing. The socket is asked again now and then, since a question keeps this task from reading the connection.
    async fn verify_if_possible(&mut self) -> Result<(), FollowError> {
        let error = match self.verify().await {
            Ok(()) => {
                (self.silent_replay, self.replay_failures) = (None, 0);
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
        if self.silent_replay.is_none() {
            tracing::warn!(endpoint, %error, "the replay socket does not answer: followed without it");
        }
        self.replay = None;
        self.silent_replay = Some(SilentReplay {
            ask_at: Instant::now() + REPLAY_BACKOFF.pause(self.replay_failures - (REPLAY_ATTEMPTS - 1)),
            error: format!("replay socket {endpoint}: {error}"),
        });
        Ok(())
    }

    /// To be called whenever this task has waited, before it publishes anything: after a stall the engine is out of sight until a look
    /// that begins after this. Returns whether there was one.
    pub(super) async fn awake(&mut self) -> Result<bool, FollowError> {
        let has_stalled = self.stalls.has_stalled();
        if has_stalled {
            self.lost().await?;
        }
        Ok(has_stalled)
    }

    /// The connection broke, or the engine is silent.
    pub(super) async fn lost(&mut self) -> Result<(), FollowError> {
        self.replay = None;
        Ok(self.relay.lost().await?)
    }

    /// Looks whether the engine lives and nothing is missing. Without a replay socket, a connection that stands has to do, while nothing
    /// waits in it.
    pub(super) async fn look(&mut self) -> Result<(), FollowError> {
        if self.can_ask() {
            return self.verify().await;
        }
        let is_due = |silent: &SilentReplay| silent.ask_at <= Instant::now();
        if self.silent_replay.as_ref().is_some_and(is_due) {
            self.verify_if_possible().await?;
            if self.can_ask() {
                return Ok(());
            }
        }
        self.stalls.caught_up();
        if self.is_verified {
            self.relay.seen(self.options.look_interval_max()).await?;
        }
        Ok(())
    }

    /// Asks the replay socket for what has been missed, and whether the process is still the same.
    pub(super) async fn verify(&mut self) -> Result<(), FollowError> {
        let look = self.stalls.look();
        match self.ask().await? {
            Verified::Whole | Verified::Torn => {}
            // The bridge is so far behind that only the connection can give it what it lacks. Another look shows when it has.
            Verified::Beyond if self.is_verified => return self.lost().await,
            Verified::Stranger | Verified::Beyond => {
                // Nothing is left of the old process; until the new one has told what it has, it is out of sight.
                self.relay.lost().await?;
                self.relay.restart(false).await?;
                self.continuity.restart();
                if let Verified::Stranger | Verified::Beyond = self.ask().await? {
                    // It has forgotten some of that meanwhile. Another look finds the rest.
                    return self.lost().await;
                }
            }
        }
        self.is_verified = true;
        if !self.stalls.is_news(look) {
            return Ok(());
        }
        Ok(self.relay.seen(self.options.look_interval_max()).await?)
    }

    /// Asks the replay socket, again while answers have holes: engines drop what a slow reader does not take.
    async fn ask(&mut self) -> Result<Verified, FollowError> {
        self.relay.tell().await?;
        let mut attempts = ASK_ATTEMPTS;
        loop {
            let from = self.continuity.replay_from();
            attempts -= 1;
            match self.ask_once(attempts == 0).await? {
                Verified::Torn if self.continuity.replay_from() > from => attempts = ASK_ATTEMPTS,
                Verified::Torn => {}
                verified => return Ok(verified),
            }
        }
    }

    /// One question to the replay socket. Behind a hole in the answer nothing is taken, unless `is_last`: then what is missing is lost.
    async fn ask_once(&mut self, is_last: bool) -> Result<Verified, FollowError> {
        let mut replay = match self.replay.take() {
            Some(replay) => replay,
            None => {
                let endpoint = self.replay_endpoint.as_deref().unwrap_or_default();
                let metrics = Arc::clone(self.relay.bridge_metrics());
                Replay::connect(endpoint, self.options.patience, metrics).await?
            }
        };
        self.relay.metrics().asked();
        replay.ask(self.continuity.replay_from()).await?;
        let mut is_first = true;
        let mut verified = Verified::Whole;
        loop {
            let message = replay.next().await?;
            self.awake().await?;
            let Numbered { seq, payload } = match message {
                ReplayMessage::End => break,
                ReplayMessage::Batch(numbered) => numbered,
            };
            // The rest of an answer that is no good is read all the same: the next answer comes behind it.
            if let Verified::Whole = verified {
                match self.continuity.replayed(seq, &payload, is_first) {
                    Replayed::Known | Replayed::Duplicate => {}
                    Replayed::Next => self.apply(seq, &payload, true).await?,
                    Replayed::Gap if !is_first && !is_last => verified = Verified::Torn,
                    Replayed::Gap => {
                        self.relay.lose().await?;
                        self.apply(seq, &payload, true).await?;
                    }
                    Replayed::Stranger => verified = Verified::Stranger,
                    Replayed::Beyond => verified = Verified::Beyond,
                }
            }
            is_first = false;
        }
        // Only a socket that has answered to the end can be asked again.
        self.replay = Some(replay);
        if is_first && !self.continuity.fits_nothing() {
            // Another process, which has published nothing. On an unbroken connection: one that keeps nothing to replay.
            return Ok(match self.is_verified {
                true => Verified::Beyond,
                false => Verified::Stranger,
            });
        }
        Ok(verified)
    }

    /// Takes a batch that was published on the current connection.
    pub(super) async fn published(&mut self, numbered: Numbered) -> Result<(), FollowError> {
        let Numbered { seq, payload } = numbered;
        if !self.is_verified {
            return self.first_of_connection(seq, &payload).await;
        }
        match self.continuity.published(seq) {
            Published::Next => self.apply(seq, &payload, false).await,
            Published::Duplicate => Ok(()),
            Published::Gap if self.can_ask() => {
                self.verify().await?;
                match self.continuity.published_again(seq) {
                    Published::Next => self.apply(seq, &payload, false).await,
                    Published::Duplicate | Published::Backwards => Ok(()),
                    Published::Gap => {
                        self.relay.lose().await?;
                        self.apply(seq, &payload, false).await
                    }
                }
            }
            Published::Gap => {
                self.relay.lose().await?;
                self.apply(seq, &payload, false).await
            }
            // Another process behind the same connection: a proxy's, or the numbers of one that counts anew.
            Published::Backwards if self.can_ask() => {
                self.verify().await?;
                match self.continuity.published_again(seq) {
                    Published::Next => self.apply(seq, &payload, false).await,
                    _ => Ok(()),
                }
            }
            Published::Backwards => self.begin_with(seq, &payload).await,
        }
    }

    /// The first batch after a reconnect, of an engine without a replay socket: nobody can say what came before it, nor whether it is
    /// still the same process. Only a count that begins anew is certain.
    async fn first_of_connection(&mut self, seq: u64, payload: &[u8]) -> Result<(), FollowError> {
        self.is_verified = true;
        let has_begun = self.continuity.has_begun();
        match self.continuity.published(seq) {
            Published::Next => {
                if has_begun {
                    // What it had is worth more than nothing, and is in doubt.
                    self.relay.lose().await?;
                }
                self.apply(seq, payload, false).await?;
            }
            _ => self.begin_with(seq, payload).await?,
        }
        if self.stalls.is_behind() {
            return Ok(());
        }
        Ok(self.relay.seen(self.options.look_interval_max()).await?)
    }

    /// Begins with another process, whose batch `seq` is the first that came.
    async fn begin_with(&mut self, seq: u64, payload: &[u8]) -> Result<(), FollowError> {
        self.relay.restart(seq > 0).await?;
        self.continuity.restart();
        if seq > 0 {
            self.relay.lose().await?;
        }
        self.apply(seq, payload, false).await
    }

    async fn apply(&mut self, seq: u64, payload: &[u8], by_replay: bool) -> Result<(), FollowError> {
        self.relay.apply(payload).await?;
        self.continuity.applied(seq, payload, by_replay);
        if by_replay {
            // The next message of the replay is waited for.
            self.relay.tell().await?;
        }
        Ok(())
    }
}
