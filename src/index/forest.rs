//! What one holder holds, whatever it is: a forest of blocks, owned by the holder's lane and so without a lock.
//!
//! In an index of runs, a holder is kept like this only while it has something that [`super::plain`] cannot keep: holes, several
//! tiers, several names of a block, or lineage hashes alone. In a radix tree, every holder is.
//!
//! Blocks lie in one vector and are linked by number. A block whose parent is resident stands in its parent's list of
//! children; one whose parent is missing stands in a list of orphans that the parent adopts when it comes.

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::wire::Tier;

use super::holder_set::HolderSlot;
use super::place::Place;
use super::runs::{BlockKey, RunWriter, Spot};
use super::storage::{Standing, Turn};

pub(crate) mod names;

use names::Alias;

/// A block's number within its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlockNumber(u32);

impl BlockNumber {
    const NONE: Self = Self(u32::MAX);

    fn index(self) -> usize {
        self.0 as usize
    }

    fn some(self) -> Option<Self> {
        (self != Self::NONE).then_some(self)
    }
}

/// Most blocks one holder can have, whatever the configuration says.
pub(crate) const BLOCKS_MAX: usize = u32::MAX as usize - 1;

/// One resident block.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) key: PositionalLineageHash,
    /// The full sequence hash, where it is known; blocks stored by lineage hash alone have none.
    pub(crate) sequence_hash: Option<SequenceHash>,
    /// What the engine calls it; the first of its names.
    name: Option<u64>,
    parent: BlockNumber,
    first_child: BlockNumber,
    next_sibling: BlockNumber,
    previous_sibling: BlockNumber,
    /// The tiers that hold it, under whatever name; one bit a tier.
    tiers: u8,
    /// Whether all ancestors are resident, so that queries find the block.
    counts: bool,
    /// Where they find it, while it counts.
    standing: Standing,
}

fn tier_bit(tier: Tier) -> u8 {
    1 << tier.as_u8()
}

/// Where a forest's counting blocks are published: in the index's storage, under the holder's slot.
pub(crate) struct Publication<'a, 'w> {
    pub(crate) turn: &'a mut Turn<'w>,
    pub(crate) slot: HolderSlot,
}

impl Publication<'_, '_> {
    /// Lets queries find a block whose parent, if it has one, they find at `parent`; says where.
    fn insert(&mut self, parent: Option<&Standing>, block: &Block) -> Standing {
        match (&mut *self.turn, parent) {
            (Turn::Runs(writer), None) => insert_run(writer, None, block, self.slot),
            (Turn::Runs(writer), Some(Standing::InRun(parent))) => {
                insert_run(writer, Some(*parent), block, self.slot)
            }
            (Turn::Radix(store), None) => Standing::InTree(store.insert(None, block.key, self.slot)),
            (Turn::Radix(store), Some(Standing::InTree(parent))) => {
                Standing::InTree(store.insert(Some(parent), block.key, self.slot))
            }
            // The storage had no room for the parent.
            (Turn::Runs(_) | Turn::Radix(_), Some(_)) => Standing::Nowhere,
        }
    }

    /// Takes a block that has no children any more from queries.
    fn remove(&mut self, standing: Standing) {
        match (&mut *self.turn, standing) {
            (Turn::Runs(writer), Standing::InRun(spot)) => {
                writer.set_cutoff(spot.run, self.slot, spot.offset);
            }
            (Turn::Radix(store), Standing::InTree(node)) => store.remove(node, self.slot),
            (Turn::Runs(_) | Turn::Radix(_), _) => {}
        }
    }
}

fn insert_run(writer: &mut RunWriter<'_>, parent: Option<Spot>, block: &Block, slot: HolderSlot) -> Standing {
    let key = BlockKey::from(block.key);
    let spot = writer.child(parent, &key).or_else(|| {
        let hash = block.sequence_hash.unwrap_or(SequenceHash(key.current));
        let is_whole = block.sequence_hash.is_some();
        let added = writer.add(parent, key, &[hash], is_whole, false)?;
        Some(Spot {
            run: added.run,
            offset: added.end.checked_sub(1)?,
        })
    });
    let Some(spot) = spot else {
        return Standing::Nowhere;
    };
    writer.set_cutoff(spot.run, slot, spot.offset + 1);
    Standing::InRun(spot)
}

