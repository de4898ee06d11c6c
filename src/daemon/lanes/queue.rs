//! The queue in front of a lane: bounded in bytes, fair by the time that the lane spends on each worker.
//!
//! Each worker has a *line* of jobs. The jobs of a line are done in order. The lane next serves the line on which it
//! has spent the least time: fair queueing by virtual time. A line that was empty begins with the virtual time of the
//! line whose turn it is, so idle workers save up no credit. A worker that needs more than its share of time is
//! therefore served last. It delays the others by one *turn* at most: one job, or a few small ones.
//!
//! A full queue drops messages of core NATS. If the arriving job would give its line more than an even share of the
//! room, that job is dropped. Otherwise the newest jobs of the longest line are dropped. All messages of a job are
//! dropped together. A *mark* (a tombstone) stays in the place of a dropped job. When its turn comes, the worker's
//! holders are put in doubt. Messages of JetStream are not dropped: they wait for room.
//!
//! Steps of resyncs and commands of operators neither wait for room nor take the room of messages. Otherwise a worker
//! that floods a lane could keep the publishers' answers about other workers out of it.
//!
//! A *control job* is done after all jobs that were queued before it; later jobs may overtake it. The jobs between two
//! control jobs are an *era*.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::line::Line;

mod line_queue;

use line_queue::{DropSize, LineQueue, QueuedJob};

/// Bytes that a message counts in addition to its payload.
const MESSAGE_OVERHEAD_BYTES: usize = 256;
/// Maximum size of the jobs that a lane takes in one turn, in bytes, unless the turn is a single job.
const TURN_BYTES_MAX: usize = 32 * 1024;

/// Job that can wait in a line, the queue of one worker's jobs.
pub(crate) trait LineJob: Sized {
    /// Number of messages in the job. Each message counts toward the room of the queue and the size of a turn.
    fn messages(&self) -> usize {
        1
    }

    /// Whether the job may be dropped for want of room.
    fn is_droppable(&self) -> bool;

    /// Counts a dropped job, and returns the mark that takes its place in the queue. A job that must not be dropped
    /// is returned unchanged, as the error.
    fn into_mark(self) -> Result<Self, Self>;

    /// Merges a later mark into this mark. A mark stands for dropped messages. If one of the two is not a mark,
    /// returns `mark` unchanged, as the error.
    fn merge_mark(&mut self, mark: Self) -> Result<(), Self>;
}

/// Error that the queue's lane has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneStopped;

/// Number of messages and bytes in a queue, including the jobs that are being done.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    pub(crate) messages: AtomicUsize,
    pub(crate) bytes: AtomicUsize,
}

/// Jobs between two control jobs, with the control job that ends them.
struct Era<J> {
    outstanding: usize,
    /// Control job at the end of this era, that is, of the jobs since the previous control job. `None` in the last era.
    end: Option<J>,
}

struct QueueState<J> {
    lines: HashMap<u64, LineQueue<J>>,
    /// Lines (workers' queues) whose turn can come, as pairs of virtual time and line number. The line whose jobs are
    /// being done is absent.
    turns: BTreeSet<(u64, u64)>,
    /// Virtual time of the line (worker's queue) that had the last turn.
    turn_us: u64,
    /// Control jobs that are to be done next, because all jobs that were queued before them are done.
    ready: VecDeque<J>,
    /// Eras in order: the jobs between two control jobs are an era. There is always at least one. The first era has the
    /// number `first_era`.
    eras: VecDeque<Era<J>>,
    first_era: u64,
    is_closed: bool,
    is_stopped: bool,
}

struct QueueShared<J> {
    state: Mutex<QueueState<J>>,
    work: Condvar,
    room: Notify,
    bytes_max: usize,
    /// Maximum number of messages that the lane takes in one turn, unless the turn is a single job.
    turn_messages_max: usize,
    backlog: Backlog,
    /// Number of the lane to which the queue belongs.
    lane: usize,
}

/// Sending end of a lane's queue.
pub(crate) struct JobSender<J>(Arc<QueueShared<J>>);

/// Receiving end of a lane's queue, used by the lane.
pub(crate) struct JobReceiver<J>(Arc<QueueShared<J>>);

/// Work that the lane takes in one piece: a control job, or the next jobs of one worker. The lane returns the turn when
/// the work is done.
pub(crate) struct Turn {
    from: TurnOrigin,
    jobs: usize,
    messages: usize,
    bytes: usize,
}

