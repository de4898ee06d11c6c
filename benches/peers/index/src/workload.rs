//! Sequences of blocks that are stored and asked for, made from numbers alone, so that every run has the same.

use std::ops::Range;

use kvatlas_core::hash::{BlockHash, HashSeed, block_hash, sequence_hashes};

/// Tokens in a block.
pub const BLOCK_TOKENS: usize = 16;

/// A source that no layout stores; each number above it makes content of its own.
pub const FRESH: u64 = 1 << 40;

/// A stretch of blocks of one source. Two prompts that name the same stretch have the same tokens there.
#[derive(Debug, Clone)]
pub struct Segment {
    /// Which content.
    pub source: u64,
    /// Which of its blocks.
    pub blocks: Range<u32>,
}

/// A sequence of blocks, by every kind of hash.
#[derive(Debug, Clone)]
pub struct Prompt {
    segments: Vec<Segment>,
    /// Block hashes.
    pub blocks: Vec<u64>,
    /// Sequence hashes.
    pub sequence: Vec<u64>,
}

impl Prompt {
    /// The blocks of all segments, one after another.
    pub fn new(segments: Vec<Segment>) -> Self {
        let seed = HashSeed::default();
        let named = segments
            .iter()
            .flat_map(|segment| segment.blocks.clone().map(|block| (segment.source, block)));
        let blocks: Vec<BlockHash> = named
            .map(|(source, block)| block_hash(&block_tokens(source, block), seed))
            .collect();
        let sequence = sequence_hashes(blocks.iter().copied())
            .map(|hash| hash.as_u64())
            .collect();
        Self {
            segments,
            blocks: blocks.iter().map(|hash| hash.as_u64()).collect(),
            sequence,
        }
    }

    /// The tokens behind the hashes.
    pub fn tokens(&self) -> Vec<u32> {
        let named = self
            .segments
            .iter()
            .flat_map(|segment| segment.blocks.clone().map(|block| (segment.source, block)));
        named
            .flat_map(|(source, block)| block_tokens(source, block))
            .collect()
    }

    /// How many blocks.
    pub fn len(&self) -> u32 {
        u32::try_from(self.blocks.len()).expect("no scenario is that deep")
    }

    /// The first `depth` blocks.
    pub fn prefix(&self, depth: u32) -> Self {
        let mut left = depth;
        let mut segments = Vec::new();
        for Segment { source, blocks } in &self.segments {
            let taken = left.min(blocks.end - blocks.start);
            segments.push(Segment {
                source: *source,
                blocks: blocks.start..blocks.start + taken,
            });
            left -= taken;
        }
        Self {
            segments,
            blocks: self.blocks[..depth as usize].to_vec(),
            sequence: self.sequence[..depth as usize].to_vec(),
        }
    }

    /// The first half, and then content that nobody holds.
    pub fn with_fresh_half(&self, source: u64) -> Self {
        let half = self.len() / 2;
        let mut segments = self.prefix(half).segments;
        segments.push(Segment {
            source,
            blocks: 0..self.len() - half,
        });
        Self::new(segments)
    }
}

fn block_tokens(source: u64, block: u32) -> [u32; BLOCK_TOKENS] {
    let key = mix(mix(source) ^ u64::from(block));
    std::array::from_fn(|token| {
        let mixed = mix(key ^ token as u64);
        // Below 2^17, as a vocabulary is.
        u32::try_from(mixed >> 47).expect("17 bits are left")
    })
}

/// A bijection that scatters (the finaliser of splitmix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The numbers from 0 to `count` − 1 in an order that depends on `seed` alone.
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_unstable_by_key(|&number| mix(mix(seed) ^ number as u64));
    order
}

/// Way in which workers share sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Every sequence has one holder and nothing in common with another.
    Distinct,
    /// Eight sequences, each with a holder of its own, have the first half in common.
    EightShareHalf,
    /// Every sequence is held by eight workers.
    EightShareAll,
    /// Every sequence is held by all workers.
    AllShareAll,
}

/// How an index is filled.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Name in the tables.
    pub name: &'static str,
    /// Blocks held, summed over all workers.
    pub blocks: u32,
    /// Blocks in a sequence.
    pub depth: u32,
    /// Workers.
    pub workers: u32,
    /// Way in which workers share sequences.
    pub sharing: Sharing,
}

impl Layout {
    /// How many sequences there are.
    pub fn sequences(&self) -> u32 {
        match self.sharing {
            Sharing::Distinct | Sharing::EightShareHalf => self.blocks / self.depth,
            Sharing::EightShareAll => self.blocks / self.depth / 8,
            Sharing::AllShareAll => (self.blocks / self.depth / self.workers).max(1),
        }
    }

    /// The sequence called `number`.
    pub fn prompt(&self, number: u32) -> Prompt {
        let own = |blocks| Segment {
            source: u64::from(number) + 1,
            blocks,
        };
        let segments = match self.sharing {
            Sharing::Distinct | Sharing::EightShareAll | Sharing::AllShareAll => vec![own(0..self.depth)],
            Sharing::EightShareHalf => {
                let shared = Segment {
                    source: (1 << 32) + u64::from(number / 8),
                    blocks: 0..self.depth / 2,
                };
                vec![shared, own(self.depth / 2..self.depth)]
            }
        };
        Prompt::new(segments)
    }

    /// Returns the holders of the sequence called `number`.
    pub fn holders(&self, number: u32) -> Range<u32> {
        match self.sharing {
            Sharing::Distinct | Sharing::EightShareHalf => {
                let holder = number % self.workers;
                holder..holder + 1
            }
            Sharing::EightShareAll => {
                let first = number * 8 % self.workers;
                first..first + 8
            }
            Sharing::AllShareAll => 0..self.workers,
        }
    }

    /// Every (sequence, holder) there is.
    pub fn holdings(&self) -> Vec<(u32, u32)> {
        (0..self.sequences())
            .flat_map(|number| self.holders(number).map(move |holder| (number, holder)))
            .collect()
    }
}

/// Part of a query that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All of it.
    Hit,
    /// The first half.
    Partial,
    /// Nothing.
    Miss,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Hit, Self::Partial, Self::Miss];

    /// The word in the tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Partial => "partial",
            Self::Miss => "miss",
        }
    }

    /// The question of this kind about the stored `prompt`; `number` makes fresh content its own.
    pub fn ask(self, prompt: &Prompt, number: u32) -> Prompt {
        let source = FRESH + u64::from(number);
        match self {
            Self::Hit => prompt.clone(),
            Self::Partial => prompt.with_fresh_half(source),
            Self::Miss => Prompt::new(vec![Segment {
                source,
                blocks: 0..prompt.len(),
            }]),
        }
    }
}
