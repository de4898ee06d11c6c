//! Tests of a lane's queue, without a lane.

use std::sync::Arc;
use std::time::Duration;

use kvatlas_core::wire::{NamespaceName, WorkerName};

use super::super::flow::Flows;
use super::super::line::{Assignments, InFlight, WorkerKey};
use super::*;

/// Job of these tests: a message with a number, several messages, or a mark that stands for a number of dropped jobs.
#[derive(Debug, PartialEq, Eq)]
enum Work {
    Message(u32),
    Several(usize),
    Kept(u32),
    Mark(u32),
}

impl LineJob for Work {
    fn messages(&self) -> usize {
        match self {
            Self::Several(count) => *count,
            _ => 1,
        }
    }

    fn is_droppable(&self) -> bool {
        matches!(self, Self::Message(_) | Self::Several(_))
    }

    fn into_mark(self) -> Result<Self, Self> {
        match self {
            Self::Message(_) | Self::Several(_) => Ok(Self::Mark(1)),
            other => Err(other),
        }
    }

    fn merge_mark(&mut self, mark: Self) -> Result<(), Self> {
        match (self, mark) {
            (Self::Mark(count), Self::Mark(more)) => {
                *count += more;
                Ok(())
            }
            (_, other) => Err(other),
        }
    }
}

struct World {
    sender: JobSender<Work>,
    receiver: JobReceiver<Work>,
    lines: Vec<InFlight>,
    flow: Arc<super::super::flow::NamespaceFlow>,
}

/// Ends a turn (the jobs that a lane takes at once) that took `micros`.
fn done(receiver: &JobReceiver<Work>, turn: Turn, micros: u64) {
    receiver.end_turn(&mut receiver.0.state.lock(), turn, Duration::from_micros(micros));
}

/// Makes a queue with room for `messages` messages without a payload. A lane takes one message in a turn.
fn world(messages: usize) -> World {
    world_of_turns(messages, 1)
}

/// Makes a queue as [`world`] does, from which a lane takes up to `turn_messages_max` messages in a turn.
fn world_of_turns(messages: usize, turn_messages_max: usize) -> World {
    let flows = Arc::new(Flows::new(1));
    let assignments = Assignments::new(1, Arc::clone(&flows));
    let namespace = NamespaceName::new("n").unwrap();
    let line = |name: &str| {
        let worker = WorkerName::new(name).unwrap();
        let namespace = namespace.clone();
        assignments.assign(&WorkerKey { namespace, worker }).1
    };
    let lines = ["a", "b", "c"].map(line).into();
    let (sender, receiver) = job_queue(0, messages * MESSAGE_OVERHEAD_BYTES, turn_messages_max);
    World {
        sender,
        receiver,
        lines,
        flow: flows.of(&namespace),
    }
}

impl World {
    fn send(&self, line: usize, job: Work) {
        self.send_at(line, job, 1);
    }

    fn send_at(&self, line: usize, job: Work, came_us: u64) {
        let line = Arc::clone(self.lines[line].line());
        self.sender.send_or_drop([(line, job, 0)], came_us).unwrap();
    }

    /// Does the next job, which takes `micros`, and returns it.
    fn work(&self, micros: u64) -> Work {
        self.turn(micros).pop().unwrap()
    }

    /// Does the jobs of the queue's next turn (the jobs taken at once), which takes `micros`, and returns them.
    fn turn(&self, micros: u64) -> Vec<Work> {
        let mut jobs = Vec::new();
        let turn = self.receiver.next(None, &mut jobs).unwrap();
        done(&self.receiver, turn, micros);
        jobs
    }

    /// Does all jobs that are left, in turns of one microsecond, and returns them.
    fn rest(self) -> Vec<Work> {
        drop(self.sender);
        let mut rest = Vec::new();
        while let Some(turn) = self.receiver.next(None, &mut rest) {
            done(&self.receiver, turn, 1);
        }
        rest
    }
}

#[test]
fn who_takes_more_than_his_share_is_worked_on_last() {
    let world = world(100);
    for number in 0..3 {
        world.send(0, Work::Message(number));
    }
    assert_eq!(world.work(1_000), Work::Message(0));
    world.send(1, Work::Message(10));
    world.send(1, Work::Message(11));
    assert_eq!(world.work(10), Work::Message(10));
    assert_eq!(world.work(10), Work::Message(11));
    assert_eq!(world.work(1_000), Work::Message(1));
    // A line that was idle has neither credit nor debt.
    world.send(2, Work::Message(20));
    assert_eq!(world.rest(), [Work::Message(20), Work::Message(2)]);
}

#[test]
fn a_line_is_worked_on_in_order() {
    let world = world(100);
    for number in 0..50 {
        world.send(usize::try_from(number % 2).unwrap(), Work::Message(number));
    }
    let mut last = [None, None];
    for job in world.rest() {
        let Work::Message(number) = job else {
            panic!("{job:?}");
        };
        let line = usize::try_from(number % 2).unwrap();
        assert!(last[line] < Some(number), "{number} after {:?}", last[line]);
        last[line] = Some(number);
    }
}

