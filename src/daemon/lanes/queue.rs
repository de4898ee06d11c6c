//! The queue in front of a lane: bounded in bytes, fair by the time that the lane spends on each worker.
//!
//! Each worker has a *line* of jobs, which are done in order. Between lines, the lane works on the one whose worker it has spent the least
//! time on. A line that was empty begins with the time of the line whose turn it is: idle workers save nothing up. So a worker that takes
//! more than its share is worked on last, and delays nobody by more than one job.
//!
//! A full queue drops messages of core NATS: those of the arriving worker if its line has more than an even share of the room, else the
//! newest of the longest line. A dropped message leaves a mark in its place, so that its worker's holders are doubted in order.
//! Messages of JetStream wait for room instead.
//!
//! A *control job* is done when all jobs that were queued before it are done; later ones may overtake it. A *fence* cannot be overtaken.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::line::Line;

/// What a message costs beside its payload, in bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 256;

/// What can wait in a line.
pub(crate) trait LineJob: Sized {
    /// The mark that takes the place of a job that is dropped; the job itself where it must not be dropped. A dropped job is counted here.
    fn into_mark(self) -> Result<Self, Self>;

    /// Adds a later mark to this one; gives it back where this is none.
    fn merge_mark(&mut self, mark: Self) -> Result<(), Self>;
}

/// The lane is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneStopped;

/// How much waits in a queue, the job that is being done included.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    pub(crate) messages: AtomicUsize,
    pub(crate) bytes: AtomicUsize,
}

struct Waiting<J> {
    job: J,
    bytes: usize,
    came_us: u64,
    era: u64,
}

struct LineQueue<J> {
    line: Arc<Line>,
    jobs: VecDeque<Waiting<J>>,
    bytes: usize,
    /// The time that the lane has spent on the line, as the order of turns counts it, in microseconds.
    turn_us: u64,
}

/// The jobs between two control jobs.
struct Era<J> {
    outstanding: usize,
    /// The control job at its end; none in the last era.
    end: Option<Control<J>>,
}

struct Control<J> {
    job: J,
    bytes: usize,
    is_fence: bool,
}

/// What was dropped.
struct Dropped {
    bytes: usize,
    /// The eras of the jobs that are gone without a mark of their own.
    vacated: Vec<u64>,
}

enum Arrival<J> {
    Line(Arc<Line>, J, usize, u64),
    Control(Control<J>),
}

struct State<J> {
    lines: HashMap<u64, LineQueue<J>>,
    /// The lines whose turn can come, by the time spent on them; the one that is being worked on is absent.
    turns: BTreeSet<(u64, u64)>,
    /// The time of the last turn.
    turn_us: u64,
    /// Control jobs whose turn has come.
    ready: VecDeque<Control<J>>,
    /// Never empty. The first has the number `first_era`.
    eras: VecDeque<Era<J>>,
    first_era: u64,
    /// What came behind a fence.
    behind_fence: VecDeque<Arrival<J>>,
    is_fenced: bool,
    is_closed: bool,
    is_stopped: bool,
}

struct Shared<J> {
    state: Mutex<State<J>>,
    work: Condvar,
    room: Notify,
    bytes_max: usize,
    backlog: Backlog,
    /// The lane's number.
    lane: usize,
}

/// The sending end of a lane's queue.
pub(crate) struct JobSender<J>(Arc<Shared<J>>);

/// The lane's end of its queue.
pub(crate) struct JobReceiver<J>(Arc<Shared<J>>);

/// A job that the lane has taken. To be given back when it is done.
pub(crate) struct Taken<J> {
    /// The job; the lane takes it out.
    pub(crate) job: Option<J>,
    from: Origin,
    bytes: usize,
}

enum Origin {
    Line { line: Arc<Line>, era: u64 },
    Control { is_fence: bool },
}

/// A queue that holds about `bytes_max` at most, in front of the lane with the number `lane`.
pub(crate) fn job_queue<J: LineJob>(lane: usize, bytes_max: usize) -> (JobSender<J>, JobReceiver<J>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State::new()),
        work: Condvar::new(),
        room: Notify::new(),
        bytes_max,
        backlog: Backlog::default(),
        lane,
    });
    (JobSender(Arc::clone(&shared)), JobReceiver(shared))
}

