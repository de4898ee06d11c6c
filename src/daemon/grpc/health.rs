//! Readiness over gRPC's health protocol, `grpc.health.v1`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::ready;
use futures_util::stream::poll_fn;
use futures_util::{Stream, StreamExt};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use kvatlas_process::admin::Readiness;

/// Time between two checks of the readiness, for a client that watches it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Health service that tells whether the daemon is ready.
pub(super) struct ReadinessHealth {
    pub(super) readiness: Arc<Readiness>,
    pub(super) stopping: CancellationToken,
}

fn status_of(readiness: &Readiness) -> i32 {
    match readiness.report().is_ready() {
        true => ServingStatus::Serving.into(),
        false => ServingStatus::NotServing.into(),
    }
}

/// Returns an error if the request names a service that this server does not have. The empty name stands for the whole
/// server.
fn check_name(request: &Request<HealthCheckRequest>) -> Result<(), Status> {
    match request.get_ref().service.as_str() {
        "" | super::service::KV_INDEXER => Ok(()),
        _ => Err(Status::not_found("this service is not here")),
    }
}

#[tonic::async_trait]
impl Health for ReadinessHealth {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        check_name(&request)?;
        let status = status_of(&self.readiness);
        Ok(Response::new(HealthCheckResponse { status }))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// Sends the status, and each later one that differs, until the daemon stops.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        check_name(&request)?;
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (readiness, mut told) = (Arc::clone(&self.readiness), None);
        let changes = poll_fn(move |context| looks.poll_tick(context).map(Some)).filter_map(move |_| {
            let status = status_of(&readiness);
            let is_new = told.replace(status) != Some(status);
            ready(is_new.then_some(Ok::<_, Status>(HealthCheckResponse { status })))
        });
        let stopping = self.stopping.clone().cancelled_owned();
        Ok(Response::new(Box::pin(changes.take_until(stopping))))
    }
}
