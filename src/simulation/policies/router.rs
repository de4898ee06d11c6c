//! The policies, and the load of workers as a router knows it.

use fastrand::Rng;
use kvatlas_core::worded;

/// Number of leading blocks that decide which worker some policies choose, so that prompts with the same beginning go
/// to the same worker. The number is large enough to reach beyond the system prompt, which most prompts share.
const AFFINITY_BLOCKS: usize = 3;
/// Divisor that gives the tolerance of [`Policy::ExactWithHome`] for a prompt that is partly cached: the prompt's own
/// cost divided by this number. Workers whose cost is above the least cost by at most the tolerance count as equally
/// cheap.
const KNOWN_TOLERANCE_DIVISOR: u64 = 10;
/// Greatest load that a worker may have to get a prompt by [`Policy::AffinityWithLoad`], in percent of the mean load.
/// The policy first tries the prompt's *home*, the worker that the prompt's first blocks hash to. If its load is
/// greater, the policy tries the next worker.
const AFFINITY_LOAD_MAX_PERCENT: u128 = 125;

worded! {
    /// Rule by which a router picks a worker.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Policy {
        /// The worker with the least cost. The cost is the weighted sum of the worker's blocks to compute (which the
        /// index tells) and of its blocks in flight.
        ExactWithLoad => "exact answers, with load",
        /// The worker with the highest hash score for the prompt's first blocks, among the workers whose cost is
        /// close to the least cost. The cost is that of `ExactWithLoad`.
        ExactWithHome => "exact answers, load, home",
        /// The worker that can reuse the most blocks, according to the index.
        Exact => "exact answers",
        /// As `ExactWithLoad`, but every matched block of full attention counts as reusable.
        MatchedWithLoad => "matched only, with load",
        /// As `Exact`, but every matched block of full attention counts as reusable.
        Matched => "matched only",
        /// The worker with the least cost, as `ExactWithLoad`, but by the router's guesses instead of the index.
        GuessWithLoad => "own guesses, with load",
        /// The worker that can reuse the most blocks, according to the router's own guesses.
        Guess => "own guesses",
        /// The worker that the prompt's first blocks hash to. If its load is far above the mean, the next worker
        /// whose load is not.
        AffinityWithLoad => "first blocks, with load",
        /// The worker that the first blocks hash to.
        Affinity => "first blocks",
        /// The worker with the least load: the weighted sum of its blocks to compute and its blocks in flight, without regard to
        /// the prompt.
        LeastLoaded => "least loaded",
        /// The workers one after the other.
        RoundRobin => "round robin",
        /// A worker drawn at random.
        Random => "random",
    }
}

impl Policy {
    /// Whether the policy asks an index.
    pub(super) fn asks_the_index(self) -> bool {
        matches!(self, Self::Exact | Self::ExactWithLoad | Self::ExactWithHome) || self.goes_by_matched()
    }

    /// Whether the policy counts every matched block of full attention as reusable. In a model without windows and
    /// states, this is right.
    pub(super) fn goes_by_matched(self) -> bool {
        matches!(self, Self::Matched | Self::MatchedWithLoad)
    }

    /// Whether the policy relies on the router's own guesses about the caches.
    pub(super) fn guesses(self) -> bool {
        matches!(self, Self::Guess | Self::GuessWithLoad)
    }
}

/// Work that a router has given to one worker and that is not done yet.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    /// Blocks that the worker still has to compute, as the router expects.
    to_compute: u64,
    /// Blocks of the prompts that are under way.
    in_flight: u64,
}

impl Load {
    fn cost(self, overlap_weight: u64) -> u64 {
        self.to_compute * overlap_weight + self.in_flight
    }
}

/// One router, with its account of the workers' loads.
#[derive(Debug)]
pub(super) struct PolicyRouter {
    loads: Vec<Load>,
    /// Weight of a block to compute in relation to a block in flight.
    overlap_weight: u64,
    next: usize,
    random: Rng,
}

impl PolicyRouter {
    /// Creates a router for this many idle workers.
    pub(super) fn new(workers: usize, overlap_weight: u64, random: Rng) -> Self {
        Self {
            loads: vec![Load::default(); workers],
            overlap_weight,
            next: 0,
            random,
        }
    }

