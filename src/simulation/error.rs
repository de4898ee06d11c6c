//! Errors that end a simulation.

use std::time::Duration;

use kvatlas_client::ClientError;
use kvatlas_client::publish::PublisherError;
use kvatlas_config::ConfigErrors;
use kvatlas_core::wire::{NameError, NamespaceName, SubjectError};
use kvatlas_daemon::StartError;
use kvatlas_process::broker::{ConnectError, RoundTripError};

/// Error that ends a simulation. A wrong reply is not an error: it is counted and reported.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// The configuration has errors.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The daemon in this process can't start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The daemon in this process did not get ready.
    #[error("the daemon did not get ready within {0:?}; its log says why")]
    NotReady(Duration),
    /// NATS can't be connected to.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The NATS server stopped answering.
    #[error(transparent)]
    Broker(#[from] RoundTripError),
    /// A request to the daemon failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Events could not be published.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
    /// The namespace already has workers that do not belong to this simulation.
    #[error("namespace {namespace} has {holders} holders already; choose a free one with --namespace")]
    NamespaceInUse {
        /// Name of the namespace.
        namespace: NamespaceName,
        /// Number of holders that the namespace has.
        holders: usize,
    },
    /// The daemon does not apply the published events.
    #[error(
        "the daemon has not applied the events of {workers} workers, and nothing at all for {patience:?}; \
         were batches lost on their way, or is another daemon answering?"
    )]
    Stalled {
        /// Time without any progress of the daemon.
        patience: Duration,
        /// Number of workers whose events have not all been applied.
        workers: usize,
    },
    /// The prefix of the subjects is not valid.
    #[error(transparent)]
    Prefix(#[from] SubjectError),
    /// A worker's name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The histogram of latencies can't be made.
    #[error(transparent)]
    Histogram(#[from] hdrhistogram::CreationError),
    /// The index refused to register a worker of the fleet.
    #[error(transparent)]
    Register(#[from] kvatlas_core::index::RegisterError),
    /// A prompt has more blocks than an index can search for.
    #[error(transparent)]
    Depth(#[from] kvatlas_core::hash::PositionError),
    /// A query's task ended without a result.
    #[error("a query was abandoned: {0}")]
    Task(#[from] tokio::task::JoinError),
}
