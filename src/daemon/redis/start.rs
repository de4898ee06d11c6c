//! Start of the listener for llm-d's routers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::shared::{Shared, Stage};
use crate::start_error::{StartError, bind};
use kvatlas_process::listener::{Acceptor, ConnectionLimits};
use kvatlas_telemetry::{RedisConnectionMetrics, RedisMetrics};

use super::commands::Commands;
use super::connection::{DRAIN_TIMEOUT, MORE_PATIENCE, RedisDoor, serve};
use super::guesses::Guesses;
use super::prefixes::Prefixes;

/// Serves llm-d's routers as tasks of `stage`. Returns the address to which the listener is bound, or `None` if no
/// listener is configured.
pub(crate) async fn start_redis(shared: &Shared, stage: &Stage) -> Result<Option<SocketAddr>, StartError> {
    let config = &shared.config.redis;
    let Some(address) = config.listen else {
        return Ok(None);
    };
    let token = shared
        .tokens
        .read("redis.token_file", config.token_file.as_deref())?;
    let (listener, local_addr) = bind(address, "(redis.listen)").await?;
    let door = Arc::new(RedisDoor {
        commands: Commands {
            token,
            guesses: Guesses::new(config.speculative_ttl, config.max_speculative_bytes),
            metrics: RedisMetrics::new(),
        },
        prefixes: Prefixes::new(shared.source().await?, Arc::clone(&shared.readiness)),
        room: RedisDoor::room(config.max_receiving_bytes),
        answer_room: RedisDoor::room(config.max_receiving_bytes),
        more_patience: MORE_PATIENCE,
        config: config.clone(),
    });
    let acceptor = Acceptor {
        name: "redis",
        limits: ConnectionLimits {
            connections_max: config.max_connections,
            per_source_max: config.max_connections_per_source,
            head_timeout: config.idle_timeout,
            age_max: None,
            drain_timeout: DRAIN_TIMEOUT,
            head_bytes_max: config.max_command_bytes,
            unread_timeout: config.request_timeout,
        },
        stopping: stage.stop.clone(),
        counts: Arc::new(RedisConnectionMetrics::new()),
    };
    let (numbers, stopping) = (AtomicU64::new(0), stage.stop.clone());
    let accepting = acceptor.accept(listener, move |stream, _, place| {
        let number = numbers.fetch_add(1, Ordering::Relaxed) + 1;
        serve(Arc::clone(&door), stream, place, number, stopping.clone())
    });
    stage.spawn_to_end(accepting);
    tracing::info!(%local_addr, "listener for llm-d's routers started");
    Ok(Some(local_addr))
}
