//! Following one publisher: what connections, gaps and restarts mean. The task around it decides when to connect and when to give up.

use std::time::{Duration, Instant};

use kvatlas_client::Backoff;
use kvatlas_client::publish::PublisherError;
use kvatlas_engines::Reason;

use kvatlas_telemetry::LogGate;

use super::continuity::{Continuity, Heard, Published};
use super::dynamo::AnswerPorts;
use super::frames::Numbered;
use super::relay::Relay;
use super::sockets::{Replay, SocketError};
use super::stalls::StallWatch;
use super::state::KeptEngine;
use super::topics::Topics;

mod asking;
mod identity;
mod trust;

use asking::Verified;
use identity::Identity;

/// How engines are followed.
#[derive(Debug, Clone)]
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
    /// Silence after which another process at an engine's sockets is not taken for that engine any more.
    pub give_up_after: Duration,
    /// The ports at which workers of Dynamo answer.
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
            // As long as daemons keep a holder of whom nothing is heard.
            give_up_after: Duration::from_secs(600),
            answer_ports: AnswerPorts::default(),
        }
    }
}

impl FollowOptions {
    /// The longest time between two looks at an engine: after a longer one, this process has stood still, and the engine has not.
    pub(super) fn look_interval_max(&self) -> Duration {
        self.poll_interval + Duration::from_secs(1)
    }

    /// The time from which on a pause of this process is a stall. Daemons miss heartbeats after three seconds, of which one may have passed
    /// before it: whoever was stale in one of them must not be believed again before a look.
    pub(super) fn pause_max(&self) -> Duration {
        // What a busy machine may take is no stall.
        self.poll_interval + Duration::from_millis(500)
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

/// A replay socket that does not answer, or does not answer as this engine would.
struct UselessReplay {
    /// When it is asked again.
    ask_at: Instant,
    /// Why, for people.
    error: String,
    /// Whether it contradicts what the engine publishes: then it has to agree with that before it is believed again.
    is_contradicted: bool,
}

static USELESS_GATE: LogGate = LogGate::new();

/// So many connections in a row have to fail at the replay socket before the engine is followed without it: while an engine starts, one socket
/// comes before the other.
const REPLAY_ATTEMPTS: u32 = 4;

/// The pauses between questions to one that does not answer.
const REPLAY_BACKOFF: Backoff = Backoff {
    pause_min: Duration::from_secs(1),
    pause_max: Duration::from_secs(60),
};

/// Follows one publisher.
pub(super) struct Follower {
    relay: Relay,
    continuity: Continuity,
    topics: Topics,
    /// The address of the replay socket, if there is one.
    replay_endpoint: Option<String>,
    replay: Option<Replay>,
    options: FollowOptions,
    /// The replay socket where it is of no use. Meanwhile the engine is followed as one without.
    useless_replay: Option<UselessReplay>,
    /// How often in a row it has not answered a new connection, or, once it is useless, at all.
    replay_failures: u32,
    /// Whether the batches of this connection continue what has been applied. After a reconnect that has to be shown.
    is_verified: bool,
    /// Whether the replay socket has given the same bytes as this connection for the same number.
    is_proven: bool,
    /// Since when looks have found batches that are not published on this connection; none where what came last was published.
    unheard_since: Option<Instant>,
    /// Whether that has lasted for too long.
    is_unheard: bool,
    /// When it was last certain that nothing is missing.
    known_at: Instant,
    stalls: StallWatch,
    /// In words, that a replay began too late.
    short_replay: Option<String>,
    identity: Identity,
    /// In words, that another process is not taken for the engine.
    stranger: Option<String>,
}

/// The history of an engine from before, beside its blocks.
pub(super) struct HeardBefore {
    pub(super) continuity: Continuity,
    pub(super) topic: Option<Vec<u8>>,
}

impl Follower {
    /// Follows the publisher of `topic`, with what comes first of a topic; empty for all.
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
            useless_replay: None,
            replay_failures: 0,
            options,
            is_verified: false,
            is_proven: false,
            unheard_since: None,
            is_unheard: false,
            known_at: Instant::now(),
            stalls,
            short_replay: None,
            identity: Identity::Known,
            stranger: None,
        }
    }

    /// Goes on behind what was heard before, and is what its relay knows. The engine has to show that it is still the same process.
    pub(super) fn go_on(&mut self, before: HeardBefore) {
        self.continuity = before.continuity;
        self.topics.remember(before.topic);
    }

    /// How often something has changed that is worth keeping.
    pub(super) fn changes(&self) -> u64 {
        self.continuity.changes()
    }

    /// All that is known of the engine, whose blocks are translated with `cache`.
    pub(super) async fn keep(&mut self, cache: &str) -> Result<KeptEngine, FollowError> {
        let (blocks, rank, epoch) = self.relay.save().await?;
        Ok(KeptEngine {
            cache: cache.to_owned(),
            epoch,
            rank,
            topic: self.topics.own(),
            continuity: self.continuity.clone(),
            blocks,
        })
    }

