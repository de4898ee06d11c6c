//! The blocks that a holder's names stand for. Each block is kept once, even if several names stand for it, and is found by
//! its sequence hash.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use kvatlas_core::hash::{HashSeed, SequenceHash};

use crate::reason::Reason;

use super::block::{Block, ChainSlot};
use super::forms::{SavedChain, SavedError, SavedKept};
use super::output::Translation;
use super::tiers::{TierIndex, TierSet};
use super::tree::Tree;

#[derive(Debug, Clone, Copy)]
struct KeptBlock {
    sequence: SequenceHash,
    /// Sequence hash of the block before; without meaning at position 0.
    parent: SequenceHash,
    seed: HashSeed,
    adapter: HashSeed,
    position: u32,
    /// Number of names that stand for the block. A block without names is kept until its removal has been published.
    names: u32,
    /// Bit set of the tiers in which the block was published as held.
    published: u8,
    /// Bit set of the tiers in which the block was published as held but not resumable. No request can continue after
    /// a block that is not resumable.
    barred: u8,
    /// Bit set of the tiers in which the block is a part of a chunk, but not its last block. A chunk can be loaded
    /// only as a whole.
    inner: u8,
    is_free: bool,
}

impl KeptBlock {
    /// The entry of a free slot, which has no block.
    fn free() -> Self {
        Self {
            sequence: SequenceHash(0),
            parent: SequenceHash(0),
            seed: HashSeed::default(),
            adapter: HashSeed::default(),
            position: 0,
            names: 0,
            published: 0,
            barred: 0,
            inner: 0,
            is_free: true,
        }
    }

    /// A block that has no name yet, and was not published.
    fn new(block: Block) -> Self {
        Self {
            sequence: block.sequence,
            parent: block.parent.unwrap_or(SequenceHash::from(0)),
            seed: block.seed,
            adapter: block.adapter,
            position: block.position,
            is_free: false,
            ..Self::free()
        }
    }

    fn block(&self) -> Block {
        Block {
            sequence: self.sequence,
            parent: (self.position > 0).then_some(self.parent),
            position: self.position,
            seed: self.seed,
            adapter: self.adapter,
        }
    }
}

/// All blocks of a holder.
#[derive(Debug, Default)]
pub(super) struct Chain {
    kept: Vec<KeptBlock>,
    free: Vec<ChainSlot>,
    by_sequence: HashMap<SequenceHash, ChainSlot>,
    /// The parent and children of each block, for engines with several groups of layers.
    tree: Option<Box<Tree>>,
    /// The block that was inserted last, if there is a tree. The next block usually follows it in its sequence.
    last: Option<ChainSlot>,
    /// The blocks that were published as held since the last call of [`Self::take_fresh`], in order of publishing.
    /// Always empty without a `tree`.
    fresh: Vec<ChainSlot>,
    /// The slots that have become free and that [`Self::take_freed`] has not returned yet. Always empty without a
    /// `tree`.
    freed: Vec<ChainSlot>,
}

impl Chain {
    /// Returns the saved form of all blocks, in the order of their slots. Includes the tiers in which each block was
    /// published.
    pub(super) fn save(&self) -> SavedChain {
        let saved = |kept: &KeptBlock| SavedKept {
            block: kept.block(),
            published: kept.published,
            barred: kept.barred,
            inner: kept.inner,
        };
        let kept = self.kept.iter().map(|kept| (!kept.is_free).then(|| saved(kept)));
        SavedChain {
            kept: kept.collect(),
            has_tree: self.has_tree(),
        }
    }

