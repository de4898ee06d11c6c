//! Compressed chains: bounds on how long a prefix each holder holds, from blocks at chosen positions only.
//!
//! Such a search takes a turn among the writers: it finds blocks in the middle of runs, by tables that only writers have, and all that
//! it sees is of one instant.

use std::sync::Arc;

use crate::index::block::BlockKey;
use crate::index::directory::{SlotBits, SlotSet};
use crate::index::runs::{RunWriter, Spot};
use crate::index::shared::Shared;

use super::Search;
use super::bounds::{self, BoundedMatches, Probe, SparseChain};

/// Runs one search.
pub(crate) fn find_bounds(shared: &Shared, chain: &SparseChain<'_>, search: Search<'_>) -> BoundedMatches {
    let mut runs = shared.runs.write();
    runs.place_all();
    let directory = Arc::clone(&shared.slots.load());
    bounds::find(&runs, directory, chain, search)
}

impl Probe for RunWriter<'_> {
    fn holders(&self, name: BlockKey, among: Option<&SlotSet>) -> SlotSet {
        let mut found = SlotSet::default();
        self.find_place(name.current, |spot| {
            if self.is_at(spot, &name) {
                found.unite(&self.holders_to(spot, among));
            }
            None::<()>
        });
        found
    }

    fn chain_conflicts(&self) -> u64 {
        u64::from(self.has_doubles())
    }
}

impl RunWriter<'_> {
    /// The holders of a block and of all before it.
    pub(crate) fn holders_to(&self, spot: Spot, among: Option<&SlotSet>) -> SlotSet {
        let mut holding = self.holders_through(spot);
        if let Some(among) = among {
            holding.intersect(among);
        }
        let mut next = self.run(spot.run).and_then(|run| run.parent());
        while let Some(spot) = next.filter(|_| !holding.is_empty()) {
            holding.intersect(&self.holders_through(spot));
            next = self.run(spot.run).and_then(|run| run.parent());
        }
        holding
    }

    /// The holders of the first blocks of a run, up to this one.
    fn holders_through(&self, spot: Spot) -> SlotSet {
        let entries = self.entries(spot.run);
        entries
            .filter(|entry| entry.reach(2) > spot.offset)
            .map(|entry| entry.slot())
            .collect()
    }
}
