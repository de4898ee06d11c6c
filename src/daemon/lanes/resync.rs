//! The lanes' part in a resync. Each step of a resync is sent to the lane of its holder.

use std::sync::Arc;

use tokio::sync::oneshot;

use kvatlas_core::stream::StreamGeneration;
use kvatlas_telemetry::labels::ResyncFailure;

use super::clock::now_us;
use super::held::ResyncNumber;
use super::holder::{Afterwards, Context, Holder};
use super::holder_resync::{ResyncAnswer, ResyncBegun, ResyncOutcome};
use super::job::{Job, ResyncJob, ResyncStep};
use super::lane::Lane;
use super::line::HolderKey;
use super::pool::{LanePool, PoolError};

impl LanePool {
    /// Begins the resync of a holder. Returns `None` if the holder does not exist any more.
    pub(crate) async fn begin_resync(&self, holder: &HolderKey) -> Result<Option<ResyncBegun>, PoolError> {
        let (reply, begun) = oneshot::channel();
        self.send_resync(holder, ResyncStep::Begin(reply), 0).await?;
        Ok(begun.await.ok())
    }

    /// Applies the publisher's answer to a holder. The publisher was asked in `generation` of the event stream. `bytes`
    /// is the approximate size of the answer in memory.
    pub(crate) async fn finish_resync(
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
        // A holder that has left sends no reply.
        Ok(done.await.unwrap_or(ResyncOutcome::Superseded))
    }

    /// Ends a holder's wait for an answer. The held batches are applied.
    pub(crate) async fn abandon_resync(
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
        let line = Arc::clone(in_flight.line());
        let job = Job::Resync(Box::new(ResyncJob {
            holder: holder.clone(),
            step,
            in_flight,
        }));
        Ok(self.lane(lane).jobs.send(&line, job, bytes, now_us()).await?)
    }
}

impl Lane {
    /// Does a step of a holder's resync.
    pub(super) fn resync(&mut self, job: ResyncJob) {
        // An answer shows that the publisher is alive.
        let clocks = match job.step {
            ResyncStep::Finish { .. } => self.clocks_when_seen(),
            ResyncStep::Begin(_) | ResyncStep::Abandon { .. } => self.clocks(),
        };
        let context = Context {
            clocks,
            holding: &self.holding,
            clock: &self.clock,
            tally: &self.tally,
        };
        let afterwards = self
            .holders
            .get_mut(&job.holder)
            .map_or(Afterwards::Stays, |holder| take_step(holder, job.step, context));
        if afterwards == Afterwards::Leaves {
            self.take_leave(&job.holder);
        }
        self.finish(&job.holder.0, job.in_flight);
    }
}

/// Does a step of the holder's resync. If nobody waits for the step's reply any more, the reply is dropped, and held
/// batches time out later.
fn take_step(holder: &mut Holder, step: ResyncStep, context: Context<'_>) -> Afterwards {
    match step {
        ResyncStep::Begin(reply) => {
            let _ = reply.send(holder.begin_resync(context));
            Afterwards::Stays
        }
        ResyncStep::Finish {
            number,
            answer,
            generation,
            reply,
        } => {
            let (outcome, afterwards) = holder.finish_resync(number, answer, generation, context);
            let _ = reply.send(outcome);
            afterwards
        }
        ResyncStep::Abandon { number, failure } => {
            if failure == ResyncFailure::CursorBehind {
                holder.note_contradiction();
            }
            holder.abandon_resync(number, failure != ResyncFailure::NoResponder, context)
        }
    }
}
