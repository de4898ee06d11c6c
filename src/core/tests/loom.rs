//! The pieces that readers and writers share without a lock, in all orders of their steps that memory allows: a step against a search, and
//! the table of runs against its writer. [`loom`] takes the place of the atomics in the sources of the product.

#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    unused_imports,
    reason = "the product's sources, of which a part is used"
)]
#![allow(clippy::unwrap_used, reason = "a test")]

use header::Header;
use heads::{HeadCounts, Heads};
use loom::sync::{Arc, Mutex};
use loom::thread;
use sync::{AtomicU64, Ordering, fence};

/// The module that the product's sources find in place of their own.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

    pub(crate) const IS_MODEL: bool = true;
}

#[path = "../epoch.rs"]
mod epoch;
#[path = "../index/runs/header.rs"]
mod header;
#[path = "../index/runs/heads.rs"]
mod heads;

/// Arrays that are never freed.
mod words {
    use crate::epoch::Guard;
    use loom::sync::atomic::{AtomicPtr, Ordering};

    use crate::sync::AtomicU64;

    #[derive(Debug)]
    pub(crate) struct Words(AtomicPtr<Vec<AtomicU64>>);

    impl Default for Words {
        fn default() -> Self {
            Self(AtomicPtr::new(Box::leak(Box::default())))
        }
    }

    impl Words {
        pub(crate) fn get<'g>(&'g self, _: &'g Guard) -> &'g [AtomicU64] {
            #[allow(unsafe_code, reason = "what a pointer leads to")]
            // SAFETY: only leaked vectors are stored.
            unsafe {
                &*self.0.load(Ordering::Acquire)
            }
        }

        pub(crate) fn replace(&self, len: usize, fill: impl FnOnce(&[AtomicU64]), guard: &Guard) -> usize {
            let before = self.get(guard).len();
            let next: Vec<_> = (0..len).map(|_| AtomicU64::new(0)).collect();
            fill(&next);
            self.0.swap(Box::leak(Box::new(next)), Ordering::AcqRel);
            before
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RunId(u32);

struct Spot;

impl Spot {
    fn bits(self) -> u64 {
        0
    }
}

mod ahead {
    pub(crate) fn prefetch<T: ?Sized>(_: &T) {}
}

mod mix {
    pub(crate) fn fold(one: u64, other: u64) -> u64 {
        one ^ other
    }

    pub(crate) fn random_key(number: u64) -> u64 {
        number
    }
}

/// A number of a run at position 0: searches look at its bit, too.
fn first(number: u64) -> u64 {
    number | 1 << 63
}

/// A table and what its writer knows.
struct Table {
    heads: Heads,
    counts: Mutex<HeadCounts>,
}

impl Table {
    fn new() -> Self {
        Self {
            heads: Heads::new(),
            counts: Mutex::default(),
        }
    }

    fn insert(&self, hash: u64, run: u32) {
        let guard = epoch::pin();
        self.heads
            .insert(&mut self.counts.lock().unwrap(), first(hash), RunId(run), &guard);
    }

    fn remove(&self, hash: u64, run: u32) {
        let guard = epoch::pin();
        self.heads
            .remove(&mut self.counts.lock().unwrap(), first(hash), RunId(run), &guard);
    }

    fn has(&self, hash: u64, run: u32) -> bool {
        let guard = epoch::pin();
        let is_it = |found| (found == RunId(run)).then_some(());
        self.heads.may_have_first(first(hash)) && self.heads.find(first(hash), &guard, is_it).is_some()
    }
}

/// Without the harness of tests, which would run those of the product's sources, too.
fn main() {
    a_search_notices_the_steps_that_it_meets();
    a_search_notices_the_steps_of_two_holders();
    what_runs_show_between_two_equal_versions_is_of_one_instant();
    a_run_that_is_there_all_the_time_is_found_while_the_table_grows_and_shrinks();
    a_run_behind_one_that_goes_is_found();
}

/// Checks a model in all orders in which threads are interrupted no more often than so.
fn check(name: &str, interruptions_max: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions_max);
    builder.check(model);
    println!("{name}: ok");
}

/// Two runs, and what each of two holders has of each.
#[derive(Default)]
struct World {
    runs: [Header; 2],
    turn: Mutex<()>,
    entries: [[AtomicU64; 2]; 2],
}

impl World {
    /// A step of a holder, after which it has `value` of both runs.
    fn step(&self, holder: usize, value: u64) {
        let _turn = self.turn.lock().unwrap();
        self.runs.iter().for_each(Header::count_step);
        fence(Ordering::Release);
        for entry in &self.entries[holder] {
            entry.store(value, Ordering::Release);
        }
        self.runs.iter().for_each(Header::count_step);
    }

