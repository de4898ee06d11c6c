//! A router: asks how many blocks of a prompt each worker holds, and chooses a worker.
//!
//! `cargo run -p kvatlas-client --example ask -- nats://127.0.0.1:4222 gpu-0 gpu-1`

mod policy;

use std::collections::HashMap;

use kvatlas_client::QueryClient;
use kvatlas_core::wire::{NamespaceName, QueryKey, SingleQuery, Subjects};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next();
    let nats = async_nats::connect(url.as_deref().unwrap_or("nats://127.0.0.1:4222")).await?;
    let client = QueryClient::new(nats, Subjects::new("kvatlas")?);
    let tokens: Vec<u32> = (1..=64).collect();
    let query = SingleQuery::new(QueryKey::Tokens {
        tokens: tokens.clone(),
        lora_name: None,
        cache_salt: None,
    });
    let reply = client.query(&NamespaceName::new("llama")?, query).await?;
    let mut usable = HashMap::new();
    for holder in &reply.holders {
        let (worker, matched, exact) = (&holder.worker, holder.matched_blocks, holder.exact);
        println!(
            "{worker} holds {matched} of {} blocks, exact: {exact}",
            reply.query_blocks
        );
        // Of a worker with several ranks, the best: answers begin with it.
        let best = usable.entry(worker.to_string());
        best.or_insert(u64::from(holder.usable()));
    }

    let mut engines: Vec<String> = arguments.collect();
    if engines.is_empty() {
        engines = vec!["gpu-0".to_owned(), "gpu-1".to_owned()];
    }
    // For each engine, a router keeps the number of blocks that the engine has to compute for requests that are under
    // way.
    let under_way = HashMap::new();
    let blocks = u64::from(reply.query_blocks);
    if let Some((engine, to_compute)) = policy::choose(&engines, &tokens, blocks, &usable, &under_way) {
        println!("the request goes to {engine}, which has to compute {to_compute} blocks");
    }
    Ok(())
}
