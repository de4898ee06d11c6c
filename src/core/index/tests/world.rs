//! Prompts of a test: chains of blocks that share prefixes. The test computes all their hashes itself, without the
//! code under test.

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::hash::{BlockHash, PositionalLineageHash, SequenceHash, Token};
use crate::wire::{BlockNames, Event, QueryKey, Resumable, StoredBlocks};

use kvatlas_lab::random::Random;

/// Number of tokens in a block of these tests.
pub(super) const BLOCK_SIZE: u32 = 4;

const SEED: u64 = 1337;

/// A block in the form that the oracle uses: position, parent fragment (none at position 0), current fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PlainKey {
    pub(super) position: u64,
    pub(super) parent: Option<u64>,
    pub(super) current: u64,
}

/// Number of bits of a lineage hash's fragment at this position, from the table of the lineage hash's layout.
fn fragment_bits(position: u64) -> u32 {
    match position {
        0..=255 => 59,
        256..=65_535 => 55,
        _ => 51,
    }
}

fn low_bits(value: u64, bits: u32) -> u64 {
    value & (u64::MAX >> (64 - bits))
}

impl PlainKey {
    /// Key of the block with sequence hash `current` that follows the block with sequence hash `parent`.
    pub(super) fn new(position: u64, parent: Option<u64>, current: u64) -> Self {
        Self {
            position,
            parent: parent.map(|parent| low_bits(parent, fragment_bits(position))),
            current: low_bits(current, fragment_bits(position + 1)),
        }
    }

    /// Returns the keys of consecutive blocks with these sequence hashes.
    pub(super) fn run(position: u64, parent: Option<u64>, hashes: &[u64]) -> Vec<Self> {
        let mut before = parent;
        let mut keys = Vec::with_capacity(hashes.len());
        for (position, hash) in (position..).zip(hashes) {
            keys.push(Self::new(position, before, *hash));
            before = Some(*hash);
        }
        keys
    }

    pub(super) fn lineage(self) -> PositionalLineageHash {
        PositionalLineageHash::new(
            SequenceHash(self.current),
            self.parent.map(SequenceHash),
            self.position,
        )
        .unwrap()
    }
}

impl From<PositionalLineageHash> for PlainKey {
    fn from(key: PositionalLineageHash) -> Self {
        Self {
            position: key.position(),
            parent: (key.position() > 0).then(|| key.parent_hash_fragment()),
            current: key.current_hash_fragment(),
        }
    }
}

/// Returns the tokens of the block that `symbol` stands for.
pub(super) fn tokens_of(symbol: u32) -> Vec<Token> {
    (0..BLOCK_SIZE).map(|offset| symbol * 31 + offset).collect()
}

/// Returns the hash of the block that `symbol` stands for.
pub(super) fn block_hash_of(symbol: u32) -> u64 {
    block_hash_of_tokens(&tokens_of(symbol))
}

pub(super) fn block_hash_of_tokens(tokens: &[Token]) -> u64 {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, SEED)
}

/// Returns the sequence hash of the block `block` that follows `parent`.
pub(super) fn next_hash(parent: Option<u64>, block: u64) -> u64 {
    let Some(parent) = parent else { return block };
    let bytes = [parent.to_le_bytes(), block.to_le_bytes()].concat();
    xxh3_64_with_seed(&bytes, SEED)
}

/// Returns an event that stores blocks given only by their lineage hashes.
pub(super) fn stored_by_lineage(keys: Vec<PositionalLineageHash>) -> Event {
    Event::Stored(StoredBlocks {
        names: BlockNames::Lineage(keys),
        content: None,
        engine_hashes: None,
        resumable: Resumable::ALL,
    })
}

/// One prompt.
#[derive(Debug, Clone)]
pub(super) struct Path {
    pub(super) symbols: Vec<u32>,
    pub(super) blocks: Vec<u64>,
    /// Sequence hashes of the prompt's blocks, in the contract's rolling chain.
    pub(super) chain: Vec<u64>,
    pub(super) keys: Vec<PlainKey>,
}

