//! The oracle: what one holder holds, written down naively.
//!
//! No links, no counting flags, no shared table, no search: a map from place to block, a map from name to place, and loops.

use std::collections::{HashMap, HashSet};

use crate::wire::{BlockContent, BlockNames, Event, RemovedBlocks, StoredBlocks, Tier};

use super::super::ParkingLimits;
use super::world::{PlainKey, block_hash_of_tokens, next_hash};

/// Position and current fragment: a holder has at most one block there.
pub(super) type Place = (u64, u64);

/// A block in a comparable form: place, parent, tiers without a name, names with their tiers.
pub(super) type Content = (Place, Option<u64>, u8, Vec<(u64, u8)>);

#[derive(Debug)]
struct Block {
    parent: Option<u64>,
    sequence: Option<u64>,
    /// The tiers that hold it without a name, one bit each; none once it has a name.
    nameless: u8,
    /// Its names, oldest first, each with the tiers that hold it under that name.
    names: Vec<(u64, u8)>,
}

#[derive(Debug)]
struct Parked {
    parent: u64,
    stored: StoredBlocks,
    tier: Tier,
    removed: HashSet<u64>,
}

/// What the rules say an event does.
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
}

/// One holder.
#[derive(Debug)]
pub(super) struct Oracle {
    recomputes: bool,
    blocks_max: usize,
    parking: ParkingLimits,
    blocks: HashMap<Place, Block>,
    names: HashMap<u64, Place>,
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

    /// A dump does not have what waits for a parent.
    pub(super) fn forget_parked(&mut self) {
        self.parked.clear();
    }

    pub(super) fn holds(&self, key: PlainKey) -> bool {
        let block = self.blocks.get(&(key.position, key.current));
        block.is_some_and(|block| block.parent == key.parent)
    }

    /// Leading keys that the holder holds, one after the other.
    pub(super) fn matched(&self, keys: &[PlainKey]) -> usize {
        keys.iter().take_while(|key| self.holds(**key)).count()
    }

    /// Whether the holder has the chain from `place` down to position 0, and all of it is resident.
    fn counts(&self, mut place: Place) -> bool {
        loop {
            match self.blocks.get(&place).map(|block| block.parent) {
                None => return false,
                Some(None) => return true,
                Some(Some(parent)) => place = (place.0 - 1, parent),
            }
        }
    }

