//! `GET /workers`: the known workers, and how the engines of this process's bridge are followed.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use kvatlas_core::hash::Scheme;
use kvatlas_core::wire::{
    Address, ErrorCode, HolderStatusReply, Labels, ModelKey, NamespaceName, Profile, Rank, WireError,
    WorkerName, instance_among, is_pool, worker_of_instance,
};

use super::dialect::InstanceId;
use super::error::HttpRefusal;
use super::shared::{HttpShared, Index, json_response};
use kvatlas_process::registry::{EngineState, EngineStatus, ServerState};

/// Maximum number of workers in one answer.
const WORKERS_MAX: usize = 10_000;

/// Parameters of `GET /workers`: the model and the routing group of the wanted workers.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WorkerSelection {
    model_name: Option<String>,
    routing_group: Option<String>,
    /// Accepted and ignored, as in bodies of Dynamo's dialect.
    #[serde(rename = "tenant_id")]
    _tenant_id: Option<IgnoredAny>,
}

/// State of the connection over which the bridge receives the events of one rank.
#[derive(Debug, Serialize)]
struct Listener {
    endpoint: String,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

/// One worker with all its ranks, as `GET /workers` shows it.
#[derive(Debug, Serialize)]
struct WorkerJson {
    instance_id: InstanceId,
    /// Transport (for example `zmq`) of an engine that the bridge in this process follows. `nats` for all other
    /// workers.
    source: &'static str,
    status: &'static str,
    model_name: String,
    routing_group: String,
    /// Scheme of the hashes that name the worker's blocks. Absent if the hashes are the contract's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    scheme: Option<String>,
    block_size: u32,
    endpoints: BTreeMap<Rank, String>,
    listeners: BTreeMap<Rank, Listener>,
    /// Whether the state of all ranks of the worker in the index is certain. Absent if the index knows no rank of the
    /// worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    exact: Option<bool>,
    /// Addresses to which requests for the ranks go. Ranks without a known address are left out. `labels` leaves out
    /// the ranks without known labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    addresses: BTreeMap<Rank, Address>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<Rank, Labels>,
}

impl WorkerJson {
    /// Returns the entry of a worker that has no ranks yet, and no name: [`name_all`] gives it.
    fn new(model: &ModelKey, source: &'static str, status: &'static str, block_size: u32) -> Self {
        Self {
            instance_id: InstanceId::Text(String::new()),
            source,
            status,
            model_name: model.model.clone(),
            routing_group: model.tenant.clone(),
            scheme: model.scheme.as_ref().map(Scheme::to_string),
            block_size,
            endpoints: BTreeMap::new(),
            listeners: BTreeMap::new(),
            exact: None,
            addresses: BTreeMap::new(),
            labels: BTreeMap::new(),
        }
    }

