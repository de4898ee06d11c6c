//! The index against the oracle: applies the same operations to both, then compares every answer and the whole state.

use std::collections::BTreeMap;

use hashbrown::HashSet;
use proptest::prelude::*;

use crate::hash::BlockSize;
use crate::wire::{HolderId, QueryKey, WorkerName};

use super::api::{
    Applied, Hashing, HolderWriter, IndexLimits, NamespaceSettings, ParkingLimits, PositionalIndexer,
    QueryChain, RejectReason, Search, TierDepth,
};
use super::operation::{Operation, Shape};
use super::oracle::{Oracle, Outcome};
use super::sparse::check_bounds;
use super::world::{BLOCK_SIZE, PlainKey, World};
use kvatlas_lab::random::{Random, setting};

const PARKING: ParkingLimits = ParkingLimits {
    events_max: 6,
    blocks_max: 2000,
    bytes_max: u64::MAX,
    wait_us_max: u64::MAX,
};

struct Holder {
    id: HolderId,
    writer: HolderWriter,
    oracle: Oracle,
}

/// An index under test and its oracles.
struct Run {
    shape: Shape,
    world: World,
    index: PositionalIndexer,
    holders: Vec<Holder>,
}

fn new_index(shape: &Shape) -> PositionalIndexer {
    let settings = NamespaceSettings {
        block_size: BlockSize::new(BLOCK_SIZE).unwrap(),
        hashing: shape.hashing,
        ..NamespaceSettings::default()
    };
    let limits = IndexLimits {
        blocks_per_holder_max: shape.blocks_per_holder_max,
        parking: PARKING,
        ..IndexLimits::default()
    };
    PositionalIndexer::new(settings, limits)
}

fn new_oracle(shape: &Shape) -> Oracle {
    Oracle::new(
        shape.hashing == Hashing::Recompute,
        shape.blocks_per_holder_max,
        PARKING,
    )
}

/// Returns those counts of an applied event that the oracle computes, too.
fn outcome_of(applied: &Applied) -> Outcome {
    Outcome {
        stored: applied.stored,
        removed: applied.removed,
        unknown: applied.rejected(RejectReason::UnknownBlock),
        moved: applied.rejected(RejectReason::Moved),
        parked: applied.parked,
        parking_full: applied.rejected(RejectReason::ParkingFull),
        missing_content: applied.rejected(RejectReason::MissingContent),
        capacity: applied.rejected(RejectReason::Capacity),
        ambiguous: applied.rejected(RejectReason::AmbiguousParent),
    }
}

impl Run {
    fn new(shape: Shape, random: &mut Random) -> Self {
        let world = World::new(random, shape.paths, shape.depth_max, shape.alphabet);
        let index = new_index(&shape);
        let mut holders = Vec::new();
        for worker in 0..shape.workers {
            for rank in 0..shape.ranks {
                let worker = WorkerName::new(&format!("worker-{worker}")).unwrap();
                let id = HolderId { worker, rank };
                let writer = index.register(&id).unwrap();
                let oracle = new_oracle(&shape);
                holders.push(Holder { id, writer, oracle });
            }
        }
        Self {
            shape,
            world,
            index,
            holders,
        }
    }

    fn step(&mut self, random: &mut Random) {
        match Operation::random(random, &self.shape, &self.world) {
            Operation::Apply { holder, tier, event } => {
                let holder = &mut self.holders[holder];
                let expected = holder.oracle.apply(&event, tier);
                let applied = holder.writer.apply(event.clone(), tier, 0);
                assert_eq!(outcome_of(&applied), expected, "{event:?} in {tier:?}");
                assert_eq!(holder.writer.blocks(), holder.oracle.len(), "{event:?}");
                let parked = holder.writer.status().parked_events.load();
                assert_eq!(parked as usize, holder.oracle.parked(), "{event:?}");
            }
            Operation::Replace { holder, before } => self.replace(holder, before),
            Operation::Restore { blocks_per_event_max } => self.restore(blocks_per_event_max),
        }
    }

