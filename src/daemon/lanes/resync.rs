//! The lanes' part in a resync. Each step of a resync is done by the lane of its holder.

use tokio::sync::oneshot;

use kvatlas_core::stream::StreamGeneration;
use kvatlas_telemetry::labels::{LaneWork, ResyncFailure};

use super::held::ResyncNumber;
use super::holder::{Afterwards, Context, Holder, JobClocks};
use super::holder_resync::{ResyncAnswer, ResyncBegun, ResyncOutcome};
use super::lane::Lane;
use super::line::{HolderKey, WorkerKey};
use super::pool::{LanePool, PoolError};

impl LanePool {
    /// Begins the resync of a holder. Returns `None` if the holder does not exist any more.
    pub(crate) async fn begin_resync(&self, holder: &HolderKey) -> Result<Option<ResyncBegun>, PoolError> {
        let begin = |holder: &mut Holder, context: Context<'_>| {
            // If nobody waits for the request any more, held batches time out later.
            (holder.begin_resync(context), Afterwards::Stays)
        };
        let begun = self.on_holder(holder, Lane::clocks, begin)?;
        Ok(begun.await.ok().flatten())
    }

    /// Applies the publisher's answer to a holder. The publisher was asked in `generation` of the event stream; a later
    /// generation means that messages may have been lost.
    ///
    /// The answer does not wait for room in the lane's queue. The caller bounds the number of answers, and their sizes.
    pub(crate) async fn finish_resync(
        &self,
        holder: &HolderKey,
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
    ) -> Result<ResyncOutcome, PoolError> {
        let finish = move |holder: &mut Holder, context: Context<'_>| {
            holder.finish_resync(number, answer, generation, context)
        };
        // An answer shows that the publisher is alive.
        let clocks = Lane::clocks_when_seen;
        let done = self.on_holder(holder, clocks, finish)?;
        // A holder that has left sends no reply.
        Ok(done.await.ok().flatten().unwrap_or(ResyncOutcome::Superseded))
    }

    /// Ends a holder's wait for an answer. The holder then applies the held batches.
    pub(crate) fn abandon_resync(
        &self,
        holder: &HolderKey,
        number: ResyncNumber,
        failure: ResyncFailure,
    ) -> Result<(), PoolError> {
        let abandon = move |holder: &mut Holder, context: Context<'_>| {
            ((), holder.abandon_resync(number, failure, context))
        };
        self.on_holder(holder, Lane::clocks, abandon).map(drop)
    }

    /// Lets the holder's lane do a step of a resync. `clocks` reads the lane's clocks for this step. The result is
    /// `None` if the holder does not exist.
    fn on_holder<T: Send + 'static>(
        &self,
        holder: &HolderKey,
        clocks: fn(&Lane) -> JobClocks,
        step: impl FnOnce(&mut Holder, Context<'_>) -> (T, Afterwards) + Send + 'static,
    ) -> Result<oneshot::Receiver<Option<T>>, PoolError> {
        let (worker, rank) = holder.clone();
        let task = move |lane: &mut Lane, worker: &WorkerKey| {
            let key = (worker.clone(), rank);
            let context = lane.parts.context(clocks(lane));
            let (told, afterwards) = step(lane.holders.get_mut(&key)?, context);
            if afterwards == Afterwards::Leaves {
                lane.take_leave(&key);
            }
            Some(told)
        };
        self.on_worker_now(worker, LaneWork::Resync, task)
    }
}
