//! Clocks, and figures from their readings.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Readings of two clocks at one time.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    wall: Instant,
    processor: Duration,
}

impl Stamp {
    /// Reads the wall clock, then the thread's processor time. The second reading is a system call.
    pub fn now() -> Self {
        Self {
            wall: Instant::now(),
            processor: thread_processor_time(),
        }
    }
}

/// Returns the processor time of the calling thread. It does not include time that other processes took meanwhile.
fn thread_processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a live timespec, which is all that the call writes.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every Linux has the clock of a thread");
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Unit of work whose time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// Each event is timed, so that the longest time of an event is known.
    Each,
    /// Only the whole list of events is timed.
    Whole,
}

/// Outcome of applying a list of events.
#[derive(Debug, Clone, Copy, Default)]
pub struct Applied {
    /// Number of events that the index accepted.
    pub events: u64,
    /// Number of events that the index refused.
    pub refused: u64,
    /// Time from the first event to the last, by the wall clock.
    pub wall: Duration,
    /// Processor time of the applying thread.
    pub processor: Duration,
    /// Longest single event, by the wall clock; zero if events were not measured one by one.
    pub worst_wall: Duration,
    /// Longest single event, in processor time; zero if events were not measured one by one.
    pub worst_processor: Duration,
}

impl Applied {
    /// Computes the times between `stamps`. The first stamp was taken before the first event. With [`Timing::Each`],
    /// one more was taken after each event; with [`Timing::Whole`], one after the last event.
    pub fn between(stamps: &[Stamp], timing: Timing) -> Self {
        let mut applied = Self::default();
        for pair in stamps.windows(2) {
            let wall = pair[1].wall - pair[0].wall;
            let processor = pair[1].processor.saturating_sub(pair[0].processor);
            applied.wall += wall;
            applied.processor += processor;
            if timing == Timing::Each {
                applied.worst_wall = applied.worst_wall.max(wall);
                applied.worst_processor = applied.worst_processor.max(processor);
            }
        }
        applied
    }

    /// Adds the outcome of applying a later list of events.
    pub fn add(&mut self, later: &Self) {
        self.events += later.events;
        self.refused += later.refused;
        self.wall += later.wall;
        self.processor += later.processor;
        self.worst_wall = self.worst_wall.max(later.worst_wall);
        self.worst_processor = self.worst_processor.max(later.worst_processor);
    }
}

/// Applies `events` in the calling thread. `apply` returns whether the index accepted the event.
pub fn apply_here<E>(events: Vec<E>, timing: Timing, mut apply: impl FnMut(E) -> bool) -> Applied {
    let mut stamps = vec![Stamp::now()];
    let (mut taken, mut refused) = (0, 0);
    for event in events {
        if apply(event) {
            taken += 1;
        } else {
            refused += 1;
        }
        if timing == Timing::Each {
            stamps.push(Stamp::now());
        }
    }
    if timing == Timing::Whole {
        stamps.push(Stamp::now());
    }
    let mut applied = Applied::between(&stamps, timing);
    (applied.events, applied.refused) = (taken, refused);
    applied
}

/// Returns the nanoseconds between two readings of the wall clock with nothing in between. This time is subtracted from
/// measurements.
pub fn timer_cost_ns() -> f64 {
    static COST: OnceLock<f64> = OnceLock::new();
    *COST.get_or_init(|| {
        let mut samples: Vec<f64> = (0..10_000)
            .map(|_| {
                let started = Instant::now();
                started.elapsed().as_nanos() as f64
            })
            .collect();
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    })
}

/// Keeps the calling thread on one of the cores that the process may use: on core `number`, or on the last core if
/// there are fewer.
pub fn stay_on_core(number: usize) {
    // SAFETY: all fields of the structure are numbers, for which zero is a value.
    let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live set of the size that is given, which is all that the call writes.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut allowed) };
    assert_eq!(result, 0, "a thread may ask for its cores");
    let cores = 0..usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
    // SAFETY: every number is below the size of a set.
    let mut own = cores.filter(|core| unsafe { libc::CPU_ISSET(*core, &allowed) });
    let Some(core) = own.clone().nth(number).or_else(|| own.next_back()) else {
        return;
    };
    // SAFETY: as above.
    let mut wanted: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::CPU_SET(core, &mut wanted) };
    // SAFETY: the pointer is to a live set of the size that is given, which the call reads.
    let result = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const wanted) };
    assert_eq!(result, 0, "a thread may stay on a core that it may use");
}

/// Returns the number of times that the system has taken the processor away from the calling thread.
pub fn involuntary_switches() -> u64 {
    // SAFETY: all fields of the structure are numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live structure, which is all that the call writes.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0, "Linux counts by thread");
    usage.ru_nivcsw.unsigned_abs()
}

/// Returns freed memory to the system, so that the next contender does not get memory pages that another has used.
pub fn trim_memory() {
    // SAFETY: the call takes no pointer and may be made at any time.
    unsafe { libc::malloc_trim(0) };
}

/// Returns the resident bytes of this process.
pub fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("the process can read its own size");
    let pages: u64 = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("the second word of statm is a number of pages");
    pages * 4096
}

/// Least, median and greatest value of the repetitions.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// Median of the values.
    pub median: f64,
    /// Least value.
    pub least: f64,
    /// Greatest value.
    pub greatest: f64,
}

impl Spread {
    /// Returns the spread of `values`; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: *sorted.get(sorted.len() / 2)?,
            least: *sorted.first()?,
            greatest: *sorted.last()?,
        })
    }
}

/// Returns the value below which `share` of the sorted values lie.
pub fn percentile(sorted: &[u32], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share) as usize;
    sorted
        .get(index.min(sorted.len().saturating_sub(1)))
        .map_or(f64::NAN, |value| f64::from(*value))
}
