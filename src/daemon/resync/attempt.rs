//! One attempt to resync a holder. It asks the holder's publisher, and applies the answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::Client;
use tokio_util::sync::CancellationToken;

use crate::lanes::{HolderKey, LanePool, ResyncAnswer, ResyncBegun, ResyncOutcome, epoch_max};
use kvatlas_client::Backoff;
use kvatlas_config::Config;
use kvatlas_core::index::Namespaces;
use kvatlas_core::stream::{StreamGeneration, StreamTrust};
use kvatlas_core::wire::{ResyncRequest, Subjects};
use kvatlas_telemetry::ResyncMetrics;
use kvatlas_telemetry::labels::ResyncFailure;

use super::answers::{Answers, ResyncMessage};
use super::assembly::{AnswerLimits, AnswerProgress, Assembly, Evidence};
use super::slots::ResyncSlot;

/// Settings for resyncs, that is, for asking publishers.
#[derive(Debug, Clone)]
pub(super) struct ResyncSettings {
    /// Maximum number of publishers that are asked at the same time.
    pub(super) concurrency: usize,
    /// Maximum time to wait for a publisher's answer.
    pub(super) timeout: Duration,
    /// Bounds on an answer of a publisher.
    pub(super) answer: AnswerLimits,
    /// Pauses between attempts to resync one holder.
    pub(super) backoff: Backoff,
}

impl ResyncSettings {
    /// Reads the settings from `config`.
    pub(super) fn of(config: &Config) -> Self {
        /// Minimum size of a useful chunk, in bytes. Most chunks are far larger.
        const BYTES_PER_CHUNK_MIN: usize = 1024;
        let chunks_max = (config.resync.max_answer_bytes / BYTES_PER_CHUNK_MIN).max(64);
        Self {
            concurrency: config.resync.concurrency,
            timeout: config.resync.timeout,
            answer: AnswerLimits {
                bytes_max: config.resync.max_answer_bytes,
                chunks_max: u32::try_from(chunks_max).unwrap_or(u32::MAX),
            },
            backoff: Backoff {
                pause_min: config.resync.retry_min,
                pause_max: config.resync.retry_max,
            },
        }
    }
}

/// Parts of the daemon that a resyncer uses.
pub(super) struct ResyncerParts {
    pub(super) client: Client,
    /// Inbox for the expected answers of publishers.
    pub(super) answers: Arc<Answers>,
    /// Subjects on which publishers are asked.
    pub(super) subjects: Subjects,
    /// Namespaces of the holders.
    pub(super) namespaces: Arc<Namespaces>,
    /// Lanes that apply the answers.
    pub(super) pool: Arc<LanePool>,
    /// State of the event stream, which says whether events are followed. If they are not, no answer proves anything.
    pub(super) trust: Arc<StreamTrust>,
}

/// Attempt to resync one holder.
pub(super) struct Attempt {
    pub(super) parts: Arc<ResyncerParts>,
    pub(super) settings: Arc<ResyncSettings>,
    pub(super) metrics: Arc<ResyncMetrics>,
    pub(super) holder: HolderKey,
    /// Generation of the event stream in which the publisher is asked. The generation changes when messages may have
    /// been lost.
    pub(super) generation: StreamGeneration,
    /// Token that is cancelled when the publisher's answer is no longer waited for.
    pub(super) overtaken: CancellationToken,
}

impl Attempt {
    /// Asks the publisher, and applies its answer. The `slot` (permission for one publisher to answer) is kept until
    /// the answer has been applied.
    pub(super) async fn run(self, mut slot: ResyncSlot) -> Result<(), ResyncFailure> {
        let started = Instant::now();
        let pool = &self.parts.pool;
        let begun = pool.begin_resync(&self.holder).await;
        let Some(begun) = begun.map_err(|_| ResyncFailure::Disconnected)? else {
            return Err(ResyncFailure::Superseded);
        };
        self.metrics.started.increment(1);
        let mut assembly = self.assembly(&begun);
        let asking = self.ask(&begun, &mut assembly, &mut slot);
        let asking = tokio::time::timeout(self.settings.timeout, asking);
        let answer = match self.overtaken.run_until_cancelled(asking).await {
            None => Err(ResyncFailure::Superseded),
            Some(Ok(answer)) => answer,
            Some(Err(_)) if assembly.has_seen_outdated() => Err(ResyncFailure::StaleEpoch),
            Some(Err(_)) => Err(ResyncFailure::TimedOut),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                // A stopped lane needs no news.
                let _ = pool.abandon_resync(&self.holder, begun.number, failure);
                return Err(failure);
            }
        };
        let batches = answer.batches.len();
        let outcome = pool
            .finish_resync(&self.holder, begun.number, answer, self.generation)
            .await;
        match outcome.map_err(|_| ResyncFailure::Disconnected)? {
            ResyncOutcome::Exact => {
                let named = format!("{}/{}", self.holder.0.worker, self.holder.1);
                self.metrics.succeeded(&named, batches, started.elapsed());
                Ok(())
            }
            ResyncOutcome::Incomplete => Err(ResyncFailure::Incomplete),
            ResyncOutcome::Superseded => Err(ResyncFailure::Superseded),
        }
    }

    fn request(&self, begun: &ResyncBegun) -> ResyncRequest {
        ResyncRequest {
            rank: self.holder.1,
            cursor: begun.cursor,
            full: begun.full,
        }
    }

    fn assembly(&self, begun: &ResyncBegun) -> Assembly {
        let namespace = self.parts.namespaces.get(&self.holder.0.namespace);
        let settings = namespace.map(|namespace| *namespace.indexer.settings());
        let limits = self.parts.pool.limits().now();
        Assembly::new(
            self.request(begun),
            Evidence {
                seen: begun.seen,
                epoch_max: epoch_max(limits.epoch_ahead_max),
            },
            settings.unwrap_or_default(),
            self.settings.answer,
            limits.wire.clone(),
        )
    }

    /// Asks the publisher, and assembles its answer.
    async fn ask(
        &self,
        begun: &ResyncBegun,
        assembly: &mut Assembly,
        slot: &mut ResyncSlot,
    ) -> Result<ResyncAnswer, ResyncFailure> {
        let client = &self.parts.client;
        let (worker, rank) = &self.holder;
        let subject = self
            .parts
            .subjects
            .resync(&worker.namespace, &worker.worker, *rank);
        let mut reply = self.parts.answers.expect();
        let payload = self.request(begun).encode();
        client
            .publish_with_reply(subject, reply.subject(), payload.into())
            .await
            .map_err(|_| ResyncFailure::Disconnected)?;
        let mut next = slot.wait_for(reply.next()).await;
        while let Some(word) = next {
            let payload = match word {
                ResyncMessage::NoResponder => return Err(ResyncFailure::NoResponder),
                ResyncMessage::Refused => return Err(ResyncFailure::Refused),
                ResyncMessage::Lost => return Err(ResyncFailure::Disconnected),
                ResyncMessage::Chunk(payload) => payload,
            };
            match assembly.take(&payload)? {
                AnswerProgress::More | AnswerProgress::Outdated => {}
                AnswerProgress::Whole(answer) => return Ok(answer),
            }
            next = reply.next().await;
        }
        Err(ResyncFailure::TooLarge)
    }
}