    /// Restores saved blocks, in the same slots. They have no names yet.
    pub(super) fn restore(saved: SavedChain) -> Result<Self, SavedError> {
        let mut chain = Self::default();
        for (slot, saved) in (0..).map(ChainSlot::new).zip(saved.kept) {
            let kept = match saved {
                Some(saved) => {
                    let block = saved.block.checked()?;
                    if chain.by_sequence.insert(block.sequence, slot).is_some() {
                        return Err(SavedError::Contradiction("a block comes twice"));
                    }
                    KeptBlock {
                        published: saved.published,
                        barred: saved.barred,
                        inner: saved.inner,
                        ..KeptBlock::new(block)
                    }
                }
                None => {
                    chain.free.push(slot);
                    KeptBlock::free()
                }
            };
            chain.kept.push(kept);
        }
        Ok(chain)
    }

    /// Returns the slot of this number; an error if the slot has no block.
    pub(super) fn slot_in_use(&self, number: u32) -> Result<ChainSlot, SavedError> {
        let slot = ChainSlot::new(number);
        let is_used = self.kept.get(slot.place()).is_some_and(|kept| !kept.is_free);
        is_used
            .then_some(slot)
            .ok_or(SavedError::Contradiction("a name stands for no block"))
    }

    /// How many slots there are, in use or not.
    pub(super) fn slot_count(&self) -> usize {
        self.kept.len()
    }

    pub(super) fn len(&self) -> usize {
        self.by_sequence.len()
    }

    pub(super) fn clear(&mut self) {
        self.kept.clear();
        self.free.clear();
        self.by_sequence.clear();
        self.freed.clear();
        self.last = None;
        if let Some(tree) = &mut self.tree {
            tree.clear();
        }
    }

    /// Returns the slot of the block with this sequence hash; `None` if the block is not kept.
    pub(super) fn slot_with(&self, sequence: SequenceHash) -> Option<ChainSlot> {
        self.by_sequence.get(&sequence).copied()
    }

    pub(super) fn get(&self, slot: ChainSlot) -> Option<Block> {
        self.kept.get(slot.place()).map(KeptBlock::block)
    }

    /// The slots in use.
    pub(super) fn slots(&self) -> Vec<ChainSlot> {
        self.by_sequence.values().copied().collect()
    }

    /// The blocks that were published as held in `tier`, each with whether it was published as resumable.
    pub(super) fn published(&self, tier: TierIndex) -> impl Iterator<Item = (Block, bool)> {
        self.kept
            .iter()
            .filter(move |kept| kept.published & tier.bit() != 0)
            .map(move |kept| (kept.block(), kept.barred & tier.bit() == 0))
    }

