//! Hearing hints of routers over NATS.

use std::time::Instant;

use async_nats::Message;
use futures_util::StreamExt;

use kvatlas_core::wire::{HintReport, Subjects, WireLimits};

use super::Answerer;
use crate::daemon::broker::{Buffer, ConnectError, connect_counted};
use crate::daemon::config::Live;
use crate::daemon::hints::Hints;
use crate::daemon::metrics::labels::Connection;
use crate::daemon::shared::{Shared, Stage};

/// Reports that may wait on the connection; what does not fit is dropped, and counted as of a slow consumer.
const WAITING_MAX: usize = 1024;

/// Begins to hear hints as a task of `stage`, where the settings take some. Each replica hears all of them: whichever is asked next knows them.
pub(super) async fn start_hints(
    shared: &Shared,
    stage: &Stage,
    answerer: Answerer,
) -> Result<(), ConnectError> {
    let Some(hints) = shared.hints.clone() else {
        return Ok(());
    };
    let buffer = Buffer::of_messages(WAITING_MAX);
    let client = connect_counted(&shared.nats, Connection::Hints, "hints", buffer, |_| {}).await?;
    let (subjects, limits) = (shared.subjects.clone(), shared.query_limits.clone());
    let stop = stage.stop.clone();
    stage.tasks.spawn(async move {
        let hear = async {
            let mut reports = match client.subscribe(subjects.all_hints()).await {
                Ok(reports) => reports,
                Err(error) => return tracing::error!(%error, "hints are not heard"),
            };
            while let Some(message) = reports.next().await {
                hear(&answerer, &hints, &subjects, &limits, &message);
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

fn hear(
    answerer: &Answerer,
    hints: &Hints,
    subjects: &Subjects,
    limits: &Live<WireLimits>,
    message: &Message,
) {
    let limits = limits.now();
    let name = match subjects.parse_hint(&message.subject, limits.name_bytes_max) {
        Ok(name) => name,
        Err(error) => return hints.undecodable(&error),
    };
    match HintReport::decode(&message.payload, &limits) {
        // What is wrong with it is counted.
        Ok(report) => drop(answerer.take_hints(&name, &report.0, Instant::now())),
        Err(error) => hints.undecodable(&error),
    }
}
