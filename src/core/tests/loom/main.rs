//! Models of data that readers and writers share without a lock, in all orders of steps that the memory model allows.
//! The atomics in the product's sources are replaced by those of [`loom`], and the collector by [`epoch`].
//!
//! - Arrays of words (`words.rs`): a reader keeps the whole array that it has found while writers replace it.
//! - A run's header and its blocks (`header.rs`): all blocks that the length counts can be read.
//! - A roster and its summary (`roster.rs`): if a run's version is equal before and after a read, the roster and its
//!   summary are of the same instant.
//! - A step during a search: the search sees a batch wholly or not at all, or notices the step.
//! - The table of runs (`heads.rs`): readers use it while its writer changes it.

#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    unused_imports,
    reason = "the product's sources, of which a part is used"
)]
#![allow(clippy::unwrap_used, reason = "a test")]

mod epoch;

use entry::RosterEntry;
use header::Header;
use heads::{HeadCounts, Heads};
use index::directory::HolderSlot;
use loom::sync::{Arc, Mutex};
use loom::thread;
use roster::Roster;
use sync::{AtomicU64, Ordering, fence};
use words::Words;

/// Module that the product's sources use in place of their own module of this name.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicPtr, Ordering, fence};

    pub(crate) const IS_MODEL: bool = true;

    /// Atomic word that loom also sees as changed when it is dropped. So loom reports a read that is not ordered before
    /// the drop.
    #[derive(Debug, Default)]
    pub(crate) struct AtomicU64(loom::sync::atomic::AtomicU64);

    impl AtomicU64 {
        pub(crate) fn new(value: u64) -> Self {
            Self(loom::sync::atomic::AtomicU64::new(value))
        }
    }

    impl std::ops::Deref for AtomicU64 {
        type Target = loom::sync::atomic::AtomicU64;

        fn deref(&self) -> &Self::Target {
            &self.0
        }
    }

    impl Drop for AtomicU64 {
        fn drop(&mut self) {
            self.0.with_mut(|_| ());
        }
    }
}

#[path = "../../index/runs/entry.rs"]
mod entry;
#[path = "../../index/runs/header.rs"]
mod header;
#[path = "../../index/runs/heads.rs"]
mod heads;
#[path = "../../index/directory/holder_set.rs"]
mod holder_set;
#[path = "../../index/runs/roster.rs"]
mod roster;
#[path = "../../words.rs"]
mod words;

mod index {
    pub(crate) use crate::holder_set as directory;

    pub(crate) mod hook {
        pub(crate) fn point() {}
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

/// Returns a hash for a run at position 0, made from `number`. Its highest bit is set, so that searches also check the
/// run's bit in the filter.
fn first(number: u64) -> u64 {
    number | 1 << 63
}

/// A table of runs, and the counts that its writer keeps.
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

/// Runs all models. It does not use the standard test harness, because the harness would also run the tests in the
/// product's sources.
fn main() {
    readers_of_a_replaced_array_go_on_with_what_they_have();
    blocks_that_a_length_counts_are_there();
    a_roster_and_its_summary_are_of_one_instant();
    a_search_notices_the_steps_that_it_meets();
    a_search_notices_the_steps_of_two_holders();
    what_runs_show_between_two_equal_versions_is_of_one_instant();
    a_run_that_is_there_all_the_time_is_found_while_the_table_grows_and_shrinks();
    a_run_behind_one_that_goes_is_found();
}

/// Checks a model in all orders in which threads are interrupted at most `interruptions_max` times.
fn check(name: &str, interruptions_max: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions_max);
    builder.check(move || {
        model();
        // Arrays that no reader sees any more are freed with the model.
        words::give_back(0);
    });
    println!("{name}: ok");
}

/// Writes the length of the array into every word of it.
fn fill_with_length(array: &[AtomicU64]) {
    let len = array.len() as u64;
    array.iter().for_each(|word| word.store(len, Ordering::Relaxed));
}

fn assert_whole(array: &[AtomicU64]) {
    let len = array.len() as u64;
    for word in array {
        assert_eq!(word.load(Ordering::Relaxed), len);
    }
}

fn readers_of_a_replaced_array_go_on_with_what_they_have() {
    check("readers_of_a_replaced_array_go_on", 5, || {
        let words = Arc::new(Words::default());
        words.replace(1, fill_with_length, &epoch::pin());
        let read = Arc::clone(&words);
        let reader = thread::spawn(move || {
            let guard = epoch::pin();
            let array = read.get(&guard);
            assert_whole(array);
            assert_whole(read.get(&guard));
            assert_whole(array);
        });
        for len in [2, 0, 1] {
            words.replace(len, fill_with_length, &epoch::pin());
            words::give_back(1);
        }
        reader.join().unwrap();
    });
}

/// A run to which blocks are appended.
#[derive(Default)]
struct Chain {
    header: Header,
    hashes: Words,
}

impl Chain {
    /// Appends blocks up to the length `end`. The hash of each block is its number.
    fn append(&self, end: u16) {
        let guard = epoch::pin();
        let old = self.hashes.get(&guard);
        self.hashes
            .replace(end.into(), |next| words::copy(old, next), &guard);
        for (number, hash) in (1..).zip(self.hashes.get(&guard)) {
            hash.store(number, Ordering::Relaxed);
        }
        self.header.set_len(end);
    }
}

fn blocks_that_a_length_counts_are_there() {
    check("blocks_that_a_length_counts_are_there", 5, || {
        let chain = Arc::new(Chain::default());
        chain.append(1);
        let read = Arc::clone(&chain);
        let reader = thread::spawn(move || {
            let guard = epoch::pin();
            let len = usize::from(read.header.len());
            let hashes = read.hashes.get(&guard);
            for (number, hash) in (1..=len as u64).zip(&hashes[..len]) {
                assert_eq!(hash.load(Ordering::Relaxed), number);
            }
        });
        chain.append(2);
        chain.append(3);
        reader.join().unwrap();
    });
}

/// A run, with an entry for each holder that tells how many blocks the holder has. The run itself has room for one
/// entry; further entries are in `more`.
#[derive(Default)]
struct Held {
    header: Header,
    inline: [AtomicU64; 1],
    more: Words,
}

impl Held {
    fn roster<'g>(&'g self, guard: &'g epoch::Guard) -> Roster<'g> {
        Roster::new(&self.inline, self.more.get(guard))
    }

