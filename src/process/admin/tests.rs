//! The admin listener over real sockets, in raw HTTP/1.1.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;

use super::server::AdminLimits;
use super::{AdminError, AdminServer, AdminSource, Latch, Readiness, ReadinessReport, WorkersQuery};
use crate::listener::ConnectionLimits;

/// Time limit of each step: longer than any step takes, so that a hang becomes a failure.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Source {
    readiness: Readiness,
    /// Whether a request for `/index` panics.
    index_panics: std::sync::atomic::AtomicBool,
    /// Channels to a test: a request for `/metrics` sends on the first one, then waits until the test sends on the second one or
    /// drops its sender.
    metrics_gate: Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>,
}

impl AdminSource for Source {
    fn metrics(&self) -> String {
        if let Some((entered, blocker)) = self.metrics_gate.lock().take() {
            entered.send(()).expect("the test waits for this");
            let _ = blocker.recv();
        }
        "# TYPE kvatlas_ready gauge\nkvatlas_ready 1\n".to_owned()
    }

    fn readiness(&self) -> ReadinessReport {
        self.readiness.report()
    }

    fn workers_json(&self, query: &WorkersQuery) -> String {
        serde_json::json!({ "namespace": query.namespace, "limit": query.limit }).to_string()
    }

    fn index_json(&self) -> String {
        assert!(
            !self.index_panics.load(std::sync::atomic::Ordering::SeqCst),
            "told to panic"
        );
        "{\"namespaces\":{}}".to_owned()
    }

    fn router_flags(&self, query: Option<&str>) -> Option<Result<String, String>> {
        match query? {
            "host=a" => Some(Ok("--worker-urls http://a\n".to_owned())),
            other => Some(Err(format!("not {other}"))),
        }
    }
}

fn start(limits: AdminLimits) -> (AdminServer, Arc<Source>) {
    let source = Arc::new(Source::default());
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = AdminServer::start_with(listen, Arc::clone(&source) as _, limits).expect("a free port");
    (server, source)
}

/// Limits under which nothing times out, however slow the machine is.
fn patient() -> AdminLimits {
    AdminLimits {
        connections: ConnectionLimits {
            per_source_max: 64,
            head_timeout: HANG_TIMEOUT,
            age_max: Some(HANG_TIMEOUT),
            drain_timeout: HANG_TIMEOUT,
            ..AdminLimits::default().connections
        },
        stop_timeout: HANG_TIMEOUT,
    }
}

fn connect(server: &AdminServer) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr()).expect("the listener accepts");
    stream
        .set_read_timeout(Some(HANG_TIMEOUT))
        .expect("a socket option");
    stream
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    fn json(&self) -> serde_json::Value {
        assert_eq!(self.header("content-type"), Some("application/json"));
        serde_json::from_str(&self.body).expect("JSON")
    }
}

/// Sends one request, and reads one answer of the length that the answer's head gives. The connection stays open.
fn exchange(stream: &mut TcpStream, request: &str) -> io::Result<Answer> {
    stream.write_all(request.as_bytes())?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("ASCII");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .expect("a status line");
    let mut answer = Answer {
        status,
        head,
        body: String::new(),
    };
    let length = answer
        .header("content-length")
        .map_or(0, |length| length.parse().expect("a length"));
    let mut body = vec![0; if request.starts_with("HEAD ") { 0 } else { length }];
    stream.read_exact(&mut body)?;
    answer.body = String::from_utf8(body).expect("UTF-8");
    Ok(answer)
}

fn get(server: &AdminServer, target: &str) -> Answer {
    let request = format!("GET {target} HTTP/1.1\r\nHost: admin\r\n\r\n");
    exchange(&mut connect(server), &request).expect("an answer")
}