    /// Makes two holders leave and register again in the other order, so that each gets the other's slot.
    fn replace(&mut self, one: usize, other: usize) {
        let mut leaving = vec![one, other];
        leaving.dedup();
        let holders: Vec<_> = std::mem::take(&mut self.holders)
            .into_iter()
            .enumerate()
            .collect();
        let mut kept: BTreeMap<usize, Holder> = BTreeMap::new();
        let mut ids = Vec::new();
        for (number, holder) in holders {
            if leaving.contains(&number) {
                ids.push((number, holder.id));
                holder.writer.retire();
            } else {
                kept.insert(number, holder);
            }
        }
        for (number, id) in ids.into_iter().rev() {
            let writer = self.index.register(&id).unwrap();
            let oracle = new_oracle(&self.shape);
            kept.insert(number, Holder { id, writer, oracle });
        }
        self.holders = kept.into_values().collect();
    }

    /// Dumps all holders and restores them into a new index, which replaces the old one.
    fn restore(&mut self, blocks_per_event_max: usize) {
        let fresh = new_index(&self.shape);
        for holder in &mut self.holders {
            let mut writer = fresh.register(&holder.id).unwrap();
            let mut rebuilt = new_oracle(&self.shape);
            for (tier, event) in holder.writer.dump_events(blocks_per_event_max) {
                if let crate::wire::Event::Stored(stored) = &event {
                    assert!(stored.names.len() <= blocks_per_event_max);
                }
                rebuilt.apply(&event, tier);
                writer.apply(event, tier, 0);
            }
            // Applied to a new oracle, the events give exactly the blocks that the holder had.
            assert_eq!(rebuilt.contents(), holder.oracle.contents(), "{}", holder.id);
            assert_eq!(writer.blocks(), holder.oracle.len());
            holder.writer = writer;
            // The old oracle has facts that a dump does not tell: which events wait for a parent, and which blocks have
            // had all blocks before them.
            holder.oracle = rebuilt;
        }
        self.index = fresh;
        self.check_state();
    }

    fn check_random_query(&self, random: &mut Random) {
        let path = if random.chance(50) {
            self.world.paths[random.below(self.world.paths.len())].clone()
        } else {
            self.world.branch(random, self.shape.depth_max)
        };
        let workers: Option<Vec<WorkerName>> = random.chance(40).then(|| {
            let any =
                |_| WorkerName::new(&format!("worker-{}", random.below(self.shape.workers + 1))).unwrap();
            (0..3).map(any).collect()
        });
        for key in path.queries() {
            let most = random.chance(50).then(|| random.below(path.keys.len() + 2));
            self.check_query(&key, &path.keys, workers.as_deref(), most);
            self.check_tiers(&key, &path.keys, most);
        }
        let depth = |holder: &Holder| (holder.id.clone(), holder.oracle.matched(&path.keys));
        let depths = self.holders.iter().map(depth).collect();
        check_bounds(random, &self.index, &depths, &path, workers.as_deref());
    }

