//! Task of one engine: connects, follows, and connects again, until it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::NewEngine;

use super::follower::{FollowError, FollowOptions, Follower};
use super::frames::Numbered;
use super::progress::{SharedProgress, log_untold};
use super::server::OriginServer;
use super::sockets::Subscription;
use super::state::{Keeper, cache_of};

/// Event that wakes the task of an engine.
enum Woken {
    /// A batch has come.
    Published(Numbered),
    /// No message waits to be read, so the batches read so far are reported together.
    Idle,
    /// The timer has ticked. The engine is checked now, unless a batch has just come.
    Tick,
}

/// Task that follows one engine.
pub(super) struct EngineTask {
    pub(super) engine: NewEngine,
    /// Server that reported the engine; `None` if no server did. After each new connection, the server has to report the same
    /// engine again.
    pub(super) origin: Option<OriginServer>,
    pub(super) follower: Follower,
    pub(super) options: FollowOptions,
    pub(super) progress: SharedProgress,
    /// Token that ends the task. Unless `says_goodbye` is set, daemons keep the holder until it is stale.
    pub(super) stop: CancellationToken,
    /// Whether daemons are told to forget the holder at the end.
    pub(super) says_goodbye: Arc<AtomicBool>,
    /// Keeper of the engine's state; `None` if no state is kept.
    pub(super) keeper: Option<Keeper>,
    /// Time since which the engine is out of sight (silent, or with batches missing); `None` while it is in sight.
    pub(super) unseen_since: Option<Instant>,
    /// Name of the engine's process, as the server told it after the last connection; `None` if the server tells none.
    pub(super) process: Option<String>,
}

impl EngineTask {
    pub(super) async fn run(mut self) {
        let stop = self.stop.clone();
        let mut failures = 0;
        // Until the engine is connected, nothing is known of it.
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
                // After a broken bound, the count of failures continues, although the connection had been made.
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

    /// Ends the reports about the engine, and saves its known state. With a goodbye, daemons forget the holder. Without
    /// it, they are told that the holder is out of sight, because nobody watches the engine any more.
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

    /// Returns the keeper that saves the engine's state; `None` if no state is saved, or another bridge saves it.
    fn own_keeper(&mut self) -> Option<&mut Keeper> {
        let speaks = self.follower.relay().speaks();
        self.keeper
            .as_mut()
            .filter(|keeper| speaks || !keeper.is_shared())
    }

    /// Saves the engine's known state for the last time. The earlier file stays if the stop came in the middle of a
    /// step.
    async fn keep_last(&mut self) -> Result<(), FollowError> {
        let changes = self.follower.changes();
        let Some(keeper) = self.own_keeper() else {
            return Ok(());
        };
        let Some(turn) = keeper.last_turn(changes).await else {
            return Ok(());
        };
        let kept = self.follower.keep(&cache_of(&self.engine)).await?;
        if let (Some(keeper), Some(kept)) = (&mut self.keeper, kept) {
            keeper.write(turn, changes, kept);
            keeper.wait().await;
        }
        Ok(())
    }

    /// Saves the engine's known state, if it is time for the next save.
    async fn keep_if_due(&mut self) -> Result<(), FollowError> {
        let changes = self.follower.changes();
        let Some(turn) = self.own_keeper().and_then(|keeper| keeper.turn(changes)) else {
            return Ok(());
        };
        let kept = self.follower.keep(&cache_of(&self.engine)).await?;
        if let (Some(keeper), Some(kept)) = (&mut self.keeper, kept) {
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
        self.follower.relay().metrics().connections.increment(1);
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
        // `heard_last` is the time of the last batch. `published_at` is the same time, or `None` if the engine was
        // checked after that batch.
        let (mut heard_last, mut published_at): (Option<Instant>, Option<Instant>) = (None, None);
        let interval = self.options.poll_interval;
        let mut poll = tokio::time::interval(interval);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick comes immediately. Its look fetches the batches that the engine published before it knew of
        // the subscription.
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
                    // Without a replay socket, the next look has to wait until the batches that came during the stall
                    // have been read.
                    false => poll.reset(),
                }
            }
            match woken {
                Woken::Published(numbered) => {
                    self.follower.published(numbered).await?;
                    let after_silence = heard_last.is_none_or(|at: Instant| at.elapsed() >= interval);
                    heard_at = Instant::now();
                    (heard_last, published_at) = (Some(heard_at), Some(heard_at));
                    // After a silence, the engine may be another process. This look finds that out. Otherwise, a stream
                    // of batches could delay the look.
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
                // The tick came only because the process stood still.
                Woken::Tick if has_stalled => {}
                Woken::Tick => {
                    let due = published_at.take().map(|at| at + interval);
                    let may_wait = self.follower.relay().is_in_sight() && !self.follower.wants_look();
                    if let Some(due) = due.filter(|due| may_wait && *due > Instant::now()) {
                        poll.reset_at(due.into());
                        continue;
                    }
                    self.look(&mut heard_at).await?;
                }
            }
        }
    }

    /// Checks that the engine lives and no batch is missing. Puts the engine out of sight (batches may be missing) if its last
    /// message came too long ago. `heard_at` is the time of that message.
    async fn look(&mut self, heard_at: &mut Instant) -> Result<(), FollowError> {
        match self.follower.look().await {
            Ok(()) => {
                *heard_at = Instant::now();
                self.note_followed().await?;
                Ok(())
            }
            Err(error @ FollowError::Publisher(_)) => Err(error),
            Err(error) if heard_at.elapsed() >= self.options.silent_after => Err(error),
            // One question may fail while the connection is open and its batches continue the count.
            Err(error) => {
                tracing::debug!(engine = %self.engine.key, %error, "a replay failed");
                Ok(())
            }
        }
    }

    /// Returns the time for which the engine has been out of sight, if that time is so long that another process no
    /// longer counts as the engine. Returns `None` in three cases:
    ///
    /// - The engine is in sight.
    /// - The time is below the limit (`give_up_after`).
    /// - The engine's server confirms that the process counts as the same engine.
    fn long_silence(&self) -> Option<Duration> {
        let silence = self.unseen_since?.elapsed();
        let is_long = silence >= self.options.give_up_after;
        let is_vouched_for = self.origin.as_ref().is_some_and(OriginServer::vouches);
        (is_long && !is_vouched_for).then_some(silence)
    }

    /// Notes the name that the server gives the engine's process. Returns whether the process is another one than
    /// before.
    fn is_replaced(&mut self) -> bool {
        let told = self.origin.as_ref().and_then(OriginServer::process);
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
        let trouble = self.follower.trouble().map(str::to_owned);
        let is_exact = self.follower.relay().is_exact();
        self.progress.followed(&self.engine, is_exact, trouble.as_deref());
        self.follower.explain(trouble.as_deref()).await
    }
}
