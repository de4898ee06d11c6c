//! `kv_index::ChainIndex`: runs of blocks, each with the holders that cover it. Searches walk by block hash.

use std::hint::black_box;
use std::sync::Arc;

use kv_index::{
    ChainBlockMap, ChainIndex as Index, ContentHash, SequenceHash, StoredBlock,
    compute_request_content_hashes,
};

use super::{ByWorker, Contender, Form, Reader, Run, Shape, TwoLanes, Writer};
use crate::measure::{Applied, Timing, apply_here};
use crate::workload::{BLOCK_TOKENS, Prompt};

/// `kv_index::ChainIndex` as a contender.
pub struct ChainIndex;

/// The index, and a map of each worker's own blocks. The index gives out worker ids in order, so a worker's number is
/// its id.
pub struct Lanes {
    index: Arc<Index>,
    maps: ByWorker<ChainBlockMap>,
}

/// Query by block hashes, or by tokens that are hashed within the timed search.
pub enum Query {
    /// Block hashes of the prompt.
    Blocks(Vec<ContentHash>),
    /// Tokens of the prompt.
    Tokens(Vec<u32>),
}

/// Event of one worker.
pub enum Event {
    /// Stores blocks after a parent.
    Stored(u32, Option<SequenceHash>, Vec<StoredBlock>),
    /// Removes blocks, given by sequence hash.
    Removed(u32, Vec<SequenceHash>),
}

impl Contender for ChainIndex {
    const NAME: &'static str = "ChainIndex";
    type Reader = Arc<Index>;
    type Writer = Lanes;
    // This limit is set by `ChainIndex::new`.
    const WORKERS_MAX: u32 = 256;

    fn build(workers: u32) -> (Self::Reader, Self::Writer) {
        let index = Arc::new(Index::new());
        for number in 0..workers {
            let id = index.intern_worker(&number.to_string());
            assert_eq!(
                id,
                Ok(number),
                "ids are given out in order, up to the 256 of the default"
            );
        }
        let maps = ByWorker::of_all((0..workers).map(|_| ChainBlockMap::new()));
        let lanes = Lanes {
            index: Arc::clone(&index),
            maps,
        };
        (index, lanes)
    }
}

impl Reader for Arc<Index> {
    type Query = Query;

    const SHAPES: &'static [(Shape, &'static str)] = &[(Shape::Lean, "callback"), (Shape::List, "map")];

    fn query(form: Form, prompt: &Prompt) -> Query {
        match form {
            Form::Native | Form::BlockHashes => {
                Query::Blocks(prompt.blocks.iter().copied().map(ContentHash).collect())
            }
            Form::Tokens => Query::Tokens(prompt.tokens()),
        }
    }

    fn find(&self, query: &mut Query, shape: Shape) -> usize {
        with_hashes(query, |hashes| match shape {
            Shape::Lean => {
                let mut sum = 0;
                self.score_into(
                    hashes,
                    |hash| hash.0,
                    false,
                    |worker, depth| sum += (worker ^ depth) as usize,
                );
                sum
            }
            Shape::List => black_box(self.find_matches(hashes, false)).scores.len(),
        })
    }

    fn answer(&self, query: &mut Query, shape: Shape) -> Vec<(u32, u32)> {
        let mut answer: Vec<(u32, u32)> = with_hashes(query, |hashes| match shape {
            Shape::Lean => {
                let mut answer = Vec::new();
                self.score_into(
                    hashes,
                    |hash| hash.0,
                    false,
                    |worker, depth| answer.push((worker, depth)),
                );
                answer
            }
            Shape::List => self.find_matches(hashes, false).scores.into_iter().collect(),
        });
        answer.sort_unstable();
        answer
    }
}

fn with_hashes<R>(query: &Query, search: impl FnOnce(&[ContentHash]) -> R) -> R {
    match query {
        Query::Blocks(hashes) => search(hashes),
        Query::Tokens(tokens) => search(&compute_request_content_hashes(tokens, BLOCK_TOKENS)),
    }
}

impl Writer for Lanes {
    type Event = Event;

    fn stored(worker: u32, run: Run<'_>) -> Event {
        let pairs = run.sequence.iter().zip(run.blocks);
        let blocks = pairs.map(|(&sequence, &block)| StoredBlock {
            seq_hash: SequenceHash(sequence),
            content_hash: ContentHash(block),
        });
        Event::Stored(worker, run.parent.map(SequenceHash), blocks.collect())
    }

    fn removed(worker: u32, sequence: &[u64]) -> Event {
        Event::Removed(worker, sequence.iter().copied().map(SequenceHash).collect())
    }

    fn apply(&mut self, events: Vec<Event>, timing: Timing) -> Applied {
        apply_here(events, timing, |event| match event {
            Event::Stored(worker, parent, blocks) => {
                let map = self.maps.of(worker);
                self.index.apply_stored(worker, &blocks, parent, map).is_ok()
            }
            Event::Removed(worker, hashes) => {
                let map = self.maps.of(worker);
                self.index.apply_removed(worker, &hashes, map);
                true
            }
        })
    }
}

impl TwoLanes for Lanes {
    fn split(self) -> [Self; 2] {
        let index = self.index;
        self.maps.split().map(|maps| Self {
            index: Arc::clone(&index),
            maps,
        })
    }
}