    /// Compares the index's answer to a query with the answer of the oracle. At most `most` leading blocks count as
    /// usable.
    fn check_query(
        &self,
        query: &QueryKey,
        keys: &[PlainKey],
        workers: Option<&[WorkerName]>,
        most: Option<usize>,
    ) {
        let is_asked = |id: &HolderId| workers.is_none_or(|workers| workers.contains(&id.worker));
        let usable = |oracle: &Oracle| oracle.usable_in(keys, u8::MAX, most.unwrap_or(usize::MAX));
        let expected: BTreeMap<HolderId, [usize; 2]> = self
            .holders
            .iter()
            .filter(|holder| is_asked(&holder.id))
            .map(|Holder { id, oracle, .. }| (id.clone(), [usable(oracle), oracle.matched(keys)]))
            .filter(|(_, [_, matched])| *matched > 0)
            .collect();
        let matches = self
            .index
            .find_matches(
                query,
                Search {
                    workers,
                    usable_max: most.map(|most| u32::try_from(most).unwrap()),
                    ..Search::default()
                },
            )
            .unwrap();
        let found: Vec<_> = matches
            .holders()
            .map(|found| {
                let blocks = [found.usable_blocks, found.matched_blocks].map(|blocks| blocks as usize);
                (found.holder.id.clone(), blocks)
            })
            .collect();
        assert!(
            most.is_some() || found.is_sorted_by_key(|(_, blocks)| std::cmp::Reverse(*blocks)),
            "most usable first"
        );
        assert_eq!(
            found.len(),
            expected.len(),
            "{} {found:?} {expected:?}",
            query.kind()
        );
        assert_eq!(
            found.into_iter().collect::<BTreeMap<_, _>>(),
            expected,
            "{}",
            query.kind()
        );
    }

    fn check_tiers(&self, query: &QueryKey, keys: &[PlainKey], most: Option<usize>) {
        let mut chain = QueryChain::new(query, self.index.settings().block_size).unwrap();
        let expected = |bits| -> BTreeMap<HolderId, [usize; 2]> {
            let blocks = |oracle: &Oracle| {
                let usable = oracle.usable_in(keys, bits, most.unwrap_or(usize::MAX));
                [usable, oracle.matched_in(keys, bits)]
            };
            let holders = self.holders.iter();
            let found = holders.map(|holder| (holder.id.clone(), blocks(&holder.oracle)));
            found.filter(|(_, [_, matched])| *matched > 0).collect()
        };
        for (tiers, bits) in [
            (TierDepth::Device, 1),
            (TierDepth::Host, 3),
            (TierDepth::All, 255),
            (TierDepth::Each, 255),
        ] {
            let matches = self.index.find_chain(
                &mut chain,
                Search {
                    tiers,
                    usable_max: most.map(|most| u32::try_from(most).unwrap()),
                    ..Search::default()
                },
            );
            let found: BTreeMap<HolderId, [usize; 2]> = matches
                .holders()
                .map(|found| {
                    let blocks = [found.usable_blocks, found.matched_blocks];
                    (found.holder.id.clone(), blocks.map(|blocks| blocks as usize))
                })
                .collect();
            assert_eq!(found, expected(bits), "{} {tiers:?}", query.kind());
            let near = matches
                .holders()
                .filter_map(|found| Some((found.holder.id.clone(), matches.near_blocks(found.holder)?)));
            let near: Vec<_> = near.collect();
            assert_eq!(near.len(), if tiers == TierDepth::Each { found.len() } else { 0 });
            for (step, bits) in [1, 3].into_iter().enumerate() {
                let expected = expected(bits);
                for (id, near) in &near {
                    let expected = expected.get(id).copied().unwrap_or_default();
                    assert_eq!(
                        [near[step].usable_blocks, near[step].matched_blocks].map(|blocks| blocks as usize),
                        expected,
                        "{} {id} at step {step}",
                        query.kind()
                    );
                }
            }
        }
    }

    fn check_state(&self) {
        let sizes = self.index.sizes();
        let counting: HashSet<PlainKey> = self
            .holders
            .iter()
            .flat_map(|holder| holder.oracle.counting_keys())
            .collect();
        // The index also counts missing blocks before a held block.
        assert!(sizes.distinct_blocks >= counting.len() as u64, "{sizes:?}");
        let held: usize = self.holders.iter().map(|holder| holder.oracle.len()).sum();
        assert_eq!(sizes.held_blocks, held as u64);
        let parked: usize = self.holders.iter().map(|holder| holder.oracle.parked()).sum();
        assert_eq!(sizes.parked_events, parked as u64);
        assert_eq!(
            (sizes.holders, sizes.workers),
            (self.holders.len(), self.shape.workers)
        );
        assert_eq!((sizes.foreign_holders, sizes.chain_conflicts), (0, 0));
        for path in &self.world.paths {
            for query in path.queries() {
                self.check_query(&query, &path.keys, None, None);
            }
        }
    }

