//! Starting to answer over gRPC.

use std::net::SocketAddr;

use crate::shared::{Shared, Stage};

use super::error::StartError;

/// Serves SGLang's routers as tasks of `stage`, if an address is configured. Returns the address that is listened on.
pub(super) async fn start_grpc(shared: &Shared, stage: &Stage) -> Result<Option<SocketAddr>, StartError> {
    match shared.config.grpc.listen {
        None => Ok(None),
        Some(address) => listen(address, shared, stage).await.map(Some),
    }
}

#[cfg(feature = "grpc")]
async fn listen(address: SocketAddr, shared: &Shared, stage: &Stage) -> Result<SocketAddr, StartError> {
    let source = super::http::source(shared).await?;
    Ok(crate::grpc::start_grpc(address, source, shared, stage).await?)
}

#[cfg(not(feature = "grpc"))]
async fn listen(_: SocketAddr, _: &Shared, _: &Stage) -> Result<SocketAddr, StartError> {
    Err(StartError::GrpcLeftOut)
}
