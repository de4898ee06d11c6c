//! Engines that are found in files and by DNS. The name server is a small simulation.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_bridge::{Bridge, DiscoverOptions, EngineDefaults, parse_engine};
use kvatlas_process::registry::{EngineRegistry, GivenEngine, ServerState};
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::UdpSocket;

use super::python::{Publishers, Spec, python};
use super::servers::{Answers, Server};
use super::{Site, stored};
use crate::support::http::HttpClient;
use crate::support::process::Process;
use crate::support::{broker, eventually};

pub(super) fn discover(bridge: &Bridge, source: &str) {
    let options = DiscoverOptions {
        dns_interval: Duration::from_millis(50),
        file_interval: Duration::from_millis(50),
    };
    let defaults = EngineDefaults {
        block_size: Some(4),
        ..EngineDefaults::default()
    };
    bridge.discover(&source.parse().unwrap(), &defaults, options);
}

/// Waits until the bridge knows exactly the servers with these names, and returns them.
async fn known(bridge: &Bridge, names: &[&str]) -> Vec<ServerState> {
    eventually(&format!("{names:?} are known"), async || {
        let servers = bridge.servers();
        let found: Vec<&str> = servers
            .iter()
            .map(|state| state.server.instance.as_str())
            .collect();
        (found == names).then_some(servers)
    })
    .await
}

/// Waits until the bridge cannot read its only source of engines (a file or a name server), and returns the error.
async fn failing(bridge: &Bridge) -> String {
    eventually("the source says why it cannot look", async || {
        bridge.sources().remove(0).last_error
    })
    .await
}

/// Replaces a file atomically, by a rename.
pub(super) fn replace(path: &Path, text: &str) {
    let fresh = path.with_extension("fresh");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(fresh, path).unwrap();
}

/// Replaces a file with a list of these engines, each given by its name and endpoint.
fn write(path: &Path, engines: &[(&str, &str)]) {
    let tables = engines
        .iter()
        .map(|(name, endpoint)| format!("[[engine]]\nname = \"{name}\"\nendpoint = \"{endpoint}\"\n"));
    replace(path, &tables.collect::<String>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_needs_no_restart() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(1, 0, 3)]));
    let first = Server::start(Answers::vllm(&publishers, &[0])).await;
    let second = Server::start(Answers::vllm(&publishers, &[1])).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("engines.toml");
    write(&path, &[("gpu-0", &first.url())]);
    discover(&site.bridge, &format!("file:{}", folder.path().display()));
    site.settles("gpu-0", 2, &[]).await;
    let epoch = site.holder("gpu-0").await.map(|holder| holder.epoch);
    // The file now lists a second engine. The first one stays as it was.
    write(&path, &[("gpu-0", &first.url()), ("gpu-1", &second.url())]);
    site.settles("gpu-1", 3, &[]).await;
    assert_eq!(site.holder("gpu-0").await.map(|holder| holder.epoch), epoch);
    // A file that cannot be parsed changes nothing.
    std::fs::write(&path, "[[engine]").unwrap();
    let error = failing(&site.bridge).await;
    assert!(error.contains("engines.toml"), "{error}");
    assert_eq!(site.bridge.servers().len(), 2);
    // One engine is gone from the file, and the other one has another address.
    write(&path, &[("gpu-1", &first.url())]);
    site.settles("gpu-1", 2, &[]).await;
    eventually("what is gone is forgotten", async || {
        site.holder("gpu-0").await.is_none().then_some(())
    })
    .await;
    assert_eq!(site.bridge.sources()[0].last_error, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_of_one_kind_are_counted_together() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let unused = Server::start(Answers::none()).await;
    let url = unused.url();
    let source = |name: &str, engines: &[&str]| {
        let path = folder.path().join(name);
        let engines: Vec<(&str, &str)> = engines.iter().map(|name| (*name, url.as_str())).collect();
        write(&path, &engines);
        format!("--discover=file:{}", path.display())
    };
    let (first, second) = (source("a.toml", &["a", "b"]), source("b.toml", &["c"]));
    let bridge = Process::bridge_in(broker.url(), &[&first, &second], &[]);
    eventually("all three are counted", async || {
        let mut http = HttpClient::connect(bridge.admin_address()).await;
        let answer = http.get("/metrics").await;
        let text = String::from_utf8_lossy(&answer.body);
        let line = "kvatlas_bridge_discovered_engines{source=\"file\"} 3";
        text.lines().any(|found| found == line).then_some(())
    })
    .await;
}

