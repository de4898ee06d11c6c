//! Outcomes over HTTP: the same reports as over NATS, as JSON. An outcome tells how many cached blocks a request really
//! found.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use kvatlas_core::wire::{Gathered, Outcome, OutcomeReport, WireError};

use crate::queries::Source;

use super::contract::namespace_of;
use super::error::HttpRefusal;
use super::fields::Unknown;
use super::shared::{HttpShared, Payload, json_response};

/// Report of outcomes (how many blocks requests found cached), with the namespace that the outcomes are about.
#[derive(Debug, Deserialize)]
struct OutcomeReportJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    outcomes: Vec<Outcome>,
}

#[derive(Serialize)]
struct OutcomeReportAnswer {
    counted: u64,
    /// Shards to which a gateway has passed the report. Absent if the daemon itself has counted the outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    gathered: Option<Gathered>,
}

/// Takes the report of outcomes that is the body of `POST /v1/outcomes`.
pub(super) async fn outcomes(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let report: OutcomeReportJson = payload.json(Unknown::Refused)?;
    let namespace = namespace_of(
        report.namespace.as_deref(),
        report.model.as_deref(),
        report.tenant.as_deref(),
    )?;
    let sent = OutcomeReport::new(report.outcomes);
    let (counted, gathered) = match &*index.source {
        Source::Here(_) => {
            let counted = index.outcomes.take(&namespace, &sent, Instant::now());
            (counted.map_err(WireError::from)? as u64, None)
        }
        Source::Shards(shards) => {
            let merged = shards.asker.tell_outcomes(&namespace, &sent).await?;
            (merged.reply, Some(merged.gathered))
        }
    };
    Ok(json_response(&OutcomeReportAnswer { counted, gathered }, None))
}