    /// The slot of `block`, which is inserted if it is new.
    pub(super) fn slot_of(&mut self, block: Block) -> Result<ChainSlot, Reason> {
        let vacant = match self.by_sequence.entry(block.sequence) {
            Entry::Occupied(entry) => {
                let slot = *entry.get();
                let is_same = self
                    .kept
                    .get(slot.place())
                    .is_some_and(|kept| kept.block() == block);
                // If two prefixes have the same hash, only the first is kept: the other would be taken for the first.
                return is_same.then_some(slot).ok_or(Reason::NameConflict);
            }
            Entry::Vacant(vacant) => vacant,
        };
        let kept = KeptBlock::new(block);
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => ChainSlot::new(u32::try_from(self.kept.len()).map_err(|_| Reason::TableFull)?),
        };
        match self.kept.get_mut(slot.place()) {
            Some(place) => *place = kept,
            None => self.kept.push(kept),
        }
        vacant.insert(slot);
        self.enter(slot);
        Ok(slot)
    }

    /// Inserts a block into the tree of parents and children, if there is one.
    fn enter(&mut self, slot: ChainSlot) {
        let (Some(tree), Some(kept)) = (&mut self.tree, self.kept.get(slot.place())) else {
            return;
        };
        let block = kept.block();
        let is_before = |up: &ChainSlot| {
            let up = self.kept.get(up.place()).filter(|up| !up.is_free);
            up.is_some_and(|up| {
                Some(up.sequence) == block.parent && up.position.checked_add(1) == Some(block.position)
            })
        };
        let last = self.last.replace(slot).filter(is_before);
        let named = || self.by_sequence.get(&block.parent?).copied();
        tree.enter(slot, block, last.or_else(|| named().filter(is_before)));
    }

    /// Builds the tree of the parents and children of all blocks. From now on, the tree is kept up to date.
    pub(super) fn grow_tree(&mut self) {
        self.tree = Some(Box::default());
        let mut slots = self.slots();
        // Parents are entered before their children.
        slots.sort_by_cached_key(|slot| self.get(*slot).map(|block| block.position));
        slots.into_iter().for_each(|slot| self.enter(slot));
    }

    pub(super) fn has_tree(&self) -> bool {
        self.tree.is_some()
    }

    /// The slot of the parent of the block in `slot`. `None` if the parent is not kept, or if the chain keeps no tree
    /// of parents and children.
    pub(super) fn up(&self, slot: ChainSlot) -> Option<ChainSlot> {
        self.tree.as_ref()?.up(slot)
    }

    pub(super) fn children(&self, slot: ChainSlot) -> impl Iterator<Item = ChainSlot> {
        self.tree.iter().flat_map(move |tree| tree.children(slot))
    }

    /// Notes that the block's state in a group of layers has changed.
    pub(super) fn touch(&mut self, slot: ChainSlot) {
        if let Some(tree) = &mut self.tree {
            tree.touch(slot);
        }
    }

    /// Blocks that have changed since the last [`Self::forget_touched`]: they have got or lost a parent, or their
    /// state in a group of layers is new. A block can be listed several times.
    pub(super) fn touched(&self) -> &[ChainSlot] {
        self.tree.as_ref().map_or(&[], |tree| tree.touched())
    }

    /// Adds the newly inserted blocks to those that have changed ([`Self::touched`]).
    pub(super) fn touch_entered(&mut self) {
        if let Some(tree) = &mut self.tree {
            tree.touch_entered();
        }
    }

    /// Forgets which blocks have changed, and which are new.
    pub(super) fn forget_touched(&mut self) {
        if let Some(tree) = &mut self.tree {
            tree.forget_touched();
        }
    }

    /// Returns the list of blocks that have been published as held, in order, and begins a new list.
    pub(super) fn take_fresh(&mut self) -> Vec<ChainSlot> {
        std::mem::take(&mut self.fresh)
    }

    /// The blocks that were published as held since the last call of [`Self::take_fresh`].
    pub(super) fn fresh(&self) -> &[ChainSlot] {
        &self.fresh
    }

    /// Takes a list from [`Self::take_fresh`] back, to reuse its memory.
    pub(super) fn keep_fresh(&mut self, mut list: Vec<ChainSlot>) {
        list.clear();
        self.fresh = list;
    }

    /// Returns a slot that has become free and was not returned before; `None` if there is no further such slot. A
    /// new block may already use the slot again.
    pub(super) fn take_freed(&mut self) -> Option<ChainSlot> {
        self.freed.pop()
    }

    /// Whether the block is published as held in `tier`.
    pub(super) fn is_published(&self, slot: ChainSlot, tier: TierIndex) -> bool {
        self.kept
            .get(slot.place())
            .is_some_and(|kept| kept.published & tier.bit() != 0)
    }

    /// The tiers in which at least one of the blocks in `slots` is published as held.
    pub(super) fn published_of(&self, slots: &[ChainSlot]) -> TierSet {
        let kept = slots.iter().filter_map(|slot| self.kept.get(slot.place()));
        TierSet::of_bits(kept.fold(0, |bits, kept| bits | kept.published))
    }

    /// Notes whether the block is published in `tier` as resumable, that is, as a block after which a request can
    /// continue. Returns the block's hash if the published state differs from the earlier one.
    pub(super) fn set_resumable(
        &mut self,
        slot: ChainSlot,
        tier: TierIndex,
        is_resumable: bool,
    ) -> Option<SequenceHash> {
        let kept = self.kept.get_mut(slot.place())?;
        let before = kept.barred;
        match is_resumable {
            true => kept.barred &= !tier.bit(),
            false => kept.barred |= tier.bit(),
        }
        (kept.barred != before).then_some(kept.sequence)
    }

    /// Whether the block is a part of a chunk of `tier`, but not its last block. A prefix that ends with such a block
    /// cannot be loaded, because a chunk is loaded only as a whole.
    pub(super) fn is_within_chunk(&self, slot: ChainSlot, tier: TierIndex) -> bool {
        self.kept
            .get(slot.place())
            .is_some_and(|kept| kept.inner & tier.bit() != 0)
    }

    /// Notes whether the block is a part of a chunk of `tier` (blocks that load only together), but not its last
    /// block. If the block is already published in the tier, it can be loaded alone, so it is never marked as such a
    /// part.
    pub(super) fn set_within_chunk(&mut self, slot: ChainSlot, tier: TierIndex, is_within: bool) {
        let Some(kept) = self.kept.get_mut(slot.place()) else {
            return;
        };
        match is_within && kept.published & tier.bit() == 0 {
            true => kept.inner |= tier.bit(),
            false if !is_within => kept.inner &= !tier.bit(),
            false => {}
        }
    }

    /// Counts one more name that stands for the block.
    pub(super) fn add_name(&mut self, slot: ChainSlot) {
        if let Some(kept) = self.kept.get_mut(slot.place()) {
            kept.names += 1;
        }
    }

    /// Counts one name fewer that stands for the block.
    pub(super) fn drop_name(&mut self, slot: ChainSlot) {
        if let Some(kept) = self.kept.get_mut(slot.place()) {
            kept.names = kept.names.saturating_sub(1);
        }
    }

    /// Forgets the block if no name stands for it any more.
    pub(super) fn free_unnamed(&mut self, slot: ChainSlot) {
        let Some(kept) = self.kept.get_mut(slot.place()) else {
            return;
        };
        if kept.names == 0 && !kept.is_free {
            kept.is_free = true;
            kept.published = 0;
            self.by_sequence.remove(&kept.sequence);
            if let Some(tree) = &mut self.tree {
                tree.leave(slot, kept.block());
                self.freed.push(slot);
            }
            self.free.push(slot);
        }
    }

    /// Emits that the block is held in `tier`, unless that was published before.
    pub(super) fn publish(&mut self, slot: ChainSlot, tier: TierIndex, output: &mut Translation) {
        let Some(kept) = self.kept.get_mut(slot.place()) else {
            return;
        };
        if kept.published & tier.bit() == 0 {
            kept.published |= tier.bit();
            kept.barred &= !tier.bit();
            output.push_stored(tier.tier(), &kept.block());
            if self.tree.is_some() {
                self.fresh.push(slot);
            }
        }
    }

    /// Emits that the block is no longer held in `tier`, if it was published.
    pub(super) fn withdraw(&mut self, slot: ChainSlot, tier: TierIndex, output: &mut Translation) {
        let Some(kept) = self.kept.get_mut(slot.place()) else {
            return;
        };
        if kept.published & tier.bit() != 0 {
            kept.published &= !tier.bit();
            kept.inner &= !tier.bit();
            output.push_removed(tier.tier(), kept.sequence);
        }
    }

    /// Whether `ancestor` is the block `from` or comes before it in its chain.
    pub(super) fn has_ancestor(&self, from: SequenceHash, ancestor: Block) -> bool {
        let mut at = Some(from);
        while let Some(sequence) = at {
            if sequence == ancestor.sequence {
                return true;
            }
            let block = self.slot_with(sequence).and_then(|slot| self.get(slot));
            at = block
                .filter(|block| block.position > ancestor.position)
                .and_then(|block| block.parent);
        }
        false
    }
}
