//! Parents that events gave by position and sequence hash although the holder does not have them.
//!
//! If an engine has names of its own, the hash that it gives for such a parent may be one of these names. Then the
//! children are orphans behind a block that does not exist. No query finds the children, and no answer is wrong, until
//! a block of that name comes. From then on the children should be found behind that block. Such names can be told from
//! the orphans alone, also after a restart.

use crate::index::block::is_fragment_of;

use super::blocks::NewBlock;
use super::resolve::Resolved;
use super::state::HolderState;

impl HolderState {
    /// Number of an event's blocks whose name an orphan gave as its parent's sequence hash. Judged by that hash, the
    /// orphan's parent would be another block at the same position.
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