    /// Waits until all that was told has left.
    pub(super) async fn flush(&mut self) -> Result<(), FollowError> {
        Ok(self.relay.flush().await?)
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
        self.replay_endpoint.is_some() && self.useless_replay.is_none()
    }

    /// Whether a look is due at once: nothing shows yet that the replay socket is of the engine that publishes on this connection.
    pub(super) fn wants_proof(&self) -> bool {
        self.can_ask() && !self.is_proven && self.continuity.is_heard()
    }

    /// The trouble that there is although the engine is followed.
    pub(super) fn trouble(&self) -> Option<&str> {
        const UNHEARD: &str =
            "the replay socket has batches that the engine does not publish on its endpoint";
        let useless = self.useless_replay.as_ref().map(|useless| useless.error.as_str());
        let unheard = self.is_unheard.then_some(UNHEARD);
        let doubt = self.relay.doubt();
        let short = self.short_replay.as_deref();
        let short = short.filter(|_| doubt == Some(Reason::LostBatches));
        let stranger = self.stranger.as_deref();
        let stranger = stranger.filter(|_| doubt == Some(Reason::OtherEngine));
        let certain = useless.or(unheard).or(short).or(stranger);
        certain.or_else(|| self.relay.trouble())
    }

    /// Tells daemons what the trouble is: why the engine is `out_of_sight`, or what there is although it is followed.
    pub(super) async fn explain(&mut self, out_of_sight: Option<&str>) -> Result<(), FollowError> {
        let trouble = out_of_sight.or_else(|| self.trouble()).map(str::to_owned);
        Ok(self.relay.explain(trouble.as_deref()).await?)
    }

    /// A connection stands, for the first time or again. Where the replay socket shows what has been missed, the engine is in sight
    /// afterwards; without one, its next batch has to show it.
    pub(super) async fn connected(&mut self) -> Result<(), FollowError> {
        self.continuity.reconnect();
        (self.is_verified, self.is_proven) = (false, false);
        (self.unheard_since, self.is_unheard) = (None, false);
        self.replay = None;
        // It is out of sight until now.
        self.stalls.begin();
        match &mut self.useless_replay {
            // What was published contradicted it: the next batch may show that it is right now.
            Some(useless) if useless.is_contradicted && self.continuity.last().is_some() => {
                useless.ask_at = Instant::now();
                Ok(())
            }
            _ if self.replay_endpoint.is_some() => self.verify_if_possible().await,
            _ => Ok(()),
        }
    }