    fn note_profile(&mut self, rank: Rank, profile: Profile) {
        let Profile { address, labels } = profile;
        self.addresses.extend(address.map(|address| (rank, address)));
        if !labels.is_empty() {
            self.labels.insert(rank, labels);
        }
    }
}

/// Entries of workers, by namespace and worker.
type Workers = BTreeMap<(NamespaceName, WorkerName), WorkerJson>;

/// Returns the key of an instance's entry. `None` if the model or the instance makes no name, such as the empty model
/// of a server that was registered without one.
fn key_of(model: &ModelKey, instance: &str) -> Option<(NamespaceName, WorkerName)> {
    Some((model.namespace().ok()?, worker_of_instance(instance).ok()?))
}

/// Gives each worker the name by which gateways call it.
fn name_all(workers: &mut Workers) {
    let named = |(namespace, worker): &(NamespaceName, WorkerName)| {
        let is_known = |other: &WorkerName| workers.contains_key(&(namespace.clone(), other.clone()));
        InstanceId::of_text(&instance_among(worker, &is_known))
    };
    let names: Vec<InstanceId> = workers.keys().map(named).collect();
    for (worker, name) in workers.values_mut().zip(names) {
        worker.instance_id = name;
    }
}

/// Returns all entries, ordered by model and instance.
fn in_order(workers: Workers, unnamed: Vec<WorkerJson>) -> Vec<WorkerJson> {
    let mut listed: Vec<WorkerJson> = workers.into_values().chain(unnamed).collect();
    listed.sort_by_cached_key(|worker| {
        let (model, group) = (worker.model_name.clone(), worker.routing_group.clone());
        (
            model,
            group,
            worker.scheme.clone(),
            worker.instance_id.clone().into_text(),
        )
    });
    listed
}

/// Answers `GET /workers` with all workers, at most [`WORKERS_MAX`], ordered by model and instance.
pub(super) async fn workers(
    State(shared): State<Arc<HttpShared>>,
    query: Result<Query<WorkerSelection>, QueryRejection>,
) -> Result<Response, HttpRefusal> {
    let Query(query) = query.map_err(|error| HttpRefusal::BadRequest(error.body_text()))?;
    let is_wanted = |model: &ModelKey| {
        query.model_name.as_ref().is_none_or(|name| *name == model.model)
            && query
                .routing_group
                .as_ref()
                .is_none_or(|group| *group == model.tenant)
    };
    let (index, engines) = shared.known();
    let (mut workers, mut unnamed) = (Workers::new(), Vec::new());
    if let Some(registry) = engines {
        let engines = registry.engines().into_iter();
        for state in engines.filter(|state| is_wanted(&state.engine.key.model)) {
            add_engine(&mut workers, state);
        }
        let servers = registry.servers().into_iter();
        for state in servers.filter(|state| is_wanted(&state.server.key().cache())) {
            add_server(&mut workers, &mut unnamed, state);
        }
    }
    if let Some(index) = index {
        add_known(&mut workers, index, is_wanted).await?;
    }
    check_count(workers.len() + unnamed.len())?;
    name_all(&mut workers);
    Ok(json_response(&in_order(workers, unnamed), None))
}

/// Checks that there are not too many workers for one answer. A list that was cut could hide workers.
fn check_count(count: usize) -> Result<(), WireError> {
    if count <= WORKERS_MAX {
        return Ok(());
    }
    let text = format!(
        "there are {count} workers, a list has at most {WORKERS_MAX}; ask for one model, or the admin \
         listener for /workers"
    );
    Err(WireError::new(ErrorCode::TooLarge, text))
}

/// Returns the name of an endpoint's transport. It is `grpc`, `http` or `nats` if the endpoint's address has such a
/// scheme, else `zmq`.
fn source_of(endpoint: &str) -> &'static str {
    match endpoint.split_once("://") {
        Some(("grpc" | "grpcs", _)) => "grpc",
        Some(("http" | "https", _)) => "http",
        Some(("nats", _)) => "nats",
        _ => "zmq",
    }
}

fn add_engine(workers: &mut Workers, state: EngineState) {
    let EngineState {
        engine,
        status,
        last_error,
    } = state;
    let Some(key) = key_of(&engine.key.model, &engine.key.instance) else {
        return;
    };
    let worker = workers.entry(key).or_insert_with(|| {
        let source = source_of(&engine.endpoint);
        WorkerJson::new(&engine.key.model, source, status.as_str(), engine.block_size)
    });
    worker.note_profile(engine.key.rank, engine.profile);
    if status == EngineStatus::Lost {
        worker.status = status.as_str();
    }
    worker.endpoints.insert(engine.key.rank, engine.endpoint.clone());
    let listener = Listener {
        endpoint: engine.endpoint,
        status: status.as_str(),
        last_error,
    };
    worker.listeners.insert(engine.key.rank, listener);
}

/// Adds the worker of a server whose engines the bridge does not follow yet. Does nothing if the bridge already follows
/// engines of that server. The entry of a server without a key goes to `unnamed`.
fn add_server(workers: &mut Workers, unnamed: &mut Vec<WorkerJson>, state: ServerState) {
    if !state.engines.is_empty() {
        return;
    }
    let model = state.server.key().cache();
    let ServerState {
        server, last_error, ..
    } = state;
    let status = EngineStatus::Pending.as_str();
    let listener = Listener {
        endpoint: server.url.clone(),
        status,
        last_error,
    };
    let (source, size) = (source_of(&server.url), server.block_size.unwrap_or_default());
    let mut worker = WorkerJson::new(&model, source, status, size);
    worker.endpoints.insert(0, server.url);
    worker.listeners.insert(0, listener);
    worker.note_profile(0, server.profile);
    match key_of(&model, &server.instance) {
        Some(key) => {
            workers.entry(key).or_insert(worker);
        }
        None => {
            worker.instance_id = InstanceId::of_text(&server.instance);
            unnamed.push(worker);
        }
    }
}

