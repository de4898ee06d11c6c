//! `GET /v1/models`: the models of which a cache is known, in the form of OpenAI's list.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;

use kvatlas_core::wire::{DEFAULT_TENANT, ModelKey};

use super::error::ContractError;
use super::shared::{Shared, json_response};

/// One model of a tenant.
#[derive(Debug, Serialize)]
struct Model {
    id: String,
    object: &'static str,
    owned_by: &'static str,
    tenant: String,
    namespace: String,
    block_size: u32,
    workers: u64,
}

/// The models, in the order of their namespaces.
pub(super) async fn models(State(shared): State<Arc<Shared>>) -> Result<Response, ContractError> {
    let index = shared.index()?;
    let mut namespaces = index.answerer.namespaces().all();
    namespaces.sort_by(|one, other| one.name.cmp(&other.name));
    let models: Vec<Model> = namespaces
        .iter()
        .map(|namespace| {
            // A namespace whose name no model makes is its own model.
            let key = ModelKey::of_namespace(&namespace.name).unwrap_or_else(|| ModelKey {
                model: namespace.name.to_string(),
                tenant: DEFAULT_TENANT.to_owned(),
            });
            Model {
                id: key.model,
                object: "model",
                owned_by: "kvatlas",
                tenant: key.tenant,
                namespace: namespace.name.to_string(),
                block_size: namespace.indexer.settings().block_size.as_u32(),
                workers: namespace.indexer.sizes().workers as u64,
            }
        })
        .collect();
    Ok(json_response(
        &serde_json::json!({ "object": "list", "data": models }),
        None,
    ))
}