/// Records of a name server: addresses, and services with their ports.
#[derive(Default)]
struct Zone {
    addresses: BTreeMap<String, Vec<Ipv4Addr>>,
    services: BTreeMap<String, Vec<(u16, String)>>,
    /// Whether the name server answers every question with an error.
    fails: bool,
}

/// Simulated name server on UDP, which answers questions for A and SRV records. It ends when the value is dropped.
struct NameServer {
    address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl NameServer {
    async fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let zone: Arc<Mutex<Zone>> = Arc::default();
        let answered = Arc::clone(&zone);
        let task = tokio::spawn(async move {
            let mut question = [0; 1500];
            loop {
                let (bytes, from) = socket.recv_from(&mut question).await.unwrap();
                let answer = answer(&question[..bytes], &answered.lock());
                socket.send_to(&answer, from).await.unwrap();
            }
        });
        Self { address, zone, task }
    }
}

fn encoded(name: &str) -> Vec<u8> {
    let labels = name.trim_end_matches('.').split('.');
    let mut bytes: Vec<u8> = labels
        .flat_map(|label| std::iter::once(u8::try_from(label.len()).unwrap()).chain(label.bytes()))
        .collect();
    bytes.push(0);
    bytes
}

/// Returns the answer to a question in the format of RFC 1035: header, question and records.
fn answer(question: &[u8], zone: &Zone) -> Vec<u8> {
    const A: u16 = 1;
    const SRV: u16 = 33;
    let (mut at, mut labels) = (12, Vec::new());
    while question[at] != 0 {
        let length = usize::from(question[at]);
        labels.push(String::from_utf8(question[at + 1..at + 1 + length].to_vec()).unwrap());
        at += 1 + length;
    }
    let name = labels.join(".").to_ascii_lowercase();
    let end = at + 5;
    let kind = u16::from_be_bytes([question[at + 1], question[at + 2]]);
    let data: Vec<Vec<u8>> = match kind {
        A => zone
            .addresses
            .get(&name)
            .into_iter()
            .flatten()
            .map(|address| address.octets().to_vec())
            .collect(),
        SRV => {
            let services = zone.services.get(&name).into_iter().flatten();
            services
                .map(|(port, target)| [&[0, 0, 0, 0][..], &port.to_be_bytes(), &encoded(target)].concat())
                .collect()
        }
        _ => Vec::new(),
    };
    let is_known = zone.addresses.contains_key(&name) || zone.services.contains_key(&name);
    let code = match (zone.fails, is_known) {
        (true, _) => 2,
        (false, false) => 3,
        (false, true) => 0,
    };
    let count = u16::try_from(data.len()).unwrap().to_be_bytes();
    let mut answer = question[..2].to_vec();
    answer.extend([0x85, 0x80 | code, 0, 1, count[0], count[1], 0, 0, 0, 0]);
    answer.extend(&question[12..end]);
    for data in data {
        answer.extend([0xc0, 12]);
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1, 0, 0, 0, 5]);
        answer.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
        answer.extend(data);
    }
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_with_addresses_has_an_engine_at_each() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    let names = NameServer::start().await;
    let set = |addresses: &[[u8; 4]]| {
        let addresses = addresses.iter().map(|address| Ipv4Addr::from(*address)).collect();
        names
            .zone
            .lock()
            .addresses
            .insert("vllm.llm.svc".to_owned(), addresses);
    };
    set(&[[127, 0, 0, 1]]);
    let port = server.address.port();
    discover(
        &site.bridge,
        &format!("dns:vllm.llm.svc.:{port}@{}", names.address),
    );
    let name = |address: &str| format!("{address}:{port}");
    let worker = kvatlas_core::wire::worker_of_instance(&name("127.0.0.1")).unwrap();
    site.settles(worker.as_str(), 2, &[]).await;
    set(&[[127, 0, 0, 1], [127, 0, 0, 2]]);
    known(&site.bridge, &[&name("127.0.0.1"), &name("127.0.0.2")]).await;
    // An error of the name server changes nothing.
    names.zone.lock().fails = true;
    failing(&site.bridge).await;
    assert_eq!(site.bridge.servers().len(), 2);
    (names.zone.lock().fails, names.zone.lock().addresses) = (false, BTreeMap::new());
    known(&site.bridge, &[]).await;
    eventually("its blocks are forgotten", async || {
        site.holder(worker.as_str()).await.is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_services_have_names_and_ports() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(1, 0, 3)]));
    let first = Server::start(Answers::vllm(&publishers, &[0])).await;
    let second = Server::start(Answers::vllm(&publishers, &[1])).await;
    let names = NameServer::start().await;
    let set = |records: &[(&str, &Server)]| {
        let mut zone = names.zone.lock();
        let target = |name: &str| format!("{name}.vllm.llm.svc");
        for (name, _) in records {
            zone.addresses.insert(target(name), vec![Ipv4Addr::LOCALHOST]);
        }
        let records = records
            .iter()
            .map(|(name, server)| (server.address.port(), target(name)));
        zone.services
            .insert("_http._tcp.vllm.llm.svc".to_owned(), records.collect());
    };
    set(&[("vllm-0", &first), ("vllm-1", &second)]);
    // A pod that has no address yet is no engine. The other pods are.
    let starting = (8000, "vllm-2.vllm.llm.svc".to_owned());
    names
        .zone
        .lock()
        .services
        .entry("_http._tcp.vllm.llm.svc".to_owned())
        .or_default()
        .push(starting);
    discover(
        &site.bridge,
        &format!("dns:_http._tcp.vllm.llm.svc.@{}", names.address),
    );
    site.settles("vllm-0", 2, &[]).await;
    site.settles("vllm-1", 3, &[]).await;
    // The name now has the address of another pod, so it stands for another pod.
    let target = "vllm-1.vllm.llm.svc".to_owned();
    names
        .zone
        .lock()
        .addresses
        .insert(target, vec![Ipv4Addr::new(127, 0, 0, 2)]);
    eventually("its old blocks are gone", async || {
        site.holder("vllm-1").await.is_none().then_some(())
    })
    .await;
    let servers = known(&site.bridge, &["vllm-0", "vllm-1"]).await;
    assert_eq!(servers[1].server.discovered.identity, "127.0.0.2");
    set(&[("vllm-0", &first), ("vllm-0", &second)]);
    let error = failing(&site.bridge).await;
    assert!(error.contains("several ports"), "{error}");
}

