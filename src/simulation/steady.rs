//! A fleet that serves requests at a steady rate for ever, with a daemon that may come and go.
//!
//! Unlike a [replay](super::Replay), nothing is checked, and a failure does not end the fleet. A request for which the daemon
//! gives no answer goes to any worker, as it would in a real fleet.

use std::num::NonZeroU32;
use std::time::Duration;

use kvatlas_client::QueryClient;
use kvatlas_client::publish::{HolderPublisher, PublishedHolder, PublisherOptions, Transport};
use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::{HolderMatch, NamespaceName, Outcome, QueryKey, SingleQuery, Subjects};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::error::SimulationError;
use super::fleet::{Fleet, FleetSize, RANK};
use super::replay::publish;
use super::session::{DaemonAnswer, SUBSCRIPTION_CAPACITY, answered};
use super::synthetic::SyntheticLoad;
use kvatlas_config::Config;
use kvatlas_process::broker::{ConnectPatience, connect};

/// Longest time that a router waits for an answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);
/// Time that a daemon has to apply the first events, before it must know the namespace.
const APPLY_PATIENCE: Duration = Duration::from_secs(1);
/// Longest time that the workers' goodbyes may take.
const GOODBYE_PATIENCE: Duration = Duration::from_millis(1500);

/// Settings of a steady fleet.
#[derive(Debug, Clone)]
pub struct SteadyOptions {
    /// The namespace of the workers. No other process may use their names in it.
    pub namespace: NamespaceName,
    /// Size of the fleet.
    pub size: FleetSize,
    /// Number of requests that arrive in a second.
    pub rate: NonZeroU32,
    /// Seed of the conversations, and of the choice between equally good workers.
    pub seed: u64,
    /// Transport of the events.
    pub transport: Transport,
}

/// Counts of the requests that one call of [`SteadyFleet::go_on`] has served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SteadyTally {
    /// Requests served.
    pub requests: u64,
    /// Blocks of the requests served.
    pub requested_blocks: usize,
    /// Blocks of the requests served that the chosen worker held.
    pub hit_blocks: usize,
    /// Requests that the daemon did not answer, or refused.
    pub unanswered: u64,
    /// Answers that were not exact: a holder was degraded, holders may have been unknown, or a shard was missing.
    pub degraded: u64,
}

/// A running steady fleet.
pub struct SteadyFleet {
    options: SteadyOptions,
    routers: QueryClient,
    fleet: Fleet,
    publishers: Vec<HolderPublisher>,
    load: SyntheticLoad,
    tally: SteadyTally,
    /// Time from which on a daemon must know the namespace. `None` until events have been published.
    known_from: Option<Instant>,
}

