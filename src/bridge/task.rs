//! The task of one engine: connects, follows, and connects again, until it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::NewEngine;

use super::follower::{FollowError, FollowOptions, Follower};
use super::frames::Numbered;
use super::progress::{SharedProgress, log_untold};
use super::server::Origin;
use super::sockets::Subscription;
use super::state::{Keeper, cache_of};

/// Why the task of an engine goes on.
enum Woken {
    /// A batch has come.
    Published(Numbered),
    /// Nothing waits to be read: what was read is told together.
    Idle,
    /// The time to look has come, unless something has arrived meanwhile.
    Tick,
}

/// Follows one engine.
pub(super) struct EngineTask {
    pub(super) engine: NewEngine,
    /// The server that has told of it, if one has: it has to tell the same behind each new connection.
    pub(super) origin: Option<Origin>,
    pub(super) follower: Follower,
    pub(super) options: FollowOptions,
    pub(super) progress: SharedProgress,
    /// Ends the task; the holder stays as it is, until it is stale.
    pub(super) stop: CancellationToken,
    /// Whether daemons are told to forget the holder at the end.
    pub(super) says_goodbye: Arc<AtomicBool>,
    /// The keeper of what is known, if it is kept.
    pub(super) keeper: Option<Keeper>,
    /// Since when the engine is out of sight; none while it is in sight.
    pub(super) unseen_since: Option<Instant>,
    /// The name of the engine's process, as its server told it behind the last connection; none where it tells none.
    pub(super) process: Option<String>,
}

impl EngineTask {
    pub(super) async fn run(mut self) {
        let stop = self.stop.clone();
        let mut failures = 0;
        // Until it is connected, nothing is known of it.
        if self.follower.lost().await.is_err() {
            return;
        }
        loop {
            let failed_before = failures;
            let followed = stop
                .run_until_cancelled(Box::pin(self.follow(&mut failures)))
                .await;
            let Some(error) = followed else {
                break;
            };
            if let FollowError::Publisher(error) = &error {
                return self.progress.ended(&self.engine, error);
            }
            self.note_lost(&error);
            let trouble = self.progress.get().last_error;
            let told = async {
                self.follower.lost().await?;
                self.follower.explain(trouble.as_deref()).await
            };
            if told.await.is_err() {
                return;
            }
            if error.is_cut() {
                // That it could be connected to is no reason to come back sooner.
                failures = failures.max(failed_before);
            }
            failures = failures.saturating_add(1);
            let pause = tokio::time::sleep(self.options.backoff.pause(failures));
            if stop.run_until_cancelled(pause).await.is_none() {
                break;
            }
        }
        let engine = self.engine.clone();
        if let Err(error) = self.end().await {
            log_untold(&engine, &error);
        }
    }

    /// Says that nobody sees any more what the engine does, or that there is none, and keeps what is known.
    async fn end(mut self) -> Result<(), FollowError> {
        let says_goodbye = self.says_goodbye.load(Ordering::Acquire);
        if !says_goodbye {
            self.follower.lost().await?;
            self.follower.flush().await?;
        }
        self.keep_last().await?;
        match says_goodbye {
            true => Ok(self.follower.into_relay().say_goodbye().await?),
            false => Ok(()),
        }
    }

    async fn keep_last(&mut self) -> Result<(), FollowError> {
        let Some(keeper) = &mut self.keeper else {
            return Ok(());
        };
        let changes = self.follower.changes();
        if let Some(turn) = keeper.last_turn(changes).await {
            let kept = self.follower.keep(&cache_of(&self.engine)).await?;
            keeper.write(turn, changes, kept);
            keeper.wait().await;
        }
        Ok(())
    }

    /// Keeps what is known, if it is time.
    async fn keep_if_due(&mut self) -> Result<(), FollowError> {
        let Some(keeper) = &mut self.keeper else {
            return Ok(());
        };
        let changes = self.follower.changes();
        if let Some(turn) = keeper.turn(changes) {
            let kept = self.follower.keep(&cache_of(&self.engine)).await?;
            keeper.write(turn, changes, kept);
        }
        Ok(())
    }

