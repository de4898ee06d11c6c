//! `dynamo_kv_router::PositionalIndexer`: one entry for each pair of a position and a block hash. Searches go in
//! strides or by bisection.

use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::Arc;

use dynamo_kv_router::PositionalIndexer;
use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::indexer::positional::{LevelIndex, SearchMode};
use dynamo_kv_router::protocols::{RouterEvent, WorkerWithDpRank};
use rustc_hash::FxHashMap;

use super::dynamo_event::{self, Query};
use super::{Contender, Form, Reader, Run, Shape, Writer};
use crate::measure::{Applied, Timing, apply_here};
use crate::workload::Prompt;

/// Stride in Dynamo's own benchmarks and documents.
const JUMP_SIZE: usize = 32;

/// Search mode of a [`Positional`].
pub trait Mode {
    /// Name of the mode in the tables.
    const NAME: &'static str;
    /// Setting of the index for the mode.
    const MODE: SearchMode;
}

/// Search in strides, which is the default.
pub struct Strided;

impl Mode for Strided {
    const NAME: &'static str = "Dynamo positional, strided";
    const MODE: SearchMode = SearchMode::Strided;
}

/// Search by bisection.
pub struct Binary;

impl Mode for Binary {
    const NAME: &'static str = "Dynamo positional, binary";
    const MODE: SearchMode = SearchMode::Binary;
}

/// `dynamo_kv_router::PositionalIndexer` as a contender.
pub struct Positional<M>(PhantomData<M>);

/// The index, and the tables of each worker's blocks, which only the writing thread has.
pub struct Lane {
    index: Arc<PositionalIndexer>,
    worker_blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
}

impl<M: Mode> Contender for Positional<M> {
    const NAME: &'static str = M::NAME;
    type Reader = Arc<PositionalIndexer>;
    type Writer = Lane;

    fn build(_: u32) -> (Self::Reader, Self::Writer) {
        let index = Arc::new(PositionalIndexer::new_with_mode(JUMP_SIZE, M::MODE));
        let lane = Lane {
            index: Arc::clone(&index),
            worker_blocks: FxHashMap::default(),
        };
        (index, lane)
    }
}

impl Reader for Arc<PositionalIndexer> {
    type Query = Query;

    const SHAPES: &'static [(Shape, &'static str)] = dynamo_event::SHAPES;

    fn query(form: Form, prompt: &Prompt) -> Query {
        Query::new(form, prompt)
    }

    fn find(&self, query: &mut Query, _: Shape) -> usize {
        query.with_hashes(|hashes| black_box(self.find_matches(hashes, false)).scores.len())
    }

    fn answer(&self, query: &mut Query, _: Shape) -> Vec<(u32, u32)> {
        query.with_hashes(|hashes| dynamo_event::sorted(&self.find_matches(hashes, false)))
    }
}

impl Writer for Lane {
    type Event = RouterEvent;

    fn stored(worker: u32, run: Run<'_>) -> RouterEvent {
        dynamo_event::stored(worker, run)
    }

    fn removed(worker: u32, sequence: &[u64]) -> RouterEvent {
        dynamo_event::removed(worker, sequence)
    }

    fn apply(&mut self, events: Vec<RouterEvent>, timing: Timing) -> Applied {
        apply_here(events, timing, |event| {
            self.index
                .apply_event(&mut self.worker_blocks, event, None)
                .is_ok()
        })
    }
}