enum TurnOrigin {
    Line { line: Arc<Line>, era: u64 },
    Control,
}

/// Makes a queue of at most about `bytes_max` bytes, in front of the lane with the number `lane`. A turn has at most
/// `turn_messages_max` messages, unless it is a single job.
pub(crate) fn job_queue<J: LineJob>(
    lane: usize,
    bytes_max: usize,
    turn_messages_max: usize,
) -> (JobSender<J>, JobReceiver<J>) {
    let shared = Arc::new(QueueShared {
        state: Mutex::new(QueueState::new()),
        work: Condvar::new(),
        room: Notify::new(),
        bytes_max,
        turn_messages_max: turn_messages_max.max(1),
        backlog: Backlog::default(),
        lane,
    });
    (JobSender(Arc::clone(&shared)), JobReceiver(shared))
}

impl<J: LineJob> QueueState<J> {
    fn new() -> Self {
        Self {
            lines: HashMap::new(),
            turns: BTreeSet::new(),
            turn_us: 0,
            ready: VecDeque::new(),
            eras: VecDeque::from([Era {
                outstanding: 0,
                end: None,
            }]),
            first_era: 0,
            is_closed: false,
            is_stopped: false,
        }
    }

    /// Adds a control job, which ends the present era.
    fn end_era(&mut self, control: J) {
        if let Some(last) = self.eras.back_mut() {
            last.end = Some(control);
        }
        self.eras.push_back(Era {
            outstanding: 0,
            end: None,
        });
        self.end_eras();
    }

    fn join_line(&mut self, line: &Arc<Line>, job: J, bytes: usize, came_us: u64, lane: usize) {
        let era = self.first_era + self.eras.len() as u64 - 1;
        if let Some(last) = self.eras.back_mut() {
            last.outstanding += 1;
        }
        let number = line.number;
        let turn_us = self.turn_us;
        let queue = self.lines.entry(number).or_insert_with(|| LineQueue {
            line: Arc::clone(line),
            jobs: VecDeque::new(),
            bytes: 0,
            turn_us: turn_us.max(line.turn_us()),
        });
        if queue.jobs.is_empty() && line.begin_waiting(lane, came_us) {
            self.turns.insert((queue.turn_us, number));
        }
        queue.bytes += bytes;
        queue.jobs.push_back(QueuedJob {
            job,
            bytes,
            came_us,
            era,
        });
    }

    fn end_eras(&mut self) {
        while self.eras.len() > 1 && self.eras.front().is_some_and(|era| era.outstanding == 0) {
            self.first_era += 1;
            self.ready.extend(self.eras.pop_front().and_then(|era| era.end));
        }
    }

    fn leave_era(&mut self, era: u64, jobs: usize) {
        let index = usize::try_from(era - self.first_era).unwrap_or(usize::MAX);
        if let Some(era) = self.eras.get_mut(index) {
            era.outstanding -= jobs;
        }
        self.end_eras();
    }

    /// Begins the next turn if there is work, and moves the turn's jobs to `jobs`. The jobs have at most `messages_max`
    /// messages, unless there is a single job.
    fn take(&mut self, jobs: &mut Vec<J>, messages_max: usize) -> Option<Turn> {
        if let Some(job) = self.ready.pop_front() {
            jobs.push(job);
            return Some(Turn {
                from: TurnOrigin::Control,
                jobs: 1,
                messages: 1,
                bytes: 0,
            });
        }
        let (turn_us, number) = self.turns.pop_first()?;
        self.turn_us = turn_us;
        let queue = self.lines.get_mut(&number)?;
        let first = queue.jobs.pop_front()?;
        let (era, mut bytes, mut taken) = (first.era, first.bytes, 1);
        let mut messages = first.job.messages();
        jobs.push(first.job);
        // The jobs are of one era, so that a control job between them keeps its place.
        let fits = |next: &QueuedJob<J>, messages: usize, bytes: usize| {
            let has_room = messages + next.job.messages() <= messages_max;
            has_room && next.era == era && bytes + next.bytes <= TURN_BYTES_MAX
        };
        while queue.jobs.front().is_some_and(|next| fits(next, messages, bytes))
            && let Some(next) = queue.jobs.pop_front()
        {
            bytes += next.bytes;
            messages += next.job.messages();
            taken += 1;
            jobs.push(next.job);
        }
        queue.bytes -= bytes;
        Some(Turn {
            from: TurnOrigin::Line {
                line: Arc::clone(&queue.line),
                era,
            },
            jobs: taken,
            messages,
            bytes,
        })
    }

