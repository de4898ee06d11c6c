//! Fingerprints, also called prints, of chunks of 32 consecutive hashes. A chunk begins at a position that is a
//! multiple of 32. To compare 32 blocks of a query with a run, a search reads one word of the run.
//!
//! The fingerprints are universal hashes under secret random words (NH: Black et al., *UMAC*, 1999, on words of 64
//! bits). Two different chunks of hashes have the same 128-bit sum with a probability of at most 2^-64, even if an
//! attacker chose the hashes. Another secret word mixes the two halves of the sum into one word. The hashes need not
//! be a chain.

use crate::hash::{BlockHash, SequenceHash};

use crate::mix::{fold, random_key};

/// Number of blocks that one fingerprint covers.
pub(crate) const CHUNK: usize = 32;

/// Secret random words of one index, which are the keys of its fingerprints.
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

    /// Returns the fingerprint of `hashes`. All bits of each hash count.
    #[inline]
    pub(crate) fn of(&self, hashes: &[SequenceHash; CHUNK]) -> u64 {
        self.sum(hashes, |hash| hash.0)
    }

    /// Returns the fingerprint of the content of 32 blocks: of their block hashes, and of `before`, a word that stands
    /// for the blocks before them.
    #[inline]
    pub(crate) fn of_content(&self, before: u64, blocks: &[BlockHash; CHUNK]) -> u64 {
        let [one, other] = self.content;
        fold(self.sum(blocks, |block| block.0) ^ one, before ^ other)
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "halves of words are meant")]
    fn sum<W: Copy>(&self, hashes: &[W; CHUNK], of: impl Fn(W) -> u64) -> u64 {
        let sum = sum_of_products(&self.keys, hashes, of);
        sum as u64 ^ fold((sum >> 64) as u64, self.last)
    }
}

/// Returns the sum of the products of pairs of words. To each word its key is added first. Both lists have a multiple
/// of four words.
///
/// This is a separate function on slices for speed. In a loop of known length the compiler would load all words
/// before the first multiplication, and would run out of registers.
#[inline(never)]
fn sum_of_products<W: Copy>(keys: &[u64], words: &[W], of: impl Fn(W) -> u64) -> u128 {
    // Two sums, so that neither waits for the other.
    let mut sums = [0_u128; 2];
    for (words, keys) in words.chunks_exact(4).zip(keys.chunks_exact(4)) {
        let word = |index: usize| of(words[index]).wrapping_add(keys[index]);
        sums[0] = sums[0].wrapping_add(u128::from(word(0)) * u128::from(word(1)));
        sums[1] = sums[1].wrapping_add(u128::from(word(2)) * u128::from(word(3)));
    }
    sums[0].wrapping_add(sums[1])
}