/// Returns the bytes that arrive until the server closes the connection. A reset counts as closed: a server that leaves input
/// unread causes one.
fn read_to_close(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn every_route_answers() {
    let (server, _source) = start(patient());
    let list = get(&server, "/");
    assert_eq!(list.status, 200);
    for route in ["/metrics", "/livez", "/readyz", "/workers", "/index"] {
        assert!(list.body.contains(route), "{route}");
        let answer = get(&server, route);
        assert_eq!(
            answer.status,
            if route == "/readyz" { 503 } else { 200 },
            "{route}"
        );
        assert_eq!(answer.header("cache-control"), Some("no-store"), "{route}");
    }
    let metrics = get(&server, "/metrics");
    assert_eq!(
        metrics.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    assert!(metrics.body.contains("kvatlas_ready 1\n"));
    assert_eq!(get(&server, "/livez").body, "ok");
    assert_eq!(
        get(&server, "/index").json(),
        serde_json::json!({ "namespaces": {} })
    );
    server.stop().expect("it stops");
}

#[test]
fn flags_of_routers_are_given_where_engines_are_republished() {
    let (server, _source) = start(patient());
    let answers = ["", "?host=a", "?x"].map(|query| {
        let answer = get(&server, &format!("/vllm-router{query}"));
        (answer.status, answer.body)
    });
    let expected = [
        (404, "No engines are republished here.\n"),
        (200, "--worker-urls http://a\n"),
        (400, "not x\n"),
    ];
    assert_eq!(answers, expected.map(|(status, body)| (status, body.to_owned())));
    server.stop().expect("it stops");
}

#[test]
fn head_has_the_length_but_no_body() {
    let (server, _source) = start(patient());
    let mut stream = connect(&server);
    for route in ["/", "/metrics", "/livez", "/readyz", "/workers", "/index"] {
        // Each request goes over the same connection, on which a body would be taken for the beginning of the next
        // answer.
        let head = exchange(
            &mut stream,
            &format!("HEAD {route} HTTP/1.1\r\nHost: admin\r\n\r\n"),
        )
        .expect("an answer");
        let full = get(&server, route);
        assert_eq!(
            (head.status, head.header("content-length")),
            (full.status, full.header("content-length"))
        );
    }
    server.stop().expect("it stops");
}

#[test]
fn readiness_follows_the_latches() {
    let (server, source) = start(patient());
    for latch in Latch::ALL {
        let answer = get(&server, "/readyz");
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json()["latches"][latch.as_str()], false);
        source.readiness.set(latch);
        assert_eq!(get(&server, "/readyz").json()["latches"][latch.as_str()], true);
    }
    let answer = get(&server, "/readyz");
    assert_eq!(
        (answer.status, &answer.json()["ready"]),
        (200, &serde_json::json!(true))
    );
    source.readiness.start_draining();
    let answer = get(&server, "/readyz");
    assert_eq!(
        (answer.status, &answer.json()["draining"]),
        (503, &serde_json::json!(true))
    );
    assert_eq!(get(&server, "/livez").status, 200, "a draining process is alive");
    server.stop().expect("it stops");
}

#[test]
fn workers_passes_the_query_on_or_refuses_it() {
    let (server, _source) = start(patient());
    let answer = get(&server, "/workers");
    assert_eq!(
        answer.json(),
        serde_json::json!({ "namespace": null, "limit": 1000 })
    );
    let answer = get(&server, "/workers?namespace=llama%2D3&limit=7");
    assert_eq!(
        answer.json(),
        serde_json::json!({ "namespace": "llama-3", "limit": 7 })
    );
    let answer = get(&server, "/workers?limit=10001");
    assert_eq!(answer.status, 400);
    assert!(answer.body.contains("1 to 10000"), "{}", answer.body);
    server.stop().expect("it stops");
}

#[test]
fn wrong_paths_methods_and_bodies_get_helpful_refusals() {
    let (server, _source) = start(patient());
    let answer = get(&server, "/metric");
    assert_eq!(answer.status, 404);
    assert!(answer.body.contains("/metrics"), "{}", answer.body);
    let ask = |request: &str| exchange(&mut connect(&server), request).expect("an answer");
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let answer = ask(&format!(
            "{method} /metrics HTTP/1.1\r\nHost: admin\r\nContent-Length: 2\r\n\r\nhi"
        ));
        assert_eq!(
            (answer.status, answer.header("allow")),
            (405, Some("GET, HEAD")),
            "{method}"
        );
        assert!(
            answer.body.contains("/metrics answers GET and HEAD only"),
            "{}",
            answer.body
        );
    }
    let answer = ask("GET /livez HTTP/1.1\r\nHost: admin\r\nContent-Length: 2\r\n\r\nhi");
    assert_eq!((answer.status, answer.header("connection")), (413, Some("close")));
    let answer = ask("GET /livez HTTP/1.1\r\nHost: admin\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert_eq!(answer.status, 413, "an unfinished body is not waited for");
    server.stop().expect("it stops");
}

#[test]
fn garbage_ends_its_connection_only() {
    let (server, _source) = start(patient());
    let long_head = format!("GET /livez HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(64 * 1024));
    let many_headers = format!("GET /livez HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(500));
    for garbage in [
        "\0\u{1}\u{2}\r\n\r\n",
        "GET\r\n\r\n",
        "\u{16}\u{3}\u{1}\r\n\r\n",
        &long_head,
        &many_headers,
    ] {
        let mut stream = connect(&server);
        // The server may close before it has read everything.
        let _ = stream.write_all(garbage.as_bytes());
        let answer = read_to_close(&mut stream);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let mut half = connect(&server);
    half.write_all(b"GET /liv").expect("sent");
    half.shutdown(Shutdown::Write).expect("shut down");
    let _ = read_to_close(&mut half);
    assert_eq!(get(&server, "/livez").status, 200);
    server.stop().expect("it stops");
}

#[test]
fn a_panic_of_the_source_ends_its_connection_only() {
    let (server, source) = start(patient());
    source
        .index_panics
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let mut stream = connect(&server);
    stream
        .write_all(b"GET /index HTTP/1.1\r\nHost: admin\r\n\r\n")
        .expect("sent");
    assert_eq!(read_to_close(&mut stream), "");
    assert_eq!(get(&server, "/livez").status, 200);
    server.stop().expect("it stops");
}

#[test]
fn a_connection_over_the_limit_takes_the_place_of_the_oldest_that_waits() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let (server, _source) = metrics::with_local_recorder(&recorder, || start(patient()));
    let livez = "GET /livez HTTP/1.1\r\nHost: admin\r\n\r\n";
    let mut open: Vec<TcpStream> = (0..64).map(|_| connect(&server)).collect();
    for stream in &mut open {
        assert_eq!(exchange(stream, livez).expect("within the limit").status, 200);
    }
    assert_eq!(get(&server, "/livez").status, 200);
    assert_eq!(read_to_close(&mut open[0]), "", "the oldest has given way");
    let rendered = recorder.handle().render();
    assert!(
        rendered.contains("kvatlas_admin_connections_refused_total 1\n"),
        "{rendered}"
    );
    for stream in &mut open[1..] {
        assert_eq!(exchange(stream, livez).expect("still open").status, 200);
    }
    server.stop().expect("it stops");
}

#[test]
fn thousands_of_slow_connections_keep_nobody_out() {
    let mut limits = patient();
    limits.connections.per_source_max = 16;
    let (server, _source) = start(limits);
    let mut slow = Vec::new();
    for _ in 0..500 {
        let mut stream = connect(&server);
        // The server may already have closed this connection to make room for another.
        let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nHost:");
        slow.push(stream);
    }
    // This answer comes within the time limit of the slow connections, so none of them has timed out.
    assert_eq!(get(&server, "/livez").status, 200);
    drop(slow);
    server.stop().expect("it stops");
}

#[test]
fn a_connection_that_sends_no_request_is_closed() {
    let mut limits = patient();
    limits.connections.head_timeout = Duration::from_millis(20);
    let (server, _source) = start(limits);
    let mut silent = connect(&server);
    let mut slow = connect(&server);
    let _ = slow.write_all(b"GET /livez HTTP/1.1\r\nHost:");
    // On a busy machine a connection may reach its limit before its first request is out.
    let mut idle = (0..10_000)
        .find_map(|_| {
            let mut stream = connect(&server);
            exchange(&mut stream, "GET /livez HTTP/1.1\r\nHost: admin\r\n\r\n")
                .ok()
                .map(|_| stream)
        })
        .expect("some request is in time");
    for stream in [&mut silent, &mut slow, &mut idle] {
        let _ = read_to_close(stream);
    }
    server.stop().expect("it stops");
}

#[test]
fn a_connection_is_closed_at_its_age_limit() {
    let mut limits = patient();
    limits.connections.age_max = Some(Duration::from_millis(20));
    let (server, _source) = start(limits);
    assert_eq!(read_to_close(&mut connect(&server)), "");
    server.stop().expect("it stops");
}

#[test]
fn stopping_closes_idle_connections_and_releases_the_port() {
    let (server, source) = start(patient());
    let address = server.local_addr();
    let mut idle = connect(&server);
    let _ = exchange(&mut idle, "GET /livez HTTP/1.1\r\nHost: admin\r\n\r\n").expect("an answer");
    server.stop().expect("it stops");
    assert_eq!(read_to_close(&mut idle), "");
    assert_eq!(
        Arc::strong_count(&source),
        1,
        "the thread has given up what it served"
    );
    let again = AdminServer::start(address, source).expect("the port is free");
    assert_eq!(again.local_addr(), address);
    again.stop().expect("it stops");
}

#[test]
fn stopping_does_not_wait_for_a_source_that_is_stuck() {
    let mut limits = patient();
    limits.connections.drain_timeout = Duration::from_millis(20);
    limits.stop_timeout = Duration::from_millis(20);
    let (server, source) = start(limits);
    let (entered_sender, entered) = mpsc::channel();
    let (unblock, blocker) = mpsc::channel();
    *source.metrics_gate.lock() = Some((entered_sender, blocker));
    let mut stream = connect(&server);
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: admin\r\n\r\n")
        .expect("sent");
    entered.recv_timeout(HANG_TIMEOUT).expect("the source is called");
    let error = server.stop().expect_err("the thread is stuck");
    assert!(matches!(error, AdminError::StopTimedOut { .. }), "{error}");
    drop(unblock);
    let _ = read_to_close(&mut stream);
}

#[test]
fn a_taken_port_is_an_error_at_start() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let address = taken.local_addr().expect("bound");
    let error = AdminServer::start(address, Arc::new(Source::default())).expect_err("taken");
    assert!(matches!(error, AdminError::Bind { listen, .. } if listen == address));
}
