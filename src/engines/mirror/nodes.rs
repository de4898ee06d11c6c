//! The blocks that a mirror keeps for routers, with the tokens of each block. Each block refers to its parent, the block before
//! it. All blocks are in one array, whose free places are used again (a slab).

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};
use serde::{Deserialize, Serialize};

use kvatlas_core::hash::{BlockSize, HashSeed, SequenceHash, Token};

use super::list::MirrorBlock;

/// Index that stands for no block.
const NONE: u32 = u32::MAX;
/// Maximum number of combinations of salt and adapter that are told apart at a time.
const CACHES_MAX: usize = 4096;
/// Memory that a block takes in the hash table of slots, in bytes. A bucket takes five bytes, and at least seven of sixteen
/// buckets are in use once the table has grown.
const TABLE_BYTES: usize = 12;
/// Bytes of a block without its tokens: its node, and its entry in the table.
const OVERHEAD_BYTES: usize = size_of::<MirrorNode>() + TABLE_BYTES;

/// Place of a block in the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(u32);

impl Slot {
    /// The place as an index, below [`Nodes::places`].
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The state of a block on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum BlockState {
    /// The engine does not hold the block. The block is kept because other blocks follow it.
    No,
    /// The engine holds the block.
    Yes,
    /// The engine held the block before it became silent, or before some of its events went missing. It is unknown
    /// whether the engine still holds the block.
    Unseen,
    /// The engine held the block before some of its events were lost. No later event has shown that the engine still
    /// holds it.
    InDoubt,
}

impl BlockState {
    /// Returns the state that a saved mirror has for the block. A held block is saved as [`Self::Unseen`], because a
    /// restored mirror does not know whether the engine still runs.
    pub(super) fn once_kept(self) -> Self {
        match self {
            Self::Yes => Self::Unseen,
            other => other,
        }
    }

    /// Whether the block is in doubt, that is, may be held or may be gone.
    pub(super) fn is_doubted(self) -> bool {
        matches!(self, Self::Unseen | Self::InDoubt)
    }
}

#[derive(Debug, Clone, Copy)]
struct MirrorNode {
    sequence: SequenceHash,
    parent: u32,
    children: u32,
    cache: u16,
    held: BlockState,
    /// True if routers have been told that the block is held.
    is_told: bool,
    /// True if routers have received this block in a stored event since the last clear, even if they have received
    /// its removal afterwards.
    is_known: bool,
    is_free: bool,
}

/// A combination of salt and adapter that blocks share.
#[derive(Debug)]
struct Cache {
    seed: HashSeed,
    lora_name: Option<Box<str>>,
    /// Number of blocks with this combination. At 0 another combination may take the place.
    blocks: u32,
}

/// The reason why a new block has no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// The memory for blocks is full.
    Full,
    /// The blocks already have [`CACHES_MAX`] other combinations of salt and adapter.
    Salts,
}

/// The blocks of a mirror.
#[derive(Debug)]
pub(super) struct Nodes {
    size: usize,
    nodes_max: usize,
    nodes: Vec<MirrorNode>,
    /// The tokens of each block, at its slot.
    tokens: Vec<Token>,
    free: Vec<u32>,
    /// Slots by the sequence hashes of their blocks. The hashes themselves are in the nodes.
    slots: HashTable<u32>,
    hasher: DefaultHashBuilder,
    caches: Vec<Cache>,
    /// False if certainly no block is in doubt.
    may_have_doubted: bool,
}

impl Nodes {
    pub(super) fn new(block_size: BlockSize, bytes_max: usize) -> Self {
        let size = block_size.as_usize();
        let block_bytes = OVERHEAD_BYTES + size * size_of::<Token>();
        Self {
            size,
            nodes_max: (bytes_max / block_bytes).min(NONE as usize),
            nodes: Vec::new(),
            tokens: Vec::new(),
            free: Vec::new(),
            slots: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            caches: Vec::new(),
            may_have_doubted: false,
        }
    }

