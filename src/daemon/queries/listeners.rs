//! Source of the listeners' answers. It is made when the first listener asks for it.

use std::sync::Arc;

use crate::shared::Shared;
use kvatlas_client::unix_time_us;
use kvatlas_process::broker::{Buffer, ConnectionNotice, connect_counted, follow_connection};
use kvatlas_telemetry::labels::Connection;

use super::member::MEMBER_MESSAGES_MIN;
use super::shards::{ShardAsker, gathers_max};
use super::source::{IndexHere, Shards, Source, SourceError};

impl Shared {
    /// Returns the source from which all listeners answer: the index of this process, or, in a gateway, the shards.
    ///
    /// # Errors
    ///
    /// [`SourceError`] if the shards cannot be asked.
    pub(crate) async fn source(&self) -> Result<Arc<Source>, SourceError> {
        self.source
            .get_or_try_init(|| listener_source(self))
            .await
            .cloned()
    }
}

/// Makes the source from which all listeners answer: the index of this process, or the shards. A gateway is not ready
/// while it has no connection to the shards.
///
/// # Errors
///
/// [`SourceError`] if the shards cannot be asked.
async fn listener_source(shared: &Shared) -> Result<Arc<Source>, SourceError> {
    if !shared.config.gateway.enabled {
        return Ok(Arc::new(Source::Here(Box::new(IndexHere {
            answerer: shared.listener_answerer(),
            pool: Arc::clone(&shared.pool),
            dialect_depth: shared.config.queries.dialect_depth,
        }))));
    }
    // The replies of many shards come at once.
    let messages_max = shared
        .config
        .events
        .subscription_capacity
        .max(MEMBER_MESSAGES_MIN);
    let buffer = Buffer::of_messages(messages_max);
    let (shards, refused) = (shared.subjects.of_shards(), Arc::clone(&shared.missing_shards));
    let notice = move |notice: &ConnectionNotice| {
        if let ConnectionNotice::Refused(refusal) = notice {
            refused.note_refused(&shards, refusal, unix_time_us());
        }
    };
    let client = connect_counted(&shared.nats, Connection::Queries, "listeners", buffer, notice).await?;
    follow_connection(&shared.readiness, "listeners", &client);
    let (gathers_max, deadline) = (gathers_max(&shared.config), shared.config.gateway.deadline);
    let missing = Arc::clone(&shared.missing_shards);
    Ok(Arc::new(Source::Shards(Box::new(Shards {
        asker: ShardAsker::new(client, &shared.subjects, gathers_max, deadline, missing).await?,
        limits: shared.http_limits.clone(),
        dialect_depth: shared.config.queries.dialect_depth,
    }))))
}