    /// Checks the whole state, dumps and restores it in three sizes, and retires all holders. The index must be empty
    /// afterwards.
    fn finish(mut self) {
        self.check_state();
        for blocks_per_event_max in [usize::MAX, 3, 1] {
            self.restore(blocks_per_event_max);
        }
        let index = self.index.clone();
        for holder in self.holders {
            holder.writer.retire();
        }
        assert_eq!(index.sizes(), new_index(&self.shape).sizes());
    }
}

fn run(shape: Shape, operations: u64, seed: u64) {
    let mut random = Random::new(seed);
    let mut run = Run::new(shape, &mut random);
    for operation in 1..=operations {
        run.step(&mut random);
        if operation % 7 == 0 {
            run.check_random_query(&mut random);
        }
        if operation % 2500 == 0 {
            run.check_state();
        }
    }
    run.finish();
}

const SMALL: Shape = Shape {
    hashing: Hashing::Engine,
    workers: 4,
    ranks: 3,
    paths: 12,
    depth_max: 20,
    alphabet: 2,
    tiers: 3,
    blocks_per_holder_max: usize::MAX,
};

/// Runs `share` percent of the configured operations with one seed, and prints the seed.
fn run_seeded(shape: Shape, share: u64) {
    let operations = setting("KVATLAS_TEST_OPERATIONS", 200_000) * share / 100;
    let seed = setting("KVATLAS_TEST_SEED", 20_260_701);
    eprintln!("KVATLAS_TEST_SEED={seed} replays this run of {operations} operations");
    run(shape, operations, seed);
}

#[test]
fn small_alphabets_equal_the_oracle() {
    run_seeded(SMALL, 40);
}

#[test]
fn large_alphabets_equal_the_oracle() {
    let shape = Shape {
        alphabet: 500,
        workers: 12,
        ranks: 1,
        paths: 20,
        ..SMALL
    };
    run_seeded(shape, 20);
}

#[test]
fn recomputed_chains_equal_the_oracle() {
    run_seeded(
        Shape {
            hashing: Hashing::Recompute,
            alphabet: 3,
            ..SMALL
        },
        30,
    );
}

#[test]
fn two_hundred_holders_equal_the_oracle() {
    let shape = Shape {
        workers: 100,
        ranks: 2,
        paths: 6,
        depth_max: 12,
        alphabet: 2,
        ..SMALL
    };
    run_seeded(shape, 6);
}

#[test]
fn chains_across_the_modes_equal_the_oracle() {
    let shape = Shape {
        workers: 3,
        ranks: 1,
        paths: 4,
        depth_max: 600,
        alphabet: 4,
        ..SMALL
    };
    run_seeded(shape, 2);
}

#[test]
fn full_holders_equal_the_oracle() {
    run_seeded(
        Shape {
            blocks_per_holder_max: 25,
            ..SMALL
        },
        5,
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Short runs of operations, which proptest shrinks to the few operations that cause a failure.
    #[test]
    fn short_runs_equal_the_oracle(
        world: u64,
        recomputes: bool,
        alphabet in 2_u32..5,
        steps in proptest::collection::vec(any::<u64>(), 1..120),
    ) {
        let hashing = if recomputes { Hashing::Recompute } else { Hashing::Engine };
        let shape = Shape { workers: 2, ranks: 2, paths: 4, depth_max: 8, alphabet, hashing, ..SMALL };
        let mut run = Run::new(shape, &mut Random::new(world));
        for step in steps {
            let mut random = Random::new(step);
            run.step(&mut random);
            run.check_random_query(&mut random);
        }
        run.finish();
    }
}
