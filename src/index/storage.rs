//! How the blocks of an index are stored: as runs, or as a radix tree. Asked once an event and once a query, not once a block.

use std::sync::Arc;

use crate::hash::PositionalLineageHash;

use super::capacity::{Capacity, Usage};
use super::chain::QueryChain;
use super::matches::Matches;
use super::namespace::IndexKind;
use super::radix::{RadixNode, RadixStore};
use super::runs::{BlockKey, RunStore, RunWriter, Spot};
use super::search::{self, Search};
use super::slots::Slots;
use super::sparse::{self, BoundedMatches, CompressedChainRefused, SparseChain};

/// What all holders of an index share.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "an index has one, mostly of the large kind, which no search should have to follow a pointer to"
)]
pub(crate) enum Storage {
    Runs(RunStore),
    Radix(RadixStore),
}

impl Storage {
    /// Nothing stored yet. Only runs can be bounded.
    pub(crate) fn new(kind: IndexKind, capacity: Capacity, total: &Arc<Usage>) -> Self {
        match kind {
            IndexKind::Lineage => Self::Runs(RunStore::new(capacity, Arc::clone(total))),
            IndexKind::Radix => Self::Radix(RadixStore::default()),
        }
    }

    /// Begins to change the storage for one event.
    pub(crate) fn write(&self) -> Turn<'_> {
        match self {
            Self::Runs(store) => Turn::Runs(store.write()),
            Self::Radix(store) => Turn::Radix(store),
        }
    }

    /// Runs one search.
    pub(crate) fn find(&self, slots: &Slots, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
        match self {
            Self::Runs(store) => search::find(store, slots, chain, search),
            Self::Radix(store) => store.find(slots, chain, search),
        }
    }

    /// Runs one search by blocks chosen from a chain.
    pub(crate) fn find_bounds(
        &self,
        slots: &Slots,
        chain: &SparseChain<'_>,
        search: Search<'_>,
    ) -> Result<BoundedMatches, CompressedChainRefused> {
        match self {
            Self::Runs(store) => Ok(sparse::find_at_one_instant(store, slots, chain, search)),
            Self::Radix(_) => Err(CompressedChainRefused),
        }
    }

    /// The block at `position` of a query, which must be below its length, and how many holders have it.
    pub(crate) fn block_at(
        &self,
        chain: &mut QueryChain<'_>,
        position: usize,
    ) -> (PositionalLineageHash, usize) {
        let key = chain.key(position);
        let holders = match self {
            Self::Runs(store) => search::holders_of(store, &BlockKey::from(key)),
            Self::Radix(store) => store.holders_of(chain, position),
        };
        (key, holders)
    }

    /// How many distinct blocks there are.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Runs(store) => store.len(),
            Self::Radix(store) => store.len(),
        }
    }

    /// What they take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Runs(store) => store.bytes(),
            Self::Radix(store) => store.bytes(),
        }
    }

    /// The runs, where the blocks are stored as such.
    pub(crate) fn runs(&self) -> Option<&RunStore> {
        match self {
            Self::Runs(store) => Some(store),
            Self::Radix(_) => None,
        }
    }
}

/// A change of the storage for one event.
pub(crate) enum Turn<'s> {
    /// Other writers of the index wait meanwhile.
    Runs(RunWriter<'s>),
    /// Nobody waits.
    Radix(&'s RadixStore),
}

impl<'s> Turn<'s> {
    /// The runs, where the blocks are stored as such.
    pub(crate) fn runs(&self) -> Option<&RunWriter<'s>> {
        match self {
            Self::Runs(writer) => Some(writer),
            Self::Radix(_) => None,
        }
    }

    /// As [`Self::runs`], to change them.
    pub(crate) fn runs_mut(&mut self) -> Option<&mut RunWriter<'s>> {
        match self {
            Self::Runs(writer) => Some(writer),
            Self::Radix(_) => None,
        }
    }
}

/// Where queries find a block of one holder.
#[derive(Debug, Clone, Default)]
pub(crate) enum Standing {
    /// Nowhere.
    #[default]
    Nowhere,
    /// In a run.
    InRun(Spot),
    /// In the radix tree.
    InTree(RadixNode),
}
