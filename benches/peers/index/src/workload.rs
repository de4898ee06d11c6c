//! Sequences of blocks that are stored and queried. All sequences are made from numbers alone, so every run has the
//! same sequences.

use std::ops::Range;

use kvatlas_core::hash::{BlockHash, HashSeed, block_hash, sequence_hashes};

/// Number of tokens in a block.
pub const BLOCK_TOKENS: usize = 16;

/// Number of the first content that no layout stores. Each number from here on stands for content of its own.
pub const FRESH: u64 = 1 << 40;

/// Stretch of blocks of one content. Two prompts with the same stretch have the same tokens there.
#[derive(Debug, Clone)]
pub struct Segment {
    /// Number of the content.
    pub source: u64,
    /// Range of blocks within the content.
    pub blocks: Range<u32>,
}

/// Sequence of blocks, with its hashes of every kind.
#[derive(Debug, Clone)]
pub struct Prompt {
    segments: Vec<Segment>,
    /// Block hashes of the sequence.
    pub blocks: Vec<u64>,
    /// Sequence hashes of the sequence.
    pub sequence: Vec<u64>,
}

impl Prompt {
    /// Makes a prompt of the blocks of all segments, one after another.
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

    /// Returns the tokens of the prompt.
    pub fn tokens(&self) -> Vec<u32> {
        let named = self
            .segments
            .iter()
            .flat_map(|segment| segment.blocks.clone().map(|block| (segment.source, block)));
        named
            .flat_map(|(source, block)| block_tokens(source, block))
            .collect()
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> u32 {
        u32::try_from(self.blocks.len()).expect("no scenario is that deep")
    }

    /// Returns a prompt of the first `depth` blocks.
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

    /// Returns a prompt with the first half of this prompt, followed by the content `source`, which no worker holds.
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
        // The tokens are below 2^17, the size of a large vocabulary.
        u32::try_from(mixed >> 47).expect("17 bits are left")
    })
}

/// Maps a number to another, one to one and without a pattern (the last step of SplitMix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns the numbers from 0 to `count` − 1, in an order that depends only on `seed`.
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_unstable_by_key(|&number| mix(mix(seed) ^ number as u64));
    order
}

/// Way in which workers share sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Every sequence has one holder, and shares nothing with other sequences.
    Distinct,
    /// Eight sequences, each with a holder of its own, share their first half.
    EightShareHalf,
    /// Every sequence has eight holders.
    EightShareAll,
    /// Every sequence is held by all workers.
    AllShareAll,
}

/// Way in which an index is filled.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Name of the layout in the tables.
    pub name: &'static str,
    /// Number of held blocks, summed over all workers.
    pub blocks: u32,
    /// Number of blocks in a sequence.
    pub depth: u32,
    /// Number of workers.
    pub workers: u32,
    /// Way in which workers share sequences.
    pub sharing: Sharing,
}

impl Layout {
    /// Returns the number of sequences.
    pub fn sequences(&self) -> u32 {
        match self.sharing {
            Sharing::Distinct | Sharing::EightShareHalf => self.blocks / self.depth,
            Sharing::EightShareAll => self.blocks / self.depth / 8,
            Sharing::AllShareAll => (self.blocks / self.depth / self.workers).max(1),
        }
    }

    /// Returns the sequence with this number.
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

    /// Returns the holders of the sequence with this number.
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

    /// Returns all pairs of a sequence and its holder.
    pub fn holdings(&self) -> Vec<(u32, u32)> {
        (0..self.sequences())
            .flat_map(|number| self.holders(number).map(move |holder| (number, holder)))
            .collect()
    }
}

/// Part of a query's prompt that workers hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The whole prompt.
    Hit,
    /// The first half of the prompt.
    Partial,
    /// No block of the prompt.
    Miss,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Hit, Self::Partial, Self::Miss];

    /// Returns the word for the kind in the tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Partial => "partial",
            Self::Miss => "miss",
        }
    }

    /// Returns a query of this kind, made from the stored `prompt`. If the query needs blocks that no worker holds,
    /// `number` selects them.
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
