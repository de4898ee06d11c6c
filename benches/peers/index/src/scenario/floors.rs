//! Cost of hashing alone: the part of a search from block hashes or tokens that no index can save.

use std::hint::black_box;
use std::time::Instant;

use dynamo_kv_router::protocols::{BlockHashOptions, compute_block_hash_for_seq};
use kvatlas_core::hash::{BlockHash, BlockSize, HashSeed, block_hashes, sequence_hashes};

use crate::contender::{ChainIndex, CompressedTree, Contender, Kvatlas};
use crate::measure::{Spread, timer_cost_ns};
use crate::report::{Column, Ledger};
use crate::workload::{BLOCK_TOKENS, Prompt, Segment};

use super::Effort;

const DEPTH: u32 = 1024;
const SAMPLES: usize = 200;

/// Figure: nanoseconds of the sequence hashes over 1024 block hashes.
pub const ROLLING: &str = "floor, rolling hash";
/// Figure: nanoseconds of hashing the tokens of 1024 blocks.
const TOKENS: &str = "floor, block hashes";

/// Measures the hash functions of every project with the same tokens.
pub fn run(effort: Effort, ledger: &mut Ledger) {
    let prompt = Prompt::new(vec![Segment {
        source: 1,
        blocks: 0..DEPTH,
    }]);
    let tokens = prompt.tokens();
    let blocks: Vec<BlockHash> = prompt.blocks.iter().copied().map(BlockHash).collect();
    let block_tokens = u32::try_from(BLOCK_TOKENS).expect("a block is small");
    let block_size = BlockSize::new(block_tokens).expect("the size is in the range");
    for _ in 0..effort.repetitions {
        let rolling = time(|| sequence_hashes(blocks.iter().copied()).collect::<Vec<_>>());
        ledger.record(ROLLING, Kvatlas::NAME, rolling);
        let ours = time(|| block_hashes(&tokens, block_size, HashSeed::default()).collect::<Vec<_>>());
        ledger.record(TOKENS, Kvatlas::NAME, ours);
        let chain = time(|| kv_index::compute_request_content_hashes(&tokens, BLOCK_TOKENS));
        ledger.record(TOKENS, ChainIndex::NAME, chain);
        let dynamo = time(|| compute_block_hash_for_seq(&tokens, block_tokens, BlockHashOptions::default()));
        ledger.record(TOKENS, CompressedTree::NAME, dynamo);
    }
}

fn time<R>(work: impl Fn() -> R) -> f64 {
    let times: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let started = Instant::now();
            black_box(work());
            started.elapsed().as_nanos() as f64 - timer_cost_ns()
        })
        .collect();
    Spread::of(&times).map_or(f64::NAN, |spread| spread.median)
}

/// Prints the table of the scenario.
pub fn print(ledger: &Ledger) {
    let columns = [
        Column::new("rolling chain over block hashes, ns", ROLLING),
        Column::new("block hashes of tokens, ns", TOKENS),
    ];
    let names = [Kvatlas::NAME, ChainIndex::NAME, CompressedTree::NAME].map(str::to_owned);
    ledger.print("A. Hashing alone, 1024 blocks in cache", &names, &columns);
}
