//! A router: asks which workers hold how much of a prompt.
//!
//! `cargo run -p kvatlas-client --example ask -- nats://127.0.0.1:4222`

use kvatlas_client::QueryClient;
use kvatlas_core::wire::{NamespaceName, QueryKey, SingleQuery, Subjects};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1);
    let nats = async_nats::connect(url.as_deref().unwrap_or("nats://127.0.0.1:4222")).await?;
    let client = QueryClient::new(nats, Subjects::new("kvatlas")?);
    let query = SingleQuery::new(QueryKey::Tokens {
        tokens: (1..=64).collect(),
        lora_name: None,
        cache_salt: None,
    });
    let reply = client.query(&NamespaceName::new("llama")?, query).await?;
    for holder in &reply.holders {
        let (worker, matched, exact) = (&holder.worker, holder.matched_blocks, holder.exact);
        println!(
            "{worker} holds {matched} of {} blocks, exact: {exact}",
            reply.query_blocks
        );
    }
    Ok(())
}
