//! The blocks of one holder, and how events change them. The lane and whoever evicts blocks take turns at them under a lock.
//!
//! A block that the holder has is in one of two places:
//!
//! - among the runs, at a [`Spot`] that says its whole prefix. The holder keeps intervals of each run ([`part`]).
//! - among the orphans ([`orphans`]), while the holder has never had its parent.
//!
//! | file | what |
//! |---|---|
//! | `part.rs`, `copies.rs` | intervals of one run, with tiers and names; further names of blocks |
//! | `orphans.rs` | blocks whose parent is not known |
//! | `names.rs` | finding blocks by name or lineage hash; several names of one block |
//! | `store.rs`, `remove.rs` | what stored, resumable and removed events do |
//! | `marks.rs` | which blocks of a stored event are resumable |
//! | `settle.rs` | blocks that are known by their lineage hashes, one by one |
//! | `parking.rs`, `claims.rs` | events whose parent has not come; blocks whose parent may be another one |
//! | `resolve.rs` | what the blocks of a stored event are |
//! | `dump.rs` | the blocks as events |
//! | `turn.rs`, `applied.rs` | applying events, and what that did |

mod applied;
mod claims;
mod copies;
mod dump;
mod marks;
mod names;
mod orphans;
pub(super) mod parking;
mod part;
mod remove;
mod resolve;
mod settle;
mod store;
mod turn;

use std::sync::Arc;

use parking_lot::Mutex;

use crate::index::directory::{HolderRecord, HolderSlot};
use crate::split_map::SplitMap;
use crate::wire::Tier;

use super::runs::{NameMap, RunId, RunView, RunWriter, Spot, Victim};
use orphans::Orphans;
use parking::Parking;
use part::{Attributes, Part};

pub use applied::{Applied, RejectReason};
pub(super) use turn::{Home, Turn};

/// A holder, as its lane, queries and whoever evicts blocks share it.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(super) record: Arc<HolderRecord>,
    /// Its blocks change only under this lock, in steps that queries see whole or not at all.
    pub(super) state: Mutex<HolderState>,
}

/// The means of applying events to a holder.
struct Work<'a> {
    runs: RunWriter<'a>,
    /// The outcome so far.
    applied: &'a mut Applied,
    /// The tier of the event's blocks.
    tier: Tier,
    /// Most blocks of the holder.
    blocks_max: usize,
    /// Most bytes of events that wait, of all holders.
    waiting_bytes_max: u64,
}

impl Work<'_> {
    /// Notes that there is no room for so many blocks.
    fn reject_full(&mut self, blocks: usize) {
        self.applied.reject(RejectReason::Capacity, blocks);
    }
}

/// Work on so many blocks is worth letting others have turns meanwhile.
const ASIDE_BLOCKS: usize = if cfg!(test) { 2 } else { 64 };
/// Most runs that are kept for a holder while others have turns.
const KEPT_RUNS: usize = 8;

/// The blocks of one holder.
#[derive(Debug, Default)]
pub(crate) struct HolderState {
    pub(super) slot: HolderSlot,
    parts: SplitMap<RunId, Part>,
    /// Places of blocks that the engine calls by names in their part.
    own: NameMap,
    /// How many of these names are not the first ones of their blocks.
    further: usize,
    /// Bytes of those names in parts.
    copies_bytes: usize,
    orphans: Orphans,
    /// Blocks that some orphans may have waited for; none between events.
    adopting: Vec<Spot>,
    pub(super) parking: Parking,
    /// Blocks among the runs.
    placed: usize,
    /// Whether all its blocks can be found by lineage hash.
    is_keyed: bool,
    /// Runs of which it has got more or less since readers were told.
    touched: Vec<RunId>,
    /// The bytes that are accounted for: in all, for what has no place among the runs, and of the latter for events that wait.
    bytes: i64,
    aside: i64,
    waiting: i64,
    /// Whether the engine names blocks; not all need have names.
    uses_names: bool,
    /// Whether blocks without a name are not taken.
    refuses_nameless: bool,
    /// Whether blocks have been evicted since the last event.
    is_cut: bool,
    /// The tiers in which blocks were stored last.
    tiers: u8,
    /// Counts whatever is more than getting and losing blocks at the ends of what there is.
    reshaped: u64,
}

