//! An engine: publishes the blocks of the worker `gpu-0`, removes some of them, and waits until it is interrupted.
//!
//! `cargo run -p kvatlas-client --example publish -- nats://127.0.0.1:4222`

use kvatlas_client::publish::{HolderPublisher, PublishConnection, PublishedHolder, PublisherOptions};
use kvatlas_core::hash::{BlockSize, HashSeed, SequenceHash, block_hashes, sequence_hashes};
use kvatlas_core::wire::{Event, NamespaceName, RemovedBlocks, StoredBlocks, Subjects, Tier, WorkerName};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1);
    let url = url.as_deref().unwrap_or("nats://127.0.0.1:4222");
    let nats = PublishConnection::connect(async_nats::ConnectOptions::new(), url).await?;
    let holder = PublishedHolder {
        namespace: NamespaceName::new("llama")?,
        worker: WorkerName::new("gpu-0")?,
        rank: 0,
    };
    let subjects = Subjects::new("kvatlas")?;
    let publisher = HolderPublisher::start(nats, &subjects, holder, PublisherOptions::default()).await?;

    let tokens: Vec<u32> = (1..=64).collect();
    let blocks = block_hashes(&tokens, BlockSize::DEFAULT, HashSeed::for_cache(None, None));
    let chain: Vec<SequenceHash> = sequence_hashes(blocks).collect();
    let evicted = RemovedBlocks::by_sequence(chain[3..].to_vec());
    let stored = StoredBlocks::by_sequence(None, None, chain);
    publisher
        .publish(Tier::DEVICE, vec![Event::Stored(stored)])
        .await?;
    publisher
        .publish(Tier::DEVICE, vec![Event::Removed(evicted)])
        .await?;
    let last = publisher.flush().await?;
    println!(
        "published up to batch {} of epoch {}; interrupt to say goodbye",
        last.seq, last.epoch
    );

    // Heartbeats and answers to daemons go on meanwhile.
    tokio::signal::ctrl_c().await?;
    publisher.say_goodbye().await?;
    Ok(())
}
