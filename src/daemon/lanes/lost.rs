//! Messages that were dropped because the queue of their lane was full: the marks that stand for them, and the doubts that follow.

use std::sync::Arc;

use kvatlas_core::wire::EventBatch;
use kvatlas_telemetry::labels::DropReason;

use super::absent::ranks_of;
use super::holder::{Afterwards, Context};
use super::lane::{Lane, Sender};
use super::payloads::Payloads;
use super::sequence::{HighWater, cursor_of};
use super::settings::epoch_max_at;

/// Most ranks for which a mark keeps the newest dropped batch. Batches of further ranks count as unknown.
const RANKS_MAX: usize = 64;

/// The mark (tombstone) in the queue for messages of a worker that were dropped.
pub(crate) struct LostJob {
    sender: Arc<Sender>,
    /// The newest dropped batch of each rank, without its events.
    newest: Vec<EventBatch>,
    /// Whether more was dropped than `newest` says: messages that cannot be read, ranks beyond the bound, or a restart of the numbering.
    has_unknown: bool,
}

impl LostJob {
    /// Makes the mark of these messages.
    pub(super) fn of(sender: Arc<Sender>, payloads: &Payloads) -> Self {
        let mut lost = Self {
            sender,
            newest: Vec::new(),
            has_unknown: false,
        };
        for payload in payloads.iter() {
            match EventBatch::decode_head(payload) {
                Ok(head) => lost.note(head),
                Err(_) => lost.has_unknown = true,
            }
        }
        lost
    }

    /// Adds later messages of the same worker.
    pub(super) fn merge(&mut self, later: Self) {
        self.has_unknown |= later.has_unknown;
        later.newest.into_iter().for_each(|head| self.note(head));
    }

    fn note(&mut self, head: EventBatch) {
        let Some(newest) = self.newest.iter_mut().find(|known| known.rank == head.rank) else {
            match self.newest.len() < RANKS_MAX {
                true => self.newest.push(head),
                false => self.has_unknown = true,
            }
            return;
        };
        if HighWater::of(newest).is_numbered_anew(&head) {
            self.has_unknown = true;
        } else if cursor_of(&head) > cursor_of(newest) {
            *newest = head;
        }
    }
}

impl Lane {
    /// Doubts the holders whose batches were dropped. A message that cannot be read may have been for any rank.
    pub(super) fn note_lost(&mut self, lost: LostJob) {
        let context = Context {
            clocks: self.clocks(),
            holding: &self.holding,
            clock: &self.clock,
            tally: &self.tally,
        };
        let worker = lost.sender.worker.clone();
        let epoch_max = epoch_max_at(context.clocks.unix_us, self.limits.now().epoch_ahead_max);
        if lost.has_unknown {
            for (_, holder) in self.holders.range_mut(ranks_of(&worker)) {
                holder.note_undecodable(context.clocks);
            }
        }
        let mut is_for_nobody = lost.has_unknown;
        let mut leaving = Vec::new();
        for head in &lost.newest {
            let key = (worker.clone(), head.rank);
            match self.holders.get_mut(&key) {
                // The dropped batch may have been the second of a holder whose first batch is late.
                None => {
                    is_for_nobody = true;
                    self.note_refused(&lost.sender, head, DropReason::LaneFull);
                }
                Some(holder) if head.epoch > epoch_max => holder.note_unbelieved(context.clocks),
                Some(holder) => match holder.note_lost(head, context) {
                    Afterwards::Leaves => leaving.push(key),
                    Afterwards::Stays => {}
                },
            }
        }
        for key in leaving {
            self.take_leave(&key);
        }
        if is_for_nobody {
            self.absent.note_undecodable(&worker);
        }
        if lost.has_unknown {
            self.note_unread(&lost.sender.namespace, &worker, DropReason::LaneFull);
        }
        self.doubts.notify_one();
        self.finish_messages(lost.sender);
    }
}
