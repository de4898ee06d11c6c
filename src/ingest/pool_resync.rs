//! The lanes' part in a resync, as the [`Resyncer`](super::Resyncer) sees it.

use tokio::sync::oneshot;

use crate::telemetry::labels::ResyncFailure;
use crate::tracking::StreamGeneration;

use super::held::ResyncNumber;
use super::holder_resync::{ResyncBegun, ResyncOutcome};
use super::job::{HolderKey, Job, ResyncJob, ResyncStep};
use super::pool::{LanePool, PoolError};
use super::resync::ResyncAnswer;

impl LanePool {
    /// Begins the resync of a holder; none where there is no such holder any more.
    pub(super) async fn begin_resync(&self, holder: &HolderKey) -> Result<Option<ResyncBegun>, PoolError> {
        let (reply, begun) = oneshot::channel();
        self.send_resync(holder, ResyncStep::Begin(reply), 0).await?;
        Ok(begun.await.ok())
    }

    /// Has an answer applied that was asked for in `generation` of the stream; `bytes` is about how much memory it takes.
    pub(super) async fn finish_resync(
        &self,
        holder: &HolderKey,
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
        bytes: usize,
    ) -> Result<ResyncOutcome, PoolError> {
        let (reply, done) = oneshot::channel();
        let step = ResyncStep::Finish {
            number,
            answer,
            generation,
            reply,
        };
        self.send_resync(holder, step, bytes).await?;
        // A holder that has left meanwhile does not answer.
        Ok(done.await.unwrap_or(ResyncOutcome::Superseded))
    }

    /// Has a holder go on without an answer.
    pub(super) async fn abandon_resync(
        &self,
        holder: &HolderKey,
        number: ResyncNumber,
        failure: ResyncFailure,
    ) -> Result<(), PoolError> {
        self.send_resync(holder, ResyncStep::Abandon { number, failure }, 0)
            .await
    }

    async fn send_resync(&self, holder: &HolderKey, step: ResyncStep, bytes: usize) -> Result<(), PoolError> {
        let (lane, in_flight) = self.assignments.assign(&holder.0);
        let job = Job::Resync(ResyncJob {
            holder: holder.clone(),
            step,
            in_flight,
        });
        Ok(self.lane(lane).jobs.send(job, bytes).await?)
    }
}
