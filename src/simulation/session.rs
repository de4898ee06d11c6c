//! Connection of a simulation to a daemon, which runs in this process or elsewhere.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use async_nats::Client;
use tokio::time::Instant;

use kvatlas_client::publish::{
    HolderPublisher, PublishConnection, PublishedHolder, PublisherError, PublisherOptions, Refusals,
    Transport,
};
use kvatlas_client::{Backoff, ClientError, QueryClient};
use kvatlas_config::{Config, NatsConfig, Setting, process_environment};
use kvatlas_core::wire::{BatchCursor, ErrorCode, NamespaceName, StatusReply, Subjects, WorkerName};
use kvatlas_daemon::{Daemon, StopReport};
use kvatlas_process::broker::{ConnectPatience, ConnectionNotice, connect, round_trip};

use super::error::SimulationError;
use super::fleet::{RANK, WorkerCursor};

/// Maximum number of messages that wait in a subscription of the simulation. These subscriptions are inboxes for replies.
pub(super) const SUBSCRIPTION_CAPACITY: usize = 4096;
/// Maximum time until the daemon is ready, and until the broker answers.
const READY_PATIENCE: Duration = Duration::from_secs(30);
/// Longest time for which the daemon may apply none of the published events.
pub(super) const PROGRESS_PATIENCE: Duration = Duration::from_secs(30);
/// Pauses between two questions to the daemon about its progress.
pub(super) const POLLS: Backoff = Backoff {
    pause_min: Duration::from_micros(500),
    pause_max: Duration::from_millis(50),
};

/// The key of the setting that names the embedded broker's binary.
const SERVER_BINARY: &str = "nats.server_binary";

/// Returns a configuration for a daemon in this process with an embedded broker, without snapshots.
///
/// `admin` is an address to listen on, or `off`. The only environment variable that is read is the one that names the broker's
/// binary. So a simulation is the same everywhere, and touches no file of a daemon that is set up on the machine.
///
/// # Errors
///
/// [`SimulationError::Config`] if a value can't be used.
pub fn embedded_config(prefix: &str, admin: &str) -> Result<Config, SimulationError> {
    let flags = [
        ("nats.embedded", "true"),
        ("subjects.prefix", prefix),
        ("admin.listen", admin),
    ];
    let flags = flags.map(|(key, text)| (key.to_owned(), text.to_owned()));
    let binary = Setting::find(SERVER_BINARY).map(|setting| setting.variable.as_str());
    let environment = process_environment()
        .into_iter()
        .filter(|(variable, _)| binary == Some(variable.as_str()));
    Ok(Config::load(BTreeMap::from(flags), environment, None)?)
}

/// A connection to a daemon, for one namespace.
pub struct Session {
    daemon: Option<Daemon>,
    routers: QueryClient,
    publishers: Client,
    /// Subscriptions and messages that the server has refused.
    refusals: Refusals,
    transport: Transport,
    subjects: Subjects,
    namespace: NamespaceName,
}

impl Session {
    /// Starts a daemon in this process, with `config`, and connects to it over NATS like any client.
    ///
    /// # Errors
    ///
    /// The errors of starting a daemon, and [`SimulationError::NotReady`].
    pub async fn embedded(config: Config, namespace: NamespaceName) -> Result<Self, SimulationError> {
        let prefix = config.subjects.prefix.clone();
        let daemon = Box::pin(Daemon::start(config)).await?;
        tokio::time::timeout(READY_PATIENCE, daemon.ready())
            .await
            .map_err(|_| SimulationError::NotReady(READY_PATIENCE))?;
        let nats = daemon.nats().clone();
        Self::connect(Some(daemon), &nats, &prefix, namespace).await
    }

