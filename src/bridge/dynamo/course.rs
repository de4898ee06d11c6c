//! Course of one worker that can be asked: how far its events are known.
//!
//! ```text
//!            message goes on                    hole, doubt, late start
//!   ┌───────────────────────────┐  ┌──────────────────────────────────────────────┐
//!   ▼                           │  │                                              ▼
//! whole ────────────────────────┘──┘                                 out of sight, messages wait
//!   ▲                                                                             │
//!   └── the answer and what has waited reach the last number that was heard of ───┘
//! ```

use std::time::{Duration, Instant};

use bytes::Bytes;

use kvatlas_client::Backoff;
use kvatlas_engines::{EngineBatch, EngineChange, EventNumber, Reason};

use super::super::follower::FollowOptions;
use super::records::SourceRecord;

/// Number of intervals ([`Pace`]) between two questions to a worker that is silent. Each question makes the worker write two
/// lines to its log.
const QUIET_INTERVALS: u32 = 5;
/// Maximum number of intervals ([`Pace`]) between two questions for the whole state. The pause grows while the answers
/// leave the worker in doubt.
const DUMP_INTERVALS_MAX: u32 = 60;

/// Intervals at which the bridge asks workers for their events.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    /// Pause after a worker's message before the worker is asked whether it has sent more.
    interval: Duration,
    /// Time from the last sign of life until a worker that does not answer counts as out of sight (perhaps dead).
    pub(super) silent_after: Duration,
    /// Backoff between questions, for as long as no useful answer comes.
    backoff: Backoff,
    /// Backoff between questions for the whole state, for as long as the answers leave the worker in doubt.
    dump_backoff: Backoff,
}

impl Pace {
    pub(super) fn new(options: &FollowOptions) -> Self {
        Self {
            interval: options.poll_interval,
            silent_after: options.silent_after,
            backoff: options.backoff,
            dump_backoff: Backoff {
                pause_min: options.poll_interval,
                pause_max: options.poll_interval * DUMP_INTERVALS_MAX,
            },
        }
    }

    /// Returns the time for which a worker that has answered counts as alive.
    pub(super) fn alive_for(&self) -> Duration {
        self.interval * (QUIET_INTERVALS + 1) + self.silent_after
    }

    /// Returns the time from which a connection that is made now counts as *heard*: the bridge then assumes that it
    /// brings the workers' messages, even if it has not brought any yet.
    pub(super) fn settled_at(&self) -> Instant {
        Instant::now() + self.interval
    }
}

/// Course of one worker: how far the bridge knows the worker's events, and the messages that wait for missing events.
#[derive(Debug)]
pub(super) struct Course {
    pub(super) record: SourceRecord,
    /// Number of the event that is expected next; `None` before the worker's state is known, or after its numbers began
    /// anew.
    pub(super) due: Option<u64>,
    /// Largest event number that a message or an answer has named; `None` before the first.
    heard: Option<u64>,
    /// Whether all known events of the worker are applied, without a gap.
    pub(super) is_whole: bool,
    /// Whether a message has come since the connection was made. The message shows that the connection brings the
    /// worker's messages: it is *heard*.
    pub(super) is_heard: bool,
    /// Messages that wait until the events before them have come.
    pub(super) waiting: Vec<Bytes>,
    /// Number of the open question; `None` if no question is open.
    pub(super) asked: Option<u64>,
    ask_at: Instant,
    failures: u32,
    /// Time at which the worker last showed that it lives.
    pub(super) alive_at: Instant,
    /// Error of the last question, in words; `None` if it succeeded.
    pub(super) trouble: Option<String>,
}

impl Course {
    /// Makes the course of a worker whose events are not known yet.
    pub(super) fn new(record: SourceRecord) -> Self {
        let now = Instant::now();
        Self {
            record,
            due: None,
            heard: None,
            is_whole: false,
            is_heard: false,
            waiting: Vec::new(),
            asked: None,
            ask_at: now,
            failures: 0,
            alive_at: now,
            trouble: None,
        }
    }

