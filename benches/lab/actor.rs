//! Design 2: any index, owned by a single-threaded actor.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use kvatlas_core::hash::SequenceHash;

use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};

/// Maximum number of messages that wait for the actor. At this number, a sender waits (back-pressure).
const WAITING_MAX: usize = 2048;

/// Messages to the actor.
enum ActorMessage {
    Store(HolderNumber, Option<SequenceHash>, Vec<PrefixBlock>),
    Remove(HolderNumber, Vec<SequenceHash>),
    Clear(HolderNumber),
    Find(PrefixQuery, SyncSender<Vec<Depth>>),
    Flush(SyncSender<()>),
    RefusedStores(SyncSender<u64>),
    Sizes(SyncSender<PrefixIndexSize>),
}

/// Design 2: an index that one thread owns. All other threads send it messages through a channel.
///
/// # Promise
///
/// Answers are as exact as those of the index that the actor owns. Reads and writes are applied in the order in which
/// they were sent. So an answer includes every change that the same sender had sent before the query.
///
/// # Cost
///
/// The index needs no locks, but uses only one core: queries and events wait in one queue. The published actor reads
/// two channels with an async runtime. Here, one channel keeps the order and needs no runtime.
#[derive(Debug)]
pub struct Actor {
    /// Sender of the thread's channel. `None` only while the actor is being dropped.
    messages: Option<SyncSender<ActorMessage>>,
    thread: Option<JoinHandle<()>>,
}

impl Actor {
    /// Creates an actor around the index that `make` returns. `make` runs in the actor's own thread, so the index need not be
    /// `Send`.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn new<I: PrefixIndex>(make: impl FnOnce() -> I + Send + 'static) -> io::Result<Self> {
        let (messages, inbox) = sync_channel(WAITING_MAX);
        let thread = thread::Builder::new()
            .name("baseline-actor".into())
            .spawn(move || serve(make(), &inbox))?;
        Ok(Self {
            messages: Some(messages),
            thread: Some(thread),
        })
    }

    /// Sends a message to the thread. Only a panic can end the thread before the actor is dropped. After a panic the
    /// message is lost, and answers are empty.
    fn send(&self, message: ActorMessage) {
        if let Some(messages) = &self.messages {
            let _ = messages.send(message);
        }
    }

    fn ask<T: Default>(&self, message: impl FnOnce(SyncSender<T>) -> ActorMessage) -> T {
        let (reply, answer) = sync_channel(1);
        self.send(message(reply));
        answer.recv().unwrap_or_default()
    }
}

fn serve(mut index: impl PrefixIndex, inbox: &Receiver<ActorMessage>) {
    // Sending a reply fails if the caller no longer waits for it. Nothing needs to be done then.
    while let Ok(message) = inbox.recv() {
        match message {
            ActorMessage::Store(holder, parent, blocks) => index.store(holder, parent, &blocks),
            ActorMessage::Remove(holder, names) => index.remove(holder, &names),
            ActorMessage::Clear(holder) => index.clear(holder),
            ActorMessage::Find(query, reply) => drop(reply.send(index.find_matches(&query))),
            ActorMessage::Flush(reply) => {
                index.flush();
                let _ = reply.send(());
            }
            ActorMessage::RefusedStores(reply) => drop(reply.send(index.refused_stores())),
            ActorMessage::Sizes(reply) => drop(reply.send(index.sizes())),
        }
    }
}

impl PrefixIndex for Actor {
    fn store(&mut self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        self.send(ActorMessage::Store(holder, parent, blocks.to_vec()));
    }

    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]) {
        self.send(ActorMessage::Remove(holder, names.to_vec()));
    }

    fn clear(&mut self, holder: HolderNumber) {
        self.send(ActorMessage::Clear(holder));
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        self.ask(|reply| ActorMessage::Find(query.clone(), reply))
    }

    fn flush(&self) {
        self.ask(ActorMessage::Flush);
    }

    fn refused_stores(&self) -> u64 {
        self.ask(ActorMessage::RefusedStores)
    }

    fn sizes(&self) -> PrefixIndexSize {
        self.ask(ActorMessage::Sizes)
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // Without a sender the thread ends when it has handled all messages.
        self.messages = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
