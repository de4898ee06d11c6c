//! Sources of engines as people write them, in `--discover`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use kvatlas_config::{Discovery, DynamoComponent, NoComponent, NoDiscovery};
use kvatlas_telemetry::labels::EngineSource;

/// A source of engines, as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discover {
    text: String,
    pub(super) place: DiscoveryPlace,
}

/// Place where a source looks for engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DiscoveryPlace {
    Dns(DnsPlace),
    File(PathBuf),
    Dynamo(DynamoPlace),
    #[cfg(feature = "kubernetes")]
    Kubernetes(KubernetesPlace),
}

/// A name of DNS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DnsPlace {
    pub(super) name: String,
    /// Port of all engines; `None` if SRV records tell it.
    pub(super) port: Option<u16>,
    /// Name server that is asked; `None` for the name servers of the system.
    pub(super) server: Option<SocketAddr>,
}

/// Objects of the Kubernetes API in which engines are found.
#[cfg(feature = "kubernetes")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KubernetesPlace {
    Pods(PodsPlace),
    InferencePool(PoolPlace),
    EndpointSlices(ServicePlace),
}

#[cfg(feature = "kubernetes")]
impl KubernetesPlace {
    /// Returns the Kubernetes namespace to look in; `None` for the namespace of the bridge's own pod.
    pub(super) fn namespace(&self) -> Option<&str> {
        let namespace = match self {
            Self::Pods(place) => &place.namespace,
            Self::InferencePool(place) => &place.namespace,
            Self::EndpointSlices(place) => &place.namespace,
        };
        namespace.as_deref()
    }
}

/// An InferencePool whose pods are engines.
#[cfg(feature = "kubernetes")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PoolPlace {
    pub(super) name: String,
    pub(super) namespace: Option<String>,
}

/// A Service whose endpoints are engines.
#[cfg(feature = "kubernetes")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServicePlace {
    pub(super) service: String,
    pub(super) namespace: Option<String>,
    /// Port of all engines; `None` if the slices tell it.
    pub(super) port: Option<u16>,
}

/// Pods that are engines.
#[cfg(feature = "kubernetes")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodsPlace {
    /// Label selector that the pods match.
    pub(super) selector: String,
    /// Kubernetes namespace of the pods; `None` for the namespace of the bridge's own pod.
    pub(super) namespace: Option<String>,
    /// Ports of all engines; empty if the pod's containers tell the port.
    pub(super) ports: Vec<u16>,
    /// Whether the servers speak gRPC, whatever containers call their ports.
    pub(super) is_grpc: bool,
}

#[cfg(feature = "kubernetes")]
impl PodsPlace {
    /// Whether a pod has several engines. Their names then end in the indices of their ports.
    pub(super) fn is_ranked(&self) -> bool {
        self.ports.len() > 1
    }
}

/// Records of Dynamo's discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DynamoPlace {
    /// Place from which the records are read.
    pub(super) records: Discovery,
    /// URL of the NATS server for event planes over NATS; `None` if it is not given.
    pub(super) nats: Option<String>,
    /// Component whose publishers are looked for; `None` for all.
    pub(super) component: Option<DynamoComponent>,
}

/// Error for a text that is no source of engines.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?}: {reason}; write dns:NAME[:PORT][@SERVER:PORT], file:PATH, kubernetes:SELECTOR[@NAMESPACE][:PORT], \
     inferencepool:[NAMESPACE/]NAME, endpointslices:[NAMESPACE/]SERVICE[:PORT] or \
     dynamo:etcd:http://HOST:PORT[,nats=nats://HOST:PORT][,component=NAMESPACE.NAME]"
)]
pub struct DiscoverError {
    text: String,
    reason: String,
}

impl Discover {
    /// Returns the text as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn kind(&self) -> EngineSource {
        match self.place {
            DiscoveryPlace::Dns(_) => EngineSource::Dns,
            DiscoveryPlace::File(_) => EngineSource::File,
            DiscoveryPlace::Dynamo(_) => EngineSource::Dynamo,
            #[cfg(feature = "kubernetes")]
            DiscoveryPlace::Kubernetes(_) => EngineSource::Kubernetes,
        }
    }
}

impl fmt::Display for Discover {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl FromStr for Discover {
    type Err = DiscoverError;

