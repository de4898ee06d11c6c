//! `POST /register` and `POST /unregister`, in both dialects.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use kvatlas_core::wire::{Address, Labels, ModelKey, Profile, Rank, worker_of_instance};
use kvatlas_engines::{Format, GroupFacts};

use super::caller::Caller;
use super::dialect::{InstanceId, cache_of, status_ok};
use super::error::HttpRefusal;
use super::fields::Unknown;
use super::scores::ScoreDialect;
use super::shared::{HttpShared, Payload, json_response};
use kvatlas_process::registry::{BesideEvents, read_scheme};
use kvatlas_process::registry::{
    Discovered, EngineKey, GivenEngine, MeantEngines, NewEngine, NewServer, RemovedEngines, follow_patiently,
};

/// Allowed times to live of a registration, in milliseconds: from 10 seconds to a day.
const TTL_MS: RangeInclusive<u64> = 10_000..=86_400_000;

/// Fields of a request that tells the bridge to follow an engine, that is, to receive its events. The struct has the
/// fields of both dialects, Mooncake's and Dynamo's.
#[derive(Debug, Deserialize)]
pub(super) struct RegisterJson {
    instance_id: InstanceId,
    endpoint: String,
    replay_endpoint: Option<String>,
    r#type: Option<String>,
    modelname: Option<String>,
    model: Option<String>,
    model_name: Option<String>,
    tenant_id: Option<String>,
    routing_group: Option<String>,
    block_size: Option<u32>,
    dp_rank: Option<Rank>,
    lora_name: Option<String>,
    adapters: Option<String>,
    salts: Option<String>,
    lookahead: Option<String>,
    tiers: Option<String>,
    groups: Option<Vec<String>>,
    hybrid: Option<bool>,
    eagle: Option<bool>,
    divergent_hits: Option<bool>,
    address: Option<Address>,
    labels: Option<Labels>,
    scheme: Option<String>,
    ttl_ms: Option<u64>,
}

impl RegisterJson {
    fn group_facts(&self) -> Result<GroupFacts, HttpRefusal> {
        let kinds = GroupFacts::read_kinds(self.groups.iter().flatten().map(String::as_str));
        Ok(GroupFacts {
            kinds: kinds.map_err(HttpRefusal::BadRequest)?,
            is_hybrid: self.hybrid.unwrap_or_default(),
            has_eagle_drop: self.eagle.unwrap_or_default(),
            has_divergent_hits: self.divergent_hits.unwrap_or_default(),
        })
    }

    fn ttl(&self) -> Result<Option<Duration>, HttpRefusal> {
        if self.ttl_ms.is_some_and(|ttl| !TTL_MS.contains(&ttl)) {
            let text = format!("ttl_ms goes from {} to {}", TTL_MS.start(), TTL_MS.end());
            return Err(HttpRefusal::BadRequest(text));
        }
        Ok(self.ttl_ms.map(Duration::from_millis))
    }

