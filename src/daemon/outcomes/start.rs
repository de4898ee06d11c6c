//! Subscription to outcomes over NATS.

use std::sync::Arc;
use std::time::Instant;

use async_nats::Message;

use kvatlas_core::wire::{ErrorCode, OutcomeReport, Subjects, WireError};

use super::{Outcomes, REPORT_BYTES_MAX};
use crate::reports::{Told, start_reports};
use crate::shared::{Shared, Stage};
use kvatlas_process::broker::ConnectError;
use kvatlas_telemetry::labels::Connection;

/// Subscribes to outcomes, as a task of `stage`. Replicas share the reports through a queue group. Each shard receives
/// all reports, and counts the outcomes about its own workers.
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

fn hear(
    outcomes: &Outcomes,
    subjects: &Subjects,
    message: &Message,
    name_bytes_max: usize,
) -> Result<usize, WireError> {
    let decoded = || {
        let name = subjects.parse_outcome(&message.subject, name_bytes_max)?;
        let bytes = message.payload.len();
        if bytes > REPORT_BYTES_MAX {
            let text = format!("a report of {bytes} bytes; at most {REPORT_BYTES_MAX} are taken");
            return Err(WireError::new(ErrorCode::TooLarge, text));
        }
        let report = OutcomeReport::decode(&message.payload);
        let report = report.map_err(|error| WireError::new(ErrorCode::BadRequest, error.to_string()))?;
        Ok((name, report))
    };
    let decoded = decoded().inspect_err(|error: &WireError| outcomes.undecodable(&error.text));
    let (name, report) = decoded?;
    // An error is counted in `take` already.
    Ok(outcomes.take(&name, &report, Instant::now())?)
}
