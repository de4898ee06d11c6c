//! Age of the state from which queries are answered.
//!
//! Events wait in three places. Each place has its own measure of the waiting time:
//!
//! | where | measure |
//! |---|---|
//! | in a lane's queue | time at which the oldest waiting message of the namespace came ([`NamespaceFlow`]) |
//! | in the stream, with JetStream | time since which the daemon knows of messages that it has not read |
//! | in the broker, the network or the socket | sending time of the last *pulse* that has come back |
//!
//! The pulse is a message that the daemon sends to itself on the connection of the events. When the pulse comes back,
//! everything that the broker had sent before has been handed to the lanes.
//!
//! After the daemon was stopped, or its machine suspended, a late pulse shows that the daemon has not read its sockets
//! for a while.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use kvatlas_core::index::HolderRecord;
use kvatlas_core::wire::{HolderId, NamespaceName, WorkerName};

use super::clock::now_us;
use super::flow::{Flows, NamespaceFlow, SearchMark, SeenInParts};
use super::line::{Assignments, WorkerKey};
use super::server_clock::ServerClock;

/// Trouble of a stream while only its leader is silent.
const LEADER_SILENT: &str = "the server that leads the events stream does not say what the stream has";

/// Age of the state of all namespaces, shared by the source, the lanes and the queries.
#[derive(Debug)]
pub(crate) struct Freshness {
    flows: Arc<Flows>,
    assignments: Arc<Assignments>,
    /// Age of the state, in microseconds, beyond which holders get the reason for doubt `Behind`. `None` means no
    /// limit.
    behind_after_us: Option<u64>,
    /// Time in microseconds of the last proof that the daemon is up to date with the broker: all events that the
    /// broker had sent by then have been handed to the lanes. 0 while events are not followed.
    heard_us: AtomicU64,
    /// Time since which the daemon has known of unread messages in the stream, in microseconds; 0 if there are none.
    unread_since_us: AtomicU64,
    /// Time in microseconds at which the daemon last knew the whole stream: it had read every message in the stream,
    /// or knew that the message was unread. 0 while no stream is followed.
    known_us: AtomicU64,
    /// Error of the last attempt to read the stream, in words; `None` while the stream is read, and while the
    /// connection to the broker is down.
    stream_error: Mutex<Option<String>>,
    /// Clock of the server that has the stream. It has no time without a stream.
    pub(crate) stream_clock: ServerClock,
}

/// Time at which a message came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct MessageArrival {
    /// Earliest time at which the message may have come, in microseconds.
    pub(super) came_us: u64,
    /// Whether the message has come just now. Otherwise it may have waited in the socket or in the stream, so it does
    /// not show that its publisher is alive.
    pub(super) is_new: bool,
    /// Latest time at which the publisher can have sent the message, in microseconds on the clock of [`now_us`].
    pub(super) sent_us: u64,
}

impl Freshness {
    pub(super) fn new(
        flows: Arc<Flows>,
        assignments: Arc<Assignments>,
        behind_after: Option<Duration>,
    ) -> Self {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self {
            flows,
            assignments,
            behind_after_us: behind_after.map(micros),
            heard_us: AtomicU64::new(0),
            unread_since_us: AtomicU64::new(0),
            known_us: AtomicU64::new(0),
            stream_error: Mutex::new(None),
            stream_clock: ServerClock::default(),
        }
    }

    /// Returns the freshness record of a daemon that follows no events.
    #[cfg(test)]
    pub(crate) fn without_events() -> Self {
        let flows = Arc::new(Flows::new(1));
        let assignments = Arc::new(Assignments::new(1, Arc::clone(&flows)));
        Self::new(flows, assignments, None)
    }

    /// Notes that the lanes (the threads that apply events) have received all events that the broker had sent by
    /// `at_us`. 0 means that this is not known for any time. Holders are then in doubt for another reason.
    pub(crate) fn heard(&self, at_us: u64) {
        self.heard_us.store(at_us, Ordering::Release);
    }

