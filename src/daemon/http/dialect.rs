//! Queries in the dialects of Mooncake and of Dynamo. A body with `model` is Mooncake's, and a body with `model_name` is
//! Dynamo's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use kvatlas_core::hash::{BlockHash, SequenceHash};
use kvatlas_core::wire::{
    DEFAULT_TENANT, ErrorCode, ModelKey, NamespaceName, QueryKey, WireError, WireLimits, WorkerName,
    usual_number, workers_of_instance,
};

use kvatlas_telemetry::labels::QueryKind;

use super::error::HttpRefusal;
use super::fields::Unknown;
use super::scores::{ScoreDialect, Scores};
use super::shared::{HttpShared, Index, Payload, json_response};

/// Fields of a query by tokens or by hashes, in the dialect of Mooncake or of Dynamo.
#[derive(Debug, Deserialize)]
pub(super) struct QueryJson {
    model: Option<String>,
    model_name: Option<String>,
    token_ids: Option<Vec<u32>>,
    block_hashes: Option<Vec<BlockHash>>,
    seq_hashes: Option<Vec<SequenceHash>>,
    /// Older name of the field `seq_hashes`.
    block_hash: Option<Vec<SequenceHash>>,
    lora_name: Option<String>,
    lora_id: Option<i64>,
    cache_salt: Option<String>,
    tenant_id: Option<String>,
    routing_group: Option<String>,
    instance_id: Option<InstanceId>,
    block_size: Option<u32>,
}

/// Name of an instance: a text in Mooncake's dialect, a number in Dynamo's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(
    untagged,
    expecting = "instance_id is neither a text nor a whole number from 0"
)]
pub(super) enum InstanceId {
    Text(String),
    Number(u64),
}

impl InstanceId {
    /// Returns [`Self::Number`] if the text is a number in its usual form (no sign, no leading zeros), else
    /// [`Self::Text`].
    pub(super) fn of_text(text: &str) -> Self {
        match usual_number(text) {
            Some(number) => Self::Number(number),
            None => Self::Text(text.to_owned()),
        }
    }

    pub(super) fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Number(number) => number.to_string(),
        }
    }
}

/// Returns the dialect of a request body (Mooncake's or Dynamo's), and the model and tenant that the body names.
pub(super) fn cache_of(
    model: Option<&str>,
    model_name: Option<&str>,
    tenant_id: Option<String>,
    routing_group: Option<String>,
) -> Result<(ScoreDialect, ModelKey), HttpRefusal> {
    match (model, model_name) {
        (Some(model), None) => Ok((
            ScoreDialect::Mooncake,
            ModelKey::of_tenant(model, tenant_id.unwrap_or_default()),
        )),
        // `tenant_id` is accepted and ignored in this dialect.
        (None, Some(model)) => Ok((
            ScoreDialect::Dynamo,
            ModelKey::of_tenant(model, routing_group.unwrap_or_default()),
        )),
        (None, None) => Err(HttpRefusal::BadRequest(
            "model or model_name is missing".to_owned(),
        )),
        (Some(_), Some(_)) => Err(HttpRefusal::BadRequest(
            "send model (Mooncake's dialect) or model_name (Dynamo's), not both".to_owned(),
        )),
    }
}