    /// The keys that queries can find.
    pub(super) fn counting_keys(&self) -> impl Iterator<Item = PlainKey> + '_ {
        let counting = self.blocks.iter().filter(|(place, _)| self.counts(**place));
        counting.map(|((position, current), block)| PlainKey {
            position: *position,
            parent: block.parent,
            current: *current,
        })
    }

    /// What the holder holds, names and tiers included, in a comparable form.
    pub(super) fn contents(&self) -> Vec<Content> {
        let mut all: Vec<_> = self
            .blocks
            .iter()
            .map(|(place, block)| (*place, block.parent, block.nameless, block.names.clone()))
            .collect();
        all.sort();
        all
    }

    pub(super) fn apply(&mut self, event: &Event, tier: Tier) -> Outcome {
        let mut outcome = Outcome::default();
        match event {
            Event::Stored(stored) => {
                self.store(stored, tier, &HashSet::new(), &mut outcome);
                self.store_parked(&mut outcome);
            }
            Event::Removed(removed) => self.remove(removed, tier, &mut outcome),
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
            let is_ready = |parked: &Parked| self.names.contains_key(&parked.parent);
            let Some(index) = self.parked.iter().position(is_ready) else {
                return;
            };
            let parked = self.parked.remove(index);
            self.store(&parked.stored, parked.tier, &parked.removed, outcome);
        }
    }

    fn store(&mut self, stored: &StoredBlocks, tier: Tier, removed: &HashSet<u64>, outcome: &mut Outcome) {
        let engine = stored.engine_hashes.as_ref();
        match &stored.names {
            BlockNames::Lineage(keys) => {
                for (index, key) in keys.iter().enumerate() {
                    let name = engine.map(|names| names[index]);
                    self.store_block(PlainKey::from(*key), None, name, tier, outcome);
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
                for ((key, sequence), name) in keys.into_iter().zip(chain).zip(names) {
                    if !removed.contains(name) {
                        self.store_block(key, Some(sequence), Some(*name), tier, outcome);
                    }
                }
            }
        }
    }

    /// Position of the first block, its parent, and whether that is the parent's whole sequence hash.
    fn start(&self, parent: Option<u64>, explicit: Option<u64>) -> Option<(u64, Option<u64>, bool)> {
        let Some(parent) = parent else {
            return Some((0, None, true));
        };
        if let Some(place) = self.names.get(&parent) {
            let position = place.0 + 1;
            if explicit.is_none_or(|explicit| explicit == position) {
                let sequence = self.blocks[place].sequence;
                return Some((position, Some(sequence.unwrap_or(place.1)), sequence.is_some()));
            }
        }
        explicit.map(|position| (position, Some(parent), false))
    }

    fn park(&mut self, parent: u64, stored: &StoredBlocks, tier: Tier, outcome: &mut Outcome) {
        outcome.parked += 1;
        self.parked.push(Parked {
            parent,
            stored: stored.clone(),
            tier,
            removed: HashSet::new(),
        });
        let blocks = |parked: &[Parked]| parked.iter().map(|event| event.stored.names.len()).sum::<usize>();
        assert!(stored.names.len() <= self.parking.blocks_max, "not modelled");
        while self.parked.len() > self.parking.events_max || blocks(&self.parked) > self.parking.blocks_max {
            outcome.parking_full += self.parked.remove(0).stored.names.len() as u64;
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
        let place = (key.position, key.current);
        let mut moved = false;
        if let Some(name) = name
            && let Some(other) = self.names.get(&name).copied()
            && (other != place || !self.holds(key))
        {
            moved = true;
            let block = self.blocks.get_mut(&other).unwrap();
            block.names.retain(|(other, _)| *other != name);
            self.names.remove(&name);
            if block.names.is_empty() {
                self.blocks.remove(&other);
            }
        }
        if self.blocks.contains_key(&place) && !self.holds(key) {
            moved = true;
            self.erase(place);
        }
        outcome.moved += u64::from(moved);
        if !self.blocks.contains_key(&place) && self.blocks.len() >= self.blocks_max {
            outcome.capacity += 1;
            return;
        }
        outcome.stored += 1;
        let block = self.blocks.entry(place).or_insert(Block {
            parent: key.parent,
            sequence,
            nameless: 0,
            names: Vec::new(),
        });
        block.sequence = block.sequence.or(sequence);
        let bit = 1 << tier.as_u8();
        match name {
            Some(name) => {
                self.names.insert(name, place);
                if block.names.is_empty() {
                    // The first name takes over what was stored without one.
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
    }

    fn erase(&mut self, place: Place) {
        let block = self.blocks.remove(&place).unwrap();
        for (name, _) in block.names {
            self.names.remove(&name);
        }
    }

    fn remove(&mut self, removed: &RemovedBlocks, tier: Tier, outcome: &mut Outcome) {
        let bit = 1 << tier.as_u8();
        for name in removed.hashes.iter().map(|hash| hash.as_u64()) {
            let waits = self.note_removed(name, tier);
            let is_gone = match self.names.get(&name).copied() {
                Some(place) => self.withdraw(place, Some(name), bit),
                None => waits,
            };
            count(is_gone, outcome);
        }
        for key in removed.lineage_hashes.iter().copied().map(PlainKey::from) {
            let is_gone = self.holds(key) && self.withdraw((key.position, key.current), None, bit);
            count(is_gone, outcome);
        }
    }

    /// What waits for a parent must not come back.
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
            is_noted |= has_name && parked.removed.insert(name);
        }
        is_noted
    }

    /// Takes a tier from a block under one name, or under all; a block that nothing holds any more is gone.
    fn withdraw(&mut self, place: Place, name: Option<u64>, bit: u8) -> bool {
        let block = self.blocks.get_mut(&place).unwrap();
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
        if block.names.is_empty() && block.nameless == 0 {
            self.blocks.remove(&place);
        }
        is_withdrawn
    }
}

fn count(is_removed: bool, outcome: &mut Outcome) {
    outcome.removed += u64::from(is_removed);
    outcome.unknown += u64::from(!is_removed);
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
