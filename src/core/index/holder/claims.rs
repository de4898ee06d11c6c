//! Parents that events gave by position and sequence hash although the holder does not have them.
//!
//! Where an engine has names of its own, such a parent may be one of them. Then its children stand behind a block that does not exist. Nobody
//! finds them, and nothing is wrong, until a block of that name comes: now they should be found behind it.

use std::collections::HashMap;

use crate::index::block::{NewBlock, is_fragment_of};

use super::resolve::Resolved;

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

    /// Notes the absent parent of an event's blocks, `claims_max` in all. Says how many blocks may stand behind another one than the engine
    /// means: those whose parent cannot be noted, and those of a name that was noted as another's sequence hash.
    pub(super) fn note(&mut self, resolved: &Resolved<'_>, claims_max: usize) -> usize {
        let sequence = match resolved {
            Resolved::Keys(blocks) => return self.contradicted_by(blocks),
            Resolved::Sequence(sequence) => sequence,
        };
        let mut ambiguous = 0;
        if let Some((parent, position)) = sequence.claim().filter(|_| !self.is_paused) {
            if self.parents.len() < claims_max || self.parents.contains_key(&parent) {
                self.parents.insert(parent, position);
            } else {
                ambiguous = sequence.hashes.len();
            }
        }
        if sequence.names.is_some() && !self.is_empty() {
            ambiguous += self.contradicted_by(&sequence.blocks());
        }
        ambiguous
    }

    /// How many of these blocks have a name that was given as the sequence hash of another block in their place. Each counts once.
    fn contradicted_by(&mut self, blocks: &[NewBlock]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let is_contradicted = |block: &&NewBlock| {
            let Some(name) = block.name else { return false };
            let is_there = self.parents.get(&name) == Some(&block.key.position());
            is_there && !is_fragment_of(block.key, name) && self.parents.remove(&name).is_some()
        };
        blocks.iter().filter(is_contradicted).count()
    }
}