    fn from_str(text: &str) -> Result<Self, DiscoverError> {
        let failed = |reason: String| DiscoverError {
            text: text.to_owned(),
            reason,
        };
        let (kind, rest) = text
            .split_once(':')
            .ok_or_else(|| failed("it has no kind".to_owned()))?;
        let place = match kind {
            "dns" => parse_dns(rest).map(DiscoveryPlace::Dns),
            "file" if rest.is_empty() => Err("the path is missing".to_owned()),
            "file" => Ok(DiscoveryPlace::File(PathBuf::from(rest))),
            "dynamo" => DynamoPlace::parse(rest).map(DiscoveryPlace::Dynamo),
            "kubernetes" | "inferencepool" | "endpointslices" => parse_kubernetes(kind, rest),
            _ => Err(format!("{kind:?} is no kind")),
        };
        Ok(Self {
            text: text.to_owned(),
            place: place.map_err(failed)?,
        })
    }
}

impl DynamoPlace {
    /// Parses the place of Dynamo's records. After the place, `nats=URL` and `component=NAMESPACE.NAME` may follow,
    /// joined by commas.
    pub(super) fn parse(rest: &str) -> Result<Self, String> {
        let mut parts = rest.split(',');
        let records = parts.next().unwrap_or_default();
        let mut place = Self {
            records: records
                .parse()
                .map_err(|error: NoDiscovery| format!("{records:?} is {error}"))?,
            nats: None,
            component: None,
        };
        for part in parts {
            let twice = match part.split_once('=') {
                Some(("nats", url)) => place.nats.replace(url.to_owned()).is_some(),
                Some(("component", name)) => {
                    let component: DynamoComponent = name
                        .parse()
                        .map_err(|error: NoComponent| format!("component is {name:?}: {error}"))?;
                    if !component.tenant.is_empty() {
                        return Err(format!("component is {name:?}: --tenant names the tenant"));
                    }
                    place.component.replace(component).is_some()
                }
                _ => {
                    return Err(format!(
                        "{part:?} is neither nats=URL nor component=NAMESPACE.NAME"
                    ));
                }
            };
            if twice {
                return Err(format!("{part:?} is given twice"));
            }
        }
        Ok(place)
    }

