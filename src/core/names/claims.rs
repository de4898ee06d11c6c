//! Claimed parents. An event has given such a parent by position and sequence hash, but the holder does not have the
//! parent.
//!
//! An engine with its own block names may give the parent by a name, where the event should have the sequence hash. The
//! blocks of the event then become orphans whose parent does not exist, so no query finds them. That is right while the
//! holder has no block of that name. Once a block of that name is stored, the orphans are children of this block, but
//! queries still do not find them. The holder is then in doubt
//! ([`RejectReason::AmbiguousParent`](super::RejectReason::AmbiguousParent)). Only the orphans are needed to notice
//! this, so it is noticed after a restart, too.

use crate::index::block::is_fragment_of;

use super::blocks::NewBlock;
use super::resolve::Resolved;
use super::state::HolderState;

impl HolderState {
    /// Number of an event's blocks that may be the missing parent of an orphan (a block whose parent has never
    /// arrived). An earlier event gave this parent by position and sequence hash. A block is counted if it has the same
    /// position, and its name equals this hash although its own sequence hash differs.
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
