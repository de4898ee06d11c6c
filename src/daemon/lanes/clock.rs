//! The clock by which waiting is measured, and the clocks of a lane.

use std::cell::Cell;
use std::time::{Duration, Instant};

use kvatlas_client::unix_time_us;

/// Microseconds on a clock that never runs backwards, and on Linux goes on while the machine is suspended. Never 0.
pub(crate) fn now_us() -> u64 {
    #[cfg(target_os = "linux")]
    let clock = rustix::time::ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(clock);
    let micros = time
        .tv_sec
        .saturating_mul(1_000_000)
        .saturating_add(time.tv_nsec / 1000);
    u64::try_from(micros).unwrap_or_default().max(1)
}

/// The clocks of a lane. They are read once for all that happens at the end of one job and the beginning of the next.
pub(super) struct LaneClock {
    started: Instant,
    /// When the turn began, also in microseconds since the Unix epoch.
    turn: (Instant, u64),
    now: Cell<Instant>,
}

impl LaneClock {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            started: now,
            turn: (now, unix_time_us()),
            now: Cell::new(now),
        }
    }

    /// A turn begins.
    pub(super) fn begin_turn(&mut self) {
        self.lap();
        self.turn = (self.now.get(), unix_time_us());
    }

    /// Reads the time; says how much has passed since it was read last.
    pub(super) fn lap(&self) -> Duration {
        let now = Instant::now();
        now.duration_since(self.now.replace(now))
    }

    /// How long the turn has lasted.
    pub(super) fn turn_elapsed(&self) -> Duration {
        self.now.get().duration_since(self.turn.0)
    }

    /// Microseconds since the lane was started.
    pub(super) fn monotonic_us(&self) -> u64 {
        micros(self.now.get().duration_since(self.started))
    }

    /// Microseconds since the Unix epoch.
    pub(super) fn unix_us(&self) -> u64 {
        self.turn.1.saturating_add(micros(self.turn_elapsed()))
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
