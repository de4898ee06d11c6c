//! Errors that keep a daemon from starting, and the opening of listeners.

use std::io;
use std::net::SocketAddr;

#[cfg(any(feature = "dynamo", feature = "grpc", feature = "redis"))]
use tokio::net::TcpListener;

use crate::http::{HttpStartError, TokenError};
use crate::lanes::PoolError;
use crate::life::NamespaceError;
use crate::queries::SourceError;
use crate::snapshots::SnapshotStartError;
use kvatlas_core::wire::SubjectError;
use kvatlas_process::admin::AdminError;
use kvatlas_process::broker::ConnectError;
use kvatlas_process::broker::embedded::BrokerError;
use kvatlas_telemetry::MetricsError;

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
        source: io::Error,
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
    /// Gateway cannot get a listener's answers, because the shards cannot be asked.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Subject prefix is not valid.
    #[error(transparent)]
    Subjects(#[from] SubjectError),
    /// Namespace that the configuration names cannot be made.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Listener for routers of another project cannot be opened.
    #[error("cannot listen on {address} {purpose}: {source}")]
    Listen {
        /// Address of the listener.
        address: SocketAddr,
        /// Words that say what the listener is for.
        purpose: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Listener for SGLang's routers cannot be made from the settings. The value is the reason.
    #[error("{0}")]
    Grpc(String),
    /// Setting needs a cargo feature, and this program was built without that feature.
    #[error("{setting}: this program was built without the feature {feature}")]
    LeftOut {
        /// Name of the setting.
        setting: &'static str,
        /// Name of the cargo feature.
        feature: &'static str,
    },
    /// Snapshots cannot be used. The value is the reason.
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

/// Opens the listener of a door (listener for routers of another project), and returns it with its address. Errors use
/// `purpose` to say what the listener is for.
#[cfg(any(feature = "dynamo", feature = "grpc", feature = "redis"))]
pub(crate) async fn bind(
    address: SocketAddr,
    purpose: &'static str,
) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Listen {
        address,
        purpose,
        source,
    };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let local_addr = listener.local_addr().map_err(failed)?;
    Ok((listener, local_addr))
}
