//! Answers of a simulated name server, and the engines that a source knows after them.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use hickory_resolver::config::ResolverOpts;
use hickory_resolver::proto::op::{Message, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use kvatlas_core::wire::Subjects;
use kvatlas_telemetry::labels::EngineSource;
use kvatlas_telemetry::rendered;

use super::super::super::BridgeOptions;
use super::super::super::engines::Bridge;
use super::*;

#[test]
fn an_engine_is_gone_when_several_answers_in_a_row_lack_it() {
    let defaults = EngineDefaults::default();
    let port = ServerPort {
        number: 1,
        is_grpc: false,
    };
    let server = |name: &str| server_at(name.to_owned(), name, port, Discovered::default(), &defaults);
    let mut known = KnownServers::default();
    let mut answered = |names: &[&str]| -> Vec<String> {
        let engines = known.answered(names.iter().map(|name| server(name)).collect());
        engines
            .iter()
            .map(|engine| engine.instance().to_owned())
            .collect()
    };
    assert_eq!(answered(&["a", "b"]), ["a", "b"]);
    assert_eq!(answered(&["a"]), ["a", "b"]);
    assert_eq!(answered(&["a"]), ["a", "b"]);
    assert_eq!(answered(&["a", "b"]), ["a", "b"]);
    assert_eq!(answered(&["b"]), ["a", "b"]);
    assert_eq!(answered(&["b"]), ["a", "b"]);
    assert_eq!(answered(&["b"]), ["b"]);
}

/// Answers by name and type. A name without any does not exist. A name without an answer of a type has no such records.
type Zone = BTreeMap<(String, RecordType), Result<Vec<RData>, ResponseCode>>;

/// Simulated name server on UDP. It ends when the value is dropped.
struct FakeServer {
    address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeServer {
    async fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let zone: Arc<Mutex<Zone>> = Arc::default();
        let answered = Arc::clone(&zone);
        let task = tokio::spawn(async move {
            let mut bytes = [0; 1500];
            loop {
                let (length, from) = socket.recv_from(&mut bytes).await.unwrap();
                let question = Message::from_vec(&bytes[..length]).unwrap();
                let answer = answer(&question, &answered.lock()).to_vec().unwrap();
                socket.send_to(&answer, from).await.unwrap();
            }
        });
        Self { address, zone, task }
    }

    /// Sets the answer to questions for one type of record of a name.
    fn set(&self, name: &str, kind: RecordType, answer: Result<Vec<RData>, ResponseCode>) {
        self.zone.lock().insert((name.to_owned(), kind), answer);
    }
}

fn answer(question: &Message, zone: &Zone) -> Message {
    let asked = &question.queries[0];
    let name = asked.name().to_lowercase().to_string();
    let found = zone.get(&(name.clone(), asked.query_type()));
    let is_name = zone.keys().any(|(other, _)| *other == name);
    let (code, records) = match found.cloned() {
        Some(Ok(records)) => (ResponseCode::NoError, records),
        Some(Err(code)) => (code, Vec::new()),
        None if is_name => (ResponseCode::NoError, Vec::new()),
        None => (ResponseCode::NXDomain, Vec::new()),
    };
    let mut answer = Message::response(question.metadata.id, OpCode::Query);
    answer.metadata.response_code = code;
    answer.add_query(asked.clone());
    let record = |data| Record::from_rdata(asked.name().clone(), 5, data);
    answer.add_answers(records.into_iter().map(record));
    answer
}

fn a(last: u8) -> RData {
    RData::A(Ipv4Addr::new(10, 0, 0, last).into())
}

fn aaaa(last: u16) -> RData {
    RData::AAAA(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).into())
}

fn place(text: &str) -> DnsPlace {
    let (name, port) = text.split_once(':').unwrap_or((text, ""));
    DnsPlace {
        name: name.to_owned(),
        port: port.parse().ok(),
        server: None,
    }
}

fn reports() -> Reports {
    let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
    Reports::new("dns:vllm", EngineSource::Dns, bridge.metrics()).0
}

/// Looks `times` times. Returns the number of engines that are known afterwards, and the number of looks that failed.
async fn look(source: &mut DnsSource<'_>, times: u32, reports: &Reports) -> (usize, u32) {
    let mut failed = 0;
    for _ in 0..times {
        source.look_once(reports).await;
        failed += u32::from(reports.state().last_error.is_some());
    }
    (reports.state().engines, failed)
}

fn source<'a>(place: &'a DnsPlace, defaults: &'a EngineDefaults, servers: NameServers) -> DnsSource<'a> {
    DnsSource {
        place,
        defaults,
        servers: Some(servers),
        known: KnownServers::default(),
    }
}

