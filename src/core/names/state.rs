//! State of one holder: its blocks, their names, orphans and waiting events.

use crate::index::runs::{RunView, RunWriter, Spot};
use crate::index::share::{Attributes, Part, Share};
use crate::index::usage::Change;
use crate::wire::Tier;

use super::applied::{Applied, RejectReason};
use super::orphans::Orphans;
use super::parking::Parking;
use super::table::Names;

/// Number of blocks after which a long event releases its locks for a moment, so that other writers can have them.
pub(super) const TURN_BLOCKS: usize = 1024;

/// Everything that applying an event needs in addition to the holder's own state.
pub(super) struct Work<'a> {
    pub(super) runs: RunWriter<'a>,
    /// Outcome of the event so far.
    pub(super) applied: &'a mut Applied,
    /// Tier of the event's blocks.
    pub(super) tier: Tier,
    /// Maximum number of blocks of the holder.
    pub(super) blocks_max: usize,
    /// Maximum number of bytes of waiting events (events that wait for a parent), for all holders together.
    pub(super) waiting_bytes_max: u64,
}

impl Work<'_> {
    /// Counts `blocks` blocks as rejected, because there is no room for them.
    pub(super) fn reject_full(&mut self, blocks: usize) {
        self.applied.reject(RejectReason::Capacity, blocks);
    }
}

/// The blocks of one holder, and its events that wait for a parent.
#[derive(Debug, Default)]
pub(super) struct HolderState {
    /// Blocks that have places in the runs. Queries see only these blocks.
    pub(super) share: Share,
    /// Engine's names of the blocks that have places in the runs, except names that equal the blocks' hashes.
    pub(super) names: Names,
    pub(super) orphans: Orphans,
    /// Blocks that may be the parents of orphans (blocks whose parent was unknown). Empty between events.
    pub(super) adopting: Vec<Spot>,
    pub(super) parking: Parking,
    /// Memory of the holder that has been counted in the usage of the index.
    accounted: Change,
    /// Number of twins that the holder has stored since it was last empty: blocks beside which it had another child of the
    /// same block with the same lineage hash.
    pub(super) twins: u32,
    /// Whether the engine names blocks. Even then, some blocks may have no name.
    pub(super) uses_names: bool,
    /// Whether blocks without a name are refused.
    pub(super) refuses_nameless: bool,
    /// Whether any blocks have been evicted since the last event.
    pub(super) is_cut: bool,
}

impl HolderState {
    /// Makes the state of a holder that has no blocks, with the empty `share` of the runs.
    pub(super) fn of(share: Share) -> Self {
        Self {
            share,
            ..Self::default()
        }
    }

    /// Returns an empty state for the same holder, so that the holder starts again without blocks.
    pub(super) fn emptied(&self) -> Self {
        Self {
            accounted: self.accounted,
            ..Self::of(self.share.emptied())
        }
    }

    /// Number of blocks that the holder has, including orphans (blocks whose parent is unknown).
    pub(super) fn blocks(&self) -> usize {
        self.share.blocks() + self.orphans.len()
    }

    pub(super) fn attributes(&self, spot: Spot) -> Option<Attributes> {
        self.share.get(spot)
    }

    /// Runs `work`, which handles `blocks` blocks and changes only this holder's state. If there are many blocks,
    /// usually releases the lock on the runs for that time. Other writers then cut off no blocks that this holder has
    /// put into the runs and not published yet.
    pub(super) fn aside<T>(
        &mut self,
        blocks: usize,
        runs: &mut RunWriter<'_>,
        work: impl FnOnce(&mut Self, RunView<'_>) -> T,
    ) -> T {
        match self.share.kept_aside(blocks) {
            Some(kept) => runs.aside(&kept, |view| work(self, view)),
            None => work(self, runs.view()),
        }
    }

    /// Makes all changes visible to queries in one step, and counts them in the usage.
    pub(super) fn publish(&mut self, runs: &mut RunWriter<'_>) {
        self.share.publish(runs);
        self.account(runs);
    }

    pub(super) fn account(&mut self, runs: &mut RunWriter<'_>) {
        let bytes = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        let waiting = bytes(self.parking.bytes());
        let aside = bytes(self.orphans.bytes()) + waiting;
        let placed = bytes(self.share.bytes() + self.names.bytes());
        let now = Change {
            blocks: 0,
            bytes: placed + aside,
            aside,
            waiting,
        };
        runs.count_usage(now.since(self.accounted));
        self.accounted = now;
    }

    /// Removes blocks of a run from the holder: those from `from` up to the offset `end`. The blocks' names must
    /// already be removed from the table.
    pub(super) fn lose(&mut self, from: Spot, end: u16) {
        self.share.set(from, end, None);
        let end = self.share.part(from.run).map_or(0, Part::end);
        self.names.trim(from.run, end);
    }
}
