//! Tree of the prefixes for which recent queries have asked.

use std::sync::Arc;
use std::time::Instant;

use kvatlas_core::hash::PositionalLineageHash;

use crate::queries::SampledQuery;

use super::atlas::Branch;

type PrefixPath = Arc<[PositionalLineageHash]>;

/// Returns the tree of the prefixes that the sampled queries asked for, as branches with parents first. The weight of a
/// branch is the number of queries whose path goes through it.
pub(super) fn branches(queries: &[SampledQuery]) -> Vec<Branch> {
    let mut paths: Vec<PrefixPath> = queries.iter().map(|query| Arc::clone(&query.blocks)).collect();
    paths.sort_unstable();
    let mut branches = Vec::new();
    // Groups of paths that are equal up to a position. Each group still has to be divided after its common blocks.
    let mut open = groups(&paths, 0, None);
    while let Some(group) = open.pop() {
        let Some(members) = paths.get(group.from..group.to) else {
            continue;
        };
        let end = common(members);
        let index = branches.len();
        let Some(path) = members.first() else { continue };
        branches.push(Branch {
            parent: group.parent,
            start: group.start,
            end,
            weight: members.len() as u64,
            path: Arc::clone(path),
        });
        for mut child in groups(members, end, Some(index)) {
            child.from += group.from;
            child.to += group.from;
            open.push(child);
        }
    }
    branches
}

/// Returns the seconds since the oldest query of the sample, rounded up. 0 if the sample is empty.
pub(super) fn seconds(queries: &[SampledQuery], now: Instant) -> u64 {
    let oldest = queries.iter().map(|query| query.at).min();
    oldest.map_or(0, |oldest| now.saturating_duration_since(oldest).as_secs() + 1)
}

/// Returns the number of queries that ask for the whole of `prefix`.
pub(super) fn asking(queries: &[SampledQuery], prefix: &[PositionalLineageHash]) -> usize {
    let asks = |query: &&SampledQuery| query.blocks.starts_with(prefix);
    queries.iter().filter(asks).count()
}

struct PathGroup {
    parent: Option<usize>,
    start: usize,
    from: usize,
    to: usize,
}

/// Groups sorted paths (the blocks of queries) that have the same block at `position`. A path that ends before
/// `position` is in no group.
fn groups(paths: &[PrefixPath], position: usize, parent: Option<usize>) -> Vec<PathGroup> {
    let mut groups = Vec::new();
    let mut from = 0;
    for members in paths.chunk_by(|one, other| one.get(position) == other.get(position)) {
        let to = from + members.len();
        if members.first().is_some_and(|path| path.len() > position) {
            groups.push(PathGroup {
                parent,
                start: position,
                from,
                to,
            });
        }
        from = to;
    }
    groups
}

/// Returns the number of leading blocks that all of the paths (the blocks of queries) share. The paths must be sorted:
/// then it is enough to compare the first and the last path.
fn common(paths: &[PrefixPath]) -> usize {
    match (paths.first(), paths.last()) {
        (Some(first), Some(last)) => first
            .iter()
            .zip(last.iter())
            .take_while(|(one, other)| one == other)
            .count(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::{BlockSize, SequenceHash};
    use kvatlas_core::index::QueryChain;
    use kvatlas_core::wire::{NamespaceName, QueryKey};
    use proptest::prelude::*;

    use super::*;
    use crate::queries::QuerySample;

    /// Returns a sampled query with these sequence hashes.
    fn query(hashes: &[u64]) -> SampledQuery {
        let name = NamespaceName::new("n").unwrap();
        let sample = QuerySample::default();
        let key = QueryKey::SequenceHashes(hashes.iter().copied().map(SequenceHash).collect());
        let mut chain = QueryChain::new(&key, BlockSize::DEFAULT).unwrap();
        sample.offer(&name, &mut chain, 1);
        sample.queries(&name).remove(0)
    }

    #[test]
    fn paths_branch_where_they_differ() {
        let queries = [&[1, 2, 3, 4][..], &[1, 2, 3, 5], &[1, 2, 3, 4], &[7, 8], &[1, 2]].map(query);
        let branches = branches(&queries);
        let mut seen: Vec<_> = branches
            .iter()
            .map(|branch| {
                let parent = branch.parent.map(|parent| branches[parent].start);
                (branch.start, branch.end, branch.weight, parent)
            })
            .collect();
        seen.sort_unstable();
        let expected = [
            (0, 2, 1, None),
            (0, 2, 4, None),
            (2, 3, 3, Some(0)),
            (3, 4, 1, Some(2)),
            (3, 4, 2, Some(2)),
        ];
        assert_eq!(seen, expected);
        assert_eq!(asking(&queries, &queries[0].blocks[..3]), 3);
        assert_eq!(asking(&queries, &queries[4].blocks), 4);
    }

    proptest! {
        #[test]
        fn every_branch_weighs_what_asks_for_it(
            paths in prop::collection::vec(prop::collection::vec(0_u64..3, 1..6), 1..30),
        ) {
            // A hash names its whole prefix.
            let chain = |path: &Vec<u64>| -> Vec<u64> {
                (1..=path.len())
                    .map(|len| path[..len].iter().fold(1, |hash, digit| hash * 4 + digit))
                    .collect()
            };
            let queries: Vec<_> = paths.iter().map(|path| query(&chain(path))).collect();
            let branches = branches(&queries);
            for branch in &branches {
                prop_assert!(branch.start < branch.end);
                prop_assert_eq!(branch.weight, asking(&queries, &branch.path[..branch.end]) as u64
                    + queries.iter().filter(|query| {
                        query.blocks.len() < branch.end && branch.path.starts_with(&query.blocks)
                            && query.blocks.len() > branch.start
                    }).count() as u64);
                if let Some(parent) = branch.parent {
                    prop_assert_eq!(branches[parent].end, branch.start);
                    prop_assert_eq!(&branches[parent].path[..branch.start], &branch.path[..branch.start]);
                }
            }
            let roots: u64 = branches.iter().filter(|branch| branch.parent.is_none()).map(|branch| branch.weight).sum();
            prop_assert_eq!(roots, queries.len() as u64);
        }
    }
}