    /// Notes that the stream has had unread messages since `since_us`. 0 means that there are none.
    pub(crate) fn set_unread(&self, since_us: u64) {
        self.unread_since_us.store(since_us, Ordering::Release);
    }

    /// Notes that the daemon knew the whole stream at `at_us`: it had read every message in the stream, or knew that
    /// the message was unread. 0 means that no stream is followed. `answered_us` is the time of the last question that the
    /// stream's leader has answered. Messages may come for longer, from servers that do not lead the stream: they show only
    /// for the allowed age that nothing else has come.
    pub(crate) fn stream_known(&self, at_us: u64, answered_us: u64) {
        let limit_us = self.behind_after_us.unwrap_or(u64::MAX);
        let known_us = at_us.min(answered_us.saturating_add(limit_us));
        self.known_us.store(known_us, Ordering::Release);
    }

    /// Notes the error because of which the stream is not read; `None` if the stream is read, or if the connection is
    /// down.
    pub(crate) fn set_stream_error(&self, error: Option<String>) {
        *self.stream_error.lock() = error;
    }

    /// Whether the broker has been silent for longer than is allowed.
    pub(super) fn is_unheard(&self) -> bool {
        let heard_us = self.heard_us.load(Ordering::Acquire);
        let silent_us = now_us().saturating_sub(heard_us);
        heard_us > 0 && self.behind_after_us.is_some_and(|limit| silent_us > limit)
    }

    /// Returns the arrival of a message that is handed to a lane now. `kept_for` is the time for which the stream has
    /// kept the message: the message was sent that long before it came.
    ///
    /// Normally the message has come just now, with two exceptions:
    ///
    /// - The stream is known to have unread messages. This message is the oldest of them, and may have waited as long.
    /// - There has been no sign of the broker, or no report about the stream, for longer than is allowed. The message
    ///   may have waited since then, in the socket or in the stream.
    ///
    /// A message that may have waited for longer than is allowed does not count as new.
    pub(super) fn arrival(&self, kept_for: Duration) -> MessageArrival {
        let now_us = now_us();
        let kept_us = u64::try_from(kept_for.as_micros()).unwrap_or(u64::MAX);
        let is_late = |since_us| {
            self.behind_after_us
                .is_some_and(|limit| age(since_us, now_us) > limit)
        };
        let signs_us = [&self.heard_us, &self.known_us].map(|at_us| at_us.load(Ordering::Acquire));
        let unread_us = self.unread_since_us.load(Ordering::Acquire);
        let late_us = signs_us.into_iter().filter(|since_us| is_late(*since_us));
        let unread_us = Some(unread_us).filter(|since_us| *since_us > 0);
        let came_us = late_us.chain(unread_us).fold(now_us, u64::min);
        MessageArrival {
            came_us,
            is_new: kept_for.is_zero() && !is_late(came_us),
            // What the stream has kept was not sent later than when it came there.
            sent_us: came_us.min(now_us.saturating_sub(kept_us)),
        }
    }

    /// Interval at which the daemon sends itself a message (the pulse) on the connection of the events; `None` if there
    /// is no limit on the age of the state.
    pub(crate) fn pulse_interval(&self) -> Option<Duration> {
        let behind_after = Duration::from_micros(self.behind_after_us?);
        Some((behind_after / 5).clamp(Duration::from_millis(5), Duration::from_secs(1)))
    }

    /// Interval at which the daemon asks the server for the number of the stream's last message. The interval is less than half the limit on the age of the state, so that an idle stream makes no
    /// holder count as behind.
    pub(crate) fn look_interval(&self) -> Duration {
        let longest = Duration::from_millis(500);
        self.behind_after_us.map_or(longest, |limit| {
            (Duration::from_micros(limit) / 4).clamp(Duration::from_millis(5), longest)
        })
    }

