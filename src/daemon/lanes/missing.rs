//! Messages whose namespaces do not exist, and publishers without a holder, as the pool of lanes tells of them.

use std::sync::Arc;

use kvatlas_client::unix_time_us;
use kvatlas_core::index::Namespace;
use kvatlas_core::stream::RefusedName;
use kvatlas_core::wire::{EventBatch, NamespaceName, SubjectError};
use kvatlas_telemetry::labels::{DropReason, LabelValue};

use super::pool::LanePool;
use super::unheld::{NoHolder, Stray, Strays};

impl LanePool {
    /// Returns the namespaces that do not exist although messages for them came in the last 300 seconds.
    pub(crate) fn strays(&self) -> Vec<Stray> {
        let exists = |name: &NamespaceName| self.namespaces.get(name).is_some();
        self.unheld.strays.lately(unix_time_us(), exists)
    }

    /// Returns the record of namespaces that do not exist although messages for them came.
    pub(crate) fn stray_names(&self) -> Arc<Strays> {
        Arc::clone(&self.unheld.strays)
    }

    /// Whether messages of the last 300 seconds were dropped because their namespace does not exist. Only names that
    /// satisfy `is_meant` count, and names that are not remembered.
    pub(crate) fn lacks_any(&self, is_meant: impl Fn(&NamespaceName) -> bool) -> bool {
        let mut strays = self.strays().into_iter();
        strays.any(|stray| is_meant(stray.namespace())) || self.unheld.strays.lacks_some(unix_time_us())
    }

    /// Whether publishers' batches are being dropped, so that these publishers have no holders.
    pub(crate) fn drops_some(&self) -> bool {
        let refuses = |namespace: &Arc<Namespace>| namespace.indexer.refused().count(None) > 0;
        self.namespaces.all().iter().any(refuses) || !self.strays().is_empty()
    }

    /// Counts a message or snapshot frame that cannot be taken because its namespace does not exist.
    pub(super) fn note_stray(&self, name: &NamespaceName, worker: &RefusedName, why: impl Into<NoHolder>) {
        let why = why.into();
        self.unattributed.batch_dropped(why.reason(), name.as_str(), &why);
        self.unheld
            .strays
            .note(name, worker, why.reason(), &why, unix_time_us());
    }

    /// Returns the reason why messages of the last 300 seconds were dropped that are, or may be, for the namespace `name`,
    /// which does not exist. `None` if there were none.
    ///
    /// If the namespace is made now, it begins in doubt. The dropped messages' publishers are known once each has sent
    /// its next message, so the doubt is as short as one about a message that cannot be read.
    pub(super) fn former_stray(&self, name: &NamespaceName) -> Option<&'static str> {
        let now_us = unix_time_us();
        let strays = &self.unheld.strays;
        // Messages of this namespace may be among those whose namespaces are not remembered.
        let lacks_some = strays
            .lacks_some(now_us)
            .then(|| DropReason::TooManyNamespaces.as_str());
        strays.last_reason(name, now_us).or(lacks_some)
    }

    /// Counts a message whose subject is not accepted. If the subject has a namespace, notes that the blocks of the
    /// message's worker are not known there.
    ///
    /// The namespace is not made: no worker of an accepted name has sent anything of it.
    pub(super) fn refuse_subject(&self, subject: &str, payload: &[u8], error: &SubjectError) {
        let reason = DropReason::BadSubject;
        let limits = self.limits().now();
        let found = self
            .subjects
            .events_of_any_worker(subject, limits.wire.name_bytes_max);
        let is_own = |text: &str| self.shard.as_ref().is_none_or(|(shard, _)| shard.owns_text(text));
        let Some((name, text)) = found.filter(|(_, text)| is_own(text)) else {
            self.unattributed.batch_dropped(reason, subject, error);
            return;
        };
        let worker = RefusedName::in_subject(text);
        let Some(namespace) = self.namespaces.get(&name) else {
            self.note_stray(&name, &worker, error.clone());
            return;
        };
        self.unattributed.batch_dropped(reason, subject, error);
        match EventBatch::decode(payload, &limits.wire) {
            Ok(batch) => {
                _ = self
                    .unheld
                    .note_batch(&namespace, &worker, &batch, reason, unix_time_us())
            }
            Err(_) => self
                .unheld
                .note_unread(&namespace, &worker, false, reason.as_str(), unix_time_us()),
        }
    }
}
