//! The search: which holders hold how long a prefix.
//!
//! Holders are compared as sets. The holders of position 0 are the candidates; those found at the last position hold
//! everything. The others dropped out somewhere in between, and bisecting on the set that is still missing finds where:
//! the probes grow with the number of distinct drop-out points and the logarithm of the depth, not with depth × holders.

use std::sync::Arc;

use crate::hash::PositionalLineageHash;
use crate::tracking::{DegradedReason, DegradedReasons, StreamTrust};
use crate::wire::WorkerName;

use super::chain::QueryChain;
use super::holder_set::{HolderSet, SlotSet};
use super::slots::{Directory, HolderRecord, Slots};
use super::table::EntryTable;

/// Whom a search asks about.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// Only these workers; all where it is absent.
    pub workers: Option<&'a [WorkerName]>,
}

/// One holder and how long a prefix it holds.
#[derive(Debug, Clone, Copy)]
pub struct Match<'a> {
    /// The holder.
    pub holder: &'a Arc<HolderRecord>,
    /// How many leading blocks it holds, without a hole; at least 1.
    pub matched_blocks: u32,
}

/// Holders that hold the same number of leading blocks.
#[derive(Debug, Clone)]
struct MatchGroup {
    matched_blocks: u32,
    slots: SlotSet,
}

/// The holders found, in groups of equal depth.
#[derive(Debug, Default)]
pub struct Matches {
    directory: Arc<Directory>,
    groups: Vec<MatchGroup>,
    /// How many states had been replaced when the search began.
    replacements: u64,
}

impl Matches {
    pub(crate) fn begun_at(mut self, replacements: u64) -> Self {
        self.replacements = replacements;
        self
    }

    /// Why the state in which `holder` was found is not certain.
    ///
    /// Where it has been replaced since the search began, the reasons of now are those of another state than the one that was
    /// searched: the holder counts as unverified.
    pub fn reasons(&self, holder: &HolderRecord, trust: &StreamTrust) -> DegradedReasons {
        let reasons = holder.status.reasons(trust);
        if holder.status.replacement() > self.replacements {
            return reasons.with(DegradedReason::Unverified);
        }
        reasons
    }

    /// The holders with at least one matched block, deepest first; in no particular order within one depth.
    ///
    /// A holder that left while the search ran is left out: it holds nothing now.
    pub fn holders(&self) -> impl Iterator<Item = Match<'_>> {
        self.groups.iter().flat_map(|group| {
            let holders = group.slots.iter().filter_map(|slot| self.directory.holder(slot));
            holders.filter(|holder| !holder.is_retired()).map(|holder| Match {
                holder,
                matched_blocks: group.matched_blocks,
            })
        })
    }
}

/// A stretch of positions in which `candidates` drop out: all of them hold `held`, none holds `missing`.
struct Stretch {
    held: usize,
    missing: usize,
    candidates: SlotSet,
}

/// Runs one search.
pub(crate) fn find(
    table: &EntryTable,
    slots: &Slots,
    chain: &mut QueryChain<'_>,
    search: Search<'_>,
) -> Matches {
    // Before the first probe: a holder that joins later was not there when the query came.
    let directory = Arc::clone(&slots.load());
    let conflicts = table.chain_conflicts();
    if conflicts == 0 {
        let groups = bisect(table, &directory, chain, search);
        if table.chain_conflicts() == conflicts {
            return matches(directory, groups);
        }
    }
    let groups = walk(table, &directory, chain, search);
    matches(directory, groups)
}

fn matches(directory: Arc<Directory>, groups: Vec<MatchGroup>) -> Matches {
    Matches {
        directory,
        groups,
        replacements: 0,
    }
}

/// How many holders the block has that a holder dropped out at.
pub(crate) fn holders_of(table: &EntryTable, key: PositionalLineageHash) -> usize {
    table.read(key, HolderSet::len).unwrap_or_default()
}

/// The holders of position 0 that the search asks about.
fn candidates(
    table: &EntryTable,
    directory: &Directory,
    chain: &mut QueryChain<'_>,
    search: Search<'_>,
) -> SlotSet {
    if chain.is_empty() {
        return SlotSet::default();
    }
    let mut found = table.read(chain.key(0), HolderSet::to_slots).unwrap_or_default();
    if let Some(workers) = search.workers {
        found.intersect(&directory.slots_of(workers));
    }
    found
}

fn matched_blocks(depth: usize) -> u32 {
    // Positions are below 2^24.
    u32::try_from(depth).unwrap_or(u32::MAX)
}

fn bisect(
    table: &EntryTable,
    directory: &Directory,
    chain: &mut QueryChain<'_>,
    search: Search<'_>,
) -> Vec<MatchGroup> {
    let mut candidates = candidates(table, directory, chain, search);
    if candidates.is_empty() {
        return Vec::new();
    }
    let mut groups = Vec::new();
    let last = chain.len() - 1;
    let whole = holding(table, chain, last, &candidates);
    candidates.subtract(&whole);
    push_group(&mut groups, chain.len(), whole);
    // Deeper stretches are taken first, so that groups come out deepest first.
    let mut stretches = vec![Stretch {
        held: 0,
        missing: last,
        candidates,
    }];
    while let Some(Stretch {
        held,
        missing,
        mut candidates,
    }) = stretches.pop()
    {
        if candidates.is_empty() {
            continue;
        }
        if missing - held <= 1 {
            push_group(&mut groups, missing, candidates);
            continue;
        }
        let middle = held + (missing - held) / 2;
        let deeper = holding(table, chain, middle, &candidates);
        candidates.subtract(&deeper);
        stretches.push(Stretch {
            held,
            missing: middle,
            candidates,
        });
        stretches.push(Stretch {
            held: middle,
            missing,
            candidates: deeper,
        });
    }
    groups
}

/// Block by block, for an index whose hashes are no chain: finding a block proves nothing about those before it.
fn walk(
    table: &EntryTable,
    directory: &Directory,
    chain: &mut QueryChain<'_>,
    search: Search<'_>,
) -> Vec<MatchGroup> {
    let mut candidates = candidates(table, directory, chain, search);
    let mut groups = Vec::new();
    for position in 1..chain.len() {
        if candidates.is_empty() {
            break;
        }
        let deeper = holding(table, chain, position, &candidates);
        candidates.subtract(&deeper);
        push_group(&mut groups, position, candidates);
        candidates = deeper;
    }
    push_group(&mut groups, chain.len(), candidates);
    groups.reverse();
    groups
}

fn holding(table: &EntryTable, chain: &mut QueryChain<'_>, position: usize, candidates: &SlotSet) -> SlotSet {
    table
        .read(chain.key(position), |holders| holders.intersection(candidates))
        .unwrap_or_default()
}

fn push_group(groups: &mut Vec<MatchGroup>, depth: usize, slots: SlotSet) {
    if !slots.is_empty() {
        groups.push(MatchGroup {
            matched_blocks: matched_blocks(depth),
            slots,
        });
    }
}
