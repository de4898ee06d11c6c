//! Engines as pods with given labels.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use kvatlas_core::wire::Labels;
use parking_lot::Mutex;
use tokio::time::timeout;

use kvatlas_process::registry::{Discovered, NewServer};

use super::super::super::spec::EngineDefaults;
use super::super::found::{ServerPort, server_at};
use super::super::reports::{EngineLookup, Reports};
use super::super::spec::PodsPlace;
use super::ports::{declared, is_active, port_of, ranked};
use super::watch::Watched;
use super::{LOOK_PATIENCE, ObjectScope, Objects, confirm, engines, unanswered};

/// Maximum size of a pod's labels that are kept, in bytes.
const LABEL_BYTES_MAX: usize = 4096;

/// Place where pods are looked for, shared because a change of an InferencePool replaces it.
pub(super) type SharedPlace = Arc<Mutex<PodsPlace>>;

/// Looks for the pods of `place` for ever, and lets the bridge ask about single pods.
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
    let watched = Watched {
        api,
        selected: ListParams::default().labels(&place.selector),
        scope: &reading(namespace),
        reports,
        read: &|pod: &Pod| servers_of(pod, place, defaults),
        take: &mut |known| reports.know(engines(known.values().flatten())),
    };
    watched.run().await;
}

fn reading(namespace: String) -> ObjectScope {
    ObjectScope {
        objects: Objects::Pods,
        namespace,
    }
}

/// Makes the function that asks the API about the pod of one engine.
pub(super) fn look(
    client: Client,
    namespace: &str,
    place: SharedPlace,
    defaults: &EngineDefaults,
) -> EngineLookup {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    let (reading, defaults) = (reading(namespace.to_owned()), defaults.clone());
    Box::new(move |server| {
        let (api, reading, defaults) = (api.clone(), reading.clone(), defaults.clone());
        let place = place.lock().clone();
        Box::pin(async move {
            let asked = timeout(LOOK_PATIENCE, api.get_opt(&server.discovered.object)).await;
            let pod = asked.map_err(|_| unanswered())?;
            let pod = pod.map_err(|error| reading.of_look(error))?;
            let now = pod.map(|pod| servers_of(&pod, &place, &defaults));
            confirm(&server, now.into_iter().flatten())
        })
    })
}

/// Returns the engines of a pod: one, or one for each of several ports. The list is empty if the pod has no address, has
/// ended, or is being deleted.
fn servers_of(pod: &Pod, place: &PodsPlace, defaults: &EngineDefaults) -> Vec<NewServer> {
    let status = pod.status.as_ref();
    let has_ended = matches!(
        status.and_then(|status| status.phase.as_deref()),
        Some("Succeeded" | "Failed")
    );
    let host = status.and_then(|status| status.pod_ip.as_deref());
    let host = host.filter(|address| !address.is_empty());
    let (Some(host), Some(name)) = (host, pod.metadata.name.as_deref()) else {
        return Vec::new();
    };
    if has_ended || pod.metadata.deletion_timestamp.is_some() {
        return Vec::new();
    }
    let discovered = Discovered {
        identity: pod.metadata.uid.clone().unwrap_or_default(),
        object: name.to_owned(),
        labels: bounded(pod.metadata.labels.as_ref()),
    };
    let chosen = pod.metadata.labels.as_ref();
    let chosen = chosen.map_or(Labels::NONE, |labels| defaults.pod_labels.of(labels));
    let server = |(index, port): (usize, ServerPort)| {
        let name = match place.is_ranked() {
            true => ranked(name, index),
            false => name.to_owned(),
        };
        let mut server = server_at(name, host, port, discovered.clone(), defaults);
        server.profile.labels = chosen.clone();
        server
    };
    ports_of(pod, place).into_iter().map(server).collect()
}

/// Returns the ports of a pod at which the bridge asks the servers of the pod's engines. Each port comes with its index
/// among the ports of `place`.
fn ports_of(pod: &Pod, place: &PodsPlace) -> Vec<(usize, ServerPort)> {
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice());
    let containers = containers.unwrap_or_default();
    if place.ports.is_empty() {
        return vec![(0, port_of(declared(containers), None))];
    }
    let given = place.ports.iter().copied().enumerate();
    let active = given.filter(|(_, port)| is_active(pod.metadata.annotations.as_ref(), *port));
    let port = |(index, number)| {
        let mut port = port_of(declared(containers), Some(number));
        port.is_grpc |= place.is_grpc;
        (index, port)
    };
    active.map(port).collect()
}

/// Returns the labels that fit into [`LABEL_BYTES_MAX`], in the order of their keys.
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
        ports: Vec::new(),
        is_grpc: false,
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
        servers_of(pod, place, &EngineDefaults::default()).pop()
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
            ports: vec![9000],
            ..PLACE.clone()
        };
        let url = |change: fn(&mut Value), place| server(&pod("a", "u", change), place).unwrap().url;
        assert_eq!(url(|_| {}, &given), "http://10.0.0.1:9000");
        assert_eq!(
            url(|pod| pod["status"]["podIP"] = json!("fd00::1"), &PLACE),
            "http://[fd00::1]:8100"
        );
        let mut labels: BTreeMap<String, String> =
            (0..3).map(|key| (key.to_string(), "x".repeat(2000))).collect();
        assert_eq!(bounded(Some(&labels)).len(), 2);
        labels.clear();
        assert!(bounded(Some(&labels)).is_empty());
    }

    #[test]
    fn each_of_several_ports_is_an_engine() {
        let place = PodsPlace {
            ports: vec![8000, 8001, 8002],
            is_grpc: true,
            ..PLACE.clone()
        };
        let found = |pod: &Pod| -> Vec<(String, String)> {
            let servers = servers_of(pod, &place, &EngineDefaults::default()).into_iter();
            servers.map(|server| (server.instance, server.url)).collect()
        };
        let engine = |name: &str, url: &str| (name.to_owned(), url.to_owned());
        let all = [
            engine("vllm-0-rank-0", "grpc://10.0.0.1:8000"),
            engine("vllm-0-rank-1", "grpc://10.0.0.1:8001"),
            engine("vllm-0-rank-2", "grpc://10.0.0.1:8002"),
        ];
        assert_eq!(found(&pod("vllm-0", "u", |_| {})), all);
        // If a pod lacks a port, the engines at its other ports keep their names.
        let lacking = pod("vllm-0", "u", |pod| {
            pod["metadata"]["annotations"] = json!({"llm-d.ai/active-ports": "8000,8002"});
        });
        assert_eq!(found(&lacking), [all[0].clone(), all[2].clone()]);
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