    /// Ends a turn that did `jobs` jobs of the worker's queue `line`, and took `elapsed_us`.
    fn end_turn(&mut self, line: &Line, era: u64, jobs: usize, elapsed_us: u64, lane: usize) {
        if let Some(queue) = self.lines.get_mut(&line.number) {
            queue.turn_us = queue.turn_us.saturating_add(elapsed_us.max(1));
            line.spend(queue.turn_us, elapsed_us);
            if let Some(next) = queue.jobs.front() {
                line.go_on_waiting(lane, next.came_us);
                self.turns.insert((queue.turn_us, line.number));
            } else {
                line.end_waiting(lane);
                self.lines.remove(&line.number);
            }
        }
        self.leave_era(era, jobs);
    }

    /// Whether the worker's queue `line` may take `bytes` more room at the cost of other workers. This is allowed if
    /// the line then has no more than an even share of `bytes_max`.
    fn may_displace(&self, line: u64, bytes: usize, bytes_max: usize) -> bool {
        let (own, lines) = match self.lines.get(&line) {
            Some(queue) => (queue.bytes, self.lines.len()),
            None => (0, self.lines.len() + 1),
        };
        own + bytes <= bytes_max / lines
    }

    /// Drops the newest job of the longest worker's queue, of the queues with a job that can be dropped. Returns the
    /// size of what was dropped, or `None` if nothing can be dropped.
    fn drop_of_longest(&mut self) -> Option<DropSize> {
        let lines = self.lines.values_mut();
        let longest = lines
            .filter(|queue| queue.newest_droppable().is_some())
            .max_by_key(|queue| queue.bytes)?;
        let dropped = longest.drop_newest()?;
        for era in &dropped.vacated {
            self.leave_era(*era, 1);
        }
        Some(dropped)
    }
}

impl<J: LineJob> QueueShared<J> {
    fn discount(&self, messages: usize, bytes: usize) {
        self.backlog.messages.fetch_sub(messages, Ordering::Relaxed);
        self.backlog.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if bytes > 0 {
            self.room.notify_waiters();
        }
    }

    /// Queues an arriving job in its worker's queue, and counts it. The caller holds the lock on `state`, so that counts
    /// and queue agree.
    fn push(
        &self,
        state: &mut QueueState<J>,
        line: &Arc<Line>,
        job: J,
        bytes: usize,
        came_us: u64,
    ) -> Result<(), LaneStopped> {
        if state.is_stopped {
            return Err(LaneStopped);
        }
        self.backlog.messages.fetch_add(job.messages(), Ordering::Relaxed);
        self.backlog.bytes.fetch_add(bytes, Ordering::Relaxed);
        state.join_line(line, job, bytes, came_us, self.lane);
        self.work.notify_one();
        Ok(())
    }

    fn waiting_bytes(&self) -> usize {
        self.backlog.bytes.load(Ordering::Relaxed)
    }

    /// Whether there is room for `bytes` more. An empty queue has room for a job of any size.
    fn has_room(&self, bytes: usize) -> bool {
        let waiting = self.waiting_bytes();
        waiting == 0 || waiting + bytes <= self.bytes_max
    }

    /// Queues a job in its worker's queue. If there is no room, drops this job, or the newest jobs of the worker
    /// whose jobs take the most room.
    fn push_or_drop(
        &self,
        state: &mut QueueState<J>,
        line: &Arc<Line>,
        job: J,
        bytes: usize,
        came_us: u64,
    ) -> Result<(), LaneStopped> {
        if !self.has_room(bytes) && state.may_displace(line.number, bytes, self.bytes_max) {
            while !self.has_room(bytes)
                && let Some(dropped) = state.drop_of_longest()
            {
                self.discount(dropped.messages, dropped.bytes);
            }
        }
        if self.has_room(bytes) {
            return self.push(state, line, job, bytes, came_us);
        }
        let (job, bytes) = match job.into_mark() {
            Ok(mark) => (mark, 0),
            Err(kept) => (kept, bytes),
        };
        let merged = match state.lines.get_mut(&line.number) {
            Some(queue) if bytes == 0 => queue.merge_last_mark(job),
            _ => Err(job),
        };
        match merged {
            Ok(()) => Ok(()),
            Err(job) => self.push(state, line, job, bytes, came_us),
        }
    }
}

