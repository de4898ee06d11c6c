//! Troubles of a namespace that degrade none of its holders: publishers whose batches are dropped, and epochs in the
//! future. An epoch numbers the runs of a publisher by their start times, in microseconds. It counts as in the future
//! if it is more than 5 seconds later than this daemon's clock.

use std::sync::Arc;

use serde::Serialize;

use kvatlas_core::index::{HolderRecord, Namespace};
use kvatlas_core::stream::RefusedPublisher;

use super::lanes::epoch_ahead_s;

/// Maximum number of publishers or holders that are named for each trouble.
const NAMED_MAX: usize = 8;

/// Publishers and holders that cause troubles, as a table of names and numbers for the admin listener.
#[derive(Debug, Serialize)]
pub(crate) struct Troubles {
    /// Publishers whose batches are dropped, each with the reason. Such a publisher has no holder that could show the
    /// trouble.
    refused: Vec<RefusedPublisher>,
    /// Number of all publishers whose batches are dropped, including publishers that `refused` does not name.
    refused_total: usize,
    /// Some of the holders whose epoch lies in the future, each as `WORKER/RANK`.
    ahead: Vec<String>,
    /// Earliest time at which this daemon saw one of the epochs counted in `epochs_ahead` begin, in microseconds since
    /// the Unix epoch. `None` if no such time is known.
    ahead_since_us: Option<u64>,
    /// Number of all holders whose epoch lies in the future, including holders that `ahead` does not name.
    epochs_ahead: usize,
}

impl Troubles {
    /// Returns the troubles of a namespace at the time `now_us`, in microseconds since the Unix epoch.
    pub(crate) fn of(namespace: &Namespace, now_us: u64) -> Self {
        let holders = namespace.indexer.holders();
        let is_ahead =
            |holder: &&Arc<HolderRecord>| epoch_ahead_s(holder.status.cursor.load().epoch, now_us) > 0;
        let mut ahead: Vec<_> = holders.iter().filter(is_ahead).collect();
        ahead.sort_unstable_by(|one, other| one.id.cmp(&other.id));
        let begun = ahead.iter().map(|holder| holder.status.epoch_since_us.load());
        let mut refused = namespace.indexer.refused().named(usize::MAX);
        let refused_total = refused.len();
        refused.truncate(NAMED_MAX);
        Self {
            refused,
            refused_total,
            epochs_ahead: ahead.len(),
            ahead_since_us: begun.filter(|since_us| *since_us > 0).min(),
            ahead: ahead
                .into_iter()
                .take(NAMED_MAX)
                .map(|holder| holder.id.to_string())
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::shared::unbounded;
    use kvatlas_core::stream::{RefusedAt, RefusedName};
    use kvatlas_core::wire::{BatchCursor, HolderId, NamespaceName, WorkerName};

    use super::*;

    const NOW_US: u64 = 1_800_000_000_000_000;

    #[test]
    fn culprits_are_named_with_the_time_since_which_they_are_known() {
        let namespaces = unbounded(4);
        let name = NamespaceName::new("n").unwrap();
        let namespace = namespaces.get_or_create(&name, None).unwrap();
        let worker = |name: &str| WorkerName::new(name).unwrap();
        let at = |seconds: u64| RefusedAt {
            listened_us: seconds,
            unix_us: NOW_US + seconds,
        };
        let refused = RefusedName::from(&worker("wide"));
        namespace
            .indexer
            .refused()
            .note(&refused, 0, "undecodable", at(1));
        namespace
            .indexer
            .refused()
            .note(&refused, 0, "other_settings", at(9));
        let register = |name: &str, epoch_since_us: u64| {
            let id = HolderId {
                worker: worker(name),
                rank: 0,
            };
            let holder = namespace.indexer.register(&id).unwrap();
            let epoch = NOW_US + 60_000_000;
            holder.status().cursor.store(BatchCursor { epoch, seq: 1 });
            holder.status().epoch_since_us.store(epoch_since_us);
            holder
        };
        let _holders = [register("b", 7), register("a", 0), register("c", 8)];
        let told = serde_json::to_value(Troubles::of(&namespace, NOW_US)).unwrap();
        let expected = serde_json::json!({
            "refused": [{"worker": "wide", "reason": "other_settings", "since_us": NOW_US + 1}],
            "refused_total": 1,
            "ahead": ["a/0", "b/0", "c/0"],
            "ahead_since_us": 7,
            "epochs_ahead": 3,
        });
        assert_eq!(told, expected);
        for number in 0..NAMED_MAX {
            let refused = RefusedName::from(&worker(&format!("odd-{number}")));
            namespace
                .indexer
                .refused()
                .note(&refused, 0, "undecodable", at(9));
        }
        let told = Troubles::of(&namespace, NOW_US);
        assert_eq!(
            (told.refused.len(), told.refused_total),
            (NAMED_MAX, NAMED_MAX + 1)
        );
    }
}