    /// Notes the numbers of the worker's events in a message.
    pub(super) fn hear(&mut self, batch: &EngineBatch) {
        let newest = self.own_numbers(batch).max();
        self.heard = self.heard.max(newest);
    }

    /// Returns the numbers of the worker's events in `batch`. Each rank of a worker counts its own events, so the
    /// numbers of other ranks are left out.
    fn own_numbers<'a>(&self, batch: &'a EngineBatch) -> impl Iterator<Item = u64> + use<'a> {
        let own = self.record.rank;
        let numbers = batch.numbers.iter();
        let is_own = move |number: &&EventNumber| number.rank.unwrap_or_default() == own;
        numbers.filter(is_own).map(|number| number.id)
    }

    /// Notes that events are missing or in doubt. The bridge then asks the worker immediately. `counts_anew` says that
    /// the worker has begun to number its events from the beginning.
    pub(super) fn break_off(&mut self, counts_anew: bool) {
        if counts_anew {
            (self.due, self.heard) = (None, None);
        }
        if self.is_whole {
            self.is_whole = false;
            self.ask_at = Instant::now();
        }
    }

    /// Notes that the connection broke. The open question is given up, because its answer does not show which messages
    /// the next connection brings.
    pub(super) fn disconnect(&mut self) {
        (self.is_heard, self.asked) = (false, None);
        self.ask_at = Instant::now();
    }

    /// Begins the question with the number `name`. Returns `None` if the worker is not to be asked yet, and
    /// `Some(None)` if it is to be asked for everything. Otherwise returns the number of the first event to ask for. It
    /// is the last event that the bridge knows, because the worker surely has that event.
    pub(super) fn question(&mut self, name: u64) -> Option<Option<u64>> {
        if self.asked.is_some() || self.ask_at > Instant::now() {
            return None;
        }
        self.asked = Some(name);
        Some(self.due.map(|due| due.saturating_sub(1)))
    }

    /// Returns the number of the next event after `batch`. `due` is the number of the next event before it. `None` if
    /// an event in between is missing, or if an event has no number. With `clears_all`, a clear at the beginning of the
    /// batch makes up for missing events before it.
    pub(super) fn next_due(&self, due: u64, batch: &EngineBatch, clears_all: bool) -> Option<u64> {
        if batch.events().iter().any(|event| event.id.is_none()) {
            return None;
        }
        let mut numbers = self.own_numbers(batch).peekable();
        let first = numbers.peek().copied();
        let clear = batch
            .events()
            .first()
            .filter(|event| event.change == EngineChange::Cleared);
        let begins = match clear.and_then(|event| event.id) {
            Some(id) if clears_all && Some(id) == first => due.max(id),
            _ => due,
        };
        numbers.try_fold(begins, |due, number| match number {
            id if id < due => Some(due),
            id if id == due => due.checked_add(1),
            _ => None,
        })
    }

    /// Whether all events up to the highest known number have been applied.
    pub(super) fn is_complete(&self) -> bool {
        self.due
            .is_some_and(|due| self.heard.is_none_or(|heard| heard < due))
    }

    /// Notes that the answer to the last question has closed every gap: all events that the bridge has heard of are
    /// applied.
    pub(super) fn is_healed(&mut self, pace: &Pace) {
        (self.is_whole, self.failures, self.trouble) = (true, 0, None);
        self.alive_at = Instant::now();
        self.ask_at = self.alive_at + pace.interval * QUIET_INTERVALS;
    }

    /// Notes that the last question failed, or that events are still missing after its answer. `trouble` says why.
    pub(super) fn has_failed(&mut self, trouble: String, pace: &Pace) {
        self.fail(trouble, pace.backoff);
    }

    /// Notes that the worker's blocks are in doubt even after the answer to the last question. So the next question
    /// asks for the whole state.
    pub(super) fn is_doubtful(&mut self, doubt: Reason, pace: &Pace) {
        (self.is_whole, self.due) = (false, None);
        self.fail(doubt.as_str().to_owned(), pace.dump_backoff);
    }

    fn fail(&mut self, trouble: String, backoff: Backoff) {
        self.failures = self.failures.saturating_add(1);
        self.ask_at = Instant::now() + backoff.pause(self.failures);
        self.trouble = Some(trouble);
    }

    /// Notes that a message has come which continues the known events. After one interval without another message, the
    /// bridge asks the worker whether it has sent more.
    pub(super) fn is_alive(&mut self, pace: &Pace) {
        self.alive_at = Instant::now();
        self.ask_at = self.alive_at + pace.interval;
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_engines::{DecodeLimits, Decoder, Format};
    use serde_json::{Value, json};

    use super::super::records::Target;
    use super::*;

    fn course() -> Course {
        Course::new(SourceRecord {
            subject: "s".to_owned(),
            id: 7,
            worker: kvatlas_core::wire::WorkerName::new("7").unwrap(),
            rank: 0,
            target: Target::Nats("t".to_owned()),
        })
    }

    /// Makes a batch with one clear for each of these event numbers. For `None`, the clear has no number.
    fn batch(numbers: &[Option<u64>]) -> EngineBatch {
        let numbers: Vec<_> = numbers.iter().map(|id| (0, *id)).collect();
        batch_of_ranks(&numbers)
    }

    /// Makes a batch with one clear for each of these ranks and event numbers.
    fn batch_of_ranks(numbers: &[(u32, Option<u64>)]) -> EngineBatch {
        let event = |(rank, id): &(u32, Option<u64>)| {
            let event = json!({"event_id": id, "data": "cleared", "dp_rank": rank});
            json!({"worker_id": 7, "event": event})
        };
        let events: Vec<Value> = numbers.iter().map(event).collect();
        let mut batch = EngineBatch::default();
        let mut decoder = Decoder::new(Format::Dynamo, DecodeLimits::default());
        decoder
            .decode(&serde_json::to_vec(&events).unwrap(), &mut batch)
            .unwrap();
        batch
    }

    #[test]
    fn numbers_go_on_or_one_is_missing() {
        let course = course();
        let next = |due, numbers: &[u64], clears_all| {
            let numbers: Vec<_> = numbers.iter().copied().map(Some).collect();
            course.next_due(due, &batch(&numbers), clears_all)
        };
        assert_eq!(next(3, &[], false), Some(3));
        assert_eq!(next(3, &[3, 4, 5], false), Some(6));
        assert_eq!(next(3, &[1, 2, 3], false), Some(4));
        assert_eq!(next(3, &[1, 2], false), Some(3));
        assert_eq!(next(3, &[4], false), None);
        assert_eq!(next(3, &[3, 5], false), None);
        // Event 0 is missing: it may have been lost.
        assert_eq!(next(0, &[1], false), None);
        assert_eq!(next(0, &[0, 1], false), Some(2));
        // After a clear, earlier events are not needed.
        assert_eq!(next(3, &[7, 8], true), Some(9));
        assert_eq!(next(3, &[7, 9], true), None);
        assert_eq!(next(3, &[2, 3], true), Some(4));
        assert_eq!(course.next_due(3, &batch(&[Some(3), None]), false), None);
    }

    #[test]
    fn what_was_heard_of_has_to_come() {
        let mut course = course();
        assert!(!course.is_complete());
        course.due = Some(5);
        course.hear(&batch(&[Some(4)]));
        assert!(course.is_complete());
        course.hear(&batch(&[Some(6), Some(5)]));
        assert!(!course.is_complete());
        course.due = Some(7);
        assert!(course.is_complete());
        // Another rank of the worker counts its own events.
        course.hear(&batch_of_ranks(&[(0, Some(6)), (1, Some(900))]));
        assert!(course.is_complete());
    }

    #[test]
    fn a_question_is_open_once_and_asks_for_what_is_known_last() {
        let mut course = course();
        assert_eq!(course.question(1), Some(None));
        assert_eq!(course.question(2), None);
        course.disconnect();
        course.due = Some(5);
        assert_eq!(course.question(3), Some(Some(4)));
        course.asked = None;
        course.has_failed("x".to_owned(), &Pace::new(&FollowOptions::default()));
        assert_eq!(course.question(4), None);
    }
}
