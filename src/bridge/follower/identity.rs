//! Identity: decides whether another process at an engine's sockets still counts as that engine.
//!
//! If an engine has been out of sight for long, its address may belong to another engine. Daemons have removed the old
//! engine's holder by then.
//!
//! - A process that gives the same bytes under the same numbers as before is the same process.
//! - Any other process is followed, but its blocks are in doubt until it clears its cache. In two cases they are not in
//!   doubt: the source that found the engine confirms the engine's identity, or the engine's name is nothing but its
//!   address.

use std::time::Duration;

use kvatlas_engines::Reason;

use kvatlas_telemetry::log_gated;

use super::{FollowError, Follower};

/// Knowledge of the process that answers at the sockets of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Identity {
    /// The engine itself, or another process that counts as the engine.
    Known,
    /// The engine was out of sight for this long. If another process answers now, it does not count as the engine.
    LongSilent(Duration),
    /// Another process answers, after the engine was out of sight for this long.
    Stranger(Duration),
}

impl Follower {
    /// Notes that the engine has been out of sight (silent, or with batches missing) for `silence`. After such a long
    /// time, another process does not count as the engine.
    pub(crate) fn was_long_silent(&mut self, silence: Duration) {
        if self.continuity.last().is_some() {
            self.identity = Identity::LongSilent(silence);
        }
    }

    /// Starts over, without any block of the old process, because the engine's server reports that another process is there.
    pub(crate) async fn was_replaced(&mut self) -> Result<(), FollowError> {
        self.short_replay = None;
        self.restart(None).await
    }

    /// Starts over for another process, of which no block and no batch is known yet. `doubt` is the reason why its
    /// blocks are in doubt. After a long silence, the reason is [`Reason::OtherEngine`] instead.
    pub(super) async fn restart(&mut self, doubt: Option<Reason>) -> Result<(), FollowError> {
        let doubt = match self.identity {
            Identity::Known => doubt,
            Identity::LongSilent(silence) | Identity::Stranger(silence) => {
                self.identity = Identity::Stranger(silence);
                Some(Reason::OtherEngine)
            }
        };
        self.is_in_step = true;
        self.relay.restart(doubt).await?;
        self.continuity.restart();
        self.is_in_step = false;
        Ok(())
    }

    /// Starts over because batches are missing and cannot be fetched any more. The engine may be the same process.
    pub(super) async fn restart_behind_a_gap(&mut self) -> Result<(), FollowError> {
        self.is_in_step = true;
        self.relay.restart_behind_a_gap().await?;
        self.continuity.restart();
        self.is_in_step = false;
        Ok(())
    }

    /// Settles which process answers at the sockets. Called once the process's batches have been applied. If the
    /// process does not count as the engine (a stranger), its blocks are in doubt from now on, even if one of those
    /// batches was a clear.
    pub(super) async fn settle_identity(&mut self) -> Result<(), FollowError> {
        let Identity::Stranger(silence) = self.identity else {
            self.identity = Identity::Known;
            return Ok(());
        };
        let silence = Duration::from_secs(silence.as_secs());
        let text = format!(
            "silent for {silence:?}, and another process by now: whether it is still this engine is not known. It counts when it clears \
             its cache (kvatlas admin reset), or is unregistered and registered again"
        );
        log_gated!(
            warn "{text}" up to 64;
            engine = self.relay.name(), replay = self.replay_endpoint.as_deref()
        );
        self.stranger = Some(text);
        self.relay.note_doubt(Reason::OtherEngine).await?;
        self.identity = Identity::Known;
        Ok(())
    }
}
