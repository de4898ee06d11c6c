//! The clock that measures how long messages wait, and the clocks of a lane.

use std::cell::Cell;
use std::time::{Duration, Instant};

use kvatlas_client::unix_time_us;
use kvatlas_process::since_boot;

/// Returns the time in microseconds on the clock of [`since_boot`]. Never 0.
pub(crate) fn now_us() -> u64 {
    u64::try_from(since_boot().as_micros()).unwrap_or(u64::MAX).max(1)
}

/// Clocks of a lane (a thread that applies events). One reading gives both the end of one job and the beginning of the
/// next.
pub(super) struct LaneClock {
    started: Instant,
    /// Time at which the lane's present turn (the jobs that it takes at once) began: in nanoseconds since the lane was
    /// started, and in microseconds since the Unix epoch.
    turn: (u64, u64),
    /// Time of the last reading of the clock, in nanoseconds since the lane was started.
    now_ns: Cell<u64>,
}

impl LaneClock {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            turn: (0, unix_time_us()),
            now_ns: Cell::new(0),
        }
    }

    /// Notes that a turn (the jobs that the lane takes at once) begins now.
    pub(super) fn begin_turn(&mut self) {
        self.lap();
        self.turn = (self.now_ns.get(), unix_time_us());
    }

    /// Reads the clock. Returns the time since the last reading.
    pub(super) fn lap(&self) -> Duration {
        let now_ns = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let before_ns = self.now_ns.replace(now_ns);
        Duration::from_nanos(now_ns.saturating_sub(before_ns))
    }

    /// Returns the time from the beginning of the lane's present turn (the jobs taken at once) to the last reading of
    /// the clock.
    pub(super) fn turn_elapsed(&self) -> Duration {
        Duration::from_nanos(self.turn_ns())
    }

    /// Returns the time of the last reading of the clock, in microseconds since the lane was started.
    pub(super) fn monotonic_us(&self) -> u64 {
        self.now_ns.get() / 1000
    }

    /// Returns the time of the last reading of the clock, in microseconds since the Unix epoch.
    pub(super) fn unix_us(&self) -> u64 {
        self.turn.1.saturating_add(self.turn_ns() / 1000)
    }

    fn turn_ns(&self) -> u64 {
        self.now_ns.get().saturating_sub(self.turn.0)
    }
}
