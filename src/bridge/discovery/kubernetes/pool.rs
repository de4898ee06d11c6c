//! Engines that are the pods of an InferencePool, a kind of object of the Gateway API's extension for inference. The
//! bridge watches the pool's selector and ports, and follows their changes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::super::spec::EngineDefaults;
use super::super::reports::Reports;
use super::super::spec::{PodsPlace, PoolPlace};
use super::pods::{SharedPlace, look, watch_pods};
use super::watch::Watched;
use super::{ObjectScope, Objects};

/// API group of InferencePools.
pub(super) const GROUP: &str = "inference.networking.k8s.io";

/// Time after which a pool that cannot be followed counts as another failure.
const FAILED_AGAIN: Duration = Duration::from_secs(10);
/// Protocol of a pool whose servers speak gRPC.
const GRPC_PROTOCOL: &str = "kubernetes.io/h2c";
/// Maximum number of target ports of a pool; the API allows eight.
const PORTS_MAX: usize = 64;

/// Looks for the pods of the pool of `place` for ever.
pub(super) async fn run(
    client: Client,
    namespace: String,
    place: &PoolPlace,
    defaults: &EngineDefaults,
    reports: &Reports,
) {
    let (told, pool) = watch::channel(None);
    let watching = watch_pool(client.clone(), &namespace, place, reports, told);
    let following = follow_pool(client, &namespace, pool, defaults, reports);
    tokio::join!(watching, following);
}

/// Watches the pool. After each change, sends to `told` the settings by which the pool's pods are found, or an error in
/// words if the pods cannot be followed.
async fn watch_pool(
    client: Client,
    namespace: &str,
    place: &PoolPlace,
    reports: &Reports,
    told: watch::Sender<Option<Result<PodsPlace, String>>>,
) {
    let kind = GroupVersionKind::gvk(GROUP, "v1", "InferencePool");
    let resource = ApiResource::from_gvk_with_plural(&kind, Objects::InferencePools.plural());
    let api: Api<DynamicObject> = Api::namespaced_with(client, namespace, &resource);
    let scope = ObjectScope {
        objects: Objects::InferencePools,
        namespace: namespace.to_owned(),
    };
    let watched = Watched {
        api,
        selected: ListParams::default().fields(&format!("metadata.name={}", place.name)),
        scope: &scope,
        reports,
        read: &|pool: &DynamicObject| pods_of(&pool.data),
        take: &mut |known| {
            let pods = known.values().next().cloned();
            let pods = pods.unwrap_or_else(|| {
                Err(format!(
                    "there is no InferencePool {} in the namespace {namespace}",
                    place.name
                ))
            });
            told.send_if_modified(|before| {
                let is_news = before.as_ref() != Some(&pods);
                *before = Some(pods);
                is_news
            });
        },
    };
    watched.run().await;
}

/// Follows the pods that the pool selects at present.
async fn follow_pool(
    client: Client,
    namespace: &str,
    mut pool: watch::Receiver<Option<Result<PodsPlace, String>>>,
    defaults: &EngineDefaults,
    reports: &Reports,
) {
    let mut shared: Option<SharedPlace> = None;
    loop {
        let pods = pool.borrow_and_update().clone();
        let changed = match pods {
            None => pool.changed().await,
            Some(Err(error)) => {
                // A pool that cannot be followed has no engines.
                reports.know(Vec::new());
                loop {
                    // Again and again, so that the rate of failures shows it as long as it lasts.
                    reports.fail(&error);
                    if let Ok(changed) = timeout(FAILED_AGAIN, pool.changed()).await {
                        break changed;
                    }
                }
            }
            Some(Ok(place)) => {
                let known = shared.get_or_insert_with(|| {
                    let shared = Arc::new(Mutex::new(place.clone()));
                    reports.answer_by(look(client.clone(), namespace, Arc::clone(&shared), defaults));
                    shared
                });
                *known.lock() = place.clone();
                let pods = watch_pods(client.clone(), namespace.to_owned(), &place, defaults, reports);
                // If the selector has changed, the known pods stay until the pods of the new selector are listed.
                tokio::select! {
                    changed = pool.changed() => changed,
                    () = pods => Ok(()),
                }
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Reads the settings by which a pool's pods are found; an error in words if the pods cannot be followed.
fn pods_of(pool: &Value) -> Result<PodsPlace, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Spec {
        selector: Selector,
        target_ports: Vec<Port>,
        app_protocol: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Selector {
        match_labels: BTreeMap<String, String>,
    }
    #[derive(Deserialize)]
    struct Port {
        number: u16,
    }

    let spec = pool.get("spec").cloned().unwrap_or_default();
    let spec: Spec =
        serde_json::from_value(spec).map_err(|error| format!("the InferencePool cannot be read: {error}"))?;
    let labels: Vec<String> = spec
        .selector
        .match_labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    if labels.is_empty() {
        return Err("the InferencePool selects no labels".to_owned());
    }
    let ports: Vec<u16> = spec.target_ports.iter().map(|port| port.number).collect();
    if ports.is_empty() || ports.contains(&0) || ports.len() > PORTS_MAX {
        return Err(format!(
            "the InferencePool has no target ports that can be followed: {ports:?}"
        ));
    }
    Ok(PodsPlace {
        selector: labels.join(","),
        namespace: None,
        ports,
        is_grpc: spec.app_protocol.as_deref() == Some(GRPC_PROTOCOL),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pool_selects_pods_and_has_a_port() {
        let pool = |labels: Value, ports: Value| {
            pods_of(
                &json!({"spec": {"selector": {"matchLabels": labels}, "targetPorts": ports, "endpointPickerRef": {"name": "epp"}}}),
            )
        };
        let labels = json!({"app": "vllm", "role": "decode"});
        let expected = PodsPlace {
            selector: "app=vllm,role=decode".to_owned(),
            namespace: None,
            ports: vec![8000],
            is_grpc: false,
        };
        assert_eq!(pool(labels.clone(), json!([{"number": 8000}])), Ok(expected));
        // Data-parallel ranks, each with a port of its own.
        let ranks = pool(labels.clone(), json!([{"number": 8000}, {"number": 8001}])).unwrap();
        assert!(ranks.ports == [8000, 8001] && ranks.is_ranked());
        let grpc = json!({"spec": {"selector": {"matchLabels": labels}, "targetPorts": [{"number": 1}], "appProtocol": "kubernetes.io/h2c"}});
        assert!(pods_of(&grpc).unwrap().is_grpc);
        for (labels, ports, words) in [
            (json!({}), json!([{"number": 8000}]), "no labels"),
            (
                labels.clone(),
                json!([{"number": 8000}, {"number": 0}]),
                "no target ports",
            ),
            (labels.clone(), json!([]), "no target ports"),
            (labels, json!([{"number": 70000}]), "cannot be read"),
            (json!(null), json!([{"number": 8000}]), "cannot be read"),
        ] {
            let error = pool(labels, ports).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(pods_of(&json!({})).is_err());
    }
}
