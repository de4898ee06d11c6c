//! The walk that designs 3, 4 and 5 share: a set of holders that drains from block to block.

use hashbrown::HashSet;

use super::prefix_index::{Depth, HolderNumber};

/// The holders of all blocks so far, and the depths of the holders that have dropped out.
#[derive(Debug, Default)]
pub(super) struct Drain {
    matched: usize,
    active: HashSet<HolderNumber>,
    depths: Vec<Depth>,
}

impl Drain {
    /// Goes on to the next block, which `holders` have. Returns whether a holder of all blocks so far is left.
    pub(super) fn step(&mut self, holders: &HashSet<HolderNumber>) -> bool {
        let Self {
            matched,
            active,
            depths,
        } = self;
        if *matched == 0 {
            active.clone_from(holders);
        } else {
            active.retain(|holder| {
                let stays = holders.contains(holder);
                if !stays {
                    depths.push(Depth::new(*holder, *matched));
                }
                stays
            });
        }
        *matched += usize::from(!active.is_empty());
        !active.is_empty()
    }

    /// Returns the depths of all holders, when no more blocks come.
    pub(super) fn finish(mut self) -> Vec<Depth> {
        let matched = self.matched;
        let whole = self.active.into_iter().map(|holder| Depth::new(holder, matched));
        self.depths.extend(whole);
        self.depths
    }
}
