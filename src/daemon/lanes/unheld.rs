//! The registry of publishers without a holder: the reason why each has no holder, and facts that the daemon remembers
//! about each. All lanes share the registry.
//!
//! Each message for which there is no holder is counted by its reason, [`NoHolder`]. Four tables remember more. They
//! are separate, because they lose different things when they are full:
//!
//! | table | key | bound | beyond the bound | an entry ends with |
//! |---|---|---|---|---|
//! | [`RefusedHolders`] | holder | 4,096 workers, 64 ranks each | no entry | its holder, goodbye, silence or a command; see below |
//! | [`Strays`] | namespace that does not exist | 64 names | any name may be one of them | its namespace, or 300 seconds of silence |
//! | [`Unreadable`] | worker | none, a Bloom filter | other workers are put in doubt without cause | 60 seconds |
//! | [`Goodbyes`] | holder | 65,536 holders | the oldest entry is forgotten | 60 seconds |
//!
//! [`RefusedHolders`] is part of the index, one for each namespace. Answers stay inexact even beyond its bound, because
//! other holders are listed as refused already.
//!
//! A worker can have holders of some ranks, while messages of another rank cannot be read. Such a message does not tell
//! its rank. So [`RefusedHolders`] has an entry beside the holders. This entry ends 1.5 to 2.5 seconds after the last
//! such message.
//!
//! A publisher can be in several tables. For example, a publisher that has said goodbye is refused as well if it sends
//! a batch of another block size.

mod goodbyes;
mod strays;
mod unreadable;

use std::sync::Arc;

use parking_lot::Mutex;

use kvatlas_client::unix_time_us;
use kvatlas_core::hash::BlockSize;
use kvatlas_core::index::{Namespace, NamespaceRefused, RegisterError};
use kvatlas_core::stream::{RefusedAt, RefusedHolders, RefusedName};
use kvatlas_core::wire::{DecodeError, EventBatch, NamespaceName, Rank, SubjectError, WorkerName};
use kvatlas_telemetry::labels::{DropReason, LabelValue};

use super::clock::now_us;
use super::contest::is_fresh;
use super::holder::JobClocks;
use super::line::Sender;
use super::liveness::ListeningClock;

pub(super) use goodbyes::Goodbye;
use goodbyes::Goodbyes;
pub(crate) use strays::{Stray, Strays};
use unreadable::Unreadable;