    /// Measures how old the state of an existing namespace is now. Must be called before a search.
    pub(crate) fn look(&self, namespace: &NamespaceName) -> FreshnessReading<'_> {
        let now_us = now_us();
        let age = |since_us| age(since_us, now_us);
        let is_over = |age_us: u64| self.behind_after_us.is_some_and(|limit| age_us > limit);
        // Read in the order of a message's way. So no message is missed that goes on in between.
        let everybody_us = self.everybody_us(now_us);
        // A namespace without workers gets a flow, too. So the search sees a step of its first worker.
        let flow = self.flows.of(namespace);
        let queued_us = flow.oldest_us().map_or(0, age);
        let lines_behind = match self.behind_after_us {
            Some(limit) if is_over(queued_us) => flow.lines_since_before(now_us.saturating_sub(limit)),
            _ => Vec::new(),
        };
        FreshnessReading {
            freshness: self,
            now_us,
            behind_us: queued_us.max(everybody_us),
            is_everybody_behind: is_over(everybody_us),
            lines_behind,
            flow,
        }
    }

    /// Whether the whole state is older than is allowed. A publisher may have sent its first message since then. Must
    /// be called before a search.
    pub(crate) fn is_everybody_behind(&self) -> bool {
        let everybody_us = self.everybody_us(now_us());
        self.behind_after_us.is_some_and(|limit| everybody_us > limit)
    }

    /// Returns the age of the whole state at `now_us`, in microseconds. 0 if it is not older than is allowed, and no
    /// message is unread.
    fn everybody_us(&self, now_us: u64) -> u64 {
        // The writer notes unread messages before it says that the stream is known.
        let silent_us = self.silent_us(now_us).unwrap_or_default();
        let unread_us = age(self.unread_since_us.load(Ordering::Acquire), now_us);
        unread_us.max(silent_us)
    }

    /// Returns how long the broker has been silent at `now_us`, in microseconds. `None` if that is within the limit.
    /// The broker counts as silent since the older of two signs: the last message that the daemon sent to itself and
    /// got back, and the last report about the stream.
    pub(crate) fn silent_us(&self, now_us: u64) -> Option<u64> {
        let since_us = [&self.heard_us, &self.known_us].map(|at_us| at_us.load(Ordering::Acquire));
        let silent_us = since_us.map(|since_us| age(since_us, now_us)).into_iter().max()?;
        self.behind_after_us
            .is_some_and(|limit| silent_us > limit)
            .then_some(silent_us)
    }

    /// Returns in words why nothing new is known of the stream at `now_us`, although the broker is connected. `None` if
    /// [`Self::silent_us`] is, or if the broker itself is silent.
    pub(crate) fn stream_trouble(&self, now_us: u64) -> Option<String> {
        self.silent_us(now_us)?;
        let error = self.stream_error.lock().clone();
        error.or_else(|| (!self.is_unheard()).then(|| LEADER_SILENT.to_owned()))
    }

    /// Returns the time that the lane has spent on a worker, in microseconds.
    pub(crate) fn spent_us(&self, worker: &WorkerKey) -> u64 {
        self.assignments.line_of(worker).map_or(0, |line| line.spent_us())
    }
}

/// Returns the time from `since_us` to `now_us`; 0 if `since_us` is 0, that is, unknown.
fn age(since_us: u64, now_us: u64) -> u64 {
    match since_us {
        0 => 0,
        since_us => now_us.saturating_sub(since_us),
    }
}

/// Age of a namespace's state at one moment.
#[derive(Debug)]
pub(crate) struct FreshnessReading<'f> {
    freshness: &'f Freshness,
    /// Time of the measurement, by [`now_us`].
    pub(crate) now_us: u64,
    /// Age of the state in microseconds: the longest wait of a message, in a lane's queue or unread in the stream. If
    /// the broker has been silent for longer than is allowed, its silence counts like a wait. 0 if nothing waits.
    pub(crate) behind_us: u64,
    is_everybody_behind: bool,
    /// Numbers of the workers' queues (lines) whose events had waited for too long, in ascending order. The numbers
    /// are read before the search, because an event that the search does not see may be applied before the search
    /// ends.
    lines_behind: Vec<u64>,
    flow: Arc<NamespaceFlow>,
}