/// Returns the text, or `None` if the text is empty.
pub(super) fn named(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

impl QueryJson {
    fn cache(&self) -> Result<(ScoreDialect, ModelKey), HttpRefusal> {
        cache_of(
            self.model.as_deref(),
            self.model_name.as_deref(),
            self.tenant_id.clone(),
            self.routing_group.clone(),
        )
    }

    fn tokens(&mut self) -> Result<QueryKey, HttpRefusal> {
        let missing = || HttpRefusal::BadRequest("token_ids is missing".to_owned());
        let tokens = self.token_ids.take().ok_or_else(missing)?;
        let lora_name = named(self.lora_name.take());
        // If the adapter's number were ignored, the answer would be the base model's.
        if self.lora_id.is_some_and(|number| number > 0) {
            let text = match lora_name {
                Some(_) => "lora_id does not go beside lora_name; send lora_name alone",
                None => "lora_id is deprecated, and numbers of adapters are not known here; send lora_name",
            };
            return Err(HttpRefusal::BadRequest(text.to_owned()));
        }
        Ok(QueryKey::Tokens {
            tokens,
            lora_name,
            cache_salt: named(self.cache_salt.take()),
        })
    }

    /// Returns the hashes of a query. Those have the adapter in them, so clients may name it beside them: `lora_name`
    /// is ignored, and so is Mooncake's `cache_salt`. Dynamo's indexer refuses the salt.
    fn hashes(&mut self, words: ScoreDialect) -> Result<QueryKey, HttpRefusal> {
        let missing = |field: &str| HttpRefusal::BadRequest(format!("{field} is missing"));
        match words {
            ScoreDialect::Mooncake => {
                let hashes = self.seq_hashes.take().or_else(|| self.block_hash.take());
                let hashes = hashes.ok_or_else(|| missing("seq_hashes"))?;
                Ok(QueryKey::SequenceHashes(hashes))
            }
            ScoreDialect::Dynamo if self.cache_salt.is_some() => Err(HttpRefusal::BadRequest(
                "cache_salt is not accepted by /query_by_hash; block_hashes must already include it"
                    .to_owned(),
            )),
            ScoreDialect::Dynamo => {
                let hashes = self.block_hashes.take().ok_or_else(|| missing("block_hashes"))?;
                Ok(QueryKey::BlockHashes(hashes))
            }
        }
    }

    fn check_block_size(&self, words: ScoreDialect, found: &Scores) -> Result<(), HttpRefusal> {
        match (words, self.block_size) {
            (ScoreDialect::Mooncake, None) => {
                Err(HttpRefusal::BadRequest("block_size is missing".to_owned()))
            }
            // Dynamo's clients may leave the block size out. A client with another block size computes other hashes, so
            // no holder can have its blocks.
            (_, Some(asked)) if asked != found.block_size => {
                let size = found.block_size;
                let text = format!("the blocks of this model have {size} tokens here, not {asked}");
                Err(HttpRefusal::BadRequest(text))
            }
            _ => Ok(()),
        }
    }
}

/// Values by which a query names blocks. Queries by tokens and queries by hashes have different routes.
#[derive(Clone, Copy)]
enum By {
    Tokens,
    Hashes,
}

/// Answers `POST /query`, the query by tokens.
pub(super) async fn query(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    answer(&shared, &payload, By::Tokens).await
}

/// Answers `POST /query_by_hash`, the query by hashes.
pub(super) async fn query_by_hash(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    answer(&shared, &payload, By::Hashes).await
}

async fn answer(shared: &HttpShared, payload: &Payload, by: By) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let mut request: QueryJson = payload.json(Unknown::Ignored)?;
    let (words, cache) = request.cache()?;
    let namespace = cache
        .namespace()
        .map_err(|error| HttpRefusal::name("model", &error))?;
    let key = match by {
        By::Tokens => request.tokens()?,
        By::Hashes => request.hashes(words)?,
    };
    let instance = request
        .instance_id
        .take()
        .filter(|_| words == ScoreDialect::Mooncake);
    let instance = named(instance.map(InstanceId::into_text));
    let workers = instance.as_deref().map(workers_of_instance);
    let workers = workers
        .transpose()
        .map_err(|error| HttpRefusal::name("instance_id", &error))?;
    let mut scores = find(shared, index, (&namespace, &cache), &key, workers).await?;
    if let Some(instance) = &instance {
        scores.keep(instance);
    }
    request.check_block_size(words, &scores)?;
    Ok(respond(&scores, words, &cache))
}

/// Finds the holders that have leading blocks of a prompt in `namespace`. `key` has the prompt's tokens or hashes.
/// `cache` is the model of that namespace. `workers` limits the search to the ranks of these workers. Counts the query.
///
/// # Errors
///
/// [`HttpRefusal::Contract`] if the query breaks the wire contract.
pub(super) async fn find(
    shared: &HttpShared,
    index: &Index,
    (namespace, cache): (&NamespaceName, &ModelKey),
    key: &QueryKey,
    workers: Option<Vec<WorkerName>>,
) -> Result<Scores, HttpRefusal> {
    let started = Instant::now();
    let kind = match key {
        QueryKey::Tokens { .. } => QueryKind::Tokens,
        QueryKey::BlockHashes(_) => QueryKind::BlockHashes,
        _ => QueryKind::SequenceHashes,
    };
    check_texts(key, &index.source.limits())?;
    match index.source.find(namespace, key, workers).await {
        Ok(found) => {
            let prompt = std::iter::once(found.prompt);
            index.metrics.count(namespace, kind, 1, started.elapsed(), prompt);
            let lacks_some = found.lacks_some();
            let is_known = |worker: &WorkerName| index.source.knows_worker(namespace, worker);
            Ok(Scores::new(found.block_size, found.holders, lacks_some, is_known))
        }
        Err(error) => {
            let is_unheard = index.source.is_unheard(namespace, &error);
            let followed = is_unheard.then(|| shared.followed(cache)).flatten();
            let found = followed.ok_or(error);
            Ok(found.inspect_err(|error| index.errors.failed(error.code, &error.text))?)
        }
    }
}

