//! Queue of publishers to ask, fair between workers. First attempts come before repeated ones, and silent publishers
//! come last.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Prospect (likelihood) that a holder's publisher answers. Publishers with a lower value are asked first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Prospect {
    /// No attempt has failed since the doubt began.
    First,
    /// Last attempt failed, but not because the publisher was silent: for example, the answer was not valid.
    Again,
    /// Publisher did not answer the last request in time.
    Silent,
}

/// Interval, in items, at which the queue takes an item with the worst prospect (likelihood of an answer). All other
/// items are taken from those with the best prospect. So no item waits for ever.
const LAST_FIRST_EVERY: u64 = 8;

/// Queue of items, sorted by their prospects ([`Prospect`]). Among items of one prospect the workers take turns, one
/// item each, however many items each worker has.
#[derive(Debug)]
pub(super) struct FairQueue<W, T> {
    classes: [Class<W, T>; 3],
    taken: u64,
}

#[derive(Debug)]
struct Class<W, T> {
    turns: VecDeque<W>,
    items: HashMap<W, VecDeque<T>>,
}

impl<W: Clone + Eq + Hash, T> FairQueue<W, T> {
    pub(super) fn new() -> Self {
        let class = || Class {
            turns: VecDeque::new(),
            items: HashMap::new(),
        };
        Self {
            classes: [class(), class(), class()],
            taken: 0,
        }
    }

    /// Returns the number of items that wait.
    pub(super) fn len(&self) -> usize {
        let items = self.classes.iter().flat_map(|class| class.items.values());
        items.map(VecDeque::len).sum()
    }

    /// Adds an item of `worker` after the worker's other items of the same prospect (likelihood of an answer).
    pub(super) fn push(&mut self, worker: W, prospect: Prospect, item: T) {
        let class = &mut self.classes[prospect as usize];
        let items = class.items.entry(worker.clone()).or_default();
        if items.is_empty() {
            class.turns.push_back(worker);
        }
        items.push_back(item);
    }

    /// Takes the next item from the queue.
    pub(super) fn pop(&mut self) -> Option<T> {
        self.taken += 1;
        if self.taken.is_multiple_of(LAST_FIRST_EVERY) {
            self.classes.iter_mut().rev().find_map(Class::pop)
        } else {
            self.classes.iter_mut().find_map(Class::pop)
        }
    }
}

impl<W: Clone + Eq + Hash, T> Class<W, T> {
    fn pop(&mut self) -> Option<T> {
        let worker = self.turns.pop_front()?;
        let items = self.items.get_mut(&worker)?;
        let item = items.pop_front();
        if items.is_empty() {
            self.items.remove(&worker);
        } else {
            self.turns.push_back(worker);
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_with_many_ranks_delays_another_by_one_turn() {
        let mut queue = FairQueue::new();
        for rank in 0..63 {
            queue.push("loud", Prospect::First, ("loud", rank));
        }
        queue.push("quiet", Prospect::First, ("quiet", 0));
        assert_eq!(queue.len(), 64);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order.iter().position(|(worker, _)| *worker == "quiet"), Some(1));
        assert_eq!(order.len(), 64);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn first_tries_come_before_repeated_ones_and_the_silent_last_but_not_never() {
        let mut queue = FairQueue::new();
        for number in 0..20 {
            queue.push(number, Prospect::Silent, "silent");
            queue.push(number, Prospect::Again, "again");
            queue.push(number, Prospect::First, "first");
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order.len(), 60);
        assert_eq!(&order[..7], ["first"; 7]);
        assert_eq!(order[7], "silent");
        let last_first = order.iter().rposition(|item| *item == "first").unwrap();
        let last_again = order.iter().rposition(|item| *item == "again").unwrap();
        assert!(last_first < last_again && last_again < 59);
    }
}
