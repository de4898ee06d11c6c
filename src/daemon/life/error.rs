//! Why a daemon cannot start.

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

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The embedded broker cannot be started.
    #[error("the embedded NATS server: {0}")]
    Broker(#[from] BrokerError),
    /// The embedded broker's address cannot be used.
    #[error("the embedded NATS server's address {url}: {source}")]
    BrokerAddress {
        /// The address.
        url: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The admin listener cannot be started.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// The query listener cannot be started.
    #[error(transparent)]
    Http(#[from] HttpStartError),
    /// The token of the query listener cannot be read.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The metrics recorder cannot be installed.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The lanes cannot be started.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The connection to NATS cannot be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The shards cannot be asked for a listener.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The subject prefix is not valid.
    #[error(transparent)]
    Subjects(#[from] SubjectError),
    /// A namespace of the configuration cannot be made.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Dynamo's routers cannot be served.
    #[cfg(feature = "dynamo")]
    #[error(transparent)]
    Dynamo(#[from] crate::dynamo::DynamoError),
    /// llm-d's routers cannot be served.
    #[cfg(feature = "redis")]
    #[error(transparent)]
    Redis(#[from] crate::redis::RedisStartError),
    /// SGLang's routers cannot be served.
    #[cfg(feature = "grpc")]
    #[error(transparent)]
    Grpc(#[from] crate::grpc::GrpcStartError),
    /// A setting needs a cargo feature without which this program was built.
    #[error("{setting}: this program was built without the feature {feature}")]
    LeftOut {
        /// The setting.
        setting: &'static str,
        /// The cargo feature.
        feature: &'static str,
    },
    /// The daemon cannot start with its snapshots.
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
