//! Hearing outcomes over NATS.

use std::sync::Arc;
use std::time::Instant;

use async_nats::Message;
use futures_util::StreamExt;

use kvatlas_core::wire::{OutcomeReport, Subjects};

use super::{Outcomes, REPORT_BYTES_MAX};
use crate::daemon::broker::{Buffer, ConnectError, connect_counted};
use crate::daemon::metrics::labels::Connection;
use crate::daemon::shared::{Shared, Stage};

/// Reports that may wait on the connection; what does not fit is dropped, and counted as of a slow consumer.
const WAITING_MAX: usize = 1024;

/// Begins to hear outcomes, as a task of `stage`. Replicas share them by `queue_group`; each shard hears all, and counts those of its own
/// workers.
pub(crate) async fn start_outcomes(
    shared: &Shared,
    stage: &Stage,
    queue_group: &str,
) -> Result<(), ConnectError> {
    let buffer = Buffer::of_messages(WAITING_MAX);
    let client = connect_counted(&shared.nats, Connection::Outcomes, "outcomes", buffer, |_| {}).await?;
    let group = queue_group.to_owned();
    let (outcomes, subjects) = (Arc::clone(&shared.outcomes), shared.subjects.clone());
    let (stop, name_bytes_max) = (stage.stop.clone(), shared.config.limits.max_name_bytes);
    stage.tasks.spawn(async move {
        let hear = async {
            let subscribed = client.queue_subscribe(subjects.all_outcomes(), group).await;
            let mut reports = match subscribed {
                Ok(reports) => reports,
                Err(error) => return tracing::error!(%error, "outcomes are not heard"),
            };
            while let Some(message) = reports.next().await {
                hear(&outcomes, &subjects, &message, name_bytes_max);
                // However many come, others have their turns.
                tokio::task::consume_budget().await;
            }
        };
        tokio::select! {
            () = hear => {}
            () = stop.cancelled() => {}
        }
    });
    Ok(())
}

fn hear(outcomes: &Outcomes, subjects: &Subjects, message: &Message, name_bytes_max: usize) {
    let name = match subjects.parse_outcome(&message.subject, name_bytes_max) {
        Ok(name) => name,
        Err(error) => return outcomes.undecodable(&error),
    };
    if message.payload.len() > REPORT_BYTES_MAX {
        return outcomes.undecodable(&format_args!("a report of {} bytes", message.payload.len()));
    }
    match OutcomeReport::decode(&message.payload) {
        // What is wrong with it is counted.
        Ok(report) => drop(outcomes.take(&name, &report, Instant::now())),
        Err(error) => outcomes.undecodable(&error),
    }
}
