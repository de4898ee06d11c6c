//! Everything that is known of one holder's blocks.

use crate::index::runs::{RunView, RunWriter, Spot};
use crate::index::share::{Attributes, Part, Share};
use crate::index::usage::Change;
use crate::wire::Tier;

use super::applied::{Applied, RejectReason};
use super::orphans::Orphans;
use super::parking::Parking;
use super::table::Names;

/// Number of blocks after which others have a turn.
pub(super) const TURN_BLOCKS: usize = 1024;

/// Everything that applying an event needs beside the holder's own state.
pub(super) struct Work<'a> {
    pub(super) runs: RunWriter<'a>,
    /// The outcome so far.
    pub(super) applied: &'a mut Applied,
    /// The tier of the event's blocks.
    pub(super) tier: Tier,
    /// Maximum number of blocks of the holder.
    pub(super) blocks_max: usize,
    /// Maximum bytes of waiting events of all holders together.
    pub(super) waiting_bytes_max: u64,
}

impl Work<'_> {
    /// Notes that `blocks` blocks were left out, because there is no room for them.
    pub(super) fn reject_full(&mut self, blocks: usize) {
        self.applied.reject(RejectReason::Capacity, blocks);
    }
}

/// The blocks of one holder, and its events that wait.
#[derive(Debug, Default)]
pub(super) struct HolderState {
    /// The blocks that have places, for queries.
    pub(super) share: Share,
    /// The engine's names of these blocks, apart from names that are the blocks' hashes.
    pub(super) names: Names,
    pub(super) orphans: Orphans,
    /// Blocks that some orphans may have waited for. Empty between events.
    pub(super) adopting: Vec<Spot>,
    pub(super) parking: Parking,
    /// Memory of the holder that is accounted for.
    accounted: Change,
    /// Whether the engine gives names to blocks. Not all blocks need have names.
    pub(super) uses_names: bool,
    /// Whether blocks without a name are refused.
    pub(super) refuses_nameless: bool,
    /// Whether blocks have been evicted since the last event.
    pub(super) is_cut: bool,
}

impl HolderState {
    /// Makes the state of a holder that has nothing but the empty `share`.
    pub(super) fn of(share: Share) -> Self {
        Self {
            share,
            ..Self::default()
        }
    }

    /// Returns the state with which the holder begins anew.
    pub(super) fn emptied(&self) -> Self {
        Self {
            accounted: self.accounted,
            ..Self::of(self.share.emptied())
        }
    }

    /// Number of blocks that the holder has, including blocks behind holes.
    pub(super) fn blocks(&self) -> usize {
        self.share.blocks() + self.orphans.len()
    }

    pub(super) fn attributes(&self, spot: Spot) -> Option<Attributes> {
        self.share.get(spot)
    }

    /// Runs `work`, which concerns this holder alone, on `blocks` blocks. If these are many, other writers have turns
    /// at the runs meanwhile. Blocks that the holder has put among the runs are kept until they can be published.
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

    /// Publishes all changes, in one step, and accounts for them.
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

    /// Removes blocks that have places from the share. Their names must be out of the table.
    pub(super) fn lose(&mut self, from: Spot, end: u16) {
        self.share.set(from, end, None);
        let end = self.share.part(from.run).map_or(0, Part::end);
        self.names.trim(from.run, end);
    }
}
