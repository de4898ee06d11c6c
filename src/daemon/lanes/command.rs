//! Commands of operators that lanes carry out on holders.

use std::sync::Arc;

use tokio::sync::oneshot;

use kvatlas_core::wire::{AdminHolder, Rank};

use super::clock::now_us;
use super::job::{CommandJob, HolderCommand, Job};
use super::lane::Lane;
use super::line::{HolderKey, WorkerKey};
use super::pool::{LanePool, PoolError};

impl LanePool {
    /// Carries out an operator's command on the holders that `of` names, after all batches that their worker sent
    /// earlier. Returns the number of these holders.
    pub(crate) async fn command(&self, of: &AdminHolder, command: HolderCommand) -> Result<u64, PoolError> {
        let worker = WorkerKey {
            namespace: of.namespace.clone(),
            worker: of.worker.clone(),
        };
        let (lane, in_flight) = self.assignments.assign(&worker);
        let line = Arc::clone(in_flight.line());
        let (reply, done) = oneshot::channel();
        let job = Job::Command(CommandJob {
            worker,
            rank: of.rank,
            command,
            reply,
            in_flight,
        });
        self.lane(lane).jobs.send(&line, job, 0, now_us()).await?;
        done.await.map_err(|_| PoolError::LaneStopped)
    }
}

impl Lane {
    /// Carries out an operator's command on holders of this lane, and replies with the number of these holders.
    pub(super) fn command(&mut self, job: CommandJob) {
        let ranks = job.rank.map_or(Rank::MIN..=Rank::MAX, |rank| rank..=rank);
        let (first, last) = (*ranks.start(), *ranks.end());
        let keys = (job.worker.clone(), first)..=(job.worker.clone(), last);
        let mut count = 0;
        match job.command {
            HolderCommand::Doubt => {
                for (_, holder) in self.holders.range_mut(keys) {
                    holder.note_operator_doubt();
                    count += 1;
                }
            }
            HolderCommand::Forget => {
                self.unheld.goodbyes.forget(keys.clone());
                let found: Vec<HolderKey> = self.holders.range(keys).map(|(key, _)| key.clone()).collect();
                for key in found {
                    self.forget(&key);
                    count += 1;
                }
            }
        }
        // The caller may have gone.
        let _ = job.reply.send(count);
        self.finish(&job.worker, job.in_flight);
    }
}
