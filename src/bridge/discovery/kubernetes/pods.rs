//! Pods with given labels.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::runtime::watcher;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::daemon::http::{Discovered, NewServer};

use super::super::super::spec::EngineDefaults;
use super::super::spec::PodsPlace;
use super::super::{Look, Reports, SERVER_PORT, server_at};
use super::{LOOK_PATIENCE, Objects, Reading, confirm, engines, unanswered, watch};

/// The container's port that is taken where several are declared.
pub(super) const PORT_NAME: &str = "http";
/// Most bytes of a pod's labels that are kept.
const LABEL_BYTES_MAX: usize = 4096;

/// The place where pods are looked for; an InferencePool may change it.
pub(super) type SharedPlace = Arc<Mutex<PodsPlace>>;

/// Looks for the pods of `place` for ever.
pub(super) async fn run(
    client: Client,
    namespace: String,
    place: &PodsPlace,
    defaults: &EngineDefaults,
    reports: &Reports,
) {
    let shared = SharedPlace::new(Mutex::new(place.clone()));
    reports.answer_by(look(client.clone(), &namespace, shared, defaults));
    watch_pods(client, namespace, place, defaults, reports).await;
}

/// Watches the pods of `place` for ever.
pub(super) async fn watch_pods(
    client: Client,
    namespace: String,
    place: &PodsPlace,
    defaults: &EngineDefaults,
    reports: &Reports,
) {
    let api: Api<Pod> = Api::namespaced(client, &namespace);
    let config = watcher::Config::default().labels(&place.selector);
    let reading = reading(namespace);
    let read = |pod: &Pod| server_of(pod, place, defaults);
    watch(api, config, &reading, reports, read, |known| {
        reports.know(engines(known.values().flatten()));
    })
    .await;
}

fn reading(namespace: String) -> Reading {
    Reading {
        objects: Objects::Pods,
        namespace,
    }
}

/// Looks at single pods.
pub(super) fn look(client: Client, namespace: &str, place: SharedPlace, defaults: &EngineDefaults) -> Look {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    let (reading, defaults) = (reading(namespace.to_owned()), defaults.clone());
    Box::new(move |server| {
        let (api, reading, defaults) = (api.clone(), reading.clone(), defaults.clone());
        let place = place.lock().clone();
        Box::pin(async move {
            let asked = timeout(LOOK_PATIENCE, api.get_opt(&server.instance)).await;
            let pod = asked.map_err(|_| unanswered())?;
            let pod = pod.map_err(|error| reading.of_look(error))?;
            let now = pod.and_then(|pod| server_of(&pod, &place, &defaults));
            confirm(&server, now.into_iter())
        })
    })
}

/// The engine of a pod; none where it has no address, has ended, or is being deleted.
fn server_of(pod: &Pod, place: &PodsPlace, defaults: &EngineDefaults) -> Option<NewServer> {
    let status = pod.status.as_ref()?;
    let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    if has_ended || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let host = status.pod_ip.as_deref().filter(|address| !address.is_empty())?;
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice());
    let port = place
        .port
        .or_else(|| declared_port(containers.unwrap_or_default()));
    let discovered = Discovered {
        identity: pod.metadata.uid.clone().unwrap_or_default(),
        labels: bounded(pod.metadata.labels.as_ref()),
    };
    let name = pod.metadata.name.clone()?;
    Some(server_at(
        name,
        host,
        port.unwrap_or(SERVER_PORT),
        discovered,
        defaults,
    ))
}

/// The port called `http`, or else the only one that containers declare.
fn declared_port(containers: &[Container]) -> Option<u16> {
    let mut ports = containers
        .iter()
        .flat_map(|container| container.ports.iter().flatten());
    let named = ports.clone().find(|port| port.name.as_deref() == Some(PORT_NAME));
    let only = ports.next().filter(|_| ports.next().is_none());
    u16::try_from(named.or(only)?.container_port)
        .ok()
        .filter(|port| *port > 0)
}

/// The labels that fit, in the order of their keys.
fn bounded(labels: Option<&BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let mut left = LABEL_BYTES_MAX;
    let mut fits = |key: &str, value: &str| match left.checked_sub(key.len() + value.len()) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    let labels = labels.into_iter().flatten();
    let labels = labels.filter(|(key, value)| fits(key, value));
    labels.map(|(key, value)| (key.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    static PLACE: PodsPlace = PodsPlace {
        selector: String::new(),
        namespace: None,
        port: None,
    };

    fn pod(name: &str, uid: &str, change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {"name": name, "uid": uid, "labels": {"app": "vllm"}},
            "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": 8100}]}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1"},
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn server(pod: &Pod, place: &PodsPlace) -> Option<NewServer> {
        server_of(pod, place, &EngineDefaults::default())
    }

    #[test]
    fn a_pod_is_an_engine_by_its_name_address_and_uid() {
        let found = server(&pod("vllm-0", "u1", |_| {}), &PLACE).unwrap();
        assert_eq!(
            (found.instance.as_str(), found.url.as_str()),
            ("vllm-0", "http://10.0.0.1:8100")
        );
        assert_eq!(found.discovered.identity, "u1");
        assert_eq!(found.discovered.labels["app"], "vllm");
        let given = PodsPlace {
            port: Some(9000),
            ..PLACE.clone()
        };
        let url = |change: fn(&mut Value), place| server(&pod("a", "u", change), place).unwrap().url;
        assert_eq!(url(|_| {}, &given), "http://10.0.0.1:9000");
        assert_eq!(
            url(|pod| pod["status"]["podIP"] = json!("fd00::1"), &PLACE),
            "http://[fd00::1]:8100"
        );
        // Of several ports, the one with the name; without one, the engine's usual.
        let several = json!([{"containerPort": 5557}, {"containerPort": 8200, "name": "http"}]);
        assert_eq!(
            url(
                |pod| pod["spec"]["containers"][0]["ports"] =
                    json!([{"containerPort": 5557}, {"containerPort": 5558}]),
                &PLACE
            ),
            "http://10.0.0.1:8000"
        );
        let named = pod("a", "u", |pod| pod["spec"]["containers"][0]["ports"] = several);
        assert_eq!(server(&named, &PLACE).unwrap().url, "http://10.0.0.1:8200");
        let mut labels: BTreeMap<String, String> =
            (0..3).map(|key| (key.to_string(), "x".repeat(2000))).collect();
        assert_eq!(bounded(Some(&labels)).len(), 2);
        labels.clear();
        assert!(bounded(Some(&labels)).is_empty());
    }

    #[test]
    fn a_pod_that_has_no_address_or_ends_is_none() {
        let changes: [fn(&mut Value); 5] = [
            |pod| pod["status"]["podIP"] = json!(null),
            |pod| pod["status"]["podIP"] = json!(""),
            |pod| pod["status"]["phase"] = json!("Succeeded"),
            |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-26T09:00:00Z"),
            |pod| pod["metadata"]["name"] = json!(null),
        ];
        for change in changes {
            assert_eq!(server(&pod("a", "u", change), &PLACE), None);
        }
        assert!(
            server(
                &pod("a", "u", |pod| pod["status"]["phase"] = json!("Pending")),
                &PLACE
            )
            .is_some()
        );
    }
}
