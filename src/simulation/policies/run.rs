//! The clock of a run. A *happening* is an event that the run has planned for a point in virtual time. The clock carries out
//! the happenings in order of time.

use std::collections::BTreeMap;

use kvatlas_core::wire::Event;

use super::super::error::SimulationError;
use super::super::request::Request;
use super::knowledge::{CacheChange, DaemonIndex, RouterGuesses, changes_of};
use super::outcome::{Counts, PolicyOutcome};
use super::router::{Policy, PolicyRouter};
use super::service::{Ticket, Worker};
use super::{Comparison, Scenario};
use fastrand::Rng;

/// Latest time at which a request may arrive, in microseconds. It is far below the largest `u64`, so that the times
/// of all later happenings still fit.
const ARRIVAL_US_MAX: u64 = u64::MAX / 4;
/// Number of restarts for each worker that are carried out in a time without work. Further restarts are skipped.
const IDLE_RESTARTS_PER_WORKER: u64 = 16;

/// A happening: an event that the run has planned for a point in virtual time.
enum Happening {
    /// A request arrives at a router. The value is the index of the request.
    Arrival(usize),
    /// A worker has finished computing a prompt. Ignored if the worker has restarted since it began the prompt.
    Computed {
        worker: usize,
        life: u32,
        hit_blocks: usize,
    },
    /// A request's answer is complete.
    Answered {
        worker: usize,
        router: usize,
        blocks: u64,
    },
    /// The index receives the changes of a worker's cache.
    Heard {
        worker: usize,
        changes: Vec<CacheChange>,
    },
    /// A worker sends its heartbeat. If events of the worker were lost, the index notices this and receives the lost
    /// changes.
    Heartbeat(usize),
    /// A random worker restarts.
    Restart,
}

/// State of a run, which serves all requests by one policy under one scenario.
struct PolicyRun<'a> {
    comparison: &'a Comparison,
    scenario: &'a Scenario,
    policy: Policy,
    requests: &'a [Request],
    /// Planned happenings (events of the simulation), in the order of their times. Happenings at the same time are in
    /// the order in which they were planned.
    plan: BTreeMap<(u64, u64), Happening>,
    planned: u64,
    workers: Vec<Worker>,
    routers: Vec<(PolicyRouter, RouterGuesses)>,
    heard: Option<DaemonIndex>,
    /// For each worker, the changes of its cache that were lost before they reached the index.
    lost: Vec<Vec<CacheChange>>,
    /// Number of requests that still wait for their first token.
    open: usize,
    random: Rng,
    counts: Counts,
}

/// Serves all requests by one policy under one scenario.
pub(super) fn run(
    comparison: &Comparison,
    scenario: &Scenario,
    policy: Policy,
    requests: &[Request],
) -> Result<PolicyOutcome, SimulationError> {
    let mut run = PolicyRun::new(comparison, scenario, policy, requests)?;
    while let Some(((now_us, _), happening)) = run.plan.pop_first() {
        run.happen(now_us, happening)?;
    }
    Ok(run
        .counts
        .outcome(scenario.name, comparison.cache, policy.as_str()))
}

impl<'a> PolicyRun<'a> {
    fn new(
        comparison: &'a Comparison,
        scenario: &'a Scenario,
        policy: Policy,
        requests: &'a [Request],
    ) -> Result<Self, SimulationError> {
        let size = comparison.size;
        let count = size.workers.get();
        let mut random = Rng::with_seed(comparison.seed);
        let routers = (0..scenario.routers.get()).map(|_| {
            let router = PolicyRouter::new(
                count,
                comparison.model.overlap_weight,
                Rng::with_seed(random.u64(..)),
            );
            (
                router,
                RouterGuesses::new(count, size.blocks_per_worker, comparison.cache),
            )
        });
        let mut run = Self {
            comparison,
            scenario,
            policy,
            requests,
            plan: BTreeMap::new(),
            planned: 0,
            workers: (0..count)
                .map(|_| Worker::new(size.blocks_per_worker, comparison.cache))
                .collect(),
            routers: routers.collect(),
            heard: policy
                .asks_the_index()
                .then(|| DaemonIndex::new(size, comparison.cache))
                .transpose()?,
            lost: (0..count).map(|_| Vec::new()).collect(),
            open: requests.len(),
            random,
            counts: Counts::new()?,
        };
        for (number, request) in requests.iter().enumerate() {
            run.plan(arrival_us(request, comparison.speed), Happening::Arrival(number));
        }
        if scenario.restart_every_us > 0 {
            run.plan(scenario.restart_every_us, Happening::Restart);
        }
        Ok(run)
    }