/// What became of a stored block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// It is new.
    New,
    /// It was there; at most its tiers and names have grown.
    Known,
    /// The holder is full, or the block has as many names as it may have.
    Full,
}

/// What became of a block to be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removed {
    /// It is gone.
    Gone,
    /// Another tier or name still holds it.
    Remains,
    /// It was not there, or not in that tier.
    Unknown,
}

/// The blocks of one holder.
#[derive(Debug, Default)]
pub(crate) struct Forest {
    blocks: Vec<Block>,
    free: Vec<BlockNumber>,
    by_place: HashTable<BlockNumber>,
    by_name: HashMap<u64, BlockNumber>,
    /// All names of blocks that have more than one, oldest first; rare.
    aliases: HashMap<BlockNumber, Vec<Alias>>,
    /// The first of the blocks that wait for a parent at this place.
    orphans: HashMap<Place, BlockNumber>,
    hasher: DefaultHashBuilder,
    /// Reused by walks over a subtree.
    scratch: Vec<BlockNumber>,
}

impl Forest {
    /// How many blocks are resident.
    pub(crate) fn len(&self) -> usize {
        self.by_place.len()
    }

    pub(crate) fn block(&self, number: BlockNumber) -> &Block {
        &self.blocks[number.index()]
    }

    fn block_mut(&mut self, number: BlockNumber) -> &mut Block {
        &mut self.blocks[number.index()]
    }

    /// The block that the engine calls `name`.
    pub(crate) fn find_name(&self, name: u64) -> Option<BlockNumber> {
        self.by_name.get(&name).copied()
    }

    /// The block with this lineage hash.
    pub(crate) fn find_key(&self, key: PositionalLineageHash) -> Option<BlockNumber> {
        self.find_place(Place::of(key))
            .filter(|number| self.block(*number).key == key)
    }

    fn find_place(&self, place: Place) -> Option<BlockNumber> {
        let blocks = &self.blocks;
        let is_there = |number: &BlockNumber| Place::of(blocks[number.index()].key) == place;
        self.by_place.find(place.hash(&self.hasher), is_there).copied()
    }

    /// Stores a block; says what became of it, and whether another block lost its place or name to it.
    pub(crate) fn store(
        &mut self,
        block: NewBlock,
        tier: Tier,
        blocks_max: usize,
        publication: &mut Publication<'_, '_>,
    ) -> (Stored, bool) {
        let mut moved = false;
        if let Some(other) = block.name.and_then(|name| self.find_name(name))
            && self.block(other).key != block.key
        {
            moved = true;
            if let Some(name) = block.name {
                self.drop_name(other, name, publication);
            }
        }
        match self.find_place(Place::of(block.key)) {
            Some(number) if self.block(number).key == block.key => {
                return (self.extend(number, &block, tier), moved);
            }
            Some(other) => {
                moved = true;
                self.erase(other, publication);
            }
            None => {}
        }
        if self.len() >= blocks_max.min(BLOCKS_MAX) {
            return (Stored::Full, moved);
        }
        self.create(&block, tier, publication);
        (Stored::New, moved)
    }

    /// Takes over a new block that stands in a run already, after its parent.
    pub(crate) fn take_over(&mut self, block: &NewBlock, tier: Tier, spot: Spot) {
        let (number, _) = self.link(block, tier);
        let taken = self.block_mut(number);
        taken.counts = true;
        taken.standing = Standing::InRun(spot);
    }

    fn create(&mut self, block: &NewBlock, tier: Tier, publication: &mut Publication<'_, '_>) {
        let (number, counts) = self.link(block, tier);
        if counts {
            self.publish_subtree(number, publication);
        }
    }

