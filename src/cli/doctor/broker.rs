//! Checks of the NATS server: whether it can be reached, how large messages may be, and whether it keeps streams.

use std::time::{Duration, Instant};

use async_nats::{Client, jetstream};
use kvatlas_config::Config;
use kvatlas_process::broker::{
    ConnectPatience, ConnectionNotice, Refusal, connect as connect_nats, places_of,
};
use kvatlas_process::setup::Setup;
use tokio::sync::mpsc;

use super::report::Check;

/// Maximum number of messages that may wait in one subscription. A check subscribes to all events for a moment.
const SUBSCRIPTION_CAPACITY: usize = 1024;
/// Maximum number of the server's refusals that are kept for the checks.
const REFUSALS_MAX: usize = 64;

/// Connection to NATS, with the server's refusals on it.
pub(super) struct DoctorConnection {
    pub(super) nats: Client,
    pub(super) refusals: tokio::sync::Mutex<mpsc::Receiver<Refusal>>,
    round_trip: Duration,
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
            // Beyond the bound they say nothing new.
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

    /// Returns the check of JetStream. Its result is "skipped" if no daemon needs JetStream.
    pub(super) async fn check_jetstream(&self, setup: &Setup, patience: Duration) -> Check {
        const NAME: &str = "JetStream";
        if setup.stream.is_none() && !setup.has_object_store {
            return Check::skipped(
                NAME,
                "not needed: events.transport is core, and there is no snapshots.object_store",
            );
        }
        let mut context = jetstream::new(self.nats.clone());
        context.set_timeout(patience);
        if let Err(error) = context.query_account().await {
            let mend = "turn it on in the server's configuration (jetstream { store_dir: … }) and for the account, and \
                 let the daemon publish to $JS.API.>";
            return Check::failed(NAME, error, mend);
        }
        let Some(name) = &setup.stream else {
            return Check::fine(NAME, "it answers");
        };
        match context.get_stream(name).await {
            Ok(stream) => {
                let info = stream.cached_info();
                let found = format!(
                    "the stream {name} keeps {} messages on {} replicas",
                    info.state.messages, info.config.num_replicas
                );
                if info.config.num_replicas < 2 {
                    let mend = "on a cluster, set events.stream_replicas to 3, so that the loss of a server loses no event";
                    return Check::warning(NAME, found, mend);
                }
                Check::fine(NAME, found)
            }
            Err(error) => Check::failed(
                NAME,
                format!("the stream {name}: {error}"),
                "start the daemon, which creates it unless events.stream_create is off",
            ),
        }
    }
}