#[test]
fn a_turn_has_small_jobs_of_one_line_between_two_control_jobs() {
    let world = world_of_turns(10_000, 3);
    for number in 0..5 {
        world.send(0, Work::Message(number));
    }
    world.sender.send_control(Work::Kept(100)).unwrap();
    world.send(0, Work::Message(5));
    world.send(1, Work::Message(10));
    let messages = |numbers: &[u32]| numbers.iter().copied().map(Work::Message).collect::<Vec<_>>();
    assert_eq!(world.turn(10), messages(&[0, 1, 2]));
    assert_eq!(
        world.turn(100),
        messages(&[10]),
        "others are not delayed by more than a turn"
    );
    assert_eq!(
        world.turn(1),
        messages(&[3, 4]),
        "the next job came after the control job"
    );
    assert_eq!(world.turn(1), [Work::Kept(100)]);
    assert_eq!(world.turn(1), messages(&[5]));
    assert_eq!(world.sender.backlog().messages.load(Ordering::Relaxed), 0);
    assert_eq!(world.sender.backlog().bytes.load(Ordering::Relaxed), 0);

    let line = |bytes| (Arc::clone(world.lines[2].line()), Work::Message(1), bytes);
    let large = [line(1), line(TURN_BYTES_MAX), line(1), line(1)];
    world.sender.send_or_drop(large, 1).unwrap();
    let turns: Vec<_> = (0..3).map(|_| world.turn(1).len()).collect();
    assert_eq!(turns, [1, 1, 2], "a large job is a turn of its own");
}

#[test]
fn control_jobs_wait_for_what_came_before() {
    let world = world(100);
    world.send(0, Work::Message(0));
    world.send(0, Work::Message(1));
    world.sender.send_control(Work::Kept(100)).unwrap();
    world.send(1, Work::Message(2));
    assert_eq!(world.work(1_000), Work::Message(0));
    // A later message of another line may go before the control job. An earlier message must.
    assert_eq!(world.work(1), Work::Message(2));
    assert_eq!(world.work(1), Work::Message(1));
    assert_eq!(world.work(1), Work::Kept(100));
}

#[test]
fn a_full_queue_drops_messages_of_those_with_more_than_their_share() {
    let world = world(6);
    for number in 0..10 {
        world.send(0, Work::Message(number));
    }
    // Messages of another line displace the newest jobs of the longest line.
    world.send(1, Work::Message(20));
    world.send(1, Work::Message(21));
    world.send(1, Work::Message(22));
    let backlog = world.sender.backlog();
    let bytes = backlog.bytes.load(std::sync::atomic::Ordering::Relaxed);
    assert!(bytes <= 6 * MESSAGE_OVERHEAD_BYTES);
    let rest = world.rest();
    let dropped: u32 = rest
        .iter()
        .map(|job| match job {
            Work::Mark(count) => *count,
            _ => 0,
        })
        .sum();
    let kept = rest.iter().filter(|job| matches!(job, Work::Message(_))).count();
    assert_eq!((kept, dropped), (6, 7), "{rest:?}");
    for number in 20..23 {
        assert!(rest.contains(&Work::Message(number)), "{rest:?}");
    }
    let marks = rest.iter().filter(|job| matches!(job, Work::Mark(_))).count();
    assert_eq!(marks, 1, "marks beside each other become one: {rest:?}");
}

#[test]
fn what_must_not_be_dropped_is_kept() {
    let world = world(2);
    for number in 0..4 {
        world.send(0, Work::Kept(number));
    }
    world.send(0, Work::Message(9));
    assert_eq!(world.rest().len(), 5);
}

#[test]
fn a_job_that_must_not_be_dropped_does_not_shield_the_messages_before_it() {
    let world = world(8);
    for number in 0..6 {
        world.send(0, Work::Message(number));
    }
    world.send(0, Work::Kept(100));
    world.send(0, Work::Message(6));
    world.send(0, Work::Kept(101));
    // Messages of another line displace the newest messages of the longest line, and no other jobs.
    for number in 20..23 {
        world.send(1, Work::Message(number));
    }
    let backlog = |world: &World| {
        let backlog = world.sender.backlog();
        let counts = [&backlog.messages, &backlog.bytes];
        counts.map(|count| count.load(Ordering::Relaxed))
    };
    // Two marks are left, on either side of a job that is kept.
    assert_eq!(backlog(&world), [10, 8 * MESSAGE_OVERHEAD_BYTES]);
    let mut rest = Vec::new();
    while backlog(&world)[0] > 0 {
        rest.push(world.work(1));
    }
    let own: Vec<_> = rest
        .iter()
        .filter(|job| !matches!(job, Work::Message(20..)))
        .collect();
    let before = [0, 1, 2].map(Work::Message);
    let after = [Work::Mark(3), Work::Kept(100), Work::Mark(1), Work::Kept(101)];
    assert_eq!(own, before.iter().chain(&after).collect::<Vec<_>>());
    assert_eq!(backlog(&world), [0, 0]);
}

