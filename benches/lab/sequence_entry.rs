//! Entries of design 6: the holders of blocks with one content at one position.

use hashbrown::{HashMap, HashSet};

use kvatlas_core::hash::SequenceHash;

use super::prefix_index::HolderNumber;

/// Holders of the blocks with one content at one position. The holders are grouped by sequence hash, because blocks after
/// different prefixes have different sequence hashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeqEntry {
    /// Entry with one sequence hash. This is the usual case, and needs no map.
    Single(SequenceHash, HashSet<HolderNumber>),
    /// Entry with several sequence hashes, because blocks of this content follow several prefixes.
    Multi(HashMap<SequenceHash, HashSet<HolderNumber>>),
}

impl SeqEntry {
    /// Makes an entry without holders.
    pub(super) fn vacant(name: SequenceHash) -> Self {
        Self::Single(name, HashSet::new())
    }

    /// Returns the holders that have the block with the sequence hash `name`.
    pub(super) fn holders(&self, name: SequenceHash) -> Option<&HashSet<HolderNumber>> {
        match self {
            Self::Single(only, holders) => (*only == name).then_some(holders),
            Self::Multi(names) => names.get(&name),
        }
    }

    /// Adds `holder` to the holders of the block with the sequence hash `name`.
    pub(super) fn insert(&mut self, name: SequenceHash, holder: HolderNumber) {
        match self {
            Self::Single(only, holders) if *only == name => {
                holders.insert(holder);
            }
            Self::Single(only, holders) => {
                let known = (*only, std::mem::take(holders));
                let new = (name, HashSet::from_iter([holder]));
                *self = Self::Multi(HashMap::from_iter([known, new]));
            }
            Self::Multi(names) => {
                names.entry(name).or_default().insert(holder);
            }
        }
    }

    /// Removes `holder` from the holders of the block with the sequence hash `name`. Returns whether the whole entry
    /// has no holder left.
    pub(super) fn remove(&mut self, name: SequenceHash, holder: HolderNumber) -> bool {
        match self {
            Self::Single(only, holders) => {
                if *only == name {
                    holders.remove(&holder);
                }
                holders.is_empty()
            }
            Self::Multi(names) => {
                if let Some(holders) = names.get_mut(&name) {
                    holders.remove(&holder);
                    if holders.is_empty() {
                        names.remove(&name);
                    }
                }
                // There were at least two names, so at least one is left.
                if names.len() == 1 {
                    let last = names.drain().next();
                    if let Some((only, holders)) = last {
                        *self = Self::Single(only, holders);
                    }
                }
                false
            }
        }
    }
}
