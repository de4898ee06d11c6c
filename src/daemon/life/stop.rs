//! Stop of a daemon, step by step, within one time limit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::Daemon;
use kvatlas_process::admin::{Latch, Readiness};

/// Report of the steps of a stop that did not end in time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopReport {
    /// Names of the steps that overran or failed, in order. Empty if all steps ended in time.
    pub overran: Vec<String>,
}

impl fmt::Display for StopReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.overran.is_empty() {
            return formatter.write_str("everything stopped in time");
        }
        write!(formatter, "did not stop in time: {}", self.overran.join(", "))
    }
}

/// Time limit of a stop, with the report of the steps that have overrun the limit.
struct Deadline {
    at: Instant,
    readiness: Arc<Readiness>,
    /// Whether the NATS server could not be reached when the stop began.
    was_away: bool,
    report: StopReport,
}

/// Maximum time for a step that needs the NATS server, such as leaving a queue group, while the server cannot be
/// reached.
const ALONE_PATIENCE: Duration = Duration::from_millis(500);
/// Time between two checks whether the NATS server can still be reached.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

impl Deadline {
    /// Runs a step that needs the NATS server. While the server cannot be reached, the step is cut short after
    /// [`ALONE_PATIENCE`], and is not reported as overrun.
    async fn leave(&mut self, name: &str, step: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = step => return,
            () = self.alone() => {}
            () = tokio::time::sleep_until(self.at) => {}
        }
        match self.is_away() {
            true => tracing::warn!(
                step = name,
                "left without taking leave: NATS is away, or refuses what that needs"
            ),
            false => self.report.overran.push(name.to_owned()),
        }
    }

    fn is_away(&self) -> bool {
        self.was_away || self.readiness.is_cut_off()
    }

    /// Waits until the NATS server could not be reached for [`ALONE_PATIENCE`].
    async fn alone(&self) {
        let mut since = Instant::now();
        while since.elapsed() < ALONE_PATIENCE {
            tokio::time::sleep(LOOK_INTERVAL).await;
            if !self.is_away() {
                since = Instant::now();
            }
        }
    }

    async fn step(&mut self, name: &str, step: impl Future<Output = ()>) {
        // Even after the time limit, a step may take 50 ms, because most steps are quick.
        let at = self.at.max(Instant::now() + Duration::from_millis(50));
        if tokio::time::timeout_at(at, step).await.is_err() {
            self.report.overran.push(name.to_owned());
        }
    }
}

impl Daemon {
    /// Stops the daemon. In order: no new queries, no new events, received events applied, a last snapshot, the
    /// listeners closed.
    ///
    /// Takes about `shutdown.drain_seconds` at most. With snapshots, the steps before the last one have half of that
    /// time. The report names the steps that were cut short.
    ///
    /// The future is boxed for the same reason as the future of [`Self::start`].
    pub fn stop(self) -> BoxFuture<'static, StopReport> {
        Box::pin(self.end())
    }

    async fn end(self) -> StopReport {
        let (begun, drain) = (Instant::now(), self.config.shutdown.drain);
        let mut deadline = Deadline {
            at: begun + self.snapshots.as_ref().map_or(drain, |_| drain / 2),
            readiness: Arc::clone(&self.readiness),
            was_away: !self.readiness.report().is_set(Latch::Connected),
            report: StopReport::default(),
        };
        self.readiness.start_draining();
        deadline.leave("queries", self.queries.end()).await;
        if let Some(http) = &self.http {
            deadline.step("http", http.stop()).await;
        }
        deadline.leave("events", self.events.end()).await;
        self.readiness.forget_connections();
        let lanes = async {
            if let Err(error) = self.pool.drain().await {
                tracing::error!(%error, "the lanes cannot be drained");
            }
        };
        deadline.step("lanes", lanes).await;
        deadline.step("upkeep", self.upkeep.end()).await;
        deadline.at = begun + drain;
        if let Some(snapshots) = &self.snapshots {
            let saving = async {
                // `save` counts and logs its failure.
                let _ = snapshots.save().await;
            };
            deadline.step("snapshot", saving).await;
            snapshots.leave();
        }
        let Self { admin, broker, .. } = self;
        if let Some(admin) = admin {
            let stopping = async {
                match tokio::task::spawn_blocking(move || admin.stop()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(%error, "the admin listener did not stop"),
                    Err(error) => tracing::warn!(%error, "the admin listener did not stop"),
                }
            };
            deadline.step("admin", stopping).await;
        }
        if let Some(broker) = broker {
            let stopping = async {
                if let Err(error) = broker.stop().await {
                    tracing::warn!(%error, "the embedded NATS server did not stop");
                }
            };
            deadline.step("broker", stopping).await;
        }
        deadline.report
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_step_ends_soon_after_its_server_has_gone() {
        let (readiness, up) = (Arc::new(Readiness::new()), Arc::new(AtomicBool::new(true)));
        let stands = Arc::clone(&up);
        readiness.follow_connection("queries", move || stands.load(Ordering::Relaxed));
        let mut deadline = Deadline {
            at: Instant::now() + Duration::from_secs(30),
            readiness,
            was_away: false,
            report: StopReport::default(),
        };
        deadline.leave("quick", async {}).await;
        // The server goes when the step has begun, and the step never ends.
        let step = async {
            up.store(false, Ordering::Relaxed);
            std::future::pending().await
        };
        deadline.leave("queries", step).await;
        assert!(deadline.report.overran.is_empty());
    }
}
