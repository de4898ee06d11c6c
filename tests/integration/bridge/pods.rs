//! Engines that are found as pods, in InferencePools and by EndpointSlices. The Kubernetes API is simulated: it has
//! lists, watches, refusals and outages.

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

/// A watch that a client has opened.
struct Watch {
    plural: String,
    selector: String,
    lines: mpsc::UnboundedSender<String>,
}

/// Objects of the simulated API, and the open watches.
#[derive(Default)]
struct Cluster {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// InferencePools and EndpointSlices, by the plural name of their kind and their own name.
    others: BTreeMap<(&'static str, String), Value>,
    watches: Vec<Watch>,
    is_forbidden: bool,
    lists: usize,
}

impl Cluster {
    fn tell(&mut self, kind: &str, pod: Value) -> Value {
        self.tell_of("pods", kind, pod)
    }

    fn tell_of(&mut self, plural: &str, kind: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        let is_heard = |watch: &Watch| watch.plural == plural && selects(&watch.selector, &object);
        self.watches
            .retain(|watch| !is_heard(watch) || watch.lines.send(line.clone()).is_ok());
        object
    }

    fn objects(&self, plural: &str, selector: &str) -> Vec<&Value> {
        let others = self.others.iter().filter(|((kind, _), _)| *kind == plural);
        let others = others.map(|(_, object)| object);
        let pods = self.pods.values().filter(|_| plural == "pods");
        pods.chain(others)
            .filter(|object| selects(selector, object))
            .collect()
    }

    /// Makes an object other than a pod, or changes it.
    fn put_other(&mut self, plural: &'static str, name: &str, object: &Value) {
        let key = (plural, name.to_owned());
        let kind = if self.others.contains_key(&key) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        let mut object = object.clone();
        object["metadata"]["name"] = json!(name);
        object["metadata"]["uid"] = json!(format!("uid-{name}"));
        let object = self.tell_of(plural, kind, object);
        self.others.insert(key, object);
    }