    /// Changes the number of blocks of the holder in `slot` to `reach`. Readers see this change, called a step, as a
    /// whole. The holder's entry is at `index`.
    fn step(&self, slot: usize, index: usize, reach: u16) {
        let guard = epoch::pin();
        self.header.count_step();
        fence(Ordering::Release);
        let slot = HolderSlot::new(slot).unwrap();
        let roster = self.roster(&guard);
        if let Some([words, room]) = roster.wanting(slot, index) {
            let fill = |list: &[AtomicU64]| roster.copy_to(list, words);
            self.more.replace(1 + words + room, fill, &guard);
        }
        let entry = match reach {
            0 => RosterEntry::default(),
            reach => RosterEntry::new(slot, [reach; 3], reach),
        };
        self.roster(&guard).set(index, slot, entry);
        if self.roster(&guard).has_empty_list() {
            self.more.replace(0, |_| (), &guard);
        }
        self.header.count_step();
    }

    /// Reads the summary and the entries as a search does. If the run did not change in between, both must show the
    /// same state.
    fn search(&self) {
        let guard = epoch::pin();
        let version = self.header.version();
        let summary = self.roster(&guard).all::<u64>(2, 2);
        let entries: Vec<RosterEntry> = self.roster(&guard).entries().collect();
        fence(Ordering::Acquire);
        let Some(summary) = summary.filter(|_| self.header.is_still(version)) else {
            return;
        };
        let reaching = entries.iter().filter(|entry| entry.reach(2) >= 2);
        let slots = reaching.fold(0, |slots, entry| slots | 1 << entry.slot().index());
        assert_eq!((summary, slots), (slots, summary), "{entries:?}");
        assert!(entries.iter().all(|entry| entry.reach(2) >= 2), "{entries:?}");
    }
}

fn a_roster_and_its_summary_are_of_one_instant() {
    check("a_roster_and_its_summary_are_of_one_instant", 3, || {
        let run = Arc::new(Held::default());
        run.step(0, 0, 2);
        run.step(1, 1, 3);
        run.search();
        let read = Arc::clone(&run);
        let reader = thread::spawn(move || read.search());
        run.step(1, 1, 1);
        run.step(2, 2, 2);
        run.step(1, 1, 0);
        reader.join().unwrap();
        run.search();
    });
}

/// Two runs, and for each of two holders the number of its blocks in each run.
#[derive(Default)]
struct World {
    runs: [Header; 2],
    turn: Mutex<()>,
    entries: [[AtomicU64; 2]; 2],
}

impl World {
    /// Changes the number of the holder's blocks in each of the two runs to `value`. Readers see this change, called a
    /// step, as a whole.
    fn step(&self, holder: usize, value: u64) {
        let _turn = self.turn.lock().unwrap();
        self.runs.iter().for_each(Header::count_step);
        fence(Ordering::Release);
        for entry in &self.entries[holder] {
            entry.store(value, Ordering::Release);
        }
        self.runs.iter().for_each(Header::count_step);
    }

    /// Reads, run by run, how many blocks each of the first `holders` holders has. If no step was made in between, the
    /// numbers must be the same for both runs, and are returned. Otherwise returns `None`.
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

/// Runs [`World::search`] for the first holder in another thread.
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
        // These runs have the same home and the same tag, and the table grows with each insertion.
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
