//! Dumps: events that rebuild a holder's blocks in an empty index.

use std::ops::Range;

use crate::hash::{Position, SequenceHash};
use crate::index::block::current_mask;
use crate::index::runs::{Run, RunId, RunWriter, Spot};
use crate::index::settings::Hashing;
use crate::index::share::{Interval, classes, tier_bit};
use crate::index::shared::IndexShared;
use crate::wire::{BlockNames, Event, Resumable, StoredBlocks, Tier};

use super::find::FoundBlock;
use super::form::{Form, NameNotes};
use super::holder::SharedHolder;
use super::orphans::{Key, Orphan};
use super::state::HolderState;

impl SharedHolder {
    /// Returns events that rebuild the holder's blocks, parents before children. The iterator reads the blocks piece by
    /// piece, as the caller asks for more events. Blocks that are evicted before the iterator reads them are left out.
    pub(super) fn dump_events<'h>(
        &'h self,
        index: &'h IndexShared,
        blocks_per_event_max: usize,
    ) -> impl Iterator<Item = (Tier, Event)> + use<'h> {
        let blocks_max = u16::try_from(blocks_per_event_max.max(1)).unwrap_or(u16::MAX);
        let (state, runs) = (self.state.lock(), index.runs.write());
        let mut parts: Vec<(RunId, Interval)> = Vec::new();
        for (run, part) in state.share.parts() {
            // Intervals that differ only in whether their blocks are resumable are joined.
            let mut from = 0;
            while from < part.end() {
                let (to, held) = part.extent_alike(from, part.end());
                parts.extend(held.map(|attributes| (run, Interval { from, to, attributes })));
                from = to;
            }
        }
        let start = |run: RunId| runs.run(run).map_or(0, Run::start);
        parts.sort_by_cached_key(|(run, interval)| (start(*run), *run, interval.from));
        let orphans = state.orphans.all();
        let orphans = orphans.flat_map(|(key, orphan)| orphan_events(key, orphan, &state, &runs));
        let orphans: Vec<(Tier, Event)> = orphans.collect();
        let pieces = parts
            .into_iter()
            .flat_map(move |(run, interval)| cut(run, interval, blocks_max));
        let placed = pieces.flat_map(move |(run, offsets)| {
            let state = self.state.lock();
            state.events(run, offsets, index.settings.hashing, &index.runs.write())
        });
        placed.chain(orphans)
    }
}

/// Cuts an interval into pieces of at most `blocks_max` blocks, so that each fits in an event.
fn cut(run: RunId, interval: Interval, blocks_max: u16) -> impl Iterator<Item = (RunId, Range<u16>)> {
    // A block with several names is a piece by itself.
    let is_many = interval.attributes.form() == Form::Many;
    let step = if is_many { 1 } else { blocks_max };
    let froms = (interval.from..interval.to).step_by(usize::from(step));
    froms.map(move |from| (run, from..interval.to.min(from.saturating_add(step))))
}

impl HolderState {
    /// Returns events that store the first of these blocks of a run, and the blocks after it with the same attributes
    /// (tiers, and how the engine names the block). The blocks may differ in whether they are resumable.
    fn events(
        &self,
        run: RunId,
        offsets: Range<u16>,
        hashing: Hashing,
        runs: &RunWriter<'_>,
    ) -> Vec<(Tier, Event)> {
        let part = self.share.part(run);
        let piece = part.map(|part| (part, part.extent_alike(offsets.start, offsets.end)));
        let Some((part, (end, Some(held)))) = piece else {
            return Vec::new();
        };
        let (from, form) = (offsets.start, held.form());
        let first = Spot { run, offset: from };
        // A nameless block can only be stored by its lineage hash.
        let blocks = if held.is_whole() && form != Form::Nameless {
            BlockNames::Sequence {
                parent: runs.before(first).map(|before| self.parent_name(before, runs)),
                position: Position::new(u64::from(runs.position(first))).ok(),
                hashes: runs.view().hashes(run, from, end).map(SequenceHash).collect(),
            }
        } else {
            let keys = (from..end).map(|offset| runs.key(Spot { run, offset }));
            BlockNames::Lineage(keys.collect())
        };
        let tiers = held.tiers();
        let named: Vec<(u8, Option<Vec<u64>>)> = match form {
            Form::Nameless => vec![(tiers, None)],
            Form::Hash => {
                // If the namespace recomputes hashes, an event without names would need the content of its blocks.
                let names = || runs.view().hashes(run, from, end).collect();
                vec![(tiers, (hashing == Hashing::Recompute).then(names))]
            }
            Form::Own => vec![(tiers, Some(self.names.firsts(run, from, end).to_vec()))],
            Form::Many => {
                let names = self.names_of(first, runs).into_iter();
                names.map(|alias| (alias.tiers, Some(vec![alias.name]))).collect()
            }
        };
        let resumable = |tier| part.resumable(from, end, tier);
        let events =
            |(tiers, names): (u8, Option<Vec<u64>>)| each_tier(tiers, &blocks, names.as_deref(), resumable);
        named.into_iter().flat_map(events).collect()
    }

