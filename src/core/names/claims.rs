//! Claimed parents: parents that an event gave by position and sequence hash, although the holder does not have them.
//!
//! An engine with names of its own may give such a parent by a name instead of its sequence hash. The blocks of the
//! event then become orphans whose parent does not exist, so no query finds them. That is right while the holder has no
//! block of that name. Once a block of that name is stored, the orphans are children of this block, but queries still
//! do not find them: the holder is then in doubt
//! ([`RejectReason::AmbiguousParent`](super::RejectReason::AmbiguousParent)). The doubt is found by means of the
//! orphans alone, so it is found after a restart, too.

use crate::index::block::is_fragment_of;

use super::blocks::NewBlock;
use super::resolve::Resolved;
use super::state::HolderState;

impl HolderState {
    /// Number of an event's blocks that may be the parent of an orphan (a block whose parent has never arrived). Such a
    /// block is at the position of the missing parent, and its name equals the sequence hash that was given for the
    /// missing parent. But its sequence hash differs, so it is unclear which block the parent is.
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
