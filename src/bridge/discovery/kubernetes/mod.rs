//! Engines that the Kubernetes API knows, by a list and then a watch.
//!
//! | source | engines are | file |
//! |---|---|---|
//! | `kubernetes:SELECTOR` | pods with these labels | `pods` |
//! | `inferencepool:NAME` | the pods that an InferencePool's present selector matches, at each of the pool's ports | `pool` |
//! | `endpointslices:SERVICE` | the endpoints of a Service, ready or not | `slices` |
//!
//! An engine has its pod's name and address, and the pod's UID as its identity. It counts as gone as soon as its pod is being
//! deleted, because no request should go there any more. Pods that are not ready are asked, too, because nobody knows how long
//! a model loads.
//!
//! News from a watch may be late, and another pod may already have the address. So after each new connection to an engine, the
//! bridge asks the API about that engine. Nothing that comes over the connection is believed before the answer.

mod pods;
mod pool;
mod ports;
mod slices;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use futures_util::StreamExt;
use kube::core::Status;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config, Resource, ResourceExt};
use kvatlas_client::Backoff;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};

use kvatlas_process::registry::{GivenEngine, NewServer};

use super::super::spec::EngineDefaults;
use super::reports::{FOUND_MAX, LookError, Reports};
use super::spec::KubernetesPlace;

/// Time for which the API answers one watch, in seconds. The watch is then renewed.
const WATCH_SECONDS: u32 = 60;
/// Silence on a watch after which its connection is given up.
const SILENT_AFTER: Duration = Duration::from_secs(90);
/// Time for which changes are gathered, so that many changes in a short time are reported together.
const GATHERED_FOR: Duration = Duration::from_millis(20);
/// Maximum time for an answer about one engine.
const LOOK_PATIENCE: Duration = Duration::from_secs(5);

/// The pauses between attempts to reach the API.
const BACKOFF: Backoff = Backoff {
    pause_min: Duration::from_millis(200),
    pause_max: Duration::from_secs(5),
};

/// A kind of objects that the bridge reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Objects {
    Pods,
    InferencePools,
    EndpointSlices,
}

impl Objects {
    fn plural(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::InferencePools => "inferencepools",
            Self::EndpointSlices => "endpointslices",
        }
    }

    fn group(self) -> &'static str {
        match self {
            Self::Pods => "",
            Self::InferencePools => pool::GROUP,
            Self::EndpointSlices => "discovery.k8s.io",
        }
    }
}

/// Writes the rule of a Role that lets the bridge read the objects.
impl fmt::Display for Objects {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (group, plural) = (self.group(), self.plural());
        write!(
            formatter,
            "{{apiGroups: [\"{group}\"], resources: [{plural}], verbs: [get, list, watch]}}"
        )
    }
}

/// An error that keeps engines from being found, for now.
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
        "the service account may not read {} in the namespace {namespace}: it needs a RoleBinding to a Role there with \
         rules: [{objects}] ({text})",
        objects.plural()
    )]
    Forbidden {
        objects: Objects,
        namespace: String,
        text: String,
    },
    #[error("the API knows no {} of {}: install their definition ({text})", objects.plural(), objects.group())]
    NoSuchKind { objects: Objects, text: String },
}

/// Kind of objects that are read, and the namespace. Errors name both.
#[derive(Debug, Clone)]
struct ObjectScope {
    objects: Objects,
    namespace: String,
}

impl ObjectScope {
    fn of_watch(&self, error: watcher::Error) -> KubernetesError {
        let status = match &error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status))
            | watcher::Error::WatchFailed(kube::Error::Api(status)) => status,
            watcher::Error::WatchError(status) => status,
            _ => return KubernetesError::Watch(error),
        };
        self.of_status(status).unwrap_or(KubernetesError::Watch(error))
    }

    fn of_look(&self, error: kube::Error) -> LookError {
        let refused = match &error {
            kube::Error::Api(status) => self.of_status(status),
            _ => None,
        };
        let error = refused.unwrap_or(KubernetesError::Client(error));
        LookError::Unanswered(error.to_string())
    }

    /// Returns the error if the API refuses because a right is missing (401, 403) or does not know the kind of objects
    /// (404); `None` for any other status.
    fn of_status(&self, status: &Status) -> Option<KubernetesError> {
        let (objects, text) = (self.objects, status.message.clone());
        match status.code {
            401 => Some(KubernetesError::Unauthorized(text)),
            403 => Some(KubernetesError::Forbidden {
                objects,
                namespace: self.namespace.clone(),
                text,
            }),
            404 => Some(KubernetesError::NoSuchKind { objects, text }),
            _ => None,
        }
    }
}

