//! One worker of the model: prompts wait in a queue, and are computed one after the other.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use kvatlas_core::hash::SequenceHash;

use super::super::attention::CacheModel;
use super::super::cache::{Admission, PrefixCache};

/// Request that a worker has queued or is computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket {
    /// Index of the request among all requests.
    pub(super) request: usize,
    /// Number of the router that sent the request.
    pub(super) router: usize,
    /// Time at which the request reached the router, in microseconds.
    pub(super) arrived_us: u64,
    /// Number of the prompt's blocks that the worker has to compute, as the router expects.
    pub(super) expected_blocks: u64,
}

/// Simulated worker: its queue of prompts, the prompt that is being computed, and its cache.
#[derive(Debug)]
pub(super) struct Worker {
    capacity: NonZeroUsize,
    model: CacheModel,
    cache: PrefixCache,
    waiting: VecDeque<Ticket>,
    /// The request whose prompt the worker is computing; `None` if it is idle.
    computing: Option<Ticket>,
    /// Number of restarts so far. It shows whether a restart has interrupted the computation of a prompt.
    pub(super) life: u32,
}

impl Worker {
    /// Creates an idle worker with an empty cache.
    pub(super) fn new(capacity: NonZeroUsize, model: CacheModel) -> Self {
        Self {
            capacity,
            model,
            cache: PrefixCache::new(capacity, model),
            waiting: VecDeque::new(),
            computing: None,
            life: 0,
        }
    }

    /// Takes a request into the queue.
    pub(super) fn enqueue(&mut self, ticket: Ticket) {
        self.waiting.push_back(ticket);
    }

    /// Begins with the next prompt, if the worker is idle and a prompt waits. Returns the prompt that was begun.
    pub(super) fn begin(&mut self) -> Option<Ticket> {
        if self.computing.is_none() {
            self.computing = self.waiting.pop_front();
            return self.computing;
        }
        None
    }

    /// Returns the prompt that is being computed.
    pub(super) fn computing(&self) -> Option<Ticket> {
        self.computing
    }

    /// Returns how many leading blocks of a prompt can be reused now.
    pub(super) fn hit_blocks(&self, chain: &[SequenceHash]) -> usize {
        self.cache.usable_blocks(chain)
    }

    /// Ends the computation of the current prompt, and admits the prompt's blocks to the cache.
    pub(super) fn finish(&mut self, chain: &[SequenceHash]) -> Option<(Ticket, Admission)> {
        let ticket = self.computing.take()?;
        Some((ticket, self.cache.admit(chain)))
    }

    /// Restarts the worker with an empty cache. The prompt that was being computed goes back to the front of the queue.
    pub(super) fn restart(&mut self) {
        self.cache = PrefixCache::new(self.capacity, self.model);
        self.life += 1;
        if let Some(ticket) = self.computing.take() {
            self.waiting.push_front(ticket);
        }
    }
}