#[test]
fn of_the_longest_lines_one_with_messages_loses_them() {
    let world = world(6);
    for number in 0..4 {
        world.send(0, Work::Kept(number));
    }
    for number in 10..12 {
        world.send(1, Work::Message(number));
    }
    world.send(2, Work::Message(20));
    let rest = world.rest();
    assert!(
        rest.contains(&Work::Message(20)) && !rest.contains(&Work::Message(11)),
        "{rest:?}"
    );
}

#[test]
fn a_job_that_does_not_wait_for_room_is_queued_beside_a_flood() {
    let world = world(16);
    let flood = || (0..64).for_each(|number| world.send(0, Work::Message(number)));
    flood();
    for number in 0..3 {
        world
            .sender
            .send_now(world.lines[1].line(), Work::Kept(number), 1)
            .unwrap();
        flood();
    }
    let kept = (0..9)
        .map(|_| world.work(1))
        .filter(|job| matches!(job, Work::Kept(_)));
    assert_eq!(kept.collect::<Vec<_>>(), [0, 1, 2].map(Work::Kept));
}

#[test]
fn control_jobs_are_done_after_messages_that_were_dropped() {
    let world = world(2);
    for number in 0..5 {
        world.send(0, Work::Message(number));
    }
    world.sender.send_control(Work::Kept(100)).unwrap();
    world.send(1, Work::Message(10));
    let rest = world.rest();
    assert!(rest.contains(&Work::Kept(100)), "{rest:?}");
}

#[test]
fn the_age_of_what_waits_is_that_of_the_oldest_message() {
    let world = world(10);
    assert_eq!(world.flow.oldest_us(), None);
    world.send_at(0, Work::Message(0), 100);
    world.send_at(1, Work::Message(1), 200);
    assert_eq!(world.flow.oldest_us(), Some(100));
    let turn = world.receiver.next(None, &mut Vec::new()).unwrap();
    assert_eq!(world.flow.oldest_us(), Some(100), "it is not applied yet");
    done(&world.receiver, turn, 5);
    assert_eq!(world.flow.oldest_us(), Some(200));
    world.work(1);
    assert_eq!(world.flow.oldest_us(), None);
}

#[tokio::test]
async fn who_waits_for_room_gets_it() {
    let world = world(1);
    world.send(0, Work::Message(0));
    let (first, second) = tokio::join!(
        world.sender.send(world.lines[1].line(), Work::Message(1), 0, 1),
        async {
            tokio::task::yield_now().await;
            world.work(1)
        }
    );
    first.unwrap();
    assert_eq!(second, Work::Message(0));
    assert_eq!(world.rest(), [Work::Message(1)]);
}

#[test]
fn a_turn_has_so_many_messages_or_one_job() {
    let world = world_of_turns(100, 4);
    for count in [3, 1, 2, 3, 9, 1] {
        world.send(0, Work::Several(count));
    }
    let several = |counts: &[usize]| counts.iter().copied().map(Work::Several).collect::<Vec<_>>();
    assert_eq!(world.sender.backlog().messages.load(Ordering::Relaxed), 19);
    assert_eq!(world.turn(10), several(&[3, 1]));
    assert_eq!(world.turn(10), several(&[2]));
    assert_eq!(world.turn(10), several(&[3]));
    assert_eq!(world.turn(10), several(&[9]));
    assert_eq!(world.sender.backlog().messages.load(Ordering::Relaxed), 1);
    assert_eq!(world.turn(10), several(&[1]));
    assert_eq!(world.sender.backlog().messages.load(Ordering::Relaxed), 0);
}

#[test]
fn several_messages_are_dropped_together_and_each_counts() {
    let world = world(8);
    world.send(0, Work::Several(6));
    assert_eq!(
        world.sender.backlog().bytes.load(Ordering::Relaxed),
        6 * MESSAGE_OVERHEAD_BYTES
    );
    // The second line has no more than its share, so the first line's job is dropped.
    world.send(1, Work::Several(3));
    world.send(1, Work::Message(1));
    // A mark stays in the place of the first line's messages.
    assert_eq!(world.sender.backlog().messages.load(Ordering::Relaxed), 5);
    assert_eq!(
        world.sender.backlog().bytes.load(Ordering::Relaxed),
        4 * MESSAGE_OVERHEAD_BYTES
    );
    // This job would exceed its line's share, so the job itself is dropped.
    world.send(1, Work::Several(5));
    assert_eq!(world.sender.backlog().messages.load(Ordering::Relaxed), 6);
    let backlog = |world: &World| world.sender.backlog().messages.load(Ordering::Relaxed);
    assert_eq!(world.work(1), Work::Mark(1));
    assert_eq!(world.work(1), Work::Several(3));
    assert_eq!(world.work(1), Work::Message(1));
    assert_eq!(world.work(1), Work::Mark(1));
    assert_eq!(backlog(&world), 0);
}
