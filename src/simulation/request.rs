//! One request of the simulated load.

use kvatlas_core::hash::{HashSeed, SequenceHash, block_hash, next_sequence_hash};

/// A prompt that arrives at the fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Time of arrival, in milliseconds since the beginning of the simulated time.
    pub arrival_ms: u64,
    /// Sequence hash of each block of the prompt. Each hash covers all blocks up to its own.
    pub chain: Vec<SequenceHash>,
    /// Number of tokens of the answer, which sets how long the request keeps a worker busy.
    pub output_tokens: u64,
}

/// Returns the sequence hashes of a prompt's blocks. `block_ids` has one identifier for each block.
///
/// The blocks' real tokens are not known. Instead, the two halves of an identifier count as the tokens of a block of two tokens,
/// from which the block hash is computed. Equal identifiers get equal hashes, in every run and on every machine. The sequence
/// hashes follow the hash contract.
pub fn chain_of(block_ids: &[u64]) -> Vec<SequenceHash> {
    let mut chain = Vec::with_capacity(block_ids.len());
    extend_chain(&mut chain, block_ids.iter().copied());
    chain
}

/// Appends the sequence hashes of further blocks to a chain. `block_ids` has the identifiers of the blocks.
pub(super) fn extend_chain(chain: &mut Vec<SequenceHash>, block_ids: impl IntoIterator<Item = u64>) {
    let seed = HashSeed::for_cache(None, None);
    for id in block_ids {
        let bytes = id.to_le_bytes();
        let [a, b, c, d, e, f, g, h] = bytes;
        let tokens = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])];
        let parent = chain.last().copied();
        chain.push(next_sequence_hash(parent, block_hash(&tokens, seed)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_names_whole_prefixes() {
        let (one, other) = (chain_of(&[1, 2, 3, 4]), chain_of(&[1, 2, 9, 4]));
        assert_eq!(one.len(), 4);
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
        assert_ne!(one[3], other[3]);
    }

    #[test]
    fn both_halves_of_an_identifier_count() {
        assert_ne!(chain_of(&[1]), chain_of(&[1 << 32]));
        assert_ne!(chain_of(&[1]), chain_of(&[1 | 1 << 32]));
    }

    #[test]
    fn extending_is_the_same_as_beginning_with_all() {
        let mut chain = chain_of(&[5, 6]);
        extend_chain(&mut chain, [7, 8]);
        assert_eq!(chain, chain_of(&[5, 6, 7, 8]));
    }
}
