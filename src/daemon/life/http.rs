//! Start of the HTTP query listener.

use std::sync::Arc;
use std::time::Duration;

use crate::http::{HEAD_BYTES_MAX, HttpParts, HttpServer, Index};
use crate::queries::query_limits;
use crate::shared::Shared;
use crate::start_error::StartError;
use kvatlas_config::Config;
use kvatlas_process::admin::AdminSource;
use kvatlas_process::listener::ConnectionLimits;
use kvatlas_process::registry::EngineRegistry;

use kvatlas_core::wire::WireLimits;

/// Time for which a request in progress may go on after the listener is told to stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the bounds on queries over HTTP. A message may be as long as a request body.
pub(super) fn http_limits(config: &Config) -> WireLimits {
    WireLimits {
        message_bytes_max: config.http.max_body_bytes,
        ..query_limits(config)
    }
}

/// Starts the query listener, if one is configured. Until the daemon is ready, the listener refuses queries.
pub(super) async fn start_http(
    shared: &Shared,
    metrics: Arc<dyn AdminSource>,
    engines: Option<Arc<dyn EngineRegistry>>,
) -> Result<Option<HttpServer>, StartError> {
    let config = &shared.config.http;
    let Some(listen) = config.listen else {
        return Ok(None);
    };
    let token = shared
        .tokens
        .read("http.token_file", config.token_file.as_deref())?;
    let index = Index::new(
        shared.source().await?,
        Arc::clone(&shared.readiness),
        Arc::clone(&shared.outcomes),
        shared.config.sharding.shard.map(|shard| shard.to_string()),
    );
    let parts = HttpParts {
        index: Some(index),
        engines,
        metrics,
        token,
        body_bytes_max: config.max_body_bytes,
        receiving_bytes_max: config.max_receiving_bytes,
        request_timeout: config.request_timeout,
        tracer: shared.tracer.clone(),
    };
    let limits = ConnectionLimits {
        connections_max: config.max_connections,
        per_source_max: config.max_connections_per_source,
        head_timeout: config.idle_timeout,
        age_max: None,
        drain_timeout: DRAIN_TIMEOUT,
        head_bytes_max: HEAD_BYTES_MAX,
        unread_timeout: config.request_timeout,
    };
    Ok(Some(HttpServer::start(listen, parts, limits).await?))
}
