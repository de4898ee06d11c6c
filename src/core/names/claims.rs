//! Parents that events gave by position and sequence hash although the holder does not have them.
//!
//! If an engine uses its own names, the hash that it gives for such a parent may be one of these names. Then the
//! children are orphans of a block that does not exist. Until a block of that name is stored, no query finds the
//! children, and no answer is wrong. After that, queries should find the children after that block. The orphans are
//! enough to recognise such names, also after a restart.

use crate::index::block::is_fragment_of;

use super::blocks::NewBlock;
use super::resolve::Resolved;
use super::state::HolderState;

impl HolderState {
    /// Number of an event's blocks whose name an orphan gave as its parent's sequence hash. If that name were a
    /// sequence hash, the orphan's parent would be another block at the same position.
    pub(super) fn contradicted_by(&self, resolved: &Resolved<'_>) -> usize {
        if self.orphans.len() == 0 {
            return 0;
        }
        let is_contradicted = |block: &&NewBlock| {
            let is_awaited = |name| self.orphans.is_awaited(block.key.position(), name);
            let name = block.name.filter(|name| !is_fragment_of(block.key, *name));
            name.is_some_and(is_awaited)
        };
        match resolved {
            Resolved::Keys(blocks) => blocks.iter().filter(is_contradicted).count(),
            Resolved::Sequence(sequence) if sequence.names.is_none() => 0,
            Resolved::Sequence(sequence) => sequence.blocks().iter().filter(is_contradicted).count(),
        }
    }
}
