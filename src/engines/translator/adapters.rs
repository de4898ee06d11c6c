//! Numbers of an engine's adapters, and whether the blocks of adapters are certain.

use std::collections::HashMap;

use kvatlas_core::hash::HashSeed;
use serde::{Deserialize, Serialize};

/// Maximum number of adapters whose numbers are remembered.
const ADAPTERS_MAX: usize = 4096;

/// The adapters that an engine has used: the number of each, and whether some of their blocks are missing or
/// outdated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Adapters {
    numbers: HashMap<HashSeed, u64>,
    is_uncertain: bool,
}

impl Adapters {
    /// Whether the blocks of adapters are uncertain. That lasts until the engine clears.
    pub(super) fn is_uncertain(&self) -> bool {
        self.is_uncertain
    }

    /// Notes that the engine has cleared. The numbers stay known.
    pub(super) fn clear(&mut self) {
        self.is_uncertain = false;
    }

    /// Notes that a block of an adapter was left out because only the adapter's number is known.
    pub(super) fn note_unnamed(&mut self) {
        self.is_uncertain = true;
    }

    /// Notes the number of an adapter. If the adapter had another number before, the engine has loaded it again,
    /// perhaps from another path, and no longer uses the blocks from before. So the blocks of adapters become
    /// uncertain. They also become uncertain if too many adapters have been noted.
    pub(super) fn note(&mut self, adapter: HashSeed, number: u64) {
        let is_full = self.numbers.len() >= ADAPTERS_MAX && !self.numbers.contains_key(&adapter);
        let before = match is_full {
            true => None,
            false => self.numbers.insert(adapter, number),
        };
        self.is_uncertain |= is_full || before.is_some_and(|before| before != number);
    }
}
