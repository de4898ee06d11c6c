//! Outcomes over HTTP: the same report as on NATS, as JSON. It tells how many cached blocks requests found.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use kvatlas_core::wire::{ErrorCode, Outcome, OutcomeReport, WireError};

use super::contract::namespace_of;
use super::error::{ContractError, HttpError};
use super::fields::Unknown;
use super::shared::{HttpShared, Payload, json_response};
use crate::outcomes::ReportError;

/// A report of outcomes, and the namespace that it is about.
#[derive(Debug, Deserialize)]
struct ReportJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    outcomes: Vec<Outcome>,
}

/// `POST /v1/outcomes`.
pub(super) async fn outcomes(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, ContractError> {
    let index = shared.index()?;
    let report: ReportJson = payload.json(Unknown::Refused)?;
    let namespace = namespace_of(
        report.namespace.as_deref(),
        report.model.as_deref(),
        report.tenant.as_deref(),
    )?;
    let sent = OutcomeReport::new(report.outcomes);
    let counted = index.outcomes.take(&namespace, &sent, Instant::now());
    let counted = counted.map_err(|error| HttpError::Contract(contract_error(&error)))?;
    Ok(json_response(&serde_json::json!({ "counted": counted }), None))
}

fn contract_error(error: &ReportError) -> WireError {
    let code = match error {
        ReportError::Version(_) => ErrorCode::UnsupportedVersion,
        ReportError::TooMany(_) => ErrorCode::TooLarge,
        ReportError::UnknownNamespace(_) => ErrorCode::UnknownNamespace,
    };
    WireError::new(code, error.to_string())
}
