//! An engine's adapters, as far as they are known.

use std::collections::HashMap;

use kvatlas_core::hash::HashSeed;
use serde::{Deserialize, Serialize};

/// Most adapters whose numbers are remembered.
const ADAPTERS_MAX: usize = 4096;

/// The numbers of adapters, and whether blocks of some are missing or outdated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Adapters {
    numbers: HashMap<HashSeed, u64>,
    is_uncertain: bool,
}

impl Adapters {
    /// Whether what the engine has of adapters is uncertain, until it clears.
    pub(super) fn is_uncertain(&self) -> bool {
        self.is_uncertain
    }

    /// The engine has cleared. The numbers stay known.
    pub(super) fn clear(&mut self) {
        self.is_uncertain = false;
    }

    /// A block of an adapter was left out, because only its number is known.
    pub(super) fn note_unnamed(&mut self) {
        self.is_uncertain = true;
    }

    /// Notes an adapter's number. A name that has another number than before was loaded anew, perhaps from another path: then the engine does
    /// not use the blocks of before.
    pub(super) fn note(&mut self, adapter: HashSeed, number: u64) {
        let is_full = self.numbers.len() >= ADAPTERS_MAX && !self.numbers.contains_key(&adapter);
        let before = match is_full {
            true => None,
            false => self.numbers.insert(adapter, number),
        };
        self.is_uncertain |= is_full || before.is_some_and(|before| before != number);
    }
}
