//! One holder's share of the runs: which blocks of each run the holder has, and in which tiers. Queries see each
//! change of a share as one step.
//!
//! In each run, a holder has intervals of blocks ([`part`]). From the entries in the runs' rosters, readers learn how
//! far these intervals reach. The engine's names for blocks are not a part of a share.

mod part;

use smallvec::SmallVec;

use crate::index::directory::HolderSlot;
use crate::index::runs::{Run, RunId, RunWriter, Spot, Victim};
use crate::split_map::SplitMap;
use crate::wire::Tier;

pub(crate) use part::{Attributes, Interval, Part, classes, marked, tier_bit};

/// Minimum number of blocks in a piece of work for which a holder releases the lock on the runs.
const ASIDE_BLOCKS: usize = if cfg!(test) { 2 } else { 64 };
/// Maximum number of runs in which other writers are kept from cutting off blocks, while a holder has released the lock
/// on the runs. A holder with unpublished blocks in more runs does not release the lock.
const KEPT_RUNS: usize = 8;

/// Holder from which eviction can take blocks.
pub(crate) trait Evictable: std::fmt::Debug + Send + Sync {
    /// Removes the blocks in `victims` from the holder, in one step. If the holder has any of them, it is first marked
    /// as degraded.
    fn evict(&self, victims: &[Victim], runs: &super::runs::RunStore);
}

/// One holder's share of the runs: the blocks of each run that the holder has.
#[derive(Debug, Default)]
pub(crate) struct Share {
    pub(crate) slot: HolderSlot,
    parts: SplitMap<RunId, Part>,
    /// Number of bytes that the intervals take beside the map.
    spilled_bytes: usize,
    /// Number of the holder's blocks in all runs.
    blocks: usize,
    /// Runs in which the holder's blocks have changed since its changes were last published to readers.
    touched: Vec<RunId>,
    /// Tiers in which the holder had the first block of a run when that run was last published. Runs whose first block
    /// the holder does not have leave the value as it is.
    tiers: u8,
    /// Change counter. It does not count blocks that are added or removed at the ends of the holder's chains; see
    /// [`Self::regular`].
    reshaped: u64,
}

impl Share {
    /// Makes an empty share, without any blocks, for the holder that has `slot`.
    pub(crate) fn new(slot: HolderSlot) -> Self {
        Self {
            slot,
            ..Self::default()
        }
    }

    /// Makes an empty share for the same holder, so that the holder starts again without blocks.
    pub(crate) fn emptied(&self) -> Self {
        Self {
            reshaped: self.reshaped + 1,
            ..Self::new(self.slot)
        }
    }

