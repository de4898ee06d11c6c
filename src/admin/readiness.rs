//! Readiness as a set of latches: one for each precondition of serving.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use serde_json::json;

/// A precondition of serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Latch {
    /// The snapshot is loaded, or it is settled that there is none to load.
    SnapshotLoaded,
    /// The subscription to events is in place at the broker.
    EventsSubscribed,
    /// The subscription to queries is in place at the broker.
    QueriesSubscribed,
    /// Events that were published before the start are applied.
    CaughtUp,
    /// The index knows what a replica that serves knows, or has had the time to learn it, or nobody serves.
    Settled,
}

impl Latch {
    /// Every latch, in the usual order of a start.
    pub const ALL: [Self; 5] = [
        Self::SnapshotLoaded,
        Self::EventsSubscribed,
        Self::QueriesSubscribed,
        Self::CaughtUp,
        Self::Settled,
    ];

    /// The name in reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SnapshotLoaded => "snapshot_loaded",
            Self::EventsSubscribed => "events_subscribed",
            Self::QueriesSubscribed => "queries_subscribed",
            Self::CaughtUp => "caught_up",
            Self::Settled => "settled",
        }
    }

    /// What the daemon waits for while the latch is not set, for a person to read.
    const fn awaited(self) -> &'static str {
        match self {
            Self::SnapshotLoaded => "the newest snapshot to be loaded",
            Self::EventsSubscribed => "the NATS server to take the subscription to events",
            Self::QueriesSubscribed => "the NATS server to take the subscription to queries",
            Self::CaughtUp => "the events from before the start to be applied",
            Self::Settled => "the index to know as much as a replica that takes queries",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

const DRAINING: u8 = 1 << 7;
const ALL_LATCHES: u8 = (1 << Latch::ALL.len()) - 1;

/// The latches, shared by the parts of the daemon that set them and the probe that reads them.
///
/// The daemon is ready while every latch is set and it is not draining. A latch may be cleared again, for example
/// while a connection is lost; draining is for good.
#[derive(Debug, Default)]
pub struct Readiness {
    bits: AtomicU8,
    /// What went wrong last with the connection to NATS, while it does not stand.
    trouble: Mutex<Option<String>>,
}

impl Readiness {
    /// No latch set, not draining.
    pub const fn new() -> Self {
        Self {
            bits: AtomicU8::new(0),
            trouble: Mutex::new(None),
        }
    }

    /// Records that a precondition is met. What the caller did before is visible to whoever sees the latch set.
    pub fn set(&self, latch: Latch) {
        self.bits.fetch_or(latch.bit(), Ordering::AcqRel);
    }

    /// Records that a precondition is no longer met.
    pub fn clear(&self, latch: Latch) {
        self.bits.fetch_and(!latch.bit(), Ordering::AcqRel);
    }

    /// Records what went wrong with a connection that a latch waits for, in words for a person, or that it stands. It explains
    /// why the daemon is not ready, and does not decide it.
    pub fn set_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock() = trouble;
    }

    /// Records that the daemon is stopping; it is not ready from now on.
    pub fn start_draining(&self) {
        self.bits.fetch_or(DRAINING, Ordering::AcqRel);
    }

    /// All latches as they are at one time.
    pub fn report(&self) -> ReadinessReport {
        ReadinessReport {
            bits: self.bits.load(Ordering::Acquire),
            trouble: self.trouble.lock().clone(),
        }
    }
}

/// The state of all latches at one time, and what keeps them from being set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessReport {
    bits: u8,
    trouble: Option<String>,
}

impl ReadinessReport {
    /// Whether every latch is set and the daemon is not draining.
    pub const fn is_ready(&self) -> bool {
        self.bits == ALL_LATCHES
    }

    /// Whether a latch is set.
    pub const fn is_set(&self, latch: Latch) -> bool {
        self.bits & latch.bit() != 0
    }

    /// Whether the daemon is stopping.
    pub const fn is_draining(&self) -> bool {
        self.bits & DRAINING != 0
    }

