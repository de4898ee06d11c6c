//! `dynamo_kv_router::RadixTree`: one node for each block, for use by one thread.

use std::cell::RefCell;
use std::hint::black_box;
use std::rc::Rc;

use dynamo_kv_router::protocols::RouterEvent;

use super::dynamo_event::{self, Query};
use super::{Contender, Form, Reader, Run, Shape, Writer};
use crate::measure::{Applied, Timing, apply_here};
use crate::workload::Prompt;

/// `dynamo_kv_router::RadixTree` as a contender.
pub struct RadixTree;

/// The tree, for reading and writing by the same thread.
pub struct Shared(Rc<RefCell<dynamo_kv_router::RadixTree>>);

impl Contender for RadixTree {
    const NAME: &'static str = "Dynamo radix tree (one thread)";
    type Reader = Shared;
    type Writer = Shared;

    fn build(_: u32) -> (Self::Reader, Self::Writer) {
        let tree = Rc::new(RefCell::new(dynamo_kv_router::RadixTree::new()));
        (Shared(Rc::clone(&tree)), Shared(tree))
    }
}

impl Reader for Shared {
    type Query = Query;

    const SHAPES: &'static [(Shape, &'static str)] = dynamo_event::SHAPES;

    fn query(form: Form, prompt: &Prompt) -> Query {
        Query::new(form, prompt)
    }

    fn find(&self, query: &mut Query, _: Shape) -> usize {
        let found = self.0.borrow().find_matches(query.take_hashes(), false);
        black_box(found).scores.len()
    }

    fn answer(&self, query: &mut Query, _: Shape) -> Vec<(u32, u32)> {
        dynamo_event::sorted(&self.0.borrow().find_matches(query.take_hashes(), false))
    }
}

impl Writer for Shared {
    type Event = RouterEvent;

    fn stored(worker: u32, run: Run<'_>) -> RouterEvent {
        dynamo_event::stored(worker, run)
    }

    fn removed(worker: u32, sequence: &[u64]) -> RouterEvent {
        dynamo_event::removed(worker, sequence)
    }

    fn apply(&mut self, events: Vec<RouterEvent>, timing: Timing) -> Applied {
        apply_here(events, timing, |event| {
            self.0.borrow_mut().apply_event(event).is_ok()
        })
    }
}