    /// Follows one connection to its end, and returns why it ended.
    async fn follow(&mut self, failures: &mut u32) -> FollowError {
        match self.follow_connection(failures).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn follow_connection(
        &mut self,
        failures: &mut u32,
    ) -> Result<std::convert::Infallible, FollowError> {
        let NewEngine { endpoint, topic, .. } = &self.engine;
        let metrics = Arc::clone(self.follower.relay().bridge_metrics());
        let patience = self.options.patience;
        let mut subscription = Subscription::connect(endpoint, topic, patience, metrics).await?;
        if let Some(origin) = &self.origin {
            origin.confirmed().await;
        }
        self.follower.relay().metrics().connected();
        if let Some(silence) = self.long_silence() {
            self.follower.was_long_silent(silence);
        }
        if self.is_replaced() {
            self.follower.was_replaced().await?;
        }
        self.follower.connected().await?;
        (self.unseen_since, *failures) = (None, 0);
        self.note_followed().await?;
        let mut heard_at = Instant::now();
        // When a batch came last, and the same if that was since the last look.
        let (mut heard_last, mut published_at): (Option<Instant>, Option<Instant>) = (None, None);
        let interval = self.options.poll_interval;
        let mut poll = tokio::time::interval(interval);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick is due at once: it shows what was published before the engine knew of the subscription.
        loop {
            let woken = tokio::select! {
                biased;
                numbered = subscription.next() => Woken::Published(numbered?),
                () = std::future::ready(()), if self.follower.has_untold() => Woken::Idle,
                _ = poll.tick() => Woken::Tick,
            };
            let has_stalled = self.follower.awake().await?;
            self.keep_if_due().await?;
            if has_stalled {
                match self.follower.can_ask() {
                    true => poll.reset_immediately(),
                    // A connection that stands shows nothing before what waits in it has been read.
                    false => poll.reset(),
                }
            }
            match woken {
                Woken::Published(numbered) => {
                    self.follower.published(numbered).await?;
                    let after_silence = heard_last.is_none_or(|at: Instant| at.elapsed() >= interval);
                    heard_at = Instant::now();
                    (heard_last, published_at) = (Some(heard_at), Some(heard_at));
                    // Whoever may be another one since shows that at once, however much comes behind.
                    if after_silence && self.follower.can_ask() {
                        self.look(&mut heard_at).await?;
                        published_at = None;
                    } else if !self.follower.has_untold() {
                        self.note_followed().await?;
                    }
                }
                Woken::Idle => {
                    self.follower.tell().await?;
                    self.note_followed().await?;
                }
                // This tick was due during the stall.
                Woken::Tick if has_stalled => {}
                Woken::Tick => {
                    let due = published_at.take().map(|at| at + interval);
                    let may_wait = self.follower.relay().is_in_sight() && !self.follower.wants_proof();
                    if let Some(due) = due.filter(|due| may_wait && *due > Instant::now()) {
                        poll.reset_at(due.into());
                        continue;
                    }
                    self.look(&mut heard_at).await?;
                }
            }
        }
    }

    /// Looks whether the engine lives and nothing is missing. An engine that was last heard at `heard_at` is out of sight after too long a
    /// silence.
    async fn look(&mut self, heard_at: &mut Instant) -> Result<(), FollowError> {
        match self.follower.look().await {
            Ok(()) => {
                *heard_at = Instant::now();
                self.note_followed().await?;
                Ok(())
            }
            Err(error @ FollowError::Publisher(_)) => Err(error),
            Err(error) if heard_at.elapsed() >= self.options.silent_after => Err(error),
            // One question may fail; the connection stands, and continues the count.
            Err(error) => {
                tracing::debug!(engine = %self.engine.key, %error, "a replay failed");
                Ok(())
            }
        }
    }

    /// The time for which the engine has been out of sight, where that is too long for another process to be taken for it, and nobody vouches
    /// for that.
    fn long_silence(&self) -> Option<Duration> {
        let silence = self.unseen_since?.elapsed();
        let is_long = silence >= self.options.give_up_after;
        let is_vouched_for = self.origin.as_ref().is_some_and(Origin::vouches);
        (is_long && !is_vouched_for).then_some(silence)
    }

    /// Takes note of which process the server tells of. Returns whether it is another one than before.
    fn is_replaced(&mut self) -> bool {
        let told = self.origin.as_ref().and_then(Origin::process);
        let before = std::mem::replace(&mut self.process, told);
        before.is_some() && self.process.is_some() && before != self.process
    }

    fn note_lost(&mut self, error: &FollowError) {
        self.unseen_since.get_or_insert_with(Instant::now);
        match &self.origin {
            None => self.progress.out_of_sight(&self.engine, error),
            Some(origin) => {
                self.progress.out_of_sight(&self.engine, &origin.explain(error));
                origin.ask_again();
            }
        }
    }

    async fn note_followed(&mut self) -> Result<(), FollowError> {
        self.progress.followed(
            &self.engine,
            self.follower.relay().is_exact(),
            self.follower.trouble(),
        );
        self.follower.explain(None).await
    }
}
