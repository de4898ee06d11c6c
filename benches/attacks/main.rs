//! Damage that a publisher can do to an index if it may send any messages of up to 1 MiB: the worst time and memory for
//! each kind of attack.
//!
//! ```sh
//! cargo bench --package kvatlas-core --bench attacks
//! ```
//!
//! | column | what |
//! |---|---|
//! | MiB | size of all messages, each of at most 1 MiB |
//! | longest message | longest time to apply one message, while no other holder is active |
//! | ns a byte | time to apply all messages, for each byte |
//! | longest turn | longest time that another holder takes to store or remove one block; least of the rounds |
//! | longest query | longest time of a query for blocks of that other holder; least of the rounds |
//! | kept, counted | bytes kept for each byte sent, the most after any message: as the allocator counts, and as
//! the index counts |
//! | left | bytes that are left for each MiB sent, after the holder is gone |
//!
//! With an argument, only the kinds whose names contain it are run.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a bench fails by panicking"
)]

mod allocations;
mod kinds;
mod message;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{HolderWriter, NamespaceSettings, PositionalIndexer, Search, give_back_memory};
use kvatlas_core::wire::{
    Event, EventBatch, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WireLimits, WorkerName,
};

use allocations::{Counting, held};
use kinds::Attack;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of rounds in which another holder is active during the attack.
const ROUNDS: usize = 5;

/// Figures of an attack while no other holder is active.
#[derive(Default)]
struct Alone {
    sent: usize,
    longest: Duration,
    all: Duration,
    kept: f64,
    counted: f64,
    left: usize,
}

/// Figures of another holder during an attack: the longest times of a store and of a query.
#[derive(Clone, Copy)]
struct Beside {
    store: Duration,
    query: Duration,
}

fn main() {
    let only = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'));
    println!(
        "| attack | MiB | longest message, ms | ns a byte | longest turn, ms | longest query, ms | kept | counted | left |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for attack in kinds::all() {
        if only
            .as_ref()
            .is_some_and(|only| !attack.name.contains(only.as_str()))
        {
            continue;
        }
        let alone = alone(&attack);
        let rounds: Vec<Beside> = (0..ROUNDS).map(|_| beside(&attack)).collect();
        let least = |time: fn(&Beside) -> Duration| rounds.iter().map(time).min().unwrap();
        let mib = alone.sent as f64 / f64::from(1 << 20);
        println!(
            "| {} | {mib:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.0} |",
            attack.name,
            milliseconds(alone.longest),
            alone.all.as_nanos() as f64 / alone.sent as f64,
            milliseconds(least(|round| round.store)),
            milliseconds(least(|round| round.query)),
            alone.kept,
            alone.counted,
            alone.left as f64 / mib,
        );
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn new_index(attack: &Attack) -> PositionalIndexer {
    let settings = NamespaceSettings {
        hashing: attack.hashing,
        ..NamespaceSettings::default()
    };
    PositionalIndexer::new(settings, attack.limits)
}

fn register(index: &PositionalIndexer, name: &str) -> HolderWriter {
    let worker = WorkerName::new(name).unwrap();
    index.register(&HolderId { worker, rank: 0 }).unwrap()
}

fn payload(attack: &Attack, number: u64) -> Vec<u8> {
    let (tier, events) = (attack.events)(number);
    message::encode(tier, &events)
}

fn apply(writer: &mut HolderWriter, payload: &[u8], number: u64) -> Duration {
    let batch = EventBatch::decode(payload, &WireLimits::default()).unwrap();
    let started = Instant::now();
    for event in batch.events {
        writer.apply(event, batch.tier, number);
    }
    started.elapsed()
}

/// Runs the attack while no other holder is active, and measures its time and memory.
fn alone(attack: &Attack) -> Alone {
    let index = new_index(attack);
    let mut writer = register(&index, "attacker");
    let (before, counted_before) = (held(), index.sizes().bytes);
    let mut figures = Alone::default();
    let mut kept = 0;
    for number in 0..attack.messages {
        let payload = payload(attack, number);
        figures.sent += payload.len();
        let held_before = held();
        let took = apply(&mut writer, &payload, number);
        kept += held().cast_signed() - held_before.cast_signed();
        figures.longest = figures.longest.max(took);
        figures.all += took;
        let sent = figures.sent as f64;
        figures.kept = figures.kept.max(kept as f64 / sent);
        let counted = index.sizes().bytes.saturating_sub(counted_before);
        figures.counted = figures.counted.max(counted as f64 / sent);
    }
    writer.retire();
    for _ in 0..200 {
        give_back_memory();
    }
    figures.left = held().saturating_sub(before);
    figures
}

/// Runs the attack while another holder stores, removes and queries blocks.
fn beside(attack: &Attack) -> Beside {
    let index = new_index(attack);
    let mut writer = register(&index, "attacker");
    let over = Arc::new(AtomicBool::new(false));
    let watcher = std::thread::spawn({
        let over = Arc::clone(&over);
        move || watch(&index, &over)
    });
    for number in 0..attack.messages {
        apply(&mut writer, &payload(attack, number), number);
    }
    writer.retire();
    over.store(true, Ordering::Relaxed);
    watcher.join().unwrap()
}

/// Stores and removes blocks of a holder, and queries them, until the attack is over. Returns the longest times.
fn watch(index: &PositionalIndexer, over: &AtomicBool) -> Beside {
    let mut writer = register(index, "bystander");
    let chain: Vec<SequenceHash> = (0..64)
        .map(|block| SequenceHash(kinds::mix(1 << 62 | block)))
        .collect();
    let (last, first) = chain.split_last().unwrap();
    let chains = |parent, blocks: &[SequenceHash]| {
        Event::Stored(StoredBlocks::by_sequence(parent, None, blocks.to_vec()))
    };
    writer.apply(chains(None, first), Tier::DEVICE, 0);
    let query = QueryKey::SequenceHashes(chain.clone());
    let mut longest = Beside {
        store: Duration::ZERO,
        query: Duration::ZERO,
    };
    while !over.load(Ordering::Relaxed) {
        let started = Instant::now();
        writer.apply(chains(first.last().copied(), &[*last]), Tier::DEVICE, 0);
        longest.store = longest.store.max(started.elapsed());
        let started = Instant::now();
        std::hint::black_box(index.find_matches(&query, Search::default()).unwrap());
        longest.query = longest.query.max(started.elapsed());
        let started = Instant::now();
        let removed = RemovedBlocks::by_sequence(vec![*last]);
        writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
        longest.store = longest.store.max(started.elapsed());
    }
    longest
}
