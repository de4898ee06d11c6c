//! Compressed chains: queries that give blocks only at chosen positions.

use std::num::NonZeroUsize;

use crate::hash::{Position, PositionError, PositionalLineageHash};

use super::error::PositionsError;
use super::query::{QueryKey, SingleQuery};

/// Checks that `positions` fit the hashes of `key`.
///
/// There must be one position for each hash, in ascending order. Each lineage hash must contain the same position, and
/// lineage hashes at consecutive positions must be parent and child.
///
/// # Errors
///
/// Any [`PositionsError`] except [`PositionsError::OutOfRange`].
pub(crate) fn check_positions(key: &QueryKey, positions: &[Position]) -> Result<(), PositionsError> {
    let hashes = match key {
        QueryKey::SequenceHashes(hashes) => hashes.len(),
        QueryKey::LineageHashes(hashes) => hashes.len(),
        QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => return Err(PositionsError::NeedChain),
    };
    if positions.len() != hashes {
        return Err(PositionsError::LengthMismatch {
            positions: positions.len(),
            hashes,
        });
    }
    if positions.is_empty() {
        return Err(PositionsError::Empty);
    }
    if let Some(index) = positions.windows(2).position(|pair| pair[0] >= pair[1]) {
        return Err(PositionsError::NotAscending { index: index + 1 });
    }
    match key {
        QueryKey::LineageHashes(hashes) => check_lineage(hashes, positions),
        _ => Ok(()),
    }
}

fn check_lineage(hashes: &[PositionalLineageHash], positions: &[Position]) -> Result<(), PositionsError> {
    for (index, (hash, position)) in hashes.iter().zip(positions).enumerate() {
        let found = Position::from(*hash);
        if found != *position {
            return Err(PositionsError::OtherPosition { index, found });
        }
    }
    let is_broken = |pair: &[PositionalLineageHash]| {
        pair[0].position() + 1 == pair[1].position() && !pair[1].is_child_of(&pair[0])
    };
    match hashes.windows(2).position(is_broken) {
        Some(index) => Err(PositionsError::BrokenChain { index: index + 1 }),
        None => Ok(()),
    }
}

impl SingleQuery {
    /// Makes a compressed query for a whole chain. The query has the first block, every `stride`-th block after it,
    /// and the last block.
    ///
    /// Because the query has the first block, it finds every holder of any leading block.
    ///
    /// # Errors
    ///
    /// [`PositionsError::NeedChain`] for tokens and block hashes. [`PositionsError::Empty`] for a chain without
    /// blocks. [`PositionsError::OutOfRange`] beyond 2^24 blocks. Any other [`PositionsError`] if the hashes are not
    /// a chain.
    pub fn compressed(key: QueryKey, stride: NonZeroUsize) -> Result<Self, PositionsError> {
        let (key, positions) = match key {
            QueryKey::SequenceHashes(hashes) => {
                let positions = chosen(hashes.len(), stride)?;
                (QueryKey::SequenceHashes(pick(&hashes, &positions)), positions)
            }
            QueryKey::LineageHashes(hashes) => {
                let positions = chosen(hashes.len(), stride)?;
                (QueryKey::LineageHashes(pick(&hashes, &positions)), positions)
            }
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => return Err(PositionsError::NeedChain),
        };
        check_positions(&key, &positions)?;
        Ok(Self {
            positions: Some(positions),
            ..Self::new(key)
        })
    }
}

/// Returns the positions 0, `stride`, 2 × `stride` and so on, and the position of the last of `blocks` blocks.
fn chosen(blocks: usize, stride: NonZeroUsize) -> Result<Vec<Position>, PositionError> {
    let Some(last) = blocks.checked_sub(1) else {
        return Ok(Vec::new());
    };
    let evenly = (0..last).step_by(stride.get());
    evenly
        .chain(std::iter::once(last))
        .map(|position| Position::new(position as u64))
        .collect()
}

