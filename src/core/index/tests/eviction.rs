//! Eviction: indexes that are too small for the blocks of their holders.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use hashbrown::HashSet;

use crate::hash::{BlockSize, SequenceHash};
use crate::wire::{
    DegradedReason, Event, HolderId, NamespaceName, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName,
};

use super::api::{
    Capacity, Hashing, HolderWriter, IndexLimits, NamespaceSettings, Namespaces, ParkingLimits,
    PositionalIndexer, RejectReason, Search,
};
use super::hook;
use super::operation::{Operation, Shape};
use super::oracle::Oracle;
use super::world::{BLOCK_SIZE, Path, PlainKey, World};
use kvatlas_lab::random::{Random, setting};

fn blocks(blocks_max: u64) -> Capacity {
    Capacity {
        blocks_max,
        ..Capacity::UNBOUNDED
    }
}

fn limits(capacity: Capacity) -> IndexLimits {
    IndexLimits {
        capacity,
        ..IndexLimits::default()
    }
}

fn index_of(capacity: Capacity) -> PositionalIndexer {
    PositionalIndexer::new(NamespaceSettings::default(), limits(capacity))
}

fn register(index: &PositionalIndexer, worker: &str) -> HolderWriter {
    register_rank(index, worker, 0)
}

/// Registers one rank of a worker. All ranks of a worker have one share.
fn register_rank(index: &PositionalIndexer, worker: &str, rank: u32) -> HolderWriter {
    let worker = WorkerName::new(worker).unwrap();
    index.register(&HolderId { worker, rank }).unwrap()
}

/// Hashes of a chain's blocks from `from` up to `to`. Different chains have different hashes.
fn hashes(chain: u64, from: u64, to: u64) -> Vec<SequenceHash> {
    (from..to)
        .map(|block| SequenceHash(chain << 32 | (block + 1)))
        .collect()
}