    fn delete_other(&mut self, plural: &'static str, name: &str) {
        let object = self.others.remove(&(plural, name.to_owned())).unwrap();
        self.tell_of(plural, "DELETED", object);
    }
}

/// Whether `selector`, which names labels or the object's name, selects the object.
fn selects(selector: &str, object: &Value) -> bool {
    let mut pairs = selector.split(',').filter_map(|pair| pair.split_once('='));
    pairs.all(|(key, value)| match key {
        "metadata.name" => object["metadata"]["name"] == value,
        key => object["metadata"]["labels"][key] == value,
    })
}

/// Simulated Kubernetes API. While it is stopped, requests fail; its objects are kept.
struct Api {
    address: SocketAddr,
    cluster: Arc<Mutex<Cluster>>,
    task: tokio::task::JoinHandle<()>,
}

type Parameters = Query<BTreeMap<String, String>>;

async fn pods(
    state: State<Arc<Mutex<Cluster>>>,
    Path(namespace): Path<String>,
    parameters: Parameters,
) -> Response {
    list_or_watch(&state, &namespace, "pods", &parameters)
}

async fn others(
    state: State<Arc<Mutex<Cluster>>>,
    Path((_group, namespace, plural)): Path<(String, String, String)>,
    parameters: Parameters,
) -> Response {
    list_or_watch(&state, &namespace, &plural, &parameters)
}

fn list_or_watch(
    cluster: &Mutex<Cluster>,
    namespace: &str,
    plural: &str,
    parameters: &BTreeMap<String, String>,
) -> Response {
    let mut known = cluster.lock();
    let parameter = |name: &str| parameters.get(name).map(String::as_str);
    let selector = parameter("labelSelector").or_else(|| parameter("fieldSelector"));
    let Some(selector) = selector.filter(|_| !known.is_forbidden && namespace == "llm") else {
        let text = format!(
            "{plural} is forbidden: User \"bridge\" cannot list resource \"{plural}\" in the namespace \"{namespace}\""
        );
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": text,
            "reason": "Forbidden", "code": 403});
        return (StatusCode::FORBIDDEN, axum::Json(status)).into_response();
    };
    if parameter("watch").is_none() {
        known.lists += 1;
        let items = known.objects(plural, selector);
        let version = known.version.to_string();
        let list = json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items});
        return axum::Json(list).into_response();
    }
    let (line, lines) = mpsc::unbounded_channel();
    // The API keeps no old changes: a watch from any version but the last is refused, as a real API does after a while.
    if parameter("resourceVersion") != Some(known.version.to_string().as_str()) {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Expired",
            "message": "too old resource version", "code": 410});
        let _ = line.send(format!("{}\n", json!({"type": "ERROR", "object": status})));
    } else {
        known.watches.push(Watch {
            plural: plural.to_owned(),
            selector: selector.to_owned(),
            lines: line,
        });
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
            .route("/apis/{group}/v1/namespaces/{namespace}/{plural}", get(others))
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
        self.put_labelled(name, uid, server, "vllm");
    }

    fn put_labelled(&self, name: &str, uid: &str, server: &Server, app: &str) {
        let pod = json!({"kind": "Pod", "apiVersion": "v1",
            "metadata": {"name": name, "namespace": "llm", "uid": uid, "labels": {"app": app, "zone": "a"}},
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

    /// Gives a pod other labels.
    fn relabel(&self, name: &str, labels: Value) {
        let mut cluster = self.cluster.lock();
        let mut pod = cluster.pods[name].clone();
        pod["metadata"]["labels"] = labels;
        let pod = cluster.tell("MODIFIED", pod);
        cluster.pods.insert(name.to_owned(), pod);
    }

    /// Marks a pod as being deleted. The pod stays in the list, as it does until its engine has ended.
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

    /// Starts a bridge that looks for engines in this API.
    fn bridge(&self, site: &Site, folder: &tempfile::TempDir) -> Process {
        self.bridge_of(site, folder, "kubernetes:app=vllm")
    }

    fn bridge_of(&self, site: &Site, folder: &tempfile::TempDir, source: &str) -> Process {
        self.bridge_with(site, folder, &["--discover", source])
    }

    fn bridge_with(&self, site: &Site, folder: &tempfile::TempDir, arguments: &[&str]) -> Process {
        self.bridge_given(site, folder, &[arguments, &["--block-size", "4"]].concat())
    }

    /// Starts a bridge with these arguments alone.
    fn bridge_given(&self, site: &Site, folder: &tempfile::TempDir, arguments: &[&str]) -> Process {
        let config = folder.path().join("kubeconfig");
        let text = json!({"apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "bridge", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "bridge", "namespace": "llm"}}]});
        std::fs::write(&config, text.to_string()).unwrap();
        let variables = [("KUBECONFIG", config.to_str().unwrap())];
        Process::bridge_in(site.broker.url(), arguments, &variables)
    }
}

/// Returns the answer of the bridge's route `/workers`.
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
    // The bridge opens a new watch after its watch was cut.
    api.cut();
    api.put("vllm-2", "u2", &servers[2]);
    site.settles("vllm-2", 3, &[]).await;
    // The holder is gone when the pod's end begins, and stays gone after the end.
    api.terminate("vllm-2");
    is_gone(&site, "vllm-2").await;
    api.delete("vllm-2");
    // While the API is away, the known engines stay.
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
    // Meanwhile a pod of a StatefulSet is made anew, with the address of another pod.
    api.delete("vllm-0");
    api.put("vllm-1", "u3", &servers[2]);
    api.come_back().await;
    site.settles("vllm-1", 3, &[]).await;
    is_gone(&site, "vllm-0").await;
    let shown = shown(&bridge).await;
    assert_eq!(shown["sources"][0]["last_error"], json!(null));
    assert_eq!(shown["servers"][0]["identity"], "u3");
}

/// Waits until the error of the bridge's only server satisfies `is_it`.
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
    // The engine's process is replaced at the same address and ports. The API cannot tell to which pod they belong.
    api.go_away().await;
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 2)]));
    troubled(&bridge, "the pod cannot be confirmed", |error| {
        error.contains("another engine may have its address")
    })
    .await;
    site.settles("vllm-0", 3, &["unverified", "upstream_lost"]).await;
    assert_eq!(site.depth(2, "vllm-0").await, 0);
    // The pod is the same: its own container was restarted.
    api.come_back().await;
    site.settles("vllm-0", 2, &[]).await;
    // The pod is gone, but the watch does not report it.
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

/// The API cannot confirm a pod when its first block has told the block size. The block must not be lost, although the
/// engine has no replay socket.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_block_is_kept_while_the_api_is_away() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::without_replay()]);
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let mut api = Api::start().await;
    api.put("vllm-0", "u0", &server);
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge_given(&site, &folder, &["--discover", "kubernetes:app=vllm"]);
    troubled(&bridge, "the bridge waits", |error| {
        error.contains("waits for the first block")
    })
    .await;
    publishers.wait_for_subscriber(0);
    api.go_away().await;
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    troubled(&bridge, "the bridge cannot ask the API", |error| {
        !error.is_empty() && !error.contains("waits for the first block")
    })
    .await;
    api.come_back().await;
    site.settles("vllm-0", 2, &[]).await;
}