    /// Why the daemon is not ready, a sentence for each reason; empty when it is.
    pub fn reasons(&self) -> Vec<String> {
        if self.is_ready() {
            return Vec::new();
        }
        let draining = self.is_draining().then(|| "the daemon is stopping".to_owned());
        let awaited = Latch::ALL
            .into_iter()
            .filter(|latch| !self.is_set(*latch))
            .map(|latch| format!("waiting for {}", latch.awaited()));
        let trouble = self.trouble.iter().map(|trouble| format!("NATS: {trouble}"));
        draining.into_iter().chain(awaited).chain(trouble).collect()
    }

    /// The report as JSON: `{"ready":…,"draining":…,"latches":{"snapshot_loaded":…,…},"reasons":[…]}`.
    pub fn to_json(&self) -> String {
        let latches: serde_json::Map<String, serde_json::Value> = Latch::ALL
            .iter()
            .map(|latch| (latch.as_str().to_owned(), self.is_set(*latch).into()))
            .collect();
        let (ready, draining) = (self.is_ready(), self.is_draining());
        json!({ "ready": ready, "draining": draining, "latches": latches, "reasons": self.reasons() })
            .to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ready_once_every_latch_is_set_and_never_while_draining() {
        let readiness = Readiness::new();
        for latch in Latch::ALL {
            assert!(!readiness.report().is_ready());
            readiness.set(latch);
            assert!(readiness.report().is_set(latch));
        }
        assert!(readiness.report().is_ready());
        readiness.clear(Latch::CaughtUp);
        assert!(!readiness.report().is_ready());
        readiness.set(Latch::CaughtUp);
        readiness.start_draining();
        assert!(!readiness.report().is_ready());
        assert!(readiness.report().is_draining());
        assert!(Latch::ALL.iter().all(|latch| readiness.report().is_set(*latch)));
    }

    #[test]
    fn the_report_names_each_latch() {
        let readiness = Readiness::new();
        readiness.set(Latch::EventsSubscribed);
        let json: serde_json::Value = serde_json::from_str(&readiness.report().to_json()).expect("JSON");
        assert_eq!(
            json,
            json!({
                "ready": false,
                "draining": false,
                "latches": {
                    "snapshot_loaded": false,
                    "events_subscribed": true,
                    "queries_subscribed": false,
                    "caught_up": false,
                    "settled": false,
                },
                "reasons": [
                    "waiting for the newest snapshot to be loaded",
                    "waiting for the NATS server to take the subscription to queries",
                    "waiting for the events from before the start to be applied",
                    "waiting for the index to know as much as a replica that takes queries",
                ],
            })
        );
    }

    #[test]
    fn trouble_is_told_until_it_is_over_or_no_longer_matters() {
        let readiness = Readiness::new();
        readiness.set_trouble(Some("cannot connect".to_owned()));
        assert!(
            readiness
                .report()
                .reasons()
                .contains(&"NATS: cannot connect".to_owned())
        );
        readiness.set_trouble(None);
        assert_eq!(readiness.report().reasons().len(), Latch::ALL.len());
        readiness.set_trouble(Some("a hiccup".to_owned()));
        Latch::ALL.into_iter().for_each(|latch| readiness.set(latch));
        assert_eq!(readiness.report().reasons(), Vec::<String>::new());
        readiness.start_draining();
        assert_eq!(readiness.report().reasons()[0], "the daemon is stopping");
    }

    proptest! {
        #[test]
        fn latches_do_not_touch_each_other(
            steps in prop::collection::vec((0..Latch::ALL.len(), any::<bool>()), 0..40),
        ) {
            let readiness = Readiness::new();
            let mut expected = [false; Latch::ALL.len()];
            for (index, set) in steps {
                expected[index] = set;
                if set { readiness.set(Latch::ALL[index]) } else { readiness.clear(Latch::ALL[index]) }
                let report = readiness.report();
                prop_assert_eq!(Latch::ALL.map(|latch| report.is_set(latch)), expected);
                prop_assert_eq!(report.is_ready(), expected.iter().all(|set| *set));
            }
        }
    }
}
