//! What one holder holds, where that is as regular as engines usually are: every block is there with all that come before
//! it, in one tier, under one name.
//!
//! Then the shared runs say it all, and the holder's own state is a list of runs and how many blocks it has of each. What does
//! not fit is irregular: the holder goes on as a [`Forest`], block by block, until it is empty again.

use hashbrown::hash_map::Entry;
use hashbrown::{DefaultHashBuilder, HashMap};

use crate::hash::SequenceHash;
use crate::wire::Tier;

use super::forest::{Forest, NewBlock};
use super::holder_set::HolderSlot;
use super::runs::{BlockKey, RunId, RunWriter, Spot};

/// What a holder has of one run.
#[derive(Debug, Default)]
struct Held {
    /// How many blocks of it; never none.
    cutoff: u16,
    /// How many further runs of the holder follow a block of this one.
    children: u32,
    /// No such run follows a block beyond this offset.
    attached_max: u16,
    /// What the engine calls the blocks, where it has names of its own.
    names: Vec<u64>,
}

/// What the engine calls the blocks.
#[derive(Debug)]
enum Names {
    /// By their sequence hashes.
    Hashes,
    /// By names of its own.
    Own(HashMap<u64, Spot>),
}

/// The blocks of one regular holder.
#[derive(Debug)]
pub(crate) struct Plain {
    runs: HashMap<RunId, Held>,
    blocks: usize,
    names: Names,
    tier: Tier,
}

impl Default for Plain {
    fn default() -> Self {
        Self {
            runs: HashMap::with_hasher(DefaultHashBuilder::default()),
            blocks: 0,
            names: Names::Hashes,
            tier: Tier::DEVICE,
        }
    }
}

/// Consecutive blocks to be stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence<'a> {
    /// The block before them, where it is resident; at position 0 there is none.
    pub(crate) parent: Option<Spot>,
    /// Position of the first; all of them have been checked.
    pub(crate) position: u32,
    /// Whole hash of the block before the first.
    pub(crate) parent_hash: Option<u64>,
    /// Their sequence hashes.
    pub(crate) hashes: &'a [SequenceHash],
    /// What the engine calls them; the sequence hashes where this is absent.
    pub(crate) names: Option<&'a [u64]>,
}

impl Sequence<'_> {
    fn key(&self, index: usize) -> BlockKey {
        let hash = |index: usize| self.hashes.get(index).map(|hash| hash.as_u64());
        BlockKey {
            // Below 2^24 for every block of the sequence.
            position: self
                .position
                .saturating_add(u32::try_from(index).unwrap_or(u32::MAX)),
            current: hash(index).unwrap_or_default(),
            parent: index.checked_sub(1).map_or(self.parent_hash, hash),
        }
    }

    fn name(&self, index: usize) -> u64 {
        let own = self.names.and_then(|names| names.get(index)).copied();
        own.or_else(|| self.hashes.get(index).map(|hash| hash.as_u64()))
            .unwrap_or_default()
    }
}

/// How far a sequence was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredAs {
    /// How many of its blocks are held now.
    pub(crate) stored: usize,
    /// Why not all.
    pub(crate) stopped: Option<Stopped>,
}

/// Why a sequence was not stored to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The holder is full.
    Full,
    /// The rest does not fit a regular holder.
    Irregular,
}

/// How many names ahead the memory is asked for in which they are looked for.
const AHEAD: usize = 12;

/// Looks for the blocks of a list of names. Neighbours in the list are mostly neighbours in a run, too, in either order.
#[derive(Debug)]
pub(crate) struct Finder<'n> {
    names: &'n [SequenceHash],
    next: usize,
    last: Option<Spot>,
    /// How many blocks of the run of `last` the holder has.
    cutoff: u16,
}

impl Finder<'_> {
    /// The block with the next name, if the holder has it.
    pub(crate) fn next(&mut self, plain: &Plain, writer: &RunWriter<'_>) -> Option<Spot> {
        let index = self.next;
        self.next += 1;
        let name = self.names.get(index)?.as_u64();
        if !plain.has_own_names() {
            if let Some(spot) = self.neighbour(name, writer) {
                self.last = Some(spot);
                return Some(spot);
            }
            for ahead in self.names.iter().skip(index + 1).take(AHEAD) {
                writer.prefetch(ahead.as_u64());
            }
        }
        self.last = plain.find_name(name, writer);
        let held = self.last.and_then(|last| plain.runs.get(&last.run));
        self.cutoff = held.map_or(0, |held| held.cutoff);
        self.last
    }

    fn neighbour(&self, name: u64, writer: &RunWriter<'_>) -> Option<Spot> {
        let last = self.last?;
        let before = last.offset.checked_sub(1);
        let offsets = [before, Some(last.offset + 1)];
        let spots = offsets
            .into_iter()
            .flatten()
            .map(|offset| Spot { offset, ..last });
        spots
            .into_iter()
            .find(|spot| spot.offset < self.cutoff && writer.hash(*spot) == name)
    }
}

