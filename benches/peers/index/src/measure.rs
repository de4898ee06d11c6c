//! Clocks, and what comes of reading them.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Two clocks read together.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    wall: Instant,
    processor: Duration,
}

impl Stamp {
    /// Reads both clocks; the second is a system call.
    pub fn now() -> Self {
        Self {
            wall: Instant::now(),
            processor: thread_processor_time(),
        }
    }
}

/// Processor time of the calling thread. It leaves out what other processes of the machine took away meanwhile.
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

/// Unit that a writer times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// Each event, for the longest of them.
    Each,
    /// Only the whole list.
    Whole,
}

/// Outcome of applying a list of events: counts and times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Applied {
    /// Events that the index took without an error.
    pub events: u64,
    /// Events that it refused.
    pub refused: u64,
    /// From the first to the last.
    pub wall: Duration,
    /// Processor time of the applying thread.
    pub processor: Duration,
    /// The longest single event, by the clock on the wall; zero where events were not timed one by one.
    pub worst_wall: Duration,
    /// The longest single event, in processor time.
    pub worst_processor: Duration,
}

impl Applied {
    /// The time between `stamps`: the first taken before the first event, the others after each event or after the last.
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

    /// Adds what came later.
    pub fn add(&mut self, later: &Self) {
        self.events += later.events;
        self.refused += later.refused;
        self.wall += later.wall;
        self.processor += later.processor;
        self.worst_wall = self.worst_wall.max(later.worst_wall);
        self.worst_processor = self.worst_processor.max(later.worst_processor);
    }
}

/// Applies `events` by a function that says whether the index took one, in the calling thread.
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

/// Nanoseconds between two readings of the wall clock with nothing in between, subtracted from what is measured.
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

/// Makes the calling thread stay on the core of this number, of those that the process may use; on the last where it has fewer.
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

/// How often the system has taken the processor away from the calling thread.
pub fn involuntary_switches() -> u64 {
    // SAFETY: all fields of the structure are numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live structure, which is all that the call writes.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0, "Linux counts by thread");
    usage.ru_nivcsw.unsigned_abs()
}

/// Gives freed memory back to the system, so that the next contender does not start from pages that another has touched.
pub fn trim_memory() {
    // SAFETY: the call takes no pointer and may be made at any time.
    unsafe { libc::malloc_trim(0) };
}

/// Resident bytes of this process.
pub fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("the process can read its own size");
    let pages: u64 = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("the second word of statm is a number of pages");
    pages * 4096
}

/// Least, middle and greatest of the repetitions.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub greatest: f64,
}

impl Spread {
    /// Returns the spread of `values`; none where there are none.
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

/// The value below which `share` of the sorted values lie.
pub fn percentile(sorted: &[u32], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share) as usize;
    sorted
        .get(index.min(sorted.len().saturating_sub(1)))
        .map_or(f64::NAN, |value| f64::from(*value))
}