fn store(writer: &mut HolderWriter, parent: Option<SequenceHash>, hashes: Vec<SequenceHash>) {
    let stored = StoredBlocks::by_sequence(parent, None, hashes);
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

/// Returns the number of matched blocks of the holder that has the most blocks of a chain.
fn depth(index: &PositionalIndexer, hashes: Vec<SequenceHash>) -> u32 {
    let matches = index.find_matches(&QueryKey::SequenceHashes(hashes), Search::default());
    matches
        .unwrap()
        .holders()
        .map(|found| found.matched_blocks)
        .max()
        .unwrap_or(0)
}

#[test]
fn the_chain_that_was_used_longest_ago_goes_first_and_from_its_end() {
    let index = index_of(blocks(100));
    let mut writer = register(&index, "a");
    for chain in 0..10 {
        store(&mut writer, None, hashes(chain, 0, 10));
    }
    assert_eq!(index.sizes().evicted_blocks, 0);
    assert_eq!(depth(&index, hashes(0, 0, 10)), 10, "and is used by that");
    assert!(writer.status().own_reasons().is_empty());
    store(&mut writer, None, hashes(10, 0, 10));
    let depths: Vec<u32> = (0..11).map(|chain| depth(&index, hashes(chain, 0, 10))).collect();
    // Ten blocks must be evicted. One more is evicted as slack.
    assert_eq!(depths, [10, 0, 9, 10, 10, 10, 10, 10, 10, 10, 10]);
    assert_eq!(
        (index.sizes().evicted_blocks, index.sizes().distinct_blocks),
        (11, 99)
    );
    assert!(writer.status().own_reasons().contains(DegradedReason::Capacity));
}

#[test]
fn a_shared_prefix_goes_only_after_what_follows_it() {
    let index = index_of(blocks(200));
    let (mut writer, mut other) = (register(&index, "a"), register_rank(&index, "a", 1));
    let prefix = hashes(1, 0, 20);
    let branches: Vec<Vec<SequenceHash>> = (10..18).map(|branch| hashes(branch, 20, 30)).collect();
    store(&mut writer, None, prefix.clone());
    for branch in &branches {
        store(&mut writer, prefix.last().copied(), branch.clone());
    }
    let whole = |branch: &Vec<SequenceHash>| [prefix.clone(), branch.clone()].concat();
    let mut lost_prefix = false;
    for chain in 100..140 {
        store(&mut other, None, hashes(chain, 0, 10));
        let rest: Vec<u32> = branches
            .iter()
            .map(|branch| depth(&index, whole(branch)))
            .collect();
        // If a branch has any block left, it has the whole prefix before that block.
        assert!(rest.iter().all(|depth| *depth >= 20) || rest.iter().all(|depth| depth == &rest[0]));
        lost_prefix |= rest[0] < 20;
        assert!(index.sizes().distinct_blocks <= 200);
    }
    assert!(!lost_prefix, "queries kept it in use");
    for chain in 200..240 {
        store(&mut other, None, hashes(chain, 0, 10));
    }
    assert_eq!(depth(&index, whole(&branches[0])), 0);
}

#[test]
fn what_follows_a_forgotten_block_is_not_taken_and_nobody_is_asked_for_it() {
    let index = index_of(blocks(50));
    let (mut writer, mut other) = (register(&index, "a"), register_rank(&index, "a", 1));
    store(&mut writer, None, hashes(1, 0, 10));
    for chain in 2..20 {
        store(&mut other, None, hashes(chain, 0, 10));
    }
    assert_eq!(depth(&index, hashes(1, 0, 10)), 0);
    let stored = StoredBlocks::by_sequence(hashes(1, 9, 10).pop(), None, hashes(1, 10, 14));
    let applied = writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    assert_eq!((applied.rejected(RejectReason::Capacity), applied.parked), (4, 0));
    assert!(!DegradedReason::Capacity.is_worth_a_resync());
    // The chain is stored again from its start, so the blocks after the start are taken, too.
    store(&mut writer, None, hashes(1, 0, 12));
    assert_eq!(depth(&index, hashes(1, 0, 14)), 12);
}

#[test]
fn bytes_are_bounded_too_and_go_back_to_nothing() {
    let bytes_max = 1 << 20;
    let capacity = Capacity {
        bytes_max,
        ..Capacity::UNBOUNDED
    };
    let index = index_of(capacity);
    let empty = index.sizes().bytes;
    let mut writer = register(&index, "a");
    for chain in 0..3000 {
        store(&mut writer, None, hashes(chain, 0, 64));
        assert!(
            index.sizes().bytes <= bytes_max + 64 * 1024,
            "{:?}",
            index.sizes()
        );
    }
    let sizes = index.sizes();
    assert!(
        sizes.evicted_blocks > 100_000 && sizes.distinct_blocks > 20_000,
        "{sizes:?}"
    );
    assert_eq!(depth(&index, hashes(2999, 0, 64)), 64);
    writer.retire();
    assert_eq!((index.sizes().bytes, index.sizes().distinct_blocks), (empty, 0));
}

#[test]
fn where_all_namespaces_together_have_too_much_the_largest_gives_way() {
    let namespaces = Namespaces::new(
        blocks(1000),
        NamespaceSettings::default(),
        Vec::new(),
        IndexLimits::default(),
        4,
    );
    let named = |name| {
        namespaces
            .get_or_create(&NamespaceName::new(name).unwrap(), None)
            .unwrap()
    };
    let (large, small) = (named("large"), named("small"));
    let mut writer = register(&large.indexer, "a");
    for chain in 0..90 {
        store(&mut writer, None, hashes(chain, 0, 10));
    }
    let mut writer = register(&small.indexer, "a");
    for chain in 0..30 {
        store(&mut writer, None, hashes(chain, 0, 10));
        let both = [&large, &small].map(|namespace| namespace.indexer.sizes().distinct_blocks);
        assert!(both.iter().sum::<u64>() <= 1000, "{both:?}");
    }
    assert_eq!(small.indexer.sizes().evicted_blocks, 0);
    assert_eq!(small.indexer.sizes().distinct_blocks, 300);
    assert!(large.indexer.sizes().evicted_blocks >= 200);
}

#[test]
fn an_index_that_is_gone_takes_no_room() {
    let total = Arc::new(super::api::TotalUsage::of(blocks(1000)));
    let make = || PositionalIndexer::sharing(NamespaceSettings::default(), IndexLimits::default(), &total);
    let index = make();
    let mut writer = register(&index, "a");
    store(&mut writer, None, hashes(1, 0, 700));
    assert_eq!(total.usage.blocks.load(), 700);
    drop((writer, index));
    assert_eq!(total.usage.blocks.load(), 0);
    let index = make();
    let mut writer = register(&index, "a");
    store(&mut writer, None, hashes(2, 0, 900));
    assert_eq!(
        (index.sizes().distinct_blocks, index.sizes().evicted_blocks),
        (900, 0)
    );
}

struct Holder {
    id: HolderId,
    writer: HolderWriter,
    oracle: Oracle,
}

impl Holder {
    fn apply(&mut self, tier: Tier, event: Event) {
        self.oracle.apply(&event, tier);
        let clears = matches!(event, Event::Cleared | Event::Goodbye);
        let applied = self.writer.apply(event, tier, 0);
        if applied.rejected(RejectReason::Capacity) > 0 {
            self.writer.status().degrade(DegradedReason::Capacity);
        }
        if clears {
            self.writer.status().recover(DegradedReason::Capacity);
        }
    }
}

/// Random changes by holders of all kinds, in an index with room for only some of their blocks.
struct Churn {
    shape: Shape,
    world: World,
    index: PositionalIndexer,
    blocks_max: u64,
    holders: Vec<Holder>,
}

const PARKING: ParkingLimits = ParkingLimits {
    events_max: 6,
    blocks_max: 2000,
    bytes_max: u64::MAX,
    wait_us_max: u64::MAX,
};

impl Churn {
    fn new(shape: Shape, blocks_max: u64, random: &mut Random) -> Self {
        let world = World::new(random, shape.paths, shape.depth_max, shape.alphabet);
        // The bound is at most half of the blocks of the random prompts.
        let distinct: HashSet<PlainKey> = world.paths.iter().flat_map(|path| path.keys.clone()).collect();
        let blocks_max = blocks_max.min(distinct.len() as u64 / 2);
        let index = Self::index(&shape, blocks_max);
        let ids = (0..shape.workers).map(|worker| HolderId {
            worker: WorkerName::new(&format!("worker-{worker}")).unwrap(),
            rank: 0,
        });
        let holders = ids.map(|id| Self::holder(&index, &shape, id)).collect();
        Self {
            shape,
            world,
            index,
            blocks_max,
            holders,
        }
    }

    fn index(shape: &Shape, blocks_max: u64) -> PositionalIndexer {
        let settings = NamespaceSettings {
            block_size: BlockSize::new(BLOCK_SIZE).unwrap(),
            hashing: shape.hashing,
            ..NamespaceSettings::default()
        };
        let limits = IndexLimits {
            parking: PARKING,
            ..limits(blocks(blocks_max))
        };
        PositionalIndexer::new(settings, limits)
    }

    fn holder(index: &PositionalIndexer, shape: &Shape, id: HolderId) -> Holder {
        let oracle = Oracle::new(shape.hashing == Hashing::Recompute, usize::MAX, PARKING);
        let writer = index.register(&id).unwrap();
        Holder { id, writer, oracle }
    }

    fn step(&mut self, random: &mut Random) {
        match Operation::random(random, &self.shape, &self.world) {
            Operation::Apply { holder, tier, event } => self.holders[holder].apply(tier, event),
            Operation::Replace { holder, .. } => {
                let last = self.holders.len() - 1;
                self.holders.swap(holder, last);
                let Holder { id, writer, .. } = self.holders.pop().unwrap();
                writer.retire();
                self.holders.push(Self::holder(&self.index, &self.shape, id));
                self.holders.swap(holder, last);
            }
            Operation::Restore { blocks_per_event_max } => self.restore(blocks_per_event_max),
        }
        let sizes = self.index.sizes();
        assert!(sizes.distinct_blocks <= self.blocks_max, "{sizes:?}");
    }

    fn restore(&mut self, blocks_per_event_max: usize) {
        // A dump first applies the effects of evictions, so the depths are read after the dump.
        let dump = |holder: &mut Holder| holder.writer.dump_events(blocks_per_event_max).collect();
        let dumps: Vec<Vec<_>> = self.holders.iter_mut().map(dump).collect();
        let before: Vec<Vec<u32>> = self.world.paths.iter().map(|path| self.depths(path)).collect();
        let fresh = Self::index(&self.shape, self.blocks_max);
        for (holder, events) in self.holders.iter_mut().zip(dumps) {
            let writer = fresh.register(&holder.id).unwrap();
            let reasons = holder.writer.status().own_reasons();
            holder.writer = writer;
            holder.writer.status().reset_reasons(reasons);
            holder.oracle.forget_parked();
            for (tier, event) in events {
                holder.writer.apply(event, tier, 0);
            }
        }
        self.index = fresh;
        assert_eq!(self.index.sizes().evicted_blocks, 0, "what was there fits");
        let after: Vec<Vec<u32>> = self.world.paths.iter().map(|path| self.depths(path)).collect();
        assert_eq!(before, after);
    }

    /// Number of leading blocks of a path that each holder has.
    fn depths(&self, path: &Path) -> Vec<u32> {
        let [query, ..] = path.queries();
        let matches = self.index.find_matches(&query, Search::default()).unwrap();
        let depth_of = |holder: &Holder| {
            let found = matches.holders().find(|found| found.holder.id == holder.id);
            found.map_or(0, |found| found.matched_blocks)
        };
        self.holders.iter().map(depth_of).collect()
    }

    /// Retires all holders, and checks that the index is empty afterwards.
    fn finish(self) {
        let index = self.index.clone();
        for holder in self.holders {
            holder.writer.retire();
        }
        let sizes = index.sizes();
        assert_eq!((sizes.distinct_blocks, sizes.held_blocks), (0, 0));
        assert_eq!(sizes.bytes, index_of(blocks(self.blocks_max)).sizes().bytes);
    }

    fn check(&self, path: &Path) {
        for query in path.queries() {
            let matches = self.index.find_matches(&query, Search::default()).unwrap();
            for holder in &self.holders {
                let expected = holder.oracle.matched(&path.keys);
                let found = matches.holders().find(|found| found.holder.id == holder.id);
                let found = found.map_or(0, |found| found.matched_blocks as usize);
                assert!(found <= expected, "{} of {expected}: {found}", holder.id);
                let is_certain = holder.writer.status().own_reasons().is_empty();
                assert!(
                    found == expected || !is_certain,
                    "{} of {expected}: {found}",
                    holder.id
                );
            }
        }
    }
}

fn churn(shape: Shape, blocks_max: u64, share: u64) {
    let operations = setting("KVATLAS_TEST_OPERATIONS", 200_000) * share / 100;
    let seed = setting("KVATLAS_TEST_SEED", 20_260_702);
    eprintln!("KVATLAS_TEST_SEED={seed} replays this run of {operations} operations");
    let mut random = Random::new(seed);
    let mut churn = Churn::new(shape, blocks_max, &mut random);
    let mut evicted = 0;
    for operation in 0..operations {
        churn.step(&mut random);
        evicted = evicted.max(churn.index.sizes().evicted_blocks);
        if operation % 5 == 0 {
            let path = churn.world.branch(&mut random, shape.depth_max);
            churn.check(&path);
            let path = &churn.world.paths[random.below(shape.paths)];
            churn.check(path);
        }
    }
    assert!(evicted > 0, "the bound was met");
    churn.finish();
}

const SHAPE: Shape = Shape {
    hashing: Hashing::Engine,
    workers: 5,
    ranks: 1,
    paths: 12,
    depth_max: 20,
    alphabet: 2,
    tiers: 3,
    blocks_per_holder_max: usize::MAX,
};

#[test]
fn a_small_index_never_credits_more_than_the_oracle() {
    churn(SHAPE, 60, 15);
}

#[test]
fn a_small_index_of_recomputed_chains_never_credits_more_than_the_oracle() {
    let shape = Shape {
        hashing: Hashing::Recompute,
        alphabet: 3,
        ..SHAPE
    };
    churn(shape, 60, 10);
}

#[test]
fn a_small_index_of_one_tier_never_credits_more_than_the_oracle() {
    let shape = Shape {
        tiers: 1,
        alphabet: 40,
        workers: 8,
        ..SHAPE
    };
    churn(shape, 100, 10);
}

/// Makes an index with room for `capacity` blocks, a victim that has `capacity` blocks, and another holder without
/// blocks.
fn full(capacity: u64) -> (PositionalIndexer, HolderWriter, HolderWriter) {
    let index = index_of(blocks(capacity));
    let mut victim = register(&index, "victim");
    let other = register(&index, "other");
    store(&mut victim, None, hashes(1, 0, capacity));
    (index, victim, other)
}

/// Checks a holder that is cleared while eviction removes its blocks. At some point of the eviction, the test clears
/// the holder, marks it as certain, and stores other blocks for it. If the holder still counts as certain after the
/// eviction, it must have all these other blocks.
#[test]
fn who_is_cleared_while_its_blocks_are_forgotten_is_certain_only_of_what_is_there() {
    const CAPACITY: u64 = 100;
    const AGAIN: u64 = 40;
    for points in 0..12 {
        let (index, mut victim, mut other) = full(CAPACITY);
        let record = Arc::clone(victim.record());
        hook::set(points, move || {
            victim.apply(Event::Cleared, Tier::DEVICE, 0);
            victim.status().recover(DegradedReason::Capacity);
            // These blocks are so few that storing them evicts nothing. An eviction would wait for the one that is
            // under way.
            store(&mut victim, None, hashes(2, 0, AGAIN));
            // The writer is not dropped, so the holder stays.
            std::mem::forget(victim);
        });
        store(&mut other, None, hashes(3, 0, CAPACITY - AGAIN));
        let is_done = !hook::clear();
        let is_certain = record.status.own_reasons().is_empty();
        let held = u64::from(depth(&index, hashes(2, 0, AGAIN)));
        assert!(!is_done || !is_certain || held == AGAIN, "{held} at {points}");
    }
}

/// Checks a holder that removes all its blocks, in an event, while eviction is about to remove them. If the holder had
/// lost no block before that event, it must not be degraded.
#[test]
fn who_removes_what_was_to_be_forgotten_has_lost_nothing() {
    const CAPACITY: u64 = 100;
    let mut removed_in_time = 0;
    for points in 0..12 {
        let (_index, mut victim, mut other) = full(CAPACITY);
        let record = Arc::clone(victim.record());
        let is_in_time = Rc::new(Cell::new(false));
        let had_all = Rc::clone(&is_in_time);
        hook::set(points, move || {
            had_all.set(victim.blocks() as u64 == CAPACITY);
            let removed = RemovedBlocks::by_sequence(hashes(1, 0, CAPACITY));
            victim.apply(Event::Removed(removed), Tier::DEVICE, 0);
            // The writer is not dropped, so the holder stays.
            std::mem::forget(victim);
        });
        store(&mut other, None, hashes(3, 0, CAPACITY));
        if !hook::clear() && is_in_time.get() {
            removed_in_time += 1;
            assert!(record.status.own_reasons().is_empty(), "at {points}");
        }
    }
    assert!(removed_in_time > 0);
}

#[test]
fn writers_at_once_in_a_small_index_never_credit_more_than_the_oracle() {
    const EVENTS: u64 = 50;
    let shape = Shape {
        hashing: Hashing::Recompute,
        alphabet: 3,
        ..SHAPE
    };
    let rounds = setting("KVATLAS_TEST_OPERATIONS", 200_000) / EVENTS / 40;
    let mut random = Random::new(setting("KVATLAS_TEST_SEED", 20_261_123));
    let mut churn = Churn::new(shape, 60, &mut random);
    for _ in 0..rounds {
        let (shape, world) = (&churn.shape, &churn.world);
        std::thread::scope(|scope| {
            for holder in &mut churn.holders {
                let mut random = Random::new(random.next());
                scope.spawn(move || {
                    for _ in 0..EVENTS {
                        if let Operation::Apply { tier, event, .. } =
                            Operation::random(&mut random, shape, world)
                        {
                            holder.apply(tier, event);
                        }
                    }
                });
            }
        });
        for path in &churn.world.paths {
            churn.check(path);
        }
        let sizes = churn.index.sizes();
        assert!(sizes.distinct_blocks <= churn.blocks_max, "{sizes:?}");
    }
    assert!(churn.index.sizes().evicted_blocks > 0, "the bound was met");
    churn.finish();
}

#[test]
fn whoever_floods_forgets_its_own_blocks_and_leaves_others_their_share() {
    const SHARE: u64 = 100;
    let index = index_of(blocks(SHARE * 11));
    // The flooder fills the index before any other worker comes.
    let mut flooder = register(&index, "flooder");
    for chain in 0..200 {
        store(&mut flooder, None, hashes(chain, 0, 10));
    }
    assert!(flooder.blocks() as u64 > SHARE * 10);
    let chain_of = |worker: u64, chain: u64| hashes(1_000_000 + worker * 1000 + chain, 0, 10);
    let name = |worker: u64| format!("honest-{worker}");
    let mut honest: Vec<_> = (0..10).map(|worker| register(&index, &name(worker))).collect();
    for chain in 0..9 {
        for (worker, writer) in (0..).zip(&mut honest) {
            store(writer, None, chain_of(worker, chain));
            // Meanwhile, the flooder stores many more blocks, and queries for them so that they count as used.
            for _ in 0..3 {
                let own = fastrand::u64(200..100_000);
                store(&mut flooder, None, hashes(own, 0, 10));
                depth(&index, hashes(own, 0, 10));
            }
        }
    }
    for (worker, writer) in (0..).zip(&honest) {
        assert_eq!(writer.blocks(), 90, "{worker}");
        assert!(writer.status().own_reasons().is_empty(), "{worker}");
        for chain in 0..9 {
            assert_eq!(depth(&index, chain_of(worker, chain)), 10);
        }
    }
    assert!(flooder.blocks() as u64 >= SHARE, "it has what the others leave");
    assert!(flooder.status().own_reasons().contains(DegradedReason::Capacity));
    assert!(index.sizes().distinct_blocks <= SHARE * 11);
    // A worker with less than half of its share may get its blocks back, although there is no room.
    let late = register(&index, "late");
    assert!(index.has_room_for(late.record()));
    assert!(!index.has_room_for(flooder.record()));
    // A greedy worker's blocks that another worker has, too, are not evicted first. If there are no other blocks, the
    // oldest are evicted.
    for writer in &mut honest {
        writer.clear();
    }
    for chain in 0..300 {
        store(&mut flooder, None, hashes(chain, 0, 10));
        store(&mut honest[0], None, hashes(chain, 0, 10));
        assert!(index.sizes().distinct_blocks <= SHARE * 11);
    }
}
