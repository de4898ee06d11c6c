//! Engines as the endpoints of a Service, read from its EndpointSlices.

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time::timeout;

use kvatlas_process::registry::{Discovered, NewServer};

use super::super::super::http::authority;
use super::super::super::spec::EngineDefaults;
use super::super::found::{ServerPort, server_at};
use super::super::reports::{EngineLookup, Reports};
use super::super::spec::ServicePlace;
use super::ports::{number_of, port_of};
use super::watch::Watched;
use super::{LOOK_PATIENCE, ObjectScope, Objects, confirm, engines, unanswered};

/// Label that names the Service of a slice.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Looks for the endpoints of `place` for ever.
pub(super) async fn run(
    client: Client,
    namespace: String,
    place: &ServicePlace,
    defaults: &EngineDefaults,
    reports: &Reports,
) {
    let api: Api<EndpointSlice> = Api::namespaced(client, &namespace);
    let selector = format!("{SERVICE_LABEL}={}", place.service);
    let reading = ObjectScope {
        objects: Objects::EndpointSlices,
        namespace,
    };
    reports.answer_by(look(api.clone(), reading.clone(), &selector, place, defaults));
    let watched = Watched {
        api,
        selected: ListParams::default().labels(&selector),
        scope: &reading,
        reports,
        read: &|slice: &EndpointSlice| servers_of(slice, place, defaults),
        take: &mut |known| reports.know(engines(known.values().flatten())),
    };
    watched.run().await;
}

/// Makes the function that asks the API about one engine. The function lists the Service's present endpoints.
fn look(
    api: Api<EndpointSlice>,
    reading: ObjectScope,
    selector: &str,
    place: &ServicePlace,
    defaults: &EngineDefaults,
) -> EngineLookup {
    let parameters = ListParams::default().labels(selector);
    let (place, defaults) = (place.clone(), defaults.clone());
    Box::new(move |server| {
        let (api, reading, parameters) = (api.clone(), reading.clone(), parameters.clone());
        let (place, defaults) = (place.clone(), defaults.clone());
        Box::pin(async move {
            let asked = timeout(LOOK_PATIENCE, api.list(&parameters)).await;
            let slices = asked.map_err(|_| unanswered())?;
            let slices = slices.map_err(|error| reading.of_look(error))?.into_iter();
            confirm(
                &server,
                slices.flat_map(|slice| servers_of(&slice, &place, &defaults)),
            )
        })
    })
}

/// Returns the engines of a slice, one for each endpoint that is not terminating.
fn servers_of(slice: &EndpointSlice, place: &ServicePlace, defaults: &EngineDefaults) -> Vec<NewServer> {
    let ports = slice.ports.iter().flatten();
    let ports = ports.map(|port| (port.name.as_deref(), port.port.and_then(number_of)));
    let port = port_of(ports, place.port);
    let endpoints = slice.endpoints.iter();
    endpoints
        .filter_map(|endpoint| server_of(endpoint, port, defaults))
        .collect()
}

/// Returns the engine at an endpoint; `None` if the endpoint is terminating or has no address.
fn server_of(endpoint: &Endpoint, port: ServerPort, defaults: &EngineDefaults) -> Option<NewServer> {
    let conditions = endpoint.conditions.as_ref();
    if conditions.is_some_and(|conditions| conditions.terminating == Some(true)) {
        return None;
    }
    // All addresses belong to the same endpoint, so the first address is enough.
    let host = endpoint.addresses.first().filter(|address| !address.is_empty())?;
    let pod = endpoint.target_ref.as_ref();
    let name = pod.and_then(|pod| pod.name.clone());
    let discovered = Discovered {
        identity: pod.and_then(|pod| pod.uid.clone()).unwrap_or_default(),
        ..Discovered::default()
    };
    let name = name.unwrap_or_else(|| authority(host, port.number));
    Some(server_at(name, host, port, discovered, defaults))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn names(ports: &Value, endpoints: &Value, port: Option<u16>) -> Vec<(String, String, String)> {
        let slice =
            json!({"metadata": {"name": "s"}, "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
        let slice = serde_json::from_value(slice).unwrap();
        let place = ServicePlace {
            service: "vllm".to_owned(),
            namespace: None,
            port,
        };
        let servers = servers_of(&slice, &place, &EngineDefaults::default()).into_iter();
        servers
            .map(|server| (server.instance, server.url, server.discovered.identity))
            .collect()
    }

    #[test]
    fn endpoints_are_engines_until_they_end() {
        let endpoints = json!([
            {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "vllm-0", "uid": "u0"}, "conditions": {"ready": false}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": true, "terminating": true}},
            {"addresses": ["10.0.0.3"]},
            {"addresses": []},
        ]);
        let text = |name: &str, url: &str, uid: &str| (name.to_owned(), url.to_owned(), uid.to_owned());
        let one = json!([{"port": 8100}]);
        assert_eq!(
            names(&one, &endpoints, None),
            [
                text("vllm-0", "http://10.0.0.1:8100", "u0"),
                text("10.0.0.3:8100", "http://10.0.0.3:8100", ""),
            ]
        );
        let several = json!([{"port": 5557, "name": "events"}, {"port": 8200, "name": "http"}]);
        assert_eq!(names(&several, &endpoints, None)[0].1, "http://10.0.0.1:8200");
        assert_eq!(
            names(&several, &endpoints, Some(9000))[0].1,
            "http://10.0.0.1:9000"
        );
        assert_eq!(names(&json!([]), &endpoints, None)[0].1, "http://10.0.0.1:8000");
        let grpc = json!([{"port": 5557, "name": "events"}, {"port": 50051, "name": "grpc"}]);
        for given in [None, Some(50051)] {
            assert_eq!(names(&grpc, &endpoints, given)[0].1, "grpc://10.0.0.1:50051");
        }
    }
}
