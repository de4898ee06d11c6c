//! The index without a daemon: a router that keeps its own map of who holds which prefix.
//!
//! `cargo run -p kvatlas-core --example embed_index`

use kvatlas_core::hash::{BlockSize, HashSeed, SequenceHash, Token, block_hashes, sequence_hashes};
use kvatlas_core::index::{IndexLimits, NamespaceSettings, PositionalIndexer, Search};
use kvatlas_core::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

/// The sequence hashes of a prompt's blocks. Each stands for the whole prefix that ends with its block.
fn chain(tokens: &[Token], block_size: BlockSize) -> Vec<SequenceHash> {
    let seed = HashSeed::for_cache(None, None);
    sequence_hashes(block_hashes(tokens, block_size, seed)).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = NamespaceSettings::default();
    let block_size = settings.block_size;
    let index = PositionalIndexer::new(settings, IndexLimits::default());

    // One writer per holder. Writers may live on different threads; one holder's events must come in order.
    let holder = |worker: &str| -> Result<HolderId, kvatlas_core::wire::NameError> {
        Ok(HolderId {
            worker: WorkerName::new(worker)?,
            rank: 0,
        })
    };
    let mut first = index.register(&holder("gpu-0")?)?;
    let mut second = index.register(&holder("gpu-1")?)?;

    let prompt: Vec<Token> = (1..=64).collect();
    let blocks = chain(&prompt, block_size);
    // The time in microseconds, on any clock. It limits how long stored blocks wait for a parent that has not come.
    let now_us = 0;
    let stored =
        |hashes: &[SequenceHash]| Event::Stored(StoredBlocks::by_sequence(None, None, hashes.to_vec()));
    first.apply(stored(&blocks), Tier::DEVICE, now_us);
    second.apply(stored(&blocks[..2]), Tier::DEVICE, now_us);
    let evicted = RemovedBlocks::by_sequence(vec![blocks[3]]);
    first.apply(Event::Removed(evicted), Tier::DEVICE, now_us);

    // Any thread may ask, at any time, without a lock.
    let query = QueryKey::Tokens {
        tokens: prompt,
        lora_name: None,
        cache_salt: None,
    };
    let matches = index.find_matches(&query, Search::default())?;
    for found in matches.holders() {
        println!(
            "{} holds {} of {} blocks",
            found.holder.id,
            found.matched_blocks,
            blocks.len()
        );
    }

    // Everything that a holder has, as events. Applied to another index, the events give it the same content.
    for (tier, event) in first.dump_events(1024) {
        println!("gpu-0 again: {event:?} in tier {}", tier.as_u8());
    }
    Ok(())
}
