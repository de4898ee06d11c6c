//! Comparison of routing policies, to see whether routing on exact answers pays. All policies get the same requests,
//! the same fleet and the same clock.
//!
//! This is a discrete-event simulation in virtual time, so a run is the same for the same seed. Each policy gets a
//! fleet of its own, because the choice of a worker decides what the caches hold afterwards.
//!
//! | module | subject |
//! |---|---|
//! | `service` | the model of a worker: a queue of prompts, a cache, and decoding at the same time |
//! | `knowledge` | a router's knowledge: an index fed with events, or its own guesses |
//! | `router` | the policies, and the load that each weighs |
//! | `run` | the clock: arrivals, prompts computed, events heard, restarts |
//! | `outcome` | hit rate, computed blocks, time to first token |
//! | `plot` | the outcomes as a picture |
//!
//! # The model
//!
//! A worker computes prompts one after the other. A prompt takes `block_us` for each block that the cache lacks when
//! the prompt's turn comes. The first token follows one `token_us` later. Then the answer is decoded while other
//! prompts are computed, and the prompt's blocks count as in flight until the answer ends. A prompt's blocks enter the
//! cache when they are computed, and evict the least recently used leaves.
//!
//! With windows or states (`attention`), a request can reuse fewer blocks than full attention has. An index knows both
//! numbers. The policies that go by matched blocks treat every block that full attention has as reusable, as most
//! routers do.
//!
//! An index hears of a cache's changes `event_delay_us` later. A lost event is noticed with the worker's next event, or
//! with its heartbeat. The index then receives the lost changes, too. A router without an answer treats no block as
//! cached. A router that guesses receives no events. It assumes that a worker still has the prompts that this router
//! sent there, in a cache of the real size. No guess can be better.

mod knowledge;
mod outcome;
mod plot;
mod router;
mod run;
mod service;

use std::num::NonZeroUsize;

use super::attention::CacheModel;
use super::fleet::FleetSize;
use super::request::Request;

pub use outcome::PolicyOutcome;
pub use plot::plot;
pub use router::Policy;

/// Costs of serving requests in the model: times, and the weight of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceModel {
    /// Time to compute one block, in microseconds.
    pub block_us: u64,
    /// Time for a token of an answer, in microseconds.
    pub token_us: u64,
    /// Time from a change of a cache until an index knows the change, in microseconds.
    pub event_delay_us: u64,
    /// Time between two heartbeats of a worker, in microseconds.
    pub heartbeat_us: u64,
    /// Cost of a block to compute, as a multiple of the cost of a block in flight (a block of a prompt whose answer has
    /// not ended). Policies that weigh load use it.
    pub overlap_weight: u64,
}

impl Default for ServiceModel {
    /// Returns the costs of a typical worker. It computes about 25,000 prompt tokens a second, in blocks of 512
    /// tokens, and 40 answer tokens a second. Its events arrive after 5 ms, and it sends a heartbeat every second. A
    /// block in flight counts a tenth as much as a block to compute.
    fn default() -> Self {
        Self {
            block_us: 20_000,
            token_us: 25_000,
            event_delay_us: 5_000,
            heartbeat_us: 1_000_000,
            overlap_weight: 10,
        }
    }
}

/// A scenario: the number of routers, and the faults while requests arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scenario {
    /// The scenario's name in tables.
    pub name: &'static str,
    /// Number of routers that share the requests. Each router knows only the load that it has caused itself, and its own guesses.
    pub routers: NonZeroUsize,
    /// Interval at which a random worker restarts with an empty cache, in microseconds of simulated time; 0 for never.
    pub restart_every_us: u64,
    /// Number of lost events in a thousand.
    pub lost_events_per_mille: u32,
    /// Length of the periods in which the index alternately answers and does not answer, in microseconds. The first
    /// period is one with answers. 0 if the index always answers.
    pub blind_every_us: u64,
}

impl Scenario {
    /// All scenarios of a comparison: one router without faults; four routers; restarts of workers; lost events; four
    /// routers that get no answers half of the time.
    pub const ALL: [Self; 5] = [
        Self {
            name: "one router",
            ..Self::QUIET
        },
        Self {
            name: "four routers",
            routers: NonZeroUsize::MIN.saturating_add(3),
            ..Self::QUIET
        },
        Self {
            name: "a restart a minute",
            restart_every_us: 60_000_000,
            ..Self::QUIET
        },
        Self {
            name: "5 % of events lost",
            lost_events_per_mille: 50,
            ..Self::QUIET
        },
        Self {
            name: "no answers every other minute",
            routers: NonZeroUsize::MIN.saturating_add(3),
            blind_every_us: 60_000_000,
            ..Self::QUIET
        },
    ];

    const QUIET: Self = Self {
        name: "",
        routers: NonZeroUsize::MIN,
        restart_every_us: 0,
        lost_events_per_mille: 0,
        blind_every_us: 0,
    };

    /// Whether the index gives no answers at this time.
    fn is_blind(&self, now_us: u64) -> bool {
        now_us
            .checked_div(self.blind_every_us)
            .is_some_and(|turn| turn % 2 == 1)
    }

    fn is_quiet(&self) -> bool {
        self.restart_every_us == 0 && self.lost_events_per_mille == 0 && self.blind_every_us == 0
    }
}

/// The settings of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Size of the fleet.
    pub size: FleetSize,
    /// Rules by which the workers' caches keep blocks.
    pub cache: CacheModel,
    /// Costs of serving requests.
    pub model: ServiceModel,
    /// Factor by which requests arrive faster than they were recorded.
    pub speed: f64,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Comparison {
    /// Serves the requests once for each policy in each scenario. Calls `observe` after each of these runs. For a
    /// cache with windows or states, runs only the scenarios without faults.
    ///
    /// # Errors
    ///
    /// [`SimulationError`](super::SimulationError) if the index does not take the fleet, or a histogram can't be
    /// made. Both would be errors in this program.
    pub fn run(
        &self,
        requests: &[Request],
        mut observe: impl FnMut(&PolicyOutcome),
    ) -> Result<Vec<PolicyOutcome>, super::SimulationError> {
        let mut outcomes = Vec::new();
        let is_hybrid = self.cache.is_hybrid();
        // Restarts and losses affect hybrid caches no differently from others.
        let scenarios = Scenario::ALL
            .into_iter()
            .filter(|scenario| !is_hybrid || scenario.is_quiet());
        for scenario in scenarios {
            for policy in Policy::ALL {
                if policy.goes_by_matched() && !is_hybrid {
                    continue;
                }
                let outcome = run::run(self, &scenario, policy, requests)?;
                observe(&outcome);
                outcomes.push(outcome);
            }
        }
        Ok(outcomes)
    }
}
