//! Engines that are found as pods. The Kubernetes API is a small fake of our own: lists, watches, refusals, and times at which it is away.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::StreamExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::python::{Publishers, Spec, python};
use super::servers::{Answers, Server};
use super::{Site, stored};
use crate::support::eventually;
use crate::support::http::HttpClient;
use crate::support::process::Process;

const SELECTOR: &str = "app=vllm";

/// The pods that the API knows, and who watches.
#[derive(Default)]
struct Cluster {
    version: u64,
    pods: BTreeMap<String, Value>,
    watches: Vec<mpsc::UnboundedSender<String>>,
    is_forbidden: bool,
    lists: usize,
}

impl Cluster {
    fn tell(&mut self, kind: &str, mut pod: Value) -> Value {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let line = format!("{}\n", json!({"type": kind, "object": pod}));
        self.watches.retain(|watch| watch.send(line.clone()).is_ok());
        pod
    }
}

/// The API. It is away while it is stopped, and knows everything afterwards.
struct Api {
    address: SocketAddr,
    cluster: Arc<Mutex<Cluster>>,
    task: tokio::task::JoinHandle<()>,
}

type Parameters = Query<BTreeMap<String, String>>;

async fn pods(
    State(cluster): State<Arc<Mutex<Cluster>>>,
    Path(namespace): Path<String>,
    Query(parameters): Parameters,
) -> Response {
    let mut known = cluster.lock();
    let parameter = |name: &str| parameters.get(name).map(String::as_str);
    if known.is_forbidden || namespace != "llm" || parameter("labelSelector") != Some(SELECTOR) {
        let text = format!(
            "pods is forbidden: User \"bridge\" cannot list resource \"pods\" in the namespace \"{namespace}\""
        );
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": text,
            "reason": "Forbidden", "code": 403});
        return (StatusCode::FORBIDDEN, axum::Json(status)).into_response();
    }
    if parameter("watch").is_none() {
        known.lists += 1;
        let items: Vec<&Value> = known.pods.values().collect();
        let version = known.version.to_string();
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items});
        return axum::Json(list).into_response();
    }
    let (line, lines) = mpsc::unbounded_channel();
    // What has changed since the list is not kept: a watch from an older version than the last is refused, as the API does after a while.
    if parameter("resourceVersion") != Some(known.version.to_string().as_str()) {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Expired",
            "message": "too old resource version", "code": 410});
        let _ = line.send(format!("{}\n", json!({"type": "ERROR", "object": status})));
    } else {
        known.watches.push(line);
    }
    let lines = futures_util::stream::unfold(lines, |mut lines| async {
        let line = lines.recv().await?;
        Some((Ok::<_, std::convert::Infallible>(line), lines))
    });
    Body::from_stream(lines.boxed()).into_response()
}

async fn pod(
    State(cluster): State<Arc<Mutex<Cluster>>>,
    Path((_, name)): Path<(String, String)>,
) -> Response {
    let known = cluster.lock();
    match known.pods.get(&name) {
        Some(pod) => axum::Json(pod).into_response(),
        None => {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "NotFound",
                "message": "there is none", "code": 404});
            (StatusCode::NOT_FOUND, axum::Json(status)).into_response()
        }
    }
}

impl Api {
    async fn start() -> Self {
        let cluster: Arc<Mutex<Cluster>> = Arc::default();
        let (address, task) = Self::serve("127.0.0.1:0".parse().unwrap(), &cluster).await;
        Self {
            address,
            cluster,
            task,
        }
    }

    async fn serve(
        address: SocketAddr,
        cluster: &Arc<Mutex<Cluster>>,
    ) -> (SocketAddr, tokio::task::JoinHandle<()>) {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new()
            .route("/api/v1/namespaces/{namespace}/pods", get(pods))
            .route("/api/v1/namespaces/{namespace}/pods/{name}", get(pod))
            .with_state(Arc::clone(cluster));
        let task = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        (address, task)
    }

