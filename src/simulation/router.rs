//! Router of the simulated fleet: chooses the worker for a request.
//!
//! The router wants the first token of an answer soon, and the later tokens fast. A worker computes prompts one after the
//! other. So the first token waits for the worker's backlog, and for the blocks of the prompt that the worker does not hold.
//! Later tokens get slower with the number of blocks that the worker's running requests attend to. The cost of a worker is the
//! sum of three times: the backlog, the missing blocks, and the slowdown. Dynamo's router computes the cost in the same way.
//! The worker with the least cost is chosen.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::request::Request;
use fastrand::Rng;

/// Time in which a worker computes one block that it does not hold, in microseconds: some 25,000 tokens a second in blocks of
/// 512.
const BLOCK_WORK_US: u64 = 20_000;
/// Cost that a running request adds for another request, in microseconds for each block that the running request
/// attends to. Decoding reads each of these blocks for each token, which is far less work than computing the block.
const RUNNING_BLOCK_US: u64 = 2_000;
/// Time that a worker takes for a token of an answer, in microseconds.
const TOKEN_WORK_US: u64 = 25_000;

/// Load of one worker, as the router knows it.
#[derive(Debug, Default)]
struct WorkerLoad {
    /// Time at which the worker will have computed all its prompts, in microseconds of simulated time.
    computed_at_us: u64,
    /// Running requests: for each, the time of its end in microseconds, and the number of blocks that it attends to.
    running: BinaryHeap<Reverse<(u64, u64)>>,
    /// Total number of blocks that the running requests attend to.
    running_blocks: u64,
}

impl WorkerLoad {
    /// Forgets the requests that have ended.
    fn advance(&mut self, now_us: u64) {
        while let Some(Reverse((ends_us, blocks))) = self.running.peek().copied()
            && ends_us <= now_us
        {
            self.running.pop();
            self.running_blocks -= blocks;
        }
    }

    /// Returns the cost of a request at this worker, in microseconds. The worker holds the request's first `matched_blocks`
    /// blocks. The cost is relative: it is 0 at an idle worker that holds no block of the request.
    fn cost_us(&self, now_us: u64, matched_blocks: u64) -> i128 {
        let backlog_us = i128::from(self.computed_at_us.saturating_sub(now_us));
        let running_us = i128::from(self.running_blocks) * i128::from(RUNNING_BLOCK_US);
        let matched_us = i128::from(matched_blocks) * i128::from(BLOCK_WORK_US);
        backlog_us + running_us - matched_us
    }
}

/// Routes requests, and keeps account of the work that it has given to workers.
#[derive(Debug)]
pub struct Router {
    loads: Vec<WorkerLoad>,
    now_us: u64,
    random: Rng,
}

impl Router {
    /// Creates a router for this many workers, all idle.
    pub fn new(workers: usize, random: Rng) -> Self {
        Self {
            loads: (0..workers).map(|_| WorkerLoad::default()).collect(),
            now_us: 0,
            random,
        }
    }

    /// Returns the worker with the least cost for a request that arrives at `arrival_ms`. If several workers have the
    /// least cost, draws one of them at random. `matched_blocks` has, for each worker, the number of the request's
    /// leading blocks that the worker holds.
    ///
    /// Time never goes back: a request with an earlier time than its predecessor counts as arriving at the
    /// predecessor's time.
    pub fn choose(&mut self, arrival_ms: u64, matched_blocks: &[u64]) -> usize {
        self.now_us = self.now_us.max(arrival_ms.saturating_mul(1000));
        let now_us = self.now_us;
        let cost = |(load, matched): (&mut WorkerLoad, &u64)| {
            load.advance(now_us);
            load.cost_us(now_us, *matched)
        };
        let costs: Vec<_> = self.loads.iter_mut().zip(matched_blocks).map(cost).collect();
        let least = costs.iter().min().copied().unwrap_or_default();
        let best: Vec<_> = (0..costs.len())
            .filter(|worker| costs.get(*worker) == Some(&least))
            .collect();
        self.random.choice(best).unwrap_or_default()
    }

    /// Records that the worker gets the request. The worker already holds `hit_blocks` blocks of the request.
    pub fn assign(&mut self, worker: usize, request: &Request, hit_blocks: usize) {
        let Some(load) = self.loads.get_mut(worker) else {
            return;
        };
        let blocks_of = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let missed = blocks_of(request.chain.len().saturating_sub(hit_blocks));
        let begins_us = self.now_us.max(load.computed_at_us);
        load.computed_at_us = begins_us.saturating_add(missed.saturating_mul(BLOCK_WORK_US));
        let answer_us = request.output_tokens.saturating_mul(TOKEN_WORK_US);
        let (ends_us, blocks) = (
            load.computed_at_us.saturating_add(answer_us),
            blocks_of(request.chain.len()),
        );
        load.running.push(Reverse((ends_us, blocks)));
        load.running_blocks += blocks;
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::chain_of;
    use super::*;

    fn request(blocks: u64, output_tokens: u64) -> Request {
        Request {
            arrival_ms: 0,
            chain: chain_of(&(0..blocks).collect::<Vec<_>>()),
            output_tokens,
        }
    }

    #[test]
    fn the_longest_match_wins_among_idle_workers() {
        let mut router = Router::new(3, Rng::with_seed(1));
        assert_eq!(router.choose(0, &[2, 7, 4]), 1);
    }

    #[test]
    fn a_backlog_outweighs_a_match_until_it_is_worked_off() {
        let mut router = Router::new(2, Rng::with_seed(1));
        assert_eq!(router.choose(0, &[10, 0]), 0);
        // The prompt has eleven blocks to compute, which takes 220 ms. No answer follows.
        router.assign(0, &request(11, 0), 0);
        assert_eq!(router.choose(0, &[10, 0]), 1);
        assert_eq!(router.choose(220, &[10, 0]), 0);
        router.assign(0, &request(100, 0), 0);
        // This request is older than the one before, so it counts as arriving at 220 ms, too.
        assert_eq!(router.choose(0, &[10, 0]), 1);
    }

    #[test]
    fn a_running_answer_counts_with_all_its_blocks() {
        let mut router = Router::new(2, Rng::with_seed(1));
        router.choose(0, &[0, 0]);
        // The worker already holds all blocks of the prompt, so only the answer takes time: 40 tokens in one second.
        router.assign(0, &request(11, 40), 11);
        assert_eq!(router.choose(999, &[1, 0]), 1);
        assert_eq!(router.choose(999, &[2, 0]), 0);
        assert_eq!(router.choose(1000, &[1, 0]), 0);
    }

    #[test]
    fn ties_are_drawn_from_the_seed_and_reach_everyone() {
        let draw = |seed| {
            let mut router = Router::new(4, Rng::with_seed(seed));
            (0..64).map(|_| router.choose(0, &[0; 4])).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        assert!((0..4).all(|worker| draw(3).contains(&worker)));
    }
}
