//! Dynamo's standalone indexer, from its crate, without the rest of Dynamo.

use axum::http::HeaderName;
use clap::Parser;
use dynamo_kv_router::services::indexer::{IndexerConfig, run_server};

/// Settings that a comparison needs.
#[derive(Parser)]
struct Arguments {
    /// Port on which the indexer listens.
    #[arg(long)]
    port: u16,
    /// Number of tokens in a block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// Number of threads that apply events.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Model of the engines in `--workers`.
    #[arg(long, default_value = "default")]
    model: String,
    /// Engines to follow: ID[:RANK]=tcp://HOST:PORT, joined by commas. Without this flag, engines are registered over
    /// HTTP.
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
