//! Receiver of routers' hints over NATS.

use std::time::{Duration, Instant};

use async_nats::Message;

use kvatlas_core::wire::{HintReport, Subjects, WireError, WireLimits};

use super::Answerer;
use crate::hints::Hints;
use crate::reports::{Told, start_reports};
use crate::shared::{Shared, Stage};
use kvatlas_config::Live;
use kvatlas_process::broker::ConnectError;
use kvatlas_telemetry::labels::Connection;

/// Minimum pause between two checks of the hints. A check finds the hints that have come true, that is, whose holder
/// has the hint's blocks. The pause is short enough: an engine keeps a block that it has just stored for much longer.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Pause after a check, as a multiple of the time that the check took. So checks take a small share of a core.
const LOOK_PAUSES: u32 = 20;
/// Maximum number of hints of a namespace that one check looks at.
const LOOKED_AT_MAX: usize = 1024;

/// Begins to take hints from NATS as a task of `stage`, if the settings allow hints. Every replica takes all hints, so
/// that any replica can use them in its next answer.
pub(super) async fn start_hints(
    shared: &Shared,
    stage: &Stage,
    answerer: Answerer,
) -> Result<(), ConnectError> {
    let Some(hints) = shared.hints.clone() else {
        return Ok(());
    };
    let told = Told {
        connection: Connection::Hints,
        subjects: shared.subjects.all_hints(),
        group: None,
    };
    stage.spawn(look(answerer.clone()));
    let (subjects, limits) = (shared.subjects.clone(), shared.query_limits.clone());
    let take = move |message: &Message| hear(&answerer, &hints, &subjects, &limits, message);
    start_reports(shared, stage, told, take).await
}

/// Checks at intervals which hints have come true, that is, whether the hint's holder has the hint's blocks. Never
/// returns.
async fn look(answerer: Answerer) {
    loop {
        let begun = Instant::now();
        answerer.look_at_hints(LOOKED_AT_MAX, begun);
        tokio::time::sleep(LOOK_PAUSE.max(begun.elapsed() * LOOK_PAUSES)).await;
    }
}

fn hear(
    answerer: &Answerer,
    hints: &Hints,
    subjects: &Subjects,
    limits: &Live<WireLimits>,
    message: &Message,
) -> Result<usize, WireError> {
    let limits = limits.now();
    let name = subjects.parse_hint(&message.subject, limits.name_bytes_max);
    let name = name.inspect_err(|error| hints.undecodable(error))?;
    let report = HintReport::decode(&message.payload, &limits);
    let report = report.inspect_err(|error| hints.undecodable(error))?;
    // `take_hints` counts its errors.
    answerer.take_hints(&name, &report.0, Instant::now())
}
