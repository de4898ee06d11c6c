//! Pods of Kubernetes as engines: a list, and then a watch.
//!
//! An engine has its pod's name, the address of its pod, and the pod's UID as its identity. It is gone as soon as its pod is being deleted:
//! no request should go there any more. Pods that are not ready are asked all the same: how long a model loads, nobody knows.
//!
//! A watch may be behind, and another pod may have the address by then. So the API is asked for the one pod behind each new connection to its
//! engine, before anything that comes over that is believed.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::core::Status;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config};
use kvatlas_client::Backoff;
use tokio::time::{Instant, timeout, timeout_at};

use crate::daemon::http::{Discovered, GivenEngine, NewServer};

use super::super::spec::EngineDefaults;
use super::spec::KubernetesPlace;
use super::{FOUND_MAX, Look, LookError, Reports, SERVER_PORT, server_at};

/// The container's port that is taken where several are declared.
const PORT_NAME: &str = "http";
/// For so long the API answers one watch, in seconds; it is renewed then.
const WATCH_SECONDS: u32 = 60;
/// Silence on a watch after which its connection is given up.
const SILENT_AFTER: Duration = Duration::from_secs(90);
/// For so long changes are gathered: of a burst, each is not told alone.
const GATHERED_FOR: Duration = Duration::from_millis(20);
/// Longest time for an answer about one pod.
const LOOK_PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a pod's labels that are kept.
const LABEL_BYTES_MAX: usize = 4096;

/// The pauses between attempts to reach the API.
const BACKOFF: Backoff = Backoff {
    pause_min: Duration::from_millis(200),
    pause_max: Duration::from_secs(5),
};

/// An error that keeps pods from being found, for now.
#[derive(Debug, thiserror::Error)]
enum KubernetesError {
    #[error("it is not known where the Kubernetes API is: {0}")]
    Config(#[from] kube::config::InferConfigError),
    #[error("{0}")]
    Client(#[from] kube::Error),
    #[error("{0}")]
    Watch(watcher::Error),
    #[error("the API does not accept the token of the service account ({0})")]
    Unauthorized(String),
    #[error(
        "the service account may not read pods in the namespace {namespace}: it needs a RoleBinding to a Role there with \
         rules: [{{apiGroups: [\"\"], resources: [pods], verbs: [get, list, watch]}}] ({text})"
    )]
    Forbidden { namespace: String, text: String },
}

impl KubernetesError {
    fn of_watch(error: watcher::Error, namespace: &str) -> Self {
        let status = match &error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status))
            | watcher::Error::WatchFailed(kube::Error::Api(status)) => status,
            watcher::Error::WatchError(status) => status,
            _ => return Self::Watch(error),
        };
        Self::of_status(status, namespace).unwrap_or(Self::Watch(error))
    }

    fn of_look(error: kube::Error, namespace: &str) -> Self {
        let refused = match &error {
            kube::Error::Api(status) => Self::of_status(status, namespace),
            _ => None,
        };
        refused.unwrap_or(Self::Client(error))
    }

    /// The error where the API refuses to answer for want of a right.
    fn of_status(status: &Status, namespace: &str) -> Option<Self> {
        match status.code {
            401 => Some(Self::Unauthorized(status.message.clone())),
            403 => Some(Self::Forbidden {
                namespace: namespace.to_owned(),
                text: status.message.clone(),
            }),
            _ => None,
        }
    }
}

/// Looks at single pods.
fn look(api: Api<Pod>, namespace: &str, place: &KubernetesPlace, defaults: &EngineDefaults) -> Look {
    let (namespace, place, defaults) = (namespace.to_owned(), place.clone(), defaults.clone());
    Box::new(move |server| {
        let (api, namespace) = (api.clone(), namespace.clone());
        let (place, defaults) = (place.clone(), defaults.clone());
        Box::pin(async move {
            let asked = timeout(LOOK_PATIENCE, api.get_opt(&server.instance)).await;
            let pod = asked
                .map_err(|_| LookError::Unanswered(format!("no answer within {LOOK_PATIENCE:?}")))?
                .map_err(|error| {
                    LookError::Unanswered(KubernetesError::of_look(error, &namespace).to_string())
                })?;
            let now = pod.and_then(|pod| server_of(&pod, &place, &defaults));
            let is_same = |now: &NewServer| {
                now.url == server.url && now.discovered.identity == server.discovered.identity
            };
            now.filter(is_same).map(|_| ()).ok_or(LookError::Gone)
        })
    })
}

