//! Which slots each worker has, in versions that cost little to make one from another.
//!
//! Every holder that joins makes a new version of the directory. Were all names copied for each, ten thousand that join would copy a
//! hundred million: so the names lie in parts that versions share, and a change copies one part.

use std::collections::HashMap;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::wire::WorkerName;

use super::holder_set::HolderSlot;

/// In how many parts the names lie. A change copies all references to parts, and the names of one: with a few thousand names that is about
/// the same.
const PARTS: usize = 64;

type Part = HashMap<WorkerName, Vec<HolderSlot>>;

/// One version: every worker that has a slot, with its slots.
#[derive(Debug, Clone)]
pub(crate) struct WorkerSlots(Vec<Arc<Part>>);

impl Default for WorkerSlots {
    fn default() -> Self {
        // All the same empty one, until somebody is put in.
        Self(vec![Arc::default(); PARTS])
    }
}

impl WorkerSlots {
    /// How many workers have a slot.
    pub(crate) fn workers(&self) -> usize {
        self.0.iter().map(|part| part.len()).sum()
    }

    /// The slots of a worker, in the order in which it got them.
    pub(crate) fn of(&self, worker: &WorkerName) -> &[HolderSlot] {
        self.0[part_of(worker)].get(worker).map_or(&[], Vec::as_slice)
    }

    /// Gives a worker a slot more.
    pub(crate) fn add(&mut self, worker: &WorkerName, slot: HolderSlot) {
        let part = Arc::make_mut(&mut self.0[part_of(worker)]);
        part.entry(worker.clone()).or_default().push(slot);
    }

    /// Takes a slot from a worker.
    pub(crate) fn remove(&mut self, worker: &WorkerName, slot: HolderSlot) {
        let part = Arc::make_mut(&mut self.0[part_of(worker)]);
        if let Some(slots) = part.get_mut(worker) {
            slots.retain(|other| *other != slot);
            if slots.is_empty() {
                part.remove(worker);
            }
        }
    }
}

fn part_of(worker: &WorkerName) -> usize {
    #[allow(
        clippy::cast_possible_truncation,
        reason = "only the low bits are wanted, and they are in both"
    )]
    let hash = xxh3_64(worker.as_str().as_bytes()) as usize;
    hash % PARTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_share_what_does_not_change_and_nothing_else() {
        let name = |number: usize| WorkerName::new(&format!("gpu-{number}")).unwrap();
        let slot = |number: usize| HolderSlot::new(number).unwrap();
        let mut versions = vec![WorkerSlots::default()];
        for number in 0..500 {
            let mut next = versions[number].clone();
            next.add(&name(number / 2), slot(number));
            versions.push(next);
        }
        for (count, version) in versions.iter().enumerate() {
            assert_eq!(version.workers(), count.div_ceil(2));
            for number in 0..250 {
                let expected: Vec<_> = (number * 2..count.min(number * 2 + 2)).map(slot).collect();
                assert_eq!(version.of(&name(number)), expected, "{number} of {count}");
            }
        }
        let mut last = versions.pop().unwrap();
        last.remove(&name(0), slot(1));
        last.remove(&name(0), slot(7));
        assert_eq!((last.workers(), last.of(&name(0))), (250, [slot(0)].as_slice()));
        last.remove(&name(0), slot(0));
        assert_eq!((last.workers(), last.of(&name(0))), (249, [].as_slice()));
        assert_eq!(versions[499].of(&name(0)), [slot(0), slot(1)]);
    }
}
