//! Namespaces that do not exist although messages with events name them. None of these events could be applied, so no
//! holder, answer or namespace shows them.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use serde::Serialize;

use kvatlas_core::stream::RefusedName;
use kvatlas_core::wire::{NamespaceName, PROBE_NAME};
use kvatlas_telemetry::labels::{DropReason, LabelValue};

/// Maximum number of names of missing namespaces that are kept. Messages for further names only show in the metrics.
const NAMES_MAX: usize = 64;
/// Time without a message after which the name of a missing namespace is forgotten, in microseconds.
const KEPT_US: u64 = 300_000_000;
/// Maximum number of characters of an error that are kept.
const DETAIL_CHARACTERS_MAX: usize = 200;

/// Name of a namespace that does not exist, with facts about the messages that were dropped for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Stray {
    namespace: NamespaceName,
    /// Publisher of the last dropped message.
    worker: RefusedName,
    /// Reason for which the last message was dropped, as metrics name it.
    reason: &'static str,
    /// Error text of the last dropped message.
    detail: String,
    messages: u64,
    /// Time of the first dropped message, in microseconds since the Unix epoch. `last_us` is the time of the last
    /// one.
    since_us: u64,
    last_us: u64,
}

impl Stray {
    /// Returns the name of the namespace.
    pub(crate) fn namespace(&self) -> &NamespaceName {
        &self.namespace
    }
}

/// Names of namespaces that do not exist, with facts about the messages that were dropped for them.
#[derive(Debug, Default)]
pub(crate) struct Strays(Mutex<StrayTable>);

#[derive(Debug, Default)]
struct StrayTable {
    by_name: BTreeMap<NamespaceName, Stray>,
    /// Time of the last message whose namespace found no room in `by_name`, in microseconds since the Unix epoch. 0 if
    /// there was none.
    unlisted_us: u64,
}

/// Whether a message that came at `last_us` is recent enough to count.
fn is_recent(last_us: u64, now_us: u64) -> bool {
    now_us.saturating_sub(last_us) < KEPT_US
}

impl Strays {
    /// Notes a message that was dropped at `now_us`, in microseconds since the Unix epoch.
    ///
    /// Messages of `kvatlas doctor` are left out: the doctor itself reports what became of its probe.
    pub(in super::super) fn note(
        &self,
        namespace: &NamespaceName,
        worker: &RefusedName,
        reason: DropReason,
        error: &dyn std::fmt::Display,
        now_us: u64,
    ) {
        if [namespace.as_str(), worker.as_str()].contains(&PROBE_NAME) {
            return;
        }
        let StrayTable { by_name, unlisted_us } = &mut *self.0.lock();
        if by_name.len() >= NAMES_MAX && !by_name.contains_key(namespace) {
            by_name.retain(|_, stray| is_recent(stray.last_us, now_us));
            if by_name.len() >= NAMES_MAX {
                *unlisted_us = now_us;
                return;
            }
        }
        let stray = by_name.entry(namespace.clone()).or_insert_with(|| Stray {
            namespace: namespace.clone(),
            worker: worker.clone(),
            reason: reason.as_str(),
            detail: String::new(),
            messages: 0,
            since_us: now_us,
            last_us: now_us,
        });
        stray.worker = worker.clone();
        (stray.reason, stray.last_us) = (reason.as_str(), now_us);
        stray.detail = error.to_string().chars().take(DETAIL_CHARACTERS_MAX).collect();
        stray.messages += 1;
    }

    /// Returns the names for which a message came in the last 300 seconds. Forgets all other names, and the names of
    /// namespaces that exist now.
    pub(in super::super) fn lately(
        &self,
        now_us: u64,
        exists: impl Fn(&NamespaceName) -> bool,
    ) -> Vec<Stray> {
        let by_name = &mut self.0.lock().by_name;
        by_name.retain(|name, stray| is_recent(stray.last_us, now_us) && !exists(name));
        by_name.values().cloned().collect()
    }

    /// Returns the reason for which the last message of the last 300 seconds for the namespace `name` was dropped, as
    /// metrics name it. `None` if no such message came, or if the name found no room in the list.
    pub(in super::super) fn last_reason(&self, name: &NamespaceName, now_us: u64) -> Option<&'static str> {
        let strays = self.0.lock();
        let stray = strays.by_name.get(name)?;
        is_recent(stray.last_us, now_us).then_some(stray.reason)
    }

    /// Whether a message of the last 300 seconds was for a namespace whose name found no room in the list.
    pub(crate) fn lacks_some(&self, now_us: u64) -> bool {
        is_recent(self.0.lock().unlisted_us, now_us)
    }

    /// Returns the reason why messages of the last 300 seconds for the namespace `name`, which does not exist, were
    /// dropped. `None` if no such message came, or if the name found no room in the list.
    pub(crate) fn reason(&self, name: &NamespaceName, now_us: u64) -> Option<String> {
        let strays = self.0.lock();
        let stray = strays.by_name.get(name)?;
        is_recent(stray.last_us, now_us).then(|| stray.detail.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doctors_own_messages_are_no_strays() {
        let strays = Strays::default();
        let name = |name: &str| NamespaceName::new(name).unwrap();
        let note = |namespace: &str, worker: &str| {
            let worker = RefusedName::in_subject(worker);
            strays.note(
                &name(namespace),
                &worker,
                DropReason::NamespaceNotNamed,
                &"not named",
                7,
            );
        };
        note(PROBE_NAME, "w");
        note("llama", PROBE_NAME);
        assert_eq!(strays.lately(8, |_| false), []);
        note("llama", "w");
        assert_eq!(strays.lately(8, |_| false).len(), 1);
        assert_eq!(strays.reason(&name("llama"), 8).unwrap(), "not named");
        assert_eq!(strays.reason(&name(PROBE_NAME), 8), None);
    }

    #[test]
    fn names_are_kept_while_messages_come_and_no_namespace_is_made() {
        let (strays, worker) = (Strays::default(), RefusedName::in_subject("gpu-0"));
        let name = |number: usize| NamespaceName::new(&format!("n{number:03}")).unwrap();
        for number in 0..NAMES_MAX + 9 {
            strays.note(
                &name(number),
                &worker,
                DropReason::Undecodable,
                &"x".repeat(999),
                7,
            );
        }
        strays.note(&name(3), &worker, DropReason::Oversized, &"2 MiB", 8);
        let known = strays.lately(8, |_| false);
        assert_eq!(known.len(), NAMES_MAX);
        assert_eq!(strays.reason(&name(3), 8).unwrap(), "2 MiB");
        assert_eq!(strays.reason(&name(NAMES_MAX), 8), None);
        assert!(strays.lacks_some(8) && !strays.lacks_some(7 + KEPT_US));
        assert_eq!(strays.reason(&name(3), 8 + KEPT_US), None);
        let third = known.iter().find(|stray| stray.namespace == name(3)).unwrap();
        assert_eq!(
            (
                third.reason,
                third.detail.as_str(),
                third.messages,
                third.since_us
            ),
            ("oversized", "2 MiB", 2, 7)
        );
        assert!(
            known
                .iter()
                .all(|stray| stray.detail.len() <= DETAIL_CHARACTERS_MAX)
        );
        // Names without recent messages make room.
        strays.note(&name(500), &worker, DropReason::Undecodable, &"x", 7 + KEPT_US);
        let known = strays.lately(7 + KEPT_US, |found| *found == name(3));
        assert_eq!(
            known.iter().map(|stray| &stray.namespace).collect::<Vec<_>>(),
            [&name(500)]
        );
    }
}
