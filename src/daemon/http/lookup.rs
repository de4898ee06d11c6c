//! `POST /lookup`, the question that gateways ask LMCache's controller. The answer gives, for each instance, the number
//! of leading tokens of a prompt that it has, and where they lie.
//!
//! The body that LMCache's clients send has tokens, and names no model.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use kvatlas_core::wire::{DEFAULT_TENANT, ModelKey, NamespaceName, PROBE_NAME, QueryKey};

use super::dialect::{find, named};
use super::error::HttpRefusal;
use super::fields::Unknown;
use super::shared::{HttpShared, Index, Payload, json_response};

/// Fields of a request. All fields but `tokens` are additions of kvatlas.
#[derive(Debug, Deserialize)]
pub(super) struct LookupJson {
    tokens: Vec<u32>,
    model: Option<String>,
    tenant_id: Option<String>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
}

#[derive(Serialize)]
struct LookupAnswer<L, A> {
    event_id: String,
    layout_info: L,
    /// Addresses of the ranks, which kvatlas adds to LMCache's answer. Left out if no address is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    addresses: Option<A>,
}

/// Answers `POST /lookup`. If the request names no model, and only one model is known, answers about that model.
pub(super) async fn lookup(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let request: LookupJson = payload.json(Unknown::Ignored)?;
    let mut is_only = true;
    let (namespace, cache) = match named(request.model) {
        Some(model) => {
            let cache = ModelKey::of_tenant(model, request.tenant_id.unwrap_or_default());
            let namespace = cache.namespace();
            (
                namespace.map_err(|error| HttpRefusal::name("model", &error))?,
                cache,
            )
        }
        None if named(request.tenant_id).is_some_and(|tenant| tenant != DEFAULT_TENANT) => {
            let text = "tenant_id goes with model; send both, or none";
            return Err(HttpRefusal::BadRequest(text.to_owned()));
        }
        None => {
            let only;
            (only, is_only) = only_cache(index).await?;
            only
        }
    };
    let key = QueryKey::Tokens {
        tokens: request.tokens,
        lora_name: named(request.lora_name),
        cache_salt: named(request.cache_salt),
    };
    let scores = find(&shared, index, (&namespace, &cache), &key, None).await?;
    let answer = LookupAnswer {
        event_id: event_id(),
        layout_info: scores.by_location(),
        addresses: scores.addresses(),
    };
    Ok(json_response(&answer, Some(is_only && scores.are_exact())))
}

/// Returns the model from which a namespace's name is made. For any other name, returns a model of that name.
fn cache_of(name: &NamespaceName) -> ModelKey {
    ModelKey::of_namespace(name).unwrap_or_else(|| ModelKey::new(name.to_string()))
}

/// Returns the only model whose blocks are known, with its namespace, and whether it certainly is the only one. If
/// several models are known, those count that are used: a model whose last worker has gone is known for some time more.
///
/// Fails if no model is known, if several are known, or if there may be a model whose events have not come yet.
async fn only_cache(index: &Index) -> Result<((NamespaceName, ModelKey), bool), HttpRefusal> {
    if !index.source.knows_all_names() {
        let text =
            "models may be missing until everybody who publishes has been heard of; send model, or ask again";
        return Err(HttpRefusal::Unavailable(text.to_owned()));
    }
    let known = index.source.names().await?;
    let is_complete = known.is_complete();
    let mut own = models(known.used());
    if own.is_empty() {
        own = models(known.namespaces);
    }
    let mut own = own.into_iter();
    let Some(only) = own.next() else {
        let text = "no events of any model have come yet";
        return Err(HttpRefusal::Unavailable(text.to_owned()));
    };
    match own.next() {
        None => Ok((only, is_complete)),
        Some(_) => {
            let text = "several models are known; send model, and tenant_id if it has one";
            Err(HttpRefusal::BadRequest(text.to_owned()))
        }
    }
}

/// Returns the models of the namespaces `names`. A namespace of another hash scheme repeats blocks of a model that has a
/// namespace already, so it is not counted.
fn models(names: impl IntoIterator<Item = NamespaceName>) -> Vec<(NamespaceName, ModelKey)> {
    let caches = names.into_iter().map(|name| {
        let cache = cache_of(&name);
        (name, cache)
    });
    caches
        .filter(|(name, cache)| cache.chains().is_none() && name.as_str() != PROBE_NAME)
        .collect()
}

/// Returns a unique name for the request. Answers of LMCache's controller have such a name.
fn event_id() -> String {
    static ASKED: AtomicU64 = AtomicU64::new(1);
    format!("Lookup{}", ASKED.fetch_add(1, Ordering::Relaxed))
}
