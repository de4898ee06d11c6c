//! Workers without a holder that have sent a message that could not be decoded. It may have overtaken what makes them a holder, and then
//! nothing else shows that it was lost.

use std::collections::HashMap;

use super::line::WorkerKey;

/// Most workers that are remembered; of more, those that sent theirs first are forgotten.
const STRANGERS_MAX: usize = 1024;
/// For how long they are remembered: no batch comes so much later than one that overtook it.
const REMEMBERED_US: u64 = 60_000_000;

/// The strangers of a lane. Each keeps its lane while it is remembered.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    /// When each sent its last such message, in microseconds on the lane's clock.
    doubted_us: HashMap<WorkerKey, u64>,
}

impl Strangers {
    /// Remembers a worker. Gives back one that is forgotten for it.
    pub(super) fn remember(&mut self, worker: &WorkerKey, now_us: u64) -> Option<WorkerKey> {
        self.doubted_us.insert(worker.clone(), now_us);
        if self.doubted_us.len() <= STRANGERS_MAX {
            return None;
        }
        let others = self.doubted_us.iter().filter(|(other, _)| *other != worker);
        let oldest = others.min_by_key(|(_, since)| **since)?.0.clone();
        self.doubted_us.remove(&oldest);
        Some(oldest)
    }

    /// Whether a worker is remembered.
    pub(super) fn has(&self, worker: &WorkerKey) -> bool {
        self.doubted_us.contains_key(worker)
    }

    /// Forgets those that have been remembered for long, and gives them back.
    pub(super) fn forget_old(&mut self, now_us: u64) -> Vec<WorkerKey> {
        let is_old = |_: &WorkerKey, since: &mut u64| now_us.saturating_sub(*since) >= REMEMBERED_US;
        let gone = self.doubted_us.extract_if(is_old);
        gone.map(|(worker, _)| worker).collect()
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{NamespaceName, WorkerName};

    use super::*;

    fn worker(number: usize) -> WorkerKey {
        WorkerKey {
            namespace: NamespaceName::new("n").unwrap(),
            worker: WorkerName::new(&format!("w{number}")).unwrap(),
        }
    }

    #[test]
    fn strangers_are_forgotten_in_time_and_the_oldest_for_want_of_room() {
        let mut strangers = Strangers::default();
        for number in 0..STRANGERS_MAX {
            assert_eq!(strangers.remember(&worker(number), number as u64), None);
        }
        assert_eq!(strangers.remember(&worker(0), 5_000), None);
        assert_eq!(strangers.remember(&worker(STRANGERS_MAX), 5_000), Some(worker(1)));
        assert!(strangers.has(&worker(0)) && !strangers.has(&worker(1)));
        let gone = strangers.forget_old(REMEMBERED_US + 4_999);
        assert_eq!(gone.len(), STRANGERS_MAX - 2);
        assert!(strangers.has(&worker(0)) && strangers.has(&worker(STRANGERS_MAX)));
    }
}