    /// Makes a block resident; says whether all its ancestors are.
    fn link(&mut self, block: &NewBlock, tier: Tier) -> (BlockNumber, bool) {
        let place = Place::of(block.key);
        let parent_place = Place::of_parent(block.key);
        let parent = parent_place.and_then(|place| self.find_place(place));
        let resident = Block {
            key: block.key,
            sequence_hash: block.sequence_hash,
            name: block.name,
            parent: BlockNumber::NONE,
            first_child: self.orphans.remove(&place).unwrap_or(BlockNumber::NONE),
            next_sibling: BlockNumber::NONE,
            previous_sibling: BlockNumber::NONE,
            tiers: tier_bit(tier),
            counts: false,
            standing: Standing::Nowhere,
        };
        let number = self.allocate(resident);
        if let Some(name) = block.name {
            self.by_name.insert(name, number);
        }
        let blocks = &self.blocks;
        let rehash = |number: &BlockNumber| Place::of(blocks[number.index()].key).hash(&self.hasher);
        self.by_place
            .insert_unique(place.hash(&self.hasher), number, rehash);
        self.adopt_children(number);
        let counts = match (parent_place, parent) {
            (None, _) => true,
            (Some(_), Some(parent)) => {
                self.link_child(number, parent);
                self.block(parent).counts
            }
            (Some(place), None) => {
                self.link_orphan(number, place);
                false
            }
        };
        (number, counts)
    }

    fn allocate(&mut self, block: Block) -> BlockNumber {
        if let Some(number) = self.free.pop() {
            *self.block_mut(number) = block;
            return number;
        }
        // `store` keeps the count below BLOCKS_MAX, which fits.
        let number = BlockNumber(u32::try_from(self.blocks.len()).unwrap_or(u32::MAX));
        self.blocks.push(block);
        number
    }

    fn adopt_children(&mut self, parent: BlockNumber) {
        let mut child = self.block(parent).first_child.some();
        while let Some(number) = child {
            let orphan = self.block_mut(number);
            orphan.parent = parent;
            child = orphan.next_sibling.some();
        }
    }

    fn link_child(&mut self, number: BlockNumber, parent: BlockNumber) {
        let head = std::mem::replace(&mut self.block_mut(parent).first_child, number);
        self.block_mut(number).parent = parent;
        self.link_before(number, head);
    }

    fn link_orphan(&mut self, number: BlockNumber, parent_place: Place) {
        let head = self
            .orphans
            .insert(parent_place, number)
            .unwrap_or(BlockNumber::NONE);
        self.link_before(number, head);
    }

    fn link_before(&mut self, number: BlockNumber, head: BlockNumber) {
        self.block_mut(number).next_sibling = head;
        if let Some(head) = head.some() {
            self.block_mut(head).previous_sibling = number;
        }
    }

    /// Takes a block out of its parent's list, or out of the list of orphans.
    fn unlink(&mut self, number: BlockNumber) {
        let Block {
            key,
            parent,
            next_sibling: next,
            previous_sibling: previous,
            ..
        } = *self.block(number);
        if let Some(next) = next.some() {
            self.block_mut(next).previous_sibling = previous;
        }
        match (previous.some(), parent.some(), Place::of_parent(key)) {
            (Some(previous), _, _) => self.block_mut(previous).next_sibling = next,
            (None, Some(parent), _) => self.block_mut(parent).first_child = next,
            (None, None, Some(place)) => {
                match next.some() {
                    Some(next) => self.orphans.insert(place, next),
                    None => self.orphans.remove(&place),
                };
            }
            // A block at position 0 is in no list.
            (None, None, None) => {}
        }
    }

    /// Removes a block from `tier`, under all its names.
    pub(crate) fn remove_tier(
        &mut self,
        number: BlockNumber,
        tier: Tier,
        publication: &mut Publication<'_, '_>,
    ) -> Removed {
        let block = self.block_mut(number);
        if block.tiers & tier_bit(tier) == 0 {
            return Removed::Unknown;
        }
        block.tiers &= !tier_bit(tier);
        let is_held = block.tiers != 0;
        self.change_names(number, |alias| alias.tiers &= !tier_bit(tier));
        if is_held {
            return Removed::Remains;
        }
        self.erase(number, publication);
        Removed::Gone
    }

    /// Forgets a block that has been taken from queries already.
    pub(crate) fn forget(&mut self, key: PositionalLineageHash) {
        if let Some(number) = self.find_key(key) {
            self.block_mut(number).counts = false;
            self.discard(number);
        }
    }

    /// Removes a block for good; its children become orphans and count no longer.
    fn erase(&mut self, number: BlockNumber, publication: &mut Publication<'_, '_>) {
        if self.block(number).counts {
            self.withdraw_subtree(number, publication);
        }
        self.discard(number);
    }

