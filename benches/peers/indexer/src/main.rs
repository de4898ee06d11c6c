//! Dynamo's standalone indexer, as its crate has it, without Dynamo around it.

use axum::http::HeaderName;
use clap::Parser;
use dynamo_kv_router::services::indexer::{IndexerConfig, run_server};

/// The settings that a comparison needs.
#[derive(Parser)]
struct Arguments {
    /// Port that it listens on.
    #[arg(long)]
    port: u16,
    /// Tokens in a block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// Threads that apply events.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// The model of `--workers`.
    #[arg(long, default_value = "default")]
    model: String,
    /// Engines: ID[:RANK]=tcp://HOST:PORT, joined by commas; or none, and they are registered.
    #[arg(long)]
    workers: Option<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let config = IndexerConfig {
        block_size: Some(arguments.block_size),
        port: arguments.port,
        threads: arguments.threads,
        workers: arguments.workers,
        model_name: arguments.model,
        routing_group: "default".to_owned(),
        peers: None,
        access_log: None,
        trace_id_header: HeaderName::from_static("x-request-id"),
        access_log_local_time: false,
    };
    run_server(config).await
}
