//! What a walk over the runs needs: a list of them in depth-first order, and a look at each while writers go on.

use std::cmp::Reverse;
use std::ops::Range;

use crossbeam_epoch::Guard;

use super::Spot;
use super::coverage::View;
use super::run::Run;
use super::slab::RunId;
use super::store::RunStore;
use super::writer::State;

/// Runs listed in one turn: some tens of microseconds.
const RUNS_PER_TURN: usize = 1024;

/// A run, told from others that had its number before or will have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Life {
    pub(crate) run: RunId,
    pub(super) birth: u32,
}

impl Life {
    /// Stands for what is above the roots.
    const NONE: Self = Self {
        run: RunId::NONE,
        birth: 0,
    };
}

/// A run and what it follows.
#[derive(Debug, Clone, Copy)]
struct Listed {
    parent: Life,
    offset: u16,
    own: Life,
}

/// The runs that there were, each followed by those that begin at one of its blocks, later blocks first.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// By parent.
    runs: Vec<Listed>,
}

impl Listing {
    /// The runs that begin at position 0.
    pub(crate) fn roots(&self) -> Range<usize> {
        self.children(Life::NONE)
    }

    /// The runs that follow a block of `parent`, those of later blocks first.
    pub(crate) fn children(&self, parent: Life) -> Range<usize> {
        let start = self.runs.partition_point(|listed| listed.parent < parent);
        let of_parent = self.runs.get(start..).unwrap_or_default();
        start..start + of_parent.partition_point(|listed| listed.parent == parent)
    }

    /// A run of the list, and the offset of the block that it follows in its parent.
    pub(crate) fn run(&self, index: usize) -> Option<(Life, u16)> {
        let listed = self.runs.get(index)?;
        Some((listed.own, listed.offset))
    }
}

impl RunStore {
    /// Lists all runs. Writers have turns meanwhile: what comes or goes then may be missing or be there.
    pub(crate) fn list(&self) -> Listing {
        let mut runs = Vec::new();
        let mut next = 0;
        loop {
            let state = self.turns.state.lock();
            let end = state.runs_ever().min(next + RUNS_PER_TURN);
            if next >= end {
                break;
            }
            let ids = (next..end).filter_map(RunId::new);
            runs.extend(ids.filter_map(|id| listed(&state, id)));
            next = end;
        }
        runs.sort_unstable_by_key(|listed: &Listed| (listed.parent, Reverse(listed.offset), listed.own));
        Listing { runs }
    }

    /// The run at one instant, if it is still there and has whole hashes.
    ///
    /// The parent that it had when it was listed, if both are of the same list, has been there all the time in between: a run goes after
    /// its children.
    pub(crate) fn look<'g>(&self, life: Life, guard: &'g Guard) -> Option<(&'g Run, View<'g>)> {
        let run = self.slab.get(life.run, guard)?;
        let view = run.view(guard);
        let state = self.turns.state.lock();
        // It is there now, and so it was when the view was taken.
        let is_there = state.life(life.run) == Some(life) && state.is_whole(life.run);
        is_there.then_some((run, view))
    }

    /// The run that has the block at `spot`.
    pub(crate) fn life(&self, spot: Spot) -> Option<Life> {
        self.turns.state.lock().life(spot.run)
    }
}

fn listed(state: &State, id: RunId) -> Option<Listed> {
    let own = state.life(id)?;
    let Some(parent) = state.parent(id) else {
        return Some(Listed {
            parent: Life::NONE,
            offset: 0,
            own,
        });
    };
    Some(Listed {
        parent: state.life(parent.run)?,
        offset: parent.offset,
        own,
    })
}