    fn discard(&mut self, number: BlockNumber) {
        self.unlink(number);
        self.orphan_children(number);
        let Block { key, name, .. } = *self.block(number);
        let aliases = self.aliases.remove(&number).unwrap_or_default();
        for name in name.into_iter().chain(aliases.iter().map(|alias| alias.name)) {
            self.by_name.remove(&name);
        }
        let found = self
            .by_place
            .find_entry(Place::of(key).hash(&self.hasher), |other| *other == number);
        if let Ok(entry) = found {
            entry.remove();
        }
        self.free.push(number);
        if self.len() == 0 {
            self.release_memory();
        }
    }

    fn orphan_children(&mut self, parent: BlockNumber) {
        let first = self.block(parent).first_child;
        let mut child = first.some();
        while let Some(number) = child {
            let orphan = self.block_mut(number);
            orphan.parent = BlockNumber::NONE;
            child = orphan.next_sibling.some();
        }
        if let Some(first) = first.some() {
            self.orphans.insert(Place::of(self.block(parent).key), first);
        }
    }

    /// An empty holder keeps no memory.
    fn release_memory(&mut self) {
        *self = Self {
            hasher: self.hasher.clone(),
            ..Self::default()
        };
    }

    /// Removes all blocks.
    pub(crate) fn clear(&mut self, publication: &mut Publication<'_, '_>) {
        let roots: Vec<BlockNumber> = self.heads().filter(|number| self.block(*number).counts).collect();
        for root in roots {
            self.withdraw_subtree(root, publication);
        }
        self.release_memory();
    }

    /// Blocks without a resident parent: those at position 0, then orphans.
    pub(crate) fn heads(&self) -> impl Iterator<Item = BlockNumber> + '_ {
        let is_head = |number: &BlockNumber| self.block(*number).parent == BlockNumber::NONE;
        let counting_first = |counts: bool| {
            self.by_place
                .iter()
                .copied()
                .filter(is_head)
                .filter(move |number| self.block(*number).counts == counts)
        };
        counting_first(true).chain(counting_first(false))
    }

    /// The children of a block.
    pub(crate) fn children(&self, number: BlockNumber) -> impl Iterator<Item = BlockNumber> + '_ {
        let first = self.block(number).first_child.some();
        std::iter::successors(first, |child| self.block(*child).next_sibling.some())
    }

    /// The parent of a block, where it is resident.
    pub(crate) fn parent(&self, number: BlockNumber) -> Option<BlockNumber> {
        self.block(number).parent.some()
    }

    /// Fills the scratch list with a subtree, parents before children.
    fn collect_subtree(&mut self, root: BlockNumber) -> Vec<BlockNumber> {
        let mut subtree = std::mem::take(&mut self.scratch);
        subtree.clear();
        subtree.push(root);
        let mut next = 0;
        while let Some(number) = subtree.get(next).copied() {
            subtree.extend(self.children(number));
            next += 1;
        }
        subtree
    }

    /// Parents first, so that the holder stays prefix-closed at every instant.
    fn publish_subtree(&mut self, root: BlockNumber, publication: &mut Publication<'_, '_>) {
        let subtree = self.collect_subtree(root);
        for number in &subtree {
            let parent = self.parent(*number).map(|parent| &self.block(parent).standing);
            let standing = publication.insert(parent, self.block(*number));
            let block = self.block_mut(*number);
            block.counts = true;
            block.standing = standing;
        }
        self.scratch = subtree;
    }

    /// Children first, so that the holder stays prefix-closed at every instant.
    fn withdraw_subtree(&mut self, root: BlockNumber, publication: &mut Publication<'_, '_>) {
        let subtree = self.collect_subtree(root);
        for number in subtree.iter().rev() {
            let block = self.block_mut(*number);
            block.counts = false;
            publication.remove(std::mem::take(&mut block.standing));
        }
        self.scratch = subtree;
    }
}

/// A block to be stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewBlock {
    pub(crate) key: PositionalLineageHash,
    pub(crate) sequence_hash: Option<SequenceHash>,
    pub(crate) name: Option<u64>,
}