/// Reason why there is no holder for a message. Its text becomes the detail in the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoHolder {
    /// Message cannot be read.
    #[error(transparent)]
    Unreadable(#[from] DecodeError),
    /// Name of the worker in the message's subject is not accepted.
    #[error(transparent)]
    Subject(#[from] SubjectError),
    /// Namespace of the message does not exist and cannot be made.
    #[error(transparent)]
    NoNamespace(#[from] NamespaceRefused),
    /// Index has no room for a holder.
    #[error(transparent)]
    NoRoom(#[from] RegisterError),
    /// Epoch of the batch lies too far ahead of the clock. The value is the epoch.
    #[error("{0}")]
    EpochAhead(u64),
    /// Publisher has said goodbye after it made the batch.
    #[error("its publisher has said goodbye")]
    Left(DropReason),
    /// Block size of the batch differs from the namespace's. A batch that tells no block size is taken to have the
    /// configured one.
    #[error(
        "{}, and the namespace's have {in_force}; set namespaces.{namespace}.block_size, or end those that use the other",
        told_words(*.told)
    )]
    OtherSize {
        namespace: NamespaceName,
        in_force: BlockSize,
        told: Option<BlockSize>,
    },
}

fn told_words(told: Option<BlockSize>) -> String {
    match told {
        Some(told) => format!("its blocks have {told} tokens"),
        None => "it does not say how many tokens its blocks have".to_owned(),
    }
}

impl NoHolder {
    /// Returns the reason as metrics name it.
    pub(super) fn reason(&self) -> DropReason {
        match self {
            Self::Unreadable(DecodeError::Oversized { .. }) => DropReason::Oversized,
            Self::Unreadable(_) => DropReason::Undecodable,
            Self::Subject(_) => DropReason::BadSubject,
            Self::NoNamespace(NamespaceRefused::LimitReached { .. }) => DropReason::TooManyNamespaces,
            Self::NoNamespace(NamespaceRefused::NotNamed) => DropReason::NamespaceNotNamed,
            Self::NoNamespace(NamespaceRefused::OtherBlockSize { .. }) | Self::OtherSize { .. } => {
                DropReason::OtherSettings
            }
            Self::NoRoom(RegisterError::TooManyRanks { .. }) => DropReason::TooManyRanks,
            Self::NoRoom(_) => DropReason::TooManyWorkers,
            Self::EpochAhead(_) => DropReason::EpochAhead,
            Self::Left(reason) => *reason,
        }
    }
}

/// Registry of publishers without a holder.
#[derive(Debug, Default)]
pub(super) struct Unheld {
    pub(super) strays: Arc<Strays>,
    pub(super) unreadable: Unreadable,
    pub(super) goodbyes: Goodbyes,
    listening: Mutex<ListeningClock>,
}

impl Unheld {
    /// Counts the time since the last call as listening time, if messages could be received.
    pub(super) fn look(&self, is_listening: bool) {
        self.listening.lock().look(now_us(), is_listening);
    }

    /// Returns the listening time so far (time in which messages could be received), in microseconds. Silence is
    /// measured in this time.
    pub(super) fn listened_us(&self) -> u64 {
        self.listening.lock().now_us()
    }

    /// Notes a dropped batch of a holder that is not registered. Answers then say that this holder may have unknown
    /// blocks. Returns whether this is the holder's first dropped batch.
    pub(super) fn note(
        &self,
        refused: &RefusedHolders,
        worker: &RefusedName,
        rank: Rank,
        reason: DropReason,
        unix_us: u64,
    ) -> bool {
        refused.note(worker, rank, reason.as_str(), self.refused_at(unix_us))
    }

    /// Notes that batches of a lower epoch are dropped, as [`Self::note`] does, of a publisher that may have ended.
    pub(super) fn note_stale(&self, refused: &RefusedHolders, worker: &WorkerName, rank: Rank, unix_us: u64) {
        let reason = DropReason::StaleEpoch.as_str();
        refused.note_briefly(&worker.into(), rank, reason, self.refused_at(unix_us));
    }

    /// Notes that a message of a worker was dropped because it cannot be read. Answers then say that the worker may
    /// have unknown blocks. `has_holders` says whether the worker has holders. `reason` is the reason as metrics name it.
    pub(super) fn note_unread(
        &self,
        namespace: &Namespace,
        worker: &RefusedName,
        has_holders: bool,
        reason: &'static str,
        unix_us: u64,
    ) {
        let refused = namespace.indexer.refused();
        refused.note_unread(worker, has_holders, reason, self.refused_at(unix_us));
    }

    /// Notes that any publisher of a namespace may be unknown until its next message, because a message was dropped that
    /// may be its own.
    pub(super) fn note_anybody(&self, refused: &RefusedHolders, reason: &'static str) {
        refused.note_anybody(reason, self.refused_at(unix_time_us()));
    }

    fn refused_at(&self, unix_us: u64) -> RefusedAt {
        RefusedAt {
            listened_us: self.listened_us(),
            unix_us,
        }
    }

    /// Notes a dropped batch as [`Self::note`] does. If the batch ends with a goodbye, removes the holder's note
    /// instead.
    pub(super) fn note_batch(
        &self,
        namespace: &Namespace,
        worker: &RefusedName,
        batch: &EventBatch,
        reason: DropReason,
        unix_us: u64,
    ) -> bool {
        let refused = namespace.indexer.refused();
        if batch.says_goodbye() {
            refused.forget(worker, batch.rank);
            return false;
        }
        self.note(refused, worker, batch.rank, reason, unix_us)
    }

    /// Counts and notes a batch for which there is no holder.
    pub(super) fn refuse(&self, sender: &Sender, batch: &EventBatch, why: &NoHolder, clocks: &JobClocks) {
        let (worker, unix_us) = (&sender.worker.worker, clocks.unix_us);
        let is_first = match why {
            NoHolder::Left(reason) => {
                self.note_left(sender, batch, *reason, clocks);
                false
            }
            _ => self.note_batch(&sender.namespace, &worker.into(), batch, why.reason(), unix_us),
        };
        count(sender, batch, why, is_first);
    }

    /// Notes a batch that is dropped for `reason` behind a goodbye, as [`Self::note_stale`] does, if it comes from another
    /// publisher that goes on: it is a new batch with a lower epoch. An old one may be a redelivery.
    pub(super) fn note_left(
        &self,
        sender: &Sender,
        batch: &EventBatch,
        reason: DropReason,
        clocks: &JobClocks,
    ) {
        let is_alive = clocks.is_new || is_fresh(batch, clocks.unix_us);
        if reason == DropReason::StaleEpoch && is_alive && !batch.says_goodbye() {
            let refused = sender.namespace.indexer.refused();
            self.note_stale(refused, &sender.worker.worker, batch.rank, clocks.unix_us);
        }
    }
}

/// Counts a batch that is dropped. `is_first` says whether it is the first dropped batch of its holder.
pub(super) fn count(sender: &Sender, batch: &EventBatch, why: &NoHolder, is_first: bool) {
    let (metrics, worker) = (&sender.metrics, sender.worker.worker.as_str());
    match why {
        NoHolder::OtherSize { .. } => metrics.settings_refused(is_first, worker, batch.rank, why),
        _ => metrics.batch_dropped(why.reason(), worker, why),
    }
}