/// Connects to the API, and then looks for engines for ever.
pub(super) async fn run(place: &KubernetesPlace, defaults: &EngineDefaults, reports: &Reports) {
    let mut failures = 0;
    let (client, namespace) = loop {
        match connect(place).await {
            Ok(connected) => break connected,
            Err(error) => reports.fail(&error),
        }
        failures += 1;
        tokio::time::sleep(BACKOFF.pause(failures)).await;
    };
    match place {
        KubernetesPlace::Pods(place) => pods::run(client, namespace, place, defaults, reports).await,
        KubernetesPlace::InferencePool(place) => pool::run(client, namespace, place, defaults, reports).await,
        KubernetesPlace::EndpointSlices(place) => {
            slices::run(client, namespace, place, defaults, reports).await
        }
    }
}

/// Returns a client of the API, and the namespace to look in.
async fn connect(place: &KubernetesPlace) -> Result<(Client, String), KubernetesError> {
    let mut config = Config::infer().await?;
    config.read_timeout = Some(SILENT_AFTER);
    let namespace = place.namespace().map(str::to_owned);
    let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
    Ok((Client::try_from(config)?, namespace))
}

/// Watches objects for ever. After each change, calls `take` with the values that `read` gives for all known objects.
async fn watch<K, T: Clone>(
    api: Api<K>,
    config: watcher::Config,
    reading: &ObjectScope,
    reports: &Reports,
    read: impl Fn(&K) -> T,
    mut take: impl FnMut(&KnownObjects<T>),
) where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    let mut events = Box::pin(watcher(api, config.timeout(WATCH_SECONDS)));
    let mut known = KnownObjects::default();
    let mut failures = 0;
    // The stream continues after errors, from its last position or with a new list.
    while let Some(event) = events.next().await {
        let mut next = Some(event);
        let until = Instant::now() + GATHERED_FOR;
        while let Some(event) = next {
            match event {
                Ok(event) => {
                    failures = 0;
                    known.apply(event, &read);
                }
                Err(error) => {
                    failures += 1;
                    reports.fail(&reading.of_watch(error));
                }
            }
            next = match failures {
                0 => timeout_at(until, events.next()).await.ok().flatten(),
                _ => None,
            };
        }
        if failures > 0 {
            tokio::time::sleep(BACKOFF.pause(failures)).await;
        } else if known.is_complete {
            take(&known);
        }
    }
}

/// Known objects by their names. An entry has the object's UID, and the value that was read from the object.
struct KnownObjects<T> {
    known: BTreeMap<String, (Option<String>, T)>,
    /// Objects so far of the list that the API is sending; `None` if it is not sending a list.
    listed: Option<BTreeMap<String, (Option<String>, T)>>,
    /// Whether the API has sent a complete list of the objects.
    is_complete: bool,
}

impl<T> Default for KnownObjects<T> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            listed: None,
            is_complete: false,
        }
    }
}

impl<T> KnownObjects<T> {
    fn apply<K: Resource>(&mut self, event: Event<K>, read: impl Fn(&K) -> T) {
        let put = |objects: &mut BTreeMap<_, _>, object: &K| {
            let name = object.name_any();
            if objects.len() <= FOUND_MAX || objects.contains_key(&name) {
                objects.insert(name, (object.uid(), read(object)));
            }
        };
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(object) => put(self.listed.get_or_insert_default(), &object),
            Event::InitDone => {
                self.known = self.listed.take().unwrap_or_default();
                self.is_complete = true;
            }
            Event::Apply(object) => put(&mut self.known, &object),
            Event::Delete(object) => {
                let name = object.name_any();
                // A new object may have the same name.
                if self.known.get(&name).is_some_and(|(uid, _)| *uid == object.uid()) {
                    self.known.remove(&name);
                }
            }
        }
    }

    fn values(&self) -> impl Iterator<Item = &T> {
        self.known.values().map(|(_, value)| value)
    }
}

