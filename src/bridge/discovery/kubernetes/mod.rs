//! Engines that the Kubernetes API knows, by a list and then a watch (`watch`).
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
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use kube::core::Status;
use kube::{Client, Config};
use kvatlas_client::Backoff;

use kvatlas_process::registry::{GivenEngine, NewServer};

use super::super::spec::EngineDefaults;
use super::reports::{LookError, Reports};
use super::spec::KubernetesPlace;

/// Silence on a watch after which its connection is given up.
const SILENT_AFTER: Duration = Duration::from_secs(90);
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
    #[error("the API ends watches as soon as they begin")]
    Ended,
    #[error("the API gives a list no resource version")]
    NoVersion,
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

impl KubernetesError {
    /// Whether the API no longer has the version of the objects that it was asked for.
    fn is_gone(&self) -> bool {
        matches!(self, Self::Client(kube::Error::Api(status)) if status.code == 410)
    }

    /// Whether an object, or a line of a watch, has another form than the bridge can read.
    fn is_unreadable(&self) -> bool {
        matches!(self, Self::Client(kube::Error::SerdeError(_)))
    }
}

/// Kind of objects that are read, and the namespace. Errors name both.
#[derive(Debug, Clone)]
struct ObjectScope {
    objects: Objects,
    namespace: String,
}

impl ObjectScope {
    /// Returns the error of a question about objects.
    fn error(&self, error: kube::Error) -> KubernetesError {
        let refused = match &error {
            kube::Error::Api(status) => self.of_status(status),
            _ => None,
        };
        refused.unwrap_or(KubernetesError::Client(error))
    }

    fn of_look(&self, error: kube::Error) -> LookError {
        LookError::Unanswered(self.error(error).to_string())
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
    use serde_json::json;

    use super::*;

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
