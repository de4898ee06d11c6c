//! Holders that have said goodbye. They are remembered for a minute, because a redelivered batch from before the
//! goodbye would otherwise make a holder without a publisher.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use parking_lot::Mutex;

use kvatlas_core::wire::{BatchCursor, EventBatch};
use kvatlas_telemetry::labels::DropReason;

use super::super::line::HolderKey;
use super::super::sequence::{HighWater, REMEMBERED_US, cursor_of};

/// Maximum number of goodbyes that are remembered. Beyond this number, the oldest are forgotten.
const GOODBYES_MAX: usize = 65_536;

/// Time after which it is noted again that a holder was removed for another process, in microseconds.
const RENEWED_US: u64 = 1_000_000;

/// Goodbye of a holder.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Goodbye {
    /// Time at which the goodbye came, by [`now_us`](super::super::clock::now_us).
    pub(in super::super) at_us: u64,
    /// Time at which it was said, in microseconds since the Unix epoch. `None` if the publisher has said nothing: the holder
    /// was removed for a process with another block size.
    pub(in super::super) said_us: Option<u64>,
    /// Newest batch that the holder had received.
    pub(in super::super) known: HighWater,
    /// Last batch of another publisher with a lower epoch: it claimed the holder too, or its batch has come since.
    pub(in super::super) other: Option<BatchCursor>,
}

impl Goodbye {
    /// Returns the reason to drop a batch; `None` if the batch must be taken.
    ///
    /// A batch of a lower epoch is of an ended process, unless one of these shows that its publisher goes on:
    ///
    /// - It goes on behind the last batch of the other publisher.
    /// - It has not waited (`is_new`), and was made after the goodbye. If it does not tell when it was made, its epoch
    ///   began after the goodbye. The clock of the process that said goodbye was ahead then.
    fn drop_reason(&self, batch: &EventBatch, is_new: bool) -> Option<DropReason> {
        let reason = self.known.drop_reason(batch)?;
        let is_next = |other: BatchCursor| other.epoch == batch.epoch && other.seq < batch.seq;
        let goes_on = self.said_us.is_some() && self.other.is_some_and(is_next);
        let made_us = batch.time_us.unwrap_or(batch.epoch);
        let is_later = is_new && self.said_us.is_some_and(|said_us| made_us > said_us);
        let is_taken = reason == DropReason::StaleEpoch && (goes_on || is_later);
        (!is_taken).then_some(reason)
    }
}

/// Goodbyes of the last minute.
#[derive(Debug, Default)]
pub(in super::super) struct Goodbyes(Mutex<GoodbyeTable>);

#[derive(Debug, Default)]
struct GoodbyeTable {
    by_holder: BTreeMap<HolderKey, Goodbye>,
    /// Goodbyes in the order in which they came, each with its time.
    order: VecDeque<(u64, HolderKey)>,
}

impl Goodbyes {
    /// Notes that a holder has said goodbye.
    pub(in super::super) fn note(&self, holder: HolderKey, goodbye: Goodbye) {
        let GoodbyeTable { by_holder, order } = &mut *self.0.lock();
        let at_us = goodbye.at_us;
        by_holder.insert(holder.clone(), goodbye);
        order.push_back((at_us, holder));
        let is_old = |first_us: u64| at_us.saturating_sub(first_us) >= REMEMBERED_US;
        while let Some((first_us, _)) = order.front()
            && (is_old(*first_us) || order.len() > GOODBYES_MAX)
            && let Some((first_us, holder)) = order.pop_front()
        {
            // If the holder has said goodbye again later, that goodbye is kept.
            if by_holder
                .get(&holder)
                .is_some_and(|goodbye| goodbye.at_us == first_us)
            {
                by_holder.remove(&holder);
            }
        }
    }

    /// Returns the reason to drop a batch of an unregistered holder: the batch was sent before the holder's goodbye.
    /// Returns `None` if the batch must be taken. `is_new` says whether the batch has not waited in the stream. A new batch
    /// of a lower epoch is noted, because its publisher goes on with the next one.
    pub(in super::super) fn is_over(
        &self,
        holder: &HolderKey,
        batch: &EventBatch,
        is_new: bool,
        now_us: u64,
    ) -> Option<DropReason> {
        let mut goodbyes = self.0.lock();
        let goodbye = goodbyes.by_holder.get_mut(holder)?;
        if now_us.saturating_sub(goodbye.at_us) >= REMEMBERED_US {
            return None;
        }
        if batch.says_goodbye() && goodbye.known.drop_reason(batch) == Some(DropReason::StaleEpoch) {
            // Whoever this was has ended as well.
            goodbye.other = None;
            return Some(DropReason::StaleEpoch);
        }
        let reason = goodbye.drop_reason(batch, is_new)?;
        if reason == DropReason::StaleEpoch && is_new {
            goodbye.other = Some(cursor_of(batch));
        }
        Some(reason)
    }