/// Returns the engines of objects, one for each name. If several servers have one name, the first server counts. An
/// endpoint with an IPv4 and an IPv6 address has two servers, for example.
fn engines<'a>(servers: impl Iterator<Item = &'a NewServer>) -> Vec<GivenEngine> {
    let mut named: BTreeMap<&str, &NewServer> = BTreeMap::new();
    for server in servers {
        named.entry(&server.instance).or_insert(server);
    }
    let servers = named.into_values().cloned();
    servers.map(GivenEngine::Server).collect()
}

/// Checks that an engine that was found is still among `servers`, with the same URL and identity.
fn confirm(server: &NewServer, mut servers: impl Iterator<Item = NewServer>) -> Result<(), LookError> {
    let is_same = |now: NewServer| {
        now.instance == server.instance
            && now.url == server.url
            && now.discovered.identity == server.discovered.identity
    };
    match servers.any(is_same) {
        true => Ok(()),
        false => Err(LookError::Gone),
    }
}

/// Makes the error for an answer that did not come in time.
fn unanswered() -> LookError {
    LookError::Unanswered(format!("no answer within {LOOK_PATIENCE:?}"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    fn pod(name: &str, uid: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": name, "uid": uid}})).unwrap()
    }

    #[test]
    fn a_list_replaces_what_was_known_once_it_is_complete() {
        let mut known = KnownObjects::default();
        let uid = |pod: &Pod| pod.uid().unwrap();
        let uids = |known: &KnownObjects<String>| known.values().cloned().collect::<Vec<_>>();
        known.apply(Event::Init, uid);
        known.apply(Event::InitApply(pod("a", "1")), uid);
        known.apply(Event::InitApply(pod("b", "2")), uid);
        assert!(!known.is_complete);
        known.apply(Event::InitDone, uid);
        assert!(known.is_complete);
        assert_eq!(uids(&known), ["1", "2"]);
        known.apply(Event::Init, uid);
        known.apply(Event::InitApply(pod("b", "2")), uid);
        assert_eq!(uids(&known), ["1", "2"]);
        known.apply(Event::InitDone, uid);
        assert_eq!(uids(&known), ["2"]);
        // A pod of a StatefulSet comes back under its name before the API tells that the old pod is gone.
        known.apply(Event::Apply(pod("b", "3")), uid);
        known.apply(Event::Delete(pod("b", "2")), uid);
        assert_eq!(uids(&known), ["3"]);
        known.apply(Event::Delete(pod("b", "3")), uid);
        assert_eq!(uids(&known), Vec::<String>::new());
    }

    #[test]
    fn rights_that_are_missing_are_named() {
        let reading = ObjectScope {
            objects: Objects::EndpointSlices,
            namespace: "llm".to_owned(),
        };
        let status = |code: u16| -> Status {
            serde_json::from_value(json!({"status": "Failure", "message": "x", "reason": "y", "code": code}))
                .unwrap()
        };
        let error = |code| reading.of_status(&status(code));
        let forbidden = error(403).unwrap();
        let is_named = matches!(
            &forbidden,
            KubernetesError::Forbidden { objects: Objects::EndpointSlices, namespace, .. } if namespace == "llm"
        );
        assert!(is_named, "{forbidden}");
        let rule =
            r#"{apiGroups: ["discovery.k8s.io"], resources: [endpointslices], verbs: [get, list, watch]}"#;
        assert_eq!(Objects::EndpointSlices.to_string(), rule);
        let absent = error(404).unwrap();
        let is_named = matches!(
            absent,
            KubernetesError::NoSuchKind {
                objects: Objects::EndpointSlices,
                ..
            }
        );
        assert!(is_named, "{absent}");
        assert!(error(500).is_none());
    }
}
