//! Bridges that share a lease, of which one at a time publishes the events of an engine (speaks for it). Routers follow
//! the republished events; only the bridge that speaks listens for them.

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use super::python::{Publishers, Spec, python};
use super::republish::{Router, free_ports, paths};
use super::together::knows;
use super::{Site, removed, stored};
use crate::support::eventually;
use crate::support::jetstream::broker_on_store;
use crate::support::process::{Process, kvatlas};
use crate::support::{http_get, server};

/// Starts a bridge of the group in a process of its own. It follows these engines, in this order.
fn bridge(site: &Site, publishers: &Publishers, engines: &[usize], more: &[&str]) -> Process {
    let flags: Vec<String> = engines
        .iter()
        .map(|engine| format!("--engine={}", publishers.flag(*engine, &format!("gpu-{engine}"))))
        .collect();
    let mut arguments = vec!["--model=m", "--block-size=4", "--lease=pair"];
    arguments.extend(flags.iter().map(String::as_str));
    arguments.extend(more);
    Process::bridge(site.broker.url(), &arguments)
}

async fn refuses(host: &str, port: u16) -> bool {
    TcpStream::connect((host, port)).await.is_err() && TcpStream::connect((host, port + 1)).await.is_err()
}

async fn is_open(host: &str, port: u16) {
    eventually("both sockets are open", async || {
        TcpStream::connect((host, port)).await.ok()?;
        TcpStream::connect((host, port + 1)).await.ok().map(drop)
    })
    .await;
}

/// Two bridges follow an engine, and each republishes at an address of its own. Only the bridge that publishes the
/// engine's events (speaks) may listen for routers. The test freezes it and later stops the other one: each time, the
/// remaining bridge must listen, with all blocks, although the replay socket keeps only a few batches.
#[tokio::test(flavor = "multi_thread")]
async fn the_bridge_that_speaks_publishes() {
    const HOSTS: [&str; 2] = ["127.0.0.1", "127.0.0.2"];
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(8)]);
    let port = free_ports(2);
    let republish = HOSTS.map(|host| format!("--republish=tcp://{host}:{port}"));
    let first = bridge(&site, &publishers, &[0], &[&republish[0]]);
    site.settles("gpu-0", 0, &[]).await;
    is_open(HOSTS[0], port).await;
    let second = bridge(&site, &publishers, &[0], &[&republish[1]]);
    knows(&second, 0, false).await;
    for part in 0..20 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
        site.settles("gpu-0", u64::from(part) + 1, &[]).await;
        knows(&second, part + 1, false).await;
    }
    let mut router = Router::start_at(HOSTS[0], port).await;
    router.reaches(&paths(1, 0..20)).await;
    assert!(refuses(HOSTS[1], port).await, "it is not its turn");
    // A bridge that stood still does not publish when it continues, and its connections end.
    let mut connected = TcpStream::connect((HOSTS[0], port)).await.unwrap();
    first.freeze();
    is_open(HOSTS[1], port).await;
    publishers.publish(0, &json!([removed(1, 19, 1)]));
    Router::start_at(HOSTS[1], port)
        .await
        .reaches(&paths(1, 0..19))
        .await;
    first.signal(rustix::process::Signal::CONT);
    knows(&first, 21, false).await;
    eventually("the first one refuses", async || {
        refuses(HOSTS[0], port).await.then_some(())
    })
    .await;
    let mut received = Vec::new();
    // The connection may end normally or by a reset.
    let _ = connected.read_to_end(&mut received).await;
    // The first bridge speaks again. The router follows it, and keeps no outdated blocks.
    publishers.publish(0, &json!([stored(2, 0, 1)]));
    knows(&first, 22, false).await;
    let (code, log) = second.stop();
    assert_eq!(code, Some(0), "{log}");
    router.reaches(&(&paths(1, 0..19) | &paths(2, 0..1))).await;
    assert!(refuses(HOSTS[1], port).await);
}

/// Returns the endpoints at which a bridge republishes the events of both engines.
fn endpoints(bridge: &Process) -> Option<[String; 2]> {
    let page: Value = serde_json::from_str(&http_get(bridge.admin_address(), "/workers").1).ok()?;
    let engines = page["engines"].as_array()?;
    let of = |name: &str| {
        let engine = engines.iter().find(|engine| engine["instance"] == name)?;
        engine["republished"]["events"].as_str().map(str::to_owned)
    };
    Some([of("gpu-0")?, of("gpu-1")?])
}

/// Two bridges know two engines in different orders, and republish them at ports of the same range. They must give each
/// engine the same port, so that a router finds an engine at this port after the first bridge was killed.
#[tokio::test(flavor = "multi_thread")]
async fn bridges_give_an_engine_the_same_ports_of_a_range() {
    let Some(python) = python() else { return };
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(); 2]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(2, 0, 3)]));
    let port = free_ports(4);
    let republish = format!("--republish=tcp://127.0.0.1:{port}-{}", port + 3);
    let more = ["--state=nats:kept", republish.as_str()];
    let orders = [[0, 1], [1, 0]];
    let [first, second] = orders.map(|order| bridge(&site, &publishers, &order, &more));
    let mut ports = Vec::new();
    for bridge in [&first, &second] {
        ports.push(eventually("both engines have ports", async || endpoints(bridge)).await);
    }
    assert_eq!(ports[0], ports[1]);
    assert_ne!(ports[0][0], ports[0][1]);
    let port_of = |engine: usize| ports[0][engine].rsplit_once(':').unwrap().1.parse().unwrap();
    let mut routers = [Router::start(port_of(0)).await, Router::start(port_of(1)).await];
    let (one, other) = (paths(1, 0..2), paths(2, 0..3));
    routers[0].reaches(&one).await;
    routers[1].reaches(&other).await;
    first.kill();
    publishers.publish(0, &json!([removed(1, 1, 1)]));
    publishers.publish(1, &json!([removed(2, 2, 1)]));
    routers[0].reaches(&paths(1, 0..1)).await;
    routers[1].reaches(&paths(2, 0..2)).await;
    // A third bridge starts when the table of ports exists.
    let third = bridge(&site, &publishers, &[1, 0], &more);
    let known = eventually("both engines have ports", async || endpoints(&third)).await;
    assert_eq!(known, ports[0]);
    drop(second);
}

#[test]
fn a_range_of_several_bridges_needs_a_table_that_they_share() {
    let arguments = [
        "bridge",
        "--model=m",
        "--engine=a=tcp://127.0.0.1:1",
        "--lease=pair",
        "--republish=tcp://127.0.0.1:1-9",
    ];
    for more in [&[][..], &["--state=/nowhere"]] {
        let output = kvatlas(&[&arguments[..], more].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains("--state nats:BUCKET"), "{said}");
    }
}
