//! Commands of operators that lanes carry out on holders.

use kvatlas_core::wire::{AdminHolder, Rank};
use kvatlas_telemetry::labels::LaneWork;

use super::holder::Afterwards;
use super::job::HolderCommand;
use super::lane::Lane;
use super::line::{HolderKey, WorkerKey};
use super::pool::{LanePool, PoolError};

impl LanePool {
    /// Carries out an operator's command on the holders that `of` names, after all batches that their worker sent
    /// earlier. Returns the number of these holders. Publishers without a holder, whose batches are dropped, are forgotten as
    /// holders are.
    pub(crate) async fn command(&self, of: &AdminHolder, command: HolderCommand) -> Result<u64, PoolError> {
        let worker = WorkerKey {
            namespace: of.namespace.clone(),
            worker: of.worker.clone(),
        };
        let rank = of.rank;
        let carry_out = move |lane: &mut Lane, worker: &WorkerKey| lane.command(worker, rank, command);
        // Commands are carried out one after the other.
        let done = self.on_worker_now(worker, LaneWork::Upkeep, carry_out)?;
        let count = done.await.map_err(|_| PoolError::LaneStopped)?;
        let refused = match (command, self.namespaces.get(&of.namespace)) {
            (HolderCommand::Forget, Some(namespace)) => {
                namespace.indexer.refused().forget_all(&of.worker, rank)
            }
            _ => 0,
        };
        Ok(count + refused)
    }
}

impl Lane {
    /// Carries out an operator's command on the holder of `worker` with this `rank`, or on the holders of all ranks
    /// if `rank` is `None`. Returns the number of holders found.
    fn command(&mut self, worker: &WorkerKey, rank: Option<Rank>, command: HolderCommand) -> u64 {
        let ranks = rank.map_or(Rank::MIN..=Rank::MAX, |rank| rank..=rank);
        let (first, last) = (*ranks.start(), *ranks.end());
        let keys = (worker.clone(), first)..=(worker.clone(), last);
        let mut count = 0;
        match command {
            HolderCommand::Doubt => {
                let context = self.parts.context(self.clocks());
                let mut leaving = Vec::new();
                for (key, holder) in self.holders.range_mut(keys) {
                    if holder.note_operator_doubt(context) == Afterwards::Leaves {
                        leaving.push(key.clone());
                    }
                    count += 1;
                }
                leaving.iter().for_each(|key| self.take_leave(key));
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
        count
    }
}