    /// Number of blocks that the holder has, in all runs.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Number of bytes that the holder's intervals of blocks take.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.bytes() + self.spilled_bytes
    }

    /// Returns the holder's part of a run: its intervals of blocks there.
    pub(crate) fn part(&self, run: RunId) -> Option<&Part> {
        self.parts.get(&run)
    }

    /// Returns the holder's part of each run, in no particular order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (RunId, &Part)> {
        self.parts.iter().map(|(run, part)| (*run, part))
    }

    /// Returns the numbers of the groups into which the holder's runs are divided. [`Self::runs_of`] returns the runs
    /// of one group.
    pub(crate) fn groups(&self) -> std::ops::Range<usize> {
        0..self.parts.splits()
    }

    /// Returns the runs in group number `group` in which the holder has blocks. [`Self::groups`] gives the numbers of
    /// the groups.
    pub(crate) fn runs_of(&self, group: usize) -> Vec<RunId> {
        self.parts.keys_of(group).copied().collect()
    }

    /// Returns the [`Attributes`] of a block; `None` if the holder does not have the block.
    pub(crate) fn get(&self, spot: Spot) -> Option<Attributes> {
        self.parts.get(&spot.run)?.get(spot.offset)
    }

    /// Finds the stretch of blocks from `from` on that have the same [`Attributes`]. Returns the end of the stretch,
    /// which is at most `to`, and the attributes. The attributes are `None` if the holder does not have the blocks.
    pub(crate) fn extent(&self, from: Spot, to: u16) -> (u16, Option<Attributes>) {
        let part = self.parts.get(&from.run);
        part.map_or((to, None), |part| part.extent(from.offset, to))
    }

    /// Sets the [`Attributes`] of the blocks from the spot `from` up to the offset `end`. `None` removes the blocks.
    pub(crate) fn set(&mut self, from: Spot, end: u16, attributes: Option<Attributes>) {
        let part = match attributes {
            Some(_) => Some(self.parts.or_default(from.run)),
            None => self.parts.get_mut(&from.run),
        };
        let Some(part) = part else { return };
        let before = part.held(from.offset, end);
        self.spilled_bytes -= part.spilled_bytes();
        part.set(from.offset, end, attributes);
        self.spilled_bytes += part.spilled_bytes();
        let now = attributes.map_or(0, |_| end.saturating_sub(from.offset));
        self.blocks = self.blocks - usize::from(before) + usize::from(now);
        self.touch(from.run);
    }

    /// Marks a block as barred (not resumable) or not barred in a tier. Returns `false` if the holder does not have the
    /// block in that tier.
    pub(crate) fn mark(&mut self, spot: Spot, tier: Tier, is_barred: bool) -> bool {
        let held = self.get(spot);
        let Some(held) = held.filter(|held| held.tiers() & tier_bit(tier) != 0) else {
            return false;
        };
        let next = held.marked(tier, is_barred);
        if next != held {
            self.set(spot, spot.offset + 1, Some(next));
        }
        true
    }

    /// Removes all blocks of a run. Returns one more than the offset of the last block that the holder had there.
    pub(crate) fn drop_run(&mut self, run: RunId) -> u16 {
        let end = self.part(run).map_or(0, Part::end);
        self.set(Spot { run, offset: 0 }, end, None);
        end
    }

    /// Records that blocks have been put into a run for this holder. If the holder does not have some of these blocks
    /// when its changes are published, they are cut off.
    pub(crate) fn touch(&mut self, run: RunId) {
        if self.touched.last() != Some(&run) {
            self.touched.push(run);
        }
    }

    /// Returns the runs in which other writers must cut off no blocks while this holder has released the lock on the
    /// runs. These are the runs with unpublished blocks of the holder. `blocks` is the number of blocks that the holder
    /// is about to work on. `None` if the holder should keep the lock: the work is short, or there are too many such
    /// runs.
    pub(crate) fn kept_aside(&self, blocks: usize) -> Option<SmallVec<[RunId; KEPT_RUNS]>> {
        let lets_others = blocks >= ASIDE_BLOCKS && self.touched.len() <= KEPT_RUNS;
        lets_others.then(|| SmallVec::from_slice(&self.touched))
    }

    /// Number of runs whose changes have not been published yet.
    pub(crate) fn touched(&self) -> usize {
        self.touched.len()
    }

    /// Makes all changes visible to readers in one step, and frees memory that is no longer needed. Before the call
    /// readers cannot see the changes, because they read only the roster entries.
    pub(crate) fn publish(&mut self, runs: &mut RunWriter<'_>) {
        let mut touched = std::mem::take(&mut self.touched);
        if touched.len() > 1 {
            touched.sort_unstable();
            touched.dedup();
        }
        runs.step(&touched, |runs| self.show(&touched, runs));
        // Runs are trimmed only after the step, because trimming a whole run goes on with its parent run.
        for run in &touched {
            runs.trim(*run);
        }
        touched.clear();
        self.touched = touched;
        if self.parts.is_empty() {
            self.touched = Vec::new();
        }
    }

    /// Updates what readers see of the holder in the `touched` runs: its roster entries and its bars.
    fn show(&mut self, touched: &[RunId], runs: &mut RunWriter<'_>) {
        for run in touched {
            let Some(part) = self.parts.get_mut(run) else {
                continue;
            };
            let is_open = part.end() < part.shown && part.end() < runs.attached_end(*run);
            self.reshaped += u64::from(is_open || !part.is_simple());
            part.shown = part.end();
            let tiers = part.get(0).map_or(0, Attributes::tiers);
            if tiers != 0 && tiers != self.tiers {
                self.reshaped += u64::from(self.tiers != 0);
                self.tiers = tiers;
            }
            part.hint = runs.set_entry(*run, self.slot, part.entry(self.slot), part.hint);
            runs.set_bars(*run, self.slot, part.barred());
            if part.end() == 0 {
                self.parts.remove(run);
            }
        }
    }

    /// Whether the holder has any of the blocks in `victims`.
    pub(crate) fn has_any(&self, victims: &[Victim]) -> bool {
        let has = |victim: &Victim| {
            self.part(victim.run)
                .is_some_and(|part| part.end() > victim.cutoff)
        };
        victims.iter().any(has)
    }

    /// Returns the holder's tier and a change counter, if the share is regular. A share is regular if the holder has
    /// each block together with all blocks before it, all in one tier and without a note. The counter does not count
    /// blocks that are added or removed at the ends of the holder's chains. `None` if the share is not regular or is
    /// empty.
    pub(crate) fn regular(&self, runs: &RunWriter<'_>) -> Option<(Tier, u64)> {
        let mut tiers = 0;
        for (run, part) in self.parts() {
            let parent = runs.run(run).and_then(Run::parent);
            if !part.is_simple() || parent.is_some_and(|parent| self.get(parent).is_none()) {
                return None;
            }
            tiers |= part.get(0)?.tiers();
        }
        let tier = Tier::new(u8::try_from(tiers.trailing_zeros()).ok()?)?;
        (tier_bit(tier) == tiers).then_some((tier, self.reshaped))
    }
}