fn pick<T: Copy>(hashes: &[T], positions: &[Position]) -> Vec<T> {
    let at = |position: &Position| hashes.get(position.as_usize()).copied();
    positions.iter().filter_map(at).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::hash::{BlockHash, SequenceHash, lineage_hashes};

    use super::*;

    fn at(positions: &[u64]) -> Vec<Position> {
        positions
            .iter()
            .map(|position| Position::new(*position).unwrap())
            .collect()
    }

    fn sequence(blocks: u64) -> Vec<SequenceHash> {
        (0..blocks).map(|block| SequenceHash(100 + block)).collect()
    }

    fn lineage(blocks: u64) -> Vec<PositionalLineageHash> {
        lineage_hashes(&sequence(blocks))
            .collect::<Result<_, _>>()
            .unwrap()
    }

    #[test]
    fn positions_must_say_where_each_hash_stands() {
        let two = QueryKey::SequenceHashes(sequence(2));
        assert_eq!(check_positions(&two, &at(&[3, 1 << 20])), Ok(()));
        let too_few = PositionsError::LengthMismatch {
            positions: 1,
            hashes: 2,
        };
        assert_eq!(check_positions(&two, &at(&[3])), Err(too_few));
        for twice in [[3, 3], [4, 3]] {
            let expected = PositionsError::NotAscending { index: 1 };
            assert_eq!(check_positions(&two, &at(&twice)), Err(expected));
        }
        let none = QueryKey::LineageHashes(Vec::new());
        assert_eq!(check_positions(&none, &[]), Err(PositionsError::Empty));
        let blocks = QueryKey::BlockHashes(vec![BlockHash(1)]);
        assert_eq!(
            check_positions(&blocks, &at(&[0])),
            Err(PositionsError::NeedChain)
        );
    }

    #[test]
    fn lineage_hashes_must_be_where_they_say() {
        let chain = lineage(9);
        let key = QueryKey::LineageHashes(vec![chain[2], chain[3], chain[8]]);
        assert_eq!(check_positions(&key, &at(&[2, 3, 8])), Ok(()));
        let moved = PositionsError::OtherPosition {
            index: 2,
            found: Position::new(8).unwrap(),
        };
        assert_eq!(check_positions(&key, &at(&[2, 3, 7])), Err(moved));
        let other = PositionalLineageHash::new(SequenceHash(1), Some(SequenceHash(2)), 3).unwrap();
        let key = QueryKey::LineageHashes(vec![chain[2], other]);
        let broken = PositionsError::BrokenChain { index: 1 };
        assert_eq!(check_positions(&key, &at(&[2, 3])), Err(broken));
    }

    #[test]
    fn a_chain_is_compressed_to_every_nth_block_and_the_last() {
        let compress = |blocks, stride| {
            SingleQuery::compressed(
                QueryKey::SequenceHashes(sequence(blocks)),
                NonZeroUsize::new(stride).unwrap(),
            )
        };
        let query = compress(10, 4).unwrap();
        assert_eq!(query.positions, Some(at(&[0, 4, 8, 9])));
        let hashes = [100, 104, 108, 109].map(SequenceHash).to_vec();
        assert_eq!(query.key, QueryKey::SequenceHashes(hashes));
        assert_eq!(compress(9, 4).unwrap().positions, Some(at(&[0, 4, 8])));
        assert_eq!(compress(1, 4).unwrap().positions, Some(at(&[0])));
        assert_eq!(compress(0, 4), Err(PositionsError::Empty));
        let tokens = QueryKey::BlockHashes(vec![BlockHash(1)]);
        assert_eq!(
            SingleQuery::compressed(tokens, NonZeroUsize::MIN),
            Err(PositionsError::NeedChain)
        );
    }

    proptest! {
        #[test]
        fn a_compressed_chain_has_no_gap_above_its_stride(blocks in 1_u64..600, stride in 1_usize..700) {
            let stride = NonZeroUsize::new(stride).unwrap();
            let query = SingleQuery::compressed(QueryKey::LineageHashes(lineage(blocks)), stride).unwrap();
            let positions: Vec<u64> = query.positions.unwrap().iter().map(|at| at.as_u64()).collect();
            prop_assert_eq!(positions.first(), Some(&0));
            prop_assert_eq!(positions.last(), Some(&(blocks - 1)));
            for pair in positions.windows(2) {
                prop_assert!(pair[0] < pair[1] && pair[1] - pair[0] <= stride.get() as u64);
            }
        }
    }
}
