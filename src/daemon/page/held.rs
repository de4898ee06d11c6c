//! Tree of the prefixes that holders have, from a walk over the index. The index is a radix tree whose edges are runs
//! of blocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas_core::hash::{PositionalLineageHash, SequenceHash, lineage_hashes};
use kvatlas_core::index::{PositionalIndexer, Walk};

use super::atlas::Branch;

/// Maximum number of runs (edges of the index's radix tree) that a walk visits.
const RUNS_MAX: usize = 100_000;
/// Maximum number of blocks that one walk over the index keeps; 8 bytes each. Blocks are kept in whole runs
/// (consecutive blocks), so the last run may exceed this number.
const BLOCKS_MAX: usize = 1 << 21;
/// Maximum time that one walk over the index takes. A walk stops at the first step after this time.
const TIME_MAX: Duration = Duration::from_millis(500);
/// Maximum depth of a prefix that can be shown, in blocks. Deeper blocks are not visited.
const DEPTH_MAX: usize = 8192;

/// Run (consecutive blocks that the index keeps together) that the walk has visited.
struct Met {
    parent: Option<usize>,
    start: usize,
    hashes: Vec<SequenceHash>,
    weight: u64,
}

/// Returns the branches of the index's tree of prefixes, parents first. The flag says whether the walk over the tree
/// stopped early, at a bound.
///
/// The weight of a branch is the number of copies of its blocks and of all blocks that continue them. A block has as
/// many copies as there are holders that have it.
pub(super) fn branches(indexer: &PositionalIndexer) -> (Vec<Branch>, bool) {
    let (mut met, partial) = meet(&mut indexer.walk());
    // Children come after their parents.
    for index in (0..met.len()).rev() {
        if let Some(parent) = met[index].parent {
            met[parent].weight += met[index].weight;
        }
    }
    let mut branches: Vec<Branch> = Vec::with_capacity(met.len());
    for run in &met {
        branches.push(Branch {
            parent: run.parent,
            start: run.start,
            end: run.start + run.hashes.len(),
            weight: run.weight,
            path: Arc::default(),
        });
    }
    for index in super::atlas::heaviest(&branches, super::atlas::NODES_MAX) {
        branches[index].path = path(&met, index).into();
    }
    (branches, partial)
}

fn meet(walk: &mut Walk) -> (Vec<Met>, bool) {
    let begun = Instant::now();
    let (mut met, mut open, mut blocks) = (Vec::<Met>::new(), Vec::<usize>::new(), 0);
    let mut is_cut = false;
    while let Some(run) = walk.next() {
        if met.len() == RUNS_MAX || blocks > BLOCKS_MAX || begun.elapsed() > TIME_MAX {
            return (met, true);
        }
        open.truncate(run.depth - 1);
        let shown = run.hashes.len().min(DEPTH_MAX.saturating_sub(run.position));
        let is_too_deep = shown < run.hashes.len();
        if shown > 0 {
            blocks += shown;
            open.push(met.len());
            met.push(Met {
                parent: open.iter().rev().nth(1).copied(),
                start: run.position,
                hashes: run.hashes.iter().take(shown).copied().collect(),
                weight: run.copies() as u64,
            });
        }
        if is_too_deep {
            is_cut = true;
            walk.skip_subtree();
        }
    }
    (met, is_cut)
}

/// Returns all blocks from position 0 to the last block of `met[index]`. Each entry of `met` is a run, that is, a
/// stretch of consecutive blocks of a prefix.
fn path(met: &[Met], index: usize) -> Vec<PositionalLineageHash> {
    let mut lineage = Vec::new();
    let mut next = Some(index);
    while let Some(run) = next.and_then(|index| met.get(index)) {
        lineage.push(run);
        next = run.parent;
    }
    let mut sequence: Vec<SequenceHash> = Vec::new();
    for run in lineage.iter().rev() {
        sequence.truncate(run.start);
        sequence.extend_from_slice(&run.hashes);
    }
    // Positions are below the bound on the depth.
    lineage_hashes(&sequence).map_while(Result::ok).collect()
}