impl HolderState {
    /// How many blocks are held, behind holes too.
    pub(super) fn blocks(&self) -> usize {
        self.placed + self.orphans.len()
    }

    fn attributes(&self, spot: Spot) -> Option<Attributes> {
        self.parts.get(&spot.run)?.get(spot.offset)
    }

    fn touch(&mut self, run: RunId) {
        if self.touched.last() != Some(&run) {
            self.touched.push(run);
        }
    }

    /// Changes what there is from a place on, up to `end`.
    fn set(&mut self, from: Spot, end: u16, attributes: Attributes) {
        if let Some(part) = self.parts.get_mut(&from.run) {
            part.set(from.offset, end, Some(attributes));
            self.touch(from.run);
        }
    }

    /// Does some `work` on so many blocks that concerns this holder alone. Where it is much, others have turns at the runs meanwhile;
    /// what this holder has put there is kept until it can be published.
    fn aside<T>(
        &mut self,
        blocks: usize,
        runs: &mut RunWriter<'_>,
        work: impl FnOnce(&mut Self, RunView<'_>) -> T,
    ) -> T {
        if blocks < ASIDE_BLOCKS || self.touched.len() > KEPT_RUNS {
            return work(self, runs.view());
        }
        let mut touched = std::mem::take(&mut self.touched);
        let done = runs.aside(&touched, |view| work(self, view));
        touched.append(&mut self.touched);
        self.touched = touched;
        done
    }

    /// Tells readers of all that has changed, in one step, and gives back what is no longer needed. What was done before could not be seen:
    /// readers go by the entries alone.
    fn publish(&mut self, runs: &mut RunWriter<'_>) {
        let mut touched = std::mem::take(&mut self.touched);
        if touched.len() > 1 {
            touched.sort_unstable();
            touched.dedup();
        }
        runs.show_unplaced();
        runs.step(&touched, |runs| self.show(&touched, runs));
        // Only now: what is cut off one run can go on with another.
        for run in &touched {
            runs.trim(*run);
        }
        touched.clear();
        self.touched = touched;
        if self.parts.is_empty() {
            self.touched = Vec::new();
        }
        self.account(runs);
    }

    /// Sets the entries of what has changed.
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

    fn account(&mut self, runs: &mut RunWriter<'_>) {
        // First names are in parts, roughly as many as the map has.
        let names = (self.own.len() - self.further) * size_of::<u64>() + self.copies_bytes;
        let placed = self.own.bytes() + (self.parts.bytes() + names) as u64;
        let waiting = self.parking.bytes() as u64;
        let aside = self.orphans.bytes() as u64 + waiting;
        let (bytes, aside) = ((placed + aside).cast_signed(), aside.cast_signed());
        let (change, waiting) = (&mut runs.state.change, waiting.cast_signed());
        change.bytes += bytes - self.bytes;
        change.aside += aside - self.aside;
        change.waiting += waiting - self.waiting;
        (self.bytes, self.aside, self.waiting) = (bytes, aside, waiting);
    }

    /// Whether it has any of the blocks that are to be forgotten.
    pub(super) fn has_any(&self, victims: &[Victim]) -> bool {
        let has = |victim: &Victim| {
            let part = self.parts.get(&victim.run);
            part.is_some_and(|part| part.end() > victim.cutoff)
        };
        victims.iter().any(has)
    }

    /// Forgets the blocks that are to be forgotten; says how many of its own those were.
    pub(super) fn evict(&mut self, victims: &[Victim], runs: &mut RunWriter<'_>) -> usize {
        self.is_cut = true;
        let before = self.placed;
        for victim in victims {
            self.erase(victim.run, victim.cutoff, u16::MAX, |_| true);
        }
        self.publish(runs);
        before - self.placed
    }
}