impl<J: LineJob> State<J> {
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
            behind_fence: VecDeque::new(),
            is_fenced: false,
            is_closed: false,
            is_stopped: false,
        }
    }

    fn arrive(&mut self, arrival: Arrival<J>, lane: usize) {
        if self.is_fenced {
            self.behind_fence.push_back(arrival);
            return;
        }
        match arrival {
            Arrival::Line(line, job, bytes, came_us) => self.join_line(&line, job, bytes, came_us, lane),
            Arrival::Control(control) => {
                self.is_fenced = control.is_fence;
                if let Some(last) = self.eras.back_mut() {
                    last.end = Some(control);
                }
                self.eras.push_back(Era {
                    outstanding: 0,
                    end: None,
                });
                self.end_eras();
            }
        }
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
        queue.jobs.push_back(Waiting {
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

    fn leave_era(&mut self, era: u64) {
        let index = usize::try_from(era - self.first_era).unwrap_or(usize::MAX);
        if let Some(era) = self.eras.get_mut(index) {
            era.outstanding -= 1;
        }
        self.end_eras();
    }

    fn end_fence(&mut self, lane: usize) {
        self.is_fenced = false;
        while !self.is_fenced
            && let Some(arrival) = self.behind_fence.pop_front()
        {
            self.arrive(arrival, lane);
        }
    }

    /// The next job, if there is one.
    fn take(&mut self) -> Option<Taken<J>> {
        if let Some(Control { job, bytes, is_fence }) = self.ready.pop_front() {
            return Some(Taken {
                job: Some(job),
                from: Origin::Control { is_fence },
                bytes,
            });
        }
        let (turn_us, number) = self.turns.pop_first()?;
        self.turn_us = turn_us;
        let queue = self.lines.get_mut(&number)?;
        let waiting = queue.jobs.pop_front()?;
        queue.bytes -= waiting.bytes;
        Some(Taken {
            job: Some(waiting.job),
            from: Origin::Line {
                line: Arc::clone(&queue.line),
                era: waiting.era,
            },
            bytes: waiting.bytes,
        })
    }

    /// Ends a turn of a line, which took `elapsed_us`.
    fn end_turn(&mut self, line: &Line, era: u64, elapsed_us: u64, lane: usize) {
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
        self.leave_era(era);
    }

    /// Whether a line may have `bytes` more at the cost of others: it then has no more than an even share of `bytes_max`.
    fn may_displace(&self, line: u64, bytes: usize, bytes_max: usize) -> bool {
        let (own, lines) = match self.lines.get(&line) {
            Some(queue) => (queue.bytes, self.lines.len()),
            None => (0, self.lines.len() + 1),
        };
        own + bytes <= bytes_max / lines
    }

    /// Drops the newest message of the longest line. Returns what is gone; none where nothing can be dropped.
    fn drop_of_longest(&mut self) -> Option<Dropped> {
        let longest = self.lines.values_mut().max_by_key(|queue| queue.bytes)?;
        let dropped = longest.drop_newest()?;
        for era in &dropped.vacated {
            self.leave_era(*era);
        }
        Some(dropped)
    }
}

impl<J: LineJob> LineQueue<J> {
    /// Leaves a mark in the place of the newest job that can be dropped; none where there is no such job. Marks beside each other become
    /// one, so that there are never more marks than jobs.
    fn drop_newest(&mut self) -> Option<Dropped> {
        let index = self.jobs.iter().rposition(|waiting| waiting.bytes > 0)?;
        let Waiting {
            job,
            bytes,
            came_us,
            era,
        } = self.jobs.remove(index)?;
        let at = |job, bytes| Waiting {
            job,
            bytes,
            came_us,
            era,
        };
        let mut mark = match job.into_mark() {
            Ok(mark) => mark,
            Err(job) => {
                self.jobs.insert(index, at(job, bytes));
                return None;
            }
        };
        self.bytes -= bytes;
        let mut vacated = Vec::new();
        // Behind the newest job are marks alone.
        for later in self.jobs.drain(index..) {
            // A mark takes every mark.
            let _ = mark.merge_mark(later.job);
            vacated.push(later.era);
        }
        match self.merge_mark(mark) {
            Ok(()) => vacated.push(era),
            Err(mark) => self.jobs.push_back(at(mark, 0)),
        }
        Some(Dropped { bytes, vacated })
    }

    /// Adds a mark to the one at the end; gives it back where none is there.
    fn merge_mark(&mut self, mark: J) -> Result<(), J> {
        match self.jobs.back_mut() {
            Some(last) if last.bytes == 0 => last.job.merge_mark(mark),
            _ => Err(mark),
        }
    }
}

impl<J: LineJob> Shared<J> {
    fn count(&self, bytes: usize) {
        self.backlog.messages.fetch_add(1, Ordering::Relaxed);
        self.backlog.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn discount(&self, messages: usize, bytes: usize) {
        self.backlog.messages.fetch_sub(messages, Ordering::Relaxed);
        self.backlog.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if bytes > 0 {
            self.room.notify_waiters();
        }
    }

    /// Queues what arrives. The state must be locked, so that counts and queue agree.
    fn push(&self, state: &mut State<J>, arrival: Arrival<J>, bytes: usize) -> Result<(), LaneStopped> {
        if state.is_stopped {
            return Err(LaneStopped);
        }
        self.count(bytes);
        state.arrive(arrival, self.lane);
        self.work.notify_one();
        Ok(())
    }

    fn waiting_bytes(&self) -> usize {
        self.backlog.bytes.load(Ordering::Relaxed)
    }

    /// Whether there is room for `bytes` more. A job that is larger than the queue finds room when it is empty.
    fn has_room(&self, bytes: usize) -> bool {
        let waiting = self.waiting_bytes();
        waiting == 0 || waiting + bytes <= self.bytes_max
    }

    /// Queues what arrives, of about `bytes`; waits until there is room for it.
    async fn send(&self, arrival: Arrival<J>, bytes: usize) -> Result<(), LaneStopped> {
        let mut arrival = Some(arrival);
        loop {
            let mut freed = pin!(self.room.notified());
            freed.as_mut().enable();
            {
                let mut state = self.state.lock();
                if (self.has_room(bytes) || state.is_stopped)
                    && let Some(arrival) = arrival.take()
                {
                    return self.push(&mut state, arrival, bytes);
                }
            }
            freed.await;
        }
    }
}

impl<J: LineJob> JobSender<J> {
    /// Queues a job of about `bytes` in `line`, for a message that came at `came_us`; waits until there is room for it.
    pub(crate) async fn send(
        &self,
        line: &Arc<Line>,
        job: J,
        bytes: usize,
        came_us: u64,
    ) -> Result<(), LaneStopped> {
        let bytes = bytes + MESSAGE_OVERHEAD_BYTES;
        let arrival = Arrival::Line(Arc::clone(line), job, bytes, came_us);
        self.0.send(arrival, bytes).await
    }

    /// Queues a job of about `bytes` in `line` at once. Where there is no room, it or others are dropped.
    pub(crate) fn send_or_drop(
        &self,
        line: &Arc<Line>,
        job: J,
        bytes: usize,
        came_us: u64,
    ) -> Result<(), LaneStopped> {
        let (shared, bytes) = (&*self.0, bytes + MESSAGE_OVERHEAD_BYTES);
        let mut state = shared.state.lock();
        let arrival = |job, bytes| Arrival::Line(Arc::clone(line), job, bytes, came_us);
        if shared.has_room(bytes) {
            return shared.push(&mut state, arrival(job, bytes), bytes);
        }
        if state.may_displace(line.number, bytes, shared.bytes_max) {
            while !shared.has_room(bytes)
                && let Some(dropped) = state.drop_of_longest()
            {
                shared.discount(dropped.vacated.len(), dropped.bytes);
            }
        }
        if shared.has_room(bytes) {
            return shared.push(&mut state, arrival(job, bytes), bytes);
        }
        let (job, bytes) = match job.into_mark() {
            Ok(mark) => (mark, 0),
            Err(kept) => (kept, bytes),
        };
        let may_merge = bytes == 0 && !state.is_fenced;
        let merged = match state.lines.get_mut(&line.number) {
            Some(queue) if may_merge => queue.merge_mark(job),
            _ => Err(job),
        };
        match merged {
            Ok(()) => Ok(()),
            Err(job) => shared.push(&mut state, arrival(job, bytes), bytes),
        }
    }

    /// Queues a control job at once.
    pub(crate) fn send_control(&self, job: J) -> Result<(), LaneStopped> {
        let control = Control {
            job,
            bytes: 0,
            is_fence: false,
        };
        let mut state = self.0.state.lock();
        self.0.push(&mut state, Arrival::Control(control), 0)
    }

    /// Queues a fence of about `bytes`; waits until there is room for it.
    pub(crate) async fn send_fence(&self, job: J, bytes: usize) -> Result<(), LaneStopped> {
        let control = Control {
            job,
            bytes,
            is_fence: true,
        };
        self.0.send(Arrival::Control(control), bytes).await
    }
}

impl<J> JobSender<J> {
    /// How much waits.
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
    /// The next job; waits for it. None when the sender is gone and the queue is empty.
    pub(crate) fn next(&self) -> Option<Taken<J>> {
        let mut state = self.0.state.lock();
        loop {
            if let Some(taken) = state.take() {
                return Some(taken);
            }
            if state.is_closed {
                return None;
            }
            self.0.work.wait(&mut state);
        }
    }

    /// Ends a job, which took `elapsed`.
    pub(crate) fn done(&self, taken: Taken<J>, elapsed: Duration) {
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        let mut state = self.0.state.lock();
        match taken.from {
            Origin::Line { line, era } => state.end_turn(&line, era, elapsed_us, self.0.lane),
            Origin::Control { is_fence: true } => state.end_fence(self.0.lane),
            Origin::Control { is_fence: false } => {}
        }
        self.0.discount(1, taken.bytes);
    }
}

impl<J> Drop for JobReceiver<J> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_stopped = true;
        // Whoever waits for an answer learns that none comes.
        state.lines.clear();
        state.ready.clear();
        state.eras.clear();
        state.behind_fence.clear();
        drop(state);
        self.0.room.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