    /// Connects to the daemon that serves the subjects of `config` on its NATS servers. The namespace must be free: without any
    /// workers, not even those of an earlier simulation.
    ///
    /// # Errors
    ///
    /// [`SimulationError::NamespaceInUse`], and the errors of connecting to the daemon and asking it.
    pub async fn remote(config: &Config, namespace: NamespaceName) -> Result<Self, SimulationError> {
        let session = Self::connect(None, &config.nats, &config.subjects.prefix, namespace).await?;
        let subject = session.subjects.status(&session.namespace);
        let status = tokio::select! {
            biased;
            words = session.refusals.of_message(&subject) => return Err(PublisherError::Refused { words }.into()),
            status = session.status() => status?,
        };
        match status.map_or(0, |status| status.holders.len()) {
            0 => Ok(session),
            holders => Err(SimulationError::NamespaceInUse {
                namespace: session.namespace,
                holders,
            }),
        }
    }

    /// Makes the connections to NATS: one for queries and one for events, as in a real fleet.
    async fn connect(
        daemon: Option<Daemon>,
        nats: &NatsConfig,
        prefix: &str,
        namespace: NamespaceName,
    ) -> Result<Self, SimulationError> {
        let refusals = Refusals::default();
        let open = |role: &'static str| {
            let hearing = refusals.clone();
            connect(
                nats,
                role,
                SUBSCRIPTION_CAPACITY,
                ConnectPatience::FailFast,
                move |notice| {
                    if let ConnectionNotice::Refused(refusal) = &notice {
                        hearing.note(refusal);
                    }
                    tracing::info!(role, %notice, "NATS");
                },
            )
        };
        let subjects = Subjects::new(prefix)?;
        Ok(Self {
            daemon,
            routers: QueryClient::new(open("routers").await?, subjects.clone()),
            publishers: open("publishers").await?,
            refusals,
            transport: Transport::Core,
            subjects,
            namespace,
        })
    }

    /// Sets the transport through which workers publish. Core NATS is the default.
    #[must_use]
    pub fn publishing_by(self, transport: Transport) -> Self {
        Self { transport, ..self }
    }

    /// Returns the address of the admin listener of this process's daemon. `None` if there is no such daemon or listener.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.daemon.as_ref().and_then(Daemon::admin_address)
    }

    /// Returns the URL of the broker of this process's daemon, if there is such a daemon.
    pub fn broker_url(&self) -> Option<String> {
        let url = self.daemon.as_ref()?.nats().urls.first()?;
        Some(format!("nats://{}:{}", url.host(), url.port()))
    }

    /// Returns the process id of the broker of this process's daemon, if there is such a daemon.
    pub fn broker_pid(&self) -> Option<u32> {
        self.daemon.as_ref()?.broker_pid()
    }

    /// Returns the client for queries.
    pub fn routers(&self) -> &QueryClient {
        &self.routers
    }

    /// Returns the namespace of the simulated workers.
    pub fn namespace(&self) -> &NamespaceName {
        &self.namespace
    }

    /// Starts a publisher for one worker, in a new epoch. The publisher makes a batch of every call.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Publisher`] if the connection is closed.
    pub async fn publisher(&self, worker: &WorkerName) -> Result<HolderPublisher, SimulationError> {
        let holder = PublishedHolder {
            namespace: self.namespace.clone(),
            worker: worker.clone(),
            rank: RANK,
        };
        let options = PublisherOptions {
            transport: self.transport,
            batch_delay: Duration::ZERO,
            ..PublisherOptions::default()
        };
        let nats = PublishConnection::new(self.publishers.clone(), self.refusals.clone());
        Ok(HolderPublisher::start(nats, &self.subjects, holder, options).await?)
    }

    /// Asks the daemon for the status of the namespace. Returns `None` while the daemon does not know the namespace.
    async fn status(&self) -> Result<Option<StatusReply>, ClientError> {
        Ok(answered(self.routers.status(&self.namespace).await)?.into_reply())
    }

    /// Waits until the daemon has applied all batches up to these cursors. Then returns the namespace's status.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Stalled`] if the daemon does not apply anything for 30 seconds.
    pub(super) async fn wait_for_cursors(
        &self,
        cursors: &[WorkerCursor],
    ) -> Result<Option<StatusReply>, SimulationError> {
        self.wait_until(|status| behind(cursors, status)).await
    }

    /// Sends the goodbyes of `workers`, which must be sorted, and waits until the daemon has forgotten these workers.
    ///
    /// The goodbyes are in a new epoch. So they are valid whatever the workers' earlier publishers sent last.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Stalled`] if the daemon does not forget any further worker for 30 seconds.
    pub async fn say_goodbye(&self, workers: &[WorkerName]) -> Result<(), SimulationError> {
        for worker in workers {
            self.publisher(worker).await?.say_goodbye().await?;
        }
        let present = |status: Option<&StatusReply>| {
            let holders = status.map(|status| status.holders.as_slice()).unwrap_or_default();
            let left = holders
                .iter()
                .filter(|holder| workers.binary_search(&holder.worker).is_ok());
            DaemonBacklog {
                workers: left.count(),
                applied: 0,
            }
        };
        self.wait_until(present).await.map(|_| ())
    }

    /// Asks the daemon for its status again and again, until `backlog` finds that the daemon has applied the batches
    /// of all workers. Fails if the backlog does not change for [`PROGRESS_PATIENCE`].
    async fn wait_until(
        &self,
        backlog: impl Fn(Option<&StatusReply>) -> DaemonBacklog,
    ) -> Result<Option<StatusReply>, SimulationError> {
        round_trip(&self.publishers, READY_PATIENCE).await?;
        let mut looks = 0_u32;
        let mut progress: Option<(DaemonBacklog, Instant)> = None;
        loop {
            let status = self.status().await?;
            let now = backlog(status.as_ref());
            if now.workers == 0 {
                return Ok(status);
            }
            match &progress {
                Some((before, since)) if *before == now => {
                    if since.elapsed() >= PROGRESS_PATIENCE {
                        return Err(SimulationError::Stalled {
                            patience: PROGRESS_PATIENCE,
                            workers: now.workers,
                        });
                    }
                }
                _ => progress = Some((now, Instant::now())),
            }
            looks = looks.saturating_add(1);
            tokio::time::sleep(POLLS.pause(looks)).await;
        }
    }

    /// Ends the session, and with it the daemon of this process. Returns the report of the daemon's stop, if there was such a
    /// daemon.
    pub async fn close(self) -> Option<StopReport> {
        match self.daemon {
            Some(daemon) => Some(Box::pin(daemon.stop()).await),
            None => None,
        }
    }
}

