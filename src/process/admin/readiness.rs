//! Readiness as a set of latches. A latch is a flag for one precondition of serving; it is set when the precondition is met.

use kvatlas_core::worded;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use serde_json::json;

worded! {
    /// A latch: a precondition of serving, which is set when it is met.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Latch {
        /// A connection to NATS is up. In a daemon, it is the connection that receives events; in a gateway, it is the
        /// gateway's connection.
        Connected => "connected",
        /// The snapshot is loaded, or it is certain that there is no snapshot to load.
        SnapshotLoaded => "snapshot_loaded",
        /// The broker has the subscription to events.
        EventsSubscribed => "events_subscribed",
        /// The broker has the subscription to queries.
        QueriesSubscribed => "queries_subscribed",
        /// Events that were published before the start are applied.
        CaughtUp => "caught_up",
        /// The index knows as much as the index of a replica that already takes queries, or the time allowed for
        /// catching up is over. Also set if there is no such replica.
        Settled => "settled",
        /// The bridge in this process knows the blocks of all engines that it follows, or the time allowed for
        /// learning them is over. Also set if there is no bridge.
        EnginesFollowed => "engines_followed",
    }
}

impl Latch {
    /// Returns, in words for people, the event that sets the latch.
    const fn awaited(self) -> &'static str {
        match self {
            Self::Connected => "a NATS server to be reached",
            Self::SnapshotLoaded => "the newest snapshot to be loaded",
            Self::EventsSubscribed => "the NATS server to take the subscription to events",
            Self::QueriesSubscribed => "the NATS server to take the subscription to queries",
            Self::CaughtUp => "the events from before the start to be applied",
            Self::Settled => "the index to know as much as a replica that takes queries",
            Self::EnginesFollowed => "the engines of the bridge to be seen, and told to daemons",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

const DRAINING: u8 = 1 << 7;
const ALL_LATCHES: u8 = (1 << Latch::ALL.len()) - 1;

type LatchTroubles = [Option<String>; Latch::ALL.len()];

/// The latches (flags for the preconditions of serving). Parts of the daemon set them, and the probe reads them.
///
/// The daemon is ready while every latch is set and it is not draining. A latch may be cleared again, for example when
/// the server withdraws a right. Draining never ends.
#[derive(Default)]
pub struct Readiness {
    bits: AtomicU8,
    /// Followed connections: the kind of each, and a function that returns whether it is up at the moment.
    connections: Mutex<Vec<(&'static str, Stands)>>,
    /// For each latch (precondition of serving): the last trouble with the connection that the latch waits for. `None`
    /// while that connection is up.
    troubles: Mutex<LatchTroubles>,
    /// Function that returns the NATS server's refusals, and the latch that they concern; `None` if there is none.
    refusals: Mutex<Option<(Latch, RefusalSource)>>,
}

/// Function that returns whether a connection is up at the moment.
type Stands = Box<dyn Fn() -> bool + Send + Sync>;

/// Function that returns the refusals of a NATS server that last, in its words.
type RefusalSource = Box<dyn Fn() -> Vec<String> + Send + Sync>;

impl Readiness {
    /// Makes the state in which no latch (precondition of serving) is set and the daemon is not draining.
    pub const fn new() -> Self {
        Self {
            bits: AtomicU8::new(0),
            connections: Mutex::new(Vec::new()),
            troubles: Mutex::new([const { None }; Latch::ALL.len()]),
            refusals: Mutex::new(None),
        }
    }

    /// Records that a precondition is met. A thread that sees the latch set also sees the caller's earlier writes.
    pub fn set(&self, latch: Latch) {
        self.bits.fetch_or(latch.bit(), Ordering::AcqRel);
    }

    /// Records that a precondition is no longer met.
    pub fn clear(&self, latch: Latch) {
        self.bits.fetch_and(!latch.bit(), Ordering::AcqRel);
    }

    /// Adds a connection for [`Latch::Connected`]. The function `stands` returns whether this connection is up at the
    /// moment. Once a connection has been added, the latch is set exactly while at least one connection of each kind is
    /// up.
    pub fn follow_connection(&self, kind: &'static str, stands: impl Fn() -> bool + Send + Sync + 'static) {
        self.connections.lock().push((kind, Box::new(stands)));
    }

    /// Lets reports show `latch` as unset while a NATS server refuses what the latch waits for. The function `refusals`
    /// returns the refusals that last, in the server's words. The reports show them as reasons.
    pub fn follow_refusals(&self, latch: Latch, refusals: impl Fn() -> Vec<String> + Send + Sync + 'static) {
        *self.refusals.lock() = Some((latch, Box::new(refusals)));
    }

    /// Records the trouble with the connection that `latch` waits for, in words for people; `None` if the connection is
    /// up. The trouble is shown as a reason why the daemon is not ready. The trouble does not change whether the daemon
    /// is ready.
    pub fn set_trouble(&self, latch: Latch, trouble: Option<String>) {
        self.troubles.lock()[latch as usize] = trouble;
    }

    /// Records that the daemon is stopping. It is not ready from now on.
    pub fn start_draining(&self) {
        self.bits.fetch_or(DRAINING, Ordering::AcqRel);
    }

    /// Follows connections no longer. Keeps [`Latch::Connected`] as it was set by [`Self::set`] and [`Self::clear`]. The
    /// functions of the connections hold clones of the clients, and without these the connections can end.
    pub fn forget_connections(&self) {
        self.connections.lock().clear();
    }

    /// Whether connections are followed, and none of them is up.
    pub fn is_cut_off(&self) -> bool {
        let connections = self.connections.lock();
        !connections.is_empty() && !connections.iter().any(|(_, stands)| stands())
    }

    /// Whether the daemon may answer a question that it has received. It may if it is not draining and all latches
    /// other than [`Latch::Connected`] are set. While [`Latch::Connected`] is not set, no NATS server can be reached,
    /// and answers call no holder exact.
    pub fn may_answer(&self) -> bool {
        self.bits.load(Ordering::Acquire) | Latch::Connected.bit() == ALL_LATCHES
    }

    /// Whether the daemon may answer a question, even while it is draining. All other rules are those of
    /// [`Self::may_answer`]. Use this for clients that would mistake a refusal for an answer. A draining daemon still
    /// follows events until all questions are answered.
    pub fn may_still_answer(&self) -> bool {
        self.bits.load(Ordering::Acquire) & !DRAINING | Latch::Connected.bit() == ALL_LATCHES
    }

    fn bits(&self) -> u8 {
        let bits = self.bits.load(Ordering::Acquire);
        let connections = self.connections.lock();
        if connections.is_empty() {
            return bits;
        }
        let is_up = |kind| {
            connections
                .iter()
                .any(|(other, stands)| *other == kind && stands())
        };
        match connections.iter().all(|(kind, _)| is_up(*kind)) {
            true => bits | Latch::Connected.bit(),
            false => bits & !Latch::Connected.bit(),
        }
    }

    /// Returns the state of all latches (preconditions of serving) at one time.
    pub fn report(&self) -> ReadinessReport {
        let refused = self.refusals.lock();
        let (bits, refusals) = match &*refused {
            Some((latch, refusals)) => match refusals() {
                refusals if refusals.is_empty() => (self.bits(), refusals),
                refusals => (self.bits() & !latch.bit(), refusals),
            },
            None => (self.bits(), Vec::new()),
        };
        ReadinessReport {
            bits,
            troubles: self.troubles.lock().clone(),
            refusals,
        }
    }
}

/// State of all latches (preconditions of serving) at one time, and the troubles that keep them from being set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessReport {
    bits: u8,
    troubles: LatchTroubles,
    /// Refusals by the NATS server, in its words.
    refusals: Vec<String>,
}

impl ReadinessReport {
    /// Whether the daemon can serve: every latch (precondition of serving) is set, and the daemon is not draining.
    pub const fn is_ready(&self) -> bool {
        self.bits == ALL_LATCHES
    }

    /// Whether the latch, a precondition of serving, is set.
    pub const fn is_set(&self, latch: Latch) -> bool {
        self.bits & latch.bit() != 0
    }

    /// Whether the daemon is stopping.
    pub const fn is_draining(&self) -> bool {
        self.bits & DRAINING != 0
    }

    /// Returns the unset latch that an operator should look at first. `None` if the daemon is ready or stopping. The
    /// result is:
    ///
    /// - [`Latch::Connected`] if it is unset and a connection has trouble,
    /// - else the first unset latch in the order in which a daemon sets latches.
    pub fn awaited(&self) -> Option<Latch> {
        const STARTED: [Latch; Latch::ALL.len()] = [
            Latch::SnapshotLoaded,
            Latch::Connected,
            Latch::EventsSubscribed,
            Latch::CaughtUp,
            Latch::Settled,
            Latch::QueriesSubscribed,
            Latch::EnginesFollowed,
        ];
        if self.is_draining() {
            return None;
        }
        let is_unset = |latch: &Latch| !self.is_set(*latch);
        let has_trouble = self.troubles.iter().any(Option::is_some);
        let troubled = has_trouble.then_some(Latch::Connected).filter(is_unset);
        troubled.or_else(|| STARTED.into_iter().find(is_unset))
    }

    /// Returns the reasons why the daemon is not ready, one sentence each; empty if it is ready.
    pub fn reasons(&self) -> Vec<String> {
        if self.is_ready() {
            return Vec::new();
        }
        let draining = self.is_draining().then(|| "the daemon is stopping".to_owned());
        let awaited = Latch::ALL
            .into_iter()
            .filter(|latch| !self.is_set(*latch))
            .map(|latch| format!("waiting for {}", latch.awaited()));
        let mut reasons: Vec<String> = draining.into_iter().chain(awaited).collect();
        for trouble in self.troubles.iter().flatten().chain(&self.refusals) {
            let trouble = format!("NATS: {trouble}");
            // A server that refuses one connection mostly refuses all connections in the same words.
            if !reasons.contains(&trouble) {
                reasons.push(trouble);
            }
        }
        reasons
    }

    /// Returns the report as JSON:
    /// `{"ready":…,"draining":…,"latches":{"snapshot_loaded":…,…},"awaited":…,"reasons":[…]}`. `awaited` is the latch to
    /// look at first, or null.
    pub fn to_json(&self) -> String {
        let latches: serde_json::Map<String, serde_json::Value> = Latch::ALL
            .iter()
            .map(|latch| (latch.as_str().to_owned(), self.is_set(*latch).into()))
            .collect();
        let (ready, draining) = (self.is_ready(), self.is_draining());
        let awaited = self.awaited().map(Latch::as_str);
        json!({
            "ready": ready, "draining": draining, "latches": latches, "awaited": awaited, "reasons": self.reasons(),
        })
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
                    "connected": false,
                    "snapshot_loaded": false,
                    "events_subscribed": true,
                    "queries_subscribed": false,
                    "caught_up": false,
                    "settled": false,
                    "engines_followed": false,
                },
                "awaited": "snapshot_loaded",
                "reasons": [
                    "waiting for a NATS server to be reached",
                    "waiting for the newest snapshot to be loaded",
                    "waiting for the NATS server to take the subscription to queries",
                    "waiting for the events from before the start to be applied",
                    "waiting for the index to know as much as a replica that takes queries",
                    "waiting for the engines of the bridge to be seen, and told to daemons",
                ],
            })
        );
    }

    #[test]
    fn what_keeps_the_others_waiting_is_the_cause() {
        let readiness = Readiness::new();
        let awaited = || readiness.report().awaited();
        assert_eq!(awaited(), Some(Latch::SnapshotLoaded));
        // The bucket of snapshots cannot be reached.
        readiness.set_trouble(Latch::SnapshotLoaded, Some("cannot connect".to_owned()));
        assert_eq!(awaited(), Some(Latch::Connected));
        readiness.set(Latch::Connected);
        assert_eq!(awaited(), Some(Latch::SnapshotLoaded));
        for latch in [Latch::SnapshotLoaded, Latch::EventsSubscribed, Latch::CaughtUp] {
            readiness.set(latch);
        }
        assert_eq!(awaited(), Some(Latch::Settled), "queries wait for it");
        Latch::ALL.into_iter().for_each(|latch| readiness.set(latch));
        assert_eq!(awaited(), None);
        readiness.clear(Latch::Connected);
        readiness.start_draining();
        assert_eq!(awaited(), None);
    }

    #[test]
    fn trouble_is_told_until_it_is_over_or_no_longer_matters() {
        let readiness = Readiness::new();
        readiness.set_trouble(Latch::EventsSubscribed, Some("cannot connect".to_owned()));
        readiness.set_trouble(Latch::QueriesSubscribed, Some("cannot connect".to_owned()));
        assert!(
            readiness
                .report()
                .reasons()
                .contains(&"NATS: cannot connect".to_owned())
        );
        assert_eq!(readiness.report().reasons().len(), Latch::ALL.len() + 1);
        readiness.set_trouble(Latch::EventsSubscribed, None);
        readiness.set_trouble(Latch::QueriesSubscribed, None);
        assert_eq!(readiness.report().reasons().len(), Latch::ALL.len());
        readiness.set_trouble(Latch::EventsSubscribed, Some("a hiccup".to_owned()));
        Latch::ALL.into_iter().for_each(|latch| readiness.set(latch));
        assert_eq!(readiness.report().reasons(), Vec::<String>::new());
        readiness.start_draining();
        assert_eq!(readiness.report().reasons()[0], "the daemon is stopping");
    }

    #[test]
    fn ready_while_one_connection_of_each_kind_stands() {
        use std::sync::Arc;
        use std::sync::atomic::AtomicBool;

        let readiness = Readiness::new();
        Latch::ALL.into_iter().for_each(|latch| readiness.set(latch));
        let stands = [false, false].map(|stands| Arc::new(AtomicBool::new(stands)));
        for one in stands.clone() {
            readiness.follow_connection("queries", move || one.load(Ordering::Relaxed));
        }
        let listens = Arc::new(AtomicBool::new(true));
        let other = Arc::clone(&listens);
        readiness.follow_connection("events", move || other.load(Ordering::Relaxed));
        assert!(!readiness.report().is_ready() && readiness.may_answer());
        assert_eq!(
            readiness.report().reasons(),
            ["waiting for a NATS server to be reached"]
        );
        stands[1].store(true, Ordering::Relaxed);
        assert!(readiness.report().is_ready());
        listens.store(false, Ordering::Relaxed);
        assert!(!readiness.report().is_ready() && !readiness.is_cut_off());
        stands[1].store(false, Ordering::Relaxed);
        assert!(readiness.is_cut_off());
        readiness.forget_connections();
        assert!(!readiness.is_cut_off());
        readiness.clear(Latch::Settled);
        assert!(!readiness.may_answer());
    }

    #[test]
    fn what_the_server_refuses_unsets_its_latch_while_it_lasts() {
        use std::sync::Arc;

        let readiness = Readiness::new();
        Latch::ALL.into_iter().for_each(|latch| readiness.set(latch));
        let refused = Arc::new(Mutex::new(vec!["no".to_owned()]));
        let told = Arc::clone(&refused);
        readiness.follow_refusals(Latch::EnginesFollowed, move || told.lock().clone());
        let report = readiness.report();
        assert!(!report.is_ready());
        assert_eq!(report.awaited(), Some(Latch::EnginesFollowed));
        let reasons = report.reasons();
        assert_eq!(
            reasons.last().map(String::as_str),
            Some("NATS: no"),
            "{reasons:?}"
        );
        refused.lock().clear();
        let report = readiness.report();
        assert!(report.is_ready());
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
