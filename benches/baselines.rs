//! The seven designs of a prefix index, measured with the same work in one process.
//!
//! ```sh
//! cargo bench --bench baselines -- [BLOCKS] [DEPTH] [HOLDERS]
//! ```
//!
//! BLOCKS blocks (131072) are stored in prompts of DEPTH blocks (512), on HOLDERS holders (32) in turn. Every fourth
//! prompt is held by four holders. Each figure is the median of five rounds, with the least and the greatest. A store
//! or removal ends when it is applied. This thread sends the queries. A query gives block hashes to designs 1 to 6, and
//! sequence hashes to design 7.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::hint::black_box;
use std::time::Instant;

use kvatlas_core::hash::{BlockHash, sequence_hashes};
use kvatlas_lab::{Design, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};

const ROUNDS: usize = 5;
const QUERIES: usize = 200;
/// Number of holders of every fourth prompt.
const SHARERS: u32 = 4;

/// Prompts to store, and queries.
struct Work {
    depth: usize,
    prompts: Vec<(HolderNumber, Vec<PrefixBlock>)>,
    hits: Vec<PrefixQuery>,
    halves: Vec<PrefixQuery>,
    misses: Vec<PrefixQuery>,
}

fn main() {
    // Cargo adds the argument `--bench`.
    let numbers: Vec<usize> = std::env::args()
        .skip(1)
        .filter_map(|text| text.parse().ok())
        .collect();
    let number = |place: usize, default| numbers.get(place).copied().unwrap_or(default).max(1);
    let (blocks, depth, holders) = (number(0, 1 << 17), number(1, 512), number(2, 32));
    let work = Work::new((blocks / depth).max(1), depth, u32::try_from(holders).unwrap());
    println!("{blocks} blocks in prompts of {depth}, {holders} holders; nanoseconds");
    println!(
        "{:<24}{:>24}{:>24}{:>28}{:>28}{:>24}",
        "design", "store, a block", "remove, a block", "hit", "half way", "miss"
    );
    for design in Design::ALL {
        let figures = measure(design, &work);
        println!(
            "{:<24}{:>24}{:>24}{:>28}{:>28}{:>24}",
            design.as_str(),
            figures[0],
            figures[1],
            figures[2],
            figures[3],
            figures[4]
        );
    }
}

impl Work {
    fn new(prompts: usize, depth: usize, holders: u32) -> Self {
        let paths: Vec<Vec<BlockHash>> = (0..prompts as u64)
            .map(|prompt| contents(prompt, depth))
            .collect();
        let mut stored = Vec::new();
        for (number, path) in (0_u32..).zip(&paths) {
            let sharers = if number % 4 == 0 { SHARERS.min(holders) } else { 1 };
            for sharer in 0..sharers {
                stored.push((HolderNumber((number + sharer) % holders), named(path)));
            }
        }
        let chosen = |query: usize| &paths[(query * 7919) % prompts];
        let halves = (0..QUERIES).map(|query| {
            let other = contents((prompts + query) as u64, depth);
            let mut path = chosen(query)[..depth / 2].to_vec();
            path.extend_from_slice(&other[..depth - depth / 2]);
            PrefixQuery::new(&path)
        });
        Self {
            depth,
            hits: (0..QUERIES)
                .map(|query| PrefixQuery::new(chosen(query)))
                .collect(),
            halves: halves.collect(),
            misses: (0..QUERIES)
                .map(|query| PrefixQuery::new(&contents((2 * prompts + query) as u64, depth)))
                .collect(),
            prompts: stored,
        }
    }

    fn blocks(&self) -> usize {
        self.prompts.len() * self.depth
    }
}

/// Returns the block hashes of a prompt. Different prompts have no hash in common.
fn contents(prompt: u64, depth: usize) -> Vec<BlockHash> {
    let content = |block: u64| {
        let mixed = ((prompt << 24 | block) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        BlockHash(mixed ^ mixed >> 29)
    };
    (0..depth as u64).map(content).collect()
}

fn named(path: &[BlockHash]) -> Vec<PrefixBlock> {
    let names = sequence_hashes(path.iter().copied());
    let block = |(content, name): (&BlockHash, _)| PrefixBlock {
        content: *content,
        name,
    };
    path.iter().zip(names).map(block).collect()
}

/// Measures a design. Returns the figures of a store, a removal, a full hit, a half hit and a miss.
fn measure(design: Design, work: &Work) -> [String; 5] {
    let mut index = design.build(2).unwrap();
    let (mut stores, mut removals) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        stores.push(per(work.blocks(), || {
            for (holder, blocks) in &work.prompts {
                index.store(*holder, None, blocks);
            }
            index.flush();
        }));
        if round + 1 == ROUNDS {
            break;
        }
        removals.push(remove(&mut *index, work));
    }
    let whole = u32::try_from(work.depth).unwrap();
    check(&*index, &work.hits, Some(whole));
    check(&*index, &work.halves, (whole > 1).then_some(whole / 2));
    check(&*index, &work.misses, None);
    let queries = [&work.hits, &work.halves, &work.misses].map(|queries| ask(&*index, queries));
    removals.push(remove(&mut *index, work));
    assert_eq!(index.sizes(), PrefixIndexSize::default(), "{design:?}");
    let [hit, half, miss] = queries;
    [summary(stores), summary(removals), hit, half, miss]
}

/// Removes all blocks, the deepest first, as engines evict.
fn remove(index: &mut dyn PrefixIndex, work: &Work) -> f64 {
    let removals: Vec<_> = work
        .prompts
        .iter()
        .map(|(holder, blocks)| {
            (
                holder,
                blocks.iter().rev().map(|block| block.name).collect::<Vec<_>>(),
            )
        })
        .collect();
    per(work.blocks(), || {
        for (holder, names) in &removals {
            index.remove(**holder, names);
        }
        index.flush();
    })
}

/// Checks the depths of all answers, because a bench of wrong answers would be worthless.
fn check(index: &dyn PrefixIndex, queries: &[PrefixQuery], depth: Option<u32>) {
    for query in queries {
        let found = index.find_matches(query);
        assert_eq!(found.iter().map(|depth| depth.matched_blocks).max(), depth);
    }
}

fn ask(index: &dyn PrefixIndex, queries: &[PrefixQuery]) -> String {
    let round = |_| {
        per(queries.len(), || {
            for query in queries {
                black_box(index.find_matches(query));
            }
        })
    };
    summary((0..ROUNDS).map(round).collect())
}

fn per(count: usize, work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_nanos() as f64 / count as f64
}

fn summary(mut rounds: Vec<f64>) -> String {
    rounds.sort_by(f64::total_cmp);
    let (least, middle, most) = (rounds[0], rounds[rounds.len() / 2], rounds[rounds.len() - 1]);
    format!("{middle:.0} ({least:.0}–{most:.0})")
}