    /// Returns the memory that all blocks take, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.slots.len() * (OVERHEAD_BYTES + self.size * size_of::<Token>())
    }

    /// Number of blocks.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Number of places for blocks, free ones included.
    pub(super) fn places(&self) -> usize {
        self.nodes.len()
    }

    /// All combinations of salt and adapter that blocks have: for each, the hash seed, and the adapter's name if
    /// there is an adapter.
    pub(super) fn caches(&self) -> Vec<(HashSeed, Option<String>)> {
        let told = |cache: &Cache| (cache.seed, cache.lora_name.as_deref().map(str::to_owned));
        self.caches.iter().map(told).collect()
    }

    /// Returns the index of the block's salt and adapter in [`Self::caches`].
    pub(super) fn cache_place(&self, slot: Slot) -> Option<u16> {
        self.get(slot).map(|node| node.cache)
    }

    fn get(&self, slot: Slot) -> Option<&MirrorNode> {
        self.nodes.get(slot.0 as usize).filter(|node| !node.is_free)
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut MirrorNode> {
        self.nodes.get_mut(slot.0 as usize).filter(|node| !node.is_free)
    }

    pub(super) fn find(&self, sequence: SequenceHash) -> Option<Slot> {
        let is_it = |slot: &u32| self.sequence(Slot(*slot)) == Some(sequence);
        let found = self.slots.find(self.hasher.hash_one(sequence), is_it);
        found.copied().map(Slot)
    }

    pub(super) fn sequence(&self, slot: Slot) -> Option<SequenceHash> {
        self.get(slot).map(|node| node.sequence)
    }

    pub(super) fn parent(&self, slot: Slot) -> Option<Slot> {
        let parent = self.get(slot)?.parent;
        (parent != NONE).then_some(Slot(parent))
    }

    /// Hash seed of the block's sequence, which stands for its salt and adapter.
    pub(super) fn seed(&self, slot: Slot) -> Option<HashSeed> {
        self.cache(slot).map(|cache| cache.seed)
    }

    fn cache(&self, slot: Slot) -> Option<&Cache> {
        self.caches.get(usize::from(self.get(slot)?.cache))
    }

    pub(super) fn held(&self, slot: Slot) -> BlockState {
        self.get(slot).map_or(BlockState::No, |node| node.held)
    }

    pub(super) fn set_held(&mut self, slot: Slot, held: BlockState) {
        self.may_have_doubted |= held.is_doubted();
        if let Some(node) = self.get_mut(slot) {
            node.held = held;
        }
    }

    pub(super) fn is_told(&self, slot: Slot) -> bool {
        self.get(slot).is_some_and(|node| node.is_told)
    }

    pub(super) fn is_known(&self, slot: Slot) -> bool {
        self.get(slot).is_some_and(|node| node.is_known)
    }

    /// Notes that routers know the block now. `is_held` tells whether they count it as held.
    pub(super) fn note_told(&mut self, slot: Slot, is_held: bool) {
        if let Some(node) = self.get_mut(slot) {
            (node.is_known, node.is_told) = (true, is_held);
        }
    }

    /// The block with all that a stored event needs.
    pub(super) fn block(&self, slot: Slot) -> Option<MirrorBlock<'_>> {
        let start = slot.0 as usize * self.size;
        Some(MirrorBlock {
            sequence: self.sequence(slot)?,
            parent: self.parent(slot).and_then(|parent| self.sequence(parent)),
            tokens: self.tokens.get(start..start + self.size)?,
            lora_name: self.cache(slot)?.lora_name.as_deref(),
        })
    }

    /// Finds the block of this hash, or inserts it.
    ///
    /// # Errors
    ///
    /// [`NoPlace`] if the block is new and has no place.
    pub(super) fn find_or_insert(
        &mut self,
        sequence: SequenceHash,
        parent: Option<Slot>,
        seed: HashSeed,
        lora_name: Option<&str>,
        tokens: &[Token],
    ) -> Result<Slot, NoPlace> {
        if let Some(slot) = self.find(sequence) {
            return Ok(slot);
        }
        if self.slots.len() >= self.nodes_max || tokens.len() != self.size {
            return Err(NoPlace::Full);
        }
        let parent_node = parent.and_then(|parent| self.get(parent));
        let cache = match parent_node {
            Some(parent) => parent.cache,
            None => self.cache_of(seed, lora_name).ok_or(NoPlace::Salts)?,
        };
        let node = MirrorNode {
            sequence,
            parent: parent.map_or(NONE, |parent| parent.0),
            children: 0,
            cache,
            held: BlockState::No,
            is_told: false,
            is_known: false,
            is_free: false,
        };
        let slot = self.place(node, tokens).ok_or(NoPlace::Full)?;
        self.list(slot, sequence);
        if let Some(cache) = self.caches.get_mut(usize::from(cache)) {
            cache.blocks += 1;
        }
        if let Some(parent) = parent.and_then(|parent| self.get_mut(parent)) {
            parent.children += 1;
        }
        Ok(slot)
    }

    /// Adds the block with the hash `sequence` to the hash table, which finds slots by hash. The block must not be in
    /// the table yet.
    fn list(&mut self, slot: Slot, sequence: SequenceHash) {
        let Self {
            slots, nodes, hasher, ..
        } = self;
        let hash_again = |slot: &u32| {
            let node = nodes.get(*slot as usize);
            hasher.hash_one(node.map_or(sequence, |node| node.sequence))
        };
        slots.insert_unique(hasher.hash_one(sequence), slot.0, hash_again);
    }

    /// Removes the block with the hash `sequence` from the hash table, which finds slots by hash.
    fn unlist(&mut self, slot: Slot, sequence: SequenceHash) {
        let is_it = |found: &u32| *found == slot.0;
        if let Ok(found) = self.slots.find_entry(self.hasher.hash_one(sequence), is_it) {
            found.remove();
        }
    }

    /// Returns the index of this combination of salt and adapter in [`Self::caches`]. A new combination takes the place
    /// of one that no block has any more, or a place at the end. `None` if there is no place.
    fn cache_of(&mut self, seed: HashSeed, lora_name: Option<&str>) -> Option<u16> {
        let known = self.caches.iter().position(|cache| cache.seed == seed);
        if let Some(place) = known {
            return u16::try_from(place).ok();
        }
        let cache = Cache {
            seed,
            lora_name: lora_name.filter(|name| !name.is_empty()).map(Box::from),
            blocks: 0,
        };
        let unused = self.caches.iter().position(|cache| cache.blocks == 0);
        let place = match unused {
            Some(place) => place,
            None if self.caches.len() >= CACHES_MAX => return None,
            None => self.caches.len(),
        };
        match self.caches.get_mut(place) {
            Some(unused) => *unused = cache,
            None => self.caches.push(cache),
        }
        u16::try_from(place).ok()
    }

    /// Stores a block in a free place of the arrays, or at their end. The arrays grow by only an eighth at a time, so
    /// that their memory hardly exceeds the bound in bytes.
    fn place(&mut self, node: MirrorNode, tokens: &[Token]) -> Option<Slot> {
        if let Some(place) = self.free.pop() {
            let start = place as usize * self.size;
            self.tokens
                .get_mut(start..start + self.size)?
                .copy_from_slice(tokens);
            *self.nodes.get_mut(place as usize)? = node;
            return Some(Slot(place));
        }
        if self.nodes.len() == self.nodes.capacity() {
            let more = (self.nodes.len() / 8).max(1024);
            self.nodes.reserve_exact(more);
            self.tokens.reserve_exact(more * self.size);
        }
        let place = u32::try_from(self.nodes.len()).ok()?;
        self.nodes.push(node);
        self.tokens.extend_from_slice(tokens);
        Some(Slot(place))
    }

    /// Whether at least one block is [`BlockState::Yes`], that is, certainly held.
    pub(super) fn has_held(&self) -> bool {
        self.nodes
            .iter()
            .any(|node| !node.is_free && node.held == BlockState::Yes)
    }

    /// Marks all blocks as not held, and as unknown to routers.
    pub(super) fn clear_held(&mut self) {
        for node in &mut self.nodes {
            (node.held, node.is_told, node.is_known) = (BlockState::No, false, false);
        }
    }

    /// Puts all held and all [`BlockState::Unseen`] blocks in doubt.
    pub(super) fn doubt_held(&mut self) {
        self.change_held(&[BlockState::Yes, BlockState::Unseen], BlockState::InDoubt);
    }

    /// Notes that the engine is silent, or that some of its events are missing. All held blocks become
    /// [`BlockState::Unseen`].
    pub(super) fn lose_sight(&mut self) {
        self.change_held(&[BlockState::Yes], BlockState::Unseen);
    }

    fn change_held(&mut self, from: &[BlockState], to: BlockState) {
        self.may_have_doubted |= to.is_doubted();
        let is_meant = |node: &&mut MirrorNode| !node.is_free && from.contains(&node.held);
        for node in self.nodes.iter_mut().filter(is_meant) {
            node.held = to;
        }
    }

    /// Notes that the engine is alive, and that none of its events are missing any more. Marks all
    /// [`BlockState::Unseen`] blocks as held, and appends them to `touched`.
    pub(super) fn regain_sight(&mut self, touched: &mut Vec<Slot>) {
        for (place, node) in (0..).zip(&mut self.nodes) {
            if node.held == BlockState::Unseen && !node.is_free {
                node.held = BlockState::Yes;
                touched.push(Slot(place));
            }
        }
    }

    /// Whether at most an eighth of the memory for blocks is left.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.slots.len() >= self.nodes_max - self.nodes_max / 8
    }

    /// Marks all doubted blocks as not held. Returns whether there were any. Looks at all blocks only if some may be in
    /// doubt.
    pub(super) fn forget_doubted(&mut self) -> bool {
        if !std::mem::take(&mut self.may_have_doubted) {
            return false;
        }
        let mut any = false;
        let doubted = |node: &&mut MirrorNode| !node.is_free && node.held.is_doubted();
        for node in self.nodes.iter_mut().filter(doubted) {
            (node.held, any) = (BlockState::No, true);
        }
        any
    }

    /// Notes that routers know all kept blocks now, and which of them are held.
    pub(super) fn note_all_told(&mut self) {
        for node in &mut self.nodes {
            (node.is_known, node.is_told) = (true, node.held == BlockState::Yes);
        }
    }

    /// Forgets the block in `slot` if it is not held and no kept block follows it. Then does the same with its
    /// parent, and so on, until a block has to stay.
    pub(super) fn prune(&mut self, slot: Slot) {
        let mut at = Some(slot);
        while let Some(slot) = at {
            let Some(node) = self.get(slot).copied() else {
                return;
            };
            if node.held != BlockState::No || node.children > 0 {
                return;
            }
            at = self.parent(slot);
            self.unlist(slot, node.sequence);
            self.free.push(slot.0);
            if let Some(cache) = self.caches.get_mut(usize::from(node.cache)) {
                cache.blocks = cache.blocks.saturating_sub(1);
            }
            if let Some(freed) = self.get_mut(slot) {
                freed.is_free = true;
            }
            if let Some(parent) = at.and_then(|parent| self.get_mut(parent)) {
                parent.children = parent.children.saturating_sub(1);
            }
        }
    }

    /// Forgets all blocks that are not held, unless a held block follows them.
    pub(super) fn prune_all(&mut self) {
        (0..)
            .take(self.nodes.len())
            .for_each(|place| self.prune(Slot(place)));
        if self.slots.is_empty() {
            (self.nodes, self.tokens, self.free) = (Vec::new(), Vec::new(), Vec::new());
            self.slots = HashTable::new();
            self.caches.clear();
        }
    }

    /// Visits all blocks depth-first, each after its parent.
    pub(super) fn walk(&self, mut visit: impl FnMut(Slot)) {
        // Only this walk needs the first child and the next sibling of each block, so they are found here.
        let mut first = vec![NONE; self.nodes.len()];
        let mut next = vec![NONE; self.nodes.len()];
        let mut waiting = Vec::new();
        for (place, node) in (0..).zip(&self.nodes).filter(|(_, node)| !node.is_free) {
            match first.get_mut(node.parent as usize) {
                Some(first) => {
                    let sibling = std::mem::replace(first, place);
                    if let Some(next) = next.get_mut(place as usize) {
                        *next = sibling;
                    }
                }
                None => waiting.push(place),
            }
        }
        while let Some(place) = waiting.pop() {
            visit(Slot(place));
            let mut child = first.get(place as usize).copied().unwrap_or(NONE);
            while child != NONE {
                waiting.push(child);
                child = next.get(child as usize).copied().unwrap_or(NONE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_looked_at_for_doubts_only_if_some_may_be_in_doubt() {
        let mut nodes = Nodes::new(BlockSize::DEFAULT, 1 << 20);
        let tokens = vec![0; BlockSize::DEFAULT.as_usize()];
        let slot = nodes.find_or_insert(SequenceHash(1), None, HashSeed::default(), None, &tokens);
        let slot = slot.unwrap();
        nodes.set_held(slot, BlockState::Yes);
        assert!(!nodes.may_have_doubted && !nodes.forget_doubted());
        nodes.doubt_held();
        assert!(nodes.forget_doubted() && !nodes.may_have_doubted);
        assert_eq!(nodes.held(slot), BlockState::No);
        nodes.set_held(slot, BlockState::Unseen);
        assert!(nodes.forget_doubted());
    }
}