impl Path {
    fn new(symbols: Vec<u32>, block_hashes: &HashMap<u32, u64>) -> Self {
        let blocks: Vec<u64> = symbols.iter().map(|symbol| block_hashes[symbol]).collect();
        let mut chain: Vec<u64> = Vec::with_capacity(blocks.len());
        for block in &blocks {
            chain.push(next_hash(chain.last().copied(), *block));
        }
        let keys = PlainKey::run(0, None, &chain);
        Self {
            symbols,
            blocks,
            chain,
            keys,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.symbols.len()
    }

    /// Returns the prompt as a query, in each of the four forms of a query.
    pub(super) fn queries(&self) -> [QueryKey; 4] {
        [
            QueryKey::Tokens {
                tokens: self
                    .symbols
                    .iter()
                    .flat_map(|symbol| tokens_of(*symbol))
                    .collect(),
                lora_name: None,
                cache_salt: None,
            },
            QueryKey::BlockHashes(self.blocks.iter().copied().map(BlockHash).collect()),
            QueryKey::SequenceHashes(self.chain.iter().copied().map(SequenceHash).collect()),
            QueryKey::LineageHashes(self.keys.iter().map(|key| key.lineage()).collect()),
        ]
    }
}

/// Pool of prompts. Many of them share a prefix, and many have the same block hash at the same position after
/// different prefixes.
#[derive(Debug)]
pub(super) struct World {
    pub(super) paths: Vec<Path>,
    alphabet: u32,
    block_hashes: HashMap<u32, u64>,
}

impl World {
    /// Makes `paths` random prompts of up to `depth_max` blocks each, from `alphabet` different blocks.
    pub(super) fn new(random: &mut Random, paths: usize, depth_max: usize, alphabet: u32) -> Self {
        let block_hashes = (0..alphabet)
            .map(|symbol| (symbol, block_hash_of(symbol)))
            .collect();
        let mut world = Self {
            paths: Vec::new(),
            alphabet,
            block_hashes,
        };
        for _ in 0..paths {
            let path = world.branch(random, depth_max);
            world.paths.push(path);
        }
        world
    }

    fn symbol(&self, random: &mut Random) -> u32 {
        u32::try_from(random.below(self.alphabet as usize)).unwrap()
    }

    /// Makes a prompt that usually shares a prefix with a prompt of the pool.
    pub(super) fn branch(&self, random: &mut Random, depth_max: usize) -> Path {
        let mut symbols = Vec::new();
        if !self.paths.is_empty() && random.chance(80) {
            let other = &self.paths[random.below(self.paths.len())].symbols;
            symbols.extend_from_slice(&other[..random.below(other.len() + 1)]);
        }
        let depth = 1 + random.below(depth_max);
        while symbols.len() < depth {
            symbols.push(self.symbol(random));
        }
        // Now and then one block in the middle differs, and all that follow are the same blocks under another prefix.
        if random.chance(30) {
            let place = random.below(symbols.len());
            symbols[place] = self.symbol(random);
        }
        Path::new(symbols, &self.block_hashes)
    }
}

#[test]
fn the_test_hashes_match_the_contract_vectors() {
    let tokens: Vec<Token> = (1..=8).collect();
    let (first, second) = (
        block_hash_of_tokens(&tokens[..4]),
        block_hash_of_tokens(&tokens[4..]),
    );
    assert_eq!((first, second), (0xcb38_e4d7_fb2d_ca5c, 0xe8d3_ec39_b907_b74c));
    assert_eq!(next_hash(Some(first), second), 0x44a2_b237_9d6d_3c3d);
    let lineage = |position| {
        let key = PlainKey::new(position, Some(0x0123_4567_89ab_cdef), 0xfedc_ba98_7654_3210);
        assert_eq!(PlainKey::from(key.lineage()), key);
        format!("{:032x}", key.lineage().as_u128())
    };
    assert_eq!(lineage(255), "3fc91a2b3c4d5e6f785cba9876543210");
    assert_eq!(lineage(256), "404011a2b3c4d5e6f7dcba9876543210");
}