/// Counts of the blocks that holders have from one block of a prefix on: that block, and all blocks that continue it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub(super) struct Below {
    /// Number of different blocks. A block counts once, even if several holders have it.
    blocks: u64,
    /// Number of pairs of a holder and a block that the holder has.
    copies: u64,
    /// Whether the count stopped early, at a bound on its size or time, so that there may be more blocks.
    partial: bool,
}

/// Counts the blocks that holders have from `block` on: `block` itself, and all blocks that continue it.
pub(super) fn below(indexer: &PositionalIndexer, block: PositionalLineageHash) -> Below {
    let mut counted = Below::default();
    let Some(mut walk) = indexer.walk_below(block) else {
        return counted;
    };
    let (begun, mut runs) = (Instant::now(), 0);
    while let Some(run) = walk.next() {
        if runs == RUNS_MAX || begun.elapsed() > TIME_MAX {
            counted.partial = true;
            break;
        }
        runs += 1;
        counted.blocks += run.hashes.len() as u64;
        counted.copies += run.copies() as u64;
    }
    counted
}

#[cfg(test)]
mod tests {
    use kvatlas_core::index::{IndexLimits, NamespaceSettings};
    use kvatlas_core::wire::{Event, HolderId, StoredBlocks, Tier, WorkerName};

    use super::*;

    fn index(holders: &[(&str, &[&[u64]])]) -> PositionalIndexer {
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        for (worker, chains) in holders {
            let worker = WorkerName::new(worker).unwrap();
            let mut writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
            for chain in *chains {
                let hashes = chain.iter().copied().map(SequenceHash).collect();
                let stored = StoredBlocks::by_sequence(None, None, hashes);
                writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
            }
        }
        index
    }

    #[test]
    fn what_is_too_deep_to_show_is_said_to_be_left_out() {
        let most = DEPTH_MAX as u64;
        let long: Vec<u64> = (1..=most + 5).collect();
        let other = [&long[..DEPTH_MAX], &[most + 9]].concat();
        for chains in [&[&long[..]][..], &[&long[..], &other[..]]] {
            let (branches, partial) = branches(&index(&[("a", chains)]));
            assert!(partial);
            assert_eq!(branches.iter().map(|branch| branch.end).max(), Some(DEPTH_MAX));
        }
        let (_, partial) = branches(&index(&[("a", &[&long[..DEPTH_MAX]])]));
        assert!(!partial);
    }

    #[test]
    fn weights_are_copies_of_the_blocks_and_of_those_behind_them() {
        let index = index(&[
            ("a", &[&[1, 2, 3, 4], &[1, 2, 8]]),
            ("b", &[&[1, 2, 3]]),
            ("c", &[&[9]]),
        ]);
        let (branches, partial) = branches(&index);
        assert!(!partial);
        let roots: u64 = branches
            .iter()
            .filter(|branch| branch.parent.is_none())
            .map(|branch| branch.weight)
            .sum();
        assert_eq!(roots, 5 + 3 + 1);
        for branch in &branches {
            assert_eq!(branch.path.len(), branch.end);
            if let Some(parent) = branch.parent {
                let parent = &branches[parent];
                assert!(parent.weight >= branch.weight);
                assert_eq!(parent.path[..branch.start], branch.path[..branch.start]);
            }
        }
        let leaf = branches.iter().find(|branch| branch.start == 2).expect("the 8");
        assert_eq!((leaf.end, leaf.weight), (3, 1));
        let counted = below(&index, leaf.path[1]);
        let expected = Below {
            blocks: 4,
            copies: 6,
            partial: false,
        };
        assert_eq!(counted, expected, "2, 3, 4 and 8");
        assert_eq!(below(&index, leaf.path[2]).copies, 1);
    }
}
