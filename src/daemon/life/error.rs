//! Why a daemon cannot start.

use crate::dynamo::DynamoError;
#[cfg(feature = "grpc")]
use crate::grpc::GrpcStartError;
use crate::http::{HttpStartError, TokenError};
use crate::lanes::PoolError;
use crate::redis::RedisStartError;
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
    /// The embedded broker.
    #[error("the embedded NATS server: {0}")]
    Broker(#[from] BrokerError),
    /// The embedded broker's address.
    #[error("the embedded NATS server's address {url}: {source}")]
    BrokerAddress {
        /// The address.
        url: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The admin listener.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// The query listener.
    #[error(transparent)]
    Http(#[from] HttpStartError),
    /// The token of the query listener.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The metrics recorder.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The lanes.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The connection to NATS.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection on which a gateway asks the shards for its listener.
    #[error("the connection to the shards: {0}")]
    Shards(#[from] kvatlas_client::ClientError),
    /// The subject prefix.
    #[error(transparent)]
    Subjects(#[from] SubjectError),
    /// A namespace of the configuration.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Dynamo's routers.
    #[error(transparent)]
    Dynamo(#[from] DynamoError),
    /// llm-d's routers.
    #[error(transparent)]
    Redis(#[from] RedisStartError),
    /// SGLang's routers.
    #[cfg(feature = "grpc")]
    #[error(transparent)]
    Grpc(#[from] GrpcStartError),
    /// SGLang's routers, in a program that leaves them out.
    #[cfg(not(feature = "grpc"))]
    #[error("grpc.listen: this kvatlas was built without gRPC (the feature grpc)")]
    GrpcLeftOut,
    /// The snapshots.
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
