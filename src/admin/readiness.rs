//! Readiness as a set of latches: one for each precondition of serving.

use std::sync::atomic::{AtomicU8, Ordering};

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
}

impl Readiness {
    /// No latch set, not draining.
    pub const fn new() -> Self {
        Self {
            bits: AtomicU8::new(0),
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

    /// Records that the daemon is stopping; it is not ready from now on.
    pub fn start_draining(&self) {
        self.bits.fetch_or(DRAINING, Ordering::AcqRel);
    }

    /// All latches as they are at one time.
    pub fn report(&self) -> ReadinessReport {
        ReadinessReport {
            bits: self.bits.load(Ordering::Acquire),
        }
    }
}

/// The state of all latches at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadinessReport {
    bits: u8,
}

impl ReadinessReport {
    /// Whether every latch is set and the daemon is not draining.
    pub const fn is_ready(self) -> bool {
        self.bits == ALL_LATCHES
    }

    /// Whether a latch is set.
    pub const fn is_set(self, latch: Latch) -> bool {
        self.bits & latch.bit() != 0
    }

    /// Whether the daemon is stopping.
    pub const fn is_draining(self) -> bool {
        self.bits & DRAINING != 0
    }

    /// The report as JSON: `{"ready":…,"draining":…,"latches":{"snapshot_loaded":…,…}}`.
    pub fn to_json(self) -> String {
        let latches: serde_json::Map<String, serde_json::Value> = Latch::ALL
            .iter()
            .map(|latch| (latch.as_str().to_owned(), self.is_set(*latch).into()))
            .collect();
        json!({ "ready": self.is_ready(), "draining": self.is_draining(), "latches": latches }).to_string()
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
            })
        );
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