    /// Looks at what the first `holders` have as a search does, run by run: where no step was made, each has the same of both runs. Then gives
    /// what each has.
    fn search(&self, holders: usize) -> Option<Vec<u64>> {
        let look = |run: usize| {
            let version = self.runs[run].version();
            let entries = self.entries.iter().take(holders);
            let seen: Vec<_> = entries
                .map(|entries| entries[run].load(Ordering::Acquire))
                .collect();
            (version, seen)
        };
        let [(one, first), (other, second)] = [0, 1].map(look);
        fence(Ordering::Acquire);
        let is_of_one_instant = self.runs[0].is_still(one) && self.runs[1].is_still(other);
        assert!(
            !is_of_one_instant || first == second,
            "{first:?} and {second:?}, unnoticed"
        );
        is_of_one_instant.then_some(first)
    }
}

/// Looks at what the first holder has, in a thread of its own.
fn search_beside(world: &Arc<World>) -> thread::JoinHandle<Option<Vec<u64>>> {
    let world = Arc::clone(world);
    thread::spawn(move || world.search(1))
}

fn a_search_notices_the_steps_that_it_meets() {
    check("a_search_notices_the_steps_that_it_meets", 3, || {
        let world = Arc::new(World::default());
        let search = search_beside(&world);
        world.step(0, 1);
        search.join().unwrap();
        world.search(1);
    });
}

fn a_search_notices_the_steps_of_two_holders() {
    check("a_search_notices_the_steps_of_two_holders", 2, || {
        let world = Arc::new(World::default());
        let writers = [0, 1].map(|holder| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.step(holder, 1))
        });
        world.search(2);
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

fn what_runs_show_between_two_equal_versions_is_of_one_instant() {
    check(
        "what_runs_show_between_two_equal_versions_is_of_one_instant",
        3,
        || {
            let world = Arc::new(World::default());
            let search = search_beside(&world);
            world.step(0, 1);
            world.step(0, 2);
            search.join().unwrap();
            assert_eq!(world.search(1), Some(vec![2]));
        },
    );
}

fn a_run_that_is_there_all_the_time_is_found_while_the_table_grows_and_shrinks() {
    check("a_run_that_is_there_all_the_time_is_found", 4, || {
        let table = Arc::new(Table::new());
        table.insert(0, 1);
        let searched = Arc::clone(&table);
        let search = thread::spawn(move || assert!(searched.has(0, 1)));
        // At the same home, with the same tag; the table grows with each.
        table.insert(0, 2);
        table.insert(0, 3);
        table.remove(0, 2);
        search.join().unwrap();
        assert!(table.has(0, 1) && !table.has(0, 2) && table.has(0, 3));
    });
}

fn a_run_behind_one_that_goes_is_found() {
    check("a_run_behind_one_that_goes_is_found", 4, || {
        let table = Arc::new(Table::new());
        table.insert(0, 1);
        table.insert(0, 2);
        let searched = Arc::clone(&table);
        let search = thread::spawn(move || assert!(searched.has(0, 2)));
        table.remove(0, 1);
        table.insert(0, 3);
        search.join().unwrap();
    });
}
