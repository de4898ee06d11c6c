//! `GET /v1/models`: the models that have a namespace here, in the form of OpenAI's list.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;

use kvatlas_core::wire::{ModelKey, PROBE_NAME, is_pool};

use super::error::HttpRefusal;
use super::shared::{HttpShared, json_response};

/// Entry of the list: one model of one tenant.
#[derive(Debug, Serialize)]
struct ModelJson {
    id: String,
    object: &'static str,
    owned_by: &'static str,
    tenant: String,
    namespace: String,
    block_size: u32,
    workers: u64,
}

/// Answers with the known models, in the order of their namespaces. Leaves out the namespace of the doctor's probes.
pub(super) async fn models(State(shared): State<Arc<HttpShared>>) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let mut statuses = index.source.statuses().await?;
    statuses.sort_by(|(one, _), (other, _)| one.cmp(other));
    let models: Vec<ModelJson> = statuses
        .into_iter()
        .filter(|(name, _)| name.as_str() != PROBE_NAME)
        .map(|(name, status)| {
            // A namespace whose name is not made from a model counts as a model of that name.
            let key = ModelKey::of_namespace(&name);
            let key = key.unwrap_or_else(|| ModelKey::new(name.to_string()));
            let workers = status.holders.iter().map(|holder| &holder.worker);
            let workers: BTreeSet<_> = workers.filter(|worker| !is_pool(worker)).collect();
            ModelJson {
                id: key.model,
                object: "model",
                owned_by: "kvatlas",
                tenant: key.tenant,
                namespace: name.to_string(),
                block_size: status.block_size,
                workers: workers.len() as u64,
            }
        })
        .collect();
    Ok(json_response(
        &serde_json::json!({ "object": "list", "data": models }),
        None,
    ))
}
