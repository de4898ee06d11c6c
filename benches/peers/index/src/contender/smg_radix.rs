//! `smg-radix-tree`: SMG's radix tree of chains, with shared sets of holders along them.
//!
//! The tree has one writer and no locks. SMG's service puts it behind a reader-writer lock, and so does this
//! comparison.

use std::hint::black_box;
use std::sync::{Arc, PoisonError, RwLock};

use kv_index::compute_request_content_hashes;
use radix_tree::{Config, HolderId, Overlap, OverlapScratch, RadixTree};

use super::{ByWorker, Contender, Form, Reader, Run, Shape, TwoLanes, Writer};
use crate::measure::{Applied, Timing, apply_here};
use crate::workload::{BLOCK_TOKENS, Prompt};

/// `radix_tree::RadixTree` as a contender.
pub struct SmgTree;

/// The tree, which the reader and the writer share.
pub type Locked = Arc<RwLock<RadixTree>>;

/// The tree, and the ids of the holders.
pub struct Lanes {
    tree: Locked,
    holders: ByWorker<HolderId>,
}

/// Query, with the buffers that a caller reuses for the next query.
pub struct Query {
    asked: Asked,
    scratch: OverlapScratch,
    found: Vec<Overlap>,
}

enum Asked {
    Blocks(Vec<u64>),
    Tokens(Vec<u32>),
}

/// Event of one worker.
pub enum Event {
    /// Stores blocks after a parent, given by sequence hash and block hash.
    Stored(u32, Option<u64>, Vec<(u64, u64)>),
    /// Removes blocks, given by sequence hash.
    Removed(u32, Vec<u64>),
}

impl Contender for SmgTree {
    const NAME: &'static str = "smg-radix-tree";
    type Reader = Locked;
    type Writer = Lanes;

    fn build(workers: u32) -> (Self::Reader, Self::Writer) {
        let mut tree = RadixTree::new(Config::default());
        let holders: Vec<HolderId> = (0..workers)
            .map(|number| {
                let id = tree.create_holder(&number.to_string());
                assert_eq!(id.parts().0, number, "ids are given out in order");
                id
            })
            .collect();
        let tree = Arc::new(RwLock::new(tree));
        let lanes = Lanes {
            tree: Arc::clone(&tree),
            holders: ByWorker::of_all(holders.into_iter()),
        };
        (tree, lanes)
    }
}

/// Searches the tree. The answer is in `query.found`.
fn ask(tree: &Locked, query: &mut Query) {
    let hashed;
    let hashes = match &query.asked {
        Asked::Blocks(hashes) => hashes,
        Asked::Tokens(tokens) => {
            let hashes = compute_request_content_hashes(tokens, BLOCK_TOKENS);
            hashed = hashes.iter().map(|hash| hash.0).collect::<Vec<u64>>();
            &hashed
        }
    };
    query.found.clear();
    let tree = tree.read().unwrap_or_else(PoisonError::into_inner);
    tree.overlap(hashes, &mut query.scratch, &mut query.found);
}

impl Reader for Locked {
    type Query = Query;

    const SHAPES: &'static [(Shape, &'static str)] = &[(Shape::Lean, "list")];

    fn query(form: Form, prompt: &Prompt) -> Query {
        let asked = match form {
            Form::Native | Form::BlockHashes => Asked::Blocks(prompt.blocks.clone()),
            Form::Tokens => Asked::Tokens(prompt.tokens()),
        };
        Query {
            asked,
            scratch: OverlapScratch::default(),
            found: Vec::new(),
        }
    }

    fn find(&self, query: &mut Query, _shape: Shape) -> usize {
        ask(self, query);
        black_box(&query.found).len()
    }

    fn answer(&self, query: &mut Query, _shape: Shape) -> Vec<(u32, u32)> {
        ask(self, query);
        let holders = query
            .found
            .iter()
            .map(|found| (found.holder.parts().0, found.depth));
        let mut answer: Vec<(u32, u32)> = holders.collect();
        answer.sort_unstable();
        answer
    }
}

impl Writer for Lanes {
    type Event = Event;

    fn stored(worker: u32, run: Run<'_>) -> Event {
        let blocks = run.sequence.iter().copied().zip(run.blocks.iter().copied());
        Event::Stored(worker, run.parent, blocks.collect())
    }

    fn removed(worker: u32, sequence: &[u64]) -> Event {
        Event::Removed(worker, sequence.to_vec())
    }

    fn apply(&mut self, events: Vec<Event>, timing: Timing) -> Applied {
        let (tree, holders) = (&self.tree, &mut self.holders);
        apply_here(events, timing, |event| {
            let mut tree = tree.write().unwrap_or_else(PoisonError::into_inner);
            match event {
                Event::Stored(worker, parent, blocks) => {
                    tree.store(*holders.of(worker), parent, &blocks).is_ok()
                }
                Event::Removed(worker, keys) => {
                    tree.remove(*holders.of(worker), &keys);
                    true
                }
            }
        })
    }
}

impl TwoLanes for Lanes {
    fn split(self) -> [Self; 2] {
        let tree = self.tree;
        self.holders.split().map(|holders| Self {
            tree: Arc::clone(&tree),
            holders,
        })
    }
}
