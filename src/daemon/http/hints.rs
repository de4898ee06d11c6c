//! Hints over HTTP: the same report of routers as on NATS, as JSON.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use kvatlas_core::wire::Hint;

use super::contract::namespace_of;
use super::error::{ContractError, HttpError};
use super::fields::Unknown;
use super::shared::{HttpShared, Payload, json_response};

/// A report of hints, and the namespace that it is about.
#[derive(Debug, Deserialize)]
struct ReportJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    hints: Vec<Hint>,
}

/// `POST /v1/hints`.
pub(super) async fn hints(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, ContractError> {
    let answerer = &shared.index()?.source.here()?.answerer;
    let report: ReportJson = payload.json(Unknown::Refused)?;
    let namespace = namespace_of(
        report.namespace.as_deref(),
        report.model.as_deref(),
        report.tenant.as_deref(),
    )?;
    let taken = answerer.take_hints(&namespace, &report.hints, Instant::now());
    let taken = taken.map_err(HttpError::Contract)?;
    Ok(json_response(&serde_json::json!({ "taken": taken }), None))
}