impl<J: LineJob> JobSender<J> {
    /// Queues a job of about `bytes` in the worker's queue `line`, for a message that came at `came_us`. Waits until
    /// there is room for the job.
    pub(crate) async fn send(
        &self,
        line: &Arc<Line>,
        job: J,
        bytes: usize,
        came_us: u64,
    ) -> Result<(), LaneStopped> {
        let bytes = bytes + job.messages() * MESSAGE_OVERHEAD_BYTES;
        let mut job = Some(job);
        loop {
            let mut freed = pin!(self.0.room.notified());
            freed.as_mut().enable();
            {
                let mut state = self.0.state.lock();
                if (self.0.has_room(bytes) || state.is_stopped)
                    && let Some(job) = job.take()
                {
                    return self.0.push(&mut state, line, job, bytes, came_us);
                }
            }
            freed.await;
        }
    }

    /// Queues a job in the worker's queue `line` without waiting for room. The job takes the room of a message without
    /// a payload, whatever memory it needs. The caller bounds such jobs.
    pub(crate) fn send_now(&self, line: &Arc<Line>, job: J, came_us: u64) -> Result<(), LaneStopped> {
        let bytes = job.messages() * MESSAGE_OVERHEAD_BYTES;
        self.0.push(&mut self.0.state.lock(), line, job, bytes, came_us)
    }

    /// Queues jobs without waiting for room. Each comes with the queue of its worker, and its approximate size in
    /// bytes. The messages in the jobs came at `came_us`.
    ///
    /// If there is no room for a job, drops that job, or the newest jobs of the worker whose jobs take the most room.
    pub(crate) fn send_or_drop(
        &self,
        jobs: impl IntoIterator<Item = (Arc<Line>, J, usize)>,
        came_us: u64,
    ) -> Result<(), LaneStopped> {
        let mut state = self.0.state.lock();
        for (line, job, bytes) in jobs {
            let bytes = bytes + job.messages() * MESSAGE_OVERHEAD_BYTES;
            self.0.push_or_drop(&mut state, &line, job, bytes, came_us)?;
        }
        Ok(())
    }

    /// Queues a control job (done after all jobs queued before it) without waiting for room.
    pub(crate) fn send_control(&self, job: J) -> Result<(), LaneStopped> {
        let mut state = self.0.state.lock();
        if state.is_stopped {
            return Err(LaneStopped);
        }
        self.0.backlog.messages.fetch_add(1, Ordering::Relaxed);
        state.end_era(job);
        self.0.work.notify_one();
        Ok(())
    }
}

impl<J> JobSender<J> {
    /// Returns the number of messages and bytes in the queue.
    pub(crate) fn backlog(&self) -> &Backlog {
        &self.0.backlog
    }
}

impl<J> Drop for JobSender<J> {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = true;
        self.0.work.notify_all();
    }
}

impl<J: LineJob> JobReceiver<J> {
    /// Ends the last turn, then waits for the next one. `done` is the last turn and the time that it took. Moves the
    /// jobs of the next turn to `jobs`. Returns `None` when the sender is gone and the queue is empty.
    pub(crate) fn next(&self, done: Option<(Turn, Duration)>, jobs: &mut Vec<J>) -> Option<Turn> {
        let mut state = self.0.state.lock();
        if let Some((turn, elapsed)) = done {
            self.end_turn(&mut state, turn, elapsed);
        }
        loop {
            if let Some(turn) = state.take(jobs, self.0.turn_messages_max) {
                return Some(turn);
            }
            if state.is_closed {
                return None;
            }
            self.0.work.wait(&mut state);
        }
    }

    fn end_turn(&self, state: &mut QueueState<J>, turn: Turn, elapsed: Duration) {
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        match turn.from {
            TurnOrigin::Line { line, era } => state.end_turn(&line, era, turn.jobs, elapsed_us, self.0.lane),
            TurnOrigin::Control => {}
        }
        self.0.discount(turn.messages, turn.bytes);
    }
}

impl<J> Drop for JobReceiver<J> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_stopped = true;
        // Dropped jobs drop their reply channels: callers that wait for a reply learn that none comes.
        state.lines.clear();
        state.ready.clear();
        state.eras.clear();
        drop(state);
        self.0.room.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