    fn plan(&mut self, at_us: u64, happening: Happening) {
        self.planned += 1;
        self.plan.insert((at_us, self.planned), happening);
    }

    fn happen(&mut self, now_us: u64, happening: Happening) -> Result<(), SimulationError> {
        match happening {
            Happening::Arrival(number) => self.arrive(now_us, number)?,
            Happening::Computed {
                worker,
                life,
                hit_blocks,
            } => {
                if self.workers.get(worker).is_some_and(|worker| worker.life == life) {
                    self.computed(now_us, worker, hit_blocks);
                }
            }
            Happening::Answered {
                worker,
                router,
                blocks,
            } => {
                if let Some((router, _)) = self.routers.get_mut(router) {
                    router.answered(worker, blocks);
                }
            }
            Happening::Heard { worker, changes } => {
                if let Some(heard) = &mut self.heard {
                    heard.apply(worker, changes);
                }
            }
            Happening::Heartbeat(worker) => self.deliver(now_us, worker, Vec::new()),
            Happening::Restart => self.restart(now_us),
        }
        Ok(())
    }

    fn arrive(&mut self, now_us: u64, number: usize) -> Result<(), SimulationError> {
        let Some(request) = self.requests.get(number) else {
            return Ok(());
        };
        let chosen = self.random.usize(..self.routers.len().max(1));
        let Some((router, guesses)) = self.routers.get_mut(chosen) else {
            return Ok(());
        };
        let reusable = match &self.heard {
            Some(_) if self.scenario.is_blind(now_us) => vec![0; self.workers.len()],
            Some(heard) if self.policy.goes_by_matched() => heard.matched(&request.chain)?,
            Some(heard) => heard.usable(&request.chain)?,
            None if self.policy.guesses() => guesses.usable(&request.chain),
            None => vec![0; self.workers.len()],
        };
        let prompt: Vec<u64> = request.chain.iter().map(|hash| hash.as_u64()).collect();
        let worker = router.choose(self.policy, &reusable, &prompt);
        let blocks = prompt.len() as u64;
        let promised_blocks = reusable.get(worker).copied().unwrap_or_default();
        let expected_blocks = blocks.saturating_sub(promised_blocks);
        self.counts.promised(promised_blocks);
        router.sent(worker, expected_blocks, blocks);
        if self.policy.guesses() {
            guesses.sent(worker, &request.chain);
        }
        if let Some(worker) = self.workers.get_mut(worker) {
            worker.enqueue(Ticket {
                request: number,
                router: chosen,
                arrived_us: now_us,
                expected_blocks,
            });
        }
        self.begin(now_us, worker);
        Ok(())
    }

    /// Lets a worker begin with its next prompt, if it is idle and a prompt waits.
    fn begin(&mut self, now_us: u64, number: usize) {
        let Some(worker) = self.workers.get_mut(number) else {
            return;
        };
        let Some(request) = worker
            .begin()
            .and_then(|ticket| self.requests.get(ticket.request))
        else {
            return;
        };
        let hit_blocks = worker.hit_blocks(&request.chain);
        let missing = (request.chain.len() - hit_blocks) as u64;
        let computed = Happening::Computed {
            worker: number,
            life: worker.life,
            hit_blocks,
        };
        self.counts.begun(request.chain.len() as u64, hit_blocks as u64);
        self.plan(now_us + missing * self.comparison.model.block_us, computed);
    }

