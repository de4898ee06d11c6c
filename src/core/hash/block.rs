//! Block hashes: XXH3-64 over the tokens of one block as little-endian `u32`, seeded per cache.
//!
//! XXH3 is Yann Collet's hash, <https://github.com/Cyan4973/xxHash>; the seed derivation is Dynamo's.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use super::newtype::hash_newtype;

/// One token id of the model's vocabulary.
pub type Token = u32;

const TOKEN_BYTES: usize = size_of::<Token>();

hash_newtype! {
    /// Hash of the tokens in one block, independent of the blocks before it. It is also called the local hash.
    ///
    /// Made by [`block_hash`] and [`block_hashes`]. Two blocks with the same tokens, at different places of a
    /// sequence, have the same block hash.
    BlockHash
}

/// Number of tokens in a block: 1 to 65536.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// 16 tokens, the size that most engines use.
    pub const DEFAULT: Self = Self(NonZeroU32::new(16).unwrap());

    /// The largest block, in tokens.
    pub const TOKENS_MAX: u32 = 65_536;

    /// Returns a block size of `tokens` tokens.
    ///
    /// # Errors
    ///
    /// [`BlockSizeError`] when `tokens` is 0 or above [`BlockSize::TOKENS_MAX`].
    pub fn new(tokens: u32) -> Result<Self, BlockSizeError> {
        NonZeroU32::new(tokens)
            .filter(|tokens| tokens.get() <= Self::TOKENS_MAX)
            .map(Self)
            .ok_or(BlockSizeError { tokens })
    }

    /// The number of tokens in a block.
    #[inline]
    pub const fn as_u32(self) -> u32 {
        self.0.get()
    }

    /// The number of tokens in a block, as a length.
    #[inline]
    pub const fn as_usize(self) -> usize {
        self.0.get() as usize
    }
}

impl Default for BlockSize {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl TryFrom<u32> for BlockSize {
    type Error = BlockSizeError;