    /// Asks the replay socket. Where it does not answer, for long enough, the engine is followed as one without: what it publishes is worth more
    /// than nothing. The socket is asked again now and then, since a question keeps this task from reading the connection.
    async fn verify_if_possible(&mut self) -> Result<(), FollowError> {
        self.useless_replay = None;
        let error = match self.verify().await {
            Ok(()) => {
                self.replay_failures = 0;
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
        if self.replay_failures == REPLAY_ATTEMPTS
            && let Some(suppressed) = USELESS_GATE.admit()
        {
            tracing::warn!(
                endpoint,
                %error,
                suppressed,
                "the replay socket does not answer: followed without it"
            );
        }
        self.replay = None;
        self.useless_replay = Some(UselessReplay {
            ask_at: Instant::now() + REPLAY_BACKOFF.pause(self.replay_failures - (REPLAY_ATTEMPTS - 1)),
            error: format!("replay socket {endpoint}: {error}"),
            is_contradicted: false,
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
        let is_due = |useless: &UselessReplay| !useless.is_contradicted && useless.ask_at <= Instant::now();
        if self.useless_replay.as_ref().is_some_and(is_due) {
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
        let (was_verified, before) = (self.is_verified, self.continuity.last());
        match self.ask().await? {
            Verified::Whole | Verified::Torn => {}
            // The bridge is so far behind that only the connection can give it what it lacks. Another look shows when it has.
            Verified::Beyond if was_verified => return self.lost().await,
            Verified::Stranger if was_verified => return self.settle_contradiction().await,
            behind @ (Verified::Stranger | Verified::Beyond) => {
                // Nothing is left of the old process; until the new one has told what it has, it is out of sight.
                self.relay.lost().await?;
                match behind {
                    Verified::Beyond => self.relay.restart_behind_a_gap().await?,
                    _ => {
                        self.short_replay = None;
                        self.restart(None).await?;
                    }
                }
                self.continuity.restart();
                if !self.ask_all().await? {
                    // It has forgotten some of that meanwhile. Another look finds the rest.
                    return self.lost().await;
                }
            }
        }
        if !was_verified {
            self.settle_identity().await?;
        }
        self.is_verified = true;
        self.is_proven = self.continuity.is_heard();
        self.known_at = Instant::now();
        if was_verified && self.continuity.last() > before {
            // One that was the last before a silence may be lost, and one that was just published may be on its way.
            let since = *self.unheard_since.get_or_insert(self.known_at);
            self.is_unheard |= since.elapsed() >= self.options.silent_after / 2;
        }
        if self.is_unheard {
            return self.lost().await;
        }
        if !self.stalls.is_news(look) {
            return Ok(());
        }
        Ok(self.relay.seen(self.options.look_interval_max()).await?)
    }

    /// Takes a batch that was published on the current connection.
    pub(super) async fn published(&mut self, numbered: Numbered) -> Result<(), FollowError> {
        match self.is_verified {
            true => self.next_of_connection(&numbered).await?,
            false => self.first_of_connection(&numbered).await?,
        }
        (self.unheard_since, self.is_unheard) = (None, false);
        let is_due = |useless: &UselessReplay| useless.is_contradicted && useless.ask_at <= Instant::now();
        match self.useless_replay.as_ref().is_some_and(is_due) {
            true => self.try_to_believe(&numbered).await,
            false => Ok(()),
        }
    }

    async fn next_of_connection(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        let Numbered { seq, payload, .. } = numbered;
        match self.continuity.published(*seq, payload) {
            Published::Next => self.apply(numbered, false).await,
            Published::Duplicate => {
                self.is_proven = true;
                // The replay socket may not have told the topic.
                match self.topics.is_other(&numbered.topic) {
                    true => Ok(self.relay.refuse(Reason::OtherEngine).await?),
                    false => Ok(()),
                }
            }
            Published::Forgotten if !self.is_proven && !self.agrees(Heard::new(*seq, payload)).await? => {
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
            // Another process behind the same connection, or a replay socket of another one.
            Published::Other if self.can_ask() => self.distrust(Some(numbered)).await,
            Published::Other => self.begin_with(numbered).await,
        }
    }

    /// Takes a batch behind a gap, about which the replay socket was asked.
    async fn after_gap(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        if !self.is_verified {
            return self.begin_with(numbered).await;
        }
        match self.continuity.published_again(numbered.seq, &numbered.payload) {
            Published::Next => self.apply(numbered, false).await,
            Published::Duplicate | Published::Forgotten => Ok(()),
            // The replay socket has given everything, and not what was published before the question.
            Published::Gap if self.continuity.is_confirmed() => self.distrust(Some(numbered)).await,
            Published::Gap => {
                self.relay.lose(Reason::LostBatches).await?;
                self.apply(numbered, false).await
            }
            Published::Other => self.distrust(Some(numbered)).await,
        }
    }

    /// The first batch after a reconnect, of an engine without a replay socket: nobody can say what came before it, nor whether it is
    /// still the same process. Only a count that begins anew is certain.
    async fn first_of_connection(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        self.is_verified = true;
        let has_begun = self.continuity.last().is_some();
        match self.continuity.published(numbered.seq, &numbered.payload) {
            Published::Next => {
                if has_begun {
                    // What it had is worth more than nothing, and is in doubt.
                    self.relay.lose(Reason::LostBatches).await?;
                }
                self.settle_identity().await?;
                self.apply(numbered, false).await?;
            }
            _ => self.begin_with(numbered).await?,
        }
        self.seen_unless_behind().await
    }

    /// The engine is in sight, unless what it said during a stall may still wait.
    async fn seen_unless_behind(&mut self) -> Result<(), FollowError> {
        match self.stalls.is_behind() {
            true => Ok(()),
            false => Ok(self.relay.seen(self.options.look_interval_max()).await?),
        }
    }

    /// Begins with another process, whose batch `numbered` is the first that came.
    async fn begin_with(&mut self, numbered: &Numbered) -> Result<(), FollowError> {
        self.is_verified = true;
        let is_first = self.continuity.is_first(numbered.seq);
        let doubt = (!is_first).then_some(Reason::LostBatches);
        self.restart(doubt).await?;
        self.continuity.restart();
        if let Some(doubt) = doubt {
            self.relay.lose(doubt).await?;
        }
        self.settle_identity().await?;
        self.apply(numbered, false).await
    }

    async fn apply(&mut self, numbered: &Numbered, by_replay: bool) -> Result<(), FollowError> {
        let Numbered { seq, payload, topic } = numbered;
        match self.topics.is_other(topic) {
            true => self.relay.refuse(Reason::OtherEngine).await?,
            false => self.relay.apply(payload).await?,
        }
        self.continuity.applied(*seq, payload, by_replay);
        match by_replay {
            // The next message of the replay is waited for.
            true => self.relay.tell().await?,
            false => self.known_at = Instant::now(),
        }
        Ok(())
    }
}
