//! Reports of routers over HTTP: the same hints and outcomes as over NATS, as JSON.
//!
//! A hint says where a router has sent a request. An outcome tells how many cached blocks a request really found. A gateway
//! passes reports on to its shards. Its answer has the number of shards, and names the shards that did not answer. A
//! daemon keeps hints for itself: unlike over NATS, its replicas do not hear them.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use kvatlas_core::wire::{Hint, Outcome, OutcomeReport, Rank, WireError, WorkerName};

use crate::queries::Source;

use super::contract::namespace_of;
use super::error::HttpRefusal;
use super::fields::Unknown;
use super::shared::{HttpShared, Payload, json_response};

/// Report of hints, with the namespace that the hints are about.
#[derive(Debug, Deserialize)]
struct HintsJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    hints: Vec<Hint>,
}

/// Report of outcomes, with the namespace that the outcomes are about.
#[derive(Debug, Deserialize)]
struct OutcomesJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    outcomes: Vec<OutcomeJson>,
}

/// Outcome, as on NATS. But unknown fields are refused here: with a misspelt `exact`, the outcome would count as one of
/// an answer in doubt.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutcomeJson {
    worker: WorkerName,
    #[serde(default)]
    rank: Rank,
    promised_blocks: u32,
    found_tokens: u32,
    prompt_tokens: Option<u32>,
    #[serde(default)]
    exact: bool,
}

impl From<OutcomeJson> for Outcome {
    fn from(told: OutcomeJson) -> Self {
        Self {
            worker: told.worker,
            rank: told.rank,
            promised_blocks: told.promised_blocks,
            found_tokens: told.found_tokens,
            prompt_tokens: told.prompt_tokens,
            exact: told.exact,
        }
    }
}

/// Answers `POST /v1/hints` with the number of hints that are kept.
pub(super) async fn hints(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let report: HintsJson = payload.json(Unknown::Refused)?;
    let namespace = namespace_of(report.namespace, report.model, report.tenant)?;
    let answer = match &*index.source {
        Source::Here(here) => {
            let now = Instant::now();
            json!({ "taken": here.answerer.take_hints(&namespace, &report.hints, now)? })
        }
        Source::Shards(shards) => {
            let (taken, gathered) = shards.asker.tell_hints(&namespace, report.hints).await?;
            json!({ "taken": taken, "gathered": gathered })
        }
    };
    Ok(json_response(&answer, None))
}

/// Answers `POST /v1/outcomes` with the number of outcomes that are counted.
pub(super) async fn outcomes(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let report: OutcomesJson = payload.json(Unknown::Refused)?;
    let namespace = namespace_of(report.namespace, report.model, report.tenant)?;
    let sent = OutcomeReport::new(report.outcomes.into_iter().map(Outcome::from).collect());
    let answer = match &*index.source {
        Source::Here(_) => {
            let counted = index.outcomes.take(&namespace, &sent, Instant::now());
            json!({ "counted": counted.map_err(WireError::from)? })
        }
        Source::Shards(shards) => {
            let (counted, gathered) = shards.asker.tell_outcomes(&namespace, &sent).await?;
            json!({ "counted": counted, "gathered": gathered })
        }
    };
    Ok(json_response(&answer, None))
}
