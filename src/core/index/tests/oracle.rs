//! The oracle: a naive record of what one holder holds.
//!
//! It has no links, no counting flags, no shared table and no search. It consists of a map from lineage hash to
//! block, a map from name to lineage hash, and loops.

use hashbrown::{HashMap, HashSet};

use crate::wire::{
    BlockContent, BlockNames, Event, RemovedBlocks, Resumable, ResumableBlocks, StoredBlocks, Tier,
};

use super::api::ParkingLimits;
use super::world::{PlainKey, block_hash_of_tokens, next_hash};

/// A block in a comparable form. The parts are: position, parent and fragment; tiers without a name; names with their
/// tiers; classes of tiers in which the block is not resumable.
pub(super) type Content = ((u64, Option<u64>, u64), u8, Vec<(u64, u8)>, u8);

/// Returns the classes of `tiers`, one bit for each class: the device, the host, and all other tiers.
fn classes(tiers: u8) -> u8 {
    tiers & 3 | if tiers & 0b1111_1100 == 0 { 0 } else { 4 }
}

#[derive(Debug)]
struct Block {
    sequence: Option<u64>,
    /// Tiers that hold the block without a name, one bit each; 0 once the block has a name.
    nameless: u8,
    /// Names of the block, oldest first, each with the tiers that hold the block under that name.
    names: Vec<(u64, u8)>,
    /// Classes of tiers in which the block is not resumable.
    barred: u8,
    /// Whether the holder has had every block before this block, back to position 0.
    is_placed: bool,
}

impl Block {
    fn tiers(&self) -> u8 {
        let names = self.names.iter();
        names.fold(self.nameless, |held, (_, tiers)| held | tiers)
    }

    /// Clears the barred bits of tier classes in which the block does not lie any more.
    fn settle(&mut self) {
        self.barred &= classes(self.tiers());
    }

    fn mark(&mut self, bit: u8, resumable: bool) {
        self.barred &= !classes(bit);
        if !resumable {
            self.barred |= classes(bit);
        }
    }
}

#[derive(Debug)]
struct Parked {
    parent: u64,
    stored: StoredBlocks,
    tier: Tier,
    removed: Gone,
}

impl Parked {
    /// Number of blocks that are lost if the waiting event is dropped. Blocks removed by name while the event waited
    /// are not lost.
    fn lost(&self) -> u64 {
        let BlockNames::Sequence { hashes, .. } = &self.stored.names else {
            unreachable!("lineage hashes wait for nobody");
        };
        let own = || hashes.iter().map(|hash| hash.as_u64()).collect::<HashSet<_>>();
        let names = self.stored.engine_hashes.as_ref();
        let names = names.map_or_else(own, |names| names.iter().copied().collect());
        names.difference(&self.removed.names).count() as u64
    }
}

/// Removals that came while an event waited.
#[derive(Debug, Default, Clone)]
struct Gone {
    names: HashSet<u64>,
    /// Removed hashes that were not the names of blocks.
    hashes: HashSet<u64>,
    keys: HashSet<PlainKey>,
}

/// Expected outcome of an event, by the rules.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) stored: u64,
    pub(super) removed: u64,
    pub(super) unknown: u64,
    pub(super) moved: u64,
    pub(super) parked: u64,
    pub(super) parking_full: u64,
    pub(super) missing_content: u64,
    pub(super) capacity: u64,
    /// Number of stored blocks with an ambiguous name: an earlier event gave this name as the sequence hash of its
    /// parent, at the position of the stored block. The parent was absent.
    pub(super) ambiguous: u64,
}

/// Naive record of what one holder holds.
#[derive(Debug)]
pub(super) struct Oracle {
    recomputes: bool,
    blocks_max: usize,
    parking: ParkingLimits,
    blocks: HashMap<PlainKey, Block>,
    names: HashMap<u64, PlainKey>,
    parked: Vec<Parked>,
}

