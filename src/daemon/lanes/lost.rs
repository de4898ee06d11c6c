//! Marks in a lane's queue. A mark stands for messages that were dropped because the queue was full.

use std::sync::Arc;

use kvatlas_core::wire::EventBatch;

use super::line::Sender;
use super::payloads::Payloads;
use super::sequence::{HighWater, cursor_of};

/// Maximum number of ranks in a mark. For each rank, the mark has the newest dropped batch. Dropped batches of
/// further ranks count as unknown.
const RANKS_MAX: usize = 64;

/// Mark (tombstone) in the queue, in the place of dropped messages of a worker.
pub(crate) struct LostJob {
    pub(super) sender: Arc<Sender>,
    /// Newest dropped batch of each rank, without its events.
    pub(super) newest: Vec<EventBatch>,
    /// Whether batches were dropped of which `newest` shows nothing. There are three causes: a message could not be
    /// read, a batch was of a rank beyond [`RANKS_MAX`], or the publisher began to count from 1 again.
    pub(super) has_unknown: bool,
}

impl LostJob {
    /// Makes the mark that takes the place of dropped messages in the queue. `payloads` has these messages.
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

    /// Merges `later` into this mark. `later` stands for messages of the same worker that were dropped later.
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