    /// Returns whether the publishers with this scope are to be followed. A scope is a text such as
    /// `namespace/n/component/c/endpoint/e`.
    pub(super) fn is_meant(&self, scope: &str) -> bool {
        self.component
            .as_ref()
            .is_none_or(|DynamoComponent { namespace, name, .. }| {
                let own = format!("namespace/{namespace}/component/{name}");
                scope
                    .strip_prefix(&own)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
    }
}

fn parse_dns(rest: &str) -> Result<DnsPlace, String> {
    let (rest, server) = match rest.split_once('@') {
        None => (rest, None),
        Some((rest, server)) => {
            let address = server
                .parse()
                .map_err(|_| format!("{server:?} is no ADDRESS:PORT"))?;
            (rest, Some(address))
        }
    };
    let (name, port) = split_port(rest)?;
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 253 || !name.bytes().all(is_letter) {
        return Err(format!("{name:?} is no name"));
    }
    Ok(DnsPlace {
        name: name.to_owned(),
        port,
        server,
    })
}

/// Splits a text at its port. Returns the text before the port, and the port; `None` if there is none.
fn split_port(text: &str) -> Result<(&str, Option<u16>), String> {
    let Some((before, port)) = text.rsplit_once(':') else {
        return Ok((text, None));
    };
    match port.parse() {
        Ok(port @ 1..) => Ok((before, Some(port))),
        _ => Err(format!("{port:?} is no port")),
    }
}

#[cfg(feature = "kubernetes")]
fn parse_kubernetes(kind: &str, rest: &str) -> Result<DiscoveryPlace, String> {
    let place = match kind {
        "inferencepool" => {
            let (name, namespace) = parse_object(rest)?;
            KubernetesPlace::InferencePool(PoolPlace { name, namespace })
        }
        "endpointslices" => {
            let (rest, port) = split_port(rest)?;
            let (service, namespace) = parse_object(rest)?;
            KubernetesPlace::EndpointSlices(ServicePlace {
                service,
                namespace,
                port,
            })
        }
        _ => KubernetesPlace::Pods(parse_pods(rest)?),
    };
    Ok(DiscoveryPlace::Kubernetes(place))
}

/// Parses a namespace as Kubernetes names it.
#[cfg(feature = "kubernetes")]
fn parse_namespace(text: &str) -> Result<String, String> {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match !text.is_empty() && text.len() <= 63 && text.bytes().all(is_letter) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is no namespace")),
    }
}

/// Parses the name of an object, and its namespace if it is given.
#[cfg(feature = "kubernetes")]
fn parse_object(text: &str) -> Result<(String, Option<String>), String> {
    let (namespace, name) = match text.split_once('/') {
        None => (None, text),
        Some((namespace, name)) => (Some(parse_namespace(namespace)?), name),
    };
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    match !name.is_empty() && name.len() <= 253 && name.bytes().all(is_letter) {
        true => Ok((name.to_owned(), namespace)),
        false => Err(format!("{name:?} is no name")),
    }
}

#[cfg(feature = "kubernetes")]
fn parse_pods(rest: &str) -> Result<PodsPlace, String> {
    let (rest, port) = split_port(rest)?;
    let (selector, namespace) = match rest.split_once('@') {
        None => (rest, None),
        Some((selector, namespace)) => (selector, Some(parse_namespace(namespace)?)),
    };
    if selector.is_empty() {
        return Err("the selector is missing, such as app=vllm".to_owned());
    }
    Ok(PodsPlace {
        selector: selector.to_owned(),
        namespace,
        ports: port.into_iter().collect(),
        is_grpc: false,
    })
}

#[cfg(not(feature = "kubernetes"))]
fn parse_kubernetes(_kind: &str, _rest: &str) -> Result<DiscoveryPlace, String> {
    Err("this program was built without the feature kubernetes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> DiscoveryPlace {
        text.parse::<Discover>().unwrap().place
    }

    #[test]
    fn sources_have_a_kind_and_a_place() {
        let dns = |name: &str, port, server: Option<&str>| {
            DiscoveryPlace::Dns(DnsPlace {
                name: name.to_owned(),
                port,
                server: server.map(|server| server.parse().unwrap()),
            })
        };
        assert_eq!(
            place("dns:vllm-headless.llm.svc"),
            dns("vllm-headless.llm.svc", None, None)
        );
        assert_eq!(
            place("dns:a.b:8000@[::1]:53"),
            dns("a.b", Some(8000), Some("[::1]:53"))
        );
        assert_eq!(place("dns:_http._tcp.a."), dns("_http._tcp.a.", None, None));
        assert_eq!(
            place("file:/etc/a:b"),
            DiscoveryPlace::File(PathBuf::from("/etc/a:b"))
        );
        let discover: Discover = "dns:a".parse().unwrap();
        assert_eq!((discover.as_str(), discover.kind()), ("dns:a", EngineSource::Dns));
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn pods_have_a_selector() {
        let pods = |selector: &str, namespace: Option<&str>, port| {
            DiscoveryPlace::Kubernetes(KubernetesPlace::Pods(PodsPlace {
                selector: selector.to_owned(),
                namespace: namespace.map(str::to_owned),
                ports: Option::into_iter(port).collect(),
                is_grpc: false,
            }))
        };
        let selector = "app.kubernetes.io/name=vllm,role in (decode, mixed)";
        assert_eq!(
            place(&format!("kubernetes:{selector}")),
            pods(selector, None, None)
        );
        assert_eq!(
            place("kubernetes:app=vllm@llm:8000"),
            pods("app=vllm", Some("llm"), Some(8000))
        );
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn pools_and_services_have_a_name() {
        let pool = |name: &str, namespace: Option<&str>| {
            DiscoveryPlace::Kubernetes(KubernetesPlace::InferencePool(PoolPlace {
                name: name.to_owned(),
                namespace: namespace.map(str::to_owned),
            }))
        };
        assert_eq!(place("inferencepool:llama"), pool("llama", None));
        assert_eq!(place("inferencepool:llm/llama.8b"), pool("llama.8b", Some("llm")));
        let service = |namespace: Option<&str>, port| {
            DiscoveryPlace::Kubernetes(KubernetesPlace::EndpointSlices(ServicePlace {
                service: "vllm".to_owned(),
                namespace: namespace.map(str::to_owned),
                port,
            }))
        };
        assert_eq!(place("endpointslices:vllm"), service(None, None));
        assert_eq!(
            place("endpointslices:llm/vllm:8000"),
            service(Some("llm"), Some(8000))
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("vllm", "no kind"),
            ("etcd:a", "no kind"),
            ("dns:", "no name"),
            ("dns:a b", "no name"),
            ("dns:a:0", "no port"),
            ("dns:a@b", "no ADDRESS:PORT"),
            ("file:", "path is missing"),
            ("dynamo:", "etcd:http://HOST:PORT"),
            ("dynamo:file:/d,nats", "neither nats=URL"),
            ("dynamo:file:/d,component=a", "NAMESPACE.COMPONENT"),
            ("dynamo:file:/d,nats=nats://a:1,nats=nats://a:1", "twice"),
        ] {
            let error = text.parse::<Discover>().unwrap_err();
            assert!(error.reason.contains(part), "{text}: {error}");
        }
        #[cfg(feature = "kubernetes")]
        for (text, part) in [
            ("kubernetes:", "selector is missing"),
            ("kubernetes:a=b@c/d", "no namespace"),
            ("kubernetes:a=b:x", "no port"),
            ("inferencepool:", "no name"),
            ("inferencepool:a/b/c", "no name"),
            ("inferencepool:/b", "no namespace"),
            ("inferencepool:a:8000", "no name"),
            ("endpointslices:a b", "no name"),
            ("endpointslices:a:0", "no port"),
        ] {
            let error = text.parse::<Discover>().unwrap_err();
            assert!(error.reason.contains(part), "{text}: {error}");
        }
    }
}
