//! Which worker gets a request.
//!
//! The router wants the first token soon. A worker works off one request's blocks after the other, so the time until then is
//! its backlog plus the work on the blocks that it does not hold. A matched block saves exactly the work on one block; the
//! score is therefore the matched blocks less the backlog, both in time.

use super::random::Random;

/// How long a worker works on one block that it does not hold, in microseconds: some 25,000 tokens a second in blocks of 512.
const BLOCK_WORK_US: u64 = 20_000;

/// Routes requests, and keeps account of the work that it has given out.
#[derive(Debug)]
pub struct Router {
    /// When each worker is through with its work, in microseconds of simulated time.
    idle_at_us: Vec<u64>,
    now_us: u64,
    random: Random,
}

impl Router {
    /// A router for this many workers, all idle.
    pub fn new(workers: usize, random: Random) -> Self {
        Self {
            idle_at_us: vec![0; workers],
            now_us: 0,
            random,
        }
    }

    /// The worker with the best score for a request that arrives now: the greatest of its matched blocks, less its backlog.
    /// Among equals the random numbers decide. `matched_blocks` has one number a worker.
    ///
    /// Time never goes back: a request that is older than the one before arrives with it.
    pub fn choose(&mut self, arrival_ms: u64, matched_blocks: &[u64]) -> usize {
        self.now_us = self.now_us.max(arrival_ms.saturating_mul(1000));
        let cost_us = |(idle_at_us, matched): (&u64, &u64)| {
            let backlog_us = idle_at_us.saturating_sub(self.now_us);
            i128::from(backlog_us) - i128::from(*matched) * i128::from(BLOCK_WORK_US)
        };
        let costs: Vec<_> = self.idle_at_us.iter().zip(matched_blocks).map(cost_us).collect();
        let least = costs.iter().min().copied().unwrap_or_default();
        let best: Vec<_> = (0..costs.len())
            .filter(|worker| costs.get(*worker) == Some(&least))
            .collect();
        let drawn = self.random.index(best.len());
        best.get(drawn).copied().unwrap_or_default()
    }

    /// Gives the worker the work on `missed_blocks`.
    pub fn assign(&mut self, worker: usize, missed_blocks: u64) {
        if let Some(idle_at_us) = self.idle_at_us.get_mut(worker) {
            let work_us = missed_blocks.saturating_mul(BLOCK_WORK_US);
            *idle_at_us = self.now_us.max(*idle_at_us).saturating_add(work_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_match_wins_among_idle_workers() {
        let mut router = Router::new(3, Random::new(1));
        assert_eq!(router.choose(0, &[2, 7, 4]), 1);
    }

    #[test]
    fn a_backlog_outweighs_a_shorter_match() {
        let mut router = Router::new(2, Random::new(1));
        assert_eq!(router.choose(0, &[10, 0]), 0);
        router.assign(0, 11);
        assert_eq!(router.choose(0, &[10, 0]), 1);
        // One block of work later, and a bit: worth it again.
        assert_eq!(router.choose(21, &[10, 0]), 0);
        router.assign(0, 100);
        // A late-comer does not turn the clock back.
        assert_eq!(router.choose(0, &[10, 0]), 1);
    }

    #[test]
    fn ties_are_drawn_from_the_seed_and_reach_everyone() {
        let draw = |seed| {
            let mut router = Router::new(4, Random::new(seed));
            (0..64).map(|_| router.choose(0, &[0; 4])).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        assert!((0..4).all(|worker| draw(3).contains(&worker)));
    }
}