impl FreshnessReading<'_> {
    /// Whether the state of `holder` was older than is allowed, at the moment of the measurement.
    pub(crate) fn is_behind(&self, namespace: &NamespaceName, holder: &HolderId) -> bool {
        if self.is_everybody_behind || self.lines_behind.is_empty() {
            return self.is_everybody_behind;
        }
        self.is_line_behind(namespace, &holder.worker)
    }

    fn is_line_behind(&self, namespace: &NamespaceName, worker: &WorkerName) -> bool {
        let worker = WorkerKey {
            namespace: namespace.clone(),
            worker: worker.clone(),
        };
        let line = self.freshness.assignments.line_of(&worker);
        line.is_some_and(|line| self.lines_behind.binary_search(&line.number).is_ok())
    }

    /// Whether the state of any holder was older than is allowed, at the moment of the measurement.
    pub(crate) fn is_anybody_behind(&self) -> bool {
        self.is_everybody_behind || !self.lines_behind.is_empty()
    }

    /// Whether events had waited for too long that were of none of `holders`, at the moment of the measurement. If
    /// `workers` is given, only events of these workers count. `holders` has all holders of these workers, or all
    /// holders of the namespace if `workers` is `None`.
    pub(crate) fn is_unheld_behind(
        &self,
        namespace: &NamespaceName,
        workers: Option<&[WorkerName]>,
        holders: &[Arc<HolderRecord>],
    ) -> bool {
        if !self.is_anybody_behind() {
            return false;
        }
        let held: HashSet<_> = holders.iter().map(|holder| &holder.id.worker).collect();
        let is_behind = |worker: &&WorkerName| self.is_line_behind(namespace, worker);
        match workers {
            _ if self.is_everybody_behind => true,
            Some(workers) => workers
                .iter()
                .filter(is_behind)
                .any(|worker| !held.contains(worker)),
            // Each worker has one line.
            None => held.into_iter().filter(is_behind).count() < self.lines_behind.len(),
        }
    }

    /// Returns the mark of a search. Must be called just before the search begins.
    pub(crate) fn mark_search(&self) -> SearchMark {
        self.flow.mark_search()
    }

    /// Returns the holders whose batches a search may have seen half applied. The search began at `mark` and has just
    /// ended.
    pub(crate) fn seen_in_parts(&self, mark: SearchMark) -> SeenInParts {
        self.flow.seen_in_parts(mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the freshness record of a daemon with the limit `behind_after`, to which the broker has been silent
    /// for `unheard`. Also returns the time of the last sign of the broker.
    fn freshness(behind_after: Option<Duration>, unheard: Duration) -> (Freshness, u64) {
        let flows = Arc::new(Flows::new(1));
        let assignments = Arc::new(Assignments::new(1, Arc::clone(&flows)));
        let freshness = Freshness::new(flows, assignments, behind_after);
        let heard_us = now_us() - u64::try_from(unheard.as_micros()).unwrap();
        freshness.heard(heard_us);
        (freshness, heard_us)
    }

    #[test]
    fn after_a_standstill_a_message_may_be_as_old_as_the_last_sign_of_the_broker() {
        let (long, short) = (Duration::from_secs(2), Duration::from_secs(600));
        let (stood_still, heard_us) = freshness(Some(Duration::from_secs(1)), long);
        let late = stood_still.arrival(Duration::ZERO);
        assert_eq!(
            (late.came_us, late.sent_us, late.is_new),
            (heard_us, heard_us, false)
        );
        // Once the broker has been heard, later messages count as new again.
        stood_still.heard(now_us());
        let prompt = stood_still.arrival(Duration::ZERO);
        assert!(prompt.came_us > heard_us && prompt.sent_us == prompt.came_us && prompt.is_new);
        let kept = stood_still.arrival(Duration::from_secs(5));
        assert!(kept.came_us - kept.sent_us == 5_000_000 && !kept.is_new);
        // A message counts as new if there is no limit, if the silence is within the limit, or if events are not
        // followed.
        let before_us = now_us();
        let (unasked, _) = freshness(None, long);
        let (allowed, _) = freshness(Some(short), long);
        let (unfollowed, _) = freshness(Some(Duration::ZERO), long);
        unfollowed.heard(0);
        for now in [unasked, allowed, unfollowed] {
            let arrival = now.arrival(Duration::ZERO);
            assert!(arrival.came_us >= before_us && arrival.is_new);
        }
    }

    #[test]
    fn a_message_that_was_unread_in_the_stream_has_waited_as_long() {
        let (limit, short) = (Duration::from_secs(60), Duration::ZERO);
        let arrival = |unread_since_us: u64, known_us: u64| {
            let (paused, _) = freshness(Some(limit), short);
            paused.set_unread(unread_since_us);
            paused.stream_known(known_us, known_us);
            let arrival = paused.arrival(Duration::ZERO);
            assert_eq!(arrival.sent_us, arrival.came_us);
            (arrival.came_us, arrival.is_new)
        };
        let now_us = now_us();
        let (late_us, allowed_us) = (now_us - 62_000_000, now_us - 2_000_000);
        assert_eq!(arrival(late_us, now_us), (late_us, false));
        assert_eq!(arrival(allowed_us, now_us), (allowed_us, true));
        // Nothing was known to be unread, because nothing was known.
        assert_eq!(arrival(0, late_us), (late_us, false));
        let read = arrival(0, allowed_us);
        assert!(read.0 >= now_us && read.1);
        assert_eq!(arrival(late_us - 1, late_us), (late_us - 1, false));
        // The stream says how long it has kept the message, from before it was known to be unread on.
        let (reading, _) = freshness(Some(limit), short);
        reading.set_unread(allowed_us);
        let kept = reading.arrival(Duration::from_secs(1));
        assert_eq!(
            (kept.came_us, kept.sent_us, kept.is_new),
            (allowed_us, allowed_us, false)
        );
        let kept = reading.arrival(Duration::from_secs(50));
        assert!(kept.sent_us >= now_us - 50_000_000 && kept.sent_us < allowed_us);
    }

    #[test]
    fn a_broker_is_silent_beyond_the_limit_only() {
        let silent = Duration::from_secs(2);
        let (quiet, heard_us) = freshness(Some(Duration::from_secs(1)), silent);
        let now_us = heard_us + 2_000_000;
        assert_eq!(quiet.silent_us(now_us), Some(2_000_000));
        assert_eq!(quiet.silent_us(heard_us + 1_000_000), None);
        // The pulse comes back, and nobody says what the stream has.
        quiet.heard(now_us);
        assert_eq!(quiet.silent_us(now_us), None);
        quiet.stream_known(now_us - 3_000_000, now_us);
        assert_eq!(quiet.silent_us(now_us), Some(3_000_000));
        assert_eq!(freshness(None, silent).0.silent_us(now_us), None);
    }

    #[test]
    fn a_stream_without_a_leader_is_not_a_silent_broker() {
        let (limit, long) = (Duration::from_secs(60), Duration::from_secs(62));
        let (silent, late_us) = freshness(Some(limit), long);
        assert_eq!(silent.stream_trouble(now_us()), None, "the broker is silent");
        // The pulse comes back.
        silent.heard(now_us());
        assert_eq!(silent.stream_trouble(now_us()), None);
        silent.stream_known(late_us, late_us);
        assert_eq!(silent.stream_trouble(now_us()).as_deref(), Some(LEADER_SILENT));
        // There is no pulse while a consumer is made.
        silent.heard(late_us);
        silent.set_stream_error(Some("no leader".to_owned()));
        assert_eq!(silent.stream_trouble(now_us()).as_deref(), Some("no leader"));
        silent.heard(now_us());
        silent.stream_known(now_us(), now_us());
        assert_eq!(silent.stream_trouble(now_us()), None, "the error has not lasted");
    }

    #[test]
    fn a_wait_that_ends_after_a_look_counts_for_that_look() {
        let namespace = NamespaceName::new("llama").unwrap();
        let (freshness, _) = freshness(Some(Duration::from_secs(1)), Duration::ZERO);
        let holder = |name: &str| HolderId {
            worker: WorkerName::new(name).unwrap(),
            rank: 0,
        };
        let assign = |name: &str| {
            let (namespace, worker) = (namespace.clone(), holder(name).worker);
            freshness.assignments.assign(&WorkerKey { namespace, worker }).1
        };
        let (late, prompt) = (assign("late"), assign("prompt"));
        late.line().begin_waiting(0, now_us() - 2_000_000);
        prompt.line().begin_waiting(0, now_us());
        let look = freshness.look(&namespace);
        late.line().end_waiting(0);
        assert!(look.is_behind(&namespace, &holder("late")));
        assert!(!look.is_behind(&namespace, &holder("prompt")));
        let later = freshness.look(&namespace);
        assert!(!later.is_behind(&namespace, &holder("late")));
    }

    #[test]
    fn a_search_may_see_the_first_batch_of_a_namespace_in_parts() {
        let namespace = NamespaceName::new("llama").unwrap();
        let (freshness, _) = freshness(None, Duration::ZERO);
        let look = freshness.look(&namespace);
        let mark = look.mark_search();
        freshness.flows.prune();
        let holder = HolderId {
            worker: WorkerName::new("w").unwrap(),
            rank: 0,
        };
        drop(freshness.flows.of(&namespace).begin_step(&holder));
        assert!(look.seen_in_parts(mark).contains(&holder));
        drop(look);
        freshness.flows.prune();
        assert!(freshness.flows.get(&namespace).is_none());
    }

    #[test]
    fn everybody_is_behind_while_the_broker_is_not_heard() {
        let namespace = NamespaceName::new("llama").unwrap();
        let (silent, _) = freshness(Some(Duration::from_secs(1)), Duration::from_secs(2));
        let look = silent.look(&namespace);
        assert!(look.is_everybody_behind && look.behind_us >= 2_000_000);
        silent.heard(now_us());
        let look = silent.look(&namespace);
        assert!(!look.is_everybody_behind && look.behind_us == 0);
    }

    #[test]
    fn everybody_is_behind_while_the_end_of_the_stream_is_not_known() {
        let namespace = NamespaceName::new("llama").unwrap();
        let (unknown, _) = freshness(Some(Duration::from_secs(1)), Duration::ZERO);
        unknown.stream_known(now_us() - 2_000_000, now_us());
        let look = unknown.look(&namespace);
        assert!(look.is_everybody_behind && look.behind_us >= 2_000_000);
        unknown.stream_known(now_us(), now_us());
        assert!(!unknown.look(&namespace).is_everybody_behind);
        // Messages come, but the stream's leader has not answered since.
        unknown.stream_known(now_us(), now_us() - 3_000_000);
        assert!(unknown.look(&namespace).behind_us >= 2_000_000);
        // Without a stream, or without a limit, no holder is behind.
        unknown.stream_known(0, 0);
        assert!(!unknown.look(&namespace).is_everybody_behind);
        let (unlimited, _) = freshness(None, Duration::ZERO);
        unlimited.stream_known(1, 1);
        assert!(!unlimited.look(&namespace).is_everybody_behind);
    }

    #[test]
    fn the_end_of_the_stream_is_asked_for_twice_before_holders_are_behind() {
        for limit_ms in [20, 250, 1_000, 3_600_000] {
            let limit = Duration::from_millis(limit_ms);
            let (limited, _) = freshness(Some(limit), Duration::ZERO);
            assert!(limited.look_interval() * 2 < limit, "{limit:?}");
        }
        let (unlimited, _) = freshness(None, Duration::ZERO);
        assert_eq!(unlimited.look_interval(), Duration::from_millis(500));
    }
}
