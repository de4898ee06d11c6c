//! Thread pool of designs 5 to 7. Each holder's events are always applied by the same thread; queries run on the
//! calling thread.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use hashbrown::HashMap;

use kvatlas_core::hash::SequenceHash;

use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};

/// Maximum number of messages that wait for one thread. At this number, a sender waits (back-pressure).
const WAITING_MAX: usize = 2048;

/// Index that many threads share.
///
/// Calls that change the same holder must not overlap. Calls for different holders, and queries, may run at the same
/// time. The methods have the same meaning as those of [`PrefixIndex`].
pub trait SharedIndex: Send + Sync + 'static {
    /// Records that `holder` holds `blocks`.
    fn store(&self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]);

    /// Records that `holder` no longer holds the blocks with these names.
    fn remove(&self, holder: HolderNumber, names: &[SequenceHash]);

    /// Records that `holder` holds no blocks any more.
    fn clear(&self, holder: HolderNumber);

    /// Returns the holders of leading blocks of `query`, each with the number of leading blocks that it holds.
    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth>;

    /// Number of stores that were refused because the holder did not hold the parent.
    fn refused_stores(&self) -> u64;

    /// Returns the size of the index. May walk over the whole index.
    fn sizes(&self) -> PrefixIndexSize;
}

/// One change for a thread to apply.
enum PoolMessage {
    Store(HolderNumber, Option<SequenceHash>, Vec<PrefixBlock>),
    Remove(HolderNumber, Vec<SequenceHash>),
    Clear(HolderNumber),
    Flush(SyncSender<()>),
}

#[derive(Debug)]
struct PoolThread {
    messages: SyncSender<PoolMessage>,
    thread: JoinHandle<()>,
}

/// A [`SharedIndex`] whose events are applied by a pool of threads, and whose queries run on the calling thread.
///
/// A holder's first event assigns the holder permanently to one thread; the threads take turns at getting new
/// holders. So a holder's events are applied in order, and no two threads ever change one holder.
#[derive(Debug)]
pub struct ThreadPool<I> {
    index: Arc<I>,
    lanes: Vec<PoolThread>,
    assigned: HashMap<HolderNumber, usize>,
}

impl<I: SharedIndex> ThreadPool<I> {
    /// Makes a pool of `lanes` threads, at least one, for `index`.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn new(index: I, lanes: usize) -> io::Result<Self> {
        let mut pool = Self {
            index: Arc::new(index),
            lanes: Vec::new(),
            assigned: HashMap::new(),
        };
        for number in 0..lanes.max(1) {
            let (messages, inbox) = sync_channel(WAITING_MAX);
            let index = Arc::clone(&pool.index);
            let thread = thread::Builder::new()
                .name(format!("baseline-lane-{number}"))
                .spawn(move || apply_all(&*index, &inbox))?;
            pool.lanes.push(PoolThread { messages, thread });
        }
        Ok(pool)
    }

    /// Returns the index, for queries on other threads.
    pub fn index(&self) -> Arc<I> {
        Arc::clone(&self.index)
    }

    fn send(&mut self, holder: HolderNumber, message: PoolMessage) {
        let next = self.assigned.len() % self.lanes.len().max(1);
        let lane = *self.assigned.entry(holder).or_insert(next);
        // Only a panic ends a lane before its pool is dropped. The message is then not applied.
        if let Some(lane) = self.lanes.get(lane) {
            let _ = lane.messages.send(message);
        }
    }
}

fn apply_all(index: &impl SharedIndex, inbox: &Receiver<PoolMessage>) {
    while let Ok(message) = inbox.recv() {
        match message {
            PoolMessage::Store(holder, parent, blocks) => index.store(holder, parent, &blocks),
            PoolMessage::Remove(holder, names) => index.remove(holder, &names),
            PoolMessage::Clear(holder) => index.clear(holder),
            // Sending the reply fails if the caller no longer waits for it. Nothing needs to be done then.
            PoolMessage::Flush(reply) => {
                let _ = reply.send(());
            }
        }
    }
}

impl<I: SharedIndex> PrefixIndex for ThreadPool<I> {
    fn store(&mut self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        self.send(holder, PoolMessage::Store(holder, parent, blocks.to_vec()));
    }

    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]) {
        self.send(holder, PoolMessage::Remove(holder, names.to_vec()));
    }

    fn clear(&mut self, holder: HolderNumber) {
        self.send(holder, PoolMessage::Clear(holder));
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        self.index.find_matches(query)
    }

    fn flush(&self) {
        let (reply, replies) = sync_channel(self.lanes.len());
        for lane in &self.lanes {
            let _ = lane.messages.send(PoolMessage::Flush(reply.clone()));
        }
        drop(reply);
        // The loop ends when every lane has replied or ended.
        while replies.recv().is_ok() {}
    }

    fn refused_stores(&self) -> u64 {
        self.index.refused_stores()
    }

    fn sizes(&self) -> PrefixIndexSize {
        self.index.sizes()
    }
}

impl<I> Drop for ThreadPool<I> {
    fn drop(&mut self) {
        for PoolThread { messages, thread } in self.lanes.drain(..) {
            // Without a sender the thread ends when it has applied all messages.
            drop(messages);
            let _ = thread.join();
        }
    }
}
