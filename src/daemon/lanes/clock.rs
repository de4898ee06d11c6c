//! The clock by which waiting is measured.

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
