//! Sequence hashes: a rolling hash over block hashes, so that one `u64` names a whole prefix.
//!
//! The first sequence hash of a chain equals its first block hash. Each further sequence hash is XXH3-64 over the
//! parent's sequence hash and the block hash, both little-endian, with seed 1337. The seed of the cache
//! ([`HashSeed`](super::HashSeed)) enters through the block hashes only.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::block::{BlockHash, HashSeed};
use super::newtype::hash_newtype;

hash_newtype! {
    /// Rolling hash of the prefix up to and including a block.
    ///
    /// Made by [`next_sequence_hash`] and [`sequence_hashes`].
    SequenceHash
}

/// Returns the sequence hash of `block`, which follows the prefix with the sequence hash `parent`. Without `parent`,
/// `block` is the first block of its sequence.
#[inline]
pub fn next_sequence_hash(parent: Option<SequenceHash>, block: BlockHash) -> SequenceHash {
    let Some(parent) = parent else {
        return SequenceHash(block.as_u64());
    };
    // The parent and then the block, both little-endian, are the same sixteen bytes as one little-endian number with
    // the parent in its low half.
    let joined = u128::from(block.as_u64()) << 64 | u128::from(parent.as_u64());
    SequenceHash(xxh3_64_with_seed(&joined.to_le_bytes(), HashSeed::BASE))
}

/// Returns the sequence hashes of the blocks of a sequence, from its first block on.
///
/// The iterator is lazy: each hash is computed when it is requested, so a search that stops early computes no more
/// than it needs.
pub fn sequence_hashes(blocks: impl IntoIterator<Item = BlockHash>) -> impl Iterator<Item = SequenceHash> {
    sequence_hashes_after(None, blocks)
}

/// Returns the sequence hashes of `blocks`, which follow the prefix with the sequence hash `parent`. The iterator is
/// lazy, as that of [`sequence_hashes`] is.
///
/// Continuing a chain gives the same hashes as computing the whole chain.
pub fn sequence_hashes_after(
    parent: Option<SequenceHash>,
    blocks: impl IntoIterator<Item = BlockHash>,
) -> impl Iterator<Item = SequenceHash> {
    let mut last = parent;
    // With `scan`, the iterator would not know the number of hashes.
    blocks.into_iter().map(move |block| {
        let hash = next_sequence_hash(last, block);
        last = Some(hash);
        hash
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collect(blocks: &[u64]) -> Vec<SequenceHash> {
        sequence_hashes(blocks.iter().copied().map(BlockHash)).collect()
    }

    #[test]
    fn sequence_hashes_match_the_contract_vectors() {
        let chain = collect(&[0xea06_fc71_a5ee_6e88, 0x1fbf_39bd_106b_e0b5]);
        assert_eq!(
            chain,
            [
                SequenceHash(0xea06_fc71_a5ee_6e88),
                SequenceHash(0xad01_835a_37dd_294c)
            ]
        );
        let chain = collect(&[0xcb38_e4d7_fb2d_ca5c, 0xe8d3_ec39_b907_b74c]);
        assert_eq!(
            chain,
            [
                SequenceHash(0xcb38_e4d7_fb2d_ca5c),
                SequenceHash(0x44a2_b237_9d6d_3c3d)
            ]
        );
    }

    #[test]
    fn the_chain_is_lazy() {
        let endless = std::iter::repeat(BlockHash(7));
        assert_eq!(sequence_hashes(endless).take(3).count(), 3);
        assert_eq!(collect(&[]), []);
    }

    proptest! {
        #[test]
        fn a_step_hashes_parent_then_block(parent: u64, block: u64) {
            let bytes = [parent.to_le_bytes(), block.to_le_bytes()].concat();
            prop_assert_eq!(
                next_sequence_hash(Some(SequenceHash(parent)), BlockHash(block)).as_u64(),
                xxh3_64_with_seed(&bytes, 1337)
            );
        }

        #[test]
        fn a_chain_can_be_continued_anywhere(
            blocks in prop::collection::vec(any::<u64>().prop_map(BlockHash), 0..40),
            cut in 0_usize..40,
        ) {
            let whole: Vec<_> = sequence_hashes(blocks.iter().copied()).collect();
            let (head, tail) = blocks.split_at(cut.min(blocks.len()));
            let mut parts: Vec<_> = sequence_hashes(head.iter().copied()).collect();
            parts.extend(sequence_hashes_after(parts.last().copied(), tail.iter().copied()));
            prop_assert_eq!(parts, whole);
        }
    }
}
