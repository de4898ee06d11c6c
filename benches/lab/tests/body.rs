//! Common test of all designs: applies the same streams of operations to each design, and compares every answer with
//! the oracle's answer.

use std::collections::HashSet;

use proptest::prelude::*;

use crate::random::{Random, setting};

use super::oracle::{Oracle, Prefix, blocks, name, query};
use super::stream::{Alphabet, Operation, Paths, Shape};
use crate::{Depth, Design, HolderNumber, PrefixIndex, PrefixIndexSize};

/// Number of threads in the designs that have a pool.
const LANES: usize = 3;

/// Test run of one design, together with the oracle.
struct Run {
    design: Design,
    /// Whether the design's answers must equal the oracle's answers.
    is_exact: bool,
    index: Box<dyn PrefixIndex>,
    oracle: Oracle,
}

impl Run {
    fn new(design: Design, shape: &Shape) -> Self {
        Self {
            design,
            is_exact: design.is_exact() || shape.alphabet == Alphabet::Distinct,
            index: design.build(LANES).unwrap(),
            oracle: Oracle::default(),
        }
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Store { holder, path, from } => {
                self.oracle.store(holder, &path, from);
                self.index
                    .store(holder, name(&path[..from]), &blocks(&path)[from..]);
            }
            Operation::Remove {
                holder,
                prefixes,
                unknown,
            } => {
                self.oracle.remove(holder, &prefixes);
                let mut names = unknown;
                names.extend(prefixes.iter().filter_map(|prefix| name(prefix)));
                self.index.remove(holder, &names);
            }
            Operation::Clear { holder } => {
                self.oracle.clear(holder);
                self.index.clear(holder);
            }
        }
    }

    fn check(&self, path: &Prefix) {
        self.index.flush();
        let mut found = self.index.find_matches(&query(path));
        found.sort_unstable();
        let holders: HashSet<HolderNumber> = found.iter().map(|depth| depth.holder).collect();
        assert_eq!(
            holders.len(),
            found.len(),
            "{:?} names a holder twice",
            self.design
        );
        let is_possible = |depth: &Depth| (1..=path.len()).contains(&(depth.matched_blocks as usize));
        assert!(found.iter().all(is_possible), "{:?} {found:?}", self.design);
        if self.is_exact {
            assert_eq!(found, self.oracle.matches(path), "{:?} {path:?}", self.design);
        }
    }

    fn check_sizes(&self) {
        self.index.flush();
        if self.is_exact {
            assert_eq!(
                self.index.sizes().names,
                self.oracle.held_blocks(),
                "{:?}",
                self.design
            );
        }
        if self.design.is_exact() {
            assert_eq!(
                self.index.refused_stores(),
                self.oracle.refused_stores,
                "{:?}",
                self.design
            );
        }
    }

    /// Removes all blocks: one by one for some holders, by a clear for others. The index must be empty afterwards.
    fn finish(mut self, random: &mut Random, shape: &Shape) {
        self.check_sizes();
        for number in 0..u32::try_from(shape.holders).unwrap() {
            let holder = HolderNumber(number);
            if random.chance(30) {
                self.apply(Operation::Clear { holder });
                continue;
            }
            let mut prefixes = self.oracle.prefixes(holder);
            random.shuffle(&mut prefixes);
            self.apply(Operation::Remove {
                holder,
                prefixes,
                unknown: Vec::new(),
            });
        }
        self.index.flush();
        // A design that confuses equal contents may still have blocks that the oracle refused, or whose names the
        // design lost.
        if !self.is_exact {
            for number in 0..u32::try_from(shape.holders).unwrap() {
                self.index.clear(HolderNumber(number));
            }
            self.index.flush();
        }
        assert_eq!(
            self.index.sizes(),
            PrefixIndexSize::default(),
            "{:?}",
            self.design
        );
    }
}

/// Applies one random stream to one design.
fn run(design: Design, shape: &Shape, seed: u64) {
    let mut random = Random::new(seed);
    let mut paths = Paths::new(&mut random, shape);
    let mut run = Run::new(design, shape);
    for step in 0..shape.operations {
        // Holders join one after the other.
        let joined = 1 + step * shape.holders / shape.operations;
        run.apply(Operation::random(&mut random, shape, &paths, &run.oracle, joined));
        if step % 5 == 0 {
            let path = if random.chance(50) {
                paths.all[random.below(paths.all.len())].clone()
            } else {
                paths.branch(&mut random, shape.depth_max)
            };
            run.check(&path);
        }
        if step % 500 == 0 {
            run.check_sizes();
            paths.all.iter().for_each(|path| run.check(path));
        }
    }
    run.finish(&mut random, shape);
}

/// Applies the same stream to all designs. The seed comes from the environment, so that a failure can be replayed.
fn run_all(shape: &Shape) {
    let seed = setting("KVATLAS_TEST_SEED", 20_260_702);
    let mut shape = *shape;
    let operations = setting("KVATLAS_TEST_OPERATIONS", shape.operations as u64);
    shape.operations = usize::try_from(operations).unwrap();
    eprintln!(
        "KVATLAS_TEST_SEED={seed} replays this run of {} operations",
        shape.operations
    );
    for design in Design::ALL {
        run(design, &shape, seed);
    }
}

const SMALL: Shape = Shape {
    alphabet: Alphabet::Of(2),
    holders: 8,
    paths: 12,
    depth_max: 20,
    operations: 6000,
};

#[test]
fn small_alphabets() {
    run_all(&SMALL);
}

#[test]
fn large_alphabets() {
    run_all(&Shape {
        alphabet: Alphabet::Of(500),
        holders: 12,
        paths: 20,
        ..SMALL
    });
}

#[test]
fn distinct_contents() {
    run_all(&Shape {
        alphabet: Alphabet::Distinct,
        ..SMALL
    });
}

#[test]
fn deep_chains() {
    run_all(&Shape {
        alphabet: Alphabet::Of(3),
        holders: 5,
        paths: 6,
        depth_max: 300,
        operations: 600,
    });
}

#[test]
fn many_holders() {
    run_all(&Shape {
        holders: 200,
        paths: 5,
        depth_max: 40,
        operations: 3000,
        ..SMALL
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Short streams of operations, which proptest can shrink to the few operations that cause a failure.
    #[test]
    fn short_streams(
        world: u64,
        symbols in 1_usize..4,
        distinct in prop::bool::weighted(0.2),
        steps in prop::collection::vec(any::<u64>(), 1..60),
    ) {
        let alphabet = if distinct { Alphabet::Distinct } else { Alphabet::Of(symbols) };
        let shape = Shape { alphabet, holders: 3, paths: 4, depth_max: 8, operations: steps.len() };
        for design in Design::ALL {
            let paths = Paths::new(&mut Random::new(world), &shape);
            let mut run = Run::new(design, &shape);
            for step in &steps {
                let mut random = Random::new(*step);
                run.apply(Operation::random(&mut random, &shape, &paths, &run.oracle, shape.holders));
                run.check(&paths.all[random.below(paths.all.len())]);
            }
            run.finish(&mut Random::new(world), &shape);
        }
    }
}
