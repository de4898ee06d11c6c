//! Whether another process at an engine's sockets is still that engine.
//!
//! Where an engine has been out of sight for long, its place may have been given to another one: daemons have removed its holder by then.
//! The same bytes for the same numbers show that it is the same process. Another process is followed, and in doubt until it clears, unless
//! somebody vouches for it: a source that has found it by an identity, or a name that is nothing but its address.

use std::time::Duration;

use kvatlas_engines::Reason;

use kvatlas_telemetry::LogGate;

use super::{FollowError, Follower};

static STRANGER_GATE: LogGate = LogGate::of_bursts(64);

/// The knowledge of who answers at the sockets of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Identity {
    /// The engine, or another process that is taken for it.
    Known,
    /// The engine was silent for so long that another process would not be taken for it.
    LongSilent(Duration),
    /// Another process, after such a silence.
    Stranger(Duration),
}

impl Follower {
    /// The engine has been out of sight for `silence`, which is too long for another process to be taken for it.
    pub(crate) fn was_long_silent(&mut self, silence: Duration) {
        if self.continuity.last().is_some() {
            self.identity = Identity::LongSilent(silence);
        }
    }

    /// Another process is there by now, as the engine's server tells: nothing of the old one is left.
    pub(crate) async fn was_replaced(&mut self) -> Result<(), FollowError> {
        self.short_replay = None;
        self.restart(None).await?;
        self.continuity.restart();
        Ok(())
    }

    /// Begins with another process, of which nothing is known, with this `doubt`.
    pub(super) async fn restart(&mut self, doubt: Option<Reason>) -> Result<(), FollowError> {
        let doubt = match self.identity {
            Identity::Known => doubt,
            Identity::LongSilent(silence) | Identity::Stranger(silence) => {
                self.identity = Identity::Stranger(silence);
                Some(Reason::OtherEngine)
            }
        };
        Ok(self.relay.restart(doubt).await?)
    }

    /// Settles who answers at the sockets, once that one has told what it has. Where it is a stranger, that is in doubt, whatever it has cleared
    /// before.
    pub(super) async fn settle_identity(&mut self) -> Result<(), FollowError> {
        let settled = std::mem::replace(&mut self.identity, Identity::Known);
        let Identity::Stranger(silence) = settled else {
            return Ok(());
        };
        let silence = Duration::from_secs(silence.as_secs());
        let text = format!(
            "silent for {silence:?}, and another process by now: whether it is still this engine is not known. It counts when it clears \
             its cache (kvatlas admin reset), or is unregistered and registered again"
        );
        if let Some(suppressed) = STRANGER_GATE.admit() {
            let endpoint = self.replay_endpoint.as_deref();
            tracing::warn!(
                engine = self.relay.name(),
                replay = endpoint,
                suppressed,
                "{text}"
            );
        }
        self.stranger = Some(text);
        Ok(self.relay.note_doubt(Reason::OtherEngine).await?)
    }
}