/// Checks that no text that enters the block hashes (LoRA name, cache salt) is longer than the contract allows.
fn check_texts(key: &QueryKey, limits: &WireLimits) -> Result<(), WireError> {
    let QueryKey::Tokens {
        lora_name,
        cache_salt,
        ..
    } = key
    else {
        return Ok(());
    };
    for (field, text) in [("lora_name", lora_name), ("cache_salt", cache_salt)] {
        let (bytes, bytes_max) = (text.as_ref().map_or(0, String::len), limits.text_bytes_max);
        if bytes > bytes_max {
            let text = format!("{field} has {bytes} bytes; at most {bytes_max} are allowed");
            return Err(WireError::new(ErrorCode::TooLarge, text));
        }
    }
    Ok(())
}

fn respond(scores: &Scores, words: ScoreDialect, cache: &ModelKey) -> Response {
    #[derive(Serialize)]
    struct Dynamo<S, I, A> {
        scores: S,
        frequencies: [u32; 0],
        instances: I,
        /// Addresses of the ranks, an addition of kvatlas to Dynamo's answer. Left out if no address is known.
        #[serde(skip_serializing_if = "Option::is_none")]
        addresses: Option<A>,
    }

    let exact = Some(scores.are_exact());
    match words {
        ScoreDialect::Mooncake => {
            let tenant = cache.tenant.as_str();
            let answer = std::collections::BTreeMap::from([(tenant, scores.by_instance(words))]);
            json_response(&answer, exact)
        }
        ScoreDialect::Dynamo => json_response(
            &Dynamo {
                scores: scores.by_rank(),
                // How often blocks were looked up. kvatlas does not count that, and Dynamo leaves out counts of 0.
                frequencies: [],
                instances: scores.by_instance(words),
                addresses: scores.addresses(),
            },
            exact,
        ),
    }
}

/// Returns the keys under which `/dump` lists namespaces: that of [`label_of`], or the namespace's name if another
/// namespace has the same key. Names have no colon, so no two keys are the same.
pub(super) fn labels_of(namespaces: &[&NamespaceName]) -> Vec<String> {
    let labels: Vec<String> = namespaces.iter().map(|namespace| label_of(namespace)).collect();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for label in &labels {
        *counts.entry(label).or_default() += 1;
    }
    let unique = namespaces.iter().zip(&labels).map(|(namespace, label)| {
        let is_unique = counts.get(label.as_str()) == Some(&1);
        if is_unique {
            label.clone()
        } else {
            namespace.to_string()
        }
    });
    unique.collect()
}

/// Returns `MODEL:TENANT` if the namespace is made from a model and names no hash scheme, else `NAMESPACE:default`.
fn label_of(namespace: &NamespaceName) -> String {
    match ModelKey::of_namespace(namespace).filter(|key| key.scheme.is_none()) {
        Some(key) => format!("{}:{}", key.model, key.tenant),
        None => format!("{namespace}:{DEFAULT_TENANT}"),
    }
}

/// Returns the body `{"status": "ok"}`.
pub(super) fn status_ok() -> Value {
    json!({ "status": "ok" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_namespace_has_a_key_of_its_own() {
        let names = [
            "a_b",
            "a_ub",
            "x_cy",
            "x_ty_cdefault",
            "m_tacme",
            "m_sllm-d-xxh64",
        ];
        let names = names.map(|name| NamespaceName::new(name).unwrap());
        assert_eq!(
            labels_of(&names.each_ref()),
            [
                "a_b",
                "a_ub",
                "x_cy",
                "x_ty_cdefault",
                "m:acme",
                "m_sllm-d-xxh64:default"
            ]
        );
    }
}
