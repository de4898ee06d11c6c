//! Gates that keep log lines which a client can provoke at will from filling the log.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Interval of a gate, in nanoseconds. A gate lets one line pass per interval, or several lines if
/// [`LogGate::of_bursts`] made it.
const INTERVAL_NS: u64 = 1_000_000_000;

/// Gate that lets one log line or a few pass per second, and counts the suppressed lines, without a lock.
///
/// A line that passes tells how many lines were suppressed since the previous one that passed. So lines that are suppressed at
/// the end of a burst are reported only when a further line passes the same gate. The metrics count every event.
#[derive(Debug)]
pub struct LogGate {
    /// Time at which the next line would pass if lines were spaced evenly by `step_ns`, in nanoseconds since the origin
    /// of [`now_ns`].
    due_ns: AtomicU64,
    suppressed: AtomicU64,
    /// Average interval between lines when the gate lets as many lines pass as it may, in nanoseconds.
    step_ns: u64,
    /// Number of nanoseconds that a line may come earlier than `due_ns` and still pass. The allowance lets bursts of
    /// lines pass.
    early_ns: u64,
}

impl Default for LogGate {
    fn default() -> Self {
        Self::new()
    }
}

impl LogGate {
    /// Makes a gate that lets one line pass per second, the first one immediately.
    pub const fn new() -> Self {
        Self::of_bursts(1)
    }

    /// Makes a gate that lets a burst of `lines` lines pass, and `lines` lines per second afterwards. Use it where the
    /// start of a process writes one line for each of several things, such as listeners.
    pub const fn of_bursts(lines: u64) -> Self {
        let step_ns = INTERVAL_NS / lines;
        Self {
            due_ns: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
            step_ns,
            early_ns: INTERVAL_NS - step_ns,
        }
    }

    /// Asks whether a line may be written now. If so, returns the number of lines that were suppressed since the previous line;
    /// else `None`.
    pub fn admit(&self) -> Option<u64> {
        self.admit_at(now_ns())
    }

    /// Does the same as [`LogGate::admit`], but takes the time from the caller: `now_ns` is in nanoseconds since any
    /// fixed origin.
    pub fn admit_at(&self, now_ns: u64) -> Option<u64> {
        let due_ns = self.due_ns.load(Ordering::Relaxed);
        let next_ns = due_ns.max(now_ns).saturating_add(self.step_ns);
        let may_pass = now_ns.saturating_add(self.early_ns) >= due_ns
            // Of several threads that arrive together, the thread that moves `due_ns` on writes the line.
            && self
                .due_ns
                .compare_exchange(due_ns, next_ns, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if may_pass {
            Some(self.suppressed.swap(0, Ordering::Relaxed))
        } else {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

/// Writes a log line if the gate of this place in the code lets it pass. The line's last field is the number of
/// suppressed lines. Each place in the code has one gate for the whole process.
///
/// `log_gated!(warn "message"; fields)` lets one line pass per second. `log_gated!(warn "message" up to N)` lets a
/// burst of `N` lines pass. `log_gated!(warn "message" per Label(value))` has a separate gate for each value of the
/// label.
#[macro_export]
macro_rules! log_gated {
    ($level:ident $message:literal $(; $($fields:tt)+)?) => {
        $crate::log_gated!($level $message up to 1 $(; $($fields)+)?)
    };
    ($level:ident $message:literal up to $lines:literal $(; $($fields:tt)+)?) => {{
        static GATE: $crate::LogGate = $crate::LogGate::of_bursts($lines);
        $crate::log_gated!(@line $level $message, GATE $(; $($fields)+)?)
    }};
    ($level:ident $message:literal per $label:ident($value:expr) $(; $($fields:tt)+)?) => {{
        const VALUES: usize = <$label as $crate::labels::LabelValue>::ALL.len();
        static GATES: [$crate::LogGate; VALUES] = [const { $crate::LogGate::new() }; VALUES];
        $crate::log_gated!(@line $level $message, GATES[$crate::labels::LabelValue::index($value)] $(; $($fields)+)?)
    }};
    (@line $level:ident $message:literal, $gate:expr $(; $($fields:tt)+)?) => {
        if let Some(suppressed) = $gate.admit() {
            tracing::$level!($($($fields)+,)? suppressed, $message);
        }
    };
}

/// Returns the monotonic time since the first call, in nanoseconds.
fn now_ns() -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    let elapsed = ORIGIN.get_or_init(Instant::now).elapsed();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_line_a_second_passes_and_tells_how_many_did_not() {
        let gate = LogGate::new();
        assert_eq!(gate.admit_at(5), Some(0));
        assert_eq!(gate.admit_at(6), None);
        assert_eq!(gate.admit_at(5 + INTERVAL_NS - 1), None);
        assert_eq!(gate.admit_at(5 + INTERVAL_NS), Some(2));
        assert_eq!(gate.admit_at(5 + 2 * INTERVAL_NS), Some(0));
    }

    #[test]
    fn a_burst_passes_and_then_a_line_for_each_part_of_a_second() {
        let gate = LogGate::of_bursts(4);
        for _ in 0..4 {
            assert!(gate.admit_at(5).is_some());
        }
        assert_eq!(gate.admit_at(5), None);
        assert_eq!(gate.admit_at(5 + INTERVAL_NS / 4), Some(1));
        assert_eq!(gate.admit_at(5 + INTERVAL_NS / 4), None);
        let after = 5 + 9 * INTERVAL_NS;
        assert_eq!((0..9).filter(|_| gate.admit_at(after).is_some()).count(), 4);
    }

    #[test]
    fn threads_that_arrive_together_write_one_line() {
        let gate = LogGate::new();
        let (passed, told) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        if let Some(suppressed) = gate.admit_at(7) {
                            passed.fetch_add(1, Ordering::Relaxed);
                            told.fetch_add(suppressed, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(passed.into_inner(), 1);
        let told_later = gate.admit_at(7 + INTERVAL_NS).expect("a second has passed");
        assert_eq!(told.into_inner() + told_later, 3999);
    }

    proptest! {
        #[test]
        fn lines_keep_their_distance_and_every_attempt_is_told(
            steps in prop::collection::vec(0..2 * INTERVAL_NS, 1..200),
        ) {
            let gate = LogGate::new();
            let (mut now, mut last_line, mut told) = (0, None, 0);
            for step in &steps {
                now += step;
                if let Some(suppressed) = gate.admit_at(now) {
                    prop_assert!(last_line.is_none_or(|last| now - last >= INTERVAL_NS));
                    last_line = Some(now);
                    told += 1 + suppressed;
                }
            }
            told += gate.suppressed.load(Ordering::Relaxed);
            prop_assert_eq!(told, steps.len() as u64);
        }
    }
}
