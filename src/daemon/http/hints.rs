//! Hints over HTTP: the same reports of routers as over NATS, as JSON. A hint says where a router has sent a request.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use kvatlas_core::wire::{Gathered, Hint};

use crate::queries::Source;

use super::contract::namespace_of;
use super::error::HttpRefusal;
use super::fields::Unknown;
use super::shared::{HttpShared, Payload, json_response};

/// Report of hints (where a router has sent requests), with the namespace that the hints are about.
#[derive(Debug, Deserialize)]
struct ReportJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    hints: Vec<Hint>,
}

#[derive(Serialize)]
struct HintReportAnswer {
    taken: u64,
    /// Shards to which a gateway has passed the report. Absent if the daemon itself keeps the hints.
    #[serde(skip_serializing_if = "Option::is_none")]
    gathered: Option<Gathered>,
}

/// Answers `POST /v1/hints` with the number of hints that are kept.
pub(super) async fn hints(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let report: ReportJson = payload.json(Unknown::Refused)?;
    let namespace = namespace_of(
        report.namespace.as_deref(),
        report.model.as_deref(),
        report.tenant.as_deref(),
    )?;
    let (taken, gathered) = match &*index.source {
        Source::Here(here) => {
            let taken = here
                .answerer
                .take_hints(&namespace, &report.hints, Instant::now())?;
            (taken as u64, None)
        }
        Source::Shards(shards) => {
            let merged = shards.asker.tell_hints(&namespace, report.hints).await?;
            (merged.reply, Some(merged.gathered))
        }
    };
    Ok(json_response(&HintReportAnswer { taken, gathered }, None))
}
