//! Interleaved steps: a test stops a search at some point, and lets a writer change a holder there. The answer must be
//! a state that the holder had before or after one of these changes, never a mixture. Other tests stop a long event
//! where it lets other writers have a turn, and apply whole events of other holders there.

use std::cell::RefCell;
use std::rc::Rc;

use super::hook;
use crate::hash::{BlockSize, Position, SequenceHash};
use crate::index::search::ATTEMPTS_MAX;
use crate::wire::{Event, HolderId, StoredBlocks, Tier, WorkerName};

use super::api::{
    Hashing, HolderWriter, IndexLimits, Matches, NamespaceSettings, PositionalIndexer, Search, TierDepth,
};
use super::operation::{Operation, Shape};
use super::oracle::Oracle;
use super::world::{BLOCK_SIZE, Path, World, stored_by_lineage};
use kvatlas_lab::random::{Random, setting};

const SHAPE: Shape = Shape {
    hashing: Hashing::Engine,
    workers: 3,
    ranks: 1,
    paths: 6,
    depth_max: 80,
    alphabet: 2,
    tiers: 2,
    blocks_per_holder_max: usize::MAX,
};

struct Holder {
    writer: HolderWriter,
    oracle: Oracle,
}

impl Holder {
    fn apply(&mut self, tier: Tier, event: Event) {
        self.oracle.apply(&event, tier);
        self.writer.apply(event, tier, 0);
    }
}

fn index_of(hashing: Hashing) -> PositionalIndexer {
    let settings = NamespaceSettings {
        block_size: BlockSize::new(BLOCK_SIZE).unwrap(),
        hashing,
        ..NamespaceSettings::default()
    };
    PositionalIndexer::new(settings, IndexLimits::default())
}

fn holders(index: &PositionalIndexer) -> Vec<Holder> {
    let limits = IndexLimits::default();
    let recomputes = index.settings().hashing == Hashing::Recompute;
    let holder = |rank| {
        let worker = WorkerName::new("w").unwrap();
        Holder {
            writer: index.register(&HolderId { worker, rank }).unwrap(),
            oracle: Oracle::new(recomputes, usize::MAX, limits.parking),
        }
    };
    (0..3).map(holder).collect()
}

/// Script of one search: the steps (changes by writers) that are made during the search.
struct Script {
    random: Random,
    held: Rc<RefCell<Vec<Holder>>>,
    left: Vec<(usize, Tier, Event)>,
    path: Path,
    /// Numbers of blocks of the path that each holder has, before the first step and after each step.
    seen: Rc<RefCell<Vec<Vec<Depths>>>>,
}

/// Makes the remaining steps, each at a random point of the search after the previous step.
fn interleave(mut script: Script) {
    let Some((holder, tier, event)) = script.left.pop() else {
        return;
    };
    hook::set(script.random.below(16), move || {
        script.held.borrow_mut()[holder].apply(tier, event);
        let now = depths(&script.held.borrow(), &script.path);
        script.seen.borrow_mut().push(now);
        interleave(script);
    });
}

/// Numbers of matched and of usable blocks that a holder has of a path: on the device, on device and host, and in all
/// tiers.
type Depths = [[usize; 2]; 3];

/// Returns a search for the depth over all tiers, or for the depth at each step of tiers.
fn search_of(random: &mut Random) -> Search<'static> {
    let tiers = if random.chance(50) {
        TierDepth::Each
    } else {
        TierDepth::All
    };
    Search {
        tiers,
        ..Search::default()
    }
}

/// Number of matched blocks that an answer gives the holder with this rank.
fn found_of(matches: &Matches, rank: u32) -> usize {
    let found = matches.holders().find(|found| found.holder.id.rank == rank);
    found.map_or(0, |found| found.matched_blocks as usize)
}

/// Whether an answer gives these depths for the holder with this rank. The depths on the device, and on device and
/// host, are compared only if the search was for them.
fn says(matches: &Matches, rank: u32, [device, host, all]: Depths) -> bool {
    let found = matches.holders().find(|found| found.holder.id.rank == rank);
    let near = found.and_then(|found| matches.near_blocks(found.holder));
    let both = |matched: u32, usable: u32| [matched as usize, usable as usize];
    let is_near = near.is_none_or(|near| {
        near.map(|blocks| both(blocks.matched_blocks, blocks.usable_blocks)) == [device, host]
    });
    let found = found.map_or([0; 2], |found| both(found.matched_blocks, found.usable_blocks));
    found == all && is_near
}

