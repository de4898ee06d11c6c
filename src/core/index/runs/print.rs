//! Fingerprints of 32 consecutive hashes, from positions on that are multiples of 32: a query that agrees with a run reads one word of it
//! for 32 blocks.
//!
//! Universal hashing under secret random words (NH: Black et al., *UMAC*, 1999, on words of 64 bits): two different chunks of hashes
//! have the same sum of 128 bits with probability 2^-64 at most, whoever chose them. The two halves of the sum are mixed to one word under
//! another secret word. No assumption that hashes are a chain is needed.

use crate::hash::{BlockHash, SequenceHash};

use super::{fold, random_key};

/// Blocks of one fingerprint.
pub(crate) const CHUNK: usize = 32;

/// The secret words of an index.
#[derive(Debug)]
pub(crate) struct Prints {
    keys: [u64; CHUNK],
    last: u64,
    content: [u64; 2],
}

impl Prints {
    pub(crate) fn new() -> Self {
        Self {
            keys: std::array::from_fn(|number| random_key(number as u64)),
            last: random_key(CHUNK as u64),
            content: std::array::from_fn(|number| random_key(number as u64)),
        }
    }

    /// The fingerprint of these hashes, all bits of each.
    #[inline]
    pub(crate) fn of(&self, hashes: &[SequenceHash; CHUNK]) -> u64 {
        self.sum(hashes, |hash| hash.0)
    }

    /// The fingerprint of blocks with these hashes after the block with the sequence hash `before`.
    #[inline]
    pub(crate) fn of_content(&self, before: u64, blocks: &[BlockHash; CHUNK]) -> u64 {
        let [one, other] = self.content;
        fold(self.sum(blocks, |block| block.0) ^ one, before ^ other)
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "halves of words are meant")]
    fn sum<W: Copy>(&self, hashes: &[W; CHUNK], of: impl Fn(W) -> u64) -> u64 {
        // Two sums, so that neither waits for the other.
        let mut sums = [0_u128; 2];
        for (hashes, keys) in hashes.chunks_exact(4).zip(self.keys.chunks_exact(4)) {
            let word = |index: usize| of(hashes[index]).wrapping_add(keys[index]);
            sums[0] = sums[0].wrapping_add(u128::from(word(0)) * u128::from(word(1)));
            sums[1] = sums[1].wrapping_add(u128::from(word(2)) * u128::from(word(3)));
        }
        let sum = sums[0].wrapping_add(sums[1]);
        sum as u64 ^ fold((sum >> 64) as u64, self.last)
    }
}