/// An engine has told its block size while the API was away, and its container is restarted before the API is back. The
/// new process has another block size.
#[tokio::test(flavor = "multi_thread")]
async fn a_size_that_was_found_while_the_api_is_away_is_of_that_process() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    let tokens: Vec<u32> = (0..8).collect();
    publishers.publish(
        0,
        &json!([["BlockStored", [1], null, tokens, 8, null, "GPU", null, null]]),
    );
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let mut api = Api::start().await;
    api.put("vllm-0", "u0", &server);
    let folder = tempfile::tempdir().unwrap();
    let answers = std::mem::replace(&mut *server.answers.lock(), Answers::none());
    let bridge = api.bridge_given(&site, &folder, &["--discover", "kubernetes:app=vllm"]);
    troubled(&bridge, "the server does not tell", |error| !error.is_empty()).await;
    api.go_away().await;
    *server.answers.lock() = answers;
    troubled(&bridge, "the bridge cannot ask the API", |error| {
        error.contains("another engine may have its address")
    })
    .await;
    publishers = publishers.restart(&python);
    troubled(&bridge, "the bridge knows no size", |error| {
        error.contains("waits for the first block")
    })
    .await;
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    api.come_back().await;
    site.settles("vllm-0", 2, &[]).await;
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
    // No engine answers at this server.
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

/// Starts `count` engines, and a server for each engine. Engine number `n` has `n + 1` blocks.
async fn engines(python: &std::path::Path, count: u32) -> (Publishers, Vec<Server>) {
    let specs: Vec<Spec> = (0..count).map(|_| Spec::default()).collect();
    let mut publishers = Publishers::start(python, &specs);
    let mut servers = Vec::new();
    for engine in 0..count {
        let index = usize::try_from(engine).unwrap();
        publishers.publish(index, &json!([stored(1, 0, engine + 1)]));
        servers.push(Server::start(Answers::vllm(&publishers, &[index])).await);
    }
    (publishers, servers)
}

