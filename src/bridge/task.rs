//! Engine with sockets, as a source of events: its connection is followed, and its known state is saved.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas_process::registry::NewEngine;
use kvatlas_telemetry::log_gated;

use super::follower::{FollowError, Follower};
use super::frames::Numbered;
use super::relay::LOST_TOLD_FOR;
use super::server::OriginServer;
use super::sockets::Subscription;
use super::sources::{FollowedSource, FollowedSourceError, SourceTask};
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

/// Engine with sockets, as a source of the events of one holder.
pub(super) struct SocketEvents {
    follower: Follower,
    /// Keeper of the engine's state; `None` if no state is kept.
    keeper: Option<Keeper>,
    /// Time since which the engine is out of sight (silent, or with batches missing), by the bridge's clock; `None` while it
    /// is in sight.
    unseen_since: Option<Instant>,
    /// Name of the engine's process, as the server told it after the last connection; `None` if the server tells none.
    process: Option<String>,
}

impl FollowedSource for SocketEvents {
    async fn follow(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowedSourceError> {
        Ok(self.follow_connection(task, failures).await?)
    }

    async fn disconnected(&mut self, task: &SourceTask) -> Result<(), FollowedSourceError> {
        // The bridge may have stood still until now, and the engine was not watched meanwhile.
        self.unseen_since
            .get_or_insert_with(|| self.follower.watched_until());
        self.follower.lost().await?;
        let trouble = task.progress.get().last_error;
        Ok(self.follower.explain(trouble.as_deref()).await?)
    }

    async fn told_alive(&mut self) -> Result<(), FollowedSourceError> {
        Ok(self.follower.told_alive().await?)
    }

    /// Ends the reports about the engine, and saves its known state. With a goodbye, daemons forget the holder. Without
    /// it, they are told that the holder is out of sight, because nobody watches the engine any more.
    async fn end(mut self, task: &SourceTask, says_goodbye: bool) -> Result<(), FollowedSourceError> {
        if !says_goodbye {
            self.follower.lost().await?;
            self.follower.flush().await?;
        }
        self.keep_last(&task.engine).await?;
        let relay = self.follower.into_relay();
        match says_goodbye {
            true => Ok(relay.say_goodbye().await?),
            false => {
                relay.note_end();
                Ok(())
            }
        }
    }
}

impl SocketEvents {
    /// Makes the source of an engine to which the bridge has not connected yet.
    pub(super) fn new(follower: Follower, keeper: Option<Keeper>) -> Self {
        Self {
            unseen_since: Some(follower.watched_until()),
            follower,
            keeper,
            process: None,
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
    async fn keep_last(&mut self, engine: &NewEngine) -> Result<(), FollowError> {
        let changes = self.follower.changes();
        let Some(keeper) = self.own_keeper() else {
            return Ok(());
        };
        let Some(turn) = keeper.last_turn(changes).await else {
            return Ok(());
        };
        let kept = self.follower.keep(&cache_of(engine)).await?;
        if let (Some(keeper), Some(kept)) = (&mut self.keeper, kept) {
            keeper.write(turn, changes, kept);
            keeper.wait().await;
        }
        Ok(())
    }

    /// Decides about an earlier bridge's file that could not be read. If all of the engine's blocks are known without it,
    /// it may be written over. Otherwise the engine is begun again once the file can be read and the replay socket has said
    /// that no more would be lost by that.
    async fn settle_unread(&mut self, engine: &NewEngine) -> Result<(), FollowError> {
        let Some(keeper) = self.keeper.as_mut().filter(|keeper| keeper.is_unread()) else {
            return Ok(());
        };
        if self.follower.relay().is_exact() {
            keeper.write_over();
            return Ok(());
        }
        let Some(last) = keeper.read_late(&cache_of(engine)) else {
            return Ok(());
        };
        match self.follower.can_go_on_after(last).await? {
            Some(true) => {
                // The end of this source must not write over the file.
                self.keeper = None;
                Err(FollowError::BeginAgain)
            }
            Some(false) => {
                log_gated!(
                    info "what was kept of an engine comes too late to be of use" up to 64;
                    worker = %engine.key.instance, last = last.seq
                );
                keeper.write_over();
                Ok(())
            }
            // The socket is asked again after a pause, and the file stays until then.
            None => Ok(()),
        }
    }

    /// Saves the engine's known state, if it is time for the next save.
    async fn keep_if_due(&mut self, engine: &NewEngine) -> Result<(), FollowError> {
        self.settle_unread(engine).await?;
        let changes = self.follower.changes();
        let Some(turn) = self.own_keeper().and_then(|keeper| keeper.turn(changes)) else {
            return Ok(());
        };
        let kept = self.follower.keep(&cache_of(engine)).await?;
        if let (Some(keeper), Some(kept)) = (&mut self.keeper, kept) {
            keeper.write(turn, changes, kept);
        }
        Ok(())
    }

    async fn follow_connection(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowError> {
        let NewEngine { endpoint, topic, .. } = &task.engine;
        let metrics = Arc::clone(self.follower.relay().bridge_metrics());
        let patience = task.options.patience;
        let made = task
            .origin
            .as_ref()
            .and_then(|origin| origin.take_subscription(&task.engine));
        let mut subscription = match made {
            Some(subscription) => subscription,
            None => Subscription::connect(endpoint, topic, patience, metrics).await?,
        };
        if let Some(origin) = &task.origin {
            let mut confirmation = origin.confirmation();
            while confirmation.is_open(LOST_TOLD_FOR / 2).await {
                self.follower.told_alive().await?;
            }
        }
        self.follower.relay().metrics().connections.increment(1);
        if let Some(silence) = self.long_silence(task) {
            self.follower.was_long_silent(silence);
        }
        if self.is_replaced(task) {
            self.follower.was_replaced().await?;
        }
        self.follower.connected().await?;
        (self.unseen_since, *failures) = (None, 0);
        self.note_followed(task).await?;
        let mut heard_at = Instant::now();
        // `heard_last` is the time of the last batch. `published_at` is the same time, or `None` if the engine was
        // checked after that batch.
        let (mut heard_last, mut published_at): (Option<Instant>, Option<Instant>) = (None, None);
        let interval = task.options.poll_interval;
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
            self.keep_if_due(&task.engine).await?;
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
                        self.look(task, &mut heard_at).await?;
                        published_at = None;
                    } else if !self.follower.has_untold() {
                        self.note_followed(task).await?;
                    }
                }
                Woken::Idle => {
                    self.follower.tell().await?;
                    self.note_followed(task).await?;
                }
                // The tick came only because the process stood still.
                Woken::Tick if has_stalled => {}
                Woken::Tick => {
                    let due = published_at.take().map(|at| at + interval);
                    let may_wait = self.follower.relay().is_in_sight() && !self.follower.wants_look();
                    if let Some(due) = due.filter(|due| may_wait && *due > Instant::now()) {
                        self.follower.still_seen().await?;
                        poll.reset_at(due.into());
                        continue;
                    }
                    self.look(task, &mut heard_at).await?;
                }
            }
        }
    }

