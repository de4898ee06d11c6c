//! `dynamo_kv_router::ConcurrentRadixTreeCompressed`: a radix tree whose edges are runs of blocks, with a lock in each
//! node.
//!
//! Events can be applied only by the loop of the tree's own lane thread, which receives them over a channel. Therefore
//! that thread has to read the clocks. It does so by a trick: when it acknowledges an event, it wakes a waker, and the
//! waker takes a time stamp. So the hand-over between threads is not counted. The cost of the channel is counted once
//! for each event.

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle, Thread};

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::RouterEvent;
use tokio::sync::oneshot;

use super::dynamo_event::{self, Query};
use super::{Contender, Form, Reader, Run, Shape, Writer};
use crate::measure::{Applied, Stamp, Timing};
use crate::workload::Prompt;

/// `dynamo_kv_router::ConcurrentRadixTreeCompressed` as a contender.
pub struct CompressedTree;

/// Channel to the lane.
pub struct Lane {
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl Contender for CompressedTree {
    const NAME: &'static str = "Dynamo compressed tree";
    type Reader = Arc<ConcurrentRadixTreeCompressed>;
    type Writer = Lane;

    fn build(_: u32) -> (Self::Reader, Self::Writer) {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, received) = flume::unbounded();
        let lane = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            lane.worker(received, None)
                .expect("the lane ends without an error")
        });
        let lane = Lane {
            tasks,
            thread: Some(thread),
        };
        (tree, lane)
    }
}

impl Reader for Arc<ConcurrentRadixTreeCompressed> {
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

/// Waker that takes a time stamp when it is woken. So the time stamp comes from the lane's own thread, which wakes it
/// with an acknowledgement.
struct StampWaker {
    stamp: OnceLock<Stamp>,
    waiting: Thread,
}

impl Wake for StampWaker {
    fn wake(self: Arc<Self>) {
        let _ = self.stamp.set(Stamp::now());
        self.waiting.unpark();
    }
}

impl StampWaker {
    /// Returns a waker that is woken when `receiver` gets its value.
    fn attach<T>(receiver: &mut oneshot::Receiver<T>) -> Arc<Self> {
        let stamper = Arc::new(Self {
            stamp: OnceLock::new(),
            waiting: thread::current(),
        });
        let waker = Waker::from(Arc::clone(&stamper));
        let polled = Pin::new(receiver).poll(&mut Context::from_waker(&waker));
        assert!(matches!(polled, Poll::Pending), "nothing has been sent yet");
        stamper
    }

    fn wait(&self) -> Stamp {
        loop {
            if let Some(stamp) = self.stamp.get() {
                return *stamp;
            }
            thread::park();
        }
    }
}

impl Lane {
    fn send(&self, task: WorkerTask) {
        assert!(
            self.tasks.send(task).is_ok(),
            "the lane runs until it is told to end"
        );
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
        let (flushed, mut flush) = oneshot::channel();
        let mut stampers = vec![StampWaker::attach(&mut flush)];
        let mut acknowledgements = Vec::with_capacity(events.len());
        let mut tasks = Vec::with_capacity(events.len());
        let last = events.len().saturating_sub(1);
        for (number, event) in events.into_iter().enumerate() {
            let (resp, mut acknowledged) = oneshot::channel();
            if timing == Timing::Each || number == last {
                stampers.push(StampWaker::attach(&mut acknowledged));
            }
            acknowledgements.push(acknowledged);
            tasks.push(WorkerTask::EventWithAck { event, resp });
        }
        self.send(WorkerTask::Flush(flushed));
        for task in tasks {
            self.send(task);
        }
        let stamps: Vec<Stamp> = stampers.iter().map(|stamper| stamper.wait()).collect();
        let mut applied = Applied::between(&stamps, timing);
        for mut acknowledged in acknowledgements {
            if acknowledged.try_recv() == Ok(true) {
                applied.events += 1;
            } else {
                applied.refused += 1;
            }
        }
        applied
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.send(WorkerTask::Terminate);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
