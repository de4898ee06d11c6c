//! History of holders' states: when each holder was exact, and when and why it was not. For the last hour, all
//! changes are kept. For the rest of the last day, the last change of each minute is kept.
//!
//! Each second a pass over all holders notes the states that have changed. If there is a snapshot directory, a file
//! there keeps the history, too, so that it outlives the daemon.
//!
//! Three numbers are bounded: the changes of a holder ([`changes`]), the changes of all holders, and the holders. A
//! holder for which there is no room is counted, and has no history.

mod changes;
mod file;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use kvatlas_core::index::HolderRecord;
use kvatlas_core::wire::{DegradedReasons, HolderId, NamespaceName};

use kvatlas_telemetry::HistoryMetrics;

pub(crate) use file::{FILE_BYTES_MAX, SavedHistory};

use changes::{Changes, HistoryState, StateChange};

/// Maximum number of holders that have a history, including removed holders.
const HOLDERS_MAX: usize = 65_536;
/// Maximum number of changes of all holders together; they take 16 MiB.
const CHANGES_MAX: usize = 1 << 20;
/// Seconds after its removal for which a holder's history is kept.
const GONE_S: u64 = 24 * 60 * 60;

/// History of the states of all holders.
pub(crate) struct History {
    book: Mutex<HistoryBook>,
    metrics: HistoryMetrics,
}

#[derive(Debug, Default)]
struct HistoryBook {
    holders: HashMap<NamespaceName, HashMap<HolderId, HolderHistory>>,
    look: u64,
    count: usize,
    changes: usize,
}

#[derive(Debug, Default)]
struct HolderHistory {
    changes: Changes,
    /// Number of the last pass over all holders that has seen this holder.
    seen: u64,
}

/// Change of a holder's state, as the admin listener shows it.
#[derive(Debug, Serialize)]
pub(crate) struct ShownChange {
    at_us: u64,
    state: &'static str,
    #[serde(skip_serializing_if = "DegradedReasons::is_empty")]
    degraded: DegradedReasons,
}

impl From<&StateChange> for ShownChange {
    fn from(change: &StateChange) -> Self {
        let (state, degraded) = match change.state {
            HistoryState::Known(reasons) if reasons.is_empty() => ("exact", reasons),
            HistoryState::Known(reasons) => ("degraded", reasons),
            HistoryState::Gone => ("gone", DegradedReasons::default()),
            HistoryState::Unwatched => ("unwatched", DegradedReasons::default()),
        };
        Self {
            at_us: microseconds(change.at_s),
            state,
            degraded,
        }
    }
}

fn microseconds(seconds: u64) -> u64 {
    seconds.saturating_mul(1_000_000)
}

impl History {
    /// Makes an empty history.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            book: Mutex::default(),
            metrics: HistoryMetrics::new(),
        })
    }

    /// Begins a pass over all holders at `now_s`, in seconds since the Unix epoch. The pass notes the states that have
    /// changed.
    pub(crate) fn look(&self, now_s: u64) -> Look<'_> {
        let mut book = self.book.lock();
        book.look += 1;
        Look {
            book,
            now_s,
            dropped: 0,
            metrics: &self.metrics,
        }
    }

    /// Counts a history file that could not be written or read.
    pub(crate) fn file_failed(&self, error: &dyn fmt::Display) {
        self.metrics.file_failed(error);
    }

    /// Returns the changes of a holder's state, the oldest first.
    pub(crate) fn of(&self, namespace: &NamespaceName, holder: &HolderId) -> Vec<ShownChange> {
        let book = self.book.lock();
        let entry = book
            .holders
            .get(namespace)
            .and_then(|holders| holders.get(holder));
        let changes = entry.map(|entry| entry.changes.iter().map(ShownChange::from).collect());
        changes.unwrap_or_default()
    }
}

/// One pass over all holders, which notes the states that have changed.
pub(crate) struct Look<'h> {
    book: MutexGuard<'h, HistoryBook>,
    now_s: u64,
    dropped: u64,
    metrics: &'h HistoryMetrics,
}

impl Look<'_> {
    /// Notes the state of an existing holder: its reasons for doubt, or none if it is exact. Stores in the holder's
    /// status the time since which it has been in doubt. That time is 0 if the holder is exact.
    pub(crate) fn saw(&mut self, namespace: &NamespaceName, record: &HolderRecord, reasons: DegradedReasons) {
        let noted = self
            .book
            .note(namespace, &record.id, self.now_s, HistoryState::Known(reasons));
        self.dropped += u64::from(noted.is_none());
        let since_us = &record.status.inexact_since_us;
        since_us.store(match noted {
            Some(since_s) => since_s.map_or(0, microseconds),
            None if reasons.is_empty() => 0,
            // Without a history, the doubt counts from the first pass that has seen it.
            None => match (since_us.load(), microseconds(self.now_s)) {
                (0, now_us) => now_us,
                (known_us, now_us) => known_us.min(now_us),
            },
        });
    }

    /// Ends the pass over all holders. Every existing holder must have been noted before, because the others count as
    /// removed.
    pub(crate) fn end(mut self) {
        self.book.end_look(self.now_s);
        self.metrics.dropped(self.dropped);
    }
}