    fn try_from(tokens: u32) -> Result<Self, Self::Error> {
        Self::new(tokens)
    }
}

impl From<BlockSize> for u32 {
    fn from(block_size: BlockSize) -> Self {
        block_size.as_u32()
    }
}

impl std::fmt::Display for BlockSize {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A block size outside 1 to [`BlockSize::TOKENS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "block size {tokens} is outside 1 to {max} tokens; give the block size that the engine runs with",
    max = BlockSize::TOKENS_MAX
)]
pub struct BlockSizeError {
    /// Number of tokens that was refused: 0, or above the maximum.
    pub tokens: u32,
}

/// The seed of every block hash of one cache.
///
/// Caches that must not share blocks (another LoRA adapter, another tenant's salt) have different seeds, and
/// so different block hashes for the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(transparent)]
pub struct HashSeed(u64);

impl HashSeed {
    /// The seed for a cache without adapter and salt. Every step of the sequence hash uses this seed too.
    pub(super) const BASE: u64 = 1337;
    const LORA_NAME_SEED: u64 = 0;
    const CACHE_SALT_SEED: u64 = 1;

    /// Returns the seed of the cache that serves LoRA adapter `lora_name` under `cache_salt`.
    ///
    /// The seed is `1337 + XXH3-64(lora_name, seed 0) + XXH3-64(cache_salt, seed 1)`, wrapping. An absent or empty
    /// string adds nothing: without an adapter or a salt, some engines send an empty string and others send none.
    pub fn for_cache(lora_name: Option<&str>, cache_salt: Option<&str>) -> Self {
        let term = |text: Option<&str>, seed| match text {
            None | Some("") => 0,
            Some(text) => xxh3_64_with_seed(text.as_bytes(), seed),
        };
        Self(
            Self::BASE
                .wrapping_add(term(lora_name, Self::LORA_NAME_SEED))
                .wrapping_add(term(cache_salt, Self::CACHE_SALT_SEED)),
        )
    }

    /// The seed as a plain integer.
    #[inline]
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl Default for HashSeed {
    fn default() -> Self {
        Self(Self::BASE)
    }
}

/// Hash of the tokens of one block.
///
/// Hashes all of `tokens`, however many there are. The caller makes sure that they fill one block. [`block_hashes`]
/// splits a longer list.
///
/// A little-endian machine hashes the tokens in place, without a copy.
#[inline]
pub fn block_hash(tokens: &[Token], seed: HashSeed) -> BlockHash {
    BlockHash(if cfg!(target_endian = "little") {
        xxh3_64_with_seed(bytemuck::cast_slice(tokens), seed.0)
    } else {
        hash_streamed(tokens, seed)
    })
}

/// Hash of the tokens of one block together with the other objects that its cache depends on, such as images. Each
/// object is given by its hash.
///
/// The input of the hash is the tokens, followed by the object hashes as little-endian u64 in the given order. The
/// contract demands ascending order. Without any object, the result is that of [`block_hash`].
pub fn block_hash_with(
    tokens: &[Token],
    objects: impl IntoIterator<Item = u64>,
    seed: HashSeed,
) -> BlockHash {
    let mut hasher = Xxh3::with_seed(seed.0);
    tokens
        .iter()
        .for_each(|token| hasher.update(&token.to_le_bytes()));
    objects
        .into_iter()
        .for_each(|object| hasher.update(&object.to_le_bytes()));
    BlockHash(hasher.digest())
}

/// Hash of an object on which a block depends in addition to its tokens, such as an image. It is XXH3-64 with seed 0
/// over the bytes that identify the object.
pub fn object_hash(identifier: &[u8]) -> u64 {
    xxh3_64(identifier)
}

/// Hashes of the full blocks of `tokens`, in order. A tail that does not fill a block gets no hash.
pub fn block_hashes(
    tokens: &[Token],
    block_size: BlockSize,
    seed: HashSeed,
) -> impl ExactSizeIterator<Item = BlockHash> {
    tokens
        .chunks_exact(block_size.as_usize())
        .map(move |block| block_hash(block, seed))
}

/// Hash of `tokens`, computed on a big-endian machine. The function first swaps the bytes of the tokens, in a buffer
/// that fits in the first-level cache.
fn hash_streamed(tokens: &[Token], seed: HashSeed) -> u64 {
    const CHUNK_TOKENS: usize = 256;
    let mut hasher = Xxh3::with_seed(seed.0);
    let mut buffer = [0; CHUNK_TOKENS * TOKEN_BYTES];
    for chunk in tokens.chunks(CHUNK_TOKENS) {
        hasher.update(little_endian(chunk, &mut buffer));
    }
    hasher.digest()
}

/// Writes `tokens` as little-endian bytes to the front of `buffer` and returns the written part. The caller provides
/// a buffer that is large enough.
#[inline]
fn little_endian<'buffer>(tokens: &[Token], buffer: &'buffer mut [u8]) -> &'buffer [u8] {
    debug_assert!(tokens.len() * TOKEN_BYTES <= buffer.len());
    let written = (tokens.len() * TOKEN_BYTES).min(buffer.len());
    let (cells, _) = buffer.as_chunks_mut::<TOKEN_BYTES>();
    for (cell, token) in cells.iter_mut().zip(tokens) {
        *cell = token.to_le_bytes();
    }
    &buffer[..written]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hashes(last_token: Token, block_size: u32, seed: HashSeed) -> Vec<u64> {
        let tokens: Vec<Token> = (1..=last_token).collect();
        let block_size = BlockSize::new(block_size).unwrap();
        block_hashes(&tokens, block_size, seed)
            .map(BlockHash::as_u64)
            .collect()
    }

    #[test]
    fn block_hashes_match_the_contract_vectors() {
        let plain = HashSeed::default();
        assert_eq!(
            hashes(32, 16, plain),
            [0xea06_fc71_a5ee_6e88, 0x1fbf_39bd_106b_e0b5]
        );
        assert_eq!(
            hashes(8, 4, plain),
            [0xcb38_e4d7_fb2d_ca5c, 0xe8d3_ec39_b907_b74c]
        );
    }

    #[test]
    fn seeds_match_the_contract_vectors() {
        let lora = HashSeed::for_cache(Some("my-lora"), None);
        assert_eq!(lora.as_u64(), 0xb204_1cc4_5cbc_fedd);
        assert_eq!(
            hashes(32, 16, lora),
            [0x3990_f1b1_4309_d7e6, 0x27c8_09c2_2da9_1b94]
        );
        let salt = HashSeed::for_cache(None, Some("tenant-a"));
        assert_eq!(
            hashes(32, 16, salt),
            [0x7174_2dfe_d906_82a9, 0xb7db_648a_a3df_b040]
        );
        let both = HashSeed::for_cache(Some("my-lora"), Some("tenant-a"));
        assert_eq!(hashes(32, 16, both).first(), Some(&0x12ed_440c_ccc3_8cf3));
    }

    #[test]
    fn absent_and_empty_names_add_nothing() {
        assert_eq!(HashSeed::default().as_u64(), 1337);
        for name in [None, Some("")] {
            for salt in [None, Some("")] {
                assert_eq!(HashSeed::for_cache(name, salt), HashSeed::default());
            }
        }
        assert_ne!(
            HashSeed::for_cache(Some("x"), None),
            HashSeed::for_cache(None, Some("x"))
        );
    }

    #[test]
    fn block_size_bounds() {
        assert_eq!(BlockSize::new(0), Err(BlockSizeError { tokens: 0 }));
        assert_eq!(BlockSize::new(65_537), Err(BlockSizeError { tokens: 65_537 }));
        assert_eq!(BlockSize::new(1).unwrap().as_usize(), 1);
        assert_eq!(BlockSize::new(65_536).unwrap().as_u32(), 65_536);
        let refused = serde_json::from_str::<BlockSize>("0").unwrap_err().to_string();
        let error = BlockSizeError { tokens: 0 }.to_string();
        assert!(refused.starts_with(&error), "{refused}");
        assert_eq!(serde_json::from_str::<BlockSize>("16").unwrap().to_string(), "16");
    }

    #[test]
    fn the_tail_has_no_hash() {
        assert_eq!(hashes(31, 16, HashSeed::default()), [0xea06_fc71_a5ee_6e88]);
        assert!(hashes(15, 16, HashSeed::default()).is_empty());
        assert!(hashes(0, 1, HashSeed::default()).is_empty());
    }

    proptest! {
        /// Checks that the hash of any number of tokens equals XXH3-64 over the tokens' little-endian bytes.
        #[test]
        fn every_length_hashes_the_little_endian_bytes(
            tokens in prop_oneof![
                prop::collection::vec(any::<Token>(), 0..300),
                prop::collection::vec(any::<Token>(), 300..2_000),
            ],
            seed: u64,
        ) {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            prop_assert_eq!(block_hash(&tokens, HashSeed(seed)).as_u64(), xxh3_64_with_seed(&bytes, seed));
        }

        #[test]
        fn objects_follow_the_tokens(
            tokens in prop::collection::vec(any::<Token>(), 0..300),
            objects in prop::collection::vec(any::<u64>(), 0..5),
            seed: u64,
        ) {
            let mut bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            bytes.extend(objects.iter().flat_map(|object| object.to_le_bytes()));
            let hash = block_hash_with(&tokens, objects.iter().copied(), HashSeed(seed));
            prop_assert_eq!(hash.as_u64(), xxh3_64_with_seed(&bytes, seed));
            if objects.is_empty() {
                prop_assert_eq!(hash, block_hash(&tokens, HashSeed(seed)));
            }
        }

        #[test]
        fn blocks_are_hashed_apart(
            tokens in prop::collection::vec(any::<Token>(), 0..200),
            size in 1_u32..40,
        ) {
            let block_size = BlockSize::new(size).unwrap();
            let hashes = block_hashes(&tokens, block_size, HashSeed::default());
            prop_assert_eq!(hashes.len(), tokens.len() / block_size.as_usize());
            for (index, hash) in hashes.enumerate() {
                let start = index * block_size.as_usize();
                let block = &tokens[start..start + block_size.as_usize()];
                prop_assert_eq!(hash, block_hash(block, HashSeed::default()));
            }
        }
    }
}