impl Oracle {
    pub(super) fn new(recomputes: bool, blocks_max: usize, parking: ParkingLimits) -> Self {
        Self {
            recomputes,
            blocks_max,
            parking,
            blocks: HashMap::new(),
            names: HashMap::new(),
            parked: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Forgets the events that wait for a parent. A dump does not contain these events.
    pub(super) fn forget_parked(&mut self) {
        self.parked.clear();
    }

    pub(super) fn holds(&self, key: PlainKey) -> bool {
        self.blocks.contains_key(&key)
    }

    /// Number of leading keys that the holder holds without a hole.
    pub(super) fn matched(&self, keys: &[PlainKey]) -> usize {
        keys.iter().take_while(|key| self.holds(**key)).count()
    }

    /// Number of leading keys that the holder holds without a hole in any of `tiers`, which has one bit for each tier.
    pub(super) fn matched_in(&self, keys: &[PlainKey], tiers: u8) -> usize {
        let is_in = |key: &&PlainKey| {
            let block = self.blocks.get(*key);
            block.is_some_and(|block| block.tiers() & tiers != 0)
        };
        keys.iter().take_while(is_in).count()
    }

    /// Number of leading keys in `tiers` that a request can use: the keys up to the last resumable one among the
    /// first `most`.
    pub(super) fn usable_in(&self, keys: &[PlainKey], tiers: u8, most: usize) -> usize {
        let depth = self.matched_in(keys, tiers).min(most);
        let is_resumable = |key: &PlainKey| {
            let block = &self.blocks[key];
            classes(block.tiers() & tiers) & !block.barred != 0
        };
        let last = keys[..depth].iter().rposition(is_resumable);
        last.map_or(0, |last| last + 1)
    }

    /// Returns the keys that queries can find: blocks that the holder has together with all blocks before them.
    pub(super) fn counting_keys(&self) -> Vec<PlainKey> {
        let mut keys: Vec<PlainKey> = self.blocks.keys().copied().collect();
        keys.sort_by_key(|key| key.position);
        let mut counting: HashSet<(u64, u64)> = HashSet::new();
        keys.retain(|key| {
            let counts = key
                .parent
                .is_none_or(|parent| counting.contains(&(key.position - 1, parent)));
            if counts {
                counting.insert((key.position, key.current));
            }
            counts
        });
        keys
    }

    /// Returns the holder's blocks in a comparable form, names and tiers included.
    pub(super) fn contents(&self) -> Vec<Content> {
        let content = |(key, block): (&PlainKey, &Block)| {
            (order(key), block.nameless, block.names.clone(), block.barred)
        };
        let mut all: Vec<_> = self.blocks.iter().map(content).collect();
        all.sort();
        all
    }

    pub(super) fn apply(&mut self, event: &Event, tier: Tier) -> Outcome {
        let mut outcome = Outcome::default();
        match event {
            Event::Stored(stored) => {
                self.store(stored, tier, &Gone::default(), &mut outcome);
                self.store_parked(&mut outcome);
            }
            Event::Removed(removed) => self.remove(removed, tier, &mut outcome),
            Event::Resumable(blocks) => self.mark(blocks, tier, &mut outcome),
            Event::Doubted(_) => {}
            Event::Cleared | Event::Goodbye => {
                self.blocks.clear();
                self.names.clear();
                self.parked.clear();
            }
        }
        outcome
    }

    fn store_parked(&mut self, outcome: &mut Outcome) {
        loop {
            let is_ready = |parked: &Parked| self.parent(parked.parent, None).is_some();
            let Some(index) = self.parked.iter().position(is_ready) else {
                return;
            };
            let parked = self.parked.remove(index);
            self.store(&parked.stored, parked.tier, &parked.removed, outcome);
        }
    }

    fn store(&mut self, stored: &StoredBlocks, tier: Tier, removed: &Gone, outcome: &mut Outcome) {
        let engine = stored.engine_hashes.as_ref();
        let flags = flags_of(stored);
        match &stored.names {
            BlockNames::Lineage(keys) => {
                let keyed = keys.iter().map(|key| PlainKey::from(*key));
                let named = keyed.zip(engine.into_iter().flatten());
                self.note_ambiguous(named.map(|(key, name)| (key, *name)), outcome);
                for (index, key) in keys.iter().enumerate() {
                    let name = engine.map(|names| names[index]);
                    self.store_block(PlainKey::from(*key), None, name, tier, outcome);
                    self.mark_stored(PlainKey::from(*key), name, tier, flags[index]);
                }
            }
            BlockNames::Sequence { hashes, .. } if hashes.is_empty() => {}
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                let explicit = position.map(|position| position.as_u64());
                let Some((position, parent, is_known)) = self.start(parent.map(u64::from), explicit) else {
                    self.park(parent.unwrap().as_u64(), stored, tier, outcome);
                    return;
                };
                let hashes: Vec<u64> = hashes.iter().copied().map(u64::from).collect();
                let names = engine.unwrap_or(&hashes);
                let chain = if self.recomputes && engine.is_none() {
                    let content = content_of(stored);
                    if content.is_empty() || !is_known {
                        outcome.missing_content += hashes.len() as u64;
                        return;
                    }
                    let mut parent = parent;
                    let step = |block: &u64| *parent.insert(next_hash(parent, *block));
                    content.iter().map(step).collect()
                } else {
                    hashes.clone()
                };
                let keys = PlainKey::run(position, parent, &chain);
                self.note_ambiguous(keys.iter().copied().zip(names.iter().copied()), outcome);
                for (((key, sequence), name), flag) in keys.into_iter().zip(chain).zip(names).zip(flags) {
                    let is_gone = removed.names.contains(name)
                        || removed.hashes.contains(&sequence)
                        || removed.keys.contains(&key);
                    if !is_gone {
                        self.store_block(key, Some(sequence), Some(*name), tier, outcome);
                        self.mark_stored(key, Some(*name), tier, flag);
                    }
                }
            }
        }
    }

    /// Counts the blocks of an event that have an ambiguous name. A block's name is ambiguous if blocks without a place
    /// gave it as the sequence hash of their parent, at the same position, although the block has another hash.
    fn note_ambiguous(&self, blocks: impl Iterator<Item = (PlainKey, u64)>, outcome: &mut Outcome) {
        let is_ambiguous = |(key, name): &(PlainKey, u64)| {
            let child = PlainKey::new(key.position + 1, Some(*name), 0);
            let waits = |(own, block): (&PlainKey, &Block)| {
                !block.is_placed && (own.position, own.parent) == (child.position, child.parent)
            };
            let is_own_hash = key.current == PlainKey::new(key.position, None, *name).current;
            !is_own_hash && self.blocks.iter().any(waits)
        };
        outcome.ambiguous += blocks.filter(is_ambiguous).count() as u64;
    }

    /// Gives a place to each block whose parent has a place.
    fn place(&mut self) {
        loop {
            let has_place = |key: &PlainKey| {
                let is_parent = |(own, block): (&PlainKey, &Block)| {
                    block.is_placed && (own.position + 1, Some(own.current)) == (key.position, key.parent)
                };
                key.position == 0 || self.blocks.iter().any(is_parent)
            };
            let waiting = self.blocks.iter().filter(|(_, block)| !block.is_placed);
            let due: Vec<PlainKey> = waiting.map(|(key, _)| *key).filter(has_place).collect();
            if due.is_empty() {
                return;
            }
            for key in due {
                self.blocks.get_mut(&key).unwrap().is_placed = true;
            }
        }
    }

    /// Returns the position of an event's first block, the hash of the block's parent, and whether that hash is the
    /// parent's whole sequence hash.
    fn start(&self, parent: Option<u64>, explicit: Option<u64>) -> Option<(u64, Option<u64>, bool)> {
        let Some(parent) = parent else {
            return Some((0, None, true));
        };
        if let Some((position, hash, is_known)) = self.parent(parent, explicit) {
            return Some((position + 1, Some(hash), is_known));
        }
        explicit.map(|position| (position, Some(parent), false))
    }

    /// Returns the position and the hash of the block that an event names as a parent. Also returns whether that hash
    /// is the block's whole sequence hash.
    fn parent(&self, name: u64, child: Option<u64>) -> Option<(u64, u64, bool)> {
        let precedes = |key: &PlainKey| child.is_none_or(|child| child == key.position + 1);
        if let Some(key) = self.names.get(&name).filter(|key| precedes(key)) {
            let sequence = self.blocks[key].sequence;
            return Some((key.position, sequence.unwrap_or(key.current), sequence.is_some()));
        }
        let key = self.hashed(name).into_iter().find(precedes)?;
        Some((key.position, name, true))
    }

    /// Returns the blocks that can have this sequence hash, in the order of their positions.
    fn hashed(&self, hash: u64) -> Vec<PlainKey> {
        let is_it = |key: &PlainKey, block: &Block| match block.sequence {
            Some(sequence) => sequence == hash,
            None => key.current == PlainKey::new(key.position, None, hash).current,
        };
        let blocks = self.blocks.iter().filter(|(key, block)| is_it(key, block));
        let mut keys: Vec<PlainKey> = blocks.map(|(key, _)| *key).collect();
        keys.sort_by_key(order);
        keys
    }

    fn park(&mut self, parent: u64, stored: &StoredBlocks, tier: Tier, outcome: &mut Outcome) {
        outcome.parked += 1;
        self.parked.push(Parked {
            parent,
            stored: stored.clone(),
            tier,
            removed: Gone::default(),
        });
        let blocks = |parked: &[Parked]| parked.iter().map(|event| event.stored.names.len()).sum::<usize>();
        assert!(stored.names.len() <= self.parking.blocks_max, "not modelled");
        while self.parked.len() > self.parking.events_max || blocks(&self.parked) > self.parking.blocks_max {
            outcome.parking_full += self.parked.remove(0).lost();
        }
    }

    fn store_block(
        &mut self,
        key: PlainKey,
        sequence: Option<u64>,
        name: Option<u64>,
        tier: Tier,
        outcome: &mut Outcome,
    ) {
        if let Some(name) = name
            && let Some(other) = self.names.get(&name).copied()
            && other != key
        {
            outcome.moved += 1;
            let block = self.blocks.get_mut(&other).unwrap();
            block.names.retain(|(other, _)| *other != name);
            block.settle();
            self.names.remove(&name);
            if block.names.is_empty() {
                self.blocks.remove(&other);
            }
        }
        if !self.blocks.contains_key(&key) && self.blocks.len() >= self.blocks_max {
            outcome.capacity += 1;
            return;
        }
        outcome.stored += 1;
        let block = self.blocks.entry(key).or_insert(Block {
            sequence,
            nameless: 0,
            names: Vec::new(),
            barred: 0,
            is_placed: false,
        });
        block.sequence = block.sequence.or(sequence);
        let bit = 1 << tier.as_u8();
        match name {
            Some(name) => {
                self.names.insert(name, key);
                if block.names.is_empty() {
                    // Tiers that held the block without a name now hold it under its first name.
                    block
                        .names
                        .push((name, std::mem::take(&mut block.nameless) | bit));
                } else if let Some((_, tiers)) = block.names.iter_mut().find(|(known, _)| *known == name) {
                    *tiers |= bit;
                } else {
                    block.names.push((name, bit));
                }
            }
            None => match block.names.first_mut() {
                Some((_, tiers)) => *tiers |= bit,
                None => block.nameless |= bit,
            },
        }
        if !self.blocks[&key].is_placed {
            self.place();
        }
    }

    /// Marks a block that was just stored as resumable or not. Does nothing if the block was not stored, because there
    /// was no room.
    fn mark_stored(&mut self, key: PlainKey, name: Option<u64>, tier: Tier, resumable: bool) {
        let is_there = name.is_none_or(|name| self.names.get(&name) == Some(&key));
        if let Some(block) = self.blocks.get_mut(&key).filter(|_| is_there) {
            block.mark(1 << tier.as_u8(), resumable);
        }
    }

    fn mark(&mut self, blocks: &ResumableBlocks, tier: Tier, outcome: &mut Outcome) {
        let (bit, waits) = (1 << tier.as_u8(), |parked: &Parked| parked.tier == tier);
        if !blocks.lineage_hashes.is_empty() {
            let lost = self
                .parked
                .iter()
                .filter(|parked| waits(parked))
                .map(Parked::lost);
            outcome.parking_full += lost.sum::<u64>();
            self.parked.retain(|parked| !waits(parked));
        }
        for parked in self.parked.iter_mut().filter(|parked| waits(parked)) {
            let mut flags = flags_of(&parked.stored);
            let BlockNames::Sequence { hashes, .. } = &parked.stored.names else {
                unreachable!("lineage hashes wait for nobody");
            };
            for (index, flag) in flags.iter_mut().enumerate() {
                let name = parked.stored.engine_hashes.as_ref().map(|names| names[index]);
                let own = [Some(hashes[index].as_u64()), name];
                let is_meant = blocks
                    .hashes
                    .iter()
                    .any(|hash| own.contains(&Some(hash.as_u64())));
                *flag = if is_meant { blocks.resumable } else { *flag };
            }
            parked.stored.resumable = Resumable::from_flags(flags);
        }
        let named = blocks
            .hashes
            .iter()
            .map(|hash| match self.names.get(&hash.as_u64()) {
                Some(key) => vec![*key],
                None => self.hashed(hash.as_u64()),
            });
        let keyed = blocks.lineage_hashes.iter().map(|key| vec![PlainKey::from(*key)]);
        for keys in named.chain(keyed).collect::<Vec<_>>() {
            let mut is_held = false;
            for key in keys {
                let block = self.blocks.get_mut(&key);
                if let Some(block) = block.filter(|block| block.tiers() & bit != 0) {
                    is_held = true;
                    block.mark(bit, blocks.resumable);
                }
            }
            outcome.unknown += u64::from(!is_held);
        }
    }

    fn remove(&mut self, removed: &RemovedBlocks, tier: Tier, outcome: &mut Outcome) {
        let bit = 1 << tier.as_u8();
        let keys: Vec<PlainKey> = removed
            .lineage_hashes
            .iter()
            .copied()
            .map(PlainKey::from)
            .collect();
        for parked in self.parked.iter_mut().filter(|parked| parked.tier == tier) {
            parked.removed.keys.extend(keys.iter().copied());
        }
        let (mut seen, mut hashes) = (HashSet::new(), Vec::new());
        for name in removed.hashes.iter().map(|hash| hash.as_u64()) {
            let waits = self.note_removed(name, tier);
            if let Some(key) = self.names.get(&name).copied() {
                seen.insert(name);
                count(self.withdraw(key, Some(name), bit), outcome);
            } else if seen.contains(&name) {
                count(false, outcome);
            } else if waits {
                seen.insert(name);
                count(true, outcome);
            } else {
                hashes.push(name);
            }
        }
        // A hash that is not the name of a block counts as a sequence hash.
        for hash in hashes {
            for parked in self.parked.iter_mut().filter(|parked| parked.tier == tier) {
                parked.removed.hashes.insert(hash);
            }
            let found = self.hashed(hash);
            if found.is_empty() {
                count(false, outcome);
            }
            for key in found {
                count(self.withdraw(key, None, bit), outcome);
            }
        }
        for key in keys {
            let is_gone = self.holds(key) && self.withdraw(key, None, bit);
            count(is_gone, outcome);
        }
    }

    /// Records a removal for the events that wait for a parent, so that the removed block is not stored with them.
    fn note_removed(&mut self, name: u64, tier: Tier) -> bool {
        let mut is_noted = false;
        for parked in self.parked.iter_mut().filter(|parked| parked.tier == tier) {
            let BlockNames::Sequence { hashes, .. } = &parked.stored.names else {
                unreachable!("lineage hashes wait for nobody");
            };
            let has_name = match &parked.stored.engine_hashes {
                Some(names) => names.contains(&name),
                None => hashes.iter().any(|hash| hash.as_u64() == name),
            };
            is_noted |= has_name && parked.removed.names.insert(name);
        }
        is_noted
    }

    /// Removes a tier from a block: under one name, or under all names if `name` is `None`. Removes the block if no
    /// tier is left. Returns whether the block had the tier under that name.
    fn withdraw(&mut self, key: PlainKey, name: Option<u64>, bit: u8) -> bool {
        let block = self.blocks.get_mut(&key).unwrap();
        let mut is_withdrawn = name.is_none() && block.nameless & bit != 0;
        if name.is_none() {
            block.nameless &= !bit;
        }
        for (known, tiers) in &mut block.names {
            if name.is_none_or(|name| name == *known) {
                is_withdrawn |= *tiers & bit != 0;
                *tiers &= !bit;
            }
        }
        for (name, _) in block.names.iter().filter(|(_, tiers)| *tiers == 0) {
            self.names.remove(name);
        }
        block.names.retain(|(_, tiers)| *tiers != 0);
        block.settle();
        if block.names.is_empty() && block.nameless == 0 {
            self.blocks.remove(&key);
        }
        is_withdrawn
    }
}

/// Returns the sort key of a block: position, then parent, then the block's own fragment.
fn order(key: &PlainKey) -> (u64, Option<u64>, u64) {
    (key.position, key.parent, key.current)
}

fn count(is_removed: bool, outcome: &mut Outcome) {
    outcome.removed += u64::from(is_removed);
    outcome.unknown += u64::from(!is_removed);
}

/// Returns, for each block of an event, whether the block is resumable.
fn flags_of(stored: &StoredBlocks) -> Vec<bool> {
    let stretches = stored.resumable.stretches(stored.names.len());
    stretches
        .flat_map(|(stretch, flag)| stretch.map(move |_| flag))
        .collect()
}

fn content_of(stored: &StoredBlocks) -> Vec<u64> {
    match &stored.content {
        None => Vec::new(),
        Some(BlockContent::BlockHashes(hashes)) => hashes.iter().copied().map(u64::from).collect(),
        Some(BlockContent::Tokens { tokens, .. }) => {
            let size = super::world::BLOCK_SIZE as usize;
            tokens.chunks(size).map(block_hash_of_tokens).collect()
        }
    }
}