fn depths(holders: &[Holder], path: &Path) -> Vec<Depths> {
    let depths_of = |Holder { oracle, .. }: &Holder| {
        [1, 3, u8::MAX].map(|tiers| {
            let usable = oracle.usable_in(&path.keys, tiers, usize::MAX);
            [oracle.matched_in(&path.keys, tiers), usable]
        })
    };
    holders.iter().map(depths_of).collect()
}

/// State of the index and its holders at the start of a test.
struct Run {
    operations: u64,
    random: Random,
    world: World,
    index: PositionalIndexer,
    held: Rc<RefCell<Vec<Holder>>>,
}

impl Run {
    /// Begins a run with the configured number of operations divided by `parts`. Uses `seed` unless
    /// `KVATLAS_TEST_SEED` sets another seed.
    fn begin(parts: u64, seed: u64, hashing: Hashing) -> Self {
        let operations = setting("KVATLAS_TEST_OPERATIONS", 200_000) / parts;
        let seed = setting("KVATLAS_TEST_SEED", seed);
        eprintln!("KVATLAS_TEST_SEED={seed} replays this run of {operations} operations");
        let mut random = Random::new(seed);
        let world = World::new(&mut random, SHAPE.paths, SHAPE.depth_max, SHAPE.alphabet);
        let index = index_of(hashing);
        let held = Rc::new(RefCell::new(holders(&index)));
        Self {
            operations,
            random,
            world,
            index,
            held,
        }
    }
}

#[test]
fn an_answer_is_of_before_a_step_or_of_after_it() {
    let Run {
        operations,
        mut random,
        world,
        index,
        held,
    } = Run::begin(4, 11, SHAPE.hashing);
    let mut happened = 0_u64;
    for _ in 0..operations {
        let Operation::Apply { holder, tier, event } = Operation::random(&mut random, &SHAPE, &world) else {
            continue;
        };
        let path = &world.paths[random.below(SHAPE.paths)];
        let query = &path.queries()[random.below(4)];
        let before = depths(&held.borrow(), path);
        let search = search_of(&mut random);
        let writers = Rc::clone(&held);
        hook::set(random.below(24), move || {
            writers.borrow_mut()[holder].apply(tier, event);
        });
        let matches = index.find_matches(query, search).unwrap();
        happened += u64::from(!hook::clear());
        let after = depths(&held.borrow(), path);
        for (rank, (before, after)) in (0..).zip(before.into_iter().zip(after)) {
            assert!(
                says(&matches, rank, before) || says(&matches, rank, after),
                "neither {before:?} nor {after:?} for {rank}: {matches:?}"
            );
        }
    }
    assert!(happened > operations / 10, "{happened} of {operations}");
}

#[test]
fn an_answer_is_of_one_instant_among_several_steps() {
    let Run {
        operations,
        mut random,
        world,
        index,
        held,
    } = Run::begin(8, 12, SHAPE.hashing);
    let mut several = 0_u64;
    for _ in 0..operations {
        // There are as many steps as tries, so no step is left when the search takes the lock. While it has the lock,
        // no step is possible.
        let steps = (0..ATTEMPTS_MAX).filter_map(|_| match Operation::random(&mut random, &SHAPE, &world) {
            Operation::Apply { holder, tier, event } => Some((holder, tier, event)),
            _ => None,
        });
        let steps: Vec<_> = steps.collect();
        let path = &world.paths[random.below(SHAPE.paths)];
        let query = &path.queries()[random.below(4)];
        let seen = Rc::new(RefCell::new(vec![depths(&held.borrow(), path)]));
        let search = search_of(&mut random);
        interleave(Script {
            random: Random::new(random.next()),
            held: Rc::clone(&held),
            left: steps,
            path: path.clone(),
            seen: Rc::clone(&seen),
        });
        let matches = index.find_matches(query, search).unwrap();
        hook::clear();
        several += u64::from(seen.borrow().len() > 2);
        for rank in 0..3 {
            let seen = seen.borrow();
            let mut states = seen.iter().map(|depths| depths[rank as usize]);
            assert!(
                states.any(|depths| says(&matches, rank, depths)),
                "{rank} is not in {seen:?}: {matches:?}"
            );
        }
    }
    assert!(several > operations / 10, "{several} of {operations}");
}

