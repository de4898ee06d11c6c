//! Events, queries and answers, which the indexes of `dynamo-kv-router` have in common.

use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
    compute_block_hash_for_seq,
};

use super::{Form, Run, Shape};
use crate::workload::{BLOCK_TOKENS, Prompt};

/// Shapes of answers of every index of `dynamo-kv-router`: each returns a map.
pub const SHAPES: &[(Shape, &str)] = &[(Shape::List, "map")];

/// Query by block hashes, or by tokens that are hashed within the timed search.
pub enum Query {
    /// Block hashes of the prompt.
    Blocks(Vec<LocalBlockHash>),
    /// Tokens of the prompt.
    Tokens(Vec<u32>),
}

impl Query {
    /// Makes the query for `prompt`.
    pub fn new(form: Form, prompt: &Prompt) -> Self {
        match form {
            Form::Native | Form::BlockHashes => {
                Self::Blocks(prompt.blocks.iter().copied().map(LocalBlockHash).collect())
            }
            Form::Tokens => Self::Tokens(prompt.tokens()),
        }
    }

    /// Takes the block hashes out of the query, for an index that consumes them. If the query has tokens, hashes them
    /// in this call.
    pub fn take_hashes(&mut self) -> Vec<LocalBlockHash> {
        match self {
            Self::Blocks(hashes) => std::mem::take(hashes),
            Self::Tokens(tokens) => hash_tokens(tokens),
        }
    }

    /// Calls `search` with the block hashes, for an index that does not consume them. If the query has tokens, hashes
    /// them in this call.
    pub fn with_hashes<R>(&self, search: impl FnOnce(&[LocalBlockHash]) -> R) -> R {
        match self {
            Self::Blocks(hashes) => search(hashes),
            Self::Tokens(tokens) => search(&hash_tokens(tokens)),
        }
    }
}

fn hash_tokens(tokens: &[u32]) -> Vec<LocalBlockHash> {
    let block_tokens = u32::try_from(BLOCK_TOKENS).expect("a block is small");
    compute_block_hash_for_seq(tokens, block_tokens, BlockHashOptions::default())
}

/// Returns the holders with their matched blocks, ordered by holder.
pub fn sorted(scores: &OverlapScores) -> Vec<(u32, u32)> {
    let mut answer: Vec<(u32, u32)> = scores
        .scores
        .iter()
        .map(|(worker, &depth)| {
            let worker = u32::try_from(worker.worker_id).expect("`stored` has made it of 32 bits");
            (worker, depth)
        })
        .collect();
    answer.sort_unstable();
    answer
}

/// Makes the event that `worker` has stored a run of blocks.
pub fn stored(worker: u32, run: Run<'_>) -> RouterEvent {
    let pairs = run.sequence.iter().zip(run.blocks);
    let blocks = pairs.map(|(&sequence, &block)| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(sequence),
        tokens_hash: LocalBlockHash(block),
        mm_extra_info: None,
    });
    event(
        worker,
        KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: run.parent.map(ExternalSequenceBlockHash),
            start_position: Some(run.position),
            blocks: blocks.collect(),
        }),
    )
}

/// Makes the event that `worker` has removed blocks.
pub fn removed(worker: u32, sequence: &[u64]) -> RouterEvent {
    let block_hashes = sequence.iter().copied().map(ExternalSequenceBlockHash).collect();
    event(
        worker,
        KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }),
    )
}

fn event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    let event = KvCacheEvent {
        event_id: 0,
        data,
        dp_rank: 0,
    };
    RouterEvent::new(u64::from(worker), event)
}
