//! Parents that events gave by position and sequence hash although the holder does not have them.
//!
//! Where an engine has names of its own, such a parent may be one of them. Then its children stand behind a block that does not exist. Nobody
//! finds them, and nothing is wrong, until a block of that name comes: now they should be found behind it.

use std::collections::HashMap;

use crate::index::block::{NewBlock, is_fragment_of};

/// The absent parents of one holder.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// What was given as a sequence hash, with the position of the parent.
    parents: HashMap<u64, u64>,
    /// Whether events are known to mean sequence hashes.
    pub(crate) is_paused: bool,
}

impl Claims {
    pub(crate) fn is_empty(&self) -> bool {
        self.parents.is_empty()
    }

    /// Notes that `parent` was given as the sequence hash of an absent block at `position`; false where there are too many.
    pub(crate) fn add(&mut self, parent: u64, position: u64, claims_max: usize) -> bool {
        if self.is_paused {
            return true;
        }
        let has_room = self.parents.len() < claims_max || self.parents.contains_key(&parent);
        if has_room {
            self.parents.insert(parent, position);
        }
        has_room
    }

    /// How many of these blocks have a name that was given as the sequence hash of another block in their place. Each counts once.
    pub(crate) fn contradicted_by(&mut self, blocks: &[NewBlock]) -> usize {
        let mut contradicted = 0;
        for block in blocks {
            let Some(name) = block.name.filter(|_| !self.parents.is_empty()) else {
                continue;
            };
            let is_there = self.parents.get(&name) == Some(&block.key.position());
            if is_there && !is_fragment_of(block.key, name) {
                self.parents.remove(&name);
                contradicted += 1;
            }
        }
        contradicted
    }
}
