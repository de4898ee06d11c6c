//! The blocks of one holder, and how events change them. The holder's lane and threads that evict blocks take turns at
//! them under a lock.
//!
//! A block that the holder has is in one of two places:
//!
//! - among the runs, at a [`Spot`] that determines its whole prefix. The holder keeps intervals of each run ([`part`]).
//! - among the orphans ([`orphans`]), while the holder has never had its parent.
//!
//! | file | what |
//! |---|---|
//! | `part.rs`, `copies.rs` | intervals of one run, with tiers and names; further names of blocks |
//! | `orphans.rs` | blocks whose parent is not known |
//! | `names.rs` | finding blocks by name or lineage hash; several names of one block |
//! | `store.rs`, `remove.rs` | what stored, resumable and removed events do |
//! | `marks.rs` | which blocks of a stored event are resumable |
//! | `settle.rs` | storing blocks one by one, by their lineage hashes |
//! | `parking.rs`, `claims.rs` | events whose parent has not come; orphans whose parent may be another block than they say |
//! | `resolve.rs` | hashes, names and place of the blocks of a stored event |
//! | `dump.rs` | the blocks as events |
//! | `turn.rs`, `applied.rs` | applying events; the outcome of that |

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

/// Holder, as its lane, queries and threads that evict blocks share it.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(super) record: Arc<HolderRecord>,
    /// The holder's blocks. They change only under this lock, in steps that queries see whole or not at all.
    pub(super) state: Mutex<HolderState>,
}

/// Everything that applying an event needs beside the holder's own state.
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
    /// Notes that `blocks` blocks were left out, because there is no room for them.
    fn reject_full(&mut self, blocks: usize) {
        self.applied.reject(RejectReason::Capacity, blocks);
    }
}

/// Number of blocks from which on work is worth letting others have turns meanwhile.
const ASIDE_BLOCKS: usize = if cfg!(test) { 2 } else { 64 };
/// Most runs that are kept from being cut for a holder while others have turns.
const KEPT_RUNS: usize = 8;

/// The blocks of one holder.
#[derive(Debug, Default)]
pub(crate) struct HolderState {
    pub(super) slot: HolderSlot,
    parts: SplitMap<RunId, Part>,
    /// Table from names to places, for blocks whose names are in their part.
    own: NameMap,
    /// Number of names in `own` that are not the first name of their block.
    further: usize,
    /// Bytes that these further names take in parts.
    copies_bytes: usize,
    orphans: Orphans,
    /// Blocks that some orphans may have waited for. Empty between events.
    adopting: Vec<Spot>,
    pub(super) parking: Parking,
    /// Number of the holder's blocks among the runs.
    placed: usize,
    /// Runs of which the holder's share has changed since it was last published.
    touched: Vec<RunId>,
    /// Bytes that are accounted for: in all (`bytes`), for state without a place among the runs (`aside`), and of the
    /// latter for events that wait (`waiting`).
    bytes: i64,
    aside: i64,
    waiting: i64,
    /// Whether the engine gives names to blocks. Not all blocks need have names.
    uses_names: bool,
    /// Whether blocks without a name are refused.
    refuses_nameless: bool,
    /// Whether blocks have been evicted since the last event.
    is_cut: bool,
    /// Tiers that blocks had when they were last published.
    tiers: u8,
    /// Counts changes that are more than getting and losing blocks at the ends of what the holder has. See
    /// [`Holder::regular`].
    reshaped: u64,
}

impl HolderState {
    /// Number of blocks that the holder has, including blocks behind holes.
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

    /// Sets the attributes of the blocks from a place on, up to the offset `end`, in a run of which the holder has
    /// some.
    fn set(&mut self, from: Spot, end: u16, attributes: Attributes) {
        if let Some(part) = self.parts.get_mut(&from.run) {
            part.set(from.offset, end, Some(attributes));
            self.touch(from.run);
        }
    }

    /// Runs `work`, which concerns this holder alone, on `blocks` blocks. If that is much, others have turns at the
    /// runs meanwhile. Blocks that this holder has put among the runs are kept until they can be published.
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

    /// Publishes all changes, in one step, and frees what is no longer needed. Readers could not see the changes
    /// before: they go by the entries alone.
    fn publish(&mut self, runs: &mut RunWriter<'_>) {
        let mut touched = std::mem::take(&mut self.touched);
        if touched.len() > 1 {
            touched.sort_unstable();
            touched.dedup();
        }
        runs.step(&touched, |runs| self.show(&touched, runs));
        // Only now, because cutting off all of one run goes on with another run.
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

    /// Sets the entries and the bars of the runs that have changed.
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

    /// Whether the holder has any of the blocks to be evicted.
    pub(super) fn has_any(&self, victims: &[Victim]) -> bool {
        let has = |victim: &Victim| {
            let part = self.parts.get(&victim.run);
            part.is_some_and(|part| part.end() > victim.cutoff)
        };
        victims.iter().any(has)
    }

    /// Removes the blocks to be evicted from the holder. Returns how many blocks the holder had of them.
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