/// Checks a search during which a run grows and so gets a new array of hashes. In the new array, some hash fragments
/// become whole hashes. The search must still find the same blocks.
#[test]
fn hashes_that_become_whole_in_a_run_that_grows_stay_the_same_blocks() {
    let mut random = Random::new(4);
    let world = World::new(&mut random, SHAPE.paths, SHAPE.depth_max, SHAPE.alphabet);
    let path = world.paths.iter().max_by_key(|path| path.keys.len()).unwrap();
    assert!(path.keys.len() > 64, "{}", path.keys.len());
    let known = path.keys.len() / 2;
    for query in &path.queries() {
        for points in 0..64 {
            let index = index_of(SHAPE.hashing);
            let held = Rc::new(RefCell::new(holders(&index)));
            let keys: Vec<_> = path.keys.iter().map(|key| key.lineage()).collect();
            held.borrow_mut()[0].apply(Tier::DEVICE, stored_by_lineage(keys[..known].to_vec()));
            let whole = path.chain.iter().copied().map(SequenceHash).collect();
            let whole = StoredBlocks::by_sequence(None, Position::new(0).ok(), whole);
            let events = [stored_by_lineage(keys), Event::Stored(whole)];
            let others = Rc::clone(&held);
            hook::set(points, move || {
                let mut others = others.borrow_mut();
                events
                    .into_iter()
                    .for_each(|event| others[1].apply(Tier::DEVICE, event));
            });
            let matches = index.find_matches(query, Search::default()).unwrap();
            hook::clear();
            assert_eq!(found_of(&matches, 0), known, "after {points} points");
        }
    }
}

/// Applies the event of one holder. If that event releases the lock on the runs before its end, the next holder's event
/// may be applied at that point, and so on. Counts the applied events in `depth`.
fn nest(mut holders: Vec<(Rc<RefCell<Holder>>, Tier, Event)>, mut random: Random, depth: Rc<RefCell<usize>>) {
    let Some((holder, tier, event)) = holders.pop() else {
        return;
    };
    *depth.borrow_mut() += 1;
    let next = Random::new(random.next());
    hook::set(random.below(3), move || nest(holders, next, depth));
    holder.borrow_mut().apply(tier, event);
    hook::clear();
}

#[test]
fn events_of_others_in_the_middle_of_an_event_change_nothing_of_it() {
    let shape = Shape {
        hashing: Hashing::Recompute,
        ..SHAPE
    };
    let Run {
        operations,
        mut random,
        world,
        index,
        held,
    } = Run::begin(4, 13, shape.hashing);
    let held: Vec<_> = held
        .take()
        .into_iter()
        .map(|holder| Rc::new(RefCell::new(holder)))
        .collect();
    let mut nested = 0;
    for _ in 0..operations / 3 {
        let mut events = Vec::new();
        for holder in &held {
            if let Operation::Apply { tier, event, .. } = Operation::random(&mut random, &shape, &world) {
                events.push((Rc::clone(holder), tier, event));
            }
        }
        random.shuffle(&mut events);
        let depth = Rc::default();
        nest(events, Random::new(random.next()), Rc::clone(&depth));
        nested += u64::from(*depth.borrow() > 1);
        let path = &world.paths[random.below(shape.paths)];
        let matches = index.find_matches(&path.queries()[0], Search::default()).unwrap();
        for (rank, holder) in (0..).zip(&held) {
            let found = matches.holders().find(|found| found.holder.id.rank == rank);
            let found = found.map_or([0; 2], |found| [found.matched_blocks, found.usable_blocks]);
            let oracle = &holder.borrow().oracle;
            let usable = oracle.usable_in(&path.keys, u8::MAX, usize::MAX);
            let expected = [oracle.matched(&path.keys), usable];
            assert_eq!(found.map(|blocks| blocks as usize), expected);
        }
    }
    for holder in &held {
        holder.borrow_mut().apply(Tier::DEVICE, Event::Cleared);
    }
    let sizes = index.sizes();
    assert_eq!((sizes.distinct_blocks, sizes.held_blocks), (0, 0));
    assert!(nested > operations / 30, "{nested} of {operations}");
}