    /// Returns the worker for a prompt of these blocks. `reusable` has the number of blocks that each worker can reuse; zeros if
    /// the policy knows nothing about the caches.
    pub(super) fn choose(&mut self, policy: Policy, reusable: &[u64], prompt: &[u64]) -> usize {
        let (blocks, weight) = (prompt.len() as u64, self.overlap_weight);
        match policy {
            Policy::ExactWithLoad | Policy::MatchedWithLoad | Policy::GuessWithLoad => {
                let cost = |worker: usize, load: &Load| {
                    let found = reusable.get(worker).copied().unwrap_or_default();
                    load.cost(weight) + blocks.saturating_sub(found) * weight
                };
                self.least(cost)
            }
            Policy::ExactWithHome => self.cheapest_near_home(reusable, prompt),
            Policy::Exact | Policy::Matched | Policy::Guess => {
                self.least(|worker, _| u64::MAX - reusable.get(worker).copied().unwrap_or_default())
            }
            Policy::AffinityWithLoad => self.near_home(prompt),
            Policy::Affinity => self.home(prompt),
            Policy::LeastLoaded => self.least(|_, load| load.cost(weight)),
            Policy::RoundRobin => {
                self.next = (self.next + 1) % self.loads.len().max(1);
                self.next
            }
            Policy::Random => self.random.usize(..self.loads.len().max(1)),
        }
    }

    /// Adds a prompt of `blocks` blocks to the load of a worker. The router expects the worker to compute `expected_blocks` of
    /// them.
    pub(super) fn sent(&mut self, worker: usize, expected_blocks: u64, blocks: u64) {
        if let Some(load) = self.loads.get_mut(worker) {
            load.to_compute += expected_blocks;
            load.in_flight += blocks;
        }
    }

    /// Notes that an answer's first token has come: subtracts `expected_blocks` from the blocks that the worker still has to
    /// compute.
    pub(super) fn computed(&mut self, worker: usize, expected_blocks: u64) {
        if let Some(load) = self.loads.get_mut(worker) {
            load.to_compute = load.to_compute.saturating_sub(expected_blocks);
        }
    }

    /// Notes that an answer has ended: subtracts the prompt's blocks from the worker's blocks in flight.
    pub(super) fn answered(&mut self, worker: usize, blocks: u64) {
        if let Some(load) = self.loads.get_mut(worker) {
            load.in_flight = load.in_flight.saturating_sub(blocks);
        }
    }

    /// Returns the worker with the least cost. If several workers have the least cost, draws one of them at random.
    fn least(&mut self, cost: impl Fn(usize, &Load) -> u64) -> usize {
        let costs: Vec<u64> = self
            .loads
            .iter()
            .enumerate()
            .map(|(worker, load)| cost(worker, load))
            .collect();
        let least = costs.iter().min().copied().unwrap_or_default();
        let best: Vec<usize> = (0..costs.len())
            .filter(|worker| costs.get(*worker) == Some(&least))
            .collect();
        self.random.choice(best).unwrap_or_default()
    }

    /// Returns the worker with the highest score for the prompt's first blocks, among the workers that are cheap
    /// enough: their cost is above the least cost by at most a tolerance. This is rendezvous hashing (Thaler and
    /// Ravishankar, 1998). All routers prefer the same workers for a prompt, in the same order, without talking to
    /// each other.
    ///
    /// If some of the prompt is known to be cached, the tolerance is a tenth of the prompt's own cost. If nothing is
    /// known, the preferred worker probably has the prompt. So the tolerance is the prompt's whole cost.
    fn cheapest_near_home(&self, reusable: &[u64], prompt: &[u64]) -> usize {
        let (blocks, weight) = (prompt.len() as u64, self.overlap_weight);
        let found = |worker: usize| reusable.get(worker).copied().unwrap_or_default();
        let costs: Vec<u64> = self
            .loads
            .iter()
            .enumerate()
            .map(|(worker, load)| load.cost(weight) + blocks.saturating_sub(found(worker)) * weight)
            .collect();
        let is_known = reusable.iter().any(|found| *found > 0);
        let whole = blocks * weight;
        let tolerance = if is_known {
            whole / KNOWN_TOLERANCE_DIVISOR
        } else {
            whole
        };
        let most = costs.iter().min().copied().unwrap_or_default() + tolerance;
        let first = first_blocks(prompt);
        (0..costs.len())
            .filter(|worker| costs.get(*worker).is_some_and(|cost| *cost <= most))
            .max_by_key(|worker| score(first, *worker))
            .unwrap_or_default()
    }

    fn home(&self, prompt: &[u64]) -> usize {
        let workers = self.loads.len().max(1) as u64;
        usize::try_from(first_blocks(prompt) % workers).unwrap_or_default()
    }

