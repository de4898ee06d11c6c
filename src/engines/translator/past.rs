//! Past names: names of blocks that the engine no longer has on the device. Such a name can still come in a later
//! event about a copy of the block on the host, disk or remote storage, because that event may come after the
//! device's copy has gone.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::block::Block;

/// Maximum number of names that are remembered: about two megabytes.
const NAMES_MAX: usize = 1 << 14;

/// Names that the engine no longer uses, each with the block that it stood for. Only the latest are kept.
#[derive(Debug, Default)]
pub(super) struct Past {
    blocks: HashMap<u64, Block>,
    order: VecDeque<u64>,
}

impl Past {
    /// The block that `name` stood for.
    pub(super) fn get(&self, name: u64) -> Option<Block> {
        self.blocks.get(&name).copied()
    }

    /// Remembers the block that `name` stood for.
    pub(super) fn remember(&mut self, name: u64, block: Block) {
        if self.blocks.insert(name, block).is_some() {
            return;
        }
        self.order.push_back(name);
        if self.order.len() > NAMES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.blocks.remove(&oldest);
        }
    }

    /// All names with the blocks that they stood for, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Block)> {
        let kept = |name: &u64| Some((*name, *self.blocks.get(name)?));
        self.order.iter().filter_map(kept)
    }

    /// Forgets all names.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.order.clear();
    }
}
