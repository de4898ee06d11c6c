//! Checks of the NATS server: whether it can be reached, and how large messages may be.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use async_nats::Client;
use kvatlas_config::Config;
use kvatlas_process::broker::{
    ConnectPatience, ConnectionNotice, Refusal, Refused, connect as connect_nats, places_of,
};
use kvatlas_process::setup::Setup;
use tokio::sync::mpsc;

use super::report::Check;

/// Maximum number of messages that may wait in one subscription. A check subscribes to all events for a moment.
const SUBSCRIPTION_CAPACITY: usize = 1024;
/// Maximum number of the server's refusals that are kept for the checks.
const REFUSALS_MAX: usize = 64;
/// Time to wait after a flush for the server's refusals. The server sends them before its answer to the flush, but the
/// NATS library passes them on a moment later.
pub(super) const PASSING_ON: Duration = Duration::from_millis(200);

/// Connection to NATS, together with the refusals that the server sends on it.
pub(super) struct DoctorConnection {
    pub(super) nats: Client,
    pub(super) refusals: tokio::sync::Mutex<mpsc::Receiver<Refusal>>,
    round_trip: Duration,
    /// Refusal of a subscription to an inbox, if one has come. The client subscribes to its inbox only once, so a later
    /// request gets no refusal of its own.
    inbox_refusal: OnceLock<Refusal>,
}

/// Result of a failed attempt to connect: the failed check, and the error text with which the command ends.
pub(super) struct Unconnected {
    pub(super) check: Check,
    pub(super) verdict: &'static str,
}

const UNREACHABLE: &str = "no NATS server could be reached";

/// Connects to NATS. `patience` is the longest wait.
pub(super) async fn connect(config: &Config, patience: Duration) -> Result<DoctorConnection, Unconnected> {
    let (sender, refusals) = mpsc::channel(REFUSALS_MAX);
    let notice = move |notice| {
        if let ConnectionNotice::Refused(refusal) = notice {
            // Refusals beyond the bound are dropped, because the checks need no more of them.
            let _ = sender.try_send(refusal);
        }
    };
    let connecting = connect_nats(
        &config.nats,
        "doctor",
        SUBSCRIPTION_CAPACITY,
        ConnectPatience::FailFast,
        notice,
    );
    let failed = |found: String, mend: &str, verdict| Unconnected {
        check: Check::failed("broker", found, mend),
        verdict,
    };
    let silent = |found: String| {
        let mend = "check that a NATS server runs there, or name another with --nats-url";
        failed(found, mend, UNREACHABLE)
    };
    let nats = tokio::time::timeout(patience, connecting)
        .await
        .map_err(|_| {
            silent(format!(
                "no answer from {} within {patience:?}",
                places_of(&config.nats)
            ))
        })?
        .map_err(|error| match error.is_refusal() {
            true => failed(
                error.found(),
                error.mend(),
                "the NATS server refuses the credentials",
            ),
            false => failed(error.found(), error.mend(), UNREACHABLE),
        })?;
    let begun = Instant::now();
    nats.flush().await.map_err(|error| silent(error.to_string()))?;
    Ok(DoctorConnection {
        nats,
        refusals: tokio::sync::Mutex::new(refusals),
        round_trip: begun.elapsed(),
        inbox_refusal: OnceLock::new(),
    })
}

impl DoctorConnection {
    /// Returns a check that names the server, and tells the time of a round trip.
    pub(super) fn check(&self) -> Check {
        let info = self.nats.server_info();
        let found = format!(
            "nats-server {} at {}:{}, a round trip takes {:.1?}",
            info.version, info.host, info.port, self.round_trip
        );
        Check::fine("broker", found)
    }

    /// Returns a check that warns if the server takes no messages as large as the largest query that the daemon takes.
    pub(super) fn check_payload(&self, setup: &Setup) -> Check {
        let (taken, wanted) = (self.nats.max_payload() as u64, setup.max_message_bytes);
        let found = format!("the server takes messages of {taken} bytes");
        if taken >= wanted {
            return Check::fine("max_payload", found);
        }
        Check::warning(
            "max_payload",
            format!("{found}; the daemon would take {wanted}"),
            format!(
                "set max_payload of the NATS server to {wanted}, or queries.max_message_bytes to {taken}"
            ),
        )
    }

    /// Waits for `asked`, the answer to messages on `subjects`. Returns the refusal instead if the server refuses one
    /// of the messages, or the subscription to the inbox on which the answer would come.
    pub(super) async fn unless_refused<T>(
        &self,
        subjects: &[&str],
        asked: impl Future<Output = T>,
    ) -> Result<T, Refusal> {
        let without_inbox = async {
            match self.inbox_refusal.get() {
                Some(refusal) => {
                    // The server may also refuse a message that `asked` sends, which says more.
                    tokio::time::sleep(PASSING_ON).await;
                    refusal.clone()
                }
                None => std::future::pending().await,
            }
        };
        let mut refusals = self.refusals.lock().await;
        let refused = async {
            while let Some(refusal) = refusals.recv().await {
                match &refusal.refused {
                    Refused::Message(subject) if subjects.contains(&subject.as_str()) => return refusal,
                    Refused::Subscription(Some(subject)) if self.is_inbox(subject) => {
                        return self.inbox_refusal.get_or_init(|| refusal).clone();
                    }
                    Refused::Message(_) | Refused::Subscription(_) => {}
                }
            }
            // The connection is closed, which ends the other wait, too.
            std::future::pending().await
        };
        tokio::select! {
            biased;
            refusal = refused => Err(refusal),
            refusal = without_inbox => Err(refusal),
            answer = asked => Ok(answer),
        }
    }

    /// Whether the connection receives replies on `subject`.
    fn is_inbox(&self, subject: &str) -> bool {
        let inbox = self.nats.new_inbox();
        let (prefix, _) = inbox.rsplit_once('.').unwrap_or_default();
        let inner = subject.strip_prefix(prefix);
        inner.is_some_and(|inner| inner.starts_with('.'))
    }
}