/// Stands for a place until it is known.
const NOWHERE: Spot = Spot {
    run: RunId::NONE,
    offset: 0,
};

/// Whether `name` was not there before.
fn insert_new(names: &mut HashMap<u64, Spot>, name: u64, spot: Spot) -> bool {
    match names.entry(name) {
        Entry::Occupied(_) => false,
        Entry::Vacant(vacant) => {
            vacant.insert(spot);
            true
        }
    }
}

impl Plain {
    /// How many blocks are held.
    pub(crate) fn len(&self) -> usize {
        self.blocks
    }

    /// The tier that holds them.
    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    fn has(&self, spot: Spot) -> bool {
        self.runs
            .get(&spot.run)
            .is_some_and(|held| held.cutoff > spot.offset)
    }

    /// The block that the engine calls `name`.
    pub(crate) fn find_name(&self, name: u64, writer: &RunWriter<'_>) -> Option<Spot> {
        match &self.names {
            Names::Hashes => writer.find_hash(name, |spot| self.has(spot)),
            Names::Own(names) => names.get(&name).copied(),
        }
    }

    /// Looks for one name after the other.
    pub(crate) fn finder<'n>(&self, names: &'n [SequenceHash]) -> Finder<'n> {
        Finder {
            names,
            next: 0,
            last: None,
            cutoff: 0,
        }
    }

    /// Whether the engine has names of its own for the blocks.
    pub(crate) fn has_own_names(&self) -> bool {
        matches!(self.names, Names::Own(_))
    }

    /// The block that `key` names.
    pub(crate) fn find_key(&self, key: &BlockKey, writer: &RunWriter<'_>) -> Option<Spot> {
        writer.find_key(key, |spot| self.has(spot))
    }

    /// Whether an event in `tier`, under names of the engine's own or without, can be kept here.
    pub(crate) fn suits(&mut self, tier: Tier, has_own_names: bool) -> bool {
        if self.blocks == 0 {
            self.tier = tier;
            self.names = if has_own_names {
                Names::Own(HashMap::new())
            } else {
                Names::Hashes
            };
        }
        self.tier == tier && matches!(self.names, Names::Own(_)) == has_own_names
    }

    /// Stores a sequence.
    pub(crate) fn store(
        &mut self,
        sequence: Sequence<'_>,
        blocks_max: usize,
        slot: HolderSlot,
        writer: &mut RunWriter<'_>,
    ) -> StoredAs {
        let count = sequence.hashes.len();
        let mut parent = sequence.parent;
        let mut stored = 0;
        while stored < count {
            let room = blocks_max.saturating_sub(self.blocks);
            let step = match writer.child(parent, &sequence.key(stored)) {
                Some(spot) => self.join(&sequence, stored, spot, room, slot, writer),
                None => self.append(&sequence, stored, parent, room, slot, writer),
            };
            match step {
                Ok((last, taken)) => {
                    stored += taken;
                    parent = Some(last);
                }
                Err(stopped) => {
                    return StoredAs {
                        stored,
                        stopped: Some(stopped),
                    };
                }
            }
        }
        StoredAs {
            stored,
            stopped: None,
        }
    }

    /// Takes blocks that are there already, as far as the run of `spot` has them.
    fn join(
        &mut self,
        sequence: &Sequence<'_>,
        from: usize,
        spot: Spot,
        room: usize,
        slot: HolderSlot,
        writer: &mut RunWriter<'_>,
    ) -> Result<(Spot, usize), Stopped> {
        let mut count = writer.agreement(spot, &sequence.hashes[from..]);
        if count == 0 || !writer.is_whole(spot.run) {
            return Err(Stopped::Irregular);
        }
        let held = self.runs.get(&spot.run).map_or(0, |held| held.cutoff);
        let known = usize::from(held.saturating_sub(spot.offset)).min(count);
        if count - known > room {
            count = known + room;
        }
        if count == 0 {
            return Err(Stopped::Full);
        }
        let spots = (spot.offset..).map(|offset| Spot { offset, ..spot });
        for (index, place) in (0..count).zip(spots) {
            let name = sequence.name(from + index);
            let is_regular = match &mut self.names {
                Names::Own(names) if index < known => names.get(&name) == Some(&place),
                Names::Own(names) => insert_new(names, name, place),
                Names::Hashes => true,
            };
            let hash = sequence.hashes[from + index].as_u64();
            let is_alone = index < known
                || !writer.has_doubles()
                || !writer.has_double(hash, place, |other| self.has(other));
            if !is_regular || !is_alone {
                count = index;
                break;
            }
        }
        if count == 0 {
            return Err(Stopped::Irregular);
        }
        // At most the run's length.
        let end = spot.offset + u16::try_from(count).unwrap_or(u16::MAX);
        if end > held {
            let new = from + known..from + count;
            self.cover(spot.run, end, new.map(|index| sequence.name(index)), slot, writer);
        }
        Ok((
            Spot {
                offset: end - 1,
                ..spot
            },
            count,
        ))
    }

    /// Adds blocks that nobody has yet.
    fn append(
        &mut self,
        sequence: &Sequence<'_>,
        from: usize,
        parent: Option<Spot>,
        room: usize,
        slot: HolderSlot,
        writer: &mut RunWriter<'_>,
    ) -> Result<(Spot, usize), Stopped> {
        let mut count = (sequence.hashes.len() - from).min(room);
        if count == 0 {
            return Err(Stopped::Full);
        }
        if let Names::Own(names) = &mut self.names {
            // Their places are not known yet.
            let is_new = |index: &usize| insert_new(names, sequence.name(from + index), NOWHERE);
            count = (0..count).take_while(is_new).count();
        }
        let hashes = &sequence.hashes[from..from + count];
        let added = writer.add(parent, sequence.key(from), hashes, true, true);
        let added_count = added.map_or(0, |added| added.count);
        if let Names::Own(names) = &mut self.names {
            for index in added_count..count {
                names.remove(&sequence.name(from + index));
            }
        }
        let Some(added) = added.filter(|added| added.count > 0) else {
            return Err(Stopped::Irregular);
        };
        let first = Spot {
            run: added.run,
            // No longer than the run.
            offset: added.end - u16::try_from(added.count).unwrap_or(added.end),
        };
        self.note_names(sequence, from, first, added.count);
        let new = from..from + added.count;
        self.cover(
            added.run,
            added.end,
            new.map(|index| sequence.name(index)),
            slot,
            writer,
        );
        let last = Spot {
            offset: added.end - 1,
            ..first
        };
        Ok((last, added.count))
    }

    fn note_names(&mut self, sequence: &Sequence<'_>, from: usize, first: Spot, count: usize) {
        if let Names::Own(names) = &mut self.names {
            let spots = (first.offset..).map(|offset| Spot { offset, ..first });
            names.extend((from..from + count).map(|index| sequence.name(index)).zip(spots));
        }
    }

    /// Holds more of a run; `names` are those of the new blocks.
    fn cover(
        &mut self,
        run: RunId,
        cutoff: u16,
        names: impl Iterator<Item = u64>,
        slot: HolderSlot,
        writer: &mut RunWriter<'_>,
    ) {
        writer.set_cutoff(run, slot, cutoff);
        let has_own_names = self.has_own_names();
        let held = self.runs.entry(run).or_default();
        let before = std::mem::replace(&mut held.cutoff, cutoff);
        if has_own_names {
            held.names.extend(names);
        }
        self.blocks += usize::from(cutoff - before);
        if before == 0
            && let Some(parent) = writer.parent(run)
            && let Some(held) = self.runs.get_mut(&parent.run)
        {
            held.attached_max = if held.children == 0 {
                parent.offset
            } else {
                held.attached_max.max(parent.offset)
            };
            held.children += 1;
        }
    }

    fn lower(&mut self, run: RunId, cutoff: u16, slot: HolderSlot, writer: &mut RunWriter<'_>) {
        // Before the run can be gone.
        let parent = writer.parent(run).map(|parent| parent.run);
        writer.set_cutoff(run, slot, cutoff);
        self.forget(run, parent, cutoff);
    }

    /// Forgets what is beyond `cutoff` in a run that follows `parent`; the shared runs know of it already.
    pub(crate) fn forget(&mut self, run: RunId, parent: Option<RunId>, cutoff: u16) {
        let Some(held) = self.runs.get_mut(&run) else {
            return;
        };
        self.blocks -= usize::from(held.cutoff.saturating_sub(cutoff));
        held.cutoff = held.cutoff.min(cutoff);
        if let Names::Own(names) = &mut self.names {
            for name in held.names.drain(usize::from(cutoff).min(held.names.len())..) {
                names.remove(&name);
            }
        }
        if cutoff > 0 {
            return;
        }
        self.runs.remove(&run);
        if let Some(held) = parent.and_then(|parent| self.runs.get_mut(&parent)) {
            held.children -= 1;
        }
    }

    /// Removes the blocks of these names where they are the last ones of a run, the deepest first, as engines mostly name them; if they
    /// are not, nothing is removed, and the answer is false.
    pub(crate) fn remove_tail(
        &mut self,
        names: &[SequenceHash],
        slot: HolderSlot,
        writer: &mut RunWriter<'_>,
    ) -> bool {
        let Some(deepest) = names.first().filter(|_| !self.has_own_names()) else {
            return false;
        };
        let Some(last) = self.find_name(deepest.as_u64(), writer) else {
            return false;
        };
        let Some(before) = (usize::from(last.offset) + 1).checked_sub(names.len()) else {
            return false;
        };
        let first = Spot {
            // No deeper than the last.
            offset: u16::try_from(before).unwrap_or(last.offset),
            ..last
        };
        if !writer.are_backwards(last, names) || !self.is_tail(first, names.len(), writer) {
            return false;
        }
        self.lower(first.run, first.offset, slot, writer);
        true
    }

    /// Removes blocks that are all held, each named once or several times; gives back those that only a forest can
    /// remove, because a hole would be left behind.
    pub(crate) fn remove(
        &mut self,
        mut spots: Vec<Spot>,
        slot: HolderSlot,
        writer: &mut RunWriter<'_>,
    ) -> (usize, Vec<Spot>) {
        spots.sort_unstable();
        spots.dedup();
        let mut stretches: Vec<&[Spot]> = spots.chunk_by(|one, other| one.run == other.run).collect();
        // Deepest first: no run goes before its children.
        if stretches.len() > 1 {
            stretches.sort_by_cached_key(|stretch| std::cmp::Reverse(writer.start(stretch[0].run)));
        }
        let mut removed = 0;
        let mut left = Vec::new();
        for stretch in stretches {
            let first = stretch[0];
            if self.is_tail(first, stretch.len(), writer) {
                self.lower(first.run, first.offset, slot, writer);
                removed += stretch.len();
            } else {
                left.extend(stretch);
            }
        }
        (removed, left)
    }

    /// Whether `count` different blocks of one run, `first` before all others, can go without leaving a hole.
    fn is_tail(&mut self, first: Spot, count: usize, writer: &RunWriter<'_>) -> bool {
        let Some(held) = self.runs.get(&first.run) else {
            return false;
        };
        if usize::from(first.offset) + count != usize::from(held.cutoff) {
            return false;
        }
        if held.children == 0 || held.attached_max < first.offset {
            return true;
        }
        let parents = self.runs.keys().filter_map(|run| writer.parent(*run));
        let attached = parents
            .filter(|parent| parent.run == first.run)
            .map(|parent| parent.offset);
        let attached_max = attached.max().unwrap_or_default();
        if let Some(held) = self.runs.get_mut(&first.run) {
            held.attached_max = attached_max;
        }
        attached_max < first.offset
    }

    /// The runs, those nearer to the root first.
    pub(crate) fn runs(&self, writer: &RunWriter<'_>) -> Vec<(RunId, u16)> {
        let mut runs: Vec<_> = self.runs.iter().map(|(run, held)| (*run, held.cutoff)).collect();
        runs.sort_by_cached_key(|(run, _)| (writer.start(*run), *run));
        runs
    }

    /// Removes everything. Others have turns meanwhile.
    pub(crate) fn clear(&mut self, slot: HolderSlot, writer: &mut RunWriter<'_>) {
        for (run, _) in self.runs(writer).into_iter().rev() {
            writer.set_cutoff(run, slot, 0);
            writer.pause();
        }
        *self = Self::default();
    }

    /// What the engine calls the blocks of a run, where that is not their sequence hashes.
    pub(crate) fn own_names(&self, run: RunId) -> Option<&[u64]> {
        let held = self.runs.get(&run).filter(|_| self.has_own_names())?;
        Some(&held.names)
    }

    /// The same blocks as a forest.
    pub(crate) fn to_forest(&self, writer: &RunWriter<'_>) -> Forest {
        let mut forest = Forest::default();
        for (run, cutoff) in self.runs(writer) {
            let own_names = self.own_names(run);
            for spot in (0..cutoff).map(|offset| Spot { run, offset }) {
                let Some(key) = writer.key(spot) else { continue };
                let name = match &own_names {
                    Some(names) => names.get(usize::from(spot.offset)).copied(),
                    None => Some(key.current),
                };
                let block = NewBlock {
                    key: key.into(),
                    sequence_hash: Some(SequenceHash(key.current)),
                    name,
                };
                forest.take_over(&block, self.tier, spot);
            }
        }
        forest
    }
}