    /// Returns the prompt's home (the worker that its first blocks hash to), or the next worker whose load is within
    /// the bound. This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).
    fn near_home(&self, prompt: &[u64]) -> usize {
        let (home, workers) = (self.home(prompt), self.loads.len().max(1));
        let weight = self.overlap_weight;
        let total: u64 = self.loads.iter().map(|load| load.cost(weight)).sum();
        let with_this = u128::from(total) + prompt.len() as u128 * u128::from(weight);
        let fits = |worker: &usize| {
            let load = self.loads.get(*worker).map_or(0, |load| load.cost(weight));
            u128::from(load) * workers as u128 * 100 <= with_this * AFFINITY_LOAD_MAX_PERCENT
        };
        (0..workers)
            .map(|step| (home + step) % workers)
            .find(fits)
            .unwrap_or(home)
    }
}

/// Returns the sequence hash of the last of a prompt's first [`AFFINITY_BLOCKS`] blocks. The hash covers the whole prefix up to
/// that block.
fn first_blocks(prompt: &[u64]) -> u64 {
    let first = prompt.get(..AFFINITY_BLOCKS).unwrap_or(prompt);
    first.last().copied().unwrap_or_default()
}

/// Returns the score of a worker for a prompt, which is the same at every router.
fn score(first: u64, worker: usize) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(&worker.to_le_bytes(), first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(workers: usize) -> PolicyRouter {
        PolicyRouter::new(workers, 1, Rng::with_seed(1))
    }

    #[test]
    fn with_load_a_match_is_worth_the_blocks_that_it_saves() {
        let mut router = router(2);
        assert_eq!(router.choose(Policy::ExactWithLoad, &[0, 5], &[1; 8]), 1);
        router.sent(1, 3, 8);
        // Worker 1 has 11 blocks of load and saves 5.
        assert_eq!(router.choose(Policy::ExactWithLoad, &[0, 5], &[1; 8]), 0);
        assert_eq!(router.choose(Policy::Exact, &[0, 5], &[1; 8]), 1);
        router.computed(1, 3);
        router.answered(1, 8);
        assert_eq!(router.choose(Policy::GuessWithLoad, &[0, 5], &[1; 8]), 1);
    }

    #[test]
    fn affinity_stays_until_its_home_is_loaded() {
        let mut router = router(3);
        let prompt = [9, 9, 7, 1];
        assert_eq!(router.choose(Policy::Affinity, &[], &prompt), 1);
        assert_eq!(router.choose(Policy::AffinityWithLoad, &[], &prompt), 1);
        router.sent(1, 40, 40);
        assert_eq!(router.choose(Policy::Affinity, &[], &prompt), 1);
        assert_eq!(router.choose(Policy::AffinityWithLoad, &[], &prompt), 2);
    }

    #[test]
    fn among_equals_and_without_knowledge_all_routers_choose_one_home() {
        let policy = Policy::ExactWithHome;
        let prompts: Vec<[u64; 4]> = (0..200).map(|number| [1, 2, number, number]).collect();
        let homes: Vec<usize> = prompts
            .iter()
            .map(|prompt| router(4).choose(policy, &[0; 4], prompt))
            .collect();
        for worker in 0..4 {
            let count = homes.iter().filter(|home| **home == worker).count();
            assert!((25..=75).contains(&count), "{count} of 200");
        }
        for (prompt, home) in prompts.iter().zip(&homes) {
            let other = (*home + 1) % 4;
            let mut another = PolicyRouter::new(4, 1, Rng::with_seed(99));
            // Blocks after the first blocks do not change the choice.
            assert_eq!(another.choose(policy, &[0; 4], &[1, 2, prompt[2], 7]), *home);
            // A worker that is known to have blocks of the prompt is preferred to the home.
            let mut reusable = [0; 4];
            reusable[other] = 3;
            assert_eq!(another.choose(policy, &reusable, prompt), other);
            // If nothing is known to be cached, the home may have one prompt more than other workers, but not two.
            another.sent(*home, 2, 2);
            assert_eq!(another.choose(policy, &[0; 4], prompt), *home);
            another.sent(*home, 2, 2);
            assert_ne!(another.choose(policy, &[0; 4], prompt), *home);
        }
    }

    #[test]
    fn a_home_that_is_gone_moves_its_own_prompts_alone() {
        let prompts = (0..200_u64).map(|number| [1, 2, number]);
        for prompt in prompts {
            let among = |workers| router(workers).choose(Policy::ExactWithHome, &[0; 5], &prompt);
            assert!(among(5) == 4 || among(5) == among(4), "{prompt:?}");
        }
    }

    #[test]
    fn without_knowledge_everyone_has_a_turn() {
        let mut router = router(4);
        for policy in [Policy::RoundRobin, Policy::Random, Policy::LeastLoaded] {
            let chosen: std::collections::BTreeSet<usize> =
                (0..200).map(|_| router.choose(policy, &[0; 4], &[1])).collect();
            assert_eq!(chosen.len(), 4, "{policy:?}");
        }
    }
}