impl SteadyFleet {
    /// Creates a fleet of workers with empty caches. Does not wait for NATS or the daemon.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Connect`] if the credentials cannot be used; [`SimulationError::Prefix`] if the subjects' prefix is not
    /// valid.
    pub async fn start(config: &Config, options: SteadyOptions) -> Result<Self, SimulationError> {
        let subjects = Subjects::new(&config.subjects.prefix)?;
        let open = |role: &'static str| {
            let last = watch::Sender::new(None);
            connect(
                &config.nats,
                role,
                SUBSCRIPTION_CAPACITY,
                ConnectPatience::Forever,
                move |notice| {
                    // Each failed attempt to connect gives the same notice, which is logged only once.
                    let is_news =
                        last.send_if_modified(|last| last.replace(notice.clone()).as_ref() != Some(&notice));
                    if is_news {
                        tracing::info!(role, %notice, "NATS");
                    }
                },
            )
        };
        let routers = QueryClient::new(open("routers").await?, subjects.clone());
        let nats = open("publishers").await?;
        let fleet = Fleet::new(options.size, options.seed)?;
        let mut publishers = Vec::with_capacity(options.size.workers.get());
        for name in fleet.names() {
            let holder = PublishedHolder {
                namespace: options.namespace.clone(),
                worker: name.clone(),
                rank: RANK,
            };
            let how = PublisherOptions {
                transport: options.transport,
                ..PublisherOptions::default()
            };
            publishers.push(HolderPublisher::start(nats.clone(), &subjects, holder, how).await?);
        }
        Ok(Self {
            routers: routers.with_patience(ANSWER_PATIENCE),
            fleet,
            publishers,
            load: SyntheticLoad::new(options.seed),
            tally: SteadyTally::default(),
            known_from: None,
            options,
        })
    }

    /// Serves requests for `time`, and returns the counts of that time.
    ///
    /// # Errors
    ///
    /// [`SimulationError::Publisher`] if a publisher has ended.
    pub async fn go_on(&mut self, time: Duration) -> Result<SteadyTally, SimulationError> {
        let mut arrivals = tokio::time::interval(Duration::from_secs(1) / self.options.rate.get());
        // If a slow answer delays requests, the fleet does not send them faster afterwards.
        arrivals.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let until = Instant::now() + time;
        while arrivals.tick().await < until {
            self.serve_next().await?;
        }
        Ok(std::mem::take(&mut self.tally))
    }

    /// Announces the departure of all workers, so that daemons forget them.
    pub async fn say_goodbye(self) {
        let leave = self.publishers.into_iter().map(HolderPublisher::say_goodbye);
        let leaves = futures_util::future::join_all(leave);
        if tokio::time::timeout(GOODBYE_PATIENCE, leaves).await.is_err() {
            tracing::warn!("not every worker could take its leave; daemons forget the others after a while");
        }
    }

    /// Routes one request by the daemon's answer, publishes the changes in the worker's cache, and reports the outcome.
    async fn serve_next(&mut self) -> Result<(), SimulationError> {
        let Some(request) = self.load.next() else {
            return Ok(());
        };
        let query = SingleQuery::new(QueryKey::SequenceHashes(request.chain.clone()));
        let (mut matches, mut holders) = (vec![0; self.options.size.workers.get()], Vec::new());
        match answered(self.routers.query(&self.options.namespace, query).await) {
            Ok(DaemonAnswer::Reply(reply)) => {
                matches = self.fleet.matches_in(&reply);
                holders.clone_from(&reply.holders);
                self.tally.degraded += u64::from(!reply.is_exact());
            }
            // The first events may not have been applied yet.
            Ok(DaemonAnswer::UnknownNamespace)
                if self.known_from.is_none_or(|from| Instant::now() < from) => {}
            Ok(DaemonAnswer::UnknownNamespace | DaemonAnswer::Unavailable) => self.tally.unanswered += 1,
            Err(error) => {
                tracing::debug!(%error, "no answer");
                self.tally.unanswered += 1;
            }
        }
        let served = self.fleet.serve(&request, &matches);
        self.tally.requests += 1;
        self.tally.requested_blocks += request.chain.len();
        self.tally.hit_blocks += served.admission.hit_blocks;
        if let Some(publisher) = self.publishers.get(served.worker)
            && !served.events.is_empty()
        {
            publish(publisher, served.events).await?;
            self.known_from
                .get_or_insert_with(|| Instant::now() + APPLY_PATIENCE);
        }
        let worker = self.fleet.names().nth(served.worker);
        let promised = holders.iter().find(|holder| Some(&holder.worker) == worker);
        self.tell(promised, served.admission.hit_blocks).await;
        Ok(())
    }

    /// Reports the outcome of a request to the daemon: how many blocks the request found in the worker's cache, and
    /// how many the daemon's answer (`promised`) had led the router to expect. In a real fleet, the engine tells the
    /// router the first number.
    async fn tell(&self, promised: Option<&HolderMatch>, hit_blocks: usize) {
        let Some(promised) = promised else { return };
        let found = hit_blocks.saturating_mul(BlockSize::default().as_usize());
        let outcome = Outcome {
            prompt_tokens: None,
            ..Outcome::of(promised, u32::try_from(found).unwrap_or(u32::MAX), 0)
        };
        if let Err(error) = self
            .routers
            .tell_outcomes(&self.options.namespace, vec![outcome])
            .await
        {
            tracing::debug!(%error, "an outcome is not told");
        }
    }
}