/// Looks for pods for ever.
pub(super) async fn run(place: &KubernetesPlace, defaults: &EngineDefaults, reports: &Reports) {
    let mut failures = 0;
    let (api, namespace) = loop {
        match connect(place).await {
            Ok(connected) => break connected,
            Err(error) => reports.fail(&error),
        }
        failures += 1;
        tokio::time::sleep(BACKOFF.pause(failures)).await;
    };
    let config = watcher::Config::default()
        .labels(&place.selector)
        .timeout(WATCH_SECONDS);
    reports.answer_by(look(api.clone(), &namespace, place, defaults));
    let mut events = Box::pin(watcher(api, config));
    let mut pods = Pods::new(place, defaults);
    failures = 0;
    // The stream goes on after errors, from where it was or with a list.
    while let Some(event) = events.next().await {
        let mut next = Some(event);
        let until = Instant::now() + GATHERED_FOR;
        while let Some(event) = next {
            match event {
                Ok(event) => {
                    failures = 0;
                    pods.apply(event);
                }
                Err(error) => {
                    failures += 1;
                    reports.fail(&KubernetesError::of_watch(error, &namespace));
                }
            }
            next = match failures {
                0 => timeout_at(until, events.next()).await.ok().flatten(),
                _ => None,
            };
        }
        if failures > 0 {
            tokio::time::sleep(BACKOFF.pause(failures)).await;
        } else if let Some(engines) = pods.known() {
            reports.know(engines);
        }
    }
}

async fn connect(place: &KubernetesPlace) -> Result<(Api<Pod>, String), KubernetesError> {
    let mut config = Config::infer().await?;
    config.read_timeout = Some(SILENT_AFTER);
    let namespace = place.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config)?;
    Ok((Api::namespaced(client, &namespace), namespace))
}

/// The pods that are known.
struct Pods<'a> {
    place: &'a KubernetesPlace,
    defaults: &'a EngineDefaults,
    known: BTreeMap<String, NewServer>,
    /// The pods of a list that is not complete yet.
    listed: Option<BTreeMap<String, NewServer>>,
    /// Set once a list was complete.
    is_known: bool,
}

impl<'a> Pods<'a> {
    fn new(place: &'a KubernetesPlace, defaults: &'a EngineDefaults) -> Self {
        Self {
            place,
            defaults,
            known: BTreeMap::new(),
            listed: None,
            is_known: false,
        }
    }

    fn apply(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(pod) => {
                let server = server_of(&pod, self.place, self.defaults);
                let listed = self.listed.get_or_insert_default();
                if let Some(server) = server.filter(|_| listed.len() <= FOUND_MAX) {
                    listed.insert(server.instance.clone(), server);
                }
            }
            Event::InitDone => {
                self.known = self.listed.take().unwrap_or_default();
                self.is_known = true;
            }
            Event::Apply(pod) => {
                let Some(name) = pod.metadata.name.clone() else {
                    return;
                };
                match server_of(&pod, self.place, self.defaults) {
                    Some(server) if self.known.len() <= FOUND_MAX => {
                        self.known.insert(name, server);
                    }
                    _ => {
                        self.known.remove(&name);
                    }
                }
            }
            Event::Delete(pod) => {
                let uid = pod.metadata.uid.unwrap_or_default();
                let name = pod.metadata.name.unwrap_or_default();
                // Another pod may have the name by now.
                if self
                    .known
                    .get(&name)
                    .is_some_and(|server| server.discovered.identity == uid)
                {
                    self.known.remove(&name);
                }
            }
        }
    }

    /// The engines of all pods; none before the first list is complete.
    fn known(&self) -> Option<Vec<GivenEngine>> {
        let servers = self.known.values().cloned();
        self.is_known.then(|| servers.map(GivenEngine::Server).collect())
    }
}

/// The engine of a pod; none where it has no address, has ended, or is being deleted.
fn server_of(pod: &Pod, place: &KubernetesPlace, defaults: &EngineDefaults) -> Option<NewServer> {
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

    static PLACE: KubernetesPlace = KubernetesPlace {
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

    fn server(pod: &Pod, place: &KubernetesPlace) -> Option<NewServer> {
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
        let given = KubernetesPlace {
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

    #[test]
    fn a_list_replaces_what_was_known_once_it_is_complete() {
        let defaults = EngineDefaults::default();
        let mut pods = Pods::new(&PLACE, &defaults);
        let names = |pods: &Pods<'_>| -> Option<Vec<String>> {
            let engines = pods.known()?;
            Some(
                engines
                    .iter()
                    .map(|engine| engine.instance().to_owned())
                    .collect(),
            )
        };
        pods.apply(Event::Init);
        pods.apply(Event::InitApply(pod("a", "1", |_| {})));
        pods.apply(Event::InitApply(pod("b", "2", |_| {})));
        assert_eq!(names(&pods), None);
        pods.apply(Event::InitDone);
        assert_eq!(names(&pods).unwrap(), ["a", "b"]);
        pods.apply(Event::Init);
        pods.apply(Event::InitApply(pod("b", "2", |_| {})));
        assert_eq!(names(&pods).unwrap(), ["a", "b"]);
        pods.apply(Event::InitDone);
        assert_eq!(names(&pods).unwrap(), ["b"]);
        // A pod of a StatefulSet comes back under its name before the old one is told to be gone.
        pods.apply(Event::Apply(pod("b", "3", |_| {})));
        pods.apply(Event::Delete(pod("b", "2", |_| {})));
        assert_eq!(names(&pods).unwrap(), ["b"]);
        pods.apply(Event::Apply(pod("b", "3", |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-11-26T09:00:00Z");
        })));
        assert!(names(&pods).unwrap().is_empty());
    }
}
