//! Claimed parents: parents that an event gave by position and sequence hash, although the holder does not have them.
//!
//! If an engine uses its own names, the hash that it gives for such a parent may be one of these names. Then the
//! event's blocks become orphans whose parent does not exist. No query finds these orphans. That is right as long as
//! the holder has no block of that name. Once such a block is stored, queries should find the orphans after it, but
//! they do not: the holder is then in doubt
//! ([`RejectReason::AmbiguousParent`](super::RejectReason::AmbiguousParent)). Such names are recognised by means of the
//! orphans alone, so they are recognised after a restart too.

use crate::index::block::is_fragment_of;

use super::blocks::NewBlock;
use super::resolve::Resolved;
use super::state::HolderState;

impl HolderState {
    /// Number of an event's blocks that may be the parent of an orphan (a block whose parent has never arrived). Such a
    /// block has the parent's position, and its name equals the sequence hash that was given for the parent. But its
    /// own sequence hash is another, so it is unclear which block the parent is.
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
