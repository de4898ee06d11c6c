//! Refusals by the NATS server, and its absence, as the bridge's engines and operators see them.

use std::time::{Duration, Instant};

use async_nats::Client;
use async_nats::connection::State;
use kvatlas_client::Refusal;
use kvatlas_process::broker::RefusedSubscriptions;
use kvatlas_process::registry::{EngineState, EngineStatus};

use super::{Bridge, FollowedEngine, Inner};

/// Pause between two looks at whether the NATS server is there.
const LOOK: Duration = Duration::from_millis(250);

/// Whether the NATS server is away, so that daemons are told nothing.
fn is_away(nats: &Client) -> bool {
    nats.connection_state() != State::Connected
}

impl Bridge {
    /// Records in the metrics, until the bridge stops, whether the NATS server is away.
    pub(super) async fn watch_connection(self, nats: Client) {
        loop {
            self.inner.metrics.set_away(is_away(&nats));
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Records a refusal by the NATS server. Returns whether the refusal keeps the bridge from reporting engines.
    pub fn note_refusal(&self, refusal: &Refusal) -> bool {
        let inner = &self.inner;
        inner.refused.note(&inner.subjects, refusal, Instant::now())
    }

    /// Returns the count of the refusals of subscriptions to commands and to services. The bridge makes these
    /// subscriptions again. The caller counts the refusals.
    pub fn refused_optional(&self) -> &RefusedSubscriptions {
        &self.inner.refused_optional
    }
}

impl Inner {
    /// Returns the state of an engine. If daemons are not told of the engine, because the NATS server refuses that or is
    /// away, the state says so. `nats` is the connection; `None` until the bridge is started.
    pub(super) fn state_of(&self, followed: &FollowedEngine, nats: Option<&Client>) -> EngineState {
        let state = followed.state();
        let words = match nats.is_some_and(is_away) {
            true => Some("NATS is away".to_owned()),
            false => self.refusal_of(followed),
        };
        let Some(words) = words else {
            return state;
        };
        let status = match state.status {
            EngineStatus::Exact => EngineStatus::Degraded,
            status => status,
        };
        EngineState {
            status,
            last_error: Some(format!("daemons are not told: {words}")),
            ..state
        }
    }

    /// Returns the text of the server's error if it refuses messages with the engine's events, or the subscription to
    /// questions about the engine; `None` if it refuses neither.
    fn refusal_of(&self, followed: &FollowedEngine) -> Option<String> {
        let holder = self.own_holder(&followed.engine).ok()?;
        let events = self.subjects.events(&holder.namespace, &holder.worker);
        let resync = self
            .subjects
            .resync(&holder.namespace, &holder.worker, holder.rank);
        let is_of_engine = |subject: &str| subject == events || subject == resync;
        self.refused.about(Instant::now(), is_of_engine)
    }
}
