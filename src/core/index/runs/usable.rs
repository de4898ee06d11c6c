//! Usable blocks: how many leading blocks of a chain a request can reuse at each holder. The bars of the chain's runs
//! mark the blocks after which a request cannot resume.

use super::run::Run;
use crate::epoch::Guard;
use crate::index::directory::SlotBits;
use crate::index::hook::point;

/// Splits holders by their numbers of usable blocks. All of them have the first `depth` blocks of a chain. A holder's
/// usable blocks are the blocks up to the last one that is resumable at `step`, a step of tiers. `path` gives the runs
/// of the chain, beginning with the last run. Calls `found` once for each set of holders, with the number of usable
/// blocks of these holders.
pub(crate) fn split_by_usable<'g, S: SlotBits>(
    path: impl Iterator<Item = &'g Run>,
    depth: u32,
    step: u32,
    mut slots: S,
    guard: &'g Guard,
    mut found: impl FnMut(u32, S),
) {
    let mut end = depth;
    for run in path {
        let start = run.start();
        if start >= end {
            continue;
        }
        point();
        let bars = run.bars(guard);
        if bars.is_empty() {
            return found(end, slots);
        }
        let mut row = bars.row_of(end - start - 1, run.len());
        loop {
            let resumable = bars.take_free(row, step, &mut slots);
            if !resumable.is_empty() {
                found(end, resumable);
            }
            if slots.is_empty() {
                return;
            }
            end = start + bars.from(row);
            let Some(before) = row.checked_sub(1) else { break };
            row = before;
        }
        // If another run has this number by now, `start` is meaningless. The bound makes sure that the loop ends even
        // then.
        end = end.min(start);
    }
    found(0, slots);
}