/// Waits until the error of the bridge's only source contains `words`.
async fn source_says(bridge: &Process, words: &str) {
    eventually(words, async || {
        let shown = shown(bridge).await;
        let error = shown["sources"][0]["last_error"].as_str().unwrap_or_default();
        error.contains(words).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_of_a_pool_are_followed_and_so_is_its_selector() {
    const POOLS: &str = "inferencepools";
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let (_publishers, servers) = engines(&python, 3).await;
    let mut api = Api::start().await;
    api.put("vllm-0", "u0", &servers[0]);
    api.put_labelled("other-0", "u1", &servers[1], "other");
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge_of(&site, &folder, "inferencepool:llm/llama");
    source_says(&bridge, "there is no InferencePool llama in the namespace llm").await;
    let pool = |app: &str, ports: &[u16]| {
        let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
        json!({"kind": "InferencePool", "apiVersion": "inference.networking.k8s.io/v1", "metadata": {"namespace": "llm"},
            "spec": {"selector": {"matchLabels": {"app": app}}, "targetPorts": ports}})
    };
    // The port of the pool counts, not the port of the container.
    let port = |server: &Server| server.address.port();
    api.cluster
        .lock()
        .put_other(POOLS, "llama", &pool("vllm", &[port(&servers[0])]));
    site.settles("vllm-0", 1, &[]).await;
    assert_eq!(shown(&bridge).await["sources"][0]["last_error"], json!(null));
    // Another pool has no effect.
    api.cluster
        .lock()
        .put_other(POOLS, "mistral", &pool("none", &[1]));
    // The pool's selector changes while the API is away.
    api.go_away().await;
    api.cluster
        .lock()
        .put_other(POOLS, "llama", &pool("other", &[port(&servers[1])]));
    api.come_back().await;
    site.settles("other-0", 2, &[]).await;
    is_gone(&site, "vllm-0").await;
    // The pool's port changes.
    api.cluster
        .lock()
        .put_other(POOLS, "llama", &pool("other", &[port(&servers[2])]));
    site.settles("other-0", 3, &[]).await;
    api.cluster.lock().put_other(
        POOLS,
        "llama",
        &pool("other", &[port(&servers[1]), port(&servers[2])]),
    );
    // A pod has several ranks, each with a server of its own.
    site.settles("other-0-rank-0", 2, &[]).await;
    site.settles("other-0-rank-1", 3, &[]).await;
    is_gone(&site, "other-0").await;
    api.cluster
        .lock()
        .put_other(POOLS, "llama", &pool("other", &[port(&servers[2])]));
    site.settles("other-0", 3, &[]).await;
    is_gone(&site, "other-0-rank-1").await;
    api.cluster.lock().delete_other(POOLS, "llama");
    is_gone(&site, "other-0").await;
    source_says(&bridge, "there is no InferencePool").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_endpoints_of_a_service_are_followed_until_they_end() {
    const SLICES: &str = "endpointslices";
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let (mut publishers, servers) = engines(&python, 2).await;
    let mut api = Api::start().await;
    let slice = |server: &Server, endpoints: Value| {
        json!({"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4", "ports": [{"port": server.address.port()}],
            "metadata": {"namespace": "llm", "labels": {"kubernetes.io/service-name": "vllm"}}, "endpoints": endpoints})
    };
    let endpoint = |name: &str, uid: &str, conditions: Value| json!({"addresses": ["127.0.0.1"], "targetRef": {"kind": "Pod", "name": name, "uid": uid}, "conditions": conditions});
    let loading = json!({"ready": false, "serving": false, "terminating": false});
    let ending = json!({"ready": false, "serving": true, "terminating": true});
    let folder = tempfile::tempdir().unwrap();
    let bridge = api.bridge_of(&site, &folder, "endpointslices:vllm");
    let first = slice(&servers[0], json!([endpoint("vllm-0", "u0", loading.clone())]));
    api.cluster.lock().put_other(SLICES, "vllm-a", &first);
    site.settles("vllm-0", 1, &[]).await;
    let second = slice(&servers[1], json!([endpoint("vllm-1", "u1", loading.clone())]));
    api.cluster.lock().put_other(SLICES, "vllm-b", &second);
    site.settles("vllm-1", 2, &[]).await;
    // Another Service has no effect.
    let mut other = slice(&servers[1], json!([endpoint("web-0", "u2", json!({}))]));
    other["metadata"]["labels"]["kubernetes.io/service-name"] = json!("web");
    api.cluster.lock().put_other(SLICES, "web-a", &other);
    let ended = slice(&servers[1], json!([endpoint("vllm-1", "u1", ending)]));
    api.cluster.lock().put_other(SLICES, "vllm-b", &ended);
    is_gone(&site, "vllm-1").await;
    // Another process is at the address, and the API cannot tell to which pod the address belongs.
    api.go_away().await;
    publishers = publishers.restart(&python);
    publishers.publish(0, &json!([stored(2, 0, 3)]));
    troubled(&bridge, "the endpoint cannot be confirmed", |error| {
        error.contains("another engine may have its address")
    })
    .await;
    assert_eq!(site.depth(2, "vllm-0").await, 0);
    // The address now belongs to another pod.
    let moved = slice(&servers[0], json!([endpoint("vllm-2", "u3", loading)]));
    api.cluster.lock().put_other(SLICES, "vllm-a", &moved);
    api.come_back().await;
    site.settles("vllm-2", 3, &[]).await;
    is_gone(&site, "vllm-0").await;
    assert!(site.holder("web-0").await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn chosen_labels_of_a_pod_are_its_engines_and_a_change_of_them_begins_nothing_anew() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let (_publishers, servers) = engines(&python, 1).await;
    let api = Api::start().await;
    api.put("vllm-0", "u0", &servers[0]);
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--discover", "kubernetes:app=vllm", "--pod-labels", "role,zone"];
    let bridge = api.bridge_with(&site, &folder, &arguments);
    site.settles("vllm-0", 1, &[]).await;
    let becomes = async |expected: &str| {
        eventually(expected, async || {
            let holder = site.holder("vllm-0").await?;
            (holder.labels.to_string() == expected).then_some(holder.epoch)
        })
        .await
    };
    let epoch = becomes("zone=a").await;
    api.relabel(
        "vllm-0",
        json!({"app": "vllm", "zone": "b", "role": "decode", "other": "1"}),
    );
    assert_eq!(becomes("role=decode,zone=b").await, epoch);
    // Labels that are not chosen are shown only by the bridge, with their present values.
    assert_eq!(shown(&bridge).await["servers"][0]["labels"]["other"], "1");
    api.relabel("vllm-0", json!({"app": "vllm"}));
    assert_eq!(becomes("").await, epoch);
    site.settles("vllm-0", 1, &[]).await;
}
