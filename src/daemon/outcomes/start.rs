//! Subscription to outcomes over NATS.

use std::sync::Arc;
use std::time::Instant;

use async_nats::Message;

use kvatlas_core::wire::{OutcomeReport, Subjects};

use super::{Outcomes, REPORT_BYTES_MAX};
use crate::reports::{Told, start_reports};
use crate::shared::{Shared, Stage};
use kvatlas_process::broker::ConnectError;
use kvatlas_telemetry::labels::Connection;

/// Subscribes to outcomes, as a task of `stage`. Replicas share the reports by `queue_group`. Each shard receives all reports, and counts
/// the outcomes of its own workers.
pub(crate) async fn start_outcomes(
    shared: &Shared,
    stage: &Stage,
    queue_group: &str,
) -> Result<(), ConnectError> {
    let told = Told {
        connection: Connection::Outcomes,
        subjects: shared.subjects.all_outcomes(),
        group: Some(queue_group.to_owned()),
    };
    let (outcomes, subjects) = (Arc::clone(&shared.outcomes), shared.subjects.clone());
    let name_bytes_max = shared.config.limits.max_name_bytes;
    let take = move |message: &Message| hear(&outcomes, &subjects, message, name_bytes_max);
    start_reports(shared, stage, told, take).await
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
        // An error is counted in `take` already.
        Ok(report) => drop(outcomes.take(&name, &report, Instant::now())),
        Err(error) => outcomes.undecodable(&error),
    }
}