    /// Checks that the engine lives and no batch is missing. Puts the engine out of sight (batches may be missing) if its last
    /// message came too long ago. `heard_at` is the time of that message.
    async fn look(&mut self, task: &SourceTask, heard_at: &mut Instant) -> Result<(), FollowError> {
        match self.follower.look().await {
            Ok(()) => {
                *heard_at = Instant::now();
                // The connection stands, so the engine lives, even if it is out of sight.
                self.follower.told_alive().await?;
                self.note_followed(task).await?;
                Ok(())
            }
            Err(error @ FollowError::Publisher(_)) => Err(error),
            Err(error) if heard_at.elapsed() >= task.options.silent_after => Err(error),
            // One question may fail while the connection is open and its batches continue the count.
            Err(error) => {
                tracing::debug!(engine = %task.engine.key, %error, "a replay failed");
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
    fn long_silence(&self, task: &SourceTask) -> Option<Duration> {
        let silence = task.clock.now().saturating_duration_since(self.unseen_since?);
        let is_long = silence >= task.options.give_up_after;
        let is_vouched_for = task.origin.as_ref().is_some_and(OriginServer::vouches);
        (is_long && !is_vouched_for).then_some(silence)
    }

    /// Notes the name that the server gives the engine's process. Returns whether the process is another one than
    /// before.
    fn is_replaced(&mut self, task: &SourceTask) -> bool {
        let told = task.origin.as_ref().and_then(OriginServer::process);
        let before = std::mem::replace(&mut self.process, told);
        before.is_some() && self.process.is_some() && before != self.process
    }

    async fn note_followed(&mut self, task: &SourceTask) -> Result<(), FollowError> {
        let trouble = self.follower.trouble().map(Cow::into_owned);
        let is_exact = self.follower.relay().is_exact();
        task.note_followed(is_exact, trouble.as_deref());
        self.follower.explain(trouble.as_deref()).await
    }
}