#[tokio::test]
async fn an_error_for_one_family_of_addresses_is_an_error_of_the_look() {
    let server = FakeServer::start().await;
    let (place, defaults, reports) = (place("vllm.:8000"), EngineDefaults::default(), reports());
    let mut source = source(&place, &defaults, NameServers::at(server.address).unwrap());
    server.set("vllm.", RecordType::A, Ok(vec![a(1), a(2)]));
    assert_eq!(look(&mut source, 1, &reports).await, (2, 0));
    server.set("vllm.", RecordType::A, Err(ResponseCode::ServFail));
    assert_eq!(look(&mut source, 4, &reports).await, (2, 4));
    let error = reports.state().last_error.unwrap();
    assert!(error.starts_with("no answer for A of vllm.: "), "{error}");
    // The other family's addresses are those of the same pods.
    server.set("vllm.", RecordType::AAAA, Ok(vec![aaaa(1)]));
    assert_eq!(look(&mut source, 1, &reports).await, (2, 1));
    // Only the other family is left.
    server.set("vllm.", RecordType::A, Ok(Vec::new()));
    assert_eq!(look(&mut source, 3, &reports).await, (1, 0));
    server.set("vllm.", RecordType::AAAA, Err(ResponseCode::ServFail));
    assert_eq!(look(&mut source, 4, &reports).await, (1, 4));
    // A name that there is no more has no engines.
    server.zone.lock().clear();
    assert_eq!(look(&mut source, 3, &reports).await, (0, 3));
    let note = reports.state().last_error.unwrap();
    assert!(note.starts_with("no name server knows vllm.: "), "{note}");
    server.set("vllm.", RecordType::AAAA, Ok(Vec::new()));
    assert_eq!(look(&mut source, 1, &reports).await, (0, 0));
}

#[tokio::test]
async fn an_error_for_one_full_name_is_an_error_of_the_look() {
    let server = FakeServer::start().await;
    let domains = ["llm.svc.local.", "svc.local."].map(|domain| Name::from_ascii(domain).unwrap());
    let mut options = ResolverOpts::default();
    options.ndots = 5;
    let servers = || NameServers::with_domains(server.address, domains.to_vec(), options.clone()).unwrap();
    let (place, defaults, reports) = (place("vllm.llm:8000"), EngineDefaults::default(), reports());
    let mut of_addresses = source(&place, &defaults, servers());
    server.set("vllm.llm.svc.local.", RecordType::A, Ok(vec![a(1)]));
    assert_eq!(look(&mut of_addresses, 1, &reports).await, (1, 0));
    server.set("vllm.llm.svc.local.", RecordType::A, Err(ResponseCode::ServFail));
    assert_eq!(look(&mut of_addresses, 4, &reports).await, (1, 4));
    // The name itself comes last.
    server
        .zone
        .lock()
        .remove(&("vllm.llm.svc.local.".to_owned(), RecordType::A));
    server.set("vllm.llm.", RecordType::A, Ok(vec![a(1)]));
    assert_eq!(look(&mut of_addresses, 4, &reports).await, (1, 0));

    let reports = self::reports();
    let place = self::place("_http._tcp.vllm.llm");
    let mut of_services = source(&place, &defaults, servers());
    let target = Name::from_ascii("vllm-0.pods.").unwrap();
    let service = RData::SRV(SRV::new(0, 0, 8000, target));
    let name = "_http._tcp.vllm.llm.svc.local.";
    server.set(name, RecordType::SRV, Ok(vec![service]));
    server.set("vllm-0.pods.", RecordType::A, Ok(vec![a(1)]));
    assert_eq!(look(&mut of_services, 1, &reports).await, (1, 0));
    server.set("vllm-0.pods.", RecordType::A, Err(ResponseCode::ServFail));
    assert_eq!(look(&mut of_services, 4, &reports).await, (1, 4));
    server.set(name, RecordType::SRV, Err(ResponseCode::ServFail));
    assert_eq!(look(&mut of_services, 4, &reports).await, (1, 4));
}

/// So name servers of Kubernetes answer for a headless Service without a ready pod.
#[test]
fn a_name_that_nobody_knows_is_told_and_no_failure() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let looked = async {
        let server = FakeServer::start().await;
        let (place, defaults, reports) = (place("vllm.:8000"), EngineDefaults::default(), reports());
        let mut source = source(&place, &defaults, NameServers::at(server.address).unwrap());
        assert_eq!(look(&mut source, 3, &reports).await, (0, 3));
        server.set("vllm.", RecordType::A, Ok(vec![a(1)]));
        assert_eq!(look(&mut source, 1, &reports).await, (1, 0));
        server.zone.lock().clear();
        assert_eq!(look(&mut source, 3, &reports).await, (0, 3));
    };
    let page = rendered(|| runtime.block_on(looked));
    let mut lines = page.lines();
    let failures = "kvatlas_bridge_discovery_failures_total{source=\"dns\"}";
    let counted = lines.find(|line| line.starts_with(failures));
    assert!(counted.is_none_or(|line| line.ends_with(" 0")), "{counted:?}");
}