/// Returns engines that are given at addresses where nobody listens, with these names and block sizes.
fn given_at(name: &str, port: u16, block_size: u32) -> GivenEngine {
    let text = format!("{name}=tcp://127.0.0.1:{port},model=m,block_size={block_size}");
    let mut engines = parse_engine(&text, &EngineDefaults::default()).unwrap();
    engines.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_found_and_refused_is_out_of_sight_until_it_is_gone() {
    let site = Site::new(&[]).await;
    let pending: &[&str] = &["unverified", "upstream_lost"];
    let first = given_at("gpu-0", 1, 4);
    let others = [given_at("gpu-1", 2, 8), given_at("gpu-2", 3, 8)];
    let [one, two] = others.clone();
    let refused = site.bridge.replace("a", &[first.clone(), one, two]).unwrap_err();
    assert_eq!(refused.len(), 2, "{refused:?}");
    site.settles("gpu-0", 0, pending).await;
    site.settles("gpu-1", 0, pending).await;
    let told = site.holder("gpu-1").await.unwrap();
    let told = serde_json::to_string(&told).unwrap();
    assert!(told.contains("it is not followed: block_size is 8"), "{told}");
    assert!(
        site.holder("gpu-2").await.is_none(),
        "one for each model is enough"
    );
    // The next one stands for those that are left.
    let [_, two] = others;
    site.bridge.replace("a", &[first.clone(), two]).unwrap_err();
    site.settles("gpu-2", 0, pending).await;
    eventually("gpu-1 is gone", async || {
        site.holder("gpu-1").await.is_none().then_some(())
    })
    .await;
    site.bridge.replace("a", &[first]).unwrap();
    eventually("gpu-2 is gone", async || {
        site.holder("gpu-2").await.is_none().then_some(())
    })
    .await;
}
