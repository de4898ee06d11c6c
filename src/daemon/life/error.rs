//! Errors that keep a daemon from starting.

use crate::http::{HttpStartError, TokenError};
use crate::lanes::PoolError;
use crate::queries::SourceError;
use crate::snapshots::SnapshotStartError;
use kvatlas_core::wire::SubjectError;
use kvatlas_process::admin::AdminError;
use kvatlas_process::broker::ConnectError;
use kvatlas_process::broker::embedded::BrokerError;
use kvatlas_telemetry::MetricsError;

use super::namespaces::NamespaceError;

/// Reason why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Embedded broker cannot be started.
    #[error("the embedded NATS server: {0}")]
    Broker(#[from] BrokerError),
    /// Address of the embedded broker cannot be used.
    #[error("the embedded NATS server's address {url}: {source}")]
    BrokerAddress {
        /// Address of the broker.
        url: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Admin listener cannot be started.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// Query listener cannot be started.
    #[error(transparent)]
    Http(#[from] HttpStartError),
    /// Token of the query listener cannot be read.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Metrics recorder cannot be installed.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Lanes cannot be started.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Connecting to NATS failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Shards cannot be asked for the answers of a listener.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Subject prefix is not valid.
    #[error(transparent)]
    Subjects(#[from] SubjectError),
    /// Namespace that the configuration names cannot be made.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Listener for Dynamo's routers cannot be started.
    #[cfg(feature = "dynamo")]
    #[error(transparent)]
    Dynamo(#[from] crate::dynamo::DynamoError),
    /// Listener for llm-d's routers cannot be started.
    #[cfg(feature = "redis")]
    #[error(transparent)]
    Redis(#[from] crate::redis::RedisStartError),
    /// Listener for SGLang's routers cannot be started.
    #[cfg(feature = "grpc")]
    #[error(transparent)]
    Grpc(#[from] crate::grpc::GrpcStartError),
    /// Setting needs a cargo feature without which this program was built.
    #[error("{setting}: this program was built without the feature {feature}")]
    LeftOut {
        /// Name of the setting.
        setting: &'static str,
        /// Name of the cargo feature.
        feature: &'static str,
    },
    /// Snapshots cannot be used, so that the daemon cannot start with them.
    #[error(transparent)]
    Snapshots(SnapshotStartError),
}

impl From<SnapshotStartError> for StartError {
    fn from(error: SnapshotStartError) -> Self {
        match error {
            SnapshotStartError::Connect(error) => Self::Connect(error),
            other => Self::Snapshots(other),
        }
    }
}
