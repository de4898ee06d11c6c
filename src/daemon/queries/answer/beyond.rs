//! Doubts about tiers beyond the device, and the queries that they concern.
//!
//! The blocks of a tier can only add to the blocks of nearer tiers. So if nearer tiers have all blocks of a query, the
//! answer is certain, whatever the farther tiers have.

use kvatlas_core::index::{NearBlocks, PositionalIndexer, Search, TierDepth};
use kvatlas_core::wire::{DegradedReasons, SingleQuery, Tier};

use super::{DoubtFacts, usable_max, usable_max_of_pairs};

/// Length of a query, in blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryLength {
    /// Number of blocks in the query.
    pub(super) blocks: u32,
    /// Maximum number of the query's blocks that a request can reuse.
    usable_max: u32,
    /// Maximum number of the query's blocks that a request can reuse at an engine that hashes pairs of tokens.
    usable_max_of_pairs: u32,
}

impl QueryLength {
    /// Returns the length of a query with this number of `blocks`. The number of tokens limits how many of the blocks
    /// a request can reuse.
    pub(super) fn of(query: &SingleQuery, blocks: impl TryInto<u32>, indexer: &PositionalIndexer) -> Self {
        let blocks = blocks.try_into().unwrap_or(u32::MAX);
        let usable_max = usable_max(query, indexer);
        Self {
            blocks,
            usable_max: usable_max.unwrap_or(blocks).min(blocks),
            usable_max_of_pairs: usable_max_of_pairs(query, indexer),
        }
    }

    /// Returns the maximum number of the query's blocks that a request can reuse at an engine that hashes pairs of
    /// tokens. `None` if it is not less than at other engines.
    pub(super) fn bound_of_pairs(self) -> Option<u32> {
        Some(self.usable_max_of_pairs).filter(|bound| *bound < self.usable_max)
    }

    /// Returns the length for an engine that hashes pairs of tokens.
    pub(super) fn of_pairs(self) -> Self {
        Self {
            usable_max: self.usable_max.min(self.usable_max_of_pairs),
            ..self
        }
    }

    /// Whether the blocks in nearer tiers, `near`, already reach the length of the query. If so, farther tiers cannot
    /// add any.
    fn is_met_by(self, near: NearBlocks) -> bool {
        near.matched_blocks >= self.blocks && near.usable_blocks >= self.usable_max
    }
}

impl DoubtFacts<'_, '_> {
    /// Whether any holder of the namespace is in doubt about its blocks on other tiers than the device.
    fn are_of_tiers(&self) -> bool {
        self.before.partial.up_to(Tier::DEVICE) != self.before.partial
    }

    /// Makes the search for a query. The search counts the blocks of each tier separately if the query asks for that,
    /// or if any holder is in doubt about other tiers than the device.
    pub(super) fn search_of<'o>(&self, query: &'o SingleQuery) -> Search<'o> {
        let tiers = match query.options.tiers || self.are_of_tiers() {
            true => TierDepth::Each,
            false => TierDepth::All,
        };
        Search {
            workers: query.options.workers.as_deref(),
            tiers,
            usable_max: usable_max(query, &self.namespace.indexer),
        }
    }
}

/// Positions, in an answer, of the holders that are in doubt about a tier beyond the device. A holder is included
/// even if that doubt does not concern the query.
#[derive(Debug, Default)]
pub(super) struct Doubted {
    judged: usize,
    places: Vec<usize>,
}

impl Doubted {
    /// Returns those of the next holder's `reasons` for doubt that concern the query. Called for each holder of the
    /// answer, in order. `near` has the holder's numbers of leading blocks: on the device, and on device and host
    /// together.
    pub(super) fn judge(
        &mut self,
        reasons: DegradedReasons,
        near: Option<[NearBlocks; 2]>,
        asked: QueryLength,
    ) -> DegradedReasons {
        let place = self.judged;
        self.judged += 1;
        // Mostly there is no reason.
        if reasons.is_empty() || reasons.up_to(Tier::DEVICE) == reasons {
            return reasons;
        }
        self.places.push(place);
        match near {
            Some([device, _]) if asked.is_met_by(device) => reasons.up_to(Tier::DEVICE),
            Some([_, host]) if asked.is_met_by(host) => reasons.up_to(Tier::HOST),
            _ => reasons,
        }
    }

    /// Whether the holder at position `place` of the answer is in doubt about a tier beyond the device.
    pub(super) fn has(&self, place: usize) -> bool {
        // The places are in order.
        self.places.binary_search(&place).is_ok()
    }
}