    /// Remembers for longer that a holder was removed for a process with another block size, because `batch` is of that
    /// process. If it is a goodbye, it counts like any other from now on, said at `unix_us`. Returns whether the process
    /// before has gone on, and is left.
    pub(in super::super) fn renew(
        &self,
        holder: &HolderKey,
        batch: &EventBatch,
        now_us: u64,
        unix_us: u64,
    ) -> bool {
        let known = self.0.lock().by_holder.get(holder).copied();
        let Some(mut removed) = known.filter(|known| known.said_us.is_none()) else {
            return false;
        };
        let is_goodbye = batch.says_goodbye();
        // Once a second is enough, and leaves room for others.
        if is_goodbye || now_us >= removed.at_us + RENEWED_US {
            removed.known.note(batch);
            removed.at_us = now_us;
            removed.said_us = is_goodbye.then_some(unix_us);
            self.note(holder.clone(), removed);
        }
        is_goodbye && removed.other.is_some()
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
    use kvatlas_core::wire::Event;

    use super::super::super::tests::{batch, worker};
    use super::*;

    fn known(seq: u64, at_us: u64) -> Goodbye {
        Goodbye {
            at_us,
            said_us: Some(1_000),
            known: HighWater {
                seen: BatchCursor { epoch: 1, seq },
                made_us: 0,
            },
            other: None,
        }
    }

    #[test]
    fn a_lower_epoch_is_taken_only_of_a_publisher_that_goes_on() {
        let goodbye = Goodbye {
            known: HighWater {
                seen: BatchCursor { epoch: 9_000, seq: 5 },
                made_us: 0,
            },
            other: Some(BatchCursor { epoch: 4, seq: 7 }),
            ..known(5, 10)
        };
        let made = |epoch, seq, time_us| EventBatch {
            epoch,
            time_us,
            ..batch(seq, Vec::new())
        };
        let is_taken =
            |batch: &EventBatch| [true, false].map(|is_new| goodbye.drop_reason(batch, is_new).is_none());
        // The other one that claimed the holder.
        assert_eq!(is_taken(&made(4, 8, None)), [true; 2]);
        assert_eq!(is_taken(&made(4, 7, None)), [false; 2]);
        assert_eq!(is_taken(&made(3, 8, None)), [false; 2]);
        // A process that has begun since, or a batch from before.
        assert_eq!(is_taken(&made(3, 1, Some(1_001))), [true, false]);
        assert_eq!(is_taken(&made(3, 1, Some(1_000))), [false; 2]);
        assert_eq!(is_taken(&made(1_001, 1, None)), [true, false]);
        // The one that said goodbye, whose clock is ahead.
        assert_eq!(
            is_taken(&made(9_000, 5, Some(9_500))),
            [true; 2],
            "it is numbered anew"
        );
        assert_eq!(is_taken(&made(9_000, 4, None)), [false; 2]);
        assert_eq!(is_taken(&made(9_001, 1, None)), [true; 2]);
    }

    #[test]
    fn a_publisher_that_goes_on_behind_a_goodbye_is_taken_by_its_second_new_batch() {
        let (goodbyes, holder) = (Goodbyes::default(), (worker(0), 0));
        let left = Goodbye {
            known: HighWater {
                seen: BatchCursor { epoch: 9, seq: 5 },
                made_us: 0,
            },
            ..known(5, 10)
        };
        // Its clock is behind.
        let made = |seq| EventBatch {
            epoch: 4,
            time_us: Some(1),
            ..batch(seq, Vec::new())
        };
        let is_taken = |seq, is_new| goodbyes.is_over(&holder, &made(seq), is_new, 20).is_none();
        goodbyes.note(holder.clone(), left);
        assert!(!is_taken(1, false) && !is_taken(2, false), "they have waited");
        assert!(!is_taken(3, true) && !is_taken(3, true) && is_taken(4, true));
        // The holder was removed for a process with another block size.
        let removed = Goodbye {
            said_us: None,
            ..left
        };
        goodbyes.note(holder.clone(), removed);
        let later = EventBatch {
            time_us: Some(2_000),
            ..made(6)
        };
        assert!(!is_taken(5, true) && goodbyes.is_over(&holder, &later, true, 20).is_some());
        let is_over = |now_us| goodbyes.is_over(&holder, &made(7), true, now_us).is_some();
        goodbyes.renew(&holder, &made(1), 9 + RENEWED_US, 0);
        assert!(is_over(9 + REMEMBERED_US) && !is_over(10 + REMEMBERED_US));
        goodbyes.renew(&holder, &made(1), 10 + RENEWED_US, 0);
        assert!(is_over(9 + RENEWED_US + REMEMBERED_US) && !is_over(10 + RENEWED_US + REMEMBERED_US));
        // That process says goodbye, so that the other one is taken by its next batch.
        let leave = |epoch| EventBatch {
            events: vec![Event::Goodbye],
            ..EventBatch { epoch, ..made(20) }
        };
        assert!(goodbyes.renew(&holder, &leave(10), 40 + RENEWED_US, 1_500));
        assert!(goodbyes.is_over(&holder, &later, true, 50 + RENEWED_US).is_none());
        assert!(
            goodbyes
                .is_over(&holder, &leave(4), true, 50 + RENEWED_US)
                .is_some()
        );
    }

    #[test]
    fn goodbyes_are_forgotten_in_time_and_the_first_for_want_of_room() {
        let goodbyes = Goodbyes::default();
        for number in 0..GOODBYES_MAX {
            goodbyes.note((worker(number), 0), known(5, 10));
        }
        goodbyes.note((worker(0), 0), known(9, 20));
        let over = |goodbyes: &Goodbyes, number, seq, now_us| {
            goodbyes
                .is_over(&(worker(number), 0), &batch(seq, Vec::new()), true, now_us)
                .is_some()
        };
        assert!(over(&goodbyes, 0, 9, 30) && over(&goodbyes, 1, 5, 30));
        assert!(!over(&goodbyes, 1, 6, 30), "it goes on behind the goodbye");
        goodbyes.note((worker(GOODBYES_MAX), 0), known(5, 30));
        assert!(!over(&goodbyes, 1, 5, 30) && over(&goodbyes, 2, 5, 30));
        assert!(!over(&goodbyes, 0, 9, 20 + REMEMBERED_US));
        goodbyes.note((worker(0), 1), known(5, 20 + REMEMBERED_US));
        let left = goodbyes.0.lock();
        assert_eq!((left.order.len(), left.by_holder.len()), (2, 2));
    }
}