    fn computed(&mut self, now_us: u64, number: usize, hit_blocks: usize) {
        let model = self.comparison.model;
        let Some(worker) = self.workers.get_mut(number) else {
            return;
        };
        let ticket = worker.computing();
        let Some(request) = ticket.and_then(|ticket| self.requests.get(ticket.request)) else {
            return;
        };
        let Some((ticket, admission)) = worker.finish(&request.chain) else {
            return;
        };
        let blocks = request.chain.len() as u64;
        let first_token_us = now_us + model.token_us;
        self.counts
            .first_token(blocks, hit_blocks as u64, first_token_us - ticket.arrived_us);
        self.open -= 1;
        if let Some((router, _)) = self.routers.get_mut(ticket.router) {
            router.computed(number, ticket.expected_blocks);
        }
        let answered = Happening::Answered {
            worker: number,
            router: ticket.router,
            blocks,
        };
        let answer_us = model.token_us.saturating_mul(request.output_tokens.max(1));
        self.plan(now_us.saturating_add(answer_us), answered);
        self.publish(now_us, number, changes_of(&request.chain, admission));
        self.begin(now_us, number);
    }

    /// Sends the changes of a worker's cache to the index. At random, the changes are lost: they are then kept, and
    /// the index receives them with the worker's next event or heartbeat.
    fn publish(&mut self, now_us: u64, worker: usize, changes: Vec<CacheChange>) {
        if self.heard.is_none() || changes.is_empty() {
            return;
        }
        let is_lost = self.random.u64(..1000) < u64::from(self.scenario.lost_events_per_mille);
        if !is_lost {
            self.deliver(now_us, worker, changes);
            return;
        }
        if let Some(lost) = self.lost.get_mut(worker) {
            lost.extend(changes);
        }
        let heartbeat_us = self.comparison.model.heartbeat_us.max(1);
        let next_us = (now_us / heartbeat_us + 1) * heartbeat_us;
        self.plan(next_us, Happening::Heartbeat(worker));
    }

    /// Plans that the index receives the worker's lost changes, followed by `changes`.
    fn deliver(&mut self, now_us: u64, worker: usize, changes: Vec<CacheChange>) {
        let mut all = self.lost.get_mut(worker).map(std::mem::take).unwrap_or_default();
        all.extend(changes);
        if !all.is_empty() {
            let heard = Happening::Heard { worker, changes: all };
            self.plan(now_us + self.comparison.model.event_delay_us, heard);
        }
    }

    fn restart(&mut self, now_us: u64) {
        let number = self.random.usize(..self.workers.len().max(1));
        if let Some(worker) = self.workers.get_mut(number) {
            worker.restart();
        }
        self.publish(now_us, number, vec![CacheChange::Blocks(Event::Cleared)]);
        self.begin(now_us, number);
        // Restarts are planned only while requests are open: otherwise the run would never end.
        if self.open > 0 {
            self.plan(self.next_restart_us(now_us), Happening::Restart);
        }
    }

    /// Returns the time of the restart after the one at `now_us`. In a long time without work, most restarts are skipped,
    /// because the caches are empty after the first ones.
    fn next_restart_us(&self, now_us: u64) -> u64 {
        let every_us = self.scenario.restart_every_us;
        let is_work = |happening: &Happening| {
            matches!(
                happening,
                Happening::Arrival(_) | Happening::Computed { .. } | Happening::Answered { .. }
            )
        };
        let work = self.plan.iter().find(|(_, happening)| is_work(happening));
        let work_us = work.map_or(now_us, |((at_us, _), _)| *at_us);
        let restarts = (self.workers.len() as u64).saturating_mul(IDLE_RESTARTS_PER_WORKER);
        let skipped_us = work_us
            .saturating_sub(now_us)
            .saturating_sub(restarts.saturating_mul(every_us));
        // The restarts keep their beat.
        now_us + skipped_us / every_us.max(1) * every_us + every_us
    }
}

