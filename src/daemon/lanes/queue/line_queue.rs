//! Line of one worker in a lane's queue, and the dropping of its jobs.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::line::Line;
use super::LineJob;

/// Job that waits in a line.
pub(super) struct QueuedJob<J> {
    pub(super) job: J,
    pub(super) bytes: usize,
    pub(super) came_us: u64,
    pub(super) era: u64,
}

/// Line of one worker: its jobs that wait.
pub(super) struct LineQueue<J> {
    pub(super) line: Arc<Line>,
    pub(super) jobs: VecDeque<QueuedJob<J>>,
    pub(super) bytes: usize,
    /// Virtual time of the line: the time in microseconds that the lane has spent on the worker, raised after idle
    /// times. The line with the smallest value gets the next turn.
    pub(super) turn_us: u64,
}

/// Size of dropped jobs: their bytes and their messages.
pub(super) struct DropSize {
    pub(super) bytes: usize,
    pub(super) messages: usize,
    /// Numbers of the eras (jobs between two control jobs) that have lost a job for good: the mark of the dropped job
    /// was merged into another mark. An era that has lost several jobs is listed several times.
    pub(super) vacated: Vec<u64>,
}

impl<J: LineJob> LineQueue<J> {
    /// Returns the place of the newest job that can be dropped.
    pub(super) fn newest_droppable(&self) -> Option<usize> {
        self.jobs.iter().rposition(|waiting| waiting.job.is_droppable())
    }

    /// Drops the newest job that can be dropped, and leaves a mark in its place. Returns `None` if there is no such
    /// job. Neighboring marks are merged, so that there are never more marks than jobs.
    pub(super) fn drop_newest(&mut self) -> Option<DropSize> {
        let index = self.newest_droppable()?;
        let QueuedJob {
            job,
            bytes,
            came_us,
            era,
        } = self.jobs.remove(index)?;
        let at = |job, bytes| QueuedJob {
            job,
            bytes,
            came_us,
            era,
        };
        // The mark that replaces the job counts as one message, so the queue loses one message less than the job had.
        let messages = job.messages() - 1;
        let mut mark = match job.into_mark() {
            Ok(mark) => mark,
            Err(job) => {
                self.jobs.insert(index, at(job, bytes));
                return None;
            }
        };
        self.bytes -= bytes;
        let mut vacated = Vec::new();
        while self.has_mark(Some(index))
            && let Some(later) = self.jobs.remove(index)
        {
            // Two marks can always be merged.
            let _ = mark.merge_mark(later.job);
            vacated.push(later.era);
        }
        match self.merge_mark(index.checked_sub(1), mark) {
            Ok(()) => vacated.push(era),
            Err(mark) => self.jobs.insert(index, at(mark, 0)),
        }
        Some(DropSize {
            bytes,
            messages: messages + vacated.len(),
            vacated,
        })
    }

    /// Whether there is a mark at `place` of this worker's queue.
    fn has_mark(&self, place: Option<usize>) -> bool {
        let waiting = place.and_then(|place| self.jobs.get(place));
        waiting.is_some_and(|waiting| waiting.bytes == 0)
    }

    /// Merges `mark` into the mark at `place` of this worker's queue. If there is no mark, returns `mark` unchanged, as
    /// the error.
    fn merge_mark(&mut self, place: Option<usize>, mark: J) -> Result<(), J> {
        match place.and_then(|place| self.jobs.get_mut(place)) {
            Some(waiting) if waiting.bytes == 0 => waiting.job.merge_mark(mark),
            _ => Err(mark),
        }
    }

    /// Merges `mark` into the mark at the end of this worker's queue. If the queue does not end with a mark, returns
    /// `mark` unchanged, as the error.
    pub(super) fn merge_last_mark(&mut self, mark: J) -> Result<(), J> {
        self.merge_mark(self.jobs.len().checked_sub(1), mark)
    }
}
