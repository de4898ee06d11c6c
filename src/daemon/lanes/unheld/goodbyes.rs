//! Holders that have said goodbye. They are remembered for a minute, because a redelivered batch from before the
//! goodbye would otherwise make a holder without a publisher.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use parking_lot::Mutex;

use kvatlas_core::wire::EventBatch;
use kvatlas_telemetry::labels::DropReason;

use super::super::line::HolderKey;
use super::super::sequence::{HighWater, REMEMBERED_US};

/// Maximum number of goodbyes that are remembered. Beyond this number, the oldest are forgotten.
const GOODBYES_MAX: usize = 65_536;

/// Goodbyes of the last minute.
#[derive(Debug, Default)]
pub(in super::super) struct Goodbyes(Mutex<GoodbyeTable>);

#[derive(Debug, Default)]
struct GoodbyeTable {
    /// Time of each holder's goodbye, with the newest batch that the holder had received (its high-water marks).
    by_holder: BTreeMap<HolderKey, (u64, HighWater)>,
    /// Goodbyes in the order in which they came, each with its time.
    order: VecDeque<(u64, HolderKey)>,
}

impl Goodbyes {
    /// Notes that a holder has said goodbye. `known` is the newest batch that the holder had received (its high-water
    /// marks).
    pub(in super::super) fn note(&self, holder: HolderKey, known: HighWater, at_us: u64) {
        let GoodbyeTable { by_holder, order } = &mut *self.0.lock();
        by_holder.insert(holder.clone(), (at_us, known));
        order.push_back((at_us, holder));
        let is_old = |first_us: u64| at_us.saturating_sub(first_us) >= REMEMBERED_US;
        while let Some((first_us, _)) = order.front()
            && (is_old(*first_us) || order.len() > GOODBYES_MAX)
            && let Some((first_us, holder)) = order.pop_front()
        {
            // If the holder has said goodbye again later, that goodbye is kept.
            if by_holder
                .get(&holder)
                .is_some_and(|(at_us, _)| *at_us == first_us)
            {
                by_holder.remove(&holder);
            }
        }
    }

    /// Returns the reason to drop a batch of an unregistered holder: the batch was sent before the holder's goodbye.
    /// Returns `None` if the batch must be taken.
    pub(in super::super) fn is_over(
        &self,
        holder: &HolderKey,
        batch: &EventBatch,
        now_us: u64,
    ) -> Option<DropReason> {
        let goodbyes = self.0.lock();
        let (at_us, known) = goodbyes.by_holder.get(holder)?;
        let is_remembered = now_us.saturating_sub(*at_us) < REMEMBERED_US;
        is_remembered.then(|| known.drop_reason(batch)).flatten()
    }

    /// Forgets the goodbyes of a range of holders.
    pub(in super::super) fn forget(&self, ranks: RangeInclusive<HolderKey>) {
        let by_holder = &mut self.0.lock().by_holder;
        let found: Vec<HolderKey> = by_holder.range(ranks).map(|(holder, _)| holder.clone()).collect();
        for holder in found {
            by_holder.remove(&holder);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::BatchCursor;

    use super::super::super::tests::{batch, worker};
    use super::*;

    fn known(seq: u64) -> HighWater {
        HighWater {
            seen: BatchCursor { epoch: 1, seq },
            made_us: 0,
        }
    }

    #[test]
    fn goodbyes_are_forgotten_in_time_and_the_first_for_want_of_room() {
        let goodbyes = Goodbyes::default();
        for number in 0..GOODBYES_MAX {
            goodbyes.note((worker(number), 0), known(5), 10);
        }
        goodbyes.note((worker(0), 0), known(9), 20);
        let over = |goodbyes: &Goodbyes, number, seq, now_us| {
            goodbyes
                .is_over(&(worker(number), 0), &batch(seq, Vec::new()), now_us)
                .is_some()
        };
        assert!(over(&goodbyes, 0, 9, 30) && over(&goodbyes, 1, 5, 30));
        assert!(!over(&goodbyes, 1, 6, 30), "it goes on behind the goodbye");
        goodbyes.note((worker(GOODBYES_MAX), 0), known(5), 30);
        assert!(!over(&goodbyes, 1, 5, 30) && over(&goodbyes, 2, 5, 30));
        assert!(!over(&goodbyes, 0, 9, 20 + REMEMBERED_US));
        goodbyes.note((worker(0), 1), known(5), 20 + REMEMBERED_US);
        let left = goodbyes.0.lock();
        assert_eq!((left.order.len(), left.by_holder.len()), (2, 2));
    }
}
