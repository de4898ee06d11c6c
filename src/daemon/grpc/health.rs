//! Readiness over gRPC's health protocol, `grpc.health.v1`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::time::{Interval, MissedTickBehavior, interval};
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

/// State of one client's stream of health changes.
struct HealthWatch {
    readiness: Arc<Readiness>,
    stopping: CancellationToken,
    looks: Interval,
    /// Status that was sent to the client last.
    told: Option<i32>,
}

fn status_of(readiness: &Readiness) -> i32 {
    match readiness.report().is_ready() {
        true => ServingStatus::Serving.into(),
        false => ServingStatus::NotServing.into(),
    }
}

impl HealthWatch {
    /// Waits for a status that differs from the one sent last. Returns the new status with the stream's next state, or
    /// `None` when the daemon stops.
    async fn next(mut self) -> Option<(Result<HealthCheckResponse, Status>, Self)> {
        let stopping = self.stopping.clone();
        loop {
            stopping.run_until_cancelled(self.looks.tick()).await?;
            let status = status_of(&self.readiness);
            if self.told.replace(status) != Some(status) {
                return Some((Ok(HealthCheckResponse { status }), self));
            }
        }
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

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        check_name(&request)?;
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let watch = HealthWatch {
            readiness: Arc::clone(&self.readiness),
            stopping: self.stopping.clone(),
            looks,
            told: None,
        };
        Ok(Response::new(Box::pin(unfold(watch, HealthWatch::next))))
    }
}