#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "simulated time of hours, to the microsecond"
)]
fn arrival_us(request: &Request, speed: f64) -> u64 {
    ((request.arrival_ms as f64 * 1000.0 / speed) as u64).min(ARRIVAL_US_MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::super::super::attention::{Attention, CacheModel};
    use super::super::super::fleet::FleetSize;
    use super::super::super::synthetic::SyntheticLoad;
    use super::super::ServiceModel;
    use super::*;

    fn comparison(workers: usize) -> Comparison {
        Comparison {
            size: FleetSize {
                workers: NonZeroUsize::new(workers).unwrap(),
                blocks_per_worker: NonZeroUsize::new(400).unwrap(),
            },
            model: ServiceModel::default(),
            speed: 1.0,
            seed: 5,
            cache: CacheModel::default(),
        }
    }

    fn requests() -> Vec<Request> {
        SyntheticLoad::new(3).take(400).collect()
    }

    fn of(policy: Policy, scenario: &Scenario) -> PolicyOutcome {
        run(&comparison(4), scenario, policy, &requests()).unwrap()
    }

    fn of_hybrid(policy: Policy, scenario: &Scenario) -> PolicyOutcome {
        let hybrid = Comparison {
            cache: CacheModel {
                attention: Attention::Window(NonZeroUsize::new(2).unwrap()),
                ..CacheModel::default()
            },
            ..comparison(4)
        };
        run(&hybrid, scenario, policy, &requests()).unwrap()
    }

    #[test]
    fn every_request_gets_its_first_token_under_every_policy_and_scenario() {
        for scenario in Scenario::ALL {
            for policy in Policy::ALL {
                for of in [of, of_hybrid] {
                    let outcome = of(policy, &scenario);
                    assert_eq!(outcome.requests, 400, "{outcome:?}");
                    // A first token comes only after its prompt is computed and the token is made.
                    assert!(outcome.first_token_ms_p50 >= 24.0, "{outcome:?}");
                    assert_eq!(outcome, of(policy, &scenario));
                }
            }
        }
    }

    #[test]
    fn a_pause_of_years_ends_at_once() {
        let mut requests = requests();
        for (number, request) in requests.iter_mut().enumerate() {
            let years = number as u64 / 100;
            request.arrival_ms = request.arrival_ms.saturating_add(years * 1_700_000_000_000_000);
        }
        requests.last_mut().unwrap().arrival_ms = u64::MAX;
        for scenario in Scenario::ALL {
            let outcome = run(&comparison(4), &scenario, Policy::ExactWithLoad, &requests).unwrap();
            assert_eq!(outcome.requests, 400, "{outcome:?}");
        }
    }

    #[test]
    fn usable_blocks_are_found_and_matched_ones_are_not() {
        let quiet = &Scenario::ALL[0];
        let lacking = |outcome: PolicyOutcome| outcome.promised_rate - outcome.hit_rate;
        let usable = lacking(of_hybrid(Policy::ExactWithLoad, quiet));
        let matched = lacking(of_hybrid(Policy::MatchedWithLoad, quiet));
        // What is cached changes while a prompt waits for its turn.
        assert!(usable.abs() < 0.005 && matched > 0.02, "{usable} {matched}");
        // In a model with full attention alone, a request can reuse every matched block.
        let same = of(Policy::ExactWithLoad, quiet);
        let plain = of(Policy::MatchedWithLoad, quiet);
        assert_eq!(
            (same.computed_blocks, same.promised_rate),
            (plain.computed_blocks, plain.promised_rate)
        );
    }

    #[test]
    fn what_is_hit_is_not_computed() {
        let total: u64 = requests().iter().map(|request| request.chain.len() as u64).sum();
        for policy in Policy::ALL {
            let outcome = of(policy, &Scenario::ALL[0]);
            #[allow(clippy::cast_precision_loss, reason = "small numbers")]
            let hit = 1.0 - outcome.computed_blocks as f64 / total as f64;
            assert!((hit - outcome.hit_rate).abs() < 1e-9, "{outcome:?}");
        }
    }

    #[test]
    fn knowledge_finds_more_than_chance() {
        let exact = of(Policy::Exact, &Scenario::ALL[0]);
        let random = of(Policy::Random, &Scenario::ALL[0]);
        assert!(exact.hit_rate > random.hit_rate, "{exact:?} {random:?}");
    }

    #[test]
    fn without_answers_nothing_is_promised() {
        let promised = |scenario: &Scenario| of(Policy::ExactWithLoad, scenario).promised_rate;
        let [_, four, .., blind] = &Scenario::ALL;
        assert_eq!(blind.routers, four.routers);
        assert!(promised(blind) > 0.1 && promised(blind) < promised(four) * 0.8);
    }

    #[test]
    fn with_one_worker_all_policies_are_one() {
        let alone = comparison(1);
        let outcomes = Policy::ALL.map(|policy| run(&alone, &Scenario::ALL[0], policy, &requests()).unwrap());
        let hits: Vec<u64> = outcomes.iter().map(|outcome| outcome.computed_blocks).collect();
        assert!(hits.windows(2).all(|pair| pair[0] == pair[1]), "{hits:?}");
    }
}