/// The part of the published events that the daemon has not applied yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DaemonBacklog {
    /// Number of workers whose batches the daemon has not all applied.
    workers: usize,
    /// Sum of the numbers of the last applied batches of these workers. If it changes, the daemon makes progress.
    applied: u64,
}

fn behind(cursors: &[WorkerCursor], status: Option<&StatusReply>) -> DaemonBacklog {
    let holders = status.map(|status| status.holders.as_slice()).unwrap_or_default();
    let reached: HashMap<_, _> = holders
        .iter()
        .filter(|holder| holder.rank == RANK)
        .map(|holder| {
            let cursor = BatchCursor {
                epoch: holder.epoch,
                seq: holder.seq,
            };
            (&holder.worker, cursor)
        })
        .collect();
    // Heartbeats may have moved a holder beyond its cursor.
    let is_behind = |(worker, cursor): &&WorkerCursor| reached.get(worker).is_none_or(|at| at < cursor);
    let behind: Vec<&WorkerCursor> = cursors.iter().filter(is_behind).collect();
    let applied =
        |sum: u64, (worker, _): &&WorkerCursor| sum.wrapping_add(reached.get(worker).map_or(0, |at| at.seq));
    DaemonBacklog {
        workers: behind.len(),
        applied: behind.iter().fold(0, applied),
    }
}

/// A daemon's answer about the namespace of the workers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DaemonAnswer<T> {
    /// Reply of the daemon.
    Reply(T),
    /// The daemon does not know the namespace. That is right until the first events have been applied.
    UnknownNamespace,
    /// The daemon cannot answer at present, for example because it has just begun to follow the events.
    Unavailable,
}

