//! Why a simulation can't go on.

use std::time::Duration;

use kvatlas_client::ClientError;
use kvatlas_client::publish::PublisherError;
use kvatlas_config::ConfigErrors;
use kvatlas_core::wire::{NameError, NamespaceName, SubjectError};
use kvatlas_daemon::StartError;
use kvatlas_process::broker::{ConnectError, RoundTripError};

/// Why a simulation can't go on. A wrong reply is none of these: it is counted and reported.
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
    /// No connection to NATS.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The NATS server stopped answering.
    #[error(transparent)]
    Broker(#[from] RoundTripError),
    /// A request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Events could not be published.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
    /// The namespace has workers of somebody else.
    #[error("namespace {namespace} has {holders} holders already; choose a free one with --namespace")]
    NamespaceInUse {
        /// The namespace.
        namespace: NamespaceName,
        /// How many holders it has.
        holders: usize,
    },
    /// The daemon does not apply what was published.
    #[error(
        "the daemon has not applied the events of {workers} workers, and nothing at all for {patience:?}; \
         were batches lost on their way, or is another daemon answering?"
    )]
    Stalled {
        /// How long it was waited for.
        patience: Duration,
        /// Workers of which events are missing.
        workers: usize,
    },
    /// The subject prefix is none.
    #[error(transparent)]
    Prefix(#[from] SubjectError),
    /// A worker's name is none.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The histogram of latencies can't be made.
    #[error(transparent)]
    Histogram(#[from] hdrhistogram::CreationError),
    /// The index does not take the fleet.
    #[error(transparent)]
    Register(#[from] kvatlas_core::index::RegisterError),
    /// A prompt is deeper than an index can be asked for.
    #[error(transparent)]
    Depth(#[from] kvatlas_core::hash::PositionError),
    /// A query's task ended without a result.
    #[error("a query was abandoned: {0}")]
    Task(#[from] tokio::task::JoinError),
}
