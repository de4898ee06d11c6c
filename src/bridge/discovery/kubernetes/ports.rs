//! Ports of a pod at which engines are asked.
//!
//! A pod is one engine. With several target ports of an InferencePool, each port is an engine: a data-parallel rank with a
//! server of its own. Such engines are named as the endpoint picker of the Gateway API names them, `POD-rank-INDEX`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;

use super::super::found::{SERVER_PORT, ServerPort};

/// Name of the container's port to ask if several are declared.
const HTTP_NAME: &str = "http";
/// Name of the container's port to ask if no port is called `http`. The server at that port speaks gRPC.
const GRPC_NAME: &str = "grpc";
/// Annotations by which a pod says which of its pool's target ports it serves. The first annotation that is present
/// counts.
const ACTIVE_PORTS: [&str; 2] = [
    "llm-d.ai/active-ports",
    "inference.networking.k8s.io/active-ports",
];
/// The text between a pod's name and the index of a port.
const RANK: &str = "-rank-";

/// Returns the name of the engine at one of several ports of a pod.
pub(super) fn ranked(pod: &str, index: usize) -> String {
    format!("{pod}{RANK}{index}")
}

/// Whether a pod serves a target port. A pod without an annotation for active ports serves all target ports; with one,
/// only the ports that it names.
pub(super) fn is_active(annotations: Option<&BTreeMap<String, String>>, port: u16) -> bool {
    let mut told = ACTIVE_PORTS
        .iter()
        .filter_map(|key| annotations.and_then(|annotations| annotations.get(*key)));
    let is_named = |ports: &String| ports.split(',').any(|active| active.trim().parse() == Ok(port));
    told.next().is_none_or(is_named)
}

/// Name and number of a port.
pub(super) type NamedPort<'a> = (Option<&'a str>, Option<u16>);

/// Returns the number of a port; `None` if it is none.
pub(super) fn number_of(port: i32) -> Option<u16> {
    u16::try_from(port).ok().filter(|number| *number > 0)
}

/// Returns the ports that a pod's containers declare.
pub(super) fn declared(containers: &[Container]) -> impl Iterator<Item = NamedPort<'_>> + Clone {
    let ports = containers
        .iter()
        .flat_map(|container| container.ports.iter().flatten());
    ports.map(|port| (port.name.as_deref(), number_of(port.container_port)))
}

/// Returns the port at which to ask a server: the `given` port, or else the port called `http`, or else the one called
/// `grpc`, or else the only one. If there is none of these, returns the usual port of an engine's server.
pub(super) fn port_of<'a>(
    mut ports: impl Iterator<Item = NamedPort<'a>> + Clone,
    given: Option<u16>,
) -> ServerPort {
    if let Some(number) = given {
        let is_grpc = ports.any(|port| port == (Some(GRPC_NAME), given));
        return ServerPort { number, is_grpc };
    }
    let named = |wanted: &str| ports.clone().find(|(name, _)| *name == Some(wanted));
    let named = named(HTTP_NAME).or_else(|| named(GRPC_NAME));
    let only = ports.next().filter(|_| ports.next().is_none());
    let (number, is_grpc) = match named.or(only) {
        Some((name, Some(number))) => (number, name == Some(GRPC_NAME)),
        _ => (SERVER_PORT, false),
    };
    ServerPort { number, is_grpc }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn containers(ports: &Value) -> Vec<Container> {
        serde_json::from_value(json!([{"name": "engine", "ports": ports}])).unwrap()
    }

    #[test]
    fn of_several_ports_the_name_tells() {
        for (ports, number, is_grpc) in [
            (json!([{"containerPort": 8100}]), 8100, false),
            (
                json!([{"containerPort": 5557}, {"containerPort": 5558}]),
                8000,
                false,
            ),
            (
                json!([{"containerPort": 5557}, {"containerPort": 8200, "name": "http"}]),
                8200,
                false,
            ),
            (json!([{"containerPort": 50051, "name": "grpc"}]), 50051, true),
            (
                json!([{"containerPort": 50051, "name": "grpc"}, {"containerPort": 8200, "name": "http"}]),
                8200,
                false,
            ),
            (json!([{"containerPort": 0, "name": "grpc"}]), 8000, false),
        ] {
            assert_eq!(
                port_of(declared(&containers(&ports)), None),
                ServerPort { number, is_grpc },
                "{ports}"
            );
        }
        let two = containers(&json!([{"containerPort": 50051, "name": "grpc"}, {"containerPort": 8200}]));
        let is_grpc = |number| port_of(declared(&two), Some(number)).is_grpc;
        assert!(is_grpc(50051) && !is_grpc(8200));
    }

    #[test]
    fn a_pod_says_which_ports_of_its_pool_it_has() {
        let told = |key: &str, ports: &str| BTreeMap::from([(key.to_owned(), ports.to_owned())]);
        assert!(is_active(None, 8000) && is_active(Some(&BTreeMap::new()), 8000));
        for key in ACTIVE_PORTS {
            let two = told(key, "8000, 8001,x");
            assert!(
                is_active(Some(&two), 8001) && !is_active(Some(&two), 8002),
                "{key}"
            );
        }
        let mut both = told(ACTIVE_PORTS[0], "8000");
        both.extend(told(ACTIVE_PORTS[1], "8001"));
        assert!(is_active(Some(&both), 8000) && !is_active(Some(&both), 8001));
    }

    #[test]
    fn a_rank_is_called_as_the_endpoint_picker_calls_it() {
        assert_eq!(ranked("vllm-0", 3), "vllm-0-rank-3");
    }
}