impl<T> DaemonAnswer<T> {
    /// Returns the reply, if there is one.
    pub(super) fn into_reply(self) -> Option<T> {
        match self {
            Self::Reply(reply) => Some(reply),
            Self::UnknownNamespace | Self::Unavailable => None,
        }
    }
}

/// Returns a daemon's answer. Refusals other than those that [`DaemonAnswer`] names stay errors.
pub(super) fn answered<T>(answer: Result<T, ClientError>) -> Result<DaemonAnswer<T>, ClientError> {
    match answer {
        Ok(reply) => Ok(DaemonAnswer::Reply(reply)),
        Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownNamespace => {
            Ok(DaemonAnswer::UnknownNamespace)
        }
        Err(ClientError::Refused(error)) if error.code == ErrorCode::Unavailable => {
            Ok(DaemonAnswer::Unavailable)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_core::wire::{DegradedReasons, HolderStatusReply, Labels, WireError};

    fn status(holders: &[(&str, u64, u64)]) -> StatusReply {
        let holder = |(worker, epoch, seq): &(&str, u64, u64)| HolderStatusReply {
            worker: WorkerName::new(worker).unwrap(),
            rank: RANK,
            epoch: *epoch,
            seq: *seq,
            blocks: 0,
            parked_events: 0,
            foreign_chain: false,
            epoch_ahead_s: 0,
            exact: true,
            address: None,
            labels: Labels::NONE,
            degraded: DegradedReasons::default(),
            since_us: None,
        };
        StatusReply {
            behind_us: 0,
            v: 1,
            block_size: 16,
            distinct_blocks: 0,
            batches_waiting: 0,
            unsized_holders: 0,
            refused_holders: 0,
            unheard_holders: 0,
            holders: holders.iter().map(holder).collect(),
            gathered: None,
        }
    }

    #[test]
    fn a_worker_is_behind_until_its_cursor_is_reached() {
        let cursor =
            |worker: &str, epoch, seq| (WorkerName::new(worker).unwrap(), BatchCursor { epoch, seq });
        let cursors = [cursor("a", 7, 3), cursor("b", 7, 1)];
        let workers = |status: Option<&StatusReply>| behind(&cursors, status).workers;
        assert_eq!(workers(None), 2);
        assert_eq!(workers(Some(&status(&[("a", 7, 2), ("b", 7, 1)]))), 1);
        // A batch number of an older epoch does not count, even if the number is equal.
        assert_eq!(workers(Some(&status(&[("a", 6, 3), ("b", 7, 1)]))), 1);
        // A heartbeat has moved the holder beyond the expected batch number.
        let done = status(&[("a", 7, 4), ("b", 7, 1), ("c", 1, 1)]);
        assert_eq!(workers(Some(&done)), 0);
    }

    #[test]
    fn refusals_that_may_pass_are_told_apart_and_others_are_errors() {
        let refusal = |code| {
            answered(Err::<(), _>(ClientError::Refused(WireError::new(
                code,
                String::new(),
            ))))
        };
        assert_eq!(
            refusal(ErrorCode::UnknownNamespace).unwrap(),
            DaemonAnswer::UnknownNamespace
        );
        assert_eq!(
            refusal(ErrorCode::Unavailable).unwrap(),
            DaemonAnswer::Unavailable
        );
        assert!(refusal(ErrorCode::BadRequest).is_err());
        assert_eq!(answered(Ok(1)).unwrap(), DaemonAnswer::Reply(1));
    }

    #[test]
    fn an_embedded_daemon_writes_no_snapshots_and_takes_the_prefix() {
        let config = embedded_config("test.prefix", "off").unwrap();
        assert!(config.nats.embedded);
        assert_eq!(config.subjects.prefix, "test.prefix");
        assert_eq!(config.snapshots.directory, None);
        assert_eq!(config.admin.listen, None);
        assert!(embedded_config("no prefix", "off").is_err());
    }
}