    /// Ends all watches.
    fn cut(&self) {
        self.cluster.lock().watches.clear();
    }

    async fn go_away(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
        self.cut();
    }

    async fn come_back(&mut self) {
        (_, self.task) = Self::serve(self.address, &self.cluster).await;
    }

    /// Makes a pod, or changes it.
    fn put(&self, name: &str, uid: &str, server: &Server) {
        let pod = json!({"kind": "Pod", "apiVersion": "v1",
            "metadata": {"name": name, "namespace": "llm", "uid": uid, "labels": {"app": "vllm", "zone": "a"}},
            "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": server.address.port(), "name": "http"}]}]},
            "status": {"phase": "Running", "podIP": "127.0.0.1"}});
        let mut cluster = self.cluster.lock();
        let kind = if cluster.pods.contains_key(name) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        let pod = cluster.tell(kind, pod);
        cluster.pods.insert(name.to_owned(), pod);
    }

    /// Asks for a pod's end: it is there until its engine has ended.
    fn terminate(&self, name: &str) {
        let mut cluster = self.cluster.lock();
        let mut pod = cluster.pods[name].clone();
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-26T09:00:00Z");
        let pod = cluster.tell("MODIFIED", pod);
        cluster.pods.insert(name.to_owned(), pod);
    }

    fn delete(&self, name: &str) {
        let mut cluster = self.cluster.lock();
        let pod = cluster.pods.remove(name).unwrap();
        cluster.tell("DELETED", pod);
    }

    /// A bridge that finds engines here.
    fn bridge(&self, site: &Site, folder: &tempfile::TempDir) -> Process {
        let config = folder.path().join("kubeconfig");
        let text = json!({"apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "bridge", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "bridge", "namespace": "llm"}}]});
        std::fs::write(&config, text.to_string()).unwrap();
        let arguments = ["--discover", "kubernetes:app=vllm", "--block-size", "4"];
        let variables = [("KUBECONFIG", config.to_str().unwrap())];
        Process::bridge_in(site.broker.url(), &arguments, &variables)
    }
}

/// The view that the bridge shows of its engines.
async fn shown(bridge: &Process) -> Value {
    let mut http = HttpClient::connect(bridge.admin_address()).await;
    http.get("/workers").await.json()
}

async fn is_gone(site: &Site, name: &str) {
    eventually(&format!("{name} is forgotten"), async || {
        site.holder(name).await.is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_followed_from_their_start_to_their_end() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default(), Spec::default()]);
    let mut servers = Vec::new();
    for engine in 0..3 {
        publishers.publish(engine, &json!([stored(1, 0, u32::try_from(engine).unwrap() + 1)]));
        servers.push(Server::start(Answers::vllm(&publishers, &[engine])).await);
    }
    let mut api = Api::start().await;
    api.put("vllm-0", "u0", &servers[0]);
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge(&site, &folder);
    site.settles("vllm-0", 1, &[]).await;
    api.put("vllm-1", "u1", &servers[1]);
    site.settles("vllm-1", 2, &[]).await;
    let listed = &shown(&bridge).await["servers"][0];
    assert_eq!(
        (&listed["identity"], &listed["labels"]["zone"]),
        (&json!("u0"), &json!("a"))
    );
    // A watch that is cut goes on.
    api.cut();
    api.put("vllm-2", "u2", &servers[2]);
    site.settles("vllm-2", 3, &[]).await;
    // It is gone when its end is asked for, and stays gone when it has ended.
    api.terminate("vllm-2");
    is_gone(&site, "vllm-2").await;
    api.delete("vllm-2");
    // While the API is away, what is known stays.
    api.go_away().await;
    let error = eventually("the bridge says that the API is away", async || {
        shown(&bridge).await["sources"][0]["last_error"]
            .as_str()
            .map(str::to_owned)
    })
    .await;
    assert!(!error.is_empty());
    publishers.publish(0, &json!([stored(1, 1, 3)]));
    site.settles("vllm-0", 4, &[]).await;
    site.settles("vllm-1", 2, &[]).await;
    // A pod of a StatefulSet is made anew meanwhile, and has the address of another one.
    api.delete("vllm-0");
    api.put("vllm-1", "u3", &servers[2]);
    api.come_back().await;
    site.settles("vllm-1", 3, &[]).await;
    is_gone(&site, "vllm-0").await;
    let shown = shown(&bridge).await;
    assert_eq!(shown["sources"][0]["last_error"], json!(null));
    assert_eq!(shown["servers"][0]["identity"], "u3");
}

/// Waits until the bridge says of its only server something that `is_it`.
async fn troubled(bridge: &Process, what: &str, is_it: impl Fn(&str) -> bool) {
    eventually(what, async || {
        let shown = shown(bridge).await;
        let error = shown["servers"][0]["last_error"].as_str().unwrap_or_default();
        is_it(error).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_of_a_pod_may_be_anothers_while_the_watch_is_behind() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 3)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let mut api = Api::start().await;
    api.put("vllm-0", "u0", &server);
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge(&site, &folder);
    site.settles("vllm-0", 3, &[]).await;
    // It ends, and another one has its address and its ports; nobody can be asked whose they are.
    api.go_away().await;
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 2)]));
    troubled(&bridge, "the pod cannot be confirmed", |error| {
        error.contains("another engine may have its address")
    })
    .await;
    site.settles("vllm-0", 3, &["unverified", "stale", "upstream_lost"])
        .await;
    assert_eq!(site.depth(2, "vllm-0").await, 0);
    // It was its own container that was made anew.
    api.come_back().await;
    site.settles("vllm-0", 2, &[]).await;
    // The pod has gone, and the watch says nothing.
    let gone = api.cluster.lock().pods.remove("vllm-0").unwrap();
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(3, 0, 1)]));
    troubled(&bridge, "the pod is gone", |error| error.contains("it is gone")).await;
    assert_eq!(site.depth(3, "vllm-0").await, 0);
    api.put("vllm-1", "u1", &server);
    site.settles("vllm-1", 1, &[]).await;
    api.cluster.lock().tell("DELETED", gone);
    is_gone(&site, "vllm-0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_that_are_missing_are_named() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let api = Api::start().await;
    api.put("vllm-0", "u0", &server);
    api.cluster.lock().is_forbidden = true;
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge(&site, &folder);
    let error = eventually("the bridge says what it lacks", async || {
        shown(&bridge).await["sources"][0]["last_error"]
            .as_str()
            .map(str::to_owned)
    })
    .await;
    assert!(
        error.contains("Role") && error.contains("verbs: [get, list, watch]") && error.contains("llm"),
        "{error}"
    );
    api.cluster.lock().is_forbidden = false;
    site.settles("vllm-0", 2, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_pods_in_a_burst_are_all_known() {
    let site = Site::new(&[]).await;
    let api = Api::start().await;
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge(&site, &folder);
    eventually("the watch stands", async || {
        (!api.cluster.lock().watches.is_empty()).then_some(())
    })
    .await;
    // Nobody answers there.
    let unused = Server::start(Answers::none()).await;
    for number in 0..1000 {
        api.put(&format!("vllm-{number}"), &format!("u{number}"), &unused);
    }
    eventually("all are known", async || {
        (shown(&bridge).await["sources"][0]["engines"] == 1000).then_some(())
    })
    .await;
    assert_eq!(api.cluster.lock().lists, 1);
    for number in 0..1000 {
        api.delete(&format!("vllm-{number}"));
    }
    eventually("none is left", async || {
        let shown = shown(&bridge).await;
        (shown["sources"][0]["engines"] == 0 && shown["servers"] == json!([])).then_some(())
    })
    .await;
}