    /// Returns the engine to follow, and the dialect of the request.
    fn into_engine(self) -> Result<(ScoreDialect, GivenEngine), HttpRefusal> {
        if self.lora_name.as_deref().is_some_and(|name| !name.is_empty()) {
            let text = "an engine is not registered for one adapter: its events name the adapter of each block, or say none; leave \
                        lora_name out";
            return Err(HttpRefusal::BadRequest(text.to_owned()));
        }
        let groups = self.group_facts()?;
        let ttl = self.ttl()?;
        let (words, model) = cache_of(
            self.modelname.or(self.model).as_deref(),
            self.model_name.as_deref(),
            self.tenant_id,
            self.routing_group,
        )?;
        let format = format_of(self.r#type.as_deref())?;
        let beside = BesideEvents::parse(
            self.adapters.as_deref(),
            self.salts.as_deref(),
            self.lookahead.as_deref(),
            self.tiers.as_deref(),
        );
        let beside = beside.map_err(HttpRefusal::BadRequest)?;
        let scheme = self.scheme.as_deref().map(read_scheme).transpose();
        let scheme = scheme.map_err(HttpRefusal::BadRequest)?;
        let profile = Profile {
            address: self.address,
            labels: self.labels.unwrap_or_default(),
        };
        let instance = self.instance_id.into_text();
        let replay = self.replay_endpoint.filter(|endpoint| !endpoint.is_empty());
        if GivenEngine::is_server(&self.endpoint, format) {
            if replay.is_some() {
                let text = "a server tells its sockets; leave replay_endpoint out";
                return Err(HttpRefusal::BadRequest(text.to_owned()));
            }
            let server = NewServer {
                instance,
                url: self.endpoint,
                model: Some(model.model),
                tenant: model.tenant,
                format,
                block_size: self.block_size,
                beside,
                groups,
                discovered: Discovered::default(),
                scheme,
                profile,
                ttl,
            };
            return Ok((words, GivenEngine::Server(server)));
        }
        let rank = match (words, self.dp_rank) {
            (ScoreDialect::Mooncake, None) => return Err(missing("dp_rank")),
            (_, rank) => rank.unwrap_or_default(),
        };
        let engine = NewEngine {
            key: EngineKey {
                instance,
                model: model.speaking(scheme),
                rank,
            },
            endpoint: self.endpoint,
            replay,
            format,
            block_size: self.block_size.ok_or_else(|| missing("block_size"))?,
            topic: String::new(),
            beside,
            groups,
            profile,
            discovery: None,
            ttl,
        };
        Ok((words, GivenEngine::Publisher(engine)))
    }
}

/// Takes `POST /register`: begins to follow an engine.
pub(super) async fn register(
    State(shared): State<Arc<HttpShared>>,
    caller: Caller,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let engines = shared.engines()?;
    let request: RegisterJson = payload.json(Unknown::Ignored)?;
    let (words, engine) = request.into_engine()?;
    engines.may_register(&engine, caller.peer)?;
    let attempt = || {
        engines
            .register_given(engine.clone())
            .map_err(|refusal| vec![refusal])
    };
    if let Err(refused) = follow_patiently(attempt).await
        && let Some(refusal) = refused.into_iter().next()
    {
        return Err(refusal.into());
    }
    Ok(match words {
        ScoreDialect::Mooncake => json_response(
            &json!({"status": "registered successfully", "instance_id": engine.instance()}),
            None,
        ),
        ScoreDialect::Dynamo => {
            let mut response = json_response(&status_ok(), None);
            *response.status_mut() = StatusCode::CREATED;
            response
        }
    })
}

fn missing(field: &str) -> HttpRefusal {
    HttpRefusal::BadRequest(format!("{field} is missing"))
}

fn format_of(word: Option<&str>) -> Result<Format, HttpRefusal> {
    let Some(word) = word else {
        return Ok(Format::Vllm);
    };
    Format::from_word(word).ok_or_else(|| {
        let known = Format::WORDS.join(", ");
        HttpRefusal::BadRequest(format!("type is {word:?}; known are {known}"))
    })
}

#[derive(Debug, Deserialize)]
pub(super) struct UnregisterJson {
    instance_id: InstanceId,
    modelname: Option<String>,
    model: Option<String>,
    model_name: Option<String>,
    tenant_id: Option<String>,
    routing_group: Option<String>,
    dp_rank: Option<Rank>,
}

/// Takes `POST /unregister`: stops following the engines that the request names.
pub(super) async fn unregister(
    State(shared): State<Arc<HttpShared>>,
    _caller: Caller,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let engines = shared.engines()?;
    let request: UnregisterJson = payload.json(Unknown::Ignored)?;
    // In Dynamo's dialect, a request without a routing group means all groups.
    let names_group = request.routing_group.is_some();
    let (words, model) = cache_of(
        request.modelname.or(request.model).as_deref(),
        request.model_name.as_deref(),
        request.tenant_id,
        request.routing_group,
    )?;
    let instance = request.instance_id.into_text();
    let means_all_tenants = words == ScoreDialect::Dynamo && !names_group;
    let meant = MeantEngines::Named {
        instance: instance.clone(),
        model: model.model.clone(),
        tenant: (!means_all_tenants).then(|| model.tenant.clone()),
        rank: request.dp_rank,
    };
    // No engine has a name that is too long, and the bridge may keep the names.
    let removed = match worker_of_instance(&instance).is_ok() && model.namespace().is_ok() {
        true => engines.unregister(&meant),
        false => RemovedEngines::new(),
    };
    if removed.is_empty() && words == ScoreDialect::Dynamo {
        return Err(HttpRefusal::NotFound(format!(
            "instance {instance} of {model} is not followed"
        )));
    }
    Ok(match words {
        ScoreDialect::Dynamo => json_response(&status_ok(), None),
        ScoreDialect::Mooncake => {
            let removed: Vec<String> = removed.iter().map(mooncake_label).collect();
            let answer = json!({"status": "unregistered successfully", "removed_instances": removed});
            json_response(&answer, None)
        }
    })
}

fn mooncake_label(key: &EngineKey) -> String {
    let ModelKey { tenant, .. } = &key.model;
    format!("{}|{tenant}|{}", key.instance, key.rank)
}
