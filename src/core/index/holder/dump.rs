//! A holder's blocks as events that rebuild it in a fresh index.

use std::ops::Range;

use parking_lot::Mutex;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::index::runs::{Run, RunId, RunStore, RunWriter, Spot};
use crate::index::settings::Hashing;
use crate::wire::{BlockNames, Event, StoredBlocks, Tier};

use super::HolderState;
use super::names::Found;
use super::orphans::{Alias, Orphan};
use super::part::{Form, Interval};

/// Events that rebuild what the holder has, parents before children. Each piece is as it is when its turn comes, since blocks may be
/// evicted meanwhile.
pub(super) fn events<'h>(
    holder: &'h Mutex<HolderState>,
    store: &'h RunStore,
    hashing: Hashing,
    blocks_per_event_max: usize,
) -> impl Iterator<Item = (Tier, Event)> + use<'h> {
    let blocks_max = u16::try_from(blocks_per_event_max.max(1)).unwrap_or(u16::MAX);
    let state = holder.lock();
    let runs = store.write();
    let mut parts: Vec<(RunId, Interval)> = Vec::new();
    for (run, part) in state.parts.iter() {
        parts.extend(part.intervals().iter().map(|interval| (*run, *interval)));
    }
    let start = |run: RunId| runs.run(run).map_or(0, Run::start);
    parts.sort_by_cached_key(|(run, interval)| (start(*run), *run, interval.from));
    let orphans = state.orphans.all();
    let orphans = orphans.flat_map(|(key, orphan)| orphan_events(key, orphan, &state, &runs));
    let orphans: Vec<(Tier, Event)> = orphans.collect();
    drop(runs);
    let pieces = parts
        .into_iter()
        .flat_map(move |(run, interval)| cut(run, interval, blocks_max));
    let placed = pieces.flat_map(move |(run, offsets)| {
        let state = holder.lock();
        let interval = state
            .parts
            .get(&run)
            .and_then(|part| part.interval_at(offsets.start));
        let Some(interval) = interval else {
            return Vec::new();
        };
        let piece = Piece {
            holder: &state,
            runs: &store.write(),
            run,
            form: interval.attributes.form(),
            offsets: offsets.start..offsets.end.min(interval.to),
        };
        piece.events(hashing)
    });
    placed.chain(orphans)
}

/// Cuts an interval into pieces that each fit into an event.
fn cut(run: RunId, interval: Interval, blocks_max: u16) -> impl Iterator<Item = (RunId, Range<u16>)> {
    // Blocks that have several names travel one by one.
    let is_many = interval.attributes.form() == Form::Many;
    let step = if is_many { 1 } else { blocks_max };
    let froms = (interval.from..interval.to).step_by(usize::from(step));
    froms.map(move |from| (run, from..interval.to.min(from.saturating_add(step))))
}

/// Blocks of one run with the same attributes.
struct Piece<'a> {
    holder: &'a HolderState,
    runs: &'a RunWriter<'a>,
    run: RunId,
    form: Form,
    offsets: Range<u16>,
}