impl HistoryBook {
    /// Notes a holder's state. Returns `Some(Some(time))` if the holder has been in doubt since `time`, in seconds
    /// since the Unix epoch, and `Some(None)` if the holder is not in doubt. Returns `None` if there is no room for the
    /// history of a new holder.
    fn note(
        &mut self,
        namespace: &NamespaceName,
        holder: &HolderId,
        now_s: u64,
        state: HistoryState,
    ) -> Option<Option<u64>> {
        let look = self.look;
        let known = self
            .holders
            .get_mut(namespace)
            .and_then(|holders| holders.get_mut(holder));
        let entry = match known {
            Some(entry) => entry,
            None if self.count >= HOLDERS_MAX || self.changes >= CHANGES_MAX => return None,
            None => {
                self.count += 1;
                let holders = self.holders.entry(namespace.clone()).or_default();
                holders.entry(holder.clone()).or_default()
            }
        };
        entry.seen = look;
        let is_news = entry.changes.last().is_none_or(|last| last.state != state);
        if is_news && self.changes >= CHANGES_MAX {
            entry.changes.drop_first();
            self.changes -= 1;
        }
        let more = entry.changes.note(now_s, state);
        self.changes = self.changes.saturating_add_signed(more);
        Some(entry.changes.inexact_since_s())
    }

    /// Marks holders that the present pass has not seen as removed. Forgets holders that were removed at least
    /// [`GONE_S`] ago.
    fn end_look(&mut self, now_s: u64) {
        let Self {
            holders,
            look,
            count,
            changes,
        } = self;
        for holders in holders.values_mut() {
            holders.retain(|_, entry| {
                if entry.seen == *look {
                    return true;
                }
                *changes = changes.saturating_add_signed(entry.changes.note(now_s, HistoryState::Gone));
                let is_kept = entry
                    .changes
                    .last()
                    .is_some_and(|last| last.at_s.saturating_add(GONE_S) > now_s);
                if !is_kept {
                    *count -= 1;
                    *changes -= entry.changes.iter().len();
                }
                is_kept
            });
        }
        holders.retain(|_, holders| !holders.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{DegradedReason, WorkerName};
    use kvatlas_lab::random::Random;

    use super::*;

    fn holder(number: usize) -> HolderId {
        let worker = WorkerName::new(&format!("w-{number}")).unwrap();
        HolderId { worker, rank: 0 }
    }

    #[test]
    fn counts_equal_what_there_is() {
        let (mut book, mut random) = (HistoryBook::default(), Random::new(3));
        let namespaces = ["a", "b"].map(|name| NamespaceName::new(name).unwrap());
        let mut now_s = 1_000_000;
        for _ in 0..4_000 {
            now_s += random.below(400) as u64;
            book.look += 1;
            for number in 0..6 {
                if random.chance(70) {
                    let reason = [DegradedReason::Gap, DegradedReason::Stale][random.below(2)];
                    let reasons = match random.chance(50) {
                        true => DegradedReasons::of(reason),
                        false => DegradedReasons::default(),
                    };
                    let since = book.note(
                        &namespaces[number % 2],
                        &holder(number),
                        now_s,
                        HistoryState::Known(reasons),
                    );
                    assert_eq!(since.unwrap().is_some(), !reasons.is_empty());
                }
            }
            book.end_look(now_s);
            let all = || book.holders.values().flat_map(HashMap::values);
            assert_eq!(book.count, all().count());
            assert_eq!(
                book.changes,
                all().map(|entry| entry.changes.iter().len()).sum::<usize>()
            );
        }
        book.look += 1;
        book.end_look(now_s);
        book.look += 1;
        book.end_look(now_s + GONE_S);
        assert_eq!((book.count, book.changes, book.holders.len()), (0, 0, 0));
    }

    #[test]
    fn a_holder_without_a_history_is_in_doubt_since_a_pass_has_seen_it() {
        let namespaces = crate::shared::unbounded(16);
        let namespace = NamespaceName::new("n").unwrap();
        let known = namespaces.get_or_create(&namespace, None).unwrap();
        let writer = known.indexer.register(&holder(0)).unwrap();
        let (record, history) = (known.indexer.holders().remove(0), History::new());
        history.book.lock().count = HOLDERS_MAX;
        let saw = |now_s, reasons| {
            history.look(now_s).saw(&namespace, &record, reasons);
            writer.status().inexact_since_us.load()
        };
        let gap = DegradedReasons::of(DegradedReason::Gap);
        assert_eq!(saw(7, gap), 7_000_000);
        assert_eq!(saw(8, gap), 7_000_000);
        assert_eq!(saw(9, DegradedReasons::default()), 0);
    }

    #[test]
    fn no_room_is_said_and_whoever_has_a_place_keeps_it() {
        let namespace = NamespaceName::new("n").unwrap();
        let mut book = HistoryBook {
            count: HOLDERS_MAX - 1,
            ..HistoryBook::default()
        };
        let gap = HistoryState::Known(DegradedReasons::of(DegradedReason::Gap));
        assert_eq!(book.note(&namespace, &holder(0), 5, gap), Some(Some(5)));
        assert_eq!(book.note(&namespace, &holder(1), 6, gap), None);
        assert_eq!(book.note(&namespace, &holder(0), 7, gap), Some(Some(5)));
        book.changes = CHANGES_MAX;
        let exact = HistoryState::Known(DegradedReasons::default());
        assert_eq!(book.note(&namespace, &holder(0), 8, exact), Some(None));
        assert_eq!(book.changes, CHANGES_MAX, "the oldest makes room");
    }
}
