//! Walk of the designs 3, 4 and 5. It follows a prompt block by block, with the set of holders that have every block so far.

use hashbrown::HashSet;

use super::prefix_index::{Depth, HolderNumber};

/// State of a walk along a prompt. It has the holders of all blocks so far, and the depths of the holders that lack a
/// block.
#[derive(Debug, Default)]
pub(super) struct Drain {
    matched: usize,
    active: HashSet<HolderNumber>,
    depths: Vec<Depth>,
}

impl Drain {
    /// Goes on to the next block, which `holders` have. Returns whether at least one holder has all blocks up to and
    /// including this one.
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

    /// Ends the walk after the last block. Returns the depths of all holders.
    pub(super) fn finish(mut self) -> Vec<Depth> {
        let matched = self.matched;
        let whole = self.active.into_iter().map(|holder| Depth::new(holder, matched));
        self.depths.extend(whole);
        self.depths
    }
}