impl Piece<'_> {
    fn events(&self, hashing: Hashing) -> Vec<(Tier, Event)> {
        let first = Spot {
            run: self.run,
            offset: self.offsets.start,
        };
        let Some(held) = self.holder.attributes(first) else {
            return Vec::new();
        };
        let own = |names: &[u64]| Some(names.to_vec());
        let part = self.holder.parts.get(&self.run);
        let hashes = || {
            self.runs
                .hashes(self.run, self.offsets.start, self.offsets.end)
                .collect::<Vec<u64>>()
        };
        match self.form {
            Form::Nameless => each_tier(held.tiers(), &self.stored(held.is_whole(), None)),
            // Where hashes are recomputed, what comes without names would have to come with its content.
            Form::Hash => {
                let names = (hashing == Hashing::Recompute).then(hashes);
                each_tier(held.tiers(), &self.stored(true, names))
            }
            Form::Own => {
                let names = part.map_or(&[][..], |part| part.names(self.offsets.start, self.offsets.end));
                each_tier(held.tiers(), &self.stored(held.is_whole(), own(names)))
            }
            Form::Many => {
                let names = self.holder.names_of(first, self.runs);
                let event =
                    |alias: &Alias| each_tier(alias.tiers, &self.stored(held.is_whole(), own(&[alias.name])));
                names.iter().flat_map(event).collect()
            }
        }
    }

    fn stored(&self, is_whole: bool, engine_hashes: Option<Vec<u64>>) -> StoredBlocks {
        let spots = self.offsets.clone().map(|offset| Spot {
            run: self.run,
            offset,
        });
        // A nameless block can only be stored by its lineage hash.
        if !is_whole || self.form == Form::Nameless {
            return StoredBlocks {
                names: BlockNames::Lineage(spots.map(|spot| self.runs.key(spot)).collect()),
                content: None,
                engine_hashes,
            };
        }
        let first = Spot {
            run: self.run,
            offset: self.offsets.start,
        };
        let parent = self.runs.before(first).map(|before| {
            // A block that the holder has came before, so its name finds it. Of another one the hash says enough.
            let name = self
                .holder
                .names_of(before, self.runs)
                .first()
                .map(|alias| alias.name);
            SequenceHash(name.unwrap_or_else(|| self.runs.hash(before)))
        });
        StoredBlocks {
            names: BlockNames::Sequence {
                parent,
                position: Position::new(u64::from(self.runs.position(first))).ok(),
                hashes: spots.map(|spot| SequenceHash(self.runs.hash(spot))).collect(),
            },
            content: None,
            engine_hashes,
        }
    }
}

fn each_tier(tiers: u8, stored: &StoredBlocks) -> Vec<(Tier, Event)> {
    let is_in = |tier: &Tier| tiers >> tier.as_u8() & 1 == 1;
    let tiers = (0..Tier::COUNT).filter_map(Tier::new).filter(is_in);
    tiers.map(|tier| (tier, Event::Stored(stored.clone()))).collect()
}

/// A hash with the parent's fragment that names the parent or nothing: by another name, the events would mean another parent.
fn absent_parent(orphan: PositionalLineageHash, state: &HolderState, runs: &RunWriter<'_>) -> SequenceHash {
    let fragment = orphan.parent_hash_fragment();
    let above = Position::from(orphan)
        .as_u32()
        .checked_sub(1)
        .map_or(0, |before| crate::index::block::current_mask(before).count_ones());
    // Lineage hashes leave 5 bits out at least.
    let candidates = (0..32).map(|number| fragment | number << above);
    let is_free = |candidate: &u64| match state.find_name(*candidate, runs) {
        None => true,
        Some(Found::Orphan(key)) => {
            key.position() + 1 == orphan.position() && key.current_hash_fragment() == fragment
        }
        Some(Found::Placed(_)) => false,
    };
    let mut free = candidates.filter(is_free);
    SequenceHash(free.next().unwrap_or(fragment))
}

fn orphan_events(
    key: PositionalLineageHash,
    orphan: &Orphan,
    state: &HolderState,
    runs: &RunWriter<'_>,
) -> Vec<(Tier, Event)> {
    let parent = absent_parent(key, state, runs);
    let stored = |name: Option<u64>| {
        let names = match (orphan.sequence_hash(), name) {
            (Some(hash), Some(_)) => BlockNames::Sequence {
                parent: Some(parent),
                position: Position::new(key.position()).ok(),
                hashes: vec![hash],
            },
            _ => BlockNames::Lineage(vec![key]),
        };
        StoredBlocks {
            names,
            content: None,
            engine_hashes: name.map(|name| vec![name]),
        }
    };
    if orphan.names.is_empty() {
        return each_tier(orphan.nameless, &stored(None));
    }
    let names = orphan.names.iter();
    names
        .flat_map(|alias| each_tier(alias.tiers, &stored(Some(alias.name))))
        .collect()
}
