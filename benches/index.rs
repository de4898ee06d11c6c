//! The index alone, in one process without a broker: the cost of a search, and of storing and removing a block.
//!
//! ```sh
//! cargo bench --bench index
//! ```
//!
//! Each figure is the median of the rounds, with the least and the greatest. The index gets 1M blocks in chains of
//! 1024. 128 holders take turns at storing a chain. Queries give random chains by their sequence hashes. All is
//! repeated for engines with windows or states, where a request can resume only after one block in 32.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::hint::black_box;
use std::time::Instant;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, Search};
use kvatlas_core::wire::{
    Event, HolderId, QueryKey, RemovedBlocks, Resumable, StoredBlocks, Tier, WorkerName,
};

const CHAINS: u64 = 1024;
const DEPTH: u64 = 1024;
const HOLDERS: u64 = 128;
const ROUNDS: usize = 7;
const QUERIES: u64 = 20_000;

fn main() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let before = resident_bytes();
    let mut holders: Vec<HolderWriter> = (0..HOLDERS).map(|number| register(&index, number)).collect();
    let mut store = Vec::new();
    for _ in 0..3 {
        store.push(per_block(CHAINS * DEPTH, || {
            for chain in 0..CHAINS {
                apply(
                    &mut holders,
                    chain,
                    Event::Stored(StoredBlocks::by_sequence(None, None, hashes(chain, DEPTH))),
                );
            }
        }));
        if store.len() < 3 {
            for holder in &mut holders {
                holder.clear();
            }
        }
    }
    print("store, per block", &store);
    let shared = index.sizes().bytes / (CHAINS * DEPTH);
    println!(
        "{:<24}{shared:>9} bytes, shared by all holders",
        "memory, per block"
    );
    if let (Some(before), Some(now)) = (before, resident_bytes()) {
        let resident = now.saturating_sub(before) / (CHAINS * DEPTH);
        println!("{:<24}{resident:>9} bytes, with the holder's own", "");
    }
    for (name, depth) in [("hit, 1024 deep", 1024), ("hit, 64 deep", 64)] {
        search(&index, name, |number| hashes(mix(number) % CHAINS, depth));
    }
    search(&index, "half way of 1024", |number| {
        let mut half = hashes(mix(number) % CHAINS, DEPTH / 2);
        half.extend(hashes(CHAINS + number, DEPTH / 2));
        half
    });
    search(&index, "miss", |number| hashes(CHAINS + number, 64));
    share_prefixes(&mut holders);
    search(&index, "eight drop-outs in 64", |number| {
        hashes(2 * CHAINS + mix(number) % 256, 64)
    });
    let remove = per_block(CHAINS * DEPTH, || {
        for chain in 0..CHAINS {
            apply(
                &mut holders,
                chain,
                Event::Removed(RemovedBlocks::by_sequence(hashes(chain, DEPTH))),
            );
        }
    });
    print("remove, per block", &[remove]);
    drop((holders, index));
    with_groups();
}

/// Measures holders of which one block in 32 is resumable.
fn with_groups() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let mut holders: Vec<HolderWriter> = (0..HOLDERS).map(|number| register(&index, number)).collect();
    let store = per_block(CHAINS * DEPTH, || {
        for chain in 0..CHAINS {
            let stored = StoredBlocks {
                resumable: Resumable::from_flags((1..=DEPTH).map(|block| block % 32 == 0)),
                ..StoredBlocks::by_sequence(None, None, hashes(chain, DEPTH))
            };
            apply(&mut holders, chain, Event::Stored(stored));
        }
    });
    print("groups: store, per block", &[store]);
    let shared = index.sizes().bytes / (CHAINS * DEPTH);
    println!(
        "{:<24}{shared:>9} bytes, shared by all holders",
        "groups: memory, per block"
    );
    search(&index, "groups: 1024 deep", |number| {
        hashes(mix(number) % CHAINS, 1024)
    });
    search(&index, "groups: 63 deep", |number| {
        hashes(mix(number) % CHAINS, 63)
    });
    search(&index, "groups: miss", |number| hashes(CHAINS + number, 64));
    share_prefixes(&mut holders);
    search(&index, "groups: eight drop-outs", |number| {
        hashes(2 * CHAINS + mix(number) % 256, 64)
    });
}

/// Returns the bytes of the process that are in memory; `None` if the system does not tell.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn register(index: &PositionalIndexer, number: u64) -> HolderWriter {
    let worker = WorkerName::new(&format!("worker-{number}")).unwrap();
    index.register(&HolderId { worker, rank: 0 }).unwrap()
}

/// Stores 256 chains of 64 blocks. Eight holders hold each chain, to eight different depths.
fn share_prefixes(holders: &mut [HolderWriter]) {
    for chain in 0..256 {
        for (number, holder) in holders.iter_mut().take(8).enumerate() {
            let event =
                StoredBlocks::by_sequence(None, None, hashes(2 * CHAINS + chain, 64 - 8 * number as u64));
            holder.apply(Event::Stored(event), Tier::DEVICE, 0);
        }
    }
}

fn apply(holders: &mut [HolderWriter], chain: u64, event: Event) {
    let holder = usize::try_from(chain % HOLDERS).unwrap();
    black_box(holders[holder].apply(event, Tier::DEVICE, 0));
}

fn mix(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

fn hashes(chain: u64, depth: u64) -> Vec<SequenceHash> {
    (0..depth)
        .map(|block| SequenceHash(mix((chain << 20) | block)))
        .collect()
}

fn per_block(blocks: u64, work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_nanos() as f64 / blocks as f64
}

fn search(index: &PositionalIndexer, name: &str, query: impl Fn(u64) -> Vec<SequenceHash>) {
    let queries: Vec<QueryKey> = (0..QUERIES)
        .map(|number| QueryKey::SequenceHashes(query(number)))
        .collect();
    let rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            for query in &queries {
                black_box(index.find_matches(query, Search::default()).unwrap());
            }
            started.elapsed().as_nanos() as f64 / queries.len() as f64
        })
        .collect();
    print(name, &rounds);
}

fn print(name: &str, rounds: &[f64]) {
    let mut sorted = rounds.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (least, middle, most) = (sorted[0], sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
    println!("{name:<24}{middle:>9.0} ns  ({least:.0}–{most:.0})");
}