    /// Returns the name by which events give this block as a parent: the block's oldest name, under which earlier
    /// events have stored the block. If the holder has no name for the block, returns the block's hash.
    fn parent_name(&self, spot: Spot, runs: &RunWriter<'_>) -> SequenceHash {
        let names = self.names_of(spot, runs);
        SequenceHash(names.first().map_or_else(|| runs.hash(spot), |alias| alias.name))
    }
}

/// Returns events that store the blocks in `names`, one event for each of `tiers`.
fn each_tier(
    tiers: u8,
    names: &BlockNames,
    engine_hashes: Option<&[u64]>,
    resumable: impl Fn(Tier) -> Resumable,
) -> Vec<(Tier, Event)> {
    let stored = |tier| StoredBlocks {
        names: names.clone(),
        content: None,
        engine_hashes: engine_hashes.map(<[u64]>::to_vec),
        resumable: resumable(tier),
    };
    let is_in = |tier: &Tier| tiers & tier_bit(*tier) != 0;
    let tiers = (0..Tier::COUNT).filter_map(Tier::new).filter(is_in);
    tiers.map(|tier| (tier, Event::Stored(stored(tier)))).collect()
}

/// Returns a hash by which events can give the parent of an orphan, a block whose parent has never arrived. The hash
/// agrees with the hash of the parent in the bits that are known. It must not be the name of another block, because
/// events would then mean that block as the parent.
fn absent_parent(orphan: Key, state: &HolderState, runs: &RunWriter<'_>) -> SequenceHash {
    let fragment = orphan.parent_hash_fragment();
    let before = Position::from(orphan).as_u32().checked_sub(1);
    let above = before.map_or(0, |before| current_mask(before).count_ones());
    // Lineage hashes leave out at least 5 bits.
    let mut candidates = (0..32).map(|number| fragment | number << above);
    let free = candidates.find(|candidate| match state.find_name(*candidate, runs) {
        None => true,
        Some(FoundBlock::Orphan(key)) => {
            key.position() + 1 == orphan.position() && key.current_hash_fragment() == fragment
        }
        Some(FoundBlock::Placed(_)) => false,
    });
    SequenceHash(free.unwrap_or(fragment))
}

fn orphan_events(key: Key, orphan: &Orphan, state: &HolderState, runs: &RunWriter<'_>) -> Vec<(Tier, Event)> {
    let names = match orphan.sequence_hash() {
        Some(hash) if !orphan.names.is_empty() => BlockNames::Sequence {
            parent: Some(absent_parent(key, state, runs)),
            position: Position::new(key.position()).ok(),
            hashes: vec![hash],
        },
        _ => BlockNames::Lineage(vec![key]),
    };
    let resumable = |tier| Resumable::from_flags([orphan.barred & classes(tier_bit(tier)) == 0]);
    let aliases = orphan.names.iter();
    let named = aliases.flat_map(|alias| each_tier(alias.tiers, &names, Some(&[alias.name]), resumable));
    named
        .chain(each_tier(orphan.nameless, &names, None, resumable))
        .collect()
}
