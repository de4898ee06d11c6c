//! Broker of the daemon's own: it is started again when it has ended by itself.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvatlas_process::broker::embedded::{BrokerError, EmbeddedBroker};
use kvatlas_telemetry::log_gated;
use tokio::sync::Mutex;
use tokio::time::MissedTickBehavior;

/// Interval between two looks whether the broker still runs.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Embedded broker of a daemon. Dropping the value kills the broker.
#[derive(Debug)]
pub(super) struct OwnBroker {
    server: Mutex<EmbeddedBroker>,
    pid: AtomicU32,
}

impl OwnBroker {
    /// Takes a broker that runs.
    pub(super) fn new(server: EmbeddedBroker) -> Self {
        Self {
            pid: AtomicU32::new(server.pid()),
            server: Mutex::new(server),
        }
    }

    /// Returns the process id of the broker.
    pub(super) fn pid(&self) -> u32 {
        self.pid.load(Ordering::Relaxed)
    }

    /// Starts the broker again if it has ended by itself.
    async fn look(&self) -> Result<(), BrokerError> {
        let mut server = self.server.lock().await;
        if !server.has_ended()? {
            return Ok(());
        }
        log_gated!(error "the embedded nats-server has ended; it is started again");
        server.start_again().await?;
        self.pid.store(server.pid(), Ordering::Relaxed);
        tracing::warn!(
            url = server.url(),
            pid = server.pid(),
            "the embedded nats-server runs again"
        );
        Ok(())
    }

    /// Stops the broker in good order. `keep` must have ended before.
    pub(super) async fn stop(self: Arc<Self>) -> Result<(), BrokerError> {
        match Arc::into_inner(self) {
            Some(own) => own.server.into_inner().stop().await,
            // Whoever has the broker drops it, and so ends it.
            None => Ok(()),
        }
    }
}

/// Starts the broker again whenever it has ended by itself, until the daemon has dropped it.
pub(super) async fn keep(broker: Weak<OwnBroker>) {
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        looks.tick().await;
        let Some(broker) = broker.upgrade() else { return };
        if let Err(error) = broker.look().await {
            log_gated!(error "the embedded nats-server cannot be started again; trying again"; %error);
        }
    }
}