/// Adds the workers that the index knows, each with its state.
async fn add_known(
    workers: &mut Workers,
    index: &Index,
    is_wanted: impl Fn(&ModelKey) -> bool,
) -> Result<(), HttpRefusal> {
    for (name, status) in index.source.statuses().await? {
        // A namespace whose name is not made from a model counts as a model of that name.
        let model = ModelKey::of_namespace(&name);
        let model = model.unwrap_or_else(|| ModelKey::new(name.to_string()));
        if !is_wanted(&model) {
            continue;
        }
        for holder in status.holders {
            // A pool is left out: a gateway would send requests to it.
            if is_pool(&holder.worker) {
                continue;
            }
            let who = (&model, (name.clone(), holder.worker.clone()));
            let worker = add_rank(workers, who, status.block_size, holder.exact);
            let HolderStatusReply { address, labels, .. } = holder;
            worker.note_profile(holder.rank, Profile { address, labels });
        }
    }
    Ok(())
}

/// Adds a rank to its worker, and returns the worker's entry.
fn add_rank<'w>(
    workers: &'w mut Workers,
    (model, key): (&ModelKey, (NamespaceName, WorkerName)),
    block_size: u32,
    is_exact: bool,
) -> &'w mut WorkerJson {
    let entry = workers.entry(key);
    let worker = entry.or_insert_with(|| WorkerJson::new(model, "nats", "active", block_size));
    worker.exact = Some(worker.exact.unwrap_or(true) && is_exact);
    worker
}

#[cfg(test)]
mod tests {
    use kvatlas_engines::{Format, GroupFacts};
    use kvatlas_process::registry::{BesideEvents, Discovered, NewServer};

    use super::*;

    #[test]
    fn a_tenant_in_the_parameters_is_ignored_and_a_mistake_is_refused() {
        let read = |query: &str| {
            let uri = format!("/workers?model_name=m&{query}").parse().unwrap();
            Query::<WorkerSelection>::try_from_uri(&uri).map(|query| query.0.routing_group)
        };
        assert_eq!(read("tenant_id=acme").unwrap(), None);
        assert_eq!(
            read("tenant_id=acme&routing_group=g").unwrap().as_deref(),
            Some("g")
        );
        assert!(read("tenant=acme").is_err());
    }

    #[test]
    fn servers_that_have_not_answered_are_listed_with_and_without_a_model() {
        let mut workers = Workers::new();
        let mut unnamed = Vec::new();
        for (instance, model) in [("7", None), ("gpu_0", None), ("a", Some("m"))] {
            let server = NewServer {
                instance: instance.to_owned(),
                url: "http://h:8000".to_owned(),
                model: model.map(str::to_owned),
                tenant: String::new(),
                format: Format::Vllm,
                block_size: None,
                beside: BesideEvents::default(),
                groups: GroupFacts::default(),
                discovered: Discovered::default(),
                scheme: None,
                profile: Profile::default(),
                ttl: None,
            };
            let state = ServerState {
                server,
                engines: Vec::new(),
                last_error: Some("no answer".to_owned()),
                is_idle: false,
            };
            add_server(&mut workers, &mut unnamed, state);
        }
        name_all(&mut workers);
        let listed = serde_json::to_value(in_order(workers, unnamed)).unwrap();
        let listed = listed.as_array().unwrap().iter();
        let listed: Vec<_> = listed
            .map(|worker| {
                let error = &worker["listeners"]["0"]["last_error"];
                assert_eq!(
                    (&worker["status"], error),
                    (&"pending".into(), &"no answer".into())
                );
                (worker["model_name"].clone(), worker["instance_id"].clone())
            })
            .collect();
        let expected = [("", 7.into()), ("", "gpu_0".into()), ("m", "a".into())];
        assert_eq!(listed, expected.map(|(model, instance)| (model.into(), instance)));
    }

    #[test]
    fn a_list_is_whole_or_refused() {
        let model = ModelKey::new("m");
        let mut workers = Workers::new();
        for number in 0..WORKERS_MAX {
            let key = key_of(&model, &number.to_string()).unwrap();
            add_rank(&mut workers, (&model, key), 16, true);
        }
        assert!(check_count(workers.len()).is_ok());
        let key = key_of(&model, "another").unwrap();
        add_rank(&mut workers, (&model, key.clone()), 16, true);
        assert!(check_count(workers.len()).is_err());
        // One rank in doubt is enough.
        assert_eq!(
            add_rank(&mut workers, (&model, key), 16, false).exact,
            Some(false)
        );
    }
}
